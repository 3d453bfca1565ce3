"""RMS norms as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..ops.norm import fused_add_rms_norm, gemma_rms_norm, rms_norm
from .base import OpLayer, empty_like, rows
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GemmaRMSNorm", "RMSNorm"]


@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    """RMS norm of rows, optionally of their sum with a residual, see `pyops.rms_norm` and `pyops.fused_add_rms_norm`.

    ``forward(x, residual=None)`` takes x [..., hidden_size] in float32, float16 or bfloat16. Without a residual it
    returns the norm, a new tensor. With a residual of the shape and dtype of x it returns (norm, x + residual).
    `forward_cuda` then writes the norm to x and the sum to residual and returns these two tensors; tensors without a
    common row stride are copied first. `forward_native` returns new tensors.

    Args:
        hidden_size: elements of a row.
        eps: added to the mean of squares.
        var_hidden_size: the mean is over the first var_hidden_size elements of a row; None for all.
        has_weight: whether `weight` [hidden_size] is a parameter. If not, it is all ones and not in the state dict.
        dtype: dtype of the weight, which must be that of x; None for torch's default.

    Examples:
        >>> norm = RMSNorm(64, eps=1e-5)
        >>> x, residual = torch.randn(2, 5, 64)
        >>> torch.testing.assert_close(norm(x), torch.nn.RMSNorm(64, eps=1e-5)(x))
        >>> with torch.no_grad():
        ...     x, residual = norm(x, residual)  # use what it returns: the arguments may be overwritten
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
        if self.variance_size_override is not None and not 0 < self.variance_size_override < hidden_size:
            raise ValueError(f"RMSNorm: var_hidden_size: expected 1 to {hidden_size}, got {var_hidden_size}")
        self.has_weight = has_weight
        weight = torch.ones(hidden_size, dtype=dtype)
        self.weight = nn.Parameter(weight) if has_weight else weight

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if self.variance_size_override is not None:
            return self._of_part(x, residual)
        return self._compute(rms_norm.reference, fused_add_rms_norm.reference, x, residual, in_place=False)

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if self.variance_size_override is not None:
            return self._of_part(x, residual)
        return self._compute(rms_norm, fused_add_rms_norm, x, residual, in_place=True)

    def _compute(
        self, norm: Callable[..., None], add: Callable[..., None], x: Tensor, residual: Tensor | None, in_place: bool
    ) -> Any:
        weight = self.weight if self.has_weight else None
        if residual is None:
            out = empty_like(x)
            norm(out, x if x.stride(-1) == 1 else x.contiguous(), weight, self.variance_epsilon)
            return out
        x, residual = (rows(each) if in_place else each.clone() for each in (x, residual))
        add(x, residual, weight, self.variance_epsilon)
        return x, residual

    def _of_part(self, x: Tensor, residual: Tensor | None) -> Any:
        """RMS norm with the mean square of only the first elements of a row, for which there is no kernel."""
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"RMSNorm: x: expected rows of hidden_size={self.hidden_size}, got shape {tuple(x.shape)}")
        z = x if residual is None else (x.float() + residual.float()).to(x.dtype)
        part = z[..., : self.variance_size_override].float()
        y = (z.float() * torch.rsqrt(part.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)
        y = y * self.weight if self.has_weight else y
        return y if residual is None else (y, z)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(OpLayer, op=gemma_rms_norm):
    """RMS norm that multiplies by ``1 + weight``, see `pyops.gemma_rms_norm`.

    ``forward(x, residual=None)`` takes x [..., hidden_size] in float32, float16 or bfloat16. It returns a new tensor;
    with a residual the pair of the norm and ``x + residual``, which is in float32 for float16, else in the wider dtype
    of the two. Neither argument is written.

    Args:
        hidden_size: elements of a row. The parameter `weight` [hidden_size] begins as zeros, of torch's default dtype.
        eps: added to the mean of squares.

    Examples:
        >>> norm = GemmaRMSNorm(64)  # the weight of a checkpoint is added to 1
        >>> x, residual = torch.randn(2, 5, 64)
        >>> torch.testing.assert_close(norm(x), torch.nn.RMSNorm(64, eps=1e-6)(x))
        >>> x, residual = norm(x, residual)
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=torch.get_default_dtype()))
        self.variance_epsilon = eps

    def compute(self, op: Callable[..., None], x: Tensor, residual: Tensor | None = None) -> Any:
        out, x = empty_like(x), rows(x)
        if residual is None:
            op(out, x, self.weight, self.variance_epsilon)
            return out
        wide = x.dtype == torch.float16 or residual.dtype == torch.float32
        total = torch.empty_like(out, dtype=torch.float32 if wide else x.dtype)
        op(out, x, self.weight, self.variance_epsilon, rows(residual), total)
        return out, total
