"""A progress bar for long commands."""

from __future__ import annotations

import sys


def show(done: float, total: float, text: str) -> None:
    """Redraw the bar at ``done / total`` on standard error. A full bar ends its line."""
    bar = "#" * int(40 * done / total)
    print(f"\r[{bar:40}] {text}", end="" if done < total else "\n", file=sys.stderr, flush=True)
