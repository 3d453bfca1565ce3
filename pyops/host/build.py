"""From the text of a kernel to a shared object, cached by the digest of all that goes into it."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import subprocess
import tempfile
import time
import warnings
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from .._core import log
from .._core.errors import CompileError
from .._core.system import folders
from .._core.system.lazy import cache_folder
from . import precompiled, toolchain
from .toolchain import Kind

# Each pattern begins with a literal, for which a text is searched three times as fast as for one that may be absent.
_SHARED = re.compile(
    r"(?:(?P<dynamic>extern\s+__shared__)|__shared__)\s+"
    r"(?:(?:alignas|__align__)\s*\((?P<align>(?:[^()]|\([^()]*\))*)\)\s*)?"
    r"(?P<type>[^;={}\[\]]+?)\s*\b(?P<name>\w+)\s*(?P<sizes>(?:\[[^;]*\])?)\s*;"
)
# clang obeys it, and takes twice as long for a kernel whose loops are all unrolled.
_UNROLL = re.compile(r"#pragma unroll\b.*")
_PROBE_BYTES = 4 << 20  # size of the probe file
_CLUSTER = re.compile(r"void\s+CLUSTER_OF\s*\(([^)]*)\)")


def _declare_shared(match: re.Match[str]) -> str:
    """A shared array as a reference to the runtime's memory, on the same number of lines."""
    align, kind, name, sizes = match["align"] or "16", match["type"], match["name"], match["sizes"]
    if match["dynamic"]:
        declaration = f"{kind}* const {name} = static_cast<{kind}*>(host::dynamic_shared());"
    else:
        declaration = (
            f"using {name}_shared_t = {kind} {sizes}; static host::Slot {name}_slot; auto& {name} = "
            f"*static_cast<{name}_shared_t*>(host::static_shared({name}_slot, sizeof({name}_shared_t), {align}));"
        )
    return declaration + "\n" * match[0].count("\n")


class Unit(NamedTuple):
    """C++ source: what many units begin with, and the rest."""

    head: str
    rest: str


def unit(text: str, entry: str, warp_size: int = 32) -> Unit:
    """The C++ source that is compiled for the kernel `entry` of `text`."""
    cluster = _CLUSTER.search(text)
    text = _SHARED.sub(_declare_shared, _UNROLL.sub("", text))
    return Unit(
        precompiled.head(warp_size),
        f'namespace pyops_kernel {{\n{text}\n}}\n#line 1 "kernels_cu/host/entry.h"\n'
        f'extern "C" HOST_API HOST_UNCHECKED void pyops_host_entry(void** parameters) {{\n'
        f"    host::call(pyops_kernel::{entry}, parameters);\n}}\n"
        f'extern "C" HOST_API unsigned pyops_host_cluster() {{\n'
        f"    using namespace pyops_kernel;\n    return {cluster[1] if cluster else 1};\n}}\n",
    )


def build(kind: Kind, code: Unit, libraries: tuple[str, ...], kernel: str, constants: str) -> tuple[str, str]:
    """(path of the shared object of `code`, its origin: ``"compiled"`` or ``"disk"``); see `Kind`.

    It is compiled unless the cache folder holds it undamaged.

    If several processes need it, one compiles and the others wait. If the cache folder cannot be written, a folder of
    this process replaces it.
    """
    chain = toolchain.preferred()
    flags = toolchain.compile_flags(chain, kind)
    name = _name(chain, flags, code, libraries)
    for place in filter(None, (_kept(), _stand_in)):
        if folders.read_sealed(os.path.join(place, name)) is not None:  # loading a damaged one would kill the process
            return os.path.join(place, name), "disk"
    while True:
        path = os.path.join(folder(), name)
        try:
            return path, _make(chain, flags, kind, code, libraries, path, kernel, constants)
        except OSError as error:
            _leave(error)


