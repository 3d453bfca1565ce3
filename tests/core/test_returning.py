"""Ops that allocate and return their outputs: every library, `out=`, torch's schemas, fakes and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pyops
from pyops import check
from pyops._core.launch.kernel import Kernel, Launch
from pyops._core.op.planner import Result
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

TEXT = """
// doubled[i] = 2 * x[i]; half[i] = x[i] / 2
#include "number.cuh"
extern "C" __global__ void halves(float* doubled, half_t* half, const float* x, int64_t size) {
    const int64_t i = int64_t(blockIdx.x) * 64 + threadIdx.x;
    if (i < size) { doubled[i] = 2 * x[i]; half[i] = half_t(x[i] / 2); }
}
"""


@pytest.fixture
def halves() -> Any:
    @pyops.op(returns=("doubled", "half"), ulps=0)
    def halves(x: Tensor, times: int = 1, *, doubled: Tensor, half: Tensor) -> None:
        doubled.copy_(x * 2)
        half.copy_(x / 2)

    @halves.result
    def result_halves(x: Any) -> tuple[Result, Result]:
        return Result(x.shape, x.dtype), Result(x.shape, dtypes.float16)

    @halves.plan
    def plan_halves(x: TensorArg, doubled: TensorArg, half: TensorArg) -> Launch:
        check.same_shape(doubled, x)
        check.same_shape(half, x)
        kernel = Kernel("test/halves.cu", text=TEXT)
        return kernel().launch(grid=-(-x.numel // 64), block=64, size=x.numel)

    return halves


@pytest.fixture
def centred() -> Any:
    @pyops.op(out=("codes", "mean", "largest"), ulps=0)
    def centred(codes: Tensor, x: Tensor, mean: Tensor, parts: int, largest: Tensor | None = None) -> None:
        groups = x.unflatten(-1, (parts, -1))
        mean.copy_(groups.mean(-1))
        codes.copy_((groups - mean[..., None]).flatten(-2).round())
        if largest is not None:
            largest.copy_(codes.float().abs().amax())

    @centred.result
    def result_centred(x: TensorArg, parts: int) -> tuple[Result, Result]:
        return Result(x.shape, dtypes.int8), Result((*x.shape[:-1], parts), x.dtype)

    @centred.plan
    def plan_centred(codes: TensorArg, x: TensorArg, mean: TensorArg, parts: int) -> list[Launch]:
        check.dtype(x, dtypes.float32)
        if parts < 1 or check.row_size(x) % parts:
            raise check.refuse(x, "parts", f"expected a divisor of {x.shape[-1]}, got {parts}")
        check.same_shape(codes, x)
        check.sizes(mean, rows=x.shape[0], parts=parts)
        return []

    return centred


@pytest.mark.parametrize("mode", ["reference", "kernels"])
def test_new_outputs_and_given_ones(halves: Any, mode: str) -> None:
    from pyops._core import config

    x = torch.randn(3, 50)
    with config.cpu(mode):
        doubled, half = halves(x)
        assert torch.equal(doubled, x * 2)
        assert half.dtype == torch.float16
        assert torch.equal(half, (x / 2).half())
        given = torch.empty(3, 50)
        results = halves(x, doubled=given)
        assert results[0] is given
        assert torch.equal(given, x * 2)
        array = numpy.arange(6, dtype=numpy.float32)
        doubled, half = halves(array)
        assert isinstance(doubled, numpy.ndarray)
        assert (doubled == array * 2).all()
        assert half.dtype == numpy.float16


def test_signature_and_schemas(halves: Any) -> None:
    import inspect

    halves(torch.ones(2))
    assert str(inspect.signature(halves)) == (
        "(x: 'Tensor', times: 'int' = 1, *, doubled: 'Tensor | None' = None, half: 'Tensor | None' = None)"
        " -> 'tuple[Tensor, Tensor]'"
    )
    packet = torch.ops.pyops.halves
    assert str(packet.default._schema) == "pyops::halves(Tensor x, SymInt times=1) -> (Tensor, Tensor)"
    assert str(packet.out._schema) == (
        "pyops::halves.out(Tensor x, SymInt times=1, *, Tensor(a2!) doubled, Tensor(a3!) half) -> ()"
    )


def test_fakes_and_compile(halves: Any) -> None:
    x = torch.randn(7, 5)
    halves(x)
    with FakeTensorMode() as mode:
        for function in (halves, torch.ops.pyops.halves):
            doubled, half = function(mode.from_tensor(x))
            assert (doubled.shape, half.dtype) == (x.shape, torch.float16)
    compiled = torch.compile(lambda x: halves(x), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (7, 9):
        x = torch.randn(rows, 5)
        doubled, half = compiled(x)
        assert torch.equal(doubled, x * 2)
        assert torch.equal(half, (x / 2).half())
    torch.library.opcheck(torch.ops.pyops.halves.default, (x,))


def test_size_argument_stays_symbolic(halves: Any) -> None:
    """A compiler that passes a symbol gets one graph: specialising would be wrong where guards are left out."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(lambda x: halves(x, x.shape[0])[0], fullgraph=True, backend="aot_eager")
        for rows in (7, 9):
            x = torch.randn(rows, 5)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(compiled(x), x * 2)


