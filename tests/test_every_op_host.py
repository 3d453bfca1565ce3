"""What holds for every op in the registry where its kernels run on the CPU. No line here knows an op by name.

Results are held to the reference by test_every_op.py, for which the host is one more device.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import pyops
from pyops._core import config, prepare
from pyops._core.host.toolchain import toolchains
from pyops._core.op import Op
from pyops.testing import SCHEDULES, assert_matches_reference, scheduled
from pyops.testing.calls import assert_results, assert_same, clones, expected, named, replaced, run, written
from tests import axes
from tests.calls import as_numpy, example, run_in_place
from tests.profiles import PROFILE

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

OPS = [pytest.param(op, id=name) for name, op in pyops.registry.items()]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with config.cpu("kernels"):
        yield


def _args(op: Op, **more: Any) -> list[Any]:
    return example(op, **{"num_tokens": 5, **axes.fullest(op), **more})


def _cases(op: Op, max_cases: int | None, *sizes: int) -> list[axes.Axes]:
    """A sample of the combinations that are run, and everything switched on for rows of these sizes."""
    more = [axes.fullest(op) | {"hidden_size": size} for size in sizes if axes.takes_any_size(op)]
    return axes.sample(op, max_cases) + more


@pytest.mark.parametrize("op", OPS)
def test_matches_its_reference(op: Op) -> None:
    """Under every schedule, in warps of NVIDIA's size and of CDNA's."""
    for case in axes.sample(op, PROFILE.varied):
        op.applied(partial(assert_matches_reference, op), example(op, num_tokens=5, **case))(warp_sizes=(32, 64))


@pytest.mark.parametrize("op", OPS)
def test_one_empty_tensor(op: Op) -> None:
    """Is refused as such, or served like any other: what has no elements is never read."""
    args = _args(op)
    for name, value in named(op, args).items():
        for dim in range(value.ndim):
            broken = replaced(op, args, **{name: value.narrow(dim, 0, 0)})
            try:
                op.check(*broken)
            except pyops.OpError:
                continue
            assert_results(op, expected(op, broken), run(op, broken))


@pytest.mark.parametrize("op", OPS)
def test_does_not_depend_on_the_schedule(op: Op) -> None:
    """Nor do results in place, where a row that is read twice is another the second time."""
    for case in _cases(op, PROFILE.varied, 64):
        args = example(op, num_tokens=9, **case)
        first = run(op, args)
        for schedule in SCHEDULES:
            with scheduled(schedule):
                assert_same(op, first, run(op, args))
                assert_same(op, run_in_place(op, args), first)


def _far_apart(value: torch.Tensor) -> torch.Tensor:
    """A copy whose rows lie more than 2^31 elements apart, in memory that is none before it is touched."""
    rows, columns = value.shape
    stride = 2**31 + 16
    # On Linux 0x4000 is MAP_NORESERVE, which mmap names since Python 3.13.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    pages = mmap.mmap(-1, ((rows - 1) * stride + columns) * value.element_size(), flags)
    memory = torch.frombuffer(pages, dtype=torch.uint8).view(value.dtype)
    return memory.as_strided((rows, columns), (stride, 1)).copy_(value)


@pytest.mark.parametrize("op", OPS)
def test_offsets_of_64_bits(op: Op) -> None:
    """Rows so far apart that 32 bits do not count the elements between them. An op may refuse gaps, by name."""
    args = _args(op, num_tokens=3)
    far = {name: _far_apart(x) for name, x in named(op, args).items() if x.ndim == 2 and x.shape[0] == 3}
    while True:
        held = replaced(op, clones(args), **far)
        try:
            op(*held)
            break
        except pyops.OpError as refusal:
            if refusal.argument not in far:
                raise
            del far[refusal.argument]
    assert_results(op, expected(op, args), written(op, held))


@pytest.mark.parametrize("op", OPS)
def test_numpy_gives_the_bits_of_torch(op: Op) -> None:
    args = _args(op)
    assert_same(op, run(op, args), run(op, args, call=lambda *values: op(*map(as_numpy, values))))


@pytest.mark.parametrize("op", OPS)
def test_switch(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYOPS_CPU is read at every call, and PYOPS_REFERENCE goes before it."""
    args = _args(op)
    calls = []
    monkeypatch.setattr(prepare, "_run_on_host", lambda *_: calls.append("kernels"))
    monkeypatch.setattr(prepare, "_run_reference", lambda *_: calls.append("reference"))
    op.forget()
    for mode in ("kernels", "reference"):
        with config.cpu(mode):
            op(*clones(args))
    monkeypatch.setenv("PYOPS_REFERENCE", "1")
    op.forget()
    op(*clones(args))
    op.forget()
    assert calls == ["kernels", "reference", "reference"]
    assert isinstance(next(iter(named(op, args).values())), torch.Tensor)
