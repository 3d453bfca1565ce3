"""Grouped GEMMs with packed quantized weights: the choice of the kernel, and its launches."""

from __future__ import annotations

from dataclasses import replace

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from . import dequantize_packed, grouped_plan, packed_mma, packed_tile
from .expert_rows import gathered
from .gemm_problem import Operand
from .grouped_problem import GroupedProblem
from .packed_engines import cdna_refusal, mma_refusal, rounding, unread
from .packed_hopper import PackedConfig, max_boxes, step_rows
from .packed_mma import TILE_N, PackedMmaConfig, choose_mma, fitting
from .packed_problem import PackedExperts, PackedProblem
from .packed_shape import PackedShape
from .packed_tile import PackedTileConfig

# Most rows per expert where wq_gemm_sm80.cu is faster than wq_gemm_sm90.cu (measured with 4 and 8 rows of Mixtral, 8 of
# gpt-oss: docs/performance/experts.md, "Marlin's experts"), and where it is faster than dequantizing first (measured
# for GEMMs without experts).
_MAX_FEW_ROWS, _MAX_ROWS = 4, 64
# Fewest warps of a block of wq_gemm_sm80.cu: one token of Mixtral takes 38.5 us, and with 2 warps 45.1 us.
_MIN_WARPS = 4
# {tile M: tile N} of wq_gemm_sm90.cu. Weights are dequantized once for all rows of a tile, so the largest accumulator
# tile that registers allow is best (docs/performance/experts.md).
TILES = {160: 128, 128: 128, 96: 256, 64: 256, 48: 256, 32: 256, 16: 256}
_BLOCK_SIZES = 8, 16, 32, 48, 64, 96, 128, 160  # slots of a block of the sorted lists
# Block size if experts have rows for several blocks: 1700 us on an H200, against 1755 us with 160 slots.
_MANY_ROWS_BLOCK = 96
_FULL = 0.9  # a block is large enough if the mean rows of an expert fill at most this part of it


def block_size_of_packed(num_rows: int, num_experts: int, most: int = _BLOCK_SIZES[-1]) -> int:
    """The block size, up to `most`, with which `moe_align_block_size` should sort `num_rows` rows for packed weights.

    It is the smallest size that holds all rows of most experts, if there is one.
    """
    num_rows = tuning.pinned_rows(num_rows, num_experts)
    fits = (size for size in _BLOCK_SIZES if size <= most and num_rows < _FULL * size * max(1, num_experts))
    return next(fits, min(most, _MANY_ROWS_BLOCK))


def plan(problem: PackedProblem) -> list[Launch]:
    """The launches of a kernel with fused dequantization, or of dequantization and a grouped GEMM."""
    experts = problem.experts
    assert experts is not None
    if 0 in (problem.m, problem.weight.n, experts.num_experts, experts.lists.num_blocks):
        return []
    if problem.weight.k == 0:
        return _written_in_full(replace(problem, weight=replace(problem.weight, perm=None)))
    if not serves(problem, problem.device):
        launches, problem = _gathered(problem, experts, by_place=False)
        return [*launches, *_written_in_full(problem)]
    config = tuning.config(problem.op, problem, problem.device, choose)
    launches, problem = _gathered(problem, experts, by_place=isinstance(config, PackedConfig))
    return [*launches, *config.launches(problem)]


def serves(problem: PackedProblem, device: Device) -> bool:
    """Whether a kernel with fused dequantization supports this problem and is faster than dequantizing first."""
    rows = problem.rows_of_weight
    if _serves_tile(problem, device):
        return rows <= packed_tile.MAX_ROWS
    return serves_many(problem, device) or (_serves_few(problem, device) and rows <= _MAX_ROWS)


