"""NVFP4 quantization of rows that belong to experts (the format: `_fp4.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float8_e4m3fn, float32, int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.fp4_tiles import BLOCK, TILE_COLUMNS, TILE_ROWS, rounded_up, tiled
from .._shared.groups import SHARES, sharing
from ._fp4 import Fp4Problem, check_codes, check_scales, gated, launch, nvfp4

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["scaled_fp4_experts_quant", "silu_and_mul_scaled_fp4_experts_quant"]

_scaled_fp4_experts_quant = Kernel("quantize/scaled_fp4_experts_quant.cu")


def write_experts(
    output: Tensor,
    output_scale: Tensor,
    x: Tensor,
    offsets: Tensor,
    tile_offsets: Tensor,
    quantized: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> None:
    """References: packed values and tiles of scales by `quantized(rows, expert)`, for rows `x` after the gate."""
    columns = output_scale.shape[1] * output_scale.element_size()
    flat = output_scale.view(torch.uint8).reshape(-1).clone()
    for expert, (first, end) in enumerate(pairwise(offsets.tolist())):
        if not 0 <= first <= end <= x.shape[0]:
            break
        start, rows = int(tile_offsets[expert]) * columns, slice(first, end)
        size = rounded_up(end - first, TILE_ROWS) * columns
        if size and 0 <= start <= flat.numel() - size:
            output[rows], scales = quantized(x[rows], expert)
            flat[start : start + size] = tiled(scales).flatten()
    output_scale.copy_(flat.view(output_scale.dtype).view(output_scale.shape))


def _nvfp4_by(scale: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """`nvfp4` of an expert's rows by its own g."""
    return lambda rows, expert: nvfp4(rows, scale.reshape(-1)[expert].reshape(1, 1))


def max_tiles(num_rows: int, num_experts: int) -> int:
    """Most tiles for `num_rows` rows: the last tile of every expert with rows may be partial."""
    return (num_rows + (TILE_ROWS - 1) * min(num_experts, num_rows)) // TILE_ROWS if num_experts else 0


def check_matrix(input: TensorArg) -> None:
    if len(input.shape) != 2:
        raise input.error(f"expected 2 dimensions, got shape {input.shape}")


