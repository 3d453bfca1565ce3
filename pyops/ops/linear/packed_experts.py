"""Products of rows with the packed weights of their experts: which kernel serves them, and its launches."""

from __future__ import annotations

from dataclasses import replace

from ..._core import tuning
from ..._core.device import Device
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.tensor import TensorArg
from . import dequantize_packed, grouped_plan
from .gemm_problem import Operand
from .grouped_problem import GroupedProblem
from .packed_plan import PackedMmaConfig, choose_mma, rows_of_step, serves_few
from .packed_problem import PackedExperts, PackedProblem

_gather_expert_columns = Kernel("linear/gather_expert_columns.cu")
_NUM_THREADS, _VEC_SIZE = 256, 8  # of it, and the elements of a thread
# Rows of an expert up to which reading its weight for every sixteen of them takes less time than writing all weights in
# full. Chosen by arithmetic: docs/performance.md, "Owed to a GPU".
_MAX_ROWS = 64


def plan(problem: PackedProblem) -> list[Launch]:
    """The launches of the kernel that reads codes itself, or of a grouped product with weights written in full."""
    experts = problem.experts
    assert experts is not None
    if 0 in (problem.m, problem.weight.n, experts.num_experts, experts.lists.num_blocks):
        return []
    launches, problem = _in_order(problem, experts)
    if problem.rows_of_weight <= _MAX_ROWS and serves_few(problem, problem.device):
        return [*launches, *tuning.config(problem.op, problem, problem.device, choose).launches(problem)]
    return [*launches, *_written_in_full(problem)]


def _in_order(problem: PackedProblem, experts: PackedExperts) -> tuple[list[Launch], PackedProblem]:
    """Launches that write each row's activations in the order of its weight's rows, and the problem of these."""
    w, a, lists = problem.weight, problem.a, experts.lists
    if w.perm is None or w.k == 0:
        return [], replace(problem, weight=replace(w, perm=None))
    assert isinstance(a.source, TensorArg)
    gathered = Scratch(problem.m * w.k * a.dtype.itemsize)
    named = {name: getattr(lists, name) for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_pad")}
    kernel = _gather_expert_columns.renamed(
        a=a.source.name, perm=w.perm.name, **{name: one.name for name, one in named.items()}
    )
    gather = kernel(scalar_t=a.dtype, VEC_SIZE=_VEC_SIZE, NUM_THREADS=_NUM_THREADS).launch(
        -(-problem.places * -(-w.k // _VEC_SIZE) // _NUM_THREADS),
        _NUM_THREADS,
        gathered=gathered,
        places=problem.places,
        num_rows=problem.m,
        num_experts=experts.num_experts,
        block_size=lists.block_size,
        top_k=experts.top_k,
        k=w.k,
        a_stride=a.stride,
    )
    rows = Operand.of_scratch(gathered, a.dtype, problem.m, w.k)
    return [gather], replace(problem, a=rows, weight=replace(w, perm=None), experts=replace(experts, top_k=1))


def choose(problem: PackedProblem, device: Device) -> PackedMmaConfig:
    """Tiles of as many rows as an expert is likely to have, which divide the lists' blocks."""
    experts, w, rows = problem.experts, problem.weight, problem.rows_of_weight
    assert experts is not None
    tile_m = 8 if rows <= 8 or experts.lists.block_size % 16 else 16
    step = rows_of_step(w, 64)
    chosen = -(-tuning.power_of_two(problem.m) // rows)
    several = w.groups > 1 and w.group_size < step
    found = choose_mma(tile_m, 64, w.n, -(-w.k // step), device, several, count=chosen * -(-rows // tile_m))
    return replace(found, tile_m=min(found.tile_m, tile_m))


def _written_in_full(problem: PackedProblem) -> list[Launch]:
    w, e, dtype, experts = problem.weight, problem.epilogue, problem.a.dtype, problem.experts
    assert experts is not None
    if w.scales is None:
        w = replace(w, scales=e.b_scales, scale_exponent=e.scale_exponent)
    elif e.a_scales is not None:  # one of each weight, which the exponent is of
        w = replace(w, scale_exponent=w.scale_exponent + e.scale_exponent)
    dense = Scratch(max(1, experts.num_experts * w.n * w.k) * dtype.itemsize)
    product = GroupedProblem(
        e.out,
        problem.a,
        Operand.of_scratch(dense, dtype, experts.num_experts * w.n, w.k),
        experts.num_experts,
        w.k,
        experts.lists,
        experts.topk_weights,
        bias=e.bias,
        top_k=experts.top_k,
        column_order=e.column_order,
    )
    written = dequantize_packed.written(dense, dtype, w, experts.num_experts, e.a_scales)
    return [written, grouped_plan.plan(product)] if w.k else [grouped_plan.plan(product)]
