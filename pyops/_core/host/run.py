"""Kernels on the CPU: the text that NVRTC compiles, compiled by a C++ compiler against `kernels_cu/host`, and run.

A text becomes a shared object that is linked to a runtime of its own library. Both are cached by the digest of all that
goes into them. A launch is deterministic: its schedule says which thread runs when.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .. import config, source
from ..errors import CompileError, KernelFault, MissingDependencyError, called
from ..lazy import cache_folder
from .lines import places

ORDERS = ("fifo", "reversed", "greedy", "shuffled")


@dataclass(frozen=True)
class Schedule:
    """Which thread runs when: one order out of all that a device may choose.

    Attributes:
        order: ``"fifo"``; ``"reversed"``, from the last block and thread to the first; ``"greedy"``, one warp as far as
            it gets before the next; ``"shuffled"``, any thread that can run, by `seed`.
    """

    order: str = "fifo"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f'order: expected one of {", ".join(ORDERS)}, got "{self.order}"')


# A result that does not depend on timing is the same under each of them.
SCHEDULES = (
    Schedule(),
    Schedule("reversed"),
    Schedule("greedy"),
    Schedule("shuffled", 1),
    Schedule("shuffled", 2),
)


@dataclass(frozen=True)
class Conditions:
    """How launches run: by which schedule, how long at most, and in warps of how many lanes (32 or 64)."""

    schedule: Schedule = Schedule()
    seconds: float = 60.0
    warp_size: int = 32


_USUAL = Conditions()
_conditions: ContextVar[Conditions] = ContextVar("conditions", default=_USUAL)


@contextmanager
def scheduled(schedule: Schedule, *, seconds: float = 60.0, warp_size: int = 32) -> Iterator[None]:
    """Launches of this thread run by `schedule`, end after `seconds`, and have warps of `warp_size` lanes."""
    token = _conditions.set(Conditions(schedule, seconds, warp_size))
    try:
        yield
    finally:
        _conditions.reset(token)


def warp_size() -> int:
    """Lanes of a warp in this thread's launches."""
    return _conditions.get().warp_size


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler: the command, and its dialect of options, ``"gcc"`` or ``"clang"``."""

    name: str
    command: tuple[str, ...]
    dialect: str

    @property
    def version(self) -> str:
        return _output((*self.command[:-1], "version") if self.name == "ziglang" else (*self.command, "--version"))


@cache
def _output(command: tuple[str, ...]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def toolchains() -> dict[str, Toolchain]:
    """The C++ compilers of this machine by name, the preferred one first."""
    found = [
        Toolchain(name, (path,), dialect)
        for name, dialect in (("g++", "gcc"), ("clang++", "clang"))
        if (path := shutil.which(name))
    ]
    if importlib.util.find_spec("ziglang"):
        found.append(Toolchain("ziglang", (sys.executable, "-m", "ziglang", "c++"), "clang"))
    return {one.name: one for one in found}


def _toolchain() -> Toolchain:
    for one in toolchains().values():
        return one
    raise MissingDependencyError("running kernels on the CPU", "a C++ compiler (g++, clang++ or ziglang)", "cpu")


# The same bits with every compiler: no product is fused with a sum, and no machine's own instructions are used. C's
# headers are all that a kernel needs: those of C++ would take a third of its compilation.
_COMMON = (
    *("-std=c++17", "-nostdinc++", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fstack-clash-protection", "-U_FORTIFY_SOURCE", "-w"),
)
# Lines of the source would take a third of the time: once a kernel has a fault, the same code is compiled with them.
_OPTIMISE = {"runtime": ("-O2",), "kernel": ("-O1",), "lines": ("-O1", "-g1", "-gdwarf-4")}
# What undefined behaviour and what accesses to memory are told to the runtime, which takes the sanitizers' place.
_CHECKS = (
    "-fsanitize=thread",
    "-fsanitize=bounds,alignment,shift-exponent,integer-divide-by-zero,float-cast-overflow,signed-integer-overflow",
)
_OF_DIALECT = {"gcc": ("-fsanitize=bounds-strict", "-fno-gnu-unique"), "clang": ("-fstrict-flex-arrays=3",)}
_OF_COMPILER = {"ziglang": ("-mcpu=baseline", "-fno-sanitize=undefined")}
_LINK = {
    "gcc": ("-shared", "-nodefaultlibs", "-lm", "-ldl", "-lrt", "-lpthread", "-lc", "-lgcc"),
    "clang": ("-shared", "-nostdlib++", "-lm", "-ldl", "-lrt", "-lpthread"),
}

_SHARED = re.compile(
    r"(?P<dynamic>extern\s+)?__shared__\s+(?:(?:alignas|__align__)\s*\((?P<align>(?:[^()]|\([^()]*\))*)\)\s*)?"
    r"(?P<type>[^;={}\[\]]+?)\s*\b(?P<name>\w+)\s*(?P<sizes>(?:\[[^;]*\])?)\s*;"
)
_CLUSTER = re.compile(r"\bvoid\s+CLUSTER_OF\s*\(([^)]*)\)")


def _declare_shared(match: re.Match[str]) -> str:
    """A shared array as a reference to memory of the runtime's, on as many lines."""
    align, kind, name, sizes = match["align"] or "16", match["type"], match["name"], match["sizes"]
    if match["dynamic"]:
        declaration = f"{kind}* const {name} = static_cast<{kind}*>(host::dynamic_shared());"
    else:
        declaration = (
            f"using {name}_shared_t = {kind} {sizes}; static host::Slot {name}_slot; auto& {name} = "
            f"*static_cast<{name}_shared_t*>(host::static_shared({name}_slot, sizeof({name}_shared_t), {align}));"
        )
    return declaration + "\n" * match[0].count("\n")


