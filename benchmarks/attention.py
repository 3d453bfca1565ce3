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

CACHE is bf16, fp8, e4m3 (prefill: fp8 cache and e4m3 queries) or, for MLA, ds_mla with 656 bytes per token. Queries are
bf16 otherwise. TOKENS of 256+32768 means 256 new tokens after 32768 cached ones. For decode and MLA, TOKENS of 1-16384
means evenly spaced lengths from 1 to 16384. torch's attention (prefill: cuDNN and FlashAttention; decode and new tokens
after cached ones: torch's choice) reads contiguous keys and values; it is timed only for equal lengths.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import pyops

from .rivals import reason
from .timing import QUICK, Call, gpu_us

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
    *(f"mla:{cache}:64x4096:{heads}" for cache in ("bf16", "fp8", "ds_mla") for heads in (128, 16)),
    "mla:bf16:64x4096:128:16",
    *(f"mla:bf16:{one}" for one in ("33x1-16000:128", "128x1-8000:16", "1x500:128", "7x500:128", "33x3000:128")),
)
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "e4m3": torch.float8_e4m3fn}
_SETS = 2  # sets of operands, each larger than L2, between which calls alternate
_TURNS = 3
_SOFT_CAP = 30.0
_LATENT, _ROPE, _DS_MLA_BYTES = 512, 64, 656


def _randn(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def _tables(num_seqs: int, tokens: int, block: int) -> Any:
    """Block tables, with blocks in random order."""
    blocks = -(-tokens // block)
    return torch.randperm(num_seqs * blocks, device="cuda").int().view(num_seqs, blocks)


def prompts(cache: str, num_seqs: int, new: int, heads: tuple[int, ...], block: int, cached: int = 0) -> dict[str, Any]:
    """The arguments of `paged_attention_varlen`, by name, for `new` tokens after `cached` ones."""
    num_heads, num_kv_heads, *sizes = heads
    tokens = new + cached
    tables = _tables(num_seqs, tokens, block)
    caches = [_randn(tables.numel(), block, num_kv_heads, size).to(_DTYPES[cache]) for size in sizes]
    query = _randn(num_seqs * new, num_heads, sizes[0])
    return {
        "out": query.new_empty(num_seqs * new, num_heads, sizes[1]),
        "query": query.to(_DTYPES[cache]) if cache == "e4m3" else query,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "num_kv_heads": num_kv_heads,
        "scale": sizes[0] ** -0.5,
        "block_tables": tables,
        "seq_lens": torch.full((num_seqs,), tokens, dtype=torch.int32, device="cuda"),
        "cu_seqlens_q": torch.arange(0, num_seqs * new + 1, new, dtype=torch.int32, device="cuda"),
        "block_size": block,
        "kv_cache_dtype": "auto" if cache == "bf16" else "fp8",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }


def ragged(
    cache: str, num_seqs: int, tokens: int, heads: tuple[int, ...], *_: int, causal: bool = True
) -> dict[str, Any]:
    """The arguments of `attention_varlen`, by name."""
    num_heads, num_kv_heads, *sizes = heads
    query = _randn(num_seqs * tokens, num_heads, sizes[0])
    key, value = (_randn(num_seqs * tokens, num_kv_heads, size) for size in sizes)
    starts = torch.arange(0, num_seqs * tokens + 1, tokens, dtype=torch.int32, device="cuda")
    return {
        "out": query.new_empty(num_seqs * tokens, num_heads, sizes[1]),
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "scale": sizes[0] ** -0.5,
        "causal": causal,
    }


def _lengths(num_seqs: int, shortest: int, longest: int) -> Any:
    """Evenly spaced lengths in any order."""
    lengths = torch.linspace(shortest, longest, num_seqs, device="cuda").round().int()
    return lengths[torch.randperm(num_seqs, device="cuda")]


def decode(cache: str, num_seqs: int, tokens: int, heads: tuple[int, ...], block: int, shortest: int) -> dict[str, Any]:
    """The arguments of `paged_attention_v1`, by name, for lengths from `shortest` to `tokens`, in any order."""
    call = prompts(cache, num_seqs, 1, heads, block, tokens - 1)
    changed = {
        "seq_lens": _lengths(num_seqs, shortest, tokens),
        "max_seq_len": tokens,
        "alibi_slopes": None,
    }
    del call["cu_seqlens_q"]
    return call | changed


def mixed(cache: str, num_seqs: int, tokens: int, heads: tuple[int, ...], block: int, new: int) -> dict[str, Any]:
    """The arguments of `paged_attention_varlen`, by name, for decode rows of `tokens` tokens and a new prompt."""
    call = prompts(cache, num_seqs + 1, 1, heads, block, max(tokens, new) - 1)
    index = {"dtype": torch.int32, "device": "cuda"}
    query = _randn(num_seqs + new, heads[0], heads[2])
    return call | {
        "out": query.new_empty(num_seqs + new, heads[0], heads[3]),
        "query": query,
        "seq_lens": torch.tensor([tokens] * num_seqs + [new], **index),
        "cu_seqlens_q": torch.tensor([*range(num_seqs + 1), num_seqs + new], **index),
    }


def mla(cache: str, num_seqs: int, tokens: int, num_heads: int, page: int, shortest: int) -> dict[str, Any]:
    """The arguments of `sm100_cutlass_mla_decode`, by name, for lengths from `shortest` to `tokens`, in any order."""
    table = _tables(num_seqs, tokens, page)
    if cache == "ds_mla":  # random fp8 values; scales around 1e-4; RoPE keys equally small
        entries = torch.randint(0, 60, (table.numel(), page, _DS_MLA_BYTES), dtype=torch.uint8, device="cuda")
    else:
        entries = _randn(table.numel(), page, _LATENT + _ROPE).to(_DTYPES[cache])
    return {
        "out": torch.empty(num_seqs, num_heads, _LATENT, dtype=torch.bfloat16, device="cuda"),
        "lse": torch.empty(num_seqs, num_heads, device="cuda"),
        "q_nope": _randn(num_seqs, num_heads, _LATENT),
        "q_pe": _randn(num_seqs, num_heads, _ROPE),
        "kv_c_and_k_pe_cache": entries,
        "seq_lens": _lengths(num_seqs, shortest, tokens),
        "page_table": table,
        "workspace": None,
        "scale": (_LATENT + _ROPE) ** -0.5,
        "num_kv_splits": 0,
    }


_MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "prompts": prompts,
    "capped": prompts,
    "ragged": ragged,
    "full": partial(ragged, causal=False),
    "decode": decode,
    "mixed": mixed,
    "mla": mla,
}


_OPS: dict[str, Any] = {
    "decode": pyops.paged_attention_v1,
    "ragged": pyops.attention_varlen,
    "full": pyops.attention_varlen,
}


def _contiguous(call: dict[str, Any]) -> tuple[Any, ...]:
    """(queries, keys, values) [num_seqs, heads, tokens, head_size]."""
    if "key" in call:
        num_seqs = len(call["cu_seqlens_q"]) - 1
        rows = (call[name].unflatten(0, (num_seqs, -1)) for name in ("query", "key", "value"))
        return tuple(x.transpose(1, 2).contiguous() for x in rows)
    tables, num_seqs, tokens = call["block_tables"].long(), len(call["seq_lens"]), int(call["seq_lens"].max())
    caches = (call[name][tables].flatten(1, 2)[:, :tokens] for name in ("key_cache", "value_cache"))
    return tuple(x.transpose(1, 2).contiguous() for x in (call["query"].unflatten(0, (num_seqs, -1)), *caches))


def _sdpa(backend: Any, call: dict[str, Any]) -> Call:
    from torch.nn.attention import sdpa_kernel

    query, keys, values = _contiguous(call)
    causal = call.get("causal", True)

    def attend() -> Any:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)

    return attend


