"""Formats of quantised weights: fp8 (DeepSeek, AutoFP8), AWQ, GPTQ, compressed-tensors and GGUF's types."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ModelError
from ..ops._shared.ggml_formats import FORMATS
from ..ops.linear.gemm_problem import SCALE_BLOCK
from .config_values import first, flag, refuse
from .mixture import STACKED
from .packed_format import Ignoring, PackedQuantization

_BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
_FORMATS = {"float": ("float-quantized", "naive-quantized"), "int": ("int-quantized", "naive-quantized")}
_DTYPES = {"float": "float8_e4m3fn", "int": "int8"}
_AT = "quantization_config"
MX_BLOCK = 32  # MX formats: values that share a power-of-two scale
GGUF_MXFP4 = 39  # GGUF's type number of MXFP4


@dataclass(frozen=True)
class GgufTypes:
    """The quantised weights of a GGUF file: pairs (module name, GGUF type number)."""

    types: tuple[tuple[str, int], ...]

    def of(self, name: str) -> int | None:
        """The GGUF type number of the module `name`; None if its weight is floating-point."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return dict(self.types)


@dataclass(frozen=True)
class Mxfp4Experts:
    """Experts are quantised to MXFP4: blocks of e2m1 values with power-of-two scales (OCP MX formats 1.0)."""

    def covers(self, name: str) -> bool:
        """Whether the projection that a checkpoint calls `name` is quantised: none is."""
        return False


@dataclass(frozen=True)
class Quantization(Ignoring):
    """How the projections of a decoder are quantised, those of attention and of MLPs.

    Attributes:
        dtype: of weights and activations: "float8_e4m3fn" or "int8".
        weights: granularity of weight scales: "tensor", "channel" (one per row) or "block" (128 x 128 elements).
        activations: granularity of activation scales: "static" (one, from the checkpoint), "token" (dynamic, one per
            row) or "group" (dynamic, one per 128 contiguous elements of a row; only together with "block").
        ignored: regular expressions. A projection is not quantised if one of them matches its whole name.
        has_mxfp4_experts: whether experts are in MXFP4 instead (DeepSeek-V4).

    Examples:
        >>> fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # as in DeepSeek-V3
        >>> Quantization.parse(fp8) == Quantization("float8_e4m3fn", weights="block", activations="group")
        True
    """

    dtype: str
    weights: str
    activations: str
    ignored: tuple[str, ...] = ()
    has_mxfp4_experts: bool = False

    @classmethod
    def parse(cls, values: Any) -> QuantizedWeights | None:
        """Read a ``quantization_config``. ModelError for an unsupported format or option."""
        if values is None:
            return None
        method = _object("", values).get("quant_method")
        if method == "fp8":
            return _fp8(values)
        if method == "compressed-tensors":
            return _compressed_tensors(values)
        if method == "awq":
            return _awq(values)
        if method == "gptq":
            return _gptq(values)
        if method == "mxfp4":
            return Mxfp4Experts()
        if method == "gguf":
            return _gguf(values)
        raise _refuse("quant_method", "'fp8', 'awq', 'gptq', 'mxfp4' or 'compressed-tensors'", method)


# The quantization of a checkpoint, in any supported format.
QuantizedWeights = Quantization | PackedQuantization | Mxfp4Experts | GgufTypes


def has_mxfp4_experts(quantization: QuantizedWeights | None) -> bool:
    """Whether experts are in MXFP4, alone or with other weights in fp8."""
    if isinstance(quantization, Quantization):
        return quantization.has_mxfp4_experts
    return isinstance(quantization, Mxfp4Experts)


