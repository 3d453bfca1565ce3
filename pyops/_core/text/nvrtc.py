"""NVRTC by its own functions: for the report of ptxas, and for PTX of an older architecture, which CuPy cannot make."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import cache
from glob import glob
from typing import NamedTuple

from ..errors import CompileError, pip_line
from ..system.lazy import cupy, gpu_extra

OLDEST = 12, 8  # the assembler of 12.4 crashes on prefill_sm90.cu, and with it the process
TILE_OPTIONS = "--enable-tile", "--tile-only", "-std=c++20"  # of a kernel in CUDA Tile C++, from NVRTC 13.3 on


class Output(NamedTuple):
    """The compiler's messages, and a cubin, PTX or Tile IR."""

    log: str
    binary: bytes


def compile(kernel: str, constants: str, text: str, options: tuple[str, ...]) -> Output:
    """Compile with CuPy's options and these, among them the architecture: ``"--gpu-architecture=sm_90"`` gives
    a cubin, ``"--gpu-architecture=compute_90"`` PTX."""
    assert cupy.__version__  # importing CuPy loads NVRTC from wherever it is installed
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, all_options(options))
        if "--enable-tile" in options:
            return Output(nvrtc.getProgramLog(program), _tile_ir(program))
        is_ptx = any(option.startswith("--gpu-architecture=compute_") for option in options)
        return Output(nvrtc.getProgramLog(program), (nvrtc.getPTX if is_ptx else nvrtc.getCUBIN)(program))
    except nvrtc.NVRTCError:
        raise CompileError(kernel, constants, nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)


def _tile_ir(program: int) -> bytes:
    """The Tile IR of a compiled program. CuPy has no binding of these functions of the NVRTC that it has loaded."""
    library, size = ctypes.CDLL("libnvrtc.so.13"), ctypes.c_size_t()
    if library.nvrtcGetTileIRSize(ctypes.c_void_p(program), ctypes.byref(size)):
        return b""
    made = ctypes.create_string_buffer(size.value)
    library.nvrtcGetTileIR(ctypes.c_void_p(program), made)
    return made.raw


def all_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """`options`, those that CuPy adds, and the folders of CUDA's headers."""
    dialect = () if "-std=c++20" in options else ("-std=c++17",)
    own = (*dialect, "-ftz=true", "--device-as-default-execution-space")
    return (*options, *own, *(f"-I{folder}" for folder in include_folders()))


def version() -> tuple[int, int]:
    """The version of NVRTC."""
    assert cupy.__version__  # importing CuPy loads NVRTC from wherever it is installed
    from cupy_backends.cuda.libs import nvrtc

    major, minor = nvrtc.getVersion()
    return int(major), int(minor)


def check_version(kernel: str, constants: str) -> None:
    """Raises CompileError if NVRTC is too old for kernels with wgmma."""
    if (found := version()) < OLDEST:
        told = "this kernel needs NVRTC {}.{} or newer, and {}.{} is installed: {}"
        raise CompileError(kernel, constants, told.format(*OLDEST, *found, pip_line(gpu_extra())))


@cache
def include_folders() -> tuple[str, ...]:
    """Folders that hold CUDA's headers: those of wheels, then the toolkit's.

    Folders of NVRTC's major version come first, because an environment may have wheels of two, such as a torch for
    CUDA 13 next to a CuPy for CUDA 12.
    """
    roots = dict.fromkeys(os.path.join(entry, "nvidia") for entry in sys.path)
    found = [folder for root in roots for folder in sorted(glob(os.path.join(root, "*", "include")), reverse=True)]
    found.append(os.path.join(os.environ.get("CUDA_PATH", "/usr/local/cuda"), "include"))
    folders = [folder for folder in found if os.path.exists(os.path.join(folder, "cuda_fp16.h"))]
    if len(folders) > 1:
        own = version()[0]
        folders.sort(key=lambda folder: _major(folder) != own)
    return tuple(folders)


def _major(folder: str) -> int:
    """The major version of CUDA's headers in a folder; 0 if it does not say."""
    try:
        with open(os.path.join(folder, "cuda_runtime_api.h"), encoding="utf-8") as header:
            found = re.search(r"#define CUDART_VERSION +(\d+)\d{3}\b", header.read())
    except OSError:
        return 0
    return int(found[1]) if found else 0
