"""Experts' weights, divided among ranks, and the methods that apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..fused.experts import FusedMoEQuantConfig, fused_experts
from ..ops.linear.grouped import activated
from ..ops.linear.grouped_problem import ACTIVATIONS
from .custom_op import CustomOp
from .parallel import divide, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FusedMoEModularMethod", "UnquantizedFusedMoEMethod"]


class ExpertWeights(CustomOp):
    """The base of `FusedMoE` with the experts' weights; see there."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None,
        activation: str,
        swiglu_limit: float | None,
        apply_router_weight_on_input: bool,
        has_bias: bool,
        divides_experts: bool,
    ) -> None:
        super().__init__()
        self.num_experts = self.global_num_experts = num_experts
        self.hidden_size, self.activation, self.swiglu_limit = hidden_size, activation, swiglu_limit
        self.apply_router_weight_on_input, self.divides_experts = apply_router_weight_on_input, divides_experts
        ranks, self.first_expert = get_tensor_model_parallel_world_size(), 0
        self.local_num_experts, width = num_experts, intermediate_size
        if divides_experts:
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

    def expert_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `pyops.fused_experts`."""
        terms = FusedMoEQuantConfig(w1_bias=self.w13_bias, w2_bias=self.w2_bias, gemm1_clamp_limit=self.swiglu_limit)
        is_plain = self.w13_bias is None and self.swiglu_limit is None
        return {
            "activation": self.activation,
            "apply_router_weight_on_input": self.apply_router_weight_on_input,
            "global_num_experts": self.global_num_experts,
            "expert_map": self.expert_map,
            "quant_config": None if is_plain else terms,
        }

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        """Copy an expert's weight or bias to its slice of `param`: the part of it that is on this rank, if any.

        Args:
            param: a parameter of this layer.
            loaded_weight: the tensor of the whole expert, from a checkpoint.
            weight_name: its name, for messages.
            shard_id: "w1" for gates, "w3" for ups, "w2" for the down projection.
            expert_id: its index among all experts.
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
            loaded_weight = torch.zeros_like(loaded_weight)  # only the first rank adds the bias
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
        """(parameter name, checkpoint name, expert_id, shard_id) of all weights; names without "weight" or "bias"."""
        shards = ("w1", ckpt_gate_proj_name), ("w2", ckpt_down_proj_name), ("w3", ckpt_up_proj_name)
        return [
            (f"experts.{'w2' if shard == 'w2' else 'w13'}_", f"experts.{expert}.{name}.", expert, shard)
            for expert in range(num_experts)
            for shard, name in shards
        ]


@CustomOp.register("unquantized_fused_moe")
class UnquantizedFusedMoEMethod(CustomOp):
    """Experts with unquantized weights, by `pyops.fused_experts`.

    ``forward(layer, x, topk_weights, topk_ids)`` takes a `FusedMoE`, [num_tokens, hidden_size], and the experts of each
    token with their weights, [num_tokens, top_k] int32 or int64 and float32. It returns [num_tokens, hidden_size].

    Args:
        moe: accepted because vLLM has it; the layer's attributes are used instead.

    Examples:
        >>> moe = FusedMoE(num_experts=8, top_k=2, hidden_size=64, intermediate_size=128)
        >>> topk_weights, topk_ids = torch.randn(5, 8).softmax(-1).topk(2)
        >>> UnquantizedFusedMoEMethod()(moe, torch.randn(5, 64), topk_weights, topk_ids.int()).shape
        torch.Size([5, 64])
    """

    def __init__(self, moe: Any = None) -> None:
        super().__init__()
        self.moe = moe

    def forward_native(self, layer: ExpertWeights, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
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
            if layer.swiglu_limit is not None:
                gate, up = hidden.chunk(2, 1)
                limit = layer.swiglu_limit
                hidden = torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), 1)
            result = (activated(hidden, layer.activation).to(x.dtype) @ w2.T).float()
            if layer.w2_bias is not None:
                result = result + layer.w2_bias[e].float()
            out = out.index_add(0, tokens, result if layer.apply_router_weight_on_input else result * weights)
        return out.to(x.dtype)

    def forward_cuda(self, layer: ExpertWeights, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return fused_experts(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, **layer.expert_arguments())


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(CustomOp):
    """Experts by an exchangeable function, by default `pyops.fused_experts`.

    ``forward(layer, x, topk_weights, topk_ids)`` is as in `UnquantizedFusedMoEMethod`.

    Args:
        old_quant_method: the method that serves if the layer is off.
        experts: a function with the signature of `pyops.fused_experts`. It may dispatch tokens to other devices and
            combine the results.

    Examples:
        >>> moe = FusedMoE(num_experts=8, top_k=2, hidden_size=64, intermediate_size=128)
        >>> moe.quant_method = FusedMoEModularMethod(experts=pyops.fused_experts)
        >>> moe(torch.randn(5, 64), torch.randn(5, 8)).shape
        torch.Size([5, 64])
    """

    def __init__(self, old_quant_method: CustomOp | None = None, experts: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.old_quant_method = old_quant_method or UnquantizedFusedMoEMethod()
        self.experts = experts or fused_experts

    def forward_native(self, layer: ExpertWeights, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        result: Tensor = self.old_quant_method.forward_native(layer, x, topk_weights, topk_ids)
        return result

    def forward_cuda(self, layer: ExpertWeights, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        weights = layer.w13_weight, layer.w2_weight
        return self.experts(x, *weights, topk_weights, topk_ids, **layer.expert_arguments())
