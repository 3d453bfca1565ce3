"""Ctrl-C while ``python -m pyops`` or the script ``pyops`` is still importing ends the process, without a traceback.

The package imports this module first. `pyops.__main__.script` has Python handle Ctrl-C again.
"""

from __future__ import annotations

import signal
import sys


def _is_program() -> bool:
    """Whether this process runs the command line. While ``-m`` imports a package, it stands for the program's name."""
    program, *_ = getattr(sys, "argv", None) or [""]
    return program.endswith("/pyops") or (program == "-m" and sys.orig_argv[sys.orig_argv.index("-m") + 1] == "pyops")


if _is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
