"""Parts of vLLM that this library takes over by vLLM's own registries, and not as ops of torch.

A part is a module of this package, named without an underscore in front. It is imported when it is chosen, and has

    install() -> str          take over; one line that says what, or "" if there is nothing to take over here
    uninstall() -> None       give back what `install` took over
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

NAMES = tuple(sorted(one.name for one in pkgutil.iter_modules(__path__) if not one.name.startswith("_")))


def load(name: str) -> ModuleType:
    """The module of the part `name`, one of `NAMES`."""
    return importlib.import_module(f"{__name__}.{name}")
