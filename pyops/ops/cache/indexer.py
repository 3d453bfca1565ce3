"""The paged cache of sparse attention's indexer, written and gathered.

A block of this cache holds the fp8 keys of all its slots, followed by the scales of all its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.indexer_cache import indexer_cache, indexer_parts
from . import _geometry
from ._common import CODES, bad_slots, example_slots, existing_slots, first_stride, fp8_codes, indexable
from ._sequences import bad_sequences, check_tables, example_sequences, existing_rows, sequence_of_rows

if TYPE_CHECKING:
    from torch import Tensor

_indexer_k_quant_and_cache = Kernel("cache/indexer_k_quant_and_cache.cu")
_cp_gather_indexer_k_quant_cache = Kernel("cache/cp_gather_indexer_k_quant_cache.cu")
_NUM_THREADS = 128  # threads of a block of indexer_k_quant_and_cache.cu; not tuned


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two that is not below `x`, a positive normal number; infinity stays."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


@op(inout="kv_cache", ulps=0)
def indexer_k_quant_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantize the indexer's keys by groups and write them into its paged cache (sparse attention of DeepSeek V3.2).

    The scale of a group x of `quant_block_size` elements is ``s = max(max|x|, 1e-4) / 448``, where the maximum ignores
    NaN, rounded up to a power of two for "ue8m0". The keys are ``e4m3(x / s)``, saturating; NaN stays NaN. A block of
    the cache is not a list of entries: it holds the keys of all its slots, [block_size, head_size], and then the
    scales of all its slots, [block_size, head_size / quant_block_size] float32. Nothing is written for a slot that is
    negative or after the last. Among tokens with the same slot, it is unspecified which one is kept.

    Args:
        k: [num_tokens, head_size], float32, float16 or bfloat16; any token stride. Tokens beyond the shorter of `k`
            and `slot_mapping` are not written.
        kv_cache: [num_blocks, block_size, head_size + 4 * head_size / quant_block_size] uint8, blocks contiguous, any
            block stride; written where slots say.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        quant_block_size: elements under one scale, a divisor of head_size.
        kv_cache_dtype: the format of scales: "ue8m0" or any other name.
    """
    num_blocks, block_size, _ = kv_cache.shape
    num_tokens, head_size = min(len(k), len(slot_mapping)), k.shape[1]
    tokens, block, offset = existing_slots(slot_mapping[:num_tokens], num_blocks, block_size)
    groups = k[tokens].float().unflatten(-1, (-1, quant_block_size))
    largest = groups.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True).clamp(min=1e-4)
    scales = largest / torch.full_like(largest, 448.0)
    if kv_cache_dtype == "ue8m0":
        scales = _power_of_two_above(scales)
    keys, scale_bytes = indexer_parts(kv_cache, head_size)
    keys[block, offset] = fp8_codes(groups, scales, torch.float8_e4m3fn).flatten(1)
    scale_bytes[block, offset] = scales.flatten(1).view(torch.uint8)


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
    lanes = 1  # threads that share a group
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
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        grid=-(-num_tokens * num_groups * lanes // _NUM_THREADS) if kv_cache.numel else 0,
        block=_NUM_THREADS,
        num_tokens=num_tokens,
        num_blocks=kv_cache.shape[0],
        slot_mapping_stride=first_stride(slot_mapping),
        k_stride=first_stride(k),
        block_stride=first_stride(kv_cache),
    )


