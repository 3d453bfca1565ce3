"""Refusals of the ops that are not GEMMs: activations, attention, caches, norms, quantisation and others."""

from __future__ import annotations

from ._refusal import Refusal

_SHAPE_WHY = (
    "vLLM counts elements in memory alone, and fills a tensor of the wrong shape; its callers give the right one"
)
_RANGE_WHY = "kernels divide by it: outside the range, scales are no normal numbers or quantized values overflow"


def _shape(argument: str, like: str = "input") -> Refusal:
    return Refusal(argument, f"rows grouped otherwise than those of {like}, or rows of another size", _SHAPE_WHY)


def _one(argument: str) -> Refusal:
    return Refusal(argument, "more than one element", "vLLM reads the first alone, so the others would be ignored")


def _group_range(least: str, largest: str) -> tuple[Refusal, ...]:
    """Refusals of group quantisation: `least` and `largest` are the names of the bounds of quantized values."""
    return (
        Refusal("group_size", "no divisor of the last dimension", "groups would reach across rows"),
        Refusal("eps", "less than 2^-100 or more than 2^100", _RANGE_WHY),
        Refusal(least, "less than the smallest value of the dtype, or above 0", _RANGE_WHY),
        Refusal(largest, "above the largest value of the dtype, or less than 1", _RANGE_WHY),
    )


_TOP_K = (
    Refusal("logits", "other strides than stride0 and stride1", "only its own strides are known to stay inside it"),
    Refusal("indices", "more rows than numRows", _SHAPE_WHY),
)
_BYTES = "quantized entries as another dtype than uint8"
_BYTES_WHY = "an entry is bytes of quantized values, scales and floats; vLLM allocates it as uint8"

_BLOCK_SIZES = Refusal(
    "block_size_M", "more than block_size_N", "a slash then has several blocks, and block_offset a place for one"
)

_AITER = "True", "the layout of values is that of AITER's kernels for AMD's GPUs, which no attention here reads"

