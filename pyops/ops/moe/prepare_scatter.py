"""The permutation of tokens by expert alone, for GEMMs that store rows by index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import int32, int64
from ..._core.tensors.tensor import TensorArg
from ._sort import check_ids
from .permute import plan_sort, write_permutation

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["moe_prepare_scatter"]


@op(out=("expert_first_token_offset", "scatter_idx", "sorted_rows"), ulps=0)
def moe_prepare_scatter(
    topk_ids: Tensor,
    token_expert_indices: Tensor,
    expert_map: Tensor | None,
    n_expert: int,
    n_local_expert: int,
    expert_first_token_offset: Tensor,
    scatter_idx: Tensor,
    sorted_rows: Tensor,
) -> None:
    """The permutation of `moe_permute`, which describes it, without a copy of rows, as vLLM's op of this name.

    Args:
        topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token. Any values are allowed.
        token_expert_indices: [num_tokens, topk] int32, contiguous. vLLM's op takes it; this op does not read it.
        expert_map: one-dimensional int32, contiguous: the local index of each expert, -1 for an expert on another
            device. None: the local index of an expert is its id.
        n_expert, n_local_expert: number of experts on all devices, and on this device.
        expert_first_token_offset: [n_local_expert + 1] int64, contiguous, written: the permuted index of the first row
            for each expert on this device, then the number of all rows for experts on this device.
        scatter_idx: [num_tokens, topk] int32, in any shape, contiguous, written: the permuted index of each row.
        sorted_rows: [num_tokens * topk] int32, in any shape, contiguous, written: the row at each permuted index, or
            ``num_tokens * topk`` if its expert is not on this device.
    """
    ids = topk_ids, expert_map, n_expert, n_local_expert
    write_permutation(*ids, expert_first_token_offset, scatter_idx, sorted_rows)


@moe_prepare_scatter.result
def result_moe_prepare_scatter(topk_ids: TensorArg, n_local_expert: int) -> tuple[Result, ...]:
    check.sizes(topk_ids, num_tokens=None, topk=None)
    num_tokens, topk = topk_ids.shape
    return Result((n_local_expert + 1,), int64), Result((num_tokens, topk), int32), Result((num_tokens * topk,), int32)


@moe_prepare_scatter.plan
def plan_moe_prepare_scatter(
    topk_ids: TensorArg,
    token_expert_indices: TensorArg,
    expert_map: TensorArg | None,
    n_expert: int,
    n_local_expert: int,
    expert_first_token_offset: TensorArg,
    scatter_idx: TensorArg,
    sorted_rows: TensorArg,
) -> Launch:
    check_ids(topk_ids)
    outputs = expert_first_token_offset, scatter_idx, sorted_rows
    return plan_sort(topk_ids, token_expert_indices, expert_map, n_expert, n_local_expert, *outputs)


@moe_prepare_scatter.example
def example_moe_prepare_scatter(make: Any, *, num_tokens: int = 16, with_map: bool = False) -> tuple[Any, ...]:
    topk, num_experts = 8, 128
    num_local = num_experts // 2 if with_map else num_experts
    return (
        make.randint(0, num_experts, num_tokens, topk, dtype="int32"),
        make.permutation(num_tokens * topk, num_tokens, topk, dtype="int32"),
        make.randint(-1, num_local, num_experts, dtype="int32") if with_map else None,
        num_experts,
        num_local,
        make.full(num_local + 1, value=0, dtype="int64"),  # not `empty`: a call without tokens does not write it
        make.empty(num_tokens, topk, dtype="int32"),
        make.empty(num_tokens * topk, dtype="int32"),
    )
