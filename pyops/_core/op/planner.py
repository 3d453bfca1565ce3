"""Planner: the functions that a family attaches to an op, from its plan function to its example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ..launch import backend
from ..launch.kernel import Launch, Specialisation
from ..system import driver
from ..tensors.dtypes import DType
from ..tensors.tensor import TensorArg
from ..text.compiler import Compiled
from .declaration import Declaration, Parameter

F = TypeVar("F", bound=Callable[..., Any])


class Result(NamedTuple):
    """What an output looks like that the form `new` of an op allocates.

    Attributes:
        shape, dtype: its own.
        column_stride: columns of the last two dimensions are contiguous, with this stride. 0: the tensor is contiguous.
    """

    shape: tuple[int, ...]
    dtype: DType
    column_stride: int = 0


def _named(parameter: Parameter, arg: Any) -> Any:
    """A descriptor renamed to its parameter, as examples make descriptors without names; other values unchanged."""
    if isinstance(arg, TensorArg) and arg.name != parameter.name:
        return replace(arg, name=parameter.name)
    return arg


class Planner:
    """The functions that plan an op and describe its calls, and the specialisations that the process has loaded.

    Attributes:
        example: builds arguments of the op with a maker; its keywords are the axes of the op.
        traffic: bytes that a call must move, from its descriptors; None where each input is read once and each output
            written once.
        bad_indices: {index tensor: mask of the entries that lie out of range}, from the op's tensors. Instead of a mask
            it may give {what is wrong: mask}.
        call: the wrapper, which takes the op's arguments.
    """

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.example: Callable[..., tuple[Any, ...]] | None = None
        self.bad_indices: Callable[..., dict[str, Any]] | None = None
        self.call: Callable[..., Any] = declaration.reference
        self.specialisations: dict[tuple[Any, ...], Specialisation] = {}
        self._plan: Callable[..., Any] | None = None
        self.traffic: Callable[..., int] | None = None
        self._result: Callable[..., Any] | None = None

    def set_plan(self, function: F) -> F:
        self._plan = self.declaration.fed(function)
        return function

    def set_example(self, function: F) -> F:
        self.example = function
        return function

    def set_traffic(self, function: F) -> F:
        self.traffic = self.declaration.fed(function)
        return function

    def set_bad_indices(self, function: F) -> F:
        self.bad_indices = self.declaration.fed(function)
        return function

    def set_results(self, form: Declaration, function: F) -> F:
        """`function` gives the results of the form `new`, from the parameters of `form`."""
        self._result = form.fed(function)
        return function

    def results(self, *args: Any) -> tuple[Result, ...]:
        """What the outputs look like that `new` allocates, from its arguments: descriptors and scalars."""
        if self._result is None:
            raise TypeError(f"{self.declaration.name} returns tensors but has no result function")
        found = self._result(*args)
        return (found,) if isinstance(found, Result) else tuple(found)

    def launches(self, *args: Any) -> list[Launch]:
        """The launches planned for tensors given as descriptors, whatever their names. Touches no device."""
        if self._plan is None:
            raise TypeError(f"{self.declaration.name} has no plan")
        planned = self._plan(*map(_named, self.declaration.parameters, args))
        launches: Sequence[Launch] = [planned] if isinstance(planned, Launch) else planned
        return [one for one in launches if not one.empty]

    def load(self, index: int, specialisation: Specialisation, shared: int = 0) -> Compiled:
        """Load a specialisation on the device `index`, and list it in `compiled`.

        `shared`: bytes of dynamic shared memory that launches ask for. A graph may be captured meanwhile.
        """
        self.specialisations[index, specialisation.kernel, specialisation.key] = specialisation
        with driver.outside_capture(self.declaration.name, f"load {specialisation.kernel.file}"):
            compiled = specialisation.load(index)
            driver.raise_limits(compiled.function, shared)
        return compiled

    def load_on_host(self, specialisation: Specialisation) -> Compiled:
        """Load a specialisation on the host backend, and list it in `compiled`."""
        loaded = backend.get().load(specialisation)
        specialisation.keep(-1, loaded)
        self.specialisations[-1, specialisation.kernel, specialisation.key] = specialisation
        return loaded

    def compiled(self) -> list[Compiled]:
        """Every specialisation that this op has used in this process, on every device and on the host backend."""
        found = (s.loaded(index) for (index, *_), s in self.specialisations.items())
        return [compiled for compiled in found if compiled is not None]
