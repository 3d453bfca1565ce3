"""State-space models of transformers with random weights, the truth of other tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {"vocab_size": 96, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class GroupedNorm(torch.nn.Module):
    """The gated norm of Mamba-2: RMSNorm of x * silu(gate), for each group of channels separately."""

    def __init__(self, weight: torch.nn.Parameter, n_groups: int, eps: float) -> None:
        super().__init__()
        self.weight, self.n_groups, self.eps = weight, n_groups, eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = (x.float() * torch.nn.functional.silu(gate.float())).unflatten(-1, (self.n_groups, -1))
        return self.weight * torch.nn.functional.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(-2).to(x.dtype)


def heed_groups(model: torch.nn.Module) -> None:
    """Give mixers of Mamba-2 a norm with groups; transformers 5.17 takes all groups as one, 5.23 does not."""
    for mixer in list(model.modules()):
        norm = getattr(mixer, "norm", None)
        heeds = not hasattr(mixer, "n_groups") or hasattr(norm, "group_size") or hasattr(norm, "n_groups")
        if type(norm).__name__.endswith("RMSNormGated") and not heeds:
            mixer.norm = GroupedNorm(norm.weight, mixer.n_groups, norm.variance_epsilon)  # type: ignore[union-attr, assignment]


def random_model(family: str, options: dict[str, Any], seed: int = 1) -> Any:
    """A model of that family with random weights that make clear choices; biases and norms are random, too."""
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind(kind.config_class(**SIZES | options))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.endswith("A_log"):
            parameter.data.normal_(0.0, 0.3)
        elif "norm" in name or name.endswith("bias"):
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(0.0, 0.2)
    heed_groups(model)
    return model.eval()
