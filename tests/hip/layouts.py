"""Operand and accumulator fragments of AMD's matrix cores, compared with AMD's tables lane by lane.

The tables are those of AMD's matrix instruction calculator (CDNA 2 and 3, RDNA 3 and 4). It lacks CDNA 4: its longer
instructions are assumed to be those of CDNA 3 with twice the registers. `check_registers` multiplies registers of any
content, `check_tiles` tiles in shared memory by product.cuh. Both run by the host backend
(tests/host/test_matrix_cores.py) and by the instruction emulator (`tests.hip emulate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy

from pyops._core.tensors import dtypes
from pyops._core.tensors.dtypes import DType
from tests.support.kernels import launched


@dataclass(frozen=True)
class Instruction:
    """One instruction: D[i, j] += sum_k A[i, k] * B[k, j], for 16 rows i and 16 columns j.

    Lane l holds row l % 16 of A and column l % 16 of B and of D.

    Attributes:
        k: elements of a sum.
        registers: of a lane, of A and of B alike.
        k_of: (lane, register, element of the register) to k.
        row_of: (lane, register of D) to i.
    """

    k: int
    registers: int
    k_of: Callable[[int, int, int], int]
    row_of: Callable[[int, int], int]


def _mfma_row(lane: int, register: int) -> int:
    return 4 * (lane // 16) + register


def _wmma_11_row(lane: int, register: int) -> int:
    return 2 * register + lane // 16


def _wmma_12_row(lane: int, register: int) -> int:
    return 8 * (lane // 16) + register


# By element size in bytes; CDNA 4 also has those of twice as many registers, and int8 those of CDNA 2.
MFMA = {
    2: Instruction(16, 2, lambda lane, gpr, e: 4 * (lane // 16) + 2 * gpr + e, _mfma_row),
    1: Instruction(32, 2, lambda lane, gpr, e: 8 * (lane // 16) + 4 * gpr + e, _mfma_row),
}
MFMA_LONG = {
    2: Instruction(32, 4, lambda lane, gpr, e: 8 * (lane // 16) + 2 * gpr + e, _mfma_row),
    1: Instruction(64, 4, lambda lane, gpr, e: 16 * (lane // 16) + 4 * gpr + e, _mfma_row),
}
MFMA_SHORT = {1: Instruction(16, 1, lambda lane, gpr, e: 4 * (lane // 16) + e, _mfma_row)}
WMMA_11 = {
    2: Instruction(16, 8, lambda lane, gpr, e: 2 * gpr + e, _wmma_11_row),
    1: Instruction(16, 4, lambda lane, gpr, e: 4 * gpr + e, _wmma_11_row),
}
WMMA_12 = {
    2: Instruction(16, 4, lambda lane, gpr, e: 8 * (gpr // 2) + 4 * (lane // 16) + 2 * (gpr % 2) + e, _wmma_12_row),
    1: Instruction(16, 2, lambda lane, gpr, e: 8 * (lane // 16) + 4 * gpr + e, _wmma_12_row),
}

REGISTERS = """#include "matrix_core.cuh"
extern "C" __global__ void registers(sum_t* d, const uint32_t* a, const uint32_t* b) {
    const int lane = threadIdx.x;
    uint32_t words[2][WORDS];
    sum_t sums[MATRIX_SUMS];
    for (int i = 0; i < WORDS; ++i) {
        words[0][i] = a[lane * WORDS + i];
        words[1][i] = b[lane * WORDS + i];
    }
    for (int i = 0; i < MATRIX_SUMS; ++i) sums[i] = d[lane * MATRIX_SUMS + i];
    matrix_multiply<scalar_t>(sums, words[0], words[1]);
    for (int i = 0; i < MATRIX_SUMS; ++i) d[lane * MATRIX_SUMS + i] = sums[i];
}
"""
TILES = """#include "product.cuh"
using tile_t = SwizzledTile<uint16_t, 8>;
extern "C" __global__ void tiles(sum_t* d, const uint16_t* a, const uint16_t* b) {
    __shared__ alignas(16) uint16_t memory[2 * 16 * 64];
    const tile_t rows{memory}, columns{memory + 16 * 64};
    const int lane = threadIdx.x;
    for (int i = lane; i < 16 * 64; i += WARP_SIZE) {
        rows.at(i / 64, i % 64 / 8)[i % 8] = a[i];
        columns.at(i / 64, i % 64 / 8)[i % 8] = b[i];
    }
    __syncthreads();
    constexpr int WORDS = IS_SHORT ? SHORT_WORDS : LOAD_WORDS, PARTS = 128 / (IS_SHORT ? 32 : LOAD_BYTES);
    for (int half = 0; half < 16 / PRODUCT_COLUMNS; ++half) {
        sum_t sums[PRODUCT_SUMS] = {};
        for (int part = 0; part < PARTS; ++part) {
            uint32_t words[2][WORDS];
            load_rows(words[0], rows, 0, part, lane);
            load_columns(words[1], columns, 0, part, lane);
            product<scalar_t>(sums, words[0], words[1], half);
        }
        for (int i = 0; i < PRODUCT_SUMS; ++i) {
            const int row = lane_row(lane) + i / ROW_SUMS * ROW_STEP;
            d[row * 16 + half * PRODUCT_COLUMNS + lane_column(lane) + i % ROW_SUMS] = sums[i];
        }
    }
}
"""


def _numpy(dtype: DType) -> Any:
    return numpy.dtype(dtype.name) if dtype in (dtypes.int8, dtypes.float16) else getattr(ml_dtypes, dtype.name)


def _values(dtype: DType, *shape: int, seed: int) -> Any:
    """Small integers with exact products and sums, as elements of the dtype."""
    most = 127 if dtype is dtypes.int8 else 15
    return numpy.random.default_rng(seed).integers(-most, most, shape, endpoint=True).astype(_numpy(dtype))


def check_registers(instruction: Instruction, dtype: DType, words: int, core: str = "") -> None:
    """matrix_core.cuh's MMA of registers matches the tables; it computes b times the transpose of a."""
    lanes, sums = (64, 4) if instruction.row_of is _mfma_row else (32, 8)
    elements = 4 // dtype.itemsize
    a, b = (_values(dtype, lanes, words * elements, seed=seed) for seed in (0, 1))
    if instruction.row_of is _wmma_11_row:
        a[16:], b[16:] = a[:16], b[:16]
    kind = numpy.int32 if dtype is dtypes.int8 else numpy.float32
    d = numpy.random.default_rng(2).integers(-99, 99, (lanes, sums)).astype(kind)
    expected = d.astype(float)
    for first in range(0, words, instruction.registers):
        of_b, of_a = numpy.zeros((2, 16, instruction.k))
        for lane in range(lanes):
            for register in range(instruction.registers):
                for e in range(elements):
                    k = instruction.k_of(lane, register, e)
                    of_b[lane % 16, k] = b[lane, (first + register) * elements + e]
                    of_a[lane % 16, k] = a[lane, (first + register) * elements + e]
        products = of_b @ of_a.T
        for lane in range(lanes):
            for register in range(sums):
                expected[lane, register] += products[instruction.row_of(lane, register), lane % 16]
    text = (f"#define PYOPS_HOST_CORE {core}\n" if core else "") + REGISTERS
    sum_t = dtypes.int32 if dtype is dtypes.int8 else dtypes.float32
    given = {name: one.view(numpy.uint32) for name, one in (("a", a), ("b", b))}
    launched(text, grid=1, block=lanes, scalar_t=dtype, sum_t=sum_t, WORDS=words, d=d, **given)
    assert numpy.array_equal(d, expected), f"{dtype} of {words} registers"