def _serves_tile(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_cdna.cu has an instance for this problem, and a tile that divides the lists' blocks."""
    assert problem.experts is not None
    return problem.experts.lists.block_size % 8 == 0 and cdna_refusal(PackedShape.of(problem), device) is None


def _serves_few(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_sm80.cu has an instance for this problem."""
    return mma_refusal(PackedShape.of(problem), device) is None


def serves_many(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_sm90.cu has an instance for this problem."""
    shape, experts = PackedShape.of(problem), problem.experts
    assert experts is not None
    step = step_rows(shape.layout)
    served = shape.layout == "marlin" and shape.k % step == 0 and shape.divides(step)
    served = served and experts.lists.block_size % 16 == 0 and device.supports("wgmma")
    return served and rounding(shape) is None and unread(shape) is None


def _gathered(problem: PackedProblem, experts: PackedExperts, by_place: bool) -> tuple[list[Launch], PackedProblem]:
    """The launch that permutes the columns of the activations by `perm`, and the problem with these activations.

    Without `perm` there is no launch, unless the rows are to be gathered in the order of the sorted lists (`by_place`).
    """
    w, a, lists = problem.weight, problem.a, experts.lists
    if w.perm is None and not by_place:
        return [], problem
    sizes = experts.num_experts, problem.m, experts.top_k, w.k
    gather, operand = gathered(a, lists, *sizes, perm=w.perm, by_place=by_place)
    return [gather], replace(problem, a=operand, weight=replace(w, perm=None), experts=replace(experts, top_k=1))


def choose(problem: PackedProblem, device: Device) -> PackedConfig | PackedMmaConfig | PackedTileConfig:
    """The kernel for a problem for which `serves` is true, and its geometry: tiles that divide the lists' blocks.

    Tiles of wq_gemm_sm80.cu have the expected number of rows of an expert; those of wq_gemm_sm90.cu are as large as
    blocks allow.
    """
    experts, w, rows = problem.experts, problem.weight, problem.rows_of_weight
    assert experts is not None
    block_size = experts.lists.block_size
    if _serves_tile(problem, device):
        weights = -(-problem.expected_rows // rows)
        return packed_tile.choose(rows, w.k, w.n, device, weights, block_size)
    if serves_many(problem, device) and (rows > _MAX_FEW_ROWS or not _serves_few(problem, device)):
        tile_m = next(size for size in TILES if block_size % size == 0)
        boxes = max_boxes(PackedShape.of(problem))
        return PackedConfig(tile_m, TILES[tile_m], chunk=2, splits=1, min_blocks=1, boxes=boxes)
    shape = PackedShape.of(problem)
    step = packed_mma.step_rows(shape, TILE_N)
    weights, several = -(-problem.expected_rows // rows), shape.groups_of(step) > 1
    max_rows = 8 if block_size % 16 else 16
    config = choose_mma(max(8, rows), TILE_N, w.n, -(-w.k // step), device, several, weights, max_rows, _MIN_WARPS)
    return fitting(config, shape, device)


def _written_in_full(problem: PackedProblem) -> list[Launch]:
    """Launches that dequantize the weights and upcast 8-bit activations, and the grouped GEMM.

    The weights are multiplied by all scales except those of the activations.
    """
    w, e, dtype, experts = problem.weight, problem.epilogue, problem.compute_dtype, problem.experts
    assert experts is not None
    gather, a = dequantize_packed.activations(problem)
    scales, of_rows = (None, e.a_scales) if problem.a.dtype.itemsize == 1 else (e.a_scales, None)
    if w.scales is None:
        w = replace(w, scales=e.b_scales, scale_exponent=e.scale_exponent)
    else:  # a_scales, one per weight or per row, take the exponent
        w = replace(w, scale_exponent=w.scale_exponent + e.scale_exponent)
    dense = Scratch(max(1, experts.num_experts * w.n * w.k) * dtype.itemsize)
    product = GroupedProblem(
        e.out,
        a,
        Operand.of_scratch(dense, dtype, experts.num_experts * w.n, w.k),
        experts.num_experts,
        w.k,
        experts.lists,
        experts.topk_weights,
        of_rows,
        bias=e.bias,
        top_k=experts.top_k,
        column_order=e.column_order,
    )
    written = dequantize_packed.written(dense, dtype, w, experts.num_experts, scales)
    return [*([written] if w.k else []), *gather, grouped_plan.plan(product)]