def test_new_outputs_of_an_op_that_is_given_them_by_position(centred: Any) -> None:
    x = torch.randn(3, 8) * 9
    right_codes, right_mean = torch.empty(3, 8, dtype=torch.int8), torch.empty(3, 2)
    assert centred(right_codes, x, right_mean, 2) is None
    codes, mean = centred.new(x, 2)
    assert (codes.dtype, codes.device) == (torch.int8, x.device)
    assert torch.equal(codes, right_codes)
    assert torch.equal(mean, right_mean)
    largest = torch.empty(())
    codes, mean = centred.new(x, 2, largest)  # an optional argument stays an argument
    assert largest == right_codes.abs().max()
    codes, mean = centred.new(x.numpy(), 2)
    assert isinstance(codes, numpy.ndarray)
    assert (codes == right_codes.numpy()).all()
    assert (mean == right_mean.numpy()).all()


def test_form_of_an_op_that_is_given_outputs_by_position(centred: Any) -> None:
    import inspect
    import pickle

    centred.new(torch.ones(1, 2), 1)
    assert str(inspect.signature(centred.new)) == (
        "(x: 'Tensor', parts: 'int', largest: 'Tensor | None' = None) -> 'tuple[Tensor, Tensor]'"
    )
    assert str(torch.ops.pyops.centred.new._schema) == (
        "pyops::centred.new(Tensor x, SymInt parts, Tensor(a2!)? largest=None) -> (Tensor, Tensor)"
    )
    assert str(torch.ops.pyops.centred.default._schema).startswith("pyops::centred(Tensor(a0!) codes, Tensor x, ")
    assert pyops.permute_cols.new is pyops.permute_cols
    new = pyops.scaled_fp4_quant.new
    assert new.__name__ == "new"
    assert pickle.loads(pickle.dumps(new)) is new


@pytest.fixture
def cast() -> Any:
    @pyops.op(out="out", partial="seen", ulps=0)
    def cast(out: Tensor, x: Tensor, seen: Tensor, first: int = 0) -> None:
        """`x` in another element type.

        Args:
            out: [...], written; rows of one stride. May be `x`.
            x: [...], float32.
            seen: [rows] int32, contiguous, written from `first` on: ones.
            first: a row.
        """
        out.copy_(x)
        seen[first:] = 1

    @cast.result
    def result_cast(x: TensorArg, *, rows: int, dtype: torch.dtype | None = None) -> tuple[Result, Result]:
        """
        Args:
            rows: of `seen`.
            dtype: of `out`; None for float16.
        """
        kind = check.chosen(x, "dtype", dtype, dtypes.float16)
        return Result(x.shape, kind, column_stride=8), Result((rows,), dtypes.int32)

    @cast.plan
    def plan_cast(out: TensorArg, x: TensorArg, seen: TensorArg) -> list[Launch]:
        check.same_shape(out, x)
        check.sizes(seen, rows=None)
        return []

    return cast


