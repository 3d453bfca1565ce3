"""Dense decoders that differ from Llama or OLMo 2 only in RoPE or in position-dependent query scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config_values import first, refuse
from .family import FULL, SLIDING, Family, layer_kinds, one_window, pattern, ropes_by_kind, windows_of
from .parts import Names, Norms
from .rope import Rope

_OLMO3 = {"eos_token_id": 50279, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096}
_ERNIE = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 2, "head_dim": 128}


_MINISTRAL3_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_MINISTRAL3_ROPE |= {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
_MINISTRAL3 = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _MINISTRAL3_ROPE}


def _olmo3(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """OLMo 3: OLMo 2 with a sliding window except in every fourth layer; only full layers use ``rope_scaling``."""
    given, scaling = ropes_by_kind(values), first(values.get("rope_scaling"), {})
    if not isinstance(scaling, dict):
        raise refuse("rope_scaling", "an object", scaling)
    full = Rope.parse(values | {"rope_parameters": first(given.get(FULL), {}) | scaling, "rope_scaling": None})
    # transformers applies a top-level ``rope_theta`` only to the layers without a window.
    own = {"rope_parameters": given.get(SLIDING), "rope_theta": _OLMO3["rope_theta"], "rope_scaling": None}
    sliding = Rope.parse(values | own)
    kinds = layer_kinds(values, pattern(layers, 4))
    return {
        "qk_norm": "row",
        "sliding_windows": windows_of(values, kinds),
        "rope": full,
        "layer_ropes": tuple(sliding if kind == SLIDING else full for kind in kinds),
    }


def _ernie4_5(values: dict[str, Any], layers: int) -> dict[str, Any]:
    return {"rope": replace(Rope.parse(values), interleaved=True)}


def _ministral3(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """Ministral 3: Mistral with position-dependent query scaling."""
    return {"rope": Rope.parse_mistral(values), "sliding_windows": one_window(values, layers)}


ROPE_FAMILIES = {
    "Ministral3ForCausalLM": Family(_MINISTRAL3, qkv_bias=False, o_bias=False, fields=_ministral3),
    "Olmo3ForCausalLM": Family(
        _OLMO3,
        Norms("rms_once", place="after"),
        Names(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"),
        fields=_olmo3,
    ),
    "Ernie4_5ForCausalLM": Family(
        _ERNIE | {"tie_word_embeddings": True},
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        fields=_ernie4_5,
    ),
}
