"""The kinds of `benchmarks.models` with experts: layers of published mixtures end to end, and their grouped GEMMs.

experts and experts_blocks are `fused_experts` with bf16 weights, and with fp8 weights and activations under block
scales, next to vLLM's `fused_experts` in Triton, if it can be imported, and to `torch._grouped_mm` with bf16. All of
them apply SiLU, also for models with another activation. grouped, grouped_fp8 and grouped_blocks are one product of
such a layer, by `grouped_gemm` alone: bf16, and fp8 with scales of rows, or of blocks; grouped_int4 and grouped_mxfp4
are one by `grouped_gemm_packed`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

import pyops

from . import drawn, experts, products
from .gemm_layers import PARTS
from .installed import reason
from .timing import Call

KINDS = "experts", "experts_blocks"
# Products with K-major quantized weights: {kind: (that of `experts.Model`, `b_type` of `grouped_gemm_packed`)}
QUANTIZED = {"grouped_int4": ("codes of int4", "uint4"), "grouped_mxfp4": ("codes of mxfp4", "float4_e2m1f")}
PRODUCTS = "grouped", "grouped_fp8", "grouped_blocks", *QUANTIZED
MAX_TOKENS = 8192
_BLOCK = 128  # side of a scale block
_MAX_BYTES = 24 << 30  # most bytes of the weights of a layer; larger draws are drawn again
_BLOCK_SIZES = 64, 128, 192  # slots of a block for products alone: those that WGMMA takes
_QUANTIZED_SIZES = 8, 16, 32, 48, 64, 96, 128, 160  # the same with quantized weights


@dataclass(frozen=True)
class Mixture:
    """The sizes of a published model's layer of experts."""

    experts: int
    top_k: int
    hidden: int
    width: int


MIXTURES = {
    "Qwen3 30B-A3B": Mixture(128, 8, 2048, 768),
    "DeepSeek V3": Mixture(256, 8, 7168, 2048),
    "gpt-oss 20B": Mixture(32, 4, 2880, 2880),
    "gpt-oss 120B": Mixture(128, 4, 2880, 2880),
    "Mixtral 8x7B": Mixture(8, 2, 4096, 14336),
    "GLM 4.5": Mixture(160, 8, 5120, 1536),
}


