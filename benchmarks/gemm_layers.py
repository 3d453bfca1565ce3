"""GEMMs of published models at random M: the kinds of `benchmarks.models` by `linear` and by `benchmarks.products`.

A row is an M drawn log-uniformly from 1 to 8192, and the [N, K] of a layer of one of `MODELS` with tensor parallel 1,
2, 4 or 8. Kinds are those of `benchmarks.products`; two more by `linear`: bias, and gated, the product and
`silu_and_mul` in one kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import pyops

from . import drawn, packed_products, products
from .timing import Call

KINDS = "bf16", "bias", "gated", "fp8", "blocks", "int8", "w4"
PARTS = 1, 2, 4, 8  # GPUs of tensor parallelism
_MAX_M = 8192
_MAX_BYTES = 2 << 30  # most bytes of a weight; larger draws are drawn again


@dataclass(frozen=True)
class Model:
    """The sizes of a published model's layers: hidden size, query heads, key heads, head size, MLP, vocabulary.

    `extra` holds further weights (name, N, K), not divided by tensor parallelism: MLA projections, routers.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocab: int
    extra: tuple[tuple[str, int, int], ...] = ()

    def layers(self, parts: int) -> dict[str, tuple[int, int]]:
        """{layer: (N, K)} of one of `parts` GPUs."""
        queries, keys = self.heads * self.head_size, max(1, self.kv_heads // parts) * self.head_size
        found = {
            "qkv": (queries // parts + 2 * keys, self.hidden),
            "o": (self.hidden, queries // parts),
            "gate_up": (2 * self.mlp // parts, self.hidden),
            "down": (self.hidden, self.mlp // parts),
            "head": (self.vocab // parts, self.hidden),
        }
        return found | {name: (n, k) for name, n, k in self.extra}


_DEEPSEEK = (
    ("q_a", 1536, 7168),
    ("kv_a", 576, 7168),
    ("q_b", 24576, 1536),
    ("kv_b", 32768, 512),
    ("router", 256, 7168),
)
MODELS = {
    "Llama 2 7B": Model(4096, 32, 32, 128, 11008, 32000),
    "Llama 2 13B": Model(5120, 40, 40, 128, 13824, 32000),
    "Llama 3.2 1B": Model(2048, 32, 8, 64, 8192, 128256),
    "Llama 3.2 3B": Model(3072, 24, 8, 128, 8192, 128256),
    "Llama 3.1 8B": Model(4096, 32, 8, 128, 14336, 128256),
    "Llama 3.1 70B": Model(8192, 64, 8, 128, 28672, 128256),
    "Llama 3.1 405B": Model(16384, 128, 8, 128, 53248, 128256),
    "Mistral 7B": Model(4096, 32, 8, 128, 14336, 32000),
    "Mistral Small 24B": Model(5120, 32, 8, 128, 32768, 131072),
    "Mixtral 8x7B": Model(4096, 32, 8, 128, 14336, 32000, (("router", 8, 4096),)),
    "Qwen2.5 0.5B": Model(896, 14, 2, 64, 4864, 151936),
    "Qwen2.5 7B": Model(3584, 28, 4, 128, 18944, 152064),
    "Qwen2.5 14B": Model(5120, 40, 8, 128, 13824, 152064),
    "Qwen2.5 32B": Model(5120, 40, 8, 128, 27648, 152064),
    "Qwen3 0.6B": Model(1024, 16, 8, 128, 3072, 151936),
    "Qwen3 4B": Model(2560, 32, 8, 128, 9728, 151936),
    "Qwen3 8B": Model(4096, 32, 8, 128, 12288, 151936),
    "Qwen3 30B-A3B": Model(2048, 32, 4, 128, 768, 151936, (("router", 128, 2048),)),
    "Qwen3 32B": Model(5120, 64, 8, 128, 25600, 151936),
    "Gemma 2 9B": Model(3584, 16, 8, 256, 14336, 256000),
    "Gemma 3 27B": Model(5376, 32, 16, 128, 21504, 262208),
    "Phi 3 mini": Model(3072, 32, 32, 96, 8192, 32064),
    "Phi 4": Model(5120, 40, 10, 128, 17920, 100352),
    "gpt-oss 20B": Model(2880, 64, 8, 64, 2880, 201088, (("router", 32, 2880),)),
    "Falcon 7B": Model(4544, 71, 1, 64, 18176, 65024),
    "Command R": Model(8192, 64, 64, 128, 22528, 256000),
    "DeepSeek V3": Model(7168, 128, 128, 128, 18432, 129280, _DEEPSEEK),
    "OLMo 2 7B": Model(4096, 32, 32, 128, 11008, 100352),
}


@dataclass(frozen=True)
class Row:
    """One GEMM of a layer."""

    kind: str
    m: int
    n: int
    k: int
    layer: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.m}x{self.n}x{self.k}"


def draw(kind: str, count: int, seed: int) -> list[Row]:
    """`count` different rows of a kind that its kernels take."""

    def one(generator: random.Random) -> Row | None:
        name, parts = generator.choice(list(MODELS)), generator.choice(PARTS)
        layer, (n, k) = generator.choice(list(MODELS[name].layers(parts).items()))
        row = Row(kind, drawn.log_uniform(generator, _MAX_M), n, k, f"{name} {layer} tp{parts}")
        return row if _is_taken(row) and n * k * 2 <= _MAX_BYTES else None

    return drawn.draw(kind, count, seed, one)


def _is_taken(row: Row) -> bool:
    """Whether every contender of the kind takes the sizes."""
    if row.kind in packed_products.KINDS:
        return row.n % 256 == 0 and row.k % 128 == 0 and row.n >= 256
    whole = 128 if row.kind == "blocks" else 16
    gated = row.kind != "gated" or ("gate_up" in row.layer and row.n % 32 == 0)
    return row.n % whole == 0 and row.k % whole == 0 and gated


def operands(row: Row) -> tuple[Any, ...]:
    """What each contender is called with."""
    if row.kind not in ("bias", "gated"):
        return products.operands(row.kind, row.m, row.n, row.k)
    out = torch.empty(row.m, row.n // (2 if row.kind == "gated" else 1), dtype=torch.bfloat16, device="cuda")
    a, b = (torch.randn(size, row.k, dtype=torch.bfloat16, device="cuda") for size in (row.m, row.n))
    return out, a, b, torch.randn(row.n, dtype=torch.bfloat16, device="cuda")


def contenders(kind: str) -> dict[str, Callable[..., Call]]:
    """{name: a function that makes a call of operands}."""
    if kind == "bias":
        return {
            "pyops": lambda out, a, b, bias: partial(pyops.linear, out, a, b, bias),
            "cuBLAS": lambda out, a, b, bias: partial(torch.addmm, bias, a, b.t(), out=out),
        }
    if kind == "gated":
        return {
            "pyops": lambda out, a, b, _: partial(pyops.linear, out, a, b, None, "silu_and_mul"),
            "cuBLAS + silu_and_mul": lambda out, a, b, _: _apart(out, a, b),
        }
    return products.contenders(kind)


def _apart(out: Any, a: Any, b: Any) -> Call:
    """The product and the activation as two kernels."""
    wide = torch.empty(len(a), len(b), dtype=a.dtype, device=a.device)

    def call() -> None:
        torch.matmul(a, b.t(), out=wide)
        pyops.silu_and_mul(out, wide)

    return call


def measure(row: Row) -> dict[str, float]:
    """{contender: microseconds}."""
    sets = [operands(row) for _ in range(products.num_sets(num_bytes(row)))]
    found = contenders(row.kind)
    if row.kind not in packed_products.KINDS:
        found = products.agreeing(row, found, sets[0])
    return products.in_turn(str(row), found, sets)


def num_bytes(row: Row) -> int:
    """Bytes of the operands."""
    return products.num_bytes("bf16" if row.kind in ("bias", "gated") else row.kind, row.m, row.n, row.k)
