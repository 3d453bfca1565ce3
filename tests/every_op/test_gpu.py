"""Every op in the registry on a device: streams, graphs, CuPy, several devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pyops
from pyops._core.launch import workspace
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.text import compiler
from pyops.testing import Layout
from pyops.testing.calls import assert_results, assert_same, clones, expected, named, run, written
from tests.support import axes
from tests.support.calls import as_cupy, example

pytestmark = pytest.mark.gpu

OPS = [pytest.param(op, id=name) for name, op in pyops.registry.items()]
_SPLITS = {"sm100_cutlass_mla_decode", "sparse_mla_attention"}


def _args(op: Op, **more: Any) -> list[Any]:
    return example(op, "cuda", **{"num_tokens": 7, **axes.fullest(op), **more})


def _cupy_call(op: Op) -> Any:
    return lambda *values: op(*map(as_cupy, values))


@pytest.mark.parametrize("op", OPS)
def test_cupy_equals_torch_bit_for_bit(op: Op) -> None:
    for case in axes.sample(op, max_cases=6):
        args = example(op, "cuda", num_tokens=7, **case)
        assert_same(op, run(op, args), run(op, args, call=_cupy_call(op)))
    args = _args(op)
    layouts = {name: Layout(offset=3) for name in named(op, args)}
    assert_same(op, run(op, args, layouts), run(op, args, layouts, call=_cupy_call(op)))


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("op", OPS)
def test_runs_on_the_current_stream(op: Op, library: str) -> None:
    """Queued on a side stream after a long kernel and a copy of its inputs, without waiting."""
    import cupy

    source = _args(op)
    args = clones(source)
    call = op if library == "torch" else _cupy_call(op)
    call(*clones(source))  # compile
    results = expected(op, source)
    inputs = [p.name for p in op.tensors if p.role != "out" and p.name in named(op, args)]
    for name in inputs:
        named(op, args)[name].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        torch.cuda._sleep(400_000_000)  # 0.2 s, enough for a busy host
        for name in inputs:
            named(op, args)[name].copy_(named(op, source)[name])
        call(*args)
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the call waited for the device"
    stream.synchronize()
    assert_results(op, results, written(op, args))


def _unload(op: Op) -> None:
    """Drop every kernel from the op, the compiler and CuPy, and from other ops that launch the same kernels.

    A plan holds the address of a kernel's function, which is invalid without its module.
    """
    import cupy

    loaded = {id(one.kernel._loaded): one.kernel._loaded for one in op.specialisations.values()}
    for other in pyops.registry.values():
        if any(id(one.kernel._loaded) in loaded for one in other.specialisations.values()):
            other.specialisations.clear()
            other.forget()
    for kernels in loaded.values():
        kernels.clear()
    op.forget()
    compiler._loaded.clear()
    cupy.clear_memo()
    gc.collect()  # unload modules here, not in the middle of a capture


@pytest.mark.parametrize("first", [False, True], ids=["loaded", "first"])
@pytest.mark.parametrize("op", OPS)
def test_graph_replay_equals_eager(op: Op, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay works on the present contents of its tensors, also if the first call was captured and loaded its
    kernels."""
    args, others = _args(op), _args(op, seed=1)
    held = clones(args)
    if first:
        _unload(op)
        monkeypatch.setattr(workspace, "_pieces", {})
    else:
        op(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*held)
    for contents in (args, others):
        for name, value in named(op, contents).items():
            named(op, held)[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        eager = clones(contents)
        op(*eager)
        assert_same(op, written(op, eager), written(op, held))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
@pytest.mark.parametrize("op", OPS)
def test_second_device(op: Op) -> None:
    """Tensors are on the second device, whichever device is current."""
    args = _args(op)
    results = run(op, args)
    moved = [arg.to("cuda:1") if isinstance(arg, torch.Tensor) else arg for arg in args]
    for current in (0, 1):
        with torch.cuda.device(current):
            elsewhere = run(op, moved)
            torch.cuda.synchronize("cuda:1")
            assert_same(op, results, {name: value.to("cuda:0") for name, value in elsewhere.items()})
            assert_same(op, results, run(op, args))


@pytest.mark.parametrize("op", OPS)
def test_compiled_lists_loaded_kernels(op: Op) -> None:
    _unload(op)  # drop kernels of other tests, some in formats of other vendors, which may spill
    op(*_args(op))
    table = op.wrapper.compiled()
    assert table
    for one in table:
        assert one.arch.startswith(("sm_", "gfx"))
        assert one.origin in ("compiled", "disk")
        assert one.milliseconds > 0
        assert one.registers > 0
        assert one.local_bytes == 0


@pytest.mark.parametrize("op", OPS)
def test_new_num_tokens_loads_nothing(op: Op) -> None:
    """A number of tokens is not compiled in: another plan, the same kernel. Both counts are odd, so that rows along the
    tokens have the same alignment, and lie between the same two powers of two, which are the buckets of GEMM
    choices."""
    if op.name in _SPLITS and not device.get(0).supports("bfloat16_products"):
        pytest.skip("without tensor cores few tokens split their KV, and seven are enough for 132 SMs")
    op.forget()
    few, more = _args(op, num_tokens=5), _args(op, num_tokens=7)
    op(*few)
    loaded = len(op.wrapper.compiled())
    op(*more)
    assert len(op.wrapper.compiled()) == loaded
    seen = [[getattr(arg, "shape", arg) for arg in args] for args in (few, more)]
    assert len(op.plans) == (1 if seen[0] == seen[1] else 2)  # sizes of experts do not depend on num_tokens


@pytest.fixture
def fresh_plans(op: Op) -> Iterator[None]:
    """Switches are read when a plan is made, so plans from before and after the test are dropped."""
    op.forget()
    yield
    op.forget()


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("op", OPS)
def test_reference_switch(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYOPS_REFERENCE=1 runs the reference on the device, for torch and for CuPy."""
    monkeypatch.setenv("PYOPS_REFERENCE", "1")
    args = _args(op)
    results = expected(op, args)
    assert_results(op, results, run(op, args))
    assert_results(op, results, run(op, args, call=_cupy_call(op)))
    assert {plan.device for plan in op.plans.values()} == {-1}


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("op", OPS)
def test_sync_switch(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYOPS_SYNC=1 waits for the device after every call."""
    monkeypatch.setenv("PYOPS_SYNC", "1")
    args = _args(op)
    op(*clones(args))
    torch.cuda._sleep(50_000_000)
    op(*args)
    assert torch.cuda.current_stream().query(), "the call did not wait for the device"
