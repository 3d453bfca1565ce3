"""Kernels compiled and loaded ahead of their first call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import Any, TypeVar

from . import axes, offline
from ._core import config, log
from ._core.errors import OpError
from ._core.launch.kernel import Specialisation
from ._core.op.op import Op, registry
from ._core.system import device
from ._core.system.lazy import cupy
from ._core.text.compiler import Compiled

T = TypeVar("T")


def warmup(*names: str, model: Any = None, **values: Any) -> list[Compiled]:
    """Compile and load kernels on the current device, several at a time, running none of them.

    Without a device, kernels are loaded for the CPU if PYOPS_CPU=kernels, and otherwise nothing is: ops run by their
    reference.

    Args:
        names: ops; all of them when none is given.
        model: instead of names, a model that `pyops.models` serves: its folder or its `Config`. Every kernel that
            serving it will ever need is loaded. `values` are then arguments of `pyops.models.serving_kernels`:
            max_num_seqs, max_model_len, max_num_batched_tokens, block_size, dtype, kv_cache_dtype.
        values: axes of their examples, each one value or a list of values, such as ``hidden_size=[4096, 8192]`` or
            ``dtype="bfloat16"``. An axis that is not given keeps the example's default, but every element type the
            example offers is made ready. With no `names`, an axis applies to the ops whose example has it.

    Returns:
        What this process now holds for them; nothing where ops run by their reference.

    Raises:
        OpError: no such op, or no example of a named op has such an axis or value.
        CompileError: a kernel that did not compile.
    """
    if model is not None:
        from .models import serving_kernels

        if names:
            raise OpError(names[0], "model", "is given with names of ops")
        index = current_device()
        wanted = serving_kernels(model, device.host() if index is None else device.get(index), **values)
    else:
        index, wanted = plan(names, values)
    return [] if index is None and not config.kernels_on_cpu() else load(wanted, index)


def current_device() -> int | None:
    """The ordinal of CuPy's current device; None where there is none."""
    return cupy.cuda.runtime.getDevice() if device.count() else None


def plan(names: Sequence[str], values: Mapping[str, Any]) -> tuple[int | None, list[tuple[Op, Specialisation]]]:
    """The current device, or None, and what to load there; without one, what would be for a model of a device."""
    index = current_device()
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
    wanted: Sequence[tuple[Op, Specialisation]], index: int | None, done: Callable[[int], None] | None = None
) -> list[Compiled]:
    """Load them on the device `index`, or for the CPU, in parallel: compilers let other threads of the process run.

    `done` is called with the number of kernels that are ready; without it, a wait of more than a second is logged.
    """
    wait = nullcontext() if done else log.waiting(f"compiling {len(wanted)} kernels")

    def load_one(op: Op, specialisation: Specialisation) -> Compiled:
        with log.quietly():
            return op.load_on_host(specialisation) if index is None else op.load(index, specialisation)

    with wait:
        if index is not None:
            open_nvrtc()
        return in_parallel([partial(load_one, *one) for one in wanted], done)


def in_parallel(jobs: Sequence[Callable[[], T]], done: Callable[[int], None] | None = None) -> list[T]:
    """The results of jobs that compile kernels, several at a time. `done` is called with how many have ended."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(job) for job in jobs]
        for count, future in enumerate(as_completed(futures), start=1):
            future.result()
            if done:
                done(count)
    return [future.result() for future in futures]


@cache
def open_nvrtc() -> None:
    """Let NVRTC open its own libraries: if two threads make it do so at a time, one of them fails.

    Nothing happens where there is no NVRTC: kernels may come from a bundle, or be the host backend's.
    """
    with suppress(Exception):
        offline.compile("", "", "", "sm_80")
