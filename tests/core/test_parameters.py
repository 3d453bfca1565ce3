"""Arguments besides tensors and floats: integers that are read at every call, numbers as tensors, scratch, indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

import pyops
from pyops import KernelFault, check
from pyops._core import config
from pyops._core.launch.kernel import Kernel, Launch
from pyops._core.launch.scratch import Scratch
from pyops._core.tensors.tensor import TensorArg
from pyops.host.toolchain import toolchains
from tests.support.calls import DEVICES

if TYPE_CHECKING:
    from torch import Tensor

on_host = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

TAKE = """
// out[i] = input[index[i]] * scale + step, 0 where an index is out of range
#include "number.cuh"
extern "C" __global__ void take(float* out, const float* input, const index_t* index, const float* scale,
                                int64_t count, int64_t size, int64_t step) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const bool inside = uint64_t(index[i]) < uint64_t(size);
    out[i] = inside ? input[index[i]] * *scale + step : 0.0f;
}
"""


@pytest.fixture
def take() -> Any:
    kernel = Kernel("test/take.cu", text=TAKE)
    planned = []

    @pyops.op(out="out", runtime="step")
    def take(out: Tensor, input: Tensor, index: Tensor, scale: Tensor | float, step: int) -> None:
        """``out = input[index] * scale + step``."""
        inside = (index >= 0) & (index < input.numel())
        found = input[torch.where(inside, index, 0)] * scale.reshape(()) + step
        out.copy_(torch.where(inside, found, 0.0))

    @take.plan
    def _(out: TensorArg, input: TensorArg, index: TensorArg, scale: TensorArg, step: int) -> Launch:
        check.scalar(scale)
        check.same_shape(out, index)
        planned.append(scale.shape)
        return kernel(index_t=index.dtype).launch(-(-index.numel // 64), 64, count=index.numel, size=input.numel)

    @take.bad_indices
    def _(out: Tensor, input: Tensor, index: Tensor, scale: Tensor, step: int) -> dict[str, Tensor]:
        return {"index": (index < 0) | (index >= input.numel())}

    take.planned = planned
    return take


def _called(take: Any, device: Any, scale: Any, step: int = 0, index: tuple[int, ...] = (3, 0, 2)) -> list[float]:
    out = torch.full((len(index),), 77.0, device=device)
    take(out, torch.arange(4.0, device=device), torch.tensor(index, device=device), scale, step)
    result: list[float] = out.tolist()
    return result


@pytest.mark.parametrize("device", DEVICES)
def test_unkeyed_integer_makes_no_plan(take: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_TRUST", "1")  # else a kernel that no GPU has run is planned once more, as portable
    for step in (0, 1, 2**40, -5):
        assert _called(take, device, 1.0, step) == [numpy.float32(x + step) for x in (3, 0, 2)]
    assert len(take.planned) == 1
    for wrong in (1.5, "x", None):
        with pytest.raises(pyops.OpError, match=r"^take: step: "):
            _called(take, device, 1.0, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_number_may_be_given_for_a_tensor(take: Any, device: str) -> None:
    """As a Python number, a numpy scalar, a scalar in host memory, and a tensor of any rank."""
    tensors = [torch.tensor(2.0, device=device), torch.full((1,), 2.0, device=device), torch.tensor(2.0)]
    for scale in (2, 2.0, numpy.float32(2), numpy.float64(2), numpy.int64(2), *tensors):
        for _ in range(3):  # first by the plan, then by its guard
            assert _called(take, device, scale) == [6.0, 0.0, 4.0]
    for wrong in (True, "x", None, [2.0], torch.ones(2, device=device), torch.tensor(2, device=device)):
        with pytest.raises(pyops.OpError, match=r"^take: scale: "):
            _called(take, device, wrong)


@pytest.mark.parametrize("device", DEVICES)
def test_torch_sees_the_tensor(take: Any, device: str) -> None:
    assert "SymInt step" in str(torch.ops.pyops.take.default._schema)
    index = torch.tensor([1, 9], device=device)
    compiled = torch.compile(lambda out, x, scale: take(out, x, index, scale, 3), fullgraph=True, backend="aot_eager")
    for scale in (2.0, torch.tensor(2.0), torch.tensor(2.0, device=device)):
        out = torch.empty(2, device=device)
        compiled(out, torch.arange(4.0, device=device), scale)
        assert out.tolist() == [5.0, 0.0]


def test_number_with_numpy_arrays(take: Any) -> None:
    out = numpy.empty(2, numpy.float32)
    for mode in ("reference", *(["kernels"] if toolchains() else [])):
        with config.cpu(mode):
            take(out.fill(7) or out, numpy.arange(4, dtype=numpy.float32), numpy.array([3, -1]), 2.0, 1)
        assert out.tolist() == [7.0, 0.0]


@pytest.mark.parametrize("device", DEVICES)
def test_indices_out_of_range_are_named(take: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYOPS_CHECK=1, after the call has done its work; the switch is read when a plan is made."""
    assert _called(take, device, 1.0, index=(1, 4, -7)) == [1.0, 0.0, 0.0]
    monkeypatch.setenv("PYOPS_CHECK", "1")
    take.op.forget()
    out = torch.full((3,), 77.0, device=device)
    index = torch.tensor((1, 4, -7), device=device)
    for scale in (1.0, torch.ones(1, device=device)):
        with pytest.raises(
            pyops.OpError, match=r"^take: index: 2 of 3 indices are out of range, the first at \(1,\): 4$"
        ):
            take(out.fill_(77), torch.arange(4.0, device=device), index, scale, 0)
        assert out.tolist() == [1.0, 0.0, 0.0]
    assert _called(take, device, 1.0) == [3.0, 0.0, 2.0]
    arrays = [numpy.zeros(3, numpy.float32), numpy.arange(4, dtype=numpy.float32), numpy.array([0, 1, 99])]
    with pytest.raises(pyops.OpError, match=r"^take: index: 1 of 3 indices are out of range, the first at \(2,\): 99$"):
        take(*arrays, 1.0, 0)
    take.op.forget()


