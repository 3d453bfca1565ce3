"""Layers that are mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._experts import fused_moe
from .config import Config
from .linear import Place
from .mixture import Mixture

if TYPE_CHECKING:
    from torch import Tensor


class Experts:
    """``sum_j p_j down_j(silu(gate_j(x)) * up_j(x))`` over the best experts of each token, by its router."""

    def __init__(self, config: Config, mixture: Mixture, place: Place) -> None:
        experts, channels, hidden_size = mixture.num_experts, mixture.intermediate_size, config.hidden_size
        self.mixture = mixture
        self.router = place._replace(quantization=None).linear({"gate": experts}, hidden_size, bias=False)
        self.gate_up = place.empty(experts, 2 * channels, hidden_size)
        self.down = place.empty(experts, hidden_size, channels)

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        mixture, found = self.mixture, self.router.tensors()
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            named = {mixture.gate: gate, mixture.up: up, mixture.down: down}
            found |= {f"experts.{i}.{name}.weight": tensor for name, tensor in named.items()}
        return found

    def __call__(self, hidden: Tensor) -> Tensor:
        mixture = self.mixture
        return fused_moe(hidden, self.gate_up, self.down, self.router(hidden), mixture.top_k, mixture.renormalize)
