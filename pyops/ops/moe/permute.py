"""Permutation of tokens by expert, and the weighted sum of the experts' results (unpermute)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int32, int64
from ..._core.tensors.tensor import TensorArg
from .._shared import chunks
from .._shared.copied_rows import MOVED, as_bytes, check_matrix
from ._common import check_topk
from ._sort import check_count, check_ids, check_map, local_experts, sort_launch, sorted_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["moe_permute", "moe_permute_unpermute_supported", "moe_unpermute"]

_moe_sort_rows = Kernel("moe/moe_sort_rows.cu")
_moe_scatter_rows = Kernel("moe/moe_scatter_rows.cu")
_moe_unpermute = Kernel("moe/moe_unpermute.cu")
# MIN_BLOCKS of moe_scatter_rows.cu and moe_unpermute.cu, in blocks of 256 threads per SM. It leaves a thread 32
# registers, enough for a copy, and 64, enough for eight loads in flight.
_SCATTER_BLOCKS, _SUM_BLOCKS = 8, 4


def moe_permute_unpermute_supported() -> bool:
    """Whether `moe_permute` and `moe_unpermute` run: always."""
    return True


@op(out=("expert_first_token_offset", "inv_permuted_idx", "permuted_idx"), partial="permuted_input", ulps=0)
def moe_permute(
    input: Tensor,
    topk_ids: Tensor,
    token_expert_indices: Tensor,
    expert_map: Tensor | None,
    n_expert: int,
    n_local_expert: int,
    topk: int,
    permuted_input: Tensor,
    expert_first_token_offset: Tensor,
    inv_permuted_idx: Tensor,
    permuted_idx: Tensor,
) -> None:
    """Copy the row of each token once for each of its topk experts, sorted by expert.

    Choice j of token t is called row ``t * topk + j``. Rows for experts on this device come first, in the order of the
    local index, 0 to n_local_expert - 1; then rows for experts on other devices, in the order of the expert id; last
    rows with an id out of range. The sort is stable: rows for one expert stay in ascending order. Only rows for experts
    on this device are copied; the rest of `permuted_input` is unchanged. Modelled on vLLM's op of this name.

    Args:
        input: [num_tokens, hidden_size], floats, float8 or integers; constant row stride.
        topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token. Any values are allowed.
        token_expert_indices: [num_tokens, topk] int32, contiguous. vLLM's op takes it; this op does not read it.
        expert_map: one-dimensional int32, contiguous: the local index of each expert, -1 for an expert on another
            device. Ids that it has no entry for are out of range. None: the local index of an expert is its id.
        n_expert, n_local_expert: number of experts on all devices, and on this device.
        topk: experts of a token.
        permuted_input: [num_tokens * topk, hidden_size] of the same dtype, contiguous, written.
        expert_first_token_offset: [n_local_expert + 1] int64, contiguous, written: the permuted index of the first row
            for each expert on this device, then the number of all rows for experts on this device.
        inv_permuted_idx: [num_tokens, topk] int32, in any shape, contiguous, written: the permuted index of each row.
        permuted_idx: [num_tokens * topk] int32, in any shape, contiguous, written: the row at each permuted index, or
            ``num_tokens * topk`` if its expert is not on this device.
    """
    sorted_ids = topk_ids, expert_map, n_expert, n_local_expert
    rows, num_local = write_permutation(*sorted_ids, expert_first_token_offset, inv_permuted_idx, permuted_idx)
    _bits(permuted_input)[:num_local] = _bits(input)[rows[:num_local] // topk]


def write_permutation(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    n_expert: int,
    n_local_expert: int,
    expert_first_token_offset: Tensor,
    inv_permuted_idx: Tensor,
    permuted_idx: Tensor,
) -> tuple[Tensor, int]:
    """Write the permutation of `moe_permute`; returns (row at each permuted index, rows of experts on this device)."""
    num_rows = topk_ids.numel()
    num_ids = n_expert if expert_map is None else min(n_expert, len(expert_map))
    num_bins = _bins(num_ids, n_local_expert, expert_map is not None)
    experts = local_experts(topk_ids, n_expert, n_local_expert, expert_map)
    ids = topk_ids.reshape(-1).long()
    elsewhere = torch.where((ids >= 0) & (ids < num_ids), ids + (num_bins - 1 - num_ids), num_bins - 1)
    rows, counts = sorted_rows(experts.where(experts >= 0, elsewhere), num_bins)
    permuted_index = torch.empty_like(rows)
    permuted_index[rows] = torch.arange(num_rows, dtype=torch.int64, device=rows.device)
    inv_permuted_idx.view(-1).copy_(permuted_index)
    permuted_idx.view(-1).copy_(rows.where(experts[rows] >= 0, num_rows))
    expert_first_token_offset.copy_((counts.cumsum(0) - counts)[: n_local_expert + 1])
    return rows, int(counts[:n_local_expert].sum())


def _bins(num_ids: int, num_local: int, has_map: bool) -> int:
    """Bins of the sort: one per expert on this device, one per expert on other devices, one for ids out of range."""
    return (num_local + num_ids if has_map else max(num_local, num_ids)) + 1


def _bits(x: Tensor) -> Tensor:
    """`x`, or its bytes if it is float8: torch cannot index float8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


