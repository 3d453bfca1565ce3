"""Products of rows with the packed weights of their experts: which kernel serves them, and its launches."""

from __future__ import annotations

from dataclasses import replace

from ..._core import tuning
from ..._core.device import Device
from ..._core.kernel import Launch, Scratch
from . import dequantize_packed, grouped_plan, packed_tile
from .expert_rows import gathered
from .gemm_problem import Operand
from .grouped_problem import GroupedProblem
from .packed_hopper import PackedConfig, max_boxes, step_rows
from .packed_plan import (
    Config,
    choose_mma,
    fits,
    fitting,
    reads_codes,
    rounds_once,
    rows_of_step,
    serves_few,
    serves_tile,
)
from .packed_problem import PackedExperts, PackedProblem

# Rows of an expert up to which wq_gemm_sm80.cu takes less time than wq_gemm_sm90.cu, where that runs (4 and 8 rows of
# Mixtral, 8 of gpt-oss: docs/performance/experts.md, "Marlin's experts"), and than weights in full, by products
# without experts.
_MAX_FEW_ROWS, _MAX_ROWS = 4, 64
_MIN_WARPS = 4  # of a block of wq_gemm_sm80.cu: one token of Mixtral takes 38.5 us, and with 2 warps 45.1
# {rows of a tile of wq_gemm_sm90.cu: its columns}, of which registers allow no more: a step takes the cycles of its
# products and those of codes, which are made numbers once for all rows (docs/performance/experts.md).
TILES = {160: 128, 128: 128, 96: 256, 64: 256, 48: 256, 32: 256, 16: 256}
_BLOCK_SIZES = 8, 16, 32, 48, 64, 96, 128, 160  # places of a block of lists
_MANY_ROWS_BLOCK = 96  # places of a block of experts whose rows fill several: 1700 us where 160 took 1755 on an H200
_FULL = 0.9  # of a block, up to which it is large enough for the rows of an expert


def block_size_of_packed(num_rows: int, num_experts: int, most: int = _BLOCK_SIZES[-1]) -> int:
    """Places of a block, up to `most`, as suit so many rows of experts with packed weights: for `moe_align_block_size`.

    It has room for all rows of most experts, where such a block is there.
    """
    fits = (size for size in _BLOCK_SIZES if size <= most and num_rows < _FULL * size * max(1, num_experts))
    return next(fits, min(most, _MANY_ROWS_BLOCK))


def plan(problem: PackedProblem) -> list[Launch]:
    """The launches of a kernel that reads codes itself, or of a grouped product with weights written in full."""
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
    """Whether a kernel that reads codes itself is there for this problem, and faster than writing the weights."""
    rows = problem.rows_of_weight
    if _serves_tile(problem, device):
        return rows <= packed_tile.MAX_ROWS
    return serves_many(problem, device) or (serves_few(problem, device) and rows <= _MAX_ROWS)


def _serves_tile(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_cdna.cu has an instance for this problem, and a tile that divides the lists' blocks."""
    assert problem.experts is not None
    return problem.experts.lists.block_size % 8 == 0 and serves_tile(problem, device)


def serves_many(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_sm90.cu has an instance for this problem."""
    w, experts = problem.weight, problem.experts
    assert experts is not None
    step = step_rows(problem.weight.layout)
    served = w.layout == "marlin" and w.k % step == 0 and fits(w, step) and experts.lists.block_size % 16 == 0
    return served and device.supports("wgmma") and rounds_once(w) and reads_codes(problem)


def _gathered(problem: PackedProblem, experts: PackedExperts, by_place: bool) -> tuple[list[Launch], PackedProblem]:
    """The launch that writes each row's activations in the order of its weight's rows, and the problem of these.

    Without that order there is nothing to write, unless rows are to be in the order of places.
    """
    w, a, lists = problem.weight, problem.a, experts.lists
    if w.perm is None and not by_place:
        return [], problem
    sizes = experts.num_experts, problem.m, experts.top_k, w.k
    gather, operand = gathered(a, lists, *sizes, perm=w.perm, by_place=by_place)
    return [gather], replace(problem, a=operand, weight=replace(w, perm=None), experts=replace(experts, top_k=1))


def choose(problem: PackedProblem, device: Device) -> Config:
    """The kernel for a problem that one `serves`, and its geometry: tiles that divide the lists' blocks.

    Tiles of wq_gemm_sm80.cu have as many rows as an expert is likely to have, those of wq_gemm_sm90.cu all they can.
    """
    experts, w, rows = problem.experts, problem.weight, problem.rows_of_weight
    assert experts is not None
    block_size = experts.lists.block_size
    if _serves_tile(problem, device):
        weights = -(-tuning.power_of_two(problem.m) // rows)
        return packed_tile.choose(rows, w.k, w.n, device, weights, block_size)
    if serves_many(problem, device) and (rows > _MAX_FEW_ROWS or not serves_few(problem, device)):
        tile_m = next(size for size in TILES if block_size % size == 0)
        boxes = max_boxes(problem)
        return PackedConfig(tile_m, TILES[tile_m], chunk=2, splits=1, min_blocks=1, boxes=boxes)
    step = rows_of_step(w, 64)
    weights, several = -(-tuning.power_of_two(problem.m) // rows), w.groups > 1 and w.group_size < step
    max_rows = 8 if block_size % 16 else 16
    config = choose_mma(max(8, rows), 64, w.n, -(-w.k // step), device, several, weights, max_rows, _MIN_WARPS)
    return fitting(config, problem, device)


def _written_in_full(problem: PackedProblem) -> list[Launch]:
    """Launches that write the weights, and activations of 8 bits in the dtype of the weights, and of their product.

    Weights have all scales but those of activations.
    """
    w, e, dtype, experts = problem.weight, problem.epilogue, problem.compute_dtype, problem.experts
    assert experts is not None
    gather, a = dequantize_packed.activations(problem)
    scales, of_rows = (None, e.a_scales) if problem.a.dtype.itemsize == 1 else (e.a_scales, None)
    if w.scales is None:
        w = replace(w, scales=e.b_scales, scale_exponent=e.scale_exponent)
    else:  # a_scales, of which there is one of each weight or of each row, have the exponent
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
