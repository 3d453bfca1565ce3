"""Gathering the entries of sequences from a paged cache."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import FLOATS, bfloat16, float16, float32, int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from . import _geometry
from ._common import check_rows, decoded, entry_layout, example_cache, first_stride, indexable
from ._sequences import bad_sequences, check_tables, example_sequences, existing_rows, sequence_of_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_gather_cache = Kernel("cache/gather_cache.cu")

_MAX_SEQUENCES_OF_A_WARP = 31  # sequences for which a warp loads the bounds at once

# {bytes: element type} with which the kernel copies elements of any dtype of that size, bit for bit.
_COPIED_AS = {1: uint8, 2: float16, 4: float32}


def _launch(
    src_cache: TensorArg,
    dst: TensorArg,
    types: dict[str, Any],
    block_table: TensorArg,
    cu_seq_lens: TensorArg,
    num_seqs: int,
    token_to_seq: TensorArg | None,
    seq_starts: TensorArg | None,
    num_rows: int,
    absent: tuple[str, ...] = (),
) -> Launch:
    """The launch of gather_cache.cu for `num_rows` rows of `dst`.

    `types` are the element types scalar_t and cache_t; `absent` names the kernel's pointers that are null.
    """
    entry = entry_layout(src_cache)
    flat_entries, rows = (
        replace(arg, shape=(*arg.shape[:dims], entry.size), strides=(*arg.strides[:dims], 1))
        for arg, dims in ((src_cache, 2), (dst, 1))
    )
    vec_size = check.vector_width(entry.size, flat_entries, rows)
    looks_early = token_to_seq is not None or num_seqs <= _MAX_SEQUENCES_OF_A_WARP
    config = _geometry.config(dst, num_rows, max(1, entry.size // vec_size), early=looks_early)
    return _gather_cache(
        **types,
        table_t=block_table.dtype,
        lens_t=cu_seq_lens.dtype,
        owner_t=token_to_seq.dtype if token_to_seq else int32,
        starts_t=seq_starts.dtype if seq_starts else int32,
        ENTRY_SIZE=entry.size,
        BLOCK_SIZE=entry.block_size,
        HAS_OWNER=token_to_seq is not None,
        HAS_STARTS=seq_starts is not None,
        VEC_SIZE=vec_size,
        **config.constants,
    ).launch(
        grid=config.num_blocks(num_rows) if src_cache.numel and block_table.numel else 0,
        block=config.num_threads,
        num_rows=num_rows,
        num_seqs=num_seqs,
        max_blocks=block_table.shape[1],
        dst_stride=first_stride(dst),
        table_stride=block_table.strides[0],
        table_entry_stride=block_table.strides[1],
        lens_stride=first_stride(cu_seq_lens),
        owner_stride=first_stride(token_to_seq),
        starts_stride=first_stride(seq_starts),
        early_blocks=_geometry.early_blocks(config.num_blocks(num_rows), dst.device) if looks_early else 0,
        **entry.fixed,
        **dict.fromkeys(absent, 0),
    )


@op(partial="dst", ulps=0)
def gather_and_maybe_dequant_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Tensor | float,
    seq_starts: Tensor | None = None,
) -> None:
    """Gather the entries of sequences from a paged cache into rows, and dequantize fp8.

    ``dst[t] = src_cache[block_table[b, p // block_size], p % block_size]``, or ``T(fp8 * scale)`` in float32, with
    ``b = token_to_seq[t]`` and ``p = t - cu_seq_lens[b] + seq_starts[b]``, for t below num_tokens. A row t outside its
    sequence (``t >= cu_seq_lens[b + 1]``), of no sequence, or with an entry that does not exist is left unchanged.

    Args:
        src_cache: [num_blocks, block_size, entry_size]; any strides but the last; of the dtype of `dst`, or uint8 or
            float8.
        dst: [at least num_tokens, entry_size], float32, float16 or bfloat16, written row by row; any row stride.
        block_table: [at least num_seqs, max_blocks] int32 or int64, any strides.
        cu_seq_lens: [num_seqs + 1] int32 or int64: the row at which each sequence begins, and the end of the last.
        token_to_seq: [at least num_tokens] int32 or int64: the sequence of each row; out of range: no sequence.
        num_tokens: rows to fill.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        scale: one float32, or a number; not read for "auto".
        seq_starts: [num_seqs] int32 or int64: the position at which the first row of each sequence is read, not
            negative; None for 0.
    """
    rows, block, offset = existing_rows(
        src_cache, block_table, cu_seq_lens, token_to_seq[:num_tokens].long(), seq_starts
    )
    dst[rows] = decoded(src_cache, block, offset, scale, kv_cache_dtype, dst.dtype)


@gather_and_maybe_dequant_cache.result
def result_gather_and_maybe_dequant_cache(
    src_cache: TensorArg, num_tokens: int, *, out_dtype: torch.dtype | None = None
) -> Result:
    """A row for each of `num_tokens` tokens.

    Args:
        out_dtype: of the output; None for the dtype of the cache if that is a float of 16 or 32 bits, else bfloat16.

    Returns:
        dst: [num_tokens, entry_size]; zeros where there is no entry.
    """
    check.sizes(src_cache, num_blocks=None, block_size=None, entry_size=None)
    default = src_cache.dtype if src_cache.dtype in FLOATS else bfloat16
    dtype = check.chosen(src_cache, "out_dtype", out_dtype, default)
    return Result((index(num_tokens), src_cache.shape[2]), dtype)


@gather_and_maybe_dequant_cache.plan
def plan_gather_and_maybe_dequant_cache(
    src_cache: TensorArg,
    dst: TensorArg,
    block_table: TensorArg,
    cu_seq_lens: TensorArg,
    token_to_seq: TensorArg,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: TensorArg,
    seq_starts: TensorArg | None,
) -> Launch:
    check.floating(dst)
    kind = fp8.cache_dtype(src_cache, kv_cache_dtype, dst.dtype)
    check.sizes(src_cache, num_blocks=None, block_size=None, entry_size=None)
    check.sizes(dst, num_tokens=None, entry_size=src_cache.shape[2])
    check.row_size(dst)
    num_seqs = check_tables(block_table, cu_seq_lens)
    check.index(token_to_seq, num_tokens=None)
    check.index(seq_starts, num_seqs=None)
    check_rows(seq_starts, num_seqs)
    check.scalar(scale)
    num_tokens = index(num_tokens)
    if num_tokens < 0:
        raise check.refuse(dst, "num_tokens", f"expected at least 0, got {num_tokens}")
    for arg in (dst, token_to_seq):
        check_rows(arg, num_tokens, "num_tokens")
    types = {"scalar_t": dst.dtype, "cache_t": kind}
    return _launch(src_cache, dst, types, block_table, cu_seq_lens, num_seqs, token_to_seq, seq_starts, num_tokens)


@gather_and_maybe_dequant_cache.bad_indices
def bad_indices_gather_and_maybe_dequant_cache(
    src_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    seq_starts: Tensor | None,
) -> dict[str, Tensor]:
    num_seqs = len(cu_seq_lens) - 1
    outside = (token_to_seq < 0) | (token_to_seq >= num_seqs)
    outside[num_tokens:] = False
    return {"token_to_seq": outside, **bad_sequences(src_cache, block_table, cu_seq_lens, num_seqs, seq_starts)}


@gather_and_maybe_dequant_cache.traffic
def traffic_gather_and_maybe_dequant_cache(
    src_cache: TensorArg,
    dst: TensorArg,
    block_table: TensorArg,
    cu_seq_lens: TensorArg,
    token_to_seq: TensorArg,
    num_tokens: int,
) -> int:
    row = dst.shape[1] * (src_cache.dtype.itemsize + dst.dtype.itemsize)
    return num_tokens * (row + token_to_seq.dtype.itemsize) + block_table.nbytes + cu_seq_lens.nbytes


@gather_and_maybe_dequant_cache.example
def example_gather_and_maybe_dequant_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = "auto",
    with_starts: bool = False,
) -> tuple[Any, ...]:
    block_size, entry_size = 64, 576
    num_blocks, _, offsets, block_table = example_sequences(make, num_tokens, block_size, start=70)
    owners = [0] * offsets[1] + [2] * (num_tokens - offsets[1])
    return (
        example_cache(make, num_blocks, block_size, entry_size, dtype=dtype if kv_cache_dtype == "auto" else "uint8"),
        make.empty(num_tokens, entry_size, dtype=dtype),
        block_table,
        make.values(offsets, dtype="int32"),
        make.values(owners, dtype="int32"),
        num_tokens,
        kv_cache_dtype,
        make.full(1, value=0.03, dtype="float32"),
        make.values([0, 64, 70], dtype="int32") if with_starts else None,
    )


@op(inout="dst", ulps=0)
def cp_gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """Gather the entries of sequences from a paged cache into rows, bit for bit (context parallelism).

    ``dst[cu_seq_lens[b] + j] = src_cache[block_table[b, p // block_size], p % block_size]`` with
    ``p = j + seq_starts[b]``, for every b below batch_size and j below ``cu_seq_lens[b + 1] - cu_seq_lens[b]``. A row
    of no sequence, or with an entry that does not exist, is left unchanged.

    Args:
        src_cache: [num_blocks, block_size, ...] of any supported dtype of 1, 2 or 4 bytes; contiguous entries, any
            strides of blocks and slots.
        dst: [num_rows, ...] of the same dtype, written row by row; any row stride.
        block_table: [at least batch_size, max_blocks] int32 or int64, any strides.
        cu_seq_lens: [at least batch_size + 1] int32 or int64, ascending: the row at which each sequence begins.
        batch_size: sequences to gather.
        seq_starts: [at least batch_size] int32 or int64: the position at which each sequence is read, not negative;
            None for 0.
    """
    sequence = sequence_of_rows(cu_seq_lens, batch_size, len(dst))
    sequence = sequence.where(sequence < batch_size, -1)
    rows, block, offset = existing_rows(src_cache, block_table, cu_seq_lens, sequence, seq_starts)
    indexable(dst)[rows] = indexable(src_cache)[block, offset]


@cp_gather_cache.plan
def plan_cp_gather_cache(
    src_cache: TensorArg,
    dst: TensorArg,
    block_table: TensorArg,
    cu_seq_lens: TensorArg,
    batch_size: int,
    seq_starts: TensorArg | None,
) -> Launch:
    check.dtype(dst, src_cache.dtype)
    if src_cache.dtype.itemsize not in _COPIED_AS:
        raise src_cache.error(f"expected elements of 1, 2 or 4 bytes, got dtype {src_cache.dtype}")
    entry_layout(src_cache)
    batch_size = index(batch_size)
    if batch_size < 0:
        raise check.refuse(dst, "batch_size", f"expected at least 0, got {batch_size}")
    if dst.shape[1:] != src_cache.shape[2:]:
        raise dst.error(f"expected rows of shape {src_cache.shape[2:]} like src_cache, got shape {dst.shape}")
    check.contiguous(replace(dst, shape=dst.shape[1:], strides=dst.strides[1:]))
    check_tables(block_table, cu_seq_lens, batch_size)
    check.index(seq_starts, num_seqs=None)
    check_rows(seq_starts, batch_size, "batch_size")
    copied_as = _COPIED_AS[src_cache.dtype.itemsize]
    types = {"scalar_t": copied_as, "cache_t": copied_as}
    absent = ("token_to_seq", "scale")
    return _launch(src_cache, dst, types, block_table, cu_seq_lens, batch_size, None, seq_starts, dst.shape[0], absent)


@cp_gather_cache.bad_indices
def bad_indices_cp_gather_cache(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor, batch_size: int, seq_starts: Tensor | None
) -> dict[str, Tensor]:
    return bad_sequences(src_cache, block_table, cu_seq_lens, batch_size, seq_starts, len(dst))


@cp_gather_cache.traffic
def traffic_cp_gather_cache(dst: TensorArg, block_table: TensorArg, cu_seq_lens: TensorArg) -> int:
    return 2 * dst.nbytes + block_table.nbytes + cu_seq_lens.nbytes


@cp_gather_cache.example
def example_cp_gather_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["bfloat16", "float32", "uint8"] = "bfloat16",
    with_starts: bool = False,
) -> tuple[Any, ...]:
    block_size, entry_size = 64, 576
    num_blocks, num_seqs, offsets, block_table = example_sequences(make, num_tokens, block_size, start=70)
    return (
        example_cache(make, num_blocks, block_size, entry_size, dtype=dtype),
        make.empty(num_tokens, entry_size, dtype=dtype),
        block_table,
        make.values(offsets, dtype="int32"),
        num_seqs,
        make.values([0, 64, 70], dtype="int32") if with_starts else None,
    )
