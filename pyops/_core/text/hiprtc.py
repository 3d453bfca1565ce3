"""Kernels on AMD GPUs: source text to loaded module by hiprtc.

CuPy's RawModule is not used on HIP: it runs hipcc, and flushes subnormal floats to zero, which no kernel can undo for a
single operation.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from ..system import device
from ..system.lazy import cupy
from . import modules


def load(index: int, text: str, kernel: str, constants: str, options: tuple[str, ...]) -> tuple[Any, str]:
    """The result of `modules.load` on the device `index`, which is CuPy's current one."""
    arch = device.get(index).arch
    parts = (text, _version(), *_options(arch, options))
    return modules.load(parts, ".hsaco", lambda: compile(kernel, constants, text, arch, options))


def compile(kernel: str, constants: str, text: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """The code object of `text` for the architecture `arch`, such as ``"gfx942"``. Needs no device."""
    with modules.compile_errors(kernel, constants):
        binary, _ = cupy.cuda.compiler.compile_using_nvrtc(text, _options(arch, options), cache_in_memory=True)
    return bytes(binary)


def _options(arch: str, options: tuple[str, ...]) -> tuple[str, ...]:
    return (f"--offload-arch={arch}", "-std=c++17", *options, *(f"-I{folder}" for folder in include_folders()))


def _version() -> str:
    from cupy_backends.cuda.libs import nvrtc

    return ".".join(map(str, (*nvrtc.getVersion(), cupy.cuda.runtime.runtimeGetVersion())))


@cache
def include_folders() -> tuple[str, ...]:
    """Folders with ROCm's headers of element types, which hiprtc itself lacks."""
    roots = [os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm", "/usr"]
    folders = dict.fromkeys(os.path.join(root, "include") for root in roots if root)
    return tuple(folder for folder in folders if os.path.exists(os.path.join(folder, "hip", "hip_fp16.h")))[:1]
