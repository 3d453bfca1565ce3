"""What runs kernels on the CPU. The core knows only this of `pyops.host`, which registers itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..text.compiler import Compiled
from .kernel import Launch, Specialisation
from .layout import Runtime


class Backend(Protocol):
    """The host backend, as a call needs it."""

    def warp_size(self) -> int:
        """Lanes of a warp in this thread's launches: 32 or 64."""

    def loaded(self, specialisation: Specialisation) -> bool:
        """Whether this process already holds the kernel for the CPU."""

    def load(self, specialisation: Specialisation) -> Compiled:
        """The kernel compiled for the CPU, at most once per process. Its device is -1."""

    def run_launches(
        self,
        launches: Sequence[Launch],
        tensors: tuple[str, ...],
        extents: Sequence[int],
        runtime: Runtime,
        scalars: dict[str, Any],
        *words: Any,
    ) -> None:
        """Run launches one after another, with the words that a call on a device would pack.

        The kernels may access `extents` bytes of each of `tensors`, and their workspaces.
        """


_load: Callable[[], Backend]


def register(load: Callable[[], Backend]) -> None:
    """`load` imports the backend. It is called when a kernel runs on the CPU."""
    global _load
    _load = load


def get() -> Backend:
    return _load()
