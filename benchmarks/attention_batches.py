"""The kinds of `benchmarks.models` with attention: batches of mixed lengths with the heads of published models.

decode is `paged_attention_v1`, prefill is `paged_attention_varlen`, and mla is `sm100_cutlass_mla_decode`. Kinds ending
in fp8 have an fp8 cache, those in e4m3 also queries of e4m3, and mla_656 has the format of 656 bytes per token. A row
draws a model and its GPUs of tensor parallelism, the slots of a block, up to 256 sequences and a longest one of up to
131072 tokens. The sequences of a batch have equal lengths, lengths spread evenly, or lengths with many short ones. A
prefill is of whole prompts, of their last tokens after cached ones, of a few draft tokens, or of decode rows among
prompts.
Rivals: `benchmarks.attention_rivals`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import pyops

from . import attention_calls, attention_rivals, drawn, products
from .gemm_layers import MODELS, PARTS

KINDS = "decode", "decode_fp8", "prefill", "prefill_fp8", "prefill_e4m3", "mla", "mla_fp8", "mla_e4m3", "mla_656"
BLOCKS = 8, 16, 32, 64, 128
LATENT_BLOCKS = *BLOCKS, 64, 64, 64  # half of the rows of MLA have pages of 64 slots, as FlashMLA alone takes them
MAX_LENGTH = 131072
MAX_SEQS = 256
_MAX_CACHE = 4 << 30  # most bytes of the caches of a row; larger draws are drawn again
_MAX_OPERATIONS = 2e13  # most of a row, about 40 ms
_CHUNK = 8192  # most new tokens of a sequence after cached ones
_DRAFTS = 8  # most tokens of a sequence that verifies drafts
# Largest difference of a rival from pyops in the 2-norm: roundings of bf16, and of weights and queries in fp8.
_ALLOWED, _ALLOWED_FP8 = 0.02, 0.1


@dataclass(frozen=True)
class Heads:
    """The attention of a model: query heads, KV heads, their size, and options of the ops."""

    heads: int
    kv_heads: int
    size: int
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


HEADS = {
    name: Heads(one.heads, one.kv_heads, one.head_size) for name, one in MODELS.items() if "DeepSeek" not in name
} | {
    "Falcon 40B": Heads(128, 8, 64),
    "Gemma 2 9B": Heads(16, 8, 256, soft_cap=50.0),
    "Gemma 2 9B, local": Heads(16, 8, 256, 4096, 50.0),
    "Gemma 3 27B, local": Heads(32, 16, 128, 1024),
    "Gemma 4 12B, global": Heads(16, 1, 512),
    "Gemma 4 26B-A4B, global": Heads(16, 2, 512),
    "gpt-oss 20B": Heads(64, 8, 64, sinks=True),
    "gpt-oss 20B, local": Heads(64, 8, 64, 128, sinks=True),
    "Granite 20B code": Heads(48, 1, 128),
    "Mistral 7B v0.1": Heads(32, 8, 128, 4096),
    "MPT 30B": Heads(64, 64, 112),
    "Nemotron 4 340B": Heads(96, 8, 192),
    "Phi 2": Heads(32, 32, 80),
    "StableLM 2 12B": Heads(32, 8, 160),
    "StarCoder2 15B": Heads(48, 4, 128, 4096),
}
LATENT_HEADS = {"DeepSeek V2 Lite": 16, "DeepSeek V3": 128, "GLM 4.7 Flash": 20, "Kimi K2": 64}


@dataclass(frozen=True)
class Row:
    """A batch.

    Attributes:
        lengths: tokens of each sequence, with the new ones.
        new: query tokens of each sequence.
        block: slots of a block of the cache.
    """

    kind: str
    layer: str
    heads: Heads
    block: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]

    def __str__(self) -> str:
        of = self.heads
        heads = str(of.heads) if self.op is pyops.sm100_cutlass_mla_decode else f"{of.heads}/{of.kv_heads}x{of.size}"
        words = [f"{self.kind}:{len(self.lengths)} of {_range(self.lengths)}", f"{heads}, blocks of {self.block}"]
        if self.op is pyops.paged_attention_varlen:
            words.insert(1, f"{_range(self.new)} new")
        words += [f"window {of.window}"] * bool(of.window) + [f"cap {of.soft_cap:.0f}"] * bool(of.soft_cap)
        return ", ".join(words + ["sinks"] * of.sinks)

    @property
    def op(self) -> Any:
        word = self.kind.partition("_")[0]
        ops = {"decode": pyops.paged_attention_v1, "prefill": pyops.paged_attention_varlen}
        return ops.get(word, pyops.sm100_cutlass_mla_decode)

    @property
    def cache(self) -> str:
        """The cache as `attention_calls` names it."""
        word = self.kind.partition("_")[2]
        return {"": "bf16", "656": "ds_mla"}.get(word, word)


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low}-{high}"


def draw(kind: str, count: int, seed: int) -> list[Row]:
    """`count` different rows of a kind."""
    return drawn.draw(kind, count, seed, partial(_row, kind))


def _row(kind: str, generator: random.Random) -> Row | None:
    if kind.startswith("mla"):
        layer, parts = generator.choice(list(LATENT_HEADS)), generator.choice(PARTS)
        heads = Heads(max(1, LATENT_HEADS[layer] // parts), 1, attention_calls.LATENT + attention_calls.ROPE)
    else:
        layer, parts = generator.choice(list(HEADS)), generator.choice(PARTS)
        of = HEADS[layer]
        kv_heads = max(1, of.kv_heads // parts)
        heads = Heads(
            max(1, of.heads // parts) // kv_heads * kv_heads, kv_heads, of.size, of.window, of.soft_cap, of.sinks
        )
    block = generator.choice(LATENT_BLOCKS if kind.startswith("mla") else BLOCKS)
    lengths = _lengths(generator)
    new = _new(generator, lengths) if kind.startswith("prefill") else (1,) * len(lengths)
    row = Row(kind, f"{layer} tp{parts}", heads, block, lengths, new)
    return row if num_bytes(row) <= _MAX_CACHE and operations(row) <= _MAX_OPERATIONS else None


def _lengths(generator: random.Random) -> tuple[int, ...]:
    """Equal lengths, evenly spread ones, or ones with each doubling equally likely."""
    count, longest = drawn.log_uniform(generator, MAX_SEQS), drawn.log_uniform(generator, MAX_LENGTH)
    how = generator.choice(("equal", "even", "doublings"))
    if how == "equal":
        return (longest,) * count
    if how == "even":
        return tuple(generator.randint(1, longest) for _ in range(count))
    return tuple(drawn.log_uniform(generator, longest) for _ in range(count))


def _new(generator: random.Random, lengths: Sequence[int]) -> tuple[int, ...]:
    """Query tokens: whole prompts, the last tokens after cached ones, drafts, or decode rows among whole prompts."""
    most = generator.choice((MAX_LENGTH, drawn.log_uniform(generator, _CHUNK), generator.randint(2, _DRAFTS), 0))
    if most:
        return tuple(min(length, most) for length in lengths)
    return tuple(1 if generator.random() < 0.8 else min(length, _CHUNK) for length in lengths)


def num_bytes(row: Row) -> int:
    """Bytes of the caches."""
    slots = sum(-(-length // row.block) * row.block for length in row.lengths)
    of, itemsize = row.heads, 2 if row.cache == "bf16" else 1
    if row.op is pyops.sm100_cutlass_mla_decode:
        return slots * (attention_calls.DS_MLA_BYTES if row.cache == "ds_mla" else of.size * itemsize)
    return 2 * slots * of.kv_heads * of.size * itemsize


def operations(row: Row) -> float:
    """Operations of the two products without a window."""
    of = row.heads
    width = 2 * of.size if row.op is not pyops.sm100_cutlass_mla_decode else of.size + attention_calls.LATENT
    return 2.0 * of.heads * width * sum(n * (t - n / 2) for n, t in zip(row.new, row.lengths, strict=True))


def operands(row: Row) -> dict[str, Any]:
    """The arguments of the op by name, on torch's default device."""
    of = row.heads
    if row.op is pyops.sm100_cutlass_mla_decode:
        return attention_calls.mla(row.cache, row.lengths, of.heads, row.block)
    sizes, options = (of.heads, of.kv_heads, of.size, of.size), _options(of)
    if row.op is pyops.paged_attention_v1:
        return attention_calls.decode(row.cache, row.lengths, sizes, row.block, **options)
    return attention_calls.paged(row.cache, row.lengths, row.new, sizes, row.block, **options)


def _options(of: Heads) -> dict[str, Any]:
    found: dict[str, Any] = {"sliding_window": of.window, "logits_soft_cap": of.soft_cap}
    return found | ({"sinks": True} if of.sinks else {})


def contenders(row: Row) -> drawn.Contenders:
    """{name: a function from the operands to a call}."""
    return {"pyops": lambda call: partial(row.op, **call), **attention_rivals.RIVALS[row.op.__name__]}


def measure(row: Row) -> dict[str, float]:
    """{contender: microseconds}."""
    with torch.device("cuda"):
        sets = [(operands(row),) for _ in range(products.num_sets(num_bytes(row)))]
    allowed = _ALLOWED if row.cache == "bf16" else _ALLOWED_FP8
    return products.in_turn(str(row), drawn.agreeing(row, contenders(row), *sets[0], "out", allowed), sets)
