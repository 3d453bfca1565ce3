"""The layout of keys and values, in a paged cache or ragged tensors, and the checks of a call's cache arguments."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import DType, float32
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from .arguments import Options, PagedKV, RaggedKV

if TYPE_CHECKING:
    from torch import Tensor

# Most tokens of a sequence. Kernels count tokens in 32 bits, and one step past the end must not overflow.
MAX_TOKENS = 2**31 - 2**20
_MAX_HEAD_SIZE = 1024  # elements of the largest head


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The memory layout of keys and values.

    Attributes:
        packed: keys are [num_blocks, num_kv_heads, head_size / x, block_size, x] and values [num_blocks, num_kv_heads,
            value_size, block_size]; else keys are [num_blocks, block_size, num_kv_heads, head_size] and values
            [num_blocks, block_size, num_kv_heads, value_size].
        dtype: element type of both caches.
        value_size: elements of a value of a head.
        x: elements in 16 bytes.
        head_scales: whether each key-value head of an fp8 cache has its own scales.
        strides: strides of the key and value cache, by the names of the kernels' parameters.
        aligned: all 16-byte loads of kernels are aligned.
        ragged: keys and values are ragged tensors, [num_keys, num_kv_heads, head_size] and [num_keys, num_kv_heads,
            value_size]; each row counts as a block of one slot.
    """

    packed: bool
    dtype: DType
    num_blocks: int
    block_size: int
    num_kv_heads: int
    value_size: int
    x: int
    head_scales: bool
    strides: dict[str, int]
    aligned: bool
    ragged: bool = False

    @classmethod
    def of(cls, kv: PagedKV, query: TensorArg) -> CacheLayout:
        """The layout of the caches of `kv` for this query; OpError for caches with neither of the two layouts."""
        keys, values, head_size = kv.key_cache, kv.value_cache, query.shape[2]
        dtype = fp8.cache_dtype(keys, kv.kv_cache_dtype, query.dtype)
        if fp8.cache_dtype(values, kv.kv_cache_dtype, query.dtype) is not dtype:
            raise values.error(f"expected {dtype} like key_cache, got {values.dtype}")
        packed, x = len(keys.shape) == 5, 16 // dtype.itemsize
        if packed:
            if len(values.shape) != 4:
                raise values.error(f"expected 4 dimensions beside a key_cache of 5, got shape {values.shape}")
            num_blocks, num_kv_heads, _, block_size, _ = keys.shape
            if head_size % x:
                raise keys.error(f"a packed cache of {dtype} takes head sizes that are multiples of {x}")
            _check_cache(keys, (num_blocks, num_kv_heads, head_size // x, block_size, x), (block_size * x, x, 1))
            value_size = values.shape[2]
            _check_cache(values, (num_blocks, num_kv_heads, value_size, block_size), (block_size, 1))
        else:
            if len(keys.shape) != 4:
                raise keys.error(f"expected 5 dimensions (packed) or 4, got shape {keys.shape}")
            num_blocks, block_size, num_kv_heads, _ = keys.shape
            value_size = values.shape[-1] if values.shape else 0
            for cache, size in ((keys, head_size), (values, value_size)):
                _check_cache(cache, (num_blocks, block_size, num_kv_heads, size), (1,))
        head_dim = 1 if packed else 2
        strides = {}
        aligned = head_size % x == 0 and (packed or value_size % x == 0)
        aligned &= keys.alignment == values.alignment == 16
        for name, cache in (("key", keys), ("value", values)):
            strides[f"{name}_block_stride"] = cache.strides[0]
            strides[f"{name}_token_stride"] = 0 if packed else cache.strides[1]
            strides[f"{name}_head_stride"] = cache.strides[head_dim]
            outer = cache.strides[: head_dim + 1]
            aligned &= all(stride % x == 0 or size == 1 for stride, size in zip(outer, cache.shape, strict=False))
        head_scales = dtype is not query.dtype and _has_head_scales(kv)
        sizes = num_blocks, block_size, num_kv_heads, value_size
        return cls(packed, dtype, *sizes, x, head_scales, strides, aligned)

    @classmethod
    def of_rows(cls, kv: RaggedKV, query: TensorArg) -> CacheLayout:
        """The layout of ragged keys and values for this query; OpError for tensors that are not ragged keys and
        values."""
        key, value, x = kv.key, kv.value, 16 // query.dtype.itemsize
        check.sizes(key, num_keys=None, num_kv_heads=None, head_size=query.shape[2])
        num_keys, num_kv_heads, _ = key.shape
        check.sizes(value, num_keys=num_keys, num_kv_heads=num_kv_heads, value_size=None)
        if num_keys > MAX_TOKENS:
            raise key.error(f"expected at most {MAX_TOKENS} rows, got shape {key.shape}")
        strides: dict[str, int] = {}
        aligned = True
        for name, rows in (("key", key), ("value", value)):
            check.dtype(rows, query.dtype)
            _check_cache(rows, rows.shape, (1,))
            strides |= {f"{name}_block_stride": rows.strides[0], f"{name}_token_stride": 0}
            strides[f"{name}_head_stride"] = rows.strides[1]
            aligned &= rows.alignment == 16 and rows.shape[2] % x == 0
            aligned &= all(
                stride % x == 0 or size == 1 for stride, size in zip(rows.strides[:2], rows.shape, strict=False)
            )
        sizes = num_keys, 1, num_kv_heads, value.shape[2]
        return cls(False, query.dtype, *sizes, x, False, strides, aligned, ragged=True)


def _has_head_scales(kv: PagedKV) -> bool:
    """Whether scales are per head, by the rule of `reshape_and_cache_flash`."""
    return kv.num_kv_heads > 1 and (kv.num_kv_heads,) in (kv.k_scale.shape, kv.v_scale.shape)


def _check_cache(cache: TensorArg, shape: tuple[int, ...], inner_strides: tuple[int, ...]) -> None:
    """Check the shape of a cache and its innermost strides."""
    if cache.shape != shape:
        raise cache.error(f"expected shape {shape}, got {cache.shape}")
    count = len(inner_strides)
    inner = zip(cache.shape[-count:], cache.strides[-count:], inner_strides, strict=True)
    if cache.numel and any(size > 1 and stride != expected for size, stride, expected in inner):
        raise cache.error(f"expected the last {count} dimensions contiguous, got strides {cache.strides}")


def check_kv(query: TensorArg, kv: PagedKV, options: Options, *, short_values: bool = False) -> CacheLayout:
    """The layout of the caches, if query, caches, tables and options fit together.

    Args:
        short_values: whether a value of a head may have fewer elements than a key.
    """
    check.floating(query)
    check.sizes(query, num_tokens=None, num_heads=None, head_size=None)
    check.index(kv.block_tables, num_seqs=None, max_blocks=None)
    check.index(kv.seq_lens, num_seqs=kv.block_tables.shape[0])
    layout = CacheLayout.of(kv, query)
    for name, given, held in (
        ("num_kv_heads", kv.num_kv_heads, layout.num_kv_heads),
        ("block_size", kv.block_size, layout.block_size),
    ):
        if given != held:
            shape = kv.key_cache.shape
            raise check.refuse(query, name, f"expected {held} as in key_cache of shape {shape}, got {given}")
    _check_heads(query, kv.value_cache, layout, short_values)
    _check_options(query, options)
    for of_cache in (kv.k_scale, kv.v_scale):
        if layout.head_scales:
            check.shape(of_cache, float32, num_kv_heads=kv.num_kv_heads)
        else:
            check.at_least(of_cache, float32, 1)
    return layout


def check_rows(query: TensorArg, kv: RaggedKV, options: Options) -> CacheLayout:
    """The layout of ragged keys and values, if query, keys, values, cu_seqlens_k and options fit together."""
    check.floating(query)
    check.sizes(query, num_tokens=None, num_heads=None, head_size=None)
    check.index(kv.cu_seqlens_k, num_seqs_and_one=None)
    layout = CacheLayout.of_rows(kv, query)
    _check_heads(query, kv.value, layout, short_values=True)
    _check_options(query, options)
    return layout


def _check_heads(query: TensorArg, values: TensorArg, layout: CacheLayout, short_values: bool) -> None:
    """Check that query heads are a multiple of key-value heads, and that kernels support their sizes."""
    _, num_heads, head_size = query.shape
    num_kv_heads, value_size = layout.num_kv_heads, layout.value_size
    if num_kv_heads == 0 or num_heads % num_kv_heads or layout.block_size == 0 or head_size == 0:
        raise query.error(f"expected heads that are a multiple of num_kv_heads={num_kv_heads}, got shape {query.shape}")
    if head_size > _MAX_HEAD_SIZE:
        raise query.error(f"expected a head_size of at most {_MAX_HEAD_SIZE}, got {head_size}")
    if not (1 if short_values else head_size) <= value_size <= head_size:
        raise values.error(
            f"expected values of {'at most ' * short_values}{head_size} elements like keys, got shape {values.shape}"
        )


def _check_options(query: TensorArg, options: Options) -> None:
    for per_head in (options.alibi_slopes, options.sinks):
        check.shape(per_head, float32, num_heads=query.shape[1])
    if options.sliding_window < 0:
        raise check.refuse(query, "sliding_window", f"expected 0 or more, got {options.sliding_window}")
    if not 0.0 <= options.logits_soft_cap < inf:
        raise check.refuse(query, "logits_soft_cap", f"expected 0 or more, finite, got {options.logits_soft_cap}")


def max_tokens_of(kv: PagedKV | RaggedKV) -> int:
    """Capacity of a sequence in tokens: that of its row of the block table, or of a ragged tensor."""
    if isinstance(kv, RaggedKV):
        return int(kv.key.shape[0])
    return min(int(kv.block_tables.shape[1]) * kv.block_size, MAX_TOKENS)


def heads_stride(arg: TensorArg) -> int:
    """Row stride of [rows, heads, head_size], in elements; OpError unless heads and elements are contiguous."""
    _, heads, size = arg.shape
    if arg.numel and ((size > 1 and arg.strides[2] != 1) or (heads > 1 and arg.strides[1] != size)):
        raise arg.error(f"expected the last two dimensions contiguous, got strides {arg.strides}")
    return arg.strides[0]


def absent(**arguments: TensorArg | None) -> dict[str, int]:
    """A null pointer for each of these arguments that is None."""
    return {name: 0 for name, arg in arguments.items() if arg is None}


def bad_indices(
    block_tables: Tensor,
    seq_lens: Tensor,
    num_blocks: int,
    block_size: int,
    attended: Tensor | int = 0,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """For PYOPS_CHECK: lengths beyond the block table, and attended block numbers that the cache does not have.

    Args:
        attended: tokens at the end of each sequence that are attended to; 0 for all.
        max_tokens: a bound of the lengths in addition to the capacity of the block table.
    """
    room = block_tables.shape[1] * block_size
    room = room if max_tokens is None else min(room, max_tokens)
    first_tokens = torch.arange(block_tables.shape[1], dtype=torch.int64, device=block_tables.device) * block_size
    begins = torch.where(torch.as_tensor(attended, device=seq_lens.device) > 0, seq_lens - attended, 0)
    used = (first_tokens < seq_lens[:, None]) & (first_tokens + block_size > begins[:, None])
    return {
        "block_tables": used & ((block_tables < 0) | (block_tables >= num_blocks)),
        "seq_lens": {"are out of range": seq_lens < 0, f"are cut to the room for {room} tokens": seq_lens > room},
    }
