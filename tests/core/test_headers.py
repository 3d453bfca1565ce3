"""Functions of kernels_cu/include that several families call, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy
import pytest

from pyops._core.tensors import dtypes
from pyops._core.tensors.dtypes import DType
from pyops.host.toolchain import toolchains
from pyops.testing import SCHEDULES, scheduled

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

MOVED = """#include "vec.cuh"
extern "C" __global__ void moved(scalar_t* loaded, scalar_t* loaded_once, const scalar_t* in) {
    using vec_t = Vec<scalar_t, SIZE>;
    const int first = threadIdx.x * SIZE;
    vec_t::load<ACCESS>(in + first).store<ACCESS>(loaded + first);
    vec_t::load_once<ACCESS>(in + first).store<ACCESS>(loaded_once + first);
}
"""


@pytest.mark.parametrize(
    ("dtype", "native", "size", "access"),
    [
        (dtypes.float32, numpy.float32, 4, 1),
        (dtypes.bfloat16, ml_dtypes.bfloat16, 8, 4),
        (dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 16, 2),
        (dtypes.float16, numpy.float16, 8, 8),
    ],
)
def test_vector_of_several_accesses(
    run_on_host: Callable[..., None], dtype: DType, native: Any, size: int, access: int
) -> None:
    """Every element is moved once, at addresses with the alignment of one access alone."""
    count = 64 * size
    values = numpy.arange(count * dtype.itemsize, dtype=numpy.uint64).astype(numpy.uint8).view(native)
    arrays = {name: _at(access, count, native) for name in ("loaded", "loaded_once", "in")}
    arrays["in"][:] = values
    run_on_host(MOVED, grid=1, block=64, scalar_t=dtype, SIZE=size, ACCESS=access, **arrays)
    for name in ("loaded", "loaded_once"):
        assert arrays[name].tobytes() == values.tobytes()


def _at(start: int, count: int, native: Any) -> Any:
    """An array that begins `start` elements after a multiple of 16 bytes."""
    memory = numpy.zeros(count * numpy.dtype(native).itemsize + 64, numpy.uint8)
    first = -memory.ctypes.data % 16 + start * numpy.dtype(native).itemsize
    return memory[first:].view(numpy.uint8)[: count * numpy.dtype(native).itemsize].view(native)


SWIZZLED = """#include "tma.cuh"
extern "C" __global__ void swizzled(int* at) {
    for (int row = 0; row < 16; ++row) at[row * 128 + threadIdx.x] = swizzle_128b(row, threadIdx.x);
}
"""


@pytest.mark.slow
def test_swizzled_box_keeps_16_byte_units(run_on_host: Callable[..., None]) -> None:
    """The 16-byte units of a row swap with those of other columns, by the row's index; bytes within them stay in
    order."""
    at = numpy.zeros((16, 128), numpy.int32)
    run_on_host(SWIZZLED, grid=1, block=128, at=at)
    for row in range(16):
        assert [at[row, c] - 128 * row for c in range(128)] == [(c // 16 ^ row % 8) * 16 + c % 16 for c in range(128)]


FP8 = """#include "number.cuh"
extern "C" __global__ void decoded(float* e4m3, float* e5m2, float* fnuz, uint8_t* again) {
    const uint8_t code = threadIdx.x;
    Fp8<3, 0x7e, false> a;
    Fp8<2, 0x7b, false> b;
    Fp8<3, 0x7f, true> c;
    a.code = b.code = c.code = code;
    e4m3[code] = float(a), e5m2[code] = float(b), fnuz[code] = float(c);
    again[code] = Fp8<3, 0x7e, false>(float(a)).code;
    again[code + 256] = Fp8<2, 0x7b, false>(float(b)).code;
    again[code + 512] = Fp8<3, 0x7f, true>(float(c)).code;
}
"""


def test_fp8_by_integer_arithmetic(run_on_host: Callable[..., None]) -> None:
    """Every fp8 value that some platform has no instruction for, in both directions."""
    kinds = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "fnuz": ml_dtypes.float8_e4m3fnuz}
    found = {name: numpy.zeros(256, numpy.float32) for name in kinds}
    again, codes = numpy.zeros((3, 256), numpy.uint8), numpy.arange(256, dtype=numpy.uint8)
    run_on_host(FP8, grid=1, block=256, again=again, **found)
    for (name, kind), there in zip(kinds.items(), again, strict=True):
        right = codes.view(kind).astype(numpy.float32)
        numpy.testing.assert_array_equal(found[name], right)
        finite = numpy.isfinite(right)
        assert (there[finite] == codes[finite]).all()
        assert numpy.isnan(there.view(kind)[numpy.isnan(right)].astype(numpy.float32)).all()


# Four integers as int8, four bytes as floats, and sums of pairs of 16 bits. Elements next to the results stay 7.
FOURS = """#include "packed.cuh"
extern "C" __global__ void fours(int8_t* small, float* bytes, uint32_t* sums, const int* in, int word) {
    store_four_integers(small + 1, in);
    float x[6] = {7, 7, 7, 7, 7, 7};
    bytes_to_floats(uint32_t(word), 3.0f, x + 1);
    for (int i = 0; i < 6; ++i) bytes[i] = x[i];
    sums[0] = min_of_sums(0x00010fffu, 0x00020001u, 0xffffffffu);
    sums[1] = min_of_sums(0xfffffff0u, 0x00020020u, 0x00000008u);
    sums[2] = min_of_sums(0xffff0003u, 0x00010004u, 0x00050006u);
}
"""


def test_packed_fours_and_pairs(run_on_host: Callable[..., None]) -> None:
    small, bytes_ = numpy.full(6, 7, numpy.int8), numpy.zeros(6, numpy.float32)
    sums, values = numpy.zeros(3, numpy.uint32), numpy.array([-1000, 127, -128, 300], numpy.int32)
    run_on_host(FOURS, grid=1, block=1, small=small, bytes=bytes_, sums=sums, word=0x04F00A02, **{"in": values})
    assert small.tolist() == [7, -128, 127, -128, 127, 7]
    assert bytes_.tolist() == [7, -1, 7, 237, 1, 7]
    assert [hex(word) for word in sums] == ["0x31000", "0x8", "0x6"]


CHUNKS = """#include "elementwise.cuh"
extern "C" __global__ void chunks(int64_t* rows, int64_t num_rows) {
    const Chunk<1 << 20, 1, 1, false> at(num_rows, 1);
    rows[blockIdx.y] = at.inside ? at.row : -1;
}
"""


def test_rows_beyond_32_bits(run_on_host: Callable[..., None]) -> None:
    rows = numpy.zeros(4099, numpy.int64)
    run_on_host(CHUNKS, grid=(1, 4099), block=1, rows=rows, num_rows=(4098 << 20) + 1)
    assert (rows == numpy.arange(4099) << 20).all()


LANES = """#include "platform.cuh"
extern "C" __global__ void lanes(int64_t* ballots, int* sources) {
    ballots[threadIdx.x] = int64_t(ballot(threadIdx.x % 5 == 1) & ALL_LANES);
    sources[threadIdx.x] = shfl<WARP_SIZE>(int(threadIdx.x), int(threadIdx.x) / 2);
}
"""


@pytest.mark.parametrize("warp_size", [32, 64])
def test_lanes_of_a_warp(run_on_host: Callable[..., None], warp_size: int) -> None:
    ballots, sources = numpy.zeros(128, numpy.int64), numpy.zeros(128, numpy.int32)
    with scheduled(SCHEDULES[0], warp_size=warp_size):
        run_on_host(LANES, grid=1, block=128, ballots=ballots, sources=sources)
    for thread in range(128):
        first = thread // warp_size * warp_size
        assert ballots[thread] == sum(1 << lane for lane in range(warp_size) if (first + lane) % 5 == 1)
        assert sources[thread] == first + thread // 2 % warp_size
