"""Decode attention in partitions of a fixed size; the caller provides the memory for their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float8_e4m3fn
from ..._core.tensors.tensor import TensorArg
from .arguments import Options, PagedKV, Partials, Sparse
from .decode import absolute_error
from .decode_choose import choose
from .decode_launch import launch
from .decode_problem import check_decode
from .examples import example_decode, in_order
from .layout import bad_indices
from .reference import Attended, finish, partitions

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["paged_attention_rocm", "paged_attention_v2"]

_V2_PARTITION, _ROCM_PARTITION = 512, 256  # tokens of a partition


def _combined(partition: int) -> Callable[..., float]:
    """`absolute_error`, and the error of partitions: their results are rounded to T before they are combined."""

    def atol(
        query: Tensor,
        key_cache: Tensor,
        scale: float,
        kv_cache_dtype: str,
        k_scale: Tensor,
        seq_lens: Tensor,
        sinks: Tensor | None,
    ) -> float:
        is_combined = sinks is not None or (seq_lens.numel() > 0 and int(seq_lens.max()) > partition)
        rounding = float(torch.finfo(query.dtype).eps) if is_combined else 0.0
        return rounding + absolute_error(query, key_cache, scale, kv_cache_dtype, k_scale)

    return atol


@op(
    out=("out", "lse"),
    inout=("exp_sums", "max_logits", "tmp_out"),
    runtime="max_seq_len",
    keyed="logits_soft_cap",
    atol=_combined(_V2_PARTITION),
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
    """`paged_attention_v1` in partitions of 512 tokens, with their results in memory that the caller provides.

    Partition p of a head writes its row max m_p to `max_logits`, ``z_p = sum_i exp(l_i - m_p)`` to `exp_sums`, and its
    own attention, rounded to T, to `tmp_out`. Then ``out = T(sum_p w_p tmp_out_p / (sum_p w_p + 1e-6))`` with ``w_p =
    z_p exp(m_p - m)``; a sink is added to both sums when partitions are combined. Memory of partitions after the end of
    a sequence, or before its window, is left unchanged.

    Args:
        exp_sums, max_logits: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
        tmp_out: [num_seqs, num_heads, max_partitions, head_size] of the queries' dtype, contiguous, written.
        The others: as in `paged_attention_v1`. Tokens beyond max_partitions * 512 are left out, like those beyond the
            block table.
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
    partials, max_tokens = Partials(exp_sums, max_logits, tmp_out), exp_sums.shape[2] * _V2_PARTITION
    for s in range(len(seq_lens)):
        attended = Attended(query[s], scale, kv, s, options, sparse, max_tokens)
        combined = partitions(attended, _V2_PARTITION, partials, s)
        finish(out[s], *combined, sinks, None if lse is None else lse[:, s])


@paged_attention_v2.result
def result_paged_attention_v2(query: TensorArg) -> Result:
    return Result(query.shape, query.dtype)


@paged_attention_v2.plan
def plan_paged_attention_v2(
    out: TensorArg, query: TensorArg, kv: PagedKV, options: Options, sparse: Sparse, partials: Partials
) -> list[Launch]:
    problem = check_decode(out, query, kv, options, sparse, partials, _V2_PARTITION)
    return launch(problem, tuning.config("paged_attention_v2", problem, problem.query.device, choose))


@paged_attention_v2.bad_indices
def bad_indices_paged_attention_v2(
    exp_sums: Tensor, key_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, block_size: int, sliding_window: int
) -> dict[str, Any]:
    room = exp_sums.shape[2] * _V2_PARTITION
    return bad_indices(block_tables, seq_lens, key_cache.shape[0], block_size, sliding_window, room)


