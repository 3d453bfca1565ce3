"""Multi-head latent attention: one query token of each sequence against a paged cache of latent entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..._core import check
from ..._core.dtypes import E4M3, bfloat16, float8_e4m3fn, float16, float32, uint8
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import fp8
from ._plan import MAX_TOKENS, NO_STARTS, bad_indices, heads_stride, join_splits, launch_join
from .reference import finish, float32_logits, largest_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sm100_cutlass_mla_decode", "sm100_cutlass_mla_get_workspace_size"]

_decode = Kernel("attention/mla_decode.cu")
_decode_simt = Kernel("attention/mla_decode_simt.cu")

_LATENT_SIZE, _ROPE_SIZE = 512, 64
_ENTRY_SIZE = _LATENT_SIZE + _ROPE_SIZE
_MAX_SPLITS = 128
_SIMT_WARPS = 4


def _cancelled(q_nope: Tensor, q_pe: Tensor, kv_c_and_k_pe_cache: Tensor, scale: float) -> float:
    """Weights are rounded to the type of the products before they meet the entries."""
    cache = _entries(kv_c_and_k_pe_cache)
    product = torch.float16 if q_nope.dtype == torch.float8_e4m3fn else q_nope.dtype
    return float(torch.finfo(product).eps) + float32_logits(
        torch.cat((q_nope.double(), q_pe.double()), -1), cache, scale
    )


def _entries(cache: Tensor) -> Tensor:
    """The cache, of codes as what they stand for."""
    return cache.view(fp8.cache_codes(cache, "fp8")) if cache.element_size() == 1 else cache


@op(out=("out", "lse"), atol=_cancelled)
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
) -> None:
    """Multi-head latent attention of one query token of each sequence over its tokens in a paged cache, on any GPU.

    An entry of the cache is a latent vector c of 512 elements and behind it a rotated key r of 64
    (`concat_and_cache_mla`). It is the key of every head, and c also the value; queries have been multiplied by the
    key's up-projection (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1, in its absorbed form). For a head of a
    sequence of length L::

        l_i = scale * (q_nope . c_i + q_pe . r_i)                           0 <= i < L
        p_i = exp(l_i - m) / (sum_j exp(l_j - m) + 1e-6),  m = max_j l_j
        out = T(sum_i p_i * c_i)

    in float32; ``exp(l_i - m)`` is rounded to 16 bits before it meets c_i, unless the queries are float32. Token i lies
    in page ``page_table[s, i // page_size]``, slot ``i % page_size``. A token whose page number is out of range
    contributes nothing; an empty sequence gives zeros; what lies in slots that no token has changes nothing. A value of
    infinity in the cache may give NaN. Nothing is returned.

    Args:
        out: [num_seqs, num_heads, 512], written, of the queries' dtype, or bfloat16 for queries of fp8; heads
            contiguous.
        lse: [num_seqs, num_heads] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty sequence. None
            if it is not wanted.
        q_nope: [num_seqs, num_heads, 512], float32, float16, bfloat16 or float8_e4m3fn; any strides but the last. Any
            number of heads.
        q_pe: [num_seqs, num_heads, 64], beside it, rotated.
        kv_c_and_k_pe_cache: [num_pages, page_size, 576], of the queries' dtype, or codes of fp8 (float8_e4m3fn,
            float8_e4m3fnuz or uint8), which are used as they are: whoever wrote them with a scale puts it into `scale`
            and the result. Any page size, any strides but the last.
        seq_lens: [num_seqs], int32 or int64, any stride; at most most_pages * page_size tokens count.
        page_table: [num_seqs, most_pages], int32 or int64, any strides.
        workspace: uint8, or None. Not read or written: what is needed is allocated for the length of the call.
        scale: of the logits.
        num_kv_splits: the most parts that a sequence is cut into, each for a block of its own; 1 for a single pass, 0
            or less for as many as keep the device busy.
    """
    cache = _entries(kv_c_and_k_pe_cache)
    num_pages, page_size, _ = cache.shape
    queries = torch.cat((q_nope.double(), q_pe.double()), -1)
    for s, length in enumerate(seq_lens.tolist()):
        tokens = torch.arange(max(0, min(length, page_table.shape[1] * page_size)), device=out.device)
        pages = page_table[s][tokens // page_size]
        there = (pages >= 0) & (pages < num_pages)
        entries = cache[pages[there], tokens[there] % page_size].double()
        logits = queries[s] @ entries.T * scale
        max_logit = largest_of(logits)
        weights = torch.exp(logits - max_logit.masked_fill(max_logit == -torch.inf, 0.0)[:, None])
        latents = entries[:, :_LATENT_SIZE]
        finish(out[s], max_logit, weights.sum(-1), weights @ latents, None, None if lse is None else lse[s])


class _Block(NamedTuple):
    """The shape of a block of mla_decode.cu."""

    heads: int
    tokens: int
    warps: int

    def shared(self, is_fp8: bool) -> int:
        """Bytes of dynamic shared memory, as the kernel counts them."""
        row, padding = (_ENTRY_SIZE + 8) * 2, self.tokens + 8
        tiles = self.tokens * (row + _ENTRY_SIZE if is_fp8 else 2 * row)
        return self.heads * row + tiles + self.heads * padding * (4 * 4 + 2)


_BLOCKS = (_Block(64, 32, 8), _Block(32, 32, 8), _Block(16, 32, 8), _Block(16, 16, 4))
_STATIC_SHARED = 512  # bytes, and more than mla_decode.cu has


def _block(num_heads: int, is_fp8: bool, max_logit: int) -> _Block | None:
    """The largest block that is not half empty, and whose shared memory a device has; None if there is none."""
    for block in _BLOCKS:
        if (num_heads > block.heads // 2 or block.heads == 16) and block.shared(is_fp8) + _STATIC_SHARED <= max_logit:
            return block
    return None


@sm100_cutlass_mla_decode.plan
def plan_sm100_cutlass_mla_decode(
    out: TensorArg,
    lse: TensorArg | None,
    q_nope: TensorArg,
    q_pe: TensorArg,
    kv_c_and_k_pe_cache: TensorArg,
    seq_lens: TensorArg,
    page_table: TensorArg,
    workspace: TensorArg | None,
    num_kv_splits: int,
) -> list[Launch]:
    cache = kv_c_and_k_pe_cache
    check.dtype(q_nope, float32, float16, bfloat16, float8_e4m3fn)
    check.sizes(q_nope, num_seqs=None, num_heads=None, latent_size=_LATENT_SIZE)
    num_seqs, num_heads, _ = q_nope.shape
    check.sizes(q_pe, num_seqs=num_seqs, num_heads=num_heads, rope_size=_ROPE_SIZE)
    check.dtype(q_pe, q_nope.dtype)
    check.same_shape(out, q_nope)
    check.dtype(out, bfloat16 if q_nope.dtype is float8_e4m3fn else q_nope.dtype)
    check.shape(lse, float32, num_seqs=num_seqs, num_heads=num_heads)
    check.dtype(cache, *dict.fromkeys((q_nope.dtype, *E4M3, uint8)))
    check.sizes(cache, num_pages=None, page_size=None, entry_size=_ENTRY_SIZE)
    for arg in (q_nope, q_pe, cache):
        check.row_size(arg)
    num_pages, page_size, _ = cache.shape
    if page_size == 0:
        raise cache.error(f"expected pages of at least one slot, got shape {cache.shape}")
    check.index(seq_lens, num_seqs=num_seqs)
    check.index(page_table, num_seqs=num_seqs, most_pages=None)
    check.dtype(workspace, uint8)

    is_fp8 = cache.dtype.itemsize == 1
    cache_t = check.cache_dtype(cache, "fp8" if is_fp8 else "auto", q_nope.dtype)
    product_t = float16 if q_nope.dtype is float8_e4m3fn else q_nope.dtype
    device = cache.device
    chunk = 16 // cache_t.itemsize
    aligned = cache.alignment == 16 and all(
        stride % chunk == 0 or size == 1 for size, stride in zip(cache.shape[:2], cache.strides[:2], strict=True)
    )
    block = None
    if aligned and product_t is not float32 and device.warp_size == 32:
        block = _block(num_heads, is_fp8, device.shared_memory)
    heads = block.heads if block else 1
    blocks = num_seqs * -(-num_heads // heads)
    shared = block.shared(is_fp8) if block else 0
    min_blocks = 2 if heads == 16 and 2 * (shared + 1024) <= device.shared_memory else 1

    # A split is worth its block when its entries outweigh the queries it reads and the results it leaves.
    most_tokens, least_split = min(page_table.shape[1] * page_size, MAX_TOKENS), 64 * max(1, heads // 16)
    # At most two full rounds of what fits on the device at once: a third of few blocks takes as long as one of all.
    wanted = num_kv_splits if num_kv_splits > 0 else 2 * min_blocks * device.multiprocessors // max(1, blocks)
    most_splits = max(1, min(wanted, -(-most_tokens // least_split), _MAX_SPLITS))
    rows = num_seqs * num_heads * most_splits if most_splits > 1 else 0
    types = {"out_t": out.dtype, "length_t": seq_lens.dtype}
    common: dict[str, Any] = {
        **({} if lse else {"lse": 0}),
        "tmp_out": Scratch(rows * _LATENT_SIZE * 4) if rows else 0,
        "max_logits": Scratch(rows * 4) if rows else 0,
        "exp_sums": Scratch(rows * 4) if rows else 0,
        "max_tokens": most_tokens,
        "max_splits": most_splits,
        "min_split": least_split,
        "out_stride": heads_stride(out),
        "length_step": seq_lens.strides[0],
    }
    constants = {
        "query_t": q_nope.dtype,
        "cache_t": cache_t,
        **types,
        "table_t": page_table.dtype,
        "PAGE_SIZE": page_size,
        "HAS_LSE": lse is not None,
    }
    fixed = {
        "num_heads": num_heads,
        "num_pages": num_pages,
        "max_pages": page_table.shape[1],
        "nope_stride": q_nope.strides[0],
        "nope_head_stride": q_nope.strides[1],
        "pe_stride": q_pe.strides[0],
        "pe_head_stride": q_pe.strides[1],
        "page_stride": cache.strides[0],
        "slot_stride": cache.strides[1],
        "table_stride": page_table.strides[0],
        "table_step": page_table.strides[1],
    }
    grid = (blocks, most_splits)
    if block:
        kernel = _decode(
            **constants,
            product_t=product_t,
            HEADS=heads,
            TOKENS=block.tokens,
            NUM_WARPS=block.warps,
            MIN_BLOCKS=min_blocks,
            QUERY_ACCESS=min(8, check.vector_width(_ROPE_SIZE, q_nope, q_pe)),
            OUT_ACCESS=min(2, check.vector_width(_LATENT_SIZE, out)),
        )
        launches = [kernel.launch(grid, block.warps * 32, shared, **fixed, **common)]
    else:
        launches = [_decode_simt(**constants, NUM_WARPS=_SIMT_WARPS).launch(grid, _SIMT_WARPS * 32, **fixed, **common)]
    if rows:
        join = join_splits(
            num_seqs,
            most_splits,
            out,
            None,
            **types,
            partial_t=float32,
            PARTITION=0,
            BALANCED=False,
            DIRECT=True,
            HAS_SINKS=False,
            HAS_LSE=lse is not None,
            LSE_BY_ROW=True,
            **NO_STARTS,
            HAS_OUT_SCALE=False,
        )
        absent = dict.fromkeys(("query_start_loc", "sinks", "fp8_out_scale", "num_seqs", "wave_splits"), 0)
        launches.append(launch_join(join, num_seqs, num_rows=num_seqs, sliding_window=0, **common, **absent))
    return launches


@sm100_cutlass_mla_decode.bad_indices
def bad_indices_sm100_cutlass_mla_decode(
    kv_c_and_k_pe_cache: Tensor, seq_lens: Tensor, page_table: Tensor
) -> dict[str, Tensor]:
    num_pages, page_size, _ = kv_c_and_k_pe_cache.shape
    bad = bad_indices(page_table, seq_lens, num_pages, page_size)
    return {"page_table": bad["block_tables"], "seq_lens": bad["seq_lens"]}


@sm100_cutlass_mla_decode.example
def example_sm100_cutlass_mla_decode(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn"] = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
) -> tuple[Any, ...]:
    num_heads, page_size, num_pages, most_pages = 12, 16, 37, 6
    return (
        make.empty(num_tokens, num_heads, _LATENT_SIZE, dtype="bfloat16" if dtype == "float8_e4m3fn" else dtype),
        make.empty(num_tokens, num_heads, dtype="float32"),
        make.randn(num_tokens, num_heads, _LATENT_SIZE, dtype=dtype),
        make.randn(num_tokens, num_heads, _ROPE_SIZE, dtype=dtype),
        make.randn(num_pages, page_size, _ENTRY_SIZE, dtype=dtype if kv_cache_dtype == "auto" else "float8_e4m3fn"),
        make.randint(0, most_pages * page_size + 1, num_tokens, dtype="int32"),
        make.randint(0, num_pages, num_tokens, most_pages, dtype="int32"),
        None,
        _ENTRY_SIZE**-0.5,
        0,
    )


def sm100_cutlass_mla_get_workspace_size(max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int) -> int:
    """Bytes of the workspace that upstream's `sm100_cutlass_mla_decode` asks for: ``513 * 4 * 128 * splits * batches``.

    The op here reads none of them, so a workspace of this size is always enough, and None is as good.

    Args:
        max_seq_len: tokens of the longest sequence.
        num_batches: sequences.
        sm_count: multiprocessors of the device.
        num_kv_splits: parts that a sequence is cut into; 0 or less for upstream's choice by the other three.
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
    return (_LATENT_SIZE + 1) * 4 * 128 * splits * num_batches
