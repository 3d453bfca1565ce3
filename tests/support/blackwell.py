"""The host backend in place of a Blackwell GPU, and kernels with a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import kernels_cu
from pyops._core import config
from pyops._core.launch.kernel import Kernel
from pyops._core.op.op import Op
from pyops._core.system import device

BLACKWELL = replace(device.model("sm_100"), tiles=True)


@contextmanager
def on_blackwell(monkeypatch: pytest.MonkeyPatch, *ops: Op) -> Iterator[None]:
    """Calls of `ops` with CPU tensors run the kernels of a Blackwell GPU, and compare none with a portable kernel."""
    monkeypatch.setitem(device._HOST, 32, BLACKWELL)
    monkeypatch.setenv("PYOPS_TRUST", "1")
    forget(*ops)
    with config.cpu("kernels"):
        yield
    forget(*ops)


def forget(*ops: Op) -> None:
    """Drop the plans and specialisations of the ops."""
    for op in ops:
        op.forget()
        op.specialisations.clear()


def mistaken(file: str, right: str, wrong: str) -> Kernel:
    """The kernel of a file with `wrong` in place of `right`, which its text has once."""
    text = kernels_cu.read(file)
    assert text.count(right) == 1
    return Kernel(file, text=text.replace(right, wrong))
