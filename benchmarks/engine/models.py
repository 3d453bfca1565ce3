"""Models for vLLM's engine: configurations of published models, and random weights."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "modules_in_block_to_quantize": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ],
}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}


@dataclass(frozen=True)
class Model:
    """A model: its ``config.json``, further arguments of vLLM's ``LLM``, and its description in tables."""

    words: str
    config: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    floor_backend: str = "TRITON_ATTN"  # vLLM's attention backend for "floor", the noise floor of logprobs


MODELS: dict[str, Model] = {
    "llama": Model("Llama 8B, bf16", _LLAMA),
    "llama-fp8": Model("Llama 8B, fp8 (online)", _LLAMA, {"quantization": "fp8"}),
    "llama-fp8-blocks": Model("Llama 8B, fp8 128-blocks", {**_LLAMA, "quantization_config": _BLOCKS}),
    "llama-gptq": Model("Llama 8B, W4 (GPTQ)", {**_LLAMA, "quantization_config": _GPTQ}),
    "llama-awq": Model("Llama 8B, W4 (AWQ)", {**_LLAMA, "quantization_config": _AWQ}),
    "qwen3-moe": Model("Qwen3-30B-A3B, 16 layers, bf16", _QWEN3_MOE),
    "gpt-oss": Model("gpt-oss-20b, 16 layers, mxfp4", _GPT_OSS),
    "deepseek": Model("DeepSeek-V2-Lite, 12 layers, bf16", _DEEPSEEK, floor_backend="TRITON_MLA"),
}


def small(model: Model) -> Model:
    """The model with two layers and a small vocabulary, to test the benchmark itself."""
    config = {**model.config, "num_hidden_layers": 2, "vocab_size": 4096}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    return Model(model.words, config, model.arguments, model.floor_backend)


def fill(name: str, parameter: torch.Tensor, hidden_size: int) -> None:
    """Fill a parameter with random values that depend only on its name and shape, before vLLM repacks it.

    Weights, also quantized ones with their scales, have a variance of about 1 / K. Activations then keep their
    magnitude from layer to layer, logits have a standard deviation of about 1, and logprobs of implementations can be
    compared.
    """
    generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))

    def normal(std: float, mean: float = 0.0) -> torch.Tensor:
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        return drawn.normal_(mean, std, generator=generator)

    weight_std = hidden_size**-0.5
    if not parameter.is_floating_point():
        if "g_idx" in name:
            parameter.zero_()
        elif "scale" in name:  # e8m0: around 1 / (2 sqrt(K)), because the mean square of mxfp4 is about 8
            parameter.random_(119, 121, generator=generator)
        else:  # packed weights and zero points: random bits
            info = torch.iinfo(parameter.dtype)
            parameter.random_(info.min, info.max, generator=generator)
            if parameter.dtype == torch.int32 and "zeros" not in name:  # int4 from -7 to 7, so that the mean is 0
                for shift in range(0, 32, 4):
                    parameter |= ((parameter >> shift & 15) == 0).int() << shift + 3
    elif "scale" in name:  # scales of int4 (mean square 21) or of fp8 blocks (below, mean square 64^2)
        std = 4.6 if parameter.dtype == torch.bfloat16 else 64.0
        parameter.copy_(normal(0.1 * weight_std / std, weight_std / std).abs())
    elif parameter.dtype.itemsize == 1:
        parameter.copy_(normal(64.0).clamp(-448, 448).to(parameter.dtype))
    elif "norm" in name:
        parameter.copy_(normal(0.05, 1.0))
    elif "sinks" in name or "bias" in name:
        parameter.copy_(normal(0.02))
    elif "embed" in name:
        parameter.copy_(normal(1.0))
    elif parameter.ndim == 3:  # experts: one at a time, because float32 copies of all would take twice the memory
        for expert in range(len(parameter)):
            drawn = torch.empty(parameter.shape[1:], dtype=torch.float32, device=parameter.device)
            parameter[expert].copy_(drawn.normal_(0, parameter.shape[-1] ** -0.5, generator=generator))
    else:
        parameter.copy_(normal(parameter.shape[-1] ** -0.5))
