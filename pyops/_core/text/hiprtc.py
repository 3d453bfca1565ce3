"""Kernels on AMD GPUs: source text to loaded module by hiprtc, with its own disk cache.

CuPy's RawModule is not used on HIP: it runs hipcc, and flushes subnormal floats to zero, which no kernel can undo for a
single operation.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from typing import Any

from ..errors import CompileError
from ..system import device, folders
from ..system.lazy import cache_folder, cupy


def load(index: int, text: str, kernel: str, constants: str, options: tuple[str, ...]) -> tuple[Any, str]:
    """(module on the device `index`, ``"compiled"`` or ``"disk"``), compiled by only one of the processes that need it.

    Raises OSError if the cache folder is unusable.
    """
    arch = device.get(index).arch
    path = os.path.join(cache_folder(), f"pyops-{_digest(text, arch, options)}.hsaco")
    origin = "disk"
    if (binary := folders.read_sealed(path)) is None:
        with folders.worked_in(path + folders.SUFFIX) as scratch:
            if (binary := folders.read_sealed(path)) is None:  # not compiled by another process since
                binary, origin = compile(kernel, constants, text, arch, options), "compiled"
                folders.write_sealed(os.path.join(scratch, "built"), binary)
                os.replace(os.path.join(scratch, "built"), path)
    return module_of(binary), origin


def module_of(binary: bytes) -> Any:
    """The code object, loaded on CuPy's current device."""
    module = cupy.cuda.function.Module()
    module.load(binary)
    return module


def compile(kernel: str, constants: str, text: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """The code object of `text` for the architecture `arch`, such as ``"gfx942"``. Needs no device."""
    try:
        binary, _ = cupy.cuda.compiler.compile_using_nvrtc(text, _options(arch, options), cache_in_memory=True)
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(kernel, constants, "\n".join(str(error).strip().splitlines()[-20:])) from None
    return bytes(binary)


def _options(arch: str, options: tuple[str, ...]) -> tuple[str, ...]:
    return (f"--offload-arch={arch}", "-std=c++17", *options, *(f"-I{folder}" for folder in include_folders()))


def _digest(text: str, arch: str, options: tuple[str, ...]) -> str:
    from cupy_backends.cuda.libs import nvrtc

    version = ".".join(map(str, (*nvrtc.getVersion(), cupy.cuda.runtime.runtimeGetVersion())))
    return hashlib.sha256("\0".join((text, version, *_options(arch, options))).encode()).hexdigest()[:32]


@cache
def include_folders() -> tuple[str, ...]:
    """Folders with ROCm's headers of element types, which hiprtc itself lacks."""
    roots = [os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm", "/usr"]
    folders = dict.fromkeys(os.path.join(root, "include") for root in roots if root)
    return tuple(folder for folder in folders if os.path.exists(os.path.join(folder, "hip", "hip_fp16.h")))[:1]
