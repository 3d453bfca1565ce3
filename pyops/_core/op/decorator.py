"""The decorator that makes an op of a reference function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, overload

from .declaration import declare
from .op import Op
from .typed import Declare, DeclareReturning, Options


@overload
def op(**options: Unpack[Options]) -> Declare: ...
@overload
def op(*, returns: str | tuple[str, ...], **options: Unpack[Options]) -> DeclareReturning: ...
def op(
    *,
    out: str | tuple[str, ...] = (),
    inout: str | tuple[str, ...] = (),
    partial: str | tuple[str, ...] = (),
    in_place: dict[str, str] | None = None,
    returns: str | tuple[str, ...] = (),
    keyed: str | tuple[str, ...] = (),
    runtime: str | tuple[str, ...] = (),
    ulps: int = 1,
    atol: float | Callable[..., float] = 2.0**-22,
) -> Any:
    """Declare an op by its reference, a plain PyTorch function that writes its outputs in place.

    Its parameters are annotated ``Tensor``, ``float``, ``int``, ``bool``, ``str`` or ``tuple[int, int]``, alone or with
    ``| None``, or ``Tensor | float``. For ``Tensor | float`` a caller may give a number or a scalar in host memory, and
    plan, kernels and reference see a tensor of one float32. Parameters after a ``*`` are keyword-only, in the torch
    schema, too. A module that declares an op again, such as a notebook cell that runs twice, replaces the op.

    Args:
        out: tensors that are written and never read; inout: tensors that are read and written.
        partial: outputs that are written in part; what is not written stays. The op also has the form
            ``op.new(...)``, which takes the other arguments, allocates every output that may not be None (zeros if it
            is partial), and returns them. They look like the inputs that `in_place` names, or as `.result` says.
        returns: outputs that the op itself allocates and returns, unless the caller gives them by name. They stand
            after a ``*``, and `.result` gives their shapes and dtypes.
        in_place: {output: input} pairs that may be one and the same tensor.
        keyed: floats that the plan may choose by; each value has a plan of its own. Integers, bools, strings and pairs
            are keyed anyway. Other floats are read at every call.
        runtime: integers that are read at every call like floats, because they change with it.
        ulps: largest difference from the reference, in ulps of the output type; 0 means equal.
        atol: absolute tolerance, as a fraction of the output's largest magnitude, for terms that cancel in a sum.
            Ignored when ulps=0. May be a function of the op's arguments.
    """

    def make(reference: Callable[..., None]) -> Any:
        names: dict[str, Any] = {"out": out, "inout": inout, "partial": partial, "returns": returns}
        names |= {"keyed": keyed, "runtime": runtime}
        names = {option: (given,) if isinstance(given, str) else given for option, given in names.items()}
        return Op(declare(reference, **names, in_place=in_place or {}, ulps=ulps, atol=atol)).wrapper

    return make
