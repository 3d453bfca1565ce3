"""GEMMs by mma.sync, or by AMD's matrix cores: the geometry and the launch of gemm_sm80.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType
from .gemm_problem import HELD_STAGES, GemmProblem
from .gemm_shape import FP8, K_TILE_BYTES, GemmShape

_mma = Kernel("linear/gemm_sm80.cu")

_MAX_STAGES = 4, 8  # most stages: of large tiles, of small tiles
_SMALL_TILE = 16 * 1024  # most bytes of a stage of a small tile
_MAX_SPLITS = 8  # split-K: most blocks that share a tile
_MIN_SPLIT_K_TILES = 4  # split-K: fewest k-tiles of each block
_MAX_ACCUMULATORS = 128  # most accumulators of a thread: half of its registers
_MAX_RESIDENT = 16 * 1024  # most accumulators of all blocks of an SM: a quarter of its registers
# Row tiles that run together for each column tile: 132 CTAs of 128 x 256 are then about as high as wide, and read the
# fewest rows. Of 4096 x 28672 x 4096, a standalone copy of the kernel took 2117 us with 8 and 2082 with 16.
_GROUP_ROWS = 16


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """The geometry of gemm_sm80.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a block's accumulator tile.
        warps_m, warps_n: warps along M and N.
        stages: k-tiles in shared memory or in flight.
        splits: blocks that share a tile (split-K); each takes a part of K.
        min_blocks: blocks per SM; bounds the registers.
    """

    tile_m: int
    tile_n: int
    warps_m: int
    warps_n: int
    stages: int
    splits: int
    min_blocks: int

    def __post_init__(self) -> None:
        if self.tile_m % (16 * self.warps_m) or self.tile_n % (16 * self.warps_n):
            raise ValueError(f"warps do not divide the tile: {self}")

    @property
    def shared_memory(self) -> int:
        return self.stages * (self.tile_m + self.tile_n) * K_TILE_BYTES

    @property
    def k_tile_traffic(self) -> int:
        """Bytes of shared memory that a k-tile writes, and that its warps read."""
        return k_tile_traffic(self.tile_m, self.tile_n, self.warps_m, self.warps_n)

    def num_threads(self, device: Device) -> int:
        return self.warps_m * self.warps_n * device.warp_size

    def candidates(self, problem: GemmProblem, device: Device) -> list[MmaConfig]:
        """Other tiles, stages, splits and registers."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 16, 128),
            tile_n=tuning.beside(self.tile_n, 32, 128),
            stages=(self.stages - 1, self.stages + 1),
            splits=tuning.beside(self.splits, 1, _MAX_SPLITS),
            min_blocks=tuning.beside(self.min_blocks, 1, 4),
        )
        return [one for one in found if one.stages >= 2 and one._fits(problem, device)]

    def _fits(self, problem: GemmProblem, device: Device) -> bool:
        """Whether shared memory and registers suffice."""
        held = self.tile_m * self.tile_n // self.num_threads(device) * (2 if problem.epilogue.block_scaled else 1)
        enough = self.min_blocks == 1 or self.min_blocks * self.num_threads(device) * held <= _MAX_RESIDENT
        return enough and held <= max_accumulators(problem.dtype, device) and self.shared_memory <= device.shared_memory

    def launch(self, problem: GemmProblem) -> Launch:
        """One launch. With split-K each block writes its accumulators to a workspace, and the last one adds them up."""
        tiles = -(-problem.m // self.tile_m) * -(-problem.b.rows // self.tile_n)
        splits = self.splits if tiles * self.splits <= 2**31 - 1 else 1
        partial: dict[str, Any] = {"partial": 0, "arrived": 0}
        if splits > 1 and tiles:
            partial["partial"] = Scratch(tiles * splits * self.tile_m * self.tile_n * 4)
            partial["arrived"] = Scratch(tiles * 4, zeroed=True)
        return problem.kernel(_mma)(
            **problem.constants(),
            VEC_SIZE=problem.vec_size,
            OUT_ACCESS=problem.out_access,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            WARPS_M=self.warps_m,
            WARPS_N=self.warps_n,
            STAGES=self.stages,
            SPLITS=splits,
            GROUP_ROWS=_GROUP_ROWS,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (tiles, splits), self.num_threads(problem.device), self.shared_memory, **problem.arguments(), **partial
        )


# Tiles and their warps: TILE_M, TILE_N, WARPS_M, WARPS_N. Warps of 64 x 64 read the fewest bytes of shared memory for
# each MMA; the small tiles are for few rows, and for few tiles.
_TILES = (
    (16, 64, 1, 4),
    (32, 64, 1, 4),
    (64, 64, 2, 2),
    (64, 128, 2, 4),
    (128, 128, 2, 4),
    (128, 128, 2, 2),
    (64, 256, 1, 4),
    (128, 256, 2, 4),
)
_SMALL_TILES = 5  # these first tiles have warps of at most 64 x 32, for copies that registers hold


def configs(shape: GemmShape, device: Device) -> Iterator[MmaConfig]:
    """Tiles that registers and shared memory allow, each whole and with split-K while SMs would idle."""
    tiles_of = _TILES if device.supports("async_copies") else _TILES[:_SMALL_TILES]
    for tile_m, tile_n, warps_m, warps_n in tiles_of:
        if tile_m > 16 and 2 * shape.m <= tile_m:
            continue  # half of the tile would be padding
        held = tile_m * tile_n // (warps_m * warps_n * device.warp_size)
        if held * (2 if shape.block_scaled else 1) > max_accumulators(shape.dtype, device):
            continue
        stage_bytes = (tile_m + tile_n) * K_TILE_BYTES
        blocks = 2 if stage_bytes <= _SMALL_TILE else 1  # per SM; they share its shared memory
        most = _MAX_STAGES[stage_bytes <= _SMALL_TILE] if device.supports("async_copies") else HELD_STAGES
        stages = min(most, device.shared_memory // blocks // stage_bytes)
        if stages < 2:
            continue
        tiles, splits = -(-shape.m // tile_m) * -(-shape.n // tile_n), 1
        # Split-K takes static shared memory for a flag.
        has_flag = stages * stage_bytes * blocks < device.shared_memory
        most_splits = min(_MAX_SPLITS, shape.num_k_tiles // _MIN_SPLIT_K_TILES) if has_flag else 1
        while True:
            yield MmaConfig(tile_m, tile_n, warps_m, warps_n, stages, splits, blocks)
            splits *= 2
            if splits > most_splits or splits * tiles > 2 * device.num_sms:
                break


def k_tile_traffic(tile_m: int, tile_n: int, warps_m: int, warps_n: int) -> int:
    """Bytes of shared memory that a k-tile writes, and that its warps read."""
    return (tile_m + tile_n + warps_n * tile_m + warps_m * tile_n) * K_TILE_BYTES


def max_accumulators(dtype: DType, device: Device) -> int:
    """Most accumulators of a thread: a half where fp8 operands are converted, or copies are held in registers."""
    converts = dtype in FP8 and not device.supports("fp8_products")
    return _MAX_ACCUMULATORS if device.supports("async_copies") and not converts else _MAX_ACCUMULATORS // 2
