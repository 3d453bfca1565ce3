"""The launches of a call on the CPU: their parameters, workspaces and tensor maps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import numpy

from .._core.launch import tensor_map
from .._core.launch.kernel import Launch, Specialisation
from .._core.launch.layout import Runtime, buffer
from .._core.launch.tensor_map import Placed
from .._core.launch.workspace import ALIGNMENT, Workspaces
from . import run
from .faults import KernelFault
from .ranges import Range
from .run import loaded as loaded
from .run import warp_size as warp_size

_MAP = Struct("<Q4QIIII5I5I8I")  # TensorMap of host/api.h
_MAGIC = 0x70616D74


def load(specialisation: Specialisation) -> run.HostFunction:
    """`run.load`, which tools of the tests replace."""
    return run.load(specialisation)


def run_launches(
    launches: Sequence[Launch],
    tensors: tuple[str, ...],
    extents: Sequence[int],
    runtime: Runtime,
    scalars: dict[str, Any],
    *words: Any,
) -> None:
    """Run launches one after another, with the words that a call on a device would pack.

    The kernels may access `extents` bytes of each of `tensors`, and their workspaces.
    """
    buffers = [buffer(launch, tensors, runtime, scalars) for launch in launches]
    _write_maps([placed for parameters in buffers for placed in parameters.maps])
    _memory, ranges, check_zeros = _placed(Workspaces(buffers, _replace_address))
    named = zip(tensors, words[: len(tensors)], extents, strict=True)
    ranges += [Range(name, address, nbytes) for name, address, nbytes in named if nbytes]
    for launch, parameters in zip(launches, buffers, strict=True):
        pack = tensor_map.packer(parameters.pack, tensors, len(runtime), parameters.maps, _replace_address)
        pack(parameters.memory, 0, *words)
        function = run.load(launch.specialisation)
        function.launch(launch.grid, launch.block, launch.shared, parameters.parameters, ranges, launch.cluster)
    check_zeros(", ".join(launch.specialisation.kernel.file for launch in launches))


def _write_maps(maps: Sequence[Placed]) -> None:
    """Encode the maps with the address 0, in the form of the host backend."""
    for at, one in maps:
        pad = (0,) * (5 - len(one.sizes))
        kind = _MAGIC, len(one.sizes), one.dtype.itemsize, tensor_map.SWIZZLES[one.swizzle]
        sizes = (size % 2**32 for size in one.sizes)
        words = (0, *one.strides, *pad, *kind, *sizes, *pad, *one.box, *pad, *(0,) * 8)
        ctypes.memmove(at, _MAP.pack(*words), tensor_map.NBYTES)


def _replace_address(at: int, address: int) -> int:
    """cuTensorMapReplaceAddress for the form of the host backend, which begins with the address."""
    ctypes.c_uint64.from_address(at).value = address
    return 0


def _placed(workspaces: Workspaces) -> tuple[Any, list[Range], Callable[[str], None]]:
    """(owner of the memory, which is placed; where it lies; a check that zeros are zero, given the kernels' names)."""
    garbage = numpy.full(workspaces.nbytes + ALIGNMENT, 0xFF, numpy.uint8)  # a NaN in every float type
    clean = numpy.zeros(workspaces.zero_bytes + ALIGNMENT, numpy.uint8)
    starts = [-(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT for memory in (garbage, clean)]
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
