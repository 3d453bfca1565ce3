"""The logits of the indexer: which keys a row has, what its logits are, and how far they may be from these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..._core.system.lazy import torch
from .._shared.fp8_accumulation import FLOAT32_ERROR, accumulated, allowed
from .._shared.indexer_cache import indexer_parts

if TYPE_CHECKING:
    from torch import Tensor


def _finite(x: Tensor) -> Tensor:
    wide = x.double()
    return torch.where(wide.isfinite(), wide, 0.0)


def scores(q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    """The logits [num_keys] of one row with keys [num_keys, head_size], in float64."""
    products = q.double() @ keys.double().T
    positive = torch.where(products > 0, products, 0.0)  # also of NaN, as fmax
    return scales.double() * (weights.double() @ positive)


def error(rows: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> float:
    """The largest error of the logits of (queries, weights, keys, scales), as a fraction of the largest.

    An H200 accumulates the product of a head and a key with 14 bits (`fp8_accumulation.py`). A ReLU does not enlarge an
    error, and the errors of heads add up, weighted: their means by size, their variances by the square.
    """
    worst = largest = 0.0
    for q, weights, keys, scales in rows:
        total, mean, variance = accumulated(q, keys.T)
        factors, of_keys = _finite(weights), _finite(scales).abs()
        errors = allowed(factors.abs() @ mean, factors.square() @ variance) * of_keys
        worst = max(worst, float(errors.amax()))
        largest = max(largest, float(((factors @ total.relu()).abs() * of_keys).amax()))
    return FLOAT32_ERROR + (worst / largest if largest else 0.0)


def keys_of_rows(
    logits: Tensor, k: Tensor, k_scales: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor, compressed: bool
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """(a row, the columns of its logits, their keys, and their scales)."""
    keys = k.view(torch.float8_e4m3fn)
    for m, (start, end) in enumerate(zip(cu_seqlen_ks.tolist(), cu_seqlen_ke.tolist(), strict=True)):
        begin, end = (max(0, min(bound, len(k))) for bound in (start, end))
        shift = begin if compressed else 0
        end = min(end, shift + logits.shape[1])
        if begin < end:
            yield m, slice(begin - shift, end - shift), keys[begin:end], k_scales[begin:end]


def keys_of_pages(
    logits: Tensor, q: Tensor, kv_cache: Tensor, context_lens: Tensor, block_tables: Tensor
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """(a row, the number of its logits, the columns of those that have a key, these keys, and their scales)."""
    num_seqs, next_n, _, head_size = q.shape
    num_blocks, block_size, _ = kv_cache.shape
    keys, scales = indexer_parts(kv_cache, head_size)
    quants, scales = keys.contiguous().view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32)[..., 0]
    capacity = min(block_tables.shape[1] * block_size, logits.shape[1])
    for row in range(num_seqs * next_n):
        s, j = divmod(row, next_n)
        length = int(context_lens[s, j] if context_lens.ndim == 2 else context_lens[s]) - (
            0 if context_lens.ndim == 2 else next_n - 1 - j
        )
        positions = torch.arange(max(0, min(length, capacity)), dtype=torch.int64, device=logits.device)
        blocks = block_tables[s][positions // block_size].long()
        there = (blocks >= 0) & (blocks < num_blocks)
        slots = blocks[there], positions[there] % block_size
        yield row, len(positions), positions[there], quants[slots], scales[slots]
