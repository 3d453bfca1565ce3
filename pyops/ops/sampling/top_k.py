"""Where the largest of each row are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import float32, int32
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["top_k_per_row_decode", "top_k_per_row_prefill"]

_top_k_per_row = Kernel("sampling/top_k_per_row.cu")
_top_k_short_row = Kernel("sampling/top_k_short_row.cu")
_SHORT_ROW_THREADS = 512  # that hold a row in registers: fewer than 1024 if that many do
_MAX_WAVES = 4  # vectors of each
_MAX_STAGED = 4096  # positions for which the histograms' memory has room
_SHORT_ROW_BLOCKS = 3  # of 512 threads on a multiprocessor
_MAX_CANDIDATES = 23  # of a thread
_SHORT = 20480  # elements: with more, a block is worth 1024 threads
_MIN_PER_BLOCK = 8192  # elements for which another block of a cluster is not worth its barriers
_MAX_COLUMNS = 2**30
_OWN_SHARED = 26 * 1024  # the kernel's histograms and what else it keeps in shared memory


@op(out="indices", ulps=0)
def top_k_per_row_prefill(
    logits: Tensor,
    rowStarts: Tensor,
    rowEnds: Tensor,
    indices: Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """Positions of the topK largest of each segment ``logits[r, rowStarts[r]:rowEnds[r]]``, from left to right.

    Positions count from the segment's start. Of equal values the first are taken, so that the result is determined; a
    segment not longer than topK gives 0, 1, ... and then -1. Values are ordered by their bits: -NaN, -inf, ..., -0, 0,
    ..., inf, NaN. A segment is cut to the columns that there are.

    Args:
        logits: [at least numRows, columns] float32, of any strides.
        rowStarts, rowEnds: [at least numRows] int32, contiguous.
        indices: [numRows, topK] int32, contiguous, written.
        numRows: rows that count.
        stride0, stride1: those of logits.
        topK: 0 or more.
    """
    starts = rowStarts[:numRows].long().clamp(0, logits.shape[1])
    _select(logits, starts, rowEnds[:numRows].long(), indices, numRows, topK)


def _select(logits: Tensor, starts: Tensor, ends: Tensor, indices: Tensor, numRows: int, topK: int) -> None:
    """What both ops write."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    starts, ends = starts[:, None], ends.clamp(max=logits.shape[1])[:, None]
    bits = logits[:numRows].view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    order = torch.where((columns >= starts) & (columns < ends), order, -(2**40))
    best = order.sort(dim=-1, descending=True, stable=True)[1][:, :topK].sort(dim=-1)[0] - starts
    lengths, places = ends - starts, torch.arange(topK, device=logits.device)
    all_of_it = places.where(places < lengths, -1)
    best = torch.nn.functional.pad(best, (0, topK - best.shape[1]))
    indices.copy_(torch.where(lengths <= topK, all_of_it, best))


