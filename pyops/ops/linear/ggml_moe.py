"""Grouped GEMMs with weights that are quantized as in GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32, int64
from ..._core.tensors.tensor import TensorArg
from .._shared import ggml_formats
from .ggml import random_weight
from .ggml_engines import plan
from .ggml_problem import BLOCK_ROWS, Choices, GgmlProblem, format_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ggml_moe_a8", "ggml_moe_a8_vec", "ggml_moe_get_block_size"]


def ggml_moe_get_block_size(quant_type: int) -> int:
    """The block size for `ggml_moe_a8` (rows of one expert): 4, as upstream; 0 for an unsupported type."""
    return BLOCK_ROWS if quant_type in ggml_formats.FORMATS else 0


def _multiply(out: Tensor, X: Tensor, W: Tensor, quant_type: int, top_k: int, rows: Tensor, experts: Tensor) -> None:
    """``out[rows] = X[rows // top_k] @ W[experts].T``, zeros for an expert that does not exist."""
    out[rows] = 0
    for expert in range(W.shape[0]):
        own = rows[experts == expert]
        weight = ggml_formats.decode(quant_type, W[expert]).view(out.shape[1], -1)[:, : X.shape[1]]
        out[own] = (X[own // top_k].double() @ weight.double().T).to(out.dtype)


def _result(X: TensorArg, W: TensorArg, row: int, top_k: int, tokens: int) -> Result:
    check.sizes(X, tokens=tokens, K=None)
    check.sizes(W, experts=None, row=row, bytes=None)
    if top_k < 1:
        raise check.refuse(X, "top_k", f"expected at least 1, got {top_k}")
    return Result((tokens * top_k, row), X.dtype)


def _plan(out: TensorArg, X: TensorArg, W: TensorArg, quant_type: int, tokens: int, choices: Choices) -> list[Launch]:
    check.floating(X)
    result = _result(X, W, W.shape[1] if len(W.shape) == 3 else 0, choices.top_k, tokens)
    k = check.row_size(X)
    format = format_of(W, quant_type, W.shape[0] * W.shape[1], k)
    if k % format.length:
        raise X.error(f"expected rows of whole blocks of {format.length} elements of {format.name}, got {X.shape}")
    check.dtype(out, X.dtype)
    check.sizes(out, choices=result.shape[0], row=result.shape[1])
    check.row_size(out)
    return plan(GgmlProblem(out, W, X, format, choices))


@op(returns="out", atol=2.0**-18)
def ggml_moe_a8(
    X: Tensor,
    W: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    quant_type: int,
    row: int,
    top_k: int,
    tokens: int,
    *,
    out: Tensor,
) -> None:
    """Grouped GEMM of choices, sorted by expert: ``out[c] = X[c // top_k] @ W[expert of c].T``.

    Choice c is one of the top_k of token ``c // top_k``. Four slots of `sorted_token_ids` belong to the expert in one
    element of `expert_ids`, as `moe_align_block_size` sorts them for `ggml_moe_get_block_size`. Accumulation is in
    float32, rounded once; X and W are those of `ggml_mul_mat_a8`. A choice of an expert that W does not have gets
    zeros; rows of out that no slot names are left unchanged.

    Args:
        X: [tokens, K] float32, float16 or bfloat16; constant row stride.
        W: [experts, row, bytes of a row] uint8, contiguous; rows may hold more blocks than X has columns for.
        sorted_token_ids: [slots] int32 or int64, contiguous, at least one slot for each choice: choices; a number out
            of range is padding, and so are slots after the last block of four.
        expert_ids: [slots / 4, or more] of the same dtype, contiguous.
        num_tokens_post_padded: one element of the same dtype: the number of leading slots that count.
        quant_type: the type's number, as `ggml_dequantize` lists them.
        row: rows of the weight of an expert.
        top_k: choices of a token.
        tokens: rows of X.
        out: [tokens * top_k, row] of the dtype of X, returned; elements of a row are contiguous.
    """
    blocks = min(-(-int(num_tokens_post_padded) // BLOCK_ROWS), len(sorted_token_ids) // BLOCK_ROWS)
    rows = sorted_token_ids[: max(blocks, 0) * BLOCK_ROWS].long()
    experts = expert_ids.long().repeat_interleave(BLOCK_ROWS)[: len(rows)]
    exists = (rows >= 0) & (rows < len(out))
    _multiply(out, X, W, quant_type, top_k, rows[exists], experts[exists])


@ggml_moe_a8.result
def result_ggml_moe_a8(X: TensorArg, W: TensorArg, row: int, top_k: int, tokens: int) -> Result:
    return _result(X, W, row, top_k, tokens)


@ggml_moe_a8.plan
def plan_ggml_moe_a8(
    X: TensorArg,
    W: TensorArg,
    sorted_token_ids: TensorArg,
    expert_ids: TensorArg,
    num_tokens_post_padded: TensorArg,
    quant_type: int,
    row: int,
    top_k: int,
    tokens: int,
    out: TensorArg,
) -> list[Launch]:
    _result(X, W, row, top_k, tokens)
    check.index(sorted_token_ids, places=None)
    check.scalar(num_tokens_post_padded, sorted_token_ids.dtype)
    check.sizes(expert_ids, blocks=None)
    check.at_least(sorted_token_ids, sorted_token_ids.dtype, tokens * top_k)
    check.at_least(expert_ids, sorted_token_ids.dtype, sorted_token_ids.numel // BLOCK_ROWS)
    return _plan(out, X, W, quant_type, tokens, Choices(sorted_token_ids, expert_ids, W.shape[0], top_k))


@ggml_moe_a8.example
def example_ggml_moe_a8(
    make: Any, *, num_tokens: int = 16, dtype: str = "bfloat16", quant_type: Literal[12, 10] = 12
) -> tuple[Any, ...]:
    """The choices of each expert are followed by three padding slots; expert 4 is out of range for W."""
    num_experts, top_k, row, k = 4, 2, 40, 256
    x = make.randn(num_tokens, k, dtype=dtype)
    blocks = num_tokens * top_k
    places = make.full(4 * blocks, value=blocks, dtype="int32")
    places = make.strewn(places, 4, make.permutation(blocks, blocks, dtype="int32"))
    return (
        x,
        random_weight(make, quant_type, num_experts, row, k),
        places,
        make.randint(0, num_experts + 1, blocks, dtype="int32"),
        make.full(1, value=4 * blocks, dtype="int32"),
        quant_type,
        row,
        top_k,
        num_tokens,
        make.full(blocks, row, value=0.0, dtype=dtype),
    )


@op(returns="out", atol=2.0**-18)
def ggml_moe_a8_vec(
    X: Tensor, W: Tensor, topk_ids: Tensor, top_k: int, quant_type: int, row: int, tokens: int, *, out: Tensor
) -> None:
    """Grouped GEMM of few tokens with their experts: ``out[t * top_k + j] = X[t] @ W[topk_ids[t * top_k + j]].T``.

    As `ggml_moe_a8`, without sorted lists. A choice of an expert that W does not have gets zeros.

    Args:
        X: [tokens, K] float32, float16 or bfloat16; constant row stride.
        W: [experts, row, bytes of a row] uint8, contiguous; rows may hold more blocks than X has columns for.
        topk_ids: tokens * top_k elements in any shape, int32 or int64, contiguous: the experts of each token.
        top_k: choices of a token.
        quant_type: the type's number, as `ggml_dequantize` lists them.
        row: rows of the weight of an expert.
        tokens: rows of X.
        out: [tokens * top_k, row] of the dtype of X, returned; elements of a row are contiguous.
    """
    rows = torch.arange(len(out), dtype=torch.int64, device=out.device)
    _multiply(out, X, W, quant_type, top_k, rows, topk_ids.reshape(-1).long())


@ggml_moe_a8_vec.result
def result_ggml_moe_a8_vec(X: TensorArg, W: TensorArg, top_k: int, row: int, tokens: int) -> Result:
    return _result(X, W, row, top_k, tokens)


@ggml_moe_a8_vec.plan
def plan_ggml_moe_a8_vec(
    X: TensorArg,
    W: TensorArg,
    topk_ids: TensorArg,
    top_k: int,
    quant_type: int,
    row: int,
    tokens: int,
    out: TensorArg,
) -> list[Launch]:
    _result(X, W, row, top_k, tokens)
    check.dtype(topk_ids, int32, int64)
    check.per_row(topk_ids, topk_ids.dtype, tokens * top_k)
    return _plan(out, X, W, quant_type, tokens, Choices(topk_ids, None, W.shape[0], top_k))


@ggml_moe_a8_vec.bad_indices
def bad_indices_ggml_moe_a8_vec(W: Tensor, topk_ids: Tensor) -> dict[str, Tensor]:
    return {"topk_ids": (topk_ids < 0) | (topk_ids >= len(W))}


@ggml_moe_a8_vec.example
def example_ggml_moe_a8_vec(
    make: Any, *, num_tokens: int = 4, dtype: str = "bfloat16", quant_type: Literal[12, 10] = 12
) -> tuple[Any, ...]:
    num_experts, top_k, row, k = 4, 2, 40, 256
    return (
        make.randn(num_tokens, k, dtype=dtype),
        random_weight(make, quant_type, num_experts, row, k),
        make.randint(0, num_experts, num_tokens, top_k, dtype="int32"),
        top_k,
        quant_type,
        row,
        num_tokens,
        make.empty(num_tokens * top_k, row, dtype=dtype),
    )
