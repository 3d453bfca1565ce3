"""GPU time of an op and its rivals on the same tensors, once each is found to agree with the op's reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .accuracy import Check
from .rivals import Builder, builders, ours, skip
from .shapes import Case
from .timing import Effort, gpu_us, num_sets


def measure(case: Case, against: Sequence[str], effort: Effort) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """(row of times, skipped rivals). Raises when pyops itself fails or disagrees with the reference."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    check = Check(case)
    sets = [case.arguments(seed) for seed in range(num_sets(case.nbytes, l2_bytes, effort.sets))]

    # Numbers that are edited over and over, say divided by a penalty, would become such as no caller has.
    edited = [arg for args in sets for p, arg in zip(case.op.parameters, args, strict=True) if p.role == "inout"]
    renew = [partial(arg.copy_, arg.clone()) for arg in edited if arg is not None]

    def contend(build: Builder) -> dict[str, Any]:
        error = check(build)
        return {"us": gpu_us([build(*args) for args in sets], effort, renew), "error": error}

    times = {"pyops": contend(ours(case.op))}
    found, skips = builders(case.op, against)
    for name, build in found.items():
        try:
            times[name] = contend(build)
        except Exception as error:
            skips.append(skip(name, case.op, error))
    cold = len(sets) * case.nbytes > 3 * l2_bytes
    row = {**case.labels, "bytes": case.traffic, "sets": len(sets), "cold": cold, "times": times}
    return row, skips
