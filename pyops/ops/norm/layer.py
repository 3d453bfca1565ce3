"""Norms of rows or of groups within rows, with an optional gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.errors import OpError
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from .._shared import geometry
from .._shared.geometry import RowTuning
from ._common import example_weight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "layer_norm",
    "mixer2_gated_rms_norm",
    "rms_norm_gated",
]

_layer_norm = Kernel("norm/layer_norm.cu")
_ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}  # {name: function of the kernel}

# Indexed by the constant GATE of the kernel. `weights=2` counts weight and bias.
_TUNING = (
    RowTuning(many=(4, 7), few=(4, 8), resident=(896, 896), rows=2, weights=2),
    # Gate before the norm: a thread holds input, z, and their float32 product, which counts as two rows.
    RowTuning(many=(4, 4), few=(1, 2), resident=(896, 896), rows=4, weights=2),
    # Gate after the norm: a thread holds input and z, and silu takes further registers.
    RowTuning(many=(4, 4), few=(1, 2), resident=(896, 896), rows=2, weights=2, spare_blocks=1),
)


def _grouped_norm(
    out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    stats: tuple[Tensor | None, Tensor | None],
    epsilon: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
    is_rms: bool,
) -> None:
    """The reference of both ops; `stats` are (mean, rstd) to write, or None."""
    activate = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    x = input.float()
    if z is not None and not norm_before_gate:
        x = x * activate(z.float())
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    mean = groups.mean(-1, keepdim=True)
    if is_rms:
        mean = torch.zeros_like(mean)
    rstd = torch.rsqrt((groups - mean).square().mean(-1, keepdim=True) + epsilon)
    y = ((groups - mean) * rstd).flatten(-2)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    if z is not None and norm_before_gate:
        y = y * activate(z.float())
    out.copy_(y)
    for stat, value in zip(stats, (mean, rstd), strict=True):
        if stat is not None:
            stat.copy_(value.reshape(-1, value.shape[-2]).t().reshape(stat.shape))


@op(out=("out", "mean", "rstd"), in_place={"out": "input"})
def layer_norm(
    out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    z: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "swish",
) -> None:
    """Normalise rows, or groups within rows, to mean 0 and variance 1, with an optional gate.

    ``out = T((x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias)`` in float32, rounded once (Ba, Kiros and Hinton
    2016, arXiv:1607.06450). Without `z`, ``x = input``. With `z`, ``x = input * act(z)``; or, if `norm_before_gate`,
    the result is multiplied by act(z) before it is rounded. A group gives zeros or NaN if its sum, or its sum of
    squares, overflows float32.

    Args:
        out: [..., hidden_size], written; constant row stride; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        weight, bias: [hidden_size] of the same dtype, or None for ones and zeros.
        epsilon: added to the variance.
        z: the shape and dtype of `input`, constant row stride; or None.
        mean, rstd: [groups * num_tokens] float32, written: the mean and ``1 / sqrt(var + epsilon)`` of the first group
            of all rows, then of the second, and so on; or None.
        group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
        norm_before_gate: whether the gate multiplies the norm, and not `input`.
        activation: act of the formula: "swish", which is also called "silu", or "sigmoid".
    """
    how = group_size, norm_before_gate, activation
    _grouped_norm(out, input, weight, bias, z, (mean, rstd), epsilon, *how, is_rms=False)


@layer_norm.plan
def plan_layer_norm(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg | None,
    bias: TensorArg | None,
    z: TensorArg | None,
    mean: TensorArg | None,
    rstd: TensorArg | None,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
) -> Launch:
    how = group_size, norm_before_gate, activation
    return _grouped_norm_plan(out, input, weight, bias, z, mean, rstd, *how, is_rms=False)


def _grouped_norm_plan(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg | None,
    bias: TensorArg | None,
    z: TensorArg | None,
    mean: TensorArg | None,
    rstd: TensorArg | None,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
    is_rms: bool,
) -> Launch:
    """The plan of both ops."""
    check.floating(input)
    check.like(out, input)
    hidden_size = check.row_size(input)
    check.row_size(out)
    group_size = hidden_size if group_size is None else group_size
    if group_size < 0 or (hidden_size and (group_size == 0 or hidden_size % group_size)):
        raise check.refuse(input, "group_size", f"expected a divisor of hidden_size={hidden_size}, got {group_size}")
    if activation not in _ACTIVATIONS:
        expected = " or ".join(f'"{name}"' for name in _ACTIVATIONS)
        raise check.refuse(input, "activation", f'expected {expected}, got "{activation}"')
    for vector in (weight, bias):
        check.shape(vector, input.dtype, hidden_size=hidden_size)
    check.like(z, input)
    if z is not None:
        check.row_size(z)
    num_rows, num_groups = check.num_rows(input), hidden_size // max(1, group_size)
    for stat in (mean, rstd):
        check.shape(stat, float32, **{"groups * num_tokens": num_groups * num_rows})
    strides = [check.row_stride(arg) for arg in (out, input, z) if arg]
    vectors = geometry.row_vectors(group_size, strides if num_groups == 1 else (), out, input, z, weight, bias)
    gate = 0 if z is None else 2 if norm_before_gate else 1
    config = geometry.choose_rows(input, num_rows * num_groups, vectors, _TUNING[gate], size=group_size)
    return _layer_norm(
        scalar_t=input.dtype,
        GROUP_SIZE=group_size,
        **config.constants,
        IS_RMS=is_rms,
        GATE=gate,
        ACT=_ACTIVATIONS[activation if gate else "silu"],
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_MEAN=mean is not None,
        HAS_RSTD=rstd is not None,
    ).launch(
        grid=config.num_blocks(num_rows * num_groups) if hidden_size else 0,
        block=config.num_threads,
        num_rows=num_rows,
        num_groups=num_groups,
        out_stride=strides[0],
        input_stride=strides[1],
        z_stride=strides[2] if z else 0,
        **({"mean": 0} if is_rms else {}),
    )


@layer_norm.example
def example_layer_norm(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    with_stats: bool = False,
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype, shift=0.5)
    bias = make.randn(hidden_size, dtype=dtype)
    mean, rstd = (make.empty(num_tokens, dtype="float32") if with_stats else None for _ in range(2))
    out = make.empty(num_tokens, hidden_size, dtype=dtype)
    return out, x, example_weight(make, hidden_size, dtype), bias, 1e-6, None, mean, rstd, None, True, "swish"


@op(out=("out", "rstd"), in_place={"out": "input"})
def rms_norm_gated(
    out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    epsilon: float,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    rstd: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> None:
    """RMS norm of rows, or of groups within rows, with an optional gate (the norm of Mamba-2 mixers).

    ``out = T(norm(input * act(z)) * weight + bias)``, or ``T((norm(input) * weight + bias) * act(z))`` if
    `norm_before_gate`, with ``norm(x) = x / sqrt(mean(x^2) + epsilon)``; float32, rounded once.

    Args:
        out: [..., hidden_size], written; constant row stride; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        weight: [hidden_size] of the same dtype, or None for ones.
        epsilon: added to the mean of squares.
        z: the gate, of the shape and dtype of `input`, constant row stride; or None.
        bias: [hidden_size] of the same dtype, or None for zeros.
        rstd: [groups * num_tokens] float32, written: ``1 / sqrt(mean(x^2) + epsilon)`` of the first group of all rows,
            then of the second, and so on; or None.
        group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
        norm_before_gate: whether the gate multiplies the norm, and not `input`.
        activation: act of the formula: "swish", which is also called "silu", or "sigmoid".
    """
    how = group_size, norm_before_gate, activation
    _grouped_norm(out, input, weight, bias, z, (None, rstd), epsilon, *how, is_rms=True)


@rms_norm_gated.plan
def plan_rms_norm_gated(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg | None,
    z: TensorArg | None,
    bias: TensorArg | None,
    rstd: TensorArg | None,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
) -> Launch:
    how = group_size, norm_before_gate, activation
    return _grouped_norm_plan(out, input, weight, bias, z, None, rstd, *how, is_rms=True)


@rms_norm_gated.example
def example_rms_norm_gated(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    groups: Literal[1, 8] = 1,
    norm_before_gate: bool = False,
    activation: Literal["swish", "sigmoid"] = "swish",
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    z = make.randn(num_tokens, hidden_size, dtype=dtype)
    group_size = hidden_size // groups if hidden_size % groups == 0 else None
    out = make.empty(num_tokens, hidden_size, dtype=dtype)
    how = group_size, norm_before_gate, activation
    return out, x, example_weight(make, hidden_size, dtype), 1e-6, z, None, None, *how


@rms_norm_gated.result
def result_rms_norm_gated(input: TensorArg) -> Result:
    return Result(input.shape, input.dtype)


def mixer2_gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float = 1e-6, n_groups: int = 1
) -> Tensor:
    """RMS norm by groups of ``x * silu(gate)``, the norm of Mamba-2 mixers, see `rms_norm_gated`: a new tensor like x.

    ``T(v / sqrt(mean(v^2) + eps) * weight)`` with ``v = x * silu(gate)`` and the mean over each group; float32, rounded
    once (Dao and Gu 2024, arXiv:2405.21060).

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        gate: shape and dtype of `x`, constant row stride.
        weight: [hidden_size] of the same dtype, or None for ones.
        eps: added to the mean of squares.
        n_groups: groups of a row that are normalised by themselves, a divisor of hidden_size.
    """
    hidden_size = x.shape[-1] if x.ndim else 0
    if n_groups < 1 or hidden_size % n_groups:
        expected = f"expected a divisor of hidden_size={hidden_size}, got {n_groups}"
        raise OpError("mixer2_gated_rms_norm", "n_groups", expected)
    return rms_norm_gated.new(x, weight, eps, gate, group_size=hidden_size // n_groups)