def _partials(
    make: Any, num_seqs: int, num_heads: int, head_size: int, num_partitions: int, dtype: str
) -> dict[str, Any]:
    exp_sums, max_logits = (make.empty(num_seqs, num_heads, num_partitions, dtype="float32") for _ in range(2))
    tmp_out = make.empty(num_seqs, num_heads, num_partitions, head_size, dtype=dtype)
    return Partials(exp_sums, max_logits, tmp_out).named()


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
    call = example_decode(make, num_tokens, lengths, heads, block_size, dtype, kv_cache_dtype, packed, options)
    num_partitions = -(-max_seq_len // _V2_PARTITION) + 1
    return in_order(
        paged_attention_v2.op, call | _partials(make, num_tokens, num_heads, head_size, num_partitions, dtype)
    )


@op(
    partial="out",
    inout=("exp_sums", "max_logits", "tmp_out", "lse"),
    runtime="max_seq_len",
    keyed="logits_soft_cap",
    atol=_combined(_ROCM_PARTITION),
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
    """`paged_attention_v2` in partitions of 256 tokens, for the decode rows of a mixed batch, on any platform.

    Args:
        out: [num_rows, num_heads, head_size], written; with fp8_out_scale float8_e4m3fn or uint8.
        query: [num_rows, num_heads, head_size]; num_rows may exceed num_seqs.
        query_start_loc: [num_seqs + 1] int32 or int64, any stride. Sequence s has the rows query_start_loc[s] <= i <
            query_start_loc[s + 1]; a sequence is skipped unless it has exactly one row, inside `query`. None: sequence
            s has row s.
        fp8_out_scale: one float32; ``out = fp8(result * (1 / fp8_out_scale))``, saturating.
        mfma_type: ignored.
        lse: [num_heads, num_rows] float32, written where `out` is.
        The others: as in `paged_attention_v2`.
    """
    kv = PagedKV(
        key_cache, value_cache, num_kv_heads, block_tables, seq_lens, block_size, kv_cache_dtype, k_scale, v_scale
    )
    options = Options(alibi_slopes, sliding_window, logits_soft_cap, sinks, lse)
    partials, max_tokens = Partials(exp_sums, max_logits, tmp_out), exp_sums.shape[2] * _ROCM_PARTITION
    for s in range(len(seq_lens)):
        row = s
        if query_start_loc is not None:
            row, end = query_start_loc[s : s + 2].tolist()
            if end - row != 1 or not 0 <= row < query.shape[0]:
                continue
        attended = Attended(query[row], scale, kv, s, options, max_tokens=max_tokens)
        combined = partitions(attended, _ROCM_PARTITION, partials, s)
        result = out[row] if fp8_out_scale is None else torch.empty_like(out[row], dtype=torch.float32)
        finish(result, *combined, sinks, None if lse is None else lse[:, row])
        if fp8_out_scale is not None:
            result = (result * (1.0 / fp8_out_scale.reshape(()))).clamp(-448.0, 448.0)
            out[row].view(torch.uint8).copy_(result.to(torch.float8_e4m3fn).view(torch.uint8))


@paged_attention_rocm.result
def result_paged_attention_rocm(query: TensorArg, fp8_out_scale: TensorArg | None) -> Result:
    return Result(query.shape, float8_e4m3fn if fp8_out_scale else query.dtype)


@paged_attention_rocm.plan
def plan_paged_attention_rocm(
    out: TensorArg,
    query: TensorArg,
    kv: PagedKV,
    options: Options,
    partials: Partials,
    query_start_loc: TensorArg | None,
    fp8_out_scale: TensorArg | None,
) -> list[Launch]:
    check.scalar(fp8_out_scale)
    check.index(kv.block_tables, num_seqs=None, max_blocks=None)
    check.index(query_start_loc, num_seqs_and_end=kv.block_tables.shape[0] + 1)
    problem = check_decode(
        out,
        query,
        kv,
        options,
        Sparse(),
        partials,
        _ROCM_PARTITION,
        query_start_loc,
        fp8_out_scale,
        more_rows_than_sequences=True,
    )
    return launch(problem, tuning.config("paged_attention_rocm", problem, problem.query.device, choose))


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
) -> dict[str, Any]:
    room = exp_sums.shape[2] * _ROCM_PARTITION
    found = bad_indices(block_tables, seq_lens, key_cache.shape[0], block_size, sliding_window, room)
    if query_start_loc is None:
        return found
    return {"query_start_loc": (query_start_loc < 0) | (query_start_loc > query.shape[0]), **found}


@paged_attention_rocm.example
def example_paged_attention_rocm(
    make: Any, *, num_tokens: int = 16, dtype: Literal["float16", "bfloat16"] = "bfloat16", options: bool = False
) -> Any:
    num_heads, head_size = 6, 64
    call = example_decode(make, num_tokens, (0, 128), (num_heads, 2, head_size), 16, dtype, "auto", True, options)
    call |= _partials(make, num_tokens, num_heads, head_size, 1, dtype) | {
        "out": make.empty(num_tokens, num_heads, head_size, dtype="float8_e4m3fn" if options else dtype),
        "query_start_loc": make.values(list(range(num_tokens + 1)), dtype="int32") if options else None,
        "fp8_out_scale": make.full(1, value=0.01, dtype="float32") if options else None,
    }
    return in_order(paged_attention_rocm.op, call)
