"""``config.json`` of a model of the Llama family: one description for all of its architectures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config_values import first, flag, is_integer, number, read_json, refuse, size
from .rope import Rope

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Config:
    """Sizes and options of a decoder, under the names of ``config.json`` if it has one.

    Attributes:
        sliding_windows: for each layer, the number of last tokens it attends to; 0 for all tokens.
        qkv_bias, o_bias, mlp_bias: whether these projections have a bias.
        qk_norm: whether query and key heads are normalised before the rotary embedding.
        dtype: dtype of the checkpoint.
        eos_token_ids: tokens that end a text.
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
    sliding_windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            size(name, getattr(self, name))
        heads, kv_heads, windows = self.num_attention_heads, self.num_key_value_heads, self.sliding_windows
        size("num_attention_heads * head_dim", heads * self.head_dim)
        if heads % kv_heads:
            raise refuse("num_key_value_heads", f"a divisor of num_attention_heads={heads}", kv_heads)
        if self.head_dim % 2:
            raise refuse("head_dim", "an even number", self.head_dim)
        if self.dtype not in DTYPES:
            raise refuse("dtype", " or ".join(DTYPES), self.dtype)
        if not windows:
            object.__setattr__(self, "sliding_windows", (0,) * self.num_hidden_layers)
        elif len(windows) != self.num_hidden_layers or not all(isinstance(w, int) and w >= 0 for w in windows):
            raise refuse("sliding_window", f"a number of tokens for each of {self.num_hidden_layers} layers", windows)
        if not all(is_integer(token) and token >= 0 for token in self.eos_token_ids):
            raise refuse("eos_token_id", "a token or several", self.eos_token_ids)

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """The config in `folder`: ``config.json``, with the eos tokens of ``generation_config.json`` if it has any."""
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
        for name, supported in (("hidden_act", "silu"), ("quantization_config", None), ("partial_rotary_factor", 1.0)):
            if values.get(name, supported) not in (supported, None):
                raise refuse(name, repr(supported), values[name])

        is_llama, is_qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
        sizes = {name: values[name] for name in _SIZES if values.get(name) is not None}
        if is_llama and "num_attention_heads" in sizes:
            sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
        for name in _SIZES:
            if name == "head_dim" and name not in sizes:
                sizes[name] = 128 if is_qwen3 else sizes["hidden_size"] // sizes["num_attention_heads"]
            size(name, sizes.get(name))
        attention_bias = flag(values, "attention_bias") and (is_llama or is_qwen3)
        ends = values.get("eos_token_id")
        return cls(
            **sizes,
            rms_norm_eps=number("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
            rope=Rope.parse(values),
            sliding_windows=_windows(values, architecture, sizes["num_hidden_layers"]),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias,
            mlp_bias=flag(values, "mlp_bias") and is_llama,
            qk_norm=is_qwen3,
            tie_word_embeddings=flag(values, "tie_word_embeddings"),
            dtype=first(values.get("dtype"), values.get("torch_dtype"), "float32"),
            eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        )


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


def _windows(values: dict[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 for none.

    Mistral has one window for all layers: 4096 if the file does not give it, none if the file says null. Qwen may have
    a window in some layers: those that ``layer_types`` names, or all from ``max_window_layers`` on.
    """
    is_qwen, full, sliding = architecture.startswith("Qwen"), "full_attention", "sliding_attention"
    has_window = architecture == "MistralForCausalLM" or (flag(values, "use_sliding_window") and is_qwen)
    window = values.get("sliding_window", 4096) if has_window else None
    if window is not None:
        size("sliding_window", window)
    begin = values.get("max_window_layers", 28) if is_qwen else 0
    if not is_integer(begin):
        raise refuse("max_window_layers", "an integer", begin)
    kinds = [sliding if window is not None and i >= begin else full for i in range(layers)]
    allowed = (full, sliding) if is_qwen and window is not None else (kinds[0],)
    kinds = first(values.get("layer_types"), kinds)
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in allowed for kind in kinds):
        raise refuse("layer_types", f"{layers} of {' or '.join(allowed)}", kinds)
    return tuple((window or 0) if kind == sliding else 0 for kind in kinds)
