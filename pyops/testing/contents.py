"""Contents for test tensors: values that provoke errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# {float type: factors that scale standard normal values to subnormals, to the smallest and to the largest numbers}
_SCALES = {
    "float32": {"subnormal": 1e-39, "small": 1e-15, "large": 1e25},
    "bfloat16": {"subnormal": 1e-39, "small": 1e-15, "large": 1e25},
    "float16": {"subnormal": 1e-6, "small": 1e-3, "large": 1e4},
    "float8_e5m2": {"subnormal": 2e-5, "small": 1e-3, "large": 1e4},
    "float8_e4m3fn": {"subnormal": 3e-3, "small": 5e-2, "large": 5e1},
    "float8_e4m3fnuz": {"subnormal": 1.5e-3, "small": 2.5e-2, "large": 2.5e1},
}
CONTENTS = ("normal", "nan", "inf", "subnormal", "small", "large", "extreme", "zero", "equal")


def filled(x: Tensor, kind: str) -> Tensor:
    """A copy of `x`, which holds standard normal values, with one kind of CONTENTS.

    ``"normal"``: unchanged. ``"nan"``, ``"inf"``: a few of them, infinities of both signs. ``"subnormal"``,
    ``"small"``, ``"large"``: scaled to that end of the type's range. ``"extreme"``: magnitudes spread over the whole
    range of the type, from 1e-38 to 1e38 in float32. ``"zero"``: zeros of both signs. ``"equal"``: one value per row,
    with four significant bits, so that sums are exact.

    Raises ValueError for a type that is none of float32, float16, bfloat16, float8_e4m3fn, float8_e4m3fnuz and
    float8_e5m2.

    Examples:
        >>> x = filled(torch.randn(3, 1000), "nan")
        >>> int(x.isnan().sum())
        31
    """
    name = str(x.dtype).removeprefix("torch.")
    if name not in _SCALES or kind not in CONTENTS:
        raise ValueError(f"expected contents of {CONTENTS} and a type of {tuple(_SCALES)}, got {kind!r} and {name}")
    y = x.float()
    flat = y.flatten().clone()
    if kind == "nan":
        flat[::97] = float("nan")
    elif kind == "inf":
        flat[::97] = float("inf")
        flat[53::193] = float("-inf")
    elif kind == "extreme":
        limits = torch.finfo(x.dtype)
        low, high = (
            torch.tensor(limit, dtype=torch.float32, device=x.device).log2() for limit in (limits.tiny, limits.max)
        )
        order = torch.arange(flat.numel(), dtype=torch.float32, device=x.device)
        spread = order * 0.6180339887 % 1  # a low-discrepancy sequence
        flat.copy_(torch.exp2(low + (high - low) * spread).clamp(max=limits.max).copysign(flat))
    elif kind == "zero":
        flat *= 0.0
    elif kind == "equal":
        significand, exponent = torch.frexp(y[..., :1] if y.ndim else y)
        return torch.ldexp((significand * 16).round() / 16, exponent).expand(y.shape).to(x.dtype).contiguous()
    elif kind != "normal":
        flat *= _SCALES[name][kind]
    return flat.view(x.shape).to(x.dtype)
