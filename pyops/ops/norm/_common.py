"""What the norms share: the norm of a reference, the weight of an example.

torch.compile traces references, but not through the name of torch in a module that declares no op: methods serve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def rms(x: Tensor, weight: Tensor | None, epsilon: float, dtype: Any) -> Tensor:
    """The norm of float32 values, rounded to `dtype` before and after the product with the weight."""
    y = (x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(dtype)
    return y if weight is None else y * weight


def example_weight(make: Any, hidden_size: int, dtype: str) -> Any:
    """Numbers near one, as the weights of norms are."""
    return make.randn(hidden_size, dtype=dtype, scale=0.1, shift=1.0)
