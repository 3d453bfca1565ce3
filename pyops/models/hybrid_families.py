"""Decoders that mix attention and state-space layers: a row for each family, and functions for the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from .config_values import first, flag, is_integer, number, refuse, size
from .families import granite
from .family import FULL, Family, layer_kinds
from .mixed_families import deepseek
from .mixture import Mixture, parse_deepseek_v3, parse_qwen3_moe
from .parts import BOTH, MLP_ALONE, Multipliers, Names, Norms
from .rope import Rope
from .state_space import (
    StateSpace,
    kimi_attention,
    parse_bamba,
    parse_delta_rule,
    parse_falcon_h1,
    parse_kimi_delta,
    parse_nemotron_h,
)

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
        "not_read": ("mtp.", "model.visual."),  # multi-token prediction, vision encoder
    }


def _qwen3_next(values: _Values, layers: int) -> dict[str, Any]:
    """Qwen3-Next: without experts, all layers have MLPs."""
    mixture = _beside_shared(parse_qwen3_moe(values, layers), values) if values["num_experts"] else None
    return _qwen_delta(True, values, layers) | {"mixture": mixture}


def _qwen3_5_moe(values: _Values, layers: int) -> dict[str, Any]:
    """Qwen3.5 with experts in all layers."""
    mixture = Mixture(
        num_experts=values["num_experts"],
        top_k=size("num_experts_per_tok", values["num_experts_per_tok"]),
        intermediate_size=values["moe_intermediate_size"],
        renormalize=True,
        layers=(True,) * layers,
    )
    return _qwen_delta(False, values, layers) | {"mixture": _beside_shared(mixture, values)}


def _beside_shared(mixture: Mixture, values: _Values) -> Mixture:
    """`mixture` with a gated shared expert."""
    shared = size("shared_expert_intermediate_size", first(values.get("shared_expert_intermediate_size"), 512))
    mixture = replace(mixture, shared_intermediate_size=shared)
    return replace(mixture, shared="shared_expert", shared_gate="shared_expert_gate")


def _of_experts_alone(values: _Values) -> _Values:
    """All layers have experts, so ``intermediate_size`` is that of an expert."""
    return values | {"intermediate_size": values["moe_intermediate_size"]}


def _falcon_h1(values: _Values, layers: int) -> dict[str, Any]:
    """Falcon-H1: attention and Mamba-2 in parallel in every layer; multipliers of the outputs of projections."""
    space = parse_falcon_h1(values)
    embedding, logits = _factors(values, "embedding_multiplier", "lm_head_multiplier")
    return {
        "layer_types": (BOTH,) * layers,
        "state_space": space,
        "multipliers": Multipliers(embedding=embedding, logits=logits),
        "row_factors": tuple(_row_factors(values, space).items()),
        "sliding_windows": (0,) * layers,
    }


def _row_factors(values: _Values, space: StateSpace) -> dict[str, tuple[tuple[float, int], ...]]:
    """`Config.row_factors` of a Falcon-H1. Multipliers of inputs do not scale biases."""
    names = "attention_in_multiplier", "key_multiplier", "attention_out_multiplier"
    before, key, after = _factors(values, *names)
    ssm_before, ssm_after = _factors(values, "ssm_in_multiplier", "ssm_out_multiplier")
    gate, down = _numbers(values, "mlp_multipliers", 2)
    hidden_size, channels, heads = values["hidden_size"], values["intermediate_size"], values["num_attention_heads"]
    head_dim, groups = first(values.get("head_dim"), hidden_size // heads), space.n_groups * space.state_size
    keys = values["num_key_value_heads"] * head_dim
    runs = space.intermediate_size, space.intermediate_size, groups, groups, space.num_heads
    inputs = tuple(zip(_numbers(values, "ssm_multipliers", 5), runs, strict=True))
    found: dict[str, tuple[tuple[float, int], ...]] = {
        "self_attn.q_proj.weight": ((before, heads * head_dim),),
        "self_attn.k_proj.weight": ((before * key, keys),),
        "self_attn.k_proj.bias": ((key, keys),),
        "self_attn.v_proj.weight": ((before, keys),),
        "mamba.in_proj.weight": tuple((ssm_before * factor, count) for factor, count in inputs),
        "mamba.in_proj.bias": inputs,
    }
    for end in ("weight", "bias"):
        for name, factor in (
            ("self_attn.o_proj", after),
            ("mamba.out_proj", ssm_after),
            ("feed_forward.down_proj", down),
        ):
            found[f"{name}.{end}"] = ((factor, hidden_size),)
        found[f"feed_forward.gate_proj.{end}"] = ((gate, channels),)
    return found


def _factors(values: _Values, *names: str) -> list[float]:
    return [number(name, first(values.get(name), 1.0)) for name in names]


def _granite(values: _Values, layers: int) -> dict[str, Any]:
    """Granite 4: Granite's multipliers; ``layer_types`` names the attention layers, which may have no RoPE."""
    kinds = first(values.get("layer_types"), [_LINEAR] * layers)
    known = (FULL, "attention", "mamba", _LINEAR)
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        raise refuse("layer_types", f"{layers} of mamba or attention", kinds)
    turns = first(values.get("position_embedding_type"), "nope")
    if turns not in ("rope", "nope"):
        raise refuse("position_embedding_type", "'rope' or 'nope'", turns)
    rope = Rope.parse(values)
    return granite(values, layers) | {
        "layer_types": tuple("attention" if kind in (FULL, "attention") else "mamba2" for kind in kinds),
        "state_space": parse_bamba(values),
        "intermediate_size": size("shared_intermediate_size", values["shared_intermediate_size"]),
        "mixture": _granite_mixture(values, layers),
        "rope": rope,
        "names": _GRANITE_NAMES._replace(mlp="" if values["num_local_experts"] else "shared_mlp"),
        "layer_ropes": () if turns == "rope" else (None,) * layers,
        "sliding_windows": (0,) * layers,
    }


