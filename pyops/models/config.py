"""``config.json`` of a model: one description for all architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .config_values import MAX_POSITIONS, first, flag, is_integer, number, read_json, refuse, size
from .gguf_file import GgufFile, is_gguf
from .latent import LATENT_ATTENTION, Latent
from .mixture import MIXTURES, Mixture
from .quantization import Mxfp4Experts, PackedQuantization, Quantization, QuantizedWeights
from .rope import Rope
from .state_space import StateSpace, parse_bamba, parse_mamba, parse_mamba2

_STATE_SPACES: dict[str, Callable[[dict[str, Any]], StateSpace]] = {
    "MambaForCausalLM": parse_mamba,
    "Mamba2ForCausalLM": parse_mamba2,
    "BambaForCausalLM": parse_bamba,
}
_DENSE = tuple(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3"))
ARCHITECTURES = (*_DENSE, *MIXTURES, *_STATE_SPACES)
DTYPES = ("float32", "float16", "bfloat16")


class Names(NamedTuple):
    """Names of the parts of a model in its checkpoint; those of a Llama, unless others are given."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    state_space: str = "mamba"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"


_LLAMA_NAMES = Names()
_MAMBA_NAMES = Names("backbone.embeddings", "backbone.layers", "backbone.norm_f", "norm", state_space="mixer")
_MIXTRAL_NAMES = Names(mlp="block_sparse_moe")
_BAMBA_NAMES = Names(norm="model.final_layernorm", mlp_norm="pre_ff_layernorm", mlp="feed_forward")


