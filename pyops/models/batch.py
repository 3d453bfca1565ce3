"""What one forward pass computes: the newest tokens of several sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The newest tokens of several sequences. One forward pass computes them and adds them to the cache.

    Attributes:
        tokens, positions, slot_mapping: [num_tokens] integers: the tokens, their rows in the cos/sin tables (their
            positions in their sequences, except in long sequences: see `Rope.cos_sin`), and their slots in the blocks
            of the cache. A token with slot -1 is not added to the blocks.
        block_tables: [num_seqs, max_blocks]: the cache blocks of each sequence.
        seq_lens: [num_seqs]: tokens of each sequence, the newest included.
        cu_seqlens_q: [num_seqs + 1]: the index of each sequence's first token in `tokens`, then num_tokens.
        state_slots: [num_seqs] int32: the slot of each sequence's states; -1 for a sequence without states. int64 in
            decode steps of a model without states, which does not read it.
        has_states: [num_seqs] bool: whether a sequence continues from the state in its slot; None if all do.
        num_decodes: the first num_decodes sequences have one token each and continue from their slots.
        shared: tensors that a layer of this pass has computed and later layers use, too.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    state_slots: Tensor
    has_states: Tensor | None
    num_decodes: int
    shared: dict[Any, Any] = field(default_factory=dict)

    def once(self, name: Any, compute: Callable[[], Any]) -> Any:
        """What `compute` returns to the first layer of this pass that asks by this name."""
        if name not in self.shared:
            self.shared[name] = compute()
        return self.shared[name]

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The sequence of each token, and the tokens of its sequence up to it, itself included: [num_tokens] int64."""
        lengths, num_tokens = self.seq_lens.long(), len(self.tokens)
        sequences = torch.arange(len(lengths), dtype=torch.int64, device=lengths.device)
        if self.num_decodes == num_tokens:
            return sequences, lengths
        starts = self.cu_seqlens_q.long()
        sequence = sequences.repeat_interleave(starts.diff(), output_size=num_tokens)
        tokens = torch.arange(num_tokens, dtype=torch.int64, device=lengths.device)
        after = starts[1:][sequence] - tokens  # tokens of the sequence from this one to the last one
        return sequence, lengths[sequence] - after + 1

    def blocks_at(self, numbers: Tensor) -> Tensor:
        """The entries [num_tokens, n] of the block tables of the tokens' sequences, by their numbers."""
        return self.block_tables[self.rows[0][:, None], numbers]

    @cached_property
    def cu_seqlens_of_prompts(self) -> Tensor:
        """`cu_seqlens_q` of the prefills: the sequences after the first num_decodes, counted from their first token."""
        return self.cu_seqlens_q[self.num_decodes :] - self.num_decodes
