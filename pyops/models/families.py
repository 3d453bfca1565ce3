"""Dense decoders: `FAMILIES` has a row for each, with a function for what a row cannot say (`Family.fields`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config_values import first, flag, is_integer, number, refuse, size
from .family import (
    FULL,
    SLIDING,
    Family,
    layer_kinds,
    one_window,
    pattern,
    ropes_by_kind,
    window_of,
    windows_by_layer,
    windows_of,
)
from .parts import Multipliers, Names, Norms
from .rope import Rope
from .rope_families import ROPE_FAMILIES

_Values = dict[str, Any]  # the fields of config.json, with defaults
_NEOX_ROTARY_FACTOR = 0.25  # default of ``rotary_pct``


def _mistral(values: _Values, layers: int) -> dict[str, Any]:
    """Mistral: all layers have the same sliding window."""
    return {"sliding_windows": one_window(values, layers)}


def _ministral(values: _Values, layers: int) -> dict[str, Any]:
    """Ministral: all layers have a sliding window, unless ``layer_types`` names those that have it."""
    return {"sliding_windows": windows_by_layer(values, [SLIDING] * layers)}


def _qwen2(values: _Values, layers: int) -> dict[str, Any]:
    """Qwen2: with ``use_sliding_window``, the layers in ``layer_types``, or from ``max_window_layers`` on, have one."""
    begin = values["max_window_layers"]
    if not is_integer(begin):
        raise refuse("max_window_layers", "an integer", begin)
    window = values["sliding_window"] if flag(values, "use_sliding_window") else None
    kinds = [SLIDING if i >= begin else FULL for i in range(layers)]
    return {"sliding_windows": windows_by_layer(values | {"sliding_window": window}, kinds)}


def _qwen3(values: _Values, layers: int) -> dict[str, Any]:
    return _qwen2(values, layers) | {"qk_norm": "head"}


def _soft_cap(values: _Values, name: str) -> float:
    return 0.0 if values.get(name) is None else number(name, values[name])


def _phi3(values: _Values, layers: int) -> dict[str, Any]:
    return {"sliding_windows": (window_of(values),) * layers}


def _gemma(values: _Values, layers: int) -> dict[str, Any]:
    """Gemma: embeddings are multiplied by the square root of hidden_size; "gelu" means the tanh approximation."""
    if flag(values, "use_bidirectional_attention"):
        raise refuse("use_bidirectional_attention", "false", True)
    multiplier = Multipliers(embedding=values["hidden_size"] ** 0.5, embedding_is_rounded=True)
    found: dict[str, Any] = {"multipliers": multiplier}
    return found | ({"hidden_act": "gelu_pytorch_tanh"} if values["hidden_act"] == "gelu" else {})


def _gemma2(values: _Values, layers: int) -> dict[str, Any]:
    """Gemma 2: Gemma with soft-capped logits, and a sliding window in every second layer, starting with the first."""
    kinds = layer_kinds(values, pattern(layers, 2))
    multipliers: Multipliers = _gemma(values | {"hidden_act": None}, layers)["multipliers"]
    return {
        "multipliers": multipliers._replace(
            attention=number("query_pre_attn_scalar", values["query_pre_attn_scalar"]) ** -0.5,
            attention_soft_cap=_soft_cap(values, "attn_logit_softcapping"),
            logits_soft_cap=_soft_cap(values, "final_logit_softcapping"),
        ),
        "hidden_act": values["hidden_activation"],
        "sliding_windows": windows_of(values, kinds),
    }


def _step(values: _Values, default: int) -> Any:
    """n, where every n-th layer has full attention; the second name is a private attribute of transformers."""
    return first(values.get("sliding_window_pattern"), values.get("_sliding_window_pattern"), default)


def _gemma3(values: _Values, layers: int) -> dict[str, Any]:
    """Gemma 3: Gemma 2 with QK norms; layers with a sliding window have their own rotary frequencies."""
    ropes = ropes_by_kind(values)
    theta, local_theta = first(values.get("rope_theta"), 1e6), first(values.get("rope_local_base_freq"), 1e4)
    full = Rope.parse(values | {"rope_parameters": ropes.get(FULL), "rope_theta": theta})
    local = {"rope_parameters": ropes.get(SLIDING), "rope_theta": local_theta, "rope_scaling": None}
    sliding = Rope.parse(values | local)
    kinds = layer_kinds(values, pattern(layers, _step(values, 6)))
    # Attention logits have no soft cap in Gemma 3, even if the file gives one.
    return _gemma2(values | {"attn_logit_softcapping": None, "layer_types": kinds}, layers) | {
        "qk_norm": "head",
        "rope": full,
        "layer_ropes": tuple(sliding if kind == SLIDING else full for kind in kinds),
    }


def _olmo2(values: _Values, layers: int) -> dict[str, Any]:
    return {"qk_norm": "row"}


def granite(values: _Values, layers: int) -> dict[str, Any]:
    """Granite: multipliers of embeddings, logits, attention scores and the outputs of layers."""
    names = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
    embedding, residual, attention, divisor = (number(name, values.get(name, 1.0)) for name in names)
    return {
        "multipliers": Multipliers(embedding=embedding, residual=residual, attention=attention, logits=1.0 / divisor)
    }


def _cohere(values: _Values, layers: int) -> dict[str, Any]:
    """Cohere: interleaved rotary pairs, and parallel attention and MLP with one shared norm."""
    return {
        "multipliers": Multipliers(logits=number("logit_scale", values["logit_scale"])),
        "parallel_residual": True,
        "shares_norm": True,
        "rope": replace(Rope.parse(values), interleaved=True),
        "qk_norm": "heads" if flag(values, "use_qk_norm") else "",
    }


def _cohere2(values: _Values, layers: int) -> dict[str, Any]:
    """Cohere 2: Cohere with sliding windows; only layers with a window have a rotary embedding."""
    kinds = layer_kinds(values, pattern(layers, _step(values, 4)))
    found, windows = _cohere(values | {"use_qk_norm": False}, layers), windows_of(values, kinds)
    ropes = tuple(found["rope"] if window else None for window in windows)
    return found | {"sliding_windows": windows, "layer_ropes": ropes}


def _smollm3(values: _Values, layers: int) -> dict[str, Any]:
    """SmolLM3: some layers, by default every fourth, have no rotary embedding."""
    step = size("no_rope_layer_interval", first(values.get("no_rope_layer_interval"), 4))
    rotates = first(values.get("no_rope_layers"), [int((i + 1) % step != 0) for i in range(layers)])  # 1: has RoPE
    if not isinstance(rotates, list) or len(rotates) < layers or not all(value in (0, 1) for value in rotates):
        raise refuse("no_rope_layers", f"0 or 1 for each of {layers} layers", rotates)
    rope, rotates = Rope.parse(values), rotates[:layers]
    window = window_of(values) if flag(values, "use_sliding_window") else 0
    kinds = layer_kinds(values, [SLIDING if window and not value else FULL for value in rotates])
    return {
        "rope": rope,
        "layer_ropes": tuple(rope if value else None for value in rotates),
        "sliding_windows": tuple(window if kind == SLIDING else 0 for kind in kinds),
    }


def _stablelm(values: _Values, layers: int) -> dict[str, Any]:
    is_parallel = flag(values, "use_parallel_residual")
    return {
        "qk_norm": "heads" if flag(values, "qk_layernorm") else "",
        "parallel_residual": is_parallel,
        "shares_norm": is_parallel,
    }


def _starcoder2(values: _Values, layers: int) -> dict[str, Any]:
    return {"has_gate": False, "sliding_windows": (window_of(values),) * layers}


def _gpt_neox(values: _Values, layers: int) -> dict[str, Any]:
    """GPT-NeoX: by default a parallel block with two norms; ``rotary_emb_base`` is ``rope_theta`` of other families."""
    renamed = values | {"rope_theta": values.get("rotary_emb_base")}
    return {
        "num_key_value_heads": values["num_attention_heads"],
        "qkv_by_head": flag(values, "qkv_by_head", True),  # false in GGUF files, which order the rows differently
        "has_gate": False,
        "parallel_residual": flag(values, "use_parallel_residual", True),
        "rope": Rope.parse(renamed, first(values.get("rotary_pct"), _NEOX_ROTARY_FACTOR)),
    }


def _renamed_falcon(values: _Values) -> _Values:
    """Rename Falcon's sizes. Only the new architecture has GQA; the old one has one KV head (MQA), or MHA."""
    heads, hidden_size = values.get("num_attention_heads"), values.get("hidden_size")
    kv_heads, num_kv_heads = 1 if flag(values, "multi_query", True) else heads, values.get("num_kv_heads")
    if flag(values, "new_decoder_architecture"):
        kv_heads = first(num_kv_heads, heads)
    mlp_size = values.get("ffn_hidden_size")
    if mlp_size is None and isinstance(hidden_size, int):
        mlp_size = 4 * hidden_size
    renamed = {"num_key_value_heads": kv_heads, "intermediate_size": mlp_size, "hidden_act": values.get("activation")}
    return values | renamed


