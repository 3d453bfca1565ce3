"""Decode attention: one query token of each sequence against a paged key-value cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from .arguments import Options, PagedKV, Sparse
from .decode_plan import launch
from .decode_problem import check_decode
from .examples import example_decode, in_order
from .layout import bad_indices
from .reference import Attended, finish, float32_logits

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["paged_attention_v1"]


def absolute_error(query: Tensor, key_cache: Tensor, scale: float, kv_cache_dtype: str, k_scale: Tensor) -> float:
    """The rounding error of a softmax weight, and that of its logit.

    Weights are split into two values of the query dtype (hi + lo); with an fp8 cache they are one float16.
    """
    weight = max(float(torch.finfo(query.dtype).eps) ** 2 / 2, 2.0**-18)
    if kv_cache_dtype != "auto" and query.dtype != torch.float32:
        weight = float(torch.finfo(torch.float16).eps)
    return weight + float32_logits(query, key_cache, scale, kv_cache_dtype, k_scale)


@op(out=("out", "lse"), runtime="max_seq_len", keyed="logits_soft_cap", atol=absolute_error)
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
    constant_past: bool = False,
) -> None:
    """Attention of one query token of each sequence over its tokens in a paged key-value cache.

    For head h of sequence s of length L, with the keys and values of the key-value head that h shares::

        l_i = softcap(scale * q . k_i) + alibi_slopes[h] * (i - L + 1)      0 <= i < L
        p_i = exp(l_i - m) / (sum_j exp(l_j - m) + 1e-6),  m = max_j l_j
        out = T(sum_i p_i * v_i)

    in float32 (PagedAttention: Kwon et al. 2023, arXiv:2309.06180). With an fp8 cache and 16-bit queries, p_i is
    rounded to float16. Token i lies in block ``block_tables[s, i // block_size]``, slot ``i % block_size``. A token
    with a block number out of range contributes nothing. An empty sequence gives zeros. Slots without a token
    are ignored, whatever they contain. An infinite value of an attended token gives infinity or NaN, and so does a
    logit that overflows float32. Accumulating the largest finite values does not overflow; a float32 result within
    2^-16 of the largest float may be rounded to infinity.

    Args:
        out: [num_seqs, num_heads, head_size], written; heads contiguous.
        query: the same shape, float32, float16 or bfloat16; heads contiguous, any row stride.
        key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
            flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
            that of the queries, or for fp8 uint8 or a float8.
        value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache.
        num_kv_heads: key-value heads; divides num_heads.
        scale: factor of the logits.
        block_tables: [num_seqs, max_blocks], int32 or int64, any strides.
        seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
            ones are left out, which is an error only with ``PYOPS_CHECK=1``.
        block_size: slots of a block.
        max_seq_len: for compatibility with vLLM; no effect: the length is not limited.
        alibi_slopes: [num_heads] float32, or None (Press et al. 2021, arXiv:2108.12409).
        kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2".
        k_scale, v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
            both [num_kv_heads], one for each head. Not read for "auto".
        tp_rank, blocksparse_*: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
            sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
            to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
            blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
        sliding_window: tokens at the end of a sequence that are attended to; 0 for all.
        logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none.
        sinks: [num_heads] float32, for each head one more logit, without a value; or None.
        lse: [num_heads, num_seqs] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty sequence.
        constant_past: a promise that no kernel which may still run when this one starts writes seq_lens,
            block_tables or scales, nor keys and values of tokens but the last one of each sequence. With few short
            sequences the others are then loaded while the previous kernel runs.
    """
    kv = PagedKV(
        key_cache, value_cache, num_kv_heads, block_tables, seq_lens, block_size, kv_cache_dtype, k_scale, v_scale
    )
    options = Options(alibi_slopes, sliding_window, logits_soft_cap, sinks, lse)
    sparse = Sparse(
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )
    for s in range(len(seq_lens)):
        attended = Attended(query[s], scale, kv, s, options, sparse)
        finish(out[s], *attended.part(0, None), sinks, None if lse is None else lse[:, s])


@paged_attention_v1.result
def result_paged_attention_v1(query: TensorArg) -> Result:
    return Result(query.shape, query.dtype)


@paged_attention_v1.plan
def plan_paged_attention_v1(
    out: TensorArg, query: TensorArg, kv: PagedKV, options: Options, sparse: Sparse, constant_past: bool
) -> list[Launch]:
    problem = check_decode(out, query, kv, options, sparse)
    return launch("paged_attention_v1", replace(problem, constant_past=constant_past))


@paged_attention_v1.bad_indices
def bad_indices_paged_attention_v1(
    key_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, block_size: int, sliding_window: int
) -> dict[str, Any]:
    return bad_indices(block_tables, seq_lens, key_cache.shape[0], block_size, sliding_window)


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
    call = example_decode(make, num_tokens, lengths, heads, block_size, dtype, kv_cache_dtype, packed, options)
    return in_order(paged_attention_v1.op, call)
