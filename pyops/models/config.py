"""What a model's ``config.json`` says, of the Llama family: one description for all architectures of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._core.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "float16", "bfloat16")
_ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864), its frequencies scaled for long texts.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear" (frequencies divided by `factor`; Chen et al. 2023, arXiv:2306.15595) or "llama3"
            (only the low ones are; Llama 3 herd of models, arXiv:2407.21783).
        factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: as in ``config.json``.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Config:
    """Sizes and options of a decoder; the names are those of ``config.json`` where it has one.

    Attributes:
        sliding_windows: for each layer, how many of the last tokens it attends to; 0 for all.
        qkv_bias, o_bias, mlp_bias: whether these projections have one.
        qk_norm: whether every query and key head is normalised before it turns.
        dtype: that of the checkpoint.
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
            _size(name, getattr(self, name))
        heads, kv_heads, windows = self.num_attention_heads, self.num_key_value_heads, self.sliding_windows
        if heads % kv_heads:
            raise _refuse("num_key_value_heads", f"a divisor of num_attention_heads={heads}", kv_heads)
        if self.head_dim % 2:
            raise _refuse("head_dim", "an even number", self.head_dim)
        if self.dtype not in DTYPES:
            raise _refuse("dtype", " or ".join(DTYPES), self.dtype)
        if not windows:
            object.__setattr__(self, "sliding_windows", (0,) * self.num_hidden_layers)
        elif len(windows) != self.num_hidden_layers or not all(isinstance(w, int) and w >= 0 for w in windows):
            raise _refuse("sliding_window", f"a number of tokens for each of {self.num_hidden_layers} layers", windows)

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """From ``config.json`` in `folder`, and the ends of text that ``generation_config.json`` adds."""
        values = read_json(Path(folder) / "config.json")
        generation = Path(folder) / "generation_config.json"
        if generation.exists():
            ends = read_json(generation).get("eos_token_id")
            values = values if ends is None else values | {"eos_token_id": ends}
        return cls.parse(values)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Config:
        """From the object in a ``config.json``. What would compute something else is refused by name."""
        architectures = values.get("architectures") or []
        if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
            raise _refuse("architectures", " or ".join(ARCHITECTURES), architectures)
        (architecture,) = architectures
        for name, supported in (("hidden_act", "silu"), ("quantization_config", None), ("partial_rotary_factor", 1.0)):
            if values.get(name, supported) not in (supported, None):
                raise _refuse(name, repr(supported), values[name])

        is_qwen, is_llama = architecture.startswith("Qwen"), architecture == "LlamaForCausalLM"
        is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        sizes = {name: values[name] for name in _SIZES if values.get(name) is not None}
        if is_llama and "num_attention_heads" in sizes:
            sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
        for name in _SIZES:
            if name == "head_dim" and name not in sizes:
                sizes[name] = 128 if is_qwen3 else sizes["hidden_size"] // sizes["num_attention_heads"]
            _size(name, sizes.get(name))
        attention_bias = bool(values.get("attention_bias")) and (is_llama or is_qwen3)
        layers, ends = sizes["num_hidden_layers"], values.get("eos_token_id")
        return cls(
            **sizes,
            rms_norm_eps=_number("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
            rope=_rope(values),
            sliding_windows=() if is_llama else _qwen_windows(values, layers) if is_qwen else _windows(values, layers),
            qkv_bias=attention_bias or is_qwen2,
            o_bias=attention_bias,
            mlp_bias=bool(values.get("mlp_bias")) and is_llama,
            qk_norm=is_qwen3,
            tie_word_embeddings=bool(values.get("tie_word_embeddings")),
            dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32"),
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
    "head_dim",  # the last: others give it where the file does not
)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds; ModelError where there is no such file, or none in it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(path, f"cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(path, f"expected an object, got {type(values).__name__}")
    return values


def _refuse(name: str, expected: str, got: object) -> ModelError:
    return ModelError("config", f"{name}: expected {expected}, got {got!r}")


def _size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refuse(name, "a positive integer", value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _refuse(name, "a positive number", value)
    return float(value)


def _rope(values: dict[str, Any]) -> Rope:
    """``rope_parameters`` has all of it; older files have ``rope_theta`` and beside it ``rope_scaling``."""
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise _refuse("rope_parameters", "one object for all layers", found)
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise _refuse("rope_type", " or ".join(_ROPE_KINDS), kind)
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refuse("partial_rotary_factor", "1.0", found["partial_rotary_factor"])
    wanted = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}[kind]
    scaling: dict[str, Any] = {name: _number(f"rope_parameters.{name}", found.get(name)) for name in wanted}
    if kind == "llama3":
        if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
            raise _refuse("rope_parameters.high_freq_factor", "more than low_freq_factor", scaling["high_freq_factor"])
        original = found.get("original_max_position_embeddings", values.get("max_position_embeddings"))
        _size("original_max_position_embeddings", original)
        scaling["original_max_position_embeddings"] = original
    theta = found.get("rope_theta") or values.get("rope_theta") or 10000.0
    return Rope(_number("rope_theta", theta), kind, **scaling)


def _windows(values: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Mistral has one window for all layers, 4096 where the file is silent, none where it says null."""
    return (values.get("sliding_window", 4096) or 0,) * layers


def _qwen_windows(values: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Qwen has windows in some layers: those that ``layer_types`` names, or all from ``max_window_layers`` on."""
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
    full, sliding = "full_attention", "sliding_attention"
    first = values.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise _refuse("max_window_layers", "an integer", first)
    kinds = values.get("layer_types") or [sliding if window and i >= first else full for i in range(layers)]
    allowed = {full, sliding} if window else {full}
    if len(kinds) != layers or not set(kinds) <= allowed:
        raise _refuse("layer_types", f"{layers} of {' or '.join(sorted(allowed))}", kinds)
    return tuple(window if window and kind == sliding else 0 for kind in kinds)