@pytest.fixture
def new_memory_is_filled() -> Iterator[None]:
    """torch fills what it allocates with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_filled")
def test_parameters_of_the_form_alone(cast: Any) -> None:
    """Keyword-only parameters of the result function; columns may be contiguous; partial outputs begin as zeros."""
    import inspect

    x = torch.arange(6.0).view(2, 3)
    assert str(inspect.signature(cast.new)) == (
        "(x: 'Tensor', first: 'int' = 0, *, rows: 'int', dtype: 'torch.dtype | None' = None) -> 'tuple[Tensor, Tensor]'"
    )
    for library in (torch.Tensor.clone, torch.Tensor.numpy):
        out, seen = cast.new(library(x), 3, rows=5)
        assert str(out.dtype).removeprefix("torch.") == "float16"
        assert out.tolist() == x.tolist()
        assert seen.tolist() == [0, 0, 0, 1, 1]
    out, _ = cast.new(x, rows=1, dtype=torch.float32)
    assert (out.dtype, out.stride()) == (torch.float32, (1, 8))
    with pytest.raises(pyops.OpError, match=r"^cast: dtype: dtype torch.complex64 is not supported"):
        cast.new(x, rows=1, dtype=torch.complex64)
    compiled = torch.compile(lambda x: cast.new(x, 1, rows=x.shape[0]), fullgraph=True, backend="aot_eager")
    assert [one.tolist() for one in compiled(x)] == [x.tolist(), [0, 1]]
    assert compiled(x)[0].stride() == (1, 8)


def test_docstring_of_the_form(cast: Any) -> None:
    assert cast.new.__doc__ == (
        "`x` in another element type.\n\n"
        "Args:\n    x: [...], float32.\n    first: a row.\n    rows: of `seen`.\n"
        "    dtype: of `out`; None for float16.\n\n"
        "Returns:\n    out: [...].\n"
        "    seen: [rows] int32, written from `first` on: ones. Zeros where the op leaves it as it is."
    )


def test_outputs_that_may_be_inputs_are_like_them() -> None:
    """Without a result function."""
    x = torch.randn(3, 8)
    assert torch.equal(pyops.rms_norm.new(x, None, 1e-6), pyops.gemma_rms_norm.new(x, torch.zeros(8), 1e-6))


def test_an_op_without_the_form_says_why() -> None:
    with pytest.raises(
        pyops.OpError, match=r"^fused_add_rms_norm: new: there is no such form: the op writes input and residual in pl"
    ):
        pyops.fused_add_rms_norm.new(torch.ones(1, 8), torch.ones(1, 8), None, 1e-6)

    @pyops.op(out=("a", "b", "c"))
    def unknown(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> None: ...

    with pytest.raises(
        pyops.OpError, match=r"^unknown: new: there .*: what a, b and c would be does not follow from the other arg"
    ):
        unknown.new(torch.ones(1))


def test_compiled_form(centred: Any) -> None:
    def call(x: Tensor, largest: Tensor | None = None) -> list[Tensor]:
        return [*centred.new(x, 4, largest), *centred.new(x, parts=2)]

    torch.library.opcheck(torch.ops.pyops.centred.new, (torch.randn(3, 8), 2, torch.empty(())))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (7, 9):
        x = torch.randn(rows, 8) * 9
        assert all(map(torch.equal, compiled(x), call(x)))
        largest, right = torch.empty(()), torch.empty(())
        assert all(map(torch.equal, compiled(x, largest), call(x, right)))
        assert largest == right


def test_compiled_call_with_some_outputs_given(halves: Any) -> None:
    x, given, right = torch.randn(3, 8), torch.empty(3, 8), torch.empty(3, 8)
    compiled = torch.compile(lambda x, given: halves(x, doubled=given)[1], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, given), halves(x, doubled=right)[1])
    assert torch.equal(given, right)
    assert torch.equal(given, x * 2)


def test_call_is_checked_before_anything_is_allocated() -> None:
    """The plan sees descriptors of the outputs; this size could not be allocated on any machine."""

    @pyops.op(returns="out", ulps=0)
    def repeated(x: Tensor, times: int, *, out: Tensor) -> None:
        out.copy_(x.repeat(times))

    @repeated.result
    def result_repeated(x: TensorArg, times: int) -> Result:
        return Result((x.numel * times,), x.dtype)

    @repeated.plan
    def plan_repeated(x: TensorArg, times: int, out: TensorArg) -> list[Launch]:
        check.dtype(x, dtypes.float32)
        if times > 3:
            raise check.refuse(x, "times", f"expected at most 3, got {times}")
        check.shape(out, x.dtype, size=x.numel * times)
        return []

    for x in (torch.ones(4), numpy.ones(4, numpy.float32)):
        for _ in range(2):
            assert repeated(x, 2).shape == (8,)
            with pytest.raises(pyops.OpError, match=r"^repeated: times: expected at most 3, got 1152921504606846976$"):
                repeated(x, 2**60)
        with pytest.raises(pyops.OpError, match=r"^repeated: times: expected int, got str$"):
            repeated(x, "2")
        with pytest.raises(pyops.OpError, match=r"^repeated: times: expected int, got list$"):
            repeated(x, [2])
    with pytest.raises(pyops.OpError, match=r"^repeated: x: expected dtype float32, got int8$"):
        repeated(torch.ones(4, dtype=torch.int8), 2)
    with pytest.raises(
        pyops.OpError, match=r"^repeated: x: dtype torch.complex64 is not supported: expected float32, "
    ):
        repeated(torch.ones(4, dtype=torch.complex64), 2)
    with pytest.raises(pyops.OpError, match=r"^repeated: x: expected a tensor, got None$"):
        repeated(None, 2)
    weights = torch.zeros(144, dtype=torch.uint8)
    with pytest.raises(pyops.OpError, match=r"^ggml_dequantize: W: expected 4503599627370496 blocks of 144 bytes"):
        pyops.ggml_dequantize(weights, 12, 2**40, 2**20)
    for x in (torch.ones(4), numpy.ones(4, numpy.float32)):
        assert repeated(x, 2).shape == (8,), "what was refused has left nothing behind"
        times = torch.tensor(2)
        assert repeated(x, times).shape == (8,)
        assert repeated(x, times.add_(1)).shape == (12,), "the size follows from the number that the tensor holds now"


def test_sizes_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shapes, dtypes and scalars: for equal ones the result function runs once."""
    op, asked = pyops.registry["static_scaled_int8_quant"], []
    results = op.results
    monkeypatch.setattr(op, "results", lambda *args: asked.append(args) or results(*args))
    scale, azp = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    x = torch.randn(17, 23)
    for _ in range(3):
        assert op.form is not None
        for arguments in ((x, scale, None), (x, scale, azp), (x.half(), scale, azp), (x[:5], scale, azp)):
            codes = op.form.new(*arguments)
            assert (codes.shape, codes.dtype) == (arguments[0].shape, torch.int8)
    assert len(asked) == 4


