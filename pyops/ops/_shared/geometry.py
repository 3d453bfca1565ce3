"""Launch geometry of kernels that reduce rows with several threads per row (row.cuh).

`choose_rows` returns a RowConfig: the compile-time constants of a kernel, and its number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

from ... import check, tuning
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType
from ..._core.tensors.tensor import TensorArg

# "Rows" below is docs/performance/rows.md, measured on an H200.

_LONG_ROW_VECS = 512  # vectors of a row: longer rows have their own tuning (Rows: 4096 and 14336 elements)
WARP_ROW_VECS = 128  # vectors of a row up to which at most one warp reduces it; for 512 one warp is slower (Rows)
_WARP_SIZE = 32  # most lanes that share a row: a warp, or half of a warp of 64 lanes
WARP_ROW_BLOCK = 128  # threads of a block where a row takes at most one warp
_FEW_THREAD_VECS = 4  # vectors per thread: with more, a short row allows only `resident[1]` threads per SM
_MANY_THREAD_VECS = 7  # vectors per thread: with more, one block fewer is resident
# Unaligned rows have vectors of less than 8 bytes, and more of them in flight per thread (Rows, "Odd sizes").
_NARROW_VEC_BYTES = 8
_NARROW_VECS = 16  # vectors per thread
_NARROW_RESIDENT = 1536, 896  # resident threads per SM, for kernels that hold one row and for those that hold more
# A deviation from the wanted vectors per thread must leave at least 8 % fewer threads idle. Any threshold from 7 to
# 10 % gives the shapes that were fastest for rows of 14336 (Rows: 448 threads x 4 vectors, 320 x 6, 256 x 7), and whole
# warps for powers of two.
_MIN_IDLE_GAIN = 0.08

# An NVIDIA GPU, to estimate how many blocks fit on an SM.
_SM_THREADS = 2048  # threads of an SM
_SM_REGISTERS = 65536  # registers of an SM
_REGISTER_STEP = 8  # a thread is given a multiple of these registers
_MAX_THREAD_REGISTERS = 255  # most registers of a thread
# If registers of a thread are bounded, the compiler can save some of the others, and needs some for each vector of a
# row. With fewer, norms of 8192 elements spill, and so do those of SHIFTED rows with any bound (NVRTC 13.0, sm_90).
_SAVED_REGISTERS = 12
_VECTOR_REGISTERS = 2
_OTHER_REGISTERS = 36  # registers of a thread other than those that hold vectors
_OTHER_REGISTERS_SHIFTED = 48  # the same for SHIFTED rows, which assemble each weight vector from two loads
# Architectures on which a kernel of SHIFTED rows that is `tight` spills if its registers are bounded.
_SPILLING_ARCHS = ("sm_100",)
_MAX_SHIFTED_VECS = 4  # vectors per thread of SHIFTED rows
# Fewest vectors of a SHIFTED row: at least 16 lanes then share the row, one for each element before the first and after
# the last vector.
_MIN_SHIFTED_ROW_VECS = 34
_MAX_CANDIDATE_VECS = 8  # vectors per thread of a long row that tuning tries


class RowVectors(NamedTuple):
    """The division of rows into vectors: elements of a vector, and whether rows are SHIFTED (row.cuh)."""

    vec_size: int
    shifted: bool = False


@dataclass(frozen=True, eq=False)
class RowTuning:
    """The measured optimum for a row kernel. Declared once, next to the op; compared by identity.

    Each pair is for (short rows, long rows): up to `_LONG_ROW_VECS` vectors, and more.

    Attributes:
        many: vectors per thread when the grid has several waves of blocks (bandwidth bound).
        few: vectors per thread when an SM holds all its rows at once (latency bound).
        resident: threads per SM that the registers of the kernel allow.
        rows: rows that a thread holds in registers at the same time, 2 for input and residual.
        weights: weight vectors that a thread holds in addition to its rows; 0 for a kernel without KEEP_WEIGHT.
        lane_vecs: vectors per lane of a row that a warp or less shares.
        spare_blocks: blocks per SM to give up, for arithmetic that takes registers while rows are held.
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


class RowProblem(NamedTuple):
    """The input of `_choose`; the fields are described at the arguments of `choose_rows`."""

    size: int
    dtype: DType
    num_rows: int
    vectors: RowVectors
    measured: RowTuning
    lanes: int
    bound_registers: bool

    def bucket(self) -> str:
        words = [
            f"rows={tuning.power_of_two(self.num_rows)}",
            f"elements={self.size}",
            self.dtype.name,
            f"vec_size={self.vectors.vec_size}",
            f"held={self.measured.rows}+{self.measured.weights}",
        ]
        words += ["shifted"] if self.vectors.shifted else []
        words += [f"lanes={self.lanes}"] if self.lanes > 1 else []
        return " ".join(words)


