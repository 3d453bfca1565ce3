"""Dense decoders by their parts: how the ``config.json`` of a family differs from that of a Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .config_values import first, flag, is_integer, number, refuse, size
from .parts import Multipliers, Names, Norms
from .rope import Rope

_FULL, _SLIDING = "full_attention", "sliding_attention"
_Values = dict[str, Any]


def _none(values: _Values, layers: int) -> dict[str, Any]:
    return {}


class Family(NamedTuple):
    """How a family differs from a Llama.

    Attributes:
        defaults: what transformers takes where the file says nothing.
        norms, names: of its decoders.
        epsilon: of norms, its name in the file.
        qkv_bias, o_bias, mlp_bias: whether these projections have a bias, or the name of the flag that says so.
        turns_partly: whether a part of each head may turn.
        has_longrope: as `Rope.parse` takes it.
        fields: further fields of `Config`, from the values of the file, with defaults, and the number of layers.
    """

    defaults: _Values = {}
    norms: Norms = Norms()
    names: Names = Names()
    epsilon: str = "rms_norm_eps"
    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    turns_partly: bool = False
    has_longrope: bool = False
    fields: Callable[[_Values, int], dict[str, Any]] = _none


def parse_dense(values: _Values, family: Family, sizes: Callable[[_Values], dict[str, int]]) -> dict[str, Any]:
    """Fields of the `Config` of a dense decoder. `sizes` checks those of a file."""
    values = family.defaults | values
    heads = first(values.get("num_key_value_heads"), values.get("num_attention_heads"))
    found: dict[str, Any] = dict(sizes(values | {"num_key_value_heads": heads}))

    def has_bias(what: str | bool) -> bool:
        return flag(values, what) if isinstance(what, str) else what

    partial = first(values.get("partial_rotary_factor"), 1.0)
    if not family.turns_partly and partial != 1.0:
        raise refuse("partial_rotary_factor", "1.0", partial)
    found |= {
        "rms_norm_eps": number(family.epsilon, values.get(family.epsilon)),
        "hidden_act": first(values.get("hidden_act"), "silu"),
        "qkv_bias": has_bias(family.qkv_bias),
        "o_bias": has_bias(family.o_bias),
        "mlp_bias": has_bias(family.mlp_bias),
        "tie_word_embeddings": flag(values, "tie_word_embeddings"),
        "norms": family.norms,
        "names": family.names,
    }
    more = family.fields(values, found["num_hidden_layers"])
    if "rope" not in more:
        found["rope"] = Rope.parse(values, partial if family.turns_partly else None, family.has_longrope)
    return found | more


def _window(values: _Values) -> int:
    """The sliding window of layers that have one; 0 for none."""
    window = values.get("sliding_window")
    return 0 if window is None else size("sliding_window", window)


def _windows(values: _Values, kinds: list[str]) -> tuple[int, ...]:
    """The window of each layer, by ``layer_types``, which are `kinds` if the file has none."""
    found, window = first(values.get("layer_types"), kinds), _window(values)
    served = (_FULL, _SLIDING)
    if not isinstance(found, list) or len(found) != len(kinds) or not all(kind in served for kind in found):
        raise refuse("layer_types", f"{len(kinds)} of {' or '.join(served)}", found)
    return tuple(window if kind == _SLIDING else 0 for kind in found)


def _pattern(values: _Values, layers: int, default: int) -> list[str]:
    """Layers with a window, of which every so many-th has none."""
    step = size("sliding_window_pattern", first(values.get("sliding_window_pattern"), default))
    return [_SLIDING if (i + 1) % step else _FULL for i in range(layers)]


def _soft_cap(values: _Values, name: str) -> float:
    return 0.0 if values.get(name) is None else number(name, values[name])


def _phi3(values: _Values, layers: int) -> dict[str, Any]:
    return {"sliding_windows": (_window(values),) * layers}


def _gemma(values: _Values, layers: int) -> dict[str, Any]:
    """Gemma: embeddings times the root of their size; "gelu" stands for GELU by the hyperbolic tangent."""
    if flag(values, "use_bidirectional_attention"):
        raise refuse("use_bidirectional_attention", "false", True)
    multiplier = Multipliers(embedding=values["hidden_size"] ** 0.5, embedding_is_rounded=True)
    found: dict[str, Any] = {"multipliers": multiplier}
    return found | ({"hidden_act": "gelu_pytorch_tanh"} if values["hidden_act"] == "gelu" else {})


def _gemma2(values: _Values, layers: int) -> dict[str, Any]:
    multipliers: Multipliers = _gemma(values | {"hidden_act": None}, layers)["multipliers"]
    return {
        "multipliers": multipliers._replace(
            attention=number("query_pre_attn_scalar", values["query_pre_attn_scalar"]) ** -0.5,
            attention_soft_cap=_soft_cap(values, "attn_logit_softcapping"),
            logits_soft_cap=_soft_cap(values, "final_logit_softcapping"),
        ),
        "hidden_act": values["hidden_activation"],
        "sliding_windows": _windows(values, _pattern(values | {"sliding_window_pattern": None}, layers, 2)),
    }


_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
_GEMMA2 = _GEMMA | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA2_NAMES = Names(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
FAMILIES = {
    "Phi3ForCausalLM": Family(
        {"rms_norm_eps": 1e-5},
        names=Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
        qkv_bias=False,
        o_bias=False,
        turns_partly=True,
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
}
