"""DeepSeek-V4's attention with a paged cache of whole rows, of floats or of fp8 under one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float16
from ..._core.tensors.tensor import TensorArg
from . import _deepseek_v4 as v4

if TYPE_CHECKING:
    from torch import Tensor


def _check_queries(q: TensorArg, kv: TensorArg) -> None:
    check.dtype(q, float16, bfloat16)
    check.sizes(q, num_tokens=None, num_heads=None, head_size=v4.HEAD_SIZE)
    check.dtype(kv, q.dtype)
    check.sizes(kv, num_tokens=q.shape[0], head_size=v4.HEAD_SIZE)


@op(inout=("q", "k_cache"))
def fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
) -> None:
    """Norm and rotate the query heads of DeepSeek-V4 in place; rotate its key, and write it into a paged cache of rows.

    ``q[t, h] = rotated(x / sqrt(mean(x^2) + eps))`` for ``x = q[t, h]``, and the key is ``rotated(kv[t])``, as in
    `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`, which describes the rotation, and the tokens that are not
    rotated or have no key written. All in float32, rounded to T at the end.

    Args:
        q: [num_tokens, num_heads, 512], float16 or bfloat16, contiguous, read and written.
        kv: [num_tokens, 512] of the same dtype; any token stride.
        k_cache: [num_blocks, cache_block_size, 512] of the same dtype, written where slots say; any strides but the
            last.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        position_ids: [num_tokens] int64 or int32, any stride.
        cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
        eps: added to the mean of squares.
        cache_block_size: slots of a block, at least 1.
        apply_q_norm: whether queries are normalised.
    """
    v4.insert_keys(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)
    q.copy_(v4.rotated_queries(q, position_ids, cos_sin_cache, eps, apply_q_norm))


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert.plan
def plan_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
    q: TensorArg,
    kv: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
    cache_block_size: int,
    apply_q_norm: bool,
) -> Launch:
    _check_queries(q, kv)
    check.contiguous(q)
    check.dtype(k_cache, q.dtype)
    tensors = kv, k_cache, slot_mapping, position_ids, cos_sin_cache
    return v4.launch(*tensors, cache_block_size, queries=v4.Queries(None, q, bool(apply_q_norm)))


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert.bad_indices
def bad_indices_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
    k_cache: Tensor, slot_mapping: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, cache_block_size: int
) -> dict[str, Tensor]:
    return v4.bad_tokens(k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert.traffic
def traffic_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
    q: TensorArg,
    kv: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
) -> int:
    return 2 * q.nbytes + v4.traffic(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, False)


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert.example
def example_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
    make: Any, *, num_tokens: int = 16, apply_q_norm: bool = True
) -> tuple[Any, ...]:
    q = make.randn(num_tokens, 8, v4.HEAD_SIZE, dtype="bfloat16")
    return q, *v4.example_tokens(make, num_tokens, "bfloat16", "auto"), 1e-6, 64, apply_q_norm


@op(out="q_fp8", inout="k_cache")
def fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
    q: Tensor,
    kv: Tensor,
    q_fp8: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    fp8_scale: Tensor,
    q_fp8_scale_inv: Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
) -> None:
    """Norm and rotate the query heads of DeepSeek-V4, as fp8; rotate its key, and write it into a paged cache of fp8.

    `fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert` in float8_e4m3fn: ``q_fp8`` is the queries times
    ``q_fp8_scale_inv``, and the cache holds ``key * (1 / fp8_scale)``, both of float32 values, saturating; NaN becomes
    -448.

    Args:
        q: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
        kv: [num_tokens, 512] of the same dtype; any token stride.
        q_fp8: [num_tokens, num_heads, 512] float8_e4m3fn, contiguous, written.
        k_cache: [num_blocks, cache_block_size, 512] float8_e4m3fn, written where slots say; any strides but the last.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        position_ids: [num_tokens] int64 or int32, any stride.
        cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
        fp8_scale, q_fp8_scale_inv: one float32 each.
        eps: added to the mean of squares.
        cache_block_size: slots of a block, at least 1.
        apply_q_norm: whether queries are normalised.
    """
    v4.insert_keys(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size, scale=fp8_scale)
    x = v4.rotated_queries(q, position_ids, cos_sin_cache, eps, apply_q_norm)
    q_fp8.copy_(v4.as_fp8(x, q_fp8_scale_inv.reshape(())))


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert.result
def result_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(q: TensorArg) -> Result:
    return Result(q.shape, float8_e4m3fn)


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert.plan
def plan_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
    q: TensorArg,
    kv: TensorArg,
    q_fp8: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
    fp8_scale: TensorArg,
    q_fp8_scale_inv: TensorArg,
    cache_block_size: int,
    apply_q_norm: bool,
) -> Launch:
    _check_queries(q, kv)
    check.row_size(q)
    num_tokens, num_heads, _ = q.shape
    check.shape(q_fp8, float8_e4m3fn, num_tokens=num_tokens, num_heads=num_heads, head_size=v4.HEAD_SIZE)
    check.scalar(q_fp8_scale_inv)
    check.dtype(k_cache, float8_e4m3fn)
    queries = v4.Queries(q, q_fp8, bool(apply_q_norm), scale_inv=q_fp8_scale_inv)
    tensors = kv, k_cache, slot_mapping, position_ids, cos_sin_cache
    return v4.launch(*tensors, cache_block_size, scale=fp8_scale, queries=queries)


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert.bad_indices
def bad_indices_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
    k_cache: Tensor, slot_mapping: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, cache_block_size: int
) -> dict[str, Tensor]:
    return v4.bad_tokens(k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert.traffic
def traffic_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
    q: TensorArg,
    kv: TensorArg,
    q_fp8: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
) -> int:
    return q.nbytes + q_fp8.nbytes + v4.traffic(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, False)


@fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert.example
def example_fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
    make: Any, *, num_tokens: int = 16, apply_q_norm: bool = True
) -> tuple[Any, ...]:
    kv, *tensors = v4.example_tokens(make, num_tokens, "bfloat16", "fp8")
    return (
        make.randn(num_tokens, 8, v4.HEAD_SIZE, dtype="bfloat16"),
        kv,
        make.empty(num_tokens, 8, v4.HEAD_SIZE, dtype="float8_e4m3fn"),
        *tensors,
        make.full(1, value=0.03, dtype="float32"),
        make.full(1, value=40.0, dtype="float32"),
        *(1e-6, 64, apply_q_norm),
    )
