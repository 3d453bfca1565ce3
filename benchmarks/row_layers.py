"""The kinds of `benchmarks.models` that work on rows: norms, activations, quantization, rotary, cache and sampling.

A row is an op of the kind with the sizes of a published model and its GPUs of tensor parallelism, and up to 16384
tokens; of sampling, a vocabulary of 32000 to 262144 and up to 256 rows of logits in float32, which FlashInfer and vLLM
take. Other operands are those of the op's example. Rivals:
those of `benchmarks.rivals`, among them torch.compile of the op's reference; each is compared with the reference first.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyops

from . import drawn, kernel_time
from .gemm_layers import MODELS, PARTS, Model
from .shapes import Case
from .timing import QUICK

MAX_TOKENS = 16384
MAX_SAMPLED = 256
_RIVALS = "torch", "compile", "vllm", "flashinfer"
_GROUP = 128  # elements of a quantization group
_VOCABULARIES = 32000, 65536, 100352, 128256, 129280, 151936, 201088, 256000, 262144


def _hidden(model: Model, parts: int) -> dict[str, Any]:
    return {"hidden_size": model.hidden}


def _mlp(model: Model, parts: int) -> dict[str, Any]:
    return {"hidden_size": model.mlp // parts}


def _heads(model: Model, parts: int) -> dict[str, Any]:
    kv_heads = max(1, model.kv_heads // parts)
    num_heads = max(1, model.heads // parts) // kv_heads * kv_heads
    return {"head_size": model.head_size, "num_heads": num_heads, "num_kv_heads": kv_heads}


def _kv_heads(model: Model, parts: int) -> dict[str, Any]:
    return {"head_size": model.head_size, "num_heads": max(1, model.kv_heads // parts)}


def _none(model: Model, parts: int) -> dict[str, Any]:
    return {}


Axes = Callable[[Model, int], dict[str, Any]]
# {kind: {op: the axes of its example that a model and a number of GPUs give}}
OPS: dict[str, Mapping[str, Axes]] = {
    "norms": dict.fromkeys(
        (
            *("rms_norm", "fused_add_rms_norm", "gemma_rms_norm", "layer_norm", "rms_norm_static_fp8_quant"),
            *("fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant"),
        ),
        _hidden,
    ),
    "activations": dict.fromkeys(
        (
            *("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swigluoai_and_mul", "relu2", "gelu_new"),
            *("silu_and_mul_quant", "silu_and_mul_per_block_quant"),
        ),
        _mlp,
    ),
    "quantize": dict.fromkeys(
        (
            *("static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant"),
            *("per_token_group_fp8_quant", "dynamic_scaled_int8_quant", "scaled_fp4_quant"),
        ),
        _hidden,
    ),
    "rotary": {"rotary_embedding": _heads},
    "cache": {"reshape_and_cache_flash": _kv_heads, "reshape_and_cache": _kv_heads, "concat_and_cache_mla": _none},
    "sampling": dict.fromkeys(
        (
            *("softmax", "log_softmax", "top_k_top_p_sampling_from_logits", "apply_repetition_penalties_"),
            *("apply_penalties_", "apply_token_bitmask_"),
        ),
        _none,
    ),
}
KINDS = tuple(OPS)
_WHOLE_GROUPS = {
    name for names in OPS.values() for name in names if "group" in name or "block" in name or "fp4" in name
}


@dataclass(frozen=True)
class Row:
    """An op at the axes of its example."""

    kind: str
    layer: str
    op: str
    axes: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return str(self.case)

    @property
    def case(self) -> Case:
        return Case(pyops.registry[self.op], dict(self.axes))


def draw(kind: str, count: int, seed: int) -> list[Row]:
    """`count` different rows of a kind."""
    return drawn.draw(kind, count, seed, partial(_row, kind))


def _row(kind: str, generator: random.Random) -> Row | None:
    op, name, parts = generator.choice(list(OPS[kind])), generator.choice(list(MODELS)), generator.choice(PARTS)
    if kind == "sampling":
        sizes = {"num_tokens": drawn.log_uniform(generator, MAX_SAMPLED), "vocab_size": generator.choice(_VOCABULARIES)}
        return Row(kind, "", op, (*sizes.items(), ("dtype", "float32")))
    axes = {"num_tokens": drawn.log_uniform(generator, MAX_TOKENS)} | OPS[kind][op](MODELS[name], parts)
    if op in _WHOLE_GROUPS and axes["hidden_size"] % _GROUP:
        return None
    return Row(kind, f"{name} tp{parts}", op, tuple(axes.items()))


def measure(row: Row) -> dict[str, float]:
    """{contender: microseconds}. A contender that disagrees with the reference is reported and left out."""
    found, skipped = kernel_time.measure(row.case, _RIVALS, QUICK)
    for one in skipped:
        print(f"{row}: {one['rival']}: {one['reason']}", file=sys.stderr, flush=True)
    return {name: time["us"].median for name, time in found["times"].items()}
