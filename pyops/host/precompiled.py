"""What every kernel's unit begins with, precompiled: parsing it is a quarter of a kernel's compilation."""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache

from .._core.system import folders
from .._core.text import source
from . import toolchain


@cache
def head(warp_size: int) -> str:
    """The text that a unit begins with."""
    return f"#define PYOPS_HOST_WARP_SIZE {warp_size}\n{source.inline('host/entry.h')}\n"


@cache
def options(chain: toolchain.Toolchain, flags: tuple[str, ...], text: str, folder: str) -> tuple[str, ...]:
    """The options of g++ that stand for a unit's head; () if it cannot be precompiled.

    The file is made unless the folder holds it undamaged. A process looks once.
    """
    digest = hashlib.sha256("\0".join((text, chain.name, chain.version, *flags)).encode()).hexdigest()[:32]
    header = os.path.join(folder, f"{digest}.h")  # g++ finds the .gch by this name; the header may be missing
    path = f"{header}.gch"
    if folders.read_sealed(path) is None:
        try:
            with folders.worked_in(path + folders.SUFFIX) as scratch:
                if folders.read_sealed(path) is None and not _make(chain, flags, text, scratch, path):
                    return ()  # otherwise made here, or by the process that was waited for
        except OSError:  # the folder is full, or gone: what is compiled next says so
            return ()
    return ("-include", header)


def _make(chain: toolchain.Toolchain, flags: tuple[str, ...], text: str, scratch: str, path: str) -> bool:
    made, original = os.path.join(scratch, "made"), os.path.join(scratch, "head.h")
    with open(original, "w", encoding="utf-8") as opened:
        opened.write(text)
    command = (*chain.command, "-x", "c++-header", original, "-o", made, *flags)
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    with open(made, "rb") as file:
        content = file.read()
    folders.write_sealed(made, content)
    os.replace(made, path)
    return True
