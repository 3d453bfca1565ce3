"""Grouped top-k routing: the best experts of each token among its best groups of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.expert_scores import sigmoid, softmax
from ._routing_geometry import choose_geometry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["grouped_topk"]

_topk_grouped = Kernel("moe/topk_grouped.cu")
_SCORING = ("none", "sigmoid", "softmax")
MAX_GROUPS = MAX_TOP_K = 32  # most groups and most choices: one per lane of a warp
_TINY = 1e-20  # added to the sum that normalises the weights


@op(returns=("topk_weights", "topk_ids"), ulps=8)
def grouped_topk(
    scores: Tensor,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None,
    scoring_func: int = 0,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> None:
    """The topk experts of each token, out of its topk_group best groups of experts, and their scores as weights.

    As DeepSeek-V3 (arXiv:2412.19437) chooses experts; without a bias, as DeepSeek-V2 (arXiv:2405.04434) does:

    1. The score s of an expert is ``scores`` itself, or its sigmoid or softmax. The key of an expert is ``s + bias``.
    2. A group ranks by the sum of its two largest keys, or by its only key. Without a bias it ranks by its largest key.
    3. Of the topk_group best groups, the topk experts with the largest keys are chosen, the best first.
    4. Weights are ``s * routed_scaling_factor``, divided by the sum of the token's s plus 1e-20 if `renormalize`.

    Of equal groups, and of equal keys, the one with the lower index comes first. Where ``scores`` is not finite, s is 0
    and the key is -inf; a key that would be NaN is -inf, too. If fewer than topk_group groups rank above -inf, the
    token's experts are 0, 1, ..., and its weights 1 / topk.

    All arithmetic is float32. vLLM rounds s and s + bias to the dtype of ``scores``; 16-bit scores tie less often here.

    Args:
        scores: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride.
        num_expert_group: groups of equal size into which the experts are divided, 1 to 32. One group may have 8192
            experts, two groups 4096 each, three or four groups 2048 each, and so on.
        topk_group: groups from which the experts of a token are chosen, 1 to num_expert_group.
        topk: experts of a token, 1 to 32, and no more than topk_group groups have.
        renormalize: whether the weights of a token are divided by their sum.
        routed_scaling_factor: multiplies the weights.
        bias: float32, float16 or bfloat16, contiguous, num_experts elements; or None.
        scoring_func: 0 if ``scores`` holds scores; 1 for the sigmoid, 2 for the softmax of logits.
        topk_weights: [num_tokens, topk] float32, contiguous, written and returned; new unless given.
        topk_ids: [num_tokens, topk] int32, contiguous, written and returned; new unless given.
    """
    x = scores.float()
    finite = x.isfinite()
    masked = torch.where(finite, x, -torch.inf)
    s = masked if scoring_func == 0 else sigmoid(masked) if scoring_func == 1 else softmax(masked)
    s = torch.where(finite, s, 0.0)
    keys = s if bias is None else s + bias.reshape(-1).float()
    keys = torch.where(finite & ~keys.isnan(), keys, -torch.inf)
    groups = keys.unflatten(-1, (num_expert_group, -1))
    counted = 1 if bias is None else min(2, groups.shape[-1])
    group_scores = groups.topk(counted, dim=-1).values.sum(-1)
    group_scores = torch.where(group_scores.isnan(), -torch.inf, group_scores)
    order, best = group_scores.sort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best[:, :topk_group], True)
    keys = torch.where(chosen[..., None], groups, -torch.inf).flatten(1)
    experts = keys.sort(dim=-1, descending=True, stable=True)[1][:, :topk]
    weights = s.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    falls_back = order[:, topk_group - 1, None] == -torch.inf
    topk_weights.copy_(torch.where(falls_back, 1 / topk, weights * routed_scaling_factor))
    topk_ids.copy_(torch.where(falls_back, torch.arange(topk, dtype=torch.int64, device=scores.device), experts))


@grouped_topk.result
def result_grouped_topk(scores: TensorArg, topk: int) -> tuple[Result, Result]:
    shape = (scores.shape[0] if scores.shape else 0, max(topk, 0))
    return Result(shape, float32), Result(shape, int32)


@grouped_topk.plan
def plan_grouped_topk(
    scores: TensorArg,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    bias: TensorArg | None,
    scoring_func: int,
    topk_weights: TensorArg,
    topk_ids: TensorArg,
) -> list[Launch]:
    def between(name: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise check.refuse(scores, name, f"expected {low} to {high}, got {value}")

    check.floating(scores)
    check.sizes(scores, num_tokens=None, num_experts=None)
    check.row_size(scores)
    num_tokens, num_experts = scores.shape
    between("num_expert_group", num_expert_group, 1, MAX_GROUPS)
    if num_experts % num_expert_group or not num_experts:
        raise scores.error(f"expected experts in {num_expert_group} groups of one size, got shape {scores.shape}")
    group_size = num_experts // num_expert_group
    between("topk_group", topk_group, 1, num_expert_group)
    between("topk", topk, 1, min(MAX_TOP_K, topk_group * group_size))
    between("scoring_func", scoring_func, 0, len(_SCORING) - 1)
    if bias is not None:
        check.floating(bias)
        check.elements(bias, bias.dtype, num_experts)
    check.shape(topk_weights, float32, num_tokens=num_tokens, topk=topk)
    check.shape(topk_ids, int32, num_tokens=num_tokens, topk=topk)
    geometry = choose_geometry(scores, num_expert_group, bias)
    return [
        _topk_grouped(
            scalar_t=scores.dtype,
            bias_t=bias.dtype if bias else float32,
            SCORING=_SCORING[scoring_func],
            NUM_GROUPS=num_expert_group,
            GROUP_SIZE=group_size,
            TOP_GROUPS=topk_group,
            TOP_K=topk,
            HAS_BIAS=bias is not None,
            GROUP_THREADS=geometry.group_threads,
            **geometry.constants,
        ).launch(
            grid=geometry.num_blocks(num_tokens),
            block=geometry.num_threads,
            num_tokens=num_tokens,
            scores_stride=scores.strides[0],
        )
    ]


@grouped_topk.example
def example_grouped_topk(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "float32",
    scoring_func: Literal[1, 0, 2] = 1,
    num_experts: Literal[256, 60] = 256,
    with_bias: bool = True,
    renormalize: bool = True,
) -> tuple[Any, ...]:
    num_expert_group, topk_group, topk = (8, 4, 8) if num_experts % 8 == 0 else (3, 2, 6)
    scores = make.randn(num_tokens, num_experts, dtype=dtype, shift=0.0 if scoring_func else 6.0)
    bias = make.randn(num_experts, dtype="float32", scale=0.1) if with_bias else None
    sizes = num_expert_group, topk_group, topk
    outputs = (make.empty(num_tokens, topk, dtype=kind) for kind in ("float32", "int32"))
    return scores, *sizes, renormalize, 2.5, bias, scoring_func, *outputs
