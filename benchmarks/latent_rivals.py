"""Latent attention of other libraries, and what FlashInfer's attention needs, as in `benchmarks.attention_rivals`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from .installed import Unavailable, fitted, module, vllm_op
from .timing import Call

Arguments = dict[str, Any]

_WORKSPACE = 128 << 20  # bytes that FlashInfer asks for
_MLA_PAGE = 64  # slots of a page in FlashMLA
_SLOTS = 128  # slots that FlashMLA's sparse prefill takes at a time
_LATENT = 512


@cache
def workspace(device: torch.device) -> Any:
    """FlashInfer's memory for partial results, which calls one after the other can share."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def pages_of(call: Arguments, table: Any, page: int) -> tuple[Any, Any, Any]:
    """(ends of the pages of each sequence, its pages, slots in use of its last page), as FlashInfer takes them."""
    lengths = call["seq_lens"].int()
    used = -(-lengths // page)
    pages = torch.cat([row[:count] for row, count in zip(table, used.tolist(), strict=True)])
    return F.pad(used.cumsum(0), (1, 0)).int(), pages, lengths - (used - 1) * page


def _mla_query(call: Arguments) -> Any:
    """[num_seqs, query tokens, heads, 576]."""
    return torch.cat((call["q_nope"], call["q_pe"]), -1).unflatten(0, (len(call["seq_lens"]), -1))


def flash_mla(call: Arguments) -> Call:
    """FlashMLA of vLLM's wheel: dense for bf16 and fp8, with queries of fp8; for 656 bytes its sparse kernel.

    The sparse kernel is given the slots of all tokens.
    """
    cache, lengths, scale = call["kv_c_and_k_pe_cache"], call["seq_lens"], call["scale"]
    if cache.shape[1] != _MLA_PAGE:
        raise Unavailable(f"has pages of {_MLA_PAGE} slots")
    query, entries, table = _mla_query(call), cache[:, :, None], call["page_table"]
    if cache.dtype is torch.uint8:
        if query.shape[1] > 1:
            raise Unavailable("would need other slots for each query token")
        slots = torch.arange(int(lengths.max()), device=table.device)
        indices = table.long()[:, slots // _MLA_PAGE] * _MLA_PAGE + slots % _MLA_PAGE
        # The kernel takes a multiple of 64 slots; -1 is none.
        indices = F.pad(indices.where(slots < lengths[:, None], -1), (0, -len(slots) % 64), value=-1)[:, None].int()
        return _sparse_decode(query, cache, indices, scale)
    if cache.dtype.itemsize == 1:
        attend = vllm_op("_flashmla_extension_C", "fwd_kvcache_mla_fp8")
        schedule = vllm_op("_flashmla_extension_C", "get_mla_decoding_metadata_dense_fp8")(
            lengths, query.shape[1] * query.shape[2], 1
        )
        one = torch.ones(1, device=query.device)
        query = query.to(cache.dtype)
        attend = partial(attend, query, entries, _LATENT, lengths, table, scale, True, *schedule, one, one)
        return lambda: attend()[0]
    op = vllm_op("_flashmla_C", "dense_decode_fwd")
    return _scheduled(op, (query, entries, _LATENT, lengths, table, scale, True))


def sparse_flash_mla(call: Arguments) -> Call:
    """FlashMLA of vLLM's wheel over lists of slots: prefill over a bf16 cache, decode over one of 656 bytes."""
    cache, indices, scale = call["kv_c_and_k_pe_cache"], call["indices"][:, None], call["scale"]
    if call["topk_length"] is not None or indices.shape[-1] % _SLOTS:
        raise Unavailable(f"has lists of a multiple of {_SLOTS} slots here")
    query = torch.cat((call["q_nope"], call["q_pe"]), -1)
    if cache.dtype is torch.uint8:
        return _sparse_decode(query[:, None], cache, indices, scale)
    if cache.dtype is not torch.bfloat16:
        raise Unavailable("attends to a bf16 cache, or one of 656 bytes")
    op, entries = vllm_op("_flashmla_C", "sparse_prefill_fwd"), cache.flatten(0, 1)[:, None]
    attend = fitted(op, query, entries, indices, scale, _LATENT)
    return lambda: attend()[0]


def _sparse_decode(query: Any, cache: Any, indices: Any, scale: float) -> Call:
    first, rest = (query, cache[:, :, None], indices, None, None), (None, None, None, _LATENT, scale)
    return _scheduled(vllm_op("_flashmla_C", "sparse_decode_fwd"), first, rest)


def _scheduled(op: Any, first: Sequence[Any], rest: Sequence[Any] = ()) -> Call:
    """A FlashMLA op between these arguments with the schedule that its first call makes."""
    schedule = fitted(op, *first, None, None, *rest)()[2:]
    attend = fitted(op, *first, *schedule, *rest)
    return lambda: attend()[0]


def flash_infer_mla(call: Arguments) -> Call:
    """FlashInfer's latent attention."""
    cache, query = call["kv_c_and_k_pe_cache"], call["q_nope"]
    if cache.dtype is not query.dtype or query.dtype.itemsize == 1:
        raise Unavailable("attends with queries of 16 bits to a cache of their dtype")
    num_rows, num_heads, _ = query.shape
    num_seqs = len(call["seq_lens"])
    wrapper = module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace(query.device))
    ends, pages, _ = pages_of(call, call["page_table"], cache.shape[1])
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=query.device) * (num_rows // num_seqs)
    sizes = (num_heads, _LATENT, cache.shape[2] - _LATENT, cache.shape[1])
    lengths = call["seq_lens"]
    wrapper.plan(starts, ends, pages, lengths, *sizes, num_rows > num_seqs, call["scale"], query.dtype, cache.dtype)
    parts = cache[..., :_LATENT], cache[..., _LATENT:]
    return partial(wrapper.run, query, call["q_pe"], *parts, out=call["out"])
