"""Logging of compilation with the stdlib: the logger ``pyops.compile``, a child of the library's logger ``pyops``.

At INFO it reports every kernel made ready, at WARNING a compile that still goes on after a second.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import config

library = logging.getLogger("pyops")
compiling = logging.getLogger("pyops.compile")

PATIENCE = 1.0  # seconds of waiting after which a warning says what the call waits for
_thread = threading.local()


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the standard error where the program has no handler, and does nothing otherwise, like a NullHandler.

    So a script or a notebook that configures no logging shows why a call takes seconds. In a program that configures
    logging, records go where the program says, and nowhere else.
    """

    def emit(self, record: logging.LogRecord) -> None:
        loggers = (compiling, library, logging.getLogger())
        if not any(handler is not self for logger in loggers for handler in logger.handlers):
            self.stream = sys.stderr  # a notebook, or a test, may have replaced it
            super().emit(record)


_console = _Console()
_console.setFormatter(logging.Formatter("pyops: %(message)s"))
library.addHandler(_console)
if config.log():
    library.setLevel(logging.INFO)


def ready(kernel: str, constants: str, target: str, how: str) -> None:
    """Report a kernel that is ready for `target`, an architecture or the host."""
    compiling.info("%s: %s", " ".join(filter(None, (kernel, constants, target))), how)


@contextmanager
def waiting(for_what: str) -> Iterator[None]:
    """Report `for_what` if the block takes longer than a second, while it goes on. Waits within it are not reported."""
    timer = threading.Timer(PATIENCE, compiling.warning, ("%s ...", for_what))
    timer.daemon = True
    if getattr(_thread, "reports", True):
        timer.start()
    try:
        with quietly():
            yield
    finally:
        timer.cancel()


@contextmanager
def quietly() -> Iterator[None]:
    """Report no wait of this thread until the block ends: whoever waits is told of it otherwise."""
    before = getattr(_thread, "reports", True)
    _thread.reports = False
    try:
        yield
    finally:
        _thread.reports = before
