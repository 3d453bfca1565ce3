"""Replace functions of vLLM in every module of vLLM that has imported them by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


class Replaced:
    """A set of replaced functions of vLLM, which `undo` restores."""

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
        """Restore vLLM's functions, also in modules that were imported in the meantime."""
        for original, ours in reversed(self._pairs):
            _rename(ours.__name__, ours, original)
        self._pairs.clear()


def _rename(name: str, old: Any, new: Any) -> None:
    """In every module of vLLM that has `old` as the global `name`, set it to `new`."""
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == "vllm" and vars(module).get(name) is old:
            setattr(module, name, new)
