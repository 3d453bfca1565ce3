"""Norm and RoPE of query and key heads, and the insert of keys and values into a paged cache, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.tensor import TensorArg
from .._shared.heads import known_positions, normed, rotated
from . import _qk_norm_rope as shared
from ._common import bad_slots, example_cache, example_slots

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_SIZE, _MAX_POSITION = 16, 4096  # of examples


@op(out=("q_out", "k_out", "v_out"), inout=("k_cache", "v_cache"))
def fused_qknorm_rope_cache(
    q_out: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    rotary_pairs: int,
    epsilon: float,
    norm_weight_bias: float,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Split qkv into queries, keys and values, norm and rotate queries and keys, and insert keys and values (Step 5).

    ``q_out[t, h] = rotated(x / sqrt(mean(x^2) + epsilon) * (q_weight + norm_weight_bias))`` for head ``x`` of
    ``qkv[t]``, keys likewise, and values as they are. The first 2 * rotary_pairs elements of a head rotate in pairs
    (j, j + rotary_pairs) by the angles of the token's position; all in float32, rounded once. Keys and values are
    then written to ``b, o = divmod(slot_mapping[t], block_size)`` of the caches, as they are or as fp8 of ``x /
    scale``. A token with a position outside the table is not rotated, and nothing of it is inserted; nor is a token
    with a slot that is negative or after the last.

    Args:
        q_out: [num_tokens, num_q_heads * head_dim], of the dtype of `qkv`, contiguous, written.
        k_out, v_out: [num_tokens, num_kv_heads * head_dim] of the same dtype, contiguous, written.
        qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], float16 or bfloat16; any row stride.
        q_weight, k_weight: [head_dim], float32, float16 or bfloat16, both of one dtype.
        cos, sin: [max_position, at least rotary_pairs], float32, float16 or bfloat16, of one row at least; both of one
            dtype, any row strides. Not read if rotary_pairs is 0.
        positions: [num_tokens] int64 or int32, any stride.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], written where slots say; any strides but the
            last; of the dtype of `qkv`, or uint8 or float8.
        head_dim: 64, 128, 192 or 256.
        num_q_heads, num_kv_heads: heads of each kind.
        rotary_pairs: at most head_dim / 2.
        epsilon: added to the mean of squares.
        norm_weight_bias: added to the weights.
        kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: one float32 each; needed for fp8.
    """
    num_tokens = len(qkv)
    heads = qkv.reshape(num_tokens, -1, head_dim)
    q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), 1)
    known = known_positions(positions, cos if rotary_pairs else None)
    for out, x, weight in ((q_out, q, q_weight), (k_out, k, k_weight)):
        y = normed(x, weight, norm_weight_bias, epsilon)
        out.copy_(rotated(y, positions, cos, sin, rotary_pairs, True).reshape(num_tokens, -1))
    v_out.copy_(v.reshape(num_tokens, -1))
    for cache, x, scale in ((k_cache, k_out, k_scale), (v_cache, v_out, v_scale)):
        shared.insert(x.view(num_tokens, -1, head_dim), cache, slot_mapping, known, kv_cache_dtype, scale)


@fused_qknorm_rope_cache.result
def result_fused_qknorm_rope_cache(
    qkv: TensorArg, head_dim: int, num_q_heads: int, num_kv_heads: int
) -> tuple[Result, Result, Result]:
    check.sizes(qkv, num_tokens=None, width=None)
    q, kv = ((qkv.shape[0], heads * head_dim) for heads in (num_q_heads, num_kv_heads))
    return Result(q, qkv.dtype), Result(kv, qkv.dtype), Result(kv, qkv.dtype)


@fused_qknorm_rope_cache.plan
def plan_fused_qknorm_rope_cache(
    q_out: TensorArg,
    k_out: TensorArg,
    v_out: TensorArg,
    qkv: TensorArg,
    q_weight: TensorArg,
    k_weight: TensorArg,
    cos: TensorArg,
    sin: TensorArg,
    positions: TensorArg,
    slot_mapping: TensorArg,
    k_cache: TensorArg,
    v_cache: TensorArg,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    rotary_pairs: int,
    kv_cache_dtype: str,
    k_scale: TensorArg | None,
    v_scale: TensorArg | None,
) -> Launch:
    if rotary_pairs < 0:
        raise check.refuse(qkv, "rotary_pairs", f"expected at least 0, got {rotary_pairs}")
    check.sizes(qkv, num_tokens=None, **{"heads * head_dim": (num_q_heads + 2 * num_kv_heads) * head_dim})
    return shared.Rows(
        qkv,
        head_dim,
        num_q_heads,
        num_kv_heads,
        positions,
        cos if rotary_pairs else None,
        sin if rotary_pairs else None,
        rotary_pairs,
        True,
        {"q_weight": q_weight, "k_weight": k_weight},
        {"q_out": q_out, "k_out": k_out, "v_out": v_out},
        k_cache,
        v_cache,
        slot_mapping,
        kv_cache_dtype,
        {"k_scale": k_scale, "v_scale": v_scale},
        {"q_fp8_scale": 1.0},
        renamed={"eps": "epsilon", "weight_bias": "norm_weight_bias"},
    ).launch()