@dataclass(frozen=True)
class Config:
    """Sizes and options of a decoder, under the names of ``config.json`` if it has one.

    Attributes:
        intermediate_size: channels of an MLP; 0 where layers have none.
        num_attention_heads, num_key_value_heads, head_dim: 0 where no layer is attention.
        layer_types: for each layer, "attention" or the kind of `state_space`; () where all are attention. The type of a
            layer decides what the layer keeps of a text.
        state_space: what the layers that are not attention are; None where all are.
        latent: sizes of multi-head latent attention; None where attention is of another kind.
        sinks: whether each head has one more logit, without a value.
        mixture: what layers have instead of an MLP that are mixtures of experts; None where none are.
        sliding_windows: for each layer, the number of last tokens it attends to; 0 for all tokens.
        qkv_bias, o_bias, mlp_bias: whether these projections have a bias.
        qk_norm: whether query and key heads are normalised before the rotary embedding.
        residual_in_float32: whether the sums of layers are float32, whatever the dtype.
        num_layers_not_read: layers that a checkpoint may have behind the last, which predict tokens further on.
        quantization: how projections are quantised; None where they are not.
        dtype: dtype of the checkpoint, of its weights that are not quantised.
        eos_token_ids: tokens that end a text.
        names: of the parts of the model in a checkpoint.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    layer_types: tuple[str, ...] = ()
    state_space: StateSpace | None = None
    latent: Latent | None = None
    sinks: bool = False
    mixture: Mixture | None = None
    num_layers_not_read: int = 0
    sliding_windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    residual_in_float32: bool = False
    tie_word_embeddings: bool = False
    quantization: QuantizedWeights | None = None
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    names: Names = _LLAMA_NAMES

    def __post_init__(self) -> None:
        size("num_hidden_layers", self.num_hidden_layers)
        layers, types, windows = self.num_hidden_layers, self.layer_types, self.sliding_windows
        for name, values, default in (("layer_types", types, "attention"), ("sliding_windows", windows, 0)):
            if not values:
                object.__setattr__(self, name, (default,) * layers)
        kinds = ("attention",) if self.state_space is None else ("attention", self.state_space.kind)
        if len(self.layer_types) != layers or not all(kind in kinds for kind in self.layer_types):
            raise refuse("layer_types", f"{layers} of {' or '.join(kinds)}", types)
        for name in _SIZES:
            absent = name == "intermediate_size" or (name in _ATTENTION_SIZES and not self.has_attention)
            if not absent or getattr(self, name) != 0:
                size(name, getattr(self, name))
        if self.has_attention:
            self._check_attention()
        if self.quantization is not None and self.state_space is not None:
            raise refuse("quantization_config", "None with state-space layers", self.quantization)
        if self.mixture is not None:
            served = Mxfp4Experts if self.mixture.is_stacked else Quantization | PackedQuantization
            is_served = self.quantization is None or isinstance(self.quantization, served)
            if len(self.mixture.layers) != layers or not is_served:
                expected = f"one of {layers} layers, quantised in mxfp4 where experts are stacked, else 8-bit or packed"
                raise refuse("mixture", expected, self.mixture)
        elif isinstance(self.quantization, Mxfp4Experts):
            raise refuse("quantization_config", "a mixture of experts with mxfp4", self.quantization)
        if self.dtype not in DTYPES:
            raise refuse("dtype", " or ".join(DTYPES), self.dtype)
        if len(self.sliding_windows) != layers or not all(isinstance(w, int) and w >= 0 for w in self.sliding_windows):
            raise refuse("sliding_window", f"a number of tokens for each of {layers} layers", windows)
        if not all(is_integer(token) and token >= 0 for token in self.eos_token_ids):
            raise refuse("eos_token_id", "a token or several", self.eos_token_ids)

    def _check_attention(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        size("num_attention_heads * head_dim", heads * self.head_dim)
        if heads % kv_heads:
            raise refuse("num_key_value_heads", f"a divisor of num_attention_heads={heads}", kv_heads)
        if self.head_dim % 2:
            raise refuse("head_dim", "an even number", self.head_dim)
        rotary_dim = self.rope.rotary_dim(self.head_dim)
        if not rotary_dim or rotary_dim % 2:
            part = self.rope.partial_rotary_factor
            raise refuse("partial_rotary_factor", f"an even number of {self.head_dim} elements", part)
        if self.rope.kind == "divided" and len(self.rope.divisors) != rotary_dim // 2:
            raise refuse("rope_parameters.divisors", f"{rotary_dim // 2} numbers", self.rope.divisors)

    @property
    def has_attention(self) -> bool:
        """Whether a layer is attention, so that texts need blocks of a paged cache."""
        return "attention" in self.layer_types

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """The config in `folder`: ``config.json``, with the eos tokens of ``generation_config.json`` if it has any.

        Or that in the metadata of a GGUF file.
        """
        if is_gguf(folder):
            return cls.parse(GgufFile(folder).config())
        values = read_json(Path(folder) / "config.json")
        generation = Path(folder) / "generation_config.json"
        if generation.exists():
            ends = read_json(generation).get("eos_token_id")
            values = values if ends is None else values | {"eos_token_id": ends}
        return cls.parse(values)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Config:
        """The config in the object of a ``config.json``. ModelError for options that are not supported."""
        architectures = values.get("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
            raise refuse("architectures", " or ".join(ARCHITECTURES), architectures)
        (architecture,) = architectures
        if values.get("hidden_act") not in ("silu", None):
            raise refuse("hidden_act", "'silu'", values["hidden_act"])
        parse = _mamba if architecture in ("MambaForCausalLM", "Mamba2ForCausalLM") else _with_attention
        ends = values.get("eos_token_id")
        return cls(
            **parse(values, architecture),
            quantization=Quantization.parse(values.get("quantization_config")),
            dtype=first(values.get("dtype"), values.get("torch_dtype"), "float32"),
            eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        )


_ATTENTION_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",  # last, because its default is computed from other sizes
)


def _mamba(values: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Fields of the config of a model whose layers are all state-space layers without MLPs."""
    sizes = {name: size(name, values.get(name)) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    state_space = _STATE_SPACES[architecture](values)
    return sizes | {
        **dict.fromkeys(("intermediate_size", *_ATTENTION_SIZES), 0),
        "max_position_embeddings": MAX_POSITIONS,  # nothing depends on positions
        "rms_norm_eps": number("layer_norm_epsilon", values.get("layer_norm_epsilon", 1e-5)),
        "layer_types": (state_space.kind,) * sizes["num_hidden_layers"],
        "state_space": state_space,
        "residual_in_float32": flag(values, "residual_in_fp32", True),
        "tie_word_embeddings": flag(values, "tie_word_embeddings", architecture == "MambaForCausalLM"),
        "names": _MAMBA_NAMES,
    }


def _with_attention(values: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Fields of the config of a model with attention and MLPs: the Llama family, and Bamba."""
    is_llama, is_bamba = (architecture == f"{name}ForCausalLM" for name in ("Llama", "Bamba"))
    is_qwen3, is_mixture = architecture.startswith("Qwen3"), architecture in MIXTURES
    is_latent, is_gpt_oss = architecture in LATENT_ATTENTION, architecture == "GptOssForCausalLM"
    if is_latent:  # the heads of the rotary embedding
        heads = values.get("num_attention_heads")
        values = values | {"head_dim": first(values.get("qk_rope_head_dim"), 64), "num_key_value_heads": heads}
    if not is_bamba and values.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise refuse("partial_rotary_factor", "1.0", values["partial_rotary_factor"])
    sizes = {name: values[name] for name in _SIZES if values.get(name) is not None}
    if (is_llama or (is_bamba and "num_key_value_heads" in values)) and "num_attention_heads" in sizes:
        sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    for name in _SIZES:
        if name == "head_dim" and name not in sizes:
            sizes[name] = 128 if is_qwen3 and not is_mixture else sizes["hidden_size"] // sizes["num_attention_heads"]
        size(name, sizes.get(name))
    may_have_bias = is_llama or is_qwen3 or is_bamba or is_latent or is_gpt_oss
    attention_bias = flag(values, "attention_bias", is_gpt_oss) and may_have_bias
    found = {
        "rms_norm_eps": number("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
        "rope": Rope.parse(values, 0.5 if is_bamba else None),
        "sliding_windows": () if is_bamba else _windows(values, architecture, sizes["num_hidden_layers"]),
        "qkv_bias": attention_bias or architecture == "Qwen2ForCausalLM",
        "o_bias": attention_bias,
        "mlp_bias": flag(values, "mlp_bias") and (is_llama or is_bamba or architecture == "DeepseekV2ForCausalLM"),
        "qk_norm": is_qwen3,
        "tie_word_embeddings": flag(values, "tie_word_embeddings"),
    }
    if is_mixture:
        found["mixture"] = MIXTURES[architecture](values, sizes["num_hidden_layers"])
    if is_latent:
        found["latent"] = Latent.parse(values)
        found["num_layers_not_read"] = _layers_not_read(values)
    if is_gpt_oss:
        found["sinks"] = True
    if architecture == "MixtralForCausalLM":
        found["names"] = _MIXTRAL_NAMES
    if is_bamba:
        found |= {
            "layer_types": _bamba_layers(values, sizes["num_hidden_layers"]),
            "state_space": parse_bamba(values),
            "names": _BAMBA_NAMES,
        }
    return sizes | found


def _layers_not_read(values: dict[str, Any]) -> int:
    """Layers behind the last that predict tokens further on."""
    count = first(values.get("num_nextn_predict_layers"), 0)
    if not is_integer(count) or count < 0:
        raise refuse("num_nextn_predict_layers", "a number of layers", count)
    return int(count)


def _bamba_layers(values: dict[str, Any], layers: int) -> tuple[str, ...]:
    """The type of each layer: ``attn_layer_indices`` are attention, and there may be none."""
    indices = first(values.get("attn_layer_indices"), [])
    if not isinstance(indices, list) or not all(is_integer(i) and 0 <= i < layers for i in indices):
        raise refuse("attn_layer_indices", f"layers from 0 to {layers - 1}", indices)
    return tuple("attention" if i in indices else "mamba2" for i in range(layers))


def _windows(values: dict[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 for none.

    gpt-oss has a window, of 128 if the file does not give it, in every second layer from the first on, unless
    ``layer_types`` names others. Mistral has one window for all layers: 4096 if the file does not give it, none if the
    file says null. So do Mixtral, with no window by default, and Qwen3-MoE, where the file says ``use_sliding_window``.
    Ministral has Mistral's window in all layers, unless ``layer_types`` names the layers that have the window.
    Other models of Qwen may have a window in some layers: those that ``layer_types`` names, or all from
    ``max_window_layers`` on.
    """
    is_qwen, full, sliding = architecture.startswith("Qwen"), "full_attention", "sliding_attention"
    is_mixtral, is_gpt_oss = (architecture == f"{name}ForCausalLM" for name in ("Mixtral", "GptOss"))
    is_ministral = architecture == "MinistralForCausalLM"
    always = is_mixtral or is_gpt_oss or is_ministral or architecture == "MistralForCausalLM"
    has_window = always or (flag(values, "use_sliding_window") and is_qwen)
    default = None if is_mixtral else 128 if is_gpt_oss else 4096
    window = values.get("sliding_window", default) if has_window else None
    is_qwen = is_qwen and architecture not in MIXTURES
    if window is not None:
        size("sliding_window", window)
    begin = values.get("max_window_layers", 28) if is_qwen else 0
    if not is_integer(begin):
        raise refuse("max_window_layers", "an integer", begin)
    step = 2 if is_gpt_oss else 1
    kinds = [sliding if window is not None and i >= begin and i % step == 0 else full for i in range(layers)]
    allowed = (full, sliding) if (is_qwen or is_gpt_oss or is_ministral) and window is not None else (kinds[0],)
    kinds = first(values.get("layer_types"), kinds)
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in allowed for kind in kinds):
        raise refuse("layer_types", f"{layers} of {' or '.join(allowed)}", kinds)
    return tuple((window or 0) if kind == sliding else 0 for kind in kinds)
