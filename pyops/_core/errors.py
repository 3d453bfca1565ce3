"""What pyops raises. Every message names the op, the argument, what was expected and what came."""

from __future__ import annotations

from pathlib import Path


class OpError(ValueError):
    """A call that an op refuses, before anything is written: ``op: argument: message``."""

    def __init__(self, op: str, argument: str, message: str) -> None:
        super().__init__(op, argument, message)
        self.op, self.argument, self.message = op, argument, message

    def __str__(self) -> str:
        return f"{self.op}: {self.argument}: {self.message}"


class MissingDependencyError(ImportError):
    """A package that this call needs is not installed; the message holds the pip line that mends it."""

    def __init__(self, needed_for: str, package: str, extra: str) -> None:
        super().__init__(f"{needed_for} needs {package}, which is not installed: {pip_line(extra)}")


def pip_line(extra: str) -> str:
    """The command that installs what the extra `extra` of pyops lists."""
    root = Path(__file__).parents[2]
    # A checkout is named by its path: where pyops is not installed, pip would fetch an unrelated project of that name.
    if (root / "pyproject.toml").exists():
        return f'pip install -e "{root}[{extra}]"'
    return f'pip install "pyops[{extra}]"'


class CompileError(RuntimeError):
    """A kernel source that its compiler refused."""

    def __init__(self, kernel: str, constants: str, log: str) -> None:
        super().__init__(
            f"{kernel} did not compile for {constants}\n{log}\n"
            f"print the source with: python -m pyops source {kernel} {constants}"
        )


class CaptureError(RuntimeError):
    """A kernel that is not loaded yet was called while its stream is captured into a graph."""

    def __init__(self, op: str, kernel: str) -> None:
        super().__init__(
            f"{op}: kernel {kernel} is not loaded, and loading is not possible while a graph is captured: "
            f"call {op} once with the same dtypes and sizes before the capture, or run pyops.warmup({op!r})"
        )


class DeviceFault(RuntimeError):
    """With PYOPS_SYNC=1: the op after which the device reported an error."""


# Tracebacks show the public names.
for _error in (OpError, MissingDependencyError, CompileError, CaptureError, DeviceFault):
    _error.__module__ = "pyops"
