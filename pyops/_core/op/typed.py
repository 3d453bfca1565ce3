"""What type checkers know of an op: its signature is that of its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from ..text.compiler import Compiled
from .op import Op

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Wrapper(Protocol[P, R_co]):
    """What `@op` leaves in place of the reference: the wrapper, with the attributes of the op.

    Attributes:
        new: the form that allocates outputs and returns them, of an op with a `result` function.
    """

    op: Op
    new: Callable[..., Any]
    reference: Callable[..., None]
    compiled: Callable[[], list[Compiled]]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def plan(self, function: F) -> F: ...
    def example(self, function: F) -> F: ...
    def traffic(self, function: F) -> F: ...
    def bad_indices(self, function: F) -> F: ...
    def result(self, function: F) -> F: ...


class Declare(Protocol):
    """A decorator that makes an op from a reference; the caller gives all outputs."""

    def __call__(self, reference: Callable[P, None]) -> Wrapper[P, None]: ...


class DeclareReturning(Protocol):
    """A decorator that makes an op from a reference; the op returns some of the outputs."""

    def __call__(self, reference: Callable[..., None]) -> Wrapper[..., Any]: ...
