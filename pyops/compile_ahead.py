"""Kernels compiled and loaded ahead of their first call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import axes
from ._core import device
from ._core.compiler import Compiled
from ._core.errors import OpError
from ._core.kernel import Specialisation
from ._core.lazy import cupy
from ._core.op import Op, registry


def warmup(*names: str, **values: Any) -> list[Compiled]:
    """Compile and load the kernels of ops on the current device, several at a time, running none of them.

    Args:
        names: ops; all of them when none is given.
        values: axes of their examples, each one value or a list of values, such as ``hidden_size=[4096, 8192]`` or
            ``dtype="bfloat16"``. An axis that is not given keeps the example's default, but every element type the
            example offers is made ready. With no `names`, an axis applies to the ops whose example has it.

    Returns:
        What this process now holds for them; empty without a device, where ops run by their reference.

    Raises:
        OpError: no such op, or no example of a named op has such an axis or value.
        CompileError: a kernel that did not compile.
    """
    index, wanted = plan(names, values)
    return [] if index is None else load(wanted, index)


def plan(names: Sequence[str], values: Mapping[str, Any]) -> tuple[int | None, list[tuple[Op, Specialisation]]]:
    """The current device, or None, and what to load there; without one, what would be for a model of a device."""
    index = cupy.cuda.runtime.getDevice() if device.count() else None
    return index, specialisations(names, values, device.model() if index is None else device.get(index))


def specialisations(
    names: Sequence[str], values: Mapping[str, Any], on: device.Device
) -> list[tuple[Op, Specialisation]]:
    """Every different specialisation that the examples of the ops plan for these axes on the device."""
    found: dict[tuple[str, str, str], tuple[Op, Specialisation]] = {}
    ops = [axes.find(name) for name in names] or list(registry.values())
    for name in values:
        if not any(name in axes.of(op) for op in ops):
            raise OpError(ops[0].name if names else "pyops", name, "is no axis of an example")
    for op in ops:
        given = values if names else {name: value for name, value in values.items() if name in axes.of(op)}
        for combination in axes.combinations(op, given, sweep=True):
            for one in axes.launches(op, combination, on):
                specialisation = one.specialisation
                found.setdefault((op.name, specialisation.kernel.file, str(specialisation)), (op, specialisation))
    return list(found.values())


def load(
    wanted: Sequence[tuple[Op, Specialisation]], index: int, done: Callable[[int], None] = lambda count: None
) -> list[Compiled]:
    """Load them on the device `index` in parallel (NVRTC lets other threads run); `done` hears how many are ready."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(op.load, index, specialisation) for op, specialisation in wanted]
        for count, future in enumerate(as_completed(futures), start=1):
            future.result()
            done(count)
    return [future.result() for future in futures]
