"""The geometry and the launches of the grouped GEMMs with K-major quantized weights.

Three kernels fuse the dequantization: wq_grouped_gemm_sm80.cu by mma.sync, wq_grouped_gemm_sm90.cu by WGMMA, and
wq_grouped_gemm_cdna on AMD's matrix cores. Otherwise the weights are dequantized to a workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float16, uint8
from . import packed_large, packed_tile
from .expert_rows import gathered
from .packed_large import LargeGeometry
from .packed_tile import TileGeometry
from .wq_grouped_problem import WqGroupedProblem, WqGroupedShape

_wq_grouped_gemm_sm80 = Kernel("linear/wq_grouped_gemm_sm80.cu")
_wq_grouped_gemm_sm90 = Kernel("linear/wq_grouped_gemm_sm90.cu")
_wq_grouped_gemm_sm80_large_m = Kernel("linear/wq_gemm_sm80_large_m.cu", entry="wq_grouped_gemm_sm80_large_m")
_wq_grouped_gemm_cdna = Kernel("linear/wq_gemm_cdna.cu", entry="wq_grouped_gemm_cdna")

# wq_grouped_gemm_sm80.cu
ROWS = 64  # weight rows of a tile
LANE_BYTES = 16  # bytes of a weight row per lane and k-tile
_STEP_BYTES = 64  # bytes of a weight row in a k-tile
_MIN_STAGES, _MAX_STAGES = 2, 3  # stages: k-tiles of a warp in shared memory
_STATIC_BYTES = 128  # bytes of static shared memory of a CTA: row indices of out and of a
_WARPS_OF_MANY = 4  # warps of a CTA where the grid exceeds one wave, as in wq_gemm_sm80.cu
# Warps per SM that registers allow, by rows of a tile. 4-bit zero points take more registers, and so does sm_80, which
# has no packed bfloat16 arithmetic.
_RESIDENT, _FEWER_RESIDENT = {8: 16, 16: 12}, {8: 12, 16: 8}

# wq_grouped_gemm_sm80_large_m
_MAX_LARGE_ROWS = 48  # most rows of a warp; 64 would spill

# wq_grouped_gemm_sm90.cu
STEPS = 128, 64  # elements of K in a k-tile; the first number that divides K is taken
# {tile M: tile N}: a weight is dequantized once for all rows of a tile, so the largest accumulator tile that registers
# allow is best (docs/performance/experts.md).
SM90_TILES = {160: 128, 128: 128, 96: 256, 64: 256, 48: 256, 32: 256, 16: 256}
_MAX_STEP_BYTES = 64  # most bytes of a weight row in a k-tile: a lane reads a quarter of them at once
_BOX, _BOX_BYTES = 64, 128  # elements of a row of a in a TMA box, and their bytes
_BARRIER_BYTES = 2 * 8  # bytes of the barriers of a stage
_MOST_STAGES = 8  # most stages
# Largest accumulator tile without register reallocation between warpgroups; twice as large with it.
_MAX_SUMS = 128 * 128


def _fed(kernel: Kernel, problem: WqGroupedProblem, tile_m: int) -> tuple[Kernel, dict[str, Any], dict[str, Any]]:
    """A kernel fed with the tensors of the problem, its constants and its arguments."""
    product, weight = problem.product, problem.weight
    tensors = {**weight.tensors(), "row_scales": product.b_scales}
    fed = product.kernel(kernel, **tensors)
    constants = product.constants() | weight.constants() | {"GROUP_SIZE": weight.group_size}
    del constants["SCALE_BLOCK"]
    return fed, constants, product.arguments(fed, tile_m, **tensors)


def _fed_by_layout(
    kernel: Kernel, problem: WqGroupedProblem, tile_m: int
) -> tuple[Kernel, dict[str, Any], dict[str, Any]]:
    """The same for a kernel of weights in any layout, with the constants of layout_rows."""
    fed, constants, arguments = _fed(kernel, problem, tile_m)
    weight, has_zeros = problem.weight, constants.pop("HAS_ZEROS")
    constants |= {
        "LAYOUT": "layout_rows",
        "RECODED": False,
        "GROUP_SCALE_EXPONENT": 0,
        "SCALE_ORDER": "column_natural",
        "ZERO_CODES": has_zeros,
        "ZERO_POINT": 0 if has_zeros or weight.type.exponent else 1 << (weight.bits - 1),
        "ZERO_FLOATS": False,
        "ADDED": False,
        "GROUP_SIZE": weight.group_size if weight.groups > 1 else 0,
    }
    return fed, constants, arguments


@dataclass(frozen=True, slots=True)
class WqGroupedSm80Config:
    """The geometry of wq_grouped_gemm_sm80.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m: rows of a tile: slots of the sorted token ids.
        warps: warps of a CTA; each takes a part of K.
        min_blocks: CTAs per SM; bounds the registers.
    """

    tile_m: int
    warps: int
    min_blocks: int

    def __post_init__(self) -> None:
        if not 1 <= self.warps <= self.warps * self.min_blocks <= _RESIDENT.get(self.tile_m, 0):
            raise ValueError(f"no geometry of wq_grouped_gemm_sm80.cu: {self}")

    def candidates(self, problem: WqGroupedProblem, device: Device) -> list[WqGroupedSm80Config]:
        """Other tiles and warps."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 8, 16),
            warps=tuning.beside(self.warps, 1, _RESIDENT[8]),
            min_blocks=(self.min_blocks - 1, self.min_blocks + 1),
        )
        return [one for one in found if problem.product.lists.block_size % one.tile_m == 0]

    def launches(self, problem: WqGroupedProblem) -> list[Launch]:
        """One CTA for each possible tile."""
        product, weight = problem.product, problem.weight
        kernel, constants, arguments = _fed(_wq_grouped_gemm_sm80, problem, self.tile_m)
        own = ((problem.device.shared_memory + 1024) // self.min_blocks - 1024 - _STATIC_BYTES) // self.warps
        stages = max(_MIN_STAGES, min(_MAX_STAGES, own // _stage_bytes(self.tile_m, weight.bits)))
        launch = kernel(
            **constants,
            SCALE_TILES=weight.tiled,
            WHOLE_STEPS=weight.k * weight.bits % (8 * _STEP_BYTES) == 0,
            TILE_M=self.tile_m,
            WARPS=self.warps,
            STAGES=stages,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            product.max_tiles(self.tile_m) * (product.b_rows // ROWS),
            self.warps * 32,
            self.warps * _warp_bytes(self.tile_m, weight.bits, stages),
            **arguments,
        )
        return [launch]


def sm80_configs(shape: WqGroupedShape, device: Device) -> Iterator[WqGroupedSm80Config]:
    """Tiles of 8 and of 16 slots, with as many warps as the device holds at a time.

    If all tiles are resident, a CTA has at least half of the resident warps: one token of Mixtral takes 49 us, and 71
    us with two warps per tile.
    """
    steps = -(-shape.row_bytes // _STEP_BYTES)
    fewer = (shape.bits == 4 and shape.has_zeros) or not device.supports("clusters")
    for tile_m, resident in (_FEWER_RESIDENT if fewer else _RESIDENT).items():
        if shape.block_size % tile_m == 0:
            blocks = max(1, -(-round(shape.row_tiles(tile_m)) * (shape.n // ROWS) // device.num_sms))  # CTAs per SM
            warps = max(resident // 2, resident // blocks) if blocks <= resident else _WARPS_OF_MANY
            most = (device.shared_memory - _STATIC_BYTES) // _warp_bytes(tile_m, shape.bits, _MIN_STAGES)
            warps = max(1, min(warps, steps, most))
            yield WqGroupedSm80Config(tile_m, warps, resident // warps)


def _stage_bytes(tile_m: int, bits: int) -> int:
    """Bytes of a stage: quantized weights of a k-tile, and the matching elements of a."""
    return ROWS * _STEP_BYTES + tile_m * _STEP_BYTES * 8 // bits * 2


def _warp_bytes(tile_m: int, bits: int, stages: int) -> int:
    """Bytes of shared memory of a warp: stages, reused for its accumulators in the epilogue."""
    return max(stages * _stage_bytes(tile_m, bits), tile_m * ROWS * 4)


@dataclass(frozen=True, slots=True)
class WqGroupedLargeConfig(LargeGeometry):
    """The geometry of wq_grouped_gemm_sm80_large_m: rows are slots of the sorted token ids, columns weight rows."""

    def candidates(self, problem: WqGroupedProblem, device: Device) -> list[WqGroupedLargeConfig]:
        """Other tiles."""
        found = large_configs(WqGroupedShape.of_problem(problem), device)
        return [one for one in found if one != self]

    def launches(self, problem: WqGroupedProblem) -> list[Launch]:
        """A persistent grid."""
        product, weight, device = problem.product, problem.weight, problem.device
        kernel, constants, arguments = _fed_by_layout(_wq_grouped_gemm_sm80_large_m, problem, self.rows)
        column_bits = packed_large.STEP * weight.bits
        stages = self.stages_of(column_bits, device, of_experts=True)
        launch = kernel(**constants, **self.constants(), STAGES=stages, CUT=False, GROUPED=True).launch(
            min(product.max_tiles(self.rows) * -(-product.b_rows // self.columns), device.num_sms * self.min_blocks),
            self.warps * 32,
            stages * self.stage_bytes(column_bits),
            groups=weight.groups,
            **arguments,
        )
        return [launch]


def large_configs(shape: WqGroupedShape, device: Device) -> Iterator[WqGroupedLargeConfig]:
    """The tiles that divide blocks of the lists."""
    for tile_m, warps_m in packed_large.expert_tiles(shape.block_size):
        warps_n = packed_large.EXPERT_WARPS_N
        one = WqGroupedLargeConfig(tile_m, warps_m, warps_n, packed_large.blocks_of(warps_m * warps_n))
        if tile_m <= _MAX_LARGE_ROWS and one.stages_of(packed_large.STEP * shape.bits, device, of_experts=True) >= 2:
            yield one


@dataclass(frozen=True, slots=True)
class WqGroupedSm90Config:
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

    def candidates(self, problem: WqGroupedProblem, device: Device) -> list[WqGroupedSm90Config]:
        """Other tiles."""
        found = tuning.varied(self, tile_m=tuning.beside(self.tile_m, 16, 160), tile_n=(128, 256))
        return [one for one in found if problem.product.lists.block_size % one.tile_m == 0]

    def launches(self, problem: WqGroupedProblem) -> list[Launch]:
        """The launch that gathers rows, and a persistent grid: at most as many CTAs as SMs, or as possible tiles."""
        product, weight, device = problem.product, problem.weight, problem.device
        sizes = product.num_experts, product.num_rows, product.top_k, product.k
        gather, a = gathered(
            product.a, product.lists, *sizes, by_place=True, lane_step=self.step, lane_pairs=16 // weight.bits
        )
        of_slots = replace(problem, product=replace(product, a=a))
        kernel, constants, arguments = _fed(_wq_grouped_gemm_sm90.for_arch(device.arch_feature), of_slots, self.tile_m)
        halves = 2 if product.gated == 1 else 1
        quant_bytes = self.step * weight.bits // 8  # bytes of a weight row in a k-tile
        stage = self.tile_m * self.step * 2 + self.tile_n * quant_bytes + _BARRIER_BYTES
        stages = min(_MOST_STAGES, device.shared_memory // stage)
        columns = -(-product.n // (self.tile_n // (2 if product.gated else 1)))
        quant_rows, row_bytes = product.num_experts * product.b_rows, product.k * weight.bits // 8
        launch = kernel(
            **constants,
            SCALE_TILES=weight.tiled,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            TILE_K=self.step,
            STAGES=stages,
        ).launch(
            min(product.max_tiles(self.tile_m) * columns, device.num_sms),
            384 if self.tile_m * self.tile_n > _MAX_SUMS else 288,
            max(stages * stage, device.shared_memory // 2 + 1),  # one CTA per SM
            a_map=TensorMap(a.source, a.dtype, (product.k, a.rows), (a.stride * 2,), (_BOX, self.tile_m), _BOX_BYTES),
            quants_map=TensorMap(
                weight.quants, uint8, (row_bytes, quant_rows), (row_bytes,), (quant_bytes, self.tile_n // halves)
            ),
            **arguments,
        )
        return [gather, launch]


def sm90_configs(shape: WqGroupedShape, device: Device) -> Iterator[WqGroupedSm90Config]:
    """The tiles that divide blocks of the lists."""
    for tile_m, tile_n in SM90_TILES.items():
        if shape.block_size % tile_m == 0:
            yield WqGroupedSm90Config(tile_m, tile_n, step_of(shape))


def step_of(shape: WqGroupedShape) -> int:
    """Elements of K in a k-tile of wq_grouped_gemm_sm90.cu; 0 if no size fits.

    A lane's quarter of a k-tile lies under one scale, or under two that are adjacent in a tile of scales.
    """

    def fits(step: int) -> bool:
        lane, size = step // 4, shape.group_size
        scales = size % lane == 0 or (shape.is_tiled and lane == 2 * size)
        return shape.k % step == 0 and step * shape.bits // 8 <= _MAX_STEP_BYTES and scales

    return next(filter(fits, STEPS), 0)


@dataclass(frozen=True, slots=True)
class WqGroupedCdnaConfig(TileGeometry):
    """The geometry of wq_grouped_gemm_cdna: tile M is slots of the sorted token ids, tile N is weight rows."""

    def candidates(self, problem: WqGroupedProblem, device: Device) -> list[WqGroupedCdnaConfig]:
        """Other tiles and depths."""
        found = tuning.varied(
            self, tile_m=tuning.beside(self.tile_m, 16 * self.warps_m, 64), tile_n=(64, 128), depth=(2, 4)
        )
        return [one for one in found if packed_tile.places_of(problem.product.lists.block_size, one.tile_m)]

    def launches(self, problem: WqGroupedProblem) -> list[Launch]:
        """One CTA for each possible tile, after the launch that writes scales in tiles in row-major order."""
        before, weight = problem.weight.untiled()
        product, problem = problem.product, replace(problem, weight=weight)
        slots = packed_tile.places_of(product.lists.block_size, self.tile_m)
        kernel, constants, arguments = _fed_by_layout(_wq_grouped_gemm_cdna, problem, slots)
        launch = kernel(
            **constants,
            IN_PAIRS=product.dtype is float16 and not weight.type.exponent,
            WHOLE_STEPS=weight.k % packed_tile.STEP == 0,
            **self.constants(slots),
        ).launch(
            product.max_tiles(slots) * -(-product.b_rows // self.tile_n),
            self.num_threads(problem.device),
            self.shared_memory,
            groups=weight.groups,
            **arguments,
        )
        return [*before, launch]


def cdna_configs(shape: WqGroupedShape, device: Device) -> Iterator[WqGroupedCdnaConfig]:
    """The largest tile that leaves no compute unit idle."""
    experts = max(1, round(shape.chosen_experts))
    rows = tuning.power_of_two(-(-shape.rows // experts))
    tile = packed_tile.choose(rows, shape.k, shape.n, device, experts, shape.block_size)
    yield WqGroupedCdnaConfig(tile.tile_m, tile.tile_n, tile.warps_m, tile.warps_n, tile.depth)


@dataclass(frozen=True, slots=True)
class DequantizeExpertsConfig:
    """The weights are dequantized to a workspace.

    Attributes:
        gemm: the Config of the grouped GEMM that follows.
    """

    gemm: Any

    def candidates(self, problem: WqGroupedProblem, device: Device) -> list[DequantizeExpertsConfig]:
        """Other grouped GEMMs."""
        return [DequantizeExpertsConfig(one) for one in self.gemm.candidates(problem.product, device)]

    def launches(self, problem: WqGroupedProblem) -> list[Launch]:
        """The launch that dequantizes the weights, and the grouped GEMM."""
        return [problem.dequantize, self.gemm.launch(problem.product)]
