"""NVFP4: e2m1 values (4 bits), an e4m3 scale for each sixteen contiguous elements, and one scale of the tensor.

The kernels run on any GPU: their arithmetic gives the bits of a conversion to e2m1. ``g`` is the global
scale, a factor of the input, normally ``448 * 6 / max|x|``; ``a`` is the largest magnitude of the sixteen elements:

    s = e4m3(g * (a * (1/6)))        q = e2m1(x * r), r = 1 / (s * (1 / g)) or 0 where s is 0

Then ``x`` is about ``q * s / g``. Every step is rounded to float32; the conversions to e2m1 and e4m3 round to
nearest even, and saturate at +-6 and 448. The maximum ignores NaN; q of a NaN is +6; -0 and numbers that round to it
keep their sign. Two e2m1 values share a byte, the first in its low nibble. The magnitudes of e2m1 are 0, 0.5, 1, 1.5,
2, 3, 4 and 6.

If ``g`` is 0, all s and q are 0. If ``g`` is negative, so are the scales, and dequantized values have the right sign. A
NaN ``g`` gives scales of 448 and q of +6; an infinite ``g`` gives scales of +-448 and q of +-6, for x = 0 of +6.

GEMMs on Blackwell read scales in tiles (`_shared/fp4_tiles.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float16, int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from .._shared.fp4_tiles import BLOCK, TILE_COLUMNS, TILE_ROWS, rounded_up

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

# Midpoints between the adjacent magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Those of the first tuple round down to even,
# those of the second round up.
_TIES_DOWN, _TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


# References


def e2m1(x: Tensor) -> Tensor:
    """Convert float32 to e2m1 bits, one value per byte; NaN becomes 6."""
    magnitude = x.abs()
    quantized = torch.zeros_like(x, dtype=torch.uint8)
    for middle in _TIES_DOWN:
        quantized += magnitude > middle
    for middle in _TIES_UP:
        quantized += magnitude >= middle
    return torch.where(x.isnan(), 7, quantized + 8 * x.signbit().byte()).byte()


def nvfp4(input: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(packed e2m1 values; e4m3 scales) of `input` [num_rows, hidden_size]; `scale` is g, float32 [num_rows, 1]."""
    x = input.float().unflatten(-1, (-1, BLOCK))
    g = scale.unsqueeze(-1)
    a = fp8.absmax(x)
    scales = fp8.saturate(g * (a * torch.full_like(a, 1 / 6)), torch.float8_e4m3fn)
    s = scales.float()
    quantized = e2m1(x * torch.where(s == 0, 0.0, 1.0 / (s * (1.0 / g)))).flatten(-2)
    return quantized[:, 1::2] << 4 | quantized[:, ::2], scales.squeeze(-1)


def matrix(x: Tensor) -> Tensor:
    """`x` as [num_rows, last size]."""
    return x.reshape(-1, x.shape[-1])


def gated(input: Tensor) -> Tensor:
    """``T(silu(gate) * up)`` for the halves ``input = [gate, up]``."""
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


# Checks


