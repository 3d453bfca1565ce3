"""Layers that are mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core.lazy import torch
from .._experts import FusedMoEQuantConfig, fused_experts
from ..ops.linear.gemm_problem import SCALE_BLOCK
from ..ops.moe.routing_fused import fused_grouped_topk, fused_topk
from .attention import MLP
from .config import Config
from .config_values import refuse
from .linear import Place
from .microscaling import MX_BLOCK, decode_mxfp4, mxfp4_views
from .mixture import Mixture
from .quantization import Mxfp4Experts, Quantization

if TYPE_CHECKING:
    from torch import Tensor


class ExpertWeights(NamedTuple):
    """One projection of all experts.

    Attributes:
        weight: [num_experts, out, in].
        weight_scale: float32, of each row or each block, where weights are of 8 bits; or None.
        input_scale: one float32, the largest of the experts' static scales; or None.
    """

    weight: Tensor
    weight_scale: Tensor | None = None
    input_scale: Tensor | None = None


def _quantization(place: Place, names: list[str]) -> Quantization | None:
    """How the projections of experts, which have these names, are quantised; all of them or none."""
    if not isinstance(place.quantization, Quantization):
        return None
    covered = {place.quantization.covers(name) for name in names}
    if len(covered) > 1:
        raise refuse("quantization_config", f"all or none of the experts of {place.module} to be quantised", "some")
    return place.quantization if covered.pop() else None


def _weights(place: Place, quantization: Quantization | None, experts: int, rows: int, columns: int) -> ExpertWeights:
    """Weights that are not set. ModelError for blocks of scales that do not divide them."""
    if quantization is None:
        return ExpertWeights(place.empty(experts, rows, columns))
    scales = rows, 1
    if quantization.weights == "block":
        if rows % SCALE_BLOCK or columns % SCALE_BLOCK:
            expected = f"sizes of quantised experts that are multiples of {SCALE_BLOCK}"
            raise refuse("moe_intermediate_size", expected, (rows, columns))
        scales = rows // SCALE_BLOCK, columns // SCALE_BLOCK
    return ExpertWeights(
        torch.empty(experts, rows, columns, dtype=getattr(torch, quantization.dtype), device=place.device),
        torch.empty(experts, *scales, device=place.device),
        torch.zeros(1, device=place.device) if quantization.activations == "static" else None,
    )


class Experts:
    """``sum_j p_j down_j(silu(gate_j(x)) * up_j(x))`` over the best experts of each token, by its router.

    The activation may be another, and an MLP that every token takes is added where the architecture has it.
    """

    def __init__(self, config: Config, mixture: Mixture, place: Place) -> None:
        experts, channels, hidden_size = mixture.num_experts, mixture.intermediate_size, config.hidden_size
        self.mixture = mixture
        router = place._replace(quantization=None)
        if mixture.router_in_float32:
            router = router._replace(dtype=torch.float32)
        self.router = router.linear({mixture.router: experts}, hidden_size, mixture.has_bias)
        self.correction_bias = torch.empty(experts, device=place.device) if mixture.has_correction_bias else None
        self.is_mxfp4 = isinstance(place.quantization, Mxfp4Experts)
        if self.is_mxfp4 and (hidden_size % MX_BLOCK or channels % MX_BLOCK):
            raise refuse("hidden_size", f"blocks of {MX_BLOCK} elements of experts", (hidden_size, channels))
        projections = mixture.gate, mixture.up, mixture.down
        names = [f"{place.module}.experts.{i}.{name}" for i in range(experts) for name in projections]
        self.quantization = _quantization(place, names)
        self.gate_up = _weights(place, self.quantization, experts, 2 * channels, hidden_size)
        self.down = _weights(place, self.quantization, experts, hidden_size, channels)
        self.biases: tuple[Tensor, Tensor] | None = None
        if mixture.has_bias:
            self.biases = place.empty(experts, 2 * channels), place.empty(experts, hidden_size)
        self.terms = self._terms()
        shared = mixture.shared_intermediate_size
        at = place._replace(module=f"{place.module}.shared_experts")
        self.shared = MLP(config, at, shared) if shared else None

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        found = self.router.tensors() | (self._stacked() if self.mixture.is_stacked else self._named())
        if self.correction_bias is not None:
            found[f"{self.mixture.router}.e_score_correction_bias"] = self.correction_bias
        if self.shared is not None:
            found |= {f"shared_experts.{name}": tensor for name, tensor in self.shared.tensors().items()}
        return found

    def _named(self) -> dict[str, Tensor]:
        """Experts that a checkpoint has one by one."""
        mixture, found = self.mixture, dict[str, "Tensor"]()
        for kind in ("weight", "weight_scale"):
            gate_ups, downs = getattr(self.gate_up, kind), getattr(self.down, kind)
            if gate_ups is not None:
                for i, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
                    gate, up = gate_up.chunk(2)
                    named = {mixture.gate: gate, mixture.up: up, mixture.down: down}
                    found |= {f"experts.{i}.{name}.{kind}": tensor for name, tensor in named.items()}
        if self.gate_up.input_scale is not None and self.down.input_scale is not None:
            inputs = dict.fromkeys((mixture.gate, mixture.up), self.gate_up.input_scale)
            inputs[mixture.down] = self.down.input_scale
            for i in range(mixture.num_experts):
                found |= {f"experts.{i}.{name}.input_scale": scale for name, scale in inputs.items()}
        return found

    def decode(self) -> None:
        """Replace codes, which a checkpoint has written, by the weights that they stand for."""
        if self.is_mxfp4:
            decode_mxfp4(self.gate_up.weight)
            decode_mxfp4(self.down.weight)

    def _terms(self) -> FusedMoEQuantConfig:
        """Scales and biases."""
        first, second = self.biases or (None, None)
        quantization = self.quantization
        if quantization is None:
            return FusedMoEQuantConfig(w1_bias=first, w2_bias=second)
        return FusedMoEQuantConfig(
            quant_dtype=quantization.dtype,
            per_act_token_quant=quantization.activations == "token",
            block_shape=[SCALE_BLOCK, SCALE_BLOCK] if quantization.weights == "block" else None,
            w1_scale=self.gate_up.weight_scale,
            w2_scale=self.down.weight_scale,
            a1_scale=self.gate_up.input_scale,
            a2_scale=self.down.input_scale,
        )

    def _stacked(self) -> dict[str, Tensor]:
        """Experts that a checkpoint has together; gates and ups are neighbours there, as swigluoai takes them."""
        names = "experts.gate_up_proj", "experts.down_proj"
        weights = dict(zip(names, (self.gate_up.weight, self.down.weight), strict=True))
        if self.is_mxfp4:
            pairs = {name: mxfp4_views(weight) for name, weight in weights.items()}
            found = {f"{name}_{kind}": view for name, pair in pairs.items() for kind, view in pair.items()}
        else:
            found = {name: weight.mT for name, weight in weights.items()}
        if self.biases is not None:
            found |= {f"{name}_bias": bias for name, bias in zip(names, self.biases, strict=True)}
        return found

    def __call__(self, hidden: Tensor) -> Tensor:
        weights, ids = self._choice(hidden)
        activation, experts = self.mixture.activation, (hidden, self.gate_up.weight, self.down.weight)
        out = fused_experts(*experts, weights, ids, activation=activation, quant_config=self.terms)
        return out if self.shared is None else out.add_(self.shared(hidden))

    def _choice(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token."""
        mixture = self.mixture
        logits = self.router(hidden.float() if mixture.router_in_float32 else hidden)
        choice = hidden, logits, mixture.top_k, mixture.renormalize
        if mixture.num_groups > 1 or mixture.has_correction_bias:
            groups = mixture.num_groups, mixture.top_k_groups
            scores = mixture.scoring_func, mixture.routed_scaling_factor
            return fused_grouped_topk(*choice, self.correction_bias, *groups, *scores)
        weights, ids, _ = fused_topk(*choice, scoring_func=mixture.scoring_func)
        return weights if mixture.routed_scaling_factor == 1 else weights * mixture.routed_scaling_factor, ids
