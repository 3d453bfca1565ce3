"""The logits of sparse attention's indexer, by which the tokens are chosen that a query token attends to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float8_e4m3fn, float32, int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.indexer_cache import indexer_cache
from .layout import bad_indices, heads_stride
from .mqa_logits_plan import TILE, blocks_in_flight, launch
from .mqa_logits_reference import error, keys_of_pages, keys_of_rows, scores

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits"]

_SCALE_BYTES = 4  # bytes of a key's scale in the cache
_MAX_GROUP = 64  # most rows of a group of fp8_mqa_logits; a block converts its keys once for all of them


def _error_of_rows(
    logits: Tensor,
    q: Tensor,
    k: Tensor,
    k_scales: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    compressed: bool,
) -> float:
    found = keys_of_rows(logits, k, k_scales, cu_seqlen_ks, cu_seqlen_ke, compressed)
    return error((q[m], weights[m], keys, scales) for m, _, keys, scales in found)


def _error_of_pages(
    logits: Tensor, q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_tables: Tensor
) -> float:
    found, queries = keys_of_pages(logits, q, kv_cache, context_lens, block_tables), q.flatten(0, 1)
    return error((queries[row], weights[row], keys, scales) for row, _, _, keys, scales in found if len(keys))


@op(partial="logits", atol=_error_of_rows)
def fp8_mqa_logits(
    logits: Tensor,
    q: Tensor,
    k: Tensor,
    k_scales: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    clean_logits: bool,
    compressed: bool,
) -> None:
    """Logits of the indexer of DeepSeek sparse attention for the query tokens of prompts, on any GPU.

    The keys of all heads are the same (MQA). For query token m and a key n with ``ks[m] <= n < ke[m]``
    (DeepSeek-AI 2025, DeepSeek-V3.2, the lightning indexer)::

        logits[m, n] = k_scales[n] * sum_h weights[m, h] * max(q[m, h] . k[n], 0)

    in float32, in which the maximum of NaN and 0 is 0. Hopper's tensor cores keep 14 bits of ``q[m, h] . k[n]``
    (`fp8_accumulation.py`). The caller has multiplied the weights by the scales of the queries.
    `top_k_per_row_prefill` then finds the largest of each row.

    Args:
        logits: [num_tokens, num_keys] float32, written where query tokens have keys; columns contiguous, any row
            stride. Or, if `compressed`, [num_tokens, columns] with logit n of row m in column ``n - ks[m]``; keys
            beyond the columns have no logit.
        q: [num_tokens, num_heads, head_size] float8_e4m3fn; heads contiguous, any token stride.
        k: [num_keys, head_size] float8_e4m3fn or uint8 of the same bits; any row stride.
        k_scales: [num_keys] float32, contiguous.
        weights: [num_tokens, num_heads] float32; any row stride.
        cu_seqlen_ks: [num_tokens] int32, contiguous: the first key of each query token.
        cu_seqlen_ke: [num_tokens] int32, contiguous: the key after the last one. Bounds beyond the keys end with them.
        clean_logits: whether the other elements become -inf; otherwise they are left unchanged. Only without
            `compressed`.
        compressed: whether a row begins with its first key.
    """
    if clean_logits:
        logits.fill_(-torch.inf)
    for m, columns, keys, scales in keys_of_rows(logits, k, k_scales, cu_seqlen_ks, cu_seqlen_ke, compressed):
        logits[m, columns] = scores(q[m], weights[m], keys, scales).float()


@fp8_mqa_logits.result
def result_fp8_mqa_logits(q: TensorArg, k: TensorArg) -> Result:
    check.sizes(q, num_tokens=None, num_heads=None, head_size=None)
    check.sizes(k, num_keys=None, head_size=q.shape[2])
    return Result((q.shape[0], k.shape[0]), float32)


@fp8_mqa_logits.plan
def plan_fp8_mqa_logits(
    logits: TensorArg,
    q: TensorArg,
    k: TensorArg,
    k_scales: TensorArg,
    weights: TensorArg,
    cu_seqlen_ks: TensorArg,
    cu_seqlen_ke: TensorArg,
    clean_logits: bool,
    compressed: bool,
) -> Launch:
    check.dtype(q, float8_e4m3fn)
    check.sizes(q, num_tokens=None, num_heads=None, head_size=None)
    num_tokens, _, head_size = q.shape
    check.dtype(k, float8_e4m3fn, uint8)
    check.sizes(k, num_keys=None, head_size=head_size)
    check.row_size(k)
    num_keys = k.shape[0]
    check.shape(k_scales, float32, num_keys=num_keys)
    for bounds in (cu_seqlen_ks, cu_seqlen_ke):
        check.shape(bounds, int32, num_tokens=num_tokens)
    check.sizes(logits, num_tokens=num_tokens, columns=None if compressed else num_keys)
    if compressed and clean_logits:
        raise check.refuse(logits, "clean_logits", "expected False for compressed logits, got True")
    rows = num_tokens * -(-num_keys // TILE) // blocks_in_flight(q)
    group_rows = max(1, min(rows, _MAX_GROUP))
    stride = k.strides[0]
    return launch(
        (logits, q, weights),
        keys=replace(k, shape=(1, *k.shape), strides=(0, *k.strides)),
        q_stride=heads_stride(q),
        aligned=k.alignment == 16 and (stride % 16 == 0 or num_keys == 1),
        groups=-(-num_tokens // group_rows),
        positions=num_keys,
        constants={"PAGED": False, "COMPRESSED": compressed, "CLEAN": clean_logits},
        num_rows=num_tokens,
        group_rows=group_rows,
        num_keys=num_keys,
        key_stride=stride,
        kv_cache=0,
        block_tables=0,
        context_lens=0,
    )


@fp8_mqa_logits.bad_indices
def bad_indices_fp8_mqa_logits(k: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor) -> dict[str, Tensor]:
    bounds = {"cu_seqlen_ks": cu_seqlen_ks, "cu_seqlen_ke": cu_seqlen_ke}
    return {name: (values < 0) | (values > len(k)) for name, values in bounds.items()}


@fp8_mqa_logits.example
def example_fp8_mqa_logits(
    make: Any,
    *,
    num_tokens: int = 16,
    num_heads: Literal[64, 20] = 64,
    head_size: Literal[128, 64, 40] = 128,
    form: Literal["clean", "unclean", "compressed"] = "clean",
    num_keys: int = 300,
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, num_keys, dtype="float32"),
        make.randn(num_tokens, num_heads, head_size, dtype="float8_e4m3fn"),
        make.randn(num_keys, head_size, dtype="float8_e4m3fn"),
        make.randn(num_keys, dtype="float32", scale=0.2, shift=1.0),
        make.randn(num_tokens, num_heads, dtype="float32"),
        make.randint(0, num_keys // 2, num_tokens, dtype="int32"),
        make.randint(num_keys // 2, num_keys + 1, num_tokens, dtype="int32"),
        form == "clean",
        form == "compressed",
    )


@op(partial="logits", atol=_error_of_pages)
def fp8_paged_mqa_logits(
    logits: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    clean_logits: bool,
) -> None:
    """`fp8_mqa_logits` of the last tokens of each sequence with the keys of the indexer's paged cache.

    Row ``s * next_n + j`` of the logits is that of token j of sequence s. It has the keys at positions
    ``n < context_lens[s] - (next_n - 1 - j)``, logit n in column n, for as many columns as there are. A key with a
    block number out of range has a logit of -inf. `top_k_per_row_decode` then finds the largest of each row.

    Args:
        logits: [num_seqs * next_n, columns] float32, written where rows have keys; columns contiguous, any row stride.
        q: [num_seqs, next_n, num_heads, head_size] float8_e4m3fn, contiguous.
        kv_cache: [num_blocks, block_size, head_size + 4] uint8, blocks contiguous, any block stride: the keys of all
            slots of a block, then their float32 scales (`indexer_k_quant_and_cache` with groups of head_size).
        weights: [num_seqs * next_n, num_heads] float32; any row stride.
        context_lens: [num_seqs] int32 or int64, any stride; or [num_seqs, next_n], contiguous: a length for each row.
            Longer contexts than the block table or the columns end with them.
        block_tables: [num_seqs, max_blocks] int32 or int64, any strides.
        clean_logits: whether the other elements become -inf; otherwise they are left unchanged.
    """
    queries = q.flatten(0, 1)
    if clean_logits:
        logits.fill_(-torch.inf)
    for row, count, columns, keys, scales in keys_of_pages(logits, q, kv_cache, context_lens, block_tables):
        logits[row, :count] = -torch.inf
        logits[row, columns] = scores(queries[row], weights[row], keys, scales).float()


@fp8_paged_mqa_logits.result
def result_fp8_paged_mqa_logits(q: TensorArg, kv_cache: TensorArg, block_tables: TensorArg) -> Result:
    check.sizes(q, num_seqs=None, next_n=None, num_heads=None, head_size=None)
    check.sizes(kv_cache, num_blocks=None, block_size=None, entry=None)
    check.sizes(block_tables, num_seqs=None, max_blocks=None)
    return Result((q.shape[0] * q.shape[1], block_tables.shape[1] * kv_cache.shape[1]), float32)


@fp8_paged_mqa_logits.plan
def plan_fp8_paged_mqa_logits(
    logits: TensorArg,
    q: TensorArg,
    kv_cache: TensorArg,
    weights: TensorArg,
    context_lens: TensorArg,
    block_tables: TensorArg,
    clean_logits: bool,
) -> Launch:
    check.dtype(q, float8_e4m3fn)
    check.sizes(q, num_seqs=None, next_n=None, num_heads=None, head_size=None)
    check.contiguous(q)
    num_seqs, next_n, num_heads, head_size = q.shape
    keys, scale_access = indexer_cache(kv_cache, head_size, _SCALE_BYTES)
    num_blocks, block_size, _ = kv_cache.shape
    if not block_size:
        raise kv_cache.error(f"expected blocks of at least one slot, got shape {kv_cache.shape}")
    check.index(block_tables, num_seqs=num_seqs, max_blocks=None)
    is_per_row = len(context_lens.shape) == 2
    if is_per_row:
        check.index(context_lens, num_seqs=num_seqs, next_n=next_n)
        check.contiguous(context_lens)
    else:
        check.index(context_lens, num_seqs=num_seqs)
    check.sizes(logits, num_rows=num_seqs * next_n, columns=None)
    columns = logits.shape[1]
    num_keys = min(block_tables.shape[1] * block_size, columns)
    return launch(
        (logits, q, weights),
        keys=keys,
        q_stride=num_heads * head_size,
        aligned=keys.alignment == 16 and kv_cache.strides[0] % 16 == 0,
        groups=num_seqs,
        positions=columns if clean_logits else num_keys,
        constants={
            "PAGED": True,
            "BLOCK_SIZE": block_size,
            "SCALE_ACCESS": min(4, scale_access),
            "LENGTH_PER_ROW": is_per_row,
            "CLEAN": clean_logits,
            "length_t": context_lens.dtype,
            "table_t": block_tables.dtype,
        },
        num_rows=num_seqs * next_n,
        group_rows=next_n,
        num_keys=num_keys,
        num_blocks=num_blocks,
        block_stride=kv_cache.strides[0],
        table_stride=block_tables.strides[0],
        table_step=block_tables.strides[1],
        length_step=1 if is_per_row else context_lens.strides[0],
        k=0,
        k_scales=0,
        cu_seqlen_ks=0,
        cu_seqlen_ke=0,
    )


@fp8_paged_mqa_logits.bad_indices
def bad_indices_fp8_paged_mqa_logits(
    logits: Tensor, kv_cache: Tensor, context_lens: Tensor, block_tables: Tensor
) -> dict[str, Any]:
    num_blocks, block_size, _ = kv_cache.shape
    longest = context_lens.amax(-1) if context_lens.ndim == 2 else context_lens
    bad = bad_indices(block_tables, longest, num_blocks, block_size, max_tokens=logits.shape[1])
    if context_lens.ndim == 2:
        capacity = min(block_tables.shape[1] * block_size, logits.shape[1])
        bad["seq_lens"] = (context_lens < 0) | (context_lens > capacity)
    return {"block_tables": bad["block_tables"], "context_lens": bad["seq_lens"]}


@fp8_paged_mqa_logits.example
def example_fp8_paged_mqa_logits(
    make: Any,
    *,
    num_tokens: int = 16,
    num_heads: Literal[64, 20] = 64,
    head_size: Literal[128, 64, 40] = 128,
    next_n: Literal[1, 2] = 1,
    clean_logits: bool = False,
    with_row_lengths: bool = False,
    num_blocks: int = 7,
    max_blocks: int = 5,
) -> tuple[Any, ...]:
    block_size = 64
    num_seqs = -(-num_tokens // next_n)
    rows = num_seqs * next_n
    longest = max_blocks * block_size
    lengths = (num_seqs, next_n) if with_row_lengths else (num_seqs,)
    return (
        make.empty(rows, longest, dtype="float32"),
        make.randn(num_seqs, next_n, num_heads, head_size, dtype="float8_e4m3fn"),
        make.randint(0, 60, num_blocks, block_size, head_size + _SCALE_BYTES, dtype="uint8"),
        make.randn(rows, num_heads, dtype="float32"),
        make.randint(next_n, longest + 1, *lengths, dtype="int32"),
        make.randint(0, num_blocks, num_seqs, max_blocks, dtype="int32"),
        clean_logits,
    )