@dataclass(frozen=True)
class Row:
    """A layer of experts, or one of its products.

    Attributes:
        kind: one of `KINDS` or `PRODUCTS`.
        tokens: of the layer.
        layer: the model and its number of GPUs.
        mixture: its sizes on one of these GPUs.
        number: 0 for the layer, 1 or 2 for a product.
        block_size: slots of a block of the lists of a product.
    """

    kind: str
    tokens: int
    layer: str
    mixture: Mixture
    number: int = 0
    block_size: int = 0

    def __str__(self) -> str:
        product = f" product {self.number} in blocks of {self.block_size}" if self.number else ""
        return f"{self.kind}:{self.tokens} {self.layer}{product}"

    @property
    def m(self) -> int:
        """Rows of the products."""
        return self.tokens * self.mixture.top_k

    @property
    def n(self) -> int:
        """Rows of the weight of an expert in the widest product of the row."""
        return self.mixture.hidden if self.number == 2 else 2 * self.mixture.width

    @property
    def k(self) -> int:
        return self.mixture.width if self.number == 2 else self.mixture.hidden

    @property
    def is_fp8(self) -> bool:
        return self.kind.endswith(("fp8", "blocks"))

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight, without scales."""
        return 0.5 if self.kind in QUANTIZED else 1 if self.is_fp8 else 2


def draw(kind: str, count: int, seed: int) -> list[Row]:
    """`count` different rows of a kind: tokens drawn log-uniformly from 1 to `MAX_TOKENS`."""

    def one(generator: random.Random) -> Row | None:
        name, parts = generator.choice(list(MIXTURES)), generator.choice(PARTS)
        of, tokens = MIXTURES[name], drawn.log_uniform(generator, MAX_TOKENS)
        mixture = Mixture(of.experts, of.top_k, of.hidden, of.width // parts)
        is_product = kind in PRODUCTS
        sizes = _QUANTIZED_SIZES if kind in QUANTIZED else _BLOCK_SIZES
        chosen = (generator.choice((1, 2)), generator.choice(sizes)) if is_product else (0, 0)
        row = Row(kind, tokens, f"{name} tp{parts}", mixture, *chosen)
        unit = _BLOCK if kind.endswith(("blocks", "int4")) else 32 if kind in QUANTIZED else 1
        whole = mixture.hidden % unit == 0 and mixture.width % unit == 0
        fits = 3 * mixture.experts * mixture.hidden * mixture.width * row.weight_bytes <= _MAX_BYTES
        return row if whole and fits else None

    return drawn.draw(kind, count, seed, one)


def num_bytes(row: Row) -> int:
    """Bytes of the weights of the experts that are chosen, if tokens choose at random."""
    mixture = row.mixture
    chosen = mixture.experts * (1 - (1 - mixture.top_k / mixture.experts) ** row.tokens)
    matrices = 3 if row.number == 0 else 3 - row.number
    return round(chosen * matrices * mixture.hidden * mixture.width * row.weight_bytes)


def operands(row: Row) -> tuple[Any, ...]:
    """What each contender is called with. Sets of a row share the weights; their tokens choose other experts."""
    mixture = row.mixture
    logits = torch.rand(row.tokens, mixture.experts, device="cuda")
    chances, ids = logits.softmax(1).topk(mixture.top_k)
    ids = ids.to(torch.int32)
    if row.kind in PRODUCTS:
        return _product(row, ids)
    x = torch.randn(row.tokens, mixture.hidden, dtype=torch.bfloat16, device="cuda")
    return x, *_weights(row.kind, mixture), chances, ids


@lru_cache(1)
def _weights(kind: str, mixture: Mixture) -> tuple[Any, Any]:
    """(w1, scales), (w2, scales) of `benchmarks.experts` for a kind of rows."""
    kind = QUANTIZED[kind][0] if kind in QUANTIZED else "fp8" if kind.endswith(("fp8", "blocks")) else "bf16"
    model = experts.Model(mixture.experts, mixture.top_k, mixture.hidden, mixture.width, kind, 0.0)
    first, second = _sizes(mixture)
    return experts.weights(model, *first), experts.weights(model, *second)


def _sizes(mixture: Mixture) -> tuple[tuple[int, int], tuple[int, int]]:
    """[N, K] of the products of an expert."""
    return (2 * mixture.width, mixture.hidden), (mixture.hidden, mixture.width)


def _product(row: Row, ids: Any) -> tuple[Any, ...]:
    """The arguments of `grouped_gemm`, or of `grouped_gemm_packed`, for a product of a layer."""
    mixture, first = row.mixture, row.number == 1
    b, scales = _weights(row.kind, mixture)[row.number - 1]
    n, k = _sizes(mixture)[row.number - 1]
    rows = row.tokens if first else row.m
    a = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    a_scales = None
    if row.is_fp8:
        by_blocks = row.kind == "grouped_blocks"
        a, a_scales = a.to(torch.float8_e4m3fn), torch.rand(rows, k // _BLOCK if by_blocks else 1, device="cuda") + 0.5
        scales = scales if by_blocks else torch.rand(mixture.experts, n, device="cuda") + 0.5
    out = torch.empty(row.m, n // 2 if first else n, dtype=torch.bfloat16, device="cuda")
    lists = pyops.moe_align(ids, row.block_size, mixture.experts)
    activation, top_k = ("silu", mixture.top_k) if first else ("none", 1)
    if row.kind in QUANTIZED:
        terms = None, None, top_k, row.block_size, activation
        return out, a, b, scales, None, *lists, *terms, QUANTIZED[row.kind][1]
    return out, a, b, *lists, None, a_scales, scales, None, top_k, row.block_size, activation


def measure(row: Row) -> dict[str, float]:
    """{contender: microseconds}."""
    sets = [operands(row) for _ in range(products.num_sets(num_bytes(row)))]
    return products.in_turn(str(row), contenders(row.kind), sets)


def contenders(kind: str) -> dict[str, Callable[..., Call]]:
    """{name: a function from operands to a call}."""
    if kind in PRODUCTS:
        op = pyops.grouped_gemm_packed if kind in QUANTIZED else pyops.grouped_gemm
        return {"pyops": lambda *args: partial(op, *args)}
    found: dict[str, Callable[..., Call]] = {"pyops": _ours}
    try:
        importlib.import_module("vllm.model_executor.layers.fused_moe")
        found["vLLM"] = _vllm
    except Exception as error:
        print(f"{kind}: vLLM: {reason(error)}", flush=True)
    if kind == "experts" and hasattr(torch, "_grouped_mm"):
        found["torch"] = _torch
    return found


def _ours(x: Any, w1: Any, w2: Any, chances: Any, ids: Any) -> Call:
    blocks, fp8 = [_BLOCK, _BLOCK], "float8_e4m3fn"
    config = None if w1[1] is None else pyops.FusedMoEQuantConfig(fp8, False, blocks, w1[1], w2[1])
    return partial(pyops.fused_experts, x, w1[0], w2[0], chances, ids, quant_config=config)


def _vllm(x: Any, w1: Any, w2: Any, chances: Any, ids: Any) -> Call:
    """vLLM's function of Triton kernels."""
    layer = importlib.import_module("vllm.model_executor.layers.fused_moe")
    given = {}
    if w1[1] is not None:
        configs = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
        scales = {"w1_scale": w1[1], "w2_scale": w2[1], "block_shape": [_BLOCK, _BLOCK]}
        given["quant_config"] = configs.fp8_w8a8_moe_quant_config(**scales)
    return partial(layer.fused_experts, x, w1[0], w2[0], chances, ids, **given)


def _torch(x: Any, w1: Any, w2: Any, chances: Any, ids: Any) -> Call:
    """Rows sorted by expert, two calls of `torch._grouped_mm`, and a sum."""
    first, second = w1[0].transpose(1, 2), w2[0].transpose(1, 2)
    numbers = torch.arange(len(w1[0]), dtype=torch.int32, device=x.device)

    def call() -> None:
        sorted_ids, order = ids.flatten().sort(stable=True)
        ends, tokens = torch.searchsorted(sorted_ids, numbers, right=True).int(), order // ids.shape[1]
        gate, up = torch._grouped_mm(x[tokens], first, offs=ends).chunk(2, 1)
        found = torch._grouped_mm(torch.nn.functional.silu(gate) * up, second, offs=ends)
        torch.zeros_like(x).index_add_(0, tokens, (found * chances.flatten()[order, None]).to(x.dtype))

    return call
