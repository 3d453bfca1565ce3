"""Functions of kernels_cu/include that kernels of every family call, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy
import pytest

from pyops._core import dtypes
from pyops._core.dtypes import DType
from pyops._core.host.toolchain import toolchains

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
def test_a_vector_of_several_accesses(
    run_on_host: Callable[..., None], dtype: DType, native: Any, size: int, access: int
) -> None:
    """Every element is moved once, at addresses that are aligned for one access alone."""
    count = 64 * size
    values = numpy.arange(count * dtype.itemsize, dtype=numpy.uint64).astype(numpy.uint8).view(native)
    arrays = {name: _at(access, count, native) for name in ("loaded", "loaded_once", "in")}
    arrays["in"][:] = values
    run_on_host(MOVED, grid=1, block=64, scalar_t=dtype, SIZE=size, ACCESS=access, **arrays)
    for name in ("loaded", "loaded_once"):
        assert arrays[name].tobytes() == values.tobytes()


def _at(start: int, count: int, native: Any) -> Any:
    """An array that begins `start` elements behind a multiple of 16 bytes."""
    memory = numpy.zeros(count * numpy.dtype(native).itemsize + 64, numpy.uint8)
    first = -memory.ctypes.data % 16 + start * numpy.dtype(native).itemsize
    return memory[first:].view(numpy.uint8)[: count * numpy.dtype(native).itemsize].view(native)
