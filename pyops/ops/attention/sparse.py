"""Sparse patterns of attention, as blocks of keys for each block of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "convert_vertical_slash_indexes",
    "convert_vertical_slash_indexes_mergehead",
]

_convert_vertical_slash_indexes = Kernel("attention/convert_vertical_slash_indexes.cu")
_NUM_THREADS = 64  # threads of a block; a thread has a row of blocks; other numbers have not been timed


def convert_vertical_slash_indexes(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    vertical_indexes: Tensor,
    slash_indexes: Tensor,
    context_size: int,
    block_size_M: int,
    block_size_N: int,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`convert_vertical_slash_indexes_mergehead` into new (block_count, block_offset, column_count, column_index)."""
    outputs: tuple[Any, Any, Any, Any] = convert_vertical_slash_indexes_mergehead(
        q_seqlens,
        kv_seqlens,
        vertical_indexes,
        slash_indexes,
        None,
        None,
        context_size,
        block_size_M,
        block_size_N,
        causal,
    )
    return outputs


@op(returns=("block_count", "block_offset", "column_count", "column_index"), ulps=0)
def convert_vertical_slash_indexes_mergehead(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    vertical_indexes: Tensor,
    slash_indexes: Tensor,
    vertical_indices_count: Tensor | None,
    slash_indices_count: Tensor | None,
    context_size: int,
    block_size_M: int,
    block_size_N: int,
    causal: bool = True,
    *,
    block_count: Tensor,
    block_offset: Tensor,
    column_count: Tensor,
    column_index: Tensor,
) -> None:
    """Vertical lines and diagonals of an attention matrix, as blocks and single columns of each row of blocks.

    A row of blocks holds block_size_M queries, up to query ``end``. Its base is ``end + kv_len - q_len`` if `causal`
    (the keys end where the queries do), else ``end + kv_len`` (the keys are an earlier chunk). A slash s adds the key
    range ``[e - block_size_M, e)`` with ``e = max(base - s, block_size_M)``. Ranges are merged if they meet or the gap
    between them is less than block_size_M; a merged range grows by whole block_size_M. Each range is cut into blocks of
    block_size_N keys, and `block_offset` gets the first key of each block. `column_index` gets the verticals that lie
    in no range: if `causal`, only those before the last range (MInference, Jiang et al. 2024, arXiv:2407.02490).
    Ignored are negative slashes, verticals outside the keys, and slashes at or after the base, unless the last slash of
    all lies at the base.

    Args:
        q_seqlens, kv_seqlens: [batch] int32, queries and keys of each sequence.
        vertical_indexes: [batch, num_heads, num_verticals] int32, ascending columns.
        slash_indexes: [batch, num_heads, num_slashes] int32, descending distances of diagonals.
        vertical_indices_count, slash_indices_count: [num_heads] int32, number of leading indices of each head
            that count; None for all.
        context_size: queries of a sequence, at most.
        block_size_M, block_size_N: queries and keys of a block; block_size_M is at most block_size_N.
        causal: whether the keys end where the queries do.
        block_count, column_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They
            are zero for rows after the queries of a sequence.
        block_offset: [batch, num_heads, rows, num_slashes] int32; zeros after the blocks of a row.
        column_index: [batch, num_heads, rows, num_verticals] int32; zeros after the columns of a row.

    All tensors are contiguous. The last four are written and returned, and new unless given.
    """
    batch, num_heads, num_rows = block_count.shape
    for tensor in (block_count, block_offset, column_count, column_index):
        tensor.zero_()
    q_lens, kv_lens = q_seqlens.tolist(), kv_seqlens.tolist()
    all_verticals, all_slashes = vertical_indexes.tolist(), slash_indexes.tolist()
    for b, h in ((b, h) for b in range(batch) for h in range(num_heads)):
        verticals, slashes = all_verticals[b][h], all_slashes[b][h]
        if vertical_indices_count is not None:
            verticals = verticals[: max(0, int(vertical_indices_count[h]))]
        if slash_indices_count is not None:
            slashes = slashes[: max(0, int(slash_indices_count[h]))]
        for row in range(min(num_rows, -(-q_lens[b] // block_size_M))):
            blocks, columns = _row(
                verticals, slashes, row * block_size_M, q_lens[b], kv_lens[b], block_size_M, block_size_N, causal
            )
            block_count[b, h, row] = len(blocks)
            column_count[b, h, row] = len(columns)
            block_offset[b, h, row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int64, device=block_offset.device)
            column_index[b, h, row, : len(columns)] = torch.tensor(
                columns, dtype=torch.int64, device=column_index.device
            )


def _row(
    verticals: list[int],
    slashes: list[int],
    start: int,
    q_len: int,
    kv_len: int,
    block_size_M: int,
    block_size_N: int,
    causal: bool,
) -> tuple[list[int], list[int]]:
    """(first keys of the blocks, columns) of the row of blocks that begins at query `start`."""
    columns = [v for v in verticals if 0 <= v < kv_len][::-1]  # reversed: pop() takes the smallest
    slashes = [s for s in slashes if s >= 0][::-1]
    base = start + block_size_M + kv_len - (q_len if causal else 0)
    slash = base + 1
    while slashes and slash >= base:
        slash = slashes.pop()
    low = base if causal else kv_len
    high = low + block_size_N
    if slash <= base:
        high = max(base - slash, block_size_M)
        low = high - block_size_M
    blocks: list[int] = []
    found: list[int] = []
    while True:
        if columns and columns[-1] < high:
            column = columns.pop()
            if column < low:
                found.append(column)
        elif slashes:
            end = max(base - slashes.pop(), block_size_M)
            if end > high + block_size_M:
                blocks += range(low, min(high, kv_len), block_size_N)
                low, high = end - block_size_M, end
            elif end > high:
                high += block_size_M
        else:
            break
    blocks += range(low, min(high, kv_len), block_size_N)
    return [key for key in blocks if key >= 0], found if causal else found + columns[::-1]


@convert_vertical_slash_indexes_mergehead.result
def result_convert_vertical_slash_indexes_mergehead(
    vertical_indexes: TensorArg, slash_indexes: TensorArg, context_size: int, block_size_M: int, block_size_N: int
) -> tuple[Result, ...]:
    if context_size < 0:
        raise check.refuse(vertical_indexes, "context_size", f"expected at least 0, got {context_size}")
    if not 0 < block_size_M <= block_size_N:
        message = f"expected 1 to block_size_N={block_size_N}, got {block_size_M}"
        raise check.refuse(vertical_indexes, "block_size_M", message)
    for arg in (vertical_indexes, slash_indexes):
        if len(arg.shape) != 3 or not arg.shape[-1]:
            raise arg.error(f"expected shape (batch, num_heads, at least 1), got {arg.shape}")
    *heads, num_verticals = vertical_indexes.shape
    rows = (*heads, -(-context_size // block_size_M))
    shapes = rows, (*rows, slash_indexes.shape[-1]), rows, (*rows, num_verticals)
    return tuple(Result(shape, int32) for shape in shapes)


@convert_vertical_slash_indexes_mergehead.plan
def plan_convert_vertical_slash_indexes_mergehead(
    q_seqlens: TensorArg,
    kv_seqlens: TensorArg,
    vertical_indexes: TensorArg,
    slash_indexes: TensorArg,
    vertical_indices_count: TensorArg | None,
    slash_indices_count: TensorArg | None,
    context_size: int,
    block_size_M: int,
    block_size_N: int,
    block_count: TensorArg,
    block_offset: TensorArg,
    column_count: TensorArg,
    column_index: TensorArg,
) -> Launch:
    results = result_convert_vertical_slash_indexes_mergehead(
        vertical_indexes, slash_indexes, context_size, block_size_M, block_size_N
    )
    batch, num_heads, rows = results[0].shape
    num_verticals, num_slashes = vertical_indexes.shape[-1], slash_indexes.shape[-1]
    heads = {"batch": batch, "num_heads": num_heads}
    check.shape(vertical_indexes, int32, **heads, num_verticals=num_verticals)
    check.shape(slash_indexes, int32, **heads, num_slashes=num_slashes)
    for lengths in (q_seqlens, kv_seqlens):
        check.shape(lengths, int32, batch=batch)
    for count in (vertical_indices_count, slash_indices_count):
        check.shape(count, int32, num_heads=num_heads)
    for count in (block_count, column_count):
        check.shape(count, int32, **heads, rows=rows)
    check.shape(block_offset, int32, **heads, rows=rows, num_slashes=num_slashes)
    check.shape(column_index, int32, **heads, rows=rows, num_verticals=num_verticals)
    return _convert_vertical_slash_indexes(NUM_THREADS=_NUM_THREADS).launch(
        grid=(batch * num_heads, -(-rows // _NUM_THREADS)),
        block=_NUM_THREADS,
        num_heads=num_heads,
        num_rows=rows,
        num_verticals=num_verticals,
        num_slashes=num_slashes,
    )


@convert_vertical_slash_indexes_mergehead.bad_indices
def bad_indices_convert_vertical_slash_indexes_mergehead(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    vertical_indexes: Tensor,
    slash_indexes: Tensor,
    vertical_indices_count: Tensor | None,
    slash_indices_count: Tensor | None,
    context_size: int,
) -> dict[str, Tensor]:
    found = {
        "q_seqlens": (q_seqlens < 0) | (q_seqlens > context_size),
        "kv_seqlens": kv_seqlens < 0,
        "vertical_indexes": (vertical_indexes < 0) | (vertical_indexes >= kv_seqlens[:, None, None]),
        "slash_indexes": slash_indexes < 0,
    }
    counts = {"vertical": vertical_indices_count, "slash": slash_indices_count}
    for kind, count in counts.items():
        if count is not None:
            indexes = found[f"{kind}_indexes"]
            indexes &= torch.arange(indexes.shape[-1], dtype=torch.int64, device=count.device) < count[:, None]
            found[f"{kind}_indices_count"] = (count < 0) | (count > indexes.shape[-1])
    return found


@convert_vertical_slash_indexes_mergehead.example
def example_convert_vertical_slash_indexes_mergehead(
    make: Any, *, num_tokens: int = 512, causal: bool = True, with_counts: bool = True
) -> tuple[Any, ...]:
    num_heads, num_verticals, num_slashes, block_size, context_size = 3, 40, 24, 64, 32 * num_tokens
    rows = -(-context_size // block_size)
    block_offset, column_index = (
        make.empty(2, num_heads, rows, size, dtype="int32") for size in (num_slashes, num_verticals)
    )
    block_count, column_count = (make.empty(2, num_heads, rows, dtype="int32") for _ in range(2))
    lengths = (context_size, context_size * 2 // 3)

    def indices(size: int) -> list[list[list[int]]]:
        """[sequence][head][size], ascending."""
        return [
            [sorted((i * i * 97 + 31 * i * head) % max(1, length) for i in range(size)) for head in range(num_heads)]
            for length in lengths
        ]

    slashes = [[head[::-1] for head in sequence] for sequence in indices(num_slashes)]
    counts = [make.values([size, size // 2, 1], dtype="int32") for size in (num_verticals, num_slashes)]
    return (
        *(make.values(list(lengths), dtype="int32") for _ in range(2)),
        make.values(indices(num_verticals), dtype="int32"),
        make.values(slashes, dtype="int32"),
        *(counts if with_counts else (None, None)),
        *(context_size, block_size, block_size, causal),
        *(block_count, block_offset, column_count, column_index),
    )
