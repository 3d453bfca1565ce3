"""Experts with weights in the quantised types of GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..ops.activation import silu_and_mul
from ..ops.linear.ggml_moe import ggml_moe_a8, ggml_moe_a8_vec, ggml_moe_get_block_size
from ..ops.moe import moe_align_block_size, moe_sum
from .config_values import refuse
from .expert_weights import projections
from .gguf_linear import BlockMatrix
from .linear import Place
from .mixture import Mixture
from .quantization import GgufTypes

if TYPE_CHECKING:
    from torch import Tensor


class GgufExperts:
    """Experts with GGUF block weights, by `ggml_moe_a8`, or by `ggml_moe_a8_vec` if there are few tokens per expert.

    Args:
        mixture: sizes and options of the experts.
        hidden_size: elements of a hidden state.
        place: dtype and device of the weights.
        types: the quantised type of each weight of the file.

    Raises:
        ModelError: the gate and up projections of a layer, or its experts, have different types.
    """

    def __init__(self, mixture: Mixture, hidden_size: int, place: Place, types: GgufTypes) -> None:
        self.mixture, self.hidden_size = mixture, hidden_size
        self.gate_up, self.down = (
            self._weights(place, types, part, columns)
            for part, (_, columns) in enumerate(projections(mixture, hidden_size, 0))
        )

    def _weights(self, place: Place, types: GgufTypes, part: int, columns: int) -> BlockMatrix:
        """The weights of one projection, or of two stacked ones, of all experts: [num_experts * rows, row bytes]."""
        sizes = [projections(self.mixture, self.hidden_size, i)[part][0] for i in range(self.mixture.num_experts)]
        names = [f"{place.module}.{name}" for each in sizes for name in each]
        found = {types.of(name) for name in names}
        if len(found) > 1:
            raise refuse(f"types.{names[0]}", f"that of all {len(names)} matrices it is multiplied with", found)
        matrix = place.matrix(names[0], sum(sum(each.values()) for each in sizes), columns)
        assert isinstance(matrix, BlockMatrix)
        return matrix

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        found: dict[str, Tensor] = {}
        for part, matrix in enumerate((self.gate_up, self.down)):
            for i, weights in enumerate(self._by_expert(matrix)):
                sizes, _ = projections(self.mixture, self.hidden_size, i)[part]
                for name, rows in zip(sizes, weights.split(list(sizes.values())), strict=True):
                    found[f"{name}.weight"] = rows
        return found

    def _by_expert(self, matrix: BlockMatrix) -> Tensor:
        return matrix.weight.unflatten(0, (self.mixture.num_experts, -1))

    def check(self) -> None:
        """Check the weights once a checkpoint is written. Block weights need no check."""

    def prepare(self) -> None:
        """Convert the weights once a checkpoint is written. The GEMMs read block weights as they are."""

    def __call__(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Apply the chosen experts to hidden [num_tokens, hidden_size]; weights and ids are [num_tokens, top_k]."""
        gate_up = self._product(hidden, self.gate_up, ids)
        activated = gate_up.new_empty(gate_up.shape[0], self.mixture.intermediate_size)
        silu_and_mul(activated, gate_up)
        of_choices = self._product(activated, self.down, ids).view(*ids.shape, self.hidden_size)
        out = torch.empty_like(hidden)
        moe_sum(of_choices.mul_(weights[..., None]), out)
        return out

    def _product(self, x: Tensor, matrix: BlockMatrix, ids: Tensor) -> Tensor:
        """The GEMM of each (token, expert) pair: [num_pairs, rows of an expert], for `x` by token or by pair."""
        experts, num_rows = self._by_expert(matrix), len(matrix.weight) // self.mixture.num_experts
        top_k, kind = ids.numel() // len(x), matrix.quant_type
        if ids.numel() <= self.mixture.num_experts:
            return ggml_moe_a8_vec.new(x, experts, ids.view(len(x), top_k), top_k, kind, num_rows, len(x))
        order = moe_align_block_size.new(ids, self.mixture.num_experts, ggml_moe_get_block_size(kind))
        return ggml_moe_a8.new(x, experts, *order, kind, num_rows, top_k, len(x))
