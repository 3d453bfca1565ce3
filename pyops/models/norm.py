"""The norms of a decoder, by the kinds that `Norms` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..ops.norm import fused_add_rms_norm, gemma_rms_norm, layer_norm, rms_norm, rms_norm_gated
from .linear import Place
from .parts import Norms

if TYPE_CHECKING:
    from torch import Tensor


class Norm:
    """A norm of rows, or of heads that have weights of their own.

    Args:
        norms: the kind of the norm, and whether it has a bias.
        epsilon: added to the mean of squares, or to the variance.
        place: dtype and device of the weights.
        size: elements that are normalised together.
        num_heads: groups of `size` elements in a row, each with its own weights.
    """

    def __init__(self, norms: Norms, epsilon: float, place: Place, size: int, num_heads: int = 1) -> None:
        self.kind, self.epsilon = norms.kind, epsilon
        self.group_size = size if num_heads > 1 else None
        self.weight = place.empty(num_heads * size)
        self.bias = place.empty(num_heads * size) if norms.has_bias and norms.kind == "layer" else None

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint, within the norm: the weights}."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    @property
    def terms(self) -> tuple[Tensor, float]:
        """The weights and epsilon."""
        return self.weight, self.epsilon

    def __call__(self, x: Tensor) -> None:
        """Normalise the rows of `x` in place."""
        self._write(x, x)

    def of(self, x: Tensor) -> Tensor:
        """The normalised rows of `x`, a new tensor."""
        out = torch.empty_like(x)
        self._write(out, x)
        return out

    def add(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Add `hidden` to `residual`, write the norm of the sum to `hidden`, and return the sum, maybe in `residual`.

        With Gemma norms and float16, the sum is float32, because Gemma's residual stream overflows float16.
        """
        if self.kind == "gemma":
            dtype = torch.float32 if hidden.dtype == torch.float16 else residual.dtype
            total = torch.empty_like(residual, dtype=dtype)
            gemma_rms_norm(hidden, hidden, self.weight, self.epsilon, residual, total)
            return total
        if residual.dtype == hidden.dtype and self.kind == "rms":
            fused_add_rms_norm(hidden, residual, self.weight, self.epsilon)
            return residual
        residual += hidden
        self._write(hidden, residual.to(hidden.dtype))
        return residual

    def _write(self, out: Tensor, x: Tensor) -> None:
        if self.kind == "rms":
            rms_norm(out, x, self.weight, self.epsilon)
        elif self.kind == "rms_once":
            rms_norm_gated(out, x, self.weight, self.epsilon)
        elif self.kind == "gemma":
            gemma_rms_norm(out, x, self.weight, self.epsilon)
        else:
            layer_norm(out, x, self.weight, self.bias, self.epsilon, group_size=self.group_size)
