"""Grouped GEMMs by tcgen05: geometry and launch of grouped_gemm_sm100.cu, in CUDA Tile C++.

No GPU has run this kernel. It is compiled for sm_100 and sm_103, and run by the host backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float32, int8, int32
from . import gemm_rates, gemm_sm100
from .gemm_problem import SCALE_BLOCK
from .gemm_shape import FP8, K_TILE_BYTES
from .gemm_sm100 import MIN_MMA_ROWS
from .grouped_problem import GROUP, GroupedProblem
from .grouped_rates import GroupedRates
from .grouped_shape import GroupedShape

_grouped_gemm_sm100 = Kernel("linear/grouped_gemm_sm100.cu")

_TILES_M, _TILES_N = (16, 32, 64, 128), (64, 128)
_MAX_GATED = 64 * 128  # gates and ups: most elements of a tile, which has twice as many accumulators; more spill


@dataclass(frozen=True, slots=True)
class GroupedTileConfig:
    """The geometry of grouped_gemm_sm100.cu: rows and columns of a tile of out, constants of the kernel."""

    tile_m: int
    tile_n: int

    def candidates(self, problem: GroupedProblem, device: Device) -> list[GroupedTileConfig]:
        """All tiles."""
        return list(configs(GroupedShape.of(problem), device))

    def launch(self, problem: GroupedProblem) -> Launch:
        """A CTA for each possible tile."""
        constants, kernel = problem.constants(), problem.kernel(_grouped_gemm_sm100)
        for name in ("COLUMN_ORDER", "AZP", "SCALE_EXPONENT", "a_scale_t", "b_scale_t"):
            del constants[name]
        return kernel(
            **constants,
            sum_t=int32 if problem.dtype is int8 else float32,
            SWAP=self.tile_m < MIN_MMA_ROWS,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            TILE_K=K_TILE_BYTES // problem.dtype.itemsize,
        ).launch(
            problem.max_tiles(self.tile_m) * -(-problem.n // self.tile_n),
            1,
            group_rows=GROUP,
            **problem.arguments(kernel, self.tile_m),
        )


def refusal(shape: GroupedShape, device: Device) -> str | None:
    """Why grouped_gemm_sm100.cu does not serve a shape."""
    if (why := gemm_sm100.refusal_of(shape.dtype, shape.out_dtype, device)) is not None:
        return why
    if 0 in (shape.rows, shape.k):
        return "an empty operand"
    if not shape.has_tiles:
        return "gelu, or a bias in another order"
    if shape.access != 16 or not shape.out_is_aligned or shape.columns % 8:
        return "TMA loads and stores rows that begin and end at multiples of 16 bytes"
    if shape.scales == "block" and shape.dtype not in FP8:
        return "block scales are for fp8 operands"
    if shape.scales == "block" and shape.gated == 1 and shape.columns % SCALE_BLOCK:
        return f"ups begin inside a block of {SCALE_BLOCK} rows with one scale"
    return None if shape.block_size % _TILES_M[0] == 0 else f"tiles of 16 rows do not divide {shape.block_size} slots"


def configs(shape: GroupedShape, device: Device) -> Iterator[GroupedTileConfig]:
    """The tiles that divide the blocks of the sorted lists, with accumulators that fit into registers. Their rows of b
    lie under one scale."""
    for tile_m, tile_n in product(_TILES_M, _TILES_N):
        straddles = shape.scales == "block" and shape.gated == 2 and 2 * tile_n > SCALE_BLOCK
        spills = shape.gated and tile_m * tile_n > _MAX_GATED
        if shape.block_size % tile_m == 0 and not (straddles or spills):
            yield GroupedTileConfig(tile_m, tile_n)


def time_us(config: GroupedTileConfig, shape: GroupedShape, device: Device, rates: GroupedRates) -> float:
    """As of gemm_sm100.cu; a tile of padding alone is multiplied like others."""
    tiles, of_block = 1 + bool(shape.gated), shape.block_size // config.tile_m
    blocks = round(shape.row_tiles(shape.block_size)) * of_block * -(-shape.columns // config.tile_n)
    sizes = config.tile_m, config.tile_n, tiles, shape.k * shape.dtype.itemsize
    return gemm_sm100.time_of_tiles(blocks, *sizes, shape.nbytes, device, gemm_rates.of(device))
