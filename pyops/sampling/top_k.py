"""Where the largest of each row are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from .._core import check
from .._core.dtypes import float32, int32
from .._core.kernel import Kernel, Launch, Scratch
from .._core.lazy import torch
from .._core.op import op
from .._core.tensor import Arg

if TYPE_CHECKING:
    from torch import Tensor

    from .._core.device import Device

__all__ = ["top_k_per_row_decode", "top_k_per_row_prefill"]

_top_k_per_row = Kernel("sampling/top_k_per_row.cu")
_PIECE_SIZE = 16384  # 64 KiB: three blocks of so much fit on a multiprocessor
_MOST_OF_BLOCK = 16384, 32768  # elements of a row for a block that shares a multiprocessor, or has it alone
_LEAST_OF_BLOCK = 4096  # elements for which a cluster is not worth its barriers
_MOST_COLUMNS = 2**30
_OWN_SHARED = 18 * 1024  # the kernel's histogram and what else it keeps in shared memory


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
def _(
    logits: Arg, rowStarts: Arg, rowEnds: Arg, indices: Arg, numRows: int, stride0: int, stride1: int, topK: int
) -> list[Launch]:
    for bounds in (rowStarts, rowEnds):
        _per_row(bounds, numRows)
    return _launches(logits, indices, numRows, (stride0, stride1), topK, {"next_n": 1, "seq_lens": 0})


@top_k_per_row_prefill.indices
def _(logits: Tensor, rowStarts: Tensor, rowEnds: Tensor, numRows: int) -> dict[str, Tensor]:
    bounds = {"rowStarts": rowStarts[:numRows], "rowEnds": rowEnds[:numRows]}
    return {name: (values < 0) | (values > logits.shape[1]) for name, values in bounds.items()}


@top_k_per_row_prefill.example
def _(make: Any, *, num_tokens: int = 16, topK: Literal[20, 2048] = 20, vocab_size: int = 4000) -> tuple[Any, ...]:
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
def _(
    logits: Arg, next_n: int, seq_lens: Arg, indices: Arg, numRows: int, stride0: int, stride1: int, topK: int
) -> list[Launch]:
    if not 1 <= next_n < 2**31:
        raise check.refuse(logits, "next_n", f"expected 1 or more, got {next_n}")
    _per_row(seq_lens, -(-numRows // next_n))
    return _launches(logits, indices, numRows, (stride0, stride1), topK, {"rowStarts": 0, "rowEnds": 0})


@top_k_per_row_decode.indices
def _(logits: Tensor, next_n: int, seq_lens: Tensor, numRows: int) -> dict[str, Tensor]:
    used = seq_lens[: -(-numRows // next_n)]
    return {"seq_lens": (used < 0) | (used > logits.shape[1])}


@top_k_per_row_decode.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    topK: Literal[20, 2048] = 20,
    next_n: Literal[1, 2] = 1,
    vocab_size: int = 4000,
) -> tuple[Any, ...]:
    logits = make.randn(num_tokens, vocab_size, dtype="float32")
    lengths = make.randint(vocab_size // 2, vocab_size + 1, -(-num_tokens // next_n), dtype="int32")
    indices = make.empty(num_tokens, topK, dtype="int32")
    return logits, next_n, lengths, indices, num_tokens, vocab_size, 1, topK


def _per_row(arg: Arg, least: int) -> None:
    """`arg` holds an int32 for each of `least` rows, one after another."""
    check.sizes(arg, num_rows=None)
    if arg.shape[0] < least:
        raise arg.error(f"expected at least {least} elements, got shape {arg.shape}")
    check.dtype(arg, int32)
    check.contiguous(arg)


def _launches(
    logits: Arg, indices: Arg, numRows: int, strides: tuple[int, int], topK: int, absent: dict[str, int]
) -> list[Launch]:
    """The launches of top_k_per_row.cu: one, or one for the pieces of rows and one that joins them."""
    check.dtype(logits, float32)
    check.sizes(logits, num_rows=None, columns=None)
    num_rows, columns = logits.shape
    if not 0 <= numRows <= num_rows:
        raise check.refuse(logits, "numRows", f"expected at most {num_rows}, as many as logits has, got {numRows}")
    if any(size > 1 and given != own for given, own, size in zip(strides, logits.strides, logits.shape, strict=True)):
        raise logits.error(f"expected strides {strides} as given, got {logits.strides}")
    if topK < 0:
        raise check.refuse(logits, "topK", f"expected 0 or more, got {topK}")
    if columns > _MOST_COLUMNS:
        raise logits.error(f"expected at most {_MOST_COLUMNS} columns, got {columns}")
    check.shape(indices, int32, numRows=numRows, topK=topK)

    device = logits.device
    most_staged = device.shared_memory - _OWN_SHARED
    piece_size = _PIECE_SIZE if most_staged > 4 * _PIECE_SIZE + 16 else _PIECE_SIZE // 2
    # Candidates are to be much fewer than what they come from.
    cut = columns > piece_size and topK <= piece_size // 4 and columns <= 2**24
    cluster = _blocks_of_row(numRows, columns, device)
    if cluster > 1:
        cut = cut and columns > cluster * most_staged // 4 - 16
        cluster = 1 if cut else cluster
    most_pieces = -(-columns // piece_size) if cut else 1
    size = most_pieces * topK
    keys, positions = (Scratch(4 * numRows * size if cut else 0) for _ in range(2))

    def launch(merge: bool, elements: int, pieces: int) -> Launch:
        vec_size = 4 if merge or strides[1] == 1 or columns <= 1 else 1
        shared = 4 * (elements + 2 * vec_size)
        staged = shared <= most_staged
        num_threads = 1024 if numRows * pieces <= device.multiprocessors and elements > 8192 else 512
        return _top_k_per_row(
            DECODE="rowStarts" in absent,
            CLUSTER=1 if merge else cluster,
            PIECE_SIZE=piece_size if cut else 0,
            MERGE=merge,
            STAGED=staged,
            VEC_SIZE=vec_size,
            NUM_THREADS=num_threads,
        ).launch(
            grid=(numRows if topK else 0, pieces),
            block=num_threads,
            shared=shared if staged else 0,
            columns=columns,
            most_pieces=most_pieces,
            keys=keys if cut else 0,
            positions=positions if cut else 0,
            **absent,
        )

    if cut:
        return [launch(False, piece_size, most_pieces), launch(True, size, 1)]
    return [launch(False, -(-columns // cluster), cluster)]


def _blocks_of_row(num_rows: int, columns: int, device: Device) -> int:
    """How many blocks of a cluster share a row.

    As few as can hold it, two to a multiprocessor if there are more blocks than those; more while multiprocessors would
    be without any.
    """
    blocks = 1
    while blocks < device.cluster:
        alone = num_rows * blocks <= device.multiprocessors
        fits = columns <= blocks * _MOST_OF_BLOCK[alone]
        if fits and (2 * num_rows * blocks > device.multiprocessors or columns <= blocks * _LEAST_OF_BLOCK):
            break
        blocks *= 2
    return blocks
