"""Scores of experts from logits, as the references compute them."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MIN_NORMAL = 2.0**-126
_FLOAT_MAX = (2 - 2.0**-23) * 2.0**127


def as_logits(logits: Tensor) -> Tensor:
    """Logits with NaN replaced by -inf, and inf by the largest float."""
    return logits.nan_to_num(nan=-inf, posinf=_FLOAT_MAX, neginf=-inf)


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; zeros for a row with only -inf."""
    largest = logits.amax(-1, keepdim=True)
    powers = (logits - largest.masked_fill(largest == -inf, 0.0)).exp()
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1.0)


def sigmoid(logits: Tensor) -> Tensor:
    return _normal_or_0(logits.sigmoid())


def softplus_sqrt(logits: Tensor) -> Tensor:
    return _normal_or_0(logits.clamp(min=0) + (-logits.abs()).exp().log1p()).sqrt()


def _normal_or_0(x: Tensor) -> Tensor:
    """`x` with subnormal numbers flushed to 0, as in the kernels."""
    return x.masked_fill(x < _MIN_NORMAL, 0.0)
