"""Scores of experts from logits, as the references compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_MIN_NORMAL = 2.0**-126
_FLOAT_MAX = (2 - 2.0**-23) * 2.0**127


def as_logits(logits: Tensor) -> Tensor:
    """Logits as scores take them: NaN as -inf, inf as the largest float."""
    return logits.nan_to_num(nan=-torch.inf, posinf=_FLOAT_MAX, neginf=-torch.inf)


def softmax(logits: Tensor) -> Tensor:
    """Over the last dimension; 0 where every logit is -inf."""
    largest = logits.amax(-1, keepdim=True)
    powers = (logits - torch.where(largest > -torch.inf, largest, 0.0)).exp()
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total > 0, total, 1.0)


def sigmoid(logits: Tensor) -> Tensor:
    return _normal_or_0(logits.sigmoid())


def softplus_sqrt(logits: Tensor) -> Tensor:
    return _normal_or_0(torch.nn.functional.softplus(logits)).sqrt()


def _normal_or_0(x: Tensor) -> Tensor:
    """The kernels flush subnormal numbers."""
    return torch.where(x < _MIN_NORMAL, 0.0, x)
