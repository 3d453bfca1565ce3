"""fp8 and int8 quantization with static scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import float32, int8, int32
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from ._common import as_fp8, fp8_matrices, matrices, one_row, saturated, shifted, static

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["static_scaled_fp8_quant", "static_scaled_int8_quant"]


def write_fp8(result: Tensor, x: Tensor, scale: Tensor) -> None:
    """Quantize float32 values to fp8; `scale` broadcasts over `x`."""
    quantized = as_fp8(result)
    quantized.copy_(fp8.static_codes(x, scale, quantized.dtype).reshape(quantized.shape))


@op(out="result", ulps=0)
def static_scaled_fp8_quant(
    result: Tensor, input: Tensor, scale: Tensor, group_shape: tuple[int, int] | None = None
) -> None:
    """Quantize to fp8 with static scales, per tensor, token, channel or block: ``result = fp8(input * (1 / scale))``.

    The multiplication is by the float32 reciprocal and saturates at +-448; a NaN becomes +448. A scale may have any
    sign. With a scale without a finite reciprocal (of magnitude up to 2^-128), results are 0, with a NaN scale +448; in
    both cases infinities and NaN become +448.

    Args:
        result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride. It has num_tokens rows.
        scale: float32, any strides. One element: for all elements. [n]: one for each group of rows, or of columns, as
            `group_shape` says. [m, n]: one for each of m x n blocks of equal size.
        group_shape: (rows, columns) that share a scale, -1 for all of them: (-1, 1) per channel, (1, -1) per token.
            Required for a scale [n] of several elements; must agree with a scale [m, n]. Groups divide the rows and
            columns exactly.
    """
    x = input.float().reshape(-1, input.shape[-1])
    num_rows, hidden_size = x.shape
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.ndim == 1 and group_shape is not None:
        scale = scale.reshape((1, -1) if group_shape[0] in (-1, num_rows) else (-1, 1))
    repeats = num_rows // scale.shape[0], hidden_size // scale.shape[1]
    scale = scale.repeat_interleave(repeats[0], 0).repeat_interleave(repeats[1], 1)
    write_fp8(result, x, scale)


def _blocks(scale: TensorArg, num_rows: int, hidden_size: int, group_shape: tuple[int, int] | None) -> tuple[int, int]:
    """Check a scale of several elements; returns (groups of rows, groups of columns)."""
    given = None
    if group_shape is not None:
        given = tuple(
            full if size == -1 else size for size, full in zip(group_shape, (num_rows, hidden_size), strict=True)
        )
        if any(size < 1 or full % size for size, full in zip(given, (num_rows, hidden_size), strict=True)):
            message = f"expected -1 or divisors of {num_rows} rows and {hidden_size} columns, got {group_shape}"
            raise check.refuse(scale, "group_shape", message)
    if len(scale.shape) == 1:
        if given is None:
            raise scale.error(f"expected group_shape with a scale of shape {scale.shape}")
        blocks = num_rows // given[0], hidden_size // given[1]
        if 1 not in blocks or max(blocks) != scale.numel:
            raise scale.error(f"expected groups of rows or of columns, {blocks}, to be as many, got {scale.shape}")
        return blocks
    if len(scale.shape) != 2:
        raise scale.error(f"expected at most 2 dimensions, got shape {scale.shape}")
    blocks = scale.shape[0], scale.shape[1]
    if not all(blocks) or num_rows % blocks[0] or hidden_size % blocks[1]:
        raise scale.error(f"expected divisors of {num_rows} rows and {hidden_size} columns, got {scale.shape}")
    inferred = num_rows // blocks[0], hidden_size // blocks[1]
    if given is not None and given != inferred:
        message = f"expected {inferred} for a scale of shape {scale.shape}, got {group_shape}"
        raise check.refuse(scale, "group_shape", message)
    return blocks


@static_scaled_fp8_quant.result
def result_static_scaled_fp8_quant(input: TensorArg, *, quant_dtype: torch.dtype | None = None) -> Result:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).
    """
    return Result(input.shape, fp8.chosen(input, quant_dtype))


@static_scaled_fp8_quant.plan
def plan_static_scaled_fp8_quant(
    result: TensorArg, input: TensorArg, scale: TensorArg, group_shape: tuple[int, int] | None
) -> Launch | list[Launch]:
    hidden_size, result = fp8_matrices(result, input)
    check.dtype(scale, float32)
    if scale.numel == 1:
        return static(*one_row(result, input))
    num_rows = check.num_rows(input)
    if not input.numel:
        return []
    row_groups, column_groups = _blocks(scale, num_rows, hidden_size, group_shape)
    strides = scale.strides if len(scale.shape) == 2 else scale.strides * 2
    group_rows = num_rows // row_groups
    return static(
        result,
        input,
        group_rows=group_rows,
        group_columns=0 if column_groups == 1 else hidden_size // column_groups,
        grouped_rows=row_groups > 1 and group_rows > 1,
        strides=(strides[0] if row_groups > 1 else 0, strides[1] if column_groups > 1 else 0),
    )


@static_scaled_fp8_quant.example
def example_static_scaled_fp8_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 14336, 769] = 4096,
    dtype: str = "bfloat16",
    scales: Literal["tensor", "token", "channel"] = "tensor",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    shape, group_shape = {
        "tensor": ((1,), None),
        "token": ((num_tokens,), (1, -1)),
        "channel": ((hidden_size,), (-1, 1)),
    }[scales]
    result = make.empty(num_tokens, hidden_size, dtype=quant_dtype)
    input = make.randn(num_tokens, hidden_size, dtype=dtype)
    return result, input, make.randn(*shape, dtype="float32", scale=0.001, shift=0.02), group_shape


@op(out="result", ulps=0)
def static_scaled_int8_quant(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
    """Quantize to int8 with one static scale: ``result = int8(input / scale)``, or ``int8(input * (1 / scale)) + azp``.

    Symmetric quantization rounds the true quotient, asymmetric quantization the product with the float32 reciprocal, to
    int32 before the zero point is added. Every step saturates; NaN counts as 0. So, before `azp` is added, a scale
    of 0 gives -128, 127 and (for 0 / 0) 0, and a NaN scale gives 0. A scale may be negative.

    Args:
        result: [..., hidden_size] int8, written; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
        scale: one float32.
        azp: one int32, the zero point, which may lie outside int8; or None for 0.
    """
    x, s = input.float(), scale.reshape(())
    result.copy_(saturated((x / s).round()) if azp is None else shifted(x * (1.0 / s), azp.reshape(())))


@static_scaled_int8_quant.result
def result_static_scaled_int8_quant(input: TensorArg) -> Result:
    return Result(input.shape, int8)


@static_scaled_int8_quant.plan
def plan_static_scaled_int8_quant(
    result: TensorArg, input: TensorArg, scale: TensorArg, azp: TensorArg | None
) -> Launch:
    matrices(result, input, int8)
    check.scalar(scale)
    check.scalar(azp, int32)
    return static(*one_row(result, input), azp=azp is not None)


@static_scaled_int8_quant.example
def example_static_scaled_int8_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 14336, 769] = 4096,
    dtype: str = "bfloat16",
    with_azp: bool = False,
) -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype="int8")
    input = make.randn(num_tokens, hidden_size, dtype=dtype)
    azp = make.full(1, value=-7, dtype="int32") if with_azp else None
    return result, input, make.full(1, value=0.02, dtype="float32"), azp