def _fp8(values: dict[str, Any]) -> Quantization:
    """``quant_method: fp8``: blocks as in DeepSeek-V3 and Qwen3, or one scale for each weight as AutoFP8 makes them."""
    blocks = values.get("weight_block_size")
    if blocks not in (None, _BLOCK):
        raise _refuse("weight_block_size", f"{_BLOCK} or null", blocks)
    scheme = first(values.get("activation_scheme"), "dynamic")
    schemes = ("dynamic",) if blocks else ("dynamic", "static")
    if scheme not in schemes:
        raise _refuse("activation_scheme", " or ".join(map(repr, schemes)), scheme)
    _only("fmt", values, "e4m3")
    # Power-of-two scales, ue8m0, are floats like others: a tensor of a checkpoint says its dtype.
    _only("scale_fmt", values, "float", *(("ue8m0",) if blocks else ()))
    _only("expert_dtype", values, "fp8", *(("fp4",) if blocks else ()))
    for name in ("modules_to_convert", "dequantize"):
        _absent(name, values)
    ignored = (*_not_converted("modules_to_not_convert", values), *_not_converted("ignored_layers", values))
    found = "group" if blocks else "static" if scheme == "static" else "token"
    has_fp4 = values.get("expert_dtype") == "fp4"
    return Quantization("float8_e4m3fn", "block" if blocks else "tensor", found, ignored, has_fp4)


def _not_converted(field: str, values: dict[str, Any]) -> tuple[str, ...]:
    """The entries of ``modules_to_not_convert`` as regular expressions, with transformers' semantics."""
    ignored: list[str] = []
    # An entry matches a module and all of its submodules, or any module with a name that ends with it.
    for name in _patterns(field, values, ""):
        ignored += [rf"(?:{name})(?:|\..*|(?<=\.).*)", f".*{re.escape(name)}"]
    return tuple(ignored)


def _awq(values: dict[str, Any]) -> PackedQuantization:
    """``quant_method: awq``, as AutoAWQ writes it."""
    _only("bits", values, 4, required=True)
    for name in ("version", "format"):
        _only(name, values, "gemm", "GEMM")
    _only("zero_point", values, True)
    if values.get("backend") == "llm-awq":  # a weight format of its own, unlike the other backends, which are kernels
        raise _refuse("backend", "a backend of the format 'gemm'", "llm-awq")
    ignored = _not_converted("modules_to_not_convert", values)
    return PackedQuantization("awq", 4, _group_size("group_size", values, 128), ignored=ignored)


def _gptq(values: dict[str, Any]) -> PackedQuantization:
    """``quant_method: gptq``, as AutoGPTQ and its successors write it."""
    _only("bits", values, 2, 3, 4, 8, required=True)
    for name in ("checkpoint_format", "format"):  # the older name has precedence, as in transformers
        _only(name, values, "gptq", "gptq_v2")
    for name in ("lm_head", "is_marlin_format"):
        _absent(name, values)
    size = _group_size("group_size", values, 128)
    has_order = flag(values, "desc_act", False) and size != -1  # act-order means nothing with a single group
    is_v2 = first(values.get("checkpoint_format"), values.get("format")) == "gptq_v2"
    is_symmetric = flag(values, "sym", False)
    ignored = _not_dynamic(first(values.get("dynamic"), {}))
    listed = _listed(first(values.get("modules_in_block_to_quantize"), []))
    return PackedQuantization("gptq", values["bits"], size, True, True, has_order, is_v2, is_symmetric, ignored, listed)


def _not_dynamic(rules: Any) -> tuple[str, ...]:
    """Regular expressions of GPTQModel's ``dynamic`` rules; only rules that exclude modules are supported."""
    for rule, _ in _object("dynamic", rules).items():
        if not rule.startswith("-:"):
            raise _refuse("dynamic", "rules that leave modules as they are ('-:...')", rule)
    return tuple(rf"(?:{rule[2:]}).*" for rule in _patterns("dynamic", {"dynamic": list(rules)}, "-:"))


def _listed(names: Any) -> tuple[str, ...]:
    """The name suffixes in ``modules_in_block_to_quantize``, a list of lists of names within a layer."""
    groups = names if isinstance(names, list) else [None]
    entries = [entry for group in groups for entry in (group if isinstance(group, list) else [group])]
    if not all(isinstance(entry, str) for entry in entries):
        raise _refuse("modules_in_block_to_quantize", "a list of names, or of lists of them", names)
    return tuple(f".{entry}" for entry in entries)


def _group_size(name: str, values: dict[str, Any], default: int, at: str = "") -> int:
    size = first(values.get(name), default)
    if not isinstance(size, int) or isinstance(size, bool) or (size != -1 and size < 1):
        raise _refuse(f"{at}{name}", "-1, or 1 or more", size)
    return size