@fused_qknorm_rope_cache.bad_indices
def bad_indices_fused_qknorm_rope_cache(
    cos: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, rotary_pairs: int
) -> dict[str, Tensor]:
    outside = ~known_positions(positions, cos if rotary_pairs else None)
    return {"positions": outside, **bad_slots(slot_mapping, *k_cache.shape[:2])}


@fused_qknorm_rope_cache.traffic
def traffic_fused_qknorm_rope_cache(qkv: TensorArg, k_cache: TensorArg, slot_mapping: TensorArg) -> int:
    inserted = 2 * slot_mapping.numel * k_cache.shape[2] * k_cache.shape[3] * k_cache.dtype.itemsize
    return 2 * qkv.nbytes + inserted


@fused_qknorm_rope_cache.example
def example_fused_qknorm_rope_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    head_dim: Literal[128, 192, 64] = 128,
    rotary_pairs: Literal[32, 12, 0] = 32,
) -> tuple[Any, ...]:
    q_heads, kv_heads = 8, 2
    num_blocks, slot_mapping = example_slots(make, num_tokens, _BLOCK_SIZE)
    cache = num_blocks, _BLOCK_SIZE, kv_heads, head_dim
    element = "bfloat16" if kv_cache_dtype == "auto" else "uint8"
    return (
        *(make.empty(num_tokens, heads * head_dim, dtype="bfloat16") for heads in (q_heads, kv_heads, kv_heads)),
        make.randn(num_tokens, (q_heads + 2 * kv_heads) * head_dim, dtype="bfloat16"),
        *(make.randn(head_dim, dtype="float32", scale=0.1) for _ in range(2)),
        *(make.randn(_MAX_POSITION, max(8, rotary_pairs), dtype="float32") for _ in range(2)),
        make.randint(0, _MAX_POSITION, num_tokens),
        slot_mapping,
        *(example_cache(make, *cache, dtype=element) for _ in range(2)),
        *(head_dim, q_heads, kv_heads, rotary_pairs, 1e-6, 1.0, kv_cache_dtype),
        *(make.full(1, value=value, dtype="float32") for value in (0.03, 0.05)),
    )


