"""Checks that 16-bit operands from register 128 on are read whole, as CDNA does (`repairs` fixes it)."""

from __future__ import annotations

import numpy

from tests.support.kernels import launched

_CONVERT = """#include "platform.cuh"
extern "C" __global__ void convert(float* y, const uint16_t* x) {
    const uint32_t half = x[threadIdx.x];
    // v168 - 128 = v40, whose upper half is 1.
    asm volatile("v_mov_b32 v40, 0x3c003c00\\nv_mov_b32 v168, %1\\nv_cvt_f32_f16 %0, v168"
                 : "=v"(y[threadIdx.x])
                 : "v"(half)
                 : "v40", "v168");
}
"""


def check_arch(arch: str) -> None:
    """float16 in register 168 becomes float32, on CDNA; RDNA has no instruction that reads it there."""
    if arch.startswith("gfx9"):
        x, y = numpy.arange(64, dtype=numpy.float16), numpy.zeros(64, numpy.float32)
        launched(_CONVERT, grid=1, block=64, y=y, x=x.view(numpy.uint16))
        assert numpy.array_equal(y, x), y
