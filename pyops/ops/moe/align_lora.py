"""The alignment of rows to blocks (align.py) for each LoRA adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from ._sort import check_count, check_map, local_experts, max_slots, sort_launch
from .align import align, wanted_slots

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["moe_lora_align_block_size"]

_moe_align = Kernel("moe/moe_align.cu")


@op(partial=("sorted_token_ids", "experts_ids", "num_tokens_post_pad"), ulps=0)
def moe_lora_align_block_size(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    adapter_enabled: Tensor,
    lora_ids: Tensor,
    expert_map: Tensor | None = None,
) -> None:
    """`moe_align_block_size` for each LoRA adapter, with the rows of the tokens that use the adapter.

    Adapter l writes its own part of the outputs, from 0 to max_loras - 1, if `lora_ids` names l anywhere and
    ``adapter_enabled[l]`` is not 0. The parts of other adapters are left unchanged. Modelled on vLLM's op of this name.

    Args:
        topk_ids, num_experts, block_size, expert_map: as in `moe_align_block_size`.
        token_lora_mapping: [num_tokens] int32, contiguous: the adapter of each token; any number.
        max_loras: maximum number of adapters.
        max_num_tokens_padded: elements of sorted_token_ids per adapter; enough for any distribution of rows (see
            `moe_align_block_size`).
        max_num_m_blocks: elements of experts_ids per adapter.
        sorted_token_ids: [max_loras * max_num_tokens_padded] int32, in any shape, contiguous, written for the active
            adapters.
        experts_ids: [max_loras * max_num_m_blocks] int32, in any shape, contiguous, written likewise; -1 after the
            last block.
        num_tokens_post_pad: [max_loras] int32, contiguous, written likewise.
        adapter_enabled: [max_loras or more] int32, contiguous.
        lora_ids: [any] int32, contiguous: adapters; ids out of range are skipped.
    """
    experts = local_experts(topk_ids, num_experts, num_experts, expert_map).view_as(topk_ids)
    parts = sorted_token_ids.view(max_loras, -1), experts_ids.view(max_loras, -1), num_tokens_post_pad.view(-1)
    for lora in range(max_loras):
        if (lora_ids == lora).any() and adapter_enabled[lora]:
            own = experts.where((token_lora_mapping == lora)[:, None], -1).reshape(-1)
            align(parts[0][lora], parts[1][lora], parts[2][lora], own, num_experts, block_size)


@moe_lora_align_block_size.result
def result_moe_lora_align_block_size(
    max_loras: int, max_num_tokens_padded: int, max_num_m_blocks: int
) -> tuple[Result, ...]:
    return tuple(Result((max_loras * size,), int32) for size in (max_num_tokens_padded, max_num_m_blocks, 1))


@moe_lora_align_block_size.plan
def plan_moe_lora_align_block_size(
    topk_ids: TensorArg,
    token_lora_mapping: TensorArg,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: TensorArg,
    experts_ids: TensorArg,
    num_tokens_post_pad: TensorArg,
    adapter_enabled: TensorArg,
    lora_ids: TensorArg,
    expert_map: TensorArg | None,
) -> Launch:
    wanted = wanted_slots(topk_ids, num_experts, block_size)
    check.shape(token_lora_mapping, int32, num_tokens=topk_ids.shape[0])
    check_count(topk_ids, "max_loras", max_loras)
    check_count(topk_ids, "max_num_tokens_padded", max_num_tokens_padded, low=wanted)
    check_count(topk_ids, "max_num_m_blocks", max_num_m_blocks, low=wanted // block_size)
    check.per_row(sorted_token_ids, int32, max_loras * max_num_tokens_padded)
    check.per_row(experts_ids, int32, max_loras * max_num_m_blocks)
    check.per_row(num_tokens_post_pad, int32, max_loras)
    check.sizes(adapter_enabled, max_loras=None)
    check.at_least(adapter_enabled, int32, max_loras)
    check.sizes(lora_ids, num_lora_ids=None)
    check.at_least(lora_ids, int32, 0)
    return sort_launch(
        _moe_align,
        topk_ids,
        num_experts,
        max_num_tokens_padded,
        groups=max_loras,
        HAS_MAP=expert_map is not None,
        LORA=True,
        HAS_SCATTER=False,
        fixed={
            "scatter_idx": 0,
            "num_ids": check_map(expert_map, num_experts),
            "num_slots": max_num_tokens_padded,
            "num_blocks": max_num_m_blocks,
            "topk": topk_ids.shape[1],
            "num_lora_ids": lora_ids.numel,
        },
    )


@moe_lora_align_block_size.example
def example_moe_lora_align_block_size(make: Any, *, num_tokens: int = 16, with_map: bool = False) -> tuple[Any, ...]:
    topk, num_experts, block_size, max_loras = 6, 64, 16, 3
    slots = max_slots(num_tokens * topk, num_experts, block_size)
    return (
        make.randint(0, num_experts, num_tokens, topk, dtype="int32"),
        make.randint(-1, max_loras, num_tokens, dtype="int32"),
        num_experts,
        block_size,
        max_loras,
        slots,
        slots // block_size,
        make.empty(max_loras * slots, dtype="int32"),
        make.empty(max_loras * slots // block_size, dtype="int32"),
        make.full(max_loras, value=0, dtype="int32"),  # unchanged by a call without tokens
        make.values([1, 0, 1, 1], dtype="int32"),
        make.values([-1, 0, 1, 2], dtype="int32"),
        make.randint(-1, num_experts, num_experts, dtype="int32") if with_map else None,
    )
