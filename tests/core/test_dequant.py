"""dequant.cuh: every quant of every type, with every zero point, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy
import pytest

from pyops._core.tensors import dtypes
from pyops.host.toolchain import toolchains

TEXT = """
#include "linear/dequant.cuh"
using quants_t = Quants<scalar_t, BITS, EXPONENT>;
extern "C" __global__ void unpack(scalar_t* out, const uint32_t* words, const uint32_t* zeros, float* factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0) *factor = quants_t::FACTOR * quants_t::SUM_FACTOR;
    if (i >= n) return;
    for (int pair = 0; pair < quants_t::PAIRS; ++pair) {
        const auto numbers = quants_t().pair(words[i], pair, quants_t::zero(zeros[i]));
        for (int j = 0; j < 2; ++j) out[i * 2 * quants_t::PAIRS + pair + j * quants_t::PAIRS] = numbers.data[j];
    }
}
"""
FLOATS = {(8, 4): ml_dtypes.float8_e4m3fn, (4, 2): ml_dtypes.float4_e2m1fn}


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16])
@pytest.mark.parametrize(("bits", "exponent"), [(2, 0), (4, 0), (8, 0), (8, 4), (4, 2)])
def test_every_quant(run_on_host: Callable[..., None], dtype: dtypes.DType, bits: int, exponent: int) -> None:
    codes = numpy.arange(2**bits)
    points = numpy.array([0]) if exponent else numpy.arange((256 if bits == 8 else 16) + 1)
    # Each position of a word takes every quant, and the quants of a word all differ.
    fields = (codes[:, None] + numpy.arange(32 // bits)[None] * 5) % 2**bits
    packed = (fields << bits * numpy.arange(32 // bits)).sum(1).astype(numpy.uint32)
    words, zeros = numpy.tile(packed, len(points)), numpy.repeat(points, len(packed)).astype(numpy.uint32)
    scalar: Any = numpy.float16 if dtype is dtypes.float16 else ml_dtypes.bfloat16
    out, factor = numpy.empty((len(words), 32 // bits), scalar), numpy.empty(1, numpy.float32)
    constants = {"scalar_t": dtype, "BITS": bits, "EXPONENT": exponent}
    grid = -(-len(words) // 256)
    given = {"out": out, "words": words, "zeros": zeros, "factor": factor, "n": len(words)}
    run_on_host(TEXT, grid=grid, block=256, **constants, **given)
    if exponent:
        right = fields.astype(numpy.uint8).view(FLOATS[bits, exponent]).astype(numpy.float64)
        right[numpy.isnan(right)] = 480.0
        right = numpy.copysign(right, numpy.where(fields >= 2 ** (bits - 1), -1.0, 1.0))
    else:
        right = (fields[None] - points[:, None, None]).reshape(out.shape)
    numpy.testing.assert_array_equal(out.astype(numpy.float64) * float(factor[0]), right)
