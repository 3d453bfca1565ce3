"""Time prefill and decode attention against torch's, and MLA decode; contenders alternate within one process.

python -m benchmarks.attention
python -m benchmarks.attention prompts:bf16:16x2048:32/8x128 prompts:fp8:1x8192:32/8x128:64 mla:fp8:64x4096:128
python -m benchmarks.attention decode:bf16:64x2048:32/8x128 decode:bf16:64x1-16384:32/8x128

A row is one of these, and may end in :BLOCK, the slots of a cache block (default 16; for MLA 64):

prompts:CACHE:SEQUENCESxTOKENS:HEADS/KV_HEADSxHEAD_SIZE    causal prefill; HEAD_SIZE/VALUE_SIZE for shorter values
capped:...                                                 the same with a logits soft cap of 30
ragged:...                                                 prefill without a cache
full:...                                                   the same without a causal mask
decode:...                                                 one query token per sequence
mixed:CACHE:SEQUENCESxTOKENS+NEW:HEADS                     decode rows and a prompt of NEW tokens: one call, two calls
mla:CACHE:SEQUENCESxTOKENS:HEADS                           MLA decode
sparse:CACHE:TOKENSxTOPK:HEADS:SLOTS                       sparse MLA of query tokens with TOPK of SLOTS slots each; no
                                                           slot twice without :SLOTS

CACHE is bf16, fp8, e4m3 (prefill: fp8 cache and e4m3 queries) or, for MLA, ds_mla with 656 bytes per token. Queries are
bf16 otherwise. TOKENS of 256+32768 means 256 new tokens after 32768 cached ones, for MLA, too. For decode and MLA,
TOKENS of 1-16384 means evenly spaced lengths from 1 to 16384. Rivals are those of `benchmarks.attention_rivals`;
torch's attention reads contiguous keys and values.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import pyops

from . import attention_calls, attention_rivals
from .products import in_turn
from .timing import Call

ROWS = (
    *(f"prompts:bf16:{one}:32/8x128" for one in ("1x8192", "16x2048", "64x512", "1x32768")),
    *(f"prompts:bf16:{one}" for one in ("1x8192:32/8x64", "16x2048:32/8x64", "1x8192:16/4x256", "16x2048:16/4x256")),
    "prompts:fp8:1x8192:32/8x128",
    *(f"prompts:e4m3:{one}" for one in ("1x8192:32/8x128", "16x2048:32/8x128", "1x8192:32/8x64", "1x8192:16/4x256")),
    "prompts:bf16:1x256+32768:32/8x128",
    *(f"prompts:bf16:1x4096:128/128x{size}" for size in ("192/128", "192")),
    *(f"capped:bf16:{one}" for one in ("1x8192:32/8x128", "16x2048:32/8x128", "1x8192:32/8x64", "1x8192:16/4x256")),
    *(f"ragged:bf16:{one}:32/8x128" for one in ("1x8192", "16x2048", "256x128")),
    *(f"ragged:bf16:1x4096:{heads}/{heads}x192/128" for heads in (16, 128)),
    *(f"full:bf16:{num_seqs}x1024:16/16x{size}" for num_seqs in (1, 16) for size in (72, 80)),
    *(f"decode:bf16:{one}:32/8x128" for one in ("16x4096", "64x2048", "256x1024", "64x8192", "64x1-16384")),
    *(f"decode:bf16:{one}" for one in ("33x3000:71/1x64", "17x5000:48/1x128", "40x3000:48/4x128")),
    *(f"prompts:bf16:64x{one}:32/8x128" for one in ("4+2044", "8+2040")),
    *(f"mixed:bf16:{one}:32/8x128" for one in ("64x2048+512", "256x1024+2048")),
    *(f"mla:{cache}:64x4096:{heads}" for cache in ("bf16", "fp8", "e4m3", "ds_mla") for heads in (128, 16)),
    "mla:bf16:64x4096:128:16",
    *(f"mla:{cache}:64x4+4092:16" for cache in ("bf16", "fp8")),
    *(f"sparse:{cache}:128x2048:128" for cache in ("bf16", "fp8", "ds_mla")),
    *(f"sparse:{cache}:4096x2048:128:32768" for cache in ("bf16", "ds_mla")),
    *(f"mla:bf16:{one}" for one in ("33x1-16000:128", "128x1-8000:16", "1x500:128", "7x500:128", "33x3000:128")),
    *(f"mla:e4m3:{one}" for one in ("8x2-21412:64", "1x40000:128", "33x3000:128", "7x4000:128", "27x13029:32")),
)
_SETS = 2  # sets of operands, each larger than L2, between which calls alternate
_SOFT_CAP = 30.0
_MLA_PAGE = 64  # slots of a page


def _lengths(num_seqs: int, shortest: int, longest: int) -> list[int]:
    """Evenly spaced lengths in any order."""
    steps = max(1, num_seqs - 1)
    lengths = [round(shortest + i * (longest - shortest) / steps) for i in range(num_seqs)]
    return random.sample(lengths, num_seqs)


def _prompts(cache: str, num_seqs: int, new: int, heads: Sequence[int], block: int, cached: int) -> dict[str, Any]:
    return attention_calls.paged(cache, [new + cached] * num_seqs, [new] * num_seqs, heads, block)


def _capped(*sizes: Any) -> dict[str, Any]:
    return _prompts(*sizes) | {"logits_soft_cap": _SOFT_CAP}


def _ragged(cache: str, num_seqs: int, tokens: int, heads: Sequence[int], *_: int, causal: bool) -> dict[str, Any]:
    return attention_calls.ragged([tokens] * num_seqs, heads, causal)


def _decode(cache: str, num_seqs: int, tokens: int, heads: Sequence[int], block: int, shortest: int) -> dict[str, Any]:
    return attention_calls.decode(cache, _lengths(num_seqs, shortest, tokens), heads, block)


def _mixed(cache: str, num_seqs: int, tokens: int, heads: Sequence[int], block: int, new: int) -> dict[str, Any]:
    """Decode rows of `tokens` tokens and a new prompt."""
    return attention_calls.paged(cache, [tokens] * num_seqs + [new], [1] * num_seqs + [new], heads, block)


def _mla(cache: str, num_seqs: int, tokens: int, num_heads: int, page: int, shortest: int, new: int) -> dict[str, Any]:
    return attention_calls.mla(cache, _lengths(num_seqs, shortest, tokens), num_heads, page, new)


def _sparse(cache: str, num_tokens: int, topk: int, num_heads: int, slots: int) -> dict[str, Any]:
    return attention_calls.sparse_mla(cache, num_tokens, topk, num_heads, slots, _MLA_PAGE)


# {kind: a function that makes the arguments of its op by name, from the numbers of a row}
_MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "prompts": _prompts,
    "capped": _capped,
    "ragged": partial(_ragged, causal=True),
    "full": partial(_ragged, causal=False),
    "decode": _decode,
    "mixed": _mixed,
    "mla": _mla,
    "sparse": _sparse,
}


_OPS: dict[str, Any] = {
    "decode": pyops.paged_attention_v1,
    "ragged": pyops.attention_varlen,
    "full": pyops.attention_varlen,
    "mla": pyops.sm100_cutlass_mla_decode,
    "sparse": pyops.sparse_mla_attention,
}


def _two_calls(call: dict[str, Any]) -> Call:
    """The batch of `mixed` as two calls: decode attention, and prefill of the prompt."""
    rows = len(call["seq_lens"]) - 1
    of_rows, of_seqs = ("out", "query"), ("block_tables", "seq_lens")
    decoded = call | {name: call[name][:rows] for name in (*of_rows, *of_seqs)}
    prompt = call | {name: call[name][rows:] for name in (*of_rows, *of_seqs)}
    prompt["cu_seqlens_q"] = call["cu_seqlens_q"][rows:] - rows
    decoded |= {"max_seq_len": int(decoded["seq_lens"].max()), "alibi_slopes": None}
    del decoded["cu_seqlens_q"]

    def attend() -> None:
        pyops.paged_attention_v1(**decoded)
        pyops.paged_attention_varlen(**prompt)

    return attend


def contenders(kind: str) -> dict[str, attention_rivals.Rival]:
    """{name: a function from arguments to a call}."""
    op = _OPS.get(kind, pyops.paged_attention_varlen)
    rivals = {"two calls": _two_calls} if kind == "mixed" else attention_rivals.RIVALS[op.__name__]
    return {"pyops": lambda call: partial(op, **call), **rivals}


def parse(row: str) -> tuple[str, str, list[Any], float]:
    """Parse a row: (kind, cache, arguments for the function that makes the operands, FLOPs)."""
    kind, cache, sequences, heads, *block = row.split(":")
    count, _, length = sequences.partition("x")
    shortest, is_mixed, longest = length.partition("-")
    new, _, behind = (longest or length).partition("+")
    num_seqs, tokens, cached = int(count), int(new), int(behind or 0)
    if kind == "sparse":
        operations = 2.0 * num_seqs * tokens * int(heads) * (2 * attention_calls.LATENT + attention_calls.ROPE)
        return kind, cache, [num_seqs, tokens, int(heads), int(block[0]) if block else num_seqs * tokens], operations
    if kind == "mla":
        query_tokens, tokens = tokens if cached else 1, tokens + cached
        num_heads, least = int(heads), int(shortest) if is_mixed else tokens
        operations = 1.0 * num_seqs * (least + tokens) * num_heads * (2 * attention_calls.LATENT + attention_calls.ROPE)
        sizes: list[Any] = [num_seqs, tokens, num_heads, int(block[0]) if block else _MLA_PAGE, least, query_tokens]
        return kind, cache, sizes, operations * query_tokens
    num_heads, num_kv_heads, head_size, *value_size = map(int, heads.replace("/", "x").split("x"))
    sizes_of_heads = num_heads, num_kv_heads, head_size, *(value_size or [head_size])
    elements = num_heads * sum(sizes_of_heads[2:])  # elements of K and V per key token, over all query heads
    if kind == "decode":
        least = int(shortest) if is_mixed else tokens
        operations = 1.0 * num_seqs * (least + tokens) * elements
        sizes = [num_seqs, tokens, sizes_of_heads, int(block[0]) if block else 16, least]
        return kind, cache, sizes, operations
    operations = 1.0 * num_seqs * tokens * (2 * cached + tokens) * elements
    operations *= 2 if kind == "full" else 1
    if kind == "mixed":
        operations = (2.0 * num_seqs * tokens + cached * cached) * elements
    sizes = [num_seqs, tokens, sizes_of_heads, int(block[0]) if block else 16, cached]
    return kind, cache, sizes, operations


def measure(row: str) -> dict[str, float]:
    """{contender: median time in microseconds}. A contender that fails is reported and left out."""
    kind, cache, sizes, _ = parse(row)
    with torch.device("cuda"):
        sets = [(_MAKERS[kind](cache, *sizes),) for _ in range(_SETS)]
    return in_turn(row, contenders(kind), sets)


def main(arguments: Sequence[str] | None = None) -> None:
    for row in arguments or ROWS:
        operations = parse(row)[3]
        found = (f"{name} {us:.1f} us, {operations / us * 1e-6:.0f} TFLOP/s" for name, us in measure(row).items())
        print(f"{row}: {'; '.join(found)}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
