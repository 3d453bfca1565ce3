"""Kernels that live for one test."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from pyops._core import launch
from pyops._core.dtypes import DType
from pyops._core.kernel import Kernel


@pytest.fixture
def kernel() -> Callable[[str, str], Kernel]:
    """kernel(name, text): a Kernel over a text that no file holds."""
    return lambda name, text: Kernel(f"test/{name}.cu", text=text)


@pytest.fixture
def run_on_host(kernel: Callable[[str, str], Kernel]) -> Callable[..., None]:
    """run_on_host(text, grid=, block=, shared=0, **parameters): run the one kernel of a text on the CPU.

    Constants, which have upper-case names, and parameters are given by name: numpy arrays, None, ints and floats.
    """

    def run(text: str, grid: Any, block: int, shared: int = 0, **values: Any) -> None:
        (name,) = re.findall(r'extern "C" __global__ void (?:LAUNCH_BOUNDS\(.*?\)\s+)?(\w+)', text)
        made = kernel(name, text)
        constants = {key: value for key, value in values.items() if key.isupper() or isinstance(value, DType)}
        given = {key: value for key, value in values.items() if key not in constants}
        tensors = {key: value for key, value in given.items() if value is None or isinstance(value, numpy.ndarray)}
        floats = {key: value for key, value in given.items() if isinstance(value, float)}
        fixed = {key: value for key, value in given.items() if key not in tensors and key not in floats}
        words = [0 if value is None else value.ctypes.data for value in tensors.values()]
        one = made(**constants).launch(grid, block, shared, **fixed)
        launch.run_on_host([one], tuple(tensors), tuple((name, "d") for name in floats), {}, *words, *floats.values())

    return run
