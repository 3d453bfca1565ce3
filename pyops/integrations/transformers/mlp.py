"""MLPs, recognised by what they compute: gate and up, fused or separate, or only up, and an activation op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops import activation
from .joined import Joined
from .replacement import Replacement, without_weights
from .trial import Trials, Unknown, agree, dimensions, nearest, projection, randn, refuse_tensors, twin, width

_GATED = ("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul")
_GATE_LAST = ("mul_and_silu",)
_PLAIN = ("gelu_new", "gelu_fast", "gelu_quick", "relu2")
_HIDDEN, _INTERMEDIATE = 8, 12  # sizes of a trial
_CLOSE = 2e-6  # GELU and its approximations differ by far more
_LARGE = 100.0  # factor of the rows of a second trial, large enough to reach a clamp of the activation


class Form(NamedTuple):
    """What an MLP computes: ``output(op(concat(input(x) for each of inputs)))``.

    Attributes:
        op: the name of the op.
        inputs: names of the projections of the hidden states.
        output: the name of the last projection.
    """

    op: str
    inputs: tuple[str, ...]
    output: str

    def __call__(self, module: Any, products: Tensor) -> Tensor:
        halves = 1 if self.op in _PLAIN else 2
        activated = products.new_empty(*products.shape[:-1], products.shape[-1] // halves)
        getattr(activation, self.op)(activated, products)
        result: Tensor = getattr(module, self.output)(activated)
        return result


class MLP(Replacement):
    """An MLP with one GEMM for gate and up, and an activation op.

    Raises:
        Unknown: no activation op agrees with the forward.
    """

    def __init__(self, module: Any, dtype: torch.dtype, trials: Trials) -> None:
        super().__init__(module, dtype)
        refuse_tensors(module, *(part for _, part in without_weights(module)))
        self.form, self.ndims = trials.outcome(module, _tried)
        self.op = self.form.op
        self.products = Joined(*(getattr(module, name) for name in self.form.inputs))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or hidden_states.ndim not in self.ndims or not self.serves(hidden_states):
            result: Tensor = self.original(hidden_states, *args, **kwargs)
            return result
        return self.form(self.module, self.products(hidden_states))

    def serving(self) -> str:
        return self.op + self.products.note()

    def passed_over(self) -> Iterable[tuple[str, Any]]:
        return without_weights(self.module)

    def remove(self) -> None:
        super().remove()
        self.products.part()


def is_mlp(module: Any) -> bool:
    """Whether a module has two or three projections and no other weights."""
    parts = [part for part in module.children() if next(part.parameters(), None) is not None]
    own = next(module.parameters(recurse=False), None)
    return own is None and len(parts) in (2, 3) and all(width(part) for part in parts)


def _why(module: Any) -> str:
    """The reason why an MLP is not replaced; names its activation if that is a module."""
    acts = [type(part).__name__ for part in module.children() if next(part.parameters(), None) is None]
    return f"no op computes what it does with {acts[0]}" if acts else "no op computes what it does"


def _tried(module: Any) -> tuple[Form, frozenset[int]]:
    """The form that agrees with an MLP, and the numbers of dimensions of hidden states for which it does.

    Raises:
        Unknown: no form agrees.
    """
    linears = {name: part for name, part in module.named_children() if width(part)}

    def small(form: Form, dtype: torch.dtype) -> Any:
        """A twin with small projections."""
        joined = len(form.inputs) == 1 and form.op not in _PLAIN
        sizes = dict.fromkeys(form.inputs, (_HIDDEN, _INTERMEDIATE * (2 if joined else 1)))
        sizes[form.output] = _INTERMEDIATE, _HIDDEN
        biases = {name: getattr(linears[name], "bias", None) is not None for name in linears}
        parts: dict[str, nn.Module] = {
            name: projection(*sizes[name], biases[name], 10 * i, dtype) for i, name in enumerate(linears)
        }
        return twin(module, parts, dtype)

    x = randn(1, 64, _HIDDEN, seed=1) / _HIDDEN**0.5

    def ours(form: Form, dtype: torch.dtype, rows: Tensor = x) -> Tensor:
        made, rows = small(form, dtype), rows.to(dtype)
        return form(made, torch.cat([getattr(made, name)(rows) for name in form.inputs], -1))

    def theirs(form: Form, rows: Tensor = x) -> Callable[[torch.dtype], Tensor]:
        return lambda dtype: small(form, dtype).forward(rows.to(dtype))

    for forms in _shapes(linears):
        try:
            found = nearest(forms, ours, theirs(forms[0]), _CLOSE)
        except Unknown:  # the forward expects other shapes of weights
            continue
        # Large hidden states reach the clamp of the activation, if it has one.
        if found and agree([ours(found, torch.float32, _LARGE * x)], [theirs(found, _LARGE * x)(torch.float32)]):
            computed = partial(ours, found, torch.float32)
            return found, dimensions(computed, small(found, torch.float32).forward, x[0])
    raise Unknown(_why(module))


def _shapes(linears: dict[str, Any]) -> list[list[Form]]:
    """Candidate forms, grouped by the shapes that they imply for the projections."""
    if len(linears) == 3:
        return [[Form(op, (first, second), last) for op in _GATED] for first, second, last in permutations(linears)]
    return [
        [Form(op, (first,), last) for op in ops]
        for first, last in permutations(linears, 2)
        for ops in ((*_GATED, *_GATE_LAST), _PLAIN)
    ]
