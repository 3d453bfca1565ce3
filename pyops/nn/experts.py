"""Mixtures of experts: the layer, and the methods that compute its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import softmax

from .._experts import FusedMoEQuantConfig, fused_experts
from ..ops.linear.grouped import activated
from ..ops.linear.grouped_problem import ACTIVATIONS
from ..ops.moe.routing_fused import fused_grouped_topk, fused_topk_bias
from .custom_op import CustomOp
from .parallel import (
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FusedMoE", "FusedMoEModularMethod", "TransformersFusedMoE", "UnquantizedFusedMoEMethod"]


def _chosen(layer: FusedMoE, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    bias, scale = layer.e_score_correction_bias, layer.routed_scaling_factor
    choice = layer.top_k, layer.renormalize
    if layer.use_grouped_topk:
        groups = layer.num_expert_group or 0, layer.topk_group or 0
        return fused_grouped_topk(hidden_states, router_logits, *choice, bias, *groups, layer.scoring_func, scale)
    scoring = layer.scoring_func
    return fused_topk_bias(hidden_states, router_logits, bias, *choice, scoring, routed_scaling_factor=scale)


def _chosen_natively(layer: FusedMoE, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = router_logits.float()
    scores = softmax(logits, -1) if layer.scoring_func == "softmax" else logits.sigmoid()
    bias = layer.e_score_correction_bias
    ranks = scores if bias is None else scores + bias
    if layer.use_grouped_topk:
        groups = ranks.unflatten(1, (layer.num_expert_group, -1))
        best = groups.amax(2) if bias is None else groups.topk(min(2, groups.shape[2]), 2)[0].sum(2)
        kept = torch.zeros_like(best).scatter(1, best.topk(layer.topk_group or 1, 1)[1], 1.0)
        ranks = groups.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)
    ids = ranks.topk(layer.top_k, 1)[1]
    weights = scores.gather(1, ids)
    if layer.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * layer.routed_scaling_factor, ids.int()


@CustomOp.register("unquantized_fused_moe")
class UnquantizedFusedMoEMethod(CustomOp):
    """Experts whose weights are as they are: `pyops.fused_experts` of a layer's weights.

    ``forward(layer, x, topk_weights, topk_ids)`` takes a `FusedMoE`, [num_tokens, hidden_size], and the experts of each
    token with their weights, [num_tokens, top_k] int32 or int64 and float32. It returns [num_tokens, hidden_size].

    Args:
        moe: accepted because vLLM has it; the layer says what it is.
    """

    def __init__(self, moe: Any = None) -> None:
        super().__init__()
        self.moe = moe

    def forward_native(self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        ids = topk_ids.long()
        if layer.expert_map is not None:
            exists = (ids >= 0) & (ids < len(layer.expert_map))
            ids = layer.expert_map[ids.where(exists, 0)].long().where(exists, -1)
        for e, (w13, w2) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
            tokens, slots = (ids == e).nonzero(as_tuple=True)
            weights = topk_weights[tokens, slots, None].float()
            hidden = (x[tokens] @ w13.T).float()
            if layer.w13_bias is not None:
                hidden = hidden + layer.w13_bias[e].float()
            if layer.apply_router_weight_on_input:
                hidden = hidden * weights
            result = (activated(hidden, layer.activation).to(x.dtype) @ w2.T).float()
            if layer.w2_bias is not None:
                result = result + layer.w2_bias[e].float()
            out = out.index_add(0, tokens, result if layer.apply_router_weight_on_input else result * weights)
        return out.to(x.dtype)

    def forward_cuda(self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return fused_experts(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, **layer.expert_arguments())


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(CustomOp):
    """Experts by a kernel that may be replaced, `pyops.fused_experts` unless another is given.

    ``forward(layer, x, topk_weights, topk_ids)`` is that of `UnquantizedFusedMoEMethod`.

    Args:
        old_quant_method: the method that computes where the layer is off.
        experts: takes what `pyops.fused_experts` takes, and returns the same. It may send tokens to other devices and
            fetch the results.
    """

    def __init__(self, old_quant_method: CustomOp | None = None, experts: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.old_quant_method = old_quant_method or UnquantizedFusedMoEMethod()
        self.experts = experts or fused_experts

    def forward_native(self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        result: Tensor = self.old_quant_method.forward_native(layer, x, topk_weights, topk_ids)
        return result

    def forward_cuda(self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        weights = layer.w13_weight, layer.w2_weight
        return self.experts(x, *weights, topk_weights, topk_ids, **layer.expert_arguments())


@CustomOp.register("fused_moe")
class FusedMoE(CustomOp):
    """A mixture of experts: ``y = sum_j p_j W2_j act(W13_j x)`` over the best experts of each token.

    ``forward(hidden_states, router_logits)`` takes [num_tokens, hidden_size] and [num_tokens, num_experts] of any float
    dtype, and returns [num_tokens, hidden_size]. The experts are `pyops.fused_experts`, their choice is
    `pyops.fused_grouped_topk` or `pyops.fused_topk_bias`.

    Parameters are ``w13_weight`` [experts, 2 * intermediate_size, hidden_size] (gates, then ups), ``w2_weight``
    [experts, hidden_size, intermediate_size], and with `has_bias` ``w13_bias`` and ``w2_bias``. `weight_loader` fills
    them from checkpoints. Ranks of a tensor-parallel group divide intermediate_size or, with an `ep_size`, the experts.

    Args:
        num_experts, top_k: experts, and experts of a token.
        hidden_size, intermediate_size: elements of a hidden state, and of an expert's.
        params_dtype: of the weights; None for torch's default.
        renormalize: whether the weights of a token's experts are divided by their sum.
        use_grouped_topk, num_expert_group, topk_group: whether experts are chosen from the best groups, of how many.
        quant_config: None.
        tp_size, ep_size: ranks that divide intermediate_size, or experts; the size of the group, or None.
        dp_size, pcp_size: None or 1.
        prefix: the name of the layer in its model.
        custom_routing_function: ``(hidden_states, gating_output, topk, renormalize)`` returns weights and ids; or None.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: multiplies the weights of experts.
        e_score_correction_bias: [num_experts] float32, added to scores for the choice alone; or None.
        apply_router_weight_on_input: see `pyops.fused_experts`.
        activation: one of those of `pyops.grouped_gemm`, with a gate.
        is_act_and_mul: whether the activation has a gate; otherwise it is that of the name with "_no_mul".
        has_bias: whether there are biases.
        reduce_results: whether results of all ranks are added up.
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
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        is_act_and_mul: bool = True,
        has_bias: bool = False,
        *,
        reduce_results: bool = False,
    ) -> None:
        super().__init__()
        if not is_act_and_mul:
            activation = f"{activation}_no_mul"
        ranks = get_tensor_model_parallel_world_size()
        for name, value, fits in (
            ("top_k", top_k, 0 < top_k <= num_experts),
            ("activation", activation, activation in ACTIVATIONS and activation != "none"),
            ("quant_config", quant_config, quant_config is None),
            ("tp_size", tp_size, tp_size in (None, ranks) or (tp_size == 1 and ep_size == ranks)),
            ("ep_size", ep_size, ep_size in (None, 1, ranks)),
            ("dp_size", dp_size, dp_size in (None, 1)),
            ("pcp_size", pcp_size, pcp_size in (None, 1)),
            ("scoring_func", scoring_func, scoring_func in ("softmax", "sigmoid")),
            ("num_expert_group", num_expert_group, bool(num_expert_group and topk_group) or not use_grouped_topk),
        ):
            if not fits:
                raise ValueError(
                    f"FusedMoE: {name}: {value!r} is not supported with {num_experts} experts, {ranks} ranks"
                )
        self.num_experts = self.global_num_experts = num_experts
        self.top_k, self.hidden_size, self.reduce_results, self.prefix = top_k, hidden_size, reduce_results, prefix
        self.renormalize, self.scoring_func, self.routed_scaling_factor = (
            renormalize,
            scoring_func,
            routed_scaling_factor,
        )
        self.use_grouped_topk, self.num_expert_group, self.topk_group = use_grouped_topk, num_expert_group, topk_group
        self.custom_routing_function, self.e_score_correction_bias = custom_routing_function, e_score_correction_bias
        self.apply_router_weight_on_input, self.activation = apply_router_weight_on_input, activation
        self.divides_experts = ranks > 1 and ep_size == ranks
        self.first_expert = 0
        self.local_num_experts, width = num_experts, intermediate_size
        if self.divides_experts:
            self.local_num_experts = divide("FusedMoE", "num_experts", num_experts, ranks)
            self.first_expert = get_tensor_model_parallel_rank() * self.local_num_experts
            numbers = torch.arange(num_experts, dtype=torch.int32) - self.first_expert
            self.register_buffer(
                "expert_map", numbers.where((numbers >= 0) & (numbers < self.local_num_experts), -1), False
            )
        else:
            self.expert_map = None
            width = divide("FusedMoE", "intermediate_size", intermediate_size, ranks)
        self.intermediate_size_per_partition = width
        rows = width * (2 if ACTIVATIONS[activation] else 1)

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(self.local_num_experts, *sizes, dtype=params_dtype), requires_grad=False)

        self.w13_weight, self.w2_weight = parameter(rows, hidden_size), parameter(hidden_size, width)
        self.w13_bias = parameter(rows) if has_bias else None
        self.w2_bias = parameter(hidden_size) if has_bias else None
        self.quant_method: CustomOp = UnquantizedFusedMoEMethod()

    def expert_arguments(self) -> dict[str, Any]:
        """What `pyops.fused_experts` takes by name."""
        biases = FusedMoEQuantConfig(w1_bias=self.w13_bias, w2_bias=self.w2_bias)
        return {
            "activation": self.activation,
            "apply_router_weight_on_input": self.apply_router_weight_on_input,
            "global_num_experts": self.global_num_experts,
            "expert_map": self.expert_map,
            "quant_config": None if self.w13_bias is None else biases,
        }

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        """Copy an expert's weight or bias of a checkpoint to its place in `param`, as far as it is on this rank.

        Args:
            param: a parameter of this layer.
            loaded_weight: of the whole expert.
            weight_name: its name, for messages.
            shard_id: "w1" for gates, "w3" for ups, "w2" for what follows the activation.
            expert_id: its number among all experts.
        """
        if shard_id not in ("w1", "w2", "w3"):
            raise ValueError(f"FusedMoE: shard_id: expected w1, w2 or w3, got {shard_id!r} for {weight_name}")
        local = expert_id - self.first_expert
        if not 0 <= local < self.local_num_experts:
            return
        place, rank, width = param.data[local], get_tensor_model_parallel_rank(), self.intermediate_size_per_partition
        is_divided = shard_id != "w2" or loaded_weight.ndim == 2
        if is_divided and not self.divides_experts:
            loaded_weight = loaded_weight.narrow(loaded_weight.ndim - 1 if shard_id == "w2" else 0, rank * width, width)
        elif shard_id == "w2" and not self.divides_experts and rank:
            loaded_weight = torch.zeros_like(loaded_weight)  # the bias is added once, by the first rank
        if shard_id != "w2" and ACTIVATIONS[self.activation]:
            interleaved = ACTIVATIONS[self.activation] == 2
            half = int(shard_id == "w3")
            place = place[half::2] if interleaved else place.narrow(0, half * width, width)
        if place.shape != loaded_weight.shape:
            expected = f"expected shape {tuple(place.shape)} on this rank"
            raise ValueError(f"FusedMoE: {weight_name}: {expected}, got {tuple(loaded_weight.shape)}")
        place.copy_(loaded_weight)

    @classmethod
    def make_expert_params_mapping(
        cls, ckpt_gate_proj_name: str, ckpt_down_proj_name: str, ckpt_up_proj_name: str, num_experts: int
    ) -> list[tuple[str, str, int, str]]:
        """(name of the parameter, name in checkpoints, expert_id, shard_id), both names up to "weight" or "bias"."""
        shards = ("w1", ckpt_gate_proj_name), ("w2", ckpt_down_proj_name), ("w3", ckpt_up_proj_name)
        return [
            (f"experts.{'w2' if shard == 'w2' else 'w13'}_", f"experts.{expert}.{name}.", expert, shard)
            for expert in range(num_experts)
            for shard, name in shards
        ]

    def select_experts(
        self, hidden_states: Tensor, router_logits: Tensor, native: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(weights float32, ids), both [num_tokens, top_k], by the ops or by plain PyTorch."""
        if self.custom_routing_function is not None:
            return self.custom_routing_function(hidden_states, router_logits, self.top_k, self.renormalize)
        return (_chosen_natively if native else _chosen)(self, hidden_states, router_logits)

    def _finished(self, out: Tensor) -> Tensor:
        return tensor_model_parallel_all_reduce(out) if self.reduce_results else out

    def forward_native(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        chosen = self.select_experts(hidden_states, router_logits, native=True)
        return self._finished(self.quant_method.forward_native(self, hidden_states, *chosen))

    def forward_cuda(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        chosen = self.select_experts(hidden_states, router_logits)
        return self._finished(self.quant_method(self, hidden_states, *chosen))


@CustomOp.register("transformers_fused_moe")
class TransformersFusedMoE(FusedMoE):
    """`FusedMoE` of experts that its caller has chosen, as models of transformers do, by `pyops.fused_experts`.

    ``forward(hidden_states, topk_ids, topk_weights)`` takes [num_tokens, hidden_size] and what the router says, both
    [num_tokens, top_k]. Arguments are those of `FusedMoE`.
    """

    def forward_native(  # type: ignore[override]
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        weights = topk_weights.float()
        return self._finished(self.quant_method.forward_native(self, hidden_states, weights, topk_ids))

    def forward_cuda(  # type: ignore[override]
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        weights = topk_weights.float().contiguous()
        return self._finished(self.quant_method(self, hidden_states, weights, topk_ids.contiguous()))
