"""Ops of Mamba and of experts, with hostile indices among so many tokens that kernels of long prompts run.

What is out of range, the op's own `bad_indices` says. The first value that it refuses is the capacity of a table, of a
cache, of a list, or the capacity and one: kernel and reference skip it, or cut it, alike, and touch nothing outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import pyops
from pyops._core import config
from pyops._core.host.toolchain import toolchains
from pyops._core.op import Op
from pyops.testing.calls import assert_results, expected, named, replaced, run
from tests import axes
from tests.calls import example

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with config.cpu("kernels"):
        yield


def made(op: Op) -> list[Any]:
    """Everything switched on; few tokens for a step of decoding, which has one kernel for any number of them."""
    return example(op, **{"num_tokens": 20 if op.name.endswith("_update") else 260, **axes.fullest(op)})


def bad(op: Op, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    assert op.bad_indices is not None
    return op.bad_indices(*args)


def with_values(op: Op, args: Sequence[Any], name: str, values: dict[int, int]) -> list[Any]:
    """The same with other values at these places of an index tensor."""
    index = named(op, args)[name].clone()
    for place, value in values.items():
        index.view(-1)[place] = value
    return list(replaced(op, args, **{name: index}))


def first_refused(op: Op, args: Sequence[Any], name: str, place: int) -> int | None:
    """The smallest value from 0 on that is out of range there; None if every value of 31 bits is in range."""

    def is_bad(value: int) -> bool:
        return bool(bad(op, with_values(op, args, name, {place: value}))[name].reshape(-1)[place])

    low, high = -1, 2**31 - 1
    if not is_bad(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle, high)
    return high


# The families whose kernels are cheap on the host with so many tokens.
FAMILIES = tuple(f"pyops.ops.{family}." for family in ("mamba", "moe"))
CASES = [
    pytest.param(op, index, id=f"{name}-{index}")
    for name, op in pyops.registry.items()
    if op.bad_indices is not None and op.reference.__module__.startswith(FAMILIES)
    for index in bad(op, made(op))
]


@pytest.mark.parametrize(("op", "index"), CASES)
def test_hostile_indices_among_many_tokens(op: Op, index: str) -> None:
    args = made(op)
    size = named(op, args)[index].numel()
    # Sequences that overlap are written by several blocks, in any order; the end of the last one may be anything.
    is_start = index in ("query_start_loc", "cu_seqlens")
    place = size - 1 if is_start else size // 2
    end = first_refused(op, args, index, place)
    tries = [{place: 2**31 - 1} if is_start else {0: 2**31 - 1, size // 3: -1, place: -(2**31)}]
    if end is not None:
        tries += [{place: end}, {place: end + 1}]
    for values in tries:
        call = with_values(op, args, index, values)
        assert_results(op, expected(op, call), run(op, call))
