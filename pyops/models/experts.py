"""The mixture-of-experts layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..ops.linear.dsv3 import fp32_router_gemm
from ..ops.linear.skinny_router import MAX_CHOICES, MAX_ROUTED, skinny_router
from ..ops.moe.routing_fused import fused_grouped_topk, fused_topk, fused_topk_bias
from ..tuning import batch_invariant
from .attention import MLP
from .config import Config
from .config_values import refuse
from .expert_weights import PlainExperts, as_plain
from .gguf_experts import GgufExperts
from .linear import Linear, Place, gpu_of
from .marlin_experts import MarlinExperts, serves
from .mixture import STACKED, Mixture
from .norm import Norm
from .packed_format import PackedQuantization
from .quantization import GGUF_MXFP4, MX_BLOCK, GgufTypes, Mxfp4Experts, Quantization, has_mxfp4_experts

if TYPE_CHECKING:
    from torch import Tensor

# `fp32_router_gemm` reads the weight once for every four tokens. Most tokens for any weight, those of vLLM's op; and
# most bytes that it reads for more tokens: 16 MB take 4 us from L2, less than a conversion and cuBLAS.
_FEW_TOKENS, _FEW_BYTES = 48, 2**24


def _quantization(place: Place, names: list[str]) -> Quantization | PackedQuantization | Mxfp4Experts | None:
    """How the expert projections `names` are quantised. ModelError if only some of them are."""
    own = place.quantization
    if isinstance(own, GgufTypes) and own.of(f"{place.module}.{STACKED[0]}") == GGUF_MXFP4:
        return Mxfp4Experts()
    if has_mxfp4_experts(own):
        return Mxfp4Experts()
    if not isinstance(own, Quantization | PackedQuantization):
        return None
    covered = {own.covers(name) for name in names}
    if len(covered) > 1:
        raise refuse("quantization_config", f"all or none of the experts of {place.module} to be quantised", "some")
    return own if covered.pop() else None


def _weights(mixture: Mixture, hidden_size: int, place: Place) -> PlainExperts | MarlinExperts | GgufExperts:
    """The experts of a layer, uninitialised, of the class that reads their quantization."""
    experts, parts = range(mixture.num_experts), (mixture.gate, mixture.up, mixture.down)
    own = _quantization(place, [f"{place.module}.experts.{i}.{name}" for i in experts for name in parts])
    if isinstance(own, Mxfp4Experts) and (hidden_size % MX_BLOCK or mixture.intermediate_size % MX_BLOCK):
        sizes = hidden_size, mixture.intermediate_size
        raise refuse("hidden_size", f"blocks of {MX_BLOCK} elements of experts", sizes)
    types = place.quantization
    if (
        own is None
        and isinstance(types, GgufTypes)
        and types.of(f"{place.module}.experts.0.{mixture.down}") is not None
    ):
        return GgufExperts(mixture, hidden_size, place, types)
    if own is None or isinstance(own, Quantization):
        return PlainExperts(mixture, hidden_size, place, own)
    if serves(own, mixture, hidden_size, place.dtype):
        return MarlinExperts(mixture, hidden_size, place, own)
    return as_plain(mixture, hidden_size, place, own)


class Experts:
    """``sum_j p_j down_j(silu(gate_j(x)) * up_j(x))`` over the top-k experts that the router chooses for each token.

    Some architectures have another activation, or add a shared MLP, which processes every token.
    """

    def __init__(self, config: Config, mixture: Mixture, place: Place) -> None:
        experts, hidden_size = mixture.num_experts, config.hidden_size
        self.mixture = mixture
        router = place._replace(quantization=None)
        if mixture.router_in_float32:
            router = router._replace(dtype=torch.float32)
        self.router = router.linear({mixture.router: experts}, hidden_size, mixture.has_bias)
        # The op ranks groups by the sum of their two best experts if it gets a bias, so a bias of zeros is passed.
        has_bias = mixture.has_correction_bias or (mixture.ranks_by_two and mixture.num_groups > 1)
        self.correction_bias = torch.zeros(experts, dtype=torch.float32, device=place.device) if has_bias else None
        self.by_token = None  # the experts of each token
        if any(mixture.by_token):
            shape = config.vocab_size, mixture.top_k
            self.by_token = torch.zeros(shape, dtype=torch.int64, device=place.device)
        self.weights = _weights(mixture, hidden_size, place)
        shared = mixture.shared_intermediate_size
        at = place._replace(module=f"{place.module}.{mixture.shared}")
        self.shared = MLP(config, at, shared, mixture.limit) if shared else None
        one = {mixture.shared_gate: 1}
        self.shared_gate = place.linear(one, hidden_size, bias=False) if mixture.shared_gate else None

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        found = self.router.tensors() | self.weights.tensors()
        if self.correction_bias is not None and self.mixture.has_correction_bias:
            found[self.mixture.correction_bias] = self.correction_bias
        if self.by_token is not None:
            found[f"{self.mixture.router}.tid2eid"] = self.by_token
        if self.shared is not None:
            found |= {f"{self.mixture.shared}.{name}": tensor for name, tensor in self.shared.tensors().items()}
        if self.shared_gate is not None:
            found |= self.shared_gate.tensors()
        return found

    adds = True  # `add_norm_to` serves all weights

    def add_norm_to(self, residual: Tensor, norm: Norm) -> Tensor:
        """``residual + self(norm.of(residual))``, in the memory of `residual` or in new memory."""
        if self.shared_gate is not None or not isinstance(self.weights, PlainExperts):
            return residual.add_(self(norm.of(residual)))
        hidden, weights, ids = self._routed(residual, norm)
        shared = self._shared_like_experts()
        out = self.weights.add_to(residual, hidden, weights, ids, shared)
        return out if self.shared is None or shared else self.shared.add_to(out, hidden)

    def _routed(self, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised token, and the weights and ids of its experts: one launch, but for groups and biases."""
        mixture, router = self.mixture, self.router
        is_served = mixture.scoring_func in ("softmax", "sigmoid") and self.correction_bias is None
        is_served = is_served and mixture.num_groups == 1 and self.by_token is None
        fits = mixture.num_experts <= MAX_ROUTED and mixture.top_k <= MAX_CHOICES
        if is_served and fits and isinstance(router, Linear) and router.bias is None:
            scores = mixture.renormalize, mixture.scoring_func, mixture.routed_scaling_factor
            weights = norm.weight, router.weight
            found: tuple[Tensor, Tensor, Tensor]
            found = skinny_router.new(residual, *weights, *scores, norm.epsilon, topk=mixture.top_k)
            return found
        hidden = norm.of(residual)
        return hidden, *self._choice(hidden)

    def _shared_like_experts(self) -> tuple[Tensor, ...]:
        """Both weights of the shared expert if it is like several experts of the router, which are plain; else ()."""
        mixture, shared = self.mixture, self.shared
        if shared is None or not (isinstance(self.weights, PlainExperts) and self.weights.are_plain):
            return ()
        is_multiple = shared.intermediate_size % mixture.intermediate_size == 0
        if not (is_multiple and shared.has_gate and shared.activation == mixture.activation == "silu"):
            return ()
        gate_up, down = shared.gate_up, shared.down
        if not (isinstance(gate_up, Linear) and isinstance(down, Linear)):
            return ()
        return (gate_up.weight, down.weight) if gate_up.bias is None and down.bias is None else ()

    def __call__(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The sum; `tokens` are the ids of the tokens, for a layer in which a table names their experts."""
        out = self.weights(hidden, *self._choice(hidden, tokens))
        if self.shared is None:
            return out
        if self.shared_gate is None:
            return self.shared.add_to(out, hidden)
        return out.add_(self.shared(hidden).mul_(self.shared_gate(hidden).sigmoid_()))

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits of the router. In float32, few tokens of bfloat16 take one kernel, without a conversion."""
        if not self.mixture.router_in_float32:
            return self.router(hidden)
        is_served = gpu_of(hidden) is not None and not batch_invariant() and hidden.dtype == torch.bfloat16
        if is_served and isinstance(self.router, Linear) and self.router.bias is None:
            num_tokens, weight = hidden.shape[0], self.router.weight
            if num_tokens <= _FEW_TOKENS or -(-num_tokens // 4) * weight.nbytes <= _FEW_BYTES:
                return fp32_router_gemm.new(hidden, weight)
        return self.router(hidden.float())

    def _choice(self, hidden: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route the tokens: weights and ids of the experts of each token."""
        mixture = self.mixture
        logits = self._logits(hidden)
        choice = hidden, logits, mixture.top_k, mixture.renormalize
        if mixture.scoring_func == "sqrtsoftplus":
            return fused_topk_bias(
                *(hidden, logits, self.correction_bias, mixture.top_k, mixture.renormalize, mixture.scoring_func),
                input_tokens=None if self.by_token is None else tokens,
                hash_indices_table=self.by_token,
                routed_scaling_factor=mixture.routed_scaling_factor,
            )
        if mixture.num_groups > 1 or mixture.has_correction_bias:
            groups = mixture.num_groups, mixture.top_k_groups
            scores = mixture.scoring_func, mixture.routed_scaling_factor
            return fused_grouped_topk(*choice, self.correction_bias, *groups, *scores)
        weights, ids, _ = fused_topk(*choice, scoring_func=mixture.scoring_func)
        return weights if mixture.routed_scaling_factor == 1 else weights * mixture.routed_scaling_factor, ids
