"""Test tensors in unusual memory layouts, surrounded by canary bytes that no kernel may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .._core.system.lazy import torch
from .._core.tensors.tensor import library_of
from ..example import nan_byte

if TYPE_CHECKING:
    from torch import Tensor

_AROUND = 256  # canary bytes on either side of a tensor
_ALIGNED = 64  # bytes: the alignment of every library's allocations
_PATTERN = 0xA5


class Layout(NamedTuple):
    """The layout of a tensor in memory.

    Attributes:
        offset: elements from an aligned address to the first one.
        gap: elements from the end of a row to the next row.
        lone: stride of every dimension of size 1, which never affects an address; None for the usual stride.

    Examples:
        >>> x = Layout(offset=1, gap=3).place(torch.randn(4, 8))  # misaligned, with gaps between rows
        >>> x.stride(), x.storage_offset()
        ((11, 1), 1)
    """

    offset: int = 0
    gap: int = 0
    lone: int | None = None

    def place(self, value: Tensor) -> Tensor:
        """A copy of `value` in this layout. The buffer around it is NaN in every float type, else bytes of 0xFF."""
        strides, step = [], 1
        for size in reversed(value.shape):
            strides.append(step if size != 1 or self.lone is None else self.lone)
            step = step * size + (self.gap if len(strides) == 1 else 0)
        strides.reverse()
        size = (self.offset + max(1, step)) * value.element_size()
        memory = torch.full((size,), nan_byte(value.dtype), dtype=torch.uint8, device=value.device).view(value.dtype)
        placed = memory.as_strided(value.shape, strides, self.offset)
        placed.copy_(value)
        return placed


class Canaries:
    """A copy of a torch tensor in a larger buffer. All other bytes, including those between its rows, are canaries.

    The copy has the strides and the alignment of the original.

    Attributes:
        tensor: the copy.

    Examples:
        >>> held = Canaries(torch.empty(3, 100))
        >>> with cpu("kernels"):
        ...     pyops.relu2(held.tensor, torch.randn(3, 100))
        >>> held.check("out")
    """

    tensor: Tensor

    def __init__(self, value: Tensor) -> None:
        itemsize, extent = value.element_size(), _extent(value.shape, value.stride())
        # The offset is in whole elements, because the buffer is viewed as the tensor's dtype.
        self._start = (_AROUND + value.data_ptr() % _ALIGNED) // itemsize
        size = (self._start + max(1, extent)) * itemsize + _AROUND
        self.memory = torch.full((size,), _PATTERN, dtype=torch.uint8, device=value.device)
        self.tensor = self.memory.view(value.dtype).as_strided(value.shape, value.stride(), self._start)
        # torch refuses to copy into expanded dimensions, so only their first element is written.
        self._shape = [min(size, 1) if stride == 0 else size for size, stride in zip(value.shape, value.stride())]  # noqa: B905
        _once(self.tensor, self._shape).copy_(_once(value, self._shape))

    def _bytes(self, memory: Tensor) -> Tensor:
        """The bytes of the tensor's elements in `memory`."""
        itemsize = self.tensor.element_size()
        strides = (*(stride * itemsize for stride in self.tensor.stride()), 1)
        return memory.as_strided((*self._shape, itemsize), strides, self._start * itemsize)

    def poison(self, byte: int) -> None:
        """Set all bytes of the tensor's elements to `byte`."""
        self._bytes(self.memory).fill_(byte)

    def check(self, name: str = "a tensor") -> None:
        """Raise AssertionError if a byte of the buffer outside the tensor's elements has changed."""
        memory = self.memory.clone()
        self._bytes(memory).fill_(_PATTERN)
        changed = (memory != _PATTERN).nonzero()
        if len(changed):
            at = int(changed[0]) - self._start * self.tensor.element_size()
            raise AssertionError(f"{name}: bytes around it were written, the first {at} bytes from its first element")


def canaries(value: Tensor) -> Canaries:
    """Copy a torch tensor on any device into a buffer with canary bytes: pass on ``.tensor``, then call ``.check()``.

    Raises:
        TypeError: `value` is not a torch tensor.

    Examples:
        >>> held = canaries(torch.empty(3, 100))
        >>> with cpu("kernels"):
        ...     pyops.relu2(held.tensor, torch.randn(3, 100))
        >>> held.check("out")
    """
    if library_of(value) != "torch":
        raise TypeError(f"expected a torch tensor, got {type(value).__name__}")
    return Canaries(value)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first to the last one, inclusive; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _once(value: Tensor, shape: Sequence[int]) -> Tensor:
    return value.as_strided(shape, value.stride(), value.storage_offset())
