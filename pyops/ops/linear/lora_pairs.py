"""Pairs of a token and an expert with LoRA adapters: where they come from, and the plan that both products share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.tensors.dtypes import float32, int32
from ..._core.tensors.tensor import TensorArg
from .lora_plan import check_operands, given, launch

if TYPE_CHECKING:
    from torch import Tensor

_mma = Kernel("linear/lora_mma.cu", entry="lora_mma_experts")
_simt = Kernel("linear/lora_simt.cu", entry="lora_simt_experts")


class PairArgs(NamedTuple):
    """The arguments of both ops that say which pairs there are; tensors, or their descriptions in a plan."""

    expert_ids: Any
    adapter_enabled: Any
    token_lora_mapping: Any
    sorted_token_ids: Any
    num_tokens_post_padded: Any
    lora_ids: Any
    block_size: int


def adapters_of_pairs(num_pairs: int, top_k: int, weight: Tensor, pairs: PairArgs) -> Tensor:
    """The adapter of each pair, numbered l * num_experts + e; -1 for pairs without one."""
    import torch

    expert_ids, adapter_enabled, token_lora_mapping, *lists, block_size = pairs
    sorted_token_ids, num_tokens_post_padded, lora_ids = lists
    max_loras, num_experts = weight.shape[:2]

    def numbered(loras: Tensor, experts: Tensor) -> Tensor:
        experts = experts.clamp(max=0) if num_experts == 1 else experts
        return torch.where((experts >= 0) & (experts < num_experts), loras * num_experts + experts, -1)

    if sorted_token_ids is None:
        loras = token_lora_mapping.long()[: num_pairs // max(1, top_k)].repeat_interleave(top_k)
        exists = (loras >= 0) & (loras < max_loras)
        exists &= adapter_enabled[loras.where(exists, 0)] != 0
        return torch.where(exists, numbered(loras, expert_ids.long()), -1)
    found = torch.full((num_pairs,), -1, dtype=torch.int64, device=weight.device)
    named = set(lora_ids.tolist())
    for lora in range(max_loras):
        if lora not in named or not adapter_enabled[lora]:
            continue
        count = min(
            sorted_token_ids.shape[1], expert_ids.shape[1] * block_size, max(0, int(num_tokens_post_padded[lora]))
        )
        listed = sorted_token_ids[lora, :count].long()
        experts = expert_ids[lora].long().repeat_interleave(block_size)[:count]
        exists = (listed >= 0) & (listed < num_pairs)
        found[listed[exists]] = numbered(torch.full_like(listed, lora), experts)[exists]
    return found


def bad_pairs(weight: Tensor, pairs: PairArgs) -> dict[str, Tensor]:
    """Experts and adapters that are neither one nor -1; in lists, negative pairs and slots that do not exist."""
    import torch

    expert_ids, adapter_enabled, token_lora_mapping, *lists, block_size = pairs
    sorted_token_ids, num_tokens_post_padded, lora_ids = lists
    max_loras, num_experts = weight.shape[:2]
    bad_experts = (expert_ids < -1) | ((expert_ids >= num_experts) & (num_experts > 1))
    if token_lora_mapping is not None and sorted_token_ids is None:
        return {
            "expert_ids": bad_experts,
            "token_lora_mapping": (token_lora_mapping < -1) | (token_lora_mapping >= max_loras),
        }
    loras = torch.arange(max_loras, dtype=torch.int64, device=weight.device)
    is_read = (lora_ids[:, None] == loras).any(0) & (adapter_enabled[:max_loras] != 0)
    slots = torch.arange(sorted_token_ids.shape[1], dtype=torch.int64, device=weight.device)
    in_use = is_read[:, None] & (slots < num_tokens_post_padded[:, None])
    blocks = torch.arange(expert_ids.shape[1], dtype=torch.int64, device=weight.device) * block_size
    return {
        "expert_ids": bad_experts & is_read[:, None] & (blocks < num_tokens_post_padded[:, None]),
        "sorted_token_ids": in_use & (sorted_token_ids < 0),
        "num_tokens_post_padded": is_read
        & ((num_tokens_post_padded < 0) | (num_tokens_post_padded > sorted_token_ids.shape[1])),
        "lora_ids": (lora_ids < -1) | (lora_ids >= max_loras),
    }


def plan_pairs(
    out: TensorArg,
    x: TensorArg,
    weights: Sequence[TensorArg | None],
    topk_weights: TensorArg | None,
    pairs: PairArgs,
    *,
    is_shrink: bool,
    adds: bool,
) -> Launch:
    """Checks what both ops have in common, and launches a kernel."""
    check_operands(out, x, weights)
    max_loras, num_experts = given(weights)[0].shape[:2]
    num_tokens, top_k = out.shape[-3:-1]
    check.sizes(pairs.adapter_enabled, max_loras=None)
    check.at_least(pairs.adapter_enabled, int32, max_loras)
    slots, blocks = _lists(num_tokens, top_k, max_loras, pairs)
    is_sorted = pairs.sorted_token_ids is not None
    return launch(
        _mma,
        _simt,
        out,
        x,
        weights,
        num_rows=num_tokens * top_k,
        is_shrink=is_shrink,
        is_ordered=is_sorted,
        lists=(max_loras, slots) if is_sorted else None,
        constants={
            "index_t": pairs.expert_ids.dtype,
            "SORTED": is_sorted,
            "HAS_FACTORS": topk_weights is not None,
            "factor_t": float32 if topk_weights is None else topk_weights.dtype,
            "ADDS": adds,
            "CLEARS": False,
        },
        num_pairs=num_tokens * top_k,
        top_k=max(1, top_k),
        x_top_k=1 if x.shape[-2] == top_k else max(1, top_k),
        max_loras=max_loras,
        num_experts=num_experts,
        num_slots=slots,
        num_blocks=blocks,
        num_lora_ids=pairs.lora_ids.numel if is_sorted else 0,
        out_stride=_pair_stride(out),
        x_stride=_pair_stride(x),
        **({"topk_weights": 0} if is_shrink else {}),
    )


def _lists(num_tokens: int, top_k: int, max_loras: int, pairs: PairArgs) -> tuple[int, int]:
    """Checks where pairs come from; the slots and blocks of each adapter's list, 0 without lists."""
    expert_ids, _, token_lora_mapping, *lists, block_size = pairs
    sorted_token_ids, num_tokens_post_padded, lora_ids = lists
    check.contiguous(expert_ids)
    given_lists = given(lists)
    if not given_lists:
        check.index(expert_ids, num_pairs=num_tokens * top_k)
        if token_lora_mapping is None:
            raise check.refuse(expert_ids, "token_lora_mapping", "expected a tensor, or sorted_token_ids")
        check.sizes(token_lora_mapping, num_tokens=None)
        check.at_least(token_lora_mapping, int32, num_tokens)
        return 0, 0
    if len(given_lists) < len(lists):
        expected = "sorted_token_ids, num_tokens_post_padded and lora_ids, or none of them"
        raise given_lists[0].error(f"expected all of {expected}")
    check.index(expert_ids, max_loras=max_loras, num_blocks=None)
    check.sizes(sorted_token_ids, max_loras=max_loras, num_slots=None)
    for arg in (expert_ids, sorted_token_ids):
        check.narrow(arg)
    check.at_least(sorted_token_ids, int32, 0)
    check.shape(num_tokens_post_padded, int32, max_loras=max_loras)
    check.sizes(lora_ids, num_lora_ids=None)
    check.at_least(lora_ids, int32, 0)
    if block_size < 1:
        raise check.refuse(expert_ids, "block_size", f"expected at least 1, got {block_size}")
    return sorted_token_ids.shape[1], expert_ids.shape[1]


