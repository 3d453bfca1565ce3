"""The arguments of a call, as a plan takes them: conversion, descriptors, checks of scalars."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import inf, prod
from numbers import Real
from typing import Any

import numpy

from . import dtypes, tensor, torch_library
from .declaration import Declaration, Parameter
from .errors import OpError
from .tensor import TensorArg

_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool, int, numpy.bool_), "str": (str,)}
_FLOATS = (float, int, numpy.floating, numpy.integer, numpy.bool_)
_MAX_FLOAT = (2 - 2.0**-24) * 2.0**127  # from here on, float32 has infinity alone


def convert(declaration: Declaration, args: Sequence[Any]) -> list[Any] | None:
    """`args` as plans take them; None if `args` are so already.

    A number, or a scalar in host memory, becomes a tensor where a kernel reads it by address. A tensor, or a scalar of
    numpy's, becomes a Python value where a plan may choose by it.
    """
    like = args[declaration.leader_position]
    made: dict[int, Any] = {}
    for i, p in enumerate(declaration.parameters):
        value = args[i]
        if p.number:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            is_elsewhere = (
                tensor.library_of(value)
                and tensor.on_host(value)
                and not tensor.on_host(like)
                and prod(value.shape) == 1
            )
            if is_number or is_elsewhere:
                made[i] = tensor.held_number(value, like)
        elif p.keyed and isinstance(value, numpy.generic):
            made[i] = value.item()
        elif p.kind == "tuple[int, int]" and isinstance(value, tuple):
            made[i] = value
            if any(isinstance(one, numpy.integer) for one in value):
                made[i] = tuple(one.item() if isinstance(one, numpy.integer) else one for one in value)
        elif p.keyed and tensor.library_of(value):
            check_scalar(declaration.name, p, value)
            try:
                made[i] = float(value) if p.kind == "float" else operator.index(value)
            except (TypeError, ValueError) as error:
                raise OpError(declaration.name, p.name, f"expected {p.kind}: {error}") from None
    changed = any(new is not args[i] for i, new in made.items())
    return [made.get(i, arg) for i, arg in enumerate(args)] if changed else None


def describe(
    declaration: Declaration, args: Sequence[Any], describe_tensor: Callable[..., TensorArg] = tensor.describe
) -> tuple[str, list[Any]]:
    """(library, args with every tensor replaced by its descriptor). Raises OpError for what the signature rules out."""
    op = declaration.name
    described: list[Any] = []
    library, first_type, first_name, where = None, None, "", None
    for p, value in zip(declaration.parameters, args, strict=True):
        if not p.is_tensor:
            check_scalar(op, p, value)
        elif value is not None:
            found = library if type(value) is first_type else tensor.library_of(value)
            if found is None:
                raise OpError(op, p.name, f"expected a torch tensor or a cupy array, got {type(value).__name__}")
            if library is None:
                library, first_type, first_name = found, type(value), p.name
            if found != library:
                raise OpError(op, p.name, f"expected a {library} tensor like {first_name}, got a {found} one")
            value = describe_tensor(op, p.name, value, found, p.written)
            if where is None:
                where = value.device.index
            if value.device.index != where:
                came = _place(value.device.index)
                raise value.error(f"expected device {_place(where)} like {first_name}, got {came}")
        elif not p.optional:
            raise OpError(op, p.name, "expected a tensor, got None")
        described.append(value)
    if library == "torch":
        torch_library.bind_torch()
    return library or "", described


def check_scalar(op: str, p: Parameter, value: Any) -> None:
    """Raises OpError unless `value` is of the kind of the parameter, and kernels can take it."""
    if value is None and p.optional:
        return
    if p.kind == "float":
        try:
            if isinstance(value, _FLOATS) or tensor.library_of(value):
                if _MAX_FLOAT <= abs(float(value)) < inf:
                    raise OpError(op, p.name, f"expected a number that float32 can hold, got {value}")
                return
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, OpError):
                raise
    elif p.kind == "dtype":
        if hasattr(value, "itemsize") or (isinstance(value, str) and dtypes.of(value)):
            return
        if isinstance(value, str):
            raise OpError(op, p.name, f'expected the name of an element type, got "{value}"')
    elif p.kind == "tuple[int, int]":
        if isinstance(value, tuple) and [type(one) for one in value] == [int, int]:
            return
    elif isinstance(value, _SCALARS[p.kind]) or (p.kind != "str" and hasattr(value, "__index__")):
        if p.kind == "int" and isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise OpError(op, p.name, f"expected an integer of 64 bits, got {value}")
        return
    raise OpError(op, p.name, f"expected {p.kind}, got {type(value).__name__}")


def _place(index: int) -> str:
    return "cpu" if index < 0 else f"cuda:{index}"
