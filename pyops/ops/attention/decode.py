"""Decode attention: one query token of each sequence against a paged key-value cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ..._core import check, dtypes
from ..._core.kernel import Launch
from ..._core.lazy import torch
from ..._core.op import op
from ._plan import bad_indices, example_caches, plan
from .reference import Attended, Sparse, finish, float32_logits, partitions

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["paged_attention_rocm", "paged_attention_v1", "paged_attention_v2"]

_V2_PARTITION, _ROCM_PARTITION = 512, 256


def _cancelled(query: Tensor, key_cache: Tensor, scale: float, kv_cache_dtype: str, k_scale: Tensor) -> float:
    """Weights are two numbers of the queries' type, or one float16 where they meet values of fp8."""
    weight = max(float(torch.finfo(query.dtype).eps) ** 2 / 2, 2.0**-18)
    if kv_cache_dtype != "auto" and query.dtype != torch.float32:
        weight = float(torch.finfo(torch.float16).eps)
    return weight + float32_logits(query, key_cache, scale, kv_cache_dtype, k_scale)


def _joined(partition: int) -> Callable[..., float]:
    """As `_cancelled`; the result of each partition is rounded to T before it meets the others, or a sink."""

    def atol(
        query: Tensor,
        key_cache: Tensor,
        scale: float,
        kv_cache_dtype: str,
        k_scale: Tensor,
        seq_lens: Tensor,
        sinks: Tensor | None,
    ) -> float:
        meets = sinks is not None or (seq_lens.numel() > 0 and int(seq_lens.max()) > partition)
        rounding = float(torch.finfo(query.dtype).eps) if meets else 0.0
        return rounding + _cancelled(query, key_cache, scale, kv_cache_dtype, k_scale)

    return atol


