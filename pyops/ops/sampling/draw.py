"""Drawing tokens from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int32, int64
from ..._core.tensors.tensor import TensorArg
from ._random import philox

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

__all__ = ["top_k_top_p_sampling_from_logits"]

_sampling_row = Kernel("sampling/sampling_row.cu")
_sampling_max = Kernel("sampling/sampling_max.cu")
_sampling_filter = Kernel("sampling/sampling_filter.cu")
_sampling_pick = Kernel("sampling/sampling_pick.cu")
_WHOLE = 2**35  # weight of the most likely token
_MIN_TEMPERATURE = 2.0**-98  # as in probability.cuh; below it, sampling is greedy
_MAX_TOKENS = 2**28  # the sum of all weights must fit into 63 bits

# Kernels of pieces: every launch reads all rows from memory. Pieces of 8192 logits are 4 % faster without filters and
# 5 % slower with top-p (docs/performance/sampling.md, like the numbers below).
_NUM_THREADS = 256  # threads of a block
_MIN_PIECE, _MAX_PIECE = 4 * _NUM_THREADS, 2**14  # logits of a piece; its weights add up to at most 2^49
_PIECES = 8  # wanted pieces per SM, unless pieces would be smaller than _MIN_PIECE
_BINS, _BIN_BYTES, _STATE_BYTES = 2048, 8, 24  # scratch memory of a row: histogram bins, bytes of a bin, of the state

# sampling_row.cu reads a row once and keeps it in the shared memory of a cluster. With 10 bits instead of 9, only two
# blocks fit on an SM instead of three, which is a fifth slower; with 1024 threads per block only one fits, which is up
# to twice as slow. Rows that do not fit all at once are read in every pass instead.
_BLOCK_LOGITS = 2**14  # logits per block above which the cluster grows, so that two blocks fit on an SM
_MIN_BLOCK_LOGITS = 2**12  # logits of a block below which the cluster does not grow to fill idle SMs
_MAX_BLOCK_LOGITS = 2**17 - 1  # the kernel's partial sums of weights must fit into 32 bits
_BITS = 9  # bits of a key that one radix-select pass resolves
_RESIDENT = 3 * 512  # resident threads per SM: while one block waits at a barrier, others run
_STATIC_SHARED = (16 << _BITS) + 3 * 1024  # bytes of shared memory that the kernel declares itself
_DRIVER_SHARED = 1024  # bytes of shared memory that the driver takes from each block
_VEC_SIZE = 4  # logits of a vector
_MIN_THREADS, _MAX_THREADS = 128, 512  # fewest and most threads of a block
_THREAD_LOGITS = 32  # logits of a thread: the bits of one word
# Rows read in every pass: threads, blocks per SM (up to 76 bytes spill with six), vectors of a thread in flight.
_REREAD_THREADS, _REREAD_BLOCKS, _BATCH = 256, 5, 2


@dataclass(frozen=True)
class DrawProblem:
    """The input of `choose`.

    Attributes:
        num_rows, vocab_size, itemsize: sizes of the logits, and bytes of one.
        is_aligned: whether every row begins at a vector.
        is_filtered: whether top_k or top_p is given. Without them a row is read at most twice, so it need not stay in
            shared memory.
    """

    num_rows: int
    vocab_size: int
    itemsize: int
    is_aligned: bool
    is_filtered: bool

    def bucket(self) -> str:
        rows, vocab = tuning.power_of_two(self.num_rows), f"{self.vocab_size}x{self.itemsize}"
        words = [f"rows={rows}", f"vocab={vocab}", "aligned" if self.is_aligned else "unaligned"]
        return " ".join(words + ["filtered"] * self.is_filtered)


@dataclass(frozen=True)
class WholeRows:
    """sampling_row.cu: `cluster` blocks keep a row in shared memory or, unless in_shared, read it in every pass."""

    cluster: int
    num_threads: int
    min_blocks: int
    in_shared: bool = True

    def block_vecs(self, problem: DrawProblem) -> int:
        """Vectors of a row per block."""
        return -(-problem.vocab_size // (self.cluster * _VEC_SIZE))

    def thread_vecs(self, problem: DrawProblem) -> int:
        """Vectors per thread. An unaligned row begins and ends within a vector, and so has one more."""
        vecs = -(-(self.block_vecs(problem) + (not problem.is_aligned)) // self.num_threads)
        return vecs if self.in_shared else -(-vecs // _BATCH) * _BATCH

    def block_logits(self, problem: DrawProblem) -> int:
        """Capacity of a block's shared memory, in logits."""
        return _VEC_SIZE * self.thread_vecs(problem) * self.num_threads

    def fitting(self, problem: DrawProblem, device: Device) -> int:
        """Blocks per SM by shared memory; 0 also if partial sums of weights do not fit into 32 bits."""
        if self.block_logits(problem) > _MAX_BLOCK_LOGITS:
            return 0
        return (device.shared_memory + _DRIVER_SHARED) // (self.shared(problem) + _STATIC_SHARED)

    def shared(self, problem: DrawProblem) -> int:
        """Bytes of dynamic shared memory of a block."""
        return problem.itemsize * self.block_logits(problem) if self.in_shared else 0

    def candidates(self, problem: DrawProblem, device: Device) -> list[WholeRows]:
        """Other cluster sizes, blocks and register bounds."""
        found = [tuning.resized(self, threads) for threads in tuning.beside(self.num_threads, 64, 2 * _MAX_THREADS)]
        blocks = tuning.occupancies(self.num_threads, self.min_blocks)
        found += tuning.varied(self, cluster=tuning.beside(self.cluster, 1, device.cluster), min_blocks=blocks)
        return [config for config in found if config.fitting(problem, device)]


