"""The attention residual: a softmax over the residual stream and the outputs of earlier blocks of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float16
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["kimi_k3_attn_res"]

_attn_res = Kernel("norm/kimi_k3_attn_res.cu")
_MAX_BLOCKS = 16  # most blocks that are mixed: a thread has two accumulators of each
_MAX_THREADS, _MAX_SIZE = 512, 16384  # threads of a block; elements of a row that so many threads hold
_THREAD_VECS = 2  # vectors of a row per thread, so that the loads of all blocks are in flight together


@op(out="output", inout=("prefix", "blocks"))
def kimi_k3_attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    norm_weight: Tensor,
    qk_weight: Tensor,
    output_norm_weight: Tensor | None,
    output: Tensor,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
) -> None:
    """Mix the residual stream and the outputs of earlier blocks by a softmax over their scores (Kimi K3).

    ``x = prefix[t]``, or, with `delta`, ``x = prefix[t] = T(prefix[t] + delta[t])``; then ``blocks[t, block_write_idx]
    = x`` unless that index is -1. The sources are ``v[s] = blocks[t, s]`` for s < num_blocks, and x. Their scores are
    ``sum(v[s] * norm_weight * qk_weight) / sqrt(mean(v[s]^2) + eps)``, and ``y`` is the sum of the sources, weighted by
    the softmax of the scores. ``output[t] = y``, or, with `output_norm_weight`, ``y / sqrt(mean(y^2) + output_norm_eps)
    * output_norm_weight``. All in float32; T rounds x and the output.

    Args:
        prefix: [num_tokens, hidden_size], float16 or bfloat16, read, and written with `delta`; any row stride.
        delta: the same shape and dtype, any row stride; or None.
        blocks: [num_tokens, at least num_blocks, hidden_size] of the same dtype, read, and written at block_write_idx;
            any strides but the last.
        norm_weight, qk_weight: [hidden_size] of the same dtype; hidden_size at most 16384.
        output_norm_weight: [hidden_size] of the same dtype, or None.
        output: [num_tokens, hidden_size] of the same dtype, written; any row stride.
        num_blocks: blocks that are mixed, 0 to 16.
        block_write_idx: the block that x is written to, or -1.
        eps, output_norm_eps: added to the means of squares.
    """
    if delta is not None:
        prefix.copy_(prefix.float() + delta.float())
    if block_write_idx >= 0:
        blocks[:, block_write_idx] = prefix
    sources = torch.cat((blocks[:, :num_blocks], prefix[:, None]), 1).float()
    scale = torch.rsqrt(sources.square().mean(-1) + eps)
    scores = (sources * (norm_weight.float() * qk_weight.float())).sum(-1) * scale
    y = (scores.softmax(-1)[..., None] * sources).sum(1)
    if output_norm_weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + output_norm_eps) * output_norm_weight.float()
    output.copy_(y)


@kimi_k3_attn_res.result
def result_kimi_k3_attn_res(prefix: TensorArg) -> Result:
    return Result(prefix.shape, prefix.dtype)


@kimi_k3_attn_res.plan
def plan_kimi_k3_attn_res(
    prefix: TensorArg,
    delta: TensorArg | None,
    blocks: TensorArg,
    norm_weight: TensorArg,
    qk_weight: TensorArg,
    output_norm_weight: TensorArg | None,
    output: TensorArg,
    num_blocks: int,
    block_write_idx: int,
) -> Launch:
    check.dtype(prefix, float16, bfloat16)
    check.sizes(prefix, num_tokens=None, hidden_size=None)
    num_tokens, hidden_size = prefix.shape
    if hidden_size > _MAX_SIZE:
        raise prefix.error(f"expected at most {_MAX_SIZE} elements in a row, got shape {prefix.shape}")
    for arg in (delta, output):
        if arg is not None:
            check.dtype(arg, prefix.dtype)
            check.sizes(arg, num_tokens=num_tokens, hidden_size=hidden_size)
    check.dtype(blocks, prefix.dtype)
    check.sizes(blocks, num_tokens=num_tokens, num_blocks=None, hidden_size=hidden_size)
    held = blocks.shape[1]
    if not 0 <= num_blocks <= min(held, _MAX_BLOCKS):
        message = f"expected 0 to {min(held, _MAX_BLOCKS)}, got {num_blocks}"
        raise check.refuse(prefix, "num_blocks", message)
    if not -1 <= block_write_idx < held:
        raise check.refuse(prefix, "block_write_idx", f"expected -1 to {held - 1}, got {block_write_idx}")
    rows = [arg for arg in (prefix, delta, blocks, output) if arg is not None]
    for arg in rows:
        check.row_size(arg)
    weights = [arg for arg in (norm_weight, qk_weight, output_norm_weight) if arg is not None]
    for arg in weights:
        check.shape(arg, prefix.dtype, hidden_size=hidden_size)
    vec_size = check.vector_width(hidden_size, *rows, *weights)
    num_threads = check.threads(-(-hidden_size // (vec_size * _THREAD_VECS)), max_threads=_MAX_THREADS)
    absent = {"delta": delta, "output_norm_weight": output_norm_weight}
    fed: dict[str, Any] = {name: 0 for name, arg in absent.items() if arg is None}
    return _attn_res(
        scalar_t=prefix.dtype,
        HIDDEN_SIZE=hidden_size,
        NUM_BLOCKS=num_blocks,
        HAS_DELTA=delta is not None,
        HAS_NORM=output_norm_weight is not None,
        VEC_SIZE=vec_size,
        NUM_THREADS=num_threads,
    ).launch(
        grid=num_tokens if hidden_size else 0,
        block=num_threads,
        prefix_stride=prefix.strides[0],
        delta_stride=delta.strides[0] if delta else 0,
        blocks_stride=blocks.strides[0],
        block_stride=blocks.strides[1],
        output_stride=output.strides[0],
        **fed,
    )


@kimi_k3_attn_res.traffic
def traffic_kimi_k3_attn_res(
    prefix: TensorArg, delta: TensorArg | None, output: TensorArg, num_blocks: int, block_write_idx: int
) -> int:
    rows = 2 + num_blocks + (2 if delta else 0) + (block_write_idx >= 0)
    return rows * output.nbytes


@kimi_k3_attn_res.example
def example_kimi_k3_attn_res(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[7168, 1000] = 7168,
    num_blocks: Literal[4, 8, 0] = 4,
    with_delta: bool = True,
    with_norm: bool = True,
    write: bool = False,
) -> tuple[Any, ...]:
    def rows(*shape: int) -> Any:
        return make.randn(*shape, hidden_size, dtype="bfloat16")

    return (
        rows(num_tokens),
        rows(num_tokens) if with_delta else None,
        rows(num_tokens, 8),
        make.randn(hidden_size, dtype="bfloat16", scale=0.1, shift=1.0),
        make.randn(hidden_size, dtype="bfloat16", scale=0.02),
        make.randn(hidden_size, dtype="bfloat16", scale=0.1, shift=1.0) if with_norm else None,
        make.empty(num_tokens, hidden_size, dtype="bfloat16"),
        *(num_blocks, min(num_blocks, 7) if write else -1, 1e-6, 1e-6),
    )
