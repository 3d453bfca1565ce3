"""GEMMs without tensor cores: the geometry and the launch of gemm_simt.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .gemm_problem import GemmProblem
from .gemm_shape import GemmShape

_simt = Kernel("linear/gemm_simt.cu")


@dataclass(frozen=True, slots=True)
class GemmSimtConfig:
    """The geometry of gemm_simt.cu: rows and columns of a CTA's accumulator tile; a thread has 4 x 4 accumulators."""

    tile_m: int
    tile_n: int

    def candidates(self, problem: GemmProblem, device: Device) -> list[GemmSimtConfig]:
        """Other tiles."""
        return tuning.varied(
            self, tile_m=tuning.beside(self.tile_m, 16, 64), tile_n=tuning.beside(self.tile_n, 64, 128)
        )

    def launch(self, problem: GemmProblem) -> Launch:
        tiles = -(-problem.m // self.tile_m) * -(-problem.n // self.tile_n)
        return problem.kernel(_simt)(**problem.constants(), TILE_M=self.tile_m, TILE_N=self.tile_n).launch(
            tiles, self.tile_m * self.tile_n // 16, **problem.arguments()
        )


def choose(shape: GemmShape) -> GemmSimtConfig:
    return GemmSimtConfig(16 if shape.m <= 16 else 64, 64)
