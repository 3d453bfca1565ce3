"""Scratch memory of launches: garbage that lives for one call, or zeros that a device and stream keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy

from .errors import CaptureError, KernelFault
from .host.run import Range
from .kernel import Scratch
from .layout import Buffer
from .lazy import cupy, torch
from .tensor_map import Replace, failure

_ALIGNMENT = 256
_pack_address = Struct("<Q").pack_into


def allocate_torch(index: int, nbytes: int) -> tuple[Any, int]:
    """(owner, address) of memory of torch's on the device `index`, for work on torch's current stream."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
    return memory, memory.data_ptr()


def allocate_cupy(index: int, nbytes: int) -> tuple[Any, int]:
    """(owner, address) of memory of CuPy's, on its current device and stream."""
    memory = cupy.cuda.alloc(nbytes)
    return memory, memory.ptr


class Workspaces:
    """Where the scratch memory of a plan's launches lies: one piece of garbage, and one of zeros.

    Attributes:
        nbytes: bytes of garbage; zero_bytes: bytes that are 0 before and after every call.
        offsets: of each piece of scratch memory, in the garbage or the zeros.
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
                sizes[scratch.zeroed] += -(-scratch.nbytes // _ALIGNMENT) * _ALIGNMENT
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
        """Tell the launches' buffers, and the maps in them, where garbage and zeros begin in this call."""
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
    """A tensor map of scratch memory: where it lies in a buffer, and the address that it was told last."""

    at: int
    offset: int
    zeroed: bool
    told: int | None = None


# Zeros by (device, stream). Graphs hold their addresses, so a piece that has become too small is kept, too.
_zeros: dict[tuple[int, int], list[_Zeros]] = {}
# By device, zeros for streams that are captured before they have had an eager call: torch.cuda.graph captures on a
# stream of its own. Pieces are made with those of `_zeros`, and as large, or larger if larger spare ones are left.
_spare: dict[int, list[_Zeros]] = {}
_SPARE_PIECES = 2  # streams that may be captured so, at least, until an eager call needs more memory than there is
_MIN_BYTES = 1 << 16


def zeros(op: str, index: int, stream: int, nbytes: int) -> int:
    """The address of at least `nbytes` zeros, for launches on the stream, each of which leaves them zero.

    Raises CaptureError if more memory is needed while the stream is captured into a graph, and no spare piece is left.
    """
    kept = _zeros.setdefault((index, stream), [])
    if not kept or kept[-1].nbytes < nbytes:
        with cupy.cuda.Device(index):
            on = cupy.cuda.ExternalStream(stream, index)
            spare = _spare.setdefault(index, [])
            if on.is_capturing():
                if not spare or spare[-1].nbytes < nbytes:
                    raise CaptureError(op, f"workspace of {nbytes} bytes")
                kept.append(spare.pop())
            else:
                size = max([nbytes, _MIN_BYTES, *(piece.nbytes for piece in spare)])
                spare[:] = [piece for piece in spare if piece.nbytes == size]
                with on:
                    made = [_Zeros(size, stream) for _ in range(1 + _SPARE_PIECES - len(spare))]
                on.synchronize()  # a graph may be launched on any stream
                kept.append(made.pop())
                spare += made
    return kept[-1].address


class _Zeros:
    """Zeros outside of any pool: no other allocation may have this memory, and none waits for it."""

    def __init__(self, nbytes: int, stream: int) -> None:
        self.memory, self.nbytes = cupy.cuda.Memory(nbytes), nbytes
        self.address = int(self.memory.ptr)
        cupy.cuda.runtime.memsetAsync(self.address, 0, nbytes, stream)


def on_host(workspaces: Workspaces) -> tuple[Any, list[Range], Callable[[str], None]]:
    """(owner of the memory, which is placed; where it lies; a check that zeros are zero, given the kernels' names)."""
    garbage = numpy.full(workspaces.nbytes + _ALIGNMENT, 0xFF, numpy.uint8)  # a NaN in every float type
    clean = numpy.zeros(workspaces.zero_bytes + _ALIGNMENT, numpy.uint8)
    starts = [-(-memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT for memory in (garbage, clean)]
    workspaces.place(*starts)
    ranges = [
        Range("a workspace", starts[scratch.zeroed] + offset, scratch.nbytes)
        for scratch, offset in workspaces.offsets.items()
    ]

    def check(kernels: str) -> None:
        if clean.any():
            at = int(numpy.flatnonzero(clean)[0])
            message = f"zeroed workspace is not zero after the last launch, first at byte {at}"
            raise KernelFault("workspace left dirty", kernels, "", message, (), (0, 0, 0), None)

    return (garbage, clean), ranges, check
