"""Grouped GEMMs with K-major quantized weights by WGMMA on compute capability 9.0: wq_grouped_gemm_sm90.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.dtypes import uint8
from .coded_experts import CodedExperts
from .coded_problem import CodedProblem
from .expert_rows import gathered
from .packed_experts import TILES

_wq_grouped_gemm_sm90 = Kernel("linear/wq_grouped_gemm_sm90.cu")

STEPS = 128, 64  # elements of K in a k-tile; the first number that divides K is taken
_MAX_STEP_BYTES = 64  # most bytes of a weight row in a k-tile: a lane reads a quarter of them at once
_BOX, _ROW_BYTES = 64, 128  # elements of a row of a in a TMA box, and their bytes
_BARRIER_BYTES = 2 * 8  # bytes of the barriers of a stage
_MAX_STAGES = 8  # most stages
# Largest accumulator tile without register reallocation between warpgroups; twice as large with it.
_MAX_SUMS = 128 * 128


@dataclass(frozen=True, slots=True)
class CodedHopperConfig:
    """The geometry of wq_grouped_gemm_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m: rows of a tile: slots of the sorted token ids.
        tile_n: weight rows of a tile.
        step: elements of K in a k-tile.
    """

    tile_m: int
    tile_n: int
    step: int

    def __post_init__(self) -> None:
        shape = self.tile_m % 16 == 0 and self.tile_n in (128, 256) and 0 < self.tile_m * self.tile_n <= 2 * _MAX_SUMS
        if not (shape and self.step in STEPS):
            raise ValueError(f"no geometry of wq_grouped_gemm_sm90.cu: {self}")

    def candidates(self, problem: CodedProblem, device: Device) -> list[CodedHopperConfig]:
        """Other tiles."""
        found = tuning.varied(self, tile_m=tuning.beside(self.tile_m, 16, 160), tile_n=(128, 256))
        return [one for one in found if problem.product.lists.block_size % one.tile_m == 0]

    def launches(self, problem: CodedProblem) -> list[Launch]:
        """The launch that gathers rows, and a persistent grid: at most as many CTAs as SMs, or as possible tiles."""
        product, weight, device = problem.product, problem.weight, problem.device
        sizes = product.num_experts, product.num_rows, product.top_k, product.k
        gather, a = gathered(
            product.a, product.lists, *sizes, by_place=True, lane_step=self.step, lane_pairs=16 // weight.bits
        )
        others = {**weight.tensors(), "row_scales": product.b_scales}
        kernel = product.kernel(_wq_grouped_gemm_sm90.for_arch(device.arch_feature), **others)
        constants = product.constants()
        del constants["SCALE_BLOCK"]
        halves = 2 if product.gated == 1 else 1
        quant_bytes = self.step * weight.bits // 8  # bytes of a weight row in a k-tile
        stage = self.tile_m * self.step * 2 + self.tile_n * quant_bytes + _BARRIER_BYTES
        stages = min(_MAX_STAGES, device.shared_memory // stage)
        columns = -(-product.n // (self.tile_n // (2 if product.gated else 1)))
        code_rows, row_bytes = product.num_experts * product.b_rows, product.k * weight.bits // 8
        launch = kernel(
            **constants,
            **weight.constants(),
            GROUP_SIZE=weight.group_size,
            SCALE_TILES=weight.tiled,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            TILE_K=self.step,
            STAGES=stages,
        ).launch(
            min(product.max_tiles(self.tile_m) * columns, device.num_sms),
            384 if self.tile_m * self.tile_n > _MAX_SUMS else 288,
            max(stages * stage, device.shared_memory // 2 + 1),  # one CTA per SM
            a_map=TensorMap(a.source, a.dtype, (product.k, a.rows), (a.stride * 2,), (_BOX, self.tile_m), _ROW_BYTES),
            quants_map=TensorMap(
                weight.codes, uint8, (row_bytes, code_rows), (row_bytes,), (quant_bytes, self.tile_n // halves)
            ),
            **replace(product, a=a).arguments(kernel, self.tile_m, **others),
        )
        return [gather, launch]


def serves(problem: CodedProblem, device: Device) -> bool:
    """Whether wq_grouped_gemm_sm90.cu runs on the device and supports this problem."""
    p, w = problem.product, problem.weight
    codes = (w.bits == 4 or w.type.exponent > 0) and w.scales is not None and step_of(w) > 0
    return device.supports("wgmma") and codes and p.lists.block_size % 16 == 0


def choose(problem: CodedProblem) -> CodedHopperConfig:
    """The largest tile that divides blocks of the lists: a weight is dequantized once for all rows of a tile."""
    tile_m = next(size for size in TILES if problem.product.lists.block_size % size == 0)
    return CodedHopperConfig(tile_m, TILES[tile_m], step=step_of(problem.weight))


def step_of(weight: CodedExperts) -> int:
    """Elements of K in a k-tile; 0 if no size fits.

    A lane's quarter of a k-tile lies under one scale, or under two that are adjacent in a tile of scales.
    """

    def fits(step: int) -> bool:
        lane, size = step // 4, weight.group_size
        scales = size % lane == 0 or (weight.tiled and lane == 2 * size)
        return weight.k % step == 0 and step * weight.bits // 8 <= _MAX_STEP_BYTES and scales

    return next(filter(fits, STEPS), 0)
