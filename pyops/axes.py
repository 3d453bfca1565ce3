"""The axes of an op's example: what `dtype=float16 hidden_size=4096` may name, and the plans they lead to."""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ._core.errors import OpError
from ._core.launch.kernel import Launch
from ._core.op.op import Op, registry
from ._core.system.device import Device
from ._core.tensors import dtypes
from ._core.tensors.tensor import TensorArg
from .example import ArgMaker


@dataclass(frozen=True, slots=True)
class Axis:
    """A keyword of an example: its default, and the values it is annotated with (empty: none)."""

    default: Any
    choices: tuple[Any, ...]

    def takes(self, value: Any) -> bool:
        """Whether the choices allow a value. A choice between words is complete; sizes that an example names are
        samples: what else is possible, the plan says.
        """
        return not (isinstance(self.default, str) and self.choices) or value in self.choices


def find(name: str) -> Op:
    """The op `name`; OpError with the closest name when there is none."""
    if name not in registry:
        closest = difflib.get_close_matches(name, registry, n=1)
        raise OpError("pyops", name, f"is no op; did you mean {closest[0]}?" if closest else "is no op")
    return registry[name]


def of(op: Op) -> dict[str, Axis]:
    """The axes of the op's example. An element type that is not annotated with its choices is any float type."""
    example = op.example
    if example is None:
        raise TypeError(f"{op.name} has no example")
    hints = get_type_hints(example)
    axes = {}
    for name, parameter in inspect.signature(example).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            choices: tuple[Any, ...] = ()
            if get_origin(hints.get(name)) is Literal:
                choices = get_args(hints[name])
            elif name == "dtype":
                choices = tuple(dtype.name for dtype in dtypes.FLOATS)
            axes[name] = Axis(parameter.default, choices)
    return axes


def is_dtype(name: str) -> bool:
    """Whether an axis holds an element type: ``dtype``, ``quant_dtype``, ..."""
    return name.endswith("dtype")


def combinations(op: Op, given: Mapping[str, Any], sweep: bool) -> Iterator[dict[str, Any]]:
    """Every combination of the values given for the op's axes (one value, or a list of them).

    An axis that is not given keeps its default; with `sweep`, an element type takes each of its choices instead.
    """
    axes = of(op)
    values: dict[str, Iterable[Any]] = {
        name: axis.choices for name, axis in axes.items() if sweep and is_dtype(name) and axis.choices
    }
    for name, value in given.items():
        if name not in axes:
            raise OpError(op.name, name, f"is no axis of its example, which has {', '.join(axes)}")
        values[name] = value if isinstance(value, list | tuple) else [value]
        for one in values[name]:
            _check(op, name, axes[name], one)
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def only(op: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    """The one combination of the values given; OpError when an axis has several."""
    chosen = list(combinations(op, given, sweep=False))
    if len(chosen) != 1:
        raise OpError(op.name, "axes", "expected one value for each")
    return chosen[0]


def _check(op: Op, name: str, axis: Axis, value: Any) -> None:
    if not axis.takes(value):
        raise OpError(op.name, name, f"expected {' or '.join(map(str, axis.choices))}, got {value}")
    if isinstance(axis.default, int) and not isinstance(value, int):
        raise OpError(op.name, name, f"expected {type(axis.default).__name__}, got {value!r}")


def launches(op: Op, values: Mapping[str, Any], device: Device) -> list[Launch]:
    """What the op plans on `device` for its example with these values. Nothing is compiled."""
    assert op.example is not None
    try:
        args = op.example(ArgMaker(device, op.name), **values)
        named = zip(op.parameters, args, strict=True)
        return op.launches(*(replace(arg, name=p.name) if isinstance(arg, TensorArg) else arg for p, arg in named))
    except Exception as error:
        if not values or isinstance(error, OpError):
            raise
        # An example takes its axes as they are: of what it makes of others, only this is known.
        given = " ".join(f"{name}={value}" for name, value in values.items())
        raise OpError(op.name, given, f"has no example ({type(error).__name__}: {error})") from error


def parse(words: Iterable[str]) -> dict[str, list[Any]]:
    """``["hidden_size=4096,8192", "dtype=float16"]`` as ``{"hidden_size": [4096, 8192], "dtype": ["float16"]}``."""
    return {name: [_literal(part) for part in text.split(",")] for name, text in pairs(words).items()}


def pairs(words: Iterable[str]) -> dict[str, str]:
    """``["hidden_size=4096"]`` as ``{"hidden_size": "4096"}``."""
    found = {}
    for word in words:
        name, equals, found[name] = word.partition("=")
        if not (name and equals and found[name]):
            raise OpError("pyops", word, "expected key=value")
    return found


def _literal(text: str) -> Any:
    """A Python literal (4096, 1e-6, True, None), or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
