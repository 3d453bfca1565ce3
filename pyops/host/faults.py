"""The error of a kernel that ran on the host."""

from __future__ import annotations

from collections.abc import Sequence


class KernelFault(RuntimeError):
    """A fault of a kernel that ran on the host.

    Attributes:
        kind: ``"out-of-bounds global access"``, ``"divergent barrier"``, ...: docs/host.md lists them.
        kernel: source file; constants: its specialisation.
        places: (file, line) in the sources, innermost first: a function, then its call sites.
        file, line: the innermost of them; "" and 0 if unknown.
        block, thread: indices (x, y, z); thread is None where the fault belongs to no single thread.
        message: what happened there.
    """

    def __init__(
        self,
        kind: str,
        kernel: str,
        constants: str,
        message: str,
        places: Sequence[tuple[str, int]],
        block: tuple[int, int, int],
        thread: tuple[int, int, int] | None,
    ) -> None:
        super().__init__(kind, kernel, constants, message, tuple(places), block, thread)
        self.kind, self.kernel, self.constants, self.message = kind, kernel, constants, message
        self.places, self.block, self.thread = tuple(places), block, thread
        self.file, self.line = places[0] if places else ("", 0)

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.kind}: {self.message}\n"
            f"  at {called(self.places) or 'an unknown line'}\n"
            f"  in block {self.block}{f', thread {self.thread}' if self.thread else ''}\n"
            f"  of {self.kernel} {self.constants}"
        )


def called(places: Sequence[tuple[str, int]]) -> str:
    """Source lines, innermost first, as text for an error message."""
    return ", called at ".join(f"{file}:{line}" for file, line in places)


KernelFault.__module__ = "pyops"  # tracebacks show the public name
