"""The references of top-k routing: which experts a token has, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..._core.system.lazy import torch
from .expert_scores import as_logits

if TYPE_CHECKING:
    from torch import Tensor


def choose(
    outputs: tuple[Tensor, Tensor, Tensor],
    gating_output: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    score: Callable[[Tensor], Tensor],
    is_padding: Tensor | None,
    scale: float = 1.0,
) -> None:
    """The best experts of each token: `outputs` are weights, ids and indices; `score` takes logits without NaN."""
    logits = gating_output.float()
    scores = score(as_logits(logits))
    keys = logits if bias is None else torch.where(logits.isnan(), logits, scores + bias)
    keys = torch.where(keys.isnan(), -torch.inf, keys)
    experts = keys.sort(dim=-1, descending=True, stable=True)[1][:, : outputs[1].shape[1]]
    write(outputs, scores.gather(1, experts), experts, renormalize, is_padding, scale)


def write(
    outputs: tuple[Tensor, Tensor, Tensor],
    weights: Tensor,
    experts: Tensor,
    renormalize: bool,
    is_padding: Tensor | None,
    scale: float,
) -> None:
    """Write the given experts of each token and their weights."""
    topk_weights, topk_ids, token_expert_indices = outputs
    if is_padding is not None:
        weights, experts = weights.where(~is_padding[:, None], 0.0), experts.where(~is_padding[:, None], -1)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    topk_weights.copy_(weights * scale)
    topk_ids.copy_(experts)
    num_tokens, topk = topk_ids.shape
    token_expert_indices.copy_(
        torch.arange(num_tokens * topk, dtype=torch.int64, device=topk_ids.device).view(topk, num_tokens).T
    )
