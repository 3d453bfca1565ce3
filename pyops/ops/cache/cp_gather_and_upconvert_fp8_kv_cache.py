"""Gathering the 656-byte entries of multi-head latent attention from a paged cache as bfloat16 rows."""

from __future__ import annotations

from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, int32, uint8
from ..._core.tensors.tensor import TensorArg
from . import _geometry
from ._common import DS_MLA_BYTES, bad_table_entries, check_rows, entry_layout, existing_positions, first_stride
from ._sequences import example_sequences, padded_mask

if TYPE_CHECKING:
    from torch import Tensor

_cp_gather_and_upconvert_fp8_kv_cache = Kernel("cache/cp_gather_and_upconvert_fp8_kv_cache.cu")

# docs/performance/cache.md: one or two rows per warp are faster than four; blocks of 64 to 256 threads differ by less
# than 3 %.
_NUM_THREADS = 128
_ROWS = 2  # rows that a warp reads before it writes one, if every SM then still has a block


@op(inout="dst", ulps=0)
def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    seq_lens: Tensor | None,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """Gather the 656-byte entries of sequences (see `concat_and_cache_mla`) from a paged cache as bfloat16 rows.

    ``dst[workspace_starts[b] + j, i] = bfloat16(fp8[i] * scale[i // 128])`` for i < 512, and the 64 elements after
    them are copied, from the entry ``src_cache[block_table[b, p // block_size], p % block_size]`` with
    ``p = seq_starts[b] + j``, for every b below batch_size and j below ``seq_lens[b]``. A row of no sequence, or
    without an existing entry, is left unchanged. If sequences overlap, a row belongs to the first of them.

    Args:
        src_cache: [num_blocks, block_size, 656] uint8; any strides but the last.
        dst: [num_rows, 576] bfloat16, written row by row; any row stride.
        block_table: [at least batch_size, max_blocks] int32 or int64, any strides.
        seq_lens: [at least batch_size] int32 or int64: tokens of each sequence. None: a sequence ends where the next
            begins, the last with `dst`.
        workspace_starts: [at least batch_size] int32 or int64: the row of `dst` at which each sequence begins.
        batch_size: sequences to gather.
        seq_starts: [at least batch_size] int32 or int64: the first position of each sequence that is gathered; a
            sequence with one outside the table is not. None: 0.
    """
    sequences = seq_lens, workspace_starts, batch_size, seq_starts
    rows, block, offset = existing_rows(src_cache, dst, block_table, *sequences)
    latent, scales, rope = src_cache[block, offset].split((512, 16, 128), -1)
    tiles = latent.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    values = tiles * scales.contiguous().view(torch.float32)[..., None]
    dst[rows] = torch.cat((values.flatten(1).to(dst.dtype), rope.contiguous().view(torch.bfloat16)), -1)


def existing_rows(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    seq_lens: Tensor | None,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows of `dst`, blocks, offsets) of the rows with an entry."""
    row = torch.arange(len(dst), dtype=torch.int64, device=dst.device)
    starts, lengths, first = _sequences(dst, seq_lens, workspace_starts, batch_size, seq_starts)
    max_positions = block_table.shape[1] * src_cache.shape[1]
    first = first.where((first >= 0) & (first <= max_positions), max_positions)
    sequence, position = torch.full_like(row, -1), torch.zeros_like(row)
    for b in reversed(range(batch_size)):
        belongs = (
            (starts[b] >= 0)
            & (row >= starts[b])
            & (row < starts[b].clamp(0, len(dst)) + lengths[b].clamp(max=len(dst)))
        )
        sequence, position = sequence.where(~belongs, b), position.where(~belongs, row - starts[b] + first[b])
    return existing_positions(block_table, sequence, position, *src_cache.shape[:2])


def _sequences(
    dst: Tensor, seq_lens: Tensor | None, workspace_starts: Tensor, batch_size: int, seq_starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first row in `dst`, the length and the first position of each sequence, int64."""
    starts = workspace_starts[:batch_size].long()
    if seq_lens is None:
        bounds = torch.cat((starts, torch.full_like(starts[:1], len(dst)))).clamp(min=0)
        lengths = bounds.diff()
    else:
        lengths = seq_lens[:batch_size].long()
    return starts, lengths, torch.zeros_like(starts) if seq_starts is None else seq_starts[:batch_size].long()


@cp_gather_and_upconvert_fp8_kv_cache.plan
def plan_cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: TensorArg,
    dst: TensorArg,
    block_table: TensorArg,
    seq_lens: TensorArg | None,
    workspace_starts: TensorArg,
    batch_size: int,
    seq_starts: TensorArg | None,
) -> Launch:
    return launch(src_cache, dst, block_table, seq_lens, workspace_starts, batch_size, seq_starts, DS_MLA_BYTES)