def check_codes(output: TensorArg, input: TensorArg, halves: int = 1) -> int:
    """Check `input` (with `halves` = 2 if gated) and the packed `output`; returns the scales per row."""
    check.dtype(input, float16, bfloat16)
    if check.row_size(input) % (halves * BLOCK):
        raise input.error(f"expected a last dimension of multiples of {halves * BLOCK}, got shape {input.shape}")
    blocks = input.shape[-1] // (halves * BLOCK)
    check.dtype(output, uint8)
    expected = (*input.shape[:-1], blocks * BLOCK // 2)
    if output.shape != expected:
        raise output.error(f"expected shape {expected} for an input of shape {input.shape}, got {output.shape}")
    check.row_size(output)
    for arg in (output, input):
        check.row_stride(arg)
    return blocks


def check_scales(scales: TensorArg, columns: int, rows: int | None) -> None:
    """Check contiguous scales: `rows` (any number if None) x `columns` bytes, or a quarter as many int32."""
    check.dtype(scales, float8_e4m3fn, uint8, *([] if columns % TILE_COLUMNS else [int32]))
    check.sizes(scales, rows=rows, columns=columns // scales.dtype.itemsize)
    check.contiguous(scales)


# Launches

# Measured: docs/performance/quantize.md, NVFP4.
_NUM_THREADS = 128  # threads of a block
_MIN_ROW_THREADS = 4  # fewest threads along a row
# Resident threads per SM, which bound the registers: 1152 for experts without a gate (13.6 us; 14.3 us with 1024), 1024
# for others. More registers, with 640: rows narrower than a block, experts with a gate on sm_10x and sm_12x, all gates
# on sm_75.
_RESIDENT_EXPERTS, _RESIDENT, _RESIDENT_FEWER = 1152, 1024, 640
_NEED_MORE_REGISTERS = ("sm_10", "sm_12")
_UNIT = 4  # rows of a unit: a thread stores their scales as one word; in a tile they are spaced by 32 rows
_MAX_FEW_ROWS = 32  # most rows for units in small inputs; from 33 to about 500 rows single rows are faster
_MAX_ROUNDS = 12  # most rows per thread, so that rows read at the same time are close in memory
_MAX_CANDIDATE_ROUNDS = 32  # most rows per thread that tuning tries
_MAX_GRID = 65535  # largest grid dimension y and z


@dataclass(frozen=True)
class Fp4Problem:
    """The input of `choose`.

    Attributes:
        num_rows: rows of the input.
        scale_rows, columns: rows and columns of scales, including the padding of tiles.
        tiled: whether scales lie in tiles.
        experts: whether rows belong to experts.
        gated: whether the input has gates and ups.
    """

    num_rows: int
    scale_rows: int
    columns: int
    tiled: bool = True
    experts: bool = False
    gated: bool = False

    def bucket(self) -> str:
        kinds = {"tiled": self.tiled, "experts": self.experts, "gated": self.gated}
        words = [f"rows={tuning.power_of_two(self.num_rows)}", f"columns={self.columns}"]
        return " ".join(words + [kind for kind, holds in kinds.items() if holds])


@dataclass(frozen=True)
class Fp4Config:
    """The geometry of the NVFP4 kernels. A thread quantizes one group of sixteen elements in each of its rows.

    Attributes:
        row_threads: adjacent threads along a row.
        unit: rows of a thread with scales that it stores as one word.
        rounds: rows per thread, a multiple of `unit`.
        min_blocks: resident blocks per SM.
    """

    row_threads: int
    unit: int
    rounds: int
    min_blocks: int

    def grid(self, problem: Fp4Problem) -> tuple[int, int, int]:
        """(blocks along a row, blocks along rows), the latter in two dimensions."""
        block_rows = _NUM_THREADS // self.row_threads
        row_units = -(-problem.scale_rows // (self.unit * block_rows)) * self.unit
        below = -(-row_units // max(1, self.rounds))
        return -(-problem.columns // self.row_threads), min(below, _MAX_GRID), -(-below // _MAX_GRID)

    def candidates(self, problem: Fp4Problem, device: Device) -> list[Fp4Config]:
        """Other threads along a row, units, rows per thread and register bounds. With experts a block stays in one
        tile."""
        rounds = tuning.beside(self.rounds, self.unit, _MAX_CANDIDATE_ROUNDS)
        found = tuning.varied(
            self,
            row_threads=tuning.beside(self.row_threads, _MIN_ROW_THREADS, _NUM_THREADS),
            rounds=[count for count in rounds if count % self.unit == 0],
            min_blocks=tuning.occupancies(_NUM_THREADS, self.min_blocks),
        )
        if problem.tiled:
            unit = 1 if self.unit == _UNIT else _UNIT
            found.append(replace(self, unit=unit, rounds=rounded_up(self.rounds, unit)))
        max_rows = TILE_ROWS if problem.experts else problem.scale_rows
        return [one for one in found if one.rounds * (_NUM_THREADS // one.row_threads) <= max_rows]


def choose(problem: Fp4Problem, device: Device) -> Fp4Config:
    """Units of four rows if they leave no SM idle, else single rows, as many per thread as make whole waves."""
    row_threads = min(_NUM_THREADS, max(_MIN_ROW_THREADS, 1 << (problem.columns - 1).bit_length()))
    min_blocks = _resident_threads(problem, row_threads, device) // _NUM_THREADS
    wave = device.num_sms * min_blocks  # blocks that run at the same time
    row_blocks, block_rows = -(-problem.columns // row_threads), _NUM_THREADS // row_threads

    fills_device = problem.num_rows * row_blocks > _UNIT * block_rows * wave
    wants_units = problem.experts or fills_device or problem.num_rows <= _MAX_FEW_ROWS
    unit = _UNIT if problem.tiled and wants_units else 1
    groups = -(-problem.scale_rows // (unit * block_rows))  # blocks along the rows, with one unit per thread
    blocks = groups * row_blocks
    if unit > 1:
        # Two units per thread, unless that takes longer. (With experts some blocks have no rows.)
        waves, waves_of_two = -(-blocks // wave), -(-blocks // (2 * wave))
        takes_two = waves > 1 if problem.experts else 2 * waves_of_two <= waves
        rounds = unit * (2 if takes_two and 2 * unit * block_rows <= TILE_ROWS else 1)
    else:
        # Equal numbers of rows per thread; a thread prefetches its next row while it computes.
        waves = -(-blocks // (_MAX_ROUNDS * wave))
        rounds = -(-blocks // (max(1, waves) * wave))
    return Fp4Config(row_threads, unit, rounds, min_blocks)


def _resident_threads(problem: Fp4Problem, row_threads: int, device: Device) -> int:
    crowded = device.arch == "sm_75" or (problem.experts and device.arch.startswith(_NEED_MORE_REGISTERS))
    if row_threads < _NUM_THREADS or (problem.gated and crowded):
        return _RESIDENT_FEWER
    return _RESIDENT_EXPERTS if problem.experts and not problem.gated else _RESIDENT


def launch(
    kernel: Kernel,
    output: TensorArg,
    scales: TensorArg,
    input: TensorArg,
    problem: Fp4Problem,
    fixed: dict[str, int],
    **constants: Any,
) -> Launch:
    """The launch of an NVFP4 kernel; `fixed` and `constants` are specific to the kernel."""
    config = tuning.config(input.op, problem, input.device, choose)
    return kernel(
        scalar_t=input.dtype,
        ACCESS=check.vector_width(BLOCK, input),
        CODE_ACCESS=check.vector_width(BLOCK // 2, output),
        SCALE_ACCESS=min(TILE_COLUMNS, scales.alignment),
        **constants,
        NUM_THREADS=_NUM_THREADS,
        ROW_THREADS=config.row_threads,
        UNIT=config.unit,
        MIN_BLOCKS=config.min_blocks,
    ).launch(
        grid=config.grid(problem),
        block=_NUM_THREADS,
        num_rows=problem.num_rows,
        output_stride=check.row_stride(output),
        input_stride=check.row_stride(input),
        blocks=2 * output.shape[-1] // BLOCK,
        columns=problem.columns,
        rounds=config.rounds,
        **fixed,
    )