ROWS: dict[str, tuple[Refusal, ...]] = {
    # activations
    "silu_and_mul": (_shape("out"),),
    "mul_and_silu": (_shape("out"),),
    "gelu_and_mul": (_shape("out"),),
    "gelu_tanh_and_mul": (_shape("out"),),
    "fatrelu_and_mul": (_shape("out"),),
    "swigluoai_and_mul": (_shape("out"),),
    "silu_and_mul_with_clamp": (_shape("result"),),
    "gelu_new": (_shape("out"),),
    "gelu_fast": (_shape("out"),),
    "gelu_quick": (_shape("out"),),
    "silu_and_mul_quant": (_shape("result"), _one("scale")),
    "silu_and_mul_per_block_quant": (_shape("out"), _one("scale_ub")),
    "silu_and_mul_nvfp4_quant": (_one("input_global_scale"),),
    "persistent_masked_m_silu_mul_quant": (
        Refusal(
            "y_q", "float8_e4m3fnuz", "vLLM's kernel for it is written for NVIDIA's GPUs, whose fp8 is float8_e4m3fn"
        ),
        Refusal("counts", "elements apart in memory", "vLLM counts tokens of experts into a tensor of their own"),
    ),
    # attention
    "paged_attention_v1": (),
    "paged_attention_v2": (),
    "paged_attention": (Refusal("use_interleaved_v_cache", *_AITER),),
    "merge_attn_states": (
        Refusal("prefix_lse", "another shape than [num_heads, num_tokens]", _SHAPE_WHY),
        Refusal("suffix_lse", "another shape than [num_heads, num_tokens]", _SHAPE_WHY),
        Refusal("output_lse", "another shape than [num_heads, num_tokens]", _SHAPE_WHY),
    ),
    "convert_vertical_slash_indexes": (_BLOCK_SIZES,),
    "convert_vertical_slash_indexes_mergehead": (_BLOCK_SIZES,),
    "sm100_cutlass_mla_decode": (),
    "sm100_cutlass_mla_get_workspace_size": (),
    # caches
    "swap_blocks": (
        Refusal("src", "gaps between elements", "blocks are bytes: those in a gap belong to another tensor"),
    ),
    "swap_blocks_batch": (),
    "copy_blocks": (),
    "copy_blocks_mla": (),
    "reshape_and_cache": (_one("k_scale"), _one("v_scale"), Refusal("interleaved_v", *_AITER)),
    "reshape_and_cache_flash": (
        Refusal("kv_cache_dtype", '"nvfp4"', "vLLM has it on sm_100 alone; no attention of this library reads it"),
    ),
    "concat_and_cache_mla": (
        Refusal("kv_cache", f'"fp8_ds_mla" with {_BYTES}', _BYTES_WHY),
        _one("scale"),
    ),
    "concat_and_cache_mla_rope_fused": (),
    "convert_fp8": (
        Refusal("output", "other strides than those of input, or other sizes unless both are contiguous", _SHAPE_WHY),
    ),
    "gather_and_maybe_dequant_cache": (_one("scale"),),
    "cp_gather_cache": (),
    "cp_gather_and_upconvert_fp8_kv_cache": (
        Refusal("src_cache", _BYTES, _BYTES_WHY),
        Refusal("host_cache", "a tensor", "no cache here has rows in host memory"),
    ),
    "indexer_k_quant_and_cache": (Refusal("kv_cache", _BYTES, _BYTES_WHY),),
    "cp_gather_indexer_k_quant_cache": (Refusal("kv_cache", _BYTES, _BYTES_WHY),),
    "concat_mla_q": (),
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": (),
    "fused_deepseek_v4_kv_rope_insert": (),
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": (),
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": (),
    "fused_kimi_k3_mla_decode_q_concat_ds_mla_insert": (),
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert": (),
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert": (),
    "fused_kimi_k3_mla_key_concat_ds_mla_insert": (),
    "fused_kimi_k3_mla_key_concat_kv_cache_insert": (),
    "fused_kimi_k3_mla_kv_concat": (),
    "fused_kimi_k3_mla_kv_concat_quant_fp8": (),
    "fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert": (),
    "fused_qknorm_rope_cache": (),
    "fused_muse_spark_qknorm_rope_kv_insert": (),
    "fused_minimax_m3_qknorm_rope_kv_insert": (
        Refusal(
            "kv_cache_dtype", '"nvfp4"', "the pages are those of trtllm-gen for sm_100; no attention here reads them"
        ),
    ),
    "muse_spark_mul_tanh_soft_cap": (),
    "kimi_k3_attn_res": (),
    "cp_gather_and_upconvert_nvfp4_kv_cache": (),
    "ngram_compute_n_gram_ids": (),
    "moe_permute_with_scratch": (),
    "moe_prepare_scatter": (),
    "moe_permute_sort_workspace_size": (),
    "mxfp4_experts_quant_supported": (),
    # collectives
    "init_custom_ar": (),
    "all_reduce": (),
    "custom_all_gather": (),
    "custom_reduce_scatter": (),
    "dispose": (),
    "meta_size": (),
    "register_buffer": (),
    "get_graph_buffer_ipc_meta": (),
    "register_graph_buffers": (),
    "allocate_shared_buffer_and_handle": (),
    "open_mem_handle": (),
    "free_shared_buffer": (),
    "init_custom_qr": (),
    "qr_destroy": (),
    "qr_get_handle": (),
    "qr_open_handles": (),
    "qr_all_reduce": (),
    "qr_max_size": (),
    "minimax_allreduce_rms": (Refusal("rank", "one of 16", "GPUs that read each other's memory are at most 8"),),
    "minimax_allreduce_rms_qk": (Refusal("rank", "one of 16", "GPUs that read each other's memory are at most 8"),),
    # state-space models
    "fused_kda_decode": (),
    "fused_gdn_decode_post_conv_mtp": (),
    "fwd": (),
    "get_workspace_size": (),
    "selective_scan_fwd": (),
    # memory and devices
    "weak_ref_tensor": (),
    "get_cuda_view_from_cpu_tensor": (
        Refusal("cpu_tensor", "memory that is not pinned", "a copy would not see what the CPU writes afterwards"),
    ),
    "get_device_attribute": (),
    "get_max_shared_memory_per_block_device_attribute": (),
    # norms
    "rms_norm": (_shape("out"),),
    "fused_add_rms_norm": (_shape("residual"),),
    "rms_norm_static_fp8_quant": (_shape("result"), _one("scale")),
    "fused_add_rms_norm_static_fp8_quant": (_shape("result"), _one("scale")),
    "rms_norm_dynamic_per_token_quant": (
        _shape("result"),
        Refusal("scale", "more elements than rows", _SHAPE_WHY),
        _one("scale_ub"),
    ),
    "rms_norm_per_block_quant": (
        _shape("result"),
        Refusal("scale", "more elements than groups", _SHAPE_WHY),
        _one("scale_ub"),
    ),
    "fused_qk_norm_rope": (),
    # quantisation
    "static_scaled_fp8_quant": (_shape("result"),),
    "dynamic_scaled_fp8_quant": (_shape("result"),),
    "dynamic_per_token_scaled_fp8_quant": (_shape("result"), _one("scale_ub")),
    "static_scaled_int8_quant": (_shape("result"),),
    "dynamic_scaled_int8_quant": (
        _shape("result"),
        Refusal("scale", "more elements than rows", _SHAPE_WHY),
        Refusal("azp", "more elements than rows", _SHAPE_WHY),
    ),
    "per_token_group_fp8_quant": (
        _shape("output_q"),
        Refusal("output_q", "int8", "per_token_group_quant_int8 writes it"),
        *_group_range("fp8_min", "fp8_max"),
    ),
    "per_token_group_fp8_quant_packed": (
        Refusal("output_q", "int8", "DeepGEMM multiplies fp8 values under such scales"),
        *_group_range("fp8_min", "fp8_max"),
    ),
    "per_token_group_quant_int8": (
        _shape("output_q"),
        Refusal("output_q", "fp8", "per_token_group_fp8_quant writes it"),
        *_group_range("int8_min", "int8_max"),
    ),
    "scaled_fp4_quant": (_one("input_scale"),),
    "scaled_fp4_quant.out": (_one("input_scale"),),
    "scaled_fp4_experts_quant": (),
    "silu_and_mul_scaled_fp4_experts_quant": (),
    "mxfp4_experts_quant": (),
    "silu_and_mul_mxfp4_experts_quant": (),
    "mxfp8_experts_quant": (),
    "hadacore_transform": (),
    "permute_cols": (),
    "relu_squared": (),
    "situ_and_mul": (),
    "situ_and_mul_quant": (),
    "masked_moe_activation": (),
    "vocab_parallel_embedding": (),
    "fp32_router_gemm": (),
    "ggml_dequantize": (),
    "awq_dequantize": (),
    "gptq_shuffle": (),
    # rotary embedding
    "rotary_embedding": (
        Refusal("cos_sin_cache", "16-bit floats of another dtype than query's", "vLLM converts its table first"),
        Refusal("cos_sin_cache", "rotary_dim above 2048", "no model has it; it is the most that a block turns at once"),
    ),
    "flashinfer_rotary_embedding": (),
    # sampling
    "apply_repetition_penalties_": (),
    "top_k_per_row_prefill": _TOP_K,
    "top_k_per_row_decode": _TOP_K,
    "persistent_topk": (),
    "cooperative_topk": (),
}