def _falcon(values: _Values, layers: int) -> dict[str, Any]:
    """Falcon: a parallel block with one shared norm or two norms, or a sequential block."""
    is_new, is_parallel = flag(values, "new_decoder_architecture"), flag(values, "parallel_attn", True)
    if flag(values, "alibi"):
        raise refuse("alibi", "false", True)
    if is_new and not is_parallel:
        raise refuse("parallel_attn", "true with new_decoder_architecture", False)
    norms = first(values.get("num_ln_in_parallel_attn"), 2 if is_new else 1)
    if norms not in (1, 2) or (norms == 2 and not is_new):
        raise refuse("num_ln_in_parallel_attn", "1, or 2 with new_decoder_architecture", norms)
    return {
        "names": _FALCON_NAMES._replace(input_norm="ln_attn", mlp_norm="ln_mlp") if norms == 2 else _FALCON_NAMES,
        "qkv_by_head": is_new or not flag(values, "multi_query", True),
        "has_gate": False,
        "parallel_residual": is_parallel,
        "shares_norm": is_parallel and norms == 1,
    }


_FALCON_NAMES = Names(
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention="self_attention",
    qkv=("query_key_value",),
    o="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)
# The defaults of transformers, for fields that a config.json does not have.
_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1}
_GEMMA2 = _GEMMA | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA2_NAMES = Names(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_GEMMA3_SIZES = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_GEMMA3_SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072}
_COHERE = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True, "eos_token_id": 255001}
_QWEN = {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32, "eos_token_id": None}
_MISTRAL = Family({"sliding_window": 4096, "num_key_value_heads": 8}, qkv_bias=False, o_bias=False, fields=_mistral)
FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias="mlp_bias"),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL._replace(
        text="mistral", defaults={**_MISTRAL.defaults, "tie_word_embeddings": True}
    ),
    "MinistralForCausalLM": Family(
        {"sliding_window": 4096, "num_key_value_heads": 8}, qkv_bias=False, o_bias=False, fields=_ministral
    ),
    "Qwen2ForCausalLM": Family(_QWEN, qkv_bias=True, o_bias=False, fields=_qwen2),
    "Qwen3ForCausalLM": Family(_QWEN | {"head_dim": 128}, fields=_qwen3),
    "Phi3ForCausalLM": Family(
        {"rms_norm_eps": 1e-5, "eos_token_id": 32000},
        names=Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
        qkv_bias=False,
        o_bias=False,
        partial_rotary_factor=1.0,
        has_longrope=True,
        fields=_phi3,
    ),
    "GemmaForCausalLM": Family(_GEMMA, Norms("gemma"), fields=_gemma),
    "Gemma2ForCausalLM": Family(
        _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        Norms("gemma", place="around"),
        _GEMMA2_NAMES,
        fields=_gemma2,
    ),
    "Gemma3ForCausalLM": Family(_GEMMA2, Norms("gemma", place="around"), _GEMMA2_NAMES, fields=_gemma3),
    "Gemma3ForConditionalGeneration": Family(
        _GEMMA2 | _GEMMA3_SIZES,
        Norms("gemma", place="around"),
        _GEMMA2_NAMES,
        text="gemma3_text",
        fields=_gemma3,
    ),
    "Olmo2ForCausalLM": Family(
        {"rms_norm_eps": 1e-5, "eos_token_id": 50279},
        Norms("rms_once", place="after"),
        Names(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"),
        fields=_olmo2,
    ),
    **ROPE_FAMILIES,
    "SeedOssForCausalLM": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "GraniteForCausalLM": Family(mlp_bias="mlp_bias", fields=granite),
    "SmolLM3ForCausalLM": Family(
        {"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True, "eos_token_id": 128001},
        mlp_bias="mlp_bias",
        fields=_smollm3,
    ),
    "CohereForCausalLM": Family(
        _COHERE | {"rope_theta": 5e5}, Norms("layer"), epsilon="layer_norm_eps", fields=_cohere
    ),
    "Cohere2ForCausalLM": Family(
        _COHERE | {"sliding_window": 4096}, Norms("layer"), epsilon="layer_norm_eps", fields=_cohere2
    ),
    "StableLmForCausalLM": Family(
        {"layer_norm_eps": 1e-5, "num_key_value_heads": 32, "eos_token_id": 0},
        Norms("layer", has_bias=True),
        Names(q_norm="q_layernorm.norms.{}", k_norm="k_layernorm.norms.{}"),
        epsilon="layer_norm_eps",
        qkv_bias="use_qkv_bias",
        o_bias=False,
        partial_rotary_factor=0.25,
        fields=_stablelm,
    ),
    "Starcoder2ForCausalLM": Family(
        {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "tie_word_embeddings": True}
        | {"num_key_value_heads": 2, "eos_token_id": 50256},
        Norms("layer", has_bias=True),
        Names(gate_up=("c_fc",), down="c_proj"),
        epsilon="norm_epsilon",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        fields=_starcoder2,
    ),
    "FalconForCausalLM": Family(
        {
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "max_position_embeddings": 2048,
            "eos_token_id": 11,
            "tie_word_embeddings": True,
        },
        Norms("layer", has_bias=True),
        _FALCON_NAMES,
        epsilon="layer_norm_epsilon",
        qkv_bias="bias",
        o_bias="bias",
        mlp_bias="bias",
        renamed=_renamed_falcon,
        fields=_falcon,
    ),
    "GPTNeoXForCausalLM": Family(
        {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True},
        Norms("layer", has_bias=True),
        Names(
            embedding="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            norm="gpt_neox.final_layer_norm",
            attention="attention",
            qkv=("query_key_value",),
            o="dense",
            gate_up=("dense_h_to_4h",),
            down="dense_4h_to_h",
        ),
        epsilon="layer_norm_eps",
        mlp_bias=True,
        partial_rotary_factor=_NEOX_ROTARY_FACTOR,
        fields=_gpt_neox,
    ),
}
