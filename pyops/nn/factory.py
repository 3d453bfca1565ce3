"""`get_rope`: the rotary embedding for a model's configuration."""

from __future__ import annotations

from typing import Any

import torch

from .custom_op import CustomOp
from .rotary import MRotaryEmbedding, RotaryEmbedding
from .rotary_dual import DualChunkRotaryEmbedding
from .rotary_scaled import (
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
)
from .rotary_yarn import (
    DeepseekScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

__all__ = ["get_rope"]

_made: dict[Any, CustomOp] = {}
_RAMP = ("extrapolation_factor", "attn_factor", "beta_fast", "beta_slow")


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: dict[str, Any] | None = None,
) -> CustomOp:
    """The rotary embedding that these arguments describe. Equal arguments return the same module.

    Args:
        head_size: elements of a head.
        max_position: positions of the model.
        is_neox_style: pairs are elements (j, j + rotary_dim / 2); else (2 j, 2 j + 1).
        rope_parameters: as in a model's ``config.json``: `rope_type` ("default", "linear", "ntk", "dynamic", "llama3",
            "yarn", "deepseek_yarn", "deepseek_llama_scaling" or "longrope"), `rope_theta` (10000),
            `partial_rotary_factor` (1), `mrope_section` for "default" and "yarn", and the parameters of the type. None
            for the defaults.
        dtype: dtype of the table; None for torch's default.
        dual_chunk_attention_config: has `chunk_size` and `local_size`; None for no dual chunk attention.

    Raises:
        ValueError: rope_type is unknown, or a parameter is missing or out of range.

    Examples:
        >>> llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        ...           "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
        >>> rope = get_rope(64, 1024, rope_parameters=llama3, dtype=torch.float32)
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
        >>> query.shape, key.shape
        (torch.Size([5, 256]), torch.Size([5, 128]))
    """
    dtype = dtype or torch.get_default_dtype()
    key = (
        head_size,
        max_position,
        is_neox_style,
        _frozen(rope_parameters),
        dtype,
        _frozen(dual_chunk_attention_config),
    )
    if key not in _made:
        _made[key] = _new(
            head_size, max_position, is_neox_style, rope_parameters or {}, dtype, dual_chunk_attention_config
        )
    return _made[key]


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in sorted(value.items()) if name != "sparse_attention_config")
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _new(
    head_size: int,
    max_position: int,
    is_neox_style: bool,
    parameters: dict[str, Any],
    dtype: torch.dtype,
    dual_chunk: dict[str, Any] | None,
) -> CustomOp:
    kind = parameters.get("rope_type", "default")
    partial = parameters.get("partial_rotary_factor", 1.0)
    if not 0.0 < partial <= 1.0:
        raise ValueError(f"get_rope: partial_rotary_factor: expected above 0 and at most 1, got {partial}")
    if parameters.get("use_fope"):
        raise ValueError("get_rope: use_fope: Fourier position embedding is not supported")

    def wanted(name: str) -> Any:
        if parameters.get(name) is None:
            raise ValueError(f"get_rope: rope_parameters: {kind} needs {name}")
        return parameters[name]

    def chosen(*names: str) -> dict[str, Any]:
        return {name: parameters[name] for name in names if name in parameters}

    def common(positions: int = max_position) -> tuple[int, int, int, float, bool]:
        return head_size, int(head_size * partial), positions, parameters.get("rope_theta", 10000), is_neox_style

    if dual_chunk is not None:
        sizes = {name: dual_chunk[name] for name in ("chunk_size", "local_size") if name in dual_chunk}
        return DualChunkRotaryEmbedding(*common(), dtype, **sizes)
    if kind in ("default", "yarn") and "mrope_section" in parameters:
        sections = wanted("mrope_section"), parameters.get("mrope_interleaved", False)
        if kind == "default":
            return MRotaryEmbedding(*common(), dtype, *sections)
        original, factor = wanted("original_max_position_embeddings"), wanted("factor")
        extra = chosen(*_RAMP, "truncate")
        return MRotaryEmbedding(*common(original), dtype, *sections, scaling_factor=factor, **extra)
    if kind == "default":
        return RotaryEmbedding(*common(), dtype)
    if kind == "linear":
        return LinearScalingRotaryEmbedding(*common(), wanted("factor"), dtype)
    if kind == "dynamic":
        if "alpha" in parameters:
            return DynamicNTKAlphaRotaryEmbedding(*common(), wanted("alpha"), dtype)
        size, rotary_dim, positions, base, is_neox = common()
        trained = parameters.get("max_trained_positions", positions)
        return DynamicNTKScalingRotaryEmbedding(
            size, rotary_dim, positions, trained, base, is_neox, wanted("factor"), dtype
        )
    if kind == "ntk":
        return NTKScalingRotaryEmbedding(*common(), wanted("factor"), dtype, parameters.get("mixed_b"))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return Llama3RotaryEmbedding(*common(), dtype, *map(wanted, names))
    if kind == "yarn":
        extra = chosen(*_RAMP, "apply_yarn_scaling", "truncate")
        original = common(wanted("original_max_position_embeddings"))
        return YaRNScalingRotaryEmbedding(*original, wanted("factor"), dtype, **extra)
    if kind in ("deepseek_yarn", "deepseek_llama_scaling"):
        extra = chosen(*_RAMP, "mscale", "mscale_all_dim")
        original = common(wanted("original_max_position_embeddings"))
        return DeepseekScalingRotaryEmbedding(*original, wanted("factor"), dtype, **extra)
    if kind == "longrope":
        size, rotary_dim, positions, base, is_neox = common()
        original = wanted("original_max_position_embeddings")
        factors, extra = (wanted("short_factor"), wanted("long_factor")), chosen("short_mscale", "long_mscale")
        return Phi3LongRoPEScaledRotaryEmbedding(
            size, rotary_dim, positions, original, base, is_neox, dtype, *factors, **extra
        )
    raise ValueError(f"get_rope: rope_type: {kind} is not supported")
