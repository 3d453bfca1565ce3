"""NVFP4: codes of e2m1 (4 bits) for sixteen neighbouring elements under one scale of e4m3, and one scale of the tensor.

Any GPU makes them, by arithmetic that gives the bits of a conversion to e2m1. With ``g``, the scale of the tensor,
normally ``448 * 6 / max|x|``, which is multiplied in, and ``a``, the largest magnitude of the sixteen,

    s = e4m3(g * (a * (1/6)))        code = e2m1(x * r), r = 1 / (s * (1 / g)) or 0 where s is 0

so that ``x`` is about ``code * s / g``. Every step is rounded to float32, and to nearest even where it becomes a code;
codes saturate at +-6, scales at 448. NaN is left out of the maximum and becomes +6; -0 and what rounds to it keep their
sign. Two codes share a byte, the first in its lower half. A code is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6.

A ``g`` of 0 gives scales and codes of 0; a negative one negative scales, so that values come back with their sign. One
of NaN gives scales of 448 and codes of +6, an infinite one scales of +-448 and codes of +-6, where 0 becomes +6.

Scales in tiles, as matrix products on Blackwell take them, are rows rounded up to 128 and columns rounded up to 4. Of c
columns, row m, column k is byte ``(m // 128 * (c // 4) + k // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import bfloat16, float8_e4m3fn, float16, float32, int32, uint8
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import fp8

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "scaled_fp4_experts_quant",
    "scaled_fp4_quant",
    "silu_and_mul_nvfp4_quant",
    "silu_and_mul_scaled_fp4_experts_quant",
]

_scaled_fp4_quant = Kernel("quantize/scaled_fp4_quant.cu")
_scaled_fp4_experts_quant = Kernel("quantize/scaled_fp4_experts_quant.cu")
_silu_and_mul_nvfp4_quant = Kernel("quantize/silu_and_mul_nvfp4_quant.cu")

_BLOCK = 16  # elements under one scale
_THREADS = 128  # of a block
# Threads of a multiprocessor that find registers enough: experts' without a gate, others, those that need more.
_RESIDENT_PLAIN, _RESIDENT, _RESIDENT_FEWER = 1152, 1024, 640
_UNIT, _FEW_ROWS = 4, 32  # rows that follow each other in a tile, and those that do not
_MAX_WAVES = 12  # of a thread: rows that are read at a time should not lie far apart
_MAX_GROUPS = 65535  # of a grid's second and third dimension
_TILE_ROWS, _TILE_COLUMNS = 128, 4
# A code's magnitude is the number of these bounds that lie below a value; of those of the second row, or at it.
_BELOW, _AT_OR_BELOW = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# The truth


def _e2m1(x: Tensor) -> Tensor:
    """Codes of float32 values, one to a byte; NaN becomes 6."""
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for bound in _BELOW:
        codes += magnitude > bound
    for bound in _AT_OR_BELOW:
        codes += magnitude >= bound
    return torch.where(x.isnan(), 7, codes + 8 * x.signbit().byte()).byte()


def _nvfp4(input: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, two to a byte; scales, e4m3) of rows [num_rows, hidden_size], under float32 scales [num_rows, 1]."""
    x = input.float().unflatten(-1, (-1, _BLOCK))
    g = scale.unsqueeze(-1)
    a = fp8.absmax(x)
    scales = fp8.saturate(g * (a * torch.full_like(a, 1 / 6)), torch.float8_e4m3fn)
    s = scales.float()
    codes = _e2m1(x * torch.where(s == 0, 0.0, 1.0 / (s * (1.0 / g)))).flatten(-2)
    return codes[:, 1::2] << 4 | codes[:, ::2], scales.squeeze(-1)


