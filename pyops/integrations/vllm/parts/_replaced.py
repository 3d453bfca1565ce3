"""Functions of vLLM that others stand for, wherever vLLM's modules have imported them by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


class Replaced:
    """Functions of vLLM that are replaced by others, until `undo`."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []  # (vLLM's, ours)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def function(self, module: str, name: str, make: Callable[[Any], Any]) -> None:
        """Replace the function `name` of the module by ``make(vLLM's function)``."""
        original = getattr(importlib.import_module(module), name)
        ours = make(original)
        ours.__name__ = name
        _rename(name, original, ours)
        self._pairs.append((original, ours))

    def undo(self) -> None:
        """Put vLLM's back, also in modules that were imported since."""
        for original, ours in reversed(self._pairs):
            _rename(ours.__name__, ours, original)
        self._pairs.clear()


def _rename(name: str, old: Any, new: Any) -> None:
    """Where a module of vLLM has `old` under this name, have it have `new`."""
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == "vllm" and vars(module).get(name) is old:
            setattr(module, name, new)
