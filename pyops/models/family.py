"""Families of decoders: each is described by its differences from Llama, by which ``config.json`` is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .config_values import first, flag, is_integer, number, refuse, size
from .parts import Names, Norms
from .rope import Rope

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",  # last, because its default is computed from other sizes
)


# Name prefixes of the tensors of vision encoders.
_PARTS = "vision_tower.", "multi_modal_projector."
_IMAGES = *_PARTS, *(f"model.{part}" for part in _PARTS)


def _none(values: dict[str, Any], layers: int) -> dict[str, Any]:
    return {}


def _as_they_are(values: dict[str, Any]) -> dict[str, Any]:
    return values


class Family(NamedTuple):
    """How a family differs from a Llama.

    Attributes:
        defaults: the values of transformers for fields that the file does not have.
        norms, names: norms and names of the parts of its decoders.
        epsilon: the file's name for the epsilon of norms.
        qkv_bias, o_bias, mlp_bias: whether these projections have a bias, or the name of the flag that says so.
        partial_rotary_factor: the default fraction of a head that is rotated; None for families that rotate whole
            heads.
        has_longrope: as `Rope.parse` takes it.
        text: ``model_type`` of the decoder that ``text_config`` describes, for a multimodal model; "" if the model is
            just the decoder.
        renamed: a function that renames the values of the file, with defaults, to the names of the other families.
        fields: a function (values of the file with defaults, number of layers) that returns further fields of `Config`.
    """

    defaults: Mapping[str, Any] = MappingProxyType({})
    norms: Norms = Norms()
    names: Names = Names()
    epsilon: str = "rms_norm_eps"
    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    partial_rotary_factor: float | None = None
    has_longrope: bool = False
    text: str = ""
    renamed: Callable[[dict[str, Any]], dict[str, Any]] = _as_they_are
    fields: Callable[[dict[str, Any], int], dict[str, Any]] = _none

    def parse(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fields of the `Config` of a decoder with attention. ModelError for options that are not supported."""
        if self.text:
            values = _text_of(values, self.text)
        values = self.renamed({"rms_norm_eps": 1e-6, "eos_token_id": 2, **self.defaults} | values)
        found: dict[str, Any] = _sizes(values)
        found |= {
            "rms_norm_eps": number(self.epsilon, values.get(self.epsilon)),
            "hidden_act": first(values.get("hidden_act"), self.defaults.get("hidden_act"), "silu"),
            "qkv_bias": _has_bias(values, self.qkv_bias),
            "o_bias": _has_bias(values, self.o_bias),
            "mlp_bias": _has_bias(values, self.mlp_bias),
            "tie_word_embeddings": flag(values, "tie_word_embeddings"),
            "eos_token_ids": eos_token_ids(values),
            "norms": self.norms,
            "names": self.names,
            "not_read": _IMAGES if self.text else (),
        }
        layers = found["num_hidden_layers"]
        more = self.fields(values, layers)
        if "sliding_windows" not in more:
            found["sliding_windows"] = one_window(values | {"sliding_window": None}, layers)
        partial = first(values.get("partial_rotary_factor"), self.partial_rotary_factor)
        if self.partial_rotary_factor is None and partial not in (None, 1.0):
            raise refuse("partial_rotary_factor", "1.0", partial)
        if "rope" not in more:
            found["rope"] = Rope.parse(values, self.partial_rotary_factor and partial, self.has_longrope)
        return found | more | {"not_read": found["not_read"] + more.get("not_read", ())}


def _text_of(values: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The config of the decoder in a multimodal model: ``text_config``, with the top-level fields that override it.

    Only the top level says whether embeddings are tied, and its eos tokens override those of ``text_config``.
    """
    found = values.get("text_config")
    if not isinstance(found, dict):
        raise refuse("text_config", "an object", found)
    if found.get("model_type", model_type) != model_type:
        raise refuse("text_config.model_type", repr(model_type), found["model_type"])
    of_model = {key: values[key] for key in ("tie_word_embeddings", "eos_token_id") if values.get(key) is not None}
    text = found | {}
    text.pop("tie_word_embeddings", None)
    return text | of_model


def eos_token_ids(values: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a sequence; none if ``eos_token_id`` is null."""
    found = values.get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(is_integer(token) and token >= 0 for token in tokens):
        raise refuse("eos_token_id", "a token or several", found)
    return tuple(tokens)


def _has_bias(values: dict[str, Any], what: str | bool) -> bool:
    return flag(values, what) if isinstance(what, str) else what


def _sizes(values: dict[str, Any]) -> dict[str, int]:
    """The sizes in a file, checked. By default KV heads equal query heads, and head_dim is hidden_size / heads."""
    sizes = {name: values[name] for name in SIZES if values.get(name) is not None}
    if "num_attention_heads" in sizes:
        sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    for name in SIZES:
        if name == "head_dim" and name not in sizes:
            sizes[name] = sizes["hidden_size"] // sizes["num_attention_heads"]
        size(name, sizes.get(name))
    return sizes


def window_of(values: dict[str, Any]) -> int:
    """The size of the sliding window; 0 if the model has none."""
    window = values.get("sliding_window")
    return 0 if window is None else size("sliding_window", window)


def layer_kinds(
    values: dict[str, Any], kinds: list[str], served: tuple[str, ...] = (FULL, SLIDING), name: str = "layer_types"
) -> list[str]:
    """The kind of each layer: the field `name`, or `kinds` if absent. ModelError for a kind that is not in `served`."""
    found = first(values.get(name), kinds)
    if not isinstance(found, list) or len(found) != len(kinds) or not all(kind in served for kind in found):
        raise refuse(name, f"{len(kinds)} of {' or '.join(served)}", found)
    return found


def windows_of(values: dict[str, Any], kinds: list[str]) -> tuple[int, ...]:
    """The sliding window of each layer, by its kind; 0 for none."""
    window = window_of(values)
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def windows_by_layer(values: dict[str, Any], kinds: list[str]) -> tuple[int, ...]:
    """The window of each layer by ``layer_types``, else by `kinds`. Without a window, all layers must be full."""
    if window_of(values):
        return windows_of(values, layer_kinds(values, kinds))
    return (0,) * len(layer_kinds(values, [FULL] * len(kinds), (FULL,)))


def one_window(values: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The windows of a model with one window for all layers or none. ModelError if ``layer_types`` says otherwise."""
    kind = SLIDING if window_of(values) else FULL
    return windows_of(values, layer_kinds(values, [kind] * layers, (kind,)))


def pattern(layers: int, step: Any) -> list[str]:
    """The kinds of the layers: every `step`-th has full attention, the others have the sliding window."""
    size("sliding_window_pattern", step)
    return [SLIDING if (i + 1) % step else FULL for i in range(layers)]


def ropes_by_kind(values: dict[str, Any]) -> dict[str, Any]:
    """{kind of layer: its ``rope_parameters``}; {} if the file does not list them by kind."""
    given = first(values.get("rope_parameters"), {})
    if not isinstance(given, dict) or not set(given) <= {FULL, SLIDING}:
        raise refuse("rope_parameters", f"objects for {FULL} and {SLIDING}", given)
    return given
