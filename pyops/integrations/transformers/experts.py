"""Mixtures of experts of transformers' models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..._experts import fused_experts
from .replacement import Replacement, served
from .trial import Trials, Unknown, agree, forward_of, randn, tried, twin

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOKENS, _TOP_K = 3, 16, 8, 5, 2  # sizes of a trial


class Experts(Replacement):
    """The experts of a layer; transformers' router has chosen them.

    Raises:
        Unknown: they compute something else.
    """

    op = "fused_experts"

    def __init__(self, module: Any, dtype: torch.dtype, trials: Trials) -> None:
        super().__init__(module)
        if module.gate_up_proj.dtype != dtype:
            raise Unknown(f"its weights are {module.gate_up_proj.dtype}, not {dtype}")
        trials.outcome(module, _try)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not served(hidden_states):
            result: Tensor = self.original(hidden_states, top_k_index, top_k_weights)
            return result
        weights = self.module.gate_up_proj, self.module.down_proj
        return fused_experts(hidden_states, *weights, top_k_weights.float().contiguous(), top_k_index.contiguous())


def is_experts(module: Any) -> bool:
    """Whether a module holds the weights of experts, and is told which of them are chosen."""
    names = list(inspect.signature(forward_of(module)).parameters)[1:]
    has_weights = all(isinstance(getattr(module, name, None), Tensor) for name in ("gate_up_proj", "down_proj"))
    return has_weights and names == ["hidden_states", "top_k_index", "top_k_weights"]


def _try(module: Any) -> None:
    """Compare small experts with the op's."""
    others = {name for name, _ in module.named_parameters(recurse=False)} - {"gate_up_proj", "down_proj"}
    if others:
        raise Unknown(f"its experts have {', '.join(sorted(others))}")
    gate_up = randn(_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN, seed=1)
    down = randn(_EXPERTS, _HIDDEN, _INTERMEDIATE, seed=2)
    small = twin(module, gate_up_proj=gate_up, down_proj=down)
    small.num_experts = _EXPERTS
    x, weights = randn(_TOKENS, _HIDDEN, seed=3), randn(_TOKENS, _TOP_K, seed=4).sigmoid()
    chosen = torch.stack(
        (torch.arange(_TOKENS, device="cpu") % _EXPERTS, (torch.arange(_TOKENS, device="cpu") + 1) % _EXPERTS), 1
    )
    # The code of the class, and not what its decorator chooses for a GPU.
    theirs = tried(lambda: forward_of(module)(small, x, chosen, weights))
    if not agree([fused_experts(x, gate_up, down, weights, chosen)], [theirs]):
        raise Unknown("its experts compute something else")
