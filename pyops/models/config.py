"""``config.json`` of a model: one description for all architectures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..ops.attention.mla_problem import LATENT_SIZE
from .compressed import Compressed, HyperConnections
from .config_values import MAX_POSITIONS, first, is_integer, read_json, refuse, size
from .families import FAMILIES
from .family import ATTENTION_SIZES, SIZES
from .fields import HARMLESS_OF_GENERATION, Fields, check_unread
from .gguf_file import GgufFile, is_gguf
from .hybrid_families import HYBRID_FAMILIES
from .kv_scheme import kv_cache_dtype_of, quantises_cache_alone
from .latent import Latent
from .mixed_families import MAMBAS, MISTRAL3_TEXTS, MIXED_FAMILIES
from .mixture import Mixture
from .packed_format import PackedQuantization
from .parts import BOTH, MLP_ALONE, QK_NORMS, Multipliers, Names, Norms
from .quantization import GgufTypes, Mxfp4Experts, Quantization, QuantizedWeights, has_mxfp4_experts
from .rope import Rope
from .state_space import StateSpace

ARCHITECTURES = (*FAMILIES, *MIXED_FAMILIES, *HYBRID_FAMILIES, *MAMBAS)
_GEMMA4 = "heads of one size, where Gemma 4 has two, and no embeddings for each layer"
_WHY_NOT = {"Gemma4ForCausalLM": _GEMMA4, "Gemma4ForConditionalGeneration": _GEMMA4}  # {architecture: reason}
DTYPES = ("float32", "float16", "bfloat16")
GATED_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "relu2")


def _model_opt(path: Path) -> dict[str, Any] | None:
    """The ``quantization_config`` of an fp8 cache that an early ModelOpt file specifies instead of ``config.json``.

    ModelError if it says that weights are quantised.
    """
    said = read_json(path).get("quantization") if path.exists() else None
    kind, cache = (said.get("quant_algo"), said.get("kv_cache_quant_algo")) if isinstance(said, dict) else (said, None)
    if kind is not None:
        raise ModelError(path, f"quantization.quant_algo: expected a quantization_config in config.json, got {kind!r}")
    return None if cache is None else {"quant_method": "modelopt", "kv_cache_quant_algo": cache}


@dataclass(frozen=True)
class Config:
    """Sizes and options of a decoder, under the names of ``config.json`` if it has one.

    Attributes:
        intermediate_size: channels of an MLP; 0 where layers have none.
        num_attention_heads, num_key_value_heads, head_dim: 0 where no layer is attention.
        layer_types: for each layer, "attention", the kind of `state_space`, `BOTH` or `MLP_ALONE`; () if all are
            attention. The type of a layer decides what the layer caches of a sequence.
        state_space: sizes of the state-space layers; None if all layers are attention.
        latent: sizes of multi-head latent attention; None for other attention.
        compressed: sizes of attention to compressed keys; None for other attention.
        streams: settings of hyper-connections; None for a residual of one stream.
        sinks: whether each head has an attention sink: one more logit, without a value.
        mixture: sizes of the mixture-of-experts layers; None if all layers have a plain MLP.
        sliding_windows: for each layer, the number of last tokens it attends to; 0 for all tokens.
        qkv_bias, o_bias, mlp_bias: whether these projections have a bias.
        qk_norm: how queries and keys are normalised before the rotary embedding: "head", each head by the same weights;
            "heads", each head by weights of its own; "row", the heads of a token together; "" if they are not.
        gates_attention: whether attention has output gates: sigmoids of a second part of each query head.
        qkv_by_head: whether a checkpoint orders rows of QKV by KV heads: the queries, the key and the value of each.
        hidden_act: activation of MLPs.
        has_gate: whether MLPs are ``down(act(gate(x)) * up(x))`` and not ``down(act(up(x)))``.
        norms: kind and positions of norms; `rms_norm_eps` is the epsilon of all of them.
        parallel_residual: whether layers are parallel blocks: attention and MLP have the same input.
        shares_norm: whether both share one input norm.
        multipliers: of embeddings, logits and the outputs of layers.
        layer_ropes: for each layer, its rotary embedding, None for none; () where all have `rope`.
        residual_in_float32: whether the residual stream is float32, whatever the dtype.
        not_read: name prefixes of tensors that a checkpoint may have and text generation does not need: those of
            multi-token prediction layers, and of vision encoders.
        quantization: how projections are quantised; None if they are not.
        kv_cache_dtype: the dtype of the KV cache that the checkpoint asks for, as `Engine` takes it.
        dtype: the dtype of those weights in the checkpoint that are not quantised.
        eos_token_ids: tokens that end a sequence.
        names: names of the parts of the model in a checkpoint.
        row_factors: factors that multiply rows of weights and biases when they are loaded: (end of a tensor's name,
            ((factor, number of rows), ...) for consecutive runs of rows).
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
    compressed: Compressed | None = None
    streams: HyperConnections | None = None
    sinks: bool = False
    mixture: Mixture | None = None
    not_read: tuple[str, ...] = ()
    sliding_windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    gates_attention: bool = False
    qkv_by_head: bool = False
    hidden_act: str = "silu"
    has_gate: bool = True
    norms: Norms = field(default_factory=Norms)
    parallel_residual: bool = False
    shares_norm: bool = False
    multipliers: Multipliers = field(default_factory=Multipliers)
    layer_ropes: tuple[Rope | None, ...] = ()
    residual_in_float32: bool = False
    tie_word_embeddings: bool = False
    quantization: QuantizedWeights | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    names: Names = field(default_factory=Names)
    row_factors: tuple[tuple[str, tuple[tuple[float, int], ...]], ...] = ()

    def __post_init__(self) -> None:
        size("num_hidden_layers", self.num_hidden_layers)
        layers, types, windows = self.num_hidden_layers, self.layer_types, self.sliding_windows
        for name, values, default in (("layer_types", types, "attention"), ("sliding_windows", windows, 0)):
            if not values:
                object.__setattr__(self, name, (default,) * layers)
        kinds = ("attention",) if self.state_space is None else ("attention", self.state_space.kind, BOTH, MLP_ALONE)
        if len(self.layer_types) != layers or not all(kind in kinds for kind in self.layer_types):
            raise refuse("layer_types", f"{layers} of {' or '.join(kinds)}", types)
        for name in SIZES:
            absent = name == "intermediate_size" or (name in ATTENTION_SIZES and not self.has_attention)
            if not absent or getattr(self, name) != 0:
                size(name, getattr(self, name))
        if self.has_attention:
            _check_attention(self)
        has_mixed = self.state_space is not None or self.mixture is not None
        activations = (
            ("silu",) if has_mixed and self.has_gate else GATED_ACTIVATIONS if self.has_gate else PLAIN_ACTIVATIONS
        )
        if self.hidden_act not in activations:
            raise refuse("hidden_act", " or ".join(map(repr, activations)), self.hidden_act)
        if self.parallel_residual and self.norms.place != "before":
            raise refuse("norms.place", "'before' with parallel_residual", self.norms.place)
        if self.shares_norm and not self.parallel_residual:
            raise refuse("shares_norm", "False without parallel_residual", True)
        for name, count in (("qkv", 3), ("gate_up", 2 if self.has_gate else 1)):
            if len(getattr(self.names, name)) not in (1, count):
                raise refuse(
                    f"names.{name}", "1 name" if count == 1 else f"1 or {count} names", getattr(self.names, name)
                )
        _check_quantization(self)
        if self.dtype not in DTYPES:
            raise refuse("dtype", " or ".join(DTYPES), self.dtype)
        if len(self.sliding_windows) != layers or not all(isinstance(w, int) and w >= 0 for w in self.sliding_windows):
            raise refuse("sliding_window", f"a number of tokens for each of {layers} layers", windows)
        if not all(is_integer(token) and token >= 0 for token in self.eos_token_ids):
            raise refuse("eos_token_id", "a token or several", self.eos_token_ids)

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary embedding of a layer of attention; None where it has none."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def ropes(self) -> list[Rope]:
        """The distinct rotary embeddings of the attention layers."""
        found = [self.rope_of(i) for i, kind in enumerate(self.layer_types) if kind in ("attention", BOTH)]
        return list(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def max_short_length(self) -> int:
        """The longest sequence, in tokens, that uses the short RoPE frequencies: see `Rope.max_short_length`."""
        return min((rope.max_short_length for rope in self.ropes), default=MAX_POSITIONS)

    @property
    def attention_scale(self) -> float:
        """The factor of the attention logits, the softmax scale."""
        return self.head_dim**-0.5 if self.multipliers.attention is None else self.multipliers.attention

    @property
    def has_attention(self) -> bool:
        """Whether any layer is attention, so that sequences need blocks of a paged cache."""
        return "attention" in self.layer_types or BOTH in self.layer_types

    @property
    def has_states(self) -> bool:
        """Whether layers keep states, which cover whole sequences, in slots."""
        return self.state_space is not None or self.compressed is not None

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """The config in `folder`: ``config.json``, with the eos tokens of ``generation_config.json`` if it has any.

        `folder` may be a GGUF file; the config then comes from its metadata.
        """
        if is_gguf(folder):
            return cls.parse(GgufFile(folder).config())
        values = read_json(Path(folder) / "config.json")
        if values.get("quantization_config") is None:
            values["quantization_config"] = _model_opt(Path(folder) / "hf_quant_config.json")
        generation = Path(folder) / "generation_config.json"
        if generation.exists():
            said = Fields(read_json(generation))
            ends = said.get("eos_token_id")
            check_unread(said, "generation_config.json", HARMLESS_OF_GENERATION)
            values = values if ends is None else values | {"eos_token_id": ends}
        return cls.parse(values)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Config:
        """The config in the object of a ``config.json``.

        A warning names the fields that no part of this library knows.

        Raises:
            ModelError: an option, or a value of a field, that is not supported.
        """
        values = Fields(values)
        architectures = values.get("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
            name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
            raise refuse("architectures", _WHY_NOT.get(str(name), " or ".join(ARCHITECTURES)), architectures)
        (architecture,) = architectures
        text = first(values.get("text_config"), {})
        kind, of_text = (text.get(name) if isinstance(text, dict) else None for name in ("model_type", "dtype"))
        families = FAMILIES | MIXED_FAMILIES | HYBRID_FAMILIES
        if architecture == "Mistral3ForConditionalGeneration":
            families |= {architecture: MISTRAL3_TEXTS.get(str(kind), families[architecture])}
        found = families[architecture].parse(values) if architecture in families else MAMBAS[architecture](values)
        config = cls(
            **found,
            **_quantised(
                _with_expert_dtype(values, values.get("quantization_config"), values.get("compression_config"))
            ),
            dtype=first(values.get("dtype"), values.get("torch_dtype"), of_text, "float32"),
        )
        check_unread(values, "config.json")
        return config


def _with_expert_dtype(values: dict[str, Any], *given: Any) -> Any:
    """The first ``quantization_config`` given, with the ``expert_dtype`` that DeepSeek-V4 has next to it."""
    found, dtype = first(*given), values.get("expert_dtype")
    if dtype == "fp4" and found is None:
        raise refuse("quantization_config", "fp8 with an expert_dtype", None)
    return {"expert_dtype": dtype} | found if isinstance(found, dict) and dtype is not None else found


def _quantised(values: Any) -> dict[str, Any]:
    """The quantization of the weights, and the dtype of the cache, from a ``quantization_config``."""
    weights = None if quantises_cache_alone(values) else Quantization.parse(values)
    return {"quantization": weights, "kv_cache_dtype": kv_cache_dtype_of(values)}


def _check_attention(config: Config) -> None:
    """ModelError if sizes or options of attention do not fit together."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size("num_attention_heads * head_dim", heads * config.head_dim)
    if heads % kv_heads:
        raise refuse("num_key_value_heads", f"a divisor of num_attention_heads={heads}", kv_heads)
    if config.head_dim % 2:
        raise refuse("head_dim", "an even number", config.head_dim)
    if config.qk_norm not in QK_NORMS:
        raise refuse("qk_norm", " or ".join(map(repr, QK_NORMS)), config.qk_norm)
    if len(config.layer_ropes) not in (0, config.num_hidden_layers):
        raise refuse("layer_ropes", f"one for each of {config.num_hidden_layers} layers", config.layer_ropes)
    for rope in config.ropes:
        rope.check(config.head_dim)
    if (config.compressed is None) != (config.streams is None):
        raise refuse("streams", "hyper-connections with compressed attention, and only there", config.streams)
    if config.compressed is not None:
        layers = config.num_hidden_layers
        if len(config.compressed.layers) != layers or config.head_dim != LATENT_SIZE:
            raise refuse("compressed", f"one of {layers} layers and heads of {LATENT_SIZE}", config.compressed)
        if config.mixture is None or not all(config.mixture.layers):
            raise refuse("mixture", "experts in every layer with compressed attention", config.mixture)


def _check_quantization(config: Config) -> None:
    """ModelError if the quantization does not support a kind of layer of the model."""
    if config.quantization is not None and (config.state_space is not None or config.qkv_by_head):
        what = "state-space layers" if config.state_space is not None else "projections joined head by head"
        raise refuse("quantization_config", f"None with {what}", config.quantization)
    if config.compressed is not None and not isinstance(config.quantization, Quantization | None):
        raise refuse("quantization_config", "fp8 or None with compressed attention", config.quantization)
    if config.mixture is not None:
        served = (
            Mxfp4Experts | GgufTypes if config.mixture.is_stacked else Quantization | PackedQuantization | GgufTypes
        )
        is_served = config.quantization is None or isinstance(config.quantization, served)
        if len(config.mixture.layers) != config.num_hidden_layers or not is_served:
            layers = config.num_hidden_layers
            expected = f"one of {layers} layers, quantised in mxfp4 where experts are stacked, else 8-bit or packed"
            raise refuse("mixture", expected, config.mixture)
    elif has_mxfp4_experts(config.quantization):
        raise refuse("quantization_config", "a mixture of experts with mxfp4", config.quantization)