@op(out=("out", "lse"), runtime="max_seq_len", keyed="logits_soft_cap", atol=_cancelled)
def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Attention of one query token of each sequence over its tokens in a paged key-value cache.

    For head h of sequence s of length L, with the keys and values of the key-value head that h shares::

        l_i = softcap(scale * q . k_i) + alibi_slopes[h] * (i - L + 1)      0 <= i < L
        p_i = exp(l_i - m) / (sum_j exp(l_j - m) + 1e-6),  m = max_j l_j
        out = T(sum_i p_i * v_i)

    in float32 (PagedAttention: Kwon et al. 2023, arXiv:2309.06180), but for weights, which are rounded to float16 where
    values are of fp8 and queries are not float32. Token i lies in block
    ``block_tables[s, i // block_size]``, slot ``i % block_size``. A token whose block number is out of range
    contributes nothing; an empty sequence gives zeros; what lies in slots that no token has changes nothing. A value of
    infinity in the cache may give NaN.

    Args:
        out: [num_seqs, num_heads, head_size], written; heads contiguous.
        query: the same shape, float32, float16 or bfloat16; heads contiguous, rows of any stride.
        key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
            flash, [num_blocks, block_size, num_kv_heads, head_size]: told apart by the number of dimensions. Of the
            queries' dtype, or for fp8 uint8 or float8.
        value_cache: beside it, [num_blocks, num_kv_heads, head_size, block_size] or the shape of key_cache.
        num_kv_heads: key-value heads; divides num_heads.
        scale: of the logits.
        block_tables: [num_seqs, most_blocks], int32 or int64, any strides.
        seq_lens: [num_seqs], int32 or int64, any stride; at most most_blocks * block_size tokens count.
        block_size: slots of a block.
        max_seq_len: changes nothing here; there is no limit to the length.
        alibi_slopes: [num_heads] float32, or None (Press et al. 2021, arXiv:2108.12409).
        kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2".
        k_scale, v_scale: what codes of an fp8 cache are multiplied by: a number, or a tensor's first float32; not read
            for "auto".
        tp_rank, blocksparse_*: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
            sparse block kb = j * block_size // blocksparse_block_size, the query in qb; a head attends to it if
            (kb + offset) % blocksparse_vert_stride == 0, where its offset moves by blocksparse_head_sliding_step from
            head to head, or if kb > qb - blocksparse_local_blocks.
        sliding_window: only the last so many tokens; 0 for all.
        logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none.
        sinks: [num_heads] float32, one more logit without a value for each head, or None.
        lse: [num_heads, num_seqs] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty sequence.
    """
    sparse = Sparse(
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )
    for s, length in enumerate(seq_lens.tolist()):
        attended = Attended(
            query[s],
            key_cache,
            value_cache,
            scale,
            block_tables[s],
            length,
            alibi_slopes,
            kv_cache_dtype,
            (k_scale, v_scale),
            sparse,
            sliding_window,
            logits_soft_cap,
        )
        finish(out[s], *attended.part(0, None), sinks, None if lse is None else lse[:, s])


@paged_attention_v1.plan
def plan_paged_attention_v1(**call: Any) -> list[Launch]:
    return plan(**call)


@paged_attention_v1.bad_indices
def bad_indices_paged_attention_v1(
    key_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, block_size: int, sliding_window: int
) -> dict[str, Tensor]:
    return bad_indices(block_tables, seq_lens, key_cache.shape[0], block_size, sliding_window)


_NOT_SPARSE = (0, 0, 0, 64, 0)


def _example(
    make: Any,
    num_seqs: int,
    seq_lens: tuple[int, int],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: str,
    kv_cache_dtype: str,
    packed: bool,
    options: bool = False,
) -> tuple[Any, ...]:
    """query, caches and so on, to v_scale, of a call: sequences of lengths in a range, heads as (query, kv, size)."""
    num_heads, num_kv_heads, head_size = heads
    max_blocks = -(-seq_lens[1] // block_size)
    num_blocks = num_seqs * max_blocks
    cache_dtype = dtypes.of(dtype if kv_cache_dtype == "auto" else "float8_e4m3fn")
    assert cache_dtype is not None
    return (
        make.randn(num_seqs, num_heads, head_size, dtype=dtype),
        *example_caches(make, num_blocks, block_size, num_kv_heads, head_size, cache_dtype, packed),
        num_kv_heads,
        head_size**-0.5,
        make.permutation(num_blocks, num_seqs, max_blocks, dtype="int32"),
        make.randint(seq_lens[0], seq_lens[1] + 1, num_seqs, dtype="int32"),
        block_size,
        seq_lens[1],
        make.randn(num_heads, dtype="float32", scale=0.1) if options else None,
        kv_cache_dtype,
        make.full(1, value=0.5, dtype="float32"),
        make.full(1, value=1.5, dtype="float32"),
    )


def _extras(make: Any, num_heads: int, num_rows: int, options: bool) -> tuple[Any, ...]:
    """sliding_window, logits_soft_cap, sinks and lse."""
    if not options:
        return 0, 0.0, None, None
    return 40, 20.0, make.randn(num_heads, dtype="float32"), make.empty(num_heads, num_rows, dtype="float32")


@paged_attention_v1.example
def example_paged_attention_v1(
    make: Any,
    *,
    num_tokens: int = 16,
    min_seq_len: int = 0,
    max_seq_len: int = 128,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_size: int = 128,
    block_size: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    packed: bool = False,
    options: bool = False,
) -> tuple[Any, ...]:
    lengths, heads = (min_seq_len, max_seq_len), (num_heads, num_kv_heads, head_size)
    call = _example(make, num_tokens, lengths, heads, block_size, dtype, kv_cache_dtype, packed, options)
    more = _extras(make, num_heads, num_tokens, options)
    return make.empty(num_tokens, num_heads, head_size, dtype=dtype), *call, *_NOT_SPARSE, *more


@op(
    out=("out", "lse"),
    inout=("exp_sums", "max_logits", "tmp_out"),
    runtime="max_seq_len",
    keyed="logits_soft_cap",
    atol=_joined(_V2_PARTITION),
)
def paged_attention_v2(
    out: Tensor,
    exp_sums: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """`paged_attention_v1` in partitions of 512 tokens, whose results stay in memory that the caller gives.

    Partition p of a head leaves its largest logit m_p in `max_logits`, ``z_p = sum_i exp(l_i - m_p)`` in `exp_sums`
    and its own attention, rounded to T, in `tmp_out`; then ``out = T(sum_p w_p tmp_out_p / (sum_p w_p + 1e-6))`` for
    ``w_p = z_p exp(m_p - m)``; a sink joins the sums there. Partitions behind the end of a sequence, or before its
    window, keep what they hold.

    Args:
        exp_sums, max_logits: [num_seqs, num_heads, most_partitions] float32, contiguous, written.
        tmp_out: [num_seqs, num_heads, most_partitions, head_size] of the queries' dtype, contiguous, written.
        The others: as in `paged_attention_v1`; tokens beyond most_partitions * 512 do not count.
    """
    sparse = Sparse(
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )
    for s, length in enumerate(seq_lens.tolist()):
        attended = Attended(
            query[s],
            key_cache,
            value_cache,
            scale,
            block_tables[s],
            min(length, exp_sums.shape[2] * _V2_PARTITION),
            alibi_slopes,
            kv_cache_dtype,
            (k_scale, v_scale),
            sparse,
            sliding_window,
            logits_soft_cap,
        )
        joined = partitions(attended, _V2_PARTITION, (exp_sums[s], max_logits[s], tmp_out[s]))
        finish(out[s], *joined, sinks, None if lse is None else lse[:, s])


@paged_attention_v2.plan
def plan_paged_attention_v2(**call: Any) -> list[Launch]:
    return plan(partition=_V2_PARTITION, **call)


@paged_attention_v2.bad_indices
def bad_indices_paged_attention_v2(
    exp_sums: Tensor, key_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, block_size: int, sliding_window: int
) -> dict[str, Tensor]:
    room = exp_sums.shape[2] * _V2_PARTITION
    return bad_indices(block_tables, seq_lens, key_cache.shape[0], block_size, sliding_window, room)


def _partials(make: Any, num_seqs: int, num_heads: int, head_size: int, count: int, dtype: str) -> tuple[Any, ...]:
    """exp_sums, max_logits and tmp_out."""
    sums = (make.empty(num_seqs, num_heads, count, dtype="float32") for _ in range(2))
    return *sums, make.empty(num_seqs, num_heads, count, head_size, dtype=dtype)


@paged_attention_v2.example
def example_paged_attention_v2(
    make: Any,
    *,
    num_tokens: int = 16,
    min_seq_len: int = 0,
    max_seq_len: int = 128,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    packed: bool = True,
    options: bool = False,
) -> tuple[Any, ...]:
    lengths, heads = (min_seq_len, max_seq_len), (num_heads, num_kv_heads, head_size)
    call = _example(make, num_tokens, lengths, heads, block_size, dtype, kv_cache_dtype, packed, options)
    count = -(-max_seq_len // _V2_PARTITION) + 1
    partials = _partials(make, num_tokens, num_heads, head_size, count, dtype)
    more = _extras(make, num_heads, num_tokens, options)
    return make.empty(num_tokens, num_heads, head_size, dtype=dtype), *partials, *call, *_NOT_SPARSE, *more


@op(
    inout=("out", "exp_sums", "max_logits", "tmp_out", "lse"),
    runtime="max_seq_len",
    keyed="logits_soft_cap",
    atol=_joined(_ROCM_PARTITION),
)
def paged_attention_rocm(
    out: Tensor,
    exp_sums: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    fp8_out_scale: Tensor | None = None,
    mfma_type: str = "f16",
    *,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """`paged_attention_v2` in partitions of 256 tokens, for rows among those of a mixed batch, on any platform.

    Args:
        out: [num_rows, num_heads, head_size], written; with fp8_out_scale float8_e4m3fn or uint8.
        query: [num_rows, num_heads, head_size]; sequences may be fewer, the first rows are theirs then.
        query_start_loc: [num_seqs + 1] int32 or int64, any stride: sequence s has the rows from entry s up to entry
            s + 1, and is left alone unless it has exactly one, inside query. None: row s.
        fp8_out_scale: one float32; ``out = fp8(result * (1 / fp8_out_scale))``, saturating.
        mfma_type: changes nothing here.
        lse: [num_heads, num_rows] float32, written where `out` is.
        The others: as in `paged_attention_v2`.
    """
    for s, length in enumerate(seq_lens.tolist()):
        row = s
        if query_start_loc is not None:
            row, end = query_start_loc[s : s + 2].tolist()
            if end - row != 1 or not 0 <= row < query.shape[0]:
                continue
        attended = Attended(
            query[row],
            key_cache,
            value_cache,
            scale,
            block_tables[s],
            min(length, exp_sums.shape[2] * _ROCM_PARTITION),
            alibi_slopes,
            kv_cache_dtype,
            (k_scale, v_scale),
            window=sliding_window,
            softcap=logits_soft_cap,
        )
        joined = partitions(attended, _ROCM_PARTITION, (exp_sums[s], max_logits[s], tmp_out[s]))
        result = out[row] if fp8_out_scale is None else torch.empty_like(out[row], dtype=torch.float32)
        finish(result, *joined, sinks, None if lse is None else lse[:, row])
        if fp8_out_scale is not None:
            result = (result * (1.0 / fp8_out_scale.reshape(()))).clamp(-448.0, 448.0)
            out[row].view(torch.uint8).copy_(result.to(torch.float8_e4m3fn).view(torch.uint8))


@paged_attention_rocm.plan
def plan_paged_attention_rocm(**call: Any) -> list[Launch]:
    check.scalar(call["fp8_out_scale"])
    check.index(call["block_tables"], num_seqs=None, max_blocks=None)
    check.index(call["query_start_loc"], num_seqs_and_end=call["block_tables"].shape[0] + 1)
    return plan(partition=_ROCM_PARTITION, rows_of_others=True, **call)


@paged_attention_rocm.bad_indices
def bad_indices_paged_attention_rocm(
    exp_sums: Tensor,
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    block_size: int,
    sliding_window: int,
) -> dict[str, Tensor]:
    room = exp_sums.shape[2] * _ROCM_PARTITION
    found = bad_indices(block_tables, seq_lens, key_cache.shape[0], block_size, sliding_window, room)
    if query_start_loc is None:
        return found
    return {"query_start_loc": (query_start_loc < 0) | (query_start_loc > query.shape[0]), **found}


@paged_attention_rocm.example
def example_paged_attention_rocm(
    make: Any, *, num_tokens: int = 16, dtype: Literal["float16", "bfloat16"] = "bfloat16", options: bool = False
) -> Any:
    call = list(_example(make, num_tokens, (0, 128), (6, 2, 64), 16, dtype, "auto", True, options))
    call.insert(7, make.values(list(range(num_tokens + 1)), dtype="int32") if options else None)
    out = make.empty(num_tokens, 6, 64, dtype="float8_e4m3fn" if options else dtype)
    fp8_out_scale = make.full(1, value=0.01, dtype="float32") if options else None
    more = _extras(make, 6, num_tokens, options)
    return out, *_partials(make, num_tokens, 6, 64, 1, dtype), *call, fp8_out_scale, "f16", *more
