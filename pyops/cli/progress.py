"""A progress bar and a status line for long commands, drawn on standard error if that is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .._core import log

_PERIOD = 1.0  # seconds between two drawings of a status
_ERASE = "\r\033[K"


def show(done: float, total: float, text: str) -> None:
    """Redraw the bar at ``done / total``. A full bar ends its line."""
    if sys.stderr.isatty():
        _draw(f"\r[{'#' * int(40 * done / total):40}] {text}" + "\n" * (done >= total))


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Say what goes on, and for how many seconds, on one line that is erased when the block ends.

    A thread draws the line every second, also while a call of the block takes longer. The block is given a function
    that replaces the text. Compiles of the block that take long are not logged.
    """
    started, over, texts = time.monotonic(), threading.Event(), [text]

    def draw() -> None:
        while True:
            _draw(f"{_ERASE}{texts[0]}, {time.monotonic() - started:.0f} s")
            if over.wait(_PERIOD):
                return _draw(_ERASE)

    def replace(text: str) -> None:
        texts[0] = text

    with log.quietly():
        if not sys.stderr.isatty():
            yield replace
            return
        thread = threading.Thread(target=draw, name="pyops status", daemon=True)
        thread.start()
        try:
            yield replace
        finally:
            over.set()
            thread.join()


def _draw(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