def _sdpa_of_one_token(call: dict[str, Any]) -> Call:
    """torch's attention for decode. The query heads of a KV head become query rows of one head."""
    query, keys, values = _contiguous(call)
    query = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
    return lambda: F.scaled_dot_product_attention(query, keys, values)


def _sdpa_after_cached(call: dict[str, Any]) -> Call:
    """torch's attention for new tokens after cached ones."""
    from torch.nn.attention.bias import causal_lower_right

    query, keys, values = _contiguous(call)
    mask = causal_lower_right(query.shape[2], keys.shape[2])
    return lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


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


def contenders(kind: str, cache: str, whole: bool) -> dict[str, Callable[[dict[str, Any]], Call]]:
    """{name: a function from arguments to a call}."""
    from torch.nn.attention import SDPBackend

    if kind == "mla":
        return {"pyops": lambda call: partial(pyops.sm100_cutlass_mla_decode, **call)}
    found: dict[str, Callable[[dict[str, Any]], Call]] = {
        "pyops": lambda call: partial(_OPS.get(kind, pyops.paged_attention_varlen), **call)
    }
    if kind == "mixed":
        found["two calls"] = _two_calls
    elif cache == "bf16" and whole and kind == "decode":
        found["SDPA"] = _sdpa_of_one_token
    elif cache == "bf16" and whole:
        found["cuDNN"] = partial(_sdpa, SDPBackend.CUDNN_ATTENTION)
        found["FlashAttention"] = partial(_sdpa, SDPBackend.FLASH_ATTENTION)
    elif cache == "bf16" and kind == "prompts":
        found["SDPA"] = _sdpa_after_cached
    return found


def parse(row: str) -> tuple[str, str, list[Any], float]:
    """Parse a row: (kind, cache, arguments for the function that makes the operands, FLOPs)."""
    kind, cache, sequences, heads, *block = row.split(":")
    count, _, length = sequences.partition("x")
    shortest, is_mixed, longest = length.partition("-")
    new, _, behind = (longest or length).partition("+")
    num_seqs, tokens, cached = int(count), int(new), int(behind or 0)
    if kind == "mla":
        num_heads, least = int(heads), int(shortest) if is_mixed else tokens
        operations = 1.0 * num_seqs * (least + tokens) * num_heads * (2 * _LATENT + _ROPE)
        return kind, cache, [num_seqs, tokens, num_heads, int(block[0]) if block else 64, least], operations
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
    sets = [_MAKERS[kind](cache, *sizes) for _ in range(_SETS)]
    if kind == "capped":
        sets = [one | {"logits_soft_cap": _SOFT_CAP} for one in sets]
    times: dict[str, list[float]] = {}
    for turn in range(_TURNS):
        order = list(
            contenders(
                kind, cache, kind in ("prompts", "ragged", "full", "decode") and not {"+", "-"} & set(row)
            ).items()
        )
        for name, build in order if turn % 2 == 0 else order[::-1]:
            try:
                times.setdefault(name, []).append(gpu_us([build(one) for one in sets], QUICK).median)
            except Exception as error:
                times.pop(name)
                print(f"{row}: {name}: {reason(error)}", file=sys.stderr, flush=True)
    return {name: statistics.median(found) for name, found in times.items() if found}


def main(arguments: Sequence[str] | None = None) -> None:
    for row in arguments or ROWS:
        operations = parse(row)[3]
        found = (f"{name} {us:.1f} us, {operations / us * 1e-6:.0f} TFLOP/s" for name, us in measure(row).items())
        print(f"{row}: {'; '.join(found)}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
