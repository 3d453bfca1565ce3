"""Compiled kernels that this library keeps on disk itself, next to those that CuPy keeps."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import CompileError
from ..system import folders
from ..system.lazy import cache_folder, cupy


def load(parts: Iterable[str], suffix: str, compile: Callable[[], bytes]) -> tuple[Any, str]:
    """(module on CuPy's current device, ``"compiled"`` or ``"disk"``), compiled by only one of the processes that need
    it.

    `parts`: all that the result depends on. Raises OSError if the cache folder is unusable.
    """
    path = path_of(parts, suffix)
    origin = "disk"
    if (binary := folders.read_sealed(path)) is None:
        with folders.worked_in(path + folders.SUFFIX) as scratch:
            if (binary := folders.read_sealed(path)) is None:  # not compiled by another process since
                binary, origin = compile(), "compiled"
                folders.write_sealed(os.path.join(scratch, "built"), binary)
                os.replace(os.path.join(scratch, "built"), path)
    return of(binary), origin


@contextmanager
def compile_errors(kernel: str, constants: str) -> Iterator[None]:
    """What a compiler that CuPy calls refuses is a CompileError, with the last lines of the compiler's log."""
    try:
        yield
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(kernel, constants, "\n".join(str(error).strip().splitlines()[-20:])) from None


def path_of(parts: Iterable[str], suffix: str = ".cubin", folder: str = "") -> str:
    """The path of a file, of a bundle by default, in `folder` or CuPy's cache folder. Its name is made of `parts`."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return os.path.join(folder or cache_folder(), f"pyops-{digest}{suffix}")


def of(binary: bytes) -> Any:
    """The module of a binary or of PTX, loaded on CuPy's current device."""
    module = cupy.cuda.function.Module()
    module.load(binary)
    return module
