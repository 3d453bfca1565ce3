"""Decoders with mixtures of experts, latent attention or state-space layers: a row or a function for each family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..ops.attention.mla_problem import LATENT_SIZE, ROPE_SIZE
from .compressed import Compressed, HyperConnections
from .config_values import MAX_POSITIONS, first, flag, is_integer, number, refuse, size
from .family import ATTENTION_SIZES, FULL, SLIDING, Family, eos_token_ids, layer_kinds, one_window, windows_by_layer
from .latent import Indexer, Latent
from .mixture import (
    Mixture,
    parse_deepseek_v2,
    parse_deepseek_v3,
    parse_deepseek_v4,
    parse_gpt_oss,
    parse_minimax_m2,
    parse_mistral4,
    parse_mixtral,
    parse_qwen3_moe,
)
from .parts import Names, Norms
from .rope import Rope
from .rope_families import ROPE_FAMILIES
from .state_space import StateSpace, parse_bamba, parse_mamba, parse_mamba2

_Values = dict[str, Any]
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_INDEXED = "indexed_attention", "deepseek_sparse_attention"  # the kind of all layers, and its name in older files
_BAMBA_ROTARY_FACTOR = 0.5  # the default; only `rope_parameters` overrides it


def _mixtral(values: _Values, layers: int) -> dict[str, Any]:
    return {"mixture": parse_mixtral(values, layers), "sliding_windows": one_window(values, layers)}


def _renamed_minimax_m2(values: _Values) -> _Values:
    """Convert MiniMax-M2's ``rotary_dim`` to ``partial_rotary_factor``."""
    turning = values.get("rotary_dim")
    if turning is None:
        return values
    part = size("rotary_dim", turning) / size("head_dim", values.get("head_dim"))
    return {"partial_rotary_factor": part} | values


def _minimax_m2(values: _Values, layers: int) -> dict[str, Any]:
    return {"mixture": parse_minimax_m2(values, layers), "qk_norm": "row"}


def _qwen3_moe(values: _Values, layers: int) -> dict[str, Any]:
    window = values["sliding_window"] if flag(values, "use_sliding_window") else None
    return {
        "mixture": parse_qwen3_moe(values, layers),
        "qk_norm": "head",
        "sliding_windows": one_window(values | {"sliding_window": window}, layers),
    }


def _not_read(values: _Values, layers: int) -> tuple[str, ...]:
    """Name prefixes of the multi-token prediction layers, which follow the last layer."""
    count = first(values.get("num_nextn_predict_layers"), 0)
    if not is_integer(count) or not 0 <= count <= layers:
        raise refuse("num_nextn_predict_layers", f"a number of layers up to {layers}", count)
    return tuple(f"{Names().layers}.{i}." for i in range(layers, layers + count))


def deepseek(parse: Callable[[_Values, int], Mixture], values: _Values, layers: int) -> dict[str, Any]:
    """Latent attention, and the mixture that `parse` reads."""
    return {
        "mixture": parse(values, layers),
        "latent": Latent.parse(values),
        "num_key_value_heads": values["num_attention_heads"],
        "head_dim": size("qk_rope_head_dim", first(values.get("qk_rope_head_dim"), 64)),  # the rotated part of a head
        "not_read": _not_read(values, layers),
    }


def _deepseek_v32(values: _Values, layers: int) -> dict[str, Any]:
    """DeepSeek-V3.2: DeepSeek-V3 with an indexer in each layer."""
    found = deepseek(parse_deepseek_v3, values, layers)
    mixture: Mixture = found["mixture"]
    layer_kinds(values, [_INDEXED[0]] * layers, _INDEXED)
    kinds = ["sparse" if has_experts else "dense" for has_experts in mixture.layers]
    kinds = layer_kinds(values, kinds, ("sparse", "dense"), "mlp_layer_types")
    return found | {
        "sliding_windows": (0,) * layers,
        "mixture": replace(mixture, layers=tuple(kind == "sparse" for kind in kinds)),
        "latent": replace(found["latent"], indexer=Indexer.parse(values)),
    }


def _glm_moe_dsa(values: _Values, layers: int) -> dict[str, Any]:
    """GLM-5: DeepSeek-V3.2 with interleaved RoPE in the indexer, which layers may share with the layer before them."""
    found = _deepseek_v32(values, layers)
    kinds = layer_kinds(values, _indexers(values, layers), ("full", "shared"), "indexer_types")
    if kinds[0] == "shared":
        raise refuse("indexer_types", "an indexer in the first layer", kinds)
    shares = tuple(kind == "shared" for kind in kinds) if "shared" in kinds else ()
    latent: Latent = found["latent"]
    return found | {"latent": replace(latent, indexer=Indexer.parse(values, 32, interleaved=True, shares=shares))}