def _pair_stride(arg: TensorArg) -> int:
    """Elements from a pair to the next, [..., num_tokens, top_k, columns]; OpError unless they follow each other."""
    (num_tokens, top_k), (token_stride, stride) = arg.shape[-3:-1], arg.strides[-3:-1]
    if top_k == 1:
        return token_stride
    if num_tokens > 1 and token_stride != top_k * stride and arg.numel:
        raise arg.error(f"expected pairs that follow each other, got shape {arg.shape} with strides {arg.strides}")
    return stride


def pairs_traffic(out: TensorArg, x: TensorArg, weights: Sequence[TensorArg | None], passes: int) -> int:
    """Bytes of a call: `passes` over out, one over x, and the adapters that its pairs have at most."""
    num_pairs = out.shape[-3] * out.shape[-2]
    total = passes * out.numel * out.dtype.itemsize + x.numel * x.dtype.itemsize
    for weight in given(weights):
        num_adapters = max(1, weight.shape[0] * weight.shape[1])
        total += min(num_pairs, num_adapters) * weight.numel // num_adapters * weight.dtype.itemsize
    return total


def example_pairs(
    make: Any, num_tokens: int, top_k: int, num_loras: int, num_experts: int, index_dtype: str, is_sorted: bool
) -> tuple[Any, ...]:
    """expert_ids, and what follows it. Of several adapters, the last is not enabled."""
    enabled = make.values([1] * (num_loras - 1) + [int(num_loras == 1)], "int32")
    num_pairs, block_size = num_tokens * top_k, 16
    if not is_sorted:
        experts = make.randint(-1, num_experts, num_pairs, dtype=index_dtype)
        return experts, enabled, make.randint(-1, num_loras, num_tokens, dtype="int32"), None, None, None, 0
    blocks = num_pairs // block_size + 2
    slots = blocks * block_size
    return (
        make.randint(-1, num_experts, num_loras, blocks, dtype=index_dtype),
        enabled,
        None,
        make.permutation(num_loras * slots, num_loras, slots, dtype="int32"),
        make.values([slots] * (num_loras - 1) + [slots - 5], "int32"),
        make.values([-1, *range(num_loras)], "int32"),
        block_size,
    )
