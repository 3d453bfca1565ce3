"""Every fault that the host backend reports, injected into a kernel that is right without it.

Accesses outside of tensors are in test_host_bounds.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import pyops
from pyops.host import toolchain
from pyops.testing import SCHEDULES, Schedule, scheduled
from tests.support.kernels import line_of

pytestmark = pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")

Run = Callable[..., None]
Array = numpy.ndarray[Any, Any]


def floats(count: int) -> Array:
    return numpy.arange(count, dtype=numpy.float32)


SHARED = """#include "reduce.cuh"
extern "C" __global__ void reversed(float* out, const float* in) {
    DECLARATION
    const int i = threadIdx.x;
    tile[i] = in[i];
    __syncthreads();
    out[i] = tile[/*FAULT:64*/63/*END*/ - i];  // HERE
}
"""


# A sanitizer sees the index only in a direct access to the array.
SHARED_KINDS = ("out-of-bounds shared access", "out-of-bounds array index")


@pytest.mark.parametrize(
    ("declaration", "shared"),
    [
        ("__shared__ float tile[64];", 0),
        ("__shared__ float array[64]; float* const tile = array;", 0),
        ("extern __shared__ alignas(16) float tile[];", 256),
        (
            "extern __shared__ alignas(16) unsigned char bytes[]; float* const tile = reinterpret_cast<float*>(bytes);",
            256,
        ),
        ("__shared__ float before[3]; __shared__ alignas(16) float tile[64]; before[0] = 0;", 0),
    ],
)
def test_out_of_bounds_shared(caught: Any, declaration: str, shared: int) -> None:
    text = SHARED.replace("DECLARATION", declaration)
    if "before" in declaration:
        text = text.replace(" before[0] = 0;", " if (threadIdx.x == 0) before[0] = 0;")
    out = floats(64)
    how = {"grid": 1, "block": 64, "shared": shared, "out": out, "in": floats(64)}
    fault = caught(SHARED_KINDS, text, lambda: bool((out == floats(64)[::-1]).all()), **how)
    assert fault.thread == (0, 0, 0)
    assert fault.kind == SHARED_KINDS["float tile[64]" in declaration]


def test_index_beyond_a_local_array(caught: Any) -> None:
    text = """extern "C" __global__ void local(float* out, int n) {
    float values[4] = {1, 2, 3, 4};
    out[threadIdx.x] = values[n /*FAULT:+ 1*/ /*END*/ ];  // HERE
}
"""
    caught("out-of-bounds array index", text, grid=1, block=64, n=3, out=floats(64))


def test_misaligned_vector(caught: Any) -> None:
    text = """#include "vec.cuh"
extern "C" __global__ void misaligned(float* out, const float* in) {
    Vec<float, 4>::load(in + /*FAULT:1*/4/*END*/).store(out);  // HERE
}
"""
    fault = caught("misaligned access", text, grid=1, block=1, out=numpy.zeros(64, "f"), **{"in": aligned(64)})
    assert any(words in fault.message for words in ("multiple of 16", "16 bytes at", "vector instruction"))


def aligned(count: int) -> Array:
    """Floats that begin at a multiple of 16 bytes."""
    memory = numpy.zeros(count + 3, numpy.float32)
    start = -memory.ctypes.data // 4 % 4
    return memory[start : start + count]


DIVERGENT = """#include "platform.cuh"
extern "C" __global__ void divergent(float* out) {
    /*FAULT: if (threadIdx.x < 32) {
        __syncthreads();  // HERE
    } else {
        __syncthreads();
    }*/
    __syncthreads();
    /*END*/
    out[threadIdx.x] = 1.0f;
}
"""


def test_divergent_barrier(caught: Any) -> None:
    fault = caught("divergent barrier", DIVERGENT.replace("// HERE", ""), grid=1, block=64, out=floats(64))
    assert "threads 0 to 31 wait at __syncthreads (kernels_cu/test/divergent.cu:4" in fault.message
    assert "threads 32 to 63 wait at __syncthreads (kernels_cu/test/divergent.cu:6" in fault.message


def test_barrier_against_collective(caught: Any) -> None:
    text = """#include "platform.cuh"
extern "C" __global__ void mixed(float* out) {
    if (threadIdx.x == 5 && /*FAULT:true*/false/*END*/) __syncthreads();
    out[threadIdx.x] = shfl_xor(1.0f, 1);
}
"""
    fault = caught("divergent barrier", text, grid=1, block=64, out=floats(64))
    assert "threads 5 to 5 wait at __syncthreads" in fault.message
    assert "wait at __shfl_xor_sync" in fault.message


@pytest.mark.parametrize("collective", ["__syncthreads()", "out[i] = shfl_xor(1.0f, 1)", "sync_warp()"])
def test_early_exit(caught: Any, collective: str) -> None:
    text = f"""#include "platform.cuh"
