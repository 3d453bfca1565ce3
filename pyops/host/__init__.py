"""Kernels on the CPU: docs/host.md. A file imports only files above it, and `pyops._core`:

faults                          the error of a kernel
lines interruptible toolchain   source lines of a fault; Ctrl-C; the C++ compilers of this machine
precompiled build               the head of every unit, precompiled; from text to a shared object
ranges                          memory that a launch may access
run                             schedules and faults; a loaded kernel, and its launch
ranks launch                    several ranks as one launch; the launches of a call

`import pyops` imports `faults`, and `ranks`, by which collective ops find their world. The first kernel imports the
rest.
"""

from __future__ import annotations

from .._core.launch import backend


def _launch() -> backend.Backend:
    from . import launch

    return launch


backend.register(_launch)
