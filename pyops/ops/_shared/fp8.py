"""8-bit codes in references: from float32 values and scales, exactly as the specification rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core import dtypes
from ..._core.lazy import torch
from ..._core.tensor import device_of

if TYPE_CHECKING:
    from torch import Tensor


def cache_codes(cache: Tensor, kv_cache_dtype: str) -> Any:
    """The torch dtype of the codes in a cache of this kind, which may be given as bytes."""
    given = dtypes.of(cache.dtype)
    assert given is not None
    return getattr(torch, dtypes.of_codes(kv_cache_dtype, given, device_of(cache).fp8).name)


def saturate(x: Tensor, dtype: Any) -> Tensor:
    """Saturating conversion of float32 to fp8; NaN becomes the largest code."""
    largest = dtypes.largest_code(dtype)
    return x.nan_to_num(nan=largest, posinf=largest, neginf=-largest).clamp(-largest, largest).to(dtype)


def static_codes(x: Tensor, scale: Tensor, dtype: Any) -> Tensor:
    """fp8 of the product with the reciprocal of the scale, which is 0 where it is not finite."""
    reciprocal = 1.0 / scale
    return saturate(x * reciprocal.masked_fill(reciprocal.isinf(), 0.0), dtype)


def absmax(x: Tensor) -> Tensor:
    """The largest magnitude of each row, NaN left out; the last dimension is kept."""
    return x.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)


def dynamic_codes(y: Tensor, absmax: Tensor, scale_ub: Tensor | None, dtype: Any) -> tuple[Tensor, Tensor]:
    """(codes, scales) of float32 values whose magnitudes reach `absmax`, as the specification rounds.

    Divisors are tensors, because torch divides by a number on a GPU through its reciprocal.
    """
    if scale_ub is not None:
        absmax = torch.fmin(absmax, scale_ub.reshape(()))
    if dtype == torch.int8:
        scale = torch.fmax(absmax / torch.full_like(absmax, 127.0), torch.full_like(absmax, 2.0**-23))
        return (y * (1.0 / scale)).nan_to_num(nan=0.0).round().clamp(-128, 127).to(dtype), scale
    largest = torch.full_like(absmax, dtypes.largest_code(dtype))
    scale = torch.fmax(absmax / largest, 1.0 / (largest * 512.0))
    return saturate(y / scale, dtype), scale
