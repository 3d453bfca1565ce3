"""Locks that a forked child finds open: the threads that held them in the parent do not exist in the child."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

_made: WeakSet[threading.Lock] = WeakSet()


def new() -> threading.Lock:
    """A lock that a fork opens in the child. What it guards must allow for work that was left half done."""
    lock = threading.Lock()
    _made.add(lock)
    return lock


def _open_all() -> None:
    for lock in _made:
        lock._at_fork_reinit()  # type: ignore[attr-defined]


def waiting() -> threading.RLock:
    """A lock that a fork waits for: what it guards is whole in the child."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open_all)