def _name(chain: toolchain.Toolchain, flags: tuple[str, ...], code: Unit, libraries: tuple[str, ...]) -> str:
    """The name of a shared object: the digest of all that it is made of."""
    parts = (
        *code,
        chain.name,
        chain.version,
        platform.machine(),
        *flags,
        *toolchain.link_flags(chain),
        *map(os.path.basename, libraries),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".so"


def _make(
    chain: toolchain.Toolchain,
    flags: tuple[str, ...],
    kind: Kind,
    code: Unit,
    libraries: tuple[str, ...],
    path: str,
    kernel: str,
    constants: str,
) -> str:
    """Compile a unit to `path`; returns its origin, ``"disk"`` if another process has compiled it meanwhile.

    Raises OSError if the folder cannot be written, also if the compiler reports that.
    """
    started = time.perf_counter()
    with log.waiting(f"compiling {kernel} for the CPU"), folders.worked_in(path + folders.SUFFIX) as scratch:
        if folders.read_sealed(path) is not None:  # compiled by the process that was waited for
            return "disk"
        built = os.path.join(scratch, "built.so")
        link = (f"{built}.o", *libraries, f"-Wl,-soname,{os.path.basename(path)}", *toolchain.link_flags(chain))
        try:
            _compile(chain, flags, kind, code, f"{built}.o", kernel, constants)
            _run(chain, (*link, "-o", built), "", kernel, constants)
        except CompileError:
            probe(scratch)
            raise
        with open(built, "rb") as opened:
            content = opened.read()
        folders.write_sealed(built, content)
        os.replace(built, path)
    log.ready(kernel, constants, "host", f"compiled in {(time.perf_counter() - started) * 1e3:.0f} ms")
    return "compiled"


def probe(folder: str) -> None:
    """Raises OSError if the folder is gone, or lacks space for a file several times the size of a kernel."""
    with tempfile.TemporaryFile(dir=folder) as opened:
        opened.write(bytes(_PROBE_BYTES))
        opened.flush()


def _compile(
    chain: toolchain.Toolchain, flags: tuple[str, ...], kind: Kind, code: Unit, output: str, kernel: str, constants: str
) -> None:
    """Compile a unit: after its precompiled head, where that can be had."""
    arguments = ("-c", "-x", "c++", "-", "-o", output, *flags)
    if kind == "kernel" and chain.dialect == "gcc" and (head := precompiled.options(chain, flags, code.head, folder())):
        with suppress(CompileError):  # names the kernel's own error only with all of the text
            _run(chain, (*head, *arguments), code.rest, kernel, constants)
            return
    _run(chain, arguments, code.head + code.rest, kernel, constants)


def _run(chain: toolchain.Toolchain, arguments: tuple[str, ...], code: str, kernel: str, constants: str) -> None:
    done = subprocess.run((*chain.command, *arguments), input=code, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(kernel, constants, "\n".join(done.stderr.strip().splitlines()[:20]))


@cache
def _kept() -> str:
    """The folder of shared objects inside that of CuPy's kernels."""
    return os.path.join(cache_folder(), "pyops-host")


_stand_in: str | None = None  # this process's folder, once the cache folder could not be written


def folder() -> str:
    """Where shared objects are made: a folder inside that of CuPy's kernels, or one for this process."""
    if _stand_in is None:
        try:
            _prepare()
        except OSError as error:
            _leave(error)
    return _stand_in or _kept()


@cache
def _prepare() -> None:
    os.makedirs(_kept(), exist_ok=True)
    with tempfile.TemporaryFile(dir=_kept()):
        pass
    folders.sweep(_kept())


def _leave(error: OSError) -> None:
    """Make shared objects in a folder of this process from now on. Raises `error` if that would not help."""
    global _stand_in
    if _stand_in is not None or error.errno in (errno.EMFILE, errno.ENFILE):
        raise error
    _stand_in = folders.of_process("pyops-host-")
    warnings.warn(f"kernel cache {_kept()}: {error}; kernels are cached in {_stand_in}", stacklevel=2)
