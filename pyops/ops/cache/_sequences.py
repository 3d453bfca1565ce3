"""Code shared by the gathering ops: lookup of the sequence and the cache entry of each row, checks, examples."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from ._common import bad_table_entries, check_rows, existing_positions

if TYPE_CHECKING:
    from torch import Tensor


def existing_rows(
    cache: Tensor, block_table: Tensor, cu_seq_lens: Tensor, sequence: Tensor, seq_starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, blocks, offsets) of the rows with an existing entry; ``sequence[t]`` is the sequence of row t."""
    num_blocks, block_size = cache.shape[:2]
    num_seqs = min(len(cu_seq_lens) - 1, len(block_table))
    row = torch.arange(len(sequence), dtype=torch.int64, device=sequence.device)
    valid = (sequence >= 0) & (sequence < num_seqs)
    if num_seqs == 0:
        return existing_positions(block_table, torch.full_like(sequence, -1), row, num_blocks, block_size)
    known = sequence.where(valid, 0)
    begin, end = cu_seq_lens[known].long(), cu_seq_lens[known + 1].long()
    start = torch.zeros_like(begin) if seq_starts is None else seq_starts[known].long()
    valid &= (begin >= 0) & (row >= begin) & (row < end)
    valid &= (start >= 0) & (start <= block_table.shape[1] * block_size)
    return existing_positions(block_table, sequence.where(valid, -1), row - begin + start, num_blocks, block_size)


def sequence_of_rows(cu_seq_lens: Tensor, num_seqs: int, num_rows: int) -> Tensor:
    """The sequence of each row: the number of sequences that end at or before the row."""
    row = torch.arange(num_rows, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    return torch.searchsorted(cu_seq_lens[1 : num_seqs + 1].contiguous(), row, right=True)


def bad_sequences(
    cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    num_seqs: int,
    seq_starts: Tensor | None = None,
    num_rows: int | None = None,
) -> dict[str, Tensor]:
    """For PYOPS_CHECK: invalid entries of `cu_seq_lens`, `seq_starts` and `block_table`.

    An entry of `cu_seq_lens` is invalid if it is below 0 or above `num_rows` (if given), or if its sequence ends before
    it begins or beyond the last entry of the table. An entry of the table is invalid if it is read and out of range.
    """
    num_blocks, block_size = cache.shape[:2]
    capacity = block_table.shape[1] * block_size
    rows = cu_seq_lens[: num_seqs + 1].long()
    lengths = rows.diff()
    starts = torch.zeros_like(lengths) if seq_starts is None else seq_starts[:num_seqs].long()
    wrong = rows < 0 if num_rows is None else (rows < 0) | (rows > num_rows)
    wrong[1:] |= (lengths < 0) | ((lengths > 0) & (starts + lengths > capacity))
    found = {"cu_seq_lens": padded_mask(cu_seq_lens, wrong)}
    if seq_starts is not None:
        found["seq_starts"] = padded_mask(seq_starts, (lengths > 0) & ((starts < 0) | (starts > capacity)))
    return {**found, **bad_table_entries(block_table, starts, lengths, num_blocks, block_size)}


def padded_mask(values: Tensor, wrong: Tensor) -> Tensor:
    """`wrong`, a mask of the first `values`, as a mask of all `values`."""
    return torch.nn.functional.pad(wrong, (0, len(values) - len(wrong)))


def check_tables(block_table: TensorArg, cu_seq_lens: TensorArg, num_seqs: int | None = None) -> int:
    """Check that table and lengths have entries for `num_seqs` sequences; returns that number.

    `num_seqs` of None means the number of sequences in `cu_seq_lens`.
    """
    check.index(block_table, num_seqs=None, max_blocks=None)
    check.index(cu_seq_lens, **{"num_seqs + 1": None})
    if num_seqs is None:
        num_seqs = cu_seq_lens.shape[0] - 1
    if num_seqs < 0 or cu_seq_lens.shape[0] < num_seqs + 1:
        raise cu_seq_lens.error(f"expected at least num_seqs + 1 = {num_seqs + 1} entries, got {cu_seq_lens.shape}")
    check_rows(block_table, num_seqs)
    return num_seqs


def example_sequences(make: Any, num_tokens: int, block_size: int, start: int = 0) -> tuple[int, int, list[int], Any]:
    """(num_blocks, num_seqs, cu_seq_lens, block table) for an example of three sequences, one of them empty.

    The block table covers `start` more positions than each sequence has tokens.
    """
    offsets = [0, num_tokens // 3, num_tokens // 3, num_tokens]
    num_seqs = len(offsets) - 1
    longest = max(end - begin for begin, end in pairwise(offsets))
    max_blocks = -(-(start + longest) // block_size) + 1
    num_blocks = num_seqs * max_blocks
    return num_blocks, num_seqs, offsets, make.permutation(num_blocks, num_seqs, max_blocks, dtype="int32")
