"""Root-mean-square norms with fp8 results and a static scale."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import E4M3
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8, geometry
from .._shared.norms import rms
from ._common import example_weight
from .rms import FUSED_ADD_RMS_NORM, RMS_NORM

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_static_fp8_quant",
]

_rms_norm_static_fp8_quant = Kernel("norm/rms_norm_static_fp8_quant.cu")

# A row has the same threads as in `rms_norm` and `fused_add_rms_norm`, so that row sums agree bit for bit and fp8
# results are equal (docs/performance/rows.md). With a residual the conversion takes registers, so fewer threads are
# resident.
_WITHOUT_RESIDUAL = RMS_NORM
_WITH_RESIDUAL = replace(FUSED_ADD_RMS_NORM, resident=(896, 896))


@op(out="result")
def rms_norm_static_fp8_quant(result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
    """RMS norm of `input`, written as fp8 under one given scale.

    The norm is rounded as by `rms_norm`; then ``result = fp8(norm * (1 / scale))``, saturating at +-448
    (224 for float8_e4m3fnuz); NaN becomes the largest value. `static_scaled_fp8_quant` says what happens if the
    reciprocal of the scale is not finite.

    Args:
        result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; constant row stride.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        weight: [hidden_size] of the same dtype.
        scale: one float32 on the device; ``result * scale`` dequantizes.
        epsilon: added to the mean of squares.
    """
    y = rms(input.float(), weight, epsilon, input.dtype).float()
    result.copy_(fp8.static_codes(y, scale.reshape(()), result.dtype))


@rms_norm_static_fp8_quant.plan
def plan_rms_norm_static_fp8_quant(result: TensorArg, input: TensorArg, weight: TensorArg, scale: TensorArg) -> Launch:
    return _static_fp8_plan(result, input, None, weight, scale)


def _static_fp8_plan(
    result: TensorArg, input: TensorArg, residual: TensorArg | None, weight: TensorArg, scale: TensorArg
) -> Launch:
    """The plan of both ops."""
    check.floating(input)
    hidden_size = check.row_size(input)
    check.dtype(result, *E4M3)
    check.same_shape(result, input)
    check.row_size(result)
    check.like(residual, input)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    check.scalar(scale)
    num_rows = check.num_rows(input)
    strides = [check.row_stride(arg) for arg in (result, input, residual) if arg]
    vectors = geometry.row_vectors(hidden_size, strides, result, input, weight, residual)
    tuning = _WITH_RESIDUAL if residual else _WITHOUT_RESIDUAL
    config = geometry.choose_rows(input, num_rows, vectors, tuning, bound_registers=fp8.converts_to(result))
    return _rms_norm_static_fp8_quant(
        scalar_t=input.dtype,
        code_t=result.dtype,
        HIDDEN_SIZE=hidden_size,
        **config.constants,
        HAS_RESIDUAL=residual is not None,
    ).launch(
        grid=config.num_blocks(num_rows) if hidden_size else 0,
        block=config.num_threads,
        num_rows=num_rows,
        result_stride=strides[0],
        input_stride=strides[1],
        residual_stride=strides[2] if residual else 0,
        **({} if residual else {"residual": 0}),
    )


@rms_norm_static_fp8_quant.example
def example_rms_norm_static_fp8_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype=quant_dtype)
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    return result, x, example_weight(make, hidden_size, dtype), make.full(1, value=0.02, dtype="float32"), 1e-6


@op(out="result", inout="residual")
def fused_add_rms_norm_static_fp8_quant(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    """Add `residual` to `input`, keep the sum in `residual`, and write its RMS norm as fp8 under one given scale.

    Sum and norm are those of `fused_add_rms_norm`, fp8 results those of `rms_norm_static_fp8_quant`. `input` is not
    written.

    Args:
        result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; constant row stride.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        residual: the shape and dtype of `input`, read and written; constant row stride.
        weight: [hidden_size] of the same dtype.
        scale: one float32 on the device; ``result * scale`` dequantizes.
        epsilon: added to the mean of squares.
    """
    residual.copy_(input.float() + residual.float())
    y = rms(residual.float(), weight, epsilon, input.dtype).float()
    result.copy_(fp8.static_codes(y, scale.reshape(()), result.dtype))


@rms_norm_static_fp8_quant.result
@fused_add_rms_norm_static_fp8_quant.result
def result_static_fp8(input: TensorArg, *, quant_dtype: torch.dtype | None = None) -> Result:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).
    """
    return Result(input.shape, fp8.chosen(input, quant_dtype))


@fused_add_rms_norm_static_fp8_quant.plan
def plan_fused_add_rms_norm_static_fp8_quant(
    result: TensorArg, input: TensorArg, residual: TensorArg, weight: TensorArg, scale: TensorArg
) -> Launch:
    check.row_size(residual)
    return _static_fp8_plan(result, input, residual, weight, scale)


@fused_add_rms_norm_static_fp8_quant.example
def example_fused_add_rms_norm_static_fp8_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype=quant_dtype)
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    residual = make.randn(num_tokens, hidden_size, dtype=dtype)
    return (
        result,
        x,
        residual,
        example_weight(make, hidden_size, dtype),
        make.full(1, value=0.02, dtype="float32"),
        1e-6,
    )
