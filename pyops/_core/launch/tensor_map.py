"""Tensor maps: the descriptors by which TMA copies boxes of a tensor between global and shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import OpError
from ..system import device, driver
from ..system.lazy import cupy
from ..tensors.dtypes import DType
from ..tensors.tensor import TensorArg
from .scratch import Scratch

NBYTES, ALIGNMENT = 128, 64  # of CUtensorMap
NEEDS_DEVICE = "tensor maps exist on compute capability 9.0 and later"
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, and Swizzle of host/api.h
# CUtensorMapDataType, by bytes. Copies move bits, so unsigned integers stand for every type of their size.
_DATA_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
PROMOTIONS = {64: 1, 128: 2, 256: 3}  # CUtensorMapL2promotion


@dataclass(frozen=True)
class TensorMap:
    """A fixed value of a `Launch`, for a parameter that the kernel declares ``const __grid_constant__ TensorMap``.

    Dimensions count from the innermost one, of stride 1, in the order of the coordinates in the kernel.

    Attributes:
        tensor: an argument of the op, or scratch memory. The address may be another at every call.
        dtype: of an element.
        sizes: elements of each dimension. TMA reads zeros beyond them, and does not write there.
        strides: bytes from one element to the next, for each dimension but the first.
        box: elements of each dimension that one copy moves.
        swizzle: 0, 32, 64 or 128: the swizzle span in bytes; within it the row number permutes the 16-byte chunks.
        offset: bytes from the start of the tensor to the first element that the map describes.
        promotion: 64, 128 or 256: bytes that L2 fetches from DRAM at once.

    Raises:
        OpError: for an argument that cannot be mapped so (`check.mappable`), by its name: cuTensorMapEncodeTiled asks
            for addresses and strides that are multiples of 16 bytes, and more; and no map reaches beyond its tensor.
        ValueError: the same for scratch memory.
    """

    tensor: TensorArg | Scratch
    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    offset: int = 0
    promotion: int = 256

    @classmethod
    def of(cls, arg: TensorArg, box: tuple[int, ...], swizzle: int = 0) -> TensorMap:
        """The map of a whole argument. `box` counts from the innermost dimension, which is the argument's last."""
        if arg.shape and arg.shape[-1] > 1 and arg.strides[-1] != 1:
            raise arg.error(f"a tensor map needs a last dimension of stride 1, got strides {arg.strides}")
        (*outer, width), itemsize = arg.shape or (0,), arg.dtype.itemsize
        strides: list[int] = []
        pitch = -(-width * itemsize // 16) * 16
        for size, stride in zip(reversed(outer), reversed(arg.strides[:-1]), strict=True):
            # The stride of a dimension of size 1 has no meaning, and may not be a multiple of 16.
            strides.append(stride * itemsize if size > 1 else pitch)
            pitch = strides[-1] * size
        return cls(arg, arg.dtype, arg.shape[::-1], tuple(strides), box, swizzle)

    def __post_init__(self) -> None:
        if refusal := self._refusal():
            message = f"{refusal}: {self}"
            raise self.tensor.error(message) if isinstance(self.tensor, TensorArg) else ValueError(message)

    def _refusal(self) -> str:
        """Why cuTensorMapEncodeTiled would refuse the map, or how it reaches beyond the tensor; "" if it is valid."""
        rank, row, tensor = len(self.sizes), self.box[0] * self.dtype.itemsize if self.box else 0, self.tensor
        if isinstance(tensor, TensorArg):
            if not tensor.device.supports("tma"):
                return NEEDS_DEVICE
            if tensor.alignment < 16:
                return f"a tensor map needs an address that is a multiple of 16, got one of {tensor.alignment}"
        if not 1 <= rank <= 5 or (len(self.strides), len(self.box)) != (rank - 1, rank):
            return "a tensor map needs 1 to 5 dimensions, and a stride for each but the first"
        if any(not 1 <= size <= 2**32 for size in self.sizes):
            return "a tensor map needs sizes from 1 to 2^32"
        if any(stride % 16 or not 0 < stride < 2**40 for stride in self.strides) or self.offset % 16:
            return "a tensor map needs strides and an offset that are multiples of 16 bytes"
        if any(not 1 <= size <= 256 for size in self.box) or row % 16:
            return "a box has 1 to 256 elements in each dimension, and rows of a multiple of 16 bytes"
        if self.swizzle not in SWIZZLES or row > (self.swizzle or row):
            return "a swizzle is 0, 32, 64 or 128 bytes, and no less than a row of the box"
        reach = self.sizes[0] * self.dtype.itemsize
        reach += sum((size - 1) * stride for size, stride in zip(self.sizes[1:], self.strides, strict=True))
        memory = tensor.extent if isinstance(tensor, TensorArg) else tensor.nbytes
        if self.offset < 0 or self.offset + reach > memory:
            return f"a tensor map reaches over bytes {self.offset} to {self.offset + reach} of {memory}"
        return ""

    @property
    def name(self) -> str:
        """The name of the argument that the map describes."""
        return self.tensor.name if isinstance(self.tensor, TensorArg) else "scratch memory"

    def __str__(self) -> str:
        """The map with dimensions in tensor order:
        ``input [16, 4096] bfloat16, boxes of [16, 64], swizzled by 128``."""
        start = f" from byte {self.offset}" if self.offset else ""
        swizzle = f", swizzled by {self.swizzle} bytes" if self.swizzle else ""
        return f"{self.name}{start} {list(self.sizes[::-1])} {self.dtype}, boxes of {list(self.box[::-1])}{swizzle}"


# Maps in parameter blocks: each is encoded once; later calls replace its address when its tensor has moved.

Placed = tuple[int, TensorMap]  # the address of the 128 bytes in a parameter block, and what they describe
Replace = Callable[[int, int], int]  # (address of the 128 bytes, new address of the tensor) -> the driver's status


def encode(op: str, index: int, maps: Sequence[Placed]) -> None:
    """Encode the maps with the address 0, by the driver. Raises OpError if the driver has no tensor maps."""
    if maps and not (device.get(index).supports("tma") and driver.get().encode_map):
        raise OpError(op, maps[0][1].name, NEEDS_DEVICE)
    for at, one in maps:
        status = _encode(at, one)
        if status == driver.INVALID_CONTEXT:
            with cupy.cuda.Device(index):
                cupy.cuda.runtime.setDevice(index)
                status = _encode(at, one)
        if status:
            raise OpError(op, one.name, f"the driver refuses a tensor map: {failure(status)}: {one}")


def _encode(at: int, one: TensorMap) -> int:
    rank = len(one.sizes)
    wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    shape = wide(*one.sizes), wide(*one.strides), narrow(*one.box), narrow(*(1,) * rank)  # elements are not skipped
    kind, swizzle = _DATA_TYPES[one.dtype.itemsize], SWIZZLES[one.swizzle]
    # The zeros: no interleaving, and TMA fills elements outside of the tensor with zeros.
    return int(driver.get().encode_map(at, kind, rank, 0, *shape, 0, swizzle, PROMOTIONS[one.promotion], 0))


def failure(status: int) -> Exception:
    """The driver's error for a status."""
    return driver.get().error(status)


def packer(
    pack: Callable[..., None], tensors: Sequence[str], num_runtime: int, maps: Sequence[Placed], replace: Replace
) -> Callable[..., None]:
    """`pack` that also updates the addresses in the maps. Its words: addresses of `tensors`, `num_runtime` scalars."""
    of_tensors = [(at, one) for at, one in maps if isinstance(one.tensor, TensorArg)]
    if not of_tensors:
        return pack
    for _, one in of_tensors:
        if one.name not in tensors:
            raise TypeError(f"tensor map of {one}: the op has no such tensor")
    mapped = sorted((tensors.index(one.name), one.offset, at) for at, one in of_tensors)
    make = _make_packer(len(tensors) + num_runtime, tuple((index, offset) for index, offset, _ in mapped))
    made: Callable[..., None] = make(pack, replace, failure, *(at for *_, at in mapped))
    return made


@cache
def _make_packer(num_words: int, mapped: tuple[tuple[int, int], ...]) -> Any:
    """make(pack, replace, failure, at0, ...) for maps, each of a word and an offset to it, words in ascending order.

    It is generated as text, so that a call spends one comparison of two variables on a map that has not moved.
    """
    words = ", ".join(f"w{i}" for i in range(num_words))
    told = {index: f"told{index}" for index, _ in mapped}  # the address that a tensor's maps hold now
    lines = [
        f"def make(pack, replace, failure, {', '.join(f'at{number}' for number in range(len(mapped)))}):",
        f"    {' = '.join(told.values())} = None",
        f"    def pack_with_maps(buffer, start, {words}):",
        f"        nonlocal {', '.join(told.values())}",
        f"        pack(buffer, start, {words})",
    ]
    for i, name in told.items():
        lines += [f"        if w{i} != {name}:", f"            {name} = None"]
        for number, (index, offset) in enumerate(mapped):
            if index == i:
                lines.append(f"            error = replace(at{number}, w{i}{f' + {offset}' * (offset > 0)})")
                lines.append("            if error: raise failure(error)")
        lines.append(f"            {name} = w{i}")
    namespace: dict[str, Any] = {}
    exec("\n".join([*lines, "    return pack_with_maps"]), namespace)
    return namespace["make"]
