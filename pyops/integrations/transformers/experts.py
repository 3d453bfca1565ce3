"""The experts of transformers' mixtures of experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fused.experts import FusedMoEQuantConfig, fused_experts
from .replacement import Replacement, without_weights
from .trial import Trials, Unknown, agree, forward_of, randn, refuse_tensors, tried, twin

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOKENS, _TOP_K = 3, 16, 12, 5, 2  # sizes of a trial
# Factors of the hidden states of a trial: small values tell GELU from its approximations, large ones reach clamps.
_SCALES = (0.25, 4.0)
_WEIGHTS, _BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")
_ACTIVATIONS = ("silu", "gelu", "swigluoai", "swiglustep")  # gated activations of `fused_experts`


class Form(NamedTuple):
    """The layout of experts' weights, and their activation.

    Attributes:
        activation: the activation between the GEMMs.
        by_inputs: whether weights are [num_experts, in, out] instead of [num_experts, out, in].
        has_biases: whether there are biases.
    """

    activation: str
    by_inputs: bool
    has_biases: bool


class Experts(Replacement):
    """The experts of a layer, for tokens that transformers' router has routed.

    Weights [num_experts, in, out] are transposed in memory to [num_experts, out, in], as the op reads them. Their shape
    stays, and only a temporary copy of one weight is allocated.

    Raises:
        Unknown: the experts compute something that the op does not.
    """

    op = "fused_experts"

    def __init__(self, module: Any, dtype: torch.dtype, trials: Trials) -> None:
        super().__init__(module, dtype)
        if module.gate_up_proj.dtype != dtype:
            raise Unknown(f"its weights are {module.gate_up_proj.dtype}, not {dtype}")
        self._form: Form = trials.outcome(module, form_of)
        self._parameters = _parameters(module)

    def passed_over(self) -> Iterable[tuple[str, Any]]:
        return without_weights(self.module)

    def install(self) -> None:
        if self._form.by_inputs:
            lay_out(self.module)
        super().install()

    def remove(self) -> None:
        super().remove()
        if self._form.by_inputs:
            for weight in _tensors(self.module, _WEIGHTS):
                weight.data = weight.data.contiguous()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        weights, x = _tensors(self.module, _WEIGHTS), given["hidden_states"]
        is_laid_out = not self._form.by_inputs or all(weight.mT.is_contiguous() for weight in weights)
        if not self.serves(x) or x.ndim != 2 or not is_laid_out:
            result: Tensor = self.original(*args, **kwargs)
            return result
        return computed(self.module, self._form, *(given[name] for name in self._parameters))


def is_experts(module: Any) -> bool:
    """Whether a module holds the weights of experts, and its forward takes expert ids."""
    has_weights = all(isinstance(getattr(module, name, None), Tensor) for name in _WEIGHTS)
    parameters = _parameters(module) if has_weights else []
    return len(parameters) == 3 and parameters[0] == "hidden_states"


def _parameters(module: Any) -> list[str]:
    """The forward's parameter names for hidden states, expert ids and router weights."""
    return list(inspect.signature(forward_of(module)).parameters)[1:]


def _tensors(module: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(module, name) for name in names]


def lay_out(module: Any) -> None:
    """Transpose weights [num_experts, in, out] in memory to [num_experts, out, in], as the op reads them; their shape
    stays."""
    for weight in _tensors(module, _WEIGHTS):
        if not weight.mT.is_contiguous():
            weight.data = weight.data.mT.contiguous().mT


def computed(module: Any, form: Form, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The op's result for experts of a form."""
    gate_up, down = (weight.mT if form.by_inputs else weight for weight in _tensors(module, _WEIGHTS))
    first, second = _tensors(module, _BIASES) if form.has_biases else (None, None)
    choice = top_k_weights.float().contiguous(), top_k_index.contiguous()
    terms = FusedMoEQuantConfig(w1_bias=first, w2_bias=second)
    return fused_experts(x, gate_up, down, *choice, activation=form.activation, quant_config=terms)


def form_of(module: Any) -> Form:
    """The form of the module's experts, found by a trial with small weights."""
    refuse_tensors(*module.modules())
    names = {name for name, _ in module.named_parameters(recurse=False)}
    has_biases = set(_BIASES) <= names
    others = names - {*_WEIGHTS, *(_BIASES if has_biases else ())}
    if others:
        raise Unknown(f"its experts have {', '.join(sorted(others))}")
    gate_up, down = (tuple(weight.shape) for weight in _tensors(module, _WEIGHTS))
    reason = Unknown(f"its weights are {gate_up} and {down}")
    for by_inputs in (False, True):
        if _fit(gate_up, down, by_inputs):
            try:
                return _form_by(module, by_inputs, has_biases)
            except Unknown as why:
                reason = why
    raise reason


def _fit(gate_up: tuple[int, ...], down: tuple[int, ...], by_inputs: bool) -> bool:
    """Whether the shapes of both weights fit each other in this layout."""
    if by_inputs:
        gate_up, down = (gate_up[0], *gate_up[:0:-1]), (down[0], *down[:0:-1])
    return gate_up == (down[0], 2 * down[-1], down[1])


def _form_by(module: Any, by_inputs: bool, has_biases: bool) -> Form:
    """As `form_of`, for one layout of the weights.

    Raises:
        Unknown: the experts compute something else.
    """
    sizes = (2 * _INTERMEDIATE, _HIDDEN), (_HIDDEN, _INTERMEDIATE)
    weights = {name: randn(_EXPERTS, *size, seed=i) for i, (name, size) in enumerate(zip(_WEIGHTS, sizes, strict=True))}
    if by_inputs:
        weights = {name: weight.mT for name, weight in weights.items()}
    if has_biases:
        weights |= {name: randn(_EXPERTS, size[0], seed=5) for name, size in zip(_BIASES, sizes, strict=True)}
    small = twin(module, **weights)
    small.num_experts = _EXPERTS
    x, probabilities = randn(_TOKENS, _HIDDEN, seed=3), randn(_TOKENS, _TOP_K, seed=4).sigmoid()
    firsts = torch.arange(_TOKENS, dtype=torch.int64, device="cpu")
    chosen = torch.stack((firsts % _EXPERTS, (firsts + 1) % _EXPERTS), 1)
    # The undecorated forward of the class: its decorator may choose another implementation on a GPU.
    theirs = tried(lambda: [forward_of(module)(small, scale * x, chosen, probabilities) for scale in _SCALES])
    for activation in _ACTIVATIONS:
        form = Form(activation, by_inputs, has_biases)
        if agree([computed(small, form, scale * x, chosen, probabilities) for scale in _SCALES], theirs):
            return form
    raise Unknown("its experts compute something else")
