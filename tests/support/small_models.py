"""Small models of every family: transformers' models with random weights, their greedy tokens, and their folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pyops.models.runner import Part, Runner

transformers.utils.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.3}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MISTRAL_ROPE = YARN | {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.2}
MISTRAL_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}
LATENT |= {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
GLM4 = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
V4 = {"head_dim": 512, "num_key_value_heads": 1, "q_lora_rank": 40, "o_groups": 2, "o_lora_rank": 24}
V4 |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 3}
V4 |= {"index_n_heads": 2, "index_head_dim": 128, "sliding_window": 9, "compress_ratios": [0, 4, 128]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama with one key head, llama3 rope, biases": (
        "Llama",
        {"num_key_value_heads": 1, "rope_parameters": LLAMA3} | BIASES,
    ),
    "llama with linear rope, tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "llama with yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2 with dynamic rope": ("Qwen2", {"rope_parameters": DYNAMIC}),
    "qwen3 with yarn of its own": (
        "Qwen3",
        {
            "head_dim": 32,
            "rope_parameters": YARN | {"beta_fast": 8, "beta_slow": 2.0, "mscale": 1.5, "mscale_all_dim": 0.5},
        },
    ),
    "mistral with a window": ("Mistral", {"sliding_window": 9, "num_hidden_layers": 3}),
    "mistral with wide heads": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "ministral": ("Ministral", {"sliding_window": 9, "head_dim": 32, "tie_word_embeddings": True}),
    "ministral, windows by layer": (
        "Ministral",
        {"sliding_window": 7, "head_dim": 16, "num_hidden_layers": 3}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 2]},
    ),
    "ministral with yarn": ("Ministral", {"sliding_window": 16, "head_dim": 16, "rope_parameters": YARN}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window in its last layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral with a window, three experts of eight": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9, "head_dim": 32},
    ),
    "mixtral, tied, one expert": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3 moe with an MLP, biases and a window": (
        "Qwen3Moe",
        EXPERTS | {"mlp_only_layers": [0], "attention_bias": True, "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen3 moe in every second layer": (
        "Qwen3Moe",
        EXPERTS | {"decoder_sparse_step": 2, "num_hidden_layers": 3, "norm_topk_prob": True},
    ),
    "deepseek v2, no rank of queries, the best experts, biases": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 1},
    ),
    "deepseek v2, the best of groups, yarn": (
        "DeepseekV2",
        LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek v2 with entries of the op": (
        "DeepseekV2",
        LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "n_shared_experts": 1},
    ),
    "deepseek v3": (
        "DeepseekV3",
        LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "deepseek v3 of halves, yarn with mscale": (
        "DeepseekV3",
        LATENT
        | {"n_group": 2, "topk_group": 1, "rope_interleave": False, "attention_bias": True, "v_head_dim": 24}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "first_k_dense_replace": 0},
    ),
    "deepseek v3, no groups, weights as they are": (
        "DeepseekV3",
        LATENT
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0}
        | {"q_lora_rank": None, "tie_word_embeddings": True, "routed_scaling_factor": 1.0},
    ),
    "deepseek v3.2, an indexer for more tokens than there are": (
        "DeepseekV32",
        LATENT
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 2048}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "deepseek v4, layers of all kinds, yarn": (
        "DeepseekV4",
        V4
        | {"num_hash_layers": 1, "compress_rate_hca": 8, "swiglu_limit": 0.7}
        | {"rope_parameters": {name: value for name, value in YARN.items() if name != "rope_theta"}},
    ),
    "deepseek v4, two streams, windows of 128 and of 2, other groups": (
        "DeepseekV4",
        V4
        | {"hc_mult": 2, "hc_sinkhorn_iters": 3, "compress_rate_csa": 2, "num_hash_layers": 0, "o_groups": 4}
        | {"index_head_dim": 64, "sliding_window": 16, "num_experts_per_tok": 3, "routed_scaling_factor": 2.0}
        | {"num_hidden_layers": 2, "compress_ratios": None, "index_topk": 1024}
        | {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]},
    ),
    "glm 5, an indexer for more tokens than there are, shared by two layers": (
        "GlmMoeDsa",
        LATENT
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 2048}
        | {"first_k_dense_replace": 1, "indexer_types": ["full", "shared"], "rms_norm_eps": 1e-5},
    ),
    "ministral 3": ("Ministral3", {"head_dim": 16, "rope_parameters": MISTRAL_ROPE}),
    "ministral 3 with a window, linear, tied": (
        "Ministral3",
        {"head_dim": 32, "sliding_window": 9, "tie_word_embeddings": True, "num_hidden_layers": 3}
        | {"rope_parameters": LINEAR | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}},
    ),
    "ministral 3, one key head, other scales": (
        "Ministral3",
        {"num_key_value_heads": 1, "head_dim": 16}
        | {"rope_parameters": MISTRAL_ROPE | {"mscale": 0.7, "llama_4_scaling_beta": 0.3, "factor": 2.0}},
    ),
    "mistral 4": ("Mistral4", LATENT | {"rope_parameters": MISTRAL_ROPE}),
    "mistral 4, MLPs, groups, biases, no rank of queries, halves": (
        "Mistral4",
        LATENT
        | {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "first_k_dense_replace": 1}
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
        | {"rope_parameters": MISTRAL_ROPE | {"mscale_all_dim": 0.0}, "v_head_dim": 24, "num_hidden_layers": 3},
    ),
    "mistral 4, weights as they are, a factor, tied": (
        "Mistral4",
        LATENT
        | {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "tie_word_embeddings": True, "n_shared_experts": 2}
        | {"rope_parameters": MISTRAL_ROPE | {"llama_4_scaling_beta": 0.5}, "num_experts_per_tok": 1},
    ),
    "glm4 moe": ("Glm4Moe", GLM4 | {"n_routed_experts": 8, "use_qk_norm": True}),
    "glm4 moe, groups, biases, whole heads turn": (
        "Glm4Moe",
        GLM4
        | {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "attention_bias": True, "n_shared_experts": 2}
        | {"routed_scaling_factor": 2.5, "head_dim": 32}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "glm4 moe, experts in all layers, weights as they are, tied": (
        "Glm4Moe",
        GLM4
        | {"n_routed_experts": 6, "first_k_dense_replace": 0, "norm_topk_prob": False, "tie_word_embeddings": True}
        | {"use_qk_norm": True, "num_key_value_heads": 1},
    ),
    "minimax m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16}),
    "minimax m2, one expert of four, tied": (
        "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "minimax m2, three layers, yarn": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "num_hidden_layers": 3}
        | {"rope_parameters": YARN, "num_key_value_heads": 1},
    ),
    "gpt-oss": ("GptOss", OSS | {"sliding_window": 9, "rope_parameters": YARN | {"truncate": False}}),
    "gpt-oss, three layers, no biases of attention": (
        "GptOss",
        OSS | {"num_hidden_layers": 3, "attention_bias": False, "num_experts_per_tok": 3, "sliding_window": 16},
    ),
    "gpt-oss, the window in the last layer, tied": (
        "GptOss",
        OSS
        | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7, "tie_word_embeddings": True}
        | {"num_experts_per_tok": 1, "num_key_value_heads": 1},
    ),
}
PROMPTS: list[list[int]] = [list(range(5, 25)), [3], [(7 * i) % 160 for i in range(70)]]


@cache
def reference(case: str) -> Any:
    """A model of transformers with random weights that make clear choices; biases and norms are random, too."""
    family, options = CASES[case]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | deepcopy(options))  # the config mutates its options
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks", "_hc.base", "hc_base")):
            parameter.data.normal_(0.0, 0.3)
        elif "norm" in name:
            parameter.data.normal_(1.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.normal_(0.0, 0.3)
        elif name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), 8).argsort(-1)[:, : buffer.shape[1]])
    return model.eval()


@cache
def text(case: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens that transformers' model generates greedily after the prompt."""
    written = reference(case).generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return written[0, len(prompt) :].tolist()


def texts(case: str, count: int) -> list[list[int]]:
    return [text(case, tuple(prompt), count) for prompt in PROMPTS]


def folders(
    tmp_path_factory: pytest.TempPathFactory, reference: Callable[[str], Any] = reference
) -> Callable[[str], Path]:
    """The folder of a case, with its model saved once by transformers."""
    saved: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in saved:
            saved[case] = tmp_path_factory.mktemp("model")
            reference(case).save_pretrained(saved[case])
        return saved[case]

    return get


def teacher_forced(runner: Runner, prompt: Sequence[int], following: Sequence[int]) -> torch.Tensor:
    """Logits after the prompt, by prefill, and after each following token, by decode steps."""
    blocks = list(range(-(-(len(prompt) + len(following)) // runner.block_size)))[::-1]
    found = [runner.run([Part(prompt, 0, blocks, slot=0)])]
    for i, token in enumerate(following):
        found.append(runner.run([Part([token], len(prompt) + i, blocks, slot=0)]).clone())
    return torch.cat(found)
