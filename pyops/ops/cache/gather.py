"""Gathering the entries of sequences from a paged cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import bfloat16, float16, float32, int32, uint8
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import fp8
from ._common import (
    CODES,
    bits,
    check_rows,
    entries,
    entries_outside,
    example_cache,
    flat,
    held,
    positions,
    spread,
    stride,
)
from .indexer import indexer_cache, indexer_parts

if TYPE_CHECKING:
    from torch import Tensor

_gather_cache = Kernel("cache/gather_cache.cu")
_cp_gather_and_upconvert_fp8_kv_cache = Kernel("cache/cp_gather_and_upconvert_fp8_kv_cache.cu")
_cp_gather_indexer_k_quant_cache = Kernel("cache/cp_gather_indexer_k_quant_cache.cu")

# Rows that a warp reads before it writes one, if there are enough of them to give every multiprocessor a block.
_UPCONVERT_ROWS, _UPCONVERT_THREADS = 2, 128

_WORDS = {1: uint8, 2: float16, 4: float32}  # an element type of each size, for kernels that only move it


def _where(
    cache: Tensor, block_table: Tensor, cu_seq_lens: Tensor, sequence: Tensor, seq_starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, blocks, offsets) of the rows 0, 1, ... that have an entry; `sequence` is the one of each row."""
    num_blocks, block_size = cache.shape[:2]
    num_seqs = min(len(cu_seq_lens) - 1, len(block_table))
    row = torch.arange(len(sequence), device=sequence.device)
    valid = (sequence >= 0) & (sequence < num_seqs)
    if num_seqs == 0:
        return positions(block_table, torch.full_like(sequence, -1), row, num_blocks, block_size)
    known = sequence.where(valid, 0)
    begin, end = cu_seq_lens[known].long(), cu_seq_lens[known + 1].long()
    start = torch.zeros_like(begin) if seq_starts is None else seq_starts[known].long()
    valid &= (begin >= 0) & (row >= begin) & (row < end)
    valid &= (start >= 0) & (start <= block_table.shape[1] * block_size)
    return positions(block_table, sequence.where(valid, -1), row - begin + start, num_blocks, block_size)


