"""Elementwise activations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from .._shared import chunks
from ._common import min_blocks_of_silu

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gelu", "gelu_fast", "gelu_new", "gelu_quick", "relu2", "relu_squared", "silu", "xielu"]

_activation = Kernel("activation/activation.cu")
_xielu = Kernel("activation/xielu.cu")
# Resident blocks of 256 threads per SM: the kernels need 40 registers, as every step rounds (docs/performance/rows.md).
_XIELU_BLOCKS = 6


def _plan_elementwise(kernel: Kernel, out: TensorArg, input: TensorArg, **constants: Any) -> Launch:
    """The launch of an elementwise kernel; `constants` may include min_blocks."""
    check.floating(input)
    check.row_size(input)
    check.like(out, input)
    check.row_size(out)
    if check.row_stride(input) == check.row_stride(out) == input.shape[-1]:  # contiguous: one long row, in wide vectors
        out, input = (replace(arg, shape=(arg.numel,), strides=(1,)) for arg in (out, input))
    return chunks.launch(kernel, out, input, **constants)


def example_elementwise(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    """The output and input of an elementwise activation."""
    return make.empty(num_tokens, hidden_size, dtype=dtype), make.randn(num_tokens, hidden_size, dtype=dtype)


@op(out="out", in_place={"out": "input"})
def gelu(out: Tensor, input: Tensor) -> None:
    """GELU: ``out = T(x / 2 * (1 + erf(x / sqrt(2))))`` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Computed in float32 and rounded once.

    Args:
        out: [...], written; may be `input` itself; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
    """
    out.copy_(torch.nn.functional.gelu(input.float()))


@gelu.plan
def plan_gelu(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_elementwise(_activation, out, input, ACT="gelu")


gelu.example(example_elementwise)


@op(out="out", in_place={"out": "input"}, ulps=0)
def gelu_new(out: Tensor, input: Tensor) -> None:
    """GELU as GPT-2 writes it: ``out = x / 2 * (1 + tanh(0.79788456 * (x + 0.044715 * x^3)))``.

    Every operation rounds to the element type, as in eager PyTorch (Hendrycks and Gimpel 2016, arXiv:1606.08415), and
    results equal eager's bit for bit. An approximation would not be close: 1 + tanh cancels, which magnifies
    differences.

    Args:
        out: [...], written; may be `input` itself; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
    """
    tanh = torch.tanh(0.79788456 * (input + 0.044715 * (input * input * input)))
    out.copy_(0.5 * input * (1.0 + tanh))


@gelu_new.plan
def plan_gelu_new(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_elementwise(_activation, out, input, ACT="gelu_new")


gelu_new.example(example_elementwise)


@op(out="out", in_place={"out": "input"}, ulps=0)
def gelu_fast(out: Tensor, input: Tensor) -> None:
    """GELU with the cube factored out: ``out = x / 2 * (1 + tanh(0.79788456 * x * (1 + 0.044715 * x * x)))``.

    Every operation rounds to the element type, as in eager PyTorch (Hendrycks and Gimpel 2016, arXiv:1606.08415), and
    results equal eager's bit for bit. An approximation would not be close: 1 + tanh cancels, which magnifies
    differences.

    Args:
        out: [...], written; may be `input` itself; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
    """
    tanh = torch.tanh((0.79788456 * input) * (1.0 + (0.044715 * input) * input))
    out.copy_(0.5 * input * (1.0 + tanh))


@gelu_fast.plan
def plan_gelu_fast(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_elementwise(_activation, out, input, ACT="gelu_fast")


gelu_fast.example(example_elementwise)


@op(out="out", in_place={"out": "input"})
def gelu_quick(out: Tensor, input: Tensor) -> None:
    """GELU by the logistic function: ``out = T(x / (1 + exp(-1.702 * x)))``.

    Computed in float32 and rounded once (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Args:
        out: [...], written; may be `input` itself; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
    """
    x = input.float()
    out.copy_(x / (1.0 + torch.exp(-1.702 * x)))


@gelu_quick.plan
def plan_gelu_quick(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_elementwise(_activation, out, input, ACT="gelu_quick", min_blocks=min_blocks_of_silu(input))


gelu_quick.example(example_elementwise)


@op(out="out", in_place={"out": "input"}, ulps=0)
def relu2(out: Tensor, input: Tensor) -> None:
    """Squared ReLU: ``out = T(max(x, 0)^2)``; NaN stays NaN (So et al. 2021, arXiv:2109.08668).

    Args:
        out: [...], written; may be `input` itself; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
    """
    out.copy_(torch.relu(input).square())


@relu2.plan
def plan_relu2(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_elementwise(_activation, out, input, ACT="relu2")


relu2.example(example_elementwise)


@op(out="out", in_place={"out": "input"}, ulps=0)
def relu_squared(out: Tensor, input: Tensor) -> None:
    """`relu2` by the name of vLLM's op: ``out = T(max(x, 0)^2)``. NaN stays NaN, which vLLM's op makes 0.

    Args:
        out: [...], written; may be `input` itself; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
    """
    relu2.reference(out, input)


relu_squared.plan(plan_relu2)
relu_squared.example(example_elementwise)


@op(out="out", in_place={"out": "input"})
def silu(out: Tensor, input: Tensor) -> None:
    """SiLU: ``out = T(x / (1 + exp(-x)))`` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Computed in float32 and rounded once.

    Args:
        out: [...], written; may be `input` itself; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
    """
    out.copy_(torch.nn.functional.silu(input))


@silu.plan
def plan_silu(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_elementwise(_activation, out, input, ACT="silu", min_blocks=min_blocks_of_silu(input))


silu.example(example_elementwise)


@op(out="out", in_place={"out": "input"})
def xielu(out: Tensor, input: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6) -> None:
    """xIELU, a quadratic and an exponential side with learned strengths (Huang and Schlag 2024, arXiv:2411.13010).

    ``out = a_p * x * x + beta * x`` where x > 0, else ``(expm1(min(x, eps)) - x) * a_n + beta * x``, with ``a_p =
    softplus(alpha_p)`` and ``a_n = beta + softplus(alpha_n)``. `beta` and `eps` are first rounded to the element type.
    Every operation rounds to it, too, as in eager PyTorch.

    Args:
        out: [...], written; may be `input` itself; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
        alpha_p, alpha_n: [1] of the same dtype, the learned values before softplus.
        beta: slope at zero; eps: where the exponential side starts, just below zero.
    """
    slope, start = (input.new_full((), value) for value in (beta, eps))
    strength_p = torch.nn.functional.softplus(alpha_p)
    strength_n = slope + torch.nn.functional.softplus(alpha_n)
    positive = strength_p * input * input
    negative = (torch.expm1(torch.minimum(input, start)) - input) * strength_n
    out.copy_(torch.where(input > 0, positive, negative) + slope * input)


@xielu.plan
def plan_xielu(out: TensorArg, input: TensorArg, alpha_p: TensorArg, alpha_n: TensorArg) -> Launch:
    check.shape(alpha_p, input.dtype, size=1)
    check.shape(alpha_n, input.dtype, size=1)
    return _plan_elementwise(_xielu, out, input, min_blocks=_XIELU_BLOCKS)


@xielu.example
def example_xielu(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    alphas = (make.full(1, value=value, dtype=dtype) for value in (0.2, -1.05))
    return (
        *example_elementwise(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype),
        *alphas,
        0.5,
        -1e-6,
    )
