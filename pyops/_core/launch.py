"""Launches bound to loaded functions: a buffer of eight-byte words each, packed and fired. Only this file launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple

import numpy

from . import config, device, driver
from .errors import DeviceFault, OpError
from .kernel import Kernel, Launch, Scratch
from .lazy import cupy, torch

Passed = tuple[tuple[str, str], ...]  # what is given at every call beside tensors: (name, format if no kernel takes it)


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
    buffer_type: type[ctypes.Array[ctypes.c_char]]


@cache
def layout(
    kernel: Kernel, tensors: tuple[str, ...], passed: Passed, scalars: tuple[str, ...], fixed: tuple[str, ...]
) -> Layout:
    """The layout for a kernel fed with the op's `tensors`, `passed` and `scalars` and the launch's `fixed` values.

    Raises TypeError for a parameter that nothing feeds and for a fixed value that no parameter takes.
    """
    for name in set(fixed) - {parameter for _, parameter in kernel.signature.parameters}:
        raise TypeError(f"{kernel.file}: no parameter takes the value {name}")
    values = scalars + fixed
    words = tensors + tuple(name for name, _ in passed)
    formats: dict[str, str] = {}
    constants: list[tuple[str, str]] = []
    targets: list[int] = []
    for fmt, name in kernel.signature.parameters:
        if name in values:
            targets.append(8 * (len(words) + len(constants)))
            constants.append((name, fmt))
        elif name in words:
            if (name, "q") in passed and fmt != "q":
                raise TypeError(f"{kernel.file}: {name} is an integer given at every call: expected int64_t")
            formats[name] = fmt
            targets.append(8 * words.index(name))
        else:
            raise TypeError(f"{kernel.file}: nothing feeds the parameter {name}")
    start, pointers = 8 * len(words), 8 * (len(words) + len(constants))
    return Layout(
        formats,
        _packer(tensors, passed, formats),
        Struct("<" + "".join(fmt for _, fmt in constants) + "Q" * len(targets)).pack_into,
        start,
        tuple(name for name, _ in constants),
        pointers,
        tuple(targets),
        ctypes.c_char * (pointers + 8 * len(targets) + 8),
    )


def _packer(tensors: tuple[str, ...], passed: Passed, formats: dict[str, str]) -> Callable[..., None]:
    """pack(buffer, 0, *words), for kernels that take some of the words in these formats."""
    all_formats = dict.fromkeys(tensors, "Q") | dict(passed) | formats
    return Struct("<" + "".join(all_formats.values())).pack_into


class Streams(dict[int, Callable[[], Any]]):
    """{stream: a call that launches on it}, each made when its stream first comes."""

    def __init__(self, make: Callable[[int], Callable[[], Any]]) -> None:
        self._make = make

    def __missing__(self, stream: int) -> Callable[[], Any]:
        if len(self) >= _MAX_STREAMS:
            self.clear()
        self[stream] = call = self._make(stream)
        return call


_MAX_STREAMS = 64


class Bound(NamedTuple):
    """What a call needs: under `lock`, ``pack(buffer, 0, *words)`` and then ``fire[stream]()``.

    That raises, or returns the driver's status, which is 0 or None when all is well.
    """

    lock: threading.Lock
    pack: Callable[..., None]
    buffer: Any
    fire: Streams


def bind(
    op: str,
    index: int,
    launches: Sequence[Launch],
    functions: Sequence[int],
    tensors: tuple[str, ...],
    passed: Passed,
    scalars: dict[str, Any],
    allocate: Callable[[int, int], tuple[Any, int]] | None = None,
) -> Bound:
    """The launches of a plan, run in order on the device `index`; words: the tensors' addresses and what is `passed`.

    `functions` are those loaded for the launches' specialisations; `allocate` gives memory for their scratch.
    """
    buffers = [_buffer(launch, tensors, passed, scalars) for launch in launches]
    bound = [
        _bind_one(launch, function, index, buffer)
        for launch, function, buffer in zip(launches, functions, buffers, strict=True)
    ]
    scratch = _Scratches(buffers)
    if len(bound) == 1 and device.count() == 1 and not config.sync() and not scratch.nbytes:
        return bound[0]
    formats: dict[str, str] = {}
    for launch in launches:
        kernel = launch.specialisation.kernel
        for name, fmt in layout(kernel, tensors, passed, tuple(scalars), tuple(launch.fixed)).words.items():
            if formats.setdefault(name, fmt) != fmt:
                raise TypeError(f"{kernel.file}: {name} has another type than in a kernel launched before")
    pack = _packer(tensors, passed, formats)
    return _bind_all(op, index, bound, pack, 8 * (len(tensors) + len(passed)), scratch, allocate)


def _bind_one(launch: Launch, function: int, index: int, buffer: _Buffer) -> Bound:
    calls, kernel = driver.get(), launch.specialisation.kernel
    overlaps = calls.launch_overlapped and kernel.signature.overlaps and device.get(index).overlaps

    def overlapped(stream: int) -> Callable[[], Any]:
        config = driver.Config(*launch.grid, launch.block, 1, 1, launch.shared, stream, driver.OVERLAP_ADDRESS, 1)
        words = (ctypes.byref(config), ctypes.c_void_p(function), ctypes.c_void_p(buffer.parameters), None)
        return partial(calls.launch_overlapped, *words)

    def plain(stream: int) -> Callable[[], Any]:
        geometry = (*launch.grid, launch.block, 1, 1, launch.shared)
        return partial(calls.launch, function, *geometry, stream, buffer.parameters, 0)

    return Bound(threading.Lock(), buffer.pack, buffer.memory, Streams(overlapped if overlaps else plain))


class _Buffer(NamedTuple):
    """The buffer of a launch, all but the words packed."""

    pack: Callable[..., None]
    memory: Any
    parameters: int  # address of the pointers to the parameters
    holes: tuple[tuple[int, Scratch], ...]  # (offset, memory whose address belongs there)


def _buffer(launch: Launch, tensors: tuple[str, ...], passed: Passed, scalars: dict[str, Any]) -> _Buffer:
    values: dict[str, Any] = {**scalars, **launch.fixed} if scalars else launch.fixed
    found = layout(launch.specialisation.kernel, tensors, passed, tuple(scalars), tuple(launch.fixed))
    constants = [values[name] for name in found.constants]
    holes = tuple((found.start + 8 * i, value) for i, value in enumerate(constants) if isinstance(value, Scratch))
    if holes:
        constants = [0 if isinstance(value, Scratch) else value for value in constants]
    buffer = found.buffer_type()
    base = ctypes.addressof(buffer)
    found.pack_rest(buffer, found.start, *constants, *[base + offset for offset in found.targets])
    return _Buffer(found.pack_words, buffer, base + found.pointers, holes)


class _Scratches:
    """Where the scratch of launches lies in one piece of memory, and who is told its address."""

    def __init__(self, buffers: Sequence[_Buffer]) -> None:
        offsets: dict[Scratch, int] = {}
        self.nbytes = 0
        self._told: list[tuple[Any, int, int]] = []
        for buffer in buffers:
            for at, scratch in buffer.holes:
                if scratch not in offsets:
                    offsets[scratch] = self.nbytes
                    self.nbytes += -(-scratch.nbytes // 256) * 256
                self._told.append((buffer.memory, at, offsets[scratch]))

    def tell(self, address: int) -> None:
        """The memory begins here in this call."""
        for memory, at, offset in self._told:
            _pack_address(memory, at, address + offset)


_pack_address = Struct("<Q").pack_into


def allocate_torch(index: int, nbytes: int) -> tuple[Any, int]:
    """(what keeps it, its address): memory of torch's on the device `index`, for work on torch's current stream."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
    return memory, memory.data_ptr()


