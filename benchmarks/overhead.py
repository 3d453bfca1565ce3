"""Host time on a machine with a GPU: of an eager call, and of the first call with a new number of tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pyops._core.op.op import Op

from .rivals import Builder, builders, ours, skip
from .shapes import Case
from .timing import Call, Effort, host_us

NEW_SIZES = range(301, 401)  # token counts for which a norm or an activation uses the same kernel


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
    """Median host time of the first call with each of 99 new token counts, and how many of them compiled a kernel."""
    sized = (Case(case.op, {**case.axes, "num_tokens": n}) for n in NEW_SIZES)
    calls = [ours(case.op)(*one.arguments()) for one in sized]
    times, recompiled = misses_us(case.op, calls, time.perf_counter_ns, torch.cuda.synchronize)
    return {"plan_miss_us": statistics.median(times), "recompiled": recompiled}


def misses_us(
    op: Op, calls: Sequence[Call], clock: Callable[[], int], synchronize: Callable[[], None]
) -> tuple[list[float], int]:
    """(microseconds of each call but the first, number of kernels that these calls loaded). Every call must miss."""
    first, *rest = calls
    first()
    loaded, times = len(op.compiled()), []
    for call in rest:
        synchronize()
        start = clock()
        call()
        times.append((clock() - start) / 1e3)
    return times, len(op.compiled()) - loaded


def _on_cupy(case: Case) -> Builder:
    return lambda *args: ours(case.op)(*(to_cupy(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))


def to_cupy(tensor: torch.Tensor) -> Any:
    """A CuPy array that shares the tensor's memory."""
    import cupy
    import ml_dtypes

    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):  # DLPack lacks this dtype, so the bits are passed as integers
        bits = tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)
        return cupy.from_dlpack(bits).view(getattr(ml_dtypes, name))
    return cupy.from_dlpack(tensor)
