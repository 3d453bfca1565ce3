"""Example arguments of paged attention."""

from __future__ import annotations

from typing import Any

from ..._core.op.op import Op
from ..._core.tensors import dtypes
from .arguments import Options, PagedKV


def example_kv(
    make: Any,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_sizes: tuple[int, int],
    dtype: str,
    kv_cache_dtype: str,
    packed: bool,
    block_tables: Any,
    seq_lens: Any,
) -> PagedKV:
    """Caches of `num_blocks` blocks of random keys and values with these head sizes, for queries of `dtype`."""
    cache_dtype = dtypes.of(dtype if kv_cache_dtype == "auto" else "float8_e4m3fn")
    assert cache_dtype is not None
    head_size, value_size = head_sizes
    keys: tuple[int, ...] = (num_blocks, block_size, num_kv_heads, head_size)
    values: tuple[int, ...] = (num_blocks, block_size, num_kv_heads, value_size)
    if packed:
        x = 16 // cache_dtype.itemsize
        keys = (num_blocks, num_kv_heads, head_size // x, block_size, x)
        values = (num_blocks, num_kv_heads, value_size, block_size)
    return PagedKV(
        key_cache=make.randn(*keys, dtype=cache_dtype.name),
        value_cache=make.randn(*values, dtype=cache_dtype.name),
        num_kv_heads=num_kv_heads,
        block_tables=block_tables,
        seq_lens=seq_lens,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=make.full(1, value=0.5, dtype="float32"),
        v_scale=make.full(1, value=1.5, dtype="float32"),
    )


def example_options(make: Any, num_heads: int, num_rows: int, wanted: bool) -> Options:
    """Example options: all of them if `wanted`, else none."""
    if not wanted:
        return Options()
    return Options(
        alibi_slopes=make.randn(num_heads, dtype="float32", scale=0.1),
        sliding_window=40,
        logits_soft_cap=20.0,
        sinks=make.randn(num_heads, dtype="float32"),
        lse=make.empty(num_heads, num_rows, dtype="float32"),
    )


def example_decode(
    make: Any,
    num_seqs: int,
    seq_lens: tuple[int, int],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: str,
    kv_cache_dtype: str,
    packed: bool,
    options: bool,
) -> dict[str, Any]:
    """The arguments that every op of decode attention takes, by name.

    Args:
        seq_lens: the shortest and the longest length of a sequence.
        heads: query heads, key-value heads, head size.
    """
    num_heads, num_kv_heads, head_size = heads
    max_blocks = -(-seq_lens[1] // block_size)
    num_blocks = num_seqs * max_blocks
    block_tables = make.permutation(num_blocks, num_seqs, max_blocks, dtype="int32")
    lengths = make.randint(seq_lens[0], seq_lens[1] + 1, num_seqs, dtype="int32")
    kv = example_kv(
        make,
        num_blocks,
        block_size,
        num_kv_heads,
        (head_size, head_size),
        dtype,
        kv_cache_dtype,
        packed,
        block_tables,
        lengths,
    )
    return {
        "out": make.empty(num_seqs, num_heads, head_size, dtype=dtype),
        "query": make.randn(num_seqs, num_heads, head_size, dtype=dtype),
        "scale": head_size**-0.5,
        "max_seq_len": seq_lens[1],
        **kv.named(),
        **example_options(make, num_heads, num_seqs, options).named(),
    }


def in_order(op: Op, named: dict[str, Any]) -> tuple[Any, ...]:
    """A value for each parameter of the op: the one in the call, else the default."""
    return tuple(p.default if p.has_default and p.name not in named else named[p.name] for p in op.parameters)
