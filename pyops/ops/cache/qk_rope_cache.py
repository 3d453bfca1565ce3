"""RoPE of query and key heads, optionally after a norm, and the insert of keys and values into a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.tensors.tensor import TensorArg
from .._shared.heads import known_positions, normed, rotated
from . import _qk_norm_rope as shared
from ._common import bad_slots, example_cache, example_slots

if TYPE_CHECKING:
    from torch import Tensor

_HEAD_SIZES = 64, 128, 256  # head sizes; 192 would spill in heads with norms
_BLOCK_SIZE, _MAX_POSITION = 16, 4096  # of examples


@op(inout=("qkv", "key_cache", "value_cache"))
def fused_qk_rope_cache(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    constant_positions: bool = False,
) -> None:
    """Rotate the query and key heads of qkv in place, and insert keys and values into a paged cache: one launch.

    With weights a head ``x`` first becomes ``x / sqrt(mean(x^2) + eps) * weight``. The first ``rotary_dim`` elements of
    a head rotate in pairs: (j, j + rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864).
    All in float32, rounded once. Keys and values are then written to ``b, o = divmod(slot_mapping[t], block_size)`` of
    the caches, as they are or as fp8 of ``x / scale``. A token with a position outside the table is not rotated, and
    nothing of it is inserted; nor is a token with a slot that is negative or after the last.

    Args:
        qkv: [num_tokens, at least (num_heads_q + 2 * num_heads_kv) * head_dim], float16 or bfloat16, read and written;
            any row stride. Values, and what follows them, are not changed.
        num_heads_q, num_heads_kv: heads of queries, and of keys.
        head_dim: 64, 128 or 256.
        cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
            cosines, then sines; rotary_dim even, at most head_dim.
        is_neox: which elements form a pair.
        positions: [num_tokens] int64 or int32, any stride.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        key_cache, value_cache: [num_blocks, block_size, num_heads_kv, head_dim], written where slots say; any strides
            but the last; of the dtype of `qkv`, or uint8 or float8.
        kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: one float32 each; needed for fp8.
        q_weight, k_weight: [head_dim], float32, float16 or bfloat16, both of one dtype; or None, both.
        eps: added to the mean of squares; not read without weights.
        constant_positions: a promise that no kernel which may still run when this one starts writes positions,
            slot_mapping, cos_sin_cache or weights. They are then loaded while the previous kernel runs.
    """
    pairs = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache[:, :pairs], cos_sin_cache[:, pairs:]
    heads = qkv[:, : (num_heads_q + 2 * num_heads_kv) * head_dim].unflatten(-1, (-1, head_dim))
    q, k, v = heads.split((num_heads_q, num_heads_kv, num_heads_kv), 1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x.float() if weight is None else normed(x, weight, 0.0, eps)
        x.copy_(rotated(y, positions, cos, sin, pairs, is_neox))
    known = known_positions(positions, cos)
    for cache, x, scale in ((key_cache, k, k_scale), (value_cache, v, v_scale)):
        shared.insert(x, cache, slot_mapping, known, kv_cache_dtype, scale)


@fused_qk_rope_cache.plan
def plan_fused_qk_rope_cache(
    qkv: TensorArg,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    cos_sin_cache: TensorArg,
    is_neox: bool,
    positions: TensorArg,
    slot_mapping: TensorArg,
    key_cache: TensorArg,
    value_cache: TensorArg,
    kv_cache_dtype: str,
    k_scale: TensorArg | None,
    v_scale: TensorArg | None,
    q_weight: TensorArg | None,
    k_weight: TensorArg | None,
    eps: float,
    constant_positions: bool,
) -> Launch:
    if (q_weight is None) != (k_weight is None):
        wrong = "q_weight" if q_weight is None else "k_weight"
        raise check.refuse(qkv, wrong, "expected both q_weight and k_weight, or neither, got None")
    if head_dim not in _HEAD_SIZES:
        raise check.refuse(qkv, "head_dim", f"expected {' or '.join(map(str, _HEAD_SIZES))}, got {head_dim}")
    check.sizes(cos_sin_cache, max_position=None, rotary_dim=None)
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or not rotary_dim:
        raise cos_sin_cache.error(f"expected an even rotary_dim of at least 2, got {rotary_dim}")
    return shared.Rows(
        qkv,
        head_dim,
        num_heads_q,
        num_heads_kv,
        positions,
        cos_sin_cache,
        None,
        rotary_dim // 2,
        is_neox,
        {} if q_weight is None or k_weight is None else {"q_weight": q_weight, "k_weight": k_weight},
        {},
        key_cache,
        value_cache,
        slot_mapping,
        kv_cache_dtype,
        {"k_scale": k_scale, "v_scale": v_scale},
        {"weight_bias": 0.0, "q_fp8_scale": 1.0},
        norms=q_weight is not None,
        constant_positions=constant_positions,
    ).launch()


@fused_qk_rope_cache.bad_indices
def bad_indices_fused_qk_rope_cache(
    cos_sin_cache: Tensor, positions: Tensor, slot_mapping: Tensor, key_cache: Tensor
) -> dict[str, Tensor]:
    outside = ~known_positions(positions, cos_sin_cache)
    return {"positions": outside, **bad_slots(slot_mapping, *key_cache.shape[:2])}


@fused_qk_rope_cache.traffic
def traffic_fused_qk_rope_cache(
    qkv: TensorArg, num_heads_q: int, num_heads_kv: int, head_dim: int, key_cache: TensorArg
) -> int:
    token = head_dim * qkv.dtype.itemsize * (2 * num_heads_q + 3 * num_heads_kv)
    return qkv.shape[0] * (token + 2 * num_heads_kv * head_dim * key_cache.dtype.itemsize)


@fused_qk_rope_cache.example
def example_fused_qk_rope_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    head_dim: Literal[128, 256, 64] = 128,
    is_neox: bool = True,
    norms: bool = False,
) -> tuple[Any, ...]:
    q_heads, kv_heads = 8, 2
    num_blocks, slot_mapping = example_slots(make, num_tokens, _BLOCK_SIZE)
    cache = num_blocks, _BLOCK_SIZE, kv_heads, head_dim
    element = "bfloat16" if kv_cache_dtype == "auto" else "uint8"
    return (
        make.randn(num_tokens, (q_heads + 2 * kv_heads) * head_dim, dtype="bfloat16"),
        *(q_heads, kv_heads, head_dim),
        make.randn(_MAX_POSITION, head_dim, dtype="bfloat16"),
        is_neox,
        make.randint(0, _MAX_POSITION, num_tokens),
        slot_mapping,
        *(example_cache(make, *cache, dtype=element) for _ in range(2)),
        kv_cache_dtype,
        *(make.full(1, value=value, dtype="float32") for value in (0.03, 0.05)),
        *((make.randn(head_dim, dtype="bfloat16") for _ in range(2)) if norms else (None, None)),
        1e-6,
        False,
    )
