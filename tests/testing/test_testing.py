"""The test harness: which differences comparisons accept, which writes canaries notice, and which faults a whole check
finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import pyops
from pyops import check
from pyops._core.op.op import Op
from pyops._core.tensors.tensor import TensorArg
from pyops.host.toolchain import toolchains
from pyops.testing import (
    SCHEDULES,
    Layout,
    assert_close,
    assert_matches_reference,
    canaries,
    same_bits,
    strategies,
)
from pyops.testing.calls import assert_results, expected, run
from tests.support import axes
from tests.support.calls import as_numpy

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def _next(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The value that is this many ulps further from zero."""
    words = torch.int32 if x.element_size() == 4 else torch.int16
    return (x.view(words) + steps).view(x.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [1.0, 1.984375, -3.5, 1024.0, 3e-5])
def test_ulps(dtype: torch.dtype, value: float) -> None:
    x = torch.full((3,), value, dtype=dtype)
    units = 16 if dtype == torch.float32 else 1
    assert_close(x, x.clone(), 0)
    assert_close(x, _next(x, units), 1)
    assert_close(_next(x, units), x, 1)
    assert_close(x, _next(x, 2 * units), 2)
    with pytest.raises(AssertionError, match="more than 1 ulps away, 3 of 3"):
        assert_close(x, _next(x, 2 * units + 5), 1)
    with pytest.raises(AssertionError):
        assert_close(x, _next(x, 1), 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wrong_element_among_many(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    y = x.clone()
    y[17, 3] += 0.1
    with pytest.raises(AssertionError, match=r"1 of 4096 elements, the first at \(17, 3\)"):
        assert_close(x, y, 1)
    y[17, 3] = float("nan")
    with pytest.raises(AssertionError, match="NaN at other positions"):
        assert_close(x, y, 1)


def test_infinity_is_next_to_the_largest() -> None:
    infinite = torch.tensor([float("inf")], dtype=torch.float16)
    assert_close(infinite, infinite.clone(), 0)
    assert_close(infinite, torch.tensor([65504.0], dtype=torch.float16), 1)
    for wrong in (-infinite, torch.tensor([6e4], dtype=torch.float16)):
        with pytest.raises(AssertionError):
            assert_close(infinite, wrong, 1)


def test_flushed_denormals_pass() -> None:
    x = torch.tensor([1e-39, 1.0])
    assert_close(x, torch.tensor([0.0, 1.0]), 0)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1e-25, 1.0]), torch.tensor([0.0, 1.0]), 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8])
def test_fp8_values(dtype: torch.dtype) -> None:
    codes = torch.arange(-100, 100).repeat(50).to(torch.int8)
    x = codes.float().to(dtype) if dtype != torch.int8 else codes
    step = x.view(torch.uint8).clone()

    def moved(count: int, by: int) -> torch.Tensor:
        y = step.clone().view(torch.int8)
        y[150 : 150 + count] += by
        return y.view(dtype)

    assert_close(x, moved(0, 0), 0)
    assert_close(x, moved(1, 1), 1)
    assert_close(x, moved(10, 1), 1)
    for count, by, ulps in ((1, 1, 0), (1, 2, 1), (13, 1, 1)):
        with pytest.raises(AssertionError):
            assert_close(x, moved(count, by), ulps)
    # If all results may be off by a thousandth of the largest, 100, one in five, or in ten, is near a tie.
    right, wrong = (1900, 2100) if dtype == torch.int8 else (900, 1100)
    assert_close(x, moved(right, 1), 1, atol=2.0**-10)
    with pytest.raises(AssertionError):
        assert_close(x, moved(wrong, 1), 1, atol=2.0**-10)


