"""The cache of the indexer of sparse attention: codes of its keys, and their scales behind those of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import uint8
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from ._common import codes, example_slots, slots, slots_beyond, stride

if TYPE_CHECKING:
    from torch import Tensor

_indexer_k_quant_and_cache = Kernel("cache/indexer_k_quant_and_cache.cu")


def _power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two that is no smaller, of positive normal numbers; infinity stays."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


@op(inout="kv_cache", ulps=0)
def indexer_k_quant_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantise the indexer's keys by groups and write them into its paged cache (sparse attention of DeepSeek V3.2).

    ``s = max(max|x|, 1e-4) / 448`` over a group x of `quant_block_size` elements, in which NaN has no part, and the
    least power of two that is no smaller for "ue8m0"; the codes are ``e4m3(x / s)``, saturating, NaN staying NaN. A
    block of the cache is not a list of entries: it holds the codes of all its slots, [block_size, head_size], and then
    the scales of all its slots, [block_size, head_size / quant_block_size] float32. Nothing is written for a slot that
    is negative or lies behind the last. Of tokens with the same slot, which one is kept is not specified.

    Args:
        k: [num_tokens, head_size], float32, float16 or bfloat16; any stride of tokens. Tokens beyond the shorter of `k`
            and `slot_mapping` are not written.
        kv_cache: [num_blocks, block_size, head_size + 4 * head_size / quant_block_size] uint8, the elements of a block
            one after another; written where slots say.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        quant_block_size: elements under one scale, a divisor of head_size.
        kv_cache_dtype: the format of scales: "ue8m0" or any other name.
    """
    num_blocks, block_size, _ = kv_cache.shape
    num_tokens, head_size = min(len(k), len(slot_mapping)), k.shape[1]
    tokens, block, offset = slots(slot_mapping[:num_tokens], num_blocks, block_size)
    groups = k[tokens].float().unflatten(-1, (-1, quant_block_size))
    largest = groups.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True).clamp(min=1e-4)
    scales = largest / torch.full_like(largest, 448.0)
    if kv_cache_dtype == "ue8m0":
        scales = _power_of_two_above(scales)
    keys, of_scales = indexer_parts(kv_cache, head_size)
    keys[block, offset] = codes(groups, scales, torch.float8_e4m3fn).flatten(1)
    of_scales[block, offset] = scales.flatten(1).view(torch.uint8)


def indexer_parts(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """The codes [num_blocks, block_size, head_size] and the bytes of the scales [num_blocks, block_size, ...]."""
    num_blocks, block_size, entry = kv_cache.shape
    flat = kv_cache.as_strided((num_blocks, block_size * entry), (kv_cache.stride(0), 1))
    sizes = (head_size, entry - head_size)
    parts = flat.split([block_size * size for size in sizes], 1)
    keys, scales = (part.unflatten(1, (block_size, size)) for part, size in zip(parts, sizes, strict=True))
    return keys, scales


def indexer_cache(kv_cache: TensorArg, head_size: int, scale_size: int) -> tuple[TensorArg, int]:
    """(the codes of an indexer's cache, in what alignment the scales lie); checks the cache."""
    check.dtype(kv_cache, uint8)
    check.sizes(kv_cache, num_blocks=None, block_size=None, entry=head_size + scale_size)
    num_blocks, block_size, entry = kv_cache.shape
    if block_size * entry > 2**30:  # bytes, which kernels count in 32 bits
        raise kv_cache.error(f"expected blocks of at most 2^30 bytes, got shape {kv_cache.shape}")
    check.contiguous(replace(kv_cache, shape=kv_cache.shape[1:], strides=kv_cache.strides[1:]))
    block_stride = kv_cache.strides[0]
    keys = replace(kv_cache, shape=(num_blocks, block_size, head_size), strides=(block_stride, head_size, 1))
    bits_ = block_size * head_size | kv_cache.alignment | (block_stride if num_blocks > 1 else 0)
    return keys, bits_ & -bits_


@indexer_k_quant_and_cache.plan
def plan_indexer_k_quant_and_cache(
    k: TensorArg, kv_cache: TensorArg, slot_mapping: TensorArg, quant_block_size: int, kv_cache_dtype: str
) -> Launch:
    check.floating(k)
    check.sizes(k, num_tokens=None, head_size=None)
    head_size = check.row_size(k)
    if quant_block_size <= 0 or head_size % quant_block_size or not head_size:
        raise check.refuse(
            k, "quant_block_size", f"expected a divisor of head_size={head_size}, got {quant_block_size}"
        )
    check.index(slot_mapping, num_tokens=None)
    num_tokens = min(k.shape[0], slot_mapping.shape[0])
    num_groups = head_size // quant_block_size
    keys, scale_alignment = indexer_cache(kv_cache, head_size, 4 * num_groups)
    vec_size = check.vector_width(quant_block_size, k, keys)
    lanes, num_threads = 1, 128
    while lanes < 32 and lanes * vec_size < quant_block_size:
        lanes *= 2
    return _indexer_k_quant_and_cache(
        scalar_t=k.dtype,
        slot_t=slot_mapping.dtype,
        HEAD_SIZE=head_size,
        GROUP_SIZE=quant_block_size,
        BLOCK_SIZE=kv_cache.shape[1],
        POWER_OF_TWO=kv_cache_dtype == "ue8m0",
        VEC_SIZE=vec_size,
        SCALE_ACCESS=min(4, scale_alignment),
        LANES=lanes,
        NUM_THREADS=num_threads,
    ).launch(
        grid=-(-num_tokens * num_groups * lanes // num_threads) if kv_cache.numel else 0,
        block=num_threads,
        num_tokens=num_tokens,
        num_blocks=kv_cache.shape[0],
        slot_mapping_stride=stride(slot_mapping),
        k_stride=stride(k),
        block_stride=stride(kv_cache),
    )


@indexer_k_quant_and_cache.bad_indices
def bad_indices_indexer_k_quant_and_cache(kv_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return slots_beyond(slot_mapping, *kv_cache.shape[:2])


@indexer_k_quant_and_cache.traffic
def traffic_indexer_k_quant_and_cache(k: TensorArg, kv_cache: TensorArg, slot_mapping: TensorArg) -> int:
    return k.nbytes + slot_mapping.nbytes + slot_mapping.numel * kv_cache.shape[2]


@indexer_k_quant_and_cache.example
def example_indexer_k_quant_and_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    quant_block_size: Literal[128, 64] = 128,
    kv_cache_dtype: Literal["auto", "ue8m0"] = "ue8m0",
) -> tuple[Any, ...]:
    block_size, head_size = 64, 128
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
    entry = head_size + 4 * head_size // quant_block_size
    return (
        make.randn(num_tokens, head_size, dtype=dtype),
        make.randint(0, 120, num_blocks, block_size, entry, dtype="uint8"),
        slot_mapping,
        quant_block_size,
        kv_cache_dtype,
    )
