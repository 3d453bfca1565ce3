"""Routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..ops.moe.routing_fused import fused_grouped_topk
from ..ops.moe.routing_grouped import MAX_GROUPS, MAX_TOP_K
from ..ops.moe.routing_grouped import grouped_topk as _grouped_topk
from .base import OpLayer
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GroupedTopk", "grouped_topk"]


@CustomOp.register("grouped_topk")
class GroupedTopk(OpLayer, op=_grouped_topk):
    """The top-k experts of each token, out of the best groups of experts.

    `pyops.grouped_topk` of logits, as in DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437).
    ``forward(hidden_states, gating_output, e_score_correction_bias=None)`` takes logits `gating_output`
    [num_tokens, num_experts] of any float dtype, and a bias [num_experts] or None. Of hidden_states only the number of
    tokens is used. It returns (weights float32, experts int32), both [num_tokens, topk], the best expert first.

    Scores are the softmax or the sigmoid of the logits, in float32. Experts are ranked by score, or by score plus bias
    if there is a bias. A group is ranked by its best expert, or by the sum of its two best experts if there is a bias.
    Experts are chosen from the `topk_group` best groups. The weight of an expert is its score, without the bias.
    Plain PyTorch computes more than 32 groups, or more than 32 experts per token.

    Args:
        topk: experts per token.
        renormalize: whether the weights of a token are divided by their sum.
        num_expert_group: groups of equal size into which the experts are divided.
        topk_group: groups from which the experts of a token are chosen.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: multiplies the weights, after they are renormalised.
        num_fused_shared_experts: not supported above 0.

    Examples:
        >>> router = GroupedTopk(topk=2, renormalize=True, num_expert_group=4, topk_group=2, scoring_func="sigmoid")
        >>> weights, experts = router(torch.randn(5, 64), torch.randn(5, 16), e_score_correction_bias=torch.zeros(16))
        >>> weights.shape, experts.dtype
        (torch.Size([5, 2]), torch.int32)
    """

    def __init__(
        self,
        topk: int,
        renormalize: bool,
        num_expert_group: int = 0,
        topk_group: int = 0,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        num_fused_shared_experts: int = 0,
    ) -> None:
        super().__init__()
        if scoring_func not in ("softmax", "sigmoid"):
            raise ValueError(f'GroupedTopk: scoring_func: expected "softmax" or "sigmoid", got {scoring_func!r}')
        if not 0 < topk_group <= num_expert_group:
            raise ValueError(
                f"GroupedTopk: topk_group: expected 1 to num_expert_group={num_expert_group}, got {topk_group}"
            )
        if num_fused_shared_experts:
            raise ValueError(f"GroupedTopk: num_fused_shared_experts: expected 0, got {num_fused_shared_experts}")
        self.topk, self.renormalize = topk, renormalize
        self.num_expert_group, self.topk_group = num_expert_group, topk_group
        self.scoring_func, self.routed_scaling_factor = scoring_func, routed_scaling_factor
        self.num_fused_shared_experts = num_fused_shared_experts

    def compute(
        self,
        op: Callable[..., Any],
        hidden_states: Tensor,
        gating_output: Tensor,
        e_score_correction_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_experts = gating_output.shape
        if hidden_states.shape[0] != num_tokens:
            raise ValueError(
                f"GroupedTopk: gating_output: expected {hidden_states.shape[0]} tokens like hidden_states, got "
                f"{num_tokens}"
            )
        size = num_experts // self.num_expert_group
        if num_experts % self.num_expert_group or self.topk > self.topk_group * size:
            raise ValueError(
                f"GroupedTopk: gating_output: expected experts in {self.num_expert_group} groups, {self.topk_group} of "
                f"which have at least topk={self.topk}, got {num_experts}"
            )
        weights = gating_output.new_empty((num_tokens, self.topk), dtype=torch.float32)
        experts = torch.empty_like(weights, dtype=torch.int32)
        groups = self.num_expert_group, self.topk_group, self.topk
        scale, bias = self.routed_scaling_factor, e_score_correction_bias
        number = 2 if self.scoring_func == "softmax" else 1
        op(gating_output, *groups, self.renormalize, scale, bias, number, topk_weights=weights, topk_ids=experts)
        return weights, experts

    def forward_cuda(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        takes = self.num_expert_group <= MAX_GROUPS and self.topk <= MAX_TOP_K
        forward = super().forward_cuda if takes else self.forward_native
        result: tuple[Tensor, Tensor] = forward(*args, **kwargs)
        return result


def grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`pyops.fused_grouped_topk` with the order of arguments that vLLM's function `grouped_topk` has.

    Examples:
        >>> hidden_states, logits = torch.randn(5, 64), torch.randn(5, 16)
        >>> weights, experts = grouped_topk(hidden_states, logits, 2, True, num_expert_group=4, topk_group=2)
        >>> weights.shape, experts.dtype
        (torch.Size([5, 2]), torch.int32)
    """
    groups = num_expert_group, topk_group
    choice = topk, renormalize, e_score_correction_bias
    return fused_grouped_topk(hidden_states, gating_output, *choice, *groups, scoring_func, routed_scaling_factor)
