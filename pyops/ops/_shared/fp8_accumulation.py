"""The error of fp8 products on Hopper's tensor cores: the `atol` of their declarations.

A WGMMA adds 32 products to an accumulator. Each of the 33 addends is truncated to a multiple of 2^-13 of the largest
power of two among them; the addends are summed exactly; the first 14 bits of the result are kept. This describes all of
49152 accumulators that an H200 computed, bit for bit: both formats, three kinds of contents, 32 to 512 elements of K.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32_ERROR = 2.0**-18  # fraction of the largest result: the error of a float32 sum of a few hundred addends
_TERMS = 32  # products that a WGMMA adds to an accumulator
_BITS = 13  # addends are truncated to multiples of 2^-13 of the largest power of two
_DEVIATIONS = 6  # standard deviations that are allowed


def accumulated(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(``a @ b`` of fp8 [M, K] and [K, N]; the mean of its error, towards zero; the variance), each [M, N] float64.

    Truncation of the products has errors of both signs; they add up like the square root of their number, with a
    standard deviation of 1 / sqrt(12) of a unit each. An accumulator is truncated towards zero once by each WGMMA, by
    half a unit on average. NaN and infinity count as 0.
    """
    x, y = (one.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for one in (a, b))
    total = torch.zeros(x.shape[0], y.shape[1], dtype=torch.float64, device=x.device)
    mean, variance = total.clone(), total.clone()
    for first in range(0, x.shape[1], _TERMS):
        terms = slice(first, first + _TERMS)
        largest = torch.maximum(total.abs(), x[:, terms].abs().amax(1)[:, None] * y[terms].abs().amax(0))
        exponent = torch.frexp(largest)[1].double() - 1  # not by log2: on a GPU, that of 8 is below 3
        unit = torch.exp2(exponent - _BITS).masked_fill(largest == 0, 0.0)
        total += x[:, terms] @ y[terms]
        mean += unit / 2
        variance += unit.square() * (_TERMS + 2) / 12
    return total, mean, variance


def allowed(mean: Tensor, variance: Tensor) -> Tensor:
    """The largest error, given its mean and variance."""
    return mean + _DEVIATIONS * variance.sqrt()


def absolute_error(a: Tensor, b: Tensor) -> float:
    """The largest error of an element of ``a @ b`` [M, K] x [K, N], as a fraction of the largest element."""
    if a.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return FLOAT32_ERROR
    total, mean, variance = accumulated(a, b)
    if not total.any():
        return FLOAT32_ERROR
    return FLOAT32_ERROR + float(allowed(mean, variance).max() / total.abs().max())


def experts_error(a: Tensor, b: Tensor) -> float:
    """`absolute_error` of rows a [M, K] times the weights b [num_experts, N, K] of any expert."""
    if a.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return FLOAT32_ERROR
    return max((absolute_error(a, one.T) for one in b), default=FLOAT32_ERROR)