extern "C" __global__ void early(float* out, int n) {{
    const int i = threadIdx.x;
    if (i >= /*FAULT: n*/64/*END*/) return;
    {collective};  // HERE
    out[i] = i;
}}
"""
    fault = caught("early exit", text, grid=1, block=64, n=60, out=floats(64))
    assert "threads 60 to 63 have exited" in fault.message


def test_lane_outside_its_own_mask(caught: Any) -> None:
    text = """extern "C" __global__ void outside(int* out) {
    out[threadIdx.x] = __shfl_sync(/*FAULT:0xffff*/0xffffffff/*END*/, threadIdx.x, 3);  // HERE
}
"""
    caught("divergent barrier", text, grid=1, block=32, out=numpy.zeros(32, numpy.int32))


# A read without a barrier after the write, in either order.
UNORDERED = ("uninitialised shared memory", "shared memory race")


@pytest.mark.parametrize("block", [32, 128])
def test_missing_barrier(caught: Any, block: int) -> None:
    """Between warps, and between the lanes of one warp."""
    text = f"""extern "C" __global__ void exchange(float* out, const float* in) {{
    __shared__ float tile[{block}];
    const int i = threadIdx.x;
    tile[i] = in[i];
    /*FAULT:*/ __syncthreads(); /*END*/
    out[i] = tile[{block - 1} - i];  // HERE
}}
"""
    how = {"grid": 1, "block": block, "out": floats(block), "in": floats(block)}
    caught(UNORDERED, text, **how)


def test_missing_second_barrier(caught: Any) -> None:
    """The read of one round races with the write of the next."""
    text = """extern "C" __global__ void rounds(float* out, const float* in) {
    __shared__ float tile[64];
    const int i = threadIdx.x;
    float sum = 0;
    for (int round = 0; round < 3; ++round) {
        tile[i] = in[i];
        __syncthreads();
        sum += tile[63 - i];
        /*FAULT:*/ __syncthreads(); /*END*/
    }
    out[i] = sum;
}
"""
    fault = caught("shared memory race", text, grid=1, block=64, out=floats(64), **{"in": floats(64)})
    assert "since the last barrier" in fault.message
    for what in ("tile[i] = in", "sum += tile"):
        assert f"test/rounds.cu:{line_of(text, what)}" in str(fault)


def test_double_buffer_race(caught: Any) -> None:
    """Two buffers, and one round without its barrier."""
    text = """extern "C" __global__ void double_buffer(float* out, const float* in) {
    __shared__ float tile[2][64];
    const int i = threadIdx.x;
    float sum = 0;
    for (int round = 0; round < 6; ++round) {
        tile[round % 2][i] = in[i] + round;
        if (/*FAULT:round != 2*/ true /*END*/) __syncthreads();
        sum += tile[round % 2][(i + 32) % 64];
    }
    out[i] = sum;
}
"""
    caught("shared memory race", text, grid=1, block=64, out=floats(64), **{"in": floats(64)})


def test_thread_does_not_race_with_itself(caught: Any) -> None:
    """A reduction tree without its barriers: a thread overwrites what it and others have read."""
    text = """extern "C" __global__ void tree(float* out, const float* in) {
    __shared__ float largest[64];
    const int i = threadIdx.x;
    largest[i] = in[i];
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (i < half) largest[i] = fmaxf(largest[i], largest[i + half]);
        /*FAULT:*/ __syncthreads(); /*END*/
    }
    if (i == 0) out[0] = largest[0];
}
"""
    fault = caught("shared memory race", text, grid=1, block=64, out=floats(1), **{"in": floats(64)})
    assert fault.message.startswith("write of shared memory that another thread has read")


def test_warp_barrier_orders_its_lanes_only(caught: Any) -> None:
    text = """#include "platform.cuh"
