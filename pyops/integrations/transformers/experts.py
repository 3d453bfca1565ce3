"""Mixtures of experts of transformers' models."""

from __future__ import annotations

from torch import Tensor

from ..._experts import fused_experts
from .modules import Replacement, served


class Experts(Replacement):
    """The experts of a layer; transformers' router has chosen them."""

    op = "fused_experts"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not served(hidden_states):
            result: Tensor = self.original(hidden_states, top_k_index, top_k_weights)
            return result
        weights = self.module.gate_up_proj, self.module.down_proj
        return fused_experts(hidden_states, *weights, top_k_weights.float().contiguous(), top_k_index.contiguous())
