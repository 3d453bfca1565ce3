"""Activations with rows and columns in the order of grouped GEMMs with packed weights."""

from __future__ import annotations

from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.tensors.tensor import TensorArg
from .gemm_problem import Operand
from .grouped_problem import ExpertLists
from .pointers import fed

_gather_expert_columns = Kernel("linear/gather_expert_columns.cu")
_NUM_THREADS, _VEC_SIZE = 256, 8  # threads of a block, elements of a thread


def gathered(
    a: Operand,
    lists: ExpertLists,
    num_experts: int,
    num_rows: int,
    top_k: int,
    k: int,
    *,
    perm: TensorArg | None = None,
    by_place: bool = False,
    lane_step: int = 0,
    lane_pairs: int = 0,
) -> tuple[Launch, Operand]:
    """The launch that gathers the activations into a workspace, and the operand that describes it.

    Args:
        a: [num_rows / top_k, K].
        lists: the rows of each expert.
        num_experts, num_rows, top_k, k: sizes.
        perm: [num_experts, K], the order of columns; or None.
        by_place: whether each slot of the lists has a row; else each row of out has one.
        lane_step: elements of K in a k-tile of wq_grouped_gemm_sm90.cu, to permute columns to its order; or 0.
        lane_pairs: pairs of quants in a word of this kernel's weights.
    """
    places = lists.num_blocks * lists.block_size
    rows = places if by_place else num_rows
    workspace = Scratch(rows * k * a.dtype.itemsize)
    named = {name: getattr(lists, name) for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_pad")}
    kernel, others = fed(_gather_expert_columns, **named, a=a.source, perm=perm)
    vec_size = _VEC_SIZE if perm is not None else a.vec_size(k)
    launch = kernel(
        scalar_t=a.dtype,
        PERMUTED=perm is not None,
        BY_PLACE=by_place,
        LANE_STEP=lane_step,
        LANE_PAIRS=lane_pairs,
        VEC_SIZE=vec_size,
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        -(-places * -(-k // vec_size) // _NUM_THREADS),
        _NUM_THREADS,
        gathered=workspace,
        places=places,
        num_rows=num_rows,
        num_experts=num_experts,
        block_size=lists.block_size,
        top_k=top_k,
        k=k,
        a_stride=a.stride,
        **others,
    )
    return launch, Operand.of_scratch(workspace, a.dtype, rows, k)
