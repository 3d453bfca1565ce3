"""Driver calls that CuPy lacks: launches with attributes, batched copies, and loading during a stream capture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

from ..errors import CaptureError
from .lazy import CUDA_LIBRARY, cupy, driver_library


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int * 17))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


# Identifiers of CUlaunchAttribute.
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


@cache
def attributes(overlaps: bool, cluster: tuple[int, int, int]) -> ctypes.Array[Any] | None:
    """The launch attributes for cuLaunchKernelEx; None if the launch needs none.

    A kernel that `overlaps` may start while the one before it still runs. `cluster` counts the blocks of a cluster.
    """
    wanted = []
    # The value of an attribute is at offset 8, after the identifier and 4 bytes of padding.
    if overlaps:
        wanted.append(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (0, 1)))
    if cluster != (1, 1, 1):
        wanted.append(_Attribute(_CLUSTER_DIMENSION, (0, *cluster)))
    return (_Attribute * len(wanted))(*wanted) if wanted else None


INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class Driver(NamedTuple):
    """The driver functions that launches use."""

    launch: Callable[..., None]
    launch_with_attributes: Any  # cuLaunchKernelEx, which CuPy does not have; None on HIP and in old drivers
    error: Callable[[int], Exception]  # makes the exception for a status that `launch` returned
    get_device: Callable[[], int]
    # cuTensorMapEncodeTiled and cuTensorMapReplaceAddress, which CuPy does not have; None on HIP and in old drivers
    encode_map: Any = None
    replace_address: Any = None


def raise_limits(function: int, shared: int) -> None:
    """Raise (never lower) the loaded `function`'s limits: `shared` bytes of dynamic shared memory, large clusters."""
    if shared:  # static + dynamic shared memory may exceed the 48 KiB default
        from cupy_backends.cuda.api import driver, runtime

        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if not runtime.is_hip and driver.funcGetAttribute(attribute, function) < shared:
            driver.funcSetAttribute(function, attribute, shared)
        if not runtime.is_hip and driver.funcGetAttribute(12, function) > 8:  # the required height of its clusters
            driver.funcSetAttribute(function, 14, 1)  # larger ones are allowed; CuPy has no names for the two


@cache
def get() -> Driver:
    """The driver of this process."""
    from cupy_backends.cuda.api import driver, runtime

    launch_with_attributes = encode_map = replace_address = None
    if not runtime.is_hip:
        with suppress(OSError, AttributeError):
            launch_with_attributes = ctypes.CDLL(CUDA_LIBRARY).cuLaunchKernelEx
            # These two only write 128 bytes, so they keep the GIL: releasing it, as CDLL does, takes longer.
            calls = ctypes.PyDLL(CUDA_LIBRARY)
            encode_map, replace_address = calls.cuTensorMapEncodeTiled, calls.cuTensorMapReplaceAddress
            pointer, integer = ctypes.c_void_p, ctypes.c_int
            encode_map.argtypes = (pointer, integer, ctypes.c_uint32, *(pointer,) * 5, *(integer,) * 4)
            replace_address.argtypes = (pointer, pointer)
    error, get_device = driver.CUDADriverError, runtime.getDevice
    return Driver(driver.launchKernel, launch_with_attributes, error, get_device, encode_map, replace_address)


# A first call while a graph is captured must load kernels and allocate memory. A capture in the mode "global" forbids
# both to every thread of the process.

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed
# From cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread. The driver and HIP have the same numbers.
_CAPTURE_STATUS = range(900, 909)


@cache
def _capture_call(name: str) -> Any:
    """The driver's function cu`name`, or hip`name`; None in a driver without it. CuPy has none of them for HIP."""
    is_hip = cupy.cuda.runtime.is_hip
    with suppress(OSError, AttributeError):
        return getattr(driver_library(is_hip), ("hip" if is_hip else "cu") + name)
    return None


def is_capturing(stream: int) -> bool:
    """Whether the stream is being captured into a graph, or was until an error invalidated the capture."""
    call, status = _capture_call("StreamIsCapturing"), ctypes.c_int()
    return call is not None and not call(ctypes.c_void_p(stream), ctypes.byref(status)) and status.value != 0


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """While the context lasts, this thread may load kernels and allocate memory although a graph is being captured.

    The driver forbids both during a capture by default, although neither becomes part of the graph. The mode belongs to
    the thread: neither the capture nor another thread notices.
    """
    exchange, mode = _capture_call("ThreadExchangeStreamCaptureMode"), ctypes.c_int(_RELAXED)
    if exchange is not None and exchange(ctypes.byref(mode)):
        # A thread that has not called the driver before has no context yet.
        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
        if exchange(ctypes.byref(mode)):
            exchange = None
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


@contextmanager
def outside_capture(op: str, action: str) -> Iterator[None]:
    """`relaxed_capture` for an action of a first call of `op`. Raises CaptureError if the driver still refuses it."""
    try:
        with relaxed_capture():
            yield
    except Exception as error:
        if is_refusal(error):
            raise CaptureError(op, action) from error
        raise


def is_refusal(error: Exception) -> bool:
    """Whether this is the driver's error for a call that a stream capture forbids."""
    return getattr(error, "status", 0) in _CAPTURE_STATUS


def clear(address: int, nbytes: int) -> None:
    """Zero memory of the current device, and wait until it is zero. Call it within `relaxed_capture`.

    It uses a stream of its own. On a captured stream the memset would become a node of the graph, and would not run
    now; and the default stream must not be used while a stream that waits for it is captured.
    """
    runtime = cupy.cuda.runtime
    stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
    try:
        runtime.memsetAsync(address, 0, nbytes, stream)
        runtime.streamSynchronize(stream)
    finally:
        runtime.streamDestroy(stream)
