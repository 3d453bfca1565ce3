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


def log_decays(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The logarithms of decays, in float64, from the gate of Kimi Delta Attention; `g` itself without A_log."""
    if A_log is None:
        return g.double()
    rate = A_log.double().exp()[:, None]
    logits = g.double() if dt_bias is None else g.double() + dt_bias.double().view(g.shape[2:])
    if lower_bound is None:
        return -rate * torch.nn.functional.softplus(logits)
    return lower_bound * torch.sigmoid(rate * logits)


class Rows:
    """All tokens of a call in float64, with batch and tokens flattened; `step` is a step of the recurrence.

    `g` has a logarithm of a decay for each value head, or for each of its key channels.
    """

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
        kept = torch.exp(rows(g))
        self.kept = kept[:, :, None] if kept.ndim == 2 else kept
        self.beta = torch.ones_like(self.kept[..., 0]) if beta is None else rows(beta)
        self.o, self.num_tokens = o, o.shape[1]
        self.zeros = torch.zeros(*v.shape[2:], k.shape[3], dtype=torch.float64, device=q.device)

    def step(self, state: Tensor, token: int) -> Tensor:
        """Writes the output of a token. Returns the state [value_heads, value_size, key_size] after it."""
        state = state * self.kept[token, :, None]
        key = self.k[token, :, None]
        change = self.beta[token, :, None] * (self.v[token] - (state * key).sum(-1))
        state = state + change[..., None] * key
        result = (state * self.q[token, :, None]).sum(-1)
        self.o[token // self.num_tokens, token % self.num_tokens] = result
        return state


def update_slots(
    rows: Rows,
    spans: list[tuple[int, int]],
    state: Tensor,
    indices: Tensor | None,
    accepted: Tensor | None,
    state_v_first: bool,
) -> None:
    """Steps through the tokens of sequences, with their states in slots; `gated_delta_rule_update` documents these."""
    for seq, (begin, end) in enumerate(spans):
        slots = [seq] if indices is None else indices[seq].reshape(-1).tolist()
        column = 0 if accepted is None else max(int(accepted[seq]), 1) - 1
        if begin == end or column >= len(slots) or not 0 <= slots[column] < len(state):
            continue
        held = v_first(state[slots[column]], state_v_first).double()
        for token in range(begin, end):
            held = rows.step(held, token)
            t = token - begin
            if indices is not None and indices.ndim == 2:
                if t < len(slots) and 0 <= slots[t] < len(state):
                    v_first(state[slots[t]], state_v_first).copy_(held)
            elif token == end - 1:
                v_first(state[slots[0]], state_v_first).copy_(held)
