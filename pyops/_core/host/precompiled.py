"""What every kernel's unit begins with, precompiled: parsing it is a quarter of a kernel's compilation."""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache

from .. import folders, source
from . import toolchain


@cache
def head(warp_size: int) -> str:
    """The text that a unit begins with."""
    return f"#define PYOPS_HOST_WARP_SIZE {warp_size}\n{source.inline('host/entry.h')}\n"


@cache
def options(chain: toolchain.Toolchain, flags: tuple[str, ...], text: str, folder: str) -> tuple[str, ...] | None:
    """The options that stand for a unit's head; None where the compiler makes no such file.

    The file is made unless the folder holds it undamaged. A process looks once.
    """
    digest = hashlib.sha256("\0".join((text, chain.name, chain.version, *flags)).encode()).hexdigest()[:32]
    if chain.dialect == "gcc":  # finds the file beside a header that need not be there
        header = os.path.join(folder, f"{digest}.h")
        path, taken = f"{header}.gch", ("-include", header)
    else:
        path = os.path.join(folder, f"{digest}.pch")
        taken = ("-include-pch", path)
    if folders.read_sealed(path) is not None:
        return taken
    with folders.worked_in(path + folders.SUFFIX) as scratch:
        if folders.read_sealed(path) is None:  # otherwise made by the process that was waited for
            made, original = os.path.join(scratch, "made"), os.path.join(scratch, "head.h")
            with open(original, "w", encoding="utf-8") as opened:
                opened.write(text)
            # g++ reads no header from standard input; clang would remember where the header was.
            given = original if chain.dialect == "gcc" else "-"
            command = (*chain.command, "-x", "c++-header", given, "-o", made, *flags)
            if subprocess.run(command, input=text, capture_output=True, text=True, check=False).returncode:
                return None
            with open(made, "rb") as opened_made:
                content = opened_made.read()
            folders.write_sealed(made, content)
            os.replace(made, path)
    return taken
