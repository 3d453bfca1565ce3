"""Expert weights for `fused_experts`: plain, 8-bit, or dequantized at load time from fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core.system.lazy import torch
from ..fused.expert_products import multiply_experts_of_token
from ..fused.experts import FusedMoEQuantConfig, fused_experts
from ..ops._shared.scalar_type import E2M1_NUMBERS
from ..ops.linear.gemm_problem import SCALE_BLOCK
from .config_values import refuse
from .linear import Place
from .mixture import STACKED, Mixture
from .packed_format import PackedQuantization
from .packed_linear import PackedLinear, packed_linear
from .quantization import MX_BLOCK, Mxfp4Experts, Quantization

if TYPE_CHECKING:
    from torch import Tensor

_E8M0_BIAS = 127


class ExpertWeights(NamedTuple):
    """One projection of all experts.

    Attributes:
        weight: [num_experts, out, in].
        weight_scale: float32, one for each row or each block of 8-bit weights; or None.
        input_scale: one float32, the maximum of the experts' static scales; or None.
    """

    weight: Tensor
    weight_scale: Tensor | None = None
    input_scale: Tensor | None = None


def _weights(place: Place, quantization: Quantization | None, experts: int, rows: int, columns: int) -> ExpertWeights:
    """Uninitialised weights and scales. ModelError if the scale blocks do not divide the weights."""
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
        torch.empty(experts, *scales, dtype=torch.float32, device=place.device),
        torch.zeros(1, dtype=torch.float32, device=place.device) if quantization.activations == "static" else None,
    )


def expert_biases(mixture: Mixture, hidden_size: int, place: Place) -> tuple[Tensor, Tensor] | None:
    """Uninitialised biases: gate and up [num_experts, 2 * intermediate_size], and down; None if there are no biases."""
    if not mixture.has_bias:
        return None
    experts = mixture.num_experts
    return place.empty(experts, 2 * mixture.intermediate_size), place.empty(experts, hidden_size)


def named_biases(biases: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """{name in a checkpoint: biases of all experts}."""
    return {} if biases is None else {f"{name}_bias": bias for name, bias in zip(STACKED, biases, strict=True)}


def mxfp4_tensors(mixture: Mixture, gate_up: dict[str, Tensor], down: dict[str, Tensor]) -> dict[str, Tensor]:
    """{name in a checkpoint: view} of experts in MXFP4, stacked as in gpt-oss, or one by one as in DeepSeek-V4.

    Args:
        gate_up, down: "blocks" [num_experts, rows, columns / 32, 16] and "scales" [num_experts, rows, columns / 32],
            uint8. The bytes of one expert are called int8, and its scales float8_e8m0fnu.
    """
    if mixture.is_stacked:
        pairs = zip(STACKED, (gate_up, down), strict=True)
        return {f"{name}_{kind}": view for name, views in pairs for kind, view in views.items()}
    found = {}
    for i in range(mixture.num_experts):
        for views, names in ((gate_up, (mixture.gate, mixture.up)), (down, (mixture.down,))):
            blocks, scales = views["blocks"][i].flatten(-2), views["scales"][i]
            for part, name in enumerate(names):
                found[f"experts.{i}.{name}.weight"] = blocks.chunk(len(names))[part].view(torch.int8)
                of_blocks = scales.chunk(len(names))[part].view(torch.float8_e8m0fnu)
                found[f"experts.{i}.{name}.weight_scale"] = of_blocks
    return found


def projections(mixture: Mixture, hidden_size: int, expert: int) -> list[tuple[dict[str, int], int]]:
    """({name in a checkpoint: rows}, columns) for each of the two GEMMs of an expert."""
    at, channels = f"experts.{expert}.", mixture.intermediate_size
    gate_up = {f"{at}{mixture.gate}": channels, f"{at}{mixture.up}": channels}
    return [(gate_up, hidden_size), ({f"{at}{mixture.down}": hidden_size}, channels)]


class PlainExperts:
    """Experts with floating-point weights, or with 8-bit weights and scales.

    Args:
        mixture: sizes and options of the experts.
        hidden_size: elements of a hidden state.
        place: device and dtype of the weights.
        quantization: how weights and activations are quantised; None if they are not.
    """

    def __init__(
        self, mixture: Mixture, hidden_size: int, place: Place, quantization: Quantization | None = None
    ) -> None:
        experts, channels = mixture.num_experts, mixture.intermediate_size
        rows = 2 * channels if mixture.gate else channels
        self.mixture, self.quantization = mixture, quantization
        self.gate_up = _weights(place, quantization, experts, rows, hidden_size)
        self.down = _weights(place, quantization, experts, hidden_size, channels)
        self.biases = expert_biases(mixture, hidden_size, place)
        self.terms = self._terms()

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        if self.mixture.joined:
            return dict(zip(self.mixture.joined, (self.gate_up.weight, self.down.weight), strict=True))
        if not self.mixture.is_stacked:
            return self._named()
        # Gate and up rows are interleaved in such a checkpoint, as swigluoai expects them.
        weights = self.gate_up.weight.mT, self.down.weight.mT
        return dict(zip(STACKED, weights, strict=True)) | named_biases(self.biases)

    def _named(self) -> dict[str, Tensor]:
        """`tensors` of a checkpoint with separate tensors for each expert."""
        mixture, found = self.mixture, dict[str, "Tensor"]()
        for kind in ("weight", "weight_scale"):
            gate_ups, downs = getattr(self.gate_up, kind), getattr(self.down, kind)
            if gate_ups is not None:
                for i, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
                    names = [name for name in (mixture.gate, mixture.up) if name]
                    named = {**dict(zip(names, gate_up.chunk(len(names)), strict=True)), mixture.down: down}
                    found |= {f"experts.{i}.{name}.{kind}": tensor for name, tensor in named.items()}
        if self.gate_up.input_scale is not None and self.down.input_scale is not None:
            inputs = dict.fromkeys((mixture.gate, mixture.up), self.gate_up.input_scale)
            inputs[mixture.down] = self.down.input_scale
            for i in range(mixture.num_experts):
                found |= {f"experts.{i}.{name}.input_scale": scale for name, scale in inputs.items()}
        return found

    def check(self) -> None:
        """Check the weights once a checkpoint is written. Plain weights need no check."""

    def prepare(self) -> None:
        """Convert the weights once a checkpoint is written. The GEMMs read plain weights as they are."""

    def __call__(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Apply the chosen experts to hidden [num_tokens, hidden_size]; weights and ids are [num_tokens, top_k]."""
        experts = hidden, self.gate_up.weight, self.down.weight
        return fused_experts(*experts, weights, ids, activation=self.mixture.activation, quant_config=self.terms)

    @property
    def are_plain(self) -> bool:
        """Whether the GEMMs of one token read the weights as they are."""
        return self.quantization is None and not self.mixture.limit

    def add_to(
        self, total: Tensor, hidden: Tensor, weights: Tensor, ids: Tensor, shared: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """The sum of `total`, [1, hidden_size], and of the result of a call; in the memory of `total` or in new memory.

        Args:
            shared: both weights of a shared expert, which is added, too, if the experts `are_plain`; () for none.
        """
        if not self.are_plain:
            return total.add_(self(hidden, weights, ids))
        channels = self.mixture.intermediate_size
        parts = shared[1].shape[1] // channels if shared else 0
        out, between = torch.empty_like(hidden), hidden.new_empty(ids.shape[1] + parts, channels)
        experts = self.gate_up.weight, self.down.weight, weights, ids, self.mixture.activation, self.terms
        multiply_experts_of_token(out, between, hidden, *experts, total, *shared)
        return out

    def _terms(self) -> FusedMoEQuantConfig:
        """The scales and biases, as `fused_experts` takes them."""
        first, second = self.biases or (None, None)
        quantization = self.quantization
        limit = self.mixture.limit or None
        if quantization is None:
            return FusedMoEQuantConfig(w1_bias=first, w2_bias=second, gemm1_clamp_limit=limit)
        return FusedMoEQuantConfig(
            quant_dtype=quantization.dtype,
            per_act_token_quant=quantization.activations == "token",
            block_shape=[SCALE_BLOCK, SCALE_BLOCK] if quantization.weights == "block" else None,
            w1_scale=self.gate_up.weight_scale,
            w2_scale=self.down.weight_scale,
            a1_scale=self.gate_up.input_scale,
            a2_scale=self.down.input_scale,
            gemm1_clamp_limit=limit,
        )


class PackedAsPlain(PlainExperts):
    """Experts with packed weights that no grouped GEMM reads. The packed quants are loaded into the memory of the
    dequantized weights, and `prepare` dequantizes them in place, one expert at a time."""

    def __init__(self, mixture: Mixture, hidden_size: int, place: Place, packed: PackedQuantization) -> None:
        super().__init__(mixture, hidden_size, place)
        self._packed: list[tuple[Tensor, PackedLinear]] = []
        for i in range(mixture.num_experts):
            weights = self.gate_up.weight[i], self.down.weight[i]
            for weight, (sizes, columns) in zip(weights, projections(mixture, hidden_size, i), strict=True):
                packs = packed_linear(packed, sizes, columns, None, place.dtype, place.device, weight)
                self._packed.append((weight, packs))

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for _, packs in self._packed:
            found |= packs.tensors()
        return found

    def prepare(self) -> None:
        for weight, packs in self._packed:
            weight.copy_(packs.dequantised())


class Mxfp4AsPlain(PlainExperts):
    """Experts with mxfp4 weights that no grouped GEMM reads, dequantized like those of `PackedAsPlain`.

    The dequantized weights are exact in bfloat16 and float32: ``e2m1 * 2^(scale - 127)``.
    """

    def tensors(self) -> dict[str, Tensor]:
        found = named_biases(self.biases)
        views = [self._views(weight) for weight in (self.gate_up.weight, self.down.weight)]
        return found | mxfp4_tensors(self.mixture, *views)

    def prepare(self) -> None:
        for weight in (self.gate_up.weight, self.down.weight):
            values = torch.tensor(E2M1_NUMBERS, dtype=torch.float32, device=weight.device)
            for expert in weight:  # one expert at a time: e2m1 values as int64 indices take 16 times the memory
                views = self._views(expert)
                codes = torch.stack((views["blocks"] & 15, views["blocks"] >> 4), -1).flatten(-2)
                scaled = torch.ldexp(values[codes.int()], views["scales"].int()[..., None] - _E8M0_BIAS)
                expert.copy_(scaled.flatten(-2))

    def _views(self, weight: Tensor) -> dict[str, Tensor]:
        """Views into the first bytes of each row of a weight [..., rows, columns], into which a checkpoint is loaded.

        Returns:
            "blocks": [..., rows, columns / 32, 16] uint8, two e2m1 values to a byte, the earlier in the low nibble.
            "scales": [..., rows, columns / 32] uint8.
        """
        columns = weight.shape[-1]
        num_blocks, num_bytes = columns // MX_BLOCK, columns // 2
        row = weight.view(torch.uint8)
        blocks = row[..., :num_bytes].unflatten(-1, (num_blocks, MX_BLOCK // 2))
        return {"blocks": blocks, "scales": row[..., num_bytes : num_bytes + num_blocks]}


def as_plain(
    mixture: Mixture, hidden_size: int, place: Place, quantization: PackedQuantization | Mxfp4Experts
) -> PlainExperts:
    """Experts with packed weights that are dequantized in place after loading."""
    if isinstance(quantization, Mxfp4Experts):
        return Mxfp4AsPlain(mixture, hidden_size, place)
    return PackedAsPlain(mixture, hidden_size, place, quantization)