@indexer_k_quant_and_cache.bad_indices
def bad_indices_indexer_k_quant_and_cache(kv_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return bad_slots(slot_mapping, *kv_cache.shape[:2])


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


@op(inout=("dst_k", "dst_scale"), ulps=0)
def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """Gather the quantized keys of sequences and their scales from the indexer's cache (`indexer_k_quant_and_cache`).

    Row ``t`` of `dst_k` and `dst_scale` are the key and the scales in slot ``j % block_size`` of the block
    ``block_table[b, j // block_size]``, with ``j = t - cu_seq_lens[b]`` and b the sequence for which
    ``cu_seq_lens[b] <= t < cu_seq_lens[b + 1]``. A row of no sequence, or without an existing slot, is left unchanged.

    Args:
        kv_cache: [num_blocks, block_size, head_size + scale_size] uint8, blocks contiguous: the keys of all slots,
            then the scales of all slots; any block stride.
        dst_k: [num_rows, head_size] uint8 or float8, written row by row; any row stride.
        dst_scale: [num_rows, scale_size] uint8, the bytes of float32 scales, written row by row; any row stride.
        block_table: [num_seqs, max_blocks] int32 or int64, any strides.
        cu_seq_lens: [num_seqs + 1] int32 or int64, ascending.
    """
    sequence = sequence_of_rows(cu_seq_lens, len(cu_seq_lens) - 1, len(dst_k))
    rows, block, offset = existing_rows(kv_cache, block_table, cu_seq_lens, sequence, None)
    keys, scales = indexer_parts(kv_cache, dst_k.shape[1])
    indexable(dst_k)[rows] = keys[block, offset]
    dst_scale[rows] = scales[block, offset]


@cp_gather_indexer_k_quant_cache.plan
def plan_cp_gather_indexer_k_quant_cache(
    kv_cache: TensorArg, dst_k: TensorArg, dst_scale: TensorArg, block_table: TensorArg, cu_seq_lens: TensorArg
) -> Launch:
    check.dtype(dst_k, *CODES)
    check.dtype(dst_scale, uint8)
    check.sizes(dst_k, num_rows=None, head_size=None)
    num_rows, head_size = dst_k.shape
    check.sizes(dst_scale, num_rows=num_rows, scale_size=None)
    scale_size = dst_scale.shape[1]
    for arg in (dst_k, dst_scale):
        check.row_size(arg)
    if scale_size % 4 or not scale_size or 4 * head_size % scale_size:
        raise dst_scale.error(f"expected 4 bytes for each group of head_size={head_size}, got shape {dst_scale.shape}")
    keys, scale_alignment = indexer_cache(kv_cache, head_size, scale_size)
    num_seqs = check_tables(block_table, cu_seq_lens)
    vec_size = check.vector_width(head_size, keys, dst_k)
    scale_vec = check.vector_width(scale_size | scale_alignment, dst_scale)
    config = _geometry.config(dst_k, num_rows, head_size // vec_size + scale_size // scale_vec)
    return _cp_gather_indexer_k_quant_cache(
        table_t=block_table.dtype,
        lens_t=cu_seq_lens.dtype,
        HEAD_SIZE=head_size,
        SCALE_SIZE=scale_size,
        BLOCK_SIZE=kv_cache.shape[1],
        VEC_SIZE=vec_size,
        SCALE_VEC=scale_vec,
        **config.constants,
    ).launch(
        grid=config.num_blocks(num_rows) if kv_cache.numel and block_table.numel else 0,
        block=config.num_threads,
        num_rows=num_rows,
        num_seqs=num_seqs,
        num_blocks=kv_cache.shape[0],
        max_blocks=block_table.shape[1],
        block_stride=first_stride(kv_cache),
        dst_k_stride=first_stride(dst_k),
        dst_scale_stride=first_stride(dst_scale),
        table_stride=block_table.strides[0],
        table_entry_stride=block_table.strides[1],
        lens_stride=first_stride(cu_seq_lens),
    )


@cp_gather_indexer_k_quant_cache.bad_indices
def bad_indices_cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> dict[str, Tensor]:
    return bad_sequences(kv_cache, block_table, cu_seq_lens, len(cu_seq_lens) - 1, num_rows=len(dst_k))


@cp_gather_indexer_k_quant_cache.traffic
def traffic_cp_gather_indexer_k_quant_cache(
    dst_k: TensorArg, dst_scale: TensorArg, block_table: TensorArg, cu_seq_lens: TensorArg
) -> int:
    return 2 * (dst_k.nbytes + dst_scale.nbytes) + block_table.nbytes + cu_seq_lens.nbytes


@cp_gather_indexer_k_quant_cache.example
def example_cp_gather_indexer_k_quant_cache(
    make: Any, *, num_tokens: int = 16, quant_block_size: Literal[128, 64] = 128
) -> tuple[Any, ...]:
    block_size, head_size = 64, 128
    scale_size = 4 * head_size // quant_block_size
    num_blocks, _, offsets, block_table = example_sequences(make, num_tokens, block_size)
    return (
        make.randint(0, 120, num_blocks, block_size, head_size + scale_size, dtype="uint8"),
        make.empty(num_tokens, head_size, dtype="uint8"),
        make.empty(num_tokens, scale_size, dtype="uint8"),
        block_table,
        make.values(offsets, dtype="int32"),
    )
