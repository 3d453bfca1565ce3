"""Adapters for those ops of vLLM 0.33 that have other arguments, or another order, than the ops of this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from ..._core.system.lazy import torch
from ...ops.cache import concat_and_cache_mla as _concat_and_cache_mla
from ...ops.cache import cp_gather_and_upconvert_fp8_kv_cache as _cp_gather_and_upconvert_fp8_kv_cache
from ...ops.cache import reshape_and_cache as _reshape_and_cache
from ...ops.embedding import ngram_compute_n_gram_ids as _ngram_compute_n_gram_ids
from ...ops.linear import dsv3_fused_a_gemm as _dsv3_fused_a_gemm
from ...ops.linear import gptq_gemm as _gptq_gemm
from ...ops.linear import gptq_marlin_repack as _gptq_marlin_repack
from ...ops.mamba import gated_delta_rule_update as _gated_delta_rule_update
from ...ops.mamba import kda as _kda
from ...ops.moe import moe_permute as _moe_permute
from ...ops.moe import moe_prepare_scatter as _moe_prepare_scatter
from ...ops.moe import moe_sum as _moe_sum
from ...ops.moe import moe_sum_experts as _moe_sum_experts
from ...ops.moe import topk_softplus_sqrt as _topk_softplus_sqrt
from ...ops.norm import rms_norm_gated as _rms_norm_gated
from ...ops.quantize import gptq_shuffle as _gptq_shuffle
from . import adapters, adapters_lora

if TYPE_CHECKING:
    from torch import Tensor

ADAPTERS_0_33: dict[str, Callable[..., Any]] = {}
_MAX_INT32 = 2**31 - 1


def _adapter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register the decorated function as the adapter of the op of its name."""
    ADAPTERS_0_33[function.__name__] = function
    return function


def _require(op: str, trailing: Sequence[Any], **defaults: Any) -> None:
    """OpError for the first of the `trailing` arguments that is not its default. torch drops trailing defaults."""
    for (argument, default), value in zip(defaults.items(), trailing, strict=False):
        if value is not default:
            raise OpError(op, argument, f"expected {default}, got {'a tensor' if default is None else value}")


@_adapter
def marlin_gemm(a: Tensor, c_or_none: Tensor | None, *others: Any) -> Tensor:
    """marlin_gemm, where c comes second, without the arguments of act-order"""
    product: Tensor = adapters.marlin_gemm(a, c_or_none, *others[:6], None, None, *others[6:11], True, *others[11:])
    return product


@_adapter
def moe_wna16_marlin_gemm(a: Tensor, c_or_none: Tensor | None, *others: Any) -> Tensor:
    """moe_wna16_marlin_gemm, which returns c, or a new one, without the arguments of act-order"""
    ordered = *others[:6], None, None, *others[6:18], True, *others[18:]
    product: Tensor = adapters.moe_wna16_marlin_gemm(a, c_or_none, *ordered)
    return product


@_adapter
def gptq_marlin_repack(b_q_weight: Tensor, *sizes: Any) -> Tensor:
    """gptq_marlin_repack, without a permutation"""
    packed: Tensor = _gptq_marlin_repack(b_q_weight, None, *sizes)
    return packed


@_adapter
def gptq_gemm(a: Tensor, b_q_weight: Tensor, b_gptq_qzeros: Tensor, b_gptq_scales: Tensor, *others: Any) -> Tensor:
    """gptq_gemm, without the groups of act-order"""
    product: Tensor = _gptq_gemm(a, b_q_weight, b_gptq_qzeros, b_gptq_scales, None, *others)
    return product


@_adapter
def gptq_shuffle(q_weight: Tensor, bit: int) -> None:
    """gptq_shuffle, without a permutation"""
    _gptq_shuffle(q_weight, None, bit)


@_adapter
def dsv3_fused_a_gemm(output: Tensor, mat_a: Tensor, mat_b: Tensor, enable_pdl: bool = False) -> None:
    """dsv3_fused_a_gemm, for which enable_pdl has no effect: every launch may overlap the previous kernel"""
    _dsv3_fused_a_gemm(output, mat_a, mat_b)


@_adapter
def reshape_and_cache(*args: Any) -> None:
    """reshape_and_cache, without AITER's layout of values"""
    _require("reshape_and_cache", args[8:], interleaved_v=False)
    _reshape_and_cache(*args[:8])


@_adapter
def paged_attention(*args: Any) -> None:
    """paged_attention_rocm, with partial results in memory of its own, without AITER's layout of values"""
    _require("paged_attention", args[20:], use_interleaved_v_cache=False)
    adapters.paged_attention(*args[:20])


@_adapter
def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
    skip_scale: bool = False,
) -> None:
    """concat_and_cache_mla, with a scale of 1 if it is skipped"""
    _concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, 1.0 if skip_scale else scale)


