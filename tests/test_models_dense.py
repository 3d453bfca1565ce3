"""Dense decoders by their parts against transformers: the same weights, in float32, give the same texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pyops.models import Engine, SamplingParams, load
from pyops.models.runner import Part, Runner

transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPTS = [list(range(5, 25)), [3], [(7 * i) % 96 for i in range(37)]]
NUM_TOKENS = 64
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
    }


FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {"num_key_value_heads": 4}),
    "phi3 with longrope from the 40th token on, a window": (
        "Phi3",
        {"rope_parameters": longrope(8), "original_max_position_embeddings": 40, "sliding_window": 23},
    ),
    "phi3, parts of heads turn by longrope, tied": (
        "Phi3",
        {"rope_parameters": longrope(6) | {"partial_rotary_factor": 0.75}, "tie_word_embeddings": True}
        | {"original_max_position_embeddings": 64},
    ),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma with one key head, biases, gelu": (
        "Gemma",
        {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True, "hidden_act": "gelu"},
    ),
    "gemma, not tied, linear rope": (
        "Gemma",
        {"head_dim": 16, "tie_word_embeddings": False, "rope_parameters": LINEAR},
    ),
    "gemma2": ("Gemma2", GEMMA2 | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2 without caps, windows by layer": (
        "Gemma2",
        GEMMA2
        | {"layer_types": [FULL, SLIDING], "attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"attention_bias": True},
    ),
    "gemma2, three layers, not tied, gelu": (
        "Gemma2",
        GEMMA2
        | {"num_hidden_layers": 3, "hidden_activation": "gelu", "tie_word_embeddings": False, "head_dim": 32}
        | {"num_key_value_heads": 1, "rope_parameters": LLAMA3},
    ),
    "gemma3": ("Gemma3", GEMMA2 | {"sliding_window_pattern": 2}),
    "gemma3, windows by layer, scaled rope, a cap": (
        "Gemma3",
        GEMMA2
        | {"layer_types": [FULL, SLIDING], "final_logit_softcapping": 5.0, "attention_bias": True}
        | {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "gemma3, three layers, not tied, gelu": (
        "Gemma3",
        GEMMA2
        | {"num_hidden_layers": 3, "sliding_window_pattern": 3, "hidden_activation": "gelu", "head_dim": 32}
        | {"tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2 with one key head, biases": ("Olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo2 with yarn, three layers": ("Olmo2", {"rope_parameters": YARN, "num_hidden_layers": 3}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 4.0},
    ),
    "granite with biases, tied": (
        "Granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "embedding_multiplier": 0.7}
        | {"attention_multiplier": 0.3, "num_key_value_heads": 4},
    ),
    "granite, three layers, linear rope": (
        "Granite",
        {"residual_multiplier": 0.22, "num_hidden_layers": 3, "num_key_value_heads": 1, "rope_parameters": LINEAR},
    ),
    "cohere": ("Cohere", {}),
    "cohere with norms of heads, not tied": ("Cohere", {"use_qk_norm": True, "tie_word_embeddings": False}),
    "cohere with norms of heads, biases, yarn": (
        "Cohere",
        {"use_qk_norm": True, "attention_bias": True, "rope_parameters": YARN, "logit_scale": 2.0},
    ),
    "cohere2": ("Cohere2", {"sliding_window": 7, "sliding_window_pattern": 2}),
    "cohere2, windows by layer, biases, not tied": (
        "Cohere2",
        {"sliding_window": 9, "layer_types": [FULL, SLIDING], "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2, three layers": (
        "Cohere2",
        {"sliding_window": 5, "num_hidden_layers": 3, "sliding_window_pattern": 3, "num_key_value_heads": 4},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3 with windows, biases, not tied": (
        "SmolLM3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7, "tie_word_embeddings": False}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "smollm3, windows by layer, scaled rope": (
        "SmolLM3",
        {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "use_sliding_window": True}
        | {"sliding_window": 9, "rope_parameters": LLAMA3, "no_rope_layers": [1, 1, 0], "tie_word_embeddings": False},
    ),
    "stablelm": ("StableLm", {}),
    "stablelm in parallel, norms of heads, biases": (
        "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    ),
    "stablelm with norms of heads, tied": (
        "StableLm",
        {"qk_layernorm": True, "tie_word_embeddings": True, "num_key_value_heads": 4}
        | {"rope_parameters": LINEAR | {"partial_rotary_factor": 1.0}},
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2 with a window, not tied": (
        "Starcoder2",
        {"sliding_window": 9, "tie_word_embeddings": False, "hidden_act": "gelu", "num_key_value_heads": 4},
    ),
    "starcoder2 without biases, gelu_new": (
        "Starcoder2",
        {"use_bias": False, "hidden_act": "gelu_new", "tie_word_embeddings": False, "rope_parameters": YARN},
    ),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-neox one after the other, without biases of attention": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
    ),
    "gpt-neox, tied, three layers, gelu_fast": (
        "GPTNeoX",
        {"tie_word_embeddings": True, "num_hidden_layers": 3, "hidden_act": "gelu_fast", "rotary_emb_base": 500.0},
    ),
}


def reference(case: str) -> Any:
    """A model of transformers whose random weights make clear choices; biases and norms are random, too."""
    family, options = CASES[case]
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family, SIZES | options))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1)
        elif "norm" in name:
            parameter.data.normal_(0.0 if "Gemma" in family else 1.0, 0.2)
    if model.config.tie_word_embeddings:  # else the likeliest token is the last once more
        model.get_input_embeddings().weight.data *= 0.05
    return model.eval()


def config_of(family: str, options: dict[str, Any]) -> Any:
    return getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(**options)


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0].clone()
    return found


def choices(model: Any, tokens: list[int]) -> list[int]:
    """What transformers' model takes for the likeliest token behind each of `tokens`, when it is their last.

    Under longrope, the frequencies of a text depend on its length.
    """
    bound = len(tokens)
    if (model.config.rope_parameters or {}).get("rope_type") == "longrope":
        bound = model.config.original_max_position_embeddings
    short, whole = (logits_of(model, part).argmax(-1).tolist() for part in (tokens[:bound], tokens))
    return short + whole[len(short) :]


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Prompts of different lengths, together, 64 tokens each: every one is transformers' choice behind those before.

    So the text is what transformers writes greedily.
    """
    model = reference(case)
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    texts = Engine(ours, max_seq_len=110, max_num_seqs=4).generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS))
    assert len({token for text in texts for token in text}) > 16, "a model that repeats itself says little"
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == choices(model, [*prompt, *text[:-1]])[len(prompt) - 1 :]
    prompt = PROMPTS[2]
    logits = Runner(ours, 3, 16, 1, 110).run([Part(prompt, 0, [2, 0, 1])])[0]
    theirs = logits_of(model, prompt)[-1]
    exact = logits_of(model.double(), prompt)[-1]
    assert (logits - exact).abs().max() <= 4 * (theirs - exact).abs().max()
