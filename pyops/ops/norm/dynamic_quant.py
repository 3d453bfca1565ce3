"""Root-mean-square norms with int8 or fp8 results, and dynamic scales that the same kernel computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import E4M3, float32, int8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8, geometry
from .._shared.geometry import RowTuning, RowVectors
from .._shared.norms import rms
from ._common import example_weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
]

_rms_norm_dynamic_quant = Kernel("norm/rms_norm_dynamic_quant.cu")

_PER_TOKEN = RowTuning(many=(4, 7), few=(2, 8), tight=True)
_PER_BLOCK = RowTuning(many=(4, 7), resident=(896, 896))
_WITH_RESIDUAL = RowTuning(many=(3, 4), resident=(896, 896), rows=2, tight=True)


@op(out=("result", "scale"), inout="residual")
def rms_norm_dynamic_per_token_quant(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """RMS norm of `input` (plus `residual`), written as int8 or fp8 with one scale per row, computed from the row.

    ``z = input + residual`` in float32, ``residual = T(z)``, ``y = T(T(z / sqrt(mean(z^2) + epsilon)) * weight)``,
    ``scale = max(min(max|y|, scale_ub) / largest, smallest)``, ``result = quantized(y / scale)``. largest is 448 for
    float8_e4m3fn, 224 for float8_e4m3fnuz, 127 for int8; smallest 1 / (512 * largest), for int8 2^-23. int8 multiplies
    by the reciprocal of the scale. NaN is ignored by the maximum and becomes the largest fp8 value or int8 0.

    Args:
        result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8, written; constant row stride.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        weight: [hidden_size] of the same dtype.
        scale: one float32 per row, contiguous, written; ``result * scale`` dequantizes.
        epsilon: added to the mean of squares.
        scale_ub: one float32 that bounds max|y|; only with fp8.
        residual: the shape and dtype of `input`, read and written; constant row stride; or None.
    """
    z = input.float() if residual is None else input.float() + residual.float()
    y = rms(z, weight, epsilon, input.dtype).float()
    quantized, scales = fp8.dynamic_codes(y, fp8.absmax(y), scale_ub, result.dtype)
    if residual is not None:
        residual.copy_(z)
    result.copy_(quantized)
    scale.copy_(scales.reshape(scale.shape))


@rms_norm_dynamic_per_token_quant.result
def result_rms_norm_dynamic_per_token_quant(
    input: TensorArg, *, quant_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

    Returns:
        scale: [num_tokens, 1] float32; a code times the scale is its value.
    """
    quants = Result(input.shape, fp8.chosen(input, quant_dtype))
    return quants, Result((check.num_rows(input), 1), float32)


@rms_norm_dynamic_per_token_quant.plan
def plan_rms_norm_dynamic_per_token_quant(
    result: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    scale: TensorArg,
    scale_ub: TensorArg | None,
    residual: TensorArg | None,
) -> Launch:
    check.per_row(scale, float32, check.num_rows(input))
    return _dynamic_quant_plan(result, input, weight, scale_ub, residual)


