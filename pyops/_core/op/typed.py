"""What type checkers know of an op where it is declared: its signature is that of its reference.

Of the ops of this package, `pyops/__init__.pyi` says more, for all who import them from `pyops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar

from ..text.compiler import Compiled
from .op import Op

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Attributes(Protocol):
    """The attributes of an op's function."""

    op: Op
    reference: Callable[..., None]
    compiled: Callable[[], list[Compiled]]

    def plan(self, function: F) -> F: ...
    def example(self, function: F) -> F: ...
    def traffic(self, function: F) -> F: ...
    def bad_indices(self, function: F) -> F: ...
    def result(self, function: F) -> F: ...


class Wrapper(Attributes, Protocol[P, R_co]):
    """What `@op` leaves in place of the reference: the wrapper, with the attributes of the op.

    Attributes:
        new: the form that allocates outputs and returns them.
    """

    new: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Options(TypedDict, total=False):
    """What `@op` says of an op, whatever it returns."""

    out: str | tuple[str, ...]
    inout: str | tuple[str, ...]
    partial: str | tuple[str, ...]
    in_place: dict[str, str] | None
    keyed: str | tuple[str, ...]
    runtime: str | tuple[str, ...]
    ulps: int
    atol: float | Callable[..., float]


class Declare(Protocol):
    """A decorator that makes an op from a reference; the caller gives all outputs."""

    def __call__(self, reference: Callable[P, None]) -> Wrapper[P, None]: ...


class DeclareReturning(Protocol):
    """A decorator that makes an op from a reference; the op returns some of the outputs."""

    def __call__(self, reference: Callable[..., None]) -> Wrapper[..., Any]: ...
