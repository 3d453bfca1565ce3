"""Guards: torch's own test of whether tensors still have the properties for which a plan was made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def never(*_: Any) -> bool:
    """The guard of a plan before its second call, which makes the real one."""
    return False


def uncalled(*_: Any) -> bool:
    """The guard of a plan before its first call."""
    return False


def unguarded(*_: Any) -> bool:
    """The guard of a plan for tensors that torch's guards do not support: it never matches."""
    return False


def guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    """check(*tensors): whether they have these types, dtypes, devices, sizes and strides, and which require grad.

    TensorGuards is the C++ guard of torch.compile, and not documented. In a torch without it, calls build a key
    instead.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        ).check
        return check if check(*tensors) else unguarded
    except Exception:
        return unguarded
