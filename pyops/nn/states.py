"""States of sequences in slots of a cache, for layers that mix tokens by a recurrence or a convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []


def read_slots(cache: Tensor, num_seqs: int, slots: Tensor | None, has_initial: Tensor | None) -> Tensor:
    """The states of sequences, [num_seqs, ...]: zeros without an initial state or without a slot.

    Args:
        cache: [num_slots, ...].
        slots: [num_seqs] integers; None for slots 0, 1, 2, ...
        has_initial: [num_seqs] bool; None if no sequence has an initial state.
    """
    if has_initial is None:
        return cache.new_zeros(num_seqs, *cache.shape[1:])
    slots = torch.arange(num_seqs, dtype=torch.int64, device=cache.device) if slots is None else slots
    found = cache[slots.clamp(min=0).long()]
    return torch.where(_as_column(has_initial & (slots >= 0), found), found, 0.0)


def write_slots(cache: Tensor, states: Tensor, starts: Tensor, slots: Tensor | None) -> None:
    """Write the state of each sequence to its slot. Sequences without a slot or without tokens are skipped.

    Args:
        cache: [num_slots, ...], written.
        states: [num_seqs, ...].
        starts: [num_seqs + 1] integers, the first token of each sequence, and the end of the last.
        slots: [num_seqs] integers; None for slots 0, 1, 2, ...
    """
    num_seqs = len(states)
    slots = torch.arange(num_seqs, dtype=torch.int64, device=cache.device) if slots is None else slots.long()
    # Shapes must not depend on data, so every sequence writes. A sequence without a slot or tokens writes to the
    # slot of the first sequence that has both, and writes the same values as that sequence.
    has_slot = (slots >= 0) & (starts.diff() > 0)
    first = has_slot.int().argmax(0, keepdim=True)  # [1], because torch reads a 0-d index on the host
    slot = slots[first].clamp(min=0)
    again = torch.where(_as_column(has_slot[first], states), states[first].to(cache.dtype), cache[slot])
    cache[torch.where(has_slot, slots, slot)] = torch.where(_as_column(has_slot, states), states.to(cache.dtype), again)


def _as_column(mask: Tensor, states: Tensor) -> Tensor:
    """A mask of sequences, reshaped to broadcast over `states`."""
    return mask.view(-1, *[1] * (states.ndim - 1))