def unit(text: str, entry: str, warp_size: int = 32) -> str:
    """The C++ source that is compiled for the kernel `entry` of `text`."""
    cluster = _CLUSTER.search(text)
    return (
        f"#define PYOPS_HOST_WARP_SIZE {warp_size}\n{source.inline('host/mma.h')}\n"
        f"namespace pyops_kernel {{\n{_SHARED.sub(_declare_shared, text)}\n}}\n"
        f'extern "C" HOST_API void pyops_host_entry(void** parameters) {{\n'
        f"    host::call(pyops_kernel::{entry}, parameters);\n}}\n"
        f'extern "C" HOST_API unsigned pyops_host_cluster() {{\n'
        f"    using namespace pyops_kernel;\n    return {cluster[1] if cluster else 1};\n}}\n"
    )


def _build(kind: str, code: str, libraries: tuple[str, ...], kernel: str, constants: str) -> str:
    """Path of the shared object of `code`, compiled unless the cache folder holds it; `kind` is a key of _OPTIMISE."""
    chain = _toolchain()
    flags = (*_COMMON, *_OF_COMPILER.get(chain.name, ()), *_OPTIMISE[kind])
    if kind != "runtime":
        flags += (*_CHECKS, *_OF_DIALECT[chain.dialect])
    parts = (code, chain.name, chain.version, platform.machine(), *flags, *_LINK[chain.dialect], *map(_stem, libraries))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    path = os.path.join(_folder(), f"{digest}.so")
    if os.path.exists(path):
        return path
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
        built = os.path.join(scratch, "built.so")
        _run(chain, ("-c", "-x", "c++", "-", "-o", f"{built}.o", *flags), code, kernel, constants)
        link = (f"{built}.o", *libraries, f"-Wl,-soname,{os.path.basename(path)}", *_LINK[chain.dialect])
        _run(chain, (*link, *_OF_COMPILER.get(chain.name, ()), "-o", built), "", kernel, constants)
        os.replace(built, path)
    if config.log():
        milliseconds = (time.perf_counter() - started) * 1e3
        print(f"pyops: {kernel} {constants} host: compiled in {milliseconds:.0f} ms", file=sys.stderr)
    return path


def _stem(path: str) -> str:
    return os.path.basename(path)


def _run(chain: Toolchain, arguments: tuple[str, ...], code: str, kernel: str, constants: str) -> None:
    done = subprocess.run((*chain.command, *arguments), input=code, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(kernel, constants, "\n".join(done.stderr.strip().splitlines()[:20]))


@cache
def _folder() -> str:
    """Where shared objects are kept: a folder inside that of CuPy's kernels, or one for this process."""
    folder = os.path.join(cache_folder(), "pyops-host")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        scratch = tempfile.mkdtemp(prefix="pyops-host-")
        warnings.warn(f"kernel cache {folder}: {error}; kernels are cached in {scratch}", stacklevel=2)
        return scratch


class _Index(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32))

    def __iter__(self) -> Iterator[int]:
        return iter((self.x, self.y, self.z))