def _tiled(scales: Tensor) -> Tensor:
    """Scales [rows, columns] in tiles, which are filled up with zeros. As bytes."""
    rows, columns = (rounded_up(*sizes) for sizes in zip(scales.shape, (_TILE_ROWS, _TILE_COLUMNS), strict=True))
    filled = torch.zeros(rows, columns, dtype=torch.uint8, device=scales.device)
    filled[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    return filled.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _gated(input: Tensor) -> Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


# What plans share


def _check_codes(output: TensorArg, input: TensorArg, halves: int = 1) -> int:
    """Check `input`, of so many halves of a gate, and the codes `output`; returns the blocks of a row."""
    check.dtype(input, float16, bfloat16)
    if check.row_size(input) % (halves * _BLOCK):
        raise input.error(f"expected a last dimension of multiples of {halves * _BLOCK}, got shape {input.shape}")
    blocks = input.shape[-1] // (halves * _BLOCK)
    check.dtype(output, uint8)
    expected = (*input.shape[:-1], blocks * _BLOCK // 2)
    if output.shape != expected:
        raise output.error(f"expected shape {expected} for an input of shape {input.shape}, got {output.shape}")
    check.row_size(output)
    for arg in (output, input):
        check.row_stride(arg)
    return blocks


def _check_scales(scales: TensorArg, columns: int, rows: int | None) -> None:
    """`scales` are as many bytes, or four to an int32, one after another; `rows` None may be any."""
    check.dtype(scales, float8_e4m3fn, uint8, *([] if columns % _TILE_COLUMNS else [int32]))
    check.sizes(scales, rows=rows, columns=columns // scales.dtype.itemsize)
    check.contiguous(scales)


def _tiles(num_rows: int, blocks: int) -> tuple[int, int]:
    """(columns, rows) of the scales of a matrix in tiles."""
    return rounded_up(blocks, _TILE_COLUMNS), rounded_up(num_rows, _TILE_ROWS)


def _launch(
    kernel: Kernel,
    output: TensorArg,
    scales: TensorArg,
    input: TensorArg,
    blocks: int,
    rows: int,
    fixed: dict[str, int],
    **constants: Any,
) -> Launch:
    """A launch over so many `rows` of scales for `blocks` blocks; a thread has some rows of one, one after another."""
    tiled, experts = constants.get("TILED", True), kernel is _scaled_fp4_experts_quant
    columns = rounded_up(blocks, _TILE_COLUMNS) if tiled else blocks
    row_threads = min(_THREADS, max(4, 1 << (columns - 1).bit_length()))
    chunks, step = -(-columns // row_threads), _THREADS // row_threads
    # Narrow rows need more registers, and so do those of experts with a gate as they are compiled for Blackwell.
    needs_more = row_threads < _THREADS or (constants.get("GATED") and input.device.arch.startswith(("sm_10", "sm_12")))
    plain = experts and not constants["GATED"]
    resident = (_RESIDENT_FEWER if needs_more else _RESIDENT_PLAIN if plain else _RESIDENT) // _THREADS
    at_once = input.device.multiprocessors * resident
    # Rows whose scales are written at once are one thread's, unless that leaves multiprocessors without.
    num_rows = check.num_rows(input)
    many = num_rows * chunks > _UNIT * step * at_once or num_rows <= _FEW_ROWS
    unit = _UNIT if tiled and (experts or many) else 1
    groups = -(-rows // (unit * step))
    if unit > 1:  # two of a thread, unless that makes more rounds of blocks; of experts some blocks have nothing to do
        one, two = (-(-groups * chunks // (units * at_once)) for units in (1, 2))
        more = one > 1 if experts else 2 * two <= one
        rounds = unit * (2 if more and 2 * unit * step <= _TILE_ROWS else 1)
    else:  # equal shares, so that blocks fill the device some times: a thread asks for its next row while it computes
        waves = -(-groups * chunks // (_MAX_WAVES * at_once))
        rounds = -(-groups * chunks // (max(1, waves) * at_once))
    grid = -(-groups * unit // max(1, rounds))
    return kernel(
        scalar_t=input.dtype,
        ACCESS=check.vector_width(_BLOCK, input),
        CODE_ACCESS=check.vector_width(_BLOCK // 2, output),
        SCALE_ACCESS=min(_TILE_COLUMNS, scales.alignment),
        **constants,
        NUM_THREADS=_THREADS,
        ROW_THREADS=row_threads,
        UNIT=unit,
        MIN_BLOCKS=resident,
    ).launch(
        grid=(chunks, min(grid, _MAX_GROUPS), -(-grid // _MAX_GROUPS)),
        block=_THREADS,
        num_rows=num_rows,
        output_stride=check.row_stride(output),
        input_stride=check.row_stride(input),
        blocks=blocks,
        columns=columns,
        rounds=rounds,
        **fixed,
    )


@op(out=("output", "output_scale"), ulps=0)
def scaled_fp4_quant(
    output: Tensor, input: Tensor, output_scale: Tensor, input_scale: Tensor, is_sf_swizzled_layout: bool
) -> None:
    """NVFP4: codes of e2m1 and, for every sixteen elements, a scale of e4m3, ``s = e4m3(g * (max|x| * (1/6)))``.

    ``output = e2m1(x * r)`` with ``r = 1 / (s * (1 / g))``, or 0 where s is 0, so that x is about ``output * s / g``.
    Every step is rounded to float32; codes and scales round to nearest even and saturate, at +-6 and 448. NaN is left
    out of the maximum and becomes +6. Two codes share a byte, the first in its lower half (NVIDIA 2025, "Pretraining
    Large Language Models with NVFP4", arXiv:2509.25149).

    Args:
        output: [..., hidden_size / 2] uint8, written; rows of one stride.
        input: [..., hidden_size], float16 or bfloat16, hidden_size a multiple of 16; rows of one stride.
        output_scale: written; contiguous, float8_e4m3fn or uint8 of [rows, columns], or int32 of [rows, columns / 4].
            With is_sf_swizzled_layout the rows are num_tokens rounded up to 128 and the columns hidden_size / 16
            rounded up to 4, in tiles (see the module) that are filled up with zeros; else [num_tokens, hidden_size /
            16].
        input_scale: one float32, g, which is multiplied in: normally ``448 * 6 / max|input|``.
        is_sf_swizzled_layout: whether scales lie in tiles.
    """
    codes, scales = _nvfp4(_rows(input), input_scale.reshape(1, 1))
    output.copy_(codes.reshape(output.shape))
    scales = _tiled(scales) if is_sf_swizzled_layout else scales.view(torch.uint8)
    output_scale.copy_(scales.view(output_scale.dtype))


@scaled_fp4_quant.plan
def plan_scaled_fp4_quant(
    output: TensorArg, input: TensorArg, output_scale: TensorArg, input_scale: TensorArg, is_sf_swizzled_layout: bool
) -> Launch:
    blocks, num_rows = _check_codes(output, input), check.num_rows(input)
    check.scalar(input_scale)
    columns, scale_rows = _tiles(num_rows, blocks) if is_sf_swizzled_layout else (blocks, num_rows)
    _check_scales(output_scale, columns, scale_rows)
    fixed = {"scale_rows": scale_rows}
    tiled = bool(is_sf_swizzled_layout)
    return _launch(_scaled_fp4_quant, output, output_scale, input, blocks, scale_rows, fixed, TILED=tiled)


@scaled_fp4_quant.example
def example_scaled_fp4_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 7152, 80] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    is_sf_swizzled_layout: bool = True,
) -> tuple[Any, ...]:
    blocks = hidden_size // _BLOCK
    columns, rows = _tiles(num_tokens, blocks) if is_sf_swizzled_layout else (blocks, num_tokens)
    return (
        make.empty(num_tokens, hidden_size // 2, dtype="uint8"),
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.empty(rows, columns, dtype="float8_e4m3fn"),
        make.full(1, value=400.0, dtype="float32"),
        is_sf_swizzled_layout,
    )


@op(out=("result", "result_block_scale"), ulps=0)
def silu_and_mul_nvfp4_quant(
    result: Tensor, result_block_scale: Tensor, input: Tensor, input_global_scale: Tensor
) -> None:
    """`scaled_fp4_quant` of a gated activation: of ``T(silu(gate) * up)`` for the halves ``input = [gate, up]``.

    The product is computed in float32 and rounded to the element type once, where `silu_and_mul` rounds twice.

    Args:
        result: [..., hidden_size / 2] uint8, written; rows of one stride.
        result_block_scale: written; in tiles that are filled up with zeros, as `scaled_fp4_quant` takes them.
        input: [..., 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 16; rows of one stride.
        input_global_scale: one float32, which is multiplied in.
    """
    codes, scales = _nvfp4(_rows(_gated(input)), input_global_scale.reshape(1, 1))
    result.copy_(codes.reshape(result.shape))
    result_block_scale.copy_(_tiled(scales).view(result_block_scale.dtype))


@silu_and_mul_nvfp4_quant.plan
def plan_silu_and_mul_nvfp4_quant(
    result: TensorArg, result_block_scale: TensorArg, input: TensorArg, input_global_scale: TensorArg
) -> Launch:
    blocks = _check_codes(result, input, halves=2)
    check.scalar(input_global_scale)
    columns, scale_rows = _tiles(check.num_rows(input), blocks)
    _check_scales(result_block_scale, columns, scale_rows)
    fixed = {"scale_rows": scale_rows}
    return _launch(_silu_and_mul_nvfp4_quant, result, result_block_scale, input, blocks, scale_rows, fixed)


@silu_and_mul_nvfp4_quant.example
def example_silu_and_mul_nvfp4_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 7152, 80] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    columns, rows = _tiles(num_tokens, hidden_size // _BLOCK)
    return (
        make.empty(num_tokens, hidden_size // 2, dtype="uint8"),
        make.empty(rows, columns // 4, dtype="int32"),
        make.randn(num_tokens, 2 * hidden_size, dtype=dtype),
        make.full(1, value=100.0, dtype="float32"),
    )


# Rows of experts


def _write_experts(
    output: Tensor, output_scale: Tensor, x: Tensor, scale: Tensor, offsets: Tensor, tile_offsets: Tensor
) -> None:
    columns = rounded_up(x.shape[1] // _BLOCK, _TILE_COLUMNS)
    flat = output_scale.view(torch.uint8).reshape(-1).clone()
    for expert, (first, end) in enumerate(pairwise(offsets.tolist())):
        if not 0 <= first <= end <= x.shape[0]:
            break
        start, rows = int(tile_offsets[expert]) * columns, slice(first, end)
        size = rounded_up(end - first, _TILE_ROWS) * columns
        if size and 0 <= start <= flat.numel() - size:
            output[rows], scales = _nvfp4(x[rows], scale.reshape(-1)[expert].reshape(1, 1))
            flat[start : start + size] = _tiled(scales).flatten()
    output_scale.copy_(flat.view(output_scale.dtype).view(output_scale.shape))


def _plan_experts(
    output: TensorArg,
    output_scale: TensorArg,
    input: TensorArg,
    scale: TensorArg,
    offsets: TensorArg,
    tile_offsets: TensorArg,
    halves: int,
) -> Launch:
    if len(input.shape) != 2:
        raise input.error(f"expected 2 dimensions, got shape {input.shape}")
    blocks = _check_codes(output, input, halves)
    num_experts = check.row_size(scale)
    check.shape(scale, float32, num_experts=num_experts)
    for arg in (offsets, tile_offsets):
        check.shape(arg, int32, num_offsets=num_experts + 1)
    columns, _ = _tiles(0, blocks)
    _check_scales(output_scale, columns, None)
    fixed = {"scale_rows": output_scale.shape[0], "num_experts": num_experts}
    # The last tile of an expert that has rows is filled up.
    tiles = (input.shape[0] + (_TILE_ROWS - 1) * min(num_experts, input.shape[0])) // _TILE_ROWS if num_experts else 0
    return _launch(
        _scaled_fp4_experts_quant, output, output_scale, input, blocks, tiles * _TILE_ROWS, fixed, GATED=halves == 2
    )


def _outside(num_rows: int, scale_rows: int, offsets: Tensor, tile_offsets: Tensor) -> dict[str, Tensor]:
    """Offsets that no rows, or no tiles, are at; those of experts without rows may be anything."""
    first, end = offsets[:-1].long(), offsets[1:].long()
    tile, padded = tile_offsets[:-1].long(), (end - first + _TILE_ROWS - 1) // _TILE_ROWS * _TILE_ROWS
    return {
        "input_offset_by_experts": (offsets < 0) | (offsets > num_rows) | torch.nn.functional.pad(end < first, (1, 0)),
        "output_scale_offset_by_experts": torch.nn.functional.pad(
            (end > first) & ((tile < 0) | (tile + padded > scale_rows)), (0, 1)
        ),
    }


def _experts_example(make: Any, num_tokens: int, hidden_size: int, dtype: str, halves: int) -> tuple[Any, ...]:
    """Five experts: the second has no rows, the last what is left."""
    share = num_tokens // 3
    counts = [share, 0, num_tokens // 7, share, num_tokens - 2 * share - num_tokens // 7]
    padded = [rounded_up(count, _TILE_ROWS) for count in counts]

    def offsets(sizes: Sequence[int]) -> Any:
        return make.values([sum(sizes[:i]) for i in range(len(sizes) + 1)], dtype="int32")

    columns, _ = _tiles(0, hidden_size // _BLOCK)
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
    """`scaled_fp4_quant` of rows that belong to experts, each of which has a scale of its own and scales in own tiles.

    Rows ``o[e]`` to ``o[e + 1] - 1`` are those of expert e; their scales lie in tiles, from row ``t[e]`` of
    `output_scale` on, counted within the expert. What fills up the last tile of an expert becomes 0; what lies behind
    it stays. Experts may have no rows. Nothing is written for experts from the first offset on that is below 0, below
    the one before or beyond the rows, nor for one whose tiles are not all there.

    Args:
        output: [num_tokens, hidden_size / 2] uint8, written; rows of one stride.
        output_scale: [rows, columns / 4] int32, or [rows, columns] uint8 or float8_e4m3fn, columns being hidden_size /
            16 rounded up to 4, contiguous, written.
        input: [num_tokens, hidden_size], float16 or bfloat16, hidden_size a multiple of 16; rows of one stride.
        input_global_scale: [num_experts] float32, contiguous; multiplied in.
        input_offset_by_experts: [num_experts + 1] int32, contiguous: o.
        output_scale_offset_by_experts: [num_experts + 1] int32, contiguous: t, in rows, multiples of 128.
    """
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    _write_experts(output, output_scale, input, input_global_scale, *offsets)


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
) -> dict[str, Tensor]:
    return _outside(input.shape[0], output_scale.shape[0], input_offset_by_experts, output_scale_offset_by_experts)


@scaled_fp4_experts_quant.example
def example_scaled_fp4_experts_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 7152, 80] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    return _experts_example(make, num_tokens, hidden_size, dtype, halves=1)


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

    The product is computed in float32 and rounded to the element type once.

    Args:
        output, output_scale, input_global_scale, input_offset_by_experts, output_scale_offset_by_experts: as
            `scaled_fp4_experts_quant` takes them.
        input: [num_tokens, 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 16; rows of one stride.
    """
    offsets = input_offset_by_experts, output_scale_offset_by_experts
    _write_experts(output, output_scale, _gated(input), input_global_scale, *offsets)


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
) -> dict[str, Tensor]:
    return _outside(input.shape[0], output_scale.shape[0], input_offset_by_experts, output_scale_offset_by_experts)


@silu_and_mul_scaled_fp4_experts_quant.example
def example_silu_and_mul_scaled_fp4_experts_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 7152, 80] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    return _experts_example(make, num_tokens, hidden_size, dtype, halves=2)