@dataclass(frozen=True)
class RowConfig:
    """The geometry of a kernel of rows; the attributes are the constants of the kernel.

    Attributes:
        vec_size: elements of a vector.
        shifted: whether vectors begin where memory is aligned, not where the row begins.
        num_threads: threads of a block.
        row_threads: threads that share a row.
        keep_row: whether the row stays in registers between its two passes.
        keep_weight: whether the weight stays in registers, too; None for a kernel without a weight.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
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
        """The kernel's compile-time constants by name."""
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
        """Blocks for `num_rows` rows."""
        return -(-num_rows // (self.num_threads // self.row_threads))

    def candidates(self, problem: RowProblem, device: Device) -> list[RowConfig]:
        """Other threads per row, other register bounds, and row or weight kept in registers or read again."""
        row_vecs = problem.size // self.vec_size - self.shifted
        if row_vecs <= WARP_ROW_VECS:
            # Each element before and after the vectors of a SHIFTED row needs a lane: fewer than two vectors hold.
            min_lanes = max(problem.lanes, 2 * self.vec_size if self.shifted else 1)
            shapes = [(WARP_ROW_BLOCK, 1 << i) for i in range(_WARP_SIZE.bit_length()) if 1 << i >= min_lanes]
        else:
            shapes = [(check.threads(-(-row_vecs // vecs)),) * 2 for vecs in range(1, _MAX_CANDIDATE_VECS + 1)]
        found = [tuning.resized(self, threads, row_threads=row_threads) for threads, row_threads in shapes]
        keeps = {"keep_row": (not self.keep_row,)}
        if self.keep_weight is not None:
            keeps["keep_weight"] = (not self.keep_weight,)
        return found + tuning.varied(self, **keeps, min_blocks=tuning.occupancies(self.num_threads, self.min_blocks))


def row_vectors(size: int, strides: Sequence[int], *tensors: TensorArg | None) -> RowVectors:
    """Divide rows of `size` elements into vectors for which all of `tensors` are aligned.

    `strides` are the distances between rows in the tensors that have rows; none if rows have no common distance.

    Vectors have full width, 16 bytes of the widest dtype, if that divides every row. Full width is also possible with
    SHIFTED rows: all tensors begin aligned, those with rows are aligned at the same offsets of each row, and a row has
    enough threads for the elements before and after its vectors. Otherwise vectors have the widest width that divides
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
    measured: RowTuning,
    *,
    size: int | None = None,
    lanes: int = 1,
    bound_registers: bool = True,
) -> RowConfig:
    """The geometry of a kernel for `num_rows` rows of the dtype of `row`.

    Args:
        row: a tensor with rows along its last dimension; gives dtype, device and the size of a row.
        num_rows: rows of the launch.
        vectors: how rows are divided into vectors, see `row_vectors`.
        measured: the kernel's tuning.
        size: elements of a row, if the last dimension of `row` holds several of them.
        lanes: least number of adjacent threads that share a row, because they reduce a group together.
        bound_registers: False for MIN_BLOCKS = 1: for arithmetic that needs more registers than `measured` assumes,
            such as a conversion to fp8 on a device without the instruction.
    """
    check.narrow(row)
    size = row.shape[-1] if size is None else size
    problem = RowProblem(size, row.dtype, num_rows, vectors, measured, lanes, bound_registers)
    return tuning.config(row.op, problem, row.device, _choose)


def _choose(problem: RowProblem, device: Device) -> RowConfig:
    """The choice of `choose_rows`.

    If an SM holds all its rows at once, nothing hides the latency of a row: it is loaded, reduced, weighted and stored.
    The weight is then read ahead of the reduction, and a thread has few vectors. Otherwise rows hide each other's
    latency, and the launch is bound by bandwidth.
    """
    size, dtype, num_rows, vectors, measured, lanes, bound_registers = problem
    sm_rows = -(-tuning.pinned(num_rows) // device.num_sms)
    bounds = bound_registers and not (vectors.shifted and measured.tight and device.arch in _SPILLING_ARCHS)
    for resident, config in _geometries(size, dtype.itemsize, vectors, measured, lanes, bounds):
        if sm_rows <= resident:
            return config
    raise AssertionError("the last geometry is for any number of rows")


class _Shape(NamedTuple):
    """Threads of a row and of a block, vectors of a thread, and registers: of a vector, and those that hold none."""

    row_threads: int
    num_threads: int
    thread_vecs: int
    vec_registers: int
    other_registers: int

    def registers(self, held: int) -> int:
        """Registers of a thread that holds so many rows and weights."""
        return held * self.thread_vecs * self.vec_registers + self.other_registers

    def resident(self, held: int, bound: bool) -> int:
        """Blocks that an SM can hold, if the compiler bounds registers or not."""
        registers = self.registers(held) + _VECTOR_REGISTERS * self.thread_vecs - _SAVED_REGISTERS * bound
        registers = -(-registers // _REGISTER_STEP) * _REGISTER_STEP
        return min(_SM_THREADS // self.num_threads, _SM_REGISTERS // (registers * self.num_threads))


@cache  # A plan miss must not pay for the choice: a serving process meets few row sizes and many row counts.
def _geometries(
    size: int, itemsize: int, vectors: RowVectors, measured: RowTuning, lanes: int, bound_registers: bool
) -> list[tuple[float, RowConfig]]:
    """[(most rows of an SM, config)] in order of preference; the last is for any number of rows."""
    vec_size, shifted = vectors
    long = size // vec_size - shifted > _LONG_ROW_VECS
    held, found = measured.rows + measured.weights, list[tuple[float, RowConfig]]()
    bounds = bound_registers and not shifted

    def add(resident: float, shape: _Shape, keep_weight: bool, min_blocks: int) -> None:
        free = min(_MAX_THREAD_REGISTERS, _SM_REGISTERS // shape.num_threads)
        keep_row = shape.registers(measured.rows) <= free
        keep_weight = keep_weight and keep_row and shape.registers(held) <= free
        kept = keep_weight if measured.weights else None
        threads = shape.num_threads, shape.row_threads
        found.append((resident, RowConfig(vec_size, shifted, *threads, keep_row, kept, min_blocks)))

    for wanted_vecs in (measured.few[long], measured.many[long]):
        shape = _shape(size, itemsize, vectors, wanted_vecs, lanes, measured.lane_vecs)
        # Whether the kernel bounds its registers does not count: norms with and without quantization divide rows alike.
        blocks = shape.resident(held, not shifted)
        # One row per SM takes this geometry even if an SM cannot hold it by the estimate.
        add(max(1, blocks) * (shape.num_threads // shape.row_threads), shape, True, max(1, blocks * bounds))
    narrow = vec_size * itemsize < _NARROW_VEC_BYTES
    wanted_vecs, resident = (
        (_NARROW_VECS, (_NARROW_RESIDENT[measured.rows > 1],) * 2)
        if narrow
        else (measured.many[long], measured.resident)
    )
    shape = _shape(size, itemsize, vectors, wanted_vecs, lanes, measured.lane_vecs)
    min_blocks = 1
    if bound_registers:
        resident_threads = resident[long or shape.thread_vecs > _FEW_THREAD_VECS]
        spare_blocks = measured.spare_blocks + (shape.thread_vecs > _MANY_THREAD_VECS and not narrow)
        spare_blocks += shifted and measured.rows > 1  # assembling a weight vector takes registers while rows are held
        min_blocks = max(1, resident_threads // shape.num_threads - spare_blocks)
    # A weight that is long, is SHIFTED or is needed together with two rows is read when it is used: the saved registers
    # allow another resident block (Rows, "Where the weight is read").
    add(inf, shape, measured.rows == 1 and not long and not shifted, min_blocks)
    return found


def _shape(size: int, itemsize: int, vectors: RowVectors, wanted_vecs: int, lanes: int, lane_vecs: int) -> _Shape:
    """The threads of a row with about `wanted_vecs` vectors to a thread."""
    vec_size, shifted = vectors
    row_vecs = size // vec_size - shifted
    if row_vecs <= WARP_ROW_VECS:
        row_threads, num_threads = _lanes_for_row(row_vecs, lanes, lane_vecs), WARP_ROW_BLOCK
    else:
        max_vecs = _MAX_SHIFTED_VECS if shifted else wanted_vecs + 2
        row_threads = num_threads = threads_for_row(row_vecs, wanted_vecs, max_vecs)
    others = _OTHER_REGISTERS_SHIFTED if shifted else _OTHER_REGISTERS
    return _Shape(row_threads, num_threads, -(-row_vecs // row_threads), max(1, vec_size * itemsize // 4), others)


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