@_adapter
def moe_sum(input: Tensor, output: Tensor, topk_ids: Tensor | None = None, expert_map: Tensor | None = None) -> None:
    """moe_sum, or moe_sum_experts if topk_ids are given"""
    if topk_ids is None:
        _moe_sum(input, output)
        return
    try:
        _moe_sum_experts(input, topk_ids, output, _MAX_INT32, expert_map)
    except OpError as error:
        raise error.within("moe_sum", {}) from None


@_adapter
def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None,
    *host_rows: Any,
) -> None:
    """cp_gather_and_upconvert_fp8_kv_cache, where a sequence ends with the next, without rows in host memory"""
    name = "cp_gather_and_upconvert_fp8_kv_cache"
    _require(name, host_rows, host_cache=None, host_row_ids=None, device_row_ids=None)
    _cp_gather_and_upconvert_fp8_kv_cache(src_cache, dst, block_table, None, workspace_starts, batch_size, seq_starts)


@_adapter
def cooperative_topk(*args: Any) -> None:
    """persistent_topk, by its name for GPUs with clusters"""
    try:
        adapters.persistent_topk(*args)
    except OpError as error:
        raise error.within("cooperative_topk", {}) from None


@_adapter
def topk_softplus_sqrt(*args: Any) -> None:
    """topk_softplus_sqrt, without the bias of image tokens"""
    if len(args) == 12 and args[10] is not None and args[11] > 0:  # without a sentinel the bias has no effect
        raise OpError("topk_softplus_sqrt", "bias_vl", "expected None, or an image_sentinel_lo of 0, got a tensor")
    _topk_softplus_sqrt(*args[:10])


@_adapter
def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """0: kda has a workspace of its own"""
    return 0


@_adapter
def ngram_compute_n_gram_ids(*args: Any) -> None:
    """ngram_compute_n_gram_ids, which of the tensors that are marked as written writes n_gram_ids alone"""
    _ngram_compute_n_gram_ids(*args)


@_adapter
def moe_permute_with_scratch(*args: Any) -> None:
    """moe_permute, which needs no scratch: the last four tensors are not written"""
    try:
        _moe_permute(*args[:11])
    except OpError as error:
        raise error.within("moe_permute_with_scratch", {}) from None


@_adapter
def moe_prepare_scatter(
    topk_ids: Tensor,
    token_expert_indices: Tensor,
    expert_map: Tensor | None,
    n_expert: int,
    n_local_expert: int,
    expert_first_token_offset: Tensor,
    scatter_idx: Tensor,
    sort_workspace: Tensor,
    sorted_experts: Tensor,
    sorted_rows: Tensor,
    topk_ids_for_sort: Tensor,
) -> None:
    """moe_prepare_scatter, which writes neither sort_workspace nor sorted_experts nor topk_ids_for_sort"""
    outputs = expert_first_token_offset, scatter_idx, sorted_rows
    _moe_prepare_scatter(topk_ids, token_expert_indices, expert_map, n_expert, n_local_expert, *outputs)


@_adapter
def moe_permute_sort_workspace_size(num_expanded_rows: int, n_expert: int) -> int:
    """no bytes: moe_permute and moe_prepare_scatter need no workspace"""
    return 0


@_adapter
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    workspace: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> None:
    """kda with all its gates, and states that have values before keys; without the workspace"""
    states = final_state, checkpoint_state, checkpoint_offsets
    gates = A_log, dt_bias, lower_bound
    _kda(q, k, v, g, beta, scale, *gates, initial_state, cu_seqlens, True, True, True, *states, o=out)


@_adapter
def fused_gdn_decode_post_conv_mtp(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor,
    scale: float,
    norm_eps: float = 1e-5,
    output_gate_activation: str = "silu",
) -> None:
    """gated_delta_rule_update, then rms_norm_gated in float32; no slot, which 0 means too, gives outputs of 0"""
    value_heads, value_size, key_size = state.shape[1:]
    key_heads = (mixed_qkv.shape[1] - value_heads * value_size) // (2 * key_size)
    widths = [key_heads * key_size, key_heads * key_size, value_heads * value_size]
    parts = zip(mixed_qkv.unsqueeze(0).split(widths, 2), (key_size, key_size, value_size), strict=True)
    q, k, v = (part.unflatten(2, (-1, size)) for part, size in parts)
    decays = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    slots = state_indices.masked_fill((state_indices <= 0) | (num_accepted_tokens <= 0)[:, None], -1)
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    how = scale, cu_seqlens, slots, num_accepted_tokens, True, True
    _gated_delta_rule_update(state, q, k, v, decays[None], b.float().sigmoid()[None], *how, o=o)
    gate, normed = output_gate.float(), torch.empty_like(o[0], dtype=torch.float32)
    _rms_norm_gated(
        normed,
        o[0].float(),
        norm_weight.float(),
        norm_eps,
        gate,
        norm_before_gate=True,
        activation=output_gate_activation,
    )
    out.copy_(normed)


@_adapter
def mxfp4_experts_quant_supported(cuda_device_capability: int) -> bool:
    """mxfp4_experts_quant runs on every GPU"""
    return True


_adapter(adapters_lora.fused_moe_lora)
