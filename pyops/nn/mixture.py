"""Mixtures of experts: routing, experts, and shared experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import softmax, softplus

from ..ops.linear.grouped_problem import ACTIVATIONS
from ..ops.moe.routing_fused import fused_grouped_topk, fused_topk_bias
from .custom_op import CustomOp
from .experts import ExpertWeights, UnquantizedFusedMoEMethod
from .parallel import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FusedMoE", "TransformersFusedMoE"]

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: softmax(logits, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: softplus(logits).sqrt(),
}


def _chosen(
    layer: FusedMoE, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    bias, scale, scoring = layer.e_score_correction_bias, layer.routed_scaling_factor, layer.scoring_func
    choice = layer.top_k, layer.renormalize
    if layer.use_grouped_topk:
        groups = layer.num_expert_group or 0, layer.topk_group or 0
        return fused_grouped_topk(hidden_states, router_logits, *choice, bias, *groups, scoring, scale)
    by_token = None if layer.hash_indices_table is None else input_ids, layer.hash_indices_table
    return fused_topk_bias(hidden_states, router_logits, bias, *choice, scoring, None, *by_token, scale)


def _chosen_natively(
    layer: FusedMoE, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = _SCORES[layer.scoring_func](router_logits.float())
    bias = layer.e_score_correction_bias
    ranks = scores if bias is None else scores + bias
    if layer.use_grouped_topk:
        groups = ranks.unflatten(1, (layer.num_expert_group, -1))
        best = groups.amax(2) if bias is None else groups.topk(min(2, groups.shape[2]), 2)[0].sum(2)
        kept = torch.zeros_like(best).scatter(1, best.topk(layer.topk_group or 1, 1)[1], 1.0)
        ranks = groups.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)
    ids = ranks.topk(layer.top_k, 1)[1]
    if layer.hash_indices_table is not None:
        assert input_ids is not None
        ids = layer.hash_indices_table[input_ids].long()
    weights = scores.gather(1, ids)
    if layer.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * layer.routed_scaling_factor, ids.int()


@CustomOp.register("fused_moe")
class FusedMoE(ExpertWeights):
    """A mixture of experts: ``y = sum_j p_j W2_j act(W13_j x)`` over the top-k experts of each token.

    ``forward(hidden_states, router_logits, input_ids=None)`` takes [num_tokens, hidden_size] and [num_tokens,
    num_experts] of any float dtype, and returns [num_tokens, hidden_size], all-reduced over the ranks. Experts are
    computed by `pyops.fused_experts`, routing by `pyops.fused_grouped_topk` or `pyops.fused_topk_bias`.

    Parameters are ``w13_weight`` [experts, 2 * intermediate_size, hidden_size] (gates, then ups), ``w2_weight``
    [experts, hidden_size, intermediate_size], and with `has_bias` ``w13_bias`` and ``w2_bias``. `weight_loader` fills
    them from checkpoints. Ranks of a tensor-parallel group divide intermediate_size or, with an `ep_size`, the experts.
    Modules that are passed as arguments may return (output, bias); the bias is ignored.

    Args:
        num_experts, top_k: experts, and experts per token.
        hidden_size, intermediate_size: elements of a hidden state, and channels of an expert.
        params_dtype: dtype of the weights; None for torch's default.
        renormalize: whether the weights of a token's experts are divided by their sum.
        use_grouped_topk, num_expert_group, topk_group: whether experts are chosen from the `topk_group` best of
            `num_expert_group` groups.
        tp_size, ep_size: ranks that divide intermediate_size, or experts; the size of the group, or None.
        prefix: the name of the layer in its model.
        custom_routing_function: ``(hidden_states, gating_output, topk, renormalize)`` returns weights and ids; or None.
        scoring_func: "softmax", "sigmoid", or, without groups, "sqrtsoftplus".
        routed_scaling_factor: multiplies the weights of experts.
        swiglu_limit: with "silu", the upper bound of the gate and of the magnitude of the up projection; or None.
        e_score_correction_bias: [num_experts] float32, added to scores only to rank experts; or None.
        apply_router_weight_on_input: see `pyops.fused_experts`.
        activation: one of those of `pyops.grouped_gemm`, with a gate.
        is_act_and_mul: whether the activation has a gate; otherwise it is the activation with the suffix "_no_mul".
        has_bias: whether experts have biases.
        expert_mapping: the result of `make_expert_params_mapping`, for models that load weights by it.
        n_shared_experts, router_logits_dtype: accepted because vLLM has them; they have no effect.
        gate: a module that computes the logits from hidden states; router_logits are then ignored. Or None.
        shared_experts: a module; its output for the hidden states is added to the result. Or None.
        routed_input_transform, routed_output_transform: modules that transform the input of the experts, and their sum.
        apply_routed_scale_to_output: whether `routed_scaling_factor` multiplies the sum of the experts instead of their
            weights. In float16 with shared experts, their output is divided by it instead, as in vLLM.
        hash_indices_table: [vocab_size, top_k], the experts of each token id in input_ids, for the scoring function
            "sqrtsoftplus"; or None.
        quant_config, dp_size, pcp_size, enable_eplb, num_redundant_experts, is_sequence_parallel, shared_expert_gate,
            zero_expert_type: only the defaults (1 for sizes) are supported.
        reduce_results: whether results are all-reduced.

    Examples:
        >>> moe = FusedMoE(num_experts=8, top_k=2, hidden_size=64, intermediate_size=128)
        >>> gate_proj, up_proj, down_proj = torch.randn(128, 64), torch.randn(128, 64), torch.randn(64, 128)
        >>> moe.weight_loader(moe.w13_weight, gate_proj, "gate_proj.weight", "w1", 0)  # and others
        >>> moe.weight_loader(moe.w13_weight, up_proj, "up_proj.weight", "w3", 0)
        >>> moe.weight_loader(moe.w2_weight, down_proj, "down_proj.weight", "w2", 0)
        >>> moe(torch.randn(5, 64), torch.randn(5, 8)).shape  # hidden states and router logits
        torch.Size([5, 64])
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        ep_size: int | None = None,
        dp_size: int | None = None,
        pcp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: Callable[..., tuple[Tensor, Tensor]] | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        swiglu_limit: float | None = None,
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        is_act_and_mul: bool = True,
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        has_bias: bool = False,
        is_sequence_parallel: bool = False,
        expert_mapping: list[tuple[str, str, int, str]] | None = None,
        n_shared_experts: int | None = None,
        router_logits_dtype: torch.dtype | None = None,
        gate: nn.Module | None = None,
        shared_experts: nn.Module | None = None,
        shared_expert_gate: nn.Module | None = None,
        routed_input_transform: nn.Module | None = None,
        routed_output_transform: nn.Module | None = None,
        apply_routed_scale_to_output: bool = False,
        zero_expert_type: str | None = None,
        hash_indices_table: Tensor | None = None,
        *,
        reduce_results: bool = True,
    ) -> None:
        if not is_act_and_mul:
            activation = f"{activation}_no_mul"
        ranks = get_tensor_model_parallel_world_size()
        for name, value, fits in (
            ("top_k", top_k, 0 < top_k <= num_experts),
            ("activation", activation, activation in ACTIVATIONS and activation != "none"),
            ("swiglu_limit", swiglu_limit, swiglu_limit is None or (swiglu_limit >= 0 and activation == "silu")),
            ("quant_config", quant_config, quant_config is None),
            ("tp_size", tp_size, tp_size in (None, ranks) or (tp_size == 1 and ep_size == ranks)),
            ("ep_size", ep_size, ep_size in (None, 1, ranks)),
            ("dp_size", dp_size, dp_size in (None, 1)),
            ("pcp_size", pcp_size, pcp_size in (None, 1)),
            ("scoring_func", scoring_func, scoring_func in (list(_SCORES)[:2] if use_grouped_topk else _SCORES)),
            ("num_expert_group", num_expert_group, bool(num_expert_group and topk_group) or not use_grouped_topk),
            ("hash_indices_table", "a table", hash_indices_table is None or scoring_func == "sqrtsoftplus"),
            ("enable_eplb", enable_eplb, not enable_eplb),
            ("num_redundant_experts", num_redundant_experts, num_redundant_experts == 0),
            ("is_sequence_parallel", is_sequence_parallel, not is_sequence_parallel),
            ("shared_expert_gate", shared_expert_gate, shared_expert_gate is None),
            ("zero_expert_type", zero_expert_type, zero_expert_type is None),
        ):
            if not fits:
                raise ValueError(
                    f"FusedMoE: {name}: {value!r} is not supported with {num_experts} experts, {ranks} ranks"
                )
        experts = activation, swiglu_limit, apply_router_weight_on_input, has_bias, ranks > 1 and ep_size == ranks
        super().__init__(num_experts, hidden_size, intermediate_size, params_dtype, *experts)
        self.top_k, self.reduce_results, self.prefix = top_k, reduce_results, prefix
        self.renormalize, self.scoring_func = renormalize, scoring_func
        self.use_grouped_topk, self.num_expert_group, self.topk_group = use_grouped_topk, num_expert_group, topk_group
        self.custom_routing_function, self.e_score_correction_bias = custom_routing_function, e_score_correction_bias
        self.hash_indices_table, self.expert_mapping = hash_indices_table, expert_mapping
        self.n_shared_experts, self.router_logits_dtype = n_shared_experts, router_logits_dtype
        scales = routed_scaling_factor, 1.0
        self._output_scale, self.routed_scaling_factor = scales if apply_routed_scale_to_output else scales[::-1]
        self.gate, self.shared_experts = gate, shared_experts
        self.routed_input_transform, self.routed_output_transform = routed_input_transform, routed_output_transform
        self.quant_method: CustomOp = UnquantizedFusedMoEMethod()

    @property
    def is_internal_router(self) -> bool:
        """Whether the layer computes the router logits itself."""
        return self.gate is not None

    def select_experts(
        self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None, native: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(weights float32, ids), both [num_tokens, top_k], by the ops or by plain PyTorch."""
        if self.custom_routing_function is not None:
            return self.custom_routing_function(hidden_states, router_logits, self.top_k, self.renormalize)
        return (_chosen_natively if native else _chosen)(self, hidden_states, router_logits, input_ids)

    def _mixed(
        self, x: Tensor, choose: Callable[[Tensor], tuple[Tensor, Tensor]], method: Callable[..., Tensor]
    ) -> Tensor:
        """The whole layer: transforms, the experts that `choose` selects, by `method`, and shared experts."""
        routed = _applied(self.routed_input_transform, x)
        out = method(self, routed, *choose(routed))
        shared = None if self.shared_experts is None else _applied(self.shared_experts, x)
        if self._output_scale != 1.0:
            if shared is not None and out.dtype == torch.float16:
                shared = shared * (1.0 / self._output_scale)
            else:
                out = out * self._output_scale
        out = _applied(self.routed_output_transform, out)
        out = out if shared is None else shared + out
        return tensor_model_parallel_all_reduce(out) if self.reduce_results else out

    def _forward(
        self, x: Tensor, logits: Tensor, input_ids: Tensor | None, method: Callable[..., Tensor], native: bool
    ) -> Tensor:
        def choose(routed: Tensor) -> tuple[Tensor, Tensor]:
            of_router = logits if self.gate is None else _applied(self.gate, routed)
            return self.select_experts(routed, of_router, input_ids, native)

        return self._mixed(x, choose, method)

    def forward_native(self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return self._forward(hidden_states, router_logits, input_ids, self.quant_method.forward_native, True)

    def forward_cuda(self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return self._forward(hidden_states, router_logits, input_ids, self.quant_method, False)


def _applied(module: nn.Module | None, x: Tensor) -> Tensor:
    """The output of a module for `x`, without a bias that it may return; `x` if the module is None."""
    result = x if module is None else module(x)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


@CustomOp.register("transformers_fused_moe")
class TransformersFusedMoE(FusedMoE):
    """`FusedMoE` with experts chosen by the caller, as in vLLM's transformers backend, by `pyops.fused_experts`.

    ``forward(hidden_states, topk_ids, topk_weights)`` takes [num_tokens, hidden_size], and the expert ids and router
    weights, both [num_tokens, top_k]. Arguments are those of `FusedMoE`.

    Examples:
        >>> moe = TransformersFusedMoE(num_experts=8, top_k=2, hidden_size=64, intermediate_size=128)
        >>> topk_weights, topk_ids = torch.randn(5, 8).softmax(-1).topk(2)
        >>> moe(torch.randn(5, 64), topk_ids, topk_weights).shape
        torch.Size([5, 64])
    """

    def forward_native(  # type: ignore[override]
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        chosen = topk_weights.float(), topk_ids
        return self._mixed(hidden_states, lambda _: chosen, self.quant_method.forward_native)

    def forward_cuda(  # type: ignore[override]
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        chosen = topk_weights.float().contiguous(), topk_ids.contiguous()
        return self._mixed(hidden_states, lambda _: chosen, self.quant_method)
