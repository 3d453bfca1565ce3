"""Adapters for vLLM's ops of LoRA, which take lists of slices; `adapters.py` and `adapters_0_33.py` register them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from ...ops.linear import fused_moe_lora_expand as _fused_moe_lora_expand
from ...ops.linear import fused_moe_lora_shrink as _fused_moe_lora_shrink
from ...ops.linear import lora_expand as _lora_expand
from ...ops.linear import lora_shrink as _lora_shrink

if TYPE_CHECKING:
    from torch import Tensor


def lora_shrink(
    inputs: Tensor,
    lora_a_weights: Sequence[Tensor],
    output_tensor: Tensor,
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: Tensor,
    scaling: float,
) -> None:
    """lora_shrink, a launch for each four slices"""
    if no_lora_flag_cpu.item():
        return
    sorted_tokens = token_indices_sorted_by_lora_ids, num_tokens_per_lora
    for first, weights in _by_four(_stacked(lora_a_weights)):
        out = output_tensor[first : first + 4]
        _lora_shrink(out, inputs, weights[0], token_lora_mapping, scaling, *weights[1:], *sorted_tokens)


def lora_expand(
    inputs: Tensor,
    lora_b_weights: Sequence[Tensor],
    output_tensor: Tensor,
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: Tensor,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """lora_expand, a launch for each four slices"""
    if no_lora_flag_cpu.item():
        return
    sorted_tokens = token_indices_sorted_by_lora_ids, num_tokens_per_lora
    for first, weights in _by_four(_stacked(lora_b_weights)):
        columns = sum(weight.shape[1] for weight in weights if weight is not None)
        if offset_start < 0 or offset_start + columns > output_tensor.shape[-1]:
            expected = f"at most {output_tensor.shape[-1] - columns}, for {columns} columns"
            raise OpError("lora_expand", "offset_start", f"expected {expected}, got {offset_start}")
        out, x = output_tensor[:, offset_start : offset_start + columns], inputs[first : first + 4]
        _lora_expand(out, x, weights[0], token_lora_mapping, add_inputs, *weights[1:], *sorted_tokens)
        offset_start += columns


def fused_moe_lora(
    output: Tensor,
    qcurr_hidden_states: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int,
    top_k_num: int,
    lora_ids: Tensor,
    num_active_loras: Tensor,
    adapter_enabled: Tensor,
    shrink_block_size_m: int,
    shrink_block_size_n: int,
    shrink_block_size_k: int,
    shrink_group_size_m: int,
    shrink_num_warps: int,
    shrink_num_stages: int,
    shrink_split_k: int,
    expand_block_size_m: int,
    expand_block_size_n: int,
    expand_block_size_k: int,
    expand_group_size_m: int,
    expand_num_warps: int,
    expand_num_stages: int,
    expand_split_k: int,
    mul_routed_weight: bool = False,
    fully_sharded: bool = False,
    offset: int = 0,
    add_inputs: bool = True,
) -> None:
    """fused_moe_lora_shrink, then fused_moe_lora_expand, a launch of each for each four slices"""
    num_tokens, top_k = topk_weights.shape
    a, b = ([_one_expert(weight) for weight in stacked] for stacked in (lora_a_stacked, lora_b_stacked))
    num_rows, columns = num_tokens * (top_k if mul_routed_weight else 1), sum(weight.shape[2] for weight in b)
    for argument, is_right, expected, got in (
        ("lora_a_stacked", len(a) > 0, "a slice", "none"),
        ("lora_b_stacked", len(a) == len(b), f"{len(a)} slices", len(b)),
        ("qcurr_hidden_states", len(qcurr_hidden_states) == num_rows, f"{num_rows} rows", len(qcurr_hidden_states)),
        ("expand_block_size_m", expand_block_size_m == shrink_block_size_m, shrink_block_size_m, expand_block_size_m),
        ("offset", 0 <= offset <= output.shape[-1] - columns, f"0 to {output.shape[-1] - columns}", offset),
    ):
        if not is_right:
            raise OpError("fused_moe_lora", argument, f"expected {expected}, got {got}")
    if not num_tokens:
        return
    lists = sorted_token_ids, num_tokens_post_padded, None if sorted_token_ids is None else lora_ids
    pairs = expert_ids, adapter_enabled, token_lora_mapping, *lists, shrink_block_size_m
    x = qcurr_hidden_states.unflatten(0, (num_tokens, -1))
    shrunk = a[0].new_empty(len(a), num_tokens, top_k, a[0].shape[2])
    for first, four in _by_four(a):
        _fused_moe_lora_shrink(shrunk[first : first + 4], x, four[0], *pairs, *four[1:])
    if fully_sharded:
        name = "all_reduce" if shrunk.shape[-1] == b[0].shape[-1] else "all_gather"
        shrunk = getattr(importlib.import_module("vllm.distributed"), f"tensor_model_parallel_{name}")(shrunk)
    factors = topk_weights if mul_routed_weight else None
    for first, four in _by_four(b):
        out = output[..., offset : offset + sum(weight.shape[2] for weight in four if weight is not None)]
        _fused_moe_lora_expand(out, shrunk[first : first + 4], four[0], *pairs, factors, add_inputs, *four[1:])
        offset += out.shape[-1]


def _one_expert(weight: Tensor) -> Tensor:
    """A stack of weights, with one expert where vLLM has expanded that to all."""
    return weight[:, :1] if weight.stride(1) == 0 else weight


def _by_four(weights: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Any, Any, Any, Any]]]:
    """(number of the first, weights) of each four slices; None for those that are missing."""
    for first in range(0, len(weights), 4):
        one, two, three, four, *_ = (*weights[first : first + 4], None, None, None)
        yield first, (one, two, three, four)


def _stacked(weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights of slices, [num_loras, rows, columns]; vLLM stacks adapters as [num_loras, 1, rows, columns]."""
    return [weight.squeeze(1) if weight.ndim == 4 else weight for weight in weights]
