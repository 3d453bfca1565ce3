"""The exceptions of pyops. Every message names the op, the argument, what was expected and what was given.

Errors can be pickled: their `args` are the constructor's arguments, and `__str__` formats the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import kernels_cu

# The requirement by which pip installs the module pyops. The name pyops on PyPI belongs to another project.
DISTRIBUTION = "pyops-kernels"


class OpError(ValueError):
    """A call that an op refuses, before anything is written: ``op: argument: message``."""

    def __init__(self, op: str, argument: str, message: str) -> None:
        super().__init__(op, argument, message)
        self.op, self.argument, self.message = op, argument, message

    def __str__(self) -> str:
        return f"{self.op}: {self.argument}: {self.message}"

    def within(self, function: str, names: Mapping[str, str]) -> OpError:
        """This error as one of `function`, which called the op; `names` maps the op's argument names to its own."""
        return OpError(function, names.get(self.argument, self.argument), self.message)


class MissingDependencyError(ImportError):
    """A package that this call needs is not installed; the message holds the pip command that installs it."""

    def __init__(self, needed_for: str, package: str, extra: str) -> None:
        super().__init__(needed_for, package, extra)
        self.needed_for, self.package, self.extra = needed_for, package, extra

    def __str__(self) -> str:
        return f"{self.needed_for} needs {self.package}, which is not installed: {pip_line(self.extra)}"


def pip_line(extra: str) -> str:
    """The pip command that installs pyops with the extra `extra`."""
    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").exists():
        return f'pip install -e "{root}[{extra}]"'
    return f'pip install "{DISTRIBUTION}[{extra}]"'


class SwitchError(ValueError):
    """An environment variable of pyops has an invalid value."""


class UnsupportedGpuError(RuntimeError):
    """A GPU that is older than the kernels. It is raised before anything is compiled."""

    def __init__(self, index: int, name: str, arch: str) -> None:
        super().__init__(index, name, arch)
        self.index, self.name, self.arch = index, name, arch

    def __str__(self) -> str:
        return f"GPU {self.index}, {self.name}, is {self.arch}: the kernels need sm_75 (Turing, such as a T4) or later"


class CompileError(RuntimeError):
    """A kernel that does not compile."""

    def __init__(self, kernel: str, constants: str, log: str) -> None:
        super().__init__(kernel, constants, log)
        self.kernel, self.constants, self.log = kernel, constants, log

    def __str__(self) -> str:
        message = f"{self.kernel} did not compile for {self.constants}\n{self.log}"
        if self.kernel.endswith(".cu") and files(kernels_cu).joinpath(self.kernel).is_file():
            message += f"\nprint the source with: python -m pyops source {self.kernel} {self.constants}"
        return message


class CaptureError(RuntimeError):
    """During a stream capture the driver refused a step of an op's first call. `__cause__` is the driver's error.

    Attributes:
        op: the op, or the function, that was called.
        refused: the step that the driver refused, such as ``"load norm/rms_norm.cu"``.
    """

    def __init__(self, op: str, refused: str) -> None:
        super().__init__(op, refused)
        self.op, self.refused = op, refused

    def __str__(self) -> str:
        return (
            f"{self.op}: the driver refuses to {self.refused} while a graph is captured: call {self.op} once with the "
            "same dtypes and sizes before the capture, on the stream that is captured"
        )


class NotLoadedError(RuntimeError):
    """With PYOPS_JIT=error: a call needs a kernel that is not loaded."""

    def __init__(self, op: str, kernel: str, constants: str) -> None:
        super().__init__(op, kernel, constants)
        self.op, self.kernel, self.constants = op, kernel, constants

    def __str__(self) -> str:
        return (
            f"{self.op}: kernel {self.kernel} is not loaded, and PYOPS_JIT=error forbids to compile it: "
            f"warm up with pyops.warmup({self.op!r}, ...) or pyops.warmup(model=...)\n  {self.constants}"
        )


class DeviceFault(RuntimeError):
    """With PYOPS_SYNC=1: the device reported an error after this op."""


class RankError(RuntimeError):
    """Ranks waited for a rank that has ended, did not arrive in time, or arrived at another call. `ranks` has its
    number."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message, tuple(ranks))
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        return str(self.args[0])


# Tracebacks show the public module name.
for _error in (
    OpError,
    MissingDependencyError,
    CompileError,
    CaptureError,
    NotLoadedError,
    UnsupportedGpuError,
    DeviceFault,
    RankError,
):
    _error.__module__ = "pyops"
