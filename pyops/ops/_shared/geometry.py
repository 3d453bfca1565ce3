"""How a matrix is spread over threads: rows that threads share (row.cuh), or vectors each on its own (chunk.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from ..._core import check
from ..._core.kernel import Kernel, Launch
from ..._core.tensor import TensorArg
from . import fp8

_NUM_THREADS = 256
_MAX_BLOCKS = 65535  # in the second and third dimension of a grid


def vectors(size: int, strides: Sequence[int], *tensors: TensorArg | None) -> tuple[int, bool]:
    """(elements of a vector, SHIFTED) for rows of `size` elements, `strides` apart in the tensors that have rows.

    A vector of full width if it divides every row. Also if SHIFTED rows can have it: all tensors begin aligned for it,
    those with rows are aligned at the same places of a row, and a row has threads for its edge. Otherwise the widest
    that divides every row. No `strides`: rows have no common one.
    """
    given = [arg for arg in tensors if arg]
    vec_size = check.vector_width(size, *given)
    full = 16 // max(arg.dtype.itemsize for arg in given)
    agree = len({stride % full for stride in strides}) == 1
    if vec_size < full and agree and size // full > 33 and all(a.alignment >= full * a.dtype.itemsize for a in given):
        return full, True
    return vec_size, False


def rows(
    row: TensorArg,
    num_rows: int,
    vectors: tuple[int, bool],
    many: tuple[int, int] = (3, 4),
    few: tuple[int, int] = (2, 4),
    held: int = 1,
    weights: int = 1,
    size: int | None = None,
    lanes: int = 1,
    resident: tuple[int, int] = (1024, 896),
    short: int = 4,
) -> tuple[int, dict[str, int]]:
    """(blocks, constants) for rows of `size` elements, the last dimension of `row` unless given.

    The constants say into what `vectors` a row is cut, how many threads share it and what they keep in registers.
    `many` and `few` are the vectors a thread should hold when rows follow each other on a multiprocessor (then bytes in
    flight count) and when all are there at once (then the way through one row does), `resident` the threads of a
    multiprocessor that find registers enough: each for short rows and for long ones. Of a row of up to 128 vectors, a
    warp's threads hold up to `short` each. The kernel holds `held` rows and
    `weights` weights at a time; `lanes` neighbouring threads work together and must share a row.
    """
    check.narrow(row)
    size = row.shape[-1] if size is None else size
    vec_size, shifted = vectors
    vec_bytes = vec_size * row.dtype.itemsize
    row_vecs = size // vec_size - shifted
    share = min(3, -(-num_rows // row.device.multiprocessors))  # rows for a multiprocessor; more than two are many
    constants = _row_constants(row_vecs, vec_bytes, shifted, share, many, few, held, weights, lanes, resident, short)
    if not weights:
        constants = {name: value for name, value in constants.items() if name != "KEEP_WEIGHT"}
    grid = -(-num_rows // (constants["NUM_THREADS"] // constants["ROW_THREADS"]))
    return grid, {"VEC_SIZE": vec_size, "SHIFTED": shifted, **constants}


@cache
def _row_constants(
    row_vecs: int,
    vec_bytes: int,
    shifted: bool,
    share: int,
    many: tuple[int, int],
    few: tuple[int, int],
    held: int,
    weights: int,
    lanes: int,
    resident: tuple[int, int],
    short_vecs: int,
) -> dict[str, int]:
    short = row_vecs <= 512
    vec_registers = max(1, vec_bytes // 4)
    vecs = few[not short]
    # Two rows are there at once if two blocks find registers: about 36 a thread beside those that hold vectors.
    pair = 2 * row_vecs * (36 / vecs + (held + weights) * vec_registers) <= 65536
    fill = share > (2 if pair else 1)
    narrow = fill and vec_bytes < 8
    if narrow:  # a vector takes one register, and more of them in flight make up for its size
        many, resident = (16, 16), (1536, 1536) if held == 1 else (896, 896)
    if row_vecs <= 128:  # several rows to a block, each on a power of two of lanes
        row_threads = lanes
        while row_threads < 32 and row_threads * short_vecs < row_vecs:
            row_threads *= 2
        num_threads = 128
    else:
        wanted = many[not short] if fill else vecs
        row_threads = num_threads = threads_for_row(row_vecs, wanted, max_vecs=4 if shifted else wanted + 2)
    rounds = -(-row_vecs // row_threads)
    one_row = rounds * vec_registers
    max_vecs = min(255, 65536 // num_threads) - (48 if shifted else 36)
    keep_row = held * one_row <= max_vecs
    # With many rows, a weight that is long, joins two rows or is put together is better read when it is used.
    keep_weight = (
        keep_row and (not fill or (short and held == 1 and not shifted)) and (held + weights) * one_row <= max_vecs
    )
    threads = resident[0] if narrow or (short and rounds <= 4) else resident[1]
    crowded = shifted and held > 1  # putting a weight together takes registers, too
    return {
        "NUM_THREADS": num_threads,
        "ROW_THREADS": row_threads,
        "KEEP_ROW": keep_row,
        "KEEP_WEIGHT": keep_weight,
        "MIN_BLOCKS": max(1, threads // num_threads - (rounds > 7 and not narrow) - crowded) if fill else 1,
    }


def converting(threads: dict[str, int], codes: TensorArg) -> dict[str, int]:
    """`threads` for a kernel that writes `codes`: converting to fp8 takes registers where the device cannot."""
    return threads if fp8.converts_to(codes) else {**threads, "MIN_BLOCKS": 1}


def threads_for_row(row_vecs: int, wanted: int, max_vecs: int) -> int:
    """Threads for a row of which each holds about `wanted` vectors, preferring a number that leaves few idle."""
    max_idle, best = 2.0, 1024
    for vecs in (wanted, wanted + 1, wanted + 2, wanted - 1):
        vecs = min(vecs, max_vecs)
        threads = check.threads(-(-row_vecs // max(1, vecs)))
        rounds = -(-row_vecs // threads)
        idle = (threads * rounds - row_vecs) / (threads * rounds)
        if rounds <= vecs and idle < max_idle - 0.08:
            max_idle, best = idle, threads
    return best


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
    """A launch in which every thread has one vector of `out` (chunk.cuh): of one of `input`, or `twice` as wide.

    The latter only if `out` has so wide ones, and if half as many threads still fill the device several times.

    `min_blocks` a multiprocessor keep the most bytes in flight; a kernel that needs more registers asks for fewer. What
    is `fixed` feeds parameters of the kernel beside sizes and strides.
    """
    hidden_size, num_rows = out.shape[-1], check.num_rows(out)
    vec_size = check.vector_width(hidden_size, out, input)
    if twice and check.vector_width(hidden_size, out) >= 2 * vec_size:
        fills = out.device.multiprocessors * min_blocks * _NUM_THREADS
        vec_size *= 2 if num_rows * hidden_size >= 2 * vec_size * fills else 1
    grid, threads = pieces(hidden_size // vec_size, num_rows)
    return kernel(scalar_t=input.dtype, **constants, VEC_SIZE=vec_size, **threads, MIN_BLOCKS=min_blocks).launch(
        grid=grid,
        block=_NUM_THREADS,
        num_rows=num_rows,
        hidden_size=hidden_size,
        input_stride=check.row_stride(input),
        **{out_stride: check.row_stride(out)},
        **(fixed or {}),
    )


def pieces(row_pieces: int, num_rows: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """(grid, constants) for threads that each have one of the `row_pieces` of a row (chunk.cuh)."""
    # Neighbouring threads that share a row: as many as leave few of them idle, but whole warps.
    widths = [1 << shift for shift in range(8, min(5, max(0, row_pieces - 1).bit_length()) - 1, -1)]
    row_threads = next((width for width in widths if -row_pieces % width <= row_pieces // 16), widths[-1])
    groups = -(-num_rows // (_NUM_THREADS // row_threads))
    planes = -(-groups // _MAX_BLOCKS)
    grid = -(-row_pieces // row_threads), -(-groups // max(1, planes)), planes
    return grid, {"NUM_THREADS": _NUM_THREADS, "ROW_THREADS": row_threads, "PLANES": planes > 1}
