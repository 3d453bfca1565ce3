"""Largest error against a float64 evaluation of the reference, for pyops and its rivals on the same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .accuracy import difference, outputs, written
from .installed import Unavailable
from .rivals import Builder, builders, ours, skip
from .shapes import Case

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class Float64(TorchFunctionMode):  # type: ignore[misc]
    """While the mode is active, float64 replaces every float type in torch calls, so that nothing is rounded."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _CASTS:
            return args[0].double()
        if function is torch.Tensor.view and args[1] in _NARROW:  # reinterpreted bits must stay in the narrow type
            return function(*args).double()
        return function(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def exact(case: Case, device: str = "cuda") -> dict[str, torch.Tensor]:
    """The outputs of the op's reference, evaluated in float64. Unavailable for an op with quantised outputs."""
    args = case.arguments(device=device)
    if any(tensor.dtype not in _NARROW for tensor in written(case, args).values()):
        raise Unavailable("writes codes, which have no float64 value to compare with")
    wide = [arg.double() if isinstance(arg, torch.Tensor) and arg.dtype in _NARROW else arg for arg in args]
    with torch.no_grad(), Float64():
        case.op.applied(case.op.reference, wide)()
    return written(case, wide)


def measure(case: Case, against: Sequence[str], device: str = "cuda") -> tuple[dict[str, Any], list[dict[str, str]]]:
    """(row of errors, skipped contenders). The row of an op with quantised outputs is empty."""
    row: dict[str, Any] = {**case.labels, "errors": {}}
    try:
        expected = exact(case, device)
    except Unavailable as error:
        return row, [skip("float64", case.op, error)]

    def error_of(build: Builder) -> float:
        actual = outputs(case, build, device)
        return max(difference(actual[name], expected[name])[0] for name in expected)

    row["errors"]["pyops"] = error_of(ours(case.op))
    found, skips = builders(case.op, against)
    for name, build in found.items():
        try:
            row["errors"][name] = error_of(build)
        except Exception as error:
            skips.append(skip(name, case.op, error))
    return row, skips
