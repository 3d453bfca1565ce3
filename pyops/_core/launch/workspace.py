"""Scratch memory of launches: uninitialised memory for one call, or zeroed memory kept per device and stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

from ..system import driver
from ..system.lazy import cupy, torch
from .layout import Buffer
from .scratch import Scratch
from .tensor_map import Replace, failure

ALIGNMENT = 256
_pack_address = Struct("<Q").pack_into


def allocate_torch(op: str, index: int, stream: int, nbytes: int) -> tuple[Any, int]:
    """(owner, address) of memory from torch's allocator on the device `index`, for work on `stream`, torch's current
    one.

    Under torch.cuda.graph it comes from the graph's memory pool.
    """
    memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
    return memory, memory.data_ptr()


def allocate_cupy(op: str, index: int, stream: int, nbytes: int) -> tuple[Any, int]:
    """(owner, address) of memory from CuPy's pool, on its current device and `stream`, CuPy's current one.

    While the stream is being captured, the memory is kept for good instead: CuPy has no pool for graphs, so its pool
    would soon give the memory to another array, and the graph would still write there.
    """
    if driver.is_capturing(stream):
        return None, _kept(op, index, stream, nbytes, zeroed=False)
    memory = cupy.cuda.alloc(nbytes)
    return memory, memory.ptr


class Workspaces:
    """The layout of the scratch memory of a plan's launches: one uninitialised allocation, and one of zeros.

    Attributes:
        nbytes: uninitialised bytes; zero_bytes: bytes that are 0 before and after every call.
        offsets: of each piece of scratch memory, in the allocation it belongs to.
    """

    def __init__(self, buffers: Sequence[Buffer], replace: Replace) -> None:
        self.offsets: dict[Scratch, int] = {}
        sizes = {False: 0, True: 0}
        self._places: list[tuple[Any, int, int, bool]] = []
        self._replace = replace
        self._maps: list[_Map] = []

        def offset_of(scratch: Scratch) -> int:
            if scratch not in self.offsets:
                self.offsets[scratch] = sizes[scratch.zeroed]
                sizes[scratch.zeroed] += -(-scratch.nbytes // ALIGNMENT) * ALIGNMENT
            return self.offsets[scratch]

        for buffer in buffers:
            for at, scratch in buffer.workspaces:
                self._places.append((buffer.memory, at, offset_of(scratch), scratch.zeroed))
            for place, one in buffer.maps:
                if isinstance(one.tensor, Scratch):
                    self._maps.append(_Map(place, offset_of(one.tensor) + one.offset, one.tensor.zeroed))
        self.nbytes, self.zero_bytes = sizes[False], sizes[True]

    def __bool__(self) -> bool:
        return bool(self.offsets)

    def place(self, address: int, zeros: int) -> None:
        """Write the addresses of both allocations of this call to the launches' buffers and the maps in them."""
        for memory, at, offset, zeroed in self._places:
            _pack_address(memory, at, (zeros if zeroed else address) + offset)
        for one in self._maps:
            where = (zeros if one.zeroed else address) + one.offset
            if where != one.told:
                one.told = None
                if error := self._replace(one.at, where):
                    raise failure(error)
                one.told = where


@dataclass(slots=True)
class _Map:
    """A tensor map of scratch memory: its address in a buffer, and the address of the memory that it holds now."""

    at: int
    offset: int
    zeroed: bool
    told: int | None = None


# {(device, stream, whether the memory holds zeros between calls): pieces}. A piece that has become too small is kept,
# because captured graphs may hold its address.
_pieces: dict[tuple[int, int, bool], list[_Piece]] = {}
_MIN_BYTES = 1 << 16  # fewest bytes of a kept piece


def zeros(op: str, index: int, stream: int, nbytes: int) -> int:
    """The address of at least `nbytes` zeros for launches on the stream; every launch must leave them zero."""
    return _kept(op, index, stream, nbytes, zeroed=True)


def _kept(op: str, index: int, stream: int, nbytes: int, *, zeroed: bool) -> int:
    """The address of at least `nbytes` bytes that are kept for the stream, during a capture as well."""
    pieces = _pieces.setdefault((index, stream, zeroed), [])
    if not pieces or pieces[-1].nbytes < nbytes:
        with driver.outside_capture(op, f"allocate a workspace of {nbytes} bytes"), cupy.cuda.Device(index):
            pieces.append(_Piece(max(nbytes, _MIN_BYTES)))
    return pieces[-1].address


class _Piece:
    """Memory outside of any pool, zero at first: no pool hands it to another tensor, and none expects it back."""

    def __init__(self, nbytes: int) -> None:
        self.memory, self.nbytes = cupy.cuda.Memory(nbytes), nbytes
        self.address = int(self.memory.ptr)
        driver.clear(self.address, nbytes)
