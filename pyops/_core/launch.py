"""A plan's launches bound to loaded functions: one pack of eight-byte words, n launches. Only this file launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple

from . import config, device
from .errors import DeviceFault, OpError
from .kernel import Kernel, Launch
from .lazy import cupy

# launch(stream, *addresses of the tensor arguments, *float arguments)
BoundLaunch = Callable[..., None]


class Layout(NamedTuple):
    """Where a kernel's parameters lie in the buffer of a plan: first the words given at every call, then constants."""

    word_formats: dict[str, str]
    constants: tuple[str, ...]
    pack_constants: Any
    slots: tuple[int, ...]  # of each parameter; those of constants count on from the words
    pack_pointers: Any


@cache
def layout(kernel: Kernel, words: tuple[str, ...], fixed: tuple[str, ...], scalars: tuple[str, ...]) -> Layout:
    """The layout for a kernel fed with `words` (tensors and floats of the op), `fixed` values and the op's `scalars`.

    Raises TypeError for a parameter that nothing feeds and for a fixed value that no parameter takes.
    """
    formats: dict[str, str] = {}
    constants: list[tuple[str, str]] = []
    places: list[int] = []
    for fmt, name in kernel.parameters:
        if name not in fixed and name in words:
            formats[name] = fmt
            places.append(words.index(name))
        elif name in fixed or name in scalars:
            places.append(len(words) + len(constants))
            constants.append((name, fmt))
        else:
            raise TypeError(f"{kernel.file}: nothing feeds the parameter {name}")
    taken = {name for _, name in kernel.parameters}
    for name in fixed:
        if name not in taken:
            raise TypeError(f"{kernel.file}: no parameter takes the value {name}")
    return Layout(
        formats,
        tuple(name for name, _ in constants),
        Struct("<" + "".join(fmt for _, fmt in constants)).pack_into,
        tuple(places),
        Struct(f"<{len(places)}Q").pack_into,
    )


_struct = cache(Struct)


def bind(
    op: str,
    index: int,
    launches: Sequence[Launch],
    tensors: tuple[str, ...],
    floats: tuple[str, ...],
    scalars: dict[str, Any],
) -> BoundLaunch:
    """A callable that packs its arguments once and runs every launch, in order, on the stream it is given."""
    words = tensors + floats
    formats = dict.fromkeys(tensors, "Q") | dict.fromkeys(floats, "d")
    layouts = []
    size = len(words)
    for launch in launches:
        found = layout(launch.specialisation.kernel, words, tuple(launch.fixed), tuple(scalars))
        formats |= found.word_formats
        layouts.append(found)
        size += len(found.constants) + len(found.slots)

    # The buffer: words, then the constants of each launch followed by pointers to its parameters.
    buffer = ctypes.create_string_buffer(8 * size + 8)
    base = ctypes.addressof(buffer)
    prepared = []
    keep_alive: list[Any] = [buffer]
    start = len(words)
    for launch, (_, constants, pack_constants, slots, pack_pointers) in zip(launches, layouts, strict=True):
        given = scalars | launch.fixed
        pack_constants(buffer, 8 * start, *[given[name] for name in constants])
        shift = base + 8 * (start - len(words))
        pointers = 8 * (start + len(constants))
        first_constant = len(words)
        pack_pointers(buffer, pointers, *[(base if slot < first_constant else shift) + 8 * slot for slot in slots])
        compiled = launch.specialisation.load(index)
        keep_alive.append(compiled)
        prepared.append((compiled.function, *launch.grid, launch.block, 1, 1, launch.shared, base + pointers))
        start += len(constants) + len(slots)
    run = _runner(
        index,
        _struct("<" + "".join(formats[word] for word in words)).pack_into,
        buffer,
        prepared,
        keep_alive,
        lambda values: _refusal(op, dict(zip(words, values, strict=True)), formats),
    )
    return _synchronised(op, index, run) if config.sync() else run


def _refusal(op: str, values: dict[str, Any], formats: dict[str, str]) -> OpError:
    """Which value a kernel parameter could not hold."""
    for name, value in values.items():
        try:
            Struct(formats[name]).pack(value)
        except (StructError, OverflowError, TypeError) as error:
            return OpError(op, name, f"got {value!r}: {error}")
    raise AssertionError("every value can be packed")


def _runner(
    index: int, pack: Any, buffer: Any, prepared: Sequence[tuple[int, ...]], keep_alive: list[Any], refusal: Any
) -> BoundLaunch:
    """The hot path. The buffer is the plan's, so one call at a time fills it and launches from it."""
    launch_kernel, error_type, get_device = _driver()
    lock = threading.Lock()

    def launch_all(stream: int) -> None:
        for *geometry, parameters in prepared:
            launch_kernel(*geometry, stream, parameters, 0)

    def on_the_device(stream: int, *words: Any) -> None:
        # A thread that has no context yet, or whose current device is another one.
        with cupy.cuda.Device(index), lock:
            cupy.cuda.runtime.setDevice(index)
            pack(buffer, 0, *words)
            launch_all(stream)

    if len(prepared) == 1:
        function, x, y, z, block, _, _, shared, parameters = prepared[0]

        def run(stream: int, *words: Any, _keep_alive: Any = keep_alive) -> None:
            try:
                with lock:
                    pack(buffer, 0, *words)
                    launch_kernel(function, x, y, z, block, 1, 1, shared, stream, parameters, 0)
            except error_type as error:
                if error.status != _INVALID_CONTEXT:
                    raise
                on_the_device(stream, *words)
            except _NO_VALUE:
                raise refusal(words) from None

    else:

        def run(stream: int, *words: Any, _keep_alive: Any = keep_alive) -> None:
            try:
                with lock:
                    pack(buffer, 0, *words)
                    launch_all(stream)
            except error_type as error:
                if error.status != _INVALID_CONTEXT:
                    raise
                on_the_device(stream, *words)
            except _NO_VALUE:
                raise refusal(words) from None

    if device.count() == 1:
        return run

    def run_on_its_device(stream: int, *words: Any) -> None:
        if get_device() == index:
            run(stream, *words)
        else:
            on_the_device(stream, *words)

    return run_on_its_device


@cache
def _driver() -> tuple[Any, Any, Any]:
    from cupy_backends.cuda.api import driver, runtime

    return driver.launchKernel, driver.CUDADriverError, runtime.getDevice


_NO_VALUE = (StructError, OverflowError, TypeError)
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def _synchronised(op: str, index: int, run: BoundLaunch) -> BoundLaunch:
    def run_and_wait(stream: int, *words: Any) -> None:
        run(stream, *words)
        try:
            with cupy.cuda.Device(index):
                cupy.cuda.runtime.streamSynchronize(stream)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceFault(f"{op}: the device reported {error}") from error

    return run_and_wait
