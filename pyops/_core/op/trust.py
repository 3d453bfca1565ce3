"""Trust: a kernel that has never run on GPUs of an architecture is compared with portable kernels at its first use.

The portable kernels are those that the plan function chooses for a device without instructions of its own; without any,
it is the reference. At the first use of a specialisation on a device both run on the call's operands, each into copies
of the written tensors, and rows of the results are compared. A difference beyond rounding disables the kernel for the
process. While a graph is captured nothing can be compared, and the portable kernels become part of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from typing import Any

import numpy

from .. import config, log
from ..errors import DeviceFault
from ..launch.kernel import Launch
from ..system import driver
from ..system.device import Device
from ..system.lazy import cupy, torch
from ..tensors import tensor
from .declaration import Declaration
from .index_check import as_torch, capturing, torch_stream
from .plan import Plan

# {architecture: patterns of the kernels that GPUs of it have run, with results that matched float64}
PROVEN: dict[str, tuple[str, ...]] = {"sm_90": ("*",)}
_NUM_ROWS = 256  # rows of a result that are compared
# Rounding: the difference of two results, in units of their dtype's epsilon, and as a fraction of the row's largest.
_MAX_EPSILONS, _MAX_OF_ROW = 2.0, 2.0**-9
_MAX_ZEROS = 16  # comparisons of results that were all zeros, after which a specialisation is trusted

Key = tuple[Any, ...]
_agreed: set[Key] = set()  # specialisations that agreed with portable ones, and portable ones
_zeros: Counter[tuple[Key, ...]] = Counter()  # comparisons with nothing but zeros
disabled: set[tuple[int, str]] = set()  # (device, kernel)
forget_plans: list[Callable[[], None]] = []  # drop the plans of all ops


def is_proven(kernel: str, arch: str) -> bool:
    """Whether GPUs of the architecture have run the kernel, and its results matched."""
    return any(fnmatch(kernel, pattern) for pattern in PROVEN.get(arch, ()))


def unproven(index: int, on: Device, launches: Iterable[Launch]) -> list[Launch]:
    """The launches of specialisations that must be compared before the device `index` may use them."""
    if config.trust():
        return []
    return [
        one
        for one in launches
        if not is_proven(one.specialisation.kernel.file, on.arch) and _key(index, one) not in _agreed
    ]


def settled(
    declaration: Declaration,
    library: str,
    index: int,
    on: Device,
    args: Sequence[Any],
    launches: Sequence[Launch],
    portable: Sequence[Launch] | None,
    plan_of: Callable[[Sequence[Launch] | None], Plan],
) -> Plan:
    """The plan for a call with `unproven` launches: that of `launches` if results agree, else the portable one.

    `portable`: the launches of portable kernels; None: there are none, and `plan_of` makes a plan of the reference.
    """
    _agreed.update(_key(index, one) for one in portable or ())
    doubtful = unproven(index, on, launches)
    if not doubtful:
        return plan_of(launches)
    files = sorted({one.specialisation.kernel.file for one in doubtful})
    names, safe = ", ".join(files), plan_of(portable)
    if any((index, file) in disabled for file in files):
        return safe
    if index >= 0 and capturing(library, index):
        log.library.warning(
            "%s: %s has not been compared with portable kernels on this %s, so the graph that is captured has those; "
            "one call before the capture would compare them",
            *(declaration.name, names, on.arch),
        )
        safe.keep = False
        return safe
    ours, keys = plan_of(launches), tuple(_key(index, one) for one in doubtful)
    try:
        with driver.outside_capture(declaration.name, "compare kernels") if index >= 0 else nullcontext():
            wrong, nonzero = _compared(declaration, library, args, safe, ours)
    except RuntimeError as error:
        if index < 0:
            raise
        what = f"{names}, which no {on.arch} has run before, or a portable kernel failed"
        raise DeviceFault(
            f"{declaration.name}: {what}: {error}; please report it with {_described(doubtful)}"
        ) from error
    if wrong:
        disabled.update((index, file) for file in files)
        for forget in forget_plans:
            forget()
        log.library.warning(
            "%s: %s on %s differs from portable kernels, in %s. This process uses portable kernels instead, but not "
            "in graphs captured before. Please report this with the output of `python -m pyops doctor` and: %s",
            *(declaration.name, names, on.name or on.arch, wrong, _described(doubtful)),
        )
        return safe
    _zeros[keys] += not nonzero
    if nonzero or _zeros[keys] > _MAX_ZEROS:
        _agreed.update(keys)
    else:
        ours.keep = False  # zeros prove little: the next call is compared, too
    return ours


def _key(index: int, one: Launch) -> Key:
    kernel = one.specialisation.kernel
    return index, kernel.file, kernel.entry, one.specialisation.key


def _described(launches: Sequence[Launch]) -> str:
    each = (f"{one.specialisation.kernel.file} {one.specialisation} grid={one.grid}" for one in launches)
    return "; ".join(each)


def _compared(declaration: Declaration, library: str, args: Sequence[Any], safe: Plan, ours: Plan) -> tuple[str, bool]:
    """(how the results of two plans differ beyond rounding, or nothing; whether one of them is not zero)"""
    sampled: list[list[Any]] = []
    for plan in safe, ours:
        pairs = zip(declaration.parameters, args, strict=True)
        copies = [_copy(value) if p.written and value is not None else value for p, value in pairs]
        plan.run(*copies)
        with torch.no_grad(), torch_stream() if library == "cupy" else nullcontext():
            written = declaration.written_of(copies)
            sampled.append([_rows(one) for one in (written if library == "torch" else as_torch(written))])
    names = [p.name for p, value in zip(declaration.parameters, args, strict=True) if p.written and value is not None]
    found = [_difference(*pair) for pair in zip(*sampled, strict=True)]
    wrong = [f"{name}: {one}" for name, one in zip(names, found, strict=True) if one]
    return "; ".join(wrong), any(bool(one.double().any()) for one in sampled[0])


def _copy(value: Any) -> Any:
    """A copy of a tensor with its strides."""
    library = tensor.library_of(value)
    strides = value.stride() if library == "torch" else [stride // value.dtype.itemsize for stride in value.strides]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True) if size)
    memory = tensor.new(value, (reach,))
    if library == "torch":
        return memory.as_strided(value.shape, strides).copy_(value)
    strided = (cupy if library == "cupy" else numpy).lib.stride_tricks.as_strided
    made = strided(memory, value.shape, value.strides)
    made[...] = value
    return made


def _rows(value: Any) -> Any:
    """Rows of a tensor from its first to its last."""
    rows = value.reshape(1, -1) if value.ndim < 2 else value.flatten(0, -2)
    count, last = min(len(rows), _NUM_ROWS), max(0, len(rows) - 1)
    return rows[torch.linspace(0, last, count, dtype=torch.float64, device=rows.device).round().long()]


def _difference(expected: Any, found: Any) -> str | None:
    """How two results of a dtype differ beyond rounding."""
    if expected.numel() == 0:
        return None
    if expected.dtype.is_floating_point:
        limits = torch.finfo(expected.dtype)
        beyond = 2.0 * limits.max
        a, b = (x.double().nan_to_num(nan=0.0, posinf=beyond, neginf=-beyond) for x in (expected, found))
        largest = a.abs().where(a.abs() < beyond, 0.0).amax(-1, keepdim=True)
        allowed = _MAX_EPSILONS * limits.eps * a.abs().maximum(b.abs()) + _MAX_OF_ROW * largest + limits.tiny
        wrong = ((a - b).abs() > allowed) | (expected.isnan() != found.isnan())
    else:  # rounded results may differ by one
        a, b = expected.double(), found.double()
        allowed, wrong = torch.ones_like(a), (a - b).abs() > 1
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements compared, the first {expected[at].item():.6g} by portable "
        f"kernels and {found[at].item():.6g}, where rounding makes {allowed[at].item():.2g}"
    )
