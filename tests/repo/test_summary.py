"""What a run of the tests prints after its failures: nothing, unless it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import conftest


@pytest.mark.parametrize("asked", [False, True])
def test_specialisations_are_listed_where_that_is_asked_for(asked: bool) -> None:
    compiled = (0.5, "sm_90", "norm/rms_norm.cu", "HIDDEN_SIZE=64 VEC_SIZE=8")
    ran = ("norm/rms_norm.cu", "HIDDEN_SIZE=64 VEC_SIZE=4")
    reports = [
        SimpleNamespace(when="call", user_properties=[("offline_compile", compiled)]),
        SimpleNamespace(when="teardown", user_properties=[("host", ran)]),
    ]
    printed: list[str] = []
    config = SimpleNamespace(option=SimpleNamespace(specialisations=asked))
    reporter = SimpleNamespace(config=config, stats={"": reports}, section=printed.append, line=printed.append)
    conftest.pytest_terminal_summary(reporter)  # type: ignore[arg-type]
    assert bool(printed) == asked
    if asked:
        assert "1 of 2 values of constants compiled offline; none ran with" in printed
        assert printed[-1] == "  norm/rms_norm.cu  VEC_SIZE=8"


def test_the_option_is_known(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.option.specialisations in (False, True)
