"""Positions of the k largest elements of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int32
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

__all__ = ["top_k_per_row_decode", "top_k_per_row_prefill"]

_top_k_per_row = Kernel("sampling/top_k_per_row.cu")
_top_k_short_row = Kernel("sampling/top_k_short_row.cu")
_MAX_COLUMNS = 2**30  # most columns: kernels count them in 32 bits

# Measured: docs/performance/sampling.md, top_k_per_row_decode.
# top_k_short_row.cu holds a row in the registers of one block: for 1024 rows of 8192 elements 512 threads are 19 %
# faster than 1024, and three such blocks per SM 14 % faster than two.
_SHORT_THREADS, _SHORT_MAX_THREADS = 512, 1024
_SHORT_MAX_ROUNDS = 4  # most vectors per thread
_SHORT_MAX_TOP_K = 4096  # most positions: they reuse the shared memory of the histograms
_SHORT_RESIDENT = 1536  # resident threads per SM
# top_k_per_row.cu shares a row among a cluster: for one row of 65536 elements 512 threads are 12 % faster than 1024.
_LONG_THREADS, _LONG_MAX_THREADS = 512, 1024
_MAX_PIECE = 20480  # elements of a block beyond which it has 1024 threads
_MIN_PIECE = 8192  # elements of a block below which a larger cluster costs more in barriers than it gains
# {blocks of a cluster: share of the SMs that such clusters can fill}: 16 rows with eight blocks each took two waves.
_FILLED_BY_CLUSTERS = {2: 1.0, 4: 1.0, 8: 0.75}
_CANDIDATE_BYTES = 8  # bytes of a candidate: value and position
_MAX_CANDIDATES = 23  # most candidates that a thread keeps
_STATIC_SHARED = 26 * 1024  # bytes of shared memory that the kernel declares itself
_CANDIDATE_THREADS = 256, 512, 1024  # threads of a block that tuning tries
_CANDIDATE_ROUNDS = 8  # most vectors per thread of a short row that tuning tries


@dataclass(frozen=True)
class TopKProblem:
    """The input of `choose`.

    Attributes:
        num_rows, columns, top_k: sizes.
        vec_size: elements of one load: 4, or 1 if the elements of a row are not contiguous.
        is_aligned: whether every row begins at a vector.
    """

    num_rows: int
    columns: int
    top_k: int
    vec_size: int = 4
    is_aligned: bool = True

    @property
    def vectors(self) -> int:
        """Most vectors of four elements that a row touches."""
        return -(-self.columns // 4) + (not self.is_aligned)

    @property
    def is_short(self) -> bool:
        """Whether top_k_short_row.cu supports the call; top_k_per_row.cu supports every call."""
        fits = self.vectors <= _SHORT_MAX_ROUNDS * _SHORT_MAX_THREADS
        return self.vec_size == 4 and fits and self.top_k <= _SHORT_MAX_TOP_K

    def bucket(self) -> str:
        words = [
            "short" if self.is_short else "long",
            f"rows={tuning.power_of_two(self.num_rows)}",
            f"columns={tuning.power_of_two(self.columns)}",
            f"k={tuning.power_of_two(self.top_k)}",
        ]
        return " ".join(words + [f"vec_size={self.vec_size}"] * (not self.is_short))


@dataclass(frozen=True)
class ShortRows:
    """top_k_short_row.cu: a block holds its row in registers."""

    num_threads: int
    min_blocks: int

    def rounds(self, problem: TopKProblem) -> int:
        """Vectors of a thread."""
        return max(1, -(-problem.vectors // self.num_threads))

    def candidates(self, problem: TopKProblem, device: Device) -> list[ShortRows]:
        """Other blocks and register bounds."""
        found: list[ShortRows] = [
            tuning.resized(self, threads)
            for threads in _CANDIDATE_THREADS
            if problem.vectors <= _CANDIDATE_ROUNDS * threads
        ]
        return found + tuning.varied(self, min_blocks=tuning.occupancies(self.num_threads, self.min_blocks))


@dataclass(frozen=True)
class LongRows:
    """top_k_per_row.cu: `cluster` blocks share a row; each thread has `capacity` candidates in shared memory."""

    num_threads: int
    cluster: int
    capacity: int

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: one slot per candidate and one more, for each thread."""
        return _CANDIDATE_BYTES * (self.capacity + 1) * self.num_threads

    def candidates(self, problem: TopKProblem, device: Device) -> list[LongRows]:
        """Other cluster and block sizes, and other numbers of candidates."""
        found = tuning.varied(
            self,
            num_threads=_CANDIDATE_THREADS,
            cluster=tuning.beside(self.cluster, 1, device.cluster),
            capacity=tuning.beside(self.capacity, 1, _MAX_CANDIDATES),
        )
        return [config for config in found if config.shared + _STATIC_SHARED <= device.shared_memory]


