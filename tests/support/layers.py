"""Shared by tests of layers: all forward methods of a layer give the same result."""

from __future__ import annotations

from typing import Any

import torch

from pyops.nn.custom_op import CustomOp
from pyops.testing import same_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
METHODS = ("forward_native", "forward_cuda", "forward")


def fresh(args: tuple[Any, ...]) -> list[Any]:
    """Copies of tensors, with their strides."""
    return [_copy(arg) for arg in args]


def _copy(arg: Any) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    storage = arg.untyped_storage().clone()
    return torch.empty(0, dtype=arg.dtype).set_(storage, arg.storage_offset(), arg.shape, arg.stride())


def of_all_methods(layer: CustomOp, *args: Any) -> Any:
    """The result of `layer.forward_native`. It wrote no argument, and every other forward method gave the same bits."""
    given = fresh(args)
    result = layer.forward_native(*given)
    for arg, before in zip(given, args, strict=True):
        assert not isinstance(arg, torch.Tensor) or same_bits(arg, before), "forward_native wrote an argument"
    for method in METHODS[1:]:
        other = getattr(layer, method)(*fresh(args))
        for value, expected in zip(tensors(other), tensors(result), strict=True):
            assert value.shape == expected.shape
            assert same_bits(value, expected), method
    return result


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a nested result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in tensors(part)]
