"""Declaration: what `@op` reads from the reference of an op. Frozen data; nothing here runs an op."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from typing import Any

KINDS = ("Tensor", "float", "int", "bool", "str", "tuple[int, int]", "dtype")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an op.

    Attributes:
        name: as the reference spells it.
        kind: one of `KINDS`. A ``"dtype"`` is a torch dtype, a numpy dtype or the name of one.
        optional: whether None is a valid value.
        role: ``"in"``, ``"out"`` (written, never read) or ``"inout"``. Scalars are ``"in"``.
        keyed: the value of this scalar is part of the plan's key, so that the plan function may choose by it. Other
            scalars are read at every call.
        has_default, default: the default value in the signature, if there is one.
        number: a tensor of one float32, for which a caller may also give a Python number.
        by_name: keyword-only.
        returned: an output that the op allocates and returns unless the caller gives it.
        partial: written in part; what is not written stays.
    """

    name: str
    kind: str
    optional: bool
    role: str
    keyed: bool
    has_default: bool
    default: Any
    number: bool = False
    by_name: bool = False
    returned: bool = False
    partial: bool = False

    @property
    def written(self) -> bool:
        return self.role != "in"

    @property
    def is_tensor(self) -> bool:
        return self.kind == "Tensor"


@dataclass(frozen=True, eq=False)
class Declaration:
    """An op as its reference declares it: name, parameters, which tensors may alias, and the tolerance of results.

    Attributes:
        reference: a plain PyTorch function that writes the outputs.
        in_place: {output: input} pairs that may alias: the caller may pass one tensor for both.
        ulps: largest difference from the reference, in ulps of the output type; 0: equal.
        atol: absolute tolerance, as a fraction of the output's largest magnitude, for terms that cancel in a sum. A
            function of the op's arguments.
    """

    reference: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    in_place: Mapping[str, str]
    ulps: int
    atol: float | Callable[..., float]

    @cached_property
    def name(self) -> str:
        return self.reference.__name__

    @cached_property
    def tensors(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.is_tensor)

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.tensors)

    @cached_property
    def tensor_positions(self) -> tuple[int, ...]:
        """Positions of the tensors among all parameters."""
        return tuple(i for i, p in enumerate(self.parameters) if p.is_tensor)

    @cached_property
    def returned(self) -> tuple[Parameter, ...]:
        """Outputs that a call allocates and returns. They are the last parameters."""
        return tuple(p for p in self.parameters if p.returned)

    @cached_property
    def runtime(self) -> tuple[tuple[str, str], ...]:
        """Scalars that are read at every call: (name, struct format)."""
        scalars = (p for p in self.parameters if not p.is_tensor and not p.keyed)
        return tuple((p.name, "q" if p.kind == "int" else "d") for p in scalars)

    @cached_property
    def positional(self) -> int:
        """Number of parameters that may be passed by position."""
        return sum(not p.by_name for p in self.parameters)

    @cached_property
    def leader(self) -> str:
        """The first required tensor: it decides the library and the device of a call."""
        return next(p.name for p in self.tensors if not p.optional and not p.number and not p.returned)

    @cached_property
    def leader_position(self) -> int:
        return [p.name for p in self.parameters].index(self.leader)

    def tensors_of(self, values: Sequence[Any]) -> list[Any]:
        """The tensors among `values`, which has a value for each parameter."""
        return [values[position] for position in self.tensor_positions]

    def written_of(self, values: Sequence[Any]) -> list[Any]:
        """The tensors that a call writes; `values` has a value for each parameter."""
        pairs = zip(self.parameters, values, strict=True)
        return [value for p, value in pairs if p.written and value is not None]

    def applied(self, function: Callable[..., Any], values: Sequence[Any]) -> partial[Any]:
        """`function`, which takes the op's parameters, bound to these values."""
        names = (p.name for p in self.parameters[self.positional :])
        return partial(function, *values[: self.positional], **dict(zip(names, values[self.positional :], strict=True)))

    def fed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which names some of the op's parameters, as a function of values for all of them.

        It may take several of them as one argument: a dataclass of its module, with fields of their names.
        """
        scope = getattr(function, "__globals__", {})
        own = inspect.signature(function).parameters.values()
        parts = {p.name: self._part(p.name, p.default, scope.get(p.annotation)) for p in own}

        def call(*values: Any) -> Any:
            return function(**{name: part(values) for name, part in parts.items()})

        return call

    def _part(self, name: str, default: Any, group: Any = None) -> Callable[[Sequence[Any]], Any]:
        """From values for all parameters: that of the parameter `name`, or else the dataclass `group` of them."""
        index = next((i for i, p in enumerate(self.parameters) if p.name == name), None)
        if index is not None:
            missing = self.parameters[index].default if self.parameters[index].has_default else default
            return lambda values: values[index] if index < len(values) else missing
        if not isinstance(group, type) or not is_dataclass(group):
            raise TypeError(f"{self.name}: {name} is no parameter of the op")
        parts = [self._part(field.name, field.default) for field in fields(group)]
        return lambda values: group(*(part(values) for part in parts))


def declare(
    reference: Callable[..., Any],
    *,
    out: Sequence[str],
    inout: Sequence[str],
    partial: Sequence[str],
    returns: Sequence[str],
    in_place: Mapping[str, str],
    keyed: Sequence[str],
    runtime: Sequence[str],
    ulps: int,
    atol: float | Callable[..., float],
) -> Declaration:
    """The declaration of `reference` under the options of `@op`. Raises TypeError where the two disagree."""
    roles = dict.fromkeys((*out, *returns), "out") | dict.fromkeys((*inout, *partial), "inout")
    is_keyed = dict.fromkeys(keyed, True) | dict.fromkeys(runtime, False)
    parameters = tuple(
        parameter(
            reference.__name__,
            p,
            role=roles.get(p.name, "in"),
            keyed=is_keyed.get(p.name),
            returned=p.name in returns,
            partial=p.name in partial,
        )
        for p in inspect.signature(reference).parameters.values()
    )
    for what, names, kind in (("written", roles, "Tensor"), ("keyed", keyed, "float"), ("runtime", runtime, "int")):
        if unknown := set(names) - {p.name for p in parameters if p.kind == kind}:
            raise TypeError(f"{reference.__name__}: {sorted(unknown)} are {what} but are no {kind.lower()} parameters")
    if any(p.returned for p in parameters) and not all(p.returned for p in parameters[-len(returns) :]):
        raise TypeError(f"{reference.__name__}: {sorted(returns)} are returned: expected them last, behind a *")
    if inout and len(returns) > 1:
        # torch.compile runs the op twice if a call passes some of its outputs but not all.
        raise TypeError(f"{reference.__name__}: {sorted(returns)} are returned: expected one, beside inout tensors")
    return Declaration(reference, parameters, in_place, ulps, atol)


def parameter(
    op: str,
    p: inspect.Parameter,
    role: str = "in",
    keyed: bool | None = None,
    returned: bool = False,
    partial: bool = False,
) -> Parameter:
    """A parameter of a reference, from its annotation: ``Tensor``, ``Tensor | None``, ``Tensor | float``, ``int``..."""
    # The annotation as it is written in a module that imports `annotations` and `Tensor`.
    written = p.annotation.__name__ if isinstance(p.annotation, type) else str(p.annotation).removeprefix("torch.")
    kind, _, rest = written.partition(" | ")
    number = (kind, rest) == ("Tensor", "float")
    if kind not in KINDS or (rest not in ("", "None") and not number):
        came = "not annotated" if p.annotation is p.empty else f"annotated {p.annotation!r}"
        expected = f"expected one of {', '.join(KINDS)}, or one of them | None, or Tensor | float"
        raise TypeError(f"{op}: {p.name} is {came}, {expected}")
    by_name = p.kind is p.KEYWORD_ONLY
    if returned and not by_name:
        raise TypeError(f"{op}: {p.name} is returned: expected it behind a *")
    has_default = p.default is not p.empty or returned
    return Parameter(
        p.name,
        kind,
        rest == "None",
        role,
        kind not in ("Tensor", "float") if keyed is None else keyed,
        has_default,
        None if p.default is p.empty else p.default,
        number,
        by_name,
        returned,
        partial,
    )