class _Launch(ctypes.Structure):  # state.h
    _fields_ = (
        ("grid", _Index),
        ("block", _Index),
        ("shared_bytes", ctypes.c_uint32),
        ("warp_size", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("time_limit_ms", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
    )


class _Fault(ctypes.Structure):  # state.h
    _fields_ = (
        ("kind", ctypes.c_char * 64),
        ("message", ctypes.c_char * 2048),
        ("file", ctypes.c_char * 256),
        ("line", ctypes.c_int32),
        ("has_thread", ctypes.c_int32),
        ("block", _Index),
        ("thread", _Index),
        ("pc", ctypes.c_uint64),
        ("asked_pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class HostFunction:
    """A kernel that is loaded into this process."""

    kernel: str
    constants: str
    library: str
    lines: Callable[[], str] = field(repr=False)  # gives the path of the same library with lines of the source
    warp_size: int
    cluster: int  # blocks
    entry: int = field(repr=False)
    run: Any = field(repr=False)

    def launch(self, grid: tuple[int, int, int], block: int | tuple[int, ...], shared: int, parameters: int) -> None:
        """Run every block, by the schedule of the `scheduled` around the call, and return when all have run.

        `parameters` is the address of an array with a pointer to each parameter. Raises KernelFault.
        """
        conditions = _conditions.get()
        threads = (*((block,) if isinstance(block, int) else block), 1, 1)[:3]
        launch = _Launch(
            _Index(*grid),
            _Index(*threads),
            shared,
            self.warp_size,
            self.cluster,
            ORDERS.index(conditions.schedule.order),
            max(1, int(conditions.seconds * 1e3)),
            conditions.schedule.seed,
        )
        with _one_launch:
            raised = self.run(self.entry, parameters, ctypes.byref(launch))
            fault = _Fault.from_buffer_copy(raised.contents) if raised else None
        if fault is not None:
            raise self._error(fault)

    def _error(self, fault: _Fault) -> KernelFault:
        library = self.lines()
        places = _places(library, fault.pc)
        told = (fault.file.decode(), fault.line)
        if fault.line and told not in places:
            places = [told, *places]
        places = places or _places(library, fault.asked_pc)  # where it last was when it was somewhere else
        message = fault.message.decode(errors="replace")
        if others := _places(library, fault.other_pc):
            message += f", at {called(others)}"
        thread: Any = tuple(fault.thread) if fault.has_thread else None
        block: Any = tuple(fault.block)
        return KernelFault(fault.kind.decode(), self.kernel, self.constants, message, places, block, thread)


def _places(library: str, offset: int) -> list[tuple[str, int]]:
    """Where in the kernels an instruction comes from. The emulation's own lines are left out."""
    # The address is that after the instruction.
    found = places(library, offset - 1) if offset else []
    return [(match[0], line) for file, line in found if (match := re.search(r"kernels_cu/(?!host/).+", file))]


_one_launch = threading.Lock()  # the runtime runs one at a time
_loaded: dict[tuple[str, int], HostFunction] = {}
_locks: dict[tuple[str, int], threading.Lock] = {}


def load(text: str, entry: str, kernel: str, constants: str) -> HostFunction:
    """The function `entry` of `text`, compiled at most once per process; `kernel` and `constants` name it in errors.

    Raises CompileError, and MissingDependencyError where there is no compiler.
    """
    key = (text, warp_size())
    found = _loaded.get(key)
    if found is None:
        with _locks.setdefault(key, threading.Lock()):
            found = _loaded.get(key) or _loaded.setdefault(key, _load(text, entry, kernel, constants, key[1]))
    return found


def _load(text: str, entry: str, kernel: str, constants: str, warp_size: int) -> HostFunction:
    runtime, run = _runtime()
    path, library = _open("kernel", unit(text, entry, warp_size), (runtime,), kernel, constants)
    address = ctypes.cast(library.pyops_host_entry, ctypes.c_void_p).value
    assert address is not None

    def lines() -> str:
        return _build("lines", unit(text, entry, warp_size), (runtime,), kernel, constants)

    return HostFunction(kernel, constants, path, lines, warp_size, library.pyops_host_cluster(), address, run)


def _open(kind: str, code: str, libraries: tuple[str, ...], kernel: str, constants: str) -> tuple[str, ctypes.CDLL]:
    path = _build(kind, code, libraries, kernel, constants)
    try:
        return path, ctypes.CDLL(path)
    except OSError:  # damaged: make it anew
        os.remove(path)
        return path, ctypes.CDLL(_build(kind, code, libraries, kernel, constants))


@cache
def _runtime() -> tuple[str, Any]:
    """The library that runs kernels: its path, and its one function."""
    path, library = _open("runtime", source.inline("host/runtime.cpp"), (), "host/runtime.cpp", "")
    run = library.pyops_host_run
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    run.restype = ctypes.POINTER(_Fault)
    return path, run
