"""MXFP4 quantization of rows that belong to experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from .._shared.fp4_tiles import BLOCK, MX_BLOCK, TILE_COLUMNS, TILE_ROWS, rounded_up
from ._fp4 import check_codes, check_scales, e2m1, gated
from .fp4_experts import check_matrix, experts_example, max_tiles, outside, write_experts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mxfp4_experts_quant", "silu_and_mul_mxfp4_experts_quant"]

_MX_THREADS = 128  # threads of a block, which takes a tile: a thread has one group of 32 in each of four rows

_mxfp4_experts_quant = Kernel("quantize/mxfp4_experts_quant.cu")


def _mxfp4(x: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """(packed e2m1 values; exponents, uint8) of rows [num_rows, hidden_size] of any expert."""
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    a = fp8.absmax(blocks)
    exponents = (a * torch.full_like(a, 1 / 6)).view(torch.int32) >> 23
    powers = torch.ldexp(torch.ones_like(a), 127 - exponents)
    quantized = e2m1(blocks * torch.where((exponents == 0) | (exponents == 255), 0.0, powers)).flatten(-2)
    return quantized[:, 1::2] << 4 | quantized[:, ::2], exponents.squeeze(-1).byte()


def _result_mxfp4(input: TensorArg, n_experts: int, halves: int) -> tuple[Result, Result]:
    """The packed values, and scales with enough tiles for any distribution of the rows."""
    check_matrix(input)
    num_rows, hidden_size = input.shape[0], input.shape[1] // halves
    scale_rows = rounded_up(num_rows, TILE_ROWS) + TILE_ROWS * max(0, n_experts)
    scales = scale_rows, rounded_up(hidden_size // MX_BLOCK, TILE_COLUMNS)
    return Result((num_rows, hidden_size // 2), uint8), Result(scales, uint8)


def _plan_mxfp4(
    output: TensorArg,
    output_scale: TensorArg,
    input: TensorArg,
    offsets: TensorArg,
    tile_offsets: TensorArg,
    n_experts: int,
    halves: int,
) -> Launch:
    check_matrix(input)
    if input.shape[1] % (halves * MX_BLOCK):
        raise input.error(f"expected a last dimension of multiples of {halves * MX_BLOCK}, got shape {input.shape}")
    check_codes(output, input, halves)
    if n_experts < 0:
        raise check.refuse(input, "n_experts", f"expected 0 or more, got {n_experts}")
    for arg in (offsets, tile_offsets):
        check.shape(arg, int32, num_offsets=n_experts + 1)
    num_rows, blocks = input.shape[0], 2 * output.shape[1] // MX_BLOCK
    columns = rounded_up(blocks, TILE_COLUMNS)
    check_scales(output_scale, columns, None)
    return _mxfp4_experts_quant(
        scalar_t=input.dtype,
        GATED=halves == 2,
        ACCESS=check.vector_width(BLOCK, input),
        CODE_ACCESS=check.vector_width(BLOCK // 2, output),
        NUM_THREADS=_MX_THREADS,
    ).launch(
        grid=(max_tiles(num_rows, n_experts), columns // TILE_COLUMNS),
        block=_MX_THREADS,
        num_rows=num_rows,
        scale_rows=output_scale.shape[0],
        output_stride=check.row_stride(output),
        input_stride=check.row_stride(input),
        blocks=blocks,
        columns=columns,
        num_experts=n_experts,
    )


def _mxfp4_example(make: Any, num_tokens: int, hidden_size: int, dtype: str, halves: int) -> tuple[Any, ...]:
    output, finer, input, _, offsets, tiles = experts_example(make, num_tokens, hidden_size, dtype, halves)
    words = rounded_up(hidden_size // MX_BLOCK, TILE_COLUMNS) // 4
    scales = make.empty(finer.shape[0], words, dtype="int32")
    return output, scales, input, offsets, tiles, 5


@op(out=("output", "output_scale"), ulps=0)
def mxfp4_experts_quant(
    output: Tensor,
    output_scale: Tensor,
    input: Tensor,
    input_offset_by_experts: Tensor,
    output_scale_offset_by_experts: Tensor,
    n_experts: int,
) -> None:
    """MXFP4 of rows that belong to experts: e2m1 values, and a power-of-two scale per 32 contiguous elements.

    The scale is the exponent, biased by 127, of ``max|x| / 6`` rounded down to a power of two; ``q = e2m1(x /
    scale)`` saturates at +-6. NaN is ignored by the maximum and becomes +6. If the stored exponent is 0 (a maximum of
    zero or a denormal number) or 255 (infinity), values become 0 with their sign. Rows, tiles and invalid offsets are
    as in `scaled_fp4_experts_quant`; experts must not share tiles.

    Args:
        output: [num_tokens, hidden_size / 2] uint8, written; constant row stride.
        output_scale: [rows, columns / 4] int32, or [rows, columns] uint8, columns being hidden_size / 32 rounded up to
            4, contiguous, written.
        input: [num_tokens, hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
        input_offset_by_experts: [n_experts + 1] int32, contiguous: where each expert's rows begin.
        output_scale_offset_by_experts: [n_experts + 1] int32, contiguous: where each expert's tiles begin, in rows,
            multiples of 128.
        n_experts: number of experts.
    """
    write_experts(output, output_scale, input, input_offset_by_experts, output_scale_offset_by_experts, _mxfp4)


@mxfp4_experts_quant.result
def result_mxfp4_experts_quant(input: TensorArg, n_experts: int) -> tuple[Result, Result]:
    return _result_mxfp4(input, n_experts, halves=1)


@mxfp4_experts_quant.plan
def plan_mxfp4_experts_quant(
    output: TensorArg,
    output_scale: TensorArg,
    input: TensorArg,
    input_offset_by_experts: TensorArg,
    output_scale_offset_by_experts: TensorArg,
    n_experts: int,
) -> Launch:
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    return _plan_mxfp4(output, output_scale, input, *offsets, n_experts, halves=1)


@mxfp4_experts_quant.bad_indices
def bad_indices_mxfp4_experts_quant(
    input: Tensor, output_scale: Tensor, input_offset_by_experts: Tensor, output_scale_offset_by_experts: Tensor
) -> dict[str, Any]:
    return outside(input.shape[0], output_scale.shape[0], input_offset_by_experts, output_scale_offset_by_experts)


@mxfp4_experts_quant.example
def example_mxfp4_experts_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 96] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    return _mxfp4_example(make, num_tokens, hidden_size, dtype, halves=1)


@op(out=("output", "output_scale"), ulps=0)
def silu_and_mul_mxfp4_experts_quant(
    output: Tensor,
    output_scale: Tensor,
    input: Tensor,
    input_offset_by_experts: Tensor,
    output_scale_offset_by_experts: Tensor,
    n_experts: int,
) -> None:
    """`mxfp4_experts_quant` of a gated activation: of ``T(silu(gate) * up)`` for halves ``input = [gate, up]``.

    The product is computed in float32 and rounded to the element type once. Experts must not share tiles.

    Args:
        output, output_scale, input_offset_by_experts, output_scale_offset_by_experts, n_experts: as in
            `mxfp4_experts_quant`.
        input: [num_tokens, 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
    """
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    write_experts(output, output_scale, gated(input), *offsets, _mxfp4)


@silu_and_mul_mxfp4_experts_quant.result
def result_silu_and_mul_mxfp4_experts_quant(input: TensorArg, n_experts: int) -> tuple[Result, Result]:
    return _result_mxfp4(input, n_experts, halves=2)


@silu_and_mul_mxfp4_experts_quant.plan
def plan_silu_and_mul_mxfp4_experts_quant(
    output: TensorArg,
    output_scale: TensorArg,
    input: TensorArg,
    input_offset_by_experts: TensorArg,
    output_scale_offset_by_experts: TensorArg,
    n_experts: int,
) -> Launch:
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    return _plan_mxfp4(output, output_scale, input, *offsets, n_experts, halves=2)


@silu_and_mul_mxfp4_experts_quant.bad_indices
def bad_indices_silu_and_mul_mxfp4_experts_quant(
    input: Tensor, output_scale: Tensor, input_offset_by_experts: Tensor, output_scale_offset_by_experts: Tensor
) -> dict[str, Any]:
    return outside(input.shape[0], output_scale.shape[0], input_offset_by_experts, output_scale_offset_by_experts)


@silu_and_mul_mxfp4_experts_quant.example
def example_silu_and_mul_mxfp4_experts_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 96] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    return _mxfp4_example(make, num_tokens, hidden_size, dtype, halves=2)
