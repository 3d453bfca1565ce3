"""Grouped GEMMs without tensor cores: the geometry and the launch of grouped_gemm_simt."""

from __future__ import annotations

from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .grouped_problem import GROUP, GroupedProblem
from .grouped_shape import GroupedShape

_simt = Kernel("linear/gemm_simt.cu", entry="grouped_gemm_simt")

_TILES_M = 64, 48, 32, 16
_SMALL_TILE_M = 8  # rows of the tile for blocks that no other divides: a CTA of 32 threads
_TILE_N = 64


@dataclass(frozen=True, slots=True)
class GroupedSimtConfig:
    """The geometry of grouped_gemm_simt: rows and columns of a block's tile; a thread has 4 x 4 accumulators."""

    tile_m: int
    tile_n: int

    def candidates(self, problem: GroupedProblem, device: Device) -> list[GroupedSimtConfig]:
        """Other tiles."""
        found = tuning.varied(
            self, tile_m=tuning.beside(self.tile_m, 16, 64), tile_n=tuning.beside(self.tile_n, 64, 128)
        )
        return [one for one in found if problem.lists.block_size % one.tile_m == 0]

    def launch(self, problem: GroupedProblem) -> Launch:
        """One block for each possible tile."""
        tiles = problem.max_tiles(self.tile_m) * -(-problem.n // self.tile_n)
        kernel = problem.kernel(_simt)
        return kernel(**problem.constants(), TILE_M=self.tile_m, TILE_N=self.tile_n, GROUP=GROUP).launch(
            tiles,
            self.tile_m * self.tile_n // 16,
            **problem.arguments(kernel, self.tile_m),
        )


def configs(shape: GroupedShape) -> list[GroupedSimtConfig]:
    """The tiles that divide the blocks of the sorted lists."""
    sizes = [tile_m for tile_m in _TILES_M if shape.block_size % tile_m == 0] or [_SMALL_TILE_M]
    return [GroupedSimtConfig(tile_m, _TILE_N) for tile_m in sizes]
