"""A gated activation with quantized results, with one static scale or with group scales."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import E4M3, bfloat16, float16, float32, int8, int32
from ..._core.tensors.tensor import TensorArg
from .._shared import chunks, fp8
from ._common import check_halves, min_blocks_of_silu, result_gated
from .gated import situ

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["silu_and_mul_per_block_quant", "silu_and_mul_quant", "situ_and_mul_quant"]

_silu_and_mul_quant = Kernel("activation/silu_and_mul_quant.cu")
_situ_and_mul_quant = Kernel("activation/situ_and_mul_quant.cu")
_silu_and_mul_per_block_quant = Kernel("activation/silu_and_mul_per_block_quant.cu")
# Kernels with group scales: elements per thread, and threads per block. Blocks are small, so that a small M spreads
# over all SMs.
_VEC_SIZE, _NUM_THREADS = 8, 128
_SITU_GROUP, _SITU_BLOCKS = 128, 12  # situ_and_mul_quant.cu: elements of a group; resident blocks per SM, 40 registers


@op(out="result", ulps=0)
def silu_and_mul_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """`silu_and_mul` written as fp8: ``result = fp8(clamp(T(T(silu(g)) * u) * (1 / scale)))`` for ``input = [g, u]``.

    T rounds to the dtype of `input`, and the reciprocal is rounded to float32. The result saturates at +-448 (224 for
    float8_e4m3fnuz), and NaN becomes the largest fp8 value. `static_scaled_fp8_quant` says what happens if the
    reciprocal is not finite.

    Args:
        result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; constant row stride.
        input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride.
        scale: one float32 element, of any sign.
    """
    gate, up = input.chunk(2, dim=-1)
    product = (torch.nn.functional.silu(gate) * up).float()
    result.copy_(fp8.static_codes(product, scale.reshape(()), result.dtype))


@silu_and_mul_quant.result
def result_silu_and_mul_quant(input: TensorArg, *, quant_dtype: torch.dtype | None = None) -> Result:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).
    """
    return result_gated(input)._replace(dtype=fp8.chosen(input, quant_dtype))


@silu_and_mul_quant.plan
def plan_silu_and_mul_quant(result: TensorArg, input: TensorArg, scale: TensorArg) -> Launch:
    check.dtype(input, float16, bfloat16)
    check_halves(result, input)
    check.dtype(result, *E4M3)
    check.scalar(scale)
    return chunks.launch(
        _silu_and_mul_quant,
        result,
        input,
        "result_stride",
        min_blocks=min_blocks_of_silu(input),
        code_t=result.dtype,
    )


@silu_and_mul_quant.example
def example_silu_and_mul_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 14336,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype=quant_dtype)
    input = make.randn(num_tokens, 2 * hidden_size, dtype=dtype)
    return result, input, make.full(1, value=0.02, dtype="float32")


@op(out=("out", "scales"), ulps=0)
def silu_and_mul_per_block_quant(
    out: Tensor,
    input: Tensor,
    scales: Tensor,
    group_size: int,
    scale_ub: Tensor | None = None,
    is_scale_transposed: bool = False,
) -> None:
    """`silu_and_mul` written as int8 or fp8, with one dynamic scale per group of adjacent elements.

    ``y = T(T(silu(g)) * u)`` for ``input = [g, u]``, where T rounds to the dtype of `input`. Each group has the scale
    ``s = max(min(max|y| / largest, scale_ub), smallest)``, and ``out = quantized(y / s)``; for int8, y is multiplied by
    the float32 reciprocal of s. ``largest`` is 448 for float8_e4m3fn, 224 for float8_e4m3fnuz and 127 for int8.
    ``smallest`` is 1 / (512 * largest), and 2^-23 for int8. The maximum ignores NaN; in `out`, NaN becomes the largest
    fp8 value, or 0 for int8. The op equals `silu_and_mul` followed by this quantization, bit for bit.

    Args:
        out: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8, written; constant row stride.
        input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride; hidden_size a multiple of group_size.
        scales: [num_tokens, hidden_size / group_size] float32, written; any strides. num_tokens is the product of the
            leading dimensions of `out`.
        group_size: 64 or 128.
        scale_ub: one float32, an upper bound of every scale; only with fp8.
        is_scale_transposed: `scales` may then also be [hidden_size / group_size, num_tokens], contiguous.
    """
    gate, up = input.chunk(2, dim=-1)
    y = (torch.nn.functional.silu(gate) * up).float().unflatten(-1, (-1, group_size))
    absmax = fp8.absmax(y)
    if scale_ub is not None:
        # `fp8.dynamic_codes` takes a bound on absmax. Here the bound applies to the scale, after the division.
        largest = torch.full_like(absmax, fp8.largest_code(out.dtype))
        scale = torch.fmin(absmax / largest, scale_ub.reshape(())).fmax(1.0 / (largest * 512.0))
        quantized = fp8.saturate(y / scale, out.dtype)
    else:
        quantized, scale = fp8.dynamic_codes(y, absmax, None, out.dtype)
    out.copy_(quantized.flatten(-2))
    scale = scale.reshape(-1, y.shape[-2])
    has_group_rows = is_scale_transposed and fp8.has_group_rows(scales.shape, scales.stride(), *scale.shape)
    (scales.t() if has_group_rows else scales).copy_(scale)


