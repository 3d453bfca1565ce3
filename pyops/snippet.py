"""The example of an op as a program that a user could type, derived from the arguments that the op declares."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from . import axes
from ._core.op.declaration import Parameter
from ._core.op.op import Op
from ._core.system import device
from ._core.tensors import tensor
from ._core.tensors.tensor import TensorArg
from .example import ArgMaker
from .ops._shared.scalar_type import SCALAR_TYPES

_HEAD = """import torch
import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
"""
_WIDTH = 100  # characters of a line
_OF_INTEGERS = ("randint", "randperm", "arange")  # functions of torch that make int64 without `dtype=`
_OF_VALUES = ("tensor", "full")  # functions of torch that take the dtype from the values
_NAMES = {one.id: name for name, one in SCALAR_TYPES.items()}


@dataclass(frozen=True)
class Drawn:
    """A tensor of an example: the expression that makes it, and statements that then change `{name}` in place."""

    text: str
    arg: TensorArg
    changes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arg.shape

    @property
    def is_empty(self) -> bool:
        """Whether it has no contents yet: an output."""
        return self.text.startswith("torch.empty(")

    def lines(self, name: str, others: Mapping[str, Drawn]) -> Iterable[str]:
        """The statements that make this tensor as the variable `name`, where `others` are variables already."""
        layout = self.arg.shape, self.arg.strides, self.arg.dtype
        like = (n for n, one in others.items() if (one.arg.shape, one.arg.strides, one.arg.dtype) == layout)
        text = next((f"torch.empty_like({n})" for n in like if self.is_empty), self.text)
        return [f"{name} = {text}", *(change.format(name=name) for change in self.changes)]


class TextMaker:
    """Makes expressions instead of tensors, with descriptors of what they would make."""

    def __init__(self, op: str) -> None:
        self.args = ArgMaker(device.model(), op)

    def randn(self, *shape: int, dtype: str, scale: float = 1.0, shift: float = 0.0) -> Drawn:
        is_float8 = dtype.startswith("float8")
        text = _new("randn", *map(str, shape), dtype="float32" if is_float8 else dtype)
        if scale != 1:
            text = f"{_rounded(scale)} * {text}"
        if shift:
            text = f"{text} {'-' if shift < 0 else '+'} {_rounded(abs(shift))}"
        if is_float8:
            text = f"{text if text.startswith('torch') and not shift else f'({text})'}.to(torch.{dtype})"
        return Drawn(text, self.args.randn(*shape, dtype=dtype))

    def randint(self, low: int, high: int, *shape: int, dtype: str = "int64") -> Drawn:
        text = _new("randint", _number(low), _number(high), str(shape), dtype=dtype)
        return Drawn(text, self.args.randint(low, high, *shape, dtype=dtype))

    def permutation(self, high: int, *shape: int, dtype: str = "int64") -> Drawn:
        text, arg = _new("randperm", str(high), dtype=dtype), self.args.permutation(high, *shape, dtype=dtype)
        text += f"[:{arg.numel}]" * (arg.numel < high)
        return Drawn(text + f".view{shape}" * (len(shape) > 1), arg)

    def transposed(self, matrix: Drawn) -> Drawn:
        return Drawn(f"{matrix.text}.mT", self.args.transposed(matrix.arg))

    def ordered(self, tensor: Drawn, descending: bool = False) -> Drawn:
        return Drawn(f"{tensor.text}.sort({'descending=True' * descending}).values", tensor.arg)

    def masked(self, tensor: Drawn, width: int, columns: Sequence[int], mask: int) -> Drawn:
        change = f"{{name}}.view(-1, {width})[:, {list(columns)}] &= 0x{mask:X}"
        return Drawn(tensor.text, tensor.arg, (*tensor.changes, change))

    def strewn(self, tensor: Drawn, step: int, values: Drawn) -> Drawn:
        return Drawn(tensor.text, tensor.arg, (*tensor.changes, f"{{name}}[::{step}] = {values.text}"))

    def values(self, values: Any, dtype: str) -> Drawn:
        arg = self.args.values(values, dtype)
        return Drawn(_listed(values, arg.shape, dtype), arg)

    def empty(self, *shape: int, dtype: str) -> Drawn:
        return Drawn(_new("empty", *map(str, shape), dtype=dtype), self.args.empty(*shape, dtype=dtype))

    def full(self, *shape: int, value: float, dtype: str) -> Drawn:
        arg = self.args.full(*shape, value=value, dtype=dtype)
        if value in (0, 1) and arg.numel > 1:
            return Drawn(_new("ones" if value else "zeros", *map(str, shape), dtype=dtype), arg)
        number = _number(float(value) if "float" in dtype else int(value))
        if shape == (1,):
            return Drawn(_new("tensor", f"[{number}]", dtype=dtype), arg)
        return Drawn(_new("full", str(shape), number, dtype=dtype), arg)


def example_text(op: Any, **values: Any) -> str:
    """A program that calls `op` with the arguments of its example: ``print(pyops.example_text(pyops.rms_norm))``.

    It runs on the GPU, or without one on the CPU. If the op has a form that allocates outputs, the program calls that
    form first.

    Args:
        op: an op or its name.
        values: axes of the example that differ from their defaults, such as ``dtype="float16"``.

    Raises:
        OpError: no such op, or its example has no such axis or value.
    """
    found: Op = axes.find(op) if isinstance(op, str) else op.op
    chosen = axes.only(found, values)
    axes.launches(found, chosen, device.model())  # raises OpError for axes with which the op refuses its example
    assert found.example is not None
    drawn = found.example(TextMaker(found.name), **chosen)
    given = dict(zip((p.name for p in found.parameters), drawn, strict=True))
    parts, made = [], dict[str, Drawn]()
    allocated, chosen_alone = _allocated(found, given)
    if allocated:
        others = [p for p in found.parameters if p not in allocated]
        function = found.name if found.declaration.returned else f"{found.name}.new"
        function = f"{', '.join(p.name for p in allocated)} = pyops.{function}"
        call = _called(function, others, given, [f"{name}=torch.{dtype}" for name, dtype in chosen_alone.items()])
        parts.append("\n".join([*_made(others, given, made), call]))
    if not (allocated and found.declaration.returned):
        call = _called(f"pyops.{found.name}", found.parameters, given)
        heading = ["# The same, with outputs that the caller gives:"] if allocated else []
        parts.append("\n".join([*heading, *_made(found.parameters, given, made), call]))
    return _HEAD + "\n\n".join(parts)


def _allocated(op: Op, given: Mapping[str, Any]) -> tuple[Sequence[Parameter], dict[str, Any]]:
    """(the outputs that the op can allocate, in the order in which it returns them; arguments of `new` alone with which
    they look as in the example). No outputs if `new` would make others."""
    form = op.form.declaration if op.form else None
    alone = [p for p in form.parameters if p.name not in given] if form else []
    if form is None or not all(p.has_default for p in alone):
        return (), {}
    own = [next(p for p in op.parameters if p.name == one.name) for one in form.returned]
    described = {name: one.arg if isinstance(one, Drawn) else one for name, one in given.items()}
    described |= {p.name: None for p in own} | {p.name: p.default for p in alone}
    wanted = [(given[p.name].arg.shape, given[p.name].arg.dtype, given[p.name].arg.strides) for p in own]
    kinds = [p.name for p in alone if p.kind == "dtype"]
    for chosen in ({}, *({name: dtype.name} for name in kinds for _, dtype, _ in wanted)):
        values = described | chosen
        found = op.results(*(values[p.name] for p in form.parameters))
        leader = described[form.leader].device
        new = [tensor.describe_new(op.name, "", one.shape, one.dtype, leader, *one[2:]) for one in found]
        if [(one.shape, one.dtype, one.strides) for one in new] == wanted:
            return own, chosen
    return (), {}


def _made(parameters: Iterable[Parameter], given: Mapping[str, Any], made: dict[str, Drawn]) -> list[str]:
    """Statements for the tensors that are not `made` yet. Outputs come last, so that they may be like an input."""
    lines: list[str] = []
    tensors = [(p.name, given[p.name]) for p in parameters if isinstance(given[p.name], Drawn) and p.name not in made]
    for name, one in sorted(tensors, key=lambda item: item[1].is_empty):
        lines += one.lines(name, made)
        made[name] = one
    return lines


def _called(function: str, parameters: Iterable[Parameter], given: Mapping[str, Any], more: Iterable[str] = ()) -> str:
    """A call without the arguments that equal their default. From the first of these, None or bool on, by name.

    `more` follows the other arguments.
    """
    parts, by_name = list[str](), False
    for p in parameters:
        value = given[p.name]
        if p.has_default and not isinstance(value, Drawn) and value == p.default:
            by_name = True
            continue
        by_name = by_name or p.by_name or value is None or isinstance(value, bool)
        parts.append(f"{p.name}={_argument(p, value)}" if by_name else _argument(p, value))
    parts += more
    line = f"{function}({', '.join(parts)})"
    if len(line) <= _WIDTH:
        return line
    wrapper = textwrap.TextWrapper(_WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent = wrapper.subsequent_indent = " " * 4
    inner = wrapper.wrap(f"{', '.join(parts)},")
    return "\n".join([f"{function}(", *inner, ")"])


def _argument(p: Parameter, value: Any) -> str:
    if isinstance(value, Drawn):
        return p.name
    if p.kind == "dtype" and value is not None:
        return f"torch.{value}"
    if p.kind == "int" and value in _NAMES:
        return f'pyops.SCALAR_TYPES["{_NAMES[value]}"].id'
    return json.dumps(value) if isinstance(value, str) else _number(value)


def _new(function: str, *args: str, dtype: str) -> str:
    """A call of a torch function that makes a tensor on the device."""
    implied = ["float32", "int64", "bool"] if function in _OF_VALUES else ["float32"]
    if function in _OF_INTEGERS:
        implied = ["int64"]
    given = [] if dtype in implied else [f"dtype=torch.{dtype}"]
    return f"torch.{function}({', '.join([*args, *given, 'device=device'])})"


def _listed(values: Any, shape: tuple[int, ...], dtype: str) -> str:
    """A tensor of numbers: a range, equal rows, or the list of them."""
    numbers = numpy.array(values, float if "float" in dtype else None)
    if not numbers.size:
        return _new("empty", *map(str, shape), dtype=dtype)
    values = numbers.tolist()
    if len(shape) == 1 and shape[0] > 4 and len(steps := {*numpy.diff(numbers).tolist()}) == 1:
        start, step = values[0], steps.pop()
        stop = start + step * shape[0]
        if isinstance(step, int) and step > 0:
            args = [stop] if (start, step) == (0, 1) else [start, stop] if step == 1 else [start, stop, step]
            return _new("arange", *map(str, args), dtype=dtype)
    if len(shape) == 2 and shape[0] > 3 and (numbers == numbers[0]).all():
        return f"{_new('tensor', str(values[:1]), dtype=dtype)}.repeat({shape[0]}, 1)"
    return _new("tensor", str(values), dtype=dtype)


def _number(value: Any) -> str:
    """A number exactly, large powers of two and roots as such; any other value as Python has it."""
    text = repr(value).replace("e-0", "e-")
    if isinstance(value, float) and 0 < value < 1 and len(text) > 7:
        fraction, exponent = math.frexp(value)
        if fraction == 0.5:
            return f"2.0**{exponent - 1}"
        if exponent > -16 and (root := round(value**-2)) ** -0.5 == value:
            return f"{root}**-0.5"
    if type(value) is int and abs(value) >= 2**20 and abs(value).bit_count() == 1:
        power = f"2**{abs(value).bit_length() - 1}"
        return power if value > 0 else f"-({power})"
    return text


def _rounded(value: float) -> str:
    """A number that only scales random values: to three digits, unless it is short."""
    text = _number(value)
    return text if len(text) <= 10 else f"{value:.3g}"
