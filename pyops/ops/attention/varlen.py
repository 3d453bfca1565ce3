"""Attention of many query tokens of each sequence against a paged key-value cache: prompts, and parts of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core import check, dtypes
from ..._core.dtypes import float32
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from ._plan import MAX_TOKENS, NO_STARTS, NUM_WARPS, bad_indices, checked, decode_simt, example_caches, heads_stride
from .reference import float32_logits, gathered, largest_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["paged_attention_varlen"]

_varlen = Kernel("attention/attention_varlen.cu")
_MANY_ROWS = 256  # of a sequence: enough for wide tiles


def _cancelled(query: Tensor, key_cache: Tensor, scale: float, kv_cache_dtype: str, k_scale: Tensor) -> float:
    """Weights are rounded to the element type before they meet the values."""
    return float(torch.finfo(query.dtype).eps) + float32_logits(query, key_cache, scale, kv_cache_dtype, k_scale)


@op(inout=("out", "lse"), keyed="logits_soft_cap", atol=_cancelled)
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
) -> None:
    """Attention of the newest tokens of each sequence over all its tokens in a paged key-value cache.

    The query tokens of sequence s are rows ``cu_seqlens_q[s]`` up to ``cu_seqlens_q[s + 1]`` of `query`, the last ones
    of its ``seq_lens[s]`` tokens, whose keys and values the cache holds already. Of n query tokens, token i attends to
    the tokens ``j <= seq_lens[s] - n + i``, or to all of them if not `causal`, with the formula of
    `paged_attention_v1`. Weights are rounded to the element type, sums are in float32 (Dao 2023, arXiv:2307.08691).
    A token whose block number is out of range contributes nothing; a query without keys gives zeros; rows that belong
    to no sequence are left as they are. NaN or infinity among the values that one query of a sequence attends to may
    reach its other queries.

    Args:
        out: [num_tokens, num_heads, head_size], written; heads contiguous.
        query: the same shape, float32, float16 or bfloat16; heads contiguous, rows of any stride.
        key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, kv_cache_dtype, k_scale,
            v_scale: as in `paged_attention_v1`.
        cu_seqlens_q: [num_seqs + 1] int32 or int64, ascending; where it is not, rows of any sequence may be left as
            they are.
        causal: whether a token attends to none behind it.
        alibi_slopes: [num_heads] float32, or None: ``slope * (j - the last token it attends to)`` is added.
        sliding_window: only the last so many of the tokens that it would attend to; 0 for all.
        logits_soft_cap, sinks: as in `paged_attention_v1`.
        lse: [num_heads, num_tokens] float32, written: the logarithm of the sum of exponentials, -inf without keys.
    """
    starts, rows = cu_seqlens_q.tolist(), query.shape[0]
    num_heads = query.shape[1]
    for s, length in enumerate(seq_lens.tolist()):
        begin, end = starts[s : s + 2]
        if not 0 <= begin < end <= rows:
            continue
        length = max(0, min(length, block_tables.shape[1] * block_size))
        scales = (k_scale, v_scale)
        tokens, keys, values = gathered(key_cache, value_cache, block_tables[s], 0, length, kv_cache_dtype, scales)
        grouped = query[begin:end].double().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
        logits = (torch.einsum("nhgd,jhd->hgnj", grouped, keys) * scale).flatten(0, 1)
        if logits_soft_cap > 0:
            logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
        count = end - begin
        limits = torch.full((count,), length - 1, device=query.device)
        if causal:
            limits = length - count + torch.arange(count, device=query.device)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes.double()[:, None, None] * (tokens - limits[:, None])
        unseen = tokens > limits[:, None]
        if sliding_window > 0:
            unseen = unseen | (tokens <= limits[:, None] - sliding_window)
        logits = logits.masked_fill(unseen, -torch.inf)
        max_logit = largest_of(logits)
        if sinks is not None:
            max_logit = torch.maximum(max_logit, sinks.double()[:, None])
        base = max_logit.masked_fill(max_logit == -torch.inf, 0.0)
        weights = torch.exp(logits - base[..., None])
        z = weights.sum(-1)
        if sinks is not None:
            z = z + torch.exp(sinks.double()[:, None] - base)
        # What is not seen may be NaN, which no weight of zero takes away.
        seen = values.nan_to_num(nan=0.0) if bool(unseen.all(0).any()) else values
        heads = torch.einsum("hgnj,jhd->nhgd", weights.unflatten(0, (num_kv_heads, -1)), seen).flatten(1, 2)
        out[begin:end] = (heads / (z.T[..., None] + 1e-6)).to(out.dtype)
        if lse is not None:
            lse[:, begin:end] = (max_logit + torch.log(z)).float()


@paged_attention_varlen.plan
def plan_paged_attention_varlen(
    out: TensorArg,
    query: TensorArg,
    key_cache: TensorArg,
    value_cache: TensorArg,
    num_kv_heads: int,
    block_tables: TensorArg,
    seq_lens: TensorArg,
    cu_seqlens_q: TensorArg,
    block_size: int,
    kv_cache_dtype: str,
    k_scale: TensorArg,
    v_scale: TensorArg,
    causal: bool,
    alibi_slopes: TensorArg | None,
    sliding_window: int,
    logits_soft_cap: float,
    sinks: TensorArg | None,
    lse: TensorArg | None,
) -> Launch:
    cache = checked(
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        block_tables,
        seq_lens,
        block_size,
        kv_cache_dtype,
        k_scale,
        v_scale,
        alibi_slopes,
        sinks,
        sliding_window,
    )
    num_tokens, num_heads, head_size = query.shape
    num_seqs = block_tables.shape[0]
    check.like(out, query)
    check.index(cu_seqlens_q, num_seqs_and_one=num_seqs + 1)
    check.shape(lse, float32, num_heads=num_heads, num_tokens=num_tokens)

    group = num_heads // num_kv_heads
    query_stride, out_stride = heads_stride(query), heads_stride(out)
    constants = {
        "scalar_t": query.dtype,
        "cache_t": cache.dtype,
        "table_t": block_tables.dtype,
        "length_t": seq_lens.dtype,
        "starts_t": cu_seqlens_q.dtype,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "PACKED": cache.packed,
        "X": cache.chunk,
        "GROUP": group,
        "NUM_WARPS": NUM_WARPS,
        "CAUSAL": bool(causal),
        "HAS_ALIBI": alibi_slopes is not None,
        "HAS_SOFTCAP": logits_soft_cap > 0,
        "HAS_SINKS": sinks is not None,
        "HAS_LSE": lse is not None,
    }
    fixed = {
        **{name: 0 for name, arg in (("alibi_slopes", alibi_slopes), ("sinks", sinks), ("lse", lse)) if not arg},
        **cache.strides,
        "num_seqs": num_seqs,
        "num_blocks": cache.num_blocks,
        "max_tokens": min(block_tables.shape[1] * block_size, MAX_TOKENS),
        "out_stride": out_stride,
        "query_stride": query_stride,
        "table_stride": block_tables.strides[0],
        "table_step": block_tables.strides[1],
        "length_step": seq_lens.strides[0],
        "starts_step": cu_seqlens_q.strides[0],
    }
    products = (
        query.dtype is not float32
        and cache.aligned
        and query.alignment == 16
        and query_stride % 8 == 0
        and head_size % 16 == 0
        and head_size <= 256
        and query.device.warp_size == 32
        and (not cache.packed or block_size % 8 == 0)
    )
    if products:
        # Two tiles of 16 rows to a warp halve what is read of keys and values, where their sums fit into registers: of
        # large heads only on sm_90, without codes and options.
        plain = cache.dtype is query.dtype and alibi_slopes is None and not logits_soft_cap
        fit = head_size <= 64 or (head_size <= 128 and plain and query.device.arch == "sm_90")
        row_tiles = 2 if fit and num_tokens * group >= _MANY_ROWS * num_seqs else 1
        tile_rows = NUM_WARPS * 16 * row_tiles
        tokens = 64 if head_size <= 128 else 32
        rows, dims = -(-head_size // 64) * 128, tokens * 2  # bytes of a row of a head, and of tokens
        value_bytes = head_size * max(128, dims) if cache.packed else tokens * rows
        shared = tile_rows * rows + 2 * tokens * rows + 2 * value_bytes
        kernel = _varlen(
            **constants,
            TOKENS=tokens,
            ROW_TILES=row_tiles,
            MIN_BLOCKS=2,
            OUT_ACCESS=2 if out.alignment >= 2 * out.dtype.itemsize and out_stride % 2 == 0 else 1,
        )
        grid = (num_tokens * group // tile_rows + num_seqs if num_tokens else 0, num_kv_heads)
        return kernel.launch(grid, NUM_WARPS * 32, shared, num_tokens=num_tokens, **fixed)
    options = {
        "NUM_KV_HEADS": num_kv_heads,
        "PARTITION": 0,
        "DIRECT": True,
        **NO_STARTS,
        "starts_t": cu_seqlens_q.dtype,
        "VARLEN": True,
        "SPARSE": False,
    }
    absent = ("tmp_out", "max_logits", "exp_sums", "query_start_loc", "first_step", "blocksparse_local_blocks")
    sparse = ("blocksparse_vert_stride", "blocksparse_block_size", "blocksparse_head_sliding_step")
    kernel = decode_simt(**constants | options, partial_t=float32)
    splits = {"num_rows": num_tokens, "max_splits": 1, "min_split": 64}
    grid = (num_tokens * num_heads if num_seqs else 0, 1)
    return kernel.launch(grid, NUM_WARPS * 32, **fixed, **splits, **dict.fromkeys((*absent, *sparse), 0))


@paged_attention_varlen.bad_indices
def bad_indices_paged_attention_varlen(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    block_size: int,
    sliding_window: int,
) -> dict[str, Tensor]:
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
    options: bool = False,
) -> tuple[Any, ...]:
    num_kv_heads, num_heads, block_size, num_blocks, max_blocks = 2, 6, 16, 37, 24
    cache_dtype = dtypes.of(dtype if kv_cache_dtype == "auto" else "float8_e4m3fn")
    assert cache_dtype is not None
    # Three sequences: most of the tokens, none, and the rest.
    starts = [0, num_tokens * 2 // 3, num_tokens * 2 // 3, num_tokens]
    lengths = [min(starts[1] + 5, 384), 7, num_tokens - starts[2]]
    return (
        make.empty(num_tokens, num_heads, head_size, dtype=dtype),
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        *example_caches(make, num_blocks, block_size, num_kv_heads, head_size, cache_dtype, packed),
        num_kv_heads,
        head_size**-0.5,
        make.randint(0, num_blocks, 3, max_blocks, dtype="int32"),
        make.values(lengths, dtype="int32"),
        make.values(starts, dtype="int32"),
        block_size,
        kv_cache_dtype,
        make.full(1, value=0.5, dtype="float32"),
        make.full(1, value=1.5, dtype="float32"),
        True,
        make.randn(num_heads, dtype="float32", scale=0.1) if options else None,
        40 if options else 0,
        20.0 if options else 0.0,
        make.randn(num_heads, dtype="float32") if options else None,
        make.empty(num_heads, num_tokens, dtype="float32") if options else None,
    )
