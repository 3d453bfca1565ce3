"""Grouped GEMM of rows with the quantized weights of their experts: fused dequantization, or a GEMM on weights
dequantized first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float16
from ..._core.tensors.tensor import TensorArg
from .._shared.products import multiplies
from . import coded_cost, coded_hopper, grouped_plan, packed_tile
from .coded_experts import CodedExperts
from .coded_hopper import STEPS, CodedHopperConfig
from .coded_problem import CodedProblem
from .gemm_problem import Operand
from .grouped_plan import block_size_for
from .grouped_problem import ExpertLists, GroupedProblem
from .packed_experts import block_size_of_packed
from .packed_tile import TileGeometry

_wq_grouped_gemm_sm80 = Kernel("linear/wq_grouped_gemm_sm80.cu")
_wq_grouped_gemm_cdna = Kernel("linear/wq_grouped_gemm_cdna.cu")

_STEP_BYTES = 64  # bytes of a weight row in a k-tile
_ROWS = 64  # weight rows of a tile
_LANE_BYTES = 16  # bytes of a weight row per lane and k-tile: under one scale, or under two that are adjacent in a tile
_MIN_STAGES, _MAX_STAGES = 2, 3  # stages: k-tiles of a warp in shared memory
_STATIC_BYTES = 128  # bytes of static shared memory of a CTA: row indices of out and of a
_WARPS_OF_MANY = 4  # warps of a CTA where the grid exceeds one wave, as in wq_gemm_sm80.cu
# Warps per SM that registers allow, by rows of a tile. 4-bit zero points take more registers, and so does sm_80, which
# has no packed bfloat16 arithmetic.
_RESIDENT, _FEWER_RESIDENT = {8: 16, 16: 12}, {8: 12, 16: 8}
_FEW_ROWS_BLOCK = 16  # rows of a block of the sorted lists where each expert has few rows
_DENSE_TILES = 128, 64, 32, 16, 8  # slots of a tile of the dense GEMMs: the first size that divides a block
# Up to 4 rows per expert, blocks of 8 rows: hardly any expert fills more than one.
_FEWEST_ROWS, _FEWEST_ROWS_BLOCK = 4, 8


@dataclass(frozen=True, slots=True)
class CodedConfig:
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

    def candidates(self, problem: CodedProblem, device: Device) -> list[CodedConfig]:
        """Other tiles and warps."""
        return tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 8, 16),
            warps=tuning.beside(self.warps, 1, _RESIDENT[8]),
            min_blocks=(self.min_blocks - 1, self.min_blocks + 1),
        )

    def launches(self, problem: CodedProblem) -> list[Launch]:
        """One CTA for each possible tile."""
        product, weight = problem.product, problem.weight
        others = {**weight.tensors(), "row_scales": product.b_scales}
        kernel = product.kernel(_wq_grouped_gemm_sm80, **others)
        constants = product.constants()
        del constants["SCALE_BLOCK"]
        tiles = product.max_tiles(self.tile_m) * (product.b_rows // _ROWS)
        own = ((problem.device.shared_memory + 1024) // self.min_blocks - 1024 - _STATIC_BYTES) // self.warps
        stages = max(_MIN_STAGES, min(_MAX_STAGES, own // _stage_bytes(self.tile_m, weight)))
        launch = kernel(
            **constants,
            **weight.constants(),
            GROUP_SIZE=weight.group_size,
            SCALE_TILES=weight.tiled,
            WHOLE_STEPS=weight.k * weight.bits % (8 * _STEP_BYTES) == 0,
            TILE_M=self.tile_m,
            WARPS=self.warps,
            STAGES=stages,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            tiles,
            self.warps * 32,
            self.warps * _warp_bytes(self.tile_m, weight, stages),
            **product.arguments(kernel, self.tile_m, **others),
        )
        return [launch]


@dataclass(frozen=True, slots=True)
class CodedTileConfig(TileGeometry):
    """The geometry of wq_grouped_gemm_cdna.cu: tile M is slots of the sorted token ids, tile N is weight rows."""

    def candidates(self, problem: CodedProblem, device: Device) -> list[CodedTileConfig]:
        """Other tiles and depths."""
        found = tuning.varied(
            self, tile_m=tuning.beside(self.tile_m, 16 * self.warps_m, 64), tile_n=(64, 128), depth=(2, 4)
        )
        return [one for one in found if packed_tile.places_of(problem.product.lists.block_size, one.tile_m)]

    def launches(self, problem: CodedProblem) -> list[Launch]:
        """One CTA for each possible tile."""
        product, weight = problem.product, problem.weight
        others = {**weight.tensors(), "row_scales": product.b_scales}
        kernel = product.kernel(_wq_grouped_gemm_cdna, **others)
        constants = product.constants() | weight.constants()
        del constants["SCALE_BLOCK"], constants["HAS_ZEROS"]
        places = packed_tile.places_of(product.lists.block_size, self.tile_m)
        exact = product.dtype is float16 and not weight.type.exponent
        launch = kernel(
            **constants,
            LAYOUT="layout_rows",
            RECODED=False,
            GROUP_SCALE_EXPONENT=0,
            SCALE_ORDER="column_natural",
            ZERO_CODES=weight.zeros is not None,
            ZERO_POINT=0 if weight.zeros is not None or weight.type.exponent else 1 << (weight.bits - 1),
            ZERO_FLOATS=False,
            ADDED=False,
            GROUP_SIZE=weight.group_size if weight.groups > 1 else 0,
            IN_PAIRS=exact,
            WHOLE_STEPS=weight.k % packed_tile.STEP == 0,
            **self.constants(places),
        ).launch(
            product.max_tiles(places) * -(-product.b_rows // self.tile_n),
            self.num_threads(problem.device),
            self.shared_memory,
            groups=weight.groups,
            **product.arguments(kernel, places, **others),
        )
        return [launch]


Config = CodedConfig | CodedTileConfig | CodedHopperConfig


def block_size_of_codes(num_rows: int, num_experts: int, kind: str, step: int = min(STEPS)) -> int:
    """The block size with which `moe_align_block_size` should sort `num_rows` rows for weights of this type.

    It suits the tiles of the fastest kernel. `step` is the k-tile by WGMMA, or 0 if it takes no such weights.
    """
    num_rows = tuning.pinned_rows(num_rows, num_experts)
    if num_rows <= _FEWEST_ROWS * num_experts:
        return _FEWEST_ROWS_BLOCK
    rows, tile = tuning.power_of_two(num_rows) / num_experts, block_size_of_packed(num_rows, num_experts)
    tile, dense_tile = max(_FEW_ROWS_BLOCK, tile), block_size_for(num_rows, num_experts)
    costs = {
        _FEW_ROWS_BLOCK: coded_cost.by_mma(kind, rows, _mma_tile(rows, _FEW_ROWS_BLOCK)),
        dense_tile: coded_cost.dense(kind, rows, dense_tile),
    }
    if rows <= packed_tile.MAX_ROWS and coded_cost.by_wgmma(kind, rows, tile, step) < min(costs.values()):
        return tile
    return min(costs, key=costs.__getitem__)


def _mma_tile(rows: float, block_size: int) -> int:
    """Slots of a tile of wq_grouped_gemm_sm80.cu."""
    return 8 if rows <= 8 or block_size % 16 else 16


def _cost_by_mma(problem: CodedProblem, device: Device) -> float:
    """The cost by wq_grouped_gemm_sm80.cu; infinite if it does not support this problem."""
    p = problem.product
    tile_m = _mma_tile(p.rows_of_expert, p.lists.block_size)
    supported = p.b_rows % _ROWS == 0 and device.supports("mma") and multiplies(p.dtype, device)
    return coded_cost.by_mma(str(problem.weight.type), p.rows_of_expert, tile_m) if supported else math.inf


def _cost_by_wgmma(problem: CodedProblem, device: Device) -> float:
    """The cost by wq_grouped_gemm_sm90.cu; infinite if it does not support this problem."""
    if not coded_hopper.serves(problem, device):
        return math.inf
    config, rows = coded_hopper.choose(problem), problem.product.rows_of_expert
    return coded_cost.by_wgmma(str(problem.weight.type), rows, config.tile_m, config.step)


def serves(problem: CodedProblem, device: Device) -> bool:
    """Whether a kernel with fused dequantization runs on the device, supports this problem, and beats dequantizing
    first."""
    p, w = problem.product, problem.weight
    lane_scales = 2 if w.tiled else 1  # most scales of a lane
    sizes = w.k * w.bits // 8 % _LANE_BYTES == 0 and lane_scales * w.group_size * w.bits // 8 % _LANE_BYTES == 0
    sizes = sizes and p.lists.block_size % 8 == 0 and not p.empty and p.k > 0
    sizes = sizes and (p.b_rows + 127) * (w.groups + 3) < 2**32  # scales of an expert have 32-bit offsets
    aligned = p.a.vec_size(p.k) == 8 and w.codes.alignment == 16
    if w.tiled and isinstance(w.scales, TensorArg):
        aligned = aligned and w.scales.alignment >= 2  # a lane reads two scales at once
    # No fused kernel has been measured with more rows of an expert.
    if not (sizes and aligned) or p.rows_of_expert > packed_tile.MAX_ROWS:
        return False
    if device.supports("matrix_cores"):
        size = packed_tile.STEP if w.groups == 1 else w.group_size
        return size % packed_tile.STEP == 0 or packed_tile.STEP % size == 0
    # e8m0 scales do not fit into float16.
    kind = w.type.exponent == 0 or p.dtype is bfloat16
    cost = min(_cost_by_mma(problem, device), _cost_by_wgmma(problem, device))
    dense_tile = next(size for size in _DENSE_TILES if p.lists.block_size % size == 0)
    return kind and cost < coded_cost.dense(str(w.type), p.rows_of_expert, dense_tile)


def choose(problem: CodedProblem, device: Device) -> Config:
    """The config for the expected number of rows per expert, with as many warps as the device holds at a time."""
    p, w = problem.product, problem.weight
    if device.supports("matrix_cores"):
        tile = packed_tile.choose(p.rows_of_expert, w.k, p.b_rows, device, p.chosen_experts, p.lists.block_size)
        return CodedTileConfig(tile.tile_m, tile.tile_n, tile.warps_m, tile.warps_n, tile.depth)
    if _cost_by_wgmma(problem, device) < _cost_by_mma(problem, device):
        return coded_hopper.choose(problem)
    tile_m = _mma_tile(p.rows_of_expert, p.lists.block_size)
    tiles = p.row_tiles(tile_m) * (p.b_rows // _ROWS)
    steps = -(-w.k * w.bits // (8 * _STEP_BYTES))
    fewer = (w.bits == 4 and w.zeros is not None) or not device.supports("clusters")
    resident = (_FEWER_RESIDENT if fewer else _RESIDENT)[tile_m]
    blocks = -(-tiles // device.num_sms)  # blocks per SM
    # At least half of the resident warps per tile: one token of Mixtral takes 49 us, and 71 us with two warps per tile.
    warps = min(max(resident // 2, resident // blocks) if blocks <= resident else _WARPS_OF_MANY, steps)
    warps = max(1, min(warps, (device.shared_memory - _STATIC_BYTES) // _warp_bytes(tile_m, w, _MIN_STAGES)))
    return CodedConfig(tile_m, warps, resident // warps)


def _stage_bytes(tile_m: int, weight: CodedExperts) -> int:
    """Bytes of a stage: quantized weights of a k-tile, and the matching elements of a."""
    return _ROWS * _STEP_BYTES + tile_m * _STEP_BYTES * 8 // weight.bits * 2


def _warp_bytes(tile_m: int, weight: CodedExperts, stages: int) -> int:
    """Bytes of shared memory of a warp: stages, reused for its accumulators in the epilogue."""
    return max(stages * _stage_bytes(tile_m, weight), tile_m * _ROWS * 4)


def plan(
    out: TensorArg,
    a: TensorArg,
    weight: CodedExperts,
    lists: ExpertLists,
    topk_weights: TensorArg | None,
    b_scales: TensorArg | None,
    bias: TensorArg | None,
    top_k: int,
    activation: str,
) -> list[Launch]:
    """One launch with fused dequantization, or two: dequantization of all weights, then a grouped GEMM."""
    dense = Scratch(max(1, weight.num_experts * weight.rows * weight.k) * a.dtype.itemsize)
    operands = Operand.of_rows(a), Operand.of_scratch(dense, a.dtype, weight.num_experts * weight.rows, weight.k)
    terms = topk_weights, None, b_scales, bias
    product = GroupedProblem(out, *operands, weight.num_experts, weight.k, lists, *terms, top_k, activation)
    problem = CodedProblem(product, weight)
    if serves(problem, product.device):
        return launches_of(problem)
    return [weight.written(dense, a.dtype), grouped_plan.plan(product)]


def launches_of(problem: CodedProblem) -> list[Launch]:
    """The launches of the kernel with fused dequantization, for a problem that it supports."""
    return tuning.config(problem.product.out.op, problem, problem.device, choose).launches(problem)
