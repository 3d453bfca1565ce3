"""Source text to loaded function: by `cupy.RawModule`, by `hiprtc` on AMD GPUs, from PTX with PYOPS_ARCH.

A function is looked up in two caches before NVRTC compiles it: this process's functions by (device, text), then CuPy's
folder of compiled kernels by the digest of text, options, architecture and compiler.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from .. import locks, log
from ..system import device, driver, folders
from ..system.lazy import cache_folder, cupy
from . import hiprtc, modules, nvrtc


@dataclass(frozen=True)
class Compiled:
    """One specialisation that this process holds.

    Attributes:
        kernel: source file; constants: its specialisation; arch: target; device: ordinal. On the host backend arch is
            ``"host"`` and device is -1.
        milliseconds: from text to loaded function.
        origin: ``"compiled"`` or ``"disk"``.
        registers: per thread; shared_bytes, local_bytes: static shared memory per block, local memory per thread. The
            host backend has none of them, and they are 0.
    """

    kernel: str
    constants: str
    device: int
    arch: str
    milliseconds: float
    origin: str
    registers: int
    shared_bytes: int
    local_bytes: int
    function: int = field(repr=False)
    keep_alive: Any = field(repr=False)


class _CompilerRan:
    """A log stream that CuPy writes to only when it compiles, not when it reads its disk cache."""

    def __init__(self) -> None:
        self.state = threading.local()

    def write(self, _: str) -> None:
        self.state.wrote = True


_compiler_ran = _CompilerRan()
_loaded: dict[tuple[int, str], Compiled] = {}
_locks: dict[tuple[int, str], threading.Lock] = {}
_warned = False


def load(index: int, text: str, entry: str, kernel: str, constants: str, options: tuple[str, ...] = ()) -> Compiled:
    """The function `entry` of `text` on the device `index`, compiled at most once per process and device."""
    key = (index, text)
    with _locks.setdefault(key, locks.new()):
        if key not in _loaded:
            _loaded[key] = _load(index, text, entry, kernel, constants, options)
        return _loaded[key]


def _load(index: int, text: str, entry: str, kernel: str, constants: str, options: tuple[str, ...]) -> Compiled:
    started = time.perf_counter()
    on = device.get(index)
    load_module = hiprtc.load if cupy.cuda.runtime.is_hip else _load_ptx if on.translates else _load_module
    if options == nvrtc.TILE_OPTIONS:
        load_module = _load_tile
    with cupy.cuda.Device(index), log.waiting(f"compiling {kernel} for {on.arch}"):
        try:
            module, origin = load_module(index, text, kernel, constants, options)
        except (OSError, cupy.cuda.driver.CUDADriverError) as error:
            if driver.is_refusal(error):
                raise
            # The cache folder cannot be written, is full, or holds a file that is not a kernel for this device.
            _warn_once(error)
            module, origin = _compile_in_memory(index, text, kernel, constants, options), "compiled"
        function = module.get_function(entry)
        attributes = _attributes(function.ptr)
    milliseconds, held = (time.perf_counter() - started) * 1e3, (module, function)
    compiled = Compiled(kernel, constants, index, on.arch, milliseconds, origin, *attributes, function.ptr, held)
    log.ready(kernel, constants, compiled.arch, told(compiled))
    return compiled


def told(one: Compiled) -> str:
    """Where a kernel came from, how long that took, and its registers."""
    how = "read from disk" if one.origin == "disk" else "compiled"
    return f"{how} in {one.milliseconds:.0f} ms" + f", {one.registers} registers" * (one.registers > 0)


def _load_module(index: int, text: str, kernel: str, constants: str, options: tuple[str, ...]) -> tuple[Any, str]:
    """(CuPy's module, ``"compiled"`` or ``"disk"``) from a bundle in CuPy's cache folder, or by way of that folder."""
    parts = (text, device.get(index).arch, *options)
    if (binary := folders.read_sealed(modules.path_of(parts))) is not None:
        return modules.of(binary), "disk"
    if options:
        nvrtc.check_version(kernel, constants)
    _compiler_ran.state.wrote = False
    with modules.compile_errors(kernel, constants), _alone(parts):
        module = cupy.RawModule(code=text, options=options)._module(_compiler_ran)
    return module, "compiled" if _compiler_ran.state.wrote else "disk"


def _alone(parts: tuple[str, ...]) -> AbstractContextManager[Any]:
    """Let one process compile a kernel that no cache holds; other processes that need it wait for the cache entry."""
    is_kept = os.access(cache_folder(), os.W_OK)
    return folders.worked_in(modules.path_of(parts, folders.SUFFIX)) if is_kept else nullcontext()


def _load_ptx(index: int, text: str, kernel: str, constants: str, options: tuple[str, ...]) -> tuple[Any, str]:
    assert not options, f"{kernel}: no older architecture has an instruction set of its own"
    parts = (text, *map(str, nvrtc.version()), *nvrtc.all_options(_ptx_options(index)))
    return modules.load(parts, ".ptx", lambda: _ptx(index, text, kernel, constants))


def _load_tile(index: int, text: str, kernel: str, constants: str, options: tuple[str, ...]) -> tuple[Any, str]:
    """A kernel in CUDA Tile C++: the driver assembles the Tile IR that NVRTC makes."""
    options = (f"--gpu-architecture={device.get(index).arch}", *options)
    parts = (text, *map(str, nvrtc.version()), *nvrtc.all_options(options))
    return modules.load(parts, ".tile", lambda: nvrtc.compile(kernel, constants, text, options).binary)


def _ptx(index: int, text: str, kernel: str, constants: str) -> bytes:
    return nvrtc.compile(kernel, constants, text, _ptx_options(index)).binary


def _ptx_options(index: int) -> tuple[str, ...]:
    return (f"--gpu-architecture=compute_{device.get(index).arch[3:]}",)


def _compile_in_memory(index: int, text: str, kernel: str, constants: str, options: tuple[str, ...]) -> Any:
    if cupy.cuda.runtime.is_hip:
        return modules.of(hiprtc.compile(kernel, constants, text, device.get(index).arch, options))
    if device.get(index).translates:
        return modules.of(_ptx(index, text, kernel, constants))
    all_options = (*options, "-std=c++17", "-ftz=true", *(f"-I{folder}" for folder in nvrtc.include_folders()))
    with modules.compile_errors(kernel, constants):
        binary, _ = cupy.cuda.compiler.compile_using_nvrtc(text, all_options, cache_in_memory=True)
    return modules.of(binary)


def _attributes(function: int) -> tuple[int, int, int]:
    """(registers, static shared bytes, local bytes). Reading them also makes the driver load the function now."""
    from cupy_backends.cuda.api import driver

    return (
        driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function),
        driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function),
        driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function),
    )


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"kernel cache {cache_folder()} is of no use ({error}); kernels are compiled anew in every process",
            stacklevel=2,
        )
