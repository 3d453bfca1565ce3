"""Projections with weights in the quantised types of GGUF files; the kernels read the blocks as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .._core.system.lazy import torch
from ..ops.linear.ggml import ggml_mul_mat_a8
from ..ops.quantize.ggml import ggml_dequantize

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix in blocks of a quantised type.

    Attributes:
        weight: uint8 [rows, bytes of a row].
        quant_type: GGUF type number.
        columns: elements of a row.
        dtype: dtype of the rows that `__getitem__` dequantizes.
    """

    weight: Tensor
    quant_type: int
    columns: int
    dtype: torch.dtype

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The rows with these indices, dequantized: [len(rows), columns]."""
        return ggml_dequantize(self.weight[rows], self.quant_type, len(rows), self.columns, self.dtype)

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes)


class GgufLinear(NamedTuple):
    """As `Linear`, with block-quantized or floating-point matrices; adjacent projections of one type are stacked.

    Attributes:
        matrices: one or more; concatenated, their rows are those of the projections, in the order of `sizes`.
        bias: [out], or None.
        sizes: {name of a projection: its rows}.
    """

    matrices: tuple[Tensor | BlockMatrix, ...]
    bias: Tensor | None
    sizes: dict[str, int]

    @property
    def _weights(self) -> list[Tensor]:
        return [matrix.weight if isinstance(matrix, BlockMatrix) else matrix for matrix in self.matrices]

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        rows = [len(weight) for weight in self._weights]
        out = torch.empty(x.shape[0], sum(rows), dtype=x.dtype, device=x.device)
        for matrix, part in zip(self.matrices, out.split(rows, 1), strict=True):
            if isinstance(matrix, BlockMatrix):
                ggml_mul_mat_a8(matrix.weight, x, matrix.quant_type, len(matrix.weight), out=part)
            else:
                part.copy_(torch.nn.functional.linear(x, matrix))
        if self.bias is not None:
            out += self.bias
        return out

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights}, as of `Linear`."""
        found, names = {}, iter(self.sizes.items())
        for weight in self._weights:
            at = 0
            while at < len(weight):
                name, rows = next(names)
                found[f"{name}.weight"] = weight[at : at + rows]
                at += rows
        if self.bias is not None:
            biases = self.bias.split(list(self.sizes.values()))
            found |= {f"{name}.bias": part for name, part in zip(self.sizes, biases, strict=True)}
        return found