extern "C" __global__ void warps(float* out, const float* in) {
    __shared__ float tile[64];
    const int i = threadIdx.x;
    tile[i] = in[i];
    sync_warp();
    float x = tile[i ^ 1];
    sync_warp();
    tile[i] = x;
    /*FAULT:sync_warp();*/ __syncthreads(); /*END*/
    out[i] = tile[i ^ 32];  // HERE
}
"""
    caught(UNORDERED, text, grid=1, block=64, out=floats(64), **{"in": floats(64)})


def test_atomics_do_not_race(run_on_host: Run) -> None:
    text = """extern "C" __global__ void count(int* out) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, 2);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(out, total);
}
"""
    out = numpy.zeros(1, numpy.int32)
    for schedule in SCHEDULES:
        with scheduled(schedule):
            run_on_host(text, grid=3, block=96, out=out)
    assert out[0] == len(SCHEDULES) * 3 * 96 * 2


def test_atomic_against_plain_write(caught: Any) -> None:
    text = """extern "C" __global__ void count(int* out) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (threadIdx.x == 40) /*FAULT:total += 1*/ atomicAdd(&total, 1) /*END*/;
    else atomicAdd(&total, 1);
    __syncthreads();
    out[threadIdx.x] = total;
}
"""
    caught("shared memory race", text, grid=1, block=64, out=numpy.zeros(64, numpy.int32))


@pytest.mark.parametrize(("declaration", "shared"), [("__shared__", 0), ("extern __shared__", 256)])
def test_uninitialised_shared_memory(caught: Any, declaration: str, shared: int) -> None:
    """Uninitialised in this block: data of an earlier block does not count."""
    text = f"""extern "C" __global__ void partly(float* out, const float* in) {{
    {declaration} float tile[{"64" if not shared else ""}];
    const int i = threadIdx.x;
    if (i < /*FAULT:60 + (blockIdx.x == 0) * 4*/64/*END*/) tile[i] = in[i];
    __syncthreads();
    out[blockIdx.x * 64 + i] = tile[63 - i];  // HERE
}}
"""
    fault = caught(
        "uninitialised shared memory", text, grid=2, block=64, shared=shared, out=floats(128), **{"in": floats(64)}
    )
    assert fault.block == (1, 0, 0)


ASYNC = """#include "async.cuh"
extern "C" __global__ void staged(float* out, const float* in) {
    __shared__ alignas(16) float tile[2][128];
    const int i = threadIdx.x;
    cp_async<16>(&tile[0][4 * i], in + 4 * i);
    cp_async_commit();
    cp_async<16>(&tile[1][4 * i], in + 128 + 4 * i, i < 16);
    cp_async_commit();
    cp_async_wait</*FAULT:2*/1/*END*/>();
    __syncthreads();
    float sum = tile[0][127 - i];  // HERE
    cp_async_wait<0>();
    __syncthreads();
    out[i] = sum + tile[1][127 - i] + tile[1][i];
}
"""


def test_async_copy_not_waited_for(caught: Any) -> None:
    out, values = floats(32), floats(256)
    second = values[128:].copy()
    second[64:] = 0
    expected = values[127:95:-1] + second[127:95:-1] + second[:32]
    how = {"grid": 1, "block": 32, "out": out, "in": values}
    caught("async copy not waited for", ASYNC, lambda: bool((out == expected).all()), **how)


def test_async_copy_seen_by_others_without_a_barrier(caught: Any) -> None:
    text = ASYNC.replace("/*FAULT:2*/1/*END*/", "1").replace(
        "__syncthreads();\n    float", "/*FAULT:*/ __syncthreads(); /*END*/\n    float"
    )
    kinds = (*UNORDERED, "async copy not waited for")
    caught(kinds, text, grid=1, block=32, out=floats(32), **{"in": floats(256)})


def test_undefined_shift(caught: Any) -> None:
    text = """extern "C" __global__ void shift(int* out, int n) {
    out[threadIdx.x] = 1 << (n /*FAULT:+ 1*/ /*END*/ );  // HERE
}
"""
    caught("undefined shift", text, grid=1, block=32, n=31, out=numpy.zeros(32, numpy.int32))


@pytest.mark.parametrize("value", ["3e9f", "-1e20f", "NAN"])
def test_undefined_conversion(caught: Any, value: str) -> None:
    text = f"""extern "C" __global__ void convert(int* out, float x) {{
    out[threadIdx.x] = static_cast<int>(/*FAULT:x * 0 + {value}*/x/*END*/);  // HERE
}}
"""
    caught("undefined conversion", text, grid=1, block=32, x=2.0, out=numpy.zeros(32, numpy.int32))


def test_division_by_zero(caught: Any) -> None:
    text = """extern "C" __global__ void divide(int* out, int n) {
    out[threadIdx.x] = 100 / (n /*FAULT:- 4*/ /*END*/ );  // HERE
}
"""
    caught("integer division by zero", text, grid=1, block=32, n=4, out=numpy.zeros(32, numpy.int32))


def test_integer_overflow(caught: Any) -> None:
    """The offset of a block of a large cache does not fit in 32 bits."""
    text = """extern "C" __global__ void offset(int64_t* out, int n) {
    out[threadIdx.x] = /*FAULT:n*/ int64_t(n) /*END*/ * 70000;  // HERE
}
""".replace('extern "C"', '#include "platform.cuh"\nextern "C"')
    caught("integer overflow", text, grid=1, block=32, n=70000, out=numpy.zeros(32, numpy.int64))


@pytest.mark.parametrize("body", ["while (*flag == 0) {}", "while (atomicAdd(flag, 0) == 0) {}"])
def test_endless_loop(run_on_host: Run, body: str) -> None:
    text = f"""extern "C" __global__ void spin(volatile_int* flag) {{
    {body}  // HERE
}}
""".replace("volatile_int", "int" if "atomic" in body else "volatile int")
    started = time.perf_counter()
    with scheduled(Schedule(), seconds=0.3), pytest.raises(pyops.KernelFault) as caught:
        run_on_host(text, grid=1, block=32, flag=numpy.zeros(1, numpy.int32))
    assert 0.3 < time.perf_counter() - started < 5
    assert caught.value.kind == "time limit"
    assert caught.value.thread is not None
    assert ("kernels_cu/test/spin.cu", 2) in caught.value.places


def test_global_race_in_a_block(caught: Any) -> None:
    """Two warps write one element; a barrier between them orders it."""
    text = """extern "C" __global__ void twice(int* out) {
    const int i = threadIdx.x % 32;
    if (threadIdx.x < 32) out[i] = 0;
    /*FAULT:*/ __syncthreads(); /*END*/
    if (threadIdx.x >= 32) out[i] = 1;
}
"""
    fault = caught("global memory race", text, grid=1, block=64, out=numpy.zeros(32, numpy.int32))
    assert "since the last barrier" in fault.message


def test_global_read_before_write_in_a_block(caught: Any) -> None:
    """In-place work that reads what another thread will overwrite."""
    text = """extern "C" __global__ void rotate(int* out) {
    const int x = out[(threadIdx.x + 1) % blockDim.x];
    /*FAULT:*/ __syncthreads(); /*END*/
    out[threadIdx.x] = x;
}
"""
    caught("global memory race", text, grid=1, block=64, out=numpy.zeros(64, numpy.int32))


@pytest.mark.parametrize("other", ["out[0] = 1", "sink[blockIdx.x] = out[0]", "sink[blockIdx.x] = atomicAdd(out, 1)"])
def test_global_race_between_blocks(caught: Any, other: str) -> None:
    """A write in one block, and any access in another, have no order."""
    text = f"""extern "C" __global__ void blocks(int* out, int* sink) {{
    if (blockIdx.x == 1) out[/*FAULT:0*/ 1 /*END*/] = 2;
    if (blockIdx.x == 2) {other};
}}
"""
    how = {"out": numpy.zeros(2, numpy.int32), "sink": numpy.zeros(3, numpy.int32)}
    fault = caught("global memory race", text, grid=3, block=1, **how)
    assert "another block" in fault.message


def test_ordered_sharing_between_blocks_is_no_race(run_on_host: Run) -> None:
    """Atomic sums, a read by all, and the last block to arrive reading what the others have written."""
    text = """extern "C" __global__ void last(int* out, int* parts, int* count, const int* in) {
    __shared__ bool is_last;
    const int i = threadIdx.x;
    atomicAdd(out, in[0]);
    parts[blockIdx.x * 32 + i] = in[i];
    __threadfence();
    __syncthreads();
    if (i == 0) is_last = atomicAdd(count, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    int sum = 0;
    for (int block = 0; block < gridDim.x; ++block) sum += parts[block * 32 + i];
    parts[i] = sum;
}
"""
    values = numpy.arange(1, 33, dtype=numpy.int32)
    for schedule in SCHEDULES:
        out, count, parts = (numpy.zeros(size, numpy.int32) for size in (1, 1, 128))
        for _ in range(2):  # a launch may read what the previous one wrote
            count[:] = 0
            with scheduled(schedule):
                run_on_host(text, grid=4, block=32, out=out, parts=parts, count=count, **{"in": values})
            assert (parts[:32] == 4 * values).all()
        assert out[0] == 2 * 4 * 32


def test_assertion(caught: Any) -> None:
    text = """extern "C" __global__ void claims(int* out, int n) {
    assert(n == 1 /*FAULT:+ 1*/ /*END*/ );  // HERE
    out[threadIdx.x] = n;
}
"""
    fault = caught("assertion failed", text, grid=1, block=32, n=1, out=numpy.zeros(32, numpy.int32))
    assert "n == 1" in fault.message


def test_stack_overflow(caught: Any) -> None:
    text = """extern "C" __global__ void deep(int* out, int n) {
    volatile char local[/*FAULT:300*/3/*END*/ * 1024];
    for (int i = 0; i < int(sizeof local); ++i) local[sizeof local - 1 - i] = n;
    out[threadIdx.x] = local[n];
}
"""
    caught("stack overflow", text, grid=1, block=32, n=1, out=numpy.zeros(32, numpy.int32))


def test_without_pyelftools(caught: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's checks and the barriers report a line all the same."""
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    text = """extern "C" __global__ void divide(int* out, int n) {
    out[threadIdx.x] = 100 / (n /*FAULT:- 4*/ /*END*/ );  // HERE
}
"""
    caught("integer division by zero", text, grid=1, block=32, n=4, out=numpy.zeros(32, numpy.int32))
