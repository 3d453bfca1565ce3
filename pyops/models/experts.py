"""Layers that are mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import torch
from .._experts import FusedMoEQuantConfig, fused_experts
from ..ops.moe.routing_fused import fused_grouped_topk, fused_topk
from .attention import MLP
from .config import Config
from .linear import Place
from .mixture import Mixture

if TYPE_CHECKING:
    from torch import Tensor


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
        self.gate_up = place.empty(experts, 2 * channels, hidden_size)
        self.down = place.empty(experts, hidden_size, channels)
        self.biases: tuple[Tensor, Tensor] | None = None
        self.terms = None
        if mixture.has_bias:
            self.biases = place.empty(experts, 2 * channels), place.empty(experts, hidden_size)
            self.terms = FusedMoEQuantConfig(w1_bias=self.biases[0], w2_bias=self.biases[1])
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
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            named = {mixture.gate: gate, mixture.up: up, mixture.down: down}
            found |= {f"experts.{i}.{name}.weight": tensor for name, tensor in named.items()}
        return found

    def _stacked(self) -> dict[str, Tensor]:
        """Experts that a checkpoint has together; gates and ups are neighbours there, as swigluoai takes them."""
        names = "experts.gate_up_proj", "experts.down_proj"
        found = dict(zip(names, (self.gate_up.mT, self.down.mT), strict=True))
        if self.biases is not None:
            found |= {f"{name}_bias": bias for name, bias in zip(names, self.biases, strict=True)}
        return found

    def __call__(self, hidden: Tensor) -> Tensor:
        weights, ids = self._choice(hidden)
        activation, experts = self.mixture.activation, (hidden, self.gate_up, self.down)
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
