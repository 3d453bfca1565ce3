"""Launch geometry of matrices: rows that threads share (row.cuh), or vectors that each have a thread (chunk.cuh).

`choose_rows` and `choose_chunks` decide. They return a config, which says what a kernel is compiled with and how many
blocks it gets, and which can be printed and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from ..._core import check
from ..._core.kernel import Kernel, Launch
from ..._core.tensor import TensorArg

# Rows. "Rows" below is the section "Rows (the norms)" of docs/performance.md, measured on an H200.

_MAX_LATENCY_ROWS = 2  # rows per multiprocessor that are still "few" (Rows, "Two rows to a multiprocessor")
_LONG_ROW_VECS = 512  # vectors: longer rows are tuned by their own numbers (Rows: 4096 against 14336 elements)
WARP_ROW_VECS = 128  # vectors: up to here a warp or less has a row; one warp for 512 loses (Rows, "One warp, or two")
_WARP_SIZE = 32  # lanes that share a row at most; half a warp where warps have 64
WARP_ROW_BLOCK = 128  # threads of a block of rows that warps share
_FEW_THREAD_VECS = 4  # vectors per thread: a short row with more leaves registers for `resident[1]` threads only
_MANY_THREAD_VECS = 7  # vectors per thread: with more, there is room for one block fewer
# Vectors of less than 8 bytes, for rows that are not aligned: more of them in flight (Rows, "Odd sizes").
_NARROW_VEC_BYTES = 8
_NARROW_VECS = 16  # vectors per thread
_NARROW_RESIDENT = 1536, 896  # threads per multiprocessor, holding one row and holding more
# Another number of vectors per thread must leave 8 % fewer threads idle. 7 to 10 % give the shapes that were measured
# best for rows of 14336 (Rows: 448 threads x 4 vectors, 320 x 6, 256 x 7) and whole warps of work for powers of two.
_MIN_IDLE_GAIN = 0.08

# Registers of an NVIDIA GPU, for estimates of what fits in them.
_SM_REGISTERS = 65536
_MAX_THREAD_REGISTERS = 255
_OTHER_REGISTERS = 36  # of a thread, beside those that hold vectors
_OTHER_REGISTERS_SHIFTED = 48  # the same with SHIFTED rows, whose weight is put together from two vectors
# Architectures on which a kernel of SHIFTED rows that is `tight` spills if its registers are bounded.
_SPILLING_ARCHS = ("sm_100",)
_MAX_SHIFTED_VECS = 4  # vectors per thread of SHIFTED rows
# Fewest vectors of a SHIFTED row: 16 lanes or more then share the row, one for each element before and behind its
# vectors.
_MIN_SHIFTED_ROW_VECS = 34

# Chunks.

_CHUNK_THREADS = 256
_MAX_GRID_YZ = 65535  # blocks in the second and third dimension of a grid
_MAX_IDLE_CHUNKS = 16  # at most one in so many threads of a row may be idle, or more rows share a block


class RowVectors(NamedTuple):
    """How the rows of a matrix are cut: elements of a vector, and whether rows are SHIFTED (row.cuh)."""

    vec_size: int
    shifted: bool = False


@dataclass(frozen=True, eq=False)
class RowTuning:
    """What was measured to be best for a kernel of rows. Declared once beside the op; compared by identity.

    Each pair is for (short rows, long rows): up to `_LONG_ROW_VECS` vectors, and more.

    Attributes:
        many: vectors per thread when the grid has several waves of blocks (bandwidth bound).
        few: vectors per thread when all blocks run at once (latency bound).
        resident: threads per multiprocessor that the registers of the kernel allow.
        rows: rows that a thread holds in registers at the same time, 2 for input and residual.
        weights: weights of a row that a thread holds beside its rows; 0 for a kernel without KEEP_WEIGHT.
        lane_vecs: vectors per lane of a row that a warp or less shares.
        spare_blocks: blocks per multiprocessor to give up, for arithmetic that takes registers while rows are held.
        tight: whether the kernel needs every register that `resident` leaves to a thread.
    """

    many: tuple[int, int] = (3, 4)
    few: tuple[int, int] = (2, 4)
    resident: tuple[int, int] = (1024, 896)
    rows: int = 1
    weights: int = 1
    lane_vecs: int = 4
    spare_blocks: int = 0
    tight: bool = False


@dataclass(frozen=True)
class RowConfig:
    """The geometry of a kernel of rows; the attributes are the constants of the kernel.

    Attributes:
        vec_size: elements of a vector.
        shifted: whether vectors begin where memory is aligned, not where the row begins.
        num_threads: threads of a block.
        row_threads: threads that share a row.
        keep_row: whether the row stays in registers between its two passes.
        keep_weight: the same of the weight; None for a kernel without one.
        min_blocks: blocks per multiprocessor that the compiler makes room for, by bounding registers.
    """

    vec_size: int
    shifted: bool
    num_threads: int
    row_threads: int
    keep_row: bool
    keep_weight: bool | None
    min_blocks: int

    @cached_property
    def constants(self) -> dict[str, int | str]:
        """The constants of the kernel, by its names for them."""
        shifted = {"SHIFTED": "true"} if self.shifted else {}  # a #define, which row.cuh looks for
        keep_weight = {} if self.keep_weight is None else {"KEEP_WEIGHT": self.keep_weight}
        return {
            "VEC_SIZE": self.vec_size,
            **shifted,
            "NUM_THREADS": self.num_threads,
            "ROW_THREADS": self.row_threads,
            "KEEP_ROW": self.keep_row,
            **keep_weight,
            "MIN_BLOCKS": self.min_blocks,
        }

    def num_blocks(self, num_rows: int) -> int:
        """Blocks for so many rows."""
        return -(-num_rows // (self.num_threads // self.row_threads))


def row_vectors(size: int, strides: Sequence[int], *tensors: TensorArg | None) -> RowVectors:
    """How rows of `size` elements are cut into vectors that every one of `tensors` is aligned for.

    `strides` are the distances between rows in the tensors that have rows; none if rows have no common distance.

    Vectors have full width, 16 bytes of the widest dtype, if that divides every row. Full width is also possible with
    SHIFTED rows: all tensors begin aligned, those with rows are aligned at the same places of each row, and a row has
    enough threads for the elements before and behind its vectors. Otherwise vectors have the widest width that divides
    every row.
    """
    given = [arg for arg in tensors if arg]
    vec_size = check.vector_width(size, *given)
    full = 16 // max([arg.dtype.itemsize for arg in given])
    shifted = (
        vec_size < full
        and size // full >= _MIN_SHIFTED_ROW_VECS
        and len({stride % full for stride in strides}) == 1
        and all(arg.alignment >= full * arg.dtype.itemsize for arg in given)
    )
    return RowVectors(full if shifted else vec_size, shifted)


def choose_rows(
    row: TensorArg,
    num_rows: int,
    vectors: RowVectors,
    tuning: RowTuning,
    *,
    size: int | None = None,
    lanes: int = 1,
    bound_registers: bool = True,
) -> RowConfig:
    """The geometry of a kernel for `num_rows` rows of the dtype of `row`.

    Args:
        row: a tensor whose last dimension is made of rows; gives dtype, device and the size of a row.
        num_rows: rows of the launch.
        vectors: how rows are cut, see `row_vectors`.
        tuning: the numbers of the kernel.
        size: elements of a row, if the last dimension of `row` holds several of them.
        lanes: neighbouring threads that must share a row, because they reduce together.
        bound_registers: False for MIN_BLOCKS = 1. For arithmetic that needs more registers than `tuning` counts on,
            such as a conversion to fp8 without an instruction for it.
    """
    check.narrow(row)
    spills = vectors.shifted and tuning.tight and row.device.arch in _SPILLING_ARCHS
    return _choose_rows(
        row.shape[-1] if size is None else size,
        row.dtype.itemsize,
        vectors,
        min(_MAX_LATENCY_ROWS + 1, -(-num_rows // row.device.multiprocessors)),
        tuning,
        lanes,
        bound_registers and not spills,
    )


@cache  # A plan miss must not pay for the choice: a serving process meets few row sizes and many row counts.
def _choose_rows(
    size: int,
    itemsize: int,
    vectors: RowVectors,
    sm_rows: int,
    tuning: RowTuning,
    lanes: int,
    bound_registers: bool,
) -> RowConfig:
    """`choose_rows` for `sm_rows` rows per multiprocessor; more than _MAX_LATENCY_ROWS count as one more."""
    vec_size, shifted = vectors
    row_vecs = size // vec_size - shifted
    long = row_vecs > _LONG_ROW_VECS
    vec_registers = max(1, vec_size * itemsize // 4)
    few_vecs = tuning.few[long]
    # Rows are many when a multiprocessor has more of them than fit there at once: two, if two blocks find registers.
    row_registers = row_vecs * (_OTHER_REGISTERS / few_vecs + (tuning.rows + tuning.weights) * vec_registers)
    many = sm_rows > (_MAX_LATENCY_ROWS if _MAX_LATENCY_ROWS * row_registers <= _SM_REGISTERS else 1)
    wanted_vecs, resident = tuning.many[long] if many else few_vecs, tuning.resident
    narrow = many and vec_size * itemsize < _NARROW_VEC_BYTES
    if narrow:
        wanted_vecs, resident = _NARROW_VECS, (_NARROW_RESIDENT[tuning.rows > 1],) * 2
    if row_vecs <= WARP_ROW_VECS:
        row_threads, num_threads = _lanes_for_row(row_vecs, lanes, tuning.lane_vecs), WARP_ROW_BLOCK
    else:
        max_vecs = _MAX_SHIFTED_VECS if shifted else wanted_vecs + 2
        row_threads = num_threads = threads_for_row(row_vecs, wanted_vecs, max_vecs)

    thread_vecs = -(-row_vecs // row_threads)
    thread_registers = thread_vecs * vec_registers  # for one row, or one weight
    free_registers = min(_MAX_THREAD_REGISTERS, _SM_REGISTERS // num_threads) - (
        _OTHER_REGISTERS_SHIFTED if shifted else _OTHER_REGISTERS
    )
    keep_row = tuning.rows * thread_registers <= free_registers
    # With many rows, a weight that is long, is SHIFTED or is needed beside two rows is read when it is used: its
    # registers buy another resident block (Rows, "Where the weight is read").
    weight_fits = (tuning.rows + tuning.weights) * thread_registers <= free_registers
    keep_weight = keep_row and weight_fits and (not many or (tuning.rows == 1 and not long and not shifted))

    min_blocks = 1
    if many and bound_registers:
        resident_threads = resident[long or thread_vecs > _FEW_THREAD_VECS]
        spare_blocks = tuning.spare_blocks + (thread_vecs > _MANY_THREAD_VECS and not narrow)
        spare_blocks += shifted and tuning.rows > 1  # putting a weight together takes registers while rows are held
        min_blocks = max(1, resident_threads // num_threads - spare_blocks)
    return RowConfig(
        vec_size, shifted, num_threads, row_threads, keep_row, keep_weight if tuning.weights else None, min_blocks
    )


def _lanes_for_row(row_vecs: int, lanes: int, lane_vecs: int) -> int:
    """Lanes of a warp that share a row: a power of two from `lanes` on, with up to `lane_vecs` vectors each."""
    while lanes < _WARP_SIZE and lanes * lane_vecs < row_vecs:
        lanes *= 2
    return lanes


def threads_for_row(row_vecs: int, wanted_vecs: int, max_vecs: int) -> int:
    """Threads for a row: about `wanted_vecs` vectors to a thread, at most `max_vecs`, and few threads idle."""
    min_idle, best = 2.0, 1024
    for vecs in (wanted_vecs, wanted_vecs + 1, wanted_vecs + 2, wanted_vecs - 1):
        vecs = min(vecs, max_vecs)
        threads = check.threads(-(-row_vecs // max(1, vecs)))
        rounds = -(-row_vecs // threads)
        idle = (threads * rounds - row_vecs) / (threads * rounds)
        if rounds <= vecs and idle < min_idle - _MIN_IDLE_GAIN:
            min_idle, best = idle, threads
    return best


@dataclass(frozen=True)
class ChunkConfig:
    """The geometry of a kernel whose threads have one chunk of a row each (chunk.cuh).

    Attributes:
        num_threads: threads of a block.
        row_threads: neighbouring threads of a block that share a row.
        planes: whether the groups of rows need the third dimension of the grid.
        grid: blocks (chunks of a row, groups of rows, planes).
    """

    num_threads: int
    row_threads: int
    planes: bool
    grid: tuple[int, int, int]

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the kernel, by its names for them."""
        return {"NUM_THREADS": self.num_threads, "ROW_THREADS": self.row_threads, "PLANES": self.planes}


