"""Code shared by the cache ops: quantization, lookup of slots and positions, checks and examples."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import check
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float8_e4m3fn, float8_e5m2, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8

if TYPE_CHECKING:
    from torch import Tensor

CODES = (uint8, float8_e4m3fn, float8_e5m2)  # dtypes of the tensor of an fp8 cache
DS_MLA_BYTES = 656  # bytes of a token in "fp8_ds_mla": 512 fp8 values, four float32 scales, 64 16-bit elements

# References


def fp8_codes(x: Tensor, scale: Tensor, kind: Any) -> Tensor:
    """``x / scale`` as bits of the float8 dtype `kind`: to nearest, saturating; NaN becomes the positive NaN."""
    quotient = x.float() / scale
    largest = torch.finfo(kind).max
    rounded = quotient.clamp(-largest, largest).to(kind).view(torch.uint8)
    return torch.where(quotient.isnan(), 0x80 if kind == torch.float8_e4m3fnuz else 0x7F, rounded)


def encoded(x: Tensor, scale: Tensor, cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """`x` as elements of `cache`: unchanged for "auto", else fp8. `scale`: one number, or one for each row of `x`."""
    if kv_cache_dtype == "auto":
        return x
    scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    return fp8_codes(x, scale, fp8.cache_codes(cache, kv_cache_dtype))


def decoded(cache: Tensor, block: Tensor, offset: Tensor, scale: Tensor, kv_cache_dtype: str, dtype: Any) -> Tensor:
    """The entries of `cache` at these blocks and offsets, in `dtype`: the inverse of `encoded`."""
    x = indexable(cache)[block, offset]
    if kv_cache_dtype == "auto":
        return x
    return (x.view(fp8.cache_codes(cache, kv_cache_dtype)).float() * scale.reshape(())).to(dtype)


def indexable(x: Tensor) -> Tensor:
    """`x`, or its bytes if it is float8: torch cannot index float8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def existing_slots(slot_mapping: Tensor, num_blocks: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, blocks, offsets) of the tokens with a slot that exists."""
    slot = slot_mapping.long()
    tokens = ((slot >= 0) & (slot < num_blocks * block_size)).nonzero().squeeze(1)
    return tokens, slot[tokens] // block_size, slot[tokens] % block_size


def existing_positions(
    block_table: Tensor, sequence: Tensor, position: Tensor, num_blocks: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, blocks, offsets) of the rows with a position, in the row's sequence, in a block of the cache."""
    num_seqs, max_blocks = block_table.shape
    inside = (sequence >= 0) & (sequence < num_seqs) & (position >= 0) & (position < max_blocks * block_size)
    rows = inside.nonzero().squeeze(1)
    block = block_table[sequence[rows], position[rows] // block_size].long()
    exists = (block >= 0) & (block < num_blocks)
    return rows[exists], block[exists], position[rows[exists]] % block_size


# Indices for PYOPS_CHECK


def bad_slots(slot_mapping: Tensor, num_blocks: int, block_size: int) -> dict[str, Tensor]:
    """The slots after the last one. Negative slots are valid: nothing is written for them."""
    return {"slot_mapping": slot_mapping >= num_blocks * block_size}


def bad_table_entries(
    block_table: Tensor, starts: Tensor, lengths: Tensor, num_blocks: int, block_size: int
) -> dict[str, Tensor]:
    """The entries of the block table with block numbers out of range, among the entries that are read.

    Sequence b reads the entries of positions ``starts[b]`` to ``starts[b] + lengths[b] - 1``.
    """
    num_seqs, table = len(lengths), block_table[: len(lengths)]
    first = torch.arange(block_table.shape[1], dtype=torch.int64, device=block_table.device) * block_size
    starts, ends = starts[:, None], (starts + lengths)[:, None]
    used = (first < ends) & (first + block_size > starts) & (starts < ends)
    wrong = torch.zeros_like(block_table, dtype=torch.bool)
    wrong[:num_seqs] = used & ((table < 0) | (table >= num_blocks))
    return {"block_table": wrong}


# Plans


class EntryLayout(NamedTuple):
    """Sizes and strides of a cache [num_blocks, block_size, ...] with contiguous entries."""

    num_blocks: int
    block_size: int
    size: int  # elements of an entry
    block_stride: int
    slot_stride: int

    @property
    def fixed(self) -> dict[str, int]:
        """The kernel parameters for these sizes and strides."""
        return {"num_blocks": self.num_blocks, "block_stride": self.block_stride, "slot_stride": self.slot_stride}


def entry_layout(cache: TensorArg) -> EntryLayout:
    """Check that the entries of a cache are contiguous; returns the layout."""
    if len(cache.shape) < 3:
        raise cache.error(f"expected at least 3 dimensions, got shape {cache.shape}")
    num_blocks, block_size, *sizes = cache.shape
    entry = replace(cache, shape=tuple(sizes), strides=cache.strides[2:])
    check.contiguous(entry)
    return EntryLayout(num_blocks, block_size, entry.numel, *cache.strides[:2])


def first_stride(arg: TensorArg | None) -> int:
    """The stride of the first dimension; 0 for a scalar or None."""
    return arg.strides[0] if arg and arg.shape else 0


def token_bytes(*rows: tuple[TensorArg, int]) -> int:
    """Bytes of a token: the sum over pairs (tensor, number of its elements that belong to the token)."""
    return sum(arg.dtype.itemsize * size for arg, size in rows)


def check_tokens(slot_mapping: TensorArg, *sources: TensorArg) -> int:
    """Check that every source has a row for each slot; returns the number of slots."""
    check.index(slot_mapping, num_tokens=None)
    (num_tokens,) = slot_mapping.shape
    for source in sources:
        if source.shape[0] < num_tokens:
            raise source.error(f"expected at least num_tokens={num_tokens} rows like slot_mapping, got {source.shape}")
    return num_tokens


def check_rows(arg: TensorArg | None, min_rows: int, size_name: str = "num_seqs") -> None:
    """Check that `arg` has at least `min_rows` rows; errors call that size `size_name`."""
    if arg is not None and arg.shape[0] < min_rows:
        raise arg.error(f"expected at least {size_name}={min_rows} rows, got shape {arg.shape}")


def check_keys_and_values(key: TensorArg, value: TensorArg) -> tuple[int, int]:
    """Check [num_tokens, num_heads, head_size] keys and values; returns (num_heads, head_size).

    Keys and values may differ in the number of rows, and in nothing else.
    """
    check.floating(key)
    check.dtype(value, key.dtype)
    check.sizes(key, num_tokens=None, num_heads=None, head_size=None)
    _, num_heads, head_size = key.shape
    check.sizes(value, num_tokens=None, num_heads=num_heads, head_size=head_size)
    for arg in (key, value):
        check.row_size(arg)
    return num_heads, head_size


# Examples


def example_cache(make: Any, *shape: int, dtype: str) -> Any:
    """A cache with a finite number in every slot."""
    return make.randint(0, 120, *shape, dtype=dtype) if dtype == "uint8" else make.randn(*shape, dtype=dtype)


def example_slots(make: Any, num_tokens: int, block_size: int) -> tuple[int, Any]:
    """(num_blocks, a different slot for every token)."""
    num_blocks = -(-num_tokens // block_size) + 2
    return num_blocks, make.permutation(num_blocks * block_size, num_tokens)
