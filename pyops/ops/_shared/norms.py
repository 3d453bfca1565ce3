"""The RMS norm of references.

torch.compile traces references, but cannot trace the lazily imported `torch` of a module that declares no op. This
module therefore uses methods of tensors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def rms(x: Tensor, weight: Tensor | None, epsilon: float, dtype: Any) -> Tensor:
    """The RMS norm of the float32 tensor `x`, rounded to `dtype` before and after the multiplication by the weight."""
    y = (x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(dtype)
    return y if weight is None else y * weight
