"""Attention in float64: the building blocks of the references of its ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.system.lazy import torch
from .._shared import fp8
from .arguments import Options, PagedKV, Partials, Sparse

if TYPE_CHECKING:
    from torch import Tensor


def largest_of(logits: Tensor) -> Tensor:
    """The row max over the last dimension, ignoring NaN; -inf if the row is empty. (NaN propagates through the sum of
    exponentials.)"""
    max_logit = logits.masked_fill(logits.isnan(), -torch.inf)
    return max_logit.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)


def weighted_sum(weights: Tensor, logits: Tensor, values: Tensor) -> Tensor:
    """The values, summed with weights: [num_heads, rows, tokens] and [tokens, num_kv_heads, size] to [rows, num_heads,
    size].

    A token with a logit of -inf is excluded, whatever its value. Every other token counts, however small its weight: an
    infinite value makes the sum infinite, or NaN if there is an infinite value of the other sign.
    """
    num_kv_heads = values.shape[1]

    def summed(factors: Tensor, terms: Tensor) -> Tensor:
        return torch.einsum("hgnj,jhd->nhgd", factors.unflatten(0, (num_kv_heads, -1)), terms).flatten(1, 2)

    total = summed(weights, torch.where(values.isfinite(), values, 0.0))
    if not bool(values.isfinite().all()):
        attended = (logits != -torch.inf).double()
        for special, where in ((torch.inf, values == torch.inf), (-torch.inf, values == -torch.inf)):
            total = torch.where(summed(attended, where.double()) > 0, total + special, total)
        total = torch.where(summed(attended, values.isnan().double()) > 0, torch.nan, total)
    return total


def float32_logits(
    query: Tensor, keys: Tensor, scale: float, kv_cache_dtype: str = "auto", k_scale: Tensor | None = None
) -> float:
    """The rounding error of a logit in float32, and so of its exponential: 2^-22 of the largest |q| |k|.

    Args:
        keys: a cache of either layout, or any tensor with the elements of a key in its last dimension.
    """

    def longest(x: Tensor, *dims: int) -> float:
        lengths = torch.where(x.isfinite(), x, 0.0).square().sum(dims).sqrt()
        return float(lengths.max()) if lengths.numel() else 0.0

    if kv_cache_dtype != "auto":
        keys = keys.view(fp8.cache_codes(keys, kv_cache_dtype))
    unit = 1.0
    if k_scale is not None and kv_cache_dtype != "auto":
        unit = float(scales_of(k_scale, keys.shape[1 if keys.ndim == 5 else -2]).abs().max())
    lengths = longest(query.double(), -1) * longest(keys.double(), *((2, 4) if keys.ndim == 5 else (-1,)))
    return 2.0**-22 * abs(scale * unit) * lengths


def scales_of(scale: Tensor, num_kv_heads: int) -> Tensor:
    """The scales of key-value heads in float64: [num_kv_heads, 1], or [1] of the first element, for all of them."""
    if scale.shape == (num_kv_heads,):
        return scale.double()[:, None]
    return scale.double().reshape(-1)[:1]


def gathered(kv: PagedKV, s: int, first: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens first <= i < length of sequence s that lie in an existing block of the cache, with their keys and
    values.

    ``([tokens], [tokens, num_kv_heads, head_size], [tokens, num_kv_heads, value_size])``, keys and values in float64.
    """
    caches = [kv.key_cache, kv.value_cache]
    packed, is_fp8 = kv.key_cache.ndim == 5, kv.kv_cache_dtype != "auto"
    if is_fp8:
        caches = [cache.view(fp8.cache_codes(cache, kv.kv_cache_dtype)) for cache in caches]
    tokens = torch.arange(first, max(first, length), dtype=torch.int64, device=kv.key_cache.device)
    numbers = kv.block_tables[s][tokens // kv.block_size]
    exists = (numbers >= 0) & (numbers < len(kv.key_cache))
    tokens, numbers = tokens[exists], numbers[exists]
    slots = tokens % kv.block_size
    at = (numbers, slice(None), slice(None), slots) if packed else (numbers, slots)
    keys, values = (cache[at].double() for cache in caches)
    if packed:
        keys = keys.flatten(2)
    if is_fp8:
        keys, values = keys * scales_of(kv.k_scale, kv.num_kv_heads), values * scales_of(kv.v_scale, kv.num_kv_heads)
    return tokens, keys, values


def attended_of(kv: PagedKV, s: int, window: int, max_tokens: int | None = None) -> tuple[int, int]:
    """(first token, length) of the tokens that the newest token of sequence s attends to, clamped to the block
    table."""
    room = kv.block_tables.shape[1] * kv.block_size
    length = max(0, min(int(kv.seq_lens[s]), room if max_tokens is None else min(room, max_tokens)))
    return max(0, length - window) if window > 0 else 0, length


def masked_logits(
    query: Tensor, keys: Tensor, scale: float, tokens: Tensor, length: int, options: Options, causal: bool
) -> Tensor:
    """The logits of the last tokens of a sequence: [num_heads, rows, tokens], -inf where a row does not attend.

    Args:
        query: [rows, num_heads, head_size].
        keys: [tokens, num_kv_heads, head_size], in float64.
        tokens: [tokens], the position of each key in the sequence.
        length: tokens of the sequence.
    """
    count = len(query)
    grouped = query.double().unflatten(1, (keys.shape[1], -1))
    logits = (torch.einsum("nhgd,jhd->hgnj", grouped, keys) * scale).flatten(0, 1)
    if options.logits_soft_cap > 0:
        logits = options.logits_soft_cap * torch.tanh(logits / options.logits_soft_cap)
    last = torch.full((count,), length - 1, dtype=torch.int64, device=query.device)  # last token that a row attends to
    if causal:
        last = length - count + torch.arange(count, dtype=torch.int64, device=query.device)
    if options.alibi_slopes is not None:
        logits = logits + options.alibi_slopes.double()[:, None, None] * (tokens - last[:, None])
    unseen = tokens > last[:, None]
    if options.sliding_window > 0:
        unseen = unseen | (tokens <= last[:, None] - options.sliding_window)
    return logits.masked_fill(unseen, -torch.inf)


def write_rows(out: Tensor, begin: int, end: int, logits: Tensor, values: Tensor, options: Options) -> None:
    """Write the softmax of these logits over the values, and the log-sum-exp, to the rows begin <= i < end."""
    max_logit = largest_of(logits)
    if options.sinks is not None:
        max_logit = torch.maximum(max_logit, options.sinks.double()[:, None])
    base = max_logit.masked_fill(max_logit == -torch.inf, 0.0)
    weights = torch.exp(logits - base[..., None])
    z = weights.sum(-1)
    if options.sinks is not None:
        z = z + torch.exp(options.sinks.double()[:, None] - base)
    total = weighted_sum(weights, logits, values)
    out[begin:end] = (total / (z.T[..., None] + 1e-6)).to(out.dtype)
    if options.lse is not None:
        options.lse[:, begin:end] = (max_logit + torch.log(z)).float()


class Attended:
    """The tokens that the query of one sequence attends to, in float64: logits [num_heads, tokens], and values.

    Args:
        query: [num_heads, head_size], of sequence `s`.
        max_tokens: a bound of the length in addition to the capacity of the block table.
    """

    def __init__(
        self,
        query: Tensor,
        scale: float,
        kv: PagedKV,
        s: int,
        options: Options,
        sparse: Sparse | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.first, self.length = attended_of(kv, s, options.sliding_window, max_tokens)
        self.tokens, keys, self.values = gathered(kv, s, self.first, self.length)
        logits = (
            torch.einsum("hgd,nhd->hgn", query.double().unflatten(0, (kv.num_kv_heads, -1)), keys) * scale
        ).flatten(0, 1)
        if options.logits_soft_cap > 0:
            logits = options.logits_soft_cap * torch.tanh(logits / options.logits_soft_cap)
        if options.alibi_slopes is not None:
            logits = logits + options.alibi_slopes.double()[:, None] * (self.tokens + 1 - self.length)
        if sparse and sparse.on:
            logits = logits.masked_fill(~self._pages(len(query), kv, sparse), -torch.inf)
        self.logits = logits

    def _pages(self, num_heads: int, kv: PagedKV, sparse: Sparse) -> Tensor:
        """[num_heads, tokens] bool: whether a head attends to the page of a token."""
        heads, step = (
            torch.arange(num_heads, dtype=torch.int64, device=self.tokens.device),
            sparse.blocksparse_head_sliding_step,
        )
        steps = heads * step if step >= 0 else heads // (num_heads // kv.num_kv_heads) * -step
        offset = (sparse.first_step(num_heads, kv.num_kv_heads) + steps + 1)[:, None]
        size = sparse.blocksparse_block_size
        block = self.tokens // kv.block_size * kv.block_size // size
        is_local = block > (self.length - 1) // size - sparse.blocksparse_local_blocks
        return ((block + offset) % sparse.blocksparse_vert_stride == 0) | is_local

    def part(self, begin: int, end: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """(row max, sum of exponentials, weighted sum of values) of the tokens begin <= i < end."""
        among = (self.tokens >= begin) & (self.tokens < (self.logits.new_tensor(torch.inf) if end is None else end))
        logits, values = self.logits[:, among], self.values[among]
        max_logit = largest_of(logits)
        weights = torch.exp(logits - max_logit.masked_fill(max_logit == -torch.inf, 0.0)[:, None])
        return max_logit, weights.sum(-1), weighted_sum(weights[:, None], logits[:, None], values)[0]


def finish(
    out: Tensor, max_logit: Tensor, z: Tensor, total: Tensor, sinks: Tensor | None = None, lse: Tensor | None = None
) -> None:
    """Write ``out = total / (z + 1e-6)`` and the log-sum-exp, for sums relative to `max_logit`.

    `sinks` adds one logit, without a value, to each head.
    """
    if sinks is not None:
        larger = torch.maximum(max_logit, sinks.double())
        base = larger.masked_fill(larger == -torch.inf, 0.0)
        shrink = torch.exp(max_logit - base)
        z, total, max_logit = z * shrink + torch.exp(sinks.double() - base), total * shrink[:, None], larger
    out.copy_(total / (z + 1e-6)[:, None])
    if lse is not None:
        lse.copy_(max_logit + torch.log(z))


def partitions(attended: Attended, size: int, partials: Partials, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """Write the results of the partitions of sequence `s`, and combine them.

    Returns (row max, sum of exponentials, sum of the rounded results weighted by these exponentials).
    """
    exp_sums, max_logits, tmp_out = partials.exp_sums[s], partials.max_logits[s], partials.tmp_out[s]
    begin, end = attended.first // size, -(-attended.length // size)
    for p in range(begin, end):
        max_logit, z, total = attended.part(p * size, (p + 1) * size)
        max_logits[:, p], exp_sums[:, p] = max_logit, z
        tmp_out[:, p] = total / (z + 1e-6)[:, None]
    if begin == end:
        return attended.part(0, 0)
    max_logit = max_logits[:, begin:end].double()
    largest = max_logit.amax(-1)
    base = largest.masked_fill(largest == -torch.inf, 0.0)[:, None]
    weights = exp_sums[:, begin:end].double() * torch.exp(max_logit - base)
    return largest, weights.sum(-1), torch.einsum("hp,hpd->hd", weights, tmp_out[:, begin:end].double())
