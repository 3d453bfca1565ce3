"""Decoders with attention in some layers and states in others: a row for each family, and functions for its rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from .config_values import first, flag, refuse, size
from .family import FULL, Family, layer_kinds
from .mixture import Mixture, parse_qwen3_moe
from .parts import Names, Norms
from .state_space import parse_delta_rule

_Values = dict[str, Any]
_LINEAR = "linear_attention"


def _qwen_delta(is_by_group: bool, values: _Values, layers: int) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: gated attention in every fourth layer, the gated delta rule in the others."""
    if not flag(values, "attn_output_gate", True):
        raise refuse("attn_output_gate", "true", False)
    step = size("full_attention_interval", first(values.get("full_attention_interval"), 4))
    kinds = layer_kinds(values, [_LINEAR if (i + 1) % step else FULL for i in range(layers)], (_LINEAR, FULL))
    return {
        "layer_types": tuple("attention" if kind == FULL else "delta_rule" for kind in kinds),
        "state_space": parse_delta_rule(values, is_by_group),
        "qk_norm": "head",
        "gates_attention": True,
        "sliding_windows": (0,) * layers,
        "not_read": ("mtp.", "model.visual."),  # what predicts tokens further on, and what reads images
    }


def _qwen3_next(values: _Values, layers: int) -> dict[str, Any]:
    return _qwen_delta(True, values, layers) | {"mixture": _qwen_mixture(values, layers)}


def _qwen_mixture(values: _Values, layers: int) -> Mixture | None:
    """Experts beside a shared MLP with a gate; None where there are none."""
    if values["num_experts"] == 0:
        return None
    shared = size("shared_expert_intermediate_size", first(values.get("shared_expert_intermediate_size"), 512))
    mixture = replace(parse_qwen3_moe(values, layers), shared_intermediate_size=shared)
    return replace(mixture, shared="shared_expert", shared_gate="shared_expert_gate")


_QWEN_NORMS, _QWEN_NAMES = Norms("gemma"), Names(state_space="linear_attn")
_QWEN_ROTARY_FACTOR = 0.25
_QWEN3_NEXT = {"num_key_value_heads": 2, "head_dim": 256, "eos_token_id": None}
_QWEN3_NEXT |= {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
_QWEN3_5 = Family(
    {"num_key_value_heads": 4, "head_dim": 256, "eos_token_id": None},
    _QWEN_NORMS,
    _QWEN_NAMES,
    partial_rotary_factor=_QWEN_ROTARY_FACTOR,
    fields=partial(_qwen_delta, False),
)

HYBRID_FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        _QWEN3_NEXT, _QWEN_NORMS, _QWEN_NAMES, partial_rotary_factor=_QWEN_ROTARY_FACTOR, fields=_qwen3_next
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5._replace(text="qwen3_5_text"),
}
