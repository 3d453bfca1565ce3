"""The ids of n-gram embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32, int64
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ngram_compute_n_gram_ids"]

_ngram_compute_n_gram_ids = Kernel("embedding/ngram_compute_n_gram_ids.cu")
_NUM_THREADS = 256  # threads of a block
_MAX_N, _MAX_K = 32, 1024  # longest n-gram: a thread reads its tokens in an unrolled loop; most ids of a length


@op(inout="n_gram_ids", ulps=0)
def ngram_compute_n_gram_ids(
    ne_n: int,
    ne_k: int,
    ne_weights: Tensor,
    ne_mods: Tensor,
    exclusive_ne_embedder_size_sums: Tensor,
    exclusive_req_len_sums: Tensor,
    ne_token_table: Tensor,
    row_indices: Tensor,
    column_starts: Tensor,
    n_gram_ids: Tensor,
) -> None:
    """The hashed ids of the n-grams that end with each token, for the embedding of LongCat-Flash.

    An n-gram of n tokens, n = 2 ... ne_n, has ne_k ids. The id number ``c = (n - 2) * ne_k + k`` of a token is ``s[c] +
    h``, where s is `exclusive_ne_embedder_size_sums` and h the sum of ``table[row, column - j] * w[n - 2, k, j] mod m``
    over j = 0 ... n - 1, again mod m, with ``m = ne_mods[n - 2, k]``; mod is never negative. The sum ends before the
    first j with ``column - j < 0`` or a negative entry of the table, which stands for a token that no n-gram contains.

    Request r has the tokens from ``exclusive_req_len_sums[r]`` on, before the next request's; token i of it lies at
    ``row = row_indices[r]`` and ``column = column_starts[r] + i`` of the table. Ids are left unchanged for tokens
    before the first and after the last request, for rows and columns outside the table, and where m is below 1. Sums
    that do not ascend give any ids. Modelled on vLLM's op of this name.

    Args:
        ne_n: tokens of the longest n-gram, 2 to 32; ne_k: ids of each n-gram, 1 to 1024.
        ne_weights: [ne_n - 1, ne_k, ne_n] int32, contiguous: w.
        ne_mods: [ne_n - 1, ne_k] int32, contiguous: m, the rows of an embedding table.
        exclusive_ne_embedder_size_sums: [(ne_n - 1) * ne_k + 1] int32, contiguous: s. The last is not read. The sum
            with h wraps around in 32 bits.
        exclusive_req_len_sums: [num_requests + 1] int32, contiguous, ascending from 0.
        ne_token_table: [rows, columns] int32; constant row stride.
        row_indices: [num_requests] int64, contiguous.
        column_starts: [num_requests] int32, contiguous: the column of each request's first token.
        n_gram_ids: [num_tokens, (ne_n - 1) * ne_k] int32, contiguous, written.
    """
    table_rows, table_columns = ne_token_table.shape
    num_requests, device = len(row_indices), n_gram_ids.device
    token = torch.arange(len(n_gram_ids), dtype=torch.int64, device=device)
    request = torch.searchsorted(exclusive_req_len_sums.long(), token, right=True) - 1
    token = token[(request >= 0) & (request < num_requests)]
    request = request[token]
    row = row_indices[request]
    column = column_starts[request].long() + token - exclusive_req_len_sums[request]
    inside = (row >= 0) & (row < table_rows) & (column >= 0) & (column < table_columns)
    token, row, column = token[inside], row[inside], column[inside]
    weights, mods = ne_weights.long(), ne_mods.long()
    for n in range(2, ne_n + 1):
        for k in range(ne_k):
            mod, config = int(mods[n - 2, k]), (n - 2) * ne_k + k
            if mod < 1:
                continue
            total, goes_on = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)
            for j in range(n):
                entry = ne_token_table[row, (column - j).clamp(min=0)].long()
                goes_on &= (column >= j) & (entry >= 0)
                total += torch.where(goes_on, entry * weights[n - 2, k, j] % mod, 0)
            ids = total % mod + exclusive_ne_embedder_size_sums[config].long()
            n_gram_ids[token, config] = ((ids + 2**31) % 2**32 - 2**31).int()


@ngram_compute_n_gram_ids.plan
def plan_ngram_compute_n_gram_ids(
    ne_n: int,
    ne_k: int,
    ne_weights: TensorArg,
    ne_mods: TensorArg,
    exclusive_ne_embedder_size_sums: TensorArg,
    exclusive_req_len_sums: TensorArg,
    ne_token_table: TensorArg,
    row_indices: TensorArg,
    column_starts: TensorArg,
    n_gram_ids: TensorArg,
) -> Launch:
    for name, value, least, most in (("ne_n", ne_n, 2, _MAX_N), ("ne_k", ne_k, 1, _MAX_K)):
        if not least <= value <= most:
            raise check.refuse(n_gram_ids, name, f"expected {least} to {most}, got {value}")
    configs = (ne_n - 1) * ne_k
    check.shape(ne_weights, int32, lengths=ne_n - 1, ne_k=ne_k, ne_n=ne_n)
    check.shape(ne_mods, int32, lengths=ne_n - 1, ne_k=ne_k)
    check.shape(exclusive_ne_embedder_size_sums, int32, num_sums=configs + 1)
    check.sizes(row_indices, num_requests=None)
    num_requests = row_indices.shape[0]
    check.shape(row_indices, int64, num_requests=num_requests)
    check.shape(column_starts, int32, num_requests=num_requests)
    check.shape(exclusive_req_len_sums, int32, num_sums=num_requests + 1)
    check.sizes(ne_token_table, rows=None, columns=None)
    check.dtype(ne_token_table, int32)
    check.row_size(ne_token_table)
    check.sizes(n_gram_ids, num_tokens=None, num_ids=configs)
    num_tokens = n_gram_ids.shape[0]
    check.shape(n_gram_ids, int32, num_tokens=num_tokens, num_ids=configs)
    return _ngram_compute_n_gram_ids(NE_N=ne_n, NE_K=ne_k, NUM_THREADS=_NUM_THREADS).launch(
        grid=-(-num_tokens * configs // _NUM_THREADS),
        block=_NUM_THREADS,
        num_tokens=num_tokens,
        num_requests=num_requests,
        table_rows=ne_token_table.shape[0],
        table_columns=ne_token_table.shape[1],
        table_stride=check.row_stride(ne_token_table),
    )


@ngram_compute_n_gram_ids.bad_indices
def bad_indices_ngram_compute_n_gram_ids(
    exclusive_req_len_sums: Tensor, ne_token_table: Tensor, row_indices: Tensor, column_starts: Tensor
) -> dict[str, Tensor]:
    """Rows and columns outside the table, of requests with tokens."""
    lengths = exclusive_req_len_sums[1:].long() - exclusive_req_len_sums[:-1]
    starts, used = column_starts.long(), lengths > 0
    rows, columns = ne_token_table.shape
    return {
        "row_indices": used & ((row_indices < 0) | (row_indices >= rows)),
        "column_starts": used & ((starts < 0) | (starts + lengths > columns)),
    }


@ngram_compute_n_gram_ids.traffic
def traffic_ngram_compute_n_gram_ids(n_gram_ids: TensorArg) -> int:
    """An entry of the table for each token, and its ids."""
    return 4 * n_gram_ids.shape[0] + n_gram_ids.nbytes


@ngram_compute_n_gram_ids.example
def example_ngram_compute_n_gram_ids(
    make: Any, *, num_tokens: int = 16, ne_n: Literal[4, 2] = 4, ne_k: Literal[4, 1] = 4
) -> tuple[Any, ...]:
    """Two requests with half of the tokens each."""
    configs, columns = (ne_n - 1) * ne_k, num_tokens + 8
    return (
        *(ne_n, ne_k),
        make.randint(1, 2**31 - 1, ne_n - 1, ne_k, ne_n, dtype="int32"),
        make.randint(100_000, 2**20, ne_n - 1, ne_k, dtype="int32"),
        make.values([2**20 * config for config in range(configs + 1)], dtype="int32"),
        make.values([0, num_tokens // 2, num_tokens], dtype="int32"),
        make.randint(-1, 131_072, 4, columns, dtype="int32"),
        make.values([2, 0], dtype="int64"),
        make.values([0, 3], dtype="int32"),
        make.empty(num_tokens, configs, dtype="int32"),
    )
