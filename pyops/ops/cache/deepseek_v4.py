"""DeepSeek-V4's attention: norm and RoPE of query heads, RoPE of the shared key, which is written to a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float16, float32, uint8
from ..._core.tensors.tensor import TensorArg
from ._common import bad_slots, example_slots, existing_slots, first_stride

if TYPE_CHECKING:
    from torch import Tensor

_fused = Kernel("cache/fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.cu")
_HEAD_SIZE, _NOPE_SIZE, _ROPE_SIZE, _GROUP_SIZE = 512, 448, 64, 64
_ENTRY_BYTES, _SCALE_BYTES = _NOPE_SIZE + 2 * _ROPE_SIZE, 8
# Heads per group of 32 lanes if groups of one head would exceed _FEW_GROUPS per SM; that bound; threads of a block.
_MANY_ROUNDS, _FEW_GROUPS, _NUM_THREADS = 2, 64, 256


def _turned(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """The float32 heads `x` [num_tokens, heads, 512] of tokens with a position in the table, rotated."""
    cos, sin = (each[:, None] for each in cos_sin_cache[positions.long()].chunk(2, -1))
    a, b = x[..., _NOPE_SIZE::2], x[..., _NOPE_SIZE + 1 :: 2]
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((x[..., :_NOPE_SIZE], pairs), -1)


def _entries(key: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes of data [num_tokens, 576], bytes of scales [num_tokens, 8]) of keys [num_tokens, 512]."""
    x = key[:, :_NOPE_SIZE].float().unflatten(-1, (-1, _GROUP_SIZE))
    absmax = x.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True).clamp(min=1e-4)
    bits = (absmax / torch.full_like(absmax, 448.0)).view(torch.int32)
    exponents = (bits + 0x7FFFFF) >> 23
    scale = (exponents << 23).view(torch.float32)
    codes = (x * (1.0 / scale)).nan_to_num(nan=-448.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    rope = key[:, _NOPE_SIZE:].contiguous()
    rope = rope.view(torch.int16).masked_fill(rope.isnan(), 0x7FFF).view(torch.uint8)  # the NaN that conversions give
    scales = torch.nn.functional.pad(exponents.squeeze(-1), (0, 1)).to(torch.uint8)
    return torch.cat((codes.flatten(1).view(torch.uint8), rope), -1), scales


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
    of two not below ``max(max|key|, 1e-4) / 448``. NaN is ignored by the maximum and becomes -448.

    A token with a position outside the table is not rotated, and its key not written; nor is a key with a slot that is
    negative or after the last.

    Args:
        q_in: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
        kv: [num_tokens, 512] of the same dtype; any token stride.
        k_cache: [num_blocks, at least 584 * cache_block_size] uint8, written where slots say; any block stride.
        slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
        position_ids: [num_tokens] int64 or int32, any stride.
        cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
        q_head_padded: heads of q_out, at least num_heads.
        eps: added to the mean of squares.
        cache_block_size: slots of a block, at least 1.
        q_out: [num_tokens, q_head_padded, 512] of the dtype of `q_in`, contiguous, written and returned; new unless
            given.
    """
    known = ((position_ids >= 0) & (position_ids < len(cos_sin_cache))).nonzero().squeeze(1)
    x = q_in.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x[known] = _turned(x[known], position_ids[known], cos_sin_cache)
    q_out.zero_()
    q_out[:, : q_in.shape[1]] = x.to(q_in.dtype)
    known = known[known < len(slot_mapping)]
    tokens, block, offset = existing_slots(slot_mapping[known], len(k_cache), cache_block_size)
    tokens = known[tokens]
    key = _turned(kv[tokens, None].float(), position_ids[tokens], cos_sin_cache)[:, 0].to(kv.dtype)
    data, scales = _entries(key)
    for part, size, start in ((data, _ENTRY_BYTES, 0), (scales, _SCALE_BYTES, cache_block_size * _ENTRY_BYTES)):
        first = start + offset[:, None] * size
        k_cache[block[:, None], first + torch.arange(size, dtype=torch.int64, device=first.device)] = part


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.result
def result_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q_in: TensorArg, q_head_padded: int) -> Result:
    check.sizes(q_in, num_tokens=None, num_heads=None, head_size=_HEAD_SIZE)
    if q_head_padded < q_in.shape[1]:
        message = f"expected at least the {q_in.shape[1]} heads of q_in, got {q_head_padded}"
        raise check.refuse(q_in, "q_head_padded", message)
    return Result((q_in.shape[0], q_head_padded, _HEAD_SIZE), q_in.dtype)


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
    q_out: TensorArg,
) -> Launch:
    check.dtype(q_in, float16, bfloat16)
    shape, *_ = result_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q_in, q_head_padded)
    num_tokens, num_heads, _ = q_in.shape
    check.dtype(kv, q_in.dtype)
    check.sizes(kv, num_tokens=num_tokens, head_size=_HEAD_SIZE)
    for arg in (q_in, kv, k_cache):
        check.row_size(arg)
    check.shape(q_out, q_in.dtype, num_tokens=num_tokens, q_head_padded=shape[1], head_size=_HEAD_SIZE)
    check.index(slot_mapping, num_slots=None)
    if slot_mapping.shape[0] > num_tokens:
        raise slot_mapping.error(f"expected at most num_tokens={num_tokens} slots, got {slot_mapping.shape}")
    check.index(position_ids, num_tokens=num_tokens)
    check.sizes(cos_sin_cache, max_position=None, rope_size=_ROPE_SIZE)
    check.shape(cos_sin_cache, float32, max_position=cos_sin_cache.shape[0], rope_size=_ROPE_SIZE)
    if not cos_sin_cache.numel:
        raise cos_sin_cache.error("expected at least one row, got none")
    check.dtype(k_cache, uint8)
    check.sizes(k_cache, num_blocks=None, bytes=None)
    if cache_block_size < 1:
        raise check.refuse(q_in, "cache_block_size", f"expected at least 1, got {cache_block_size}")
    block_bytes = cache_block_size * (_ENTRY_BYTES + _SCALE_BYTES)
    if k_cache.shape[1] < block_bytes:
        raise k_cache.error(f"expected blocks of at least {block_bytes} bytes, got shape {k_cache.shape}")
    groups = num_tokens * (q_head_padded + 1)
    rounds = _MANY_ROUNDS if groups > _FEW_GROUPS * q_in.device.num_sms else 1
    token_groups = -(-(q_head_padded + 1) // rounds)
    return _fused(
        scalar_t=q_in.dtype,
        slot_t=slot_mapping.dtype,
        position_t=position_ids.dtype,
        NUM_HEADS=num_heads,
        PADDED_HEADS=q_head_padded,
        BLOCK_SIZE=cache_block_size,
        ROUNDS=rounds,
        ACCESS_SIZE=check.vector_width(8, q_in, kv, q_out),
        ANGLE_ACCESS=check.vector_width(4, cos_sin_cache),
        ENTRY_ACCESS=check.vector_width(16, k_cache),
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        grid=-(-num_tokens * token_groups * 32 // _NUM_THREADS),
        block=_NUM_THREADS,
        num_tokens=num_tokens,
        num_slots=slot_mapping.shape[0],
        num_blocks=k_cache.shape[0],
        max_position=cos_sin_cache.shape[0],
        q_stride=q_in.strides[0],
        q_head_stride=q_in.strides[1],
        kv_stride=first_stride(kv),
        block_stride=k_cache.strides[0],
        slot_mapping_stride=first_stride(slot_mapping),
        positions_stride=first_stride(position_ids),
    )


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.bad_indices
def bad_indices_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    k_cache: Tensor, slot_mapping: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, cache_block_size: int
) -> dict[str, Tensor]:
    outside = (position_ids < 0) | (position_ids >= len(cos_sin_cache))
    return {"position_ids": outside, **bad_slots(slot_mapping, len(k_cache), cache_block_size)}


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.traffic
def traffic_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q_in: TensorArg,
    kv: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
    q_out: TensorArg,
) -> int:
    angles = min(position_ids.numel, cos_sin_cache.shape[0]) * _ROPE_SIZE * 4
    written = q_out.nbytes + slot_mapping.numel * (_ENTRY_BYTES + _SCALE_BYTES)
    return q_in.nbytes + kv.nbytes + slot_mapping.nbytes + position_ids.nbytes + angles + written


@fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.example
def example_fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    num_heads: Literal[6, 64] = 6,
) -> tuple[Any, ...]:
    block_size, max_position = 64, 4096
    padded_heads = num_heads + 2 if num_heads < 64 else 64
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
    return (
        make.randn(num_tokens, num_heads, _HEAD_SIZE, dtype=dtype),
        make.randn(num_tokens, _HEAD_SIZE, dtype=dtype),
        make.randint(0, 120, num_blocks, block_size * (_ENTRY_BYTES + _SCALE_BYTES), dtype="uint8"),
        slot_mapping,
        make.randint(0, max_position, num_tokens),
        make.randn(max_position, _ROPE_SIZE, dtype="float32"),
        *(padded_heads, 1e-6, block_size),
        make.empty(num_tokens, padded_heads, _HEAD_SIZE, dtype=dtype),
    )
