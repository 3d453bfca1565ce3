"""Rows sorted by expert, padded so that every block of a grouped GEMM has one expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors import tensor
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from ._sort import check_count, check_ids, check_map, local_experts, max_slots, padded_slots, sort_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["batched_moe_align_block_size", "moe_align", "moe_align_block_size"]

_moe_align = Kernel("moe/moe_align.cu")
_moe_batched_align = Kernel("moe/moe_batched_align.cu")
_BATCHED_THREADS = 256  # threads of a block of moe_batched_align.cu; not tuned


def align(
    sorted_token_ids: Tensor, experts_ids: Tensor, total: Tensor, experts: Tensor, num_experts: int, block_size: int
) -> None:
    """The reference of an alignment, for the rows with an expert >= 0."""
    rows, slots, blocks = padded_slots(experts, num_experts, block_size)
    sorted_token_ids.fill_(len(experts))
    sorted_token_ids[slots] = rows.int()
    numbers = torch.arange(num_experts, dtype=torch.int64, device=experts.device).repeat_interleave(blocks)
    experts_ids.fill_(-1)
    experts_ids[: len(numbers)] = numbers.int()
    total.copy_(blocks.sum() * block_size)


@op(out=("sorted_token_ids", "experts_ids", "num_tokens_post_pad", "scatter_idx"), ulps=0)
def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    expert_map: Tensor | None = None,
    scatter_idx: Tensor | None = None,
) -> None:
    """Sort rows by their experts, and pad the rows of each expert to a multiple of `block_size`.

    A row is one choice of one token: row t is element t of `topk_ids`. `sorted_token_ids` gets the rows of expert 0 in
    ascending order, padded with ``num_tokens * topk`` to a multiple of `block_size`, then the rows of expert 1, and so
    on; the remaining elements are also ``num_tokens * topk``. A row is skipped if its id is not from 0 to num_experts -
    1, or if the map does not map its expert to such a number. Modelled on vLLM's op of this name.

    Args:
        topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
        num_experts: number of experts.
        block_size: rows of a block of the GEMM (its tile M).
        sorted_token_ids: one dimension, int32, contiguous, written; capacity for the rows of any distribution:
            ``num_tokens * topk + min(num_experts, num_tokens * topk) * (block_size - 1)`` elements, rounded down to a
            multiple of block_size, are enough.
        experts_ids: one dimension, int32, contiguous, written: the expert of each block of `block_size` elements of
            sorted_token_ids, -1 after the last; at least one element for each block.
        num_tokens_post_pad: one int32, written: elements used by rows and their padding, a multiple of block_size.
        expert_map: [any] int32, contiguous: the local index of each expert, -1 for an expert on another device. Rows
            are sorted by local index, and `experts_ids` holds local indices. None: ids are not mapped.
        scatter_idx: [num_tokens * topk, of any shape] int32, contiguous, written unless None: t for row t, -1 for a row
            that is skipped.
    """
    experts = local_experts(topk_ids, num_experts, num_experts, expert_map)
    align(sorted_token_ids, experts_ids, num_tokens_post_pad, experts, num_experts, block_size)
    if scatter_idx is not None:
        rows = torch.arange(len(experts), dtype=torch.int32, device=experts.device)
        scatter_idx.copy_(rows.where(experts >= 0, -1).view(scatter_idx.shape))


def wanted_slots(topk_ids: TensorArg, num_experts: int, block_size: int) -> int:
    """Check the sizes of an alignment; returns the maximum number of output slots."""
    check_ids(topk_ids)
    check_count(topk_ids, "num_experts", num_experts)
    check_count(topk_ids, "block_size", block_size)
    wanted = max_slots(topk_ids.numel, num_experts, block_size)
    if wanted > 2**31 - 1:
        raise check.refuse(topk_ids, "block_size", f"expected fewer than 2^31 slots, got {wanted}")
    return wanted


@moe_align_block_size.result
def result_moe_align_block_size(topk_ids: TensorArg, num_experts: int, block_size: int) -> tuple[Result, ...]:
    wanted = wanted_slots(topk_ids, num_experts, block_size)
    return Result((wanted,), int32), Result((wanted // block_size,), int32), Result((1,), int32)


@moe_align_block_size.plan
def plan_moe_align_block_size(
    topk_ids: TensorArg,
    num_experts: int,
    block_size: int,
    sorted_token_ids: TensorArg,
    experts_ids: TensorArg,
    num_tokens_post_pad: TensorArg,
    expert_map: TensorArg | None,
    scatter_idx: TensorArg | None,
) -> Launch:
    wanted = wanted_slots(topk_ids, num_experts, block_size)
    for arg, count in ((sorted_token_ids, wanted), (experts_ids, wanted // block_size)):
        check.sizes(arg, count=None)
        check.at_least(arg, int32, count)
    check.scalar(num_tokens_post_pad, int32)
    if scatter_idx is not None:
        check.dtype(scatter_idx, int32)
        check.contiguous(scatter_idx)
        if scatter_idx.numel != topk_ids.numel:
            raise scatter_idx.error(f"expected {topk_ids.numel} elements, one for each id, got {scatter_idx.shape}")
    return sort_launch(
        _moe_align,
        topk_ids,
        num_experts,
        sorted_token_ids.numel,
        HAS_MAP=expert_map is not None,
        LORA=False,
        HAS_SCATTER=scatter_idx is not None,
        fixed={
            "num_ids": check_map(expert_map, num_experts),
            "num_slots": sorted_token_ids.numel,
            "num_blocks": experts_ids.numel,
            "topk": topk_ids.shape[1],
            "num_lora_ids": 0,
            "token_lora_mapping": 0,
            "adapter_enabled": 0,
            "lora_ids": 0,
        },
    )


@moe_align_block_size.example
def example_moe_align_block_size(
    make: Any,
    *,
    num_tokens: int = 16,
    topk: Literal[8, 3] = 8,
    num_experts: Literal[128, 513] = 128,
    with_map: bool = False,
    with_scatter: bool = False,
) -> tuple[Any, ...]:
    block_size = 64
    slots = max_slots(num_tokens * topk, num_experts, block_size)
    return (
        make.randint(0, num_experts, num_tokens, topk, dtype="int32"),
        num_experts,
        block_size,
        make.empty(slots, dtype="int32"),
        make.empty(slots // block_size, dtype="int32"),
        make.full(1, value=0, dtype="int32"),  # unchanged by a call without tokens
        make.randint(-1, num_experts, num_experts, dtype="int32") if with_map else None,
        make.empty(num_tokens, topk, dtype="int32") if with_scatter else None,
    )


def moe_align(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sorted_token_ids, expert_ids, num_tokens_post_padded) of `moe_align_block_size`, which are new.

    The arguments and the sizes are those of vLLM's Python function ``moe_align_block_size``.

    Args:
        topk_ids, block_size, num_experts: as in `moe_align_block_size`.
        expert_map: [num_experts] int32, contiguous: the local index of each expert, -1 for an expert on another device.
        pad_sorted_ids: whether the size of sorted_token_ids is rounded up to a multiple of block_size.
        ignore_invalid_experts: whether rows of experts on other devices are skipped, and the others sorted by local
            index. Otherwise all rows are sorted by `topk_ids`, and expert_ids holds ``expert_map[expert]``,
            which may be -1.
    """
    num_rows = topk_ids.shape[0] * topk_ids.shape[1]
    slots = num_rows + num_experts * (block_size - 1)
    if pad_sorted_ids:
        slots = -(-slots // block_size) * block_size
    if num_rows < num_experts:
        slots = min(slots, num_rows * block_size)
    sizes = slots, -(-slots // block_size), 1
    sorted_token_ids, expert_ids, total = (tensor.new(topk_ids, (size,), "int32") for size in sizes)
    own_map = expert_map if ignore_invalid_experts else None
    moe_align_block_size(topk_ids, num_experts, block_size, sorted_token_ids, expert_ids, total, own_map)
    if expert_map is not None and not ignore_invalid_experts:
        expert_ids = expert_map[expert_ids]
    return sorted_token_ids, expert_ids, total


@op(out=("sorted_ids", "expert_ids", "num_tokens_post_pad"), ulps=0)
def batched_moe_align_block_size(
    max_tokens_per_batch: int,
    block_size: int,
    expert_num_tokens: Tensor,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_pad: Tensor,
) -> None:
    """The rows of batched experts, one batch of rows per expert, padded per expert to a multiple of `block_size`.

    Expert b has the rows ``b * max_tokens_per_batch + i`` for ``i < expert_num_tokens[b]``, a number that is clamped to
    0 ... max_tokens_per_batch. `sorted_ids` gets the rows of one expert after another; the padding of each
    expert and the elements after the last are ``num_experts * max_tokens_per_batch``. Modelled on vLLM's op of this
    name.

    Args:
        max_tokens_per_batch: row capacity of an expert.
        block_size: rows of a block of the GEMM (its tile M).
        expert_num_tokens: [num_experts] int32, contiguous.
        sorted_ids: [num_experts * c] int32, contiguous, written; c is max_tokens_per_batch, rounded up to a multiple of
            block_size.
        expert_ids: [num_experts * c / block_size] int32, contiguous, written: the expert of each block, -1 after the
            last.
        num_tokens_post_pad: one int32, written: elements used by rows and their padding.
    """
    counts = expert_num_tokens.long().clamp(0, max_tokens_per_batch)
    offsets = torch.arange(max_tokens_per_batch, dtype=torch.int64, device=counts.device)
    batch = torch.arange(len(counts), dtype=torch.int64, device=counts.device)[:, None].expand(-1, max_tokens_per_batch)
    align(
        sorted_ids,
        expert_ids,
        num_tokens_post_pad,
        batch.where(offsets < counts[:, None], -1).reshape(-1),
        len(counts),
        block_size,
    )


@batched_moe_align_block_size.result
def result_batched_moe_align_block_size(
    max_tokens_per_batch: int, block_size: int, expert_num_tokens: TensorArg
) -> tuple[Result, ...]:
    slots = _batched_slots(max_tokens_per_batch, block_size, expert_num_tokens)
    return Result((slots,), int32), Result((slots // block_size,), int32), Result((1,), int32)


def _batched_slots(max_tokens_per_batch: int, block_size: int, expert_num_tokens: TensorArg) -> int:
    """Check the sizes of the batches; returns the output slots for their rows."""
    check.sizes(expert_num_tokens, num_experts=None)
    check.dtype(expert_num_tokens, int32)
    check.contiguous(expert_num_tokens)
    check_count(expert_num_tokens, "max_tokens_per_batch", max_tokens_per_batch, low=0)
    check_count(expert_num_tokens, "block_size", block_size)
    slots = expert_num_tokens.numel * (-(-max_tokens_per_batch // block_size) * block_size)
    check_count(expert_num_tokens, "max_tokens_per_batch", max(slots, max_tokens_per_batch), low=0)
    return slots


@batched_moe_align_block_size.plan
def plan_batched_moe_align_block_size(
    max_tokens_per_batch: int,
    block_size: int,
    expert_num_tokens: TensorArg,
    sorted_ids: TensorArg,
    expert_ids: TensorArg,
    num_tokens_post_pad: TensorArg,
) -> Launch:
    slots = _batched_slots(max_tokens_per_batch, block_size, expert_num_tokens)
    check.shape(sorted_ids, int32, slots=slots)
    check.shape(expert_ids, int32, blocks=slots // block_size)
    check.scalar(num_tokens_post_pad, int32)
    num_experts = expert_num_tokens.numel
    return _moe_batched_align(NUM_THREADS=_BATCHED_THREADS).launch(
        grid=max(1, num_experts),
        block=_BATCHED_THREADS,
        num_experts=num_experts,
        num_slots=slots,
        num_blocks=slots // block_size,
    )


@batched_moe_align_block_size.bad_indices
def bad_indices_batched_moe_align_block_size(max_tokens_per_batch: int, expert_num_tokens: Tensor) -> dict[str, Tensor]:
    return {"expert_num_tokens": (expert_num_tokens < 0) | (expert_num_tokens > max_tokens_per_batch)}


@batched_moe_align_block_size.example
def example_batched_moe_align_block_size(
    make: Any, *, num_tokens: int = 16, num_experts: Literal[32, 300] = 32
) -> tuple[Any, ...]:
    block_size = 16
    slots = num_experts * (-(-num_tokens // block_size) * block_size)
    return (
        num_tokens,
        block_size,
        make.randint(0, num_tokens + 1, num_experts, dtype="int32"),
        make.empty(slots, dtype="int32"),
        make.empty(slots // block_size, dtype="int32"),
        make.full(1, value=0, dtype="int32"),  # unchanged by a call without tokens
    )
