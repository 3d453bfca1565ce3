"""What every replaced forward has."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

# What forwards of transformers call their cache; the first is the name from version 5.24 on.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def served(x: Tensor) -> bool:
    """Whether the ops compute what the module would: they have no gradients and do not follow autocast."""
    return x.dtype in _DTYPES and not (torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type))


def hooked(*modules: Any) -> bool:
    """Whether somebody sees what goes into one of the modules or comes out: it must be called, and its results kept."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def renamed(kwargs: dict[str, Any], parameters: Container[str]) -> dict[str, Any]:
    """Arguments of a forward that has these parameters, with the cache by the name that it has there."""
    given = next((name for name in CACHE_NAMES if name in kwargs and name not in parameters), None)
    known = next((name for name in CACHE_NAMES if name in parameters), None)
    if given is None or known is None:
        return kwargs
    return {known if name == given else name: value for name, value in kwargs.items()}


class Replacement:
    """The forward of `module`, which falls back on the one that the module's class has.

    Attributes:
        op: what computes the module now.
    """

    op: str

    def __init__(self, module: Any) -> None:
        self.module, self.original = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def install(self) -> None:
        self.module.forward = self.forward

    def remove(self) -> None:
        """Leave the module as it was."""
        del self.module.forward
