"""Import tinygrad's instruction emulator from a checkout."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

COMMIT = "a9069c177a9da9cca18593edf55acd2e6073cca6"
# SHA-256 of the files that are fixed in memory, as they are in that commit.
_FILES = {
    "emu.py": "b16551e8c6dbe901c231a98b7ce45ba510be9545b4e0c62c4eca36999c226b0d",
    "pcode.py": "98a31cbb01a7eba0743924aeead7fef3be32ef783d52ee15f0ad7383bf78abd1",
}


class Unavailable(RuntimeError):
    """The emulator cannot run on this machine."""


def emulator(checkout: Path, scratch: Path) -> Any:
    """The module, which compiles instructions by clang. Raises Unavailable.

    Where only zig is installed, a script in the folder `scratch` stands for clang.
    """
    folder = checkout / "test" / "mockgpu" / "amd"
    for name, digest in _FILES.items():
        file = folder / name
        if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise Unavailable(f"{file} is not that of tinygrad's commit {COMMIT}")
    os.environ.update(DEV="CPU", CC=_clang(scratch))
    sys.path.insert(0, str(checkout))
    return importlib.import_module("test.mockgpu.amd.emu")


def _clang(scratch: Path) -> str:
    if found := shutil.which("clang"):
        return found
    if not (zig := importlib.util.find_spec("ziglang")):
        raise Unavailable("the emulator needs clang, or the wheel ziglang, which holds it")
    script = scratch / "clang"
    script.write_text(f'#!/bin/sh\nexec "{Path(zig.origin).with_name("zig")}" clang "$@"\n')
    script.chmod(0o755)
    return str(script)
