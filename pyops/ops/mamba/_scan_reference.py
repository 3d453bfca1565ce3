"""Building blocks of the reference of the selective scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Rows(NamedTuple):
    """The tensors of a call with a token dimension, for all tokens or a part of them."""

    u: Tensor
    delta: Tensor
    z: Tensor | None
    B: Tensor
    C: Tensor

    def of(self, sequence: int) -> Rows:
        """The tensors of one sequence of a batch."""
        return Rows(*(None if rows is None else rows[sequence] for rows in self))

    def cut(self, begin: int, end: int) -> Rows:
        """Views of the tokens from `begin` to `end`."""
        return Rows(*(None if rows is None else rows[..., begin:end] for rows in self))


class Slots(NamedTuple):
    """The slots of sequences: `cache_indices` or, if it is None, slot b for sequence b."""

    cache_indices: Tensor | None
    num_slots: int
    pad_slot_id: int

    def at(self, sequence: int, columns: Tensor | None, offset: int = 0) -> int:
        """The slot at column ``columns[sequence] + offset`` of a sequence, or at the first; -1 if it does not exist."""
        if self.cache_indices is None:
            return sequence
        row = self.cache_indices[sequence].reshape(-1)
        column = offset if columns is None else int(columns[sequence]) + offset
        slot = int(row[column]) if 0 <= column < len(row) else -1
        return slot if slot != self.pad_slot_id and 0 <= slot < self.num_slots else -1


def first_block(
    sequence: int, cu_chunk_seqlen: Tensor | None, last_chunk_indices: Tensor | None, block_size: int
) -> int:
    """Tokens of the first block of a sequence: those of its first chunk if there are chunks, else `block_size`."""
    if cu_chunk_seqlen is None or last_chunk_indices is None:
        return block_size
    chunk = int(last_chunk_indices[sequence - 1]) + 1 if sequence else 0
    if not 0 <= chunk < len(cu_chunk_seqlen) - 1:
        return block_size
    tokens = int(cu_chunk_seqlen[chunk + 1]) - int(cu_chunk_seqlen[chunk])
    return tokens if 1 <= tokens <= block_size else block_size


def scan(rows: Rows, state: Tensor, A: Tensor, D: Tensor | None, bias: Tensor | None, softplus: bool) -> None:
    """The recurrence over the tokens of `rows`, one by one; writes `state`, `delta` and `z`."""
    u, d = rows.u.float(), rows.delta.float()
    if bias is not None:
        d = d + bias[:, None]
    if softplus:
        d = torch.nn.functional.softplus(d)
    share = len(A) // len(rows.B)  # channels that share B and C
    B, C = (each.float().repeat_interleave(share, 0) for each in (rows.B, rows.C))
    y = torch.empty_like(u)
    for t in range(u.shape[1]):
        state.mul_(torch.exp(d[:, t, None] * A)).add_((d[:, t] * u[:, t])[:, None] * B[..., t])
        y[:, t] = (state * C[..., t]).sum(-1)
    if D is not None:
        y += D[:, None] * u
    rows.delta.copy_(y)
    if rows.z is not None:
        rows.z.copy_(y * torch.nn.functional.silu(rows.z.float()))