def test_mistakes_are_named(halves: Any) -> None:
    with pytest.raises(pyops.OpError, match=r"^halves: x: expected a torch tensor or a cupy array, got list$"):
        halves([1.0])
    with pytest.raises(pyops.OpError, match=r"^halves: doubled: expected shape \(4,\) like x, got \(3,\)$"):
        halves(torch.ones(4), doubled=torch.empty(3))


def test_returned_outputs_stand_last() -> None:
    def returned_first(*, out: Tensor, x: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"returned_first: \['out'\] are returned: expected them last"):
        pyops.op(returns="out")(returned_first)

    def returned_by_position(x: Tensor, out: Tensor) -> None: ...

    with pytest.raises(TypeError, match="returned_by_position: out is returned: expected it behind a"):
        pyops.op(returns="out")(returned_by_position)

    def several(x: Tensor, *, a: Tensor, b: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"several: \['a', 'b'\] are returned: expected one, beside inout tensors"):
        pyops.op(returns=("a", "b"), inout="x")(several)


def test_tensors_that_require_grad_are_refused(halves: Any) -> None:
    x = torch.randn(2, 8, requires_grad=True)
    calls = (halves, lambda x: torch.ops.pyops.halves(x), lambda x: halves(x.to("meta")))
    for call in calls:
        with pytest.raises(pyops.OpError, match=r"halves: x: requires grad, .* torch.no_grad\(\)"):
            call(x)
        with torch.no_grad():
            call(x)


def test_tensors_without_data_are_checked() -> None:
    x, perm = torch.empty(4, 64, device="meta"), torch.arange(64, dtype=torch.int32, device="meta")
    assert pyops.permute_cols(x, perm).shape == torch.ops.pyops.permute_cols(x, perm).shape == (4, 64)
    for call in (pyops.permute_cols, torch.ops.pyops.permute_cols):
        with pytest.raises(pyops.OpError, match=r"^permute_cols: perm: expected shape \(hidden_size=64,\), got \(5,\)"):
            call(x, perm[:5])
        with pytest.raises(pyops.OpError, match=r"^permute_cols: out: expected shape"):
            call(x, perm, out=x[:2])
