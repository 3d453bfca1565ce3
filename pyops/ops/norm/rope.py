"""The norms of query and key heads, with their rotary embedding."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float16, int64
from ..._core.tensors.tensor import TensorArg
from .._shared import geometry
from ._common import example_weight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "fused_qk_norm_rope",
]

_fused_qk_norm_rope = Kernel("norm/fused_qk_norm_rope.cu")
_VEC_SIZE = 8  # elements of a head per lane; head_dim / 8 lanes form a group
# Heads per group of lanes: one with few tokens; several with many tokens, all loaded before the first is used
# (docs/performance/rows.md: `fused_qk_norm_rope`).
_HEADS = 1, 4
_MAX_HEADS = 6  # most heads of a group


@op(inout="qkv")
def fused_qk_norm_rope(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    position_ids: Tensor,
) -> None:
    """RMS norm of every query and key head, then rotary embedding, in place; value heads are not touched.

    Norm and rotation are in float32 and rounded once. The first ``rotary_dim`` elements of a head rotate in pairs:
    (j, j + rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864). Heads of a token with a
    position outside the cache are left unchanged.

    Args:
        qkv: [num_tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim], float16 or bfloat16, read and written;
            elements of a row are contiguous.
        num_heads_q, num_heads_k, num_heads_v: heads of each kind, in this order in a row.
        head_dim: 64, 128 or 256.
        eps: added to the mean of squares.
        q_weight, k_weight: [head_dim] of the same dtype.
        cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, contiguous, of at least one row;
            cosines in the first half of a row, sines in the second; rotary_dim even, at most head_dim.
        is_neox: which elements form a pair.
        position_ids: [num_tokens] int64, any stride.
    """
    heads = qkv.unflatten(-1, (-1, head_dim))[:, : num_heads_q + num_heads_k]
    weight = torch.stack([q_weight] * num_heads_q + [k_weight] * num_heads_k).float()
    x = heads.float()
    x = x * (torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)
    max_position, rotary_dim = cos_sin_cache.shape
    inside = (position_ids >= 0) & (position_ids < max_position)
    cos, sin = cos_sin_cache[position_ids.where(inside, 0)].float().unsqueeze(1).chunk(2, -1)
    turned, rest = x.split((rotary_dim, head_dim - rotary_dim), -1)
    if is_neox:
        first, second = turned.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    result = torch.cat((turned, rest), -1).to(qkv.dtype)
    heads.copy_(torch.where(inside[:, None, None], result, heads))


@fused_qk_norm_rope.plan
def plan_fused_qk_norm_rope(
    qkv: TensorArg,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    q_weight: TensorArg,
    k_weight: TensorArg,
    cos_sin_cache: TensorArg,
    is_neox: bool,
    position_ids: TensorArg,
) -> Launch:
    check.dtype(qkv, float16, bfloat16)
    if head_dim not in (64, 128, 256):
        raise check.refuse(qkv, "head_dim", f"expected 64, 128 or 256, got {head_dim}")
    for name, heads in (("num_heads_q", num_heads_q), ("num_heads_k", num_heads_k), ("num_heads_v", num_heads_v)):
        if heads < 0:
            raise check.refuse(qkv, name, f"expected at least 0, got {heads}")
    num_tokens = qkv.shape[0] if qkv.shape else 0
    width = (num_heads_q + num_heads_k + num_heads_v) * head_dim
    check.sizes(qkv, num_tokens=num_tokens, **{"heads * head_dim": width})
    check.row_size(qkv)
    for weight in (q_weight, k_weight):
        check.shape(weight, qkv.dtype, head_dim=head_dim)
    check.floating(cos_sin_cache)
    check.contiguous(cos_sin_cache)
    if len(cos_sin_cache.shape) != 2 or not cos_sin_cache.shape[0]:
        raise cos_sin_cache.error(
            f"expected shape (max_position, rotary_dim) with at least one row, got {cos_sin_cache.shape}"
        )
    max_position, rotary_dim = cos_sin_cache.shape
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise cos_sin_cache.error(f"expected an even rotary_dim of at most head_dim={head_dim}, got {rotary_dim}")
    check.dtype(position_ids, int64)
    check.sizes(position_ids, num_tokens=num_tokens)
    heads = num_heads_q + num_heads_k
    many = tuning.pinned(num_tokens) > qkv.device.num_sms
    num_threads = geometry.threads_for_row(heads * (head_dim // _VEC_SIZE), _HEADS[many], _MAX_HEADS)
    return _fused_qk_norm_rope(
        scalar_t=qkv.dtype,
        cache_t=cos_sin_cache.dtype,
        HEAD_SIZE=head_dim,
        NUM_HEADS_Q=num_heads_q,
        NUM_HEADS_K=num_heads_k,
        ROTARY_DIM=rotary_dim,
        IS_NEOX=bool(is_neox),
        ACCESS_SIZE=check.vector_width(head_dim, qkv, q_weight, k_weight),
        CACHE_VEC=check.vector_width(gcd(rotary_dim // 2, _VEC_SIZE), cos_sin_cache),
        NUM_THREADS=num_threads,
    ).launch(
        grid=num_tokens if heads else 0,
        block=num_threads,
        qkv_stride=check.row_stride(qkv),
        position_stride=position_ids.strides[0],
        max_position=max_position,
    )


@fused_qk_norm_rope.traffic
def traffic_fused_qk_norm_rope(
    qkv: TensorArg,
    num_heads_q: int,
    num_heads_k: int,
    head_dim: int,
    q_weight: TensorArg,
    k_weight: TensorArg,
    cos_sin_cache: TensorArg,
    position_ids: TensorArg,
) -> int:
    num_tokens, rotary_dim = qkv.shape[0], cos_sin_cache.shape[1]
    heads = 2 * num_tokens * (num_heads_q + num_heads_k) * head_dim * qkv.dtype.itemsize
    angles = min(num_tokens, cos_sin_cache.shape[0]) * rotary_dim * cos_sin_cache.dtype.itemsize
    return heads + angles + position_ids.nbytes + q_weight.nbytes + k_weight.nbytes


@fused_qk_norm_rope.example
def example_fused_qk_norm_rope(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["bfloat16", "float16"] = "bfloat16",
    head_dim: Literal[128, 64, 256] = 128,
    rotary_dim: Literal[None, 64, 20] = None,
    is_neox: bool = True,
) -> tuple[Any, ...]:
    heads, max_position = (32, 8, 8), 4096
    qkv = make.randn(num_tokens, sum(heads) * head_dim, dtype=dtype)
    weights = (example_weight(make, head_dim, dtype) for _ in range(2))
    cache = make.randn(max_position, rotary_dim or head_dim, dtype=dtype)
    positions = make.randint(0, max_position, num_tokens)
    return qkv, *heads, head_dim, 1e-6, *weights, cache, is_neox, positions
