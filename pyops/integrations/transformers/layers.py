"""Decoder layers, recognised by how they combine their parts, with residual additions fused into norms."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import is_attention
from .norms import Norm
from .replacement import Replacement, hooked, renamed, without_weights
from .rotary import Left, Step
from .trial import Unknown, agree, forward_of, randn, refuse_tensors, settings, tried, twin, width

# The orders in which a layer may call its parts.
_PLAIN = ("norm", "attention", "norm", "mlp")
_SANDWICH = ("norm", "attention", "norm", "norm", "mlp", "norm")
_SHAPE = (1, 3, 8)  # shape of the hidden states of a trial
_EXTRA = "pyops_extra"  # an argument that no forward names, to see whether it is passed on


class Form(NamedTuple):
    """What a layer computes::

        residual = hidden_states + multiplier * after_attention(attention(before_attention(hidden_states)))
        result = residual + multiplier * after_mlp(mlp(before_mlp(residual)))

    Attributes:
        before_attention, attention, before_mlp, mlp: names of the layer's parts.
        after_attention, after_mlp: the same; None if there is no such part.
        hidden: the keyword by which the attention gets hidden states; None if it gets them by position.
        given: {argument of the attention: the argument of the layer that is passed on as it}.
        constants: {argument of the attention: its constant value}.
        passes_more: whether the layer also passes on its ``**kwargs``.
        passive: names of further parts, such as dropout, that do nothing.
        multiplier: the layer's attribute that multiplies both summands; None for 1.
    """

    before_attention: str
    attention: str
    after_attention: str | None
    before_mlp: str
    mlp: str
    after_mlp: str | None
    hidden: str | None
    given: dict[str, str]
    constants: dict[str, Any]
    passes_more: bool
    passive: tuple[str, ...]
    multiplier: str | None


class DecoderLayer(Replacement):
    """A layer with its residual additions fused into the norms after them; the second norm is the next layer's.

    Args:
        replaced: {module: replacement} of the model's norms, attentions and MLPs. Their results are new tensors, which
            the fused norms may overwrite.

    Attributes:
        following: the replacement of the next layer; None if that is not replaced.

    Raises:
        Unknown: the layer has another form, or no residual addition is followed by a norm with a fused addition.
    """

    def __init__(self, module: Any, dtype: torch.dtype, replaced: dict[Any, Replacement]) -> None:
        super().__init__(module, dtype)
        self.form = form = form_of(module, replaced)
        refuse_tensors(module, *(part for _, part in self.passed_over()))
        signature = inspect.signature(forward_of(module)).parameters.values()
        self.defaults = {p.name: p.default for p in list(signature)[2:] if p.kind is not p.VAR_KEYWORD}
        self.following: DecoderLayer | None = None
        names = (form.before_attention, form.attention, form.after_attention, form.before_mlp, form.mlp, form.after_mlp)
        parts = {name: replaced.get(getattr(module, name)) for name in names if name is not None}
        self.parts = {name: part for name, part in parts.items() if part is not None}
        adding = [norm for name in (form.before_attention, form.before_mlp) if (norm := self._adding(name))]
        if not adding:
            raise Unknown("no norm of it adds")
        self.op = "fused_add_rms_norm" if adding[0].op == "rms_norm" else adding[0].op
        if "position_embeddings" not in form.given.values():
            raise Unknown("it is given no rotary embedding")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer, form = self.module, self.form
        given = dict(zip(self.defaults, args, strict=False)) | renamed(kwargs, self.defaults)
        step = next((value for value in given.values() if isinstance(value, Step)), None)
        if step is None or not self.serves(hidden_states):
            result: Tensor = self.original(hidden_states, *args, **kwargs)
            return result
        before_attention, before_mlp = getattr(layer, form.before_attention), getattr(layer, form.before_mlp)
        left, step.left = step.left, None
        # Hidden states from a replaced previous layer are referenced nowhere else, so they may be overwritten.
        ours = left is not None and left.hidden_states is hidden_states and left.norm is before_attention
        normalised = left.normalised if left is not None and ours else before_attention(hidden_states)
        attended = self._result(form.attention, normalised, given)
        adding = self._adding(form.before_mlp)
        if ours and adding and self._is_fresh(form.attention, form.after_attention):
            normalised, residual = adding.add(attended, hidden_states)
        else:
            residual = hidden_states + attended
            normalised = before_mlp(residual)
        out, following = self._result(form.mlp, normalised, {}), self.following
        adding = None if following is None else following._adding(following.form.before_attention)
        if following is None or adding is None or hooked(layer, following.module):
            return residual + out
        if not self._is_fresh(form.mlp, form.after_mlp):
            return residual + out
        normalised, total = adding.add(out, residual)
        step.left = Left(total, normalised, adding.module)
        return total

    def passed_over(self) -> Iterable[tuple[str, Any]]:
        return [found for found in without_weights(self.module) if found[0].split(".")[0] in self.form.passive]

    def _result(self, name: str, normalised: Tensor, given: dict[str, Any]) -> Tensor:
        """The summand of the residual: the output of the attention, called with the layer's `given`, or of the MLP."""
        layer, form = self.module, self.form
        if name == form.mlp:
            out, after = getattr(layer, name)(normalised), form.after_mlp
        else:
            options = {name: given.get(source, self.defaults.get(source)) for name, source in form.given.items()}
            if form.passes_more:
                options |= {name: value for name, value in given.items() if name not in self.defaults}
            options |= form.constants
            if form.hidden is not None:
                options[form.hidden] = normalised
            first = () if form.hidden is not None else (normalised,)
            out, after = getattr(layer, name)(*first, **options)[0], form.after_attention
        out = out if after is None else getattr(layer, after)(out)
        return out if form.multiplier is None else out * getattr(layer, form.multiplier)

    def _replaced(self, name: str) -> Replacement | None:
        """The replacement of a part; None if transformers computes the part now, or if it has hooks."""
        part = self.parts.get(name)
        return part if part is not None and part.changed() is None and not hooked(part.module) else None

    def _adding(self, name: str) -> Norm | None:
        """The replaced norm `name` if it fuses the addition before it; else None."""
        norm = self._replaced(name)
        return norm if isinstance(norm, Norm) and norm.fuses else None

    def _is_fresh(self, name: str, after: str | None) -> bool:
        """Whether nothing else references the summand of the residual, so that it may be overwritten."""
        if self.form.multiplier is not None:
            return True
        if after is not None:
            return self._replaced(after) is not None
        part = self._replaced(name)
        if part is None:
            return False
        # An adapter may keep a reference to its output.
        children = part.module._modules.values()
        return not hooked(*children) and not any(width(child) and child._modules for child in children)