HALVES = """
#include "number.cuh"
extern "C" __global__ void halves(const float* input, float* partial, float* other) {
    await_previous_kernel();
    partial[threadIdx.x] = input[threadIdx.x] / 2.0f;
    other[threadIdx.x] = input[threadIdx.x];
}
"""
SUM = """
#include "number.cuh"
extern "C" __global__ void sum(float* out, const float* partial, const float* other) {
    await_previous_kernel();
    out[threadIdx.x] = partial[threadIdx.x] + other[threadIdx.x];
}
"""


@pytest.mark.parametrize("device", DEVICES)
def test_scratch_is_shared_by_the_launches_of_a_call(device: str) -> None:
    halves, add = Kernel("test/halves.cu", text=HALVES), Kernel("test/sum.cu", text=SUM)

    @pyops.op(out="out")
    def one_and_a_half(out: Tensor, input: Tensor) -> None:
        out.copy_(input * 1.5)

    @one_and_a_half.plan
    def _(out: TensorArg, input: TensorArg) -> list[Launch]:
        partial, other = Scratch(100), Scratch(4 * 64)
        return [
            halves().launch(1, 25, partial=partial, other=other),
            add().launch(1, 25, partial=partial, other=other),
        ]

    x = torch.arange(25.0, device=device)
    for _ in range(3):
        out = torch.empty(25, device=device)
        one_and_a_half(out, x)
        assert torch.equal(out, x * 1.5)


def test_every_index_tensor_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", "1")

    @pyops.op(out="out")
    def skipped(out: Tensor, rows: Tensor, columns: Tensor) -> None:
        out.zero_()

    @skipped.plan
    def _(out: TensorArg) -> list[Launch]:
        return []

    @skipped.bad_indices
    def _(rows: Tensor, columns: Tensor) -> dict[str, Any]:
        return {"rows": rows > 1, "columns": {"are odd": columns % 2 == 1}}

    wrong = r"rows: 1 of 2 indices are out of range, the first at \(0,\): 5; columns: 2 of 2 indices are odd, the first"
    with pytest.raises(pyops.OpError, match=wrong):
        skipped(torch.zeros(2), torch.tensor([5, 1]), torch.tensor([3, 1]))


COUNT = """
// out = zeros, which are counted up, and down again where there is something to clear
#include "number.cuh"
extern "C" __global__ void count(float* out, float* garbage, float* zeros, bool clears) {
    await_previous_kernel();
    garbage[threadIdx.x] = 1.0f;
    out[threadIdx.x] = zeros[threadIdx.x];
    zeros[threadIdx.x] = clears ? 0.0f : 1.0f;
}
"""


