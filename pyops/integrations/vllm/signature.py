"""A parser of op schemas. torch has one, but `coverage` also runs without torch."""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import dataclass
from typing import Any

# An argument: a type, "!" or "(a!)" if it is written, "?" if it is optional, a name, and a default. torch prints the
# "!" of a schema that it has read as "($0! -> )".
_ARGUMENT = re.compile(
    r"(?P<type>\(.+\)|\w+)(?P<mark>[\[\]]*(!|\(\w+!?\)|\(\$\d+! -> \))?[\[\]]*)(?P<none>\??) \w+(=(?P<default>.+))?"
)
_SAME = {"SymInt": "int", "ScalarType": "int"}  # types that torch considers equal when it compares schemas


@dataclass(frozen=True)
class Argument:
    """An argument of a schema.

    Attributes:
        type: the type in the schema, without marks: ``"Tensor"``, ``"int[]"``.
        is_optional: whether it may be None.
        is_written: whether the schema marks it as written.
        has_default, default: whether it has a default, and the default.
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
        """Whether every value for the argument `other` is valid for this one."""
        return self.type == other.type and self.is_optional >= other.is_optional


@dataclass(frozen=True)
class Signature:
    """The arguments of a schema, in order, and the types of its results."""

    arguments: tuple[Argument, ...]
    results: tuple[str, ...]

    @classmethod
    def read(cls, schema: str) -> Signature:
        """The signature of ``name(arguments) -> results``."""
        arguments, _, returns = schema.partition("(")[2].rpartition(") -> ")
        parts = (part for part in _split(arguments) if part != "*")  # "*" marks keyword-only arguments
        returned = returns[1:-1] if returns.startswith("(") else returns
        return cls(tuple(map(Argument.read, parts)), tuple(one.partition(" ")[0] for one in _split(returned)))

    def takes(self, other: Signature) -> bool:
        """Whether every call by the signature `other` is a call by this one.

        Arguments are positional, so names may differ. Those that only this one has need defaults. torch drops trailing
        arguments that equal the defaults of its schema, so the defaults of `other` must be the defaults here. Marks of
        written arguments must be equal.
        """
        given = len(other.arguments)
        return (
            self.results == other.results
            and given <= len(self.arguments)
            and all(
                own.takes(argument)
                and own.is_written == argument.is_written
                and (not argument.has_default or (own.has_default and own.default == argument.default))
                for own, argument in zip(self.arguments, other.arguments, strict=False)
            )
            and all(own.has_default for own in self.arguments[given:])
        )


def _split(text: str) -> list[str]:
    """Split `text` at commas outside of parentheses."""
    parts = re.split(r", (?![^(]*\))", text)
    return [part for part in parts if part]
