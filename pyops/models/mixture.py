"""Mixtures of experts as ``config.json`` describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .config_values import first, flag, is_integer, refuse, size


@dataclass(frozen=True)
class Mixture:
    """The MLPs of layers that have several, of which each token takes the best by the softmax of its router's logits.

    Attributes:
        num_experts, top_k: MLPs of a layer, and those that a token takes.
        intermediate_size: channels of each.
        renormalize: whether the weights of a token's experts are divided by their sum.
        layers: for each layer, whether it has experts.
        gate, up, down: names of the projections of an expert in a checkpoint.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    layers: tuple[bool, ...]
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "intermediate_size"):
            size(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise refuse("num_experts_per_tok", f"at most num_experts={self.num_experts}", self.top_k)


def parse_mixtral(values: dict[str, Any], layers: int) -> Mixture:
    """Mixtral: every layer has experts, of the size that ``intermediate_size`` says."""
    return Mixture(
        num_experts=first(values.get("num_local_experts"), values.get("num_experts"), 8),
        top_k=first(values.get("num_experts_per_tok"), 2),
        intermediate_size=size("intermediate_size", values.get("intermediate_size")),
        renormalize=True,
        layers=(True,) * layers,
        gate="w1",
        up="w3",
        down="w2",
    )


def parse_qwen3_moe(values: dict[str, Any], layers: int) -> Mixture:
    """Qwen3-MoE: every ``decoder_sparse_step``-th layer has experts, unless ``mlp_only_layers`` has its number."""
    plain, step = first(values.get("mlp_only_layers"), []), first(values.get("decoder_sparse_step"), 1)
    if not isinstance(plain, list) or not all(is_integer(i) for i in plain):
        raise refuse("mlp_only_layers", "numbers of layers", plain)
    size("decoder_sparse_step", step)
    return Mixture(
        num_experts=first(values.get("num_local_experts"), values.get("num_experts"), 128),
        top_k=first(values.get("num_experts_per_tok"), 8),
        intermediate_size=first(values.get("moe_intermediate_size"), 768),
        renormalize=flag(values, "norm_topk_prob"),
        layers=tuple(i not in plain and (i + 1) % step == 0 for i in range(layers)),
    )


MIXTURES = {"MixtralForCausalLM": parse_mixtral, "Qwen3MoeForCausalLM": parse_qwen3_moe}
