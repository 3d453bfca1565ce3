"""Norm, RoPE and the insert of keys and values for MiniMax-M3, with the heads of an indexer in the same rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.tensors.tensor import TensorArg
from .._shared.heads import known_positions, normed, rotated
from . import _qk_norm_rope as shared
from ._common import bad_slots, example_cache, example_slots, indexable

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_SIZE, _MAX_POSITION, _HEAD_SIZE = 16, 4096, 128  # of examples


@op(inout=("qkv", "kv_cache", "index_cache", "q_out", "index_q_out", "q_fp8_out"))
def fused_minimax_m3_qknorm_rope_kv_insert(
    qkv: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotary_dim: int,
    eps: float,
    index_q_norm_weight: Tensor | None,
    index_k_norm_weight: Tensor | None,
    num_index_heads: int,
    slot_mapping: Tensor | None,
    index_slot_mapping: Tensor | None,
    kv_cache: Tensor | None,
    index_cache: Tensor | None,
    block_size: int,
    q_out: Tensor | None,
    index_q_out: Tensor | None,
    kv_cache_dtype: str,
    skip_index_branch: bool = False,
    q_fp8_out: Tensor | None = None,
    q_fp8_scale: float = 1.0,
    kv_k_scale: Tensor | None = None,
    kv_v_scale: Tensor | None = None,
) -> None:
    """Norm and rotate the heads of qkv in place, and insert keys and values into caches (MiniMax-M3).

    A row of qkv has query, key and value heads, and, if num_index_heads is not 0, index query heads and one index key.
    A head ``x`` of queries or keys becomes ``rotated(x / sqrt(mean(x^2) + eps) * (1 + weight))`` with the weight of its
    kind. Its first rotary_dim elements rotate in pairs (j, j + rotary_dim / 2) by the angles of the token's position;
    all in float32, rounded once to T. With `kv_cache`, keys and values are then written to ``b, o =
    divmod(slot_mapping[t], block_size)``, as they are or as fp8, and the index key to slot ``index_slot_mapping[t]`` of
    `index_cache`. A token with a position outside the table is not rotated, and nothing of it is inserted; nor is what
    has a slot that is negative or after the last.

    Args:
        qkv: [num_tokens, heads * head_size], float16 or bfloat16, read and written; any row stride. Values are not
            changed.
        q_norm_weight, k_norm_weight: [head_size], float32, float16 or bfloat16; head_size 64, 128, 192 or 256.
        cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
            cosines, then sines.
        positions: [num_tokens] int64 or int32, any stride.
        num_heads, num_kv_heads: heads of queries, and of keys.
        rotary_dim: even, at most head_size.
        eps: added to the mean of squares.
        index_q_norm_weight, index_k_norm_weight: [head_size] of the dtype of the other weights; None without an index.
        num_index_heads: heads of index queries; 0 without an index.
        slot_mapping: [at most num_tokens] int64 or int32, any stride; None without `kv_cache`.
        index_slot_mapping: the same for `index_cache`; `slot_mapping` where it is None.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], keys before values, written where slots say;
            any strides but the last; of the dtype of `qkv`, or uint8 or float8; or None.
        index_cache: [..., head_size], contiguous, of the dtype of `qkv` or float8_e4m3fn, written where slots say;
            needed with an index and `kv_cache`.
        block_size: slots of a block of `kv_cache`.
        q_out: [num_tokens, num_heads * head_size] of the dtype of `qkv`, contiguous, written: queries, instead of
            in qkv; or None.
        index_q_out: [num_tokens, num_index_heads * head_size] of the dtype of `index_cache`, contiguous, written: index
            queries, instead of in qkv; or None.
        kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
        skip_index_branch: whether index heads stay as they are.
        q_fp8_out: [num_tokens, num_heads * head_size] float8_e4m3fn, contiguous, written: queries, rounded to T,
            divided by q_fp8_scale. Without `q_out`, the queries of qkv are then not changed.
        q_fp8_scale: above 0.
        kv_k_scale, kv_v_scale: not read: fp8 caches have a scale of 1.
    """
    head_size, num_tokens = len(q_norm_weight), len(qkv)
    pairs = rotary_dim // 2
    tables = cos_sin_cache[:, :pairs], cos_sin_cache[:, pairs:]
    heads = qkv.unflatten(-1, (-1, head_size))
    counts = num_heads, num_kv_heads, num_kv_heads, num_index_heads
    ends = [sum(counts[: i + 1]) for i in range(4)]
    q, k, v, index_q = (heads[:, end - count : end] for count, end in zip(counts, ends, strict=True))
    index_k = heads[:, ends[3] :]

    def changed(x: Tensor, weight: Tensor | None) -> Tensor:
        y = normed(x, weight, 1.0, eps)
        return rotated(y, positions, *tables, pairs, True).to(qkv.dtype)

    y = changed(q, q_norm_weight)
    if q_fp8_out is not None:
        q_fp8_out.copy_(shared.as_fp8(y, q_fp8_scale).reshape(q_fp8_out.shape))
    if q_out is not None:
        q_out.copy_(y.reshape(q_out.shape))
    elif q_fp8_out is None:
        q.copy_(y)
    k.copy_(changed(k, k_norm_weight))
    known = known_positions(positions, cos_sin_cache)
    if kv_cache is not None and slot_mapping is not None:
        both = kv_cache.transpose(1, 2)
        for x, start in ((k, 0), (v, head_size)):
            shared.insert(x, both[..., start : start + head_size], slot_mapping, known, kv_cache_dtype, None)
    if not num_index_heads or skip_index_branch:
        return
    y = changed(index_q, index_q_norm_weight)
    if index_q_out is not None:
        kind = index_q_out.dtype
        index_q_out.copy_((shared.as_fp8(y, 1.0) if kind.itemsize == 1 else y).reshape(num_tokens, -1))
    else:
        index_q.copy_(y)
    index_k.copy_(changed(index_k, index_k_norm_weight))
    slots = slot_mapping if index_slot_mapping is None else index_slot_mapping
    if kv_cache is not None and index_cache is not None and slots is not None:
        flat = index_cache.view(-1, 1, 1, head_size)
        name = "fp8_e4m3" if index_cache.dtype.itemsize == 1 else "auto"
        shared.insert(index_k, flat, slots, known, name, None)


@fused_minimax_m3_qknorm_rope_kv_insert.plan
def plan_fused_minimax_m3_qknorm_rope_kv_insert(
    qkv: TensorArg,
    q_norm_weight: TensorArg,
    k_norm_weight: TensorArg,
    cos_sin_cache: TensorArg,
    positions: TensorArg,
    num_heads: int,
    num_kv_heads: int,
    rotary_dim: int,
    index_q_norm_weight: TensorArg | None,
    index_k_norm_weight: TensorArg | None,
    num_index_heads: int,
    slot_mapping: TensorArg | None,
    index_slot_mapping: TensorArg | None,
    kv_cache: TensorArg | None,
    index_cache: TensorArg | None,
    block_size: int,
    q_out: TensorArg | None,
    index_q_out: TensorArg | None,
    kv_cache_dtype: str,
    skip_index_branch: bool,
    q_fp8_out: TensorArg | None,
) -> Launch:
    check.sizes(q_norm_weight, head_size=None)
    head_size = q_norm_weight.shape[0]
    if num_index_heads < 0:
        raise check.refuse(qkv, "num_index_heads", f"expected at least 0, got {num_index_heads}")
    heads = num_heads + 2 * num_kv_heads + (num_index_heads + 1 if num_index_heads else 0)
    check.sizes(qkv, num_tokens=None, **{"heads * head_size": heads * head_size})
    if rotary_dim % 2 or rotary_dim < 2:
        raise check.refuse(qkv, "rotary_dim", f"expected an even number of at least 2, got {rotary_dim}")
    check.sizes(cos_sin_cache, max_position=None, rotary_dim=rotary_dim)
    if kv_cache is not None:
        check.sizes(kv_cache, num_blocks=None, num_kv_heads=None, block_size=block_size, elements=None)
    index = bool(num_index_heads) and not skip_index_branch
    weights = {"q_weight": q_norm_weight, "k_weight": k_norm_weight}
    if index:
        for name, weight in (("index_q", index_q_norm_weight), ("index_k", index_k_norm_weight)):
            if weight is None:
                raise check.refuse(qkv, f"{name}_norm_weight", "expected a tensor, as there are index heads, got None")
            weights[f"{name}_weight"] = weight
        if kv_cache is not None and index_cache is None:
            raise check.refuse(qkv, "index_cache", "expected a tensor, as there are index heads, got None")
    elif index_q_out is not None:
        raise index_q_out.error("expected None, as no index heads are processed, got a tensor")
    return shared.Rows(
        qkv,
        head_size,
        num_heads,
        num_kv_heads,
        positions,
        cos_sin_cache,
        None,
        rotary_dim // 2,
        True,
        weights,
        {"q_out": q_out, "q_fp8_out": q_fp8_out, "index_q_out": index_q_out},
        kv_cache,
        None,
        slot_mapping if kv_cache else None,
        kv_cache_dtype,
        {},
        {"weight_bias": 1.0},
        heads_first=True,
        num_index=num_index_heads if index else None,
        index_cache=index_cache if index and kv_cache else None,
        index_slot_mapping=index_slot_mapping if index and kv_cache else None,
    ).launch()


@fused_minimax_m3_qknorm_rope_kv_insert.bad_indices
def bad_indices_fused_minimax_m3_qknorm_rope_kv_insert(
    q_norm_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    num_index_heads: int,
    slot_mapping: Tensor | None,
    index_slot_mapping: Tensor | None,
    kv_cache: Tensor | None,
    index_cache: Tensor | None,
    skip_index_branch: bool,
) -> dict[str, Tensor]:
    wrong = {"positions": ~known_positions(positions, cos_sin_cache)}
    if slot_mapping is None or kv_cache is None:
        return wrong
    wrong |= bad_slots(slot_mapping, kv_cache.shape[0], kv_cache.shape[2])
    if num_index_heads and not skip_index_branch and index_cache is not None:
        index_slots = indexable(index_cache).numel() // len(q_norm_weight)
        if index_slot_mapping is not None:
            wrong["index_slot_mapping"] = index_slot_mapping >= index_slots
        else:
            wrong["slot_mapping"] |= slot_mapping >= index_slots
    return wrong


@fused_minimax_m3_qknorm_rope_kv_insert.traffic
def traffic_fused_minimax_m3_qknorm_rope_kv_insert(
    qkv: TensorArg, num_kv_heads: int, q_norm_weight: TensorArg, kv_cache: TensorArg | None
) -> int:
    inserted = 2 * num_kv_heads * q_norm_weight.numel * kv_cache.dtype.itemsize if kv_cache else 0
    return 2 * qkv.nbytes + qkv.shape[0] * inserted


@fused_minimax_m3_qknorm_rope_kv_insert.example
def example_fused_minimax_m3_qknorm_rope_kv_insert(
    make: Any,
    *,
    num_tokens: int = 16,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    index: Literal["bfloat16", "float8_e4m3fn", "skip", "none"] = "bfloat16",
    insert: bool = True,
    outputs: bool = False,
    rotary_dim: Literal[64, 24] = 64,
) -> tuple[Any, ...]:
    heads, kv_heads, size = 8, 2, _HEAD_SIZE
    index_heads = 0 if index == "none" else 4
    processed, kind = index in ("bfloat16", "float8_e4m3fn"), "bfloat16" if index in ("skip", "none") else index
    num_blocks, slot_mapping = example_slots(make, num_tokens, _BLOCK_SIZE)
    element = "bfloat16" if kv_cache_dtype == "auto" else "uint8"
    weights = [make.randn(size, dtype="bfloat16", scale=0.1) for _ in range(4)]
    width = heads + 2 * kv_heads + (index_heads + 1 if index_heads else 0)
    cache = example_cache(make, num_blocks, kv_heads, _BLOCK_SIZE, 2 * size, dtype=element)
    index_cache = make.randn(num_blocks, _BLOCK_SIZE, size, dtype=kind)
    return (
        make.randn(num_tokens, width * size, dtype="bfloat16"),
        *weights[:2],
        make.randn(_MAX_POSITION, rotary_dim, dtype="bfloat16"),
        make.randint(0, _MAX_POSITION, num_tokens),
        *(heads, kv_heads, rotary_dim, 1e-6),
        *(weights[2:] if processed else (None, None)),
        index_heads,
        slot_mapping if insert else None,
        example_slots(make, num_tokens, _BLOCK_SIZE)[1] if insert and processed else None,
        cache if insert else None,
        index_cache if insert and processed else None,
        _BLOCK_SIZE,
        make.empty(num_tokens, heads * size, dtype="bfloat16") if outputs else None,
        make.empty(num_tokens, index_heads * size, dtype=kind) if outputs and processed else None,
        *(kv_cache_dtype, index == "skip"),
        make.empty(num_tokens, heads * size, dtype="float8_e4m3fn") if outputs else None,
        *(0.02, None, None),
    )
