"""Gated activations: one half of a row, activated, times the other half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from .._shared import chunks
from ._common import check_halves, example_gated, min_blocks_of_silu, result_gated

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "mul_and_silu",
    "silu_and_mul",
    "silu_and_mul_with_clamp",
    "situ_and_mul",
    "swigluoai_and_mul",
    "swiglustep_and_mul",
]

_act_and_mul = Kernel("activation/act_and_mul.cu")
_fatrelu_and_mul = Kernel("activation/fatrelu_and_mul.cu")
_silu_and_mul_with_clamp = Kernel("activation/silu_and_mul_with_clamp.cu")
_situ_and_mul = Kernel("activation/situ_and_mul.cu")
_swigluoai_and_mul = Kernel("activation/swigluoai_and_mul.cu")
_swiglustep_and_mul = Kernel("activation/swiglustep_and_mul.cu")


def _plan_gated(kernel: Kernel, out: TensorArg, input: TensorArg, **constants: Any) -> Launch:
    """The launch of a gated kernel, which reads the halves of `input`; `constants` may include min_blocks."""
    check_halves(out, input)
    check.dtype(out, input.dtype)
    return chunks.launch(kernel, out, input, **constants)


@op(out="out", ulps=0)
def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """SwiGLU: ``out = T(T(g / (1 + exp(-g))) * u)`` for the halves ``input = [g, u]``.

    After Shazeer 2020, arXiv:2002.05202. Equal to eager PyTorch on the same device, bit for bit.

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
    """
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


silu_and_mul.result(result_gated)


@silu_and_mul.plan
def plan_silu_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_act_and_mul, out, input, ACT="silu", ACT_FIRST=True, min_blocks=min_blocks_of_silu(input))


silu_and_mul.example(example_gated)


@op(out="result", ulps=0)
def silu_and_mul_with_clamp(result: Tensor, input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> None:
    """SwiGLU of clamped halves: ``result = T(T(x / (1 + exp(-alpha * x))) * (y + beta))`` for ``input = [g, u]``.

    ``x = min(g, l), y = max(min(u, l), -l)``, where l is `limit`, rounded to the element type. A NaN limit means no
    limit; with a limit below 0 every u becomes -l. NaN stays NaN. ``y + beta`` is float32. Without alpha and beta equal
    to eager PyTorch on the same device, bit for bit.

    Args:
        result: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        limit: largest gate and largest magnitude of u.
        alpha: slope of the sigmoid.
        beta: added to the clamped u.
    """
    gate, up = input.chunk(2, dim=-1)
    bound = gate.new_full((), limit, dtype=torch.float32).to(gate.dtype)
    gate, up = _at_most(gate, bound), -_at_most(-_at_most(up, bound), bound)
    if (alpha, beta) == (1.0, 0.0):
        result.copy_(torch.nn.functional.silu(gate) * up)
        return
    share = (gate.float() / (1 + torch.exp(-alpha * gate.float()))).to(gate.dtype)
    result.copy_(share.float() * (up.float() + beta if beta else up.float()))


def _at_most(x: Tensor, bound: Tensor) -> Tensor:
    """`x` clamped from above. Unlike with `torch.clamp`, a NaN bound means no bound."""
    return torch.where(x > bound, bound, x)


silu_and_mul_with_clamp.result(result_gated)


@silu_and_mul_with_clamp.plan
def plan_silu_and_mul_with_clamp(result: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_silu_and_mul_with_clamp, result, input, min_blocks=min_blocks_of_silu(input))


@silu_and_mul_with_clamp.example
def example_silu_and_mul_with_clamp(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (*example_gated(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 0.7, 1.0, 0.0)


@op(out="out", ulps=0)
def mul_and_silu(out: Tensor, input: Tensor) -> None:
    """SwiGLU with the activation on the second half: ``out = T(g * T(silu(u)))`` for ``input = [g, u]``.

    Equal to eager PyTorch on the same device, bit for bit.

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
    """
    gate, up = input.chunk(2, dim=-1)
    out.copy_(gate * torch.nn.functional.silu(up))


mul_and_silu.result(result_gated)


@mul_and_silu.plan
def plan_mul_and_silu(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_act_and_mul, out, input, ACT="silu", ACT_FIRST=False, min_blocks=min_blocks_of_silu(input))


mul_and_silu.example(example_gated)


@op(out="out", ulps=0)
def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """GEGLU: ``out = T(T(g / 2 * (1 + erf(g / sqrt(2)))) * u)`` for the halves ``input = [g, u]``.

    After Shazeer 2020, arXiv:2002.05202. Equal to eager PyTorch on the same device, bit for bit.

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
    """
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate) * up)


gelu_and_mul.result(result_gated)


@gelu_and_mul.plan
def plan_gelu_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_act_and_mul, out, input, ACT="gelu", ACT_FIRST=True)


gelu_and_mul.example(example_gated)


@op(out="out", ulps=0)
def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """GEGLU by the hyperbolic tangent: ``out = T(T(g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3)))) * u)``.

    ``input = [g, u]`` (Hendrycks and Gimpel 2016, arXiv:1606.08415). Equal to eager PyTorch on the same device, bit for
    bit.

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
    """
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


gelu_tanh_and_mul.result(result_gated)


@gelu_tanh_and_mul.plan
def plan_gelu_tanh_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_act_and_mul, out, input, ACT="gelu_tanh", ACT_FIRST=True)


gelu_tanh_and_mul.example(example_gated)


@op(out="out", ulps=0)
def fatrelu_and_mul(out: Tensor, input: Tensor, threshold: float) -> None:
    """FATReLU gate: ``out = T((g <= t ? 0 : g) * u)`` for the halves ``input = [g, u]`` and the threshold t.

    The threshold is first rounded to the element type. NaN in g stays NaN (Kurtz et al. 2020, "Inducing and exploiting
    activation sparsity", ICML). Equal to eager PyTorch on the same GPU, bit for bit.

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        threshold: elements of g up to it count as 0.
    """
    gate, up = input.chunk(2, dim=-1)
    rounded = gate.new_full((), threshold, dtype=torch.float32).to(gate.dtype)
    out.copy_(torch.where(gate <= rounded, 0.0, gate) * up)


fatrelu_and_mul.result(result_gated)


@fatrelu_and_mul.plan
def plan_fatrelu_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_fatrelu_and_mul, out, input)


@fatrelu_and_mul.example
def example_fatrelu_and_mul(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (*example_gated(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 0.3125)


@op(out="out")
def swigluoai_and_mul(out: Tensor, input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """Clamped SwiGLU of adjacent elements: ``out = T((u + 1) * g / (1 + exp(-alpha * g)))``.

    g is the even elements of `input`, clamped to at most `limit`; u is the odd ones, clamped to +-`limit`. NaN counts
    as `limit`. Computed in float32 and rounded once. The gate of the gpt-oss models (OpenAI 2025, arXiv:2508.10925).

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        alpha: slope of the sigmoid; limit: largest gate and largest magnitude of u.
    """
    pairs = input.float()
    bound = pairs.new_full((), limit)
    gate = torch.fmin(pairs[..., ::2], bound)
    up = torch.fmax(torch.fmin(pairs[..., 1::2], bound), -bound)
    out.copy_((up + 1) * (gate / (1 + torch.exp(-gate * alpha))))  # (up + 1) * gate may overflow


swigluoai_and_mul.result(result_gated)


@swigluoai_and_mul.plan
def plan_swigluoai_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_swigluoai_and_mul, out, input)


@swigluoai_and_mul.example
def example_swigluoai_and_mul(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (*example_gated(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 1.702, 7.0)


@op(out="out")
def swiglustep_and_mul(out: Tensor, input: Tensor, limit: float = 7.0) -> None:
    """SwiGLU with both factors clamped: ``out = T(min(silu(g), limit) * min(max(u, -limit), limit))``.

    g and u are the halves ``input = [g, u]``. Computed in float32 and rounded once; NaN stays NaN; a NaN limit means
    no limit.

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        limit: largest activated gate and largest magnitude of u.
    """
    gate, up = input.float().chunk(2, dim=-1)
    bound = gate.new_full((), limit)
    out.copy_(_at_most(torch.nn.functional.silu(gate), bound) * _at_most(-_at_most(-up, bound), bound))


swiglustep_and_mul.result(result_gated)


@swiglustep_and_mul.plan
def plan_swiglustep_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_swiglustep_and_mul, out, input)


@swiglustep_and_mul.example
def example_swiglustep_and_mul(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (*example_gated(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 7.0)


@op(out="out")
def situ_and_mul(out: Tensor, input: Tensor, beta: float = 1.0, linear_beta: float = -1.0) -> None:
    """SituGLU: ``out = T(beta * tanh(g / beta) / (1 + exp(-g)) * y)`` for the halves ``input = [g, u]``.

    ``y = linear_beta * tanh(u / linear_beta)`` if `linear_beta` is above 0, else ``y = u``. Computed in float32 and
    rounded once; NaN stays NaN. The gate of Kimi K3. Modelled on vLLM's op of this name.

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        beta: bound of the activated gate, not 0; linear_beta: bound of y, or a number that is not positive for none.
    """
    out.copy_(situ(input, beta, linear_beta))


def situ(input: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SituGLU of the halves of `input`, not rounded, in float64."""
    gate, up = input.double().chunk(2, dim=-1)
    bounded = linear_beta * torch.tanh(up / linear_beta) if linear_beta > 0 else up
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded


situ_and_mul.result(result_gated)


@situ_and_mul.plan
def plan_situ_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _plan_gated(_situ_and_mul, out, input)


@situ_and_mul.example
def example_situ_and_mul(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16", bounded: bool = True
) -> tuple[Any, ...]:
    linear_beta = 25.0 if bounded else -1.0
    return (*example_gated(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 4.0, linear_beta)