@on_host
def test_zeros_are_separate_from_scratch_and_stay_zero() -> None:
    @pyops.op(out="out")
    def zero(out: Tensor, clears: bool) -> None:
        out.zero_()

    @zero.plan
    def _(out: TensorArg, clears: bool) -> Launch:
        scratch = {"garbage": Scratch(100), "zeros": Scratch(100, zeroed=True)}
        return Kernel("test/count.cu", text=COUNT)().launch(1, 25, clears=clears, **scratch)

    with config.cpu("kernels"):
        out = torch.ones(25)
        zero(out, True)
        assert not out.any()
        with pytest.raises(KernelFault, match=r"workspace left dirty.*first at byte \d"):
            zero(out, False)


def test_bool_is_no_number(take: Any) -> None:
    out, x, index = torch.zeros(3), torch.arange(4.0), torch.tensor([0, 1, 2])
    with pytest.raises(pyops.OpError, match=r"^take: scale: expected a torch tensor or a cupy array, got bool$"):
        take(out, x, index, True, 0)


@pytest.mark.gpu
def test_scratch_in_a_graph_and_in_cupy() -> None:
    """A captured call has its own scratch; CuPy's arrays take it from CuPy."""
    import cupy

    halves, add = Kernel("test/halves.cu", text=HALVES), Kernel("test/sum.cu", text=SUM)

    @pyops.op(out="out")
    def captured_scratch(out: Tensor, input: Tensor) -> None:
        out.copy_(input * 1.5)

    @captured_scratch.plan
    def _(out: TensorArg, input: TensorArg) -> list[Launch]:
        partial, other = Scratch(100), Scratch(100)
        return [made().launch(1, 25, partial=partial, other=other) for made in (halves, add)]

    x, out = torch.arange(25.0, device="cuda"), torch.empty(25, device="cuda")
    captured_scratch(out, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_scratch(out, x)
    for factor in (1.0, 3.0):
        x.copy_(torch.arange(25.0) * factor)
        junk = torch.full((1 << 20,), 9.0, device="cuda")
        graph.replay()
        assert torch.equal(out, x * 1.5), junk.sum()
    result = cupy.empty(25, cupy.float32)
    captured_scratch(result, cupy.arange(25, dtype=cupy.float32))
    assert cupy.array_equal(result, cupy.arange(25, dtype=cupy.float32) * 1.5)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"runtime": "factor"}, r"\['factor'\] are runtime but are no int parameters"),
        ({"keyed": "count"}, r"\['count'\] are keyed but are no float parameters"),
    ],
)
def test_wrong_declarations(declaration: dict[str, str], message: str) -> None:
    def wrongly_declared(out: Tensor, factor: float, count: int) -> None: ...

    with pytest.raises(TypeError, match=message):
        pyops.op(out="out", **declaration)(wrongly_declared)  # type: ignore[arg-type]


def test_unkeyed_integer_has_eight_bytes() -> None:
    kernel = Kernel("test/narrow.cu", text='extern "C" __global__ void narrow(float* out, int step) {}')

    @pyops.op(out="out", runtime="step")
    def narrow_step(out: Tensor, step: int) -> None: ...

    narrow_step.plan(lambda out, step: kernel().launch(1, 32))
    if not toolchains():
        pytest.skip("no C++ compiler")
    with (
        config.cpu("kernels"),
        pytest.raises(TypeError, match=r"^test/narrow\.cu: step is an integer given at every call: expected int64_t$"),
    ):
        narrow_step(torch.empty(1), 3)


@pytest.mark.parametrize("device", DEVICES)
def test_integer_may_be_a_tensor(device: str) -> None:
    """Its value counts, at every call, and not the tensor's identity."""

    @pyops.op(out="out")
    def filled_with(out: Tensor, count: int) -> None:
        out.fill_(count)

    kernel = Kernel("test/filled.cu", text=FILLED)
    filled_with.plan(lambda out: kernel().launch(1, 32))
    out, count = torch.empty(32, device=device), torch.tensor(3)
    for value in (3, 5, 5, 3):
        filled_with(out, count.fill_(value))
        assert (out == value).all()
    for wrong in (torch.tensor(1.5), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(pyops.OpError, match=r"^filled_with: count: expected int"):
            filled_with(out, wrong)


FILLED = """
#include "number.cuh"
extern "C" __global__ void filled(float* out, int count) {
    await_previous_kernel();
    out[threadIdx.x] = count;
}
"""