def _renamed_deepseek_v4(values: _Values) -> _Values:
    """Convert the sizes of DeepSeek-V4: all of its MLPs are experts."""
    return values | {"intermediate_size": first(values.get("moe_intermediate_size"), 2048)}


def _deepseek_v4(values: _Values, layers: int) -> dict[str, Any]:
    """DeepSeek-V4: a window and compressed keys, hyper-connections, and experts in every layer."""
    compressed = Compressed.parse(values, layers)
    return {
        "compressed": compressed,
        "streams": HyperConnections.parse(values),
        "mixture": parse_deepseek_v4(values, layers),
        "sliding_windows": (compressed.window,) * layers,
        "layer_ropes": compressed.ropes(values),
        "rope": Rope(),
        "not_read": ("mtp.",),
    }


def _indexers(values: _Values, layers: int) -> list[str]:
    """The kind of the indexer of each layer, where ``indexer_types`` does not list it."""
    pattern = values.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or not set(pattern) <= set("FS"):
            raise refuse("index_topk_pattern", f"{layers} of F or S", pattern)
        return ["full" if one == "F" else "shared" for one in pattern]
    step, begin = first(values.get("index_topk_freq"), 1), first(values.get("index_skip_topk_offset"), 2)
    for name, value in (("index_topk_freq", step), ("index_skip_topk_offset", begin)):
        if not is_integer(value) or value < 0:
            raise refuse(name, "a number of layers", value)
    return ["shared" if max(i - begin + 1, 0) % max(step, 1) else "full" for i in range(layers)]


def _mistral4(values: _Values, layers: int) -> dict[str, Any]:
    """Mistral 4: latent attention with position-dependent query scaling, and experts routed by softmax."""
    found = deepseek(parse_mistral4, values, layers)
    latent = found["latent"]
    rope = Rope.parse_mistral(values, latent.qk_rope_head_dim / latent.qk_head_dim)
    if rope.rotary_dim(latent.qk_head_dim) != latent.qk_rope_head_dim:
        raise refuse("partial_rotary_factor", "the part of a head that turns", rope.partial_rotary_factor)
    return found | {"rope": replace(rope, partial_rotary_factor=1.0)}  # all of the RoPE part of a head is rotated


def _glm4_moe(values: _Values, layers: int) -> dict[str, Any]:
    """GLM-4.5: attention with optional QK norms, and the mixtures of DeepSeek-V3."""
    return {
        "mixture": parse_deepseek_v3(values, layers),
        "qk_norm": "head" if flag(values, "use_qk_norm") else "",
        "not_read": _not_read(values, layers),
    }


def _gpt_oss(values: _Values, layers: int) -> dict[str, Any]:
    """gpt-oss: attention sinks, and by default a sliding window in every second layer, starting with the first."""
    kinds = [FULL if i % 2 else SLIDING for i in range(layers)]
    return {
        "mixture": parse_gpt_oss(values, layers),
        "sinks": True,
        "sliding_windows": windows_by_layer(values, kinds),
    }


def _bamba(values: _Values, layers: int) -> dict[str, Any]:
    """Bamba: the layers in ``attn_layer_indices``, possibly none, are attention; the others are Mamba-2."""
    indices = first(values.get("attn_layer_indices"), [])
    if not isinstance(indices, list) or not all(is_integer(i) and 0 <= i < layers for i in indices):
        raise refuse("attn_layer_indices", f"layers from 0 to {layers - 1}", indices)
    return {
        "layer_types": tuple("attention" if i in indices else "mamba2" for i in range(layers)),
        "state_space": parse_bamba(values),
        "rope": Rope.parse(values, _BAMBA_ROTARY_FACTOR),
        "sliding_windows": (0,) * layers,
    }


