"""Multi-head latent attention of Kimi K3 in decode: queries in the space of latents, and the cache entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import float8_e4m3fn, uint8
from ..._core.tensors.tensor import TensorArg
from . import _mla_epilogue as mla
from .kimi_k3_prefill import _bad_insert

if TYPE_CHECKING:
    from torch import Tensor


def _query_result(ql_nope: TensorArg, q_pe: TensorArg) -> Result:
    check.sizes(ql_nope, num_tokens=None, num_heads=None, latent_size=None)
    check.sizes(q_pe, num_tokens=None, num_heads=None, rope_size=None)
    return Result((*ql_nope.shape[:2], ql_nope.shape[2] + q_pe.shape[2]), ql_nope.dtype)


def _launch(
    ql_nope: TensorArg,
    q_pe: TensorArg,
    kv_c_normed: TensorArg,
    k_pe: TensorArg,
    mqa_q: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    cache_block_size: int,
    position_ids: TensorArg | None,
    cos_sin_cache: TensorArg | None,
    scales: dict[str, TensorArg] | None = None,
) -> Launch:
    check.dtype(k_pe, ql_nope.dtype)
    return mla.Epilogue(
        k_pe,
        ql_nope,
        q_nope=ql_nope,
        q_pe=q_pe,
        q_out=mqa_q,
        kv_c=kv_c_normed,
        k_cache=k_cache,
        slot_mapping=slot_mapping,
        block_size=cache_block_size,
        position_ids=position_ids,
        cos_sin_cache=cos_sin_cache,
        scales=scales,
    ).launch()


def _traffic(mqa_q: TensorArg, ql_nope: TensorArg, q_pe: TensorArg, kv_c_normed: TensorArg, k_pe: TensorArg) -> int:
    """An entry has about as many bytes as what it is made of."""
    return mqa_q.nbytes + ql_nope.nbytes + q_pe.nbytes + 2 * (kv_c_normed.nbytes + k_pe.nbytes)


def _example(make: Any, num_tokens: int, cache: str, query: str = "bfloat16") -> tuple[Any, ...]:
    num_heads = 12  # those of a rank of eight
    kv_c, k_cache, slot_mapping = mla.example_latents(make, num_tokens, cache)
    return (
        make.randn(num_tokens, num_heads, mla.LATENT_SIZE, dtype="bfloat16"),
        make.randn(num_tokens, num_heads, mla.ROPE_SIZE, dtype="bfloat16"),
        kv_c,
        make.randn(num_tokens, mla.ROPE_SIZE, dtype="bfloat16"),
        make.empty(num_tokens, num_heads, mla.LATENT_SIZE + mla.ROPE_SIZE, dtype=query),
        k_cache,
        slot_mapping,
    )


def _queries(ql_nope: Tensor, q_pe: Tensor, rotation: tuple[Tensor | None, Tensor | None]) -> Tensor:
    return mla.concatenated(ql_nope, mla.rotated(q_pe, *rotation))


@op(out="mqa_q", inout="k_cache")
def fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    mqa_q: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    cache_block_size: int,
    position_ids: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> None:
    """Concatenate the parts of queries, and write the latent into a paged cache (Kimi K3's MLA, decode).

    ``mqa_q[t, h] = [ql_nope[t, h], rotated(q_pe[t, h])]`` and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])]``
    with ``b, o = divmod(slot_mapping[t], cache_block_size)``; rotations and slots are those of
    `fused_kimi_k3_mla_key_concat_kv_cache_insert`.

    Args:
        ql_nope: [num_tokens, num_heads, latent_size], float16 or bfloat16; any strides but the last.
        q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.
        kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
        k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.
        mqa_q: [num_tokens, num_heads, latent_size + rope_size] of the same dtype, written; any strides but the last.
        k_cache: [num_blocks, cache_block_size, latent_size + rope_size] of the same dtype, written where slots say; any
            strides but the last.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        cache_block_size: slots of a block.
        position_ids: [num_tokens] int64 or int32, any stride, or None.
        cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.
    """
    rotation = position_ids, cos_sin_cache
    mqa_q.copy_(_queries(ql_nope, q_pe, rotation))
    mla.insert_latents(kv_c_normed, k_pe, k_cache, slot_mapping, cache_block_size, *rotation)


@op(out="mqa_q", inout="k_cache")
def fused_kimi_k3_mla_decode_q_concat_ds_mla_insert(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    mqa_q: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    cache_block_size: int,
    position_ids: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> None:
    """`fused_kimi_k3_mla_decode_q_concat_kv_cache_insert` with a cache in the format "fp8_ds_mla".

    `fused_kimi_k3_mla_key_concat_ds_mla_insert` describes the 656 bytes of an entry.

    Args:
        ql_nope: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
        q_pe: [num_tokens, num_heads, 64] of the same dtype; any strides but the last.
        kv_c_normed: [num_tokens, 512] of the same dtype; any token stride.
        k_pe: [num_tokens, 64] of the same dtype; any token stride.
        mqa_q: [num_tokens, num_heads, 576] of the same dtype, written; any strides but the last.
        k_cache: [num_blocks, cache_block_size, 656] uint8, written where slots say; any strides but the last.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        cache_block_size: slots of a block.
        position_ids: [num_tokens] int64 or int32, any stride, or None.
        cos_sin_cache: [max_position, 64] float32, of one row at least, any row stride; or None.
    """
    rotation = position_ids, cos_sin_cache
    mqa_q.copy_(_queries(ql_nope, q_pe, rotation))
    mla.insert_latents(kv_c_normed, k_pe, k_cache, slot_mapping, cache_block_size, *rotation)


@fused_kimi_k3_mla_decode_q_concat_kv_cache_insert.plan
def plan_fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(
    ql_nope: TensorArg,
    q_pe: TensorArg,
    kv_c_normed: TensorArg,
    k_pe: TensorArg,
    mqa_q: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    cache_block_size: int,
    position_ids: TensorArg | None,
    cos_sin_cache: TensorArg | None,
) -> Launch:
    check.dtype(mqa_q, ql_nope.dtype)
    check.dtype(k_cache, ql_nope.dtype)
    tensors = ql_nope, q_pe, kv_c_normed, k_pe, mqa_q, k_cache, slot_mapping
    return _launch(*tensors, cache_block_size, position_ids, cos_sin_cache)


@fused_kimi_k3_mla_decode_q_concat_ds_mla_insert.plan
def plan_fused_kimi_k3_mla_decode_q_concat_ds_mla_insert(
    ql_nope: TensorArg,
    q_pe: TensorArg,
    kv_c_normed: TensorArg,
    k_pe: TensorArg,
    mqa_q: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    cache_block_size: int,
    position_ids: TensorArg | None,
    cos_sin_cache: TensorArg | None,
) -> Launch:
    check.dtype(mqa_q, ql_nope.dtype)
    check.dtype(k_cache, uint8)
    tensors = ql_nope, q_pe, kv_c_normed, k_pe, mqa_q, k_cache, slot_mapping
    return _launch(*tensors, cache_block_size, position_ids, cos_sin_cache)


fused_kimi_k3_mla_decode_q_concat_kv_cache_insert.result(_query_result)
fused_kimi_k3_mla_decode_q_concat_kv_cache_insert.bad_indices(_bad_insert)
fused_kimi_k3_mla_decode_q_concat_kv_cache_insert.traffic(_traffic)
fused_kimi_k3_mla_decode_q_concat_ds_mla_insert.result(_query_result)
fused_kimi_k3_mla_decode_q_concat_ds_mla_insert.bad_indices(_bad_insert)
fused_kimi_k3_mla_decode_q_concat_ds_mla_insert.traffic(_traffic)


@fused_kimi_k3_mla_decode_q_concat_kv_cache_insert.example
def example_fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(
    make: Any, *, num_tokens: int = 16, rotary: bool = True
) -> tuple[Any, ...]:
    tensors = _example(make, num_tokens, "bfloat16")
    return *tensors, mla.BLOCK_SIZE, *mla.example_rotation(make, num_tokens, rotary)


@fused_kimi_k3_mla_decode_q_concat_ds_mla_insert.example
def example_fused_kimi_k3_mla_decode_q_concat_ds_mla_insert(
    make: Any, *, num_tokens: int = 16, rotary: bool = True
) -> tuple[Any, ...]:
    tensors = _example(make, num_tokens, "uint8")
    return *tensors, mla.BLOCK_SIZE, *mla.example_rotation(make, num_tokens, rotary)


@op(out="mqa_q", inout="k_cache")
def fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    mqa_q: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    q_scale_inv: Tensor,
    cache_scale_inv: Tensor,
    cache_block_size: int,
    position_ids: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> None:
    """`fused_kimi_k3_mla_decode_q_concat_kv_cache_insert` with an fp8 cache, and with queries in fp8 or not.

    The cache holds ``[kv_c_normed[t], rotated(k_pe[t])] * cache_scale_inv`` and `mqa_q`, if it is fp8, its values times
    ``q_scale_inv``: float8_e4m3fn of float32 values, saturating; NaN stays NaN.

    Args:
        ql_nope: [num_tokens, num_heads, latent_size], float16 or bfloat16; any strides but the last.
        q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.
        kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
        k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.
        mqa_q: [num_tokens, num_heads, latent_size + rope_size] float8_e4m3fn or the dtype of `ql_nope`, written; any
            strides but the last.
        k_cache: [num_blocks, cache_block_size, latent_size + rope_size] float8_e4m3fn, written where slots say; any
            strides but the last.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        q_scale_inv, cache_scale_inv: one float32 each; `q_scale_inv` is not read unless `mqa_q` is fp8.
        cache_block_size: slots of a block.
        position_ids: [num_tokens] int64 or int32, any stride, or None.
        cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.
    """
    rotation = position_ids, cos_sin_cache
    queries = _queries(ql_nope, q_pe, rotation)
    mqa_q.copy_(mla.as_fp8(queries, q_scale_inv) if mqa_q.dtype.itemsize == 1 else queries)
    mla.insert_latents(kv_c_normed, k_pe, k_cache, slot_mapping, cache_block_size, *rotation, cache_scale_inv)


@fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert.result
def result_fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(ql_nope: TensorArg, q_pe: TensorArg) -> Result:
    shape, *_ = _query_result(ql_nope, q_pe)
    return Result(shape, float8_e4m3fn)


@fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert.plan
def plan_fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(
    ql_nope: TensorArg,
    q_pe: TensorArg,
    kv_c_normed: TensorArg,
    k_pe: TensorArg,
    mqa_q: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    q_scale_inv: TensorArg,
    cache_scale_inv: TensorArg,
    cache_block_size: int,
    position_ids: TensorArg | None,
    cos_sin_cache: TensorArg | None,
) -> Launch:
    check.dtype(k_cache, float8_e4m3fn)
    tensors = ql_nope, q_pe, kv_c_normed, k_pe, mqa_q, k_cache, slot_mapping
    scales = {"q_scale_inv": q_scale_inv, "cache_scale_inv": cache_scale_inv}
    return _launch(*tensors, cache_block_size, position_ids, cos_sin_cache, scales)


fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert.bad_indices(_bad_insert)
fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert.traffic(_traffic)


@fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert.example
def example_fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(
    make: Any, *, num_tokens: int = 16, rotary: bool = True, fp8_queries: bool = True
) -> tuple[Any, ...]:
    tensors = _example(make, num_tokens, "float8_e4m3fn", "float8_e4m3fn" if fp8_queries else "bfloat16")
    scales = (make.full(1, value=value, dtype="float32") for value in (40.0, 20.0))
    return *tensors, *scales, mla.BLOCK_SIZE, *mla.example_rotation(make, num_tokens, rotary)
