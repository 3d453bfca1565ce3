"""Manifold-constrained hyper-connections (mHC): the streams after a layer, and the input of the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from ._hyper_connections import check_mhc_pre, check_rows, has_mma, post_logits, pre_launches, streams_of, strides_of
from .hyper_connections import example_mhc_pre, mhc_pre, result_mhc_pre

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mhc_fused_post_pre", "mhc_post"]

_post = Kernel("norm/mhc_post.cu")
_POST_THREADS = 128  # threads of a CTA of mhc_post.cu
_FUSED_TOKENS = 256  # most tokens of mhc_post_logits_mma; of more, its instructions take as long as two launches


@op(returns="out", in_place={"out": "residual"}, ulps=0)
def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, *, out: Tensor) -> None:
    """The streams after a layer: ``out[j] = post_layer_mix[j] * x + sum_i comb_res_mix[i, j] * residual[i]``.

    Products and additions are rounded to float32 in this order, the result to its dtype. The contract is that of vLLM's
    `mhc_post`.

    Args:
        x: [num_tokens, hidden_size], the output of the layer; float32, float16 or bfloat16; the last stride is 1, as
            in `residual`, `comb_res_mix` and `out`.
        residual: [num_tokens, n, hidden_size] of the same dtype; n is 1, 2 or 4.
        post_layer_mix: [num_tokens, n, 1] float32, contiguous, `post_mix` of `mhc_pre`.
        comb_res_mix: [num_tokens, n, n] float32, `comb_mix` of `mhc_pre`.
        out: as `residual`, written and returned; new unless given; may be `residual` itself.
    """
    y = post_layer_mix * x[:, None].float()
    for i in range(residual.shape[1]):
        y = y + comb_res_mix[:, i, :, None] * residual[:, i, None].float()
    out.copy_(y)


@mhc_post.result
def result_mhc_post(residual: TensorArg) -> Result:
    return Result(residual.shape, residual.dtype)


@mhc_post.plan
def plan_mhc_post(
    x: TensorArg, residual: TensorArg, post_layer_mix: TensorArg, comb_res_mix: TensorArg, out: TensorArg
) -> Launch:
    strides = _checked_strides(x, residual, post_layer_mix, comb_res_mix, out)
    num_tokens, n, hidden_size = residual.shape
    vec_size = check.vector_width(hidden_size, x, residual, out)
    threads = num_tokens * (hidden_size // vec_size)
    specialised = _post.renamed(out=out.name)(
        scalar_t=residual.dtype, HC=n, HIDDEN_SIZE=hidden_size, VEC_SIZE=vec_size, NUM_THREADS=_POST_THREADS
    )
    return specialised.launch(grid=-(-threads // _POST_THREADS), block=_POST_THREADS, num_tokens=num_tokens, **strides)


def _checked_strides(
    x: TensorArg, residual: TensorArg, post_layer_mix: TensorArg, comb_res_mix: TensorArg, out: TensorArg
) -> dict[str, int]:
    """The strides of the arguments of `mhc_post`, which fit together."""
    num_tokens, n, hidden_size = streams_of(residual)
    check_rows(x, residual.dtype, num_tokens=num_tokens, hidden_size=hidden_size)
    check.shape(post_layer_mix, float32, num_tokens=num_tokens, hc_mult=n, one=1)
    check_rows(comb_res_mix, float32, num_tokens=num_tokens, hc_mult=n, streams=n)
    check_rows(out, residual.dtype, num_tokens=num_tokens, hc_mult=n, hidden_size=hidden_size)
    strides = {"out_token_stride": out.strides[0], "out_stream_stride": out.strides[1], "x_stride": x.strides[0]}
    strides |= {"comb_token_stride": comb_res_mix.strides[0], "comb_row_stride": comb_res_mix.strides[1]}
    return strides | strides_of(residual)


@op(returns=("residual_cur", "post_mix_cur", "comb_mix_cur", "layer_input_cur"), atol=2.0**-18)
def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
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
    residual_cur: Tensor,
    post_mix_cur: Tensor,
    comb_mix_cur: Tensor,
    layer_input_cur: Tensor,
) -> None:
    """`mhc_post` of a layer and `mhc_pre` of the next one, of the streams rounded to their dtype.

    The contract is that of vLLM's `mhc_fused_post_pre`.

    Args:
        x, residual, post_layer_mix, comb_res_mix: as in `mhc_post`.
        fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_weight,
            norm_eps: as in `mhc_pre`.
        residual_cur: `out` of `mhc_post`, but not `residual` itself.
        post_mix_cur, comb_mix_cur, layer_input_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
    """
    mhc_post.reference(x, residual, post_layer_mix, comb_res_mix, out=residual_cur)
    outputs = {"post_mix": post_mix_cur, "comb_mix": comb_mix_cur, "layer_input": layer_input_cur}
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    mhc_pre.reference(residual_cur, fn, hc_scale, hc_base, *numbers, norm_weight, norm_eps, **outputs)


@mhc_fused_post_pre.result
def result_mhc_fused_post_pre(residual: TensorArg) -> tuple[Result, Result, Result, Result]:
    return Result(residual.shape, residual.dtype), *result_mhc_pre(residual)


@mhc_fused_post_pre.plan
def plan_mhc_fused_post_pre(
    x: TensorArg,
    residual: TensorArg,
    post_layer_mix: TensorArg,
    comb_res_mix: TensorArg,
    fn: TensorArg,
    hc_scale: TensorArg,
    hc_base: TensorArg,
    sinkhorn_repeat: int,
    norm_weight: TensorArg | None,
    residual_cur: TensorArg,
    post_mix_cur: TensorArg,
    comb_mix_cur: TensorArg,
    layer_input_cur: TensorArg,
) -> list[Launch]:
    strides = _checked_strides(x, residual, post_layer_mix, comb_res_mix, residual_cur)
    outputs = post_mix_cur, comb_mix_cur, layer_input_cur
    check_mhc_pre(residual_cur, fn, hc_scale, hc_base, sinkhorn_repeat, norm_weight, *outputs)
    if has_mma(residual, fn, x, residual_cur) and tuning.pinned(residual.shape[0]) <= _FUSED_TOKENS:
        logits = post_logits(residual, fn, residual_cur, strides)
        return pre_launches(residual_cur, fn, norm_weight, *outputs, logits)
    post = plan_mhc_post(x, residual, post_layer_mix, comb_res_mix, residual_cur)
    return [post, *pre_launches(residual_cur, fn, norm_weight, *outputs)]


@mhc_fused_post_pre.traffic
def traffic_mhc_fused_post_pre(x: TensorArg, residual: TensorArg, fn: TensorArg, layer_input_cur: TensorArg) -> int:
    return x.nbytes + 2 * residual.nbytes + fn.nbytes + layer_input_cur.nbytes


def _layer(make: Any, num_tokens: int, hidden_size: int, hc_mult: int, dtype: str) -> tuple[Any, ...]:
    """A layer's output, the streams before it, and their coefficients."""
    return (
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.randn(num_tokens, hc_mult, hidden_size, dtype=dtype),
        make.randn(num_tokens, hc_mult, 1, dtype="float32", scale=0.3, shift=1.0),
        make.randn(num_tokens, hc_mult, hc_mult, dtype="float32", scale=0.1, shift=1 / hc_mult),
    )


@mhc_post.example
def example_mhc_post(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[1024, 77] = 1024,
    hc_mult: Literal[4, 2, 1] = 4,
    dtype: str = "bfloat16",
) -> tuple[Any, ...]:
    layer = _layer(make, num_tokens, hidden_size, hc_mult, dtype)
    return *layer, make.empty(num_tokens, hc_mult, hidden_size, dtype=dtype)


@mhc_fused_post_pre.example
def example_mhc_fused_post_pre(
    make: Any, *, num_tokens: int = 16, hidden_size: Literal[1024, 77] = 1024, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    pre = example_mhc_pre(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype)
    return (
        *_layer(make, num_tokens, hidden_size, 4, dtype),
        *pre[1:-3],
        make.empty(num_tokens, 4, hidden_size, dtype=dtype),
        *pre[-3:],
    )
