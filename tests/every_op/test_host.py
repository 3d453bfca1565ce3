"""Kernels of every op in the registry on the CPU. No line here knows an op by name.

test_every_op.py compares their results with the reference; for it, the host is one more device.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pyops
from pyops._core import config
from pyops._core.op import prepare
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.host.toolchain import toolchains
from pyops.testing import SCHEDULES, scheduled
from pyops.testing.calls import assert_results, assert_same, clones, expected, named, replaced, run, written
from tests.support import axes
from tests.support.calls import as_numpy, example, run_in_place
from tests.support.profiles import PROFILE, covering

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

OPS = [pytest.param(op, id=name) for name, op in pyops.registry.items()]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with config.cpu("kernels"):
        yield


def _args(op: Op, **more: Any) -> list[Any]:
    return example(op, **{"num_tokens": 5, **axes.fullest(op), **more})


def _cases(op: Op, max_cases: int | None, *sizes: int) -> list[axes.Axes]:
    """A sample of the combinations that are run, and every option switched on for rows of these sizes."""
    more = [axes.fullest(op) | {"hidden_size": size} for size in sizes if axes.takes_any_size(op)]
    return axes.sample(op, max_cases) + more


# Warps of CDNA's size use other kernels; schedules are tested with NVIDIA's warps alone.
_SCHEDULES = {32: SCHEDULES, 64: (SCHEDULES[0], SCHEDULES[3])}


def _kernels_of(op: Op) -> set[str]:
    """The kernels of the calls that run under every schedule."""
    assert op.example is not None
    make = ArgMaker(device.host())
    calls = [op.example(make, num_tokens=9, **case) for case in _cases(op, PROFILE.varied, 64)]
    return {launch.specialisation.kernel.file for args in calls for launch in op.launches(*args)}


# Ops that together have every kernel: the order of threads and the library of arrays concern no more of an op. The
# profile "nightly" tests all.
_SCHEDULED = list(pyops.registry.values())
if PROFILE.variants is not None:
    _SCHEDULED = covering(_SCHEDULED, _kernels_of)
SCHEDULED = [pytest.param(op, id=op.name) for op in _SCHEDULED]


@pytest.mark.rotates
@pytest.mark.parametrize("op", SCHEDULED)
def test_matches_reference_under_every_schedule(op: Op) -> None:
    """All schedules give the same bits. In-place calls detect a row that is read again after it was written."""
    for i, case in enumerate(_cases(op, PROFILE.varied, 64)):
        args = example(op, num_tokens=9, **case)
        right = expected(op, args)
        for warp_size in (32, 64) if i == 0 else (32,):
            first: dict[str, torch.Tensor] = {}
            for poison, schedule in enumerate(_SCHEDULES[warp_size]):
                with scheduled(schedule, warp_size=warp_size):
                    results = run(op, args, poison=(0xFF, 0x00, 0x5A)[poison % 3])
                    first = first or results
                    assert_results(op, right, results)
                    assert_same(op, first, results)
                    assert_same(op, run_in_place(op, args), first)


@pytest.mark.rotates
@pytest.mark.parametrize("op", OPS)
def test_one_empty_tensor(op: Op) -> None:
    """It is refused as such, or accepted: a tensor without elements is never read."""
    args = _args(op)
    for name, value in named(op, args).items():
        for dim in range(value.ndim):
            broken = replaced(op, args, **{name: value.narrow(dim, 0, 0)})
            try:
                op.check(*broken)
            except pyops.OpError:
                continue
            assert_results(op, expected(op, broken), run(op, broken))


def _far_apart(value: torch.Tensor) -> torch.Tensor:
    """A copy with a row stride above 2^31 elements, in memory that the system provides only when it is touched."""
    rows, columns = value.shape
    stride = 2**31 + 16
    # On Linux 0x4000 is MAP_NORESERVE, which mmap names since Python 3.13.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    pages = mmap.mmap(-1, ((rows - 1) * stride + columns) * value.element_size(), flags)
    memory = torch.frombuffer(pages, dtype=torch.uint8).view(value.dtype)
    return memory.as_strided((rows, columns), (stride, 1)).copy_(value)


@pytest.mark.rotates
@pytest.mark.parametrize("op", OPS)
def test_64_bit_offsets(op: Op) -> None:
    """Row strides that do not fit in 32 bits. An op may refuse gaps, by name."""
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


@pytest.mark.rotates
@pytest.mark.parametrize("op", SCHEDULED)
def test_numpy_equals_torch_bit_for_bit(op: Op) -> None:
    args = _args(op)
    assert_same(op, run(op, args), run(op, args, call=lambda *values: op(*map(as_numpy, values))))


@pytest.mark.parametrize("op", OPS)
def test_switch(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYOPS_CPU is read at every call, and PYOPS_REFERENCE takes precedence."""
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
