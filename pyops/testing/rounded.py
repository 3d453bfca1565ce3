"""Eager PyTorch with correctly rounded functions: what references are compared with where kernels run on the host.

PyTorch's CPU functions are off by a unit in the last place here and there (and its GELU by more), each in its own way.
The host backend computes them through double. Ops that promise to equal the reference are held to it by the formulas
that PyTorch documents, in float32, with the one function in each of them rounded once.
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
    # PyTorch's compilers fuse the multiplication and the addition.
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
    """While it lasts, eager functions round once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))