def _dynamic_quant_plan(
    result: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    scale_ub: TensorArg | None,
    residual: TensorArg | None,
    group_size: int | None = None,
    group_major: bool = False,
    scale_stride: int = 1,
) -> Launch:
    """The plan of both ops: one scale for each row, or for each group of `group_size` elements.

    `scale_stride` is the distance between the scales of two rows, or of two groups if `group_major`.
    """
    check.floating(input)
    check.dtype(result, *E4M3, int8)
    check.same_shape(result, input)
    check.like(residual, input)
    rows = [arg for arg in (result, input, residual) if arg]
    for arg in rows:
        check.row_size(arg)
    hidden_size = input.shape[-1]
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    check.scalar(scale_ub)
    if scale_ub is not None and result.dtype is int8:
        raise scale_ub.error("is only taken with a result of fp8, got int8")
    num_rows, strides = check.num_rows(input), [check.row_stride(arg) for arg in rows]
    vectors = geometry.row_vectors(hidden_size, () if group_size else strides, *rows, weight)
    access_size = vectors.vec_size
    # The lanes of one warp share a group, so vectors must have 16 bytes; unaligned memory takes several accesses per
    # vector, and these take registers.
    if group_size:
        vectors = RowVectors(16 // input.dtype.itemsize)
    bound_registers = access_size == vectors.vec_size and fp8.converts_to(result)
    config = geometry.choose_rows(
        input,
        num_rows,
        vectors,
        _WITH_RESIDUAL if residual else _PER_BLOCK if group_size else _PER_TOKEN,
        lanes=group_size // vectors.vec_size if group_size else 1,
        bound_registers=bound_registers,
    )
    return _rms_norm_dynamic_quant(
        scalar_t=input.dtype,
        code_t=result.dtype,
        HIDDEN_SIZE=hidden_size,
        ACCESS_SIZE=access_size,
        **config.constants,
        GROUP_SIZE=group_size or hidden_size or 1,
        HAS_RESIDUAL=residual is not None,
        HAS_BOUND=scale_ub is not None,
        GROUP_MAJOR=group_major,
    ).launch(
        grid=config.num_blocks(num_rows) if hidden_size else 0,
        block=config.num_threads,
        num_rows=num_rows,
        result_stride=strides[0],
        input_stride=strides[1],
        residual_stride=strides[2] if residual else 0,
        scale_stride=scale_stride,
    )


@rms_norm_dynamic_per_token_quant.example
def example_rms_norm_dynamic_per_token_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz", "int8"] = "float8_e4m3fn",
    with_residual: bool = False,
    with_bound: bool = False,
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    return (
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        x,
        example_weight(make, hidden_size, dtype),
        make.empty(num_tokens, 1, dtype="float32"),
        1e-6,
        make.full(1, value=2.0, dtype="float32") if with_bound and quant_dtype != "int8" else None,
        make.randn(num_tokens, hidden_size, dtype=dtype) if with_residual else None,
    )


@op(out=("result", "scale"), inout="residual")
def rms_norm_per_block_quant(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    is_scale_transposed: bool,
) -> None:
    """RMS norm of `input` (plus `residual`), written as int8 or fp8 with one scale per group of adjacent elements.

    As `rms_norm_dynamic_per_token_quant`, with the maximum taken over each group.

    Args:
        result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8, written; constant row stride.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride; hidden_size a multiple of
            group_size.
        weight: [hidden_size] of the same dtype.
        scale: [num_tokens, hidden_size / group_size] float32, written; constant row stride, or with
            `is_scale_transposed` constant column stride, or [hidden_size / group_size, num_tokens], contiguous.
        epsilon: added to the mean of squares.
        scale_ub: one float32 that bounds max|y| of every group; only with fp8.
        residual: the shape and dtype of `input`, read and written; constant row stride; or None.
        group_size: 64 or 128.
        is_scale_transposed: whether the scales of one group of columns are contiguous, instead of those of one row.
    """
    z = input.float() if residual is None else input.float() + residual.float()
    y = rms(z, weight, epsilon, input.dtype).float().unflatten(-1, (-1, group_size))
    quantized, scales = fp8.dynamic_codes(y, fp8.absmax(y), scale_ub, result.dtype)
    if residual is not None:
        residual.copy_(z)
    result.copy_(quantized.flatten(-2))
    scales = scales.reshape(-1, y.shape[-2])
    has_group_rows = is_scale_transposed and fp8.has_group_rows(scale.shape, scale.stride(), *scales.shape)
    scale.copy_(scales.t() if has_group_rows else scales.reshape(scale.shape))


@rms_norm_per_block_quant.result
def result_rms_norm_per_block_quant(
    input: TensorArg, group_size: int, is_scale_transposed: bool, *, quant_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

    Returns:
        scale: [num_tokens, hidden_size / group_size] float32; with `is_scale_transposed` columns are contiguous.
    """
    quants = Result(input.shape, fp8.chosen(input, quant_dtype))
    return quants, fp8.group_scales(input, check.row_size(input), group_size, is_scale_transposed)


@rms_norm_per_block_quant.plan
def plan_rms_norm_per_block_quant(
    result: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    scale: TensorArg,
    scale_ub: TensorArg | None,
    residual: TensorArg | None,
    group_size: int,
    is_scale_transposed: bool,
) -> Launch:
    if group_size not in (64, 128):
        raise check.refuse(input, "group_size", f"expected 64 or 128, got {group_size}")
    hidden_size = check.row_size(input)
    if hidden_size % group_size:
        raise input.error(f"expected a last dimension that is a multiple of group_size={group_size}, got {hidden_size}")
    num_rows, groups = check.num_rows(input), hidden_size // group_size
    check.dtype(scale, float32)
    if is_scale_transposed and fp8.has_group_rows(scale.shape, scale.strides, num_rows, groups):
        scale = replace(scale, shape=(num_rows, groups), strides=(scale.strides[1], scale.strides[0]))
    if scale.shape[-1:] != (groups,) or check.num_rows(scale) != num_rows:
        raise scale.error(f"expected shape (num_tokens={num_rows}, groups={groups}), got {scale.shape}")
    row_stride, group_stride = check.row_stride(scale), scale.strides[-1]
    unit_stride, size = (row_stride, num_rows) if is_scale_transposed else (group_stride, groups)
    if unit_stride != 1 and size > 1 and scale.numel:
        dimension = "tokens" if is_scale_transposed else "groups"
        raise scale.error(
            f"expected {dimension} of stride 1 with is_scale_transposed={is_scale_transposed}, "
            f"got strides {(row_stride, group_stride)}"
        )
    group_major = bool(is_scale_transposed) and groups > 1
    scale_stride = group_stride if group_major else row_stride
    return _dynamic_quant_plan(result, input, weight, scale_ub, residual, group_size, group_major, scale_stride)


@rms_norm_per_block_quant.example
def example_rms_norm_per_block_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 14336, 128, 768] = 4096,
    dtype: str = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz", "int8"] = "float8_e4m3fn",
    group_size: Literal[128, 64] = 128,
    with_residual: bool = False,
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    return (
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        x,
        example_weight(make, hidden_size, dtype),
        make.empty(num_tokens, hidden_size // group_size, dtype="float32"),
        1e-6,
        None,
        make.randn(num_tokens, hidden_size, dtype=dtype) if with_residual else None,
        group_size,
        False,
    )