def launch(
    src_cache: TensorArg,
    dst: TensorArg,
    block_table: TensorArg,
    seq_lens: TensorArg | None,
    workspace_starts: TensorArg,
    batch_size: int,
    seq_starts: TensorArg | None,
    entry_bytes: int,
) -> Launch:
    """The checks and the launch for entries of this size: 656 bytes, or the 352 of NVFP4."""
    check.dtype(src_cache, uint8)
    check.sizes(src_cache, num_blocks=None, block_size=None, entry=entry_bytes)
    entry = entry_layout(src_cache)
    check.dtype(dst, bfloat16)
    check.sizes(dst, num_rows=None, row=576)
    check.row_size(dst)
    check.index(block_table, num_seqs=None, max_blocks=None)
    by_sequence = [arg for arg in (seq_lens, workspace_starts, seq_starts) if arg is not None]
    for arg in by_sequence:
        check.index(arg, num_seqs=None)
    batch_size = index(batch_size)
    if batch_size < 0:
        raise check.refuse(dst, "batch_size", f"expected at least 0, got {batch_size}")
    for arg in (block_table, *by_sequence):
        check_rows(arg, batch_size, "batch_size")
    given = {"seq_lens": seq_lens, "seq_starts": seq_starts}
    absent: dict[str, Any] = {name: 0 for name, arg in given.items() if arg is None}
    num_rows, warps = dst.shape[0], _NUM_THREADS // 32
    rows = _ROWS if num_rows >= warps * _ROWS * dst.device.num_sms else 1
    num_blocks = -(-num_rows // (warps * rows))
    return _cp_gather_and_upconvert_fp8_kv_cache(
        table_t=block_table.dtype,
        lens_t=seq_lens.dtype if seq_lens else int32,
        starts_t=workspace_starts.dtype,
        first_t=seq_starts.dtype if seq_starts else int32,
        NVFP4=entry_bytes != DS_MLA_BYTES,
        HAS_LENS=seq_lens is not None,
        HAS_FIRST=seq_starts is not None,
        BLOCK_SIZE=entry.block_size,
        ACCESS_SIZE=check.vector_width(16, src_cache),
        DST_ACCESS=check.vector_width(8, dst),
        ROWS=rows,
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        **absent,
        grid=num_blocks if batch_size and src_cache.numel and block_table.numel else 0,
        block=_NUM_THREADS,
        num_rows=num_rows,
        max_blocks=block_table.shape[1],
        dst_stride=first_stride(dst),
        table_stride=block_table.strides[0],
        table_entry_stride=block_table.strides[1],
        lens_stride=first_stride(seq_lens) if seq_lens else 0,
        starts_stride=first_stride(workspace_starts),
        first_stride=first_stride(seq_starts) if seq_starts else 0,
        early_blocks=_geometry.early_blocks(num_blocks, dst.device),
        **entry.fixed,
    )


@cp_gather_and_upconvert_fp8_kv_cache.bad_indices
def bad_indices_cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    seq_lens: Tensor | None,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None,
) -> dict[str, Tensor]:
    num_blocks, block_size = src_cache.shape[:2]
    rows, lengths, first = _sequences(dst, seq_lens, workspace_starts, batch_size, seq_starts)
    positions = block_table.shape[1] * block_size
    wrong_first = (first < 0) | (first > positions)
    wrong_lengths = (lengths < 0) | (lengths > positions - first.where(~wrong_first, 0))
    wrong_rows = (lengths > 0) & ((rows < 0) | (rows + lengths > len(dst)))
    if seq_lens is None:
        wrong_rows |= wrong_lengths
    return {
        **({} if seq_lens is None else {"seq_lens": padded_mask(seq_lens, wrong_lengths)}),
        "workspace_starts": padded_mask(workspace_starts, wrong_rows),
        **({} if seq_starts is None else {"seq_starts": padded_mask(seq_starts, wrong_first)}),
        **bad_table_entries(block_table, first.where(~wrong_first, 0), lengths, num_blocks, block_size),
    }


@cp_gather_and_upconvert_fp8_kv_cache.traffic
def traffic_cp_gather_and_upconvert_fp8_kv_cache(dst: TensorArg, block_table: TensorArg) -> int:
    return dst.nbytes + dst.shape[0] * DS_MLA_BYTES + block_table.nbytes


@cp_gather_and_upconvert_fp8_kv_cache.example
def example_cp_gather_and_upconvert_fp8_kv_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    block_size: Literal[64] = 64,
    with_lengths: bool = True,
    with_starts: bool = False,
) -> tuple[Any, ...]:
    num_blocks, num_seqs, offsets, block_table = example_sequences(make, num_tokens, block_size)
    lengths = [end - begin for begin, end in pairwise(offsets)]
    return (
        make.randint(0, 60, num_blocks, block_size, 656, dtype="uint8"),
        make.empty(num_tokens, 576, dtype="bfloat16"),
        block_table,
        make.values(lengths, dtype="int32") if with_lengths else None,
        make.values(offsets[:-1], dtype="int32"),
        num_seqs,
        make.values([0] * num_seqs, dtype="int32") if with_starts else None,
    )
