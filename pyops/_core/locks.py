"""Locks that are free in a forked child, where the threads that held them in the parent do not exist."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

_made: WeakSet[threading.Lock] = WeakSet()


def new() -> threading.Lock:
    """A lock that is reset in a forked child. The state that it guards must tolerate a half-finished update."""
    lock = threading.Lock()
    _made.add(lock)
    return lock


def _open_all() -> None:
    for lock in _made:
        lock._at_fork_reinit()  # type: ignore[attr-defined]


def waiting() -> threading.RLock:
    """A lock that fork() acquires before it forks: the state that it guards is consistent in the child."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open_all)
