"""Host time: what an eager call costs the thread that makes it, and what the first call with a new size costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .rivals import Builder, builders, ours, skip
from .shapes import Case
from .timing import Effort, host_us

_NEW_SIZES = range(301, 401)  # between the row counts at which kernels change their geometry


def measure(case: Case, against: Sequence[str], effort: Effort) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """(row of host times, skipped contenders): pyops on torch tensors, on cupy arrays and as a torch op, and rivals."""
    op = case.op
    args = case.arguments()
    row = {**case.labels, "times": {"pyops": host_us(ours(op)(*args), calls=effort.eager_calls)}}
    found: dict[str, Builder] = {
        "cupy": _on_cupy(case),
        "torch.ops": partial(partial, getattr(torch.ops.pyops, op.name)),
    }
    rivals, skips = builders(op, against)
    for name, build in {**found, **rivals}.items():
        try:
            row["times"][name] = host_us(build(*args), calls=effort.eager_calls)
        except Exception as error:
            skips.append(skip(name, op, error))
    if "num_tokens" in case.axes:
        row |= plan_miss(case)
    return row, skips


def plan_miss(case: Case) -> dict[str, Any]:
    """Median host time of the first call with each of 100 new token counts, and how many of them compiled a kernel."""
    calls = [ours(case.op)(*Case(case.op, {**case.axes, "num_tokens": n}).arguments()) for n in _NEW_SIZES]
    first, *rest = calls
    first()
    compiled, times = len(case.op.compiled()), []
    for call in rest:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return {"plan_miss_us": statistics.median(times), "recompiled": len(case.op.compiled()) - compiled}


def _on_cupy(case: Case) -> Builder:
    return lambda *args: ours(case.op)(*(to_cupy(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))


def to_cupy(tensor: torch.Tensor) -> Any:
    """A cupy array over the tensor's memory."""
    import cupy
    import ml_dtypes

    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):  # DLPack carries the bits under an integer's name
        bits = tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)
        return cupy.from_dlpack(bits).view(getattr(ml_dtypes, name))
    return cupy.from_dlpack(tensor)
