"""Memory that a launch on the host may access."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """Memory that a launch may access: a tensor, by its name, or a workspace."""

    name: str
    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes
