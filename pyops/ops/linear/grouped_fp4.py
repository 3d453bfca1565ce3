"""vLLM's grouped GEMMs with block scales: NVFP4, MXFP4 and MXFP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from .._shared.fp4_tiles import TILE_ROWS, rounded_up
from .block_scaled import MXFP4, MXFP8, NVFP4, BlockFormat
from .grouped_block_scaled import plan
from .grouped_rows import (
    bad_rows,
    by_rows,
    each_expert,
    example_counts,
    example_sizes,
    result_rows,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cutlass_fp4_group_mm", "cutlass_mxfp4_group_mm", "cutlass_mxfp8_grouped_mm"]


def _multiply(
    format: BlockFormat,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    scale_offsets: Tensor,
    alphas: Tensor | None = None,
) -> None:
    """References: ``out[t] = alphas[e] * (A[t] @ B[e].T)``. The scales of a row are zeros if they do not exist."""
    n, size = out.shape[1], len(a_scales)
    b = by_rows(b, n, a.shape[1])
    b_scales = by_rows(b_scales, rounded_up(n, TILE_ROWS), a_scales.shape[1])
    for e, rows in each_expert(out, problem_sizes, expert_offsets):
        place = int(scale_offsets[e]) + torch.arange(rows.stop - rows.start, dtype=torch.int64, device=a.device)
        inside = (place >= 0) & (place < size)
        codes = torch.zeros(size, a.shape[1], dtype=a.dtype, device=a.device)
        codes[place[inside]] = a[rows][inside]
        weight = format.values(b[e], b_scales[e])[:n]
        x = torch.zeros(len(place), weight.shape[1], dtype=torch.float64, device=a.device)
        x[inside] = format.values(codes, a_scales)[place[inside]]
        sums = (x @ weight.T).float()
        out[rows] = (sums if alphas is None else alphas.reshape(-1)[e] * sums).to(out.dtype)


def _outside(a_scales: Tensor, scale_offsets: Tensor) -> Tensor:
    """Mask of the scale offsets that are not the first row of a tile in `a_scales`."""
    return (scale_offsets < 0) | (scale_offsets > len(a_scales)) | (scale_offsets % TILE_ROWS != 0)


def _example(make: Any, format: BlockFormat, num_tokens: int, num_experts: int, n: int, k: int) -> dict[str, Any]:
    """Experts, the second without rows; arguments by the names of `_plan`."""
    counts = example_counts(num_tokens, num_experts)
    offsets, sizes = example_sizes(make, counts, n, k)
    padded = [rounded_up(count, TILE_ROWS) for count in counts]
    rows, columns = format.scale_sizes(n, k)
    scale_sizes = (sum(padded), columns), (num_experts, rows, columns)

    def codes(*sizes: int) -> Any:
        if format.code_bits == 4:
            return make.randint(0, 256, *sizes, k // 2, dtype="uint8")
        return make.randn(*sizes, k, dtype="float8_e4m3fn")

    def scales(*sizes: int) -> Any:
        if format is NVFP4:
            return make.randint(40, 72, *sizes, dtype="uint8")
        return make.randint(120, 130, *sizes, dtype="uint8")

    return {
        "out": make.full(num_tokens, n, value=0.0, dtype="bfloat16"),
        "a": codes(num_tokens),
        "b": codes(num_experts, n),
        **dict(zip(("a_scales", "b_scales"), (scales(*sizes) for sizes in scale_sizes), strict=True)),
        "problem_sizes": sizes,
        "expert_offsets": offsets,
        "scale_offsets": make.values([sum(padded[:e]) for e in range(num_experts)], "int32"),
    }


@op(partial="out", atol=2.0**-18)
def cutlass_fp4_group_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_blockscale: Tensor,
    b_blockscales: Tensor,
    alphas: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    sf_offsets: Tensor,
) -> None:
    """Grouped GEMM of NVFP4 rows with the weights of their experts: ``out[t] = alphas[e] * (A[t] @ B[e].T)``.

    A and B are the quantized values times their scales. Tensor cores apply the scales on compute capability 12.0 and
    12.1. Elsewhere A and B are dequantized to bfloat16 exactly: B in the main loop, unless experts have hundreds of
    rows or K is not a multiple of 64. Expert e has the rows ``expert_offsets[e] + i`` for i below its size. Other rows
    are left unchanged; experts must not share rows. Modelled on vLLM's op of this name.

    Args:
        out: [num_rows, N] float16 or bfloat16, written; constant row stride.
        a: [num_rows, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 16; constant
            row stride.
        b: [num_experts, N, K / 2] uint8, likewise.
        a_blockscale: float8_e4m3fn or uint8, contiguous, [rows, K / 16 rounded up to 4], a multiple of 128 rows: the
            scales of each expert in tiles (see `_shared/fp4_tiles.py`), as `scaled_fp4_experts_quant` writes them: none
            is negative.
        b_blockscales: likewise, [num_experts, N rounded up to 128, K / 16 rounded up to 4], in tiles for each expert.
        alphas: float32, contiguous, num_experts elements.
        problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K).
        expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
        sf_offsets: [num_experts] int32, contiguous: the first row of a_blockscale of each expert, a multiple of 128.
            The scales of a row are zeros if they would lie outside a_blockscale.
    """
    operands = out, a, b, a_blockscale, b_blockscales
    _multiply(NVFP4, *operands, problem_sizes, expert_offsets, sf_offsets, alphas)


@cutlass_fp4_group_mm.plan
def plan_cutlass_fp4_group_mm(
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    a_blockscale: TensorArg,
    b_blockscales: TensorArg,
    alphas: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    sf_offsets: TensorArg,
) -> list[Launch]:
    operands = out, a, b, a_blockscale, b_blockscales
    return plan(NVFP4, *operands, problem_sizes, expert_offsets, sf_offsets, alphas)


@cutlass_fp4_group_mm.bad_indices
def bad_indices_cutlass_fp4_group_mm(
    out: Tensor, a_blockscale: Tensor, problem_sizes: Tensor, expert_offsets: Tensor, sf_offsets: Tensor
) -> dict[str, Any]:
    return {**bad_rows(out, expert_offsets, problem_sizes), "sf_offsets": _outside(a_blockscale, sf_offsets)}


@cutlass_fp4_group_mm.example
def example_cutlass_fp4_group_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    num_experts: int = 3,
    output_size: Literal[192, 136] = 192,
    input_size: Literal[192, 160] = 192,
) -> tuple[Any, ...]:
    sizes = num_tokens, num_experts, output_size, input_size
    out, a, b, a_scales, b_scales, *lists = _example(make, NVFP4, *sizes).values()
    return out, a, b, a_scales, b_scales, make.full(num_experts, value=2.0**-8, dtype="float32"), *lists


@op(partial="out", atol=2.0**-18)
def cutlass_mxfp4_group_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_blockscale: Tensor,
    b_blockscales: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    sf_offsets: Tensor,
) -> None:
    """Grouped GEMM of MXFP4 rows with the weights of their experts: ``out[t] = A[t] @ B[e].T``.

    As `cutlass_fp4_group_mm`, without alphas and with scales that are powers of two. Dequantized values are rounded to
    bfloat16: those of 2^128 and more become infinite, but not on tensor cores that apply the scales. Experts must not
    share rows. Modelled on vLLM's op of this name.

    Args:
        out, problem_sizes, expert_offsets, sf_offsets: as in `cutlass_fp4_group_mm`.
        a: [num_rows, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 32; constant
            row stride.
        b: [num_experts, N, K / 2] uint8, likewise.
        a_blockscale: uint8 or float8_e8m0fnu, contiguous, [rows, K / 32 rounded up to 4], a multiple of 128 rows, in
            tiles as `mxfp4_experts_quant` writes them. A byte s is the scale ``2^(s - 127)``; 255 is NaN.
        b_blockscales: likewise, [num_experts, N rounded up to 128, K / 32 rounded up to 4], in tiles for each expert.
    """
    _multiply(MXFP4, out, a, b, a_blockscale, b_blockscales, problem_sizes, expert_offsets, sf_offsets)


@cutlass_mxfp4_group_mm.plan
def plan_cutlass_mxfp4_group_mm(
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    a_blockscale: TensorArg,
    b_blockscales: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    sf_offsets: TensorArg,
) -> list[Launch]:
    return plan(MXFP4, out, a, b, a_blockscale, b_blockscales, problem_sizes, expert_offsets, sf_offsets)


@cutlass_mxfp4_group_mm.bad_indices
def bad_indices_cutlass_mxfp4_group_mm(
    out: Tensor, a_blockscale: Tensor, problem_sizes: Tensor, expert_offsets: Tensor, sf_offsets: Tensor
) -> dict[str, Any]:
    return {**bad_rows(out, expert_offsets, problem_sizes), "sf_offsets": _outside(a_blockscale, sf_offsets)}


@cutlass_mxfp4_group_mm.example
def example_cutlass_mxfp4_group_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    num_experts: int = 3,
    output_size: Literal[192, 136] = 192,
    input_size: Literal[192, 160] = 192,
) -> tuple[Any, ...]:
    return tuple(_example(make, MXFP4, num_tokens, num_experts, output_size, input_size).values())


@op(partial="out", atol=2.0**-18)
def cutlass_mxfp8_grouped_mm(
    a: Tensor,
    b: Tensor,
    sfa: Tensor,
    sfb: Tensor,
    out: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
) -> None:
    """Grouped GEMM of MXFP8 rows with the weights of their experts: ``out[t] = A[t] @ B[e].T``.

    As `cutlass_mxfp4_group_mm`, for e4m3 values. Experts must not share rows. Modelled on vLLM's op of
    this name.

    Args:
        a: [num_rows, K] float8_e4m3fn, K a multiple of 32; constant row stride.
        b: [num_experts, N, K] float8_e4m3fn, constant row stride; or a view of it, [num_experts, K, N].
        sfa: uint8 or float8_e8m0fnu, contiguous, [rows, K / 32 rounded up to 4], a multiple of 128 rows, in tiles as
            `mxfp8_experts_quant` writes them. A byte s is the scale ``2^(s - 127)``; 255 is NaN.
        sfb: likewise, [num_experts, N rounded up to 128, K / 32 rounded up to 4], in tiles for each expert; or a view
            of it with its last two dimensions transposed.
        out, problem_sizes, expert_offsets: as in `cutlass_fp4_group_mm`.
        blockscale_offsets: as sf_offsets of `cutlass_fp4_group_mm`.
    """
    _multiply(MXFP8, out, a, b, sfa, sfb, problem_sizes, expert_offsets, blockscale_offsets)


cutlass_fp4_group_mm.result(result_rows)
cutlass_mxfp4_group_mm.result(result_rows)
cutlass_mxfp8_grouped_mm.result(result_rows)


@cutlass_mxfp8_grouped_mm.plan
def plan_cutlass_mxfp8_grouped_mm(
    a: TensorArg,
    b: TensorArg,
    sfa: TensorArg,
    sfb: TensorArg,
    out: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    blockscale_offsets: TensorArg,
) -> list[Launch]:
    return plan(MXFP8, out, a, b, sfa, sfb, problem_sizes, expert_offsets, blockscale_offsets)


@cutlass_mxfp8_grouped_mm.bad_indices
def bad_indices_cutlass_mxfp8_grouped_mm(
    sfa: Tensor, out: Tensor, problem_sizes: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor
) -> dict[str, Any]:
    return {**bad_rows(out, expert_offsets, problem_sizes), "blockscale_offsets": _outside(sfa, blockscale_offsets)}


@cutlass_mxfp8_grouped_mm.example
def example_cutlass_mxfp8_grouped_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    num_experts: int = 3,
    output_size: Literal[192, 136] = 192,
    input_size: Literal[192, 160] = 192,
) -> tuple[Any, ...]:
    sizes = num_tokens, num_experts, output_size, input_size
    out, a, b, a_scales, b_scales, *lists = _example(make, MXFP8, *sizes).values()
    return a, b, a_scales, b_scales, out, *lists
