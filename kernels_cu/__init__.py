"""CUDA/HIP kernel sources, shipped as text.

This package knows no Python beyond reading itself: `read` returns a source, `names` lists them.
`include/` holds the headers that kernels of several families use, `host/` the emulation that runs kernels on a CPU.
Every other folder is a family: its own headers, and one `.cu` per kernel with an entry named like the file.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["names", "read"]


def read(name: str) -> str:
    """Text of the source `name`, a path inside this package such as ``"norm/rms_norm.cu"``."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


@cache
def names() -> list[str]:
    """Paths of every kernel (`.cu`) and header (`.cuh`) in this package, sorted."""
    return sorted(
        f"{folder.name}/{file.name}"
        for folder in files(__name__).iterdir()
        if folder.is_dir()
        for file in folder.iterdir()
        if file.name.endswith((".cu", ".cuh"))
    )
