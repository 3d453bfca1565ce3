"""Root-mean-square norms, with a residual or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float16, float32
from ..._core.tensors.tensor import TensorArg
from .._shared import geometry
from .._shared.geometry import RowTuning
from .._shared.norms import rms
from ._common import example_weight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "fused_add_rms_norm",
    "gemma_rms_norm",
    "rms_norm",
]

_rms_norm = Kernel("norm/rms_norm.cu")
_fused_add_rms_norm = Kernel("norm/fused_add_rms_norm.cu")
_gemma_rms_norm = Kernel("norm/gemma_rms_norm.cu")

RMS_NORM = RowTuning(many=(4, 6))
FUSED_ADD_RMS_NORM = RowTuning(many=(3, 6), resident=(1152, 896), rows=2)
_GEMMA_RMS_NORM = RowTuning(many=(2, 4))
_GEMMA_ADD_RMS_NORM = RowTuning(many=(3, 4), resident=(896, 896), rows=2)
_NO_DIMENSION = (1, (0, 0))  # size and strides of a missing leading dimension


# Two ulps: with another order of summation T(x * scale) may round to the adjacent value, and the multiplication by the
# weight can double this difference of one ulp.
@op(out="out", in_place={"out": "input"}, ulps=2)
def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Scale each row of `input` to unit root mean square, then by `weight`.

    ``out = T(T(input / sqrt(mean(input^2) + epsilon)) * weight)``, the mean in float32 over the last dimension
    (Zhang and Sennrich 2019, arXiv:1910.07467).

    If the sum of squares of a row overflows float32, its mean is infinite: finite elements become 0, infinite ones NaN.
    Squares below 2^-126 may count as 0. This holds for every RMS norm here.

    Args:
        out: [..., hidden_size], written; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; up to three leading dimensions of any strides.
        weight: [hidden_size] of the same dtype, or None for ones.
        epsilon: added to the mean of squares.
    """
    out.copy_(rms(input.float(), weight, epsilon, input.dtype))


@rms_norm.plan
def plan_rms_norm(out: TensorArg, input: TensorArg, weight: TensorArg | None) -> Launch:
    check.floating(input)
    check.like(out, input)
    hidden_size = check.row_size(input)
    check.row_size(out)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    leading = check.leading(input, out, max_dims=3)
    num_rows = check.num_rows(input)
    vectors = geometry.row_vectors(hidden_size, leading[0][1] if len(leading) == 1 else (), out, input, weight)
    config = geometry.choose_rows(input, num_rows, vectors, RMS_NORM)
    (_, (input_stride0, out_stride0)), *inner = leading
    (size1, strides1), (size2, strides2) = (*inner, _NO_DIMENSION, _NO_DIMENSION)[:2]
    return _rms_norm(
        scalar_t=input.dtype,
        HIDDEN_SIZE=hidden_size,
        **config.constants,
        LEADING=len(leading),
        HAS_WEIGHT=weight is not None,
    ).launch(
        grid=config.num_blocks(num_rows) if hidden_size else 0,
        block=config.num_threads,
        num_rows=num_rows,
        size1=size1,
        size2=size2,
        out_stride0=out_stride0,
        out_stride1=strides1[1],
        out_stride2=strides2[1],
        input_stride0=input_stride0,
        input_stride1=strides1[0],
        input_stride2=strides2[0],
    )


