"""A driver that records the launches of kernels."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from pyops._core.launch import launch
from pyops._core.launch.kernel import Kernel, Launch
from pyops._core.system import device
from pyops._core.system import driver as driver_calls
from pyops._core.text.source import TENSOR_MAP

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
