"""Kernels that live for one test, and a driver that records their launches."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest

import pyops
from pyops._core.launch import launch
from pyops._core.launch.kernel import Kernel, Launch
from pyops._core.system import device
from pyops._core.system import driver as driver_calls
from pyops._core.tensors.dtypes import DType
from pyops._core.text.source import TENSOR_MAP
from pyops.host import launch as host
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
    host.run_launches([one], tuple(tensors), extents, runtime, {}, *words, *floats.values())


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


SIZES = {"Q": 8, "q": 8, "d": 8, "f": 4, "i": 4, "I": 4, "?": 1}


class Driver:
    """Records launches, reading every parameter through its pointer as the driver would."""

    class Error(Exception):
        def __init__(self, status: int = 0) -> None:
            super().__init__(status)
            self.status = status

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.kernels: list[Kernel] = []
        self.encoded: list[tuple[Any, ...]] = []  # what encode_map was told
        self.replaced: list[int] = []  # addresses that maps were told
        self.status = 0  # of the next call that writes a map

    def bind(self, launches: Sequence[Launch], *values: Any) -> launch.Bound:
        start = len(self.kernels)
        self.kernels += [one.specialisation.kernel for one in launches]
        return launch.bind("op", 0, launches, range(start, len(self.kernels)), *values)

    def launch(
        self,
        function: int,
        x: int,
        y: int,
        z: int,
        bx: int,
        by: int,
        bz: int,
        shared: int,
        stream: int,
        at: int,
        extra: int,
    ) -> None:
        kernel = self.kernels[function]
        pointers = (ctypes.c_uint64 * len(kernel.signature.parameters)).from_address(at)
        values = {}
        for (fmt, name), pointer in zip(kernel.signature.parameters, pointers, strict=True):
            if fmt == TENSOR_MAP:
                values[name] = self.read_map(pointer)
                continue
            code = fmt[0]
            (values[name],) = struct.unpack(f"<{code}", ctypes.string_at(pointer, SIZES[code]))
        self.launches.append((kernel.file, (x, y, z), (bx, by, bz), shared, stream, values))

    # A map of this driver: its number in `encoded`, and far after it the address.

    def encode_map(self, at: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        assert at % 64 == 0
        if not (status := self._take_status()):
            self.encoded.append((kind, rank, *(tuple(one) if hasattr(one, "__len__") else one for one in rest)))
            ctypes.memmove(at, struct.pack("<Q80xQ32x", len(self.encoded) - 1, address), 128)
        return status

    def replace_address(self, at: int, address: int) -> int:
        if not (status := self._take_status()):
            self.replaced.append(address)
            ctypes.c_uint64.from_address(at + 88).value = address
        return status

    def _take_status(self) -> int:
        status, self.status = self.status, 0
        return status

    @staticmethod
    def read_map(at: int) -> tuple[int, int]:
        """(number, address)"""
        return struct.unpack("<Q80xQ32x", ctypes.string_at(at, 128))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    maps = made.encode_map, made.replace_address
    calls = driver_calls.Driver(made.launch, None, Driver.Error, lambda: 0, *maps)
    monkeypatch.setattr(driver_calls, "get", lambda: calls)
    monkeypatch.setattr(device, "get", lambda index: device.model())
    monkeypatch.setattr(device, "count", lambda: 1)
    return made


def text(name: str, parameters: str) -> str:
    return f'extern "C" __global__ void {name}({parameters}) {{}}'


def call(bound: launch.Bound, stream: int, *words: Any) -> None:
    """What a wrapper does with a plan."""
    with bound.lock:
        bound.pack(bound.buffer, 0, *words)
        bound.fire[stream]()
