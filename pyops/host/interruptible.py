"""Ctrl-C while a kernel runs on the host.

Python handles a signal in the main thread, once C returns there, and a kernel may run for a minute. A watcher thread
reads the file to which Python writes signals (`signal.set_wakeup_fd`), so it notices at once and ends the launch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from .._core import locks

T = TypeVar("T")

_PAUSE = 0.05  # seconds between two attempts to end a launch


def interruptible(launch: Callable[[], T]) -> T:
    """`launch()`, a run of a kernel. In the main thread Ctrl-C ends it, unless the program handles Ctrl-C itself."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        return launch()
    return _watcher(os.getpid()).watched(launch)


class _Watcher:
    """Ends the launch of the main thread when the process is interrupted, as its time limit does."""

    def __init__(self) -> None:
        self._read, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._lock, self._launches, self._running = locks.new(), 0, False
        self._time_is_over = signal.SIGRTMIN + 5  # as in runtime.cpp
        threading.Thread(target=self._watch, name="pyops interrupts", daemon=True).start()

    def watched(self, launch: Callable[[], T]) -> T:
        before = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        # Between the beginning of `launch` and the kernel's the signal is ignored. It would end the process.
        action = signal.signal(self._time_is_over, signal.SIG_IGN)
        self._launches += 1
        self._running = True
        try:
            result = launch()
            signal.pthread_kill(threading.get_ident(), 0)  # raises the KeyboardInterrupt that is due, and sends nothing
            return result
        finally:
            with self._lock:
                self._running = False
            signal.signal(self._time_is_over, action)
            signal.set_wakeup_fd(before)

    def _watch(self) -> None:
        while number := os.read(self._read, 1):
            launch = self._launches
            while number[0] == signal.SIGINT and self._end(launch):
                time.sleep(_PAUSE)

    def _end(self, launch: int) -> bool:
        """Whether this launch, by its number, had not ended yet."""
        with self._lock:
            if not (self._running and self._launches == launch):
                return False
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, self._time_is_over)
            return True


@cache
def _watcher(process: int) -> _Watcher:
    """The watcher of a process. A fork needs its own: it has no threads but the one that forked."""
    return _Watcher()