@moe_permute.result
def result_moe_permute(input: TensorArg, n_local_expert: int, topk: int) -> tuple[Result, ...]:
    num_tokens, hidden_size = check_matrix(input, *MOVED)
    return (
        Result((num_tokens * topk, hidden_size), input.dtype),
        Result((n_local_expert + 1,), int64),
        Result((num_tokens, topk), int32),
        Result((num_tokens * topk,), int32),
    )


@moe_permute.plan
def plan_moe_permute(
    input: TensorArg,
    topk_ids: TensorArg,
    token_expert_indices: TensorArg,
    expert_map: TensorArg | None,
    n_expert: int,
    n_local_expert: int,
    topk: int,
    permuted_input: TensorArg,
    expert_first_token_offset: TensorArg,
    inv_permuted_idx: TensorArg,
    permuted_idx: TensorArg,
) -> list[Launch]:
    num_tokens, hidden_size = check_matrix(input, *MOVED)
    check_ids(topk_ids)
    check.sizes(topk_ids, num_tokens=num_tokens, topk=topk)
    check_topk(topk_ids, topk)
    num_rows = num_tokens * topk
    check.shape(permuted_input, input.dtype, num_rows=num_rows, hidden_size=hidden_size)
    outputs = expert_first_token_offset, inv_permuted_idx, permuted_idx
    sort = plan_sort(topk_ids, token_expert_indices, expert_map, n_expert, n_local_expert, *outputs)
    tokens = as_bytes(input)
    # A thread loads one vector of a token's row once, and stores it topk times. `chunks.launch` takes the grid from the
    # output, so it gets the output with as many rows as the input.
    one_row_per_token = replace(as_bytes(permuted_input), shape=tokens.shape)
    return [
        sort,
        chunks.launch(
            _moe_scatter_rows,
            one_row_per_token,
            tokens,
            out_stride="permuted_stride",
            min_blocks=_SCATTER_BLOCKS,
            TOPK=topk,
            fixed={"max_slots": num_rows, "num_local": n_local_expert},
        ),
    ]


def plan_sort(
    topk_ids: TensorArg,
    token_expert_indices: TensorArg,
    expert_map: TensorArg | None,
    n_expert: int,
    n_local_expert: int,
    expert_first_token_offset: TensorArg,
    inv_permuted_idx: TensorArg,
    permuted_idx: TensorArg,
) -> Launch:
    """The checks and the launch of the permutation, of `topk_ids` that are checked."""
    num_tokens, topk = topk_ids.shape
    check.shape(token_expert_indices, int32, num_tokens=num_tokens, topk=topk)
    check_count(topk_ids, "n_expert", n_expert)
    check_count(topk_ids, "n_local_expert", n_local_expert)
    check.shape(expert_first_token_offset, int64, num_offsets=n_local_expert + 1)
    for arg in (inv_permuted_idx, permuted_idx):
        check.per_row(arg, int32, num_tokens * topk)
    num_ids = check_map(expert_map, n_expert)
    num_bins = _bins(num_ids, n_local_expert, expert_map is not None)
    names = {"num_experts": num_ids, "num_local": n_local_expert, "num_bins": num_bins}
    outputs = {"inv_permuted_idx": inv_permuted_idx, "permuted_idx": permuted_idx}
    return sort_launch(
        _moe_sort_rows,
        topk_ids,
        num_bins,
        num_tokens * topk,
        tuned=False,  # `tuning` varies the Config of moe_permute's row copy, not of its sort
        HAS_MAP=expert_map is not None,
        fixed={**names, **outputs},
    )


@moe_permute.traffic
def traffic_moe_permute(
    input: TensorArg, topk_ids: TensorArg, permuted_input: TensorArg, expert_first_token_offset: TensorArg
) -> int:
    return input.nbytes + 2 * topk_ids.nbytes + 8 * topk_ids.numel + permuted_input.nbytes


@moe_permute.example
def example_moe_permute(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 64] = 4096,
    dtype: str = "bfloat16",
    with_map: bool = False,
) -> tuple[Any, ...]:
    topk, num_experts = 8, 128
    num_local = num_experts // 2 if with_map else num_experts
    return (
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.randint(0, num_experts, num_tokens, topk, dtype="int32"),
        make.permutation(num_tokens * topk, num_tokens, topk, dtype="int32"),
        make.randint(-1, num_local, num_experts, dtype="int32") if with_map else None,
        num_experts,
        num_local,
        topk,
        make.empty(num_tokens * topk, hidden_size, dtype=dtype),
        make.full(num_local + 1, value=0, dtype="int64"),  # not `empty`: a call without tokens does not write it
        make.empty(num_tokens, topk, dtype="int32"),
        make.empty(num_tokens * topk, dtype="int32"),
    )


