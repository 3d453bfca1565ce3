"""The part `jit_monitor`: kernels that this library compiles after vLLM's warm-up are reported by vLLM's monitor.

vLLM 0.33 watches compilers of kernels during inference: ``--jit-monitor-mode`` says whether a compile is a warning or
an error. A kernel that is read from the cache folder or from a bundle is no compile.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from ...._core.log import compiling

_MONITOR = "vllm.utils.jit_monitor"
_watch: _Watch | None = None


class _Watch(logging.Filter):
    """Sees the records of `pyops.compile` before any handler, and drops those that would not have been made without it.

    Attributes:
        monitor: vLLM's module.
        level: the level of the logger before.
    """

    def __init__(self, monitor: Any) -> None:
        super().__init__()
        self.monitor, self.level = monitor, compiling.level

    def filter(self, record: logging.LogRecord) -> bool:
        # A finished kernel is reported with its name and constants, and how it was made.
        if record.levelno == logging.INFO and isinstance(record.args, tuple) and len(record.args) == 2:
            kernel, how = map(str, record.args)
            if how.startswith("compiled") and self.monitor.is_active():
                self.monitor._handle_jit_event(backend="pyops", event="compiled a kernel", fn_name=kernel, detail=how)
        parent = logging.getLogger("pyops").getEffectiveLevel()
        return record.levelno >= (self.level or parent)


def install() -> str:
    """Report compiles to vLLM's monitor.

    Returns:
        One line for the log; "" for a vLLM without the monitor, or if compiles are reported already.
    """
    global _watch
    try:
        monitor = importlib.import_module(_MONITOR)
    except ImportError:
        return ""
    if _watch is not None or not (hasattr(monitor, "is_active") and hasattr(monitor, "_handle_jit_event")):
        return ""
    _watch = _Watch(monitor)
    compiling.addFilter(_watch)
    compiling.setLevel(logging.INFO)
    return "compiles during inference are reported"


def uninstall() -> None:
    """Report nothing to vLLM's monitor."""
    global _watch
    if _watch is not None:
        compiling.removeFilter(_watch)
        compiling.setLevel(_watch.level)
        _watch = None
