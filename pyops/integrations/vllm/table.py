"""Which function of this library serves which op of vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pyops

from ..._core import torch_library
from ..._core.lazy import torch
from ..._core.op import Op, registry
from .adapters import ADAPTERS
from .schemas import SCHEMAS


@dataclass(frozen=True)
class Entry:
    """An op of vLLM.

    Attributes:
        namespace: ``"_C"``, ``"_C_cache_ops"``, ...: where it is in torch.ops.
        name: its name there.
        schema: as vLLM registers it.
        state: ``"served"`` by a function of this library as it is, ``"adapted"`` by one that hands its arguments over
            to such a function in another way, or ``"missing"``.
        kernel: that function, which takes the arguments of the schema by position; None if missing.
        ours: its name, or what an adapter says of itself; "" if missing.
    """

    namespace: str
    name: str
    schema: str
    state: Literal["served", "adapted", "missing"]
    kernel: Callable[..., Any] | None = None
    ours: str = ""


def table() -> dict[str, Entry]:
    """Every op of vLLM by its name, as the ops stand that are declared now."""
    entries = (_entry(namespace, line) for namespace, text in SCHEMAS.items() for line in text.split("\n")[1:-1])
    return {entry.name: entry for entry in entries}


def _entry(namespace: str, schema: str) -> Entry:
    name = schema.partition("(")[0]
    if name in ADAPTERS:
        return Entry(namespace, name, schema, "adapted", ADAPTERS[name], ADAPTERS[name].__doc__ or "")
    op, function = registry.get(name), getattr(pyops, name, None)
    if op is not None and takes(op, parse(schema)):
        return Entry(namespace, name, schema, "served", op.wrapper, op.name)
    if op is None and function is not None and takes_as_many(function, parse(schema)):
        return Entry(namespace, name, schema, "served", function, name)
    return Entry(namespace, name, schema, "missing")


def parse(schema: str) -> Any:
    """torch's FunctionSchema of a schema."""
    return torch._C.parse_schema(schema)


def takes(op: Op, schema: Any) -> bool:
    """Whether `op` takes a FunctionSchema's arguments by position, writes those that it marks, and returns as many."""
    declared = torch_library.returning_schema if op.declaration.returned else torch_library.schema
    parsed = parse(declared(op.declaration))
    own = parsed.arguments
    return (
        len(schema.returns) == len(parsed.returns)
        and len(own) >= len(schema.arguments)
        and all(
            theirs.type.isSubtypeOf(ours.type)
            and is_written(theirs) == is_written(ours)
            # torch leaves out trailing arguments that are equal to their defaults.
            and (not theirs.has_default_value() or default(theirs) == default(ours))
            for ours, theirs in zip(own, schema.arguments, strict=False)
        )
        and all(ours.has_default_value() for ours in own[len(schema.arguments) :])
    )


def takes_as_many(function: Callable[..., Any], schema: Any) -> bool:
    """Whether a function of this library that is no op takes as many arguments by position as a FunctionSchema has."""
    try:
        inspect.signature(function).bind(*schema.arguments)
    except TypeError:
        return False
    return True


def default(argument: Any) -> tuple[bool, Any]:
    """(whether an argument of a FunctionSchema has a default, it)."""
    return argument.has_default_value(), argument.default_value


def is_written(argument: Any) -> bool:
    """Whether a FunctionSchema marks its argument as written."""
    return argument.alias_info is not None and argument.alias_info.is_write
