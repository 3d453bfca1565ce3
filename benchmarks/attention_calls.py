"""Arguments of the attention ops by name, with random operands on torch's default device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from pyops.ops.attention.prefill_problem import MAX_FEW_TOKENS

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "e4m3": torch.float8_e4m3fn}
LATENT, ROPE, DS_MLA_BYTES = 512, 64, 656
INDEXER_HEAD = 128  # elements of a head, and of a key, of sparse attention's indexer


def randn(*shape: int) -> Any:
    return torch.randn(*shape).to(torch.bfloat16)


def _e4m3(*shape: int) -> Any:
    return randn(*shape).to(torch.float8_e4m3fn)


def _ints(values: Sequence[int]) -> Any:
    return torch.tensor(list(values), dtype=torch.int32)


def _starts(counts: Sequence[int]) -> Any:
    """The row at which each sequence begins, and the end of the last."""
    return _ints((0, *accumulate(counts)))


def _tables(lengths: Sequence[int], block: int) -> tuple[Any, int]:
    """(block tables with blocks in random order, the number of blocks). A sequence has only the blocks it needs."""
    counts = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(counts)).int()
    return torch.nn.utils.rnn.pad_sequence(list(order.split(counts)), batch_first=True), sum(counts)


def paged(
    cache: str, lengths: Sequence[int], new: Sequence[int], heads: Sequence[int], block: int, **options: Any
) -> dict[str, Any]:
    """The arguments of `paged_attention_varlen`.

    Args:
        cache: bf16, fp8, or e4m3, with queries of e4m3, too.
        lengths: tokens of each sequence, with the new ones.
        new: query tokens of each sequence.
        heads: (query heads, KV heads, elements of a query and a key, elements of a value).
        block: slots of a block.
        options: further arguments; `sinks` may be True for a random tensor.
    """
    num_heads, num_kv_heads, *sizes = heads
    tables, num_blocks = _tables(lengths, block)
    caches = [randn(num_blocks, block, num_kv_heads, size).to(DTYPES[cache]) for size in sizes]
    query = randn(sum(new), num_heads, sizes[0])
    sinks = {"sinks": torch.randn(num_heads)} if options.get("sinks") else {}
    return {
        "out": query.new_empty(sum(new), num_heads, sizes[1]),
        "query": query.to(DTYPES[cache]) if cache == "e4m3" else query,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "num_kv_heads": num_kv_heads,
        "scale": sizes[0] ** -0.5,
        "block_tables": tables,
        "seq_lens": _ints(lengths),
        "cu_seqlens_q": _starts(new),
        "block_size": block,
        "kv_cache_dtype": "auto" if cache == "bf16" else "fp8",
        "k_scale": 1.0,
        "v_scale": 1.0,
        "max_query_len": max(new) if max(new) <= MAX_FEW_TOKENS else 0,
        **options,
        **sinks,
    }


def decode(cache: str, lengths: Sequence[int], heads: Sequence[int], block: int, **options: Any) -> dict[str, Any]:
    """The arguments of `paged_attention_v1`, as those of `paged`."""
    call = paged(cache, lengths, [1] * len(lengths), heads, block, **options)
    del call["cu_seqlens_q"], call["max_query_len"]
    return call | {"max_seq_len": max(lengths), "alibi_slopes": None}


def ragged(lengths: Sequence[int], heads: Sequence[int], causal: bool = True) -> dict[str, Any]:
    """The arguments of `attention_varlen`."""
    num_heads, num_kv_heads, *sizes = heads
    query = randn(sum(lengths), num_heads, sizes[0])
    key, value = (randn(sum(lengths), num_kv_heads, size) for size in sizes)
    return {
        "out": query.new_empty(sum(lengths), num_heads, sizes[1]),
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": _starts(lengths),
        "cu_seqlens_k": _starts(lengths),
        "scale": sizes[0] ** -0.5,
        "causal": causal,
    }


def mla(cache: str, lengths: Sequence[int], num_heads: int, page: int, query_tokens: int = 1) -> dict[str, Any]:
    """The arguments of `sm100_cutlass_mla_decode`. `cache`: bf16, fp8, e4m3 with queries of e4m3, too, or
    ds_mla with 656 bytes per token."""
    table, num_pages = _tables(lengths, page)
    return _latent(cache, len(lengths) * query_tokens, num_heads, num_pages, page) | {
        "seq_lens": _ints(lengths),
        "page_table": table,
        "workspace": None,
        "query_tokens": query_tokens,
    }


def sparse_mla(cache: str, num_tokens: int, topk: int, num_heads: int, num_slots: int, page: int) -> dict[str, Any]:
    """The arguments of `sparse_mla_attention`, as those of `mla`. No slot is listed twice if there are enough."""
    if num_slots >= num_tokens * topk:
        indices = torch.randperm(num_slots)[: num_tokens * topk].view(num_tokens, topk)
    else:
        indices = torch.randint(0, num_slots, (num_tokens, topk))
    return _latent(cache, num_tokens, num_heads, -(-num_slots // page), page) | {
        "indices": indices.int(),
        "topk_length": None,
    }


def _latent(cache: str, num_rows: int, num_heads: int, num_pages: int, page: int) -> dict[str, Any]:
    """The arguments that latent attention has in common."""
    if cache == "ds_mla":  # random fp8 values; scales around 1e-4; RoPE keys equally small
        entries = torch.randint(0, 60, (num_pages, page, DS_MLA_BYTES), dtype=torch.uint8)
    else:
        entries = randn(num_pages, page, LATENT + ROPE).to(DTYPES[cache])
    query = torch.float8_e4m3fn if cache == "e4m3" else torch.bfloat16
    return {
        "out": torch.empty(num_rows, num_heads, LATENT, dtype=torch.bfloat16),
        "lse": torch.empty(num_rows, num_heads),
        "q_nope": randn(num_rows, num_heads, LATENT).to(query),
        "q_pe": randn(num_rows, num_heads, ROPE).to(query),
        "kv_c_and_k_pe_cache": entries,
        "scale": (LATENT + ROPE) ** -0.5,
        "num_kv_splits": 0,
    }


def indexer_pages(lengths: Sequence[int], num_heads: int, new: int, page: int) -> dict[str, Any]:
    """The arguments of `fp8_paged_mqa_logits` for the last `new` tokens of sequences of these lengths."""
    tables, num_pages = _tables(lengths, page)
    keys = _e4m3(num_pages, page, INDEXER_HEAD).view(torch.uint8).flatten(1)
    scales = (torch.rand(num_pages, page) + 0.5).view(torch.uint8)
    num_rows, columns = len(lengths) * new, max(lengths)
    return {
        "logits": torch.zeros(num_rows, columns),
        "q": _e4m3(len(lengths), new, num_heads, INDEXER_HEAD),
        "kv_cache": torch.cat((keys, scales), 1).view(num_pages, page, INDEXER_HEAD + 4),
        "weights": torch.randn(num_rows, num_heads),
        "context_lens": _ints(lengths)[:, None] - torch.arange(new - 1, -1, -1, dtype=torch.int32),
        "block_tables": tables,
        "clean_logits": False,
    }


def indexer_rows(num_tokens: int, num_keys: int, num_heads: int) -> dict[str, Any]:
    """The arguments of `fp8_mqa_logits` for the last tokens of a prompt."""
    return {
        "logits": torch.zeros(num_tokens, num_keys),
        "q": _e4m3(num_tokens, num_heads, INDEXER_HEAD),
        "k": _e4m3(num_keys, INDEXER_HEAD),
        "k_scales": torch.rand(num_keys) + 0.5,
        "weights": torch.randn(num_tokens, num_heads),
        "cu_seqlen_ks": torch.zeros(num_tokens, dtype=torch.int32),
        "cu_seqlen_ke": torch.arange(num_keys - num_tokens + 1, num_keys + 1, dtype=torch.int32),
        "clean_logits": False,
        "compressed": False,
    }
