"""Memory layout of a kernel's parameters: eight-byte words, a pointer to each parameter, then tensor maps."""

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

# Scalars that are read at every call: (name, struct format used where no kernel takes the word).
Runtime = tuple[tuple[str, str], ...]


class Layout(NamedTuple):
    """Layout of a parameter block: words of every call, constants of the plan, the driver's void* array, tensor maps.

    Attributes:
        words: {name: struct format} of the per-call words that the kernel takes.
        pack_words: (buffer, 0, *words). pack_rest: (buffer, start, *constants, *pointers).
        start: offset of the constants; constants: their names.
        pointers: offset of the void* array; targets: offsets of what its entries point to.
        maps: {name: offset} of the tensor maps.
        buffer_type: a ctypes array that holds all of it at any alignment of the array.
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
    """The layout for a kernel with parameters fed by the op's `tensors`, `runtime` and keyed `scalars`, and by `fixed`.

    Raises TypeError for a parameter that nothing feeds and for a fixed value that no parameter takes.
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
    """pack(buffer, 0, *words), for kernels that take some of the words in these formats."""
    all_formats = dict.fromkeys(tensors, "Q") | dict(runtime) | dict(formats)
    return Struct("<" + "".join(all_formats.values())).pack_into


def common_packer(
    launches: Sequence[Launch], tensors: tuple[str, ...], runtime: Runtime, scalars: tuple[str, ...]
) -> Callable[..., None]:
    """pack(buffer, 0, *words), for launches that share the words of a call."""
    formats: dict[str, str] = {}
    for launch in launches:
        kernel, (names, fixed) = launch.specialisation.kernel, launch.names(tensors)
        for name, fmt in layout(kernel, names, runtime, scalars, fixed).words.items():
            if name not in launch.fixed and formats.setdefault(name, fmt) != fmt:
                raise TypeError(f"{kernel.file}: {name} has another type than in a kernel launched before")
    return packer(tensors, runtime, formats)


class Buffer(NamedTuple):
    """The parameter block of one launch, complete except for the words that each call packs.

    Attributes:
        parameters: address of the void* array.
        workspaces: (offset of an address, the scratch memory that it points to).
        maps: (address to write to, tensor map).
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
    found = layout(launch.specialisation.kernel, names, runtime, tuple(scalars), fixed)
    for name, value in launch.fixed.items():
        if isinstance(value, TensorMap) != (name in found.maps):
            expected = "a TensorMap" if name in found.maps else "no TensorMap"
            raise TypeError(f"{launch.specialisation.kernel.file}: {name} takes {expected}, got {value}")
    constants = [values[name] for name in found.constants]
    workspaces = tuple((found.start + 8 * i, value) for i, value in enumerate(constants) if isinstance(value, Scratch))
    if workspaces:
        constants = [0 if isinstance(value, Scratch) else value for value in constants]
    memory: Any = found.buffer_type()
    if found.maps:
        skipped = -ctypes.addressof(memory) % tensor_map.ALIGNMENT
        memory = (ctypes.c_char * (len(memory) - skipped)).from_buffer(memory, skipped)
    base = ctypes.addressof(memory)
    found.pack_rest(memory, found.start, *constants, *[base + offset for offset in found.targets])
    maps = tuple((base + offset, values[name]) for name, offset in found.maps.items())
    return Buffer(found.pack_words, memory, base + found.pointers, workspaces, maps)
