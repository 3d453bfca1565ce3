"""Memory that is watched: tensors between pages that nothing may touch, and among bytes that nothing may change."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from .._core import dtypes
from .._core.lazy import torch
from .._core.tensor import library_of

if TYPE_CHECKING:
    from torch import Tensor

_AROUND = 256  # bytes on either side of a tensor
_ALIGNED = 64  # bytes: how aligned the memory of every library begins
_PATTERN = 0xA5


class Layout(NamedTuple):
    """How a tensor lies in memory.

    Attributes:
        offset: elements from an aligned address to the first one.
        gap: elements from the end of a row to the next row.
        lone: stride of every dimension of size 1, which says nothing about any address; None for the usual one.
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
        memory = torch.full((size,), dtypes.nan_byte(value.dtype), dtype=torch.uint8, device=value.device).view(
            value.dtype
        )
        placed = memory.as_strided(value.shape, strides, self.offset)
        placed.copy_(value)
        return placed


class Canaries:
    """A copy of a torch tensor in a larger buffer, whose other bytes are watched: those between its rows as well.

    It has the strides of the original and is as aligned. With a `side` the buffer lies between unmapped pages, and the
    copy, in host memory, touches one of them: see `guarded`.

    Attributes:
        tensor: the copy.
    """

    tensor: Tensor

    def __init__(self, value: Tensor, side: str | None = None, alignment: int = 1) -> None:
        itemsize, extent = value.element_size(), _extent(value.shape, value.stride())
        if side is None:
            # In whole elements: the buffer is viewed as the tensor's type.
            self._start = (_AROUND + value.data_ptr() % _ALIGNED) // itemsize
            size = (self._start + max(1, extent)) * itemsize + _AROUND
            self.memory = torch.empty((size,), dtype=torch.uint8, device=value.device)
        else:
            between, start = _between_pages(extent * itemsize, side, alignment)
            self.memory, self._start = torch.from_numpy(between), start // itemsize
        self.memory.fill_(_PATTERN)
        self.tensor = self.memory.view(value.dtype).as_strided(value.shape, value.stride(), self._start)
        # An expanded dimension is one element in memory, and torch refuses to write it twice.
        self._shape = [min(size, 1) if stride == 0 else size for size, stride in zip(value.shape, value.stride())]  # noqa: B905
        _once(self.tensor, self._shape).copy_(_once(value, self._shape))

    def _bytes(self, memory: Tensor) -> Tensor:
        """The bytes of the tensor's elements in `memory`."""
        itemsize = self.tensor.element_size()
        strides = (*(stride * itemsize for stride in self.tensor.stride()), 1)
        return memory.as_strided((*self._shape, itemsize), strides, self._start * itemsize)

    def poison(self, byte: int) -> None:
        """Fill the tensor's elements with a byte."""
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
    """`value`, a torch tensor on any device, copied among watched bytes: give ``.tensor`` away, then ``.check()``.

    Raises TypeError for what is no torch tensor.
    """
    if library_of(value) != "torch":
        raise TypeError(f"expected a torch tensor, got {type(value).__name__}")
    return Canaries(value)


def guarded(value: Any, side: str = "after", alignment: int = 1) -> Any:
    """A copy of a numpy array or CPU torch tensor, of any shape, strides and dtype, that touches an unmapped page.

    A kernel that reads or writes on that `side` of it, ``"after"`` its last byte or ``"before"`` its first, is caught
    by the host backend; anything else that does so kills the process. On the other side lies the rest of a page, then
    another unmapped one. With "after", the address is as aligned as the size is, or a multiple of `alignment`: then
    fewer bytes than that lie between the array and the unmapped page.
    """
    if library_of(value) == "torch":
        return Canaries(value.detach(), side, alignment).tensor
    array = numpy.asarray(value)
    strides = [stride // array.itemsize for stride in array.strides]
    memory, start = _between_pages(_extent(array.shape, strides) * array.itemsize, side, alignment)
    copy: Any = numpy.ndarray(array.shape, array.dtype, memory, start, array.strides)
    copy[...] = array
    return copy


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one, both counted; 0 for none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _once(value: Tensor, shape: Sequence[int]) -> Tensor:
    return value.as_strided(shape, value.stride(), value.storage_offset())


def _between_pages(size: int, side: str, alignment: int) -> tuple[Any, int]:
    """(bytes, start): whole pages between two unmapped ones, where `size` bytes from `start` touch that on the side."""
    if side not in ("after", "before"):
        raise ValueError(f'side: expected "after" or "before", got "{side}"')
    page = mmap.PAGESIZE
    body = max(1, -(-size // page)) * page
    pages = mmap.mmap(-1, body + 2 * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for edge in (first, first + page + body):
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(page), 0):
            raise OSError("mprotect failed")
    start = (body - size) // alignment * alignment if side == "after" else 0
    return numpy.frombuffer(pages, numpy.uint8, body, page), start
