"""Values of the environment switches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyops._core import config
from pyops._core.errors import SwitchError

FLAGS = {
    "PYOPS_REFERENCE": config.reference,
    "PYOPS_SYNC": config.sync,
    "PYOPS_CHECK": config.check_indices,
    "PYOPS_LOG": config.log,
    "PYOPS_TRUST": config.trust,
}


@pytest.mark.parametrize(("name", "read"), FLAGS.items(), ids=FLAGS)
def test_switch_is_on_or_off(name: str, read: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert read() is False
    for value in ("", "0", "false", "False", "OFF", "no", " no "):
        monkeypatch.setenv(name, value)
        assert read() is False, value
    for value in ("1", "true", "TRUE", "on", "Yes"):
        monkeypatch.setenv(name, value)
        assert read() is True, value
    for value in ("2", "-1", "y", "disabled", "true,false"):
        monkeypatch.setenv(name, value)
        with pytest.raises(SwitchError, match=f'^{name}: expected 1, true, on, yes, 0, .* or nothing, got "{value}"$'):
            read()


@pytest.mark.parametrize("value", ["", "0", "off", "False", "no"])
def test_plugin_is_off_for_the_same_words(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_VLLM", value)
    assert config.vllm() == ()
    monkeypatch.setenv("PYOPS_VLLM", f"all,{value}")
    assert config.vllm() == tuple(filter(None, ("all", value)))


@pytest.mark.parametrize(
    ("name", "read", "words"),
    [
        ("PYOPS_CPU", config.kernels_on_cpu, {"": False, "reference": False, "kernels": True}),
        ("PYOPS_JIT", config.jit_forbidden, {"": False, "compile": False, "error": True}),
    ],
)
def test_switch_refuses_unknown_words(
    name: str, read: Callable[[], bool], words: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, right in words.items():
        monkeypatch.setenv(name, value)
        assert read() is right
    for value in ("0", "1", "true"):
        monkeypatch.setenv(name, value)
        with pytest.raises(SwitchError, match=f'^{name}: .*, got "{value}"$'):
            read()


def test_context_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CPU", "kernels")
    with config.cpu("reference"):
        assert not config.kernels_on_cpu()
        with config.cpu("kernels"):
            assert config.kernels_on_cpu()
        assert not config.kernels_on_cpu()
    assert config.kernels_on_cpu()
