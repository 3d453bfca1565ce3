"""MXFP8 quantization of rows that belong to experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float8_e8m0fnu, float16, int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from .._shared.fp4_tiles import BLOCK, MX_BLOCK, TILE_COLUMNS, TILE_ROWS, rounded_up, tiled
from .._shared.groups import SHARES, sharing
from .fp4_experts import check_matrix, max_tiles

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mxfp8_experts_quant"]

_MX_THREADS = 128  # threads of a block, which takes a tile: a thread has one group of 32 in each of four rows
_EXPONENT_BIAS = 127  # exponent bias of e8m0
_MAX_EXPONENT = 254  # largest biased exponent; 255 is NaN

_mxfp8_experts_quant = Kernel("quantize/mxfp8_experts_quant.cu")


def _mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 values; exponents, uint8) of rows [num_rows, hidden_size]."""
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    a = fp8.absmax(blocks)
    mantissa, exponent = torch.frexp((a * torch.full_like(a, 1 / 448)).double())  # both are 0 for a zero
    power = torch.where(mantissa == 0.5, exponent - 1, exponent).masked_fill(mantissa == 0, -_EXPONENT_BIAS)
    scales = (power + _EXPONENT_BIAS).masked_fill(a.isinf(), _MAX_EXPONENT).clamp(0, _MAX_EXPONENT)
    y = blocks * torch.ldexp(torch.ones_like(a), _EXPONENT_BIAS - scales)
    return y.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1).byte()


@op(partial=("quant_output", "scale_factor"), ulps=0)
def mxfp8_experts_quant(
    input: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    quant_output: Tensor,
    scale_factor: Tensor,
) -> None:
    """MXFP8 of rows that belong to experts: e4m3 values, and a power-of-two scale per 32 contiguous elements.

    The scale is the smallest power of two, 2^-127 or more, that is at least ``max|x| * (1/448)``, stored as its
    exponent, biased by 127; for an infinite maximum it is 2^127. ``q = e4m3(x / scale)`` saturates at +-448. NaN is
    ignored by the maximum and stays NaN. Expert e has the rows ``expert_offsets[e] + i`` for i below
    ``problem_sizes[e, 0]``; its scales lie in tiles that begin at row ``blockscale_offsets[e]`` of `scale_factor`. The
    padding of its last tile becomes 0. Nothing is written for an expert with rows out of range, or with tiles that
    reach beyond `scale_factor`, nor for rows without an expert. Experts must not share rows or tiles.

    Args:
        input: [num_rows, hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
        problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K); only the rows are read.
        expert_offsets: [num_experts] int32, contiguous: the first row of each expert.
        blockscale_offsets: [num_experts] int32, contiguous: where tiles begin, in rows, multiples of 128.
        quant_output: [num_rows, hidden_size] float8_e4m3fn, written; constant row stride.
        scale_factor: [rows, columns] uint8 or float8_e8m0fnu, columns being hidden_size / 32 rounded up to 4,
            contiguous, written.
    """
    columns = scale_factor.shape[1]
    flat = scale_factor.view(torch.uint8).reshape(-1).clone()
    for count, first, at in zip(
        problem_sizes[:, 0].tolist(), expert_offsets.tolist(), blockscale_offsets.tolist(), strict=True
    ):
        rows, padded = slice(first, first + count), rounded_up(count, TILE_ROWS)
        if count > 0 and 0 <= first <= len(input) - count and 0 <= at <= len(scale_factor) - padded:
            quant_output[rows], scales = _mxfp8(input[rows])
            flat[at * columns : (at + padded) * columns] = tiled(scales).flatten()
    scale_factor.copy_(flat.view(scale_factor.dtype).view(scale_factor.shape))


