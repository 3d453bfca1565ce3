"""A parser of op schemas. torch has one, but `coverage` also runs without torch."""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import dataclass
from typing import Any

# A type, with "!" or "(a!)" if the argument is written, an optional "?", a name, and a default.
_ARGUMENT = re.compile(
    r"(?P<type>\(.+\)|\w+)(?P<mark>[\[\]]*(!|\(\w+!?\))?[\[\]]*)(?P<none>\??) \w+(=(?P<default>.+))?"
)
_SAME = {"SymInt": "int", "ScalarType": "int"}  # what torch takes for one type where it compares types


@dataclass(frozen=True)
class Argument:
    """An argument of a schema.

    Attributes:
        type: as the schema has it, without marks: ``"Tensor"``, ``"int[]"``.
        is_optional: whether it may be None.
        is_written: whether the op is said to write it.
        has_default, default: whether it may be left out, and what it is then.
    """

    type: str
    is_optional: bool
    is_written: bool
    has_default: bool
    default: Any = None

    @classmethod
    def read(cls, text: str) -> Argument:
        """The argument that `text` describes, such as ``Tensor(a!)? out=None``."""
        match = _ARGUMENT.fullmatch(text)
        if match is None:
            raise ValueError(f"cannot read the argument {text!r} of a schema")
        type, mark, default = _SAME.get(match["type"], match["type"]), match["mark"], match["default"]
        return cls(
            type + re.sub(r"[^\[\]]", "", mark),
            bool(match["none"]),
            "!" in mark,
            default is not None,
            None if default is None else literal_eval(default),
        )

    def takes(self, other: Argument) -> bool:
        """Whether whatever is given for `other` can be given for this one."""
        return self.type == other.type and self.is_optional >= other.is_optional


@dataclass(frozen=True)
class Signature:
    """The arguments of a schema, by position, and how many results there are."""

    arguments: tuple[Argument, ...]
    num_returns: int

    @classmethod
    def read(cls, schema: str) -> Signature:
        """The signature of ``name(arguments) -> results``."""
        arguments, _, returns = schema.partition("(")[2].rpartition(") -> ")
        parts = (part for part in _split(arguments) if part != "*")  # what follows "*" is given by name only
        returned = returns[1:-1] if returns.startswith("(") else returns
        return cls(tuple(map(Argument.read, parts)), len(_split(returned)))


def _split(text: str) -> list[str]:
    """Split `text` at commas outside of parentheses."""
    parts = re.split(r", (?![^(]*\))", text)
    return [part for part in parts if part]
