"""Every environment switch, read on the cold path: where a plan is made or a kernel compiled."""

from __future__ import annotations

import os


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def reference() -> bool:
    """PYOPS_REFERENCE=1: run every op by its PyTorch reference, on any device."""
    return _flag("PYOPS_REFERENCE")


def sync() -> bool:
    """PYOPS_SYNC=1: wait for the device after every op, so that a fault is raised by the op that caused it."""
    return _flag("PYOPS_SYNC")


def log() -> bool:
    """PYOPS_LOG=1: print every kernel made ready, with its time and whether it was compiled or read from disk."""
    return _flag("PYOPS_LOG")
