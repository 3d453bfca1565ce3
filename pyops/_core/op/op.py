"""Op: a declaration with what plans it and the plans made so far. The registry of all ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from ..tensors.tensor import TensorArg
from . import arguments, guard, plan, prepare, returning, torch_library, trust, wrapper
from .plan import Plan
from .planner import F, Planner
from .torch_library import Form

_MAX_PLANS = 8192

registry: dict[str, Op] = {}


class Op(Planner):
    """An operator: its declaration, what plans it, its wrapper, and the plans made so far.

    Attributes:
        call: the wrapper that writes given outputs; compile_wrapper: compiles its text.
        form: the form that allocates outputs; None of an op that is always given them.
        plans: {key: plan} of signatures that are called by the wrapper.
        recent: [the plan of the last call with torch tensors].
    """

    def __init__(self, declaration: Any) -> None:
        super().__init__(declaration)
        self.name: str = declaration.name
        self.reference: Callable[..., None] = declaration.reference
        self.parameters = declaration.parameters
        self.tensors = declaration.tensors
        if (held := registry.get(self.name)) and held.reference.__module__ != self.reference.__module__:
            raise TypeError(f"{self.name}: {held.reference.__module__} has declared an op of this name")
        self.atol: Callable[..., float] = declaration.fed(
            declaration.atol if callable(declaration.atol) else lambda: declaration.atol
        )
        self.plans: dict[Any, Plan] = {}
        self.recent: list[Plan] = [_no_plan()]
        callbacks = wrapper.Callbacks(
            self.plans,
            self.recent,
            self._prepare,
            partial(prepare.call_unkept, declaration, self),
            partial(plan.check_overlap, declaration),
            self._recover,
            self._remember,
            {p.name: p.default for p in self.parameters},
        )
        self.call, self.compile_wrapper = wrapper.make(declaration, callbacks)
        self.form: Form | None = None
        if declaration.returned:
            self.form = returning.make(self, self.call)
        torch_library.add(declaration, self.call, self.compile_wrapper, self.check, self.form)
        self.wrapper: Any = self.form.new if self.form else self.call
        self.wrapper.__dict__.update(
            op=self,
            reference=self.reference,
            compiled=self.compiled,
            plan=self.set_plan,
            example=self.set_example,
            traffic=self.set_traffic,
            bad_indices=self.set_bad_indices,
            result=self.set_result,
            new=returning.refusing(declaration),
        )
        if like_inputs := returning.like_inputs(declaration):
            self.set_result(like_inputs)
        registry[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """An op is pickled and copied by the name of its function, as functions are."""
        return attrgetter("op"), (self.wrapper,)

    def set_result(self, function: F) -> F:
        """`function` says what the outputs look like that the form `new` allocates; with it, the op has that form.

        It names parameters of the op. Its keyword-only parameters are parameters of `new` alone: what a caller of the
        op says by the outputs that it gives, such as their dtype. Their texts are the section Args of its docstring.
        """
        if self.form is None or not self.declaration.returned:
            self.form = returning.make(self, self.call, function)
            torch_library.add(self.declaration, self.call, self.compile_wrapper, self.check, self.form)
        self.wrapper.new = self.form.new
        return self.set_results(self.form.declaration, function)

    def __call__(self, *values: Any) -> None:
        """The wrapper, given a value for each parameter."""
        self.applied(self.call, values)()

    def applied(self, function: Callable[..., Any], values: Sequence[Any]) -> Callable[[], Any]:
        """`function`, which has the op's parameters, given a value for each of them."""
        return self.declaration.applied(function, values)

    def check(self, *args: Any) -> tuple[Sequence[TensorArg | None], list[Any]]:
        """(what a plan sees of `args`, the launches it makes). Raises OpError for a call that the op refuses."""
        _, described = arguments.describe(self.declaration, args)
        return described, self.launches(*described)

    def forget(self) -> None:
        """Drop every plan; kernels stay loaded. Needed after an environment switch has changed."""
        self.recent[0] = _no_plan()
        self.plans.clear()

    # What the wrapper calls.

    def _prepare(self, key: Any, *args: Any) -> Plan:
        """Make the plan for a new signature, and keep it."""
        made = prepare.prepare(self.declaration, self, args)
        made.alignments = key[0]
        made.scalars = tuple(value for p, value in zip(self.parameters, args, strict=True) if p.keyed)
        if made.keep:
            if len(self.plans) >= _MAX_PLANS:
                self.forget()
            self.plans[key] = made
        return made

    def _recover(self, error: Exception | int, made: Plan, stream: int, *words: Any) -> None:
        plan.recover(self.declaration, error, made.device, made.bound, stream, *words)

    def _remember(self, made: Plan, *tensors: Any) -> None:
        """Let the next call with tensors like these find its plan by one guard."""
        if made.guard is guard.uncalled:
            made.guard = guard.never  # the first call of a plan makes no guard: there may be no second
        elif made.guard is guard.never or (made is self.recent[0] and made.guard is not guard.unguarded):
            # The second call, or the guard has just failed on tensors of its own key: torch is in another mode now.
            made.guard = guard.guard(tensors)
            made.requires_grad = any(value.requires_grad for value in tensors)
            pairs = zip(self.tensors, tensors, strict=True)
            made.versioned = any(p.written and not value.is_inference() for p, value in pairs)
        self.recent[0] = made


def _forget_all() -> None:
    for one in list(registry.values()):
        one.forget()


trust.forget_plans.append(_forget_all)


def _no_plan() -> Plan:
    """The content of `recent` before the first call: a plan with a guard that always fails."""
    return Plan(lambda *_: None)
