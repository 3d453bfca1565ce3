"""The arguments of a call, as a plan takes them: conversion, descriptors, checks of scalars."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import inf, prod
from numbers import Real
from typing import Any

import numpy

from ..errors import OpError
from ..tensors import dtypes, tensor
from ..tensors.tensor import TensorArg
from . import torch_library
from .declaration import Declaration, Parameter

_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool, numpy.bool_), "str": (str,)}
_FLOATS = (float, int, numpy.floating, numpy.integer, numpy.bool_)
# {kind of a parameter: the conversion to a plain Python value, for values that passed `check_scalar`}
_PYTHON: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": lambda value: int(operator.index(value)),  # True becomes 1
    "bool": lambda value: bool(operator.index(value)),
}
_MAX_SHOWN_BITS = 128  # longer integers are not written out in errors


def convert(declaration: Declaration, args: Sequence[Any]) -> list[Any] | None:
    """`args` converted to what plans take; None if no argument needs a conversion.

    A number, or a scalar in host memory, becomes a tensor where a kernel reads it by address. A tensor, or a numpy
    scalar, becomes a Python value where the plan may depend on the value.
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
            if is_number:
                _check_float(declaration.name, p, value)
            if is_number or is_elsewhere:
                made[i] = tensor.held_number(value, like)
        elif p.keyed and isinstance(value, numpy.generic):
            made[i] = value.item()
        elif p.kind == "tuple[int, int]" and isinstance(value, tuple):
            made[i] = value
            if any(isinstance(one, numpy.integer) for one in value):
                made[i] = tuple(one.item() if isinstance(one, numpy.integer) else one for one in value)
        elif p.keyed and (tensor.library_of(value) or _is_index(p, value)):
            check_scalar(declaration.name, p, value)
            made[i] = _PYTHON[p.kind](value)
    changed = any(new is not args[i] for i, new in made.items())
    return [made.get(i, arg) for i, arg in enumerate(args)] if changed else None


def numbers(declaration: Declaration, args: Sequence[Any]) -> list[Any]:
    """`args` with every float and integer, numpy scalars included, as the Python number that a kernel would receive.

    Raises OpError for a value that is not a number: a PyTorch reference might accept it, a kernel cannot.
    """
    made = list(args)
    for i, (p, value) in enumerate(zip(declaration.parameters, args, strict=True)):
        if not p.is_tensor:
            check_scalar(declaration.name, p, value)
        if value is not None and p.kind in _PYTHON:
            made[i] = _PYTHON[p.kind](value)
    return made


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
            if p.kind == "bool" and value is not None:
                value = bool(value)  # not numpy.bool_: the value may become a constant in the kernel text
        elif value is not None:
            value = tensor.taken(op, p.name, value, library)
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
        if isinstance(value, _FLOATS) or tensor.library_of(value):
            _check_float(op, p, value)
            return
    elif p.kind == "dtype":
        is_dtype = hasattr(value, "itemsize") and tensor.library_of(value) is None
        if is_dtype or (isinstance(value, str) and dtypes.of(value)):
            return
        if isinstance(value, str):
            raise OpError(op, p.name, f'expected the name of an element type, got "{value}"')
    elif p.kind == "tuple[int, int]":
        if isinstance(value, tuple) and [type(one) for one in value] == [int, int]:
            return
    elif isinstance(value, _SCALARS[p.kind]):
        if p.kind == "int":
            _check_int(op, p, value)
        return
    elif p.kind == "int" and tensor.is_symbol(value):
        return
    elif p.kind == "bool" and isinstance(value, int):
        if value in (0, 1):
            return
        raise OpError(op, p.name, f"expected True or False, got {_shown(value)}")
    elif _is_index(p, value):
        _check_int(op, p, value)
        if p.kind == "bool":
            check_scalar(op, p, operator.index(value))
        return
    raise OpError(op, p.name, f"expected {p.kind}, got {type(value).__name__}")


def _is_index(p: Parameter, value: Any) -> bool:
    """Whether the parameter is an int or a bool, and `value` is not a Python int but converts to one (`__index__`)."""
    return p.kind in ("int", "bool") and not isinstance(value, int) and hasattr(value, "__index__")


# A conversion runs code of the value's class, such as a tensor or a class of the caller, and may raise any exception.


def _check_float(op: str, p: Parameter, value: Any) -> None:
    try:
        number = abs(float(value))
    except OverflowError:
        number = tensor.MAX_FLOAT
    except Exception as error:
        raise OpError(op, p.name, f"expected float, got {type(value).__name__}: {error}") from None
    if tensor.MAX_FLOAT <= number < inf:
        raise OpError(op, p.name, f"expected a number that float32 can hold, got {_shown(value)}")


def _check_int(op: str, p: Parameter, value: Any) -> None:
    try:
        integer = operator.index(value)
    except Exception as error:
        raise OpError(op, p.name, f"expected {p.kind}, got {type(value).__name__}: {error}") from None
    if not -(2**63) <= integer < 2**63:
        raise OpError(op, p.name, f"expected an integer of 64 bits, got {_shown(integer)}")


def _shown(value: Any) -> str:
    """A number for an error message: Python refuses to print an integer of thousands of digits."""
    is_long = isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS
    return f"one of {value.bit_length()} bits" if is_long else str(value)


def _place(index: int) -> str:
    return "cpu" if index < 0 else f"cuda:{index}"
