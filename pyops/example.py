"""Makers of example arguments: one example serves tests, benchmarks and warm-up, with or without data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy

from ._core.errors import OpError
from ._core.system.device import Device
from ._core.system.lazy import torch
from ._core.tensors import dtypes, tensor
from ._core.tensors.tensor import TensorArg


def nan_byte(native: Any) -> int:
    """The byte that fills memory with NaN of a float type: 0xFF, or 0x80, the only NaN of float8_e4m3fnuz."""
    return 0x80 if dtypes.of(native) is dtypes.float8_e4m3fnuz else 0xFF


class TorchMaker:
    """Makes torch tensors on `device`, with data that depends on `seed` alone."""

    def __init__(self, device: str = "cpu", seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, dtype: str, scale: float = 1.0, shift: float = 0.0) -> Any:
        """Normal values times `scale` plus `shift`."""
        values = torch.randn(shape, dtype=torch.float32, device=self.device, generator=self.generator)
        return (values * scale + shift).to(getattr(torch, dtype))

    def randint(self, low: int, high: int, *shape: int, dtype: str = "int64") -> Any:
        """Integers in [low, high)."""
        kind = getattr(torch, dtype)
        return torch.randint(low, high, shape, device=self.device, generator=self.generator, dtype=kind)

    def permutation(self, high: int, *shape: int, dtype: str = "int64") -> Any:
        """Integers in [0, high) in random order, no two of them equal."""
        order = torch.randperm(high, device=self.device, generator=self.generator, dtype=getattr(torch, dtype))
        return order[: math.prod(shape)].reshape(shape).clone()

    def transposed(self, matrix: Any) -> Any:
        """The transpose of a matrix, or of each matrix of a batch: a column-major view."""
        return matrix.mT

    def ordered(self, tensor: Any, descending: bool = False) -> Any:
        """The tensor with its last dimension sorted."""
        return tensor.sort(descending=descending).values

    def masked(self, tensor: Any, width: int, columns: Sequence[int], mask: int) -> Any:
        """The integer tensor itself: of each `width` elements, those at `columns` keep only the bits of `mask`."""
        tensor.view(-1, width)[:, list(columns)] &= mask
        return tensor

    def strewn(self, tensor: Any, step: int, values: Any) -> Any:
        """The tensor itself, with `values` in every `step`-th element."""
        tensor[::step] = values
        return tensor

    def values(self, values: Any, dtype: str) -> Any:
        """A tensor of these values, a list or nested lists."""
        return torch.tensor(values, device=self.device, dtype=getattr(torch, dtype))

    def empty(self, *shape: int, dtype: str) -> Any:
        """A tensor for an op to write. It holds NaN, or bytes of 0xFF for integers, so that a test sees what is not
        written."""
        kind = getattr(torch, dtype)
        size = dtypes.of(dtype).itemsize  # type: ignore[union-attr]
        count = size
        for extent in shape:
            count *= extent
        return torch.full((count,), nan_byte(kind), dtype=torch.uint8, device=self.device).view(kind).reshape(shape)

    def full(self, *shape: int, value: float, dtype: str) -> Any:
        """A tensor with one value in every element."""
        return torch.full(shape, value, dtype=getattr(torch, dtype), device=self.device)


class ArgMaker:
    """Makes descriptors (`TensorArg`) without data, for planning on a device that may not exist.

    The methods are those of `TorchMaker`. `op` is the name in errors.
    """

    def __init__(self, device: Device, op: str = "example") -> None:
        self.device, self.op = device, op

    def empty(self, *shape: int, dtype: str) -> TensorArg:
        if min(shape, default=0) < 0:
            raise OpError(self.op, "example", f"expected sizes of 0 or more, got shape {shape}")
        kind = dtypes.of(dtype)
        assert kind is not None
        return tensor.describe_new(self.op, "example", shape, kind, self.device)

    def randn(self, *shape: int, dtype: str, scale: float = 1.0, shift: float = 0.0) -> TensorArg:
        return self.empty(*shape, dtype=dtype)

    def randint(self, low: int, high: int, *shape: int, dtype: str = "int64") -> TensorArg:
        return self.empty(*shape, dtype=dtype)

    def permutation(self, high: int, *shape: int, dtype: str = "int64") -> TensorArg:
        return self.empty(*shape, dtype=dtype)

    def transposed(self, matrix: TensorArg) -> TensorArg:
        (*shape, rows, columns), (*strides, row, column) = matrix.shape, matrix.strides
        return replace(matrix, shape=(*shape, columns, rows), strides=(*strides, column, row))

    def ordered(self, tensor: TensorArg, descending: bool = False) -> TensorArg:
        return tensor

    def masked(self, tensor: TensorArg, width: int, columns: Sequence[int], mask: int) -> TensorArg:
        return tensor

    def strewn(self, tensor: TensorArg, step: int, values: TensorArg) -> TensorArg:
        return tensor

    def values(self, values: Any, dtype: str) -> TensorArg:
        return self.empty(*numpy.shape(values), dtype=dtype)

    def full(self, *shape: int, value: float, dtype: str) -> TensorArg:
        return self.empty(*shape, dtype=dtype)