@rms_norm.example
def example_rms_norm(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    return make.empty(num_tokens, hidden_size, dtype=dtype), x, example_weight(make, hidden_size, dtype), 1e-6


@op(inout=("input", "residual"), ulps=2)
def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Add `residual` to `input`, keep the sum in `residual` and its RMS norm in `input`.

    ``residual = T(input + residual); input = T(T(residual / sqrt(mean(residual^2) + epsilon)) * weight)``. The norm is
    computed from the rounded sum.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16, read and written; constant row stride.
        residual: the same shape and dtype, read and written; constant row stride.
        weight: [hidden_size] of the same dtype, or None for ones.
        epsilon: added to the mean of squares.
    """
    residual.copy_(input.float() + residual.float())
    input.copy_(rms(residual.float(), weight, epsilon, input.dtype))


@fused_add_rms_norm.plan
def plan_fused_add_rms_norm(input: TensorArg, residual: TensorArg, weight: TensorArg | None) -> Launch:
    check.floating(input)
    hidden_size = check.row_size(input)
    check.like(residual, input)
    check.row_size(residual)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    num_rows = check.num_rows(input)
    strides = check.row_stride(input), check.row_stride(residual)
    vectors = geometry.row_vectors(hidden_size, strides, input, residual, weight)
    config = geometry.choose_rows(input, num_rows, vectors, FUSED_ADD_RMS_NORM)
    return _fused_add_rms_norm(
        scalar_t=input.dtype,
        HIDDEN_SIZE=hidden_size,
        **config.constants,
        HAS_WEIGHT=weight is not None,
    ).launch(
        grid=config.num_blocks(num_rows) if hidden_size else 0,
        block=config.num_threads,
        num_rows=num_rows,
        input_stride=strides[0],
        residual_stride=strides[1],
    )


@fused_add_rms_norm.example
def example_fused_add_rms_norm(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    residual = make.randn(num_tokens, hidden_size, dtype=dtype)
    return x, residual, example_weight(make, hidden_size, dtype), 1e-6


@op(out=("out", "residual_out"), in_place={"out": "input"})
def gemma_rms_norm(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> None:
    """RMS norm with the weight ``1 + weight``, rounded once (the norm of the Gemma models).

    ``z = input`` or ``residual_out = input + residual``; ``out = T(z / sqrt(mean(z^2) + epsilon) * (1 + weight))``.
    The sum is rounded to the dtype of `residual_out`.

    Args:
        out: [..., hidden_size], written; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        weight: [hidden_size] of the same dtype, zero for no scaling.
        epsilon: added to the mean of squares.
        residual: the shape of `input`, of its dtype or float32; or None.
        residual_out: the shape of `input`, written, given with `residual`; float32 if `input` is float16 or `residual`
            is float32, else the dtype of `input`.
    """
    z = input
    if residual is not None and residual_out is not None:
        z = (input.float() + residual.float()).to(residual_out.dtype)
        residual_out.copy_(z)
    x = z.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    out.copy_(x * (1.0 + weight.float()))


@gemma_rms_norm.plan
def plan_gemma_rms_norm(
    out: TensorArg, input: TensorArg, weight: TensorArg, residual: TensorArg | None, residual_out: TensorArg | None
) -> Launch:
    check.floating(input)
    check.like(out, input)
    hidden_size = check.row_size(input)
    check.row_size(out)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    rows = [out, input]
    sum_dtype = input.dtype
    if residual is not None:
        if residual_out is None:
            raise residual.error("is given without residual_out")
        check.same_shape(residual, input)
        check.dtype(residual, input.dtype, float32)
        if input.dtype is float16 or residual.dtype is float32:
            sum_dtype = float32
        check.same_shape(residual_out, input)
        check.dtype(residual_out, sum_dtype)
        check.row_size(residual)
        check.row_size(residual_out)
        rows += [residual, residual_out]
    elif residual_out is not None:
        raise residual_out.error("is given without residual")
    num_rows = check.num_rows(input)
    strides = [check.row_stride(arg) for arg in rows]
    vectors = geometry.row_vectors(hidden_size, strides, *rows, weight)
    config = geometry.choose_rows(input, num_rows, vectors, _GEMMA_ADD_RMS_NORM if residual else _GEMMA_RMS_NORM)
    return _gemma_rms_norm(
        scalar_t=input.dtype,
        residual_t=residual.dtype if residual else sum_dtype,
        residual_out_t=sum_dtype,
        HIDDEN_SIZE=hidden_size,
        **config.constants,
        HAS_RESIDUAL=residual is not None,
    ).launch(
        grid=config.num_blocks(num_rows) if hidden_size else 0,
        block=config.num_threads,
        num_rows=num_rows,
        out_stride=strides[0],
        input_stride=strides[1],
        residual_stride=strides[2] if residual else 0,
        residual_out_stride=strides[3] if residual else 0,
    )


@gemma_rms_norm.example
def example_gemma_rms_norm(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16", with_residual: bool = False
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    sum_dtype = "float32" if dtype == "float16" else dtype
    return (
        make.empty(num_tokens, hidden_size, dtype=dtype),
        x,
        make.randn(hidden_size, dtype=dtype, scale=0.1),
        1e-6,
        make.randn(num_tokens, hidden_size, dtype=dtype) if with_residual else None,
        make.empty(num_tokens, hidden_size, dtype=sum_dtype) if with_residual else None,
    )
