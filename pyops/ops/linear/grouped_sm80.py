"""Grouped GEMMs by mma.sync, or by AMD's matrix cores: the geometry and the launch of grouped_gemm_sm80."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .gemm_problem import HELD_STAGES
from .gemm_shape import K_TILE_BYTES
from .gemm_sm80 import MmaTile, max_accumulators
from .grouped_problem import GROUP, GroupedProblem
from .grouped_shape import GroupedShape

_mma = Kernel("linear/gemm_sm80.cu", entry="grouped_gemm_sm80")

_MAX_STAGES = {1: 4, 2: 6}  # most stages, by blocks per SM
# (tile_m, tile_n, warps_m, warps_n, blocks per SM): tiles with accumulators that do not spill.
_TILES = (
    (16, 64, 1, 4, 2),
    (32, 64, 1, 4, 2),
    (48, 64, 1, 4, 2),
    (64, 128, 2, 4, 1),
    (96, 128, 2, 4, 1),
    (128, 128, 2, 4, 1),
)
# Tiles with wider warps, which read fewer bytes of shared memory for each MMA and convert rows of a for more columns.
# Chosen by arithmetic, not yet measured; so GPUs with WGMMA, where other choices are measured, have none.
_WIDE_TILES = (
    (16, 128, 1, 4, 2),
    (16, 192, 1, 4, 2),
    (32, 128, 1, 4, 2),
    (48, 128, 1, 4, 2),
    (64, 128, 1, 4, 2),
    (64, 256, 2, 4, 1),
    (128, 256, 2, 4, 1),
)
_MAX_BLOCK_SCALED = 32  # accumulators of a thread, which has them twice, in a wide tile with block scales
_MATRIX_CORE_TILES = 16, 32, 64  # rows of the tiles that compile without spills for matrix cores


@dataclass(frozen=True, slots=True)
class GroupedMmaConfig(MmaTile):
    """The geometry of grouped_gemm_sm80; the attributes are constants of the kernel.

    Attributes:
        stages: k-tiles in shared memory or in flight.
        min_blocks: blocks per SM; bounds the registers.
    """

    stages: int
    min_blocks: int = 1

    def __post_init__(self) -> None:
        if self.tile_m % (16 * self.warps_m) or self.tile_n % (16 * self.warps_n) or self.stages < 2:
            raise ValueError(f"warps do not divide the tile: {self}")

    @property
    def shared_memory(self) -> int:
        return self.stages * (self.tile_m + self.tile_n) * K_TILE_BYTES

    def candidates(self, problem: GroupedProblem, device: Device) -> list[GroupedMmaConfig]:
        """Other tiles and stages."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 16, 128),
            tile_n=tuning.beside(self.tile_n, 32, 128),
            stages=(self.stages - 1, self.stages + 1),
        )
        return [one for one in found if one.fits(problem.lists.block_size, device)]

    def fits(self, block_size: int, device: Device) -> bool:
        """Whether the tile divides the blocks of the sorted lists and fits into shared memory."""
        return block_size % self.tile_m == 0 and self.shared_memory + _static_bytes(self.tile_m) <= device.shared_memory

    def launch(self, problem: GroupedProblem) -> Launch:
        """One block for each possible tile."""
        tiles = problem.max_tiles(self.tile_m) * -(-problem.b_rows // self.tile_n)
        num_threads = self.warps_m * self.warps_n * problem.device.warp_size
        kernel = problem.kernel(_mma)
        return kernel(
            **problem.constants(),
            VEC_SIZE=problem.vec_size,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            WARPS_M=self.warps_m,
            WARPS_N=self.warps_n,
            WARPS_K=1,
            STAGES=self.stages,
            GROUP=GROUP,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            tiles,
            num_threads,
            self.shared_memory,
            **problem.arguments(kernel, self.tile_m),
        )


def configs(shape: GroupedShape, device: Device) -> Iterator[GroupedMmaConfig]:
    """The tiles that divide the blocks of the sorted lists, with as many stages as fit."""
    copies = device.supports("async_copies")
    most_held = _MAX_BLOCK_SCALED if shape.scales == "block" else max_accumulators(shape.dtype, device)
    for tile_m, tile_n, warps_m, warps_n, blocks in _TILES + _WIDE_TILES:
        if not copies and tile_m not in _MATRIX_CORE_TILES:
            continue
        held = tile_m * tile_n // (warps_m * warps_n * device.warp_size)
        is_wide = (tile_m, tile_n, warps_m, warps_n, blocks) in _WIDE_TILES
        if is_wide and (not copies or device.supports("wgmma") or held > most_held):
            continue
        if held > 48 and shape.scales == "block" and device.supports("fp8_products"):
            continue  # it spills for sm_120
        most = (device.shared_memory // blocks - _static_bytes(tile_m)) // ((tile_m + tile_n) * K_TILE_BYTES)
        stages = min(_MAX_STAGES[blocks], most) if copies else HELD_STAGES
        if stages < 2:
            continue
        one = GroupedMmaConfig(tile_m, tile_n, warps_m, warps_n, stages, blocks)
        if one.fits(shape.block_size, device):
            yield one


def _static_bytes(tile_m: int) -> int:
    """Bytes of static shared memory: the rows of a tile."""
    return 4 * tile_m