@silu_and_mul_per_block_quant.result
def result_silu_and_mul_per_block_quant(
    input: TensorArg, group_size: int, is_scale_transposed: bool, *, quant_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

    Returns:
        scales: [num_tokens, hidden_size / group_size] float32; with `is_scale_transposed` columns are contiguous.
    """
    quants = result_gated(input)._replace(dtype=fp8.chosen(input, quant_dtype))
    return quants, fp8.group_scales(input, quants.shape[-1], group_size, is_scale_transposed)


@silu_and_mul_per_block_quant.plan
def plan_silu_and_mul_per_block_quant(
    out: TensorArg,
    input: TensorArg,
    scales: TensorArg,
    group_size: int,
    scale_ub: TensorArg | None,
    is_scale_transposed: bool,
) -> Launch:
    check.dtype(input, float16, bfloat16)
    check_halves(out, input)
    check.dtype(out, *E4M3, int8)
    if group_size not in (64, 128):
        raise check.refuse(input, "group_size", f"expected 64 or 128, got {group_size}")
    hidden_size, num_rows = out.shape[-1], check.num_rows(out)
    if hidden_size % group_size:
        raise out.error(f"expected a last dimension that is a multiple of group_size={group_size}, got {hidden_size}")
    check.dtype(scales, float32)
    groups = hidden_size // group_size
    if is_scale_transposed and fp8.has_group_rows(scales.shape, scales.strides, num_rows, groups):
        scales = replace(scales, shape=(num_rows, groups), strides=(scales.strides[1], scales.strides[0]))
    check.sizes(scales, num_tokens=num_rows, groups=groups)
    check.scalar(scale_ub)
    if scale_ub is not None and out.dtype is int8:
        raise scale_ub.error("is only taken with an output of fp8, got int8")
    return _silu_and_mul_per_block_quant(
        scalar_t=input.dtype,
        code_t=out.dtype,
        HIDDEN_SIZE=hidden_size or group_size,  # never 0: the kernel divides by it, and must compile for empty rows
        GROUP_SIZE=group_size,
        ACCESS_SIZE=check.vector_width(_VEC_SIZE, out, input),
        HAS_BOUND=scale_ub is not None,
        NUM_THREADS=_NUM_THREADS,
        MIN_BLOCKS=2 * min_blocks_of_silu(input),  # which counts blocks of 256 threads; these have 128
    ).launch(
        grid=-(-num_rows * hidden_size // (_VEC_SIZE * _NUM_THREADS)),
        block=_NUM_THREADS,
        num_rows=num_rows,
        out_stride=check.row_stride(out),
        input_stride=check.row_stride(input),
        scale_stride=scales.strides[0],
        scale_group_stride=scales.strides[1],
    )


@silu_and_mul_per_block_quant.example
def example_silu_and_mul_per_block_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 768] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz", "int8"] = "float8_e4m3fn",
    group_size: Literal[128, 64] = 128,
    with_bound: bool = False,
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        make.randn(num_tokens, 2 * hidden_size, dtype=dtype),
        make.empty(num_tokens, hidden_size // group_size, dtype="float32"),
        group_size,
        make.full(1, value=0.002, dtype="float32") if with_bound and quant_dtype != "int8" else None,
        False,
    )


@op(out="scale", partial="out")
def situ_and_mul_quant(
    out: Tensor,
    scale: Tensor,
    input: Tensor,
    beta: float = 1.0,
    linear_beta: float = -1.0,
    group_size: int = 0,
    num_valid_tokens: Tensor | None = None,
    topk: int = 1,
) -> None:
    """`situ_and_mul` of the first rows, written as fp8 with one dynamic scale per group of 128 adjacent elements.

    ``y = T(situ(g, u))``, where T rounds to the dtype of `input`. Each group has the scale ``s = max(max|y|, 1e-30) *
    (1 / largest)``, and ``out = fp8(y * (1 / s))``; both reciprocals are rounded to float32, and ``largest`` is 448
    (224 for float8_e4m3fnuz). The maximum ignores NaN, which becomes the largest fp8 value in `out`, as does an
    infinity, with an infinite scale. Rows from ``num_valid_tokens * topk`` on get scales of 1, and their `out` is left
    unchanged. For the second GEMM of experts, with the rows of a token's topk choices. Modelled on vLLM's op of this
    name.

    Args:
        out: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; constant row stride.
        scale: [..., hidden_size / 128] float32, written; constant row stride.
        input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride; hidden_size a multiple of 128.
        beta: bound of the activated gate, not 0; linear_beta: bound of y, or a number that is not positive for none.
        group_size: 128; the default, as in vLLM, is refused.
        num_valid_tokens: one int32 element, any number; without it all rows are valid.
        topk: rows of a token, at least 1.
    """
    y = situ(input, beta, linear_beta).to(input.dtype).float().unflatten(-1, (-1, group_size))
    largest = fp8.largest_code(out.dtype)
    scales = fp8.absmax(y).clamp(min=1e-30) * torch.full((), 1.0 / largest, dtype=torch.float32, device=y.device)
    quants = fp8.saturate(y * (1.0 / scales), out.dtype).flatten(-2)
    valid = torch.ones(out.shape[:-1], dtype=torch.bool, device=y.device)
    if num_valid_tokens is not None:
        valid.view(-1)[max(0, int(num_valid_tokens) * topk) :] = False
    scale.copy_(scales.squeeze(-1).where(valid[..., None], 1.0))
    out.copy_(torch.where(valid[..., None], quants.view(torch.uint8), out.view(torch.uint8)).view(out.dtype))


@situ_and_mul_quant.result
def result_situ_and_mul_quant(
    input: TensorArg, group_size: int, *, quant_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).
    """
    quants = result_gated(input)._replace(dtype=fp8.chosen(input, quant_dtype))
    return quants, Result((*quants.shape[:-1], quants.shape[-1] // max(1, group_size)), float32)


@situ_and_mul_quant.plan
def plan_situ_and_mul_quant(
    out: TensorArg,
    scale: TensorArg,
    input: TensorArg,
    group_size: int,
    num_valid_tokens: TensorArg | None,
    topk: int,
) -> Launch:
    check.dtype(input, float16, bfloat16)
    check_halves(out, input)
    check.dtype(out, *E4M3)
    if group_size != _SITU_GROUP:
        raise check.refuse(input, "group_size", f"expected {_SITU_GROUP}, got {group_size}")
    if topk < 1:
        raise check.refuse(input, "topk", f"expected at least 1, got {topk}")
    hidden_size, num_rows = out.shape[-1], check.num_rows(out)
    if hidden_size % group_size:
        raise out.error(f"expected a last dimension that is a multiple of group_size={group_size}, got {hidden_size}")
    check.dtype(scale, float32)
    expected = (*out.shape[:-1], hidden_size // group_size)
    if scale.shape != expected:
        raise scale.error(f"expected shape {expected}, got {scale.shape}")
    check.row_size(scale)
    if num_valid_tokens is not None:
        check.scalar(num_valid_tokens, int32)
    return _situ_and_mul_quant(
        scalar_t=input.dtype,
        code_t=out.dtype,
        HIDDEN_SIZE=hidden_size or group_size,  # never 0: the kernel divides by it, and must compile for empty rows
        ACCESS_SIZE=check.vector_width(_VEC_SIZE, out, input),
        HAS_COUNT=num_valid_tokens is not None,
        NUM_THREADS=_NUM_THREADS,
        MIN_BLOCKS=_SITU_BLOCKS,
    ).launch(
        grid=-(-num_rows * hidden_size // (_VEC_SIZE * _NUM_THREADS)),
        block=_NUM_THREADS,
        num_rows=num_rows,
        out_stride=check.row_stride(out),
        input_stride=check.row_stride(input),
        scale_stride=check.row_stride(scale),
    )


@situ_and_mul_quant.example
def example_situ_and_mul_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[3072, 384] = 3072,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
    with_count: bool = False,
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        make.empty(num_tokens, hidden_size // _SITU_GROUP, dtype="float32"),
        make.randn(num_tokens, 2 * hidden_size, dtype=dtype),
        *(4.0, 25.0, _SITU_GROUP),
        make.full(1, value=num_tokens // 4, dtype="int32") if with_count else None,
        2,
    )