@op(out="hidden_states", ulps=0)
def moe_unpermute(
    permuted_hidden_states: Tensor,
    topk_weights: Tensor,
    inv_permuted_idx: Tensor,
    expert_first_token_offset: Tensor | None,
    topk: int,
    hidden_states: Tensor,
) -> None:
    """The weighted sum of the results of each token: ``out[t] = T(sum of w[t, j] * permuted[inv[t, j]] over j)``.

    Multiplications and additions are float32, each rounded, in the order of j; T rounds to the dtype of the output. An
    index out of range is skipped. So is a row for an expert on another device, which has an index not below the last
    element of `expert_first_token_offset`. Modelled on vLLM's op of this name.

    Args:
        permuted_hidden_states: [num_permuted, hidden_size], float32, float16 or bfloat16; constant row stride.
        topk_weights: [num_tokens, topk] float32, contiguous: w.
        inv_permuted_idx: [num_tokens, topk] int32, in any shape, contiguous: inv, as `moe_permute` writes it.
        expert_first_token_offset: [num_local + 1] int64, contiguous, as `moe_permute` writes it; if None, all experts
            are on this device.
        topk: experts of a token.
        hidden_states: [num_tokens, hidden_size] of the same dtype, written; constant row stride.
    """
    num_permuted = len(permuted_hidden_states)
    if expert_first_token_offset is not None:
        num_permuted = min(num_permuted, int(expert_first_token_offset[-1]))
    inv = inv_permuted_idx.view(-1, topk).long()
    exists = (inv >= 0) & (inv < num_permuted)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=inv.device)
    for j in range(topk):
        x = permuted_hidden_states[inv[:, j].where(exists[:, j], 0)].float()
        total = torch.where(exists[:, j, None], total + topk_weights[:, j, None] * x, total)
    hidden_states.copy_(total)


@moe_unpermute.result
def result_moe_unpermute(permuted_hidden_states: TensorArg, topk_weights: TensorArg) -> Result:
    check_matrix(permuted_hidden_states, permuted_hidden_states.dtype)
    check.sizes(topk_weights, num_tokens=None, topk=None)
    return Result((topk_weights.shape[0], permuted_hidden_states.shape[1]), permuted_hidden_states.dtype)


@moe_unpermute.plan
def plan_moe_unpermute(
    permuted_hidden_states: TensorArg,
    topk_weights: TensorArg,
    inv_permuted_idx: TensorArg,
    expert_first_token_offset: TensorArg | None,
    topk: int,
    hidden_states: TensorArg,
) -> Launch:
    check.floating(permuted_hidden_states)
    num_tokens, hidden_size = check_matrix(hidden_states, permuted_hidden_states.dtype)
    num_slots, _ = check_matrix(permuted_hidden_states, permuted_hidden_states.dtype)
    check.sizes(permuted_hidden_states, num_slots=None, hidden_size=hidden_size)
    check_topk(topk_weights, topk)
    check.shape(topk_weights, float32, num_tokens=num_tokens, topk=topk)
    check.per_row(inv_permuted_idx, int32, num_tokens * topk)
    if hidden_states.numel and not num_slots:
        raise permuted_hidden_states.error("expected at least one row, got none")
    num_local = 0
    if expert_first_token_offset is not None:
        check.sizes(expert_first_token_offset, num_offsets=None)
        check.at_least(expert_first_token_offset, int64, 1)
        num_local = expert_first_token_offset.numel - 1
    return chunks.launch(
        _moe_unpermute,
        hidden_states,
        permuted_hidden_states,
        min_blocks=_SUM_BLOCKS,
        TOPK=topk,
        HAS_OFFSET=expert_first_token_offset is not None,
        fixed={"num_slots": num_slots, "num_local": num_local},
    )


@moe_unpermute.bad_indices
def bad_indices_moe_unpermute(permuted_hidden_states: Tensor, inv_permuted_idx: Tensor) -> dict[str, Tensor]:
    return {"inv_permuted_idx": (inv_permuted_idx < 0) | (inv_permuted_idx >= len(permuted_hidden_states))}


@moe_unpermute.example
def example_moe_unpermute(
    make: Any,
    *,
    num_tokens: int = 16,
    topk: Literal[8, 3, 17] = 8,
    hidden_size: Literal[4096, 64] = 4096,
    dtype: str = "bfloat16",
    with_offset: bool = False,
) -> tuple[Any, ...]:
    num_rows = num_tokens * topk
    return (
        make.randn(num_rows, hidden_size, dtype=dtype),
        make.randn(num_tokens, topk, dtype="float32"),
        make.permutation(num_rows, num_tokens, topk, dtype="int32"),
        make.values([0, num_rows // 4, num_rows // 2], dtype="int64") if with_offset else None,
        topk,
        make.empty(num_tokens, hidden_size, dtype=dtype),
    )
