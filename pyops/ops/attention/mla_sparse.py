"""Multi-head latent attention of each query token over a list of slots: DeepSeek sparse attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from .mla import absolute_error, attend, cache_entries, result_sm100_cutlass_mla_decode
from .mla_plan import choose, launch
from .mla_problem import DS_MLA_BYTES, ENTRY_SIZE, LATENT_SIZE, ROPE_SIZE, SparseMlaProblem, check_mla
from .mla_upconvert import upconverted

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sparse_mla_attention"]


@op(out=("out", "lse"), atol=absolute_error)
def sparse_mla_attention(
    out: Tensor,
    lse: Tensor | None,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c_and_k_pe_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    scale: float,
    num_kv_splits: int,
) -> None:
    """Multi-head latent attention of each query token over a list of slots of a paged cache, on any GPU.

    DeepSeek sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2): an indexer has chosen, for each query token, the tokens
    that it attends to (`fp8_mqa_logits`, `top_k_per_row_prefill`). Decode and prefill are the same call, in which a
    prompt has many query tokens: causality is a property of the lists. The formula is that of
    `sm100_cutlass_mla_decode`, with the entry of the cache in slot ``indices[t, i]`` as token i of query token t. Slot
    number ``page * page_size + offset`` is slot `offset` of the page. A slot number that is negative or has no page is
    skipped, a slot that is listed twice counts twice, and a query token without any slot gives zeros and an lse of
    -inf. Nothing is returned.

    Args:
        out: [num_tokens, num_heads, 512], written, of the queries' dtype, or bfloat16 for queries of fp8; heads
            contiguous.
        lse: [num_tokens, num_heads] float32, written: the log-sum-exp of the logits; or None.
        q_nope: [num_tokens, num_heads, 512], float32, float16, bfloat16 or float8_e4m3fn; any strides but the last: a
            view of the first 512 elements of queries of 576 will do. Any number of heads.
        q_pe: [num_tokens, num_heads, 64], the RoPE part of the queries, of the dtype of q_nope.
        kv_c_and_k_pe_cache: [num_pages, page_size, 576], of the queries' dtype or fp8, or [num_pages, page_size, 656]
            uint8 in the format "fp8_ds_mla", as `sm100_cutlass_mla_decode` takes it.
        indices: [num_tokens, topk], int32 or int64, any token stride: slot numbers.
        topk_length: [num_tokens], int32 or int64, any stride: how many of a token's indices count, the first ones; or
            None for all of them. Longer lists than topk end with it.
        scale: factor of the logits.
        num_kv_splits: most splits of a list; each split is a block. 1 for a single pass, 0 or less for the number
            that keeps the device busy.
    """
    cache = cache_entries(kv_c_and_k_pe_cache, q_nope)
    num_pages, page_size, _ = cache.shape
    queries = torch.cat((q_nope.double(), q_pe.double()), -1)
    lengths = [indices.shape[1]] * len(indices) if topk_length is None else topk_length.tolist()
    for t, length in enumerate(lengths):
        slots = indices[t, : max(0, length)].long()
        slots = slots[(slots >= 0) & (slots < num_pages * page_size)]
        entries = cache[slots // page_size, slots % page_size].double()
        attend(out[t], None if lse is None else lse[t], queries[t], entries, scale)


@sparse_mla_attention.result
def result_sparse_mla_attention(q_nope: TensorArg) -> Result:
    return result_sm100_cutlass_mla_decode(q_nope)


@sparse_mla_attention.plan
def plan_sparse_mla_attention(
    out: TensorArg,
    lse: TensorArg | None,
    q_nope: TensorArg,
    q_pe: TensorArg,
    kv_c_and_k_pe_cache: TensorArg,
    indices: TensorArg,
    topk_length: TensorArg | None,
    num_kv_splits: int,
) -> list[Launch]:
    problem = SparseMlaProblem(out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, topk_length, indices, None, num_kv_splits)
    check_mla(problem)
    check.row_size(indices)
    conversion, problem = upconverted(problem)
    return conversion + launch(problem, tuning.config("sparse_mla_attention", problem, problem.cache.device, choose))


@sparse_mla_attention.bad_indices
def bad_indices_sparse_mla_attention(
    kv_c_and_k_pe_cache: Tensor, indices: Tensor, topk_length: Tensor | None
) -> dict[str, Any]:
    num_pages, page_size, _ = kv_c_and_k_pe_cache.shape
    topk = indices.shape[1]
    counts = torch.full_like(indices[:, 0], topk) if topk_length is None else topk_length
    counted = torch.arange(topk, dtype=torch.int64, device=indices.device) < counts[:, None]
    bad: dict[str, Any] = {"indices": counted & ((indices < -1) | (indices >= num_pages * page_size))}
    if topk_length is not None:
        bad["topk_length"] = (topk_length < 0) | (topk_length > topk)
    return bad


@sparse_mla_attention.example
def example_sparse_mla_attention(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn"] = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_ds_mla"] = "auto",
    num_heads: Literal[20, 12, 128] = 20,
    topk: int = 96,
    with_lengths: bool = False,
    num_pages: int = 37,
) -> tuple[Any, ...]:
    page_size = 16
    if kv_cache_dtype == "fp8_ds_mla":
        if dtype in ("float32", "float8_e4m3fn"):
            dtype = "bfloat16"
        cache = make.randint(0, 60, num_pages, page_size, DS_MLA_BYTES, dtype="uint8")
    else:
        cache_dtype = dtype if kv_cache_dtype == "auto" else "float8_e4m3fn"
        cache = make.randn(num_pages, page_size, ENTRY_SIZE, dtype=cache_dtype)
    return (
        make.empty(num_tokens, num_heads, LATENT_SIZE, dtype="bfloat16" if dtype == "float8_e4m3fn" else dtype),
        make.empty(num_tokens, num_heads, dtype="float32"),
        make.randn(num_tokens, num_heads, LATENT_SIZE, dtype=dtype),
        make.randn(num_tokens, num_heads, ROPE_SIZE, dtype=dtype),
        cache,
        make.randint(-1, num_pages * page_size, num_tokens, topk, dtype="int32"),
        make.randint(0, topk + 1, num_tokens, dtype="int32") if with_lengths else None,
        ENTRY_SIZE**-0.5,
        0,
    )