def test_fp8_signs_and_nan() -> None:
    x = torch.tensor([0.0, 1.0, float("nan")]).to(torch.float8_e4m3fn)
    assert_close(x, torch.tensor([-0.0, 1.0, float("nan")]).to(torch.float8_e4m3fn), 0)
    for wrong in ([0.0, -1.0, float("nan")], [0.0, 1.0, 448.0], [float("nan"), 1.0, float("nan")]):
        with pytest.raises(AssertionError):
            assert_close(x, torch.tensor(wrong).to(torch.float8_e4m3fn), 1)
    nan, other = (torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fnuz) for code in (0x80, 0))
    assert_close(nan, nan.clone(), 0)
    with pytest.raises(AssertionError):  # -0 instead of 0 is wrong
        assert_close(nan, other, 1)


def test_shape_and_dtype_must_match() -> None:
    x = torch.zeros(2, 3)
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float16)):
        with pytest.raises(AssertionError):
            assert_close(x, wrong, 5)
        assert not same_bits(x, wrong)
    assert not same_bits(x, -x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_guards_notice_every_byte_around(dtype: torch.dtype) -> None:
    value = torch.arange(15).reshape(3, 5).to(torch.float32).to(dtype)
    guard = canaries(Layout(offset=3, gap=2).place(value))
    assert same_bits(guard.tensor, value)
    assert guard.tensor.stride() == (7, 1)
    guard.check()
    guard.poison(0xFF)
    guard.check()
    itemsize = value.element_size()
    start = guard.tensor.storage_offset() * itemsize
    assert start % 64 == 3 * itemsize
    inside = {start + (7 * row + i) * itemsize + byte for row in range(3) for i in range(5) for byte in range(itemsize)}
    assert min(inside) >= 256
    assert max(inside) + 256 <= guard.memory.numel()
    for byte in range(guard.memory.numel()):
        if byte not in inside:
            guard.memory[byte] ^= 1
            with pytest.raises(AssertionError, match=f"^x: bytes around it were .* first {byte - start} bytes from"):
                guard.check("x")
            guard.memory[byte] ^= 1


def test_numpy_views_share_memory() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        value = torch.ones(2, 3).to(dtype)
        array = as_numpy(value)
        assert str(array.dtype) == str(value.dtype).removeprefix("torch.")
        assert array.ctypes.data == value.data_ptr()


# Ops with one fault each, which the tests of every op must find.


@pytest.fixture
def declared() -> Any:
    """declared(reference): an op that lives for one test."""

    def declare(reference: Any, **more: Any) -> Op:
        wrapper = pyops.op(out="out", **more)(reference)

        @wrapper.plan
        def _(out: TensorArg, input: TensorArg) -> list[Any]:
            check.like(out, input)
            return []

        return wrapper.op

    return declare


def _args() -> list[Any]:
    return [torch.zeros(3, 5), torch.randn(3, 5)]


def test_write_next_to_the_output_is_found(declared: Any) -> None:
    def writes_beside(out: Tensor, input: Tensor) -> None:
        out.copy_(input)
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()

    with pytest.raises(AssertionError, match="writes_beside: out: bytes around it were written, the first 60 bytes"):
        run(declared(writes_beside), _args())


def test_written_input_is_found(declared: Any) -> None:
    def writes_input(out: Tensor, input: Tensor) -> None:
        out.copy_(input)
        input[1, 2] = 0

    with pytest.raises(AssertionError, match="the input input was written"):
        run(declared(writes_input), _args())


def test_unwritten_element_is_found(declared: Any) -> None:
    def leaves_out(out: Tensor, input: Tensor) -> None:
        out[:, :4] = input[:, :4]

    op = declared(leaves_out)
    first, second = (run(op, _args(), poison=byte)["out"] for byte in (0xFF, 0x00))
    assert not same_bits(first, second)


def test_write_before_a_refusal_is_found(declared: Any) -> None:
    def writes_then_refuses(out: Tensor, input: Tensor) -> None:
        out.zero_()
        raise pyops.OpError("writes_then_refuses", "input", "too late")

    with pytest.raises(AssertionError, match="out was written before the call was refused"):
        run(declared(writes_then_refuses), _args())


def test_wrong_result_is_found(declared: Any) -> None:
    def adds(out: Tensor, input: Tensor) -> None:
        out.copy_(input + 1)

    op = declared(adds)
    args = _args()
    right = expected(op, args)
    assert_results(op, right, run(op, args))
    with pytest.raises(AssertionError, match="adds: out: more than 1 ulps away"):
        assert_results(op, right, {"out": right["out"] * 1.001})


def test_unknown_axis_is_named(declared: Any) -> None:
    def unknown_axis(out: Tensor, input: Tensor) -> None: ...

    op = declared(unknown_axis)

    @op.wrapper.example
    def _(make: Any, *, num_tokens: int = 1, wingspan: int = 3) -> tuple[Any, ...]:
        return ()

    with pytest.raises(LookupError, match="unknown_axis: the axis 'wingspan' of its example is unknown"):
        axes.compiled(op)


# assert_matches_reference, on an op with a kernel: a correct one, and ones with one fault each.

ADD_ONE = """
#include "number.cuh"
extern "C" __global__ void LAUNCH_BOUNDS(64, 1)
add_one(float* out, const float* input, int64_t out_stride, int64_t input_stride, int row_size, float step) {
    __shared__ float tile[64];
    const int column = blockIdx.y * 64 + threadIdx.x;
    const float* row = input + blockIdx.x * input_stride;
    if (column < row_size) tile[63 - threadIdx.x] = row[column];
    __syncthreads();
    if (column < row_size) out[blockIdx.x * out_stride + column] = tile[63 - threadIdx.x] + step;
}
"""


@pytest.fixture
def add_one() -> Callable[..., Any]:
    """add_one(old, new): an op with a kernel in which `old` is replaced by `new`."""

    def declare(old: str = "", new: str = "") -> Any:
        assert old in ADD_ONE
        kernel = pyops.Kernel("add_one.cu", text=ADD_ONE.replace(old, new) if old else ADD_ONE)

        @pyops.op(out="out", ulps=0)
        def add_one(out: Tensor, input: Tensor, step: float = 1.0) -> None:
            out.copy_(input + step)

        @add_one.plan
        def _(out: TensorArg, input: TensorArg, step: float) -> Any:
            check.like(out, input)
            row_size, strides = check.row_size(input), (check.row_stride(out), check.row_stride(input))
            return kernel().launch(
                grid=(check.num_rows(input), -(-row_size // 64)),
                block=64,
                out_stride=strides[0],
                input_stride=strides[1],
                row_size=row_size,
            )

        return add_one

    return declare


needs_a_compiler = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")


def test_canaries_are_torch_tensors() -> None:
    with pytest.raises(TypeError, match="expected a torch tensor, got ndarray"):
        canaries(numpy.zeros(3))


@needs_a_compiler
def test_correct_kernel_matches(add_one: Any) -> None:
    op, x = add_one(), torch.randn(3, 100)
    out, before = torch.zeros_like(x), x.clone()
    assert_matches_reference(op, out, x, warp_sizes=(32, 64))
    assert_matches_reference(op.op, out, x, 2.5)
    assert_matches_reference(op, torch.empty(3, 0), torch.empty(3, 0))
    assert (out == 0).all()
    assert torch.equal(x, before)


@needs_a_compiler
@given(input=strategies.tensors(dtype="float32", expanded=True), layout=strategies.layouts())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])
def test_correct_kernel_matches_for_any_layout(add_one: Any, input: Any, layout: Layout) -> None:
    seen = []
    op = add_one()
    planned = op.op._plan
    op.plan(lambda out, input, step: seen.append((out, input)) or planned(out, input, step))
    out = layout.place(torch.zeros(input.shape))
    assert_matches_reference(op, out, input, schedules=SCHEDULES[:1])
    # The kernel got these strides, and this alignment.
    assert {(a.strides, b.strides) for a, b in seen} == {(out.stride(), input.stride())}
    alignments = [min(16, value.data_ptr() & -value.data_ptr()) for value in (out, input)]
    assert alignments in [[a.alignment, b.alignment] for a, b in seen]


FAULTS = [
    ("+ step", "+ step * 1.01f", AssertionError, r"^add_one: out: more than 0 ulps away, .*\(0, 0\): expected .*fifo"),
    ("if (column < row_size) out", "if (column + 1 < row_size) out", AssertionError, r"1 of 100 .*\(0, 99\)"),
    (
        "__syncthreads();",
        "if (column < row_size) const_cast<float*>(row)[column] = 7;",
        AssertionError,
        "the input input was written, under",
    ),
    ("+ column]", "+ column + (column == 99)]", pyops.KernelFault, "write of 4 bytes at 0x.*, 0 bytes past the end of"),
    ("__syncthreads();", "float x = row[100]; if (x == 3) out[0] = x;", pyops.KernelFault, "out-of-bounds global"),
    ("__syncthreads();", "float x = row[-1]; if (x == 3) out[0] = x;", pyops.KernelFault, "out-of-bounds global"),
    ("tile[63 - threadIdx.x] + step", "tile[threadIdx.x] + step", pyops.KernelFault, "uninitialised shared memory"),
    ("__syncthreads();", "if (blockIdx.y == 0 && threadIdx.x == 0) out[99] = 7;", pyops.KernelFault, "memory race"),
]


@needs_a_compiler
@pytest.mark.parametrize(("old", "new", "error", "message"), FAULTS)
def test_wrong_kernel_fails(add_one: Any, old: str, new: str, error: Any, message: str) -> None:
    """The last one is a race between blocks, with a right result under the first schedule."""
    x = torch.randn(1, 100)
    with pytest.raises(error, match=message) as caught:
        assert_matches_reference(add_one(old, new), torch.empty_like(x), x)
    if error is pyops.KernelFault:
        assert "under Schedule(" in caught.value.__notes__[0]


@needs_a_compiler
@pytest.mark.parametrize("result", [0.0, float("nan"), 2.0])
def test_unwritten_output_is_found_for_any_right_value(add_one: Any, result: float) -> None:
    op, x = (
        add_one("if (column < row_size) out", "if (column < row_size && column != 3) out"),
        torch.full((1, 5), result - 1),
    )
    with pytest.raises(AssertionError, match=r"1 of 5 elements, the first at \(0, 3\)"):
        assert_matches_reference(op, torch.full_like(x, result), x)


@needs_a_compiler
def test_warp_size_is_named(add_one: Any) -> None:
    op = add_one("+ step", "+ step + (WARP_SIZE == 64)")
    x = torch.zeros(1, 5)
    assert_matches_reference(op, x, x.clone())
    with pytest.raises(AssertionError, match="warps of 64"):
        assert_matches_reference(op, x, x.clone(), warp_sizes=(32, 64))


def test_impossible_checks_are_refused(add_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = add_one(), torch.zeros(2, 3)
    with pytest.raises(TypeError, match="op: expected what @op made of a reference, got <built-in"):
        assert_matches_reference(len, x, x)
    with pytest.raises(TypeError, match="missing a required argument: 'input'"):
        assert_matches_reference(op, x)
    with pytest.raises(TypeError, match="add_one: input: expected a torch tensor, got ndarray"):
        assert_matches_reference(op, x, x.numpy())
    with pytest.raises(ValueError, match="at least one of each"):
        assert_matches_reference(op, x, x.clone(), schedules=())
    monkeypatch.setenv("PYOPS_REFERENCE", "1")
    with pytest.raises(RuntimeError, match="no kernel would run"):
        assert_matches_reference(op, x, x.clone())


@needs_a_compiler
def test_refused_call_is_no_wrong_result(add_one: Any) -> None:
    with pytest.raises(pyops.OpError, match="add_one: out: expected shape"):
        assert_matches_reference(add_one(), torch.zeros(2, 4), torch.zeros(2, 3))


@pytest.mark.gpu
def test_runs_on_the_device_first(add_one: Any) -> None:
    x = torch.randn(1, 100, device="cuda")
    assert_matches_reference(add_one(), torch.empty_like(x), x)
    with pytest.raises(AssertionError, match=r"on the GPU$"):
        assert_matches_reference(add_one("+ step", "+ step * 1.01f"), torch.empty_like(x), x)
