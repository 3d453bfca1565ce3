"""Architectures of GGUF files: a row for each maps its metadata to the fields of ``config.json``.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and those that the package `gguf` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nextafter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ..errors import ModelError
from ..ops.rotary.tables import yarn_mscale
from .config_values import is_integer, number, size
from .families import FAMILIES
from .family import FULL, SLIDING, Family
from .mixed_families import MIXED_FAMILIES

_Values = dict[str, Any]
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"rope_{kind}.weight" for kind in ("freqs", "factors_long", "factors_short")
)
_SIGMOID = 2  # the value of `expert_gating_func` for sigmoid scores
_SCALINGS = ("none", "linear", "yarn", "longrope")
_YARN_LOG_FACTOR = 0.1  # `yarn_log_multiplier` is ``mscale_all_dim`` times this
_NO_KEYS: Mapping[str, Any] = MappingProxyType({})
# {name in ``config.json``: key in the metadata, after ``<architecture>.``}
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_EXPERTS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}


class Metadata(Protocol):
    """The part of a GGUF file that the functions of this module read."""

    def own_value(self, key: str, default: Any = None) -> Any:
        """The metadata value of the key ``<architecture>.<key>``."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor `name`."""

    def numbers(self, name: str) -> list[float]:
        """The elements of a floating-point tensor."""

    def refuse(self, key: str, expected: str, got: object) -> ModelError:
        """The error for the value of ``<architecture>.<key>``; the caller raises it."""


def _none(file: Metadata, values: _Values) -> _Values:
    return {}


class GgufFamily(NamedTuple):
    """An architecture of GGUF files.

    Attributes:
        architecture: the architecture's name in a ``config.json``.
        keys: {name in ``config.json``: key in the metadata}, in addition to `SIZES`.
        neighbours: whether rows of queries and keys are permuted for interleaved rotary pairs, unlike Hugging Face's.
        turns_parts: whether the rotary embedding may rotate only a part of each head.
        has_pattern: whether a per-layer pattern may say which layers have the sliding window.
        one_added: whether 1 is added to the weights of norms.
        own_names: {llama.cpp's name of a part of a layer for this family: its common name}, where they differ.
        experts, router, is_stacked: as in `Mixture`, if the family has experts.
        more: further values of ``config.json``, from the file and the values found so far.
    """

    architecture: str
    keys: Mapping[str, str] = _NO_KEYS
    neighbours: bool = False
    turns_parts: bool = False
    has_pattern: bool = False
    one_added: bool = False
    own_names: Mapping[str, str] = _NO_KEYS
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    is_stacked: bool = False
    more: Callable[[Metadata, _Values], _Values] = _none

    @property
    def family(self) -> Family:
        """How the family's ``config.json`` is read."""
        return (FAMILIES | MIXED_FAMILIES)[self.architecture]


def _gemma_scale(layers_of_27b: int, values: _Values) -> _Values:
    """``query_pre_attn_scalar``, which GGUF files lack: hidden_size / heads for the largest Gemma, else head_dim."""
    is_27b = values["num_hidden_layers"] == layers_of_27b
    return {
        "query_pre_attn_scalar": values["hidden_size"] // values["num_attention_heads"]
        if is_27b
        else values["head_dim"]
    }


def _gemma2(file: Metadata, values: _Values) -> _Values:
    return _gemma_scale(46, values)


def _gemma3(file: Metadata, values: _Values) -> _Values:
    """Layers with a sliding window have their own rotary frequencies, which are not scaled."""
    local = {"rope_theta": file.own_value("rope.freq_base_swa", 10000.0)}
    return _gemma_scale(62, values) | {"rope_parameters": {FULL: values["rope_parameters"], SLIDING: local}}


def _cohere(file: Metadata, values: _Values) -> _Values:
    return {"use_qk_norm": file.has("blk.0.attn_q_norm.weight")}


def _stablelm(file: Metadata, values: _Values) -> _Values:
    norms = file.has("blk.0.attn_q_norm.weight")
    return {"qk_layernorm": norms, "use_parallel_residual": not file.has("blk.0.ffn_norm.weight")}


def _qwen3_moe(file: Metadata, values: _Values) -> _Values:
    return {"norm_topk_prob": True}


def _deepseek(file: Metadata, values: _Values) -> _Values:
    """The head sizes. Newer files reuse the keys of head sizes for the sizes of the latent KV."""
    rope, head_dim = (file.own_value("rope.dimension_count"), _first(file, "attention.key_length"))
    given = all(isinstance(size, int) for size in (rope, head_dim))
    found = {
        "qk_nope_head_dim": head_dim - rope if given else None,
        "qk_rope_head_dim": rope,
        "v_head_dim": _first(file, "attention.value_length"),
        "q_lora_rank": file.own_value("attention.q_lora_rank"),
        "num_key_value_heads": values["num_attention_heads"],
        "norm_topk_prob": file.own_value("expert_weights_norm", False),
        "n_group": file.own_value("expert_group_count", 1),
        "topk_group": file.own_value("expert_group_used_count", 1),
    }
    return found | {"topk_method": None if _is_by_sigmoid(file) else _method(found)}


