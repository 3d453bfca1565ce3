"""Embedding of tokens, with the vocabulary divided among ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from .._shared import copied_rows
from .._shared.copied_rows import MOVED, check_matrix

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["vocab_parallel_embedding"]

_vocab_parallel_embedding = Kernel("embedding/vocab_parallel_embedding.cu")


@op(out="out", ulps=0)
def vocab_parallel_embedding(
    out: Tensor,
    input_ids: Tensor,
    weight: Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> None:
    """The rows of this rank's part of an embedding table, bit for bit, and zeros for tokens of other ranks.

    The sum of the outputs of all ranks is the embedding. `weight` has rows for the tokens of this rank's range of the
    original vocabulary, then rows of padding, then rows for its range of added tokens. A token in both ranges is one of
    the original vocabulary. Modelled on vLLM's op of this name.

    Args:
        out: [num_tokens, hidden_size] of the dtype of `weight`, written; constant row stride.
        input_ids: [num_tokens] int32 or int64, contiguous; any values are allowed.
        weight: [rows, hidden_size], floats, float8 or integers; constant row stride. At least as many rows as both
            ranges and the padding have.
        org_vocab_start_index, org_vocab_end_index: this rank's tokens of the original vocabulary; the end is exclusive.
        num_org_vocab_padding: rows of padding after them.
        added_vocab_start_index, added_vocab_end_index: this rank's added tokens, likewise; an empty range for none.
    """
    ids = input_ids.long()
    org = (ids >= org_vocab_start_index) & (ids < org_vocab_end_index)
    added = (ids >= added_vocab_start_index) & (ids < added_vocab_end_index)
    first_added = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    row = torch.where(org, ids - org_vocab_start_index, ids - added_vocab_start_index + first_added)
    size = weight.element_size()
    table = weight.contiguous().view(torch.uint8)  # torch cannot index float8
    rows = table.new_zeros(len(ids), weight.shape[1] * size)
    exists = org | added
    rows[exists] = table[row[exists]]
    out.copy_(rows.view(weight.dtype))


@vocab_parallel_embedding.result
def result_vocab_parallel_embedding(input_ids: TensorArg, weight: TensorArg) -> Result:
    check.index(input_ids, num_tokens=None)
    _, hidden_size = check_matrix(weight, *MOVED)
    return Result((input_ids.shape[0], hidden_size), weight.dtype)


@vocab_parallel_embedding.plan
def plan_vocab_parallel_embedding(
    out: TensorArg,
    input_ids: TensorArg,
    weight: TensorArg,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> Launch:
    (num_tokens, hidden_size), *_ = result_vocab_parallel_embedding(input_ids, weight)
    check.contiguous(input_ids)
    check_matrix(out, weight.dtype)
    check.sizes(out, num_tokens=num_tokens, hidden_size=hidden_size)
    num_org = org_vocab_end_index - org_vocab_start_index
    num_added = added_vocab_end_index - added_vocab_start_index
    for name, size in (
        ("org_vocab_end_index", num_org),
        ("num_org_vocab_padding", num_org_vocab_padding),
        ("added_vocab_end_index", num_added),
    ):
        if size < 0:
            raise check.refuse(weight, name, f"expected at least 0 rows, got {size}")
    needed = num_org + num_org_vocab_padding + num_added
    if weight.shape[0] < needed:
        raise weight.error(f"expected at least {needed} rows for the tokens of this rank, got shape {weight.shape}")
    return copied_rows.gather(_vocab_parallel_embedding, out, weight, {}, index_t=input_ids.dtype)


@vocab_parallel_embedding.bad_indices
def bad_indices_vocab_parallel_embedding(input_ids: Tensor) -> dict[str, Tensor]:
    """Tokens that no rank has; the others may have any token that is not negative."""
    return {"input_ids": input_ids < 0}


@vocab_parallel_embedding.traffic
def traffic_vocab_parallel_embedding(out: TensorArg, input_ids: TensorArg) -> int:
    """The bytes if every token is one of this rank."""
    return input_ids.nbytes + 2 * out.nbytes


@vocab_parallel_embedding.example
def example_vocab_parallel_embedding(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 64] = 4096,
    dtype: str = "bfloat16",
    index_dtype: Literal["int64", "int32"] = "int64",
) -> tuple[Any, ...]:
    """The second of two ranks: tokens 1000 to 1899 and 2000 to 2007, of 2008."""
    return (
        make.empty(num_tokens, hidden_size, dtype=dtype),
        make.randint(0, 2008, num_tokens, dtype=index_dtype),
        make.randn(1024, hidden_size, dtype=dtype),
        *(1000, 1900, 100, 2000, 2008),
    )
