"""The report on a model, module by module."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple


class Entry(NamedTuple):
    """The report on one module.

    Attributes:
        name: the name of the module in the model; "" for the model itself.
        kind: the name of its class.
        op: the ops that compute it now; "" if transformers does.
        why: the reason why it is left to transformers; "" if it is not.
    """

    name: str
    kind: str
    op: str
    why: str


class Report:
    """The result of `accelerate`. It prints as a table with one row for each kind of module.

    Attributes:
        entries: one for each module with its own weights or with a forward defined by transformers, in model order.

    Examples:
        >>> found = report(accelerate(model))
        >>> found.ops["LlamaMLP"], [*found.left_alone]
        ('silu_and_mul', [])
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    @property
    def replaced(self) -> dict[str, int]:
        """{class of modules: number of replaced modules}."""
        return dict(Counter(entry.kind for entry in self.entries if entry.op))

    @property
    def ops(self) -> dict[str, str]:
        """{class of replaced modules: the ops that compute them; those of the last module if modules differ}."""
        return {entry.kind: entry.op for entry in self.entries if entry.op}

    @property
    def left_alone(self) -> dict[str, str]:
        """{name of a module: the reason why it is left to transformers}."""
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
