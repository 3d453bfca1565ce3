"""The words that people search for, by the op that serves them. Ops stand here in the order of their family's page.

A family's page begins with these ops. Each gets a line "Also known as", and the words are tags of the page: the theme's
search ranks tags above titles.
"""

from __future__ import annotations

WORDS = {
    # activation
    "silu_and_mul": ("SwiGLU", "gated SiLU"),
    "gelu_and_mul": ("GEGLU",),
    "gelu_tanh_and_mul": ("GeGLU tanh",),
    "swigluoai_and_mul": ("gpt-oss activation",),
    "silu_and_mul_quant": ("SwiGLU fp8",),
    # attention
    "paged_attention_varlen": (
        *("flash attention", "FlashAttention", "prefill", "chunked prefill"),
        *("GQA", "grouped-query attention", "MQA", "sliding window"),
    ),
    "paged_attention_v1": ("paged attention", "PagedAttention", "decode attention", "flash decoding", "split-KV"),
    "attention_varlen": ("flash_attn_varlen_func", "ragged attention", "SDPA", "encoder attention"),
    "sm100_cutlass_mla_decode": ("MLA", "FlashMLA", "multi-head latent attention"),
    "sparse_mla_attention": ("DSA", "DeepSeek sparse attention", "flash_mla_sparse_fwd", "sparse MLA"),
    "fp8_mqa_logits": ("lightning indexer", "DeepGEMM mqa_logits"),
    "merge_attn_states": ("cascade attention",),
    # cache
    "reshape_and_cache_flash": ("KV cache", "paged KV cache", "fp8 KV cache"),
    "reshape_and_cache": ("key-value cache",),
    "concat_and_cache_mla": ("latent cache",),
    "compress_kv": ("DeepSeek-V4 compressor", "compressed sparse attention", "CSA", "HCA"),
    "copy_blocks": ("beam search",),
    "swap_blocks": ("CPU offload",),
    # collective
    "all_reduce": ("custom all-reduce", "tensor parallelism"),
    # embedding
    "vocab_parallel_embedding": ("token embedding",),
    "ngram_compute_n_gram_ids": ("n-gram embedding", "LongCat-Flash"),
    # linear
    "linear": ("GEMM", "matmul", "dense linear layer"),
    "cutlass_scaled_mm": ("fp8 GEMM", "int8 GEMM", "W8A8", "fp8 blocks"),
    "gptq_gemm": ("GPTQ", "W4A16", "ExLlama"),
    "awq_gemm": ("AWQ",),
    "marlin_gemm": ("Marlin", "weight-only quantization"),
    "machete_mm": ("Machete",),
    "cutlass_scaled_fp4_mm": ("NVFP4", "fp4 GEMM"),
    "cutlass_w4a8_mm": ("W4A8",),
    "ggml_mul_mat_a8": ("GGUF", "GGML", "llama.cpp"),
    "grouped_gemm": ("grouped GEMM", "expert GEMM"),
    "skinny_linear": ("GEMV",),
    # mamba
    "selective_scan_fwd": ("Mamba", "SSM", "state-space model", "S6"),
    "selective_state_update": ("Mamba decode",),
    "mamba_chunk_scan_varlen": ("Mamba-2", "SSD"),
    "causal_conv1d_prefill": ("causal conv1d",),
    "chunk_gated_delta_rule": ("gated delta rule", "Gated DeltaNet", "linear attention"),
    "chunk_kda": ("Kimi Delta Attention", "KDA", "Kimi Linear"),
    # memory
    "get_cuda_view_from_cpu_tensor": ("UVA", "pinned memory"),
    # moe
    "fused_experts": ("MoE", "fused MoE", "mixture of experts"),
    "topk_softmax": ("router", "gating"),
    "grouped_topk": ("DeepSeek router",),
    "moe_align_block_size": ("expert sort",),
    "parallel_fused_experts": ("expert parallelism",),
    # norm
    "rms_norm": ("RMSNorm",),
    "fused_add_rms_norm": ("add RMSNorm", "residual add"),
    "layer_norm": ("LayerNorm",),
    "fused_qk_norm_rope": ("QK norm",),
    "rms_norm_static_fp8_quant": ("RMSNorm fp8",),
    # quantize
    "scaled_fp8_quant": ("fp8 quantization", "e4m3"),
    "scaled_int8_quant": ("int8 quantization",),
    "per_token_group_quant_fp8": ("DeepSeek fp8", "128 x 128 blocks"),
    "nvfp4_quant": ("NVFP4 quantization",),
    "awq_dequantize": ("AWQ dequantization",),
    "ggml_dequantize": ("GGUF dequantization",),
    "hadacore_transform": ("Hadamard transform", "QuaRot"),
    # rotary
    "rotary_embedding": ("RoPE", "rotary position embedding", "YaRN"),
    "multimodal_rotary_embedding": ("M-RoPE", "Qwen-VL"),
    "flashinfer_rotary_embedding": ("FlashInfer RoPE",),
    # sampling
    "top_k_top_p_sampling_from_logits": ("top-k", "top-p", "nucleus sampling", "sampler", "temperature"),
    "rejection_sample": ("speculative decoding", "draft model"),
    "apply_penalties_": ("presence penalty", "frequency penalty"),
    "apply_token_bitmask_": ("structured output", "grammar"),
}


def first(names: list[str]) -> list[str]:
    """The names, those with words first, in the order above; the others keep theirs."""
    rank = {name: i for i, name in enumerate(WORDS)}
    return sorted(names, key=lambda name: rank.get(name, len(rank)))


def tags(names: list[str]) -> list[str]:
    """What a page of these names is found by: each name that has words, and its words."""
    return [tag for name in first(names) if name in WORDS for tag in (name, *WORDS[name])]
