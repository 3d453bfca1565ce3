"""Which ops of vLLM this library serves."""

from __future__ import annotations

from collections import Counter

from ..integrations.vllm import VERSIONS, table


def text(vllm: str = VERSIONS[0]) -> str:
    """One line per op of a version of vLLM: name, state, what serves it, schema. The last line counts them."""
    entries = list(table(vllm).values())
    rows = [(f"{one.namespace}::{one.name}", one.state, one.ours or "-", one.schema) for one in entries]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1, 2)]
    lines = [
        "  ".join((*(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)), row[3])) for row in rows
    ]
    counts = Counter(one.state for one in entries)
    of_each = ", ".join(f"{counts[state]} {state}" for state in ("served", "adapted", "refused", "missing"))
    return "\n".join([*lines, f"{len(entries)} ops: {of_each}"])
