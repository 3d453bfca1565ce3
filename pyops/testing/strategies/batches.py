"""Batches of sequences with different lengths, and paged KV caches for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from .tensors import generator, seeds

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class RaggedBatch:
    """Concatenated sequences of different lengths.

    Attributes:
        seq_lens: [num_seqs] int32.
        offsets: [num_seqs + 1] int32: sequence i has rows offsets[i] to offsets[i + 1] (exclusive).

    Examples:
        >>> @given(batch=ragged_batches(max_seqs=3))
        ... def test(batch):
        ...     assert batch.offsets[-1] == batch.num_tokens == batch.seq_lens.sum()
        >>> test()
    """

    seq_lens: Tensor
    offsets: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens.tolist(), default=0)


def _lengths(longest: int) -> st.SearchStrategy[int]:
    around = [size + step for size in (16, 32, 64, 128, 256) for step in (-1, 0, 1)]
    edges = sorted({min(size, longest) for size in (0, 1, *around, longest)})
    return st.sampled_from(edges) | st.integers(0, min(20, longest))


@st.composite
def ragged_batches(draw: st.DrawFn, max_seqs: int = 8, max_seq_len: int = 300) -> RaggedBatch:
    """Batches of 1 to `max_seqs` sequences with 0, 1, about 2^n or `max_seq_len` tokens.

    Examples:
        >>> @given(batch=ragged_batches(max_seqs=3, max_seq_len=100))
        ... def test(batch):
        ...     x = torch.randn(batch.num_tokens, 64)  # sequence i is x[offsets[i] : offsets[i + 1]]
        ...     assert len(x.split(batch.seq_lens.tolist())) == len(batch.seq_lens)
        >>> test()
    """
    lengths = draw(st.lists(_lengths(max_seq_len), min_size=1, max_size=max_seqs), label="lengths")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device="cpu")
    offsets[1:] = seq_lens.cumsum(0)
    return RaggedBatch(seq_lens, offsets)


@dataclass(frozen=True)
class PagedCache:
    """A paged KV cache with block tables.

    Token i of sequence s is in slot ``i % block_size`` of block ``block_tables[s, i // block_size]``. Unused slots are
    NaN. Unused entries of `block_tables` are hostile.

    Attributes:
        key_cache, value_cache: by `layout`,
            ``"flash"``: both [num_blocks, block_size, num_heads, head_size]; strides may be those of [num_blocks,
            num_heads, block_size, head_size], and both may be halves of one buffer [num_blocks, 2, ...];
            ``"packed"``: keys [num_blocks, num_heads, head_size / x, block_size, x], where x elements are 16 bytes, and
            values [num_blocks, num_heads, head_size, block_size], contiguous.
        block_tables: [num_seqs, max_blocks] int32 or int64; rows may share blocks, in any order.
        seq_lens: [num_seqs] int32.
        layout: of the caches.
        block_size: slots of a block; num_blocks: of the cache.

    Examples:
        >>> @given(cache=paged_caches("float32", layout="flash", max_seqs=2, max_seq_len=20))
        ... def test(cache):
        ...     for sequence, length in enumerate(cache.seq_lens):
        ...         keys, values = cache.tokens(sequence)
        ...         assert len(keys) == len(values) == length
        >>> test()
    """

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    layout: str
    block_size: int
    num_blocks: int

    def slots(self, sequence: int) -> Tensor:
        """[seq_len] int64: the slot of each token, ``block * block_size + offset``; -1 if its block does not exist."""
        position = torch.arange(int(self.seq_lens[sequence]), dtype=torch.int64, device="cpu")
        block = self.block_tables[sequence].long()[position // self.block_size]
        slot = block * self.block_size + position % self.block_size
        return torch.where((block >= 0) & (block < self.num_blocks), slot, -1)

    def tokens(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [n, num_heads, head_size], of a sequence's tokens that are in an existing block."""
        slots = self.slots(sequence)
        return tuple(rows[slots[slots >= 0]] for rows in _rows(self.key_cache, self.value_cache, self.layout))


def _rows(key_cache: Tensor, value_cache: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The caches as [num_blocks * block_size, num_heads, head_size]."""
    if layout == "packed":
        keys = key_cache.permute(0, 3, 1, 2, 4).flatten(3)
        values = value_cache.permute(0, 3, 1, 2)
        return keys.flatten(0, 1), values.flatten(0, 1)
    return key_cache.flatten(0, 1), value_cache.flatten(0, 1)


@st.composite
def paged_caches(
    draw: st.DrawFn,
    dtype: str = "float16",
    *,
    layout: str | None = None,
    num_heads: int = 2,
    head_size: int = 64,
    block_sizes: tuple[int, ...] = (8, 16, 32),
    max_seqs: int = 5,
    max_seq_len: int = 100,
    broken: bool = False,
) -> PagedCache:
    """Caches with any float type, fp8 included, in `layout`; in either layout if it is None.

    Sequences may end within a block or at its end, may be empty, and may share blocks; blocks are in random order.
    Unused entries of a row of the block table are negative, beyond the last block, the largest integer, or blocks of
    other sequences. With `broken`, used entries may be invalid, too, for ops that skip tokens without a block.

    Examples:
        >>> @given(cache=paged_caches("float16", layout="packed", head_size=64, max_seqs=2))
        ... def test(cache):
        ...     assert cache.key_cache.shape[-1] == 8  # 16 bytes
        >>> test()
    """
    layout = layout or draw(st.sampled_from(["flash", "packed"]), label="layout")
    if layout not in ("flash", "packed"):
        raise ValueError(f'layout: expected "flash" or "packed", got "{layout}"')
    kind = getattr(torch, dtype)
    block_size = draw(st.sampled_from(block_sizes), label="block_size")
    seq_lens = draw(ragged_batches(max_seqs, max_seq_len)).seq_lens
    needed = [-(-length // block_size) for length in seq_lens.tolist()]
    num_blocks = sum(needed) + draw(st.integers(1, 3), label="blocks too many")
    random = generator(draw(seeds(), label="seed"))

    unused = torch.randperm(num_blocks, generator=random, dtype=torch.int64, device="cpu").tolist()
    shared = draw(st.sampled_from([0.0, 0.5]), label="share of blocks in common")
    broken_share = draw(st.sampled_from([0.0, 0.3]), label="share of broken entries") if broken else 0.0
    hostile = st.sampled_from([-1, -_INT32_MAX - 1, num_blocks, num_blocks + 1, _INT32_MAX, 0, num_blocks - 1])
    max_blocks = max(needed) + draw(st.integers(0, 3), label="entries too many")
    table = torch.empty(
        len(needed), max_blocks, dtype=draw(st.sampled_from([torch.int32, torch.int64]), label="table"), device="cpu"
    )
    given: list[int] = []
    for row, count in zip(table, needed, strict=True):
        for entry in range(max_blocks):
            chance = float(torch.rand((), generator=random, dtype=torch.float32, device="cpu"))
            if entry >= count or chance < broken_share:
                row[entry] = draw(hostile)
            elif given and chance > 1 - shared:
                row[entry] = given[int(chance * 1e6) % len(given)]
            else:
                given.append(unused.pop())
                row[entry] = given[-1]

    key_cache, value_cache = _empty_caches(draw, layout, num_blocks, block_size, num_heads, head_size, kind)
    cache = PagedCache(key_cache, value_cache, table, seq_lens, layout, block_size, num_blocks)
    used = torch.cat([cache.slots(sequence) for sequence in range(len(needed))])
    used = used[used >= 0].unique()
    for store in (key_cache, value_cache):
        rows = torch.full(
            (num_blocks * block_size, num_heads, head_size), float("nan"), dtype=torch.float32, device="cpu"
        )
        rows[used] = torch.randn(len(used), num_heads, head_size, generator=random, dtype=torch.float32, device="cpu")
        blocks = rows.unflatten(0, (num_blocks, block_size))
        if layout == "packed":
            blocks = blocks.permute(0, 2, 3, 1)
            if store is key_cache:
                blocks = blocks.unflatten(2, (store.shape[2], store.shape[4])).transpose(3, 4)
        store.copy_(blocks.to(kind))
    return cache


def _empty_caches(
    draw: st.DrawFn, layout: str, num_blocks: int, block_size: int, num_heads: int, head_size: int, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    if layout == "packed":
        x = 16 // kind.itemsize
        if head_size % x:
            raise ValueError(f"head_size: expected a multiple of {x} for packed keys of {kind}, got {head_size}")
        return (
            torch.empty(num_blocks, num_heads, head_size // x, block_size, x, dtype=kind, device="cpu"),
            torch.empty(num_blocks, num_heads, head_size, block_size, dtype=kind, device="cpu"),
        )
    heads_first = draw(st.booleans(), label="heads before slots")
    inner = (num_heads, block_size) if heads_first else (block_size, num_heads)
    if draw(st.booleans(), label="keys and values in one buffer"):
        caches = torch.empty(num_blocks, 2, *inner, head_size, dtype=kind, device="cpu").unbind(1)
    else:
        caches = torch.empty(2, num_blocks, *inner, head_size, dtype=kind, device="cpu").unbind(0)
    keys, values = (cache.transpose(1, 2) if heads_first else cache for cache in caches)
    return keys, values
