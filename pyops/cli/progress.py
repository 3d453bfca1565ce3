"""How far a long command has come."""

from __future__ import annotations

import sys


def show(done: float, total: float, text: str) -> None:
    """Draw the bar of ``done / total`` over the last one, on the standard error; the full one ends its line."""
    bar = "#" * int(40 * done / total)
    print(f"\r[{bar:40}] {text}", end="" if done < total else "\n", file=sys.stderr, flush=True)
