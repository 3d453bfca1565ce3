"""NVRTC by its own functions: for the report of ptxas, and for PTX of an older architecture, which CuPy cannot make."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
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
    own = "-ftz=true", "--device-as-default-execution-space", *(f"-I{folder}" for folder in include_folders())
    return *options, *([] if "-std=c++20" in options else ["-std=c++17"]), *own


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
    """Folders with CUDA's headers; first those of NVRTC's major version, because wheels of two may be installed."""
    paths = [path for entry in sys.path for path in sorted(Path(entry).glob("nvidia/*/include"), reverse=True)]
    paths.append(Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"), "include"))
    found = [str(path) for path in dict.fromkeys(paths) if (path / "cuda_fp16.h").exists()]
    return tuple(sorted(found, key=_is_of_another) if len(found) > 1 else found)


def _is_of_another(folder: str) -> bool:
    header = Path(folder, "cuda_runtime_api.h")
    return not header.exists() or f"#define CUDART_VERSION  {version()[0]}" not in header.read_text()