def choose_chunks(row_chunks: int, num_rows: int) -> ChunkConfig:
    """The geometry for `num_rows` rows of `row_chunks` chunks, one to a thread."""
    row_threads = _chunk_threads(row_chunks)
    groups = -(-num_rows // (_CHUNK_THREADS // row_threads))
    planes = -(-groups // _MAX_GRID_YZ)
    grid = -(-row_chunks // row_threads), -(-groups // max(1, planes)), planes
    return ChunkConfig(_CHUNK_THREADS, row_threads, planes > 1, grid)


@lru_cache(4096)  # A contiguous matrix is one row of any length, so there is no end of lengths.
def _chunk_threads(row_chunks: int) -> int:
    """Threads of a block that share a row: as many as leave few idle. Whole warps, unless rows are shorter."""
    narrowest = min(_WARP_SIZE, 1 << max(0, row_chunks - 1).bit_length())
    row_threads = _CHUNK_THREADS
    while row_threads > narrowest and -row_chunks % row_threads > row_chunks // _MAX_IDLE_CHUNKS:
        row_threads //= 2
    return row_threads


def chunks(
    kernel: Kernel,
    out: TensorArg,
    input: TensorArg,
    out_stride: str = "out_stride",
    min_blocks: int = 8,
    twice: bool = False,
    fixed: dict[str, Any] | None = None,
    **constants: Any,
) -> Launch:
    """The launch of a kernel whose threads have one vector of `out` each.

    Args:
        kernel: takes the constants of `ChunkConfig`, scalar_t, VEC_SIZE and MIN_BLOCKS.
        out, input: as many rows, each of one stride.
        out_stride: the parameter of the kernel for the stride of `out`.
        min_blocks: blocks per multiprocessor that registers are bounded for. Eight blocks are 2048 threads, the most
            there can be (docs/performance.md, "Elements").
        twice: whether a thread may have two vectors of `input`. It gets them if `out` is aligned for vectors of as many
            elements, and if half as many threads still fill the device several times.
        fixed: parameters of the kernel beside sizes and strides.
        constants: other constants of the kernel.
    """
    hidden_size, num_rows = out.shape[-1], check.num_rows(out)
    vec_size = check.vector_width(hidden_size, out, input)
    if twice and check.vector_width(hidden_size, out) >= 2 * vec_size:
        wave = out.device.multiprocessors * min_blocks * _CHUNK_THREADS  # threads that run at once
        vec_size *= 2 if num_rows * hidden_size >= 2 * vec_size * wave else 1
    config = choose_chunks(hidden_size // vec_size, num_rows)
    return kernel(
        scalar_t=input.dtype, **constants, VEC_SIZE=vec_size, **config.constants, MIN_BLOCKS=min_blocks
    ).launch(
        grid=config.grid,
        block=config.num_threads,
        num_rows=num_rows,
        hidden_size=hidden_size,
        input_stride=check.row_stride(input),
        **{out_stride: check.row_stride(out)},
        **(fixed or {}),
    )
