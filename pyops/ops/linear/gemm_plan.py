"""GEMM: a Config for each kernel, the choice among them, and the launch.

A Config class stands for a kernel: it holds the kernel's geometry and makes the launch. Only `choose` chooses a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import FLOATS
from . import gemm_sm90, gemm_sm90_choice, skinny_linear
from .gemm_problem import GemmProblem, multiplies
from .gemm_sm80 import MmaConfig, choose_mma
from .gemm_sm90 import GemmConfig, SwapConfig
from .skinny_linear import SkinnyConfig

_simt = Kernel("linear/gemm_simt.cu")

# Least compute capability (major * 10 + minor) with the features "mma" and "bfloat16_products" of a device.
MIN_CAPABILITY, MIN_BFLOAT16_CAPABILITY = 75, 80

# Largest weight (elements) and K of gemv.cu with one row; largest weight and most rows with several rows; above these
# gemm_sm90_swap_ab.cu is faster. Measured on an H200 (docs/performance/products.md).
_MAX_SKINNY_WEIGHT, _MAX_SKINNY_K = 2**26, 2**13
_MAX_SMALL_WEIGHT, _MAX_SMALL_ROWS = 2**21, 4
# Chosen by arithmetic, not yet measured.
_MAX_SKINNY_ROWS = 2  # most rows of gemv.cu on devices without gemm_sm90_swap_ab.cu


@dataclass(frozen=True, slots=True)
class GemmSimtConfig:
    """The geometry of gemm_simt.cu: rows and columns of a block's accumulator tile; a thread has 4 x 4 accumulators."""

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


Config = GemmConfig | SwapConfig | MmaConfig | GemmSimtConfig | SkinnyConfig


def choose(problem: GemmProblem, device: Device) -> Config:
    """The kernel for this problem, and its geometry. Equal for all problems of a bucket."""
    on_hopper = gemm_sm90.serves(problem, device)
    if _is_skinny(problem, on_hopper):
        return skinny_linear.choose(problem, device)
    if on_hopper:
        return gemm_sm90_choice.choose(problem, device)
    if not multiplies(problem.dtype, device):
        return GemmSimtConfig(16 if problem.m <= 16 else 64, 64)
    return choose_mma(problem, device)


def _is_skinny(problem: GemmProblem, on_hopper: bool) -> bool:
    """Whether gemv.cu, without tensor cores, is faster: M is so small that reading the weight is the bound."""
    plain = problem.epilogue.is_plain and problem.dtype is problem.epilogue.out.dtype in FLOATS
    if not plain or not problem.rows_are_dense or problem.k == 0:
        return False
    if not on_hopper:
        return problem.m <= _MAX_SKINNY_ROWS
    weight = problem.n * problem.k
    if problem.m == 1:
        return weight <= _MAX_SKINNY_WEIGHT and problem.k <= _MAX_SKINNY_K
    return problem.m <= _MAX_SMALL_ROWS and weight <= _MAX_SMALL_WEIGHT


def plan(problem: GemmProblem) -> Launch:
    """The launch of the kernel that is chosen, or forced by `tuning`."""
    return tuning.config(problem.op, problem, problem.device, choose).launch(problem)
