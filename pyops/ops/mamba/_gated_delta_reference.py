"""The gated delta rule token by token: code shared by the references of its ops."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ..._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def v_first(state: Tensor, statev_first: bool) -> Tensor:
    """A view [value_heads, value_size, key_size] of a state."""
    return state if statev_first else state.transpose(-1, -2)


def spans_of(q: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    """(first token, end) of each sequence; (0, 0) where cu_seqlens gives no valid range."""
    batch, num_tokens = q.shape[:2]
    if cu_seqlens is None:
        return [(i * num_tokens, (i + 1) * num_tokens) for i in range(batch)]
    spans = pairwise(cu_seqlens.tolist())
    return [(begin, end) if 0 <= begin <= end <= num_tokens else (0, 0) for begin, end in spans]


class Rows:
    """All tokens of a call in float64, with batch and tokens flattened; `step` is a step of the recurrence."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float, norm: bool, o: Tensor
    ) -> None:
        def rows(value: Tensor) -> Tensor:
            return value.double().flatten(0, 1)

        def keys(value: Tensor) -> Tensor:
            found = rows(value)
            if norm:
                found = found * torch.rsqrt((found * found).sum(-1, keepdim=True) + 1e-6)
            return found.repeat_interleave(v.shape[2] // q.shape[2], 1)

        self.q, self.k, self.v = keys(q) * scale, keys(k), rows(v)
        self.kept = torch.exp(rows(g))
        self.beta = torch.ones_like(self.kept) if beta is None else rows(beta)
        self.o, self.num_tokens = o, o.shape[1]
        self.zeros = torch.zeros(*v.shape[2:], k.shape[3], dtype=torch.float64, device=q.device)

    def step(self, state: Tensor, token: int) -> Tensor:
        """Writes the output of a token. Returns the state [value_heads, value_size, key_size] after it."""
        state = state * self.kept[token, :, None, None]
        key = self.k[token, :, None]
        change = self.beta[token, :, None] * (self.v[token] - (state * key).sum(-1))
        state = state + change[..., None] * key
        result = (state * self.q[token, :, None]).sum(-1)
        self.o[token // self.num_tokens, token % self.num_tokens] = result
        return state
