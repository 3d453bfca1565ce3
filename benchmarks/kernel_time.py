"""GPU times of an op and its rivals on the same tensors. Contenders that disagree with the reference are not timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .accuracy import Check
from .installed import check_gpu
from .rivals import Builder, builders, ours, skip
from .shapes import Case
from .timing import Call, Effort, gpu_us, num_sets


def argument_sets(case: Case, effort: Effort) -> tuple[list[tuple[Any, ...]], list[Call]]:
    """(sets of arguments over which calls rotate, calls that restore tensors that are edited in place).

    Without the restoring calls, values that every call edits, for example by a penalty, would become unrealistic.
    """
    sets = [case.arguments(seed) for seed in range(num_sets(case.nbytes, _l2_bytes(), effort.sets))]
    edited = [arg for args in sets for p, arg in zip(case.op.parameters, args, strict=True) if p.role == "inout"]
    return sets, [partial(arg.copy_, arg.clone()) for arg in edited if arg is not None]


def _l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def measure(case: Case, against: Sequence[str], effort: Effort) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """(row of times, skipped rivals). Raises an error if pyops itself fails or disagrees with the reference.

    Raises Fault if a rival fails and the GPU cannot be used after it.
    """
    check = Check(case)
    sets, renew = argument_sets(case, effort)

    def contend(build: Builder, any_order: bool = True) -> dict[str, Any]:
        error = check(build, any_order)
        return {"us": gpu_us([build(*args) for args in sets], effort, renew), "error": error}

    times = {"pyops": contend(ours(case.op), any_order=False)}
    found, skips = builders(case.op, against)
    for name, build in found.items():
        try:
            times[name] = contend(build)
        except Exception as error:
            skips.append(skip(name, case.op, error))
            check_gpu(name)
    cold = len(sets) * case.nbytes > 3 * _l2_bytes()
    row = {**case.labels, "bytes": case.traffic, "sets": len(sets), "cold": cold, "times": times}
    return row, skips