def choose(problem: TopKProblem, device: Device) -> ShortRows | LongRows:
    """Registers for rows that fit; else the largest number of blocks per row that the device can hold."""
    if problem.is_short:
        num_threads = _SHORT_THREADS if problem.vectors <= _SHORT_MAX_ROUNDS * _SHORT_THREADS else _SHORT_MAX_THREADS
        return ShortRows(num_threads, _SHORT_RESIDENT // num_threads)
    cluster = 1
    while (
        2 * cluster <= device.cluster
        and 2 * cluster * problem.num_rows <= device.num_sms * _FILLED_BY_CLUSTERS[2 * cluster]
        and cluster * _MIN_PIECE < problem.columns
    ):
        cluster *= 2
    piece = -(-problem.columns // cluster) + 2 * problem.vec_size
    num_threads = _LONG_MAX_THREADS if piece > _MAX_PIECE else _LONG_THREADS
    fitting = (device.shared_memory - _STATIC_SHARED) // (_CANDIDATE_BYTES * num_threads) - 1
    # Where every element is a candidate, positions are implicit, and two candidates take the bytes of one.
    whole_piece = -(-piece // (2 * num_threads))
    return LongRows(num_threads, cluster, min(whole_piece, fitting, _MAX_CANDIDATES))


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

    Positions count from the start of the segment. Among equal values the first ones are taken, so that the result is
    determined. A segment of at most topK elements gives 0, 1, ... and then -1. Values are ordered by their bits: -NaN,
    -inf, ..., -0, 0, ..., inf, NaN. A segment that reaches beyond the columns ends with them.

    Args:
        logits: [at least numRows, columns] float32, any strides.
        rowStarts, rowEnds: [at least numRows] int32, contiguous.
        indices: [numRows, topK] int32, contiguous, written.
        numRows: number of rows.
        stride0, stride1: the strides of logits.
        topK: 0 or more.
    """
    starts = rowStarts[:numRows].long().clamp(0, logits.shape[1])
    _select(logits, starts, rowEnds[:numRows].long(), indices, numRows, topK)


def _select(logits: Tensor, starts: Tensor, ends: Tensor, indices: Tensor, numRows: int, topK: int) -> None:
    """The reference of both ops, for rows that begin at `starts` and end before `ends`."""
    columns = torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device)
    starts, ends = starts[:, None], ends.clamp(max=logits.shape[1])[:, None]
    bits = logits[:numRows].view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    order = torch.where((columns >= starts) & (columns < ends), order, -(2**40))
    best = order.sort(dim=-1, descending=True, stable=True)[1][:, :topK].sort(dim=-1)[0] - starts
    lengths, places = ends - starts, torch.arange(topK, dtype=torch.int64, device=logits.device)
    whole = places.where(places < lengths, -1)
    best = torch.nn.functional.pad(best, (0, topK - best.shape[1]))
    indices.copy_(torch.where(lengths <= topK, whole, best))


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
        logits: [at least numRows, columns] float32, any strides.
        next_n: rows of a sequence, one for each of its last tokens; 1 or more.
        seq_lens: [at least numRows / next_n] int32, contiguous; or [sequences, next_n], a length for each row:
            ``logits[r, : seq_lens[r // next_n, r % next_n]]``.
        indices: [numRows, topK] int32, contiguous, written.
        numRows: number of rows.
        stride0, stride1: the strides of logits.
        topK: 0 or more.
    """
    if seq_lens.ndim == 2:
        seq_lens, next_n = seq_lens.flatten(), 1
    rows = torch.arange(numRows, dtype=torch.int64, device=logits.device)
    ends = seq_lens[rows // next_n].long() - next_n + rows % next_n + 1
    _select(logits, torch.zeros_like(ends), ends, indices, numRows, topK)


@top_k_per_row_prefill.result
@top_k_per_row_decode.result
def result_top_k_per_row(numRows: int, topK: int) -> Result:
    return Result((numRows, topK), int32)


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
    absent = {"rowStarts": 0, "rowEnds": 0}
    if len(seq_lens.shape) == 2:
        check.contiguous(seq_lens)
        seq_lens, next_n = replace(seq_lens, shape=(seq_lens.numel,), strides=(1,)), 1
        absent["next_n"] = 1
    _per_row(seq_lens, -(-numRows // next_n))
    return _launches(logits, indices, numRows, (stride0, stride1), topK, absent)


@top_k_per_row_decode.bad_indices
def bad_indices_top_k_per_row_decode(logits: Tensor, next_n: int, seq_lens: Tensor, numRows: int) -> dict[str, Tensor]:
    used = seq_lens if seq_lens.ndim == 2 else seq_lens[: -(-numRows // next_n)]
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
    """Check that `arg` is contiguous int32 of at least `min_rows` elements."""
    check.sizes(arg, num_rows=None)
    check.at_least(arg, int32, min_rows)


def _launches(
    logits: TensorArg, indices: TensorArg, numRows: int, strides: tuple[int, int], topK: int, absent: dict[str, int]
) -> list[Launch]:
    """The launch of top_k_short_row.cu or top_k_per_row.cu; `absent` feeds the parameters that the op lacks."""
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

    is_aligned = logits.alignment % 16 == 0 and strides[0] % 4 == 0
    vec_size = 4 if strides[1] == 1 or columns <= 1 else 1
    problem = TopKProblem(numRows, columns, topK, vec_size, is_aligned)
    config = tuning.config(logits.op, problem, logits.device, choose)
    is_decode, num_blocks = "rowStarts" in absent, numRows if topK else 0
    if isinstance(config, ShortRows):
        return [
            _top_k_short_row(
                DECODE=is_decode,
                ROUNDS=config.rounds(problem),
                NUM_THREADS=config.num_threads,
                MIN_BLOCKS=config.min_blocks,
            ).launch(grid=num_blocks, block=config.num_threads, columns=columns, **absent)
        ]
    return [
        _top_k_per_row(
            DECODE=is_decode,
            CLUSTER=config.cluster,
            VEC_SIZE=vec_size,
            NUM_THREADS=config.num_threads,
        ).launch(
            grid=(num_blocks, config.cluster),
            block=config.num_threads,
            shared=config.shared,
            columns=columns,
            capacity=config.capacity,
            **absent,
        )
    ]
