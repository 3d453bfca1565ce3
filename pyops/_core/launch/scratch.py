"""Scratch: device memory that a plan asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Scratch:
    """Device memory that the launches of one call share.

    `zeroed` memory holds zeros before the first launch, and the last launch must leave zeros in it: the device keeps
    the memory for the next call on the same stream. Other memory is uninitialised at every call.
    """

    nbytes: int
    zeroed: bool = False
