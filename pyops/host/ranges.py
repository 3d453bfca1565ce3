"""Memory that a launch on the host backend may access; the backend reports any other access as out of bounds."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """A range of memory. `name` is its name in errors: that of a tensor's argument, "a workspace" and the like."""

    name: str
    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes
