"""Prefill attention: many query tokens of each sequence against a paged key-value cache; also chunked prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import FLOATS, bfloat16
from ..._core.tensors.tensor import TensorArg
from .arguments import Options, PagedKV
from .decode_plan import launch_varlen
from .examples import example_kv, example_options, in_order
from .layout import bad_indices
from .prefill_problem import check_varlen
from .reference import attended_of, float32_logits, gathered, masked_logits, scales_of, write_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["paged_attention_varlen"]


def _absolute_error(
    query: Tensor,
    key_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    block_size: int,
    kv_cache_dtype: str,
    k_scale: Tensor,
    q_scale: Tensor | None,
) -> float:
    """The rounding errors of a softmax weight, which is rounded to the query dtype before it multiplies values, and of
    its logit.

    With e4m3, weights also have an error of 2^-18 of the largest one, and so has their sum; logits are accumulated with
    14 bits instead of the 24 of float32.
    """
    weight, logit = (
        float(torch.finfo(query.dtype).eps),
        float32_logits(query, key_cache, scale, kv_cache_dtype, k_scale),
    )
    if query.dtype == torch.float8_e4m3fn:
        weight += 2.0**-17 * block_tables.shape[1] * block_size
        logit *= 2.0**11 * (1.0 if q_scale is None else float(q_scale.abs().max()))
    return weight + logit


@op(partial="out", inout="lse", keyed="logits_soft_cap", atol=_absolute_error)
def paged_attention_varlen(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    block_size: int,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    causal: bool = True,
    *,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    q_scale: Tensor | None = None,
    max_query_len: int = 0,
) -> None:
    """Attention of the newest tokens of each sequence over all its tokens in a paged key-value cache.

    The query tokens of sequence s are rows ``cu_seqlens_q[s]`` up to ``cu_seqlens_q[s + 1]`` of `query`, the last ones
    of its ``seq_lens[s]`` tokens; the cache already holds the keys and values of all of them. Of n query tokens, token
    i attends to the tokens ``j <= seq_lens[s] - n + i``, or to all of them if not `causal`, with the formula of
    `paged_attention_v1`. Weights are rounded to the element type, accumulation is in float32 (Dao 2023,
    arXiv:2307.08691). With e4m3 queries and keys, fp8 values are multiplied: the largest weight of a row becomes 256 or
    a little more, and weights are then rounded to e4m3; on Hopper, accumulators of a head and of a KV tile have 14
    bits. A token with a block number out of range contributes nothing; a query without keys gives zeros; rows that
    belong to no sequence are left unchanged. NaN or infinity among the values that one query of a sequence attends to
    may reach its other queries.

    Args:
        out: [num_tokens, num_heads, value_size] of the queries' dtype, written; heads contiguous.
        query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; heads contiguous, any row stride.
            Or float8_e4m3fn with e4m3 caches; `out` then has one of the other dtypes.
        value_cache: as in `paged_attention_v1`, but a value of a head may have fewer elements than a key: packed,
            [num_blocks, num_kv_heads, value_size, block_size], or flash, [num_blocks, block_size, num_kv_heads,
            value_size].
        key_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, kv_cache_dtype, k_scale,
            v_scale: as in `paged_attention_v1`.
        cu_seqlens_q: [num_seqs + 1] int32 or int64, ascending; where it is not, rows of any sequence may be left
            unchanged.
        causal: whether a token attends to no later token.
        alibi_slopes: [num_heads] float32, or None: ``slope * (j - the last token it attends to)`` is added.
        sliding_window: a token attends only to the last sliding_window of its tokens; 0 for all.
        logits_soft_cap, sinks: as in `paged_attention_v1`.
        lse: [num_heads, num_tokens] float32, written: the logarithm of the sum of exponentials, -inf without keys.
        q_scale: scale of e4m3 queries: [1] float32, or [num_kv_heads] if k_scale has as many elements; None for 1.
        max_query_len: the most query tokens of a sequence if they are few, as in speculative decoding; 0 if they are
            not, or unknown. Only the choice of the kernel depends on it, and each number has a plan of its own.
    """
    kv = PagedKV(
        key_cache, value_cache, num_kv_heads, block_tables, seq_lens, block_size, kv_cache_dtype, k_scale, v_scale
    )
    options = Options(alibi_slopes, sliding_window, logits_soft_cap, sinks, lse)
    if query.dtype == torch.float8_e4m3fn:
        grouped = query.double().unflatten(1, (num_kv_heads, -1))
        query = (grouped if q_scale is None else grouped * scales_of(q_scale, num_kv_heads)[..., None]).flatten(1, 2)
    starts = cu_seqlens_q.tolist()
    for s in range(len(seq_lens)):
        begin, end = starts[s : s + 2]
        if 0 <= begin < end <= len(query):
            _, length = attended_of(kv, s, window=0)
            tokens, keys, values = gathered(kv, s, 0, length)
            logits = masked_logits(query[begin:end], keys, scale, tokens, length, options, causal)
            write_rows(out, begin, end, logits, values, options)


@paged_attention_varlen.result
def result_paged_attention_varlen(
    query: TensorArg, key_cache: TensorArg, value_cache: TensorArg, *, out_dtype: torch.dtype | None = None
) -> Result:
    """Rows of `query`.

    Args:
        out_dtype: of the output, with queries of fp8; None for bfloat16 then, and the dtype of the queries otherwise.
    """
    check.sizes(query, num_tokens=None, num_heads=None, head_size=None)
    if len(value_cache.shape) != 4:
        raise value_cache.error(f"expected 4 dimensions, got shape {value_cache.shape}")
    value_size = value_cache.shape[2 if len(key_cache.shape) == 5 else 3]
    default = query.dtype if query.dtype in FLOATS else bfloat16
    return Result((*query.shape[:2], value_size), check.chosen(query, "out_dtype", out_dtype, default))


@paged_attention_varlen.plan
def plan_paged_attention_varlen(
    out: TensorArg,
    query: TensorArg,
    kv: PagedKV,
    options: Options,
    cu_seqlens_q: TensorArg,
    causal: bool,
    q_scale: TensorArg | None,
    max_query_len: int,
) -> list[Launch]:
    problem = check_varlen(out, query, kv, options, cu_seqlens_q, causal, q_scale)
    if max_query_len < 0:
        raise check.refuse(query, "max_query_len", f"expected 0 or more, got {max_query_len}")
    return launch_varlen("paged_attention_varlen", replace(problem, max_query_len=max_query_len))


@paged_attention_varlen.bad_indices
def bad_indices_paged_attention_varlen(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    block_size: int,
    sliding_window: int,
) -> dict[str, Any]:
    rows = cu_seqlens_q.diff()
    outside = (cu_seqlens_q < 0) | (cu_seqlens_q > query.shape[0])
    outside[1:] |= rows < 0
    attended = torch.where(rows > 0, rows + sliding_window - 1, 0) if sliding_window > 0 else 0
    found = bad_indices(block_tables, seq_lens, key_cache.shape[0], block_size, attended)
    return {"cu_seqlens_q": outside, **found}


@paged_attention_varlen.example
def example_paged_attention_varlen(
    make: Any,
    *,
    num_tokens: int = 16,
    head_size: int = 128,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    packed: bool = False,
    value_size: Literal[0, 48] = 0,
    options: bool = False,
    fp8_queries: bool = False,
) -> tuple[Any, ...]:
    kv_cache_dtype = "fp8" if fp8_queries else kv_cache_dtype
    values = value_size or head_size
    num_kv_heads, num_heads, block_size, num_blocks, max_blocks = 2, 6, 16, 37, 96
    # Three sequences with two thirds of the query tokens, none, and one third.
    starts = [0, num_tokens * 2 // 3, num_tokens * 2 // 3, num_tokens]
    lengths = [min(starts[1] + 5, 384), 7, num_tokens - starts[2]]
    kv = example_kv(
        make,
        num_blocks,
        block_size,
        num_kv_heads,
        (head_size, values),
        dtype,
        kv_cache_dtype,
        packed,
        make.randint(0, num_blocks, 3, max_blocks, dtype="int32"),
        make.values(lengths, dtype="int32"),
    )
    call = {
        "out": make.empty(num_tokens, num_heads, values, dtype=dtype),
        "query": make.randn(num_tokens, num_heads, head_size, dtype="float8_e4m3fn" if fp8_queries else dtype),
        "scale": head_size**-0.5,
        "cu_seqlens_q": make.values(starts, dtype="int32"),
        **kv.named(),
        **example_options(make, num_heads, num_tokens, options).named(),
        "q_scale": make.full(1, value=0.25, dtype="float32") if fp8_queries else None,
        "max_query_len": 0,
    }
    return in_order(paged_attention_varlen.op, call)
