"""What was done to a model, module by module."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple


class Entry(NamedTuple):
    """What was done with a module.

    Attributes:
        name: of the module in the model; "" for the model itself.
        kind: the name of its class.
        op: what computes it now; "" if transformers does, as before.
        why: why it is left to transformers; "" if it is not.
    """

    name: str
    kind: str
    op: str
    why: str


class Report:
    """What `accelerate` did; printed, a table with a row for modules that are alike.

    Attributes:
        entries: for each module that has weights of its own or a forward of transformers', in the order of the model.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    @property
    def replaced(self) -> dict[str, int]:
        """{class of modules: how many of them are replaced}."""
        return dict(Counter(entry.kind for entry in self.entries if entry.op))

    @property
    def ops(self) -> dict[str, str]:
        """{class of replaced modules: what computes them now, the last of them if they differ}."""
        return {entry.kind: entry.op for entry in self.entries if entry.op}

    @property
    def left_alone(self) -> dict[str, str]:
        """{name of a module: why it is left to transformers}."""
        return {entry.name: entry.why for entry in self.entries if entry.why}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        alike: dict[tuple[str, str, str], list[str]] = {}
        for name, kind, op, why in self.entries:
            done = op or f"left to transformers: {why}"
            alike.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), kind, done), []).append(name)
        rows = [(str(len(names)), kind, pattern, done) for (pattern, kind, done), names in alike.items()]
        if not rows:
            return "no module is replaced"
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            f"{count:>{wide[0]}} {kind:{wide[1]}} {pattern:{wide[2]}} {done}" for count, kind, pattern, done in rows
        )
