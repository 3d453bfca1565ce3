"""MMA with block scales on the host backend against numpy: the layouts of fragments and scales, and their formats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy
import pytest

from pyops.host.toolchain import toolchains
from pyops.testing import SCHEDULES, scheduled
from tests.support.kernels import Run

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

# Registers of each lane, and selectors, as they are given.
REGISTERS = """#include "linear/mma_block_scaled.cuh"
extern "C" __global__ void product(float* d, const uint32_t* a, const uint32_t* b, const uint32_t* scales) {
    const int lane = threadIdx.x;
    const uint32_t fa[4] = {a[lane * 4], a[lane * 4 + 1], a[lane * 4 + 2], a[lane * 4 + 3]};
    const uint32_t fb[2] = {b[lane * 2], b[lane * 2 + 1]};
    float sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = d[lane * 4 + i];
    mma_block_scaled<QUANT, BLOCK>(sum, fa, fb, scales[lane * 2], scales[lane * 2 + 1], BYTE, PAIR, LANE);
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}
"""
# (type of values, values under one scale, type of scales)
FORMATS = [
    ("float8_e4m3fn", 32, "float8_e8m0fnu"),
    ("float4_e2m1fn", 32, "float8_e8m0fnu"),
    ("float4_e2m1fn", 16, "float8_e4m3fn"),
]


@pytest.mark.parametrize(("kind", "block", "scale_kind"), FORMATS)
def test_layouts(run_on_host: Run, kind: str, block: int, scale_kind: str) -> None:
    """Every element is drawn in its matrix, and put where the PTX manual has it. Results are rounded once."""
    rng = numpy.random.default_rng(3)
    per_word = 8 if kind == "float4_e2m1fn" else 4
    k = 8 * per_word
    count = k // block  # scales of a row
    quants = [rng.integers(0, 16 if per_word == 8 else 0x58, shape).astype(numpy.uint8) for shape in ((16, k), (k, 8))]
    is_e8m0 = scale_kind == "float8_e8m0fnu"
    low, high = (124, 131) if is_e8m0 else (0x30, 0x48)
    scale_bytes = [rng.integers(low, high, shape).astype(numpy.uint8) for shape in ((16, count), (count, 8))]
    a, b = (one.view(getattr(ml_dtypes, kind)).astype(float) for one in quants)
    sfa, sfb = (one.view(getattr(ml_dtypes, scale_kind)).astype(float) for one in scale_bytes)
    start = rng.integers(-100, 100, (16, 8)).astype(numpy.float32)
    exact = start + (a * sfa.repeat(block, 1)) @ (b * sfb.repeat(block, 0))
    bits = 32 // per_word

    def word(values: Any) -> int:
        return sum(int(value) << bits * i for i, value in enumerate(values))

    words_a, words_b = numpy.zeros((32, 4), numpy.uint32), numpy.zeros((32, 2), numpy.uint32)
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(4):
            first = thread * per_word + (k // 2 if i >= 2 else 0)
            words_a[lane, i] = word(quants[0][group + (8 if i in (1, 3) else 0), first : first + per_word])
        for i in range(2):
            first = thread * per_word + (k // 2 if i else 0)
            words_b[lane, i] = word(quants[1][first : first + per_word, group])
    for byte in range(0, 4, count):
        for pair, thread_b in ((0, 0), (1, 3), (0, 2), (1, 1)):
            scales = rng.integers(0, 2**32, (32, 2), dtype=numpy.uint64).astype(numpy.uint32)  # of no meaning
            for lane in range(32):
                group, thread = divmod(lane, 4)
                for column, wanted, of_lane in (
                    (0, thread // 2 == pair, scale_bytes[0][group + thread % 2 * 8]),
                    (1, thread == thread_b, scale_bytes[1][:, group]),
                ):
                    for s in range(count if wanted else 0):
                        at = 8 * (byte + s)
                        kept = int(scales[lane, column]) & ~(255 << at)
                        scales[lane, column] = kept | int(of_lane[s]) << at
            constants = {"QUANT": f"fp{bits}_e{'2m1' if bits == 4 else '4m3'}_t", "BLOCK": block}
            text = REGISTERS
            for name, value in {**constants, "BYTE": byte, "PAIR": pair, "LANE": thread_b}.items():
                text = text.replace(name, str(value))
            d = numpy.zeros((32, 4), numpy.float32)
            rows = [[lane // 4 + i // 2 * 8 for i in range(4)] for lane in range(32)]
            columns = [[lane % 4 * 2 + i % 2 for i in range(4)] for lane in range(32)]
            d[:] = start[rows, columns]
            with scheduled(SCHEDULES[-1]):
                run_on_host(text, grid=1, block=32, d=d, a=words_a, b=words_b, scales=scales)
            assert numpy.array_equal(d, exact[rows, columns].astype(numpy.float32))


def test_special_scales(run_on_host: Run) -> None:
    """e8m0 255 is NaN and 0 is 2^-127; e4m3 scales have no sign, and 0x7f and 0xff are NaN."""
    one = {8: 0x38383838, 4: 0x22222222}
    for bits, block, byte, wanted in (
        (8, 32, 0, 32 * 2.0**-127),
        (8, 32, 255, numpy.nan),
        (4, 16, 0xB8, 64.0),
        (4, 16, 0x01, 64 * 2.0**-9),
        (4, 16, 0xFF, numpy.nan),
        (4, 16, 0x7F, numpy.nan),
    ):
        unit = 127 if block == 32 else 0x38
        scales = numpy.array([[byte * 0x01010101, unit * 0x01010101]] * 32, numpy.uint32)
        d = numpy.zeros((32, 4), numpy.float32)
        a, b = (numpy.full((32, count), one[bits], numpy.uint32) for count in (4, 2))
        text = REGISTERS
        quant = "fp8_e4m3_t" if bits == 8 else "fp4_e2m1_t"
        for name, value in {"QUANT": quant, "BLOCK": block, "BYTE": 0, "PAIR": 0, "LANE": 0}.items():
            text = text.replace(name, str(value))
        run_on_host(text, grid=1, block=32, d=d, a=a, b=b, scales=scales)
        assert numpy.array_equal(d, numpy.full((32, 4), wanted, numpy.float32), equal_nan=True)
