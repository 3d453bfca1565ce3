"""DeepSeek-V4's attention: norm and RoPE of query heads, RoPE of the shared key, which is written to a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float16, uint8
from ..._core.tensors.tensor import TensorArg
from . import _deepseek_v4 as v4

if TYPE_CHECKING:
    from torch import Tensor


@op(inout="k_cache", returns="q_out")
def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q_in: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    q_head_padded: int,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
    kv_mxfp8: bool = False,
    apply_q_rope: bool = True,
    is_q_interleaved: bool = False,
    *,
    q_out: Tensor,
) -> None:
    """Norm and rotate the query heads of DeepSeek-V4; rotate its key, and write the key into a paged cache as fp8.

    ``q_out[t, h] = rotated(x / sqrt(mean(x^2) + eps))`` for ``x = q_in[t, h]``, and 0 for padding heads; the key is
    ``rotated(kv[t])``. Elements 448 to 511 rotate in adjacent pairs by the angles of the token's position. All in
    float32, rounded to T at the end.

    A block of the cache holds cache_block_size entries of 576 bytes, the first 448 elements of the key as
    float8_e4m3fn of ``key / scale`` and the 64 rotated ones unquantized, followed by cache_block_size entries of 8
    bytes: the exponents of the scales of 7 groups of 64 elements, biased by 127, and a 0. A scale is the smallest power
    of two not below ``max(max|key|, 1e-4) / 448``. NaN is ignored by the maximum and becomes -448. With `kv_mxfp8`, the
    format of DeepSeek-V4.1, an entry is 528 bytes: all 512 elements as float8_e4m3fn, then the exponents of the scales
    of 16 groups of 32 elements.

    A token with a position outside the table is not rotated, and its key not written; nor is a key with a slot that is
    negative or after the last.

    Args:
        q_in: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
        kv: [num_tokens, 512] of the same dtype; any token stride.
        k_cache: [num_blocks, at least 584 * cache_block_size] uint8, written where slots say; any block stride. With
            `kv_mxfp8` at least 528 * cache_block_size.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        position_ids: [num_tokens] int64 or int32, any stride.
        cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
        q_head_padded: heads of q_out, at least num_heads; or 0, with which queries are not read and q_out is [0].
        eps: added to the mean of squares.
        cache_block_size: slots of a block, at least 1.
        apply_q_norm: whether queries are normalised.
        kv_mxfp8: the format of the cache.
        apply_q_rope: whether queries are rotated; keys always are.
        is_q_interleaved: whether the queries of a token are [32, heads, 16] in memory, in q_in and in q_out, where
            [j, h] is the elements 16j to 16j + 15 of head h; the tokens of q_in are then contiguous.
        q_out: [num_tokens, q_head_padded, 512] of the dtype of `q_in`, contiguous, written and returned; new unless
            given.
    """
    if q_head_padded:
        given = v4.interleaved(q_in) if is_q_interleaved else q_in
        x = v4.rotated_queries(given.reshape(q_in.shape), position_ids, cos_sin_cache, eps, apply_q_norm, apply_q_rope)
        q_out.zero_()
        padded = v4.interleaved(q_out) if is_q_interleaved else q_out
        padded[:, : q_in.shape[1]] = x.to(q_in.dtype).reshape(*q_in.shape[:2], *padded.shape[2:])
    v4.insert_keys(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size, kv_mxfp8)


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.result
def result_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q_in: TensorArg, q_head_padded: int) -> Result:
    check.sizes(q_in, num_tokens=None, num_heads=None, head_size=v4.HEAD_SIZE)
    if not q_head_padded:
        return Result((0,), q_in.dtype)
    if q_head_padded < q_in.shape[1]:
        message = f"expected at least the {q_in.shape[1]} heads of q_in, or 0, got {q_head_padded}"
        raise check.refuse(q_in, "q_head_padded", message)
    return Result((q_in.shape[0], q_head_padded, v4.HEAD_SIZE), q_in.dtype)


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.plan
def plan_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q_in: TensorArg,
    kv: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
    q_head_padded: int,
    cache_block_size: int,
    apply_q_norm: bool,
    kv_mxfp8: bool,
    apply_q_rope: bool,
    is_q_interleaved: bool,
    q_out: TensorArg,
) -> Launch:
    check.dtype(q_in, float16, bfloat16)
    shape, *_ = result_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q_in, q_head_padded)
    check.row_size(q_in)
    check.dtype(kv, q_in.dtype)
    check.sizes(kv, num_tokens=q_in.shape[0], head_size=v4.HEAD_SIZE)
    queries = None
    if q_head_padded:
        check.shape(q_out, q_in.dtype, num_tokens=shape[0], q_head_padded=shape[1], head_size=v4.HEAD_SIZE)
        if is_q_interleaved and q_in.numel and q_in.strides[1] != v4.HEAD_SIZE and q_in.shape[1] > 1:
            raise q_in.error(f"expected contiguous tokens, got strides {q_in.strides}")
        queries = v4.Queries(q_in, q_out, bool(apply_q_norm), bool(apply_q_rope), bool(is_q_interleaved))
    else:
        check.shape(q_out, q_in.dtype, none=0)
    check.dtype(k_cache, uint8)
    check.sizes(k_cache, num_blocks=None, bytes=None)
    tensors = kv, k_cache, slot_mapping, position_ids, cos_sin_cache
    return v4.launch(*tensors, cache_block_size, mxfp8=bool(kv_mxfp8), queries=queries)


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.bad_indices
def bad_indices_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    k_cache: Tensor, slot_mapping: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, cache_block_size: int
) -> dict[str, Tensor]:
    return v4.bad_tokens(k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.traffic
def traffic_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q_in: TensorArg,
    kv: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
    kv_mxfp8: bool,
    q_out: TensorArg,
) -> int:
    keys = v4.traffic(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, kv_mxfp8)
    return keys + q_out.nbytes + (q_in.nbytes if q_out.numel else 0)


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.example
def example_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    num_heads: Literal[6, 64] = 6,
    mxfp8: bool = False,
    raw_queries: bool = False,
) -> tuple[Any, ...]:
    padded_heads = num_heads + 2 if num_heads < 64 else 64
    return (
        make.randn(num_tokens, num_heads, v4.HEAD_SIZE, dtype=dtype),
        *v4.example_tokens(make, num_tokens, dtype, "mxfp8" if mxfp8 else "packed", rows=False),
        *(padded_heads, 1e-6, 64, not raw_queries, mxfp8, not raw_queries, raw_queries),
        make.empty(num_tokens, padded_heads, v4.HEAD_SIZE, dtype=dtype),
    )


@op(inout="k_cache")
def fused_deepseek_v4_kv_rope_insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    cache_block_size: int,
    fp8_scale: Tensor | None = None,
    kv_mxfp8: bool = False,
) -> None:
    """Rotate the key of DeepSeek-V4, and write it into a paged cache.

    The key is ``rotated(kv[t])``, as in `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`, which describes the two
    formats of a cache of bytes, and the tokens that are skipped. A cache of floats holds the key rounded to
    T; a cache of float8_e4m3fn holds ``key * (1 / fp8_scale)``, saturating, where NaN becomes -448.

    Args:
        kv: [num_tokens, 512], float16 or bfloat16; any token stride.
        k_cache: written where slots say; any block stride. [num_blocks, cache_block_size, 584] uint8 with adjacent
            slots, or 528 with `kv_mxfp8`; or [num_blocks, cache_block_size, 512] of the dtype of `kv` or float8_e4m3fn,
            any slot stride.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        position_ids: [num_tokens] int64 or int32, any stride.
        cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
        cache_block_size: slots of a block, at least 1.
        fp8_scale: one float32, for a cache of float8_e4m3fn; not read for others.
        kv_mxfp8: the format of a cache of bytes; no effect on others.
    """
    v4.insert_keys(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size, kv_mxfp8, fp8_scale)


@fused_deepseek_v4_kv_rope_insert.plan
def plan_fused_deepseek_v4_kv_rope_insert(
    kv: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
    cache_block_size: int,
    fp8_scale: TensorArg | None,
    kv_mxfp8: bool,
) -> Launch:
    if len(k_cache.shape) != 3:
        raise k_cache.error(f"expected 3 dimensions, got shape {k_cache.shape}")
    tensors = kv, k_cache, slot_mapping, position_ids, cos_sin_cache
    return v4.launch(*tensors, cache_block_size, mxfp8=bool(kv_mxfp8), scale=fp8_scale, eps=0.0)


@fused_deepseek_v4_kv_rope_insert.bad_indices
def bad_indices_fused_deepseek_v4_kv_rope_insert(
    k_cache: Tensor, slot_mapping: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, cache_block_size: int
) -> dict[str, Tensor]:
    return v4.bad_tokens(k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)


@fused_deepseek_v4_kv_rope_insert.traffic
def traffic_fused_deepseek_v4_kv_rope_insert(
    kv: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
    kv_mxfp8: bool,
) -> int:
    return v4.traffic(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, kv_mxfp8)


@fused_deepseek_v4_kv_rope_insert.example
def example_fused_deepseek_v4_kv_rope_insert(
    make: Any, *, num_tokens: int = 16, kind: Literal["packed", "mxfp8", "fp8", "auto"] = "packed"
) -> tuple[Any, ...]:
    tensors = v4.example_tokens(make, num_tokens, "bfloat16", kind)
    scale = make.full(1, value=0.03, dtype="float32") if kind == "fp8" else None
    return *tensors, 64, scale, kind == "mxfp8"
