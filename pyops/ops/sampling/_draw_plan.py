"""How many threads and blocks draw the token of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from ..._core.system.device import Device

_sampling_row = Kernel("sampling/sampling_row.cu")
_sampling_max = Kernel("sampling/sampling_max.cu")
_sampling_filter = Kernel("sampling/sampling_filter.cu")
_sampling_pick = Kernel("sampling/sampling_pick.cu")

# Kernels of pieces: every launch reads all rows from memory. Pieces of 8192 logits are 4 % faster without filters and
# 5 % slower with top-p (docs/performance/sampling.md, like the numbers below).
_NUM_THREADS = 256  # threads of a block
_MIN_PIECE, _MAX_PIECE = 4 * _NUM_THREADS, 2**14  # logits of a piece; its weights add up to at most 2^49
_PIECES = 8  # wanted pieces per SM, unless pieces would be smaller than _MIN_PIECE
_BINS, _BIN_BYTES, _STATE_BYTES = 2048, 8, 24  # scratch memory of a row: histogram bins, bytes of a bin, of the state

# sampling_row.cu keeps a row in the shared memory of a cluster. With 10 bits instead of 9, only two blocks fit on an SM
# instead of three, which is a fifth slower; with 1024 threads per block only one fits, which is up to twice as slow.
# Rows that do not fit all at once are read in every pass instead.
_BLOCK_LOGITS = 2**14  # logits per block above which the cluster grows, so that two blocks fit on an SM
_MIN_BLOCK_LOGITS = 2**12  # logits of a block below which the cluster does not grow to fill idle SMs
_MAX_BLOCK_LOGITS = 2**17 - 1  # the kernel's partial sums of weights must fit into 32 bits
_BITS = 9  # bits of a key that one radix-select pass resolves
_RESIDENT = 3 * 512  # resident threads per SM: while one block waits at a barrier, others run
_STATIC_SHARED = (16 << _BITS) + 3 * 1024  # bytes of shared memory that the kernel declares itself
_DRIVER_SHARED = 1024  # bytes of shared memory that the driver takes from each block
_VEC_SIZE = 4  # logits of a vector
_MIN_THREADS, _MAX_THREADS = 128, 512  # fewest and most threads of a block; twice as many where it has an SM alone
_THREAD_LOGITS = 32  # logits of a thread: the bits of one word
# With top_k most rows are read once (row_candidates.cuh): logits per block above which the cluster grows, resident
# threads per SM (more registers, for vectors in flight), candidates for each thread, bytes of one.
_TOP_K_BLOCK_LOGITS, _TOP_K_RESIDENT, _THREAD_CANDIDATES, _CANDIDATE_BYTES = 5 * 2**14, 2 * 512, 16, 8
# Rows read in every pass: threads, blocks per SM (up to 76 bytes spill with six), vectors of a thread in flight.
_REREAD_THREADS, _REREAD_BLOCKS, _BATCH = 256, 5, 2


@dataclass(frozen=True)
class DrawProblem:
    """The input of `choose`.

    Attributes:
        num_rows, vocab_size, itemsize: sizes of the logits, and bytes of one.
        is_aligned: whether every row begins at a vector.
        has_top_k, has_top_p: whether these filters are given. Without them a row is read at most twice, so it need not
            stay in shared memory; with top_k most rows are read once.
    """

    num_rows: int
    vocab_size: int
    itemsize: int
    is_aligned: bool
    has_top_k: bool
    has_top_p: bool

    @classmethod
    def of(cls, logits: TensorArg, has_top_k: bool, has_top_p: bool) -> DrawProblem:
        """The problem of these logits."""
        is_aligned = check.vector_width(_VEC_SIZE, logits) == _VEC_SIZE
        num_rows, vocab_size = logits.shape
        return cls(num_rows, vocab_size, logits.dtype.itemsize, is_aligned, has_top_k, has_top_p)

    def bucket(self) -> str:
        rows, vocab = tuning.power_of_two(self.num_rows), f"{self.vocab_size}x{self.itemsize}"
        words = [f"rows={rows}", f"vocab={vocab}", "aligned" if self.is_aligned else "unaligned"]
        return " ".join(words + ["top_k"] * self.has_top_k + ["top_p"] * self.has_top_p)


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

    def waves(self, problem: DrawProblem, device: Device) -> int:
        """Waves of blocks, min_blocks on each SM."""
        return -(-problem.num_rows * self.cluster // (self.min_blocks * device.num_sms))

    def shared(self, problem: DrawProblem) -> int:
        """Bytes of dynamic shared memory of a block: of its piece, or of candidates for top-k."""
        if self.in_shared:
            return problem.itemsize * self.block_logits(problem)
        return _CANDIDATE_BYTES * self.capacity(problem)

    def capacity(self, problem: DrawProblem) -> int:
        """Candidates for top-k that fit in a block's shared memory, where its piece of the row is otherwise."""
        if not problem.has_top_k:
            return 0
        capacity = _THREAD_CANDIDATES * self.num_threads
        return min(capacity, self.shared(problem) // _CANDIDATE_BYTES) if self.in_shared else capacity

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
    if (problem.has_top_k or problem.has_top_p) and (whole := _whole_rows(problem, device)):
        return whole
    share = problem.vocab_size * problem.num_rows // (_PIECES * device.num_sms)
    return Pieces(min(_MAX_PIECE, max(_MIN_PIECE, 1 << max(0, share - 1).bit_length())))


def _whole_rows(problem: DrawProblem, device: Device) -> WholeRows | None:
    """The geometry of sampling_row.cu; None if a row does not fit into the shared memory of a cluster."""
    vocab_size, cluster, has_top_k = problem.vocab_size, 1, problem.has_top_k
    block_logits = _TOP_K_BLOCK_LOGITS if has_top_k and device.cluster > 1 else _BLOCK_LOGITS
    while cluster < device.cluster and (
        cluster * block_logits < vocab_size
        or (2 * cluster * problem.num_rows <= device.num_sms and cluster * _MIN_BLOCK_LOGITS < vocab_size)
    ):
        cluster *= 2
    block_vecs = -(-vocab_size // (cluster * _VEC_SIZE))
    wanted_threads = 1 << (block_vecs * _VEC_SIZE // _THREAD_LOGITS - 1).bit_length()
    num_threads = min(_MAX_THREADS, max(_MIN_THREADS, wanted_threads))
    resident = _TOP_K_RESIDENT if has_top_k else _RESIDENT
    config = WholeRows(cluster, num_threads, min_blocks=resident // num_threads)
    fitting = min(config.fitting(problem, device), config.min_blocks)
    whole = replace(config, min_blocks=fitting) if fitting else None
    if device.cluster == 1 or (whole and whole.waves(problem, device) == 1):
        return _without_cluster(whole, problem, device) if whole else None
    if has_top_k:
        few = min(num_threads, _REREAD_THREADS)
        options = [WholeRows(cluster, threads, resident // threads, in_shared=False) for threads in (num_threads, few)]
        reread = min(options, key=lambda option: option.waves(problem, device))
    elif whole:
        reread = WholeRows(cluster, _REREAD_THREADS, _REREAD_BLOCKS, in_shared=False)
    else:
        return None
    return reread if reread.fitting(problem, device) >= reread.min_blocks else whole


def _without_cluster(config: WholeRows, problem: DrawProblem, device: Device) -> WholeRows:
    """`config`, or a block of twice the threads instead of a cluster of two, if the busiest SM then has fewer logits.

    Of more blocks than SMs, some SM has as many as fit: 128 rows take as long as 160 (docs/performance/sampling.md).
    """
    one = WholeRows(1, 2 * config.num_threads, min_blocks=1)
    if config.cluster != 2 or problem.num_rows * config.cluster <= device.num_sms or not one.fitting(problem, device):
        return config
    return min(config, one, key=lambda option: option.waves(problem, device) * option.min_blocks / option.cluster)


def launches(
    config: WholeRows | Pieces, problem: DrawProblem, logits: TensorArg, given: dict[str, TensorArg | None]
) -> list[Launch]:
    """The launches of a config; `given` are the arguments that may be None."""
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
        CAPACITY=config.capacity(problem),
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
