"""The table of calls that this library refuses and vLLM accepts is complete and true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyops import OpError
from pyops.cli import refusals
from pyops.integrations.vllm import VERSIONS, table
from pyops.integrations.vllm.refusals import REFUSALS, REFUSED_OPS
from tests.support import vllm_refused_arguments, vllm_refused_products, vllm_refused_rows

_CALLS = vllm_refused_rows.CALLS | vllm_refused_products.CALLS | vllm_refused_arguments.CALLS
_LISTED = {key: call if isinstance(call, tuple) else (call,) for key, call in _CALLS.items()}


def test_every_served_op_is_in_the_table() -> None:
    every = (entry for vllm in VERSIONS for entry in table(vllm).values())
    assert set(REFUSALS) == {entry.name for entry in every if entry.kernel is not None}


def test_refused_ops_have_no_kernel() -> None:
    refused = {entry.name: entry.ours for entry in table("0.33").values() if entry.state == "refused"}
    assert refused == REFUSED_OPS


def test_each_refusal_has_a_call_and_vice_versa() -> None:
    told = [(op, refusal.argument) for op, of_op in REFUSALS.items() for refusal in of_op]
    assert {key: told.count(key) for key in told} == {key: len(calls) for key, calls in _LISTED.items()}


@pytest.mark.parametrize(
    ("op", "argument", "call"),
    [
        pytest.param(*key, call, id=f"{'.'.join(key)}-{i}")
        for key, calls in _LISTED.items()
        for i, call in enumerate(calls)
    ],
)
def test_refused(op: str, argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(OpError) as caught:
        call()
    assert (caught.value.op, caught.value.argument) == (op.partition(".")[0], argument)


def test_the_page_is_what_the_command_prints() -> None:
    page = Path(__file__).parents[3] / "docs" / "refusals.md"
    assert page.read_text(encoding="utf-8") == f"{refusals.text()}\n"
