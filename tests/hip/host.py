"""AMD's matrix cores on the host backend, for the kernels of ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import pyops
from pyops._core.launch.kernel import Specialisation
from pyops._core.system import device


@contextmanager
def on_matrix_core(core: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """In this context, the host plans for a device with this matrix core, and emulates it. Yields the lanes of its
    warps.

    Plans made before or within it are dropped, because their keys do not distinguish the devices.
    """
    lanes, arch = {"MFMA": (64, "gfx90a"), "WMMA_11": (32, "gfx1100"), "WMMA_12": (32, "gfx1201")}[core]
    text = Specialisation.text.fget
    assert text is not None
    with monkeypatch.context() as patch:
        patch.setitem(device._HOST, lanes, device.model(arch))
        patch.setattr(Specialisation, "text", property(lambda self: f"#define PYOPS_HOST_CORE {core}\n{text(self)}"))
        for op in pyops.registry.values():
            op.forget()
        yield lanes
    for op in pyops.registry.values():
        op.forget()
