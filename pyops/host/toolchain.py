"""The C++ compilers of this machine, and the flags that make a kernel compute the same bits with each of them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from typing import Literal

from .._core.errors import MissingDependencyError

# What is compiled: the runtime, a kernel, or a kernel once more with the lines of its source.
Kind = Literal["runtime", "kernel", "lines"]


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
    if (package := importlib.util.find_spec("ziglang")) and package.origin:
        # `python -m ziglang` would start Python first, for every kernel.
        found.append(Toolchain("ziglang", (os.path.join(os.path.dirname(package.origin), "zig"), "c++"), "clang"))
    return {one.name: one for one in found}


def preferred() -> Toolchain:
    """The compiler that is used. Raises MissingDependencyError where there is none."""
    for one in toolchains().values():
        return one
    raise MissingDependencyError("running kernels on the CPU", "a C++ compiler (g++, clang++ or ziglang)", "cpu")


# The same bits with every compiler: no FMA contraction, and no machine-specific instructions. Kernels include C headers
# only: those of C++ would take a third of the compilation.
_COMMON = (
    *("-std=c++17", "-nostdinc++", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fstack-clash-protection", "-U_FORTIFY_SOURCE", "-w"),
    # A fault's call stack is read from frame pointers, not from tables.
    *("-fno-omit-frame-pointer", "-fno-asynchronous-unwind-tables"),
)
# A kernel takes longer to compile than to run. So these are the fewest optimisations that keep local variables in
# registers (accesses to memory are instrumented) and inline the runtime's small functions.
_FAST = {
    "gcc": ("-Og", "-fno-unroll-loops", "-finline-small-functions", "-finline-functions-called-once"),
    "clang": ("-O1",),
}
# Lines of the source cost a third of a compilation. A kernel is compiled with them only once it has a fault.
_LINES = {"runtime": ("-g0",), "kernel": ("-g0",), "lines": ("-g1", "-gdwarf-4")}
# The sanitizers' checks for undefined behaviour and memory accesses; our runtime replaces theirs.
# Undefined behaviour ends the launch, so the compiler generates no code to continue after it.
_CHECKS = (
    "-fsanitize=thread",
    "-fno-sanitize-recover=all",
    "-fsanitize=bounds,alignment,shift-exponent,integer-divide-by-zero,float-cast-overflow,signed-integer-overflow",
)
_OF_DIALECT = {
    "gcc": ("-fsanitize=bounds-strict", "-fno-gnu-unique"),
    "clang": ("-fstrict-flex-arrays=3",),
}
_OF_COMPILER = {"ziglang": ("-mcpu=baseline", "-fno-sanitize=undefined")}
_LINK = {
    "gcc": ("-shared", "-nodefaultlibs", "-lm", "-ldl", "-lrt", "-lpthread", "-lc", "-lgcc"),
    "clang": ("-shared", "-nostdlib++", "-lm", "-ldl", "-lrt", "-lpthread"),
}


def compile_flags(chain: Toolchain, kind: Kind) -> tuple[str, ...]:
    """The options that `chain` compiles with."""
    optimise = ("-O2",) if kind == "runtime" else _FAST[chain.dialect]
    flags = (*_COMMON, *_OF_COMPILER.get(chain.name, ()), *optimise, *_LINES[kind])
    return flags if kind == "runtime" else (*flags, *_CHECKS, *_OF_DIALECT[chain.dialect])


def link_flags(chain: Toolchain) -> tuple[str, ...]:
    """The options that `chain` links with."""
    return (*_LINK[chain.dialect], *_OF_COMPILER.get(chain.name, ()))
