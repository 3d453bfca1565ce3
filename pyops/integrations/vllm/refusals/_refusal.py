"""One refusal of this library that vLLM does not make."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """An argument that vLLM's op accepts and this library's refuses: its name, the refused values and the reason."""

    argument: str
    what: str
    why: str