def _granite_mixture(values: _Values, layers: int) -> Mixture | None:
    """The experts and their shared MLP; None if the model has no experts."""
    experts, top_k = values["num_local_experts"], values.get("num_experts_per_tok")
    if not experts:
        return None
    return Mixture(
        num_experts=experts,
        top_k=size("num_experts_per_tok", top_k),
        intermediate_size=size("intermediate_size", values["intermediate_size"]),
        renormalize=True,
        layers=(True,) * layers,
        router="block_sparse_moe.router.layer",
        joined=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        shared_intermediate_size=values["shared_intermediate_size"],
        shared="shared_mlp",
    )


_NEMOTRON_KINDS = {"M": "mamba2", "*": "attention", "-": MLP_ALONE, "E": "moe", _LINEAR: "mamba2", FULL: "attention"}
_NEMOTRON_KINDS |= {"mamba": "mamba2", "attention": "attention", "mlp": MLP_ALONE, "moe": "moe"}


def _nemotron_kinds(values: _Values) -> list[str]:
    """The kind of each layer, from a list or from a string with a letter per layer."""
    named = first(values.get("layer_types"), values.get("layers_block_type"))
    found = first(named, values.get("hybrid_override_pattern"), [_LINEAR, "moe", FULL, "mlp"])
    if not isinstance(found, list | str) or not all(kind in tuple(_NEMOTRON_KINDS) for kind in found):
        raise refuse("layers_block_type", f"layers of {', '.join(_NEMOTRON_KINDS)}", found)
    return [_NEMOTRON_KINDS[kind] for kind in found]


def _nemotron_renamed(values: _Values) -> _Values:
    return values | {"num_hidden_layers": len(_nemotron_kinds(values)), "hidden_act": values["mlp_hidden_act"]}


def _nemotron_h(values: _Values, layers: int) -> dict[str, Any]:
    """Nemotron-H: a layer is attention without RoPE, Mamba-2, an MLP without gates, or a mixture without gates."""
    kinds = _nemotron_kinds(values)
    if values.get("moe_latent_size") is not None:
        raise refuse("moe_latent_size", "null", values["moe_latent_size"])
    if values["mlp_hidden_act"] != "relu2":
        raise refuse("mlp_hidden_act", "'relu2'", values["mlp_hidden_act"])
    experts = Mixture(
        num_experts=values["n_routed_experts"],
        top_k=size("num_experts_per_tok", values["num_experts_per_tok"]),
        intermediate_size=size("moe_intermediate_size", values["moe_intermediate_size"]),
        renormalize=flag(values, "norm_topk_prob", True),
        layers=tuple(kind == "moe" for kind in kinds),
        scoring_func="sigmoid",
        num_groups=values["n_group"],
        top_k_groups=values["topk_group"],
        has_correction_bias=True,
        routed_scaling_factor=number("routed_scaling_factor", values["routed_scaling_factor"]),
        shared_intermediate_size=values["moe_shared_expert_intermediate_size"],
        activation="relu2_no_mul",
        gate="",
        router_in_float32=True,
    )
    return {
        "layer_types": tuple(MLP_ALONE if kind == "moe" else kind for kind in kinds),
        "state_space": parse_nemotron_h(values),
        "mixture": experts if "moe" in kinds else None,
        "has_gate": False,
        "layer_ropes": (None,) * layers,
        "sliding_windows": (0,) * layers,
        "not_read": ("mtp.",),
    }


def _kimi_renamed(values: _Values) -> _Values:
    """The names of DeepSeek-V3 for those of Kimi Linear."""
    found = {name: first(*map(values.get, (*given, name)), default) for name, (given, default) in _KIMI_FIELDS.items()}
    return values | found


