"""The paged cache of sparse attention's indexer: its keys and scales, and the check of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ... import check
from ..._core.tensors.dtypes import uint8
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

_MAX_BLOCK_BYTES = 2**30  # kernels count the bytes of a cache block in 32 bits


def indexer_parts(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Views of keys [num_blocks, block_size, head_size] and of the bytes of scales [num_blocks, block_size, ...]."""
    num_blocks, block_size, entry = kv_cache.shape
    flat = kv_cache.as_strided((num_blocks, block_size * entry), (kv_cache.stride(0), 1))
    sizes = (head_size, entry - head_size)
    parts = flat.split([block_size * size for size in sizes], 1)
    keys, scales = (part.unflatten(1, (block_size, size)) for part, size in zip(parts, sizes, strict=True))
    return keys, scales


def indexer_cache(kv_cache: TensorArg, head_size: int, scale_size: int) -> tuple[TensorArg, int]:
    """Check an indexer's cache; returns (its keys [num_blocks, block_size, head_size], alignment of its scales)."""
    check.dtype(kv_cache, uint8)
    check.sizes(kv_cache, num_blocks=None, block_size=None, entry=head_size + scale_size)
    num_blocks, block_size, entry = kv_cache.shape
    if block_size * entry > _MAX_BLOCK_BYTES:
        raise kv_cache.error(f"expected blocks of at most 2^30 bytes, got shape {kv_cache.shape}")
    check.contiguous(replace(kv_cache, shape=kv_cache.shape[1:], strides=kv_cache.strides[1:]))
    block_stride = kv_cache.strides[0]
    keys = replace(kv_cache, shape=(num_blocks, block_size, head_size), strides=(block_stride, head_size, 1))
    # The lowest set bit of the bitwise or is the largest power of two that divides all offsets.
    offsets = block_size * head_size | kv_cache.alignment | (block_stride if num_blocks > 1 else 0)
    return keys, offsets & -offsets