def _gpt_neox(file: Metadata, values: _Values) -> _Values:
    return {"qkv_by_head": False}


def _gpt_oss(file: Metadata, values: _Values) -> _Values:
    return {"rope_parameters": values["rope_parameters"] | {"truncate": False}}


def _method(found: _Values) -> str:
    return "greedy" if found["n_group"] == 1 else "group_limited_greedy"


def _first(file: Metadata, key: str) -> Any:
    return file.own_value(f"{key}_mla", file.own_value(key))


def _is_by_sigmoid(file: Metadata) -> bool:
    return bool(file.own_value("expert_gating_func") == _SIGMOID)


_LAYER_NORM = {"use_parallel_residual": "use_parallel_residual"}
_SOFT_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_DEEPSEEK = GgufFamily(
    "DeepseekV2ForCausalLM",
    _EXPERTS
    | {
        "kv_lora_rank": "attention.kv_lora_rank",
        "n_routed_experts": "expert_count",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
    },
    more=_deepseek,
)
GGUF_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", neighbours=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _EXPERTS | {"num_experts": "expert_count"}, more=_qwen3_moe),
    "gemma": GgufFamily("GemmaForCausalLM", one_added=True),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _WINDOW | _SOFT_CAPS, has_pattern=True, one_added=True, more=_gemma2),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _WINDOW | _SOFT_CAPS, has_pattern=True, one_added=True, more=_gemma3),
    "phi3": GgufFamily("Phi3ForCausalLM", _WINDOW, turns_parts=True),
    "olmo2": GgufFamily("Olmo2ForCausalLM"),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        {
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
        neighbours=True,
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", neighbours=True),
    "command-r": GgufFamily("CohereForCausalLM", {"logit_scale": "logit_scale"}, more=_cohere),
    "cohere2": GgufFamily("Cohere2ForCausalLM", _WINDOW | {"logit_scale": "logit_scale"}, has_pattern=True),
    "stablelm": GgufFamily("StableLmForCausalLM", turns_parts=True, more=_stablelm),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", _WINDOW),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", _LAYER_NORM, turns_parts=True, more=_gpt_neox),
    "deepseek2": _DEEPSEEK,
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        _WINDOW | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        has_pattern=True,
        own_names={"post_attention_norm": "ffn_norm"},
        router="router",
        is_stacked=True,
        more=_gpt_oss,
    ),
}
# Architectures that share the row of another.
_MIXTRAL = GgufFamily(
    "MixtralForCausalLM",
    {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    neighbours=True,
    experts=("w1", "w3", "w2"),
)
_DEEPSEEK_V3 = _DEEPSEEK._replace(architecture="DeepseekV3ForCausalLM")


def family_of(architecture: str, file: Metadata) -> GgufFamily | None:
    """The row for a file's architecture; None if it is not supported."""
    if architecture == "llama" and file.own_value("expert_count"):
        return _MIXTRAL
    if architecture == "deepseek2" and _is_by_sigmoid(file):
        return _DEEPSEEK_V3
    return GGUF_FAMILIES.get(architecture)


def config_values(family: GgufFamily, file: Metadata) -> dict[str, Any]:
    """The metadata converted to a ``config.json`` object; missing values get the defaults of transformers.

    Raises:
        ModelError: a value that no supported model of the family has; the error names the key.
    """
    own = family.family
    found = {name: file.own_value(key) for name, key in {**SIZES, **family.keys}.items()}
    heads, hidden_size = found["num_attention_heads"], found["hidden_size"]
    if not isinstance(heads, int) or not isinstance(hidden_size, int) or heads < 1:
        raise file.refuse("attention.head_count", "one number for all layers", heads)
    found["head_dim"] = size("attention.key_length", found["head_dim"] or hidden_size // heads)
    found["num_key_value_heads"] = found["num_key_value_heads"] or heads
    is_layer_norm = own.norms.kind == "layer"
    found[own.epsilon] = file.own_value(f"attention.layer_norm_{'' if is_layer_norm else 'rms_'}epsilon")
    for flag, parts in (
        (own.qkv_bias, ("attn_q", "attn_qkv")),
        (own.o_bias, ("attn_output",)),
        (own.mlp_bias, ("ffn_down",)),
    ):
        if isinstance(flag, str):
            found[flag] = any(file.has(f"blk.0.{part}.bias") for part in parts)
    window = file.own_value("attention.sliding_window", 0)
    if window and "sliding_window" not in family.keys and window < (found["max_position_embeddings"] or 0):
        raise file.refuse("attention.sliding_window", "none", window)
    value_length = file.own_value("attention.value_length", found["head_dim"])
    if value_length != found["head_dim"] and "kv_lora_rank" not in family.keys:
        raise file.refuse("attention.value_length", f"{found['head_dim']}, as keys have", value_length)
    if family.has_pattern:
        found["layer_types"] = _kinds(file, found["num_hidden_layers"])
    found |= {
        "architectures": [family.architecture],
        "tie_word_embeddings": not file.has("output.weight"),
        "rope_parameters": _rope(family, file, found["head_dim"]),
    }
    found |= family.more(file, found)
    if family.turns_parts and found["rope_parameters"].get("rope_type") == "longrope":
        found["original_max_position_embeddings"] = file.own_value("rope.scaling.original_context_length")
    return {name: value for name, value in found.items() if value is not None or name == "q_lora_rank"}


def _kinds(file: Metadata, layers: Any) -> list[str] | None:
    """The kinds of layers, if the file has a sliding-window pattern: the period of full layers, or a flag per layer."""
    pattern = file.own_value("attention.sliding_window_pattern")
    if pattern is None:
        return None
    if is_integer(pattern) and pattern >= 0:
        pattern = [pattern == 0 or (i + 1) % pattern != 0 for i in range(size("block_count", layers))]
    if not isinstance(pattern, list) or len(pattern) != layers or not all(isinstance(one, bool) for one in pattern):
        raise file.refuse(
            "attention.sliding_window_pattern", f"a number or a bool for each of {layers} layers", pattern
        )
    return [SLIDING if one else FULL for one in pattern]


def _rope(family: GgufFamily, file: Metadata, head_dim: int) -> _Values:
    """The object ``rope_parameters``. For Llama 3 and Phi-3, tensors in the file hold a divisor for each frequency."""
    found: _Values = {"rope_theta": file.own_value("rope.freq_base", 10000.0)}
    turned = file.own_value("rope.dimension_count", head_dim)
    is_latent = "kv_lora_rank" in family.keys
    if turned != head_dim and not is_latent:
        if not family.turns_parts or not isinstance(turned, int):
            raise file.refuse("rope.dimension_count", f"all {head_dim} elements of a head", turned)
        part = turned / head_dim
        found["partial_rotary_factor"] = part if int(head_dim * part) == turned else nextafter(part, 1.0)
    return found | _scaling(file)


def _scaling(file: Metadata) -> _Values:
    """How frequencies are scaled, as llama.cpp reads it: linearly if no type is given, not at all by a factor of 0."""
    kind = file.own_value("rope.scaling.type", "linear")
    if kind not in _SCALINGS:
        raise file.refuse("rope.scaling.type", " or ".join(map(repr, _SCALINGS)), kind)
    if file.has(SHORT_FACTORS):
        factors = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
        found: _Values = {name: file.numbers(tensor) for name, tensor in factors.items()}
        return found | {"rope_type": "longrope", "attention_factor": file.own_value("rope.scaling.attn_factor")}
    factor = file.own_value("rope.scaling.factor", file.own_value("rope.scale_linear")) or 1.0
    factor = 1.0 if kind == "none" else number(f"rope.scaling.factor of {kind!r}", factor)
    if kind == "yarn":
        return _yarn(file, factor)
    attention_factor = file.own_value("rope.scaling.attn_factor", 1.0)
    if attention_factor != 1.0:
        raise file.refuse("rope.scaling.attn_factor", "1.0 without 'yarn' or factors of 'longrope'", attention_factor)
    if file.has(ROPE_FACTORS):
        return {"rope_type": "divided", "divisors": [factor * one for one in file.numbers(ROPE_FACTORS)]}
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn(file: Metadata, factor: float) -> _Values:
    """The parameters of YaRN. ``attn_factor`` multiplies cosines and sines in addition to YaRN's own factor."""
    if file.has(ROPE_FACTORS):
        raise file.refuse("rope.scaling.type", f"'linear' or 'none' beside {ROPE_FACTORS}", "yarn")
    found = {"rope_type": "yarn", "factor": factor}
    found["original_max_position_embeddings"] = file.own_value("rope.scaling.original_context_length")
    found |= {name: file.own_value(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    log_multiplier = file.own_value("rope.scaling.yarn_log_multiplier")
    if log_multiplier:
        found |= dict.fromkeys(("mscale", "mscale_all_dim"), log_multiplier / _YARN_LOG_FACTOR)
    attention_factor = file.own_value("rope.scaling.attn_factor")
    if attention_factor is not None:
        own = 1.0 if log_multiplier else yarn_mscale(factor, 1.0)  # with the multiplier, both mscales are one
        found["attention_factor"] = own * number("rope.scaling.attn_factor", attention_factor)
    return found