@op(inout=("qkv", "kv_cache", "q_fp8_out"))
def fused_muse_spark_qknorm_rope_kv_insert(
    qkv: Tensor,
    positions: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    cos_sin_cache: Tensor | None,
    rotary_dim: int,
    slot_mapping: Tensor | None,
    kv_cache: Tensor | None,
    block_size: int,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_fp8_out: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> None:
    """Norm and rotate the query and key heads of qkv in place, and insert keys and values into a cache (Muse Spark).

    A head ``x`` becomes ``rotated(x / sqrt(mean(x^2) + eps))``. Its first rotary_dim elements rotate in adjacent pairs
    (2j, 2j + 1) by the angles of the token's position; without `cos_sin_cache` nothing rotates. All in float32, rounded
    once. With `kv_cache`, keys and values are then written to ``b, o = divmod(slot_mapping[t], block_size)``, as they
    are or as fp8 of ``x / scale``. A token with a position outside the table is not rotated, and nothing of it is
    inserted; nor is a token with a slot that is negative or after the last.

    Args:
        qkv: [num_tokens, at least (num_heads + 2 * num_kv_heads) * head_dim], float16 or bfloat16, read and written;
            any row stride. Values, and what follows them, are not changed.
        positions: [num_tokens] int64 or int32, any stride; not read without `cos_sin_cache`.
        num_heads, num_kv_heads: heads of queries, and of keys.
        head_dim: 64, 128, 192 or 256.
        eps: added to the mean of squares.
        cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
            cosines, then sines; or None.
        rotary_dim: even, at most head_dim; no effect without `cos_sin_cache`.
        slot_mapping: [at most num_tokens] int64 or int32, any stride; None without `kv_cache`.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_dim], keys before values, written where slots say; any
            strides but the last; of the dtype of `qkv`, or uint8 or float8; or None.
        block_size: slots of a block of `kv_cache`.
        kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: one float32 each; needed for fp8.
        q_fp8_out: [num_tokens, num_heads * head_dim] float8_e4m3fn, contiguous, written: queries, rounded to T, divided
            by `q_scale`. The queries of qkv are then not changed.
        q_scale: one float32, with `q_fp8_out`.
    """
    num_tokens, pairs = len(qkv), 0 if cos_sin_cache is None else rotary_dim // 2
    heads = qkv[:, : (num_heads + 2 * num_kv_heads) * head_dim].unflatten(-1, (-1, head_dim))
    cos, sin = (None, None) if cos_sin_cache is None else (cos_sin_cache[:, :pairs], cos_sin_cache[:, pairs:])
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    for x in (q, k):
        y = rotated(normed(x, None, 0.0, eps), positions, cos, sin, pairs, False).to(qkv.dtype)
        if x is q and q_fp8_out is not None and q_scale is not None:
            q_fp8_out.copy_(shared.as_fp8(y, q_scale).reshape(num_tokens, -1))
        else:
            x.copy_(y)
    if kv_cache is not None and slot_mapping is not None:
        known = known_positions(positions, cos)
        both = kv_cache.transpose(1, 2)
        for x, start, scale in ((k, 0, k_scale), (v, head_dim, v_scale)):
            part = both[..., start : start + head_dim]
            shared.insert(x, part, slot_mapping, known, kv_cache_dtype, scale)


@fused_muse_spark_qknorm_rope_kv_insert.plan
def plan_fused_muse_spark_qknorm_rope_kv_insert(
    qkv: TensorArg,
    positions: TensorArg,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin_cache: TensorArg | None,
    rotary_dim: int,
    slot_mapping: TensorArg | None,
    kv_cache: TensorArg | None,
    block_size: int,
    kv_cache_dtype: str,
    k_scale: TensorArg | None,
    v_scale: TensorArg | None,
    q_fp8_out: TensorArg | None,
    q_scale: TensorArg | None,
) -> Launch:
    if (q_fp8_out is None) != (q_scale is None):
        wrong = "q_scale" if q_scale is None else "q_fp8_out"
        raise check.refuse(qkv, wrong, "expected both q_fp8_out and q_scale, or neither, got None")
    if cos_sin_cache is not None and (rotary_dim % 2 or rotary_dim < 2):
        raise check.refuse(qkv, "rotary_dim", f"expected an even number of at least 2, got {rotary_dim}")
    if cos_sin_cache is not None:
        check.sizes(cos_sin_cache, max_position=None, rotary_dim=rotary_dim)
    if kv_cache is not None:
        check.sizes(kv_cache, num_blocks=None, num_kv_heads=None, block_size=block_size, elements=None)
    return shared.Rows(
        qkv,
        head_dim,
        num_heads,
        num_kv_heads,
        positions,
        cos_sin_cache,
        None,
        rotary_dim // 2 if cos_sin_cache else 0,
        False,
        {},
        {"q_fp8_out": q_fp8_out},
        kv_cache,
        None,
        slot_mapping if kv_cache else None,
        kv_cache_dtype,
        {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
        {"weight_bias": 0.0, "q_fp8_scale": 1.0},
        heads_first=True,
    ).launch()


@fused_muse_spark_qknorm_rope_kv_insert.bad_indices
def bad_indices_fused_muse_spark_qknorm_rope_kv_insert(
    positions: Tensor, cos_sin_cache: Tensor | None, slot_mapping: Tensor | None, kv_cache: Tensor | None
) -> dict[str, Tensor]:
    wrong = {"positions": ~known_positions(positions, cos_sin_cache)}
    if slot_mapping is not None and kv_cache is not None:
        wrong |= bad_slots(slot_mapping, kv_cache.shape[0], kv_cache.shape[2])
    return wrong


@fused_muse_spark_qknorm_rope_kv_insert.traffic
def traffic_fused_muse_spark_qknorm_rope_kv_insert(
    qkv: TensorArg, num_heads: int, num_kv_heads: int, head_dim: int, kv_cache: TensorArg | None
) -> int:
    token = head_dim * qkv.dtype.itemsize * (2 * num_heads + 3 * num_kv_heads)
    inserted = 2 * num_kv_heads * head_dim * kv_cache.dtype.itemsize if kv_cache else 0
    return qkv.shape[0] * (token + inserted)


@fused_muse_spark_qknorm_rope_kv_insert.example
def example_fused_muse_spark_qknorm_rope_kv_insert(
    make: Any,
    *,
    num_tokens: int = 16,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    rotary: bool = True,
    insert: bool = True,
    fp8_queries: bool = False,
) -> tuple[Any, ...]:
    heads, kv_heads, head_dim = 8, 2, 64
    num_blocks, slot_mapping = example_slots(make, num_tokens, _BLOCK_SIZE)
    element = "bfloat16" if kv_cache_dtype == "auto" else "uint8"
    cache = example_cache(make, num_blocks, kv_heads, _BLOCK_SIZE, 2 * head_dim, dtype=element)
    quants = make.empty(num_tokens, heads * head_dim, dtype="float8_e4m3fn")
    return (
        make.randn(num_tokens, (2 * heads + 2 * kv_heads) * head_dim, dtype="bfloat16"),
        make.randint(0, _MAX_POSITION, num_tokens),
        *(heads, kv_heads, head_dim, 1e-6),
        make.randn(_MAX_POSITION, head_dim, dtype="float32") if rotary else None,
        head_dim,
        *((slot_mapping, cache) if insert else (None, None)),
        *(_BLOCK_SIZE, kv_cache_dtype),
        *(make.full(1, value=value, dtype="float32") for value in (0.03, 0.05)),
        *((quants, make.full(1, value=0.02, dtype="float32")) if fp8_queries else (None, None)),
    )
