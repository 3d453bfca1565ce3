"""Eager PyTorch with correctly rounded functions, for references of kernels that run on the host backend.

PyTorch's CPU functions are sometimes off by one ulp (GELU by more). The host backend computes these functions in double
precision. Ops that must equal their reference bit for bit are compared with PyTorch's documented formulas in float32,
with the transcendental function in each formula correctly rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def _through_double(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return function(x.double()).float().to(x.dtype)

    return rounded


_exp, _expm1, _tanh, _erf, _log1p = map(_through_double, (torch.exp, torch.expm1, torch.tanh, torch.erf, torch.log1p))


def _silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    y = x.float()
    return (y / (1 + _exp(-y))).to(x.dtype)


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    y = x.float()
    if approximate == "none":
        return (y * 0.5 * (1 + _erf(y * 0.7071067811865476))).to(x.dtype)
    # One rounding, because PyTorch's compilers fuse the multiplication and the addition.
    fused = (0.04471499845385551 * (y * y * y).double() + y.double()).float()
    return (0.5 * y * (1 + _tanh(0.7978845608028654 * fused))).to(x.dtype)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return torch.where(y > 20, y, _log1p(_exp(y))).to(x.dtype)


# {function of eager PyTorch: its replacement}
FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.exp: _exp,
    torch.expm1: _expm1,
    torch.tanh: _tanh,
    F.silu: _silu,
    F.gelu: _gelu,
    F.softplus: _softplus,
}


class CorrectlyRounded(TorchFunctionMode):  # type: ignore[misc]
    """While the mode is active, the functions in `FUNCTIONS` are correctly rounded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))
