"""GEMMs by mma.sync, or by AMD's matrix cores: the geometry and the launch of gemm_sm80.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from .gemm_problem import HELD_STAGES, GemmProblem
from .gemm_shape import GemmShape

_mma = Kernel("linear/gemm_sm80.cu")

_STEP_BYTES = 128  # bytes of K in a k-tile of gemm_sm80.cu
_MAX_STAGES = 4, 8  # most stages: of large tiles, of small tiles
_SMALL_TILE = 16 * 1024  # most bytes of a stage of a small tile
_MAX_SPLITS = 8  # split-K: most blocks that share a tile
_MIN_SPLIT_STEPS = 4  # split-K: fewest k-tiles of each block
_MAX_SUMS = 64  # most accumulators of a thread: twice as many spill
_MAX_RESIDENT_SUMS = 16 * 1024  # most accumulators of all blocks of an SM: a quarter of its registers
_GROUP_ROWS = 8  # row tiles that run together for each column tile, so that the L2 cache holds the rows that they share


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
        return self.stages * (self.tile_m + self.tile_n) * _STEP_BYTES

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
        sums = self.tile_m * self.tile_n // self.num_threads(device) * (2 if problem.epilogue.block_scaled else 1)
        enough = self.min_blocks == 1 or self.min_blocks * self.num_threads(device) * sums <= _MAX_RESIDENT_SUMS
        return enough and sums <= _MAX_SUMS and self.shared_memory <= device.shared_memory

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


def choose(shape: GemmShape, device: Device) -> MmaConfig:
    """The largest tile that leaves no SM idle; else split-K."""
    m = shape.m

    def tiles(tile_m: int, tile_n: int) -> int:
        return -(-m // tile_m) * -(-shape.n // tile_n)

    if m <= 16:
        tile_m, tile_n, warps_m, warps_n = 16, 64, 1, 4
    elif m <= 32:
        tile_m, tile_n, warps_m, warps_n = 32, 64, 1, 4
    elif m <= 64 or tiles(128, 128) < device.num_sms:
        tile_m, tile_n, warps_m, warps_n = 64, 64, 2, 2
    else:
        tile_m, tile_n, warps_m, warps_n = 64 if shape.block_scaled else 128, 128, 2, 4
    steps = -(-shape.k * shape.dtype.itemsize // _STEP_BYTES)
    idle = 2 * device.num_sms // max(1, tiles(tile_m, tile_n))
    splits = 1
    while splits * 2 <= min(idle, _MAX_SPLITS, steps // _MIN_SPLIT_STEPS):
        splits *= 2
    step_bytes = (tile_m + tile_n) * _STEP_BYTES
    blocks = 2 if step_bytes <= _SMALL_TILE else 1  # blocks per SM; they share its shared memory
    max_stages = _MAX_STAGES[step_bytes <= _SMALL_TILE] if device.supports("async_copies") else HELD_STAGES
    stages = min(max_stages, device.shared_memory // blocks // step_bytes)
    if 2 * step_bytes == device.shared_memory:
        splits = 1  # split-K takes static shared memory for a flag
    return MmaConfig(tile_m, tile_n, warps_m, warps_n, max(2, stages), splits, blocks)
