"""A plan's launches bound to loaded functions: one pack of eight-byte words, n launches. Only this file launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any

from . import config, device
from .errors import DeviceFault, OpError
from .kernel import Launch
from .lazy import cupy

# launch(stream, *addresses of the tensor arguments, *float arguments)
BoundLaunch = Callable[..., None]


def slots(launch: Launch, words: Sequence[str], scalars: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """[(parameter, struct format, value)] of the kernel's parameters, in order; value None for a word given per call.

    `words` are the op's tensors and floats, `scalars` its other arguments. Raises TypeError for a parameter that
    nothing feeds and for a fixed value that no parameter takes.
    """
    file = launch.specialisation.kernel.file
    result: list[tuple[str, str, Any]] = []
    for fmt, name in launch.specialisation.kernel.parameters:
        if name in launch.fixed:
            result.append((name, fmt, launch.fixed[name]))
        elif name in words:
            result.append((name, fmt, None))
        elif name in scalars:
            result.append((name, fmt, scalars[name]))
        else:
            raise TypeError(f"{file}: nothing feeds the parameter {name}")
    for name in launch.fixed:
        if name not in (parameter for _, parameter in launch.specialisation.kernel.parameters):
            raise TypeError(f"{file}: no parameter takes the value {name}")
    return result


def bind(
    op: str,
    index: int,
    launches: Sequence[Launch],
    tensors: Sequence[str],
    floats: Sequence[str],
    scalars: dict[str, Any],
) -> BoundLaunch:
    """A callable that packs its arguments once and runs every launch, in order, on the stream it is given."""
    words = (*tensors, *floats)
    formats = dict.fromkeys(tensors, "Q") | dict.fromkeys(floats, "d")
    constants: list[tuple[str, Any]] = []
    layouts: list[list[int]] = []
    for launch in launches:
        layout = []
        for name, fmt, value in slots(launch, words, scalars):
            if value is None:
                formats[name] = fmt
                layout.append(words.index(name))
            else:
                layout.append(len(words) + len(constants))
                constants.append((fmt, value))
        layouts.append(layout)

    buffer = ctypes.create_string_buffer(8 * (len(words) + len(constants)) or 8)
    base = ctypes.addressof(buffer)
    Struct("<" + "".join(fmt for fmt, _ in constants)).pack_into(
        buffer, 8 * len(words), *(value for _, value in constants)
    )
    prepared = []
    keep_alive: list[Any] = [buffer]
    for launch, layout in zip(launches, layouts, strict=True):
        compiled = launch.specialisation.load(index)
        pointers = (ctypes.c_void_p * max(1, len(layout)))(*(base + 8 * slot for slot in layout))
        keep_alive += [pointers, compiled]
        prepared.append(
            (compiled.function, *launch.grid, launch.block, 1, 1, launch.shared, ctypes.addressof(pointers))
        )
    run = _runner(
        index,
        Struct("<" + "".join(formats[word] for word in words)).pack_into,
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
    from cupy_backends.cuda.api import driver, runtime

    launch_kernel, error_type, get_device = driver.launchKernel, driver.CUDADriverError, runtime.getDevice
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
