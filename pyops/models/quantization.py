"""What ``config.json`` says of quantised weights: fp8 as DeepSeek and AutoFP8 write it, compressed-tensors, GGUF's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._model_error import ModelError
from ..ops._shared.ggml_formats import FORMATS
from ..ops.linear.gemm_problem import SCALE_BLOCK
from .config_values import first, flag, refuse

_BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
_FORMATS = {"float": ("float-quantized", "naive-quantized"), "int": ("int-quantized", "naive-quantized")}
_DTYPES = {"float": "float8_e4m3fn", "int": "int8"}
_AT = "quantization_config"


@dataclass(frozen=True)
class GgufTypes:
    """The quantised weights of a GGUF file: {name of a module: number of its type}, of any modules, as pairs."""

    types: tuple[tuple[str, int], ...]

    def of(self, name: str) -> int | None:
        """The type of the weight of the module `name`; None if the weight is floating-point."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return dict(self.types)


@dataclass(frozen=True)
class Quantization:
    """How the projections of a decoder are quantised, those of attention and of MLPs.

    Attributes:
        dtype: of weights and of what they multiply: "float8_e4m3fn" or "int8".
        weights: what of a weight has a scale: "tensor", "channel" (each row) or "block" (128 x 128 elements).
        activations: under what scales a product quantises its input: "static" (one that the checkpoint has), "token"
            (found for each row) or "group" (found for each 128 neighbours of a row; with "block", and only with it).
        ignored: regular expressions. A projection is not quantised if one of them matches its whole name.
    """

    dtype: str
    weights: str
    activations: str
    ignored: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether the projection that a checkpoint calls `name` is quantised."""
        return not any(pattern.fullmatch(name) for pattern in self._patterns)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(pattern) for pattern in self.ignored]

    @classmethod
    def parse(cls, values: Any) -> Quantization | GgufTypes | None:
        """What a ``quantization_config`` says; ModelError for what is not served."""
        if values is None:
            return None
        method = _object("", values).get("quant_method")
        if method == "fp8":
            return _fp8(values)
        if method == "compressed-tensors":
            return _compressed_tensors(values)
        if method == "gguf":
            return _gguf(values)
        raise _refuse("quant_method", "'fp8' or 'compressed-tensors'", method)


def _fp8(values: dict[str, Any]) -> Quantization:
    """``quant_method: fp8``: blocks as in DeepSeek-V3 and Qwen3, or one scale for each weight as AutoFP8 makes them."""
    blocks = values.get("weight_block_size")
    if blocks not in (None, _BLOCK):
        raise _refuse("weight_block_size", f"{_BLOCK} or null", blocks)
    scheme = first(values.get("activation_scheme"), "dynamic")
    schemes = ("dynamic",) if blocks else ("dynamic", "static")
    if scheme not in schemes:
        raise _refuse("activation_scheme", " or ".join(map(repr, schemes)), scheme)
    for name, only in (("fmt", "e4m3"), ("scale_fmt", "float")):
        _only(name, values, only)
    for name in ("modules_to_convert", "kv_cache_scheme", "dequantize"):
        _absent(name, values)
    ignored: list[str] = []
    for field in ("modules_to_not_convert", "ignored_layers"):
        # A name stands for the module, and for all that is in it; or it is the end of names.
        for name in _patterns(field, values, ""):
            ignored += [rf"(?:{name})(?:|\..*|(?<=\.).*)", f".*{re.escape(name)}"]
    found = "group" if blocks else "static" if scheme == "static" else "token"
    return Quantization("float8_e4m3fn", "block" if blocks else "tensor", found, tuple(ignored))


def _gguf(values: dict[str, Any]) -> GgufTypes:
    """``quant_method: gguf``, as `gguf_file.py` says of a file."""
    types = _object("types", values.get("types"))
    for name, kind in types.items():
        if kind not in FORMATS:
            raise _refuse(f"types.{name}", f"one of {sorted(FORMATS)}", kind)
    return GgufTypes(tuple(types.items()))


def _compressed_tensors(values: dict[str, Any]) -> Quantization:
    """``quant_method: compressed-tensors``: one group of all linear modules, 8 bits for weights and activations."""
    groups = _object("config_groups", values.get("config_groups"))
    if len(groups) != 1:
        raise _refuse("config_groups", "one group", list(groups))
    ((name, group),) = groups.items()
    at = f"config_groups.{name}"
    group = _object(at, group)
    if group.get("targets") != ["Linear"]:
        raise _refuse(f"{at}.targets", "['Linear']", group.get("targets"))
    weights, inputs = (_object(f"{at}.{part}", group.get(part)) for part in ("weights", "input_activations"))
    kind = first(weights.get("type"), "int")
    if kind not in tuple(_FORMATS):
        raise _refuse(f"{at}.weights.type", "'float' or 'int'", kind)
    _only("format", group, *_FORMATS[kind], at=f"{at}.")
    _only("format", values, *_FORMATS[kind], required=True)
    for name, where, holder in (
        ("output_activations", f"{at}.", group),
        ("kv_cache_scheme", "", values),
        ("transform_config", "", values),
        ("actorder", f"{at}.weights.", weights),
    ):
        _absent(name, holder, where)
    sparsity = values.get("sparsity_config")
    if sparsity and _object("sparsity_config", sparsity).get("format") != "dense":
        raise _refuse("sparsity_config", "null", sparsity)
    strategies = ("tensor", "channel", "block") if kind == "float" else ("tensor", "channel")
    strategy = _arguments(f"{at}.weights.", weights, kind, strategies)
    if strategy == "block" and weights.get("block_structure") != _BLOCK:
        raise _refuse(f"{at}.weights.block_structure", str(_BLOCK), weights.get("block_structure"))
    by_input = ("group",) if strategy == "block" else ("token", "tensor")
    activation = _arguments(f"{at}.input_activations.", inputs, kind, by_input)
    if activation == "group" and inputs.get("group_size") != SCALE_BLOCK:
        raise _refuse(f"{at}.input_activations.group_size", str(SCALE_BLOCK), inputs.get("group_size"))
    for name, arguments, expected in (
        ("weights", weights, False),
        ("input_activations", inputs, activation != "tensor"),
    ):
        if first(arguments.get("dynamic"), False) is not expected:
            raise _refuse(f"{at}.{name}.dynamic", str(expected).lower(), arguments.get("dynamic"))
    ignored = tuple(
        rf"(?:{entry[3:]}).*" if entry.startswith("re:") else re.escape(entry)
        for entry in _patterns("ignore", values, "re:")
    )
    return Quantization(_DTYPES[kind], strategy, "static" if activation == "tensor" else activation, ignored)


def _arguments(at: str, values: dict[str, Any], kind: str, strategies: tuple[str, ...]) -> str:
    """The strategy of weights or activations, all else of which is checked."""
    bits = first(values.get("num_bits"), 8)
    if bits != 8:
        raise _refuse(f"{at}num_bits", "8", bits)
    if first(values.get("type"), "int") != kind:
        raise _refuse(f"{at}type", repr(kind), values.get("type"))
    if not flag(values, "symmetric", True):
        raise _refuse(f"{at}symmetric", "true", values["symmetric"])
    strategy = values.get("strategy")
    if strategy not in strategies:
        raise _refuse(f"{at}strategy", " or ".join(map(repr, strategies)), strategy)
    return str(strategy)


def _patterns(field: str, values: dict[str, Any], marked: str) -> list[str]:
    """The list `field`; those that begin with `marked` are regular expressions, and are checked to be."""
    entries = first(values.get(field), [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise _refuse(field, "a list of names", entries)
    for entry in entries:
        try:
            re.compile(entry.removeprefix(marked) if entry.startswith(marked) else "")
        except re.error as error:
            raise _refuse(field, f"regular expressions ({error})", entry) from None
    return entries


def _only(name: str, values: dict[str, Any], *served: str, at: str = "", required: bool = False) -> None:
    """ModelError if `values` has something else under `name` than what is served; null is nothing."""
    found = values.get(name)
    if found not in served and (required or found is not None):
        raise _refuse(f"{at}{name}", " or ".join(map(repr, served)), found)


def _absent(name: str, values: dict[str, Any], at: str = "") -> None:
    if values.get(name):
        raise _refuse(f"{at}{name}", "null", values[name])


def _object(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise _refuse(name, "an object", values)
    return values


def _refuse(name: str, expected: str, got: object) -> ModelError:
    return refuse(f"{_AT}.{name}" if name else _AT, expected, got)
