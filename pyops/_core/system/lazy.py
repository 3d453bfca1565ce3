"""torch and cupy, imported at first use: neither is needed to import pyops, and a cupy user never pays for torch."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import warnings
from contextlib import suppress
from functools import cache, partial
from types import ModuleType
from typing import Any

from ..errors import MissingDependencyError
from . import folders


def optional(name: str, needed_for: str, extra: str) -> ModuleType:
    """The module `name`; where it is not installed, an error that names the `extra` of pyops which brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingDependencyError(needed_for, name, extra) from None


def _import_cupy() -> ModuleType:
    # Importing CuPy creates its cache folder, and raises if it cannot. That must not fail a call of an op.
    if "cupy" not in sys.modules:
        try:
            os.makedirs(cache_folder(), exist_ok=True)
            folders.sweep(cache_folder())
        except OSError as error:
            scratch = folders.of_process("pyops-cache-")
            warnings.warn(f"kernel cache {cache_folder()}: {error}; kernels are cached in {scratch}", stacklevel=2)
            os.environ["CUPY_CACHE_DIR"] = scratch
    return optional("cupy", "compiling a kernel", gpu_extra())


def gpu_extra() -> str:
    """The extra of pyops that fits the driver of this machine; the one for CUDA 13 where there is no driver."""
    kind, version = driver_version()
    if kind == "HIP":
        return "rocm"
    return "cuda12" if kind == "CUDA" and version < 13000 else "cuda13"


CUDA_LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
# Only packages for developers have the name without a number.
HIP_LIBRARIES = "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"


def driver_library(is_hip: bool) -> ctypes.CDLL:
    """The library of the driver. Raises OSError if there is none."""
    names = HIP_LIBRARIES if is_hip else (CUDA_LIBRARY,)
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError(f"{names[0]} cannot be loaded")


def driver_version() -> tuple[str, int]:
    """(``"CUDA"`` or ``"HIP"``, the driver's number for its version); ("", 0) without a driver."""
    version = ctypes.c_int()
    for kind, prefix in (("CUDA", "cu"), ("HIP", "hip")):
        with suppress(OSError):
            getattr(driver_library(kind == "HIP"), f"{prefix}DriverGetVersion")(ctypes.byref(version))
            return kind, version.value
    return "", 0


def cache_folder() -> str:
    """The folder of CuPy's kernel cache."""
    return os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")


class _Lazy:
    def __init__(self, load: Any) -> None:
        self._load = load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)


torch: Any = _Lazy(cache(partial(optional, "torch", "this call", "torch")))
cupy: Any = _Lazy(cache(_import_cupy))


def loaded(name: str) -> Any:
    """The module `name` if the process has imported it, else None: also while a thread is still importing it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module
