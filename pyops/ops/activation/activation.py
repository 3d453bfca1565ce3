"""Activations: gated ones, which multiply one half of a row by the activated other half, and plain ones."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import E4M3, bfloat16, float16
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import fp8, geometry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "mul_and_silu",
    "relu2",
    "silu_and_mul",
    "silu_and_mul_quant",
    "swigluoai_and_mul",
    "swiglustep_and_mul",
    "xielu",
]

_act_and_mul = Kernel("activation/act_and_mul.cu")
_fatrelu_and_mul = Kernel("activation/fatrelu_and_mul.cu")
_swigluoai_and_mul = Kernel("activation/swigluoai_and_mul.cu")
_swiglustep_and_mul = Kernel("activation/swiglustep_and_mul.cu")
_silu_and_mul_quant = Kernel("activation/silu_and_mul_quant.cu")
_gelu_and_mul_sparse = Kernel("activation/gelu_and_mul_sparse.cu")
_activation = Kernel("activation/activation.cu")
_xielu = Kernel("activation/xielu.cu")


def _silu_blocks(input: TensorArg) -> int:
    return 5 if input.dtype is float16 else 8  # only float16 takes the accurate way with eight elements to a thread


def _check_halves(out: TensorArg, input: TensorArg) -> None:
    """`input` has rows twice as long as those of `out`."""
    check.floating(input)
    if check.row_size(input) % 2:
        raise input.error(f"expected a last dimension of even size, got shape {input.shape}")
    expected = (*input.shape[:-1], input.shape[-1] // 2)
    if out.shape != expected:
        raise out.error(f"expected shape {expected} for an input of shape {input.shape}, got {out.shape}")
    check.row_size(out)


def _gated(kernel: Kernel, out: TensorArg, input: TensorArg, **constants: Any) -> Launch:
    _check_halves(out, input)
    check.dtype(out, input.dtype)
    return geometry.chunks(kernel, out, input, **constants)


def _plain(kernel: Kernel, out: TensorArg, input: TensorArg, **constants: Any) -> Launch:
    check.floating(input)
    check.row_size(input)
    check.like(out, input)
    check.row_size(out)
    if check.row_stride(input) == check.row_stride(out) == input.shape[-1]:  # contiguous, so one long row does as well
        out, input = (replace(arg, shape=(arg.numel,), strides=(1,)) for arg in (out, input))
    return geometry.chunks(kernel, out, input, **constants)


def _gated_example(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return make.empty(num_tokens, hidden_size, dtype=dtype), make.randn(num_tokens, 2 * hidden_size, dtype=dtype)


def _plain_example(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return make.empty(num_tokens, hidden_size, dtype=dtype), make.randn(num_tokens, hidden_size, dtype=dtype)


@op(out="out", ulps=0)
def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """SwiGLU: ``out = T(T(g / (1 + exp(-g))) * u)`` for the halves ``input = [g, u]``.

    After Shazeer 2020, arXiv:2002.05202. Equal to eager PyTorch on the same device, bit for bit.

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
    """
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


@silu_and_mul.plan
def plan_silu_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _gated(_act_and_mul, out, input, ACT="silu", ACT_FIRST=True, min_blocks=_silu_blocks(input))


silu_and_mul.example(_gated_example)


@op(out="out", ulps=0)
def mul_and_silu(out: Tensor, input: Tensor) -> None:
    """SwiGLU with the activation on the second half: ``out = T(g * T(silu(u)))`` for ``input = [g, u]``.

    Equal to eager PyTorch on the same device, bit for bit.

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
    """
    gate, up = input.chunk(2, dim=-1)
    out.copy_(gate * torch.nn.functional.silu(up))


@mul_and_silu.plan
def plan_mul_and_silu(out: TensorArg, input: TensorArg) -> Launch:
    return _gated(_act_and_mul, out, input, ACT="silu", ACT_FIRST=False, min_blocks=_silu_blocks(input))


mul_and_silu.example(_gated_example)


@op(out="out", ulps=0)
def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """GEGLU: ``out = T(T(g / 2 * (1 + erf(g / sqrt(2)))) * u)`` for the halves ``input = [g, u]``.

    After Shazeer 2020, arXiv:2002.05202. Equal to eager PyTorch on the same device, bit for bit.

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
    """
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate) * up)


@gelu_and_mul.plan
def plan_gelu_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _gated(_act_and_mul, out, input, ACT="gelu", ACT_FIRST=True)


gelu_and_mul.example(_gated_example)


@op(out="out", ulps=0)
def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """GEGLU by the hyperbolic tangent: ``out = T(T(g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3)))) * u)``.

    ``input = [g, u]`` (Hendrycks and Gimpel 2016, arXiv:1606.08415). Equal to eager PyTorch on the same device, bit for
    bit.

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
    """
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


@gelu_tanh_and_mul.plan
def plan_gelu_tanh_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _gated(_act_and_mul, out, input, ACT="gelu_tanh", ACT_FIRST=True)


gelu_tanh_and_mul.example(_gated_example)


@op(out="out", ulps=0)
def fatrelu_and_mul(out: Tensor, input: Tensor, threshold: float) -> None:
    """FATReLU gate: ``out = T((g <= t ? 0 : g) * u)`` for the halves ``input = [g, u]`` and the threshold t.

    The threshold is rounded to the element type first, and NaN in g stays NaN (Kurtz et al. 2020, "Inducing and
    exploiting activation sparsity", ICML). Equal to eager PyTorch on the same GPU, bit for bit.

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
        threshold: what an element of g must exceed.
    """
    gate, up = input.chunk(2, dim=-1)
    rounded = gate.new_full((), threshold, dtype=torch.float32).to(gate.dtype)
    out.copy_(torch.where(gate <= rounded, 0.0, gate) * up)


@fatrelu_and_mul.plan
def plan_fatrelu_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _gated(_fatrelu_and_mul, out, input)


@fatrelu_and_mul.example
def example_fatrelu_and_mul(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (*_gated_example(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 0.3125)


@op(out="out")
def swigluoai_and_mul(out: Tensor, input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """Clamped SwiGLU of neighbouring elements: ``out = T((u + 1) * g / (1 + exp(-alpha * g)))``.

    g is the even elements of `input`, at most `limit`, and u the odd ones, clamped to +-`limit`; both take NaN for
    `limit`. Computed in float32 and rounded once. The gate of the gpt-oss models (OpenAI 2025, arXiv:2508.10925).

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
        alpha: slope of the sigmoid; limit: largest gate and largest magnitude of u.
    """
    pairs = input.float()
    bound = pairs.new_full((), limit)
    gate = torch.fmin(pairs[..., ::2], bound)
    up = torch.fmax(torch.fmin(pairs[..., 1::2], bound), -bound)
    out.copy_((up + 1) * gate / (1 + torch.exp(-gate * alpha)))


@swigluoai_and_mul.plan
def plan_swigluoai_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _gated(_swigluoai_and_mul, out, input)


@swigluoai_and_mul.example
def example_swigluoai_and_mul(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (*_gated_example(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 1.702, 7.0)


@op(out="out")
def swiglustep_and_mul(out: Tensor, input: Tensor, limit: float = 7.0) -> None:
    """SwiGLU with both factors clamped: ``out = T(min(silu(g), limit) * max(min(u, limit), -limit))``.

    g and u are the halves ``input = [g, u]``. Computed in float32 and rounded once; NaN stays NaN.

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
        limit: largest activated gate and largest magnitude of u.
    """
    gate, up = input.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit))


@swiglustep_and_mul.plan
def plan_swiglustep_and_mul(out: TensorArg, input: TensorArg) -> Launch:
    return _gated(_swiglustep_and_mul, out, input)


@swiglustep_and_mul.example
def example_swiglustep_and_mul(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (*_gated_example(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 7.0)


@op(out="out", keyed="activation_sparsity")
def gelu_and_mul_sparse(out: Tensor, input: Tensor, activation_sparsity: float, approximate: str = "none") -> None:
    """GEGLU of the gates above a quantile of their row, which leaves about `activation_sparsity` of `out` zero.

    ``out = T(T(gelu(max(T(g - c), 0))) * u)`` for the halves ``input = [g, u]`` and the cutoff ``c = T(T(mean(g)) +
    T(T(std(g)) * q))``, q being the standard normal quantile of `activation_sparsity` and the deviation that of the
    population. Mean and deviation are taken over the row in float64 and rounded to float32, then to the element type T,
    as is every result after them. The statistical top-k of Gemma 3n (You et al. 2025, arXiv:2506.06644).

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
        activation_sparsity: the fraction of a normally distributed row to cut, above 0 and below 1.
        approximate: "none" for the error function, "tanh" for the hyperbolic tangent.
    """
    gelu_and_mul_above(out, input, NormalDist().inv_cdf(activation_sparsity), approximate)


def gelu_and_mul_above(out: Tensor, input: Tensor, multiplier: float, approximate: str) -> None:
    """The reference of `gelu_and_mul_sparse`, whose cutoff is so many deviations above the mean."""
    gate, up = input.chunk(2, dim=-1)
    wide = gate.double()
    mean = wide.mean(-1, keepdim=True).float().to(input.dtype)
    deviation = wide.std(-1, correction=0, keepdim=True).float().to(input.dtype)
    cutoff = mean + deviation * multiplier
    out.copy_(torch.nn.functional.gelu(torch.relu(gate - cutoff), approximate=approximate) * up)


@gelu_and_mul_sparse.plan
def plan_gelu_and_mul_sparse(out: TensorArg, input: TensorArg, activation_sparsity: float, approximate: str) -> Launch:
    _check_halves(out, input)
    check.dtype(out, input.dtype)
    if not 0.0 < activation_sparsity < 1.0:
        raise check.refuse(
            out, "activation_sparsity", f"expected a number above 0 and below 1, got {activation_sparsity}"
        )
    if approximate not in ("none", "tanh"):
        raise check.refuse(out, "approximate", f'expected "none" or "tanh", got "{approximate}"')
    hidden_size, num_rows = out.shape[-1], check.num_rows(out)
    vec_size = check.vector_width(hidden_size, out, input)
    row_vecs = hidden_size // vec_size
    thread_vecs = 64 // max(4, vec_size * input.dtype.itemsize)  # those that fill 16 registers
    row_threads = 32 if row_vecs <= 128 else check.threads(-(-row_vecs // thread_vecs))
    num_threads = 128 if row_threads == 32 else row_threads
    return _gelu_and_mul_sparse(
        scalar_t=input.dtype,
        ACT="gelu" if approximate == "none" else "gelu_tanh",
        HIDDEN_SIZE=hidden_size,
        VEC_SIZE=vec_size,
        NUM_THREADS=num_threads,
        ROW_THREADS=row_threads,
    ).launch(
        grid=-(-num_rows // (num_threads // row_threads)) if hidden_size else 0,
        block=num_threads,
        num_rows=num_rows,
        out_stride=check.row_stride(out),
        input_stride=check.row_stride(input),
        multiplier=NormalDist().inv_cdf(activation_sparsity),
    )


@gelu_and_mul_sparse.example
def example_gelu_and_mul_sparse(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 14336,
    dtype: str = "bfloat16",
    approximate: Literal["none", "tanh"] = "none",
) -> tuple[Any, ...]:
    return (*_gated_example(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 0.95, approximate)


@op(out="result", ulps=0)
def silu_and_mul_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """`silu_and_mul` written as fp8: ``result = fp8(clamp(T(T(silu(g)) * u) * (1 / scale)))`` for ``input = [g, u]``.

    The product is with the float32 reciprocal, saturates at +-448 (224 for float8_e4m3fnuz) and takes NaN to +448. What
    a scale gives whose reciprocal is not finite is said in `static_scaled_fp8_quant`.

    Args:
        result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; rows of one stride.
        input: [..., 2 * hidden_size], float16 or bfloat16; rows of one stride.
        scale: one float32 element, of any sign.
    """
    gate, up = input.chunk(2, dim=-1)
    product = (torch.nn.functional.silu(gate) * up).float()
    result.copy_(fp8.static_codes(product, scale.reshape(()), result.dtype))


@silu_and_mul_quant.plan
def plan_silu_and_mul_quant(result: TensorArg, input: TensorArg, scale: TensorArg) -> Launch:
    check.dtype(input, float16, bfloat16)
    _check_halves(result, input)
    check.dtype(result, *E4M3)
    check.scalar(scale)
    return geometry.chunks(
        _silu_and_mul_quant,
        result,
        input,
        "result_stride",
        min_blocks=_silu_blocks(input),
        code_t=result.dtype,
    )


@silu_and_mul_quant.example
def example_silu_and_mul_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 14336,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype=quant_dtype)
    input = make.randn(num_tokens, 2 * hidden_size, dtype=dtype)
    return result, input, make.full(1, value=0.02, dtype="float32")


@op(out="out", in_place={"out": "input"}, ulps=0)
def gelu_new(out: Tensor, input: Tensor) -> None:
    """GELU as GPT-2 writes it: ``out = x / 2 * (1 + tanh(0.79788456 * (x + 0.044715 * x^3)))``.

    Every operation rounds to the element type, as in eager PyTorch (Hendrycks and Gimpel 2016, arXiv:1606.08415). Where
    1 + tanh cancels a last-place difference would grow, so results are equal to it, not merely close.

    Args:
        out: [...], written; may be `input` itself; rows of one stride.
        input: the same shape, float32, float16 or bfloat16; rows of one stride.
    """
    tanh = torch.tanh(0.79788456 * (input + 0.044715 * (input * input * input)))
    out.copy_(0.5 * input * (1.0 + tanh))


@gelu_new.plan
def plan_gelu_new(out: TensorArg, input: TensorArg) -> Launch:
    return _plain(_activation, out, input, ACT="gelu_new")


gelu_new.example(_plain_example)


@op(out="out", in_place={"out": "input"}, ulps=0)
def gelu_fast(out: Tensor, input: Tensor) -> None:
    """GELU with the cube factored out: ``out = x / 2 * (1 + tanh(0.79788456 * x * (1 + 0.044715 * x * x)))``.

    Every operation rounds to the element type, as in eager PyTorch (Hendrycks and Gimpel 2016, arXiv:1606.08415). Where
    1 + tanh cancels a last-place difference would grow, so results are equal to it, not merely close.

    Args:
        out: [...], written; may be `input` itself; rows of one stride.
        input: the same shape, float32, float16 or bfloat16; rows of one stride.
    """
    tanh = torch.tanh((0.79788456 * input) * (1.0 + (0.044715 * input) * input))
    out.copy_(0.5 * input * (1.0 + tanh))


@gelu_fast.plan
def plan_gelu_fast(out: TensorArg, input: TensorArg) -> Launch:
    return _plain(_activation, out, input, ACT="gelu_fast")


gelu_fast.example(_plain_example)


@op(out="out", in_place={"out": "input"})
def gelu_quick(out: Tensor, input: Tensor) -> None:
    """GELU by the logistic function: ``out = T(x / (1 + exp(-1.702 * x)))``.

    Computed in float32 and rounded once (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Args:
        out: [...], written; may be `input` itself; rows of one stride.
        input: the same shape, float32, float16 or bfloat16; rows of one stride.
    """
    x = input.float()
    out.copy_(x / (1.0 + torch.exp(-1.702 * x)))


@gelu_quick.plan
def plan_gelu_quick(out: TensorArg, input: TensorArg) -> Launch:
    return _plain(_activation, out, input, ACT="gelu_quick", min_blocks=_silu_blocks(input))


gelu_quick.example(_plain_example)


@op(out="out", in_place={"out": "input"}, ulps=0)
def relu2(out: Tensor, input: Tensor) -> None:
    """Squared ReLU: ``out = T(max(x, 0)^2)``; NaN stays NaN (So et al. 2021, arXiv:2109.08668).

    Args:
        out: [...], written; may be `input` itself; rows of one stride.
        input: the same shape, float32, float16 or bfloat16; rows of one stride.
    """
    out.copy_(torch.relu(input).square())


@relu2.plan
def plan_relu2(out: TensorArg, input: TensorArg) -> Launch:
    return _plain(_activation, out, input, ACT="relu2")


relu2.example(_plain_example)


@op(out="out", in_place={"out": "input"})
def xielu(out: Tensor, input: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6) -> None:
    """xIELU, a quadratic and an exponential side with learned strengths (Huang and Schlag 2024, arXiv:2411.13010).

    ``out = a_p * x * x + beta * x`` where x > 0, else ``(expm1(min(x, eps)) - x) * a_n + beta * x``, with ``a_p =
    softplus(alpha_p)`` and ``a_n = beta + softplus(alpha_n)``. Every operation rounds to the element type, as in eager
    PyTorch; `beta` and `eps` are rounded first.

    Args:
        out: [...], written; may be `input` itself; rows of one stride.
        input: the same shape, float32, float16 or bfloat16; rows of one stride.
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
    return _plain(_xielu, out, input, min_blocks=6)


@xielu.example
def example_xielu(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    alphas = (make.full(1, value=value, dtype=dtype) for value in (0.2, -1.05))
    return (*_plain_example(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), *alphas, 0.5, -1e-6)
