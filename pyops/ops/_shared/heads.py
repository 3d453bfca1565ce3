"""Norms and RoPE of heads, as references compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def normed(x: Tensor, weight: Tensor | None, bias: float, eps: float) -> Tensor:
    """Heads [num_tokens, heads, head_size] after RMS norm, in float32."""
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * (scale if weight is None else scale * (weight.float() + bias))


def known_positions(positions: Tensor, cos: Tensor | None) -> Tensor:
    """Which tokens may be inserted: those with a position in the table, or all without one."""
    return torch.ones_like(positions, dtype=torch.bool) if cos is None else (positions >= 0) & (positions < len(cos))


def rotated(x: Tensor, positions: Tensor, cos: Tensor | None, sin: Tensor | None, pairs: int, is_neox: bool) -> Tensor:
    """Float32 heads [num_tokens, heads, head_size]; their first 2 * `pairs` elements are rotated, for known tokens."""
    if cos is None or sin is None or not pairs:
        return x
    known = known_positions(positions, cos)
    at = positions.where(known, 0).long()
    c, s = (table[at, None, :pairs].float() for table in (cos, sin))
    if is_neox:
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        rotary = torch.cat((a * c - b * s, b * c + a * s), -1)
    else:
        a, b = x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        rotary = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    return torch.where(known[:, None, None], torch.cat((rotary, x[..., 2 * pairs :]), -1), x)