def _owners(cu_seq_lens: Tensor, num_seqs: int, num_rows: int) -> Tensor:
    """The sequence of each row: as many as end at or before it."""
    row = torch.arange(num_rows, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    return torch.searchsorted(cu_seq_lens[1 : num_seqs + 1].contiguous(), row, right=True)


def _outside(
    cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    num_seqs: int,
    seq_starts: Tensor | None = None,
    num_rows: int | None = None,
) -> dict[str, Tensor]:
    """For PYOPS_CHECK: rows before the first, or behind the last if `num_rows` are all; sequences that end before they
    begin, or where the table has no entries; and entries that name no block."""
    num_blocks, block_size = cache.shape[:2]
    capacity = block_table.shape[1] * block_size
    rows = cu_seq_lens[: num_seqs + 1].long()
    lengths = rows.diff()
    starts = torch.zeros_like(lengths) if seq_starts is None else seq_starts[:num_seqs].long()
    wrong = rows < 0 if num_rows is None else (rows < 0) | (rows > num_rows)
    wrong[1:] |= (lengths < 0) | ((lengths > 0) & (starts + lengths > capacity))
    found = {"cu_seq_lens": _among(cu_seq_lens, wrong)}
    if seq_starts is not None:
        found["seq_starts"] = _among(seq_starts, (lengths > 0) & ((starts < 0) | (starts > capacity)))
    return {**found, **entries_outside(block_table, starts, lengths, num_blocks, block_size)}


def _among(values: Tensor, wrong: Tensor) -> Tensor:
    """A mask of the first of `values` as one of all."""
    return torch.nn.functional.pad(wrong, (0, len(values) - len(wrong)))


def _gather_plan(
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
    """The launch for `num_rows` rows of `dst`; `absent` are pointers of the kernel that the op has no tensor for."""
    entry = entries(src_cache)
    rows = replace(dst, shape=(dst.shape[0], entry.size), strides=(dst.strides[0], 1))
    vec_size = check.vector_width(entry.size, flat(src_cache, entry), rows)
    grid, threads = spread(num_rows, max(1, entry.size // vec_size), dst.device)
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
        **threads,
    ).launch(
        grid=grid if src_cache.numel and block_table.numel else 0,
        block=threads["NUM_THREADS"],
        num_rows=num_rows,
        num_seqs=num_seqs,
        max_blocks=block_table.shape[1],
        dst_stride=stride(dst),
        table_stride=block_table.strides[0],
        table_entry_stride=block_table.strides[1],
        lens_stride=stride(cu_seq_lens),
        owner_stride=stride(token_to_seq),
        starts_stride=stride(seq_starts),
        **entry.strides,
        **dict.fromkeys(absent, 0),
    )


def _check_tables(block_table: TensorArg, cu_seq_lens: TensorArg, num_seqs: int | None = None) -> int:
    """The number of sequences, for which the table has rows and the lengths entries; all of them if None."""
    check.index(block_table, num_seqs=None, max_blocks=None)
    check.index(cu_seq_lens, **{"num_seqs + 1": None})
    if num_seqs is None:
        num_seqs = cu_seq_lens.shape[0] - 1
    if num_seqs < 0 or cu_seq_lens.shape[0] < num_seqs + 1:
        raise cu_seq_lens.error(f"expected at least num_seqs + 1 = {num_seqs + 1} entries, got {cu_seq_lens.shape}")
    check_rows(block_table, num_seqs)
    return num_seqs


@op(inout="dst", ulps=0)
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
    """Gather the entries of sequences from a paged cache into rows, taking fp8 codes back to floats.

    ``dst[t] = src_cache[block_table[b, p // block_size], p % block_size]``, or ``T(codes * scale)`` in float32, with
    ``b = token_to_seq[t]`` and ``p = t - cu_seq_lens[b] + seq_starts[b]``, for t below num_tokens. A row t outside its
    sequence (``t >= cu_seq_lens[b + 1]``), of no sequence, or whose entry does not exist is left as it is.

    Args:
        src_cache: [num_blocks, block_size, entry_size]; any strides but the last; of the dtype of `dst`, or uint8 or
            float8 codes.
        dst: [at least num_tokens, entry_size], float32, float16 or bfloat16, written row by row; any stride of rows.
        block_table: [at least num_seqs, max_blocks] int32 or int64, any strides.
        cu_seq_lens: [num_seqs + 1] int32 or int64: the row at which each sequence begins, and the end of the last.
        token_to_seq: [at least num_tokens] int32 or int64: the sequence of each row; any other number for none.
        num_tokens: rows to fill.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        scale: one float32, or a number; not read for "auto".
        seq_starts: [num_seqs] int32 or int64: the position at which the first row of each sequence is read, not
            negative; None for 0.
    """
    rows, block, offset = _where(src_cache, block_table, cu_seq_lens, token_to_seq[:num_tokens].long(), seq_starts)
    dst[rows] = held(src_cache, block, offset, scale, kv_cache_dtype, dst.dtype)


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
    num_seqs = _check_tables(block_table, cu_seq_lens)
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
    return _gather_plan(src_cache, dst, types, block_table, cu_seq_lens, num_seqs, token_to_seq, seq_starts, num_tokens)


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
    return {"token_to_seq": outside, **_outside(src_cache, block_table, cu_seq_lens, num_seqs, seq_starts)}


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


def _sequences(make: Any, num_tokens: int, block_size: int, start: int = 0) -> tuple[int, int, list[int], Any]:
    """(num_blocks, num_seqs, where each sequence begins and the last ends, block table) for an example.

    One of the sequences is empty. `start` positions lie before each.
    """
    offsets = [0, num_tokens // 3, num_tokens // 3, num_tokens]
    num_seqs = len(offsets) - 1
    longest = max(end - begin for begin, end in pairwise(offsets))
    max_blocks = -(-(start + longest) // block_size) + 1
    num_blocks = num_seqs * max_blocks
    return num_blocks, num_seqs, offsets, make.permutation(num_blocks, num_seqs, max_blocks, dtype="int32")


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
    num_blocks, _, offsets, block_table = _sequences(make, num_tokens, block_size, start=70)
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
    of no sequence, or whose entry does not exist, is left as it is.

    Args:
        src_cache: [num_blocks, block_size, ...] of any dtype of 1, 2 or 4 bytes that ops know; the elements of an entry
            one after another, any strides of blocks and slots.
        dst: [num_rows, ...] of the same dtype, written row by row; any stride of rows.
        block_table: [at least batch_size, max_blocks] int32 or int64, any strides.
        cu_seq_lens: [at least batch_size + 1] int32 or int64, ascending: the row at which each sequence begins.
        batch_size: sequences to gather.
        seq_starts: [at least batch_size] int32 or int64: the position at which each sequence is read, not negative;
            None for 0.
    """
    sequence = _owners(cu_seq_lens, batch_size, len(dst))
    sequence = sequence.where(sequence < batch_size, -1)
    rows, block, offset = _where(src_cache, block_table, cu_seq_lens, sequence, seq_starts)
    bits(dst)[rows] = bits(src_cache)[block, offset]


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
    if src_cache.dtype.itemsize not in _WORDS:
        raise src_cache.error(f"expected elements of 1, 2 or 4 bytes, got dtype {src_cache.dtype}")
    entries(src_cache)
    batch_size = index(batch_size)
    if batch_size < 0:
        raise check.refuse(dst, "batch_size", f"expected at least 0, got {batch_size}")
    if dst.shape[1:] != src_cache.shape[2:]:
        raise dst.error(f"expected rows of shape {src_cache.shape[2:]} like src_cache, got shape {dst.shape}")
    check.contiguous(replace(dst, shape=dst.shape[1:], strides=dst.strides[1:]))
    _check_tables(block_table, cu_seq_lens, batch_size)
    check.index(seq_starts, num_seqs=None)
    check_rows(seq_starts, batch_size, "batch_size")
    word = _WORDS[src_cache.dtype.itemsize]
    types = {"scalar_t": word, "cache_t": word}
    absent = ("token_to_seq", "scale")
    return _gather_plan(
        src_cache, dst, types, block_table, cu_seq_lens, batch_size, None, seq_starts, dst.shape[0], absent
    )


@cp_gather_cache.bad_indices
def bad_indices_cp_gather_cache(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor, batch_size: int, seq_starts: Tensor | None
) -> dict[str, Tensor]:
    return _outside(src_cache, block_table, cu_seq_lens, batch_size, seq_starts, len(dst))


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
    num_blocks, num_seqs, offsets, block_table = _sequences(make, num_tokens, block_size, start=70)
    return (
        example_cache(make, num_blocks, block_size, entry_size, dtype=dtype),
        make.empty(num_tokens, entry_size, dtype=dtype),
        block_table,
        make.values(offsets, dtype="int32"),
        num_seqs,
        make.values([0, 64, 70], dtype="int32") if with_starts else None,
    )


@op(inout="dst", ulps=0)
def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
) -> None:
    """Gather the 656-byte entries of sequences (see `concat_and_cache_mla`) from a paged cache as bfloat16 rows.

    ``dst[workspace_starts[b] + j, i] = bfloat16(code[i] * scale[i // 128])`` for i < 512, and the 64 elements behind
    them as they are, of the entry ``src_cache[block_table[b, j // block_size], j % block_size]``, for every b below
    batch_size and j below ``seq_lens[b]``. A row of no sequence, or whose entry does not exist, is left as it is. Of
    sequences that claim the same row, the first one has it.

    Args:
        src_cache: [num_blocks, block_size, 656] uint8; any strides but the last.
        dst: [num_rows, 576] bfloat16, written row by row; any stride of rows.
        block_table: [at least batch_size, max_blocks] int32 or int64, any strides.
        seq_lens: [at least batch_size] int32 or int64: tokens of each sequence.
        workspace_starts: [at least batch_size] int32 or int64: the row of `dst` at which each sequence begins.
        batch_size: sequences to gather.
    """
    row = torch.arange(len(dst), device=dst.device)
    starts, lengths = workspace_starts[:batch_size].long(), seq_lens[:batch_size].long()
    sequence, position = torch.full_like(row, -1), torch.zeros_like(row)
    for b in reversed(range(batch_size)):
        mine = (
            (starts[b] >= 0)
            & (row >= starts[b])
            & (row < starts[b].clamp(0, len(dst)) + lengths[b].clamp(max=len(dst)))
        )
        sequence, position = sequence.where(~mine, b), position.where(~mine, row - starts[b])
    rows, block, offset = positions(block_table, sequence, position, *src_cache.shape[:2])
    latent, scales, rope = src_cache[block, offset].split((512, 16, 128), -1)
    tiles = latent.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    values = tiles * scales.contiguous().view(torch.float32)[..., None]
    dst[rows] = torch.cat((values.flatten(1).to(dst.dtype), rope.contiguous().view(torch.bfloat16)), -1)


@cp_gather_and_upconvert_fp8_kv_cache.plan
def plan_cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: TensorArg,
    dst: TensorArg,
    block_table: TensorArg,
    seq_lens: TensorArg,
    workspace_starts: TensorArg,
    batch_size: int,
) -> Launch:
    check.dtype(src_cache, uint8)
    check.sizes(src_cache, num_blocks=None, block_size=None, entry=656)
    entry = entries(src_cache)
    check.dtype(dst, bfloat16)
    check.sizes(dst, num_rows=None, row=576)
    check.row_size(dst)
    check.index(block_table, num_seqs=None, max_blocks=None)
    for arg in (seq_lens, workspace_starts):
        check.index(arg, num_seqs=None)
    batch_size = index(batch_size)
    if batch_size < 0:
        raise check.refuse(dst, "batch_size", f"expected at least 0, got {batch_size}")
    for arg in (block_table, seq_lens, workspace_starts):
        check_rows(arg, batch_size, "batch_size")
    num_rows, num_threads = dst.shape[0], _UPCONVERT_THREADS
    groups = num_threads // 32
    rows = _UPCONVERT_ROWS if num_rows >= groups * _UPCONVERT_ROWS * dst.device.multiprocessors else 1
    return _cp_gather_and_upconvert_fp8_kv_cache(
        table_t=block_table.dtype,
        lens_t=seq_lens.dtype,
        starts_t=workspace_starts.dtype,
        BLOCK_SIZE=entry.block_size,
        ACCESS_SIZE=check.vector_width(16, src_cache),
        DST_ACCESS=check.vector_width(8, dst),
        ROWS=rows,
        NUM_THREADS=num_threads,
    ).launch(
        grid=-(-num_rows // (groups * rows)) if batch_size and src_cache.numel and block_table.numel else 0,
        block=num_threads,
        num_rows=num_rows,
        max_blocks=block_table.shape[1],
        dst_stride=stride(dst),
        table_stride=block_table.strides[0],
        table_entry_stride=block_table.strides[1],
        lens_stride=stride(seq_lens),
        starts_stride=stride(workspace_starts),
        **entry.strides,
    )


@cp_gather_and_upconvert_fp8_kv_cache.bad_indices
def bad_indices_cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
) -> dict[str, Tensor]:
    num_blocks, block_size = src_cache.shape[:2]
    lengths, rows = seq_lens[:batch_size].long(), workspace_starts[:batch_size].long()
    wrong_lengths = (lengths < 0) | (lengths > block_table.shape[1] * block_size)
    wrong_rows = (lengths > 0) & ((rows < 0) | (rows + lengths > len(dst)))
    return {
        "seq_lens": _among(seq_lens, wrong_lengths),
        "workspace_starts": _among(workspace_starts, wrong_rows),
        **entries_outside(block_table, torch.zeros_like(lengths), lengths, num_blocks, block_size),
    }


@cp_gather_and_upconvert_fp8_kv_cache.traffic
def traffic_cp_gather_and_upconvert_fp8_kv_cache(dst: TensorArg, block_table: TensorArg) -> int:
    return dst.nbytes + dst.shape[0] * 656 + block_table.nbytes


@cp_gather_and_upconvert_fp8_kv_cache.example
def example_cp_gather_and_upconvert_fp8_kv_cache(
    make: Any, *, num_tokens: int = 16, block_size: Literal[64] = 64
) -> tuple[Any, ...]:
    num_blocks, num_seqs, offsets, block_table = _sequences(make, num_tokens, block_size)
    return (
        make.randint(0, 60, num_blocks, block_size, 656, dtype="uint8"),
        make.empty(num_tokens, 576, dtype="bfloat16"),
        block_table,
        make.values([end - begin for begin, end in pairwise(offsets)], dtype="int32"),
        make.values(offsets[:-1], dtype="int32"),
        num_seqs,
    )


@op(inout=("dst_k", "dst_scale"), ulps=0)
def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """Gather the quantised keys of sequences and their scales from the indexer's cache (`indexer_k_quant_and_cache`).

    Row ``t`` of `dst_k` and `dst_scale` are the codes and the scales in slot ``j % block_size`` of the block
    ``block_table[b, j // block_size]``, with ``j = t - cu_seq_lens[b]`` and b the sequence for which
    ``cu_seq_lens[b] <= t < cu_seq_lens[b + 1]``. A row of no sequence, or whose slot does not exist, is left as it is.

    Args:
        kv_cache: [num_blocks, block_size, head_size + scale_size] uint8, the elements of a block one after another: the
            codes of all slots, then the scales of all slots; any stride of blocks.
        dst_k: [num_rows, head_size] uint8 or float8, written row by row; any stride of rows.
        dst_scale: [num_rows, scale_size] uint8, the bytes of float32 scales, written row by row; any stride of rows.
        block_table: [num_seqs, max_blocks] int32 or int64, any strides.
        cu_seq_lens: [num_seqs + 1] int32 or int64, ascending.
    """
    sequence = _owners(cu_seq_lens, len(cu_seq_lens) - 1, len(dst_k))
    rows, block, offset = _where(kv_cache, block_table, cu_seq_lens, sequence, None)
    keys, scales = indexer_parts(kv_cache, dst_k.shape[1])
    bits(dst_k)[rows] = keys[block, offset]
    dst_scale[rows] = scales[block, offset]


@cp_gather_indexer_k_quant_cache.plan
def plan_cp_gather_indexer_k_quant_cache(
    kv_cache: TensorArg, dst_k: TensorArg, dst_scale: TensorArg, block_table: TensorArg, cu_seq_lens: TensorArg
) -> Launch:
    check.dtype(dst_k, *CODES)
    check.dtype(dst_scale, uint8)
    check.sizes(dst_k, num_rows=None, head_size=None)
    num_rows, head_size = dst_k.shape
    check.sizes(dst_scale, num_rows=num_rows, scale_size=None)
    scale_size = dst_scale.shape[1]
    for arg in (dst_k, dst_scale):
        check.row_size(arg)
    if scale_size % 4 or not scale_size or 4 * head_size % scale_size:
        raise dst_scale.error(f"expected 4 bytes for each group of head_size={head_size}, got shape {dst_scale.shape}")
    keys, scale_alignment = indexer_cache(kv_cache, head_size, scale_size)
    num_seqs = _check_tables(block_table, cu_seq_lens)
    vec_size = check.vector_width(head_size, keys, dst_k)
    scale_vec = check.vector_width(scale_size | scale_alignment, dst_scale)
    grid, threads = spread(num_rows, head_size // vec_size + scale_size // scale_vec, dst_k.device)
    return _cp_gather_indexer_k_quant_cache(
        table_t=block_table.dtype,
        lens_t=cu_seq_lens.dtype,
        HEAD_SIZE=head_size,
        SCALE_SIZE=scale_size,
        BLOCK_SIZE=kv_cache.shape[1],
        VEC_SIZE=vec_size,
        SCALE_VEC=scale_vec,
        **threads,
    ).launch(
        grid=grid if kv_cache.numel and block_table.numel else 0,
        block=threads["NUM_THREADS"],
        num_rows=num_rows,
        num_seqs=num_seqs,
        num_blocks=kv_cache.shape[0],
        max_blocks=block_table.shape[1],
        block_stride=stride(kv_cache),
        dst_k_stride=stride(dst_k),
        dst_scale_stride=stride(dst_scale),
        table_stride=block_table.strides[0],
        table_entry_stride=block_table.strides[1],
        lens_stride=stride(cu_seq_lens),
    )


@cp_gather_indexer_k_quant_cache.bad_indices
def bad_indices_cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> dict[str, Tensor]:
    return _outside(kv_cache, block_table, cu_seq_lens, len(cu_seq_lens) - 1, num_rows=len(dst_k))


@cp_gather_indexer_k_quant_cache.traffic
def traffic_cp_gather_indexer_k_quant_cache(
    dst_k: TensorArg, dst_scale: TensorArg, block_table: TensorArg, cu_seq_lens: TensorArg
) -> int:
    return 2 * (dst_k.nbytes + dst_scale.nbytes) + block_table.nbytes + cu_seq_lens.nbytes


@cp_gather_indexer_k_quant_cache.example
def example_cp_gather_indexer_k_quant_cache(
    make: Any, *, num_tokens: int = 16, quant_block_size: Literal[128, 64] = 128
) -> tuple[Any, ...]:
    block_size, head_size = 64, 128
    scale_size = 4 * head_size // quant_block_size
    num_blocks, _, offsets, block_table = _sequences(make, num_tokens, block_size)
    return (
        make.randint(0, 120, num_blocks, block_size, head_size + scale_size, dtype="uint8"),
        make.empty(num_tokens, head_size, dtype="uint8"),
        make.empty(num_tokens, scale_size, dtype="uint8"),
        block_table,
        make.values(offsets, dtype="int32"),
    )
