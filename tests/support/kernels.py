"""Kernels that live for one test: fixtures of tests/core and tests/host, and functions that run a text on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import pyops
from pyops._core.launch.kernel import Kernel
from pyops._core.tensors.dtypes import DType
from pyops.host import launch
from pyops.testing import SCHEDULES, scheduled

Run = Callable[..., None]


@pytest.fixture
def kernel() -> Callable[[str, str], Kernel]:
    """kernel(name, text): a Kernel over a text that no file holds."""
    return lambda name, text: Kernel(f"test/{name}.cu", text=text)


def launched(text: str, grid: Any, block: int, shared: int = 0, **values: Any) -> None:
    """Run the one kernel of a text on the CPU.

    Constants, which have upper-case names, and parameters are given by name: numpy arrays, None, ints and floats.
    """
    (name,) = re.findall(r'extern "C" __global__ void (?:\w+\(.*?\)\s+)*(\w+)', text)
    made = Kernel(f"test/{name}.cu", text=text)
    constants = {key: value for key, value in values.items() if key.isupper() or isinstance(value, DType)}
    given = {key: value for key, value in values.items() if key not in constants}
    tensors = {key: value for key, value in given.items() if value is None or isinstance(value, numpy.ndarray)}
    floats = {key: value for key, value in given.items() if isinstance(value, float)}
    fixed = {key: value for key, value in given.items() if key not in tensors and key not in floats}
    words = [0 if value is None else value.ctypes.data for value in tensors.values()]
    one = made(**constants).launch(grid, block, shared, **fixed)
    extents = [0 if value is None else value.nbytes for value in tensors.values()]
    runtime = tuple((name, "d") for name in floats)
    launch.run_launches([one], tuple(tensors), extents, runtime, {}, *words, *floats.values())


@pytest.fixture
def run_on_host() -> Callable[..., None]:
    """run_on_host(text, grid=, block=, shared=0, **parameters): `launched`."""
    return launched


def with_fault(text: str) -> str:
    """The text with what stands in `/*FAULT: new*/ old /*END*/` replaced by new."""
    return re.sub(r"/\*FAULT:(.*?)\*/.*?/\*END\*/", r"\1", text, flags=re.DOTALL)


def line_of(text: str, what: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), start=1) if what in line)


@pytest.fixture
def caught(run_on_host: Run) -> Callable[..., pyops.KernelFault]:
    """caught(kinds, text, **launch): the fault of a text under every schedule. Without what it injects it is right.

    Which of several kinds it is depends on the schedule. `right` is called after each run without a fault.
    """

    def check(
        kinds: str | tuple[str, ...], text: str, right: Callable[[], bool] = lambda: True, **how: Any
    ) -> pyops.KernelFault:
        for schedule in SCHEDULES:
            with scheduled(schedule):
                run_on_host(re.sub(r"/\*(FAULT:.*?|END)\*/", "", text, flags=re.DOTALL), **how)
            assert right()
        wrong = with_fault(text)
        first = None
        for schedule in SCHEDULES:  # whatever the schedule
            with scheduled(schedule), pytest.raises(pyops.KernelFault) as caught:
                run_on_host(wrong, **how)
            fault = caught.value
            assert fault.kind == kinds or fault.kind in kinds, fault
            assert str(fault).startswith(f"{fault.kernel}: {fault.kind}: ")
            if fault.kind != "missing proxy fence":  # a thread does not race with itself
                assert f"that thread {fault.thread} has" not in fault.message
            assert fault.file.startswith("kernels_cu/") or fault.kind == "stack overflow"
            if "// HERE" in wrong:
                assert ("kernels_cu/" + fault.kernel, line_of(wrong, "// HERE")) in fault.places, fault
                assert f"{fault.kernel}:{line_of(wrong, '// HERE')}" in str(fault)
            first = first or fault
        assert first is not None
        return first

    return check