def _result_experts(input: TensorArg, scale: TensorArg, halves: int) -> tuple[Result, Result]:
    """The packed values, and scales with enough tiles for any distribution of the rows."""
    check_matrix(input)
    num_rows, hidden_size = input.shape[0], input.shape[1] // halves
    scale_rows = rounded_up(num_rows, TILE_ROWS) + TILE_ROWS * scale.numel
    scales = scale_rows, rounded_up(hidden_size // BLOCK, TILE_COLUMNS)
    return Result((num_rows, hidden_size // 2), uint8), Result(scales, float8_e4m3fn)


def _plan_experts(
    output: TensorArg,
    output_scale: TensorArg,
    input: TensorArg,
    scale: TensorArg,
    offsets: TensorArg,
    tile_offsets: TensorArg,
    halves: int,
) -> Launch:
    """The checks and the launch of both ops; `halves` is 2 for a gated activation."""
    check_matrix(input)
    blocks = check_codes(output, input, halves)
    num_experts = check.row_size(scale)
    check.shape(scale, float32, num_experts=num_experts)
    for arg in (offsets, tile_offsets):
        check.shape(arg, int32, num_offsets=num_experts + 1)
    columns, num_rows = rounded_up(blocks, TILE_COLUMNS), input.shape[0]
    check_scales(output_scale, columns, None)
    fixed = {"scale_rows": output_scale.shape[0], "num_experts": num_experts}
    problem = Fp4Problem(
        num_rows, max_tiles(num_rows, num_experts) * TILE_ROWS, columns, experts=True, gated=halves == 2
    )
    return launch(_scaled_fp4_experts_quant, output, output_scale, input, problem, fixed, GATED=problem.gated)


def outside(num_rows: int, scale_rows: int, offsets: Tensor, tile_offsets: Tensor) -> dict[str, Any]:
    """For PYOPS_CHECK: offsets beyond the rows, and offsets of tiles beyond the scales or in tiles of another expert.

    Experts without rows need no tiles.
    """
    first, end = offsets[:-1].long(), offsets[1:].long()
    tile, padded = tile_offsets[:-1].long(), (end - first + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    beyond = (end > first) & ((tile < 0) | (tile + padded > scale_rows))
    shared = sharing(tile, padded.clamp(min=0).masked_fill(beyond, 0))
    pad = torch.nn.functional.pad
    return {
        "input_offset_by_experts": (offsets < 0) | (offsets > num_rows) | pad(end < first, (1, 0)),
        "output_scale_offset_by_experts": {"are out of range": pad(beyond, (0, 1)), SHARES: pad(shared, (0, 1))},
    }


def experts_example(make: Any, num_tokens: int, hidden_size: int, dtype: str, halves: int) -> tuple[Any, ...]:
    """Five experts: the second has no rows, the last has the remaining rows."""
    share = num_tokens // 3
    counts = [share, 0, num_tokens // 7, share, num_tokens - 2 * share - num_tokens // 7]
    padded = [rounded_up(count, TILE_ROWS) for count in counts]

    def offsets(sizes: Sequence[int]) -> Any:
        return make.values([sum(sizes[:i]) for i in range(len(sizes) + 1)], dtype="int32")

    columns = rounded_up(hidden_size // BLOCK, TILE_COLUMNS)
    return (
        make.empty(num_tokens, hidden_size // 2, dtype="uint8"),
        make.empty(sum(padded), columns // 4, dtype="int32"),
        make.randn(num_tokens, halves * hidden_size, dtype=dtype),
        make.values([g / halves**2 for g in (300.0, 325.0, 350.0, 375.0, 400.0)], dtype="float32"),
        offsets(counts),
        offsets(padded),
    )


@op(out=("output", "output_scale"), ulps=0)
def scaled_fp4_experts_quant(
    output: Tensor,
    output_scale: Tensor,
    input: Tensor,
    input_global_scale: Tensor,
    input_offset_by_experts: Tensor,
    output_scale_offset_by_experts: Tensor,
) -> None:
    """`scaled_fp4_quant` of rows that belong to experts: each expert has its own global scale and its own tiles.

    Rows ``o[e]`` to ``o[e + 1] - 1`` belong to expert e. Their scales lie in tiles that begin at row ``t[e]`` of
    `output_scale`. The padding of the last tile of an expert becomes 0; rows after it are left unchanged.
    Experts may have no rows; experts must not share tiles. Nothing is written for the experts from the
    first invalid offset on (below 0, below the previous offset, or beyond the rows), nor for an expert with tiles that
    reach beyond `output_scale`.

    Args:
        output: [num_tokens, hidden_size / 2] uint8, written; constant row stride.
        output_scale: [rows, columns / 4] int32, or [rows, columns] uint8 or float8_e4m3fn, columns being hidden_size /
            16 rounded up to 4, contiguous, written.
        input: [num_tokens, hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
        input_global_scale: [num_experts] float32, contiguous: g of each expert, a factor of its rows.
        input_offset_by_experts: [num_experts + 1] int32, contiguous: o.
        output_scale_offset_by_experts: [num_experts + 1] int32, contiguous: t, in rows, multiples of 128.
    """
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    write_experts(output, output_scale, input, *offsets, _nvfp4_by(input_global_scale))


@scaled_fp4_experts_quant.result
def result_scaled_fp4_experts_quant(input: TensorArg, input_global_scale: TensorArg) -> tuple[Result, Result]:
    return _result_experts(input, input_global_scale, halves=1)


@scaled_fp4_experts_quant.plan
def plan_scaled_fp4_experts_quant(
    output: TensorArg,
    output_scale: TensorArg,
    input: TensorArg,
    input_global_scale: TensorArg,
    input_offset_by_experts: TensorArg,
    output_scale_offset_by_experts: TensorArg,
) -> Launch:
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    return _plan_experts(output, output_scale, input, input_global_scale, *offsets, halves=1)


@scaled_fp4_experts_quant.bad_indices
def bad_indices_scaled_fp4_experts_quant(
    input: Tensor, output_scale: Tensor, input_offset_by_experts: Tensor, output_scale_offset_by_experts: Tensor
) -> dict[str, Any]:
    return outside(input.shape[0], output_scale.shape[0], input_offset_by_experts, output_scale_offset_by_experts)


@scaled_fp4_experts_quant.example
def example_scaled_fp4_experts_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 7152, 80] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    return experts_example(make, num_tokens, hidden_size, dtype, halves=1)


@op(out=("output", "output_scale"), ulps=0)
def silu_and_mul_scaled_fp4_experts_quant(
    output: Tensor,
    output_scale: Tensor,
    input: Tensor,
    input_global_scale: Tensor,
    input_offset_by_experts: Tensor,
    output_scale_offset_by_experts: Tensor,
) -> None:
    """`scaled_fp4_experts_quant` of a gated activation: of ``T(silu(gate) * up)`` for halves ``input = [gate, up]``.

    The product is computed in float32 and rounded to the element type once. Experts must not share tiles.

    Args:
        output, output_scale, input_global_scale, input_offset_by_experts, output_scale_offset_by_experts: as in
            `scaled_fp4_experts_quant`.
        input: [num_tokens, 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
    """
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    write_experts(output, output_scale, gated(input), *offsets, _nvfp4_by(input_global_scale))


@silu_and_mul_scaled_fp4_experts_quant.result
def result_silu_and_mul_scaled_fp4_experts_quant(
    input: TensorArg, input_global_scale: TensorArg
) -> tuple[Result, Result]:
    return _result_experts(input, input_global_scale, halves=2)


@silu_and_mul_scaled_fp4_experts_quant.plan
def plan_silu_and_mul_scaled_fp4_experts_quant(
    output: TensorArg,
    output_scale: TensorArg,
    input: TensorArg,
    input_global_scale: TensorArg,
    input_offset_by_experts: TensorArg,
    output_scale_offset_by_experts: TensorArg,
) -> Launch:
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    return _plan_experts(output, output_scale, input, input_global_scale, *offsets, halves=2)


@silu_and_mul_scaled_fp4_experts_quant.bad_indices
def bad_indices_silu_and_mul_scaled_fp4_experts_quant(
    input: Tensor, output_scale: Tensor, input_offset_by_experts: Tensor, output_scale_offset_by_experts: Tensor
) -> dict[str, Any]:
    return outside(input.shape[0], output_scale.shape[0], input_offset_by_experts, output_scale_offset_by_experts)


@silu_and_mul_scaled_fp4_experts_quant.example
def example_silu_and_mul_scaled_fp4_experts_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 7152, 80] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    return experts_example(make, num_tokens, hidden_size, dtype, halves=2)
