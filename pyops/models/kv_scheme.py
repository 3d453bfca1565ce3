"""The KV cache dtype that a ``quantization_config`` asks for."""

from __future__ import annotations

from typing import Any

from .config_values import refuse

# Supported values of a `kv_cache_scheme` of compressed-tensors or ModelOpt: {field: values}. Null counts as absent.
_SCHEME: dict[str, tuple[Any, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "strategy": ("tensor", "attn_head"),
    "symmetric": (True,),
    "dynamic": (False,),
    "group_size": (),
    "block_structure": (),
    "actorder": (),
}


def kv_cache_dtype_of(values: Any) -> str:
    """The `kv_cache_dtype` that a ``quantization_config`` asks for: "fp8_e4m3", or "auto" if it does not say."""
    if not isinstance(values, dict):  # `Quantization.parse` refuses anything but an object
        return "auto"
    scheme, algorithm = (values.get(name) or None for name in ("kv_cache_scheme", "kv_cache_quant_algo"))
    if isinstance(scheme, dict):
        for name, served in _SCHEME.items():
            found = scheme.get(name)
            if found not in served and (found is not None or name in ("type", "num_bits")):
                expected = " or ".join(map(repr, served)) or "null"
                raise refuse(f"quantization_config.kv_cache_scheme.{name}", expected, found)
        return "fp8_e4m3"
    if scheme not in (None, "static"):  # AutoFP8 writes "static"
        raise refuse("quantization_config.kv_cache_scheme", "an object, 'static' or null", scheme)
    if algorithm not in (None, "FP8"):
        raise refuse("quantization_config.kv_cache_quant_algo", "'FP8' or null", algorithm)
    return "auto" if scheme is None and algorithm is None else "fp8_e4m3"


def quantises_cache_alone(values: Any) -> bool:
    """Whether a ``quantization_config`` asks for an fp8 cache and leaves all weights as they are."""
    if kv_cache_dtype_of(values) == "auto":
        return False
    method, field = values.get("quant_method"), {"modelopt": "quant_algo", "compressed-tensors": "config_groups"}
    if not isinstance(method, str) or method not in field or values.get(field[method]) not in (None, {}):
        return False
    for name in ("format", "ignore"):  # they concern quantised weights only
        values.get(name)
    return True
