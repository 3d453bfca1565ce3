"""Multi-head latent attention of Kimi K3 in prefill: keys and values of heads alone, and all of it in fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import float8_e4m3fn
from ..._core.tensors.tensor import TensorArg
from . import _mla_epilogue as mla
from .kimi_k3_prefill import _bad_insert, _example_heads, _key_result

if TYPE_CHECKING:
    from torch import Tensor


def _fp8(k_nope: TensorArg, k_pe: TensorArg, v: TensorArg) -> tuple[Result, Result]:
    shape, *_ = _key_result(k_nope, k_pe)
    return Result(shape, float8_e4m3fn), Result(v.shape, float8_e4m3fn)


@op(out="k_out", ulps=0)
def fused_kimi_k3_mla_kv_concat(k_nope: Tensor, k_pe: Tensor, k_out: Tensor) -> None:
    """Concatenate the parts of keys, ``k_out[t, h] = [k_nope[t, h], k_pe[t]]`` (Kimi K3's MLA, chunked prefill).

    Args:
        k_nope: [num_tokens, num_heads, nope_size], float16 or bfloat16; any strides but the last.
        k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.
        k_out: [num_tokens, num_heads, nope_size + rope_size] of the same dtype, written; any strides but the last.
    """
    k_out.copy_(mla.concatenated(k_nope, k_pe))


fused_kimi_k3_mla_kv_concat.result(_key_result)


@fused_kimi_k3_mla_kv_concat.plan
def plan_fused_kimi_k3_mla_kv_concat(k_nope: TensorArg, k_pe: TensorArg, k_out: TensorArg) -> Launch:
    check.dtype(k_out, k_nope.dtype)
    return mla.Epilogue(k_pe, k_nope, k_nope=k_nope, k_out=k_out).launch()


@fused_kimi_k3_mla_kv_concat.example
def example_fused_kimi_k3_mla_kv_concat(make: Any, *, num_tokens: int = 16) -> tuple[Any, ...]:
    k_nope, _ = _example_heads(make, num_tokens, mla.NOPE_SIZE, 8)
    k_pe = make.randn(num_tokens, mla.ROPE_SIZE, dtype="bfloat16")
    return k_nope, k_pe, make.empty(num_tokens, k_nope.shape[1], mla.NOPE_SIZE + mla.ROPE_SIZE, dtype="bfloat16")


@op(out=("k_fp8", "v_fp8"), ulps=0)
def fused_kimi_k3_mla_kv_concat_quant_fp8(
    k_nope: Tensor, k_pe: Tensor, v: Tensor, k_fp8: Tensor, v_fp8: Tensor
) -> None:
    """Concatenate the parts of keys, and convert keys and values to fp8 (Kimi K3's MLA, chunked prefill).

    ``k_fp8[t, h] = [k_nope[t, h], k_pe[t]]`` and ``v_fp8 = v`` as float8_e4m3fn, saturating; NaN stays NaN.

    Args:
        k_nope: [num_tokens, num_heads, nope_size], float16 or bfloat16; any strides but the last.
        k_pe: [num_tokens, rope_size] of the same dtype, or float8_e4m3fn, copied; any token stride.
        v: [num_tokens, num_heads, v_size] of the dtype of `k_nope`; any strides but the last. All sizes are multiples
            of 8.
        k_fp8: [num_tokens, num_heads, nope_size + rope_size] float8_e4m3fn, written; any strides but the last.
        v_fp8: [num_tokens, num_heads, v_size] float8_e4m3fn, written; any strides but the last.
    """
    k_fp8.copy_(mla.as_fp8(mla.concatenated(k_nope, k_pe)))
    v_fp8.copy_(mla.as_fp8(v))


fused_kimi_k3_mla_kv_concat_quant_fp8.result(_fp8)


@fused_kimi_k3_mla_kv_concat_quant_fp8.plan
def plan_fused_kimi_k3_mla_kv_concat_quant_fp8(
    k_nope: TensorArg, k_pe: TensorArg, v: TensorArg, k_fp8: TensorArg, v_fp8: TensorArg
) -> Launch:
    for out in (k_fp8, v_fp8):
        check.dtype(out, float8_e4m3fn)
    return mla.Epilogue(k_pe, k_nope, k_nope=k_nope, k_out=k_fp8, v=v, v_out=v_fp8).launch()


@fused_kimi_k3_mla_kv_concat_quant_fp8.example
def example_fused_kimi_k3_mla_kv_concat_quant_fp8(
    make: Any, *, num_tokens: int = 16, fp8_pe: bool = False
) -> tuple[Any, ...]:
    k_nope, v = _example_heads(make, num_tokens, mla.NOPE_SIZE, 128)
    k_pe = make.randn(num_tokens, mla.ROPE_SIZE, dtype="float8_e4m3fn" if fp8_pe else "bfloat16")
    heads = k_nope.shape[1]
    k_fp8 = make.empty(num_tokens, heads, mla.NOPE_SIZE + mla.ROPE_SIZE, dtype="float8_e4m3fn")
    return k_nope, k_pe, v, k_fp8, make.empty(num_tokens, heads, 128, dtype="float8_e4m3fn")


@op(out=("q_fp8", "k_fp8", "v_fp8"), inout="k_cache")
def fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c_normed: Tensor,
    v: Tensor,
    q_fp8: Tensor,
    k_fp8: Tensor,
    v_fp8: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    v_scale_inv: Tensor,
    cache_scale_inv: Tensor,
    cache_block_size: int,
    position_ids: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> None:
    """`fused_kimi_k3_mla_key_concat_kv_cache_insert` in fp8: queries, keys, values and the latent (Kimi K3, prefill).

    ``q_fp8 = q * q_scale_inv`` with rotated last elements; ``k_fp8[t, h] = [k_nope[t, h], rotated(k_pe[t])] *
    k_scale_inv``; ``v_fp8 = v * v_scale_inv``; and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])] *
    cache_scale_inv``. All as float8_e4m3fn of float32 values, saturating; NaN stays NaN. The op named above describes
    rotations and slots.

    Args:
        q: [num_tokens, num_heads, nope_size + rope_size], float16 or bfloat16; any strides but the last.
        k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
        k_pe: [num_tokens, rope_size] of the same dtype; any token stride.
        kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
        v: [num_tokens, num_heads, v_size] of the same dtype; any strides but the last. All sizes are multiples of 8.
        q_fp8, k_fp8: [num_tokens, num_heads, nope_size + rope_size] float8_e4m3fn, written; any strides but the last.
        v_fp8: [num_tokens, num_heads, v_size] float8_e4m3fn, written; any strides but the last.
        k_cache: [num_blocks, cache_block_size, latent_size + rope_size] float8_e4m3fn, written where slots say; any
            strides but the last.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        q_scale_inv, k_scale_inv, v_scale_inv, cache_scale_inv: one float32 each.
        cache_block_size: slots of a block.
        position_ids: [num_tokens] int64 or int32, any stride, or None.
        cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.
    """
    rotation = position_ids, cos_sin_cache
    start = q.shape[2] - k_pe.shape[1]
    q_fp8.copy_(mla.as_fp8(mla.concatenated(q[..., :start], mla.rotated(q[..., start:], *rotation)), q_scale_inv))
    k_fp8.copy_(mla.as_fp8(mla.concatenated(k_nope, mla.rotated(k_pe, *rotation)), k_scale_inv))
    v_fp8.copy_(mla.as_fp8(v, v_scale_inv))
    mla.insert_latents(kv_c_normed, k_pe, k_cache, slot_mapping, cache_block_size, *rotation, cache_scale_inv)


@fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert.result
def result_fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(
    q: TensorArg, k_nope: TensorArg, k_pe: TensorArg, v: TensorArg
) -> tuple[Result, ...]:
    return Result(q.shape, float8_e4m3fn), *_fp8(k_nope, k_pe, v)


@fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert.plan
def plan_fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(
    q: TensorArg,
    k_nope: TensorArg,
    k_pe: TensorArg,
    kv_c_normed: TensorArg,
    v: TensorArg,
    q_fp8: TensorArg,
    k_fp8: TensorArg,
    v_fp8: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    q_scale_inv: TensorArg,
    k_scale_inv: TensorArg,
    v_scale_inv: TensorArg,
    cache_scale_inv: TensorArg,
    cache_block_size: int,
    position_ids: TensorArg | None,
    cos_sin_cache: TensorArg | None,
) -> Launch:
    for out in (q_fp8, k_fp8, v_fp8, k_cache):
        check.dtype(out, float8_e4m3fn)
    check.dtype(k_pe, k_nope.dtype)
    check.dtype(q, k_nope.dtype)
    check.same_shape(q_fp8, q)
    shape, *_ = _key_result(k_nope, k_pe)
    check.sizes(q, num_tokens=shape[0], num_heads=shape[1], **{"nope_size + rope_size": shape[2]})
    scales = q_scale_inv, k_scale_inv, v_scale_inv, cache_scale_inv
    return mla.Epilogue(
        k_pe,
        k_nope,
        q_nope=q,
        q_out=q_fp8,
        k_nope=k_nope,
        k_out=k_fp8,
        v=v,
        v_out=v_fp8,
        kv_c=kv_c_normed,
        k_cache=k_cache,
        slot_mapping=slot_mapping,
        block_size=cache_block_size,
        position_ids=position_ids,
        cos_sin_cache=cos_sin_cache,
        scales=dict(zip(("q_scale_inv", "k_scale_inv", "v_scale_inv", "cache_scale_inv"), scales, strict=True)),
    ).launch()


fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert.bad_indices(_bad_insert)


@fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert.traffic
def traffic_fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(
    k_pe: TensorArg, kv_c_normed: TensorArg, q_fp8: TensorArg, k_fp8: TensorArg, v_fp8: TensorArg
) -> int:
    return 3 * (q_fp8.nbytes + k_fp8.nbytes + v_fp8.nbytes) + 3 * (kv_c_normed.nbytes + k_pe.nbytes) // 2


@fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert.example
def example_fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(
    make: Any, *, num_tokens: int = 16, rotary: bool = False
) -> tuple[Any, ...]:
    size = mla.NOPE_SIZE + mla.ROPE_SIZE
    q, k_nope, v = _example_heads(make, num_tokens, size, mla.NOPE_SIZE, 128)
    k_pe = make.randn(num_tokens, mla.ROPE_SIZE, dtype="bfloat16")
    kv_c, k_cache, slot_mapping = mla.example_latents(make, num_tokens, "float8_e4m3fn")
    outputs = (make.empty(num_tokens, q.shape[1], one, dtype="float8_e4m3fn") for one in (size, size, 128))
    scales = [make.full(1, value=40.0, dtype="float32")] * 4
    rotation = mla.example_rotation(make, num_tokens, rotary)
    return q, k_nope, k_pe, kv_c, v, *outputs, k_cache, slot_mapping, *scales, mla.BLOCK_SIZE, *rotation
