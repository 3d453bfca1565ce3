"""Parts of vLLM that this library replaces through vLLM's own registries, not as ops of torch.

A part is a module of this package without a leading underscore. It is imported when it is selected, and has

    install() -> str          replace the part; returns a line for the log, or "" if nothing can be replaced here
    uninstall() -> None       undo `install`
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

NAMES = tuple(sorted(one.name for one in pkgutil.iter_modules(__path__) if not one.name.startswith("_")))


def load(name: str) -> ModuleType:
    """The module of the part `name`, one of `NAMES`."""
    return importlib.import_module(f"{__name__}.{name}")
