"""The driver's launch calls: CuPy's, and the one that lets a kernel start before its turn."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a value that is one integer."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int * 17))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, on. The value lies eight bytes from the start.
_OVERLAP = _Attribute(6, (0, 1))
OVERLAP_ADDRESS = ctypes.addressof(_OVERLAP)

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class Driver(NamedTuple):
    """What launching takes from the driver."""

    launch: Callable[..., None]
    launch_overlapped: Any  # cuLaunchKernelEx, which CuPy does not have; None on HIP and in old drivers
    error: Callable[[int], Exception]  # the type of what `launch` raises, with its status
    get_device: Callable[[], int]


def allow_shared(function: int, shared: int) -> None:
    """Let the loaded `function` be launched with `shared` bytes of dynamic shared memory, if it may not yet."""
    if shared:  # which, with the static part, may be more than what needs no leave
        from cupy_backends.cuda.api import driver, runtime

        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # Another plan of the function may need more.
        if not runtime.is_hip and driver.funcGetAttribute(attribute, function) < shared:
            driver.funcSetAttribute(function, attribute, shared)


@cache
def get() -> Driver:
    """The driver of this process."""
    from cupy_backends.cuda.api import driver, runtime

    launch_overlapped = None
    if not runtime.is_hip:
        library = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
        with suppress(OSError, AttributeError):
            launch_overlapped = ctypes.CDLL(library).cuLaunchKernelEx
    return Driver(driver.launchKernel, launch_overlapped, driver.CUDADriverError, runtime.getDevice)
