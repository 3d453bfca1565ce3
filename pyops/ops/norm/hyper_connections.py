"""Manifold-constrained hyper-connections (mHC): several streams of a residual become the input of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from ._hyper_connections import check_rows, launches, plan_mhc_pre, streams_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["hc_head", "mhc_pre"]

_head = Kernel("norm/mhc_pre.cu", entry="hc_head")


def _mixes(residual: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    x = residual.flatten(1).float()
    return torch.matmul(x, fn.T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)


def _collapsed(residual: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * residual.float()).sum(1)


@op(returns=("post_mix", "comb_mix", "layer_input"), atol=2.0**-18)
def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    *,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor,
) -> None:
    """The coefficients of manifold-constrained hyper-connections (mHC), and the input of a layer (DeepSeek-V4).

    With n streams, ``mixes = fn @ x / sqrt(mean(x^2) + rms_eps)``, where x has all elements of a token. Then, in
    float32 (Xie et al. 2026),

    - ``pre = sigmoid(mixes[:n] * hc_scale[0] + hc_base[:n]) + hc_pre_eps``
    - ``post_mix = sigmoid(mixes[n:2n] * hc_scale[1] + hc_base[n:2n]) * hc_post_mult_value``
    - ``comb_mix``, n x n, from ``mixes[2n:] * hc_scale[2] + hc_base[2n:]``: the softmax of each row plus
      hc_sinkhorn_eps; its columns are divided by their sum plus hc_sinkhorn_eps; then rows and columns alternate,
      sinkhorn_repeat - 1 times each (Sinkhorn and Knopp 1967).
    - ``layer_input = sum_i pre[i] * residual[i]``; with `norm_weight`, its RMS norm. Rounded once.

    The contract is that of vLLM's `mhc_pre`.

    Args:
        residual: [num_tokens, n, hidden_size], float32, float16 or bfloat16; n is 1, 2 or 4; the last stride is 1,
            as in `comb_mix` and `layer_input`.
        fn: [n * (n + 2), n * hidden_size] float32, contiguous and finite.
        hc_scale: [3] float32.
        hc_base: [n * (n + 2)] float32.
        rms_eps: added to the mean of squares of a token.
        hc_pre_eps, hc_sinkhorn_eps: as above.
        hc_post_mult_value: as above.
        sinkhorn_repeat: at least 1.
        norm_weight: [hidden_size] of the dtype of `residual`, or None.
        norm_eps: added to the mean of squares of the layer's input.
        post_mix: [num_tokens, n, 1] float32, contiguous, written and returned; new unless given.
        comb_mix: [num_tokens, n, n] float32, written and returned; new unless given.
        layer_input: [num_tokens, hidden_size] of the dtype of `residual`, written and returned; new unless given.
    """
    n = residual.shape[1]
    mixes = _mixes(residual, fn, rms_eps)
    post_mix.copy_(torch.sigmoid(mixes[:, n : 2 * n] * hc_scale[1] + hc_base[n : 2 * n])[..., None])
    post_mix.mul_(hc_post_mult_value)
    logits = mixes[:, 2 * n :] * hc_scale[2] + hc_base[2 * n :]
    comb = logits.unflatten(1, (n, n)).softmax(-1) + hc_sinkhorn_eps
    for i in range(sinkhorn_repeat):
        if i > 0:
            comb = comb / (comb.sum(-1, keepdim=True) + hc_sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    comb_mix.copy_(comb)
    y = _collapsed(residual, torch.sigmoid(mixes[:, :n] * hc_scale[0] + hc_base[:n]) + hc_pre_eps)
    if norm_weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
    layer_input.copy_(y)


@mhc_pre.result
def result_mhc_pre(residual: TensorArg) -> tuple[Result, Result, Result]:
    num_tokens, n, hidden_size = streams_of(residual)
    shapes = Result((num_tokens, n, 1), float32), Result((num_tokens, n, n), float32)
    return *shapes, Result((num_tokens, hidden_size), residual.dtype)


mhc_pre.plan(plan_mhc_pre)


@mhc_pre.traffic
def traffic_mhc_pre(residual: TensorArg, fn: TensorArg, layer_input: TensorArg) -> int:
    return residual.nbytes + fn.nbytes + layer_input.nbytes


@op(returns="out", atol=2.0**-18)
def hc_head(
    hidden_states: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_norm_eps: float,
    hc_eps: float,
    *,
    out: Tensor,
) -> None:
    """The streams after the last layer as one: `layer_input` of `mhc_pre`, without the other coefficients.

    ``out = sum_i (sigmoid(mixes[i] * hc_scale + hc_base[i]) + hc_eps) * hidden_states[i]`` in float32, rounded once.
    The contract is that of vLLM's `hc_head`.

    Args:
        hidden_states: [num_tokens, n, hidden_size], float32, float16 or bfloat16; the last stride is 1; n is 1, 2 or 4.
        hc_fn: [n, n * hidden_size] float32, contiguous and finite.
        hc_scale: [1] float32.
        hc_base: [n] float32.
        rms_norm_eps: added to the mean of squares of a token.
        hc_eps: as above.
        out: [num_tokens, hidden_size] of the dtype of `hidden_states`, the last stride is 1, written and returned; new
            unless given.
    """
    gates = torch.sigmoid(_mixes(hidden_states, hc_fn, rms_norm_eps) * hc_scale + hc_base)
    out.copy_(_collapsed(hidden_states, gates + hc_eps))


@hc_head.result
def result_hc_head(hidden_states: TensorArg) -> Result:
    num_tokens, _, hidden_size = streams_of(hidden_states)
    return Result((num_tokens, hidden_size), hidden_states.dtype)


@hc_head.plan
def plan_hc_head(
    hidden_states: TensorArg, hc_fn: TensorArg, hc_scale: TensorArg, hc_base: TensorArg, out: TensorArg
) -> list[Launch]:
    num_tokens, n, hidden_size = streams_of(hidden_states)
    check.shape(hc_fn, float32, columns=n, size=n * hidden_size)
    check.shape(hc_scale, float32, parts=1)
    check.shape(hc_base, float32, columns=n)
    check_rows(out, hidden_states.dtype, num_tokens=num_tokens, hidden_size=hidden_size)
    return launches(_head, hidden_states, hc_fn, out, None)


@hc_head.traffic
def traffic_hc_head(hidden_states: TensorArg, hc_fn: TensorArg, out: TensorArg) -> int:
    return hidden_states.nbytes + hc_fn.nbytes + out.nbytes


def example_projection(make: Any, hidden_size: int, streams: int, columns: int, parts: int) -> tuple[Any, Any, Any]:
    """The parameters of the coefficients."""
    return (
        make.randn(columns, streams * hidden_size, dtype="float32", scale=(streams * hidden_size) ** -0.5),
        make.randn(parts, dtype="float32"),
        make.randn(columns, dtype="float32"),
    )


@mhc_pre.example
def example_mhc_pre(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[1024, 77] = 1024,
    hc_mult: Literal[4, 2, 1] = 4,
    dtype: str = "bfloat16",
    with_norm: bool = True,
) -> tuple[Any, ...]:
    return (
        make.randn(num_tokens, hc_mult, hidden_size, dtype=dtype),
        *example_projection(make, hidden_size, hc_mult, hc_mult * (hc_mult + 2), 3),
        *(1e-6, 1e-6, 1e-6, 2.0, 20),
        make.randn(hidden_size, dtype=dtype, scale=0.1, shift=1.0) if with_norm else None,
        1e-6,
        make.empty(num_tokens, hc_mult, 1, dtype="float32"),
        make.empty(num_tokens, hc_mult, hc_mult, dtype="float32"),
        make.empty(num_tokens, hidden_size, dtype=dtype),
    )


@hc_head.example
def example_hc_head(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[1024, 77] = 1024,
    hc_mult: Literal[4, 2, 1] = 4,
    dtype: str = "bfloat16",
) -> tuple[Any, ...]:
    return (
        make.randn(num_tokens, hc_mult, hidden_size, dtype=dtype),
        *example_projection(make, hidden_size, hc_mult, hc_mult, 1),
        *(1e-6, 1e-6),
        make.empty(num_tokens, hidden_size, dtype=dtype),
    )
