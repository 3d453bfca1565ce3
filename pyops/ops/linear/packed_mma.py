"""GEMMs with packed weights by mma.sync, for small M: the geometry of wq_gemm_sm80.cu, and its choice with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16
from .gemm_rates import CLUSTERS
from .packed_problem import PackedProblem
from .packed_shape import PackedShape

_wq_gemm_sm80 = Kernel("linear/wq_gemm_sm80.cu")

TILE_N = 64  # smallest tile N; N must be a multiple of it
_MIN_STAGES, _MAX_STAGES = 2, 3  # stages: k-tiles of a warp in shared memory
_WORDS = 512  # rows * bits of a k-tile with 64 columns: 32 words per lane
_SHORT_STEP = 128  # rows of a k-tile of 3-bit weights and of 2:4 sparse weights
# Measured on an H200: docs/performance/packed.md.
_MAX_WARPS = 8  # experts: most warps of a CTA
_WARPS_OF_MANY = 4  # experts: warps of a CTA where the grid exceeds one wave; with one warp it took a quarter longer
# Warps per SM that registers allow, by rows and columns of a tile.
_RESIDENT = {(1, 64): 16, (2, 64): 16, (4, 64): 16, (8, 64): 16, (16, 64): 12}
_RESIDENT |= {(1, 128): 12, (2, 128): 12, (4, 128): 12, (8, 128): 12, (16, 128): 8}
_RESIDENT_OF_GROUPS = 8  # warps per SM that registers allow where a k-tile has several groups
_MAX_ROWS = 16  # most rows of a tile
_MAX_ROWS_OF_GROUPS = 8  # most rows of a tile with several groups in a k-tile, or integer scales: 16 would spill
# Most rows where lanes hold the next k-tile in registers, for bfloat16 with 8-bit integers: 16 would spill.
_MAX_HELD_NIBBLES = 8
# Chosen by arithmetic, not yet measured.
_LONG_PART = 4  # experts: k-tiles per warp from which a CTA takes all warps that an SM holds


@dataclass(frozen=True, slots=True)
class PackedMmaConfig:
    """The geometry of wq_gemm_sm80.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        warps: warps of a CTA; each takes a part of K.
        splits: CTAs of a cluster; each takes a part of K.
        min_blocks: CTAs per SM; bounds the registers.
        held: lanes hold the packed words of the next k-tile in registers; else they go through shared memory.
    """

    tile_m: int
    tile_n: int
    warps: int
    splits: int
    min_blocks: int
    held: bool = False

    def __post_init__(self) -> None:
        resident = _RESIDENT.get((self.tile_m, self.tile_n), 0)
        if self.splits not in (1, 2, 4, 8) or not 1 <= self.warps <= self.warps * self.min_blocks <= resident:
            raise ValueError(f"no geometry of wq_gemm_sm80.cu: {self}")

    def candidates(self, problem: PackedProblem, device: Device) -> list[PackedMmaConfig]:
        """Other tiles, warps and splits."""
        shape = PackedShape.of(problem)
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, min(tuning.power_of_two(problem.m), 8), 16),
            tile_n=_tile_columns(shape),
            warps=tuning.beside(self.warps, 1, 16),
            splits=tuning.beside(self.splits, 1, device.cluster),
            min_blocks=(self.min_blocks - 1, self.min_blocks + 1),
            held=(False, True) if shape.bits in shape.format.held_rows else (False,),
        )
        return [one for one in found if one.fits(shape, device)]

    def _stage_bytes(self, shape: PackedShape) -> int:
        """Bytes of a stage of a warp: quantized weights, rows of a, scales and zero points."""
        step = step_rows(shape, self.tile_n)
        terms = -(-shape.groups_of(step) * shape.group_bits * self.tile_n // 128) * 16
        codes = 0 if self.held else step * self.tile_n * shape.bits // 8
        places = 0
        if shape.is_sparse:  # half of the rows are stored, with metadata
            codes, places = codes // 2, step // 32 * self.tile_n * 4
        return codes + self.tile_m * step * 2 + terms + places

    def fits(self, shape: PackedShape, device: Device) -> bool:
        """Whether the fewest stages fit into the shared memory of a CTA."""
        return self.warps * _MIN_STAGES * self._stage_bytes(shape) <= device.shared_memory

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """A cluster of CTAs for each tile."""
        weight, device, shape = problem.weight, problem.device, PackedShape.of(problem)
        stage = self._stage_bytes(shape)
        # Bytes of shared memory of a warp.
        own = ((device.shared_memory + 1024) // self.min_blocks - 1024) // self.warps
        stages = max(_MIN_STAGES, min(_MAX_STAGES, own // stage))
        sums = self.tile_n * max(8, self.tile_m) * 4
        kernel = problem.kernel(_wq_gemm_sm80)
        launch = kernel(
            **problem.constants(),
            WHOLE_STEPS=weight.k % step_rows(shape, self.tile_n) == 0,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            WARPS=self.warps,
            SPLITS=self.splits,
            STAGES=stages,
            HELD=self.held,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (-(-problem.places // self.tile_m) * (weight.n // self.tile_n), self.splits),
            self.warps * 32,
            self.warps * max(stages * stage, sums),
            **problem.arguments(kernel),
        )
        return [launch]


def configs(shape: PackedShape, device: Device) -> Iterator[PackedMmaConfig]:
    """Tiles of all rows of a, or of 8 and 16; K split over any number of CTAs and warps that registers allow."""
    max_rows = _max_rows(shape)
    for tile_m in sorted({min(tuning.power_of_two(shape.m), most) for most in (8, max_rows)}):
        for tile_n in _tile_columns(shape):
            steps, resident = -(-shape.k // step_rows(shape, tile_n)), _resident(shape, tile_m, tile_n)
            for splits in CLUSTERS:
                if splits > min(steps, device.cluster):
                    continue
                held = splits == 1 and shape.m <= _max_held_rows(shape)
                most = min(resident, -(-steps // splits))
                for warps in range(1, most + 1):
                    one = PackedMmaConfig(tile_m, tile_n, warps, splits, resident // warps, held)
                    fills = warps == most or resident // (warps + 1) < resident // warps
                    if fills and one.fits(shape, device):
                        yield one


def step_rows(shape: PackedShape, tile_n: int) -> int:
    """Weight rows of a k-tile with `tile_n` columns."""
    is_short = shape.bits == 3 or shape.is_sparse
    return _SHORT_STEP if is_short else _WORDS // shape.bits * 64 // tile_n


def _tile_columns(shape: PackedShape) -> tuple[int, ...]:
    """Columns of a tile: 128, too, where 64 columns are only 32 bytes of a row."""
    wide = shape.format.is_across and shape.n % 128 == 0 and shape.divides(step_rows(shape, 128))
    return (64, 128) if wide else (64,)


def _max_rows(shape: PackedShape) -> int:
    """Most rows of a tile that registers allow."""
    several = shape.groups_of(step_rows(shape, TILE_N)) > 1
    return _MAX_ROWS_OF_GROUPS if several or shape.scale_kind == "int16" else _MAX_ROWS


def _resident(shape: PackedShape, tile_m: int, tile_n: int) -> int:
    """Warps per SM that registers allow."""
    several = shape.groups_of(step_rows(shape, tile_n)) > 1
    return min(_RESIDENT[tile_m, tile_n], _RESIDENT_OF_GROUPS if several else 16)


def _max_held_rows(shape: PackedShape) -> int:
    """Most rows where lanes hold the packed words of the next k-tile in registers."""
    most = shape.format.held_rows.get(shape.bits, 0)
    # Both nibbles of a byte are held as numbers.
    nibbles = shape.type.is_integer and shape.bits == 8 and shape.dense.dtype is bfloat16
    return min(most, _MAX_HELD_NIBBLES) if nibbles else most


def fitting(config: PackedMmaConfig, shape: PackedShape, device: Device) -> PackedMmaConfig:
    """`config` with fewer warps per CTA where shared memory requires it."""
    while config.warps > 1 and not config.fits(shape, device):
        config = replace(config, warps=config.warps - 1)
    return config


def choose_mma(
    m: int,
    tile_n: int,
    n: int,
    steps: int,
    device: Device,
    several_groups: bool = False,
    weights: int = 1,
    max_rows: int = 16,
    min_warps: int = 1,
) -> PackedMmaConfig:
    """With experts: the config for m rows of each of `weights` weights: K is split over as many warps as the
    device holds at a time.

    A CTA has at most eight warps, unless the warps of the device would otherwise stay half idle because clusters do not
    fit.
    `max_rows`: most rows of a tile. With several groups in a k-tile, or integer scales, a thread needs more registers,
    and 16 rows would spill. `min_warps`: fewest warps of a CTA, as far as k-tiles and registers allow.
    """
    tile_m = min(m, 8 if several_groups else max_rows)
    resident = min(_RESIDENT_OF_GROUPS if several_groups else 16, _RESIDENT[tile_m, tile_n])
    tiles = weights * -(-m // tile_m) * (n // tile_n)
    clusters = {size: int(part * device.num_sms) for size, part in CLUSTERS.items() if size <= device.cluster}
    splits = max(size for size, count in clusters.items() if size == 1 or (tiles <= count and size <= steps))
    blocks = -(-tiles * splits // device.num_sms)  # CTAs per SM
    # In a grid of more than one wave, several warps per tile make the last wave shorter.
    warps = resident // blocks or _WARPS_OF_MANY
    max_warps = resident if splits == 1 and steps >= _LONG_PART * resident else _MAX_WARPS
    warps = max(1, min(max_warps, resident, max(warps, min_warps), -(-steps // splits)))
    return PackedMmaConfig(tile_m, tile_n, warps, splits, resident // warps)
