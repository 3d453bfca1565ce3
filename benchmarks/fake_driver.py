"""A fake driver that launches nothing: calls on CPU tensors run the host code of GPU calls, up to the launch.

A call runs the wrapper, its guard, the overlap test, packing and `fire[stream]()`. Only calls of the driver and queries
of a device are replaced; `_patches` lists all replacements.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import pyops
from pyops._core.launch import workspace
from pyops._core.launch.kernel import Kernel, Specialisation
from pyops._core.op import torch_library
from pyops._core.op.wrapper import NAMESPACE
from pyops._core.system import device, driver
from pyops._core.text.compiler import Compiled

_INDEX = 0
_FUNCTION = 1  # the fake address of a loaded function
_ZEROS = 1 << 20  # the fake address of zeroed memory


def _launch(*_: Any) -> None:
    """Replaces CuPy's cuLaunchKernel, which returns None on success."""


# Replaces cuLaunchKernelEx: a C function, so that ctypes converts the arguments as for a real launch. pthread_equal
# compares its first two arguments as numbers: here the address of the launch's configuration and the address of the
# kernel's function. The two addresses differ, so pthread_equal returns 0, which is the driver's status for success.
_launch_with_attributes = ctypes.CDLL(None).pthread_equal

# It also replaces cuTensorMapReplaceAddress, because the addresses of a map and its tensor always differ.
_replace_address = ctypes.PyDLL(None).pthread_equal
_replace_address.argtypes = (ctypes.c_void_p, ctypes.c_void_p)


def _encode_map(*_: Any) -> int:
    """Replaces cuTensorMapEncodeTiled."""
    return 0


def _nothing(*_: Any) -> None:
    pass


def _device_index() -> int:
    return _INDEX


def _device_count() -> int:
    return 1


def _allocate(_op: str, _index: int, _stream: int, nbytes: int) -> tuple[Any, int]:
    memory = torch.empty(nbytes, dtype=torch.uint8)
    return memory, memory.data_ptr()


def _zeros(*_: Any) -> int:
    return _ZEROS


class _Loaded:
    """The kernels that count as loaded while the fake is active. Kernel objects are not modified."""

    def __init__(self) -> None:
        self._held: dict[tuple[Kernel, tuple[Any, ...]], Compiled] = {}

    def find(self, specialisation: Specialisation) -> Compiled | None:
        return self._held.get((specialisation.kernel, specialisation.key))

    def load(self, specialisation: Specialisation) -> Compiled:
        found = self.find(specialisation)
        if found is None:
            kernel = specialisation.kernel
            found = Compiled(kernel.file, str(specialisation), _INDEX, "sm_90", 0, "fake", 0, 0, 0, _FUNCTION, None)
            self._held[kernel, specialisation.key] = found
        return found


def _patches() -> Iterator[Any]:
    """All replacements of the fake."""
    here = replace(device.host(), index=_INDEX)
    launches = _launch, _launch_with_attributes, RuntimeError
    fake = driver.Driver(*launches, _device_index, _encode_map, _replace_address)
    loaded = _Loaded()

    def get_device(_: int = _INDEX) -> device.Device:
        return here

    def get_driver() -> driver.Driver:
        return fake

    def find(specialisation: Specialisation, _: int) -> Compiled | None:
        return loaded.find(specialisation)

    def load(specialisation: Specialisation, _: int) -> Compiled:
        return loaded.load(specialisation)

    # Plans take CPU tensors for tensors on device 0, an H200.
    yield mock.patch.object(device, "host", get_device)
    yield mock.patch.object(device, "get", get_device)
    yield mock.patch.object(device, "count", _device_count)
    # Nothing is compiled, loaded or launched.
    yield mock.patch.object(Specialisation, "loaded", find)
    yield mock.patch.object(Specialisation, "load", load)
    yield mock.patch.object(driver, "get", get_driver)
    yield mock.patch.object(driver, "raise_limits", _nothing)
    yield mock.patch.object(driver, "relaxed_capture", nullcontext)
    # There is no stream, and workspaces lie in host memory.
    yield mock.patch.dict(NAMESPACE, torch_stream=operator.index)
    yield mock.patch.object(workspace, "allocate_torch", _allocate)
    yield mock.patch.object(workspace, "zeros", _zeros)
    # Every op lists the kernels that it has loaded.
    for op in pyops.registry.values():
        yield mock.patch.object(op, "specialisations", {})


@contextmanager
def fake_driver() -> Iterator[None]:
    """While the context lasts, ops take torch tensors on the CPU for tensors of a GPU, and write nothing.

    Entering and leaving drop the plans of every op. No other thread may call an op meanwhile.
    """
    torch_library.bind_torch()
    with ExitStack() as stack:
        stack.callback(_forget_plans)
        for patch in _patches():
            stack.enter_context(patch)
        _forget_plans()
        yield


def _forget_plans() -> None:
    for op in pyops.registry.values():
        op.forget()