@dataclass(frozen=True)
class Pieces:
    """sampling_max.cu, sampling_filter.cu and sampling_pick.cu: a block has `piece_size` logits of a row."""

    piece_size: int

    def candidates(self, problem: DrawProblem, device: Device) -> list[Pieces]:
        """Other piece sizes."""
        return tuning.varied(self, piece_size=tuning.beside(self.piece_size, _MIN_PIECE, _MAX_PIECE))


def choose(problem: DrawProblem, device: Device) -> WholeRows | Pieces:
    """Shared memory for rows that are filtered and fit, else pieces small enough to fill the device."""
    if problem.is_filtered and (whole := _whole_rows(problem, device)):
        return whole
    share = problem.vocab_size * problem.num_rows // (_PIECES * device.num_sms)
    return Pieces(min(_MAX_PIECE, max(_MIN_PIECE, 1 << max(0, share - 1).bit_length())))


def _whole_rows(problem: DrawProblem, device: Device) -> WholeRows | None:
    """The geometry of sampling_row.cu; None if a row does not fit into the shared memory of a cluster."""
    vocab_size, cluster = problem.vocab_size, 1
    while cluster < device.cluster and (
        cluster * _BLOCK_LOGITS < vocab_size
        or (2 * cluster * problem.num_rows <= device.num_sms and cluster * _MIN_BLOCK_LOGITS < vocab_size)
    ):
        cluster *= 2
    block_vecs = -(-vocab_size // (cluster * _VEC_SIZE))
    wanted_threads = 1 << (block_vecs * _VEC_SIZE // _THREAD_LOGITS - 1).bit_length()
    num_threads = min(_MAX_THREADS, max(_MIN_THREADS, wanted_threads))
    config = WholeRows(cluster, num_threads, min_blocks=_RESIDENT // num_threads)
    fitting = min(config.fitting(problem, device), config.min_blocks)
    reread = WholeRows(cluster, _REREAD_THREADS, _REREAD_BLOCKS, in_shared=False)
    is_one_wave = problem.num_rows * cluster <= fitting * device.num_sms
    if device.cluster > 1 and not is_one_wave and reread.fitting(problem, device) >= _REREAD_BLOCKS > fitting > 0:
        return reread
    return replace(config, min_blocks=fitting) if fitting else None


@op(out="samples", ulps=0)
def top_k_top_p_sampling_from_logits(
    samples: Tensor,
    logits: Tensor,
    seeds: Tensor,
    offsets: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    temperature: Tensor | None = None,
) -> None:
    """Draw a token from each row: the first one at which the running sum of weights exceeds ``r / 2^64`` of their sum.

    Weights are integers, ``w = floor(2^35 exp((x - max x) / t))``, so that their addition is exact and a token depends
    only on its row. Three filters set weights to 0, in this order: `top_k` those of tokens less likely than top_k
    others; `min_p` those below min_p times the largest weight; `top_p` those of all but the most likely tokens that
    together reach top_p of the remaining sum (Holtzman et al. 2019, arXiv:1904.09751; Nguyen et al.
    2024, arXiv:2407.01082). Tokens as likely as the last one that a filter keeps are kept, too. ``r`` is the
    first 64 bits of Philox4x32-10 (Salmon et al. 2011) under the row's seed at its offset: rows of one seed need
    different offsets, and so do the tokens of a sequence.

    A logit of NaN or -inf is never drawn; inf counts as the largest number.

    Args:
        samples: [num_rows] int32, contiguous, written; -1 for a row without a token that can be drawn.
        logits: [num_rows, vocab_size], float32, float16 or bfloat16; any row stride; one token at least.
        seeds: [num_rows] int64, contiguous.
        offsets: [num_rows] int64, contiguous; or None for 0.
        top_k: [num_rows] int32, contiguous; 0 or less, or vocab_size or more, keeps all tokens. Or None.
        top_p: [num_rows] float32, contiguous; 1 or more, or NaN, keeps all tokens. Or None.
        min_p: [num_rows] float32, contiguous; 0 or less, or NaN, keeps all tokens. Or None.
        temperature: t, [num_rows] float32, contiguous; or None for 1. NaN and numbers below 2^-98, including 0 and
            negative ones, take the first of the most likely tokens; inf makes all finite logits equally likely.
    """
    rows, vocab_size = logits.shape
    x = logits.float()
    x = torch.where(x.isnan(), -torch.inf, x).clamp(max=torch.finfo(torch.float32).max)
    largest = x.amax(-1, keepdim=True)

    t = torch.ones_like(largest) if temperature is None else temperature[:, None]
    greedy = ~(t >= _MIN_TEMPERATURE)
    shrink = 2.0**-28  # scaled by it, the largest float and its negative have a finite difference
    share = torch.exp((x * shrink - largest * shrink) * (1.0 / (t * shrink))).nan_to_num(nan=0.0)
    share = torch.where(greedy, (x == largest).float(), share).masked_fill(x == -torch.inf, 0.0)
    weights = (share.double() * _WHOLE).long()
    if min_p is not None:
        min_weight = (min_p.nan_to_num(nan=0.0).clamp(0, 1).double() * _WHOLE).ceil()
        weights = weights.masked_fill(weights < min_weight[:, None], 0)
    likeliest, order = x.sort(dim=-1, descending=True)
    if top_k is not None:
        k = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
        weights = weights.masked_fill(x < likeliest.gather(-1, k.long()[:, None] - 1), 0)
    for row in range(rows):
        w = weights[row]
        if top_p is not None and top_p[row] < 1 and w.any():
            wanted = max(1, math.ceil(max(0.0, float(top_p[row])) * float(w.sum())))
            place = torch.searchsorted(w[order[row]].cumsum(0), min(wanted, int(w.sum())))
            w = w.masked_fill(x[row] < likeliest[row, place], 0)
        total = int(w.sum())
        bits = 0 if greedy[row] else philox(int(seeds[row]), 0 if offsets is None else int(offsets[row]))
        samples[row] = torch.searchsorted(w.cumsum(0), bits * total >> 64, right=True) if total else -1


@top_k_top_p_sampling_from_logits.result
def result_top_k_top_p_sampling_from_logits(logits: TensorArg) -> Result:
    check.sizes(logits, num_rows=None, vocab_size=None)
    return Result(logits.shape[:1], int32)


@top_k_top_p_sampling_from_logits.plan
def plan_top_k_top_p_sampling_from_logits(
    samples: TensorArg,
    logits: TensorArg,
    seeds: TensorArg,
    offsets: TensorArg | None,
    top_k: TensorArg | None,
    top_p: TensorArg | None,
    min_p: TensorArg | None,
    temperature: TensorArg | None,
) -> list[Launch]:
    check.floating(logits)
    check.sizes(logits, num_rows=None, vocab_size=None)
    num_rows, vocab_size = logits.shape
    check.row_size(logits)
    check.shape(samples, int32, num_rows=num_rows)
    check.shape(seeds, int64, num_rows=num_rows)
    check.shape(offsets, int64, num_rows=num_rows)
    check.shape(top_k, int32, num_rows=num_rows)
    for arg in (top_p, min_p, temperature):
        check.shape(arg, float32, num_rows=num_rows)
    if not 1 <= vocab_size <= _MAX_TOKENS:
        raise logits.error(f"expected 1 to {_MAX_TOKENS} tokens, got {vocab_size}")

    given = {"offsets": offsets, "top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    is_aligned = check.vector_width(_VEC_SIZE, logits) == _VEC_SIZE
    is_filtered = top_k is not None or top_p is not None
    problem = DrawProblem(num_rows, vocab_size, logits.dtype.itemsize, is_aligned, is_filtered)
    config = tuning.config(logits.op, problem, logits.device, choose)
    if isinstance(config, WholeRows):
        return [_launch_whole_rows(config, problem, logits, given)]
    return _launch_pieces(config, logits, given)


def _launch_whole_rows(
    config: WholeRows, problem: DrawProblem, logits: TensorArg, given: dict[str, TensorArg | None]
) -> Launch:
    """The launch of sampling_row.cu."""
    return _sampling_row(
        scalar_t=logits.dtype,
        **{f"HAS_{name.upper()}": arg is not None for name, arg in given.items()},
        IN_SHARED=config.in_shared,
        CLUSTER=config.cluster,
        VECTORS=config.thread_vecs(problem),
        BATCH=_BATCH,
        BITS=_BITS,
        MIN_BLOCKS=config.min_blocks,
        NUM_THREADS=config.num_threads,
    ).launch(
        grid=(problem.num_rows, config.cluster),
        block=config.num_threads,
        shared=config.shared(problem),
        vocab_size=problem.vocab_size,
        logits_stride=check.row_stride(logits),
        piece_size=config.block_vecs(problem) * _VEC_SIZE,
        **{name: 0 for name, arg in given.items() if arg is None},
    )


def _launch_pieces(config: Pieces, logits: TensorArg, given: dict[str, TensorArg | None]) -> list[Launch]:
    """The launches of sampling_max.cu, sampling_filter.cu for each digit of each filter, and sampling_pick.cu."""
    num_rows, vocab_size = logits.shape
    pieces = -(-vocab_size // config.piece_size)
    maxima, sums = Scratch(4 * num_rows * pieces), Scratch(8 * num_rows * pieces)
    bins, states = Scratch(_BIN_BYTES * num_rows * _BINS), Scratch(_STATE_BYTES * num_rows)
    launches: list[Launch] = []

    def launch(kernel: Kernel, constants: dict[str, Any], *pointers: str, **scratch: Any) -> None:
        # Every second launch goes through the pieces in reverse, from those that L2 still holds (2 % faster).
        constants = {**constants, "BACKWARDS": len(launches) % 2 == 1, "NUM_THREADS": _NUM_THREADS}
        one = kernel(scalar_t=logits.dtype, **constants).launch(
            grid=num_rows * pieces,
            block=_NUM_THREADS,
            vocab_size=vocab_size,
            logits_stride=check.row_stride(logits),
            pieces=pieces,
            piece_size=config.piece_size,
            maxima=maxima,
            states=states,
            **scratch,
            **{name: 0 for name in pointers if given[name] is None},
        )
        launches.append(one)

    has = {f"HAS_{name.upper()}": given[name] is not None for name in ("min_p", "temperature")}
    filters = [name for name in ("top_k", "top_p") if given[name] is not None]
    filtered = {"FILTERED": bool(filters)}
    launch(_sampling_max, filtered, bins=bins)
    digits = 3 if logits.dtype is float32 else 2  # two digits of 11 bits cover a 16-bit logit
    for name in filters:
        for number in range(digits):
            constants = {"TOP_P": name == "top_p", "DIGIT": number, **has}
            launch(_sampling_filter, constants, "top_k", "top_p", "min_p", "temperature", bins=bins)
    has = {**has, **filtered, "HAS_OFFSETS": given["offsets"] is not None}
    launch(_sampling_pick, has, "offsets", "min_p", "temperature", sums=sums)
    return launches


@top_k_top_p_sampling_from_logits.example
def example_top_k_top_p_sampling_from_logits(
    make: Any,
    *,
    num_tokens: int = 16,
    vocab_size: int = 4000,
    dtype: str = "bfloat16",
    with_top_k: bool = True,
    with_top_p: bool = True,
    with_others: bool = False,
) -> tuple[Any, ...]:
    def numbers(is_given: bool, value: float, dtype: str = "float32") -> Any:
        return make.full(num_tokens, value=value, dtype=dtype) if is_given else None

    return (
        make.empty(num_tokens, dtype="int32"),
        make.randn(num_tokens, vocab_size, dtype=dtype, scale=2.0),
        make.randint(-(2**62), 2**62, num_tokens, dtype="int64"),
        make.randint(0, 1000, num_tokens, dtype="int64") if with_others else None,
        numbers(with_top_k, 50, "int32"),
        numbers(with_top_p, 0.9),
        numbers(with_others, 0.01),
        numbers(with_others, 0.7),
    )
