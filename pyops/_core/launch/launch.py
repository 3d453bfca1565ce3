"""Launches bound to loaded functions: each has a buffer that is packed and fired. Only this file launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple

from .. import config, locks
from ..errors import DeviceFault, OpError
from ..system import device, driver
from ..system.lazy import cupy
from . import tensor_map, workspace
from .kernel import Launch
from .layout import Buffer, Runtime, buffer, common_packer
from .workspace import Workspaces

_MAX_STREAMS = 64  # most streams with a cached launch function
_MAX_BLOCKS = 2**31 - 1, 65535, 65535  # most blocks of a launch along x, y and z, on CUDA and HIP


class Streams(dict[int, Callable[[], Any]]):
    """{stream: a function that launches on it}, each made at the first launch on the stream."""

    def __init__(self, make: Callable[[int], Callable[[], Any]]) -> None:
        self._make = make

    def __missing__(self, stream: int) -> Callable[[], Any]:
        if len(self) >= _MAX_STREAMS:
            self.clear()
        self[stream] = call = self._make(stream)
        return call


class Bound(NamedTuple):
    """The launches of a plan. A call runs, under `lock`, ``pack(buffer, 0, *words)`` and then ``fire[stream]()``.

    ``fire[stream]()`` raises, or returns the driver's status, which is 0 or None when all is well.
    """

    lock: threading.Lock
    pack: Callable[..., None]
    buffer: Any
    fire: Streams

    def launch(self, stream: int, *words: Any) -> Any:
        """Pack and launch; the generated wrappers contain the same two steps as text."""
        with self.lock:
            self.pack(self.buffer, 0, *words)
            return self.fire[stream]()


def bind(
    op: str,
    index: int,
    launches: Sequence[Launch],
    functions: Sequence[int],
    tensors: tuple[str, ...],
    runtime: Runtime,
    scalars: dict[str, Any],
    allocate: Callable[[str, int, int, int], tuple[Any, int]] | None = None,
) -> Bound:
    """The launches of a plan, run in order on the device `index`.

    The words of a call are the addresses of `tensors`, then the values of `runtime`. `functions` are those loaded for
    the launches' specialisations; `allocate` gives memory for their workspaces. Raises OpError for a launch that the
    device's runtime refuses, and for tensor maps if the driver lacks them.
    """
    for launch in launches:
        if any(count > most for count, most in zip(launch.grid, _MAX_BLOCKS, strict=True)):
            raise OpError(op, tensors[0], f"needs {launch.grid} blocks, but a launch has at most {_MAX_BLOCKS}")
        threads = launch.grid[0] * launch.block[0]
        if threads >= 2**32 and threads > (limit := device.get(index).max_threads_x):
            raise OpError(op, tensors[0], f"needs {threads} threads, but a launch on this device has at most {limit}")
    buffers = [buffer(launch, tensors, runtime, scalars) for launch in launches]
    maps = [placed for parameters in buffers for placed in parameters.maps]
    tensor_map.encode(op, index, maps)
    replace = driver.get().replace_address
    bound = [
        _bind_one(launch, function, index, parameters)
        for launch, function, parameters in zip(launches, functions, buffers, strict=True)
    ]
    workspaces = Workspaces(buffers, replace)
    if len(bound) == 1 and device.count() == 1 and not config.sync() and not workspaces:
        return bound[0]._replace(pack=tensor_map.packer(bound[0].pack, tensors, len(runtime), maps, replace))
    pack = common_packer(launches, tensors, runtime, tuple(scalars))
    pack = tensor_map.packer(pack, tensors, len(runtime), maps, replace)
    return _bind_all(op, index, bound, pack, 8 * (len(tensors) + len(runtime)), workspaces, allocate)


def _bind_one(launch: Launch, function: int, index: int, parameters: Buffer) -> Bound:
    calls, kernel = driver.get(), launch.specialisation.kernel
    overlaps = kernel.signature.overlaps and device.get(index).overlaps
    attributes = driver.attributes(overlaps, launch.cluster) if calls.launch_with_attributes else None
    if attributes is None and launch.cluster != (1, 1, 1):
        raise TypeError(f"{kernel.file}: this driver launches no clusters")

    def with_attributes(stream: int) -> Callable[[], Any]:
        assert attributes is not None
        geometry = (*launch.grid, *launch.block, launch.shared, stream)
        config = driver.Config(*geometry, ctypes.addressof(attributes), len(attributes))
        words = (ctypes.byref(config), ctypes.c_void_p(function), ctypes.c_void_p(parameters.parameters), None)
        return partial(calls.launch_with_attributes, *words)

    def plain(stream: int) -> Callable[[], Any]:
        geometry = (*launch.grid, *launch.block, launch.shared)
        return partial(calls.launch, function, *geometry, stream, parameters.parameters, 0)

    streams = Streams(with_attributes if attributes is not None else plain)
    return Bound(locks.new(), parameters.pack, parameters.memory, streams)


def _bind_all(
    op: str,
    index: int,
    bound: Sequence[Bound],
    pack: Callable[..., None],
    word_bytes: int,
    workspaces: Workspaces,
    allocate: Callable[[str, int, int, int], tuple[Any, int]] | None,
) -> Bound:
    """Several launches, launches with workspaces, a process of several devices, or a device to be waited for."""
    if not bound:
        return Bound(locks.new(), lambda *_: None, None, Streams(lambda _: lambda: None))
    first, *others = bound
    source = ctypes.addressof(first.buffer)
    get_device = driver.get().get_device
    sync = config.sync()

    def run(stream: int) -> Any:
        if workspaces:
            # The memory is freed once the launches are queued: its library's allocator reuses it in stream order, so
            # only for work that runs after them.
            _keep, address = None, 0
            if workspaces.nbytes:
                assert allocate is not None
                _keep, address = allocate(op, index, stream, workspaces.nbytes)
            zeros = workspace.zeros(op, index, stream, workspaces.zero_bytes) if workspaces.zero_bytes else 0
            workspaces.place(address, zeros)
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
    """Wait for the stream, unless it is captured: then nothing runs, and the driver refuses to wait."""
    try:
        with cupy.cuda.Device(index), driver.relaxed_capture():
            if not driver.is_capturing(stream):
                cupy.cuda.runtime.streamSynchronize(stream)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceFault(f"{op}: the device reported {error}") from error


def recover(
    error: Exception | int, op: str, index: int, bound: Bound, named: Runtime, stream: int, *words: Any
) -> None:
    """Rerun a failed call if the thread had no CUDA context yet, else raise an error that names the bad value."""
    driver_error = driver.get().error
    failure: Exception = driver_error(error) if isinstance(error, int) else error
    if getattr(failure, "status", None) == driver.INVALID_CONTEXT:
        with cupy.cuda.Device(index):
            cupy.cuda.runtime.setDevice(index)
            status = bound.launch(stream, *words)
        if not status:
            return
        failure = driver_error(status)
    explain(failure, op, named, words)


def explain(error: Exception, op: str, named: Runtime, words: Sequence[Any]) -> None:
    """Raise `error`, or the OpError that says which of the words, by name and format, could not be packed."""
    if isinstance(error, (StructError, OverflowError, TypeError)):
        for (name, fmt), word in zip(named, words, strict=True):
            try:
                # Kernels may take float32. "<f" refuses a value beyond its range; native "f" makes it infinite.
                Struct("<f" if fmt == "d" else f"<{fmt}").pack(word)
            except (StructError, OverflowError, TypeError) as reason:
                raise OpError(op, name, f"got {word!r}: {reason}") from None
    raise error