def allocate_cupy(index: int, nbytes: int) -> tuple[Any, int]:
    """The same from CuPy, on its current device and stream."""
    memory = cupy.cuda.alloc(nbytes)
    return memory, memory.ptr


def run_on_host(
    launches: Sequence[Launch], tensors: tuple[str, ...], passed: Passed, scalars: dict[str, Any], *words: Any
) -> None:
    """Run launches one after another on the CPU; words are the tensors' addresses and what is `passed`."""
    buffers = [_buffer(launch, tensors, passed, scalars) for launch in launches]
    scratch = _Scratches(buffers)
    memory = numpy.full(scratch.nbytes + 256, 0xFF, numpy.uint8)  # a NaN in every float type
    scratch.tell(-(-memory.ctypes.data // 256) * 256)
    for launch, buffer in zip(launches, buffers, strict=True):
        buffer.pack(buffer.memory, 0, *words)
        launch.specialisation.load_on_host().launch(launch.grid, launch.block, launch.shared, buffer.parameters)


def _bind_all(
    op: str,
    index: int,
    bound: Sequence[Bound],
    pack: Callable[..., None],
    word_bytes: int,
    scratch: _Scratches,
    allocate: Callable[[int, int], tuple[Any, int]] | None,
) -> Bound:
    """Several launches, launches that take scratch, a process of several devices, or a device to be waited for."""
    if not bound:
        return Bound(threading.Lock(), lambda *_: None, None, Streams(lambda _: lambda: None))
    first, *others = bound
    source = ctypes.addressof(first.buffer)
    get_device = driver.get().get_device
    sync = config.sync()

    def run(stream: int) -> Any:
        if scratch.nbytes:
            assert allocate is not None
            # Let go of when the launches are queued: what its library next puts there waits for them in the stream.
            _keep, address = allocate(index, scratch.nbytes)
            scratch.tell(address)
        status = first.fire[stream]()
        for other in others:
            if status:
                break
            ctypes.memmove(other.buffer, source, word_bytes)
            status = other.fire[stream]()
        return status

    def fire(stream: int) -> Any:
        if get_device() == index:
            status = run(stream)
        else:
            with cupy.cuda.Device(index):
                status = run(stream)
        if sync and not status:
            _wait(op, index, stream)
        return status

    return first._replace(fire=Streams(lambda stream: partial(fire, stream)), pack=pack)


def _wait(op: str, index: int, stream: int) -> None:
    try:
        with cupy.cuda.Device(index):
            cupy.cuda.runtime.streamSynchronize(stream)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceFault(f"{op}: the device reported {error}") from error


def recover(error: Exception | int, op: str, index: int, bound: Bound, named: Passed, stream: int, *words: Any) -> None:
    """A call that failed: run it again where the thread had no context yet, or say which value was no good."""
    driver_error = driver.get().error
    failure: Exception = driver_error(error) if isinstance(error, int) else error
    if getattr(failure, "status", None) == driver.INVALID_CONTEXT:
        with cupy.cuda.Device(index), bound.lock:
            cupy.cuda.runtime.setDevice(index)
            bound.pack(bound.buffer, 0, *words)
            status = bound.fire[stream]()
        if not status:
            return
        failure = driver_error(status)
    explain(failure, op, named, words)


def explain(error: Exception, op: str, named: Passed, words: Sequence[Any]) -> None:
    """Raise `error`, or the OpError that says which of the words, by name and format, could not be packed."""
    if isinstance(error, (StructError, OverflowError, TypeError)):
        for (name, fmt), word in zip(named, words, strict=True):
            try:
                # A kernel may take a float in four bytes; in native order, a value that is too large becomes infinite.
                Struct("<f" if fmt == "d" else f"<{fmt}").pack(word)
            except (StructError, OverflowError, TypeError) as reason:
                raise OpError(op, name, f"got {word!r}: {reason}") from None
    raise error