def _kimi_linear(values: _Values, layers: int) -> dict[str, Any]:
    """Kimi Linear: Kimi Delta Attention, in some layers latent attention without RoPE; DeepSeek-V3's mixtures."""
    for name in ("mla_use_nope", "use_grouped_topk"):
        if not flag(values, name, True):
            raise refuse(name, "true", False)
    if (scores := values.get("moe_router_activation_func")) not in ("sigmoid", None):
        raise refuse("moe_router_activation_func", "'sigmoid'", scores)
    found = deepseek(parse_deepseek_v3, values, layers)
    mixture, kinds = found["mixture"], layer_kinds(values, _kimi_kinds(values, layers), (_LINEAR, FULL))
    mlps = ["sparse" if has_experts else "dense" for has_experts in mixture.layers]
    has_experts = [kind == "sparse" for kind in layer_kinds(values, mlps, ("dense", "sparse"), "mlp_layer_types")]
    return found | {
        "layer_types": tuple("attention" if kind == FULL else "kda" for kind in kinds),
        "state_space": parse_kimi_delta(values),
        "mixture": replace(mixture, layers=tuple(has_experts), gate="w1", up="w3", down="w2"),
        "latent": replace(found["latent"], mscale=1.0),  # as there is no RoPE, its scaling has no effect
        "layer_ropes": (None,) * layers,
        "sliding_windows": (0,) * layers,
    }


def _kimi_kinds(values: _Values, layers: int) -> list[str]:
    """The kinds of layers by the two lists of ``linear_attn_config``, which count layers from 1.

    Without the lists, every fourth layer after the first is latent attention, as in transformers.
    """
    linear, full = map(kimi_attention(values).get, ("kda_layers", "full_attn_layers"))
    if linear is None and full is None:
        return [FULL if i and i % 4 == 0 else _LINEAR for i in range(layers)]
    both = linear + full if isinstance(linear, list) and isinstance(full, list) else []
    if full is None or not all(map(is_integer, both)) or sorted(both) != list(range(1, layers + 1)):
        expected = f"each layer from 1 to {layers} in kda_layers or full_attn_layers"
        raise refuse("linear_attn_config", expected, {"kda_layers": linear, "full_attn_layers": full})
    return [FULL if i + 1 in full else _LINEAR for i in range(layers)]


def _numbers(values: _Values, name: str, count: int) -> list[float]:
    found = first(values.get(name), [1.0] * count)
    if not isinstance(found, list) or len(found) != count:
        raise refuse(name, f"{count} numbers", found)
    return [number(name, each) for each in found]


_NEMOTRON_NAMES = Names(
    "backbone.embeddings",
    "backbone.layers",
    "backbone.norm_f",
    "norm",
    attention="mixer",
    state_space="mixer",
    mlp="mixer",
    gate_up=("up_proj",),
)
_NEMOTRON_H = {"layer_norm_epsilon": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "mlp_hidden_act": "relu2"}
_NEMOTRON_H |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_NEMOTRON_H |= {
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
# Kimi Linear: {DeepSeek-V3's name of a field: (its names in files, transformers' default)}.
_KIMI_FIELDS: dict[str, tuple[tuple[str, ...], Any]] = {
    "n_routed_experts": (("num_experts", "num_local_experts"), 256),
    "num_experts_per_tok": (("num_experts_per_token",), 8),
    "n_shared_experts": (("num_shared_experts",), 1),
    "n_group": (("num_expert_group",), 1),
    "norm_topk_prob": (("moe_renormalize",), True),
    "max_position_embeddings": (("model_max_length",), 1 << 20),
}
_KIMI: dict[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 163586, "q_lora_rank": None, "first_k_dense_replace": 1}
_KIMI |= {"moe_intermediate_size": 1024, "routed_scaling_factor": 2.446, "topk_group": 1}
_GRANITE_NAMES = Names(gate_up=("input_linear",), down="output_linear")
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
_QWEN3_5_MOE = _QWEN3_5._replace(
    defaults=_QWEN3_NEXT | {"num_experts": 256, "num_experts_per_tok": 8},
    renamed=_of_experts_alone,
    fields=_qwen3_5_moe,
)

HYBRID_FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        _QWEN3_NEXT, _QWEN_NORMS, _QWEN_NAMES, partial_rotary_factor=_QWEN_ROTARY_FACTOR, fields=_qwen3_next
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "FalconH1ForCausalLM": Family(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        names=Names(norm="model.final_layernorm", mlp_norm="pre_ff_layernorm", mlp="feed_forward"),
        mlp_bias="mlp_bias",
        fields=_falcon_h1,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}, fields=_granite
    ),
    "NemotronHForCausalLM": Family(
        _NEMOTRON_H,
        Norms("rms_once"),
        _NEMOTRON_NAMES,
        "layer_norm_epsilon",
        qkv_bias=False,
        o_bias=False,
        mlp_bias="mlp_bias",
        renamed=_nemotron_renamed,
        fields=_nemotron_h,
    ),
    "KimiLinearForCausalLM": Family(
        _KIMI,
        names=Names(state_space="self_attn", experts="block_sparse_moe"),
        renamed=_kimi_renamed,
        fields=_kimi_linear,
    ),
    "Qwen3_5ForConditionalGeneration": _QWEN3_5._replace(text="qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE._replace(text="qwen3_5_moe_text"),
}