@mxfp8_experts_quant.result
def result_mxfp8_experts_quant(input: TensorArg, problem_sizes: TensorArg) -> tuple[Result, Result]:
    """Scales with enough tiles for any distribution of the rows."""
    check_matrix(input)
    check.sizes(problem_sizes, num_experts=None, sizes=3)
    scale_rows = rounded_up(input.shape[0], TILE_ROWS) + TILE_ROWS * problem_sizes.shape[0]
    scales = scale_rows, rounded_up(input.shape[1] // MX_BLOCK, TILE_COLUMNS)
    return Result(input.shape, float8_e4m3fn), Result(scales, uint8)


@mxfp8_experts_quant.plan
def plan_mxfp8_experts_quant(
    input: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    blockscale_offsets: TensorArg,
    quant_output: TensorArg,
    scale_factor: TensorArg,
) -> Launch:
    check_matrix(input)
    check.dtype(input, float16, bfloat16)
    num_rows, hidden_size = input.shape
    if check.row_size(input) % MX_BLOCK:
        raise input.error(f"expected a last dimension of multiples of {MX_BLOCK}, got shape {input.shape}")
    check.sizes(problem_sizes, num_experts=None, sizes=3)
    num_experts = problem_sizes.shape[0]
    check.shape(problem_sizes, int32, num_experts=num_experts, sizes=3)
    for offsets in (expert_offsets, blockscale_offsets):
        check.shape(offsets, int32, num_experts=num_experts)
    check.dtype(quant_output, float8_e4m3fn)
    check.sizes(quant_output, num_rows=num_rows, hidden_size=hidden_size)
    check.row_size(quant_output)
    blocks = hidden_size // MX_BLOCK
    columns = rounded_up(blocks, TILE_COLUMNS)
    check.dtype(scale_factor, uint8, float8_e8m0fnu)
    check.shape(scale_factor, rows=scale_factor.shape[0] if scale_factor.shape else 0, columns=columns)
    return _mxfp8_experts_quant(
        scalar_t=input.dtype,
        ACCESS=check.vector_width(BLOCK, input),
        CODE_ACCESS=check.vector_width(BLOCK, quant_output),
        NUM_THREADS=_MX_THREADS,
    ).launch(
        grid=(max_tiles(num_rows, num_experts), columns // TILE_COLUMNS),
        block=_MX_THREADS,
        num_rows=num_rows,
        scale_rows=scale_factor.shape[0],
        output_stride=check.row_stride(quant_output),
        input_stride=check.row_stride(input),
        blocks=blocks,
        columns=columns,
        num_experts=num_experts,
    )


@mxfp8_experts_quant.bad_indices
def bad_indices_mxfp8_experts_quant(
    input: Tensor, problem_sizes: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, scale_factor: Tensor
) -> dict[str, Any]:
    rows, first, at = (one.long() for one in (problem_sizes[:, 0], expert_offsets, blockscale_offsets))
    padded = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    outside = (rows > 0) & ((first < 0) | (first + rows > len(input)))
    beyond = (rows > 0) & ((at < 0) | (at + padded > len(scale_factor)))
    written = ~(outside | beyond)
    return {
        "problem_sizes": torch.stack((rows < 0, *2 * [torch.zeros_like(rows, dtype=torch.bool)]), 1),
        "expert_offsets": {"are out of range": outside, SHARES: sharing(first, rows * written)},
        "blockscale_offsets": {"are out of range": beyond, SHARES: sharing(at, padded * written)},
    }


@mxfp8_experts_quant.example
def example_mxfp8_experts_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 160] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    counts = num_tokens // 3, 0, num_tokens - num_tokens // 3
    padded = [rounded_up(count, TILE_ROWS) for count in counts]
    return (
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.values([[rows, 0, hidden_size] for rows in counts], "int32"),
        make.values([0, counts[0], counts[0]], "int32"),
        make.values([0, padded[0], padded[0]], "int32"),
        make.full(num_tokens, hidden_size, value=0.0, dtype="float8_e4m3fn"),
        make.randint(0, 255, sum(padded), rounded_up(hidden_size // MX_BLOCK, TILE_COLUMNS), dtype="uint8"),
    )
