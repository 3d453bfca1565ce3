"""GEMMs with packed weights by mma.sync, for large M: the geometry of wq_gemm_sm80_large_m.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from .packed_problem import PackedProblem
from .packed_shape import PackedShape

_wq_gemm_sm80_large_m = Kernel("linear/wq_gemm_sm80_large_m.cu")

STEP = 64  # weight rows of a k-tile
COLUMNS = 64  # columns of a warp
_MAX_WARP_ROWS = 64  # most rows of a warp: 128 accumulators of a thread
# Most rows of a warp, where more would spill: with 2 bits, where a part of a k-tile is all of it; in layouts that hold
# several rows of a column, or columns of a row, in a word, with two warps along M or several groups in a k-tile.
_MAX_ROWS_OF_2_BITS, _MAX_ROWS_OF_WORDS = 32, 48
_MIN_WARP_ROWS = 32  # fewest rows of a warp: for fewer, dequantization takes longer than MMAs
_MAX_STAGES = 4  # most k-tiles in shared memory
_MAX_PARTS = 8  # stream-K: most CTAs for a tile of the last wave
_WARPS = (2, 4, 1), (1, 4, 1), (1, 2, 1), (1, 4, 2)  # warps of a CTA along M and N, and teams of them along K
_MORE_ROW_TILES = 2  # numbers of row tiles that come into question, from the fewest on
_EXPERT_WARP_ROWS = 16, 32, 48, 64  # experts: rows of a warp
EXPERT_WARPS_N = 4  # experts: warps of a CTA along N; with two, tiles of 64 rows would spill
_ROW_ID_BYTES = 4  # experts: bytes of static shared memory of a row of the tile
_THREADS = 256  # threads of an SM: two warps for each of its tensor cores


@dataclass(frozen=True, slots=True)
class LargeGeometry:
    """The common geometry of the entries of wq_gemm_sm80_large_m.cu; the attributes are their constants.

    Attributes:
        tile_m: rows of a warp.
        warps_m, warps_n: warps of a CTA along M and N; each has 64 columns.
        min_blocks: CTAs per SM; bounds the registers.
        warps_k: teams of these warps, which split K; 1 with experts.
    """

    tile_m: int
    warps_m: int
    warps_n: int
    min_blocks: int
    warps_k: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        rows = self.tile_m % 16 == 0 and 16 <= self.tile_m <= _MAX_WARP_ROWS
        warps = self.warps_m in (1, 2) and self.warps_n in (2, 4) and self.warps_k in (1, 2, 4)
        warps = warps and self.warps * self.min_blocks <= 8
        if not (rows and warps and self.min_blocks > 0):
            raise ValueError(f"no geometry of wq_gemm_sm80_large_m.cu: {self}")

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n * self.warps_k

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warps_m * self.tile_m

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.warps_n * COLUMNS

    def stage_bytes(self, column_bits: int) -> int:
        """Bytes of the teams' k-tiles in shared memory: rows of a, and `column_bits` of each column of the weight."""
        return self.warps_k * (self.rows * STEP * 2 + column_bits * self.columns // 8)

    def stages_of(self, column_bits: int, device: Device, *, of_experts: bool) -> int:
        """k-tiles in shared memory, with experts next to the rows of the tile."""
        space = (device.shared_memory + 1024) // self.min_blocks - 1024 - self.rows * _ROW_ID_BYTES * of_experts
        return min(_MAX_STAGES, space // self.stage_bytes(column_bits))

    def constants(self) -> dict[str, int]:
        """The compile-time constants."""
        return {
            "TILE_M": self.tile_m,
            "TILE_N": COLUMNS,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k,
            "HELD": False,
            "MIN_BLOCKS": self.min_blocks,
        }


@dataclass(frozen=True, slots=True)
class PackedLargeConfig(LargeGeometry):
    """The geometry of wq_gemm_sm80_large_m.

    Attributes:
        sharers: stream-K: CTAs that share, along K, each tile of a last wave that is not full, as far as there are CTAs
            for it; 1: no stream-K.
    """

    sharers: int = 1

    def __post_init__(self) -> None:
        LargeGeometry.__post_init__(self)
        if not 0 < self.sharers <= _MAX_PARTS:
            raise ValueError(f"no geometry of wq_gemm_sm80_large_m.cu: {self}")

    def candidates(self, problem: PackedProblem, device: Device) -> list[PackedLargeConfig]:
        """Other tiles, and without experts stream-K."""
        shape, experts = PackedShape.of(problem), problem.experts
        found = tuning.varied(
            self,
            tile_m=(self.tile_m - 16, self.tile_m + 16),
            warps_m=(1, 2),
            warps_n=(2, 4),
            min_blocks=(1, 2),
            sharers=(1, 2, 4, 8) if experts is None else (1,),
            warps_k=(1, 2) if experts is None else (1,),
        )
        fitting = (one for one in found if one.fits(shape, device, of_experts=experts is not None))
        return [one for one in fitting if experts is None or experts.lists.block_size % one.rows == 0]

    def waves(self, m: int, n: int, device: Device) -> tuple[int, int]:
        """(full waves, tiles of the last wave if it is not full, else 0)."""
        return divmod(-(-m // self.rows) * -(-n // self.columns), device.num_sms * self.min_blocks)

    def num_sharers(self, rest: int, k_tiles: int, device: Device) -> int:
        """CTAs of a last wave of `rest` tiles; as many as it has tiles: no stream-K."""
        most = min(device.num_sms * self.min_blocks, rest * min(k_tiles, self.sharers))
        return max(rest, most)

    def fits(self, shape: PackedShape, device: Device, *, of_experts: bool = False) -> bool:
        """Whether registers and shared memory suffice."""
        stages = self.stages_of(_column_bits(shape), device, of_experts=of_experts)
        # The accumulators of a team pass through the memory of the stages.
        adds = self.warps_k == 1 or (
            shape.k % (self.warps_k * STEP) == 0
            and self.rows * self.columns * 4 <= stages * self.stage_bytes(_column_bits(shape))
        )
        return stages >= 2 and adds and self.tile_m <= max_warp_rows(shape, self.warps_m)

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """A persistent grid."""
        weight, device, shape = problem.weight, problem.device, PackedShape.of(problem)
        column_bits = _column_bits(shape)
        stages = self.stages_of(column_bits, device, of_experts=problem.experts is not None)
        full, rest = self.waves(problem.places, weight.n, device)
        sharers = self.num_sharers(rest, weight.k // (self.warps_k * STEP), device)
        parts = rest + sharers - 1 if sharers > rest else 0  # parts of all stream-K tiles
        kernel = problem.kernel(_wq_gemm_sm80_large_m)
        launch = kernel(
            **problem.constants(),
            **self.constants(),
            STAGES=stages,
            CUT=self.sharers > 1,
        ).launch(
            device.num_sms * self.min_blocks if full else max(rest, sharers),
            self.warps * 32,
            stages * self.stage_bytes(column_bits),
            partial=Scratch(parts * self.rows * self.columns * 4) if parts else 0,
            arrived=Scratch(rest * self.warps // self.warps_k * 4, zeroed=True) if parts else 0,
            sharers=max(1, sharers),
            **problem.arguments(kernel),
        )
        return [launch]


def configs(shape: PackedShape, device: Device) -> Iterator[PackedLargeConfig]:
    """Tiles of equal rows, of the fewest row tiles or of one more; the last wave whole, or by stream-K; K whole, or
    split over teams."""
    for warps_m, warps_n, warps_k in _WARPS:
        fewest = -(-shape.m // (warps_m * max_warp_rows(shape, warps_m)))
        counts = range(fewest, fewest + _MORE_ROW_TILES)
        rows = {max(_MIN_WARP_ROWS, -(-shape.m // (16 * warps_m * count)) * 16) for count in counts}
        for tile_m in sorted(rows):
            one = _filling(tile_m, warps_m, warps_n, warps_k)
            if not one.fits(shape, device):
                continue
            rest = one.waves(shape.m, shape.n, device)[1]
            # Teams with stream-K took 4 to 6 us more than the model says, for 32 and 64 rows.
            for sharers in (1, 2, 4, 8) if warps_k == 1 else (1,):
                cut = replace(one, sharers=sharers)
                if sharers == 1 or cut.num_sharers(rest, shape.k // STEP, device) > rest:
                    yield cut


def expert_configs(shape: PackedShape, block_size: int, device: Device) -> Iterator[PackedLargeConfig]:
    """The tiles that divide blocks of the sorted lists."""
    for tile_m, warps_m in expert_tiles(block_size):
        one = _filling(tile_m, warps_m, EXPERT_WARPS_N)
        if one.fits(shape, device, of_experts=True):
            yield one


def expert_tiles(block_size: int) -> Iterator[tuple[int, int]]:
    """(rows of a warp, warps along M) of the tiles that divide blocks of the sorted lists."""
    for warps_m in (2, 1):
        for tile_m in _EXPERT_WARP_ROWS:
            if block_size % (warps_m * tile_m) == 0:
                yield tile_m, warps_m


def blocks_of(warps: int) -> int:
    """CTAs of this many warps that an SM takes at a time."""
    return _THREADS // (32 * warps)


def _filling(tile_m: int, warps_m: int, warps_n: int, warps_k: int = 1) -> PackedLargeConfig:
    """The config with as many CTAs as an SM takes."""
    return PackedLargeConfig(tile_m, warps_m, warps_n, blocks_of(warps_m * warps_n * warps_k), warps_k=warps_k)


def _column_bits(shape: PackedShape) -> int:
    """Bits of a column of a k-tile: quants, scales and zero points."""
    return STEP * shape.bits + shape.groups_of(STEP) * shape.group_bits


def max_warp_rows(shape: PackedShape, warps_m: int) -> int:
    """Most rows of a warp that registers allow, with `warps_m` warps along M."""
    if shape.bits == 2:
        return _MAX_ROWS_OF_2_BITS
    spills = not shape.format.tile_rows and (warps_m > 1 or shape.groups_of(STEP) > 1)
    return _MAX_ROWS_OF_WORDS if spills else _MAX_WARP_ROWS
