"""Parameter blocks: eight-byte values, the driver's array of pointers to all values, then tensor maps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

from ..text.source import TENSOR_MAP
from . import tensor_map
from .kernel import Kernel, Launch
from .scratch import Scratch
from .tensor_map import Placed, TensorMap

# The op's scalars that are read at every call, and their struct formats where no kernel has a parameter of the name.
Runtime = tuple[tuple[str, str], ...]


class Layout(NamedTuple):
    """Layout of a parameter block: per-call words, constants of the plan, ``kernelParams`` (a void*[]), tensor maps.

    Attributes:
        words: {name: struct format} of the per-call words that the kernel takes.
        pack_words: takes (buffer, 0, *words). pack_rest: takes (buffer, start, *constants, *pointers).
        start: byte offset of the constants; constants: their names.
        pointers: byte offset of kernelParams; targets: for each of its entries, the byte offset that it points to.
        maps: {name: byte offset} of tensor maps. buffer_type: a ctypes array type with spare bytes to align them.
    """

    words: dict[str, str]
    pack_words: Callable[..., None]
    pack_rest: Callable[..., None]
    start: int
    constants: tuple[str, ...]
    pointers: int
    targets: tuple[int, ...]
    maps: dict[str, int]
    buffer_type: type[ctypes.Array[ctypes.c_char]]


@cache
def layout(
    kernel: Kernel, tensors: tuple[str, ...], runtime: Runtime, scalars: tuple[str, ...], fixed: tuple[str, ...]
) -> Layout:
    """The layout for `kernel`, which takes each parameter by its name from the other arguments.

    `tensors` and `runtime` are per-call words; `scalars`, part of the plan's key, and `fixed` are constants. Raises
    TypeError for a parameter that none of them has, and for a fixed value that no parameter takes.
    """
    for name in set(fixed) - {parameter for _, parameter in kernel.signature.parameters}:
        raise TypeError(f"{kernel.file}: no parameter takes the value {name}")
    values = scalars + fixed
    words = tensors + tuple(name for name, _ in runtime)
    parameters = kernel.signature.parameters
    formats: dict[str, str] = {}
    constants: dict[str, str] = {}
    mapped: list[str] = []
    for fmt, name in parameters:
        if fmt == TENSOR_MAP and name in fixed:
            mapped.append(name)
        elif name in values:
            constants[name] = fmt
        elif name in words and fmt != TENSOR_MAP:
            if (name, "q") in runtime and fmt != "q":
                raise TypeError(f"{kernel.file}: {name} is an integer given at every call: expected int64_t")
            formats[name] = fmt
        else:
            raise TypeError(f"{kernel.file}: nothing feeds the parameter {name}")
    start, pointers = 8 * len(words), 8 * (len(words) + len(constants))
    end = pointers + 8 * len(parameters)
    first_map = -(-end // tensor_map.ALIGNMENT) * tensor_map.ALIGNMENT
    maps = {name: first_map + tensor_map.NBYTES * i for i, name in enumerate(mapped)}
    offsets = {name: 8 * i for i, name in enumerate((*words, *constants))} | maps
    return Layout(
        formats,
        packer(tensors, runtime, formats),
        Struct("<" + "".join(constants.values()) + "Q" * len(parameters)).pack_into,
        start,
        tuple(constants),
        pointers,
        tuple(offsets[name] for _, name in parameters),
        maps,
        ctypes.c_char * (first_map + tensor_map.NBYTES * len(maps) + tensor_map.ALIGNMENT if maps else end + 8),
    )


def packer(tensors: tuple[str, ...], runtime: Runtime, formats: Mapping[str, str]) -> Callable[..., None]:
    """``pack(buffer, 0, *words)`` for all per-call words, with the kernels' `formats` for the words that they take."""
    all_formats = dict.fromkeys(tensors, "Q") | dict(runtime) | dict(formats)
    return Struct("<" + "".join(all_formats.values())).pack_into


def common_packer(
    launches: Sequence[Launch], tensors: tuple[str, ...], runtime: Runtime, scalars: tuple[str, ...]
) -> Callable[..., None]:
    """``pack(buffer, 0, *words)`` for all `launches` of a plan: their buffers begin with the same words."""
    formats: dict[str, str] = {}
    for launch in launches:
        kernel, (names, fixed) = launch.specialisation.kernel, launch.names(tensors)
        for name, fmt in layout(kernel, names, runtime, scalars, fixed).words.items():
            if name not in launch.fixed and formats.setdefault(name, fmt) != fmt:
                raise TypeError(f"{kernel.file}: {name} has another type than in a kernel launched before")
    return packer(tensors, runtime, formats)


class Buffer(NamedTuple):
    """The parameter block of one launch, complete except for per-call words, addresses of workspaces, and maps.

    Attributes:
        pack: takes (memory, 0, *words). parameters: address of kernelParams in `memory`.
        workspaces: (byte offset in `memory`, the scratch memory with the address to write there).
        maps: (address in `memory`, the tensor map to encode there).
    """

    pack: Callable[..., None]
    memory: Any
    parameters: int
    workspaces: tuple[tuple[int, Scratch], ...]
    maps: tuple[Placed, ...]


def buffer(launch: Launch, tensors: tuple[str, ...], runtime: Runtime, scalars: dict[str, Any]) -> Buffer:
    """The parameter block of `launch`, with the plan's constants packed."""
    values: dict[str, Any] = {**scalars, **launch.fixed} if scalars else launch.fixed
    names, fixed = launch.names(tensors)
    block = layout(launch.specialisation.kernel, names, runtime, tuple(scalars), fixed)
    for name, value in launch.fixed.items():
        if isinstance(value, TensorMap) != (name in block.maps):
            expected = "a TensorMap" if name in block.maps else "no TensorMap"
            raise TypeError(f"{launch.specialisation.kernel.file}: {name} takes {expected}, got {value}")
    constants = [values[name] for name in block.constants]
    workspaces = tuple((block.start + 8 * i, value) for i, value in enumerate(constants) if isinstance(value, Scratch))
    if workspaces:
        constants = [0 if isinstance(value, Scratch) else value for value in constants]
    memory: Any = block.buffer_type()
    if block.maps:  # begin the buffer at a multiple of ALIGNMENT, so that the maps are aligned
        skipped = -ctypes.addressof(memory) % tensor_map.ALIGNMENT
        memory = (ctypes.c_char * (len(memory) - skipped)).from_buffer(memory, skipped)
    base = ctypes.addressof(memory)
    block.pack_rest(memory, block.start, *constants, *[base + offset for offset in block.targets])
    maps = tuple((base + offset, values[name]) for name, offset in block.maps.items())
    return Buffer(block.pack_words, memory, base + block.pointers, workspaces, maps)