def _pack_quantized(
    at: str, group: dict[str, Any], weights: dict[str, Any], ignored: tuple[str, ...]
) -> PackedQuantization:
    """compressed-tensors' ``pack-quantized``: 4- or 8-bit integer weights, activations in 16 bits."""
    _only("format", group, "pack-quantized", at=f"{at}.")
    _absent("input_activations", group, f"{at}.")
    at = f"{at}.weights."
    _only("num_bits", weights, 4, 8, at=at, required=True)
    _only("type", weights, "int", at=at)
    _only("dynamic", weights, False, at=at)
    _only("strategy", weights, "group", "channel", at=at, required=True)
    _only("actorder", weights, "group", "dynamic", "weight", "static", at=at)
    size = _group_size("group_size", weights, -1, at) if weights["strategy"] == "group" else -1
    has_order = weights.get("actorder") in ("group", "dynamic")
    has_zeros = not flag(weights, "symmetric", True)
    return PackedQuantization(
        "pack-quantized", weights["num_bits"], size, has_zeros, has_order, has_order, ignored=ignored
    )


def _gguf(values: dict[str, Any]) -> GgufTypes:
    """``quant_method: gguf``, which `gguf_file.py` writes for a GGUF file."""
    types = _object("types", values.get("types"))
    for name, kind in types.items():
        if kind not in FORMATS and not (kind == GGUF_MXFP4 and name.endswith(STACKED)):
            raise _refuse(f"types.{name}", f"one of {sorted(FORMATS)}", kind)
    return GgufTypes(tuple(types.items()))


def _compressed_tensors(values: dict[str, Any]) -> Quantization | PackedQuantization:
    """``quant_method: compressed-tensors``: one config group for all linear modules, packed or W8A8."""
    groups = _object("config_groups", values.get("config_groups"))
    if len(groups) != 1:
        raise _refuse("config_groups", "one group", list(groups))
    (name,) = groups
    at = f"config_groups.{name}"
    group = _object(at, groups[name])
    if group.get("targets") != ["Linear"]:
        raise _refuse(f"{at}.targets", "['Linear']", group.get("targets"))
    weights = _object(f"{at}.weights", group.get("weights"))
    for name, where, holder in (
        ("output_activations", f"{at}.", group),
        ("transform_config", "", values),
    ):
        _absent(name, holder, where)
    sparsity = values.get("sparsity_config")
    if sparsity and _object("sparsity_config", sparsity).get("format") != "dense":
        raise _refuse("sparsity_config", "null", sparsity)
    ignored = tuple(
        rf"(?:{entry[3:]}).*" if entry.startswith("re:") else re.escape(entry)
        for entry in _patterns("ignore", values, "re:")
    )
    if values.get("format") == "pack-quantized":
        return _pack_quantized(at, group, weights, ignored)
    inputs = _object(f"{at}.input_activations", group.get("input_activations"))
    kind = first(weights.get("type"), "int")
    if kind not in tuple(_FORMATS):
        raise _refuse(f"{at}.weights.type", "'float' or 'int'", kind)
    _only("format", group, *_FORMATS[kind], at=f"{at}.")
    _only("format", values, *_FORMATS[kind], required=True)
    _absent("actorder", weights, f"{at}.weights.")
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
    return Quantization(_DTYPES[kind], strategy, "static" if activation == "tensor" else activation, ignored)


def _arguments(at: str, values: dict[str, Any], kind: str, strategies: tuple[str, ...]) -> str:
    """The ``strategy`` of weights or activations, after a check of all other fields."""
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
    """The list `field`. Entries that begin with `marked` are regular expressions, and must compile."""
    entries = first(values.get(field), [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise _refuse(field, "a list of names", entries)
    for entry in entries:
        try:
            re.compile(entry.removeprefix(marked) if entry.startswith(marked) else "")
        except re.error as error:
            raise _refuse(field, f"regular expressions ({error})", entry) from None
    return entries


def _only(name: str, values: dict[str, Any], *served: object, at: str = "", required: bool = False) -> None:
    """ModelError if the value of `name` is neither null nor supported."""
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
