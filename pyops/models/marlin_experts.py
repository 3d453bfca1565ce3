"""Packed expert weights for `fused_marlin_moe`, repacked to Marlin's layout once they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..errors import ModelError
from ..fused.marlin_experts import fused_marlin_moe
from ..fused.packed_linear import PackedProduct
from ..ops._shared.packed_layouts import ZeroLayout, column_place, zero_bit
from ..ops._shared.scalar_type import SCALAR_TYPES
from ..ops.activation.gated import silu_and_mul_with_clamp
from ..ops.linear.marlin_repack import awq_marlin_repack, gptq_marlin_repack
from ..ops.linear.marlin_weight import scale_order
from ..ops.linear.repack import TILE_COLUMNS
from .expert_weights import expert_biases, mxfp4_tensors, named_biases, projections
from .linear import Place
from .mixture import Mixture
from .packed_format import PackedQuantization
from .packed_linear import PackedLinear
from .quantization import MX_BLOCK, Mxfp4Experts

if TYPE_CHECKING:
    from torch import Tensor

# Quantized types that the kernels read: {(bits, whether there are zero points): name}.
_TYPES = {(4, False): "uint4b8", (4, True): "uint4", (8, False): "uint8b128"}
_STEPS = {4: (64, 128), 8: (64,)}  # {bits: k-tile sizes of the kernels}; the smallest must divide the columns
_TILE_ROWS = 16  # K of a Marlin tile, which is that of one MMA


def serves(
    quantization: PackedQuantization | Mxfp4Experts, mixture: Mixture, hidden_size: int, dtype: torch.dtype
) -> bool:
    """Whether a kernel of `fused_marlin_moe` reads such quantized weights directly, for activations of the dtype.

    `fused_marlin_moe` also accepts other weights, but dequantizes all of them at every call.
    """
    channels = mixture.intermediate_size
    if dtype == torch.float32 or hidden_size % TILE_COLUMNS or channels % TILE_COLUMNS:
        return False
    if isinstance(quantization, Mxfp4Experts):
        return True
    if (quantization.bits, _has_zeros(quantization)) not in _TYPES:
        return False
    groups = [(columns, quantization.columns_of_group(columns)) for columns in (hidden_size, channels)]
    return all(
        size == columns or size % step == 0 or (step % size == 0 and size % _TILE_ROWS == 0)
        for columns, size in groups
        for step in _STEPS[quantization.bits]
    )


def _has_zeros(quantization: PackedQuantization) -> bool:
    """Whether the weights have zero points other than the midpoint of the quantized range."""
    return quantization.has_zeros and not quantization.is_symmetric


class MarlinWeight:
    """One projection of all experts: in the layout of the checkpoint until `repack`, then in Marlin's layout.

    Args:
        num_experts, rows, columns: of the weights, [num_experts, rows, columns].
        parts: number of projections that are stacked in the rows.
        place: device and dtype; the scales have this dtype, except those of mxfp4.
        quantization: of the weights.

    Attributes:
        kind: the quantized type.
        groups: number of column groups; each has a scale.
        codes: the packed quants, [num_experts, columns / 16, rows * bits / 2] int32.
        scales: [num_experts, groups, rows].
        zeros: [num_experts, groups, rows * bits / 32] int32; or None.
        orders: ``g_idx`` of the checkpoint, [num_experts, columns] int32, for each stacked projection with act-order.
        perm, g_idx: [num_experts, columns] int32: the columns sorted by group, and their groups; or None.
    """

    def __init__(
        self,
        size: tuple[int, int, int],
        parts: int,
        place: Place,
        quantization: PackedQuantization | Mxfp4Experts,
    ) -> None:
        experts, self.rows, self.columns = size
        self.quantization = quantization
        has_zeros = has_order = False
        if isinstance(quantization, Mxfp4Experts):
            name, self.groups, dtype = "float4_e2m1f", self.columns // MX_BLOCK, torch.uint8
        else:
            has_zeros = _has_zeros(quantization)
            has_order, dtype = quantization.has_order, place.dtype
            name = _TYPES[quantization.bits, has_zeros]
            self.groups = self.columns // quantization.columns_of_group(self.columns)
        self.kind = SCALAR_TYPES[name]
        self.bits = self.kind.size_bits

        def words(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=place.device)

        zeros, order = (self.groups, self.rows * self.bits // 32), (experts, self.columns)
        self.codes = words(experts, self.columns // 16, self.rows * self.bits // 2)
        self.scales = torch.empty(experts, self.groups, self.rows, dtype=dtype, device=place.device)
        self.zeros = words(experts, *zeros) if has_zeros else None
        self.orders = [words(*order) for _ in range(parts)] if has_order else []
        self.perm = words(*order) if has_order else None
        self.g_idx = words(*order) if has_order else None
        # Tensors that a checkpoint has although config.json implies them: `check_written` compares them, and all
        # experts write them to the same memory.
        self._known_zeros, self._known_order = words(*zeros), words(self.columns)

    def as_loaded(self, expert: int, sizes: dict[str, int], packed: PackedQuantization) -> PackedLinear:
        """The memory of one expert's projection in the checkpoint's layout; `sizes` is {name there: rows}."""
        product = PackedProduct(
            self.codes[expert].view((self.columns, -1) if packed.format == "awq" else (-1, self.rows)),
            self._known_zeros if self.zeros is None else self.zeros[expert],
            self.scales[expert],
        )
        orders = tuple(order[expert] for order in self.orders)
        if packed.lists_groups and not packed.has_order:
            orders = (self._known_order,) * len(sizes)
        return PackedLinear((product,), None, sizes, packed, orders)

    def stacked_as_loaded(self) -> dict[str, Tensor]:
        """The memory of all experts in the layout of an mxfp4 checkpoint.

        Returns:
            e2m1 values [num_experts, rows, columns / 32, 16] uint8, and scales.
        """
        blocks = self.codes.view(torch.uint8).view(len(self.codes), self.rows, self.groups, MX_BLOCK // 2)
        return {"blocks": blocks, "scales": self.scales.mT}

    def check(self, names: list[str]) -> None:
        """ModelError for weights that Marlin's layout cannot hold; `names` are those of the stacked projections."""
        for name, order in zip(names, self.orders, strict=False):
            for wrong, expected in (
                ((order != self.orders[0]).any(1), f"the groups of {names[0]}, which multiplies the same columns"),
                ((order.sort(1)[0] != self._groups_in_order()).any(1), f"{self.groups} groups of one size"),
            ):
                if wrong.any():
                    raise ModelError(f"experts.{int(wrong.nonzero()[0])}.{name}.g_idx", f"expected {expected}")
        most = (1 << self.bits) - 1
        if self.zeros is not None and self._zero_offset and (_fields(self.zeros, self.bits) == most).any():
            raise ModelError(f"experts.{names[0]}.qzeros", f"expected zero points up to {most}, got {most + 1}")

    def repack(self) -> None:
        """Repack the weights of the checkpoint to Marlin's layout, one expert at a time."""
        if self.perm is not None and self.g_idx is not None:
            self.perm.copy_(self.orders[0].argsort(dim=1, stable=True))
            self.g_idx.copy_(self._groups_in_order().expand_as(self.g_idx))
        is_awq = isinstance(self.quantization, PackedQuantization) and self.quantization.format == "awq"
        size = self.columns, self.rows, self.bits
        for i, codes in enumerate(self.codes):
            if is_awq:
                awq_marlin_repack(codes.view(self.columns, -1).clone(), *size, out=codes)
                continue
            by_columns = codes.view(-1, self.rows).clone()
            if isinstance(self.quantization, Mxfp4Experts):
                by_columns = codes.view(self.rows, -1).T.contiguous()
            gptq_marlin_repack(by_columns, None if self.perm is None else self.perm[i], *size, out=codes)
        rows = torch.arange(self.rows, dtype=torch.int64, device=self.codes.device)
        self.scales.copy_(moved(self.scales, column_place(scale_order(self.kind, self.groups), rows)))
        if self.zeros is not None:
            fields = _fields(self.zeros, self.bits)[..., self._zero_places("awq" if is_awq else "gptq")]
            self.zeros.copy_(_words(moved(fields + self._zero_offset, self._zero_places("marlin")), self.bits))

    @property
    def _zero_offset(self) -> int:
        """The difference between a zero point and its stored value."""
        return int(isinstance(self.quantization, PackedQuantization) and not self.quantization.is_v2)

    def _groups_in_order(self) -> Tensor:
        return torch.arange(self.columns, dtype=torch.int32, device=self.codes.device) // (self.columns // self.groups)

    def _zero_places(self, layout: ZeroLayout) -> Tensor:
        """The index of each weight row's zero point within a packed row."""
        rows = torch.arange(self.rows, dtype=torch.int64, device=self.codes.device)
        places: Tensor = zero_bit(layout, self.bits, self.rows, 0, rows, 0) // self.bits
        return places