_GLM4_EXPERTS: dict[str, Any] = {"n_routed_experts": 128, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1}
_GLM4_EXPERTS |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "eos_token_id": None}
_GLM5: dict[str, Any] = {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1}
_MISTRAL4_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_MISTRAL4_ROPE |= {"original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1}
_MISTRAL4: dict[str, Any] = {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64}
_MISTRAL4 |= {"num_key_value_heads": 32, "rope_parameters": _MISTRAL4_ROPE}
MIXED_FAMILIES = {
    "MixtralForCausalLM": Family(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        names=Names(mlp="block_sparse_moe"),
        qkv_bias=False,
        o_bias=False,
        fields=_mixtral,
    ),
    "MiniMaxM2ForCausalLM": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6, "eos_token_id": 200020},
        names=Names(mlp="block_sparse_moe"),
        qkv_bias=False,
        o_bias=False,
        partial_rotary_factor=1.0,
        renamed=_renamed_minimax_m2,
        fields=_minimax_m2,
    ),
    "Qwen3MoeForCausalLM": Family(
        {"sliding_window": 4096, "num_key_value_heads": 4, "eos_token_id": None}, fields=_qwen3_moe
    ),
    "DeepseekV2ForCausalLM": Family(mlp_bias="mlp_bias", fields=partial(deepseek, parse_deepseek_v2)),
    "DeepseekV3ForCausalLM": Family(
        {"num_nextn_predict_layers": 1, "eos_token_id": 1}, fields=partial(deepseek, parse_deepseek_v3)
    ),
    "DeepseekV32ForCausalLM": Family({"num_nextn_predict_layers": 1, "eos_token_id": 1}, fields=_deepseek_v32),
    "DeepseekV4ForCausalLM": Family(
        {"head_dim": LATENT_SIZE, "num_key_value_heads": 1, "num_hidden_layers": 43, "eos_token_id": 1},
        Norms("rms_once"),
        Names(
            attention="attn", input_norm="attn_norm", mlp_norm="ffn_norm", mlp="ffn", gate_up=("w1", "w3"), down="w2"
        ),
        qkv_bias=False,
        o_bias=False,
        partial_rotary_factor=ROPE_SIZE / LATENT_SIZE,
        renamed=_renamed_deepseek_v4,
        fields=_deepseek_v4,
    ),
    "GlmMoeDsaForCausalLM": Family(
        {"rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1, "eos_token_id": 1} | _GLM5, fields=_glm_moe_dsa
    ),
    "Mistral4ForCausalLM": Family(_MISTRAL4, fields=_mistral4),
    "Glm4MoeForCausalLM": Family(
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "routed_scaling_factor": 1.0, **_GLM4_EXPERTS},
        o_bias=False,
        partial_rotary_factor=0.5,
        fields=_glm4_moe,
    ),
    "GptOssForCausalLM": Family(
        {"attention_bias": True, "sliding_window": 128, "num_key_value_heads": 8, "head_dim": 64}
        | {"rms_norm_eps": 1e-5, "eos_token_id": None, "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE},
        fields=_gpt_oss,
    ),
    "BambaForCausalLM": Family(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        names=Names(norm="model.final_layernorm", mlp_norm="pre_ff_layernorm", mlp="feed_forward"),
        mlp_bias="mlp_bias",
        partial_rotary_factor=_BAMBA_ROTARY_FACTOR,
        fields=_bamba,
    ),
}

# Families of decoders other than Mistral in a ``Mistral3ForConditionalGeneration``, by their ``model_type``.
MISTRAL3_TEXTS = {
    kind: family._replace(text=kind, defaults={**family.defaults, "tie_word_embeddings": True})
    for kind, family in (
        ("ministral3", ROPE_FAMILIES["Ministral3ForCausalLM"]),
        ("mistral4", MIXED_FAMILIES["Mistral4ForCausalLM"]),
    )
}


def _mamba(parse: Callable[[_Values], StateSpace], is_tied: bool, eos: int, values: _Values) -> dict[str, Any]:
    """`Config` fields of a decoder of state-space layers without MLPs."""
    sizes = {name: size(name, values.get(name)) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    state_space = parse(values)
    return sizes | {
        **dict.fromkeys(("intermediate_size", *ATTENTION_SIZES), 0),
        "max_position_embeddings": MAX_POSITIONS,  # nothing depends on positions
        "rms_norm_eps": number("layer_norm_epsilon", values.get("layer_norm_epsilon", 1e-5)),
        "hidden_act": first(values.get("hidden_act"), "silu"),
        "layer_types": (state_space.kind,) * sizes["num_hidden_layers"],
        "state_space": state_space,
        "residual_in_float32": flag(values, "residual_in_fp32", True),
        "tie_word_embeddings": flag(values, "tie_word_embeddings", is_tied),
        "eos_token_ids": eos_token_ids({"eos_token_id": eos} | values),
        "names": Names("backbone.embeddings", "backbone.layers", "backbone.norm_f", "norm", state_space="mixer"),
    }


MAMBAS: dict[str, Callable[[_Values], dict[str, Any]]] = {
    "MambaForCausalLM": partial(_mamba, parse_mamba, True, 0),
    "Mamba2ForCausalLM": partial(_mamba, parse_mamba2, False, 2),
}
