"""What decode attention is, in float64: the references of its ops are made of this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..._core.lazy import torch
from .._shared import fp8

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sparse:
    """Block-sparse attention: which pages a head attends (attention_decode_simt.cu)."""

    tp_rank: int
    local_blocks: int
    vert_stride: int
    block_size: int
    head_sliding_step: int

    @property
    def on(self) -> bool:
        return self.vert_stride > 1

    def first_step(self, num_heads: int, num_kv_heads: int) -> int:
        step = self.head_sliding_step
        return self.tp_rank * (num_heads * step if step >= 0 else num_kv_heads * -step)


DENSE = Sparse(0, 0, 0, 64, 0)


def largest_of(logits: Tensor) -> Tensor:
    """The largest of the last dimension, -inf if there is none; NaN is dropped, and comes back with the sum."""
    max_logit = logits.masked_fill(logits.isnan(), -torch.inf)
    return max_logit.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)


def float32_logits(
    query: Tensor, keys: Tensor, scale: float, kv_cache_dtype: str = "auto", k_scale: Tensor | None = None
) -> float:
    """What float32 leaves uncertain in a logit, and so in a weight's share: 2^-22 of the largest |q| |k|.

    `keys` is a cache of either layout, or has the elements of a key in its last dimension.
    """

    def longest(x: Tensor, *dims: int) -> float:
        lengths = torch.where(x.isfinite(), x, 0.0).square().sum(dims).sqrt()
        return float(lengths.max()) if lengths.numel() else 0.0

    if kv_cache_dtype != "auto":
        keys = keys.view(fp8.cache_codes(keys, kv_cache_dtype))
    unit = 1.0 if k_scale is None or kv_cache_dtype == "auto" else float(k_scale.reshape(-1)[0])
    lengths = longest(query.double(), -1) * longest(keys.double(), *((2, 4) if keys.ndim == 5 else (-1,)))
    return 2.0**-22 * abs(scale * unit) * lengths


def gathered(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    first: int,
    length: int,
    kv_cache_dtype: str,
    scales: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Those tokens first <= i < length of a sequence that lie in a block, with their keys and values.

    ``([tokens], [tokens, num_kv_heads, head_size], the same)``, keys and values in float64.
    """
    packed = key_cache.ndim == 5
    num_kv_heads, block_size = key_cache.shape[1 if packed else 2], key_cache.shape[3 if packed else 1]
    if kv_cache_dtype != "auto":
        key_cache, value_cache = (
            cache.view(fp8.cache_codes(cache, kv_cache_dtype)) for cache in (key_cache, value_cache)
        )
    tokens = torch.arange(first, max(first, length), device=key_cache.device)
    numbers = block_table[tokens // block_size]
    there = (numbers >= 0) & (numbers < key_cache.shape[0])
    tokens, numbers = tokens[there], numbers[there]
    places = tokens % block_size
    at = (numbers, slice(None), slice(None), places) if packed else (numbers, places)
    head_size = value_cache.shape[2 if packed else 3]
    keys, values = (
        cache[at].double().reshape(len(numbers), num_kv_heads, head_size) for cache in (key_cache, value_cache)
    )
    if kv_cache_dtype != "auto":
        keys, values = (x * scale.double().reshape(-1)[0] for x, scale in zip((keys, values), scales, strict=True))
    return tokens, keys, values


class Attended:
    """What one sequence attends to, in float64: logits [num_heads, tokens] and values of the tokens that count."""

    def __init__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        block_table: Tensor,
        length: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        scales: tuple[Tensor, Tensor],
        sparse: Sparse = DENSE,
        window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        num_heads, num_kv_heads = query.shape[0], key_cache.shape[1 if key_cache.ndim == 5 else 2]
        block_size = key_cache.shape[3 if key_cache.ndim == 5 else 1]
        length = max(0, min(length, block_table.numel() * block_size))
        first = max(0, length - window) if window > 0 else 0
        cached = gathered(key_cache, value_cache, block_table, first, length, kv_cache_dtype, scales)
        self.tokens, keys, values = cached
        self.first, self.length = first, length
        grouped = query.double().reshape(num_kv_heads, num_heads // num_kv_heads, query.shape[1])
        logits = (torch.einsum("hgd,nhd->hgn", grouped, keys) * scale).flatten(0, 1)
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes.double()[:, None] * (self.tokens + 1 - length)
        if sparse.on:
            heads = torch.arange(num_heads, device=query.device)
            step = sparse.head_sliding_step
            steps = heads * step if step >= 0 else heads // (num_heads // num_kv_heads) * -step
            offset = (sparse.first_step(num_heads, num_kv_heads) + steps + 1)[:, None]
            block = self.tokens // block_size * block_size // sparse.block_size
            near = block > (length - 1) // sparse.block_size - sparse.local_blocks
            logits = logits.masked_fill(~(((block + offset) % sparse.vert_stride == 0) | near), -torch.inf)
        self.logits, self.values = logits, values

    def part(self, begin: int, end: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """(largest logit, sum of exponentials, sum of weighted values) of the tokens begin <= i < end."""
        among = (self.tokens >= begin) & (self.tokens < (self.logits.new_tensor(torch.inf) if end is None else end))
        logits, values = self.logits[:, among], self.values[among]
        max_logit = largest_of(logits)
        weights = torch.exp(logits - max_logit.masked_fill(max_logit == -torch.inf, 0.0)[:, None])
        grouped = weights.reshape(values.shape[1], len(weights) // values.shape[1], weights.shape[1])
        return max_logit, weights.sum(-1), torch.einsum("hgn,nhd->hgd", grouped, values).flatten(0, 1)


def finish(
    out: Tensor, max_logit: Tensor, z: Tensor, total: Tensor, sinks: Tensor | None = None, lse: Tensor | None = None
) -> None:
    """``out = total / (z + 1e-6)`` for sums relative to `most`, with one more logit for each head in `sinks`."""
    if sinks is not None:
        larger = torch.maximum(max_logit, sinks.double())
        base = larger.masked_fill(larger == -torch.inf, 0.0)
        shrink = torch.exp(max_logit - base)
        z, total, max_logit = z * shrink + torch.exp(sinks.double() - base), total * shrink[:, None], larger
    out.copy_(total / (z + 1e-6)[:, None])
    if lse is not None:
        lse.copy_(max_logit + torch.log(z))


def partitions(attended: Attended, size: int, partials: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Write what partitions leave, and join it: (largest logit, sum of weights, weighted sum of rounded results)."""
    exp_sums, max_logits, tmp_out = partials
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
