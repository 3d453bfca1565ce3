"""Launches bound to loaded functions: a buffer of eight-byte words each, packed and fired. Only this file launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple

from . import config, device
from .errors import DeviceFault, OpError
from .kernel import Kernel, Launch
from .lazy import cupy


class Layout(NamedTuple):
    """The buffer of a kernel fed with certain values: words given at every call, then constants, then a pointer to each
    parameter in the order of the signature."""

    words: dict[str, str]  # those that the kernel takes, with their formats
    pack_words: Callable[..., None]  # (buffer, 0, *words)
    pack_rest: Callable[..., None]  # (buffer, start, *constants, *pointers)
    start: int
    constants: tuple[str, ...]
    pointers: int  # offset of the pointers
    targets: tuple[int, ...]  # offsets of what they point to
    size: int


@cache
def layout(
    kernel: Kernel, tensors: tuple[str, ...], floats: tuple[str, ...], scalars: tuple[str, ...], fixed: tuple[str, ...]
) -> Layout:
    """The layout for a kernel fed with the op's `tensors`, `floats` and `scalars` and the launch's `fixed` values.

    Raises TypeError for a parameter that nothing feeds and for a fixed value that no parameter takes.
    """
    for name in set(fixed) - {parameter for _, parameter in kernel.parameters}:
        raise TypeError(f"{kernel.file}: no parameter takes the value {name}")
    values = scalars + fixed
    words = tensors + floats
    formats: dict[str, str] = {}
    constants: list[tuple[str, str]] = []
    targets: list[int] = []
    for fmt, name in kernel.parameters:
        if name in values:
            targets.append(8 * (len(words) + len(constants)))
            constants.append((name, fmt))
        elif name in words:
            formats[name] = fmt
            targets.append(8 * words.index(name))
        else:
            raise TypeError(f"{kernel.file}: nothing feeds the parameter {name}")
    start, pointers = 8 * len(words), 8 * (len(words) + len(constants))
    return Layout(
        formats,
        _packer(tensors, floats, formats),
        Struct("<" + "".join(fmt for _, fmt in constants) + "Q" * len(targets)).pack_into,
        start,
        tuple(name for name, _ in constants),
        pointers,
        tuple(targets),
        pointers + 8 * len(targets) + 8,
    )


def _packer(tensors: tuple[str, ...], floats: tuple[str, ...], formats: dict[str, str]) -> Callable[..., None]:
    """pack(buffer, 0, *words), for kernels that take some of the words in these formats."""
    all_formats = dict.fromkeys(tensors, "Q") | dict.fromkeys(floats, "d") | formats
    return Struct("<" + "".join(all_formats.values())).pack_into


class Bound(NamedTuple):
    """What a call needs: under `lock`, ``pack(buffer, 0, *words)`` and then ``fire(stream, parameters, 0)``."""

    lock: threading.Lock
    pack: Callable[..., None]
    buffer: Any
    fire: Callable[[int, int, int], None]
    parameters: int


def bind(
    op: str, index: int, launches: Sequence[Launch], tensors: tuple[str, ...], floats: tuple[str, ...], scalars: Any
) -> Bound:
    """The launches of a plan, run in order on the device `index`; words are the tensors' addresses and the floats."""
    bound = [_bind_one(launch, index, tensors, floats, scalars) for launch in launches]
    if len(bound) == 1 and device.count() == 1 and not config.sync():
        return bound[0]
    formats: dict[str, str] = {}
    for launch in launches:
        kernel = launch.specialisation.kernel
        for name, fmt in layout(kernel, tensors, floats, tuple(scalars), tuple(launch.fixed)).words.items():
            if formats.setdefault(name, fmt) != fmt:
                raise TypeError(f"{kernel.file}: {name} has another type than in a kernel launched before")
    return _bind_all(op, index, bound, _packer(tensors, floats, formats), 8 * (len(tensors) + len(floats)))


def _bind_one(
    launch: Launch, index: int, tensors: tuple[str, ...], floats: tuple[str, ...], scalars: dict[str, Any]
) -> Bound:
    values = {**scalars, **launch.fixed} if scalars else launch.fixed
    found = layout(launch.specialisation.kernel, tensors, floats, tuple(scalars), tuple(launch.fixed))
    buffer = ctypes.create_string_buffer(found.size)
    base = ctypes.addressof(buffer)
    found.pack_rest(
        buffer, found.start, *[values[name] for name in found.constants], *[base + offset for offset in found.targets]
    )
    compiled = launch.specialisation.load(index)
    fire = partial(_driver()[0], compiled.function, *launch.grid, launch.block, 1, 1, launch.shared)
    return Bound(threading.Lock(), found.pack_words, buffer, fire, base + found.pointers)


def _bind_all(op: str, index: int, bound: Sequence[Bound], pack: Callable[..., None], word_bytes: int) -> Bound:
    """Several launches, a process of several devices, or a device to be waited for."""
    if not bound:
        return Bound(threading.Lock(), lambda *_: None, None, lambda *_: None, 0)
    first, *others = bound
    source = ctypes.addressof(first.buffer)
    get_device = _driver()[2]
    sync = config.sync()

    def run(stream: int) -> None:
        first.fire(stream, first.parameters, 0)
        for other in others:
            ctypes.memmove(other.buffer, source, word_bytes)
            other.fire(stream, other.parameters, 0)

    def fire(stream: int, _: int, __: int) -> None:
        if get_device() == index:
            run(stream)
        else:
            with cupy.cuda.Device(index):
                run(stream)
        if sync:
            _wait(op, index, stream)

    return first._replace(fire=fire, pack=pack)


def _wait(op: str, index: int, stream: int) -> None:
    try:
        with cupy.cuda.Device(index):
            cupy.cuda.runtime.streamSynchronize(stream)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceFault(f"{op}: the device reported {error}") from error


def recover(
    error: Exception, op: str, index: int, bound: Bound, names: Sequence[str], stream: int, *words: Any
) -> None:
    """A call that failed: run it again where the thread had no context yet, or say which value was no good."""
    if isinstance(error, _driver()[1]) and error.status == _INVALID_CONTEXT:
        with cupy.cuda.Device(index), bound.lock:
            cupy.cuda.runtime.setDevice(index)
            bound.pack(bound.buffer, 0, *words)
            bound.fire(stream, bound.parameters, 0)
        return
    if isinstance(error, (StructError, OverflowError, TypeError)):
        for name, word in zip(names, words, strict=True):
            try:
                Struct("<f").pack(word)  # in native order, a value that is too large becomes infinite
            except (StructError, OverflowError, TypeError) as reason:
                raise OpError(op, name, f"got {word!r}: {reason}") from None
    raise error


_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@cache
def _driver() -> tuple[Any, Any, Any]:
    from cupy_backends.cuda.api import driver, runtime

    return driver.launchKernel, driver.CUDADriverError, runtime.getDevice