@top_k_per_row_prefill.plan
def plan_top_k_per_row_prefill(
    logits: TensorArg,
    rowStarts: TensorArg,
    rowEnds: TensorArg,
    indices: TensorArg,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> list[Launch]:
    for bounds in (rowStarts, rowEnds):
        _per_row(bounds, numRows)
    return _launches(logits, indices, numRows, (stride0, stride1), topK, {"next_n": 1, "seq_lens": 0})


@top_k_per_row_prefill.bad_indices
def bad_indices_top_k_per_row_prefill(
    logits: Tensor, rowStarts: Tensor, rowEnds: Tensor, numRows: int
) -> dict[str, Tensor]:
    bounds = {"rowStarts": rowStarts[:numRows], "rowEnds": rowEnds[:numRows]}
    return {name: (values < 0) | (values > logits.shape[1]) for name, values in bounds.items()}


@top_k_per_row_prefill.example
def example_top_k_per_row_prefill(
    make: Any, *, num_tokens: int = 16, topK: Literal[20, 2048, 5000] = 20, vocab_size: int = 4000
) -> tuple[Any, ...]:
    logits = make.randn(num_tokens, vocab_size, dtype="float32")
    starts = make.randint(0, vocab_size // 2 + 1, num_tokens, dtype="int32")
    ends = make.randint(vocab_size // 2, vocab_size + 1, num_tokens, dtype="int32")
    return logits, starts, ends, make.empty(num_tokens, topK, dtype="int32"), num_tokens, vocab_size, 1, topK


@op(out="indices", ulps=0)
def top_k_per_row_decode(
    logits: Tensor, next_n: int, seq_lens: Tensor, indices: Tensor, numRows: int, stride0: int, stride1: int, topK: int
) -> None:
    """`top_k_per_row_prefill` of ``logits[r, : seq_lens[r // next_n] - next_n + r % next_n + 1]``.

    Args:
        logits: [at least numRows, columns] float32, of any strides.
        next_n: rows of a sequence, one for each of its last tokens; 1 or more.
        seq_lens: [at least numRows / next_n] int32, contiguous.
        indices: [numRows, topK] int32, contiguous, written.
        numRows: rows that count.
        stride0, stride1: those of logits.
        topK: 0 or more.
    """
    rows = torch.arange(numRows, device=logits.device)
    ends = seq_lens[rows // next_n].long() - next_n + rows % next_n + 1
    _select(logits, torch.zeros_like(ends), ends, indices, numRows, topK)


@top_k_per_row_decode.plan
def plan_top_k_per_row_decode(
    logits: TensorArg,
    next_n: int,
    seq_lens: TensorArg,
    indices: TensorArg,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> list[Launch]:
    if not 1 <= next_n < 2**31:
        raise check.refuse(logits, "next_n", f"expected 1 to 2^31 - 1, got {next_n}")
    _per_row(seq_lens, -(-numRows // next_n))
    return _launches(logits, indices, numRows, (stride0, stride1), topK, {"rowStarts": 0, "rowEnds": 0})


@top_k_per_row_decode.bad_indices
def bad_indices_top_k_per_row_decode(logits: Tensor, next_n: int, seq_lens: Tensor, numRows: int) -> dict[str, Tensor]:
    used = seq_lens[: -(-numRows // next_n)]
    return {"seq_lens": (used < 0) | (used > logits.shape[1])}


@top_k_per_row_decode.example
def example_top_k_per_row_decode(
    make: Any,
    *,
    num_tokens: int = 16,
    topK: Literal[20, 2048, 5000] = 20,
    next_n: Literal[1, 2] = 1,
    vocab_size: int = 4000,
) -> tuple[Any, ...]:
    logits = make.randn(num_tokens, vocab_size, dtype="float32")
    lengths = make.randint(vocab_size // 2, vocab_size + 1, -(-num_tokens // next_n), dtype="int32")
    indices = make.empty(num_tokens, topK, dtype="int32")
    return logits, next_n, lengths, indices, num_tokens, vocab_size, 1, topK


def _per_row(arg: TensorArg, min_rows: int) -> None:
    """`arg` holds an int32 for each of `least` rows, one after another."""
    check.sizes(arg, num_rows=None)
    if arg.shape[0] < min_rows:
        raise arg.error(f"expected at least {min_rows} elements, got shape {arg.shape}")
    check.dtype(arg, int32)
    check.contiguous(arg)


def _launches(
    logits: TensorArg, indices: TensorArg, numRows: int, strides: tuple[int, int], topK: int, absent: dict[str, int]
) -> list[Launch]:
    """The launch of top_k_short_row.cu or top_k_per_row.cu."""
    check.dtype(logits, float32)
    check.sizes(logits, num_rows=None, columns=None)
    num_rows, columns = logits.shape
    if not 0 <= numRows <= num_rows:
        raise check.refuse(logits, "numRows", f"expected 0 to {num_rows}, as many as logits has, got {numRows}")
    if any(size > 1 and given != own for given, own, size in zip(strides, logits.strides, logits.shape, strict=True)):
        raise logits.error(f"expected strides {strides} as given, got {logits.strides}")
    if topK < 0:
        raise check.refuse(logits, "topK", f"expected 0 or more, got {topK}")
    if columns > _MAX_COLUMNS:
        raise logits.error(f"expected at most {_MAX_COLUMNS} columns, got {columns}")
    check.shape(indices, int32, numRows=numRows, topK=topK)

    device = logits.device
    vec_size = 4 if strides[1] == 1 or columns <= 1 else 1
    # A row that begins anywhere has a vector more.
    vectors = -(-columns // 4) + (logits.alignment % 16 > 0 or strides[0] % 4 > 0)
    if vec_size == 4 and vectors <= _MAX_WAVES * 1024 and topK <= _MAX_STAGED:
        num_threads = _SHORT_ROW_THREADS if vectors <= _MAX_WAVES * _SHORT_ROW_THREADS else 1024
        return [
            _top_k_short_row(
                DECODE="rowStarts" in absent,
                ROUNDS=max(1, -(-vectors // num_threads)),
                NUM_THREADS=num_threads,
                MIN_BLOCKS=_SHORT_ROW_BLOCKS * 512 // num_threads,
            ).launch(grid=numRows if topK else 0, block=num_threads, columns=columns, **absent)
        ]
    # As many blocks to a row as leave no multiprocessor idle. Eight find no room where most are taken.
    cluster = 1
    while (
        cluster < device.cluster
        and 2 * cluster * numRows <= device.multiprocessors * (1.0 if cluster < 4 else 0.75)
        and cluster * _MIN_PER_BLOCK < columns
    ):
        cluster *= 2
    piece = -(-columns // cluster) + 2 * vec_size
    num_threads = 1024 if piece > _SHORT else 512
    # Of 8 bytes, or half as many where a whole piece fits, whose places need no telling.
    fitting = (device.shared_memory - _OWN_SHARED) // (8 * num_threads) - 1
    capacity = min(-(-piece // (2 * num_threads)), fitting, _MAX_CANDIDATES)
    return [
        _top_k_per_row(
            DECODE="rowStarts" in absent,
            CLUSTER=cluster,
            VEC_SIZE=vec_size,
            NUM_THREADS=num_threads,
        ).launch(
            grid=(numRows if topK else 0, cluster),
            block=num_threads,
            shared=8 * (capacity + 1) * num_threads,
            columns=columns,
            capacity=capacity,
            **absent,
        )
    ]
