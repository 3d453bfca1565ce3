"""Constructors of layers: names, order and defaults of their arguments are those of vLLM 0.22."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from pyops import nn as layers

_ROPE = "head_size, rotary_dim, max_position_embeddings, base, is_neox_style"
_LINEAR = "params_dtype=None, quant_config=None, prefix='', *, return_bias=True, disable_tp=False"
_CONV = (
    "in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True, "
    "padding_mode='zeros', *, params_dtype=None"
)
_VOCAB = "params_dtype=None, org_num_embeddings=None, padding_size=64, quant_config=None, prefix=''"
_SWITCHES = "*, enforce_enable=False, compile_native=False"

# {layer: the arguments of vLLM's class of that name}
VLLM = {
    "ApplyRotaryEmb": "enforce_enable=False, is_neox_style=True, enable_fp32_compute=False",
    "ColumnParallelLinear": f"input_size, output_size, bias=True, gather_output=False, skip_bias_add=False, {_LINEAR}",
    "Conv2dLayer": _CONV,
    "Conv3dLayer": _CONV,
    "CustomOp": _SWITCHES,
    "DeepseekScalingRotaryEmbedding": (
        f"{_ROPE}, scaling_factor, dtype, *, extrapolation_factor=1, attn_factor=1, beta_fast=32, beta_slow=1, "
        "mscale=1, mscale_all_dim=0, init_cache=True"
    ),
    "DualChunkRotaryEmbedding": f"{_ROPE}, dtype, chunk_size, local_size",
    "DynamicNTKAlphaRotaryEmbedding": f"{_ROPE}, scaling_alpha, dtype",
    "DynamicNTKScalingRotaryEmbedding": (
        "head_size, rotary_dim, max_position_embeddings, max_trained_positions, base, is_neox_style, scaling_factor, "
        "dtype"
    ),
    "FastGELU": "",
    "FatreluAndMul": "threshold=0.0",
    # Of what FusedMoE has in vLLM, that which is served.
    "FusedMoE": (
        "num_experts, top_k, hidden_size, intermediate_size, params_dtype=None, reduce_results=False, "
        "renormalize=True, use_grouped_topk=False, num_expert_group=None, topk_group=None, quant_config=None, "
        "tp_size=None, ep_size=None, dp_size=None, pcp_size=None, prefix='', custom_routing_function=None, "
        "scoring_func='softmax', routed_scaling_factor=1.0, e_score_correction_bias=None, "
        "apply_router_weight_on_input=False, activation='silu', is_act_and_mul=True, has_bias=False"
    ),
    "FusedMoEModularMethod": "old_quant_method=None, experts=None",
    "GeluAndMul": "approximate='none'",
    "GeluAndMulSparse": "activation_sparsity, approximate='none'",
    "GemmaRMSNorm": "hidden_size, eps=1e-6",
    "GroupedTopk": (
        "topk, renormalize, num_expert_group=0, topk_group=0, scoring_func='softmax', routed_scaling_factor=1.0, "
        "num_fused_shared_experts=0"
    ),
    "LinearScalingRotaryEmbedding": f"{_ROPE}, scaling_factors, dtype",
    "Llama3RotaryEmbedding": f"{_ROPE}, dtype, scaling_factor, low_freq_factor, high_freq_factor, orig_max_position",
    "LogitsProcessor": "vocab_size, org_vocab_size=None, scale=1.0, logits_as_input=False, soft_cap=None",
    "MMEncoderAttention": "num_heads, head_size, scale=None, num_kv_heads=None, prefix=''",
    "MRotaryEmbedding": (
        f"{_ROPE}, dtype, mrope_section=None, mrope_interleaved=False, *, scaling_factor=None, extrapolation_factor=1, "
        "attn_factor=1, beta_fast=32, beta_slow=1, truncate=True"
    ),
    "MambaMixer": (
        "hidden_size, ssm_state_size, conv_kernel_size, intermediate_size, time_step_rank, use_conv_bias, use_bias, "
        "use_rms_norm, rms_norm_has_weight=True, rms_norm_eps=1e-5, activation='silu', is_lora_enabled=False, "
        "model_config=None, cache_config=None, prefix=''"
    ),
    "MambaMixer2": (
        "hidden_size, ssm_state_size, conv_kernel_size, intermediate_size, use_conv_bias, use_bias, n_groups=1, "
        "num_heads=128, head_dim=64, rms_norm_eps=1e-5, activation='silu', use_rms_norm=True, model_config=None, "
        "cache_config=None, quant_config=None, prefix=''"
    ),
    "MergedColumnParallelLinear": (
        f"input_size, output_sizes, bias=True, gather_output=False, skip_bias_add=False, {_LINEAR}"
    ),
    "Mixer2RMSNormGated": "full_hidden_size, full_n_groups, use_rms_norm=True, eps=1e-6",
    "MulAndSilu": "",
    "NTKScalingRotaryEmbedding": f"{_ROPE}, scaling_factor, dtype, mixed_b=None",
    "NewGELU": "",
    "ParallelLMHead": f"num_embeddings, embedding_dim, bias=False, {_VOCAB}",
    "Phi3LongRoPEScaledRotaryEmbedding": (
        "head_size, rotary_dim, max_position_embeddings, original_max_position_embeddings, base, is_neox_style, dtype, "
        "short_factor, long_factor, short_mscale=None, long_mscale=None"
    ),
    "Plamo2MambaMixer": "vllm_config, *, prefix='', **kwargs",
    "QKVParallelLinear": (
        "hidden_size, head_size, total_num_heads, total_num_kv_heads=None, bias=True, skip_bias_add=False, "
        f"{_LINEAR}, v_head_size=None"
    ),
    "QuantFP8": (
        "static, group_shape, num_token_padding=None, column_major_scales=False, tma_aligned_scales=False, "
        "use_ue8m0=None, compile_native=True"
    ),
    "QuickGELU": "",
    "RMSNorm": "hidden_size, eps=1e-6, var_hidden_size=None, has_weight=True, dtype=None",
    "RMSNormGated": (
        "hidden_size, eps=1e-5, group_size=None, norm_before_gate=False, device=None, dtype=None, activation='swish'"
    ),
    "ReLUSquaredActivation": _SWITCHES,
    "ReplicatedLinear": f"input_size, output_size, bias=True, skip_bias_add=False, {_LINEAR}",
    "RotaryEmbedding": f"{_ROPE}, dtype, init_cache=True",
    "RotaryEmbeddingBase": f"{_ROPE}, dtype, init_cache=True",
    "RowParallelLinear": (
        "input_size, output_size, bias=True, input_is_parallel=True, skip_bias_add=False, params_dtype=None, "
        "reduce_results=True, quant_config=None, prefix='', *, return_bias=True, disable_tp=False"
    ),
    "ShortConv": "config, dim, layer_idx, model_config=None, cache_config=None, prefix=''",
    "SiluAndMul": "*, compile_native=True",
    "SwigluOAIAndMul": "alpha=1.702, limit=7.0",
    "SiluAndMulWithClamp": "swiglu_limit, *, compile_native=True",
    "SwigluStepAndMul": "limit=7.0",
    "UnquantizedFusedMoEMethod": "moe=None",
    "VocabParallelEmbedding": f"num_embeddings, embedding_dim, {_VOCAB}",
    "XIELU": ("alpha_p_init=0.8, alpha_n_init=0.8, beta=0.5, eps=-1e-6, dtype=torch.bfloat16, with_vector_loads=False"),
    "YaRNScalingRotaryEmbedding": (
        f"{_ROPE}, scaling_factor, dtype, *, extrapolation_factor=1, attn_factor=1, beta_fast=32, beta_slow=1, "
        "apply_yarn_scaling=True, truncate=True"
    ),
    "get_rope": (
        "head_size, max_position, is_neox_style=True, rope_parameters=None, dtype=None, "
        "dual_chunk_attention_config=None"
    ),
}
VLLM["TransformersFusedMoE"] = VLLM["FusedMoE"]
# Arguments of this library alone, by name only: the switches of CustomOp, and what vLLM reads from its configuration.
ADDED = {name: {"enforce_enable", "compile_native"} for name in ("FastGELU", "MulAndSilu", "NewGELU", "QuickGELU")}
ADDED["Phi3LongRoPEScaledRotaryEmbedding"] = {"max_model_len"}


def _arguments(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_every_layer_is_in_the_table() -> None:
    modules = {name for name in layers.__all__ if isinstance(getattr(layers, name), type)}
    modules = {name for name in modules if issubclass(getattr(layers, name), torch.nn.Module)}
    # PluggableLayer has no constructor of its own.
    assert modules - {"PluggableLayer"} == VLLM.keys() - {"get_rope"}


@pytest.mark.parametrize("name", VLLM)
def test_arguments_are_those_of_vllm(name: str) -> None:
    theirs = _arguments(eval(f"lambda {VLLM[name]}: None", {"torch": torch}))
    added = ADDED.get(name, set())
    ours = _arguments(getattr(layers, name))
    assert {argument for argument, kind, _ in ours if kind is inspect.Parameter.KEYWORD_ONLY} >= added
    assert [argument for argument in ours if argument[0] not in added] == theirs