def form_of(module: Any, replaced: Mapping[Any, Replacement]) -> Form:
    """The form of a layer, found by a trial with recording stand-ins as its parts.

    Raises:
        Unknown: no form describes the layer.
    """
    calls: list[_Player] = []
    parts: dict[str, nn.Module] = {}
    passive = []
    for name, part in module.named_children():
        is_norm = isinstance(replaced.get(part), Norm)
        if next(part.parameters(), None) is None and not is_norm:
            passive.append(name)
        else:
            is_norm = is_norm or next(part.children(), None) is None
            role = "attention" if is_attention(part) else "norm" if is_norm else "mlp"
            parts[name] = _Player(name, role, len(parts), calls)
    played = twin(module, parts)
    signature = list(inspect.signature(forward_of(module)).parameters.values())[2:]
    marks = {p.name: object() for p in signature if p.kind is not p.VAR_KEYWORD}
    if any(p.kind is p.VAR_KEYWORD for p in signature):
        marks[_EXTRA] = object()
    hidden_states = randn(*_SHAPE)
    found = tried(lambda: forward_of(module)(played, hidden_states, **marks))
    order = tuple(call.role for call in calls)
    if order not in (_PLAIN, _SANDWICH):
        raise Unknown(f"it calls {', '.join(order)}")
    if not isinstance(found, Tensor) or any(call.given for call in calls if call.role != "attention"):
        raise Unknown("it takes or gives more than hidden states")
    names = [call.name for call in calls]
    after_attention, after_mlp = (names.pop(2), names.pop(4)) if order == _SANDWICH else (None, None)
    before_attention, attention, before_mlp, mlp = names

    def total(multiplier: str | None) -> Tensor:
        factor = 1.0 if multiplier is None else getattr(module, multiplier)
        residual = hidden_states + factor * _played(parts, hidden_states, before_attention, attention, after_attention)
        return residual + factor * _played(parts, residual, before_mlp, mlp, after_mlp)

    multipliers = [None, *(name for name, value in settings(module).items() if isinstance(value, float))]
    fitting = [multiplier for multiplier in multipliers if agree([found], [total(multiplier)])]
    if not fitting:
        raise Unknown("its sums are others")
    called = calls[1]
    given = {name: source for name, value in called.given.items() for source, mark in marks.items() if value is mark}
    constants = {name: value for name, value in called.given.items() if name not in given}
    if any(not isinstance(value, (bool, int, float, str, type(None))) for value in constants.values()):
        raise Unknown("it tells its attention something that it computes")
    passes_more = given.pop(_EXTRA, None) is not None
    parts_of_it = before_attention, attention, after_attention, before_mlp, mlp, after_mlp
    return Form(*parts_of_it, called.hidden, given, constants, passes_more, tuple(passive), fitting[0])


class _Player(nn.Module):  # type: ignore[misc]
    """Stands in for a part of a layer: an elementwise function that differs between parts. Records its calls."""

    def __init__(self, name: str, role: str, seed: int, calls: list[_Player]) -> None:
        super().__init__()
        self.name, self.role, self.seed, self.calls = name, role, seed, calls
        self.hidden: str | None = None
        self.given: dict[str, Any] = {}

    def forward(self, *args: Tensor, **given: Any) -> Any:
        self.calls.append(self)
        if not args:
            self.hidden = next(name for name, value in given.items() if isinstance(value, Tensor))
            args = (given.pop(self.hidden),)
        self.given = given
        (x,) = args
        out = self.played(x)
        return (out, None) if self.role == "attention" else out

    def played(self, x: Tensor) -> Tensor:
        return torch.sin((1.0 + self.seed / 8) * x + self.seed)


def _played(parts: dict[str, nn.Module], x: Tensor, *names: str | None) -> Tensor:
    """`x` after these players, applied in order; None is skipped."""
    for name in names:
        if name is not None:
            x = parts[name].played(x)
    return x
