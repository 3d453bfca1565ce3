"""The routing functions of vLLM's layers; they allocate the outputs of the routing ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.errors import OpError
from ..._core.system.lazy import torch
from .routing import topk_sigmoid, topk_softmax, topk_softplus_sqrt
from .routing_grouped import grouped_topk

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fused_grouped_topk", "fused_topk", "fused_topk_bias"]


def fused_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    scoring_func: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    """The topk experts of each token, by `topk_softmax` or `topk_sigmoid`, in new tensors.

    Args:
        hidden_states: [num_tokens, ...]; only its number of tokens is used.
        gating_output: [num_tokens, num_experts], logits: a torch tensor, float32, float16 or bfloat16; rows of any
            stride.
        topk: experts of a token, at most num_experts.
        renormalize: whether the weights of a token are divided by their sum.
        indices_type: dtype of the ids: torch.int32, torch.uint32 or torch.int64; None for int32.
        scoring_func: "softmax" or "sigmoid".

    Returns:
        Weights float32, ids, and token_expert_indices int32, all [num_tokens, topk], as the op writes them.
    """
    _check("fused_topk", hidden_states, gating_output, topk, scoring_func, ("softmax", "sigmoid"))
    outputs = _outputs(gating_output, topk, indices_type)
    (topk_softmax if scoring_func == "softmax" else topk_sigmoid)(*outputs, gating_output, renormalize)
    return outputs


def fused_topk_bias(
    hidden_states: Tensor,
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    indices_type: torch.dtype | None = None,
    input_tokens: Tensor | None = None,
    hash_indices_table: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The topk experts of each token, ranked by score plus bias, in new tensors.

    Args:
        hidden_states: [num_tokens, ...]; only its number of tokens is used.
        gating_output: [num_tokens, num_experts], logits: a torch tensor, float32, float16 or bfloat16; rows of any
            stride.
        e_score_correction_bias: [num_experts] float32, contiguous; or None.
        topk: experts of a token, at most num_experts.
        renormalize: whether the weights of a token are divided by their sum.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus": `topk_softmax`, `topk_sigmoid` or `topk_softplus_sqrt`.
        indices_type: dtype of the ids: torch.int32, torch.uint32 or torch.int64; None for int32.
        input_tokens, hash_indices_table: of topk_softplus_sqrt; None for the others.
        routed_scaling_factor: multiplies the weights, after they are renormalised.

    Returns:
        Weights float32 and ids, both [num_tokens, topk].
    """
    name = "fused_topk_bias"
    _check(name, hidden_states, gating_output, topk, scoring_func, ("softmax", "sigmoid", "sqrtsoftplus"))
    weights, ids, indices = _outputs(gating_output, topk, indices_type)
    choice = gating_output, renormalize
    if scoring_func == "sqrtsoftplus":
        by_token = input_tokens, hash_indices_table
        topk_softplus_sqrt(weights, ids, indices, *choice, routed_scaling_factor, e_score_correction_bias, *by_token)
        return weights, ids
    if input_tokens is not None or hash_indices_table is not None:
        raise OpError(name, "hash_indices_table", f'expected None with scoring_func="{scoring_func}"')
    op = topk_softmax if scoring_func == "softmax" else topk_sigmoid
    op(weights, ids, indices, *choice, e_score_correction_bias)
    return weights if routed_scaling_factor == 1.0 else weights * routed_scaling_factor, ids


def fused_grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    e_score_correction_bias: Tensor | None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`grouped_topk` of logits, by their softmax or sigmoid.

    Args:
        hidden_states: [num_tokens, ...]; only its number of tokens is used.
        gating_output: [num_tokens, num_experts], logits, as `scores` of grouped_topk.
        topk, renormalize, num_expert_group, topk_group, routed_scaling_factor: as in grouped_topk.
        e_score_correction_bias: `bias` of grouped_topk.
        scoring_func: "softmax" or "sigmoid".

    Returns:
        Weights float32 and ids int32, both [num_tokens, topk].
    """
    _check("fused_grouped_topk", hidden_states, gating_output, topk, scoring_func, ("softmax", "sigmoid"))
    number = 2 if scoring_func == "softmax" else 1
    scale, bias = routed_scaling_factor, e_score_correction_bias
    weights, ids = grouped_topk(gating_output, num_expert_group, topk_group, topk, renormalize, scale, bias, number)
    return weights, ids


def _check(
    name: str, hidden_states: Tensor, gating_output: Tensor, topk: int, scoring_func: str, known: tuple[str, ...]
) -> None:
    if gating_output.ndim != 2 or hidden_states.shape[0] != gating_output.shape[0]:
        expected = f"expected shape ({hidden_states.shape[0]}, num_experts), with the tokens of hidden_states"
        raise OpError(name, "gating_output", f"{expected}, got {tuple(gating_output.shape)}")
    if not 0 <= topk <= gating_output.shape[1]:
        raise OpError(name, "topk", f"expected 0 to {gating_output.shape[1]}, as many as experts, got {topk}")
    if scoring_func not in known:
        raise OpError(name, "scoring_func", f"expected {' or '.join(known)}, got {scoring_func!r}")


def _outputs(gating_output: Tensor, topk: int, indices_type: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    shape, device = (gating_output.shape[0], topk), gating_output.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=indices_type or torch.int32, device=device)
    return weights, ids, torch.empty(shape, dtype=torch.int32, device=device)
