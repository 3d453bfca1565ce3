"""One refusal of this library that vLLM does not make."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """An argument that an op of vLLM takes and this library's refuses: which, what is refused, and why."""

    argument: str
    what: str
    why: str
