"""Ctrl-C while ``python -m pyops`` or the script ``pyops`` is still importing ends the process, without a traceback.

The package imports this module first. `pyops.__main__.script` has Python handle Ctrl-C again.
"""

from __future__ import annotations

import signal
import sys


def _is_program() -> bool:
    """Whether this process runs the command line. While ``-m`` imports a package, it stands for the program's name."""
    program: str = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m" and "pyops" in sys.orig_argv:
        option = sys.orig_argv[sys.orig_argv.index("pyops") - 1]  # -m, or several in one, such as -Im
        return option.startswith("-") and option.endswith("m")
    return program.endswith("/pyops")


if _is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
