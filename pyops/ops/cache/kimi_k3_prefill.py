"""Multi-head latent attention of Kimi K3 in prefill: queries, keys and values of heads, and the cache entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import DType, uint8
from ..._core.tensors.tensor import TensorArg
from . import _mla_epilogue as mla

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = 12  # heads of an example: those of a rank of eight


def _key_result(k_nope: TensorArg, k_pe: TensorArg) -> Result:
    check.sizes(k_nope, num_tokens=None, num_heads=None, nope_size=None)
    check.sizes(k_pe, num_tokens=None, rope_size=None)
    return Result((*k_nope.shape[:2], k_nope.shape[2] + k_pe.shape[1]), k_nope.dtype)


def _example_heads(make: Any, num_tokens: int, *sizes: int) -> list[Any]:
    return [make.randn(num_tokens, _HEADS, size, dtype="bfloat16") for size in sizes]


def _example_insert(make: Any, num_tokens: int, cache: str, rotary: bool) -> tuple[Any, ...]:
    q, k_nope = _example_heads(make, num_tokens, mla.NOPE_SIZE + mla.ROPE_SIZE, mla.NOPE_SIZE)
    k_pe = make.randn(num_tokens, mla.ROPE_SIZE, dtype="bfloat16")
    kv_c, k_cache, slot_mapping = mla.example_latents(make, num_tokens, cache)
    k_out = make.empty(num_tokens, _HEADS, mla.NOPE_SIZE + mla.ROPE_SIZE, dtype="bfloat16")
    rotation = mla.example_rotation(make, num_tokens, rotary)
    return q, k_nope, k_pe, kv_c, k_out, k_cache, slot_mapping, mla.BLOCK_SIZE, *rotation


def _insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c_normed: Tensor,
    k_out: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    cache_block_size: int,
    position_ids: Tensor | None,
    cos_sin_cache: Tensor | None,
) -> None:
    rotation = position_ids, cos_sin_cache
    k_out.copy_(mla.concatenated(k_nope, mla.rotated(k_pe, *rotation)))
    mla.insert_latents(kv_c_normed, k_pe, k_cache, slot_mapping, cache_block_size, *rotation)
    rope = q[..., q.shape[2] - k_pe.shape[1] :]
    rope.copy_(mla.rotated(rope, *rotation))


@op(out="k_out", inout=("q", "k_cache"))
def fused_kimi_k3_mla_key_concat_kv_cache_insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c_normed: Tensor,
    k_out: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    cache_block_size: int,
    position_ids: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> None:
    """Rotate queries in place, concatenate keys, and write the latent into a paged cache (Kimi K3's MLA, prefill).

    ``k_out[t, h] = [k_nope[t, h], rotated(k_pe[t])]`` and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])]`` with
    ``b, o = divmod(slot_mapping[t], cache_block_size)``. The last rope_size elements of a query rotate, too. A rotation
    is that of the adjacent pairs (2j, 2j + 1) by the angles of the token's position, in float32, rounded once; without
    `position_ids` and `cos_sin_cache` nothing rotates. No entry is written for a slot that is negative or after the
    last. A token with a position outside the table is not rotated, and has no entry written.

    Args:
        q: [num_tokens, num_heads, nope_size + rope_size], float16 or bfloat16, read and written; any strides but the
            last.
        k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
        k_pe: [num_tokens, rope_size] of the same dtype; any token stride. All sizes are multiples of 8.
        kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
        k_out: [num_tokens, num_heads, nope_size + rope_size] of the same dtype, written; any strides but the last.
        k_cache: [num_blocks, cache_block_size, latent_size + rope_size] of the same dtype, written where slots say; any
            strides but the last.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        cache_block_size: slots of a block.
        position_ids: [num_tokens] int64 or int32, any stride, or None.
        cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride: cosines, then sines; or
            None.
    """
    rotation = position_ids, cos_sin_cache
    _insert(q, k_nope, k_pe, kv_c_normed, k_out, k_cache, slot_mapping, cache_block_size, *rotation)


@op(out="k_out", inout=("q", "k_cache"))
def fused_kimi_k3_mla_key_concat_ds_mla_insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c_normed: Tensor,
    k_out: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    cache_block_size: int,
    position_ids: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> None:
    """`fused_kimi_k3_mla_key_concat_kv_cache_insert` with a cache in the format "fp8_ds_mla".

    An entry is 656 bytes: 512 float8_e4m3fn of ``kv_c_normed / scale``, four float32, the scales of its tiles of 128
    elements, and the 64 elements of ``rotated(k_pe)``. A scale is the smallest power of two not below ``max(max|x| /
    448, 1e-4)``, where the maximum ignores NaN.

    Args:
        q: [num_tokens, num_heads, nope_size + 64], float16 or bfloat16, read and written; any strides but the last.
        k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
        k_pe: [num_tokens, 64] of the same dtype; any token stride.
        kv_c_normed: [num_tokens, 512] of the same dtype; any token stride.
        k_out: [num_tokens, num_heads, nope_size + 64] of the same dtype, written; any strides but the last.
        k_cache: [num_blocks, cache_block_size, 656] uint8, written where slots say; any strides but the last.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        cache_block_size: slots of a block.
        position_ids: [num_tokens] int64 or int32, any stride, or None.
        cos_sin_cache: [max_position, 64] float32, of one row at least, any row stride; or None.
    """
    rotation = position_ids, cos_sin_cache
    _insert(q, k_nope, k_pe, kv_c_normed, k_out, k_cache, slot_mapping, cache_block_size, *rotation)


def _launch_insert(
    q: TensorArg,
    k_nope: TensorArg,
    k_pe: TensorArg,
    kv_c_normed: TensorArg,
    k_out: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    cache_block_size: int,
    position_ids: TensorArg | None,
    cos_sin_cache: TensorArg | None,
    cache_dtype: DType,
) -> Launch:
    check.dtype(k_cache, cache_dtype)
    for arg in (q, k_out):
        check.dtype(arg, k_nope.dtype)
    sizes = {"nope_size + rope_size": sum(one.shape[-1] for one in (k_nope, k_pe) if one.shape)}
    check.sizes(q, num_tokens=None, num_heads=None, **sizes)
    return mla.Epilogue(
        k_pe,
        k_nope,
        q_out=q,
        k_nope=k_nope,
        k_out=k_out,
        kv_c=kv_c_normed,
        k_cache=k_cache,
        slot_mapping=slot_mapping,
        block_size=cache_block_size,
        position_ids=position_ids,
        cos_sin_cache=cos_sin_cache,
    ).launch()


@fused_kimi_k3_mla_key_concat_kv_cache_insert.plan
def plan_fused_kimi_k3_mla_key_concat_kv_cache_insert(
    q: TensorArg,
    k_nope: TensorArg,
    k_pe: TensorArg,
    kv_c_normed: TensorArg,
    k_out: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    cache_block_size: int,
    position_ids: TensorArg | None,
    cos_sin_cache: TensorArg | None,
) -> Launch:
    tensors = q, k_nope, k_pe, kv_c_normed, k_out, k_cache, slot_mapping
    return _launch_insert(*tensors, cache_block_size, position_ids, cos_sin_cache, k_nope.dtype)


@fused_kimi_k3_mla_key_concat_ds_mla_insert.plan
def plan_fused_kimi_k3_mla_key_concat_ds_mla_insert(
    q: TensorArg,
    k_nope: TensorArg,
    k_pe: TensorArg,
    kv_c_normed: TensorArg,
    k_out: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    cache_block_size: int,
    position_ids: TensorArg | None,
    cos_sin_cache: TensorArg | None,
) -> Launch:
    tensors = q, k_nope, k_pe, kv_c_normed, k_out, k_cache, slot_mapping
    return _launch_insert(*tensors, cache_block_size, position_ids, cos_sin_cache, uint8)


def _traffic_insert(
    q: TensorArg, k_pe: TensorArg, kv_c_normed: TensorArg, k_out: TensorArg, position_ids: TensorArg | None
) -> int:
    """Each element of k_out is read, too; so is the entry; a rotation reads and writes a part of q."""
    rope = 2 * q.nbytes // q.shape[2] * k_pe.shape[1] if position_ids and q.numel else 0
    return 2 * k_out.nbytes + rope + 2 * (kv_c_normed.nbytes + k_pe.nbytes)


def _bad_insert(
    k_cache: Tensor,
    slot_mapping: Tensor,
    cache_block_size: int,
    position_ids: Tensor | None,
    cos_sin_cache: Tensor | None,
) -> dict[str, Tensor]:
    return mla.bad_tokens(k_cache, slot_mapping, cache_block_size, position_ids, cos_sin_cache)


fused_kimi_k3_mla_key_concat_kv_cache_insert.result(_key_result)
fused_kimi_k3_mla_key_concat_kv_cache_insert.bad_indices(_bad_insert)
fused_kimi_k3_mla_key_concat_kv_cache_insert.traffic(_traffic_insert)
fused_kimi_k3_mla_key_concat_ds_mla_insert.result(_key_result)
fused_kimi_k3_mla_key_concat_ds_mla_insert.bad_indices(_bad_insert)
fused_kimi_k3_mla_key_concat_ds_mla_insert.traffic(_traffic_insert)


@fused_kimi_k3_mla_key_concat_kv_cache_insert.example
def example_fused_kimi_k3_mla_key_concat_kv_cache_insert(
    make: Any, *, num_tokens: int = 16, rotary: bool = True
) -> tuple[Any, ...]:
    return _example_insert(make, num_tokens, "bfloat16", rotary)


@fused_kimi_k3_mla_key_concat_ds_mla_insert.example
def example_fused_kimi_k3_mla_key_concat_ds_mla_insert(
    make: Any, *, num_tokens: int = 16, rotary: bool = True
) -> tuple[Any, ...]:
    return _example_insert(make, num_tokens, "uint8", rotary)
