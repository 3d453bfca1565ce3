"""Norms, recognised by what they compute."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.norm import fused_add_rms_norm, gemma_rms_norm, layer_norm, rms_norm, rms_norm_gated
from .replacement import Replacement
from .trial import Trials, Unknown, dimensions, forward_of, nearest, randn, refuse_tensors, settings, twin

_OPS = ("rms_norm", "gemma_rms_norm", "rms_norm_gated", "layer_norm")
_LARGEST_EPSILON = 1e-2
# Factors of the rows of a trial. The smallest rows make an epsilon of 1e-8 matter.
_SCALES = (1.0, 30.0, 1e-2, 1e-4)


class Form(NamedTuple):
    """The op of a norm and its epsilon.

    Attributes:
        op: the name of the op.
        epsilon: the name of a module's attribute, or a constant in the code of its forward.
    """

    op: str
    epsilon: str | float

    def __call__(self, module: Any, out: Tensor, x: Tensor) -> None:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        epsilon = self.epsilon_of(module)
        if self.op == "rms_norm":
            rms_norm(out, x, weight, epsilon)
        elif self.op == "gemma_rms_norm":
            gemma_rms_norm(out, x, weight, epsilon)
        elif self.op == "rms_norm_gated":
            rms_norm_gated(out, x, weight, epsilon, bias=bias)
        else:
            layer_norm(out, x, weight, bias, epsilon)

    def epsilon_of(self, module: Any) -> float:
        return float(getattr(module, self.epsilon) if isinstance(self.epsilon, str) else self.epsilon)


class Norm(Replacement):
    """A norm of rows.

    Raises:
        Unknown: no norm op agrees with the forward.
    """

    def __init__(self, module: Any, dtype: torch.dtype, trials: Trials) -> None:
        super().__init__(module, dtype)
        weights = list(module.parameters(recurse=False))
        if any(weight.dtype != dtype for weight in weights):
            raise Unknown(f"its weight is {weights[0].dtype}, not {dtype}")
        self.form, self.ndims = trials.outcome(module, _tried)
        self.op = self.form.op
        # In float16, gemma_rms_norm keeps the sum in float32, whereas transformers rounds it.
        self.fuses = self.op == "rms_norm" or (self.op == "gemma_rms_norm" and dtype != torch.float16)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or hidden_states.ndim not in self.ndims or not self.serves(hidden_states):
            result: Tensor = self.original(hidden_states, *args, **kwargs)
            return result
        # [batch, heads, tokens, dim] is a view of [batch, tokens, heads, dim], which has a single row stride.
        heads_first = hidden_states.ndim == 4 and not hidden_states.is_contiguous()
        rows = hidden_states.transpose(1, 2) if heads_first else hidden_states
        if rows.stride(-1) != 1 or (self.op != "rms_norm" and not _has_one_stride(rows)):
            rows = rows.contiguous()
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self.form(self.module, out, rows)
        return out.transpose(1, 2) if heads_first else out

    def add(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of the sum, the sum) of two tensors. Both may be overwritten."""
        weight, epsilon = getattr(self.module, "weight", None), self.form.epsilon_of(self.module)
        if self.op == "rms_norm":
            fused_add_rms_norm(input, residual, weight, epsilon)
            return input, residual
        total = torch.empty_like(residual)
        gemma_rms_norm(input, input, weight, epsilon, residual, total)
        return input, total


def _has_one_stride(x: Tensor) -> bool:
    """Whether all rows of a tensor have one common stride."""
    pairs = zip(range(x.ndim - 2), range(1, x.ndim - 1), strict=True)
    return x.stride(-1) == 1 and all(x.stride(i) == x.stride(j) * x.shape[j] for i, j in pairs)


def _tried(module: Any) -> tuple[Form, frozenset[int]]:
    """The form that agrees with a norm, and the numbers of dimensions of hidden states for which it does."""
    refuse_tensors(*module.modules())
    weight = getattr(module, "weight", None)
    shape = getattr(module, "normalized_shape", None) if weight is None else weight.shape
    size = 64 if shape is None else tuple(shape)[-1]
    rows = torch.stack([scale * (0.5 + randn(size, seed=7 + i)) for i, scale in enumerate(_SCALES)])[None]

    def theirs(dtype: torch.dtype) -> Tensor:
        result: Tensor = twin(module, dtype=dtype).forward(rows.to(dtype))
        return result

    def ours(form: Form, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(rows, dtype=dtype)
        form(twin(module, dtype=dtype), out, rows.to(dtype))
        return out

    candidates = [Form(op, epsilon) for op in _OPS for epsilon in _epsilons(module) if _may(op, module)]
    found = nearest(candidates, ours, theirs)
    if found is None:
        raise Unknown("no op computes what it does")

    def normalised(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        found(twin(module), out, x)
        return out

    return found, dimensions(normalised, twin(module).forward, rows[0])


def _epsilons(module: Any) -> list[str | float]:
    """Candidates for the epsilon of a norm: attributes with small values, and small constants in its code."""
    names = [name for name, value in settings(module).items() if _is_small(value)]
    return [*names, *(value for value in forward_of(module).__code__.co_consts if _is_small(value))]


def _is_small(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= _LARGEST_EPSILON


def _may(op: str, module: Any) -> bool:
    """Whether the op supports the module's combination of weight and bias."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return (weight is not None or op != "gemma_rms_norm") and (bias is None or op in ("layer_norm", "rms_norm_gated"))