def moved(entries: Tensor, places: Tensor) -> Tensor:
    """Scatter the last dimension of `entries`, [..., n]: entry i of a row goes to index ``places[i]``."""
    found = torch.empty_like(entries)
    found[..., places] = entries
    return found


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [..., n] to fields [..., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int64, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _words(fields: Tensor, bits: int) -> Tensor:
    """Pack fields into words; the inverse of `_fields`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int64, device=fields.device)
    return (fields.unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1).to(torch.int32)


class MarlinExperts:
    """Experts with packed weights, computed by `fused_marlin_moe`.

    Args:
        mixture: sizes and options of the experts.
        hidden_size: elements of a hidden state.
        place: device and dtype of the weights.
        quantization: of the weights; `serves` must accept it.
    """

    def __init__(
        self, mixture: Mixture, hidden_size: int, place: Place, quantization: PackedQuantization | Mxfp4Experts
    ) -> None:
        self.mixture, self.hidden_size, self.quantization = mixture, hidden_size, quantization
        self.gate_up, self.down = (
            MarlinWeight((mixture.num_experts, sum(sizes.values()), columns), len(sizes), place, quantization)
            for sizes, columns in projections(mixture, hidden_size, 0)
        )
        self.biases = expert_biases(mixture, hidden_size, place)

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        own, weights, found = self.quantization, (self.gate_up, self.down), named_biases(self.biases)
        if isinstance(own, Mxfp4Experts):
            return found | mxfp4_tensors(self.mixture, *[weight.stacked_as_loaded() for weight in weights])
        for i in range(self.mixture.num_experts):
            for weight, (sizes, _) in zip(weights, projections(self.mixture, self.hidden_size, i), strict=True):
                found |= weight.as_loaded(i, sizes, own).tensors()
        return found

    def check(self) -> None:
        """Check the weights once a checkpoint is written. ModelError if the kernels cannot read them."""
        self.gate_up.check([self.mixture.gate, self.mixture.up])
        self.down.check([self.mixture.down])

    def prepare(self) -> None:
        """Repack the weights once a checkpoint is written."""
        for weight in (self.gate_up, self.down):
            weight.repack()
        for bias in self.biases or ():
            bias.copy_(
                moved(
                    bias, column_place("marlin_32", torch.arange(bias.shape[1], dtype=torch.int64, device=bias.device))
                )
            )

    def __call__(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Apply the chosen experts to hidden [num_tokens, hidden_size]; weights and ids are [num_tokens, top_k]."""
        first, second = self.gate_up, self.down
        bias1, bias2 = self.biases or (None, None)
        limit = self.mixture.limit
        return fused_marlin_moe(
            hidden,
            first.codes,
            second.codes,
            bias1,
            bias2,
            first.scales,
            second.scales,
            weights,
            ids,
            first.kind.id,
            activation=self.mixture.activation,
            activation_func=(lambda _, out, x: silu_and_mul_with_clamp(out, x, limit)) if limit else None,
            g_idx1=first.g_idx,
            g_idx2=second.g_idx,
            sort_indices1=first.perm,
            sort_indices2=second.perm,
            w1_zeros=first.zeros,
            w2_zeros=second.zeros,
        )