def check_tiles(dtype: DType, lanes: int, short: bool, core: str = "") -> None:
    """product.cuh's fragments of tiles in shared memory: rows of a by rows of b."""
    a, b = (_values(dtype, 16, 128 // dtype.itemsize, seed=seed) for seed in (3, 4))
    expected = a.astype(float) @ b.astype(float).T
    d = numpy.zeros((16, 16), numpy.int32 if dtype is dtypes.int8 else numpy.float32)
    text = (f"#define PYOPS_HOST_CORE {core}\n" if core else "") + TILES
    sum_t = dtypes.int32 if dtype is dtypes.int8 else dtypes.float32
    given = {name: one.view(numpy.uint16) for name, one in (("a", a), ("b", b))}
    launched(text, grid=1, block=lanes, scalar_t=dtype, sum_t=sum_t, IS_SHORT=short, d=d, **given)
    assert numpy.array_equal(d, expected), f"{dtype} {'short' if short else 'long'}"


# (table by element size in bytes, dtypes, registers per lane of one MMA): the instructions of matrix_core.cuh on each.
_HALVES, _FP8 = (dtypes.float16, dtypes.bfloat16), (dtypes.float8_e4m3fn, dtypes.float8_e5m2)
_BY_ARCH: dict[str, list[tuple[dict[int, Instruction], tuple[DType, ...], tuple[int, ...]]]] = {
    "gfx90a": [(MFMA, _HALVES, (2, 4)), (MFMA_SHORT, (dtypes.int8,), (2, 4))],
    "gfx942": [(MFMA, (*_HALVES, dtypes.int8, dtypes.float8_e4m3fnuz), (2, 4))],
    "gfx950": [
        (MFMA, (*_HALVES, dtypes.int8), (2,)),
        (MFMA_LONG, (*_HALVES, dtypes.int8), (4,)),
        (MFMA, _FP8, (2, 4)),
    ],
    "gfx1100": [(WMMA_11, (*_HALVES, dtypes.int8), (8,))],
    "gfx1201": [(WMMA_12, (*_HALVES, dtypes.int8, *_FP8), (4,))],
}


def check_arch(arch: str) -> None:
    """Every MMA that matrix_core.cuh has on an architecture, by whichever backend launches CPU kernels now."""
    for table, kinds, widths in _BY_ARCH[arch]:
        for dtype in kinds:
            for words in widths:
                check_registers(table[dtype.itemsize], dtype, words)
    lanes = 32 if arch.startswith("gfx1") else 64
    for dtype in (dtypes.float16, dtypes.bfloat16, dtypes.int8):
        for short in (False, True):
            check_tiles(dtype, lanes, short)
