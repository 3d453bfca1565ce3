"""Multi-head latent attention: one or a few query tokens of each sequence against a paged cache of latent KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import E4M3, bfloat16
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from .._shared.fp8_accumulation import accumulated, allowed
from .layout import bad_indices
from .mla_plan import choose, launch
from .mla_problem import DS_MLA_BYTES, ENTRY_SIZE, LATENT_SIZE, ROPE_SIZE, MlaProblem, check_mla
from .reference import finish, float32_logits, largest_of, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sm100_cutlass_mla_decode", "sm100_cutlass_mla_get_workspace_size"]


def absolute_error(q_nope: Tensor, q_pe: Tensor, kv_c_and_k_pe_cache: Tensor, scale: float) -> float:
    """The rounding errors of a softmax weight, in the dtype of the MMA operands, and of its logit.

    MMAs of fp8 accumulate the logits of fp8 queries over an fp8 cache (`fp8_accumulation.py`).
    """
    cache = cache_entries(kv_c_and_k_pe_cache, q_nope)
    product = torch.float16 if q_nope.dtype == torch.float8_e4m3fn else q_nope.dtype
    queries = torch.cat((q_nope.double(), q_pe.double()), -1)
    error = float(torch.finfo(product).eps) + float32_logits(queries, cache, scale)
    if q_nope.dtype == cache.dtype == torch.float8_e4m3fn and queries.numel() and cache.numel():
        _, mean, variance = accumulated(queries.flatten(0, 1), cache.flatten(0, 1).T)
        error += abs(scale) * float(allowed(mean, variance).max())
    return error


def cache_entries(cache: Tensor, q_nope: Tensor) -> Tensor:
    """The cache in its element type: bytes as fp8, "fp8_ds_mla" dequantized to the dtype of the queries."""
    if cache.shape[2] == DS_MLA_BYTES:
        codes, scales, rotated = (part.contiguous() for part in cache.split((LATENT_SIZE, 16, 2 * ROPE_SIZE), -1))
        tiles = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128)) * scales.view(torch.float32)[..., None]
        return torch.cat((tiles.flatten(-2).to(q_nope.dtype), rotated.view(q_nope.dtype)), -1)
    return cache.view(fp8.cache_codes(cache, "fp8")) if cache.element_size() == 1 else cache


@op(out=("out", "lse"), atol=absolute_error)
def sm100_cutlass_mla_decode(
    out: Tensor,
    lse: Tensor | None,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c_and_k_pe_cache: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    workspace: Tensor | None,
    scale: float,
    num_kv_splits: int,
    *,
    query_tokens: int = 1,
) -> None:
    """Multi-head latent attention of the newest tokens of each sequence over its tokens in a paged cache, on any GPU.

    The cache holds the latent KV of each token: a latent vector c of 512 elements, then a RoPE key r of 64 elements
    (`concat_and_cache_mla`). Both together are the key of every head, and c is the value of every head. The caller has
    multiplied the queries by the up-projection of the keys (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1, absorbed
    form). For a head of a sequence of length L::

        l_i = scale * (q_nope . c_i + q_pe . r_i)                           0 <= i < L
        p_i = exp(l_i - m) / (sum_j exp(l_j - m) + 1e-6),  m = max_j l_j
        out = T(sum_i p_i * c_i)

    in float32; ``exp(l_i - m)`` is rounded to 16 bits before it multiplies c_i, unless the queries are float32. The
    accumulators of logits of fp8 queries over an fp8 cache may have 14 bits (`fp8_accumulation.py`). Token i
    lies in page ``page_table[s, i // page_size]``, slot ``i % page_size``. A token with a page number out of range
    contributes nothing. An empty sequence gives zeros. Slots without a token are ignored, whatever they contain. An
    infinite element of an attended latent KV gives infinity or NaN, and so does a logit that overflows float32.
    Accumulating the largest finite values does not overflow; a float32 result within 2^-16 of the largest float may be
    rounded to infinity.
    Nothing is returned.

    With n = `query_tokens` query tokens of each sequence, the newest of its tokens, rows ``s * n`` to ``s * n + n - 1``
    of the queries are those of sequence s. The t-th of them attends to the first ``L - n + 1 + t`` tokens: the formula
    with this number as L. An infinite element, or NaN, of a token may then reach all queries of its sequence.

    Args:
        out: [num_seqs * query_tokens, num_heads, 512], written, of the queries' dtype, or bfloat16 for queries of fp8;
            heads contiguous.
        lse: [num_seqs * query_tokens, num_heads] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty
            sequence; or None.
        q_nope: [num_seqs * query_tokens, num_heads, 512], float32, float16, bfloat16 or float8_e4m3fn; any strides but
            the last. With several query tokens, the stride of rows is num_heads times that of heads. Any number of
            heads.
        q_pe: [num_seqs * query_tokens, num_heads, 64], the RoPE part of the queries, of the dtype of q_nope; strides
            likewise. No scale is applied to queries of fp8: a caller who has quantized them multiplies `scale` by it.
        kv_c_and_k_pe_cache: [num_pages, page_size, 576], of the queries' dtype, or fp8 (float8_e4m3fn, float8_e4m3fnuz
            or uint8). No scale is applied to fp8 values: a caller who has written them with a scale multiplies `scale`
            and the result by it. Or [num_pages, page_size, 656] uint8 in the format "fp8_ds_mla"
            (`concat_and_cache_mla`, written with the queries' dtype, float16 or bfloat16): ``c = T(quant * scale)``,
            one scale for 128 quants. Any page size, any strides but the last.
        seq_lens: [num_seqs], int32 or int64, any stride; at most max_pages * page_size tokens count: later ones are
            left out, which is an error only with ``PYOPS_CHECK=1``.
        page_table: [num_seqs, max_pages], int32 or int64, any strides.
        workspace: uint8, or None. Neither read nor written: the op allocates its own for the length of the call.
        scale: factor of the logits.
        num_kv_splits: most splits of a sequence; each split is a block. 1 for a single pass, 0 or less for the number
            that keeps the device busy.
        query_tokens: query tokens of each sequence, as in speculative decoding.
    """
    cache = cache_entries(kv_c_and_k_pe_cache, q_nope)
    num_pages, page_size, _ = cache.shape
    queries = torch.cat((q_nope.double(), q_pe.double()), -1)
    for row in range(len(queries)):
        s, newer = row // query_tokens, query_tokens - 1 - row % query_tokens
        length = max(0, min(int(seq_lens[s]), page_table.shape[1] * page_size))
        tokens = torch.arange(max(0, length - newer), dtype=torch.int64, device=out.device)
        pages = page_table[s][tokens // page_size]
        there = (pages >= 0) & (pages < num_pages)
        entries = cache[pages[there], tokens[there] % page_size].double()
        attend(out[row], None if lse is None else lse[row], queries[row], entries, scale)


def attend(out: Tensor, lse: Tensor | None, queries: Tensor, entries: Tensor, scale: float) -> None:
    """Write the attention of one token's queries [num_heads, 576] over latent KV [tokens, 576], both in float64."""
    logits = queries @ entries.T * scale
    max_logit = largest_of(logits)
    weights = torch.exp(logits - max_logit.masked_fill(max_logit == -torch.inf, 0.0)[:, None])
    latents = entries[:, :LATENT_SIZE]
    total = weighted_sum(weights[:, None], logits[:, None], latents[:, None])[0]
    finish(out, max_logit, weights.sum(-1), total, None, lse)


@sm100_cutlass_mla_decode.result
def result_sm100_cutlass_mla_decode(q_nope: TensorArg) -> Result:
    return Result(q_nope.shape, bfloat16 if q_nope.dtype in E4M3 else q_nope.dtype)


@sm100_cutlass_mla_decode.plan
def plan_sm100_cutlass_mla_decode(problem: MlaProblem) -> list[Launch]:
    check_mla(problem)
    rows = problem.by_sequence()
    return launch(rows, tuning.config("sm100_cutlass_mla_decode", rows, rows.cache.device, choose))


@sm100_cutlass_mla_decode.bad_indices
def bad_indices_sm100_cutlass_mla_decode(
    kv_c_and_k_pe_cache: Tensor, seq_lens: Tensor, page_table: Tensor
) -> dict[str, Any]:
    num_pages, page_size, _ = kv_c_and_k_pe_cache.shape
    bad = bad_indices(page_table, seq_lens, num_pages, page_size)
    return {"page_table": bad["block_tables"], "seq_lens": bad["seq_lens"]}


@sm100_cutlass_mla_decode.example
def example_sm100_cutlass_mla_decode(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn"] = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_ds_mla"] = "auto",
    num_heads: Literal[20, 12] = 20,
    max_pages: Literal[6, 200] = 6,
) -> tuple[Any, ...]:
    page_size, num_pages = 16, 37
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
        make.randint(0, 6 * page_size + 1, num_tokens, dtype="int32"),  # short, also where more pages would do
        make.randint(0, num_pages, num_tokens, max_pages, dtype="int32"),
        None,
        ENTRY_SIZE**-0.5,
        0,
        1,
    )


def sm100_cutlass_mla_get_workspace_size(max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int) -> int:
    """Bytes of the workspace that vLLM's `sm100_cutlass_mla_decode` asks for: ``513 * 4 * 128 * splits * batches``.

    The op here does not read its workspace, so this size is always enough, and a workspace of None is, too.

    Args:
        max_seq_len: tokens of the longest sequence.
        num_batches: sequences.
        sm_count: SMs of the device.
        num_kv_splits: splits of a sequence; 0 or less for vLLM's choice by the other arguments.
    """
    splits = num_kv_splits
    if splits <= 0:
        thousands = max_seq_len / 1024
        if num_batches <= 4 and thousands >= 16:
            splits = 16
        elif num_batches <= 8 and thousands >= 4:
            splits = 8
        elif (num_batches <= 16 and thousands >= 8) or (num_batches == 48 and thousands >= 32):
            splits = 4
        elif (num_batches <= 32 or num_batches == 96) and thousands >= 16:
            splits = 2
        else:
            splits = 1
        splits = min(splits, max(1, sm_count // max(1, num_batches)))
    return (LATENT_SIZE + 1) * 4 * 128 * splits * num_batches
