"""Memory that a kernel on the host may access: the tensors and workspaces of its call, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy
import pytest

import kernels_cu
import pyops
from pyops._core.launch.kernel import Kernel
from pyops._core.launch.scratch import Scratch
from pyops._core.op.op import Op
from pyops._core.text import source
from pyops.host import launch, toolchain
from pyops.host import run as host
from pyops.testing import cpu
from pyops.testing.calls import assert_results, clones, expected, written
from tests.mutation import plans, python
from tests.mutation.mutant import Mutant
from tests.support.calls import example

pytestmark = pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")

Run = Callable[..., None]
Array = numpy.ndarray[Any, Any]


def floats(count: int) -> Array:
    return numpy.arange(count, dtype=numpy.float32)


COPY = """#include "vec.cuh"
extern "C" __global__ void copy(float* out, const float* in, int n, int64_t shift) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i /*FAULT:<=*/ < /*END*/ n)
        out[i] = in[i + shift];  // HERE
}
"""
RIGHT = COPY.replace("/*FAULT:<=*/ < /*END*/", "<")


@pytest.mark.parametrize("end", ["out", "in"])
def test_one_element_too_many(caught: Any, end: str) -> None:
    arrays = {name: floats(200 if name == end else 300) for name in ("out", "in")}
    fault = caught("out-of-bounds global access", COPY, grid=4, block=64, n=200, shift=0, **arrays)
    assert fault.message.startswith(f"{'write' if end == 'out' else 'read'} of 4 bytes at 0x")
    assert fault.message.endswith(f", 0 bytes past the end of {end}")
    assert fault.block == (3, 0, 0)
    assert fault.thread == (8, 0, 0)
    assert fault.kernel == "test/copy.cu"
    assert "block (3, 0, 0), thread (8, 0, 0)" in str(fault)


@pytest.mark.parametrize("shift", [-1, 64, 10**6, 10**8, 2**44, 2**61 - 1, -(2**61)])
def test_near_and_far_accesses(run_on_host: Run, shift: int) -> None:
    """Whether or not memory is mapped there, and whoever owns it."""
    memory = floats(3 * 64)
    arrays = {"in": memory[64:128], "out": floats(64)}
    with pytest.raises(pyops.KernelFault, match="out-of-bounds global access: read of 4 bytes at 0x") as caught:
        run_on_host(RIGHT, grid=1, block=64, n=64, shift=shift, **arrays)
    if shift == -1:
        assert caught.value.message.endswith(", 4 bytes before in")
    assert caught.value.places[0] == ("kernels_cu/test/copy.cu", 5)


def test_calls_around_a_fault(run_on_host: Run) -> None:
    """A function that is not inlined is named with its call."""
    text = """#include "vec.cuh"
template <typename T>
__noinline__ __device__ T read_at(const T* from, int64_t at) {
    return from[at];
}
extern "C" __global__ void copy(float* out, const float* in, int64_t shift) {
    out[threadIdx.x] = read_at(in, threadIdx.x);
    out[threadIdx.x] += read_at(in, threadIdx.x + shift);
}
"""
    with pytest.raises(pyops.KernelFault) as caught:
        run_on_host(text, grid=1, block=32, out=floats(32), shift=1, **{"in": floats(32)})
    assert caught.value.places == (("kernels_cu/test/copy.cu", 4), ("kernels_cu/test/copy.cu", 8))


def test_null_pointer(run_on_host: Run) -> None:
    with pytest.raises(pyops.KernelFault, match=r"out-of-bounds global access: read of 4 bytes at 0x0\n"):
        run_on_host(RIGHT, grid=1, block=64, n=64, shift=0, out=floats(64), **{"in": None})


def test_nothing_is_written_outside(run_on_host: Run) -> None:
    """The access does not happen: memory next to a tensor is unchanged."""
    memory = floats(300)
    with pytest.raises(pyops.KernelFault):
        run_on_host(RIGHT, grid=4, block=64, n=201, shift=0, out=memory[:200], **{"in": -floats(300)})
    assert (memory[:200] == -floats(200)).all()
    assert (memory[200:] == floats(300)[200:]).all()


def test_process_goes_on_after_a_fault(run_on_host: Run) -> None:
    """A fault leaves nothing behind: the next launches, of the same kernel and of another, are right."""
    out = floats(200)
    for _ in range(3):
        with pytest.raises(pyops.KernelFault):
            run_on_host(RIGHT, grid=4, block=64, n=201, shift=0, out=out, **{"in": floats(300)})
        run_on_host(RIGHT, grid=4, block=64, n=200, shift=0, out=out, **{"in": floats(300) * 2})
        assert (out == floats(200) * 2).all()


def test_async_copy(caught: Any) -> None:
    """At the copy, not at its wait; the bytes that a partial copy skips are not read."""
    text = """#include "async.cuh"
extern "C" __global__ void staged(float* out, const float* in) {
    __shared__ alignas(16) float tile[128];
    const int i = threadIdx.x;
    cp_async<16>(&tile[4 * i], in + 4 * i, i < /*FAULT:17*/16/*END*/);  // HERE
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    out[i] = tile[127 - i];
}
"""
    fault = caught("out-of-bounds global access", text, grid=1, block=32, out=floats(32), **{"in": floats(64)})
    assert fault.thread == (16, 0, 0)


# Every kind of access that a kernel can make to `at`.
ACCESSES = """#include "async.cuh"
#include "mma.cuh"
struct Packed { int first; short rest[9]; };
struct __attribute__((packed)) Unaligned { char before; int64_t value; };

extern "C" __global__ void access(char* memory, int offset, int which, int bytes) {
    __shared__ alignas(16) char tile[64];
    char* at = memory + offset;
    char local[64] = {};
    uint32_t fragment[4];
    switch (which) {
        case 0: local[0] = *at; break;
        case 1: local[0] = *reinterpret_cast<short*>(at); break;
        case 2: local[0] = *reinterpret_cast<float*>(at); break;
        case 3: local[0] = *reinterpret_cast<int64_t*>(at); break;
        case 4: local[0] = Vec<float, 4>::load(reinterpret_cast<float*>(at)).data[3]; break;
        case 5: local[0] = __ldg(reinterpret_cast<int4*>(at)).w; break;
        case 6: local[0] = *reinterpret_cast<volatile int*>(at); break;
        case 7: cp_async<16>(tile, at); cp_async_commit(); cp_async_wait<0>(); break;
        case 8: ldmatrix<4, false>(fragment, at); break;
        case 9: local[0] = reinterpret_cast<Unaligned*>(at)->value % 1000; break;
        case 10: { const Packed copy = *reinterpret_cast<Packed*>(at); local[0] = copy.rest[bytes % 9]; break; }
        case 11: for (int i = 0; i < bytes; ++i) local[i] = at[i]; break;
        case 12: memcpy(local, at, bytes); break;
        case 13: memcpy(local, at, 13); break;
        case 20: *at = bytes; break;
        case 21: *reinterpret_cast<short*>(at) = bytes; break;
        case 22: *reinterpret_cast<float*>(at) = bytes; break;
        case 23: *reinterpret_cast<int64_t*>(at) = bytes; break;
        case 24: Vec<float, 4>::full(bytes).store(reinterpret_cast<float*>(at)); break;
        case 25: *reinterpret_cast<volatile int*>(at) = bytes; break;
        case 26: atomicAdd(reinterpret_cast<int*>(at), 1); break;
        case 27: atomicCAS(reinterpret_cast<int*>(at), 1, 2); break;
        case 29: reinterpret_cast<Unaligned*>(at)->value = bytes; break;
        case 30: *reinterpret_cast<Packed*>(at) = Packed{bytes, {}}; break;
        case 31: for (int i = 0; i < bytes; ++i) at[i] = i; break;
        case 32: for (int i = 0; i < bytes; ++i) at[i] = 0; break;
        case 33: memcpy(at, local, bytes); break;
        case 34: memset(at, 0, bytes); break;
    }
    if (local[0] == 77) memory[0] = 1;
}
"""
SINGLE, SEVERAL = (*range(9), *range(20, 28)), (*range(9, 14), *range(29, 35))  # one address; several bytes


@pytest.mark.parametrize("name", toolchain.toolchains())
@pytest.mark.slow
def test_every_access_is_compared(run_on_host: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With every compiler. All memory around is mapped, so that no SIGSEGV reports the access."""
    chosen = toolchain.toolchains()[name]
    monkeypatch.setattr(toolchain, "preferred", lambda: chosen)
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(host, "_runtime", cache(host._runtime.__wrapped__))
    memory = numpy.zeros(256, numpy.uint8)
    start = 96 + -memory.ctypes.data % 16
    inside = memory[start : start + 32]
    for which in (*SINGLE, *SEVERAL):
        how = {"grid": 1, "block": 32 if which == 8 else 1, "memory": inside, "which": which, "bytes": 20}
        run_on_host(ACCESSES, offset=0, **how)
        for offset in (-32, 32, 28) if which in SEVERAL else (-16, 32):
            memory[:] = 0
            with pytest.raises(pyops.KernelFault, match="out-of-bounds global access"):
                run_on_host(ACCESSES, offset=offset, **how)
            assert not memory[:start].any()
            assert not memory[start + 32 :].any()


SPACES = """#include "async.cuh"
extern "C" __global__ void spaces(float* out, const float* in, int which) {
    __shared__ alignas(16) float tile[64];
    alignas(16) float local[4] = {};
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    using vec_t = Vec<float, 4>;
    float* const at = which % 2 ? tile : local;
    vec_t x = vec_t::full(1.0f);
    switch (which / 2) {
        case 0: x.store(at); break;  // HERE 0
        case 1: x = vec_t::load_once(at); break;  // HERE 1
        case 2: x.data[0] = load_fresh(at); break;  // HERE 2
        case 3: prefetch_line(at); break;  // HERE 3
        case 4: cp_async<16>(tile + 32, at); cp_async_commit(); cp_async_wait<0>(); break;  // HERE 4
        case 5: x.store_shared(tile); break;
    }
    out[threadIdx.x] = x.data[0] + local[0];
}
"""


@pytest.mark.parametrize("which", range(10))
def test_global_memory_instruction_refuses_shared_memory(run_on_host: Run, which: int) -> None:
    arrays = {"out": floats(1), "in": floats(1)}
    with pytest.raises(pyops.KernelFault) as caught:
        run_on_host(SPACES, grid=1, block=1, which=which, **arrays)
    assert caught.value.kind == "wrong address space"
    assert ("shared" if which % 2 else "local") in caught.value.message
    assert f"HERE {which // 2}" in SPACES.splitlines()[int(re.search(r"spaces.cu:(\d+)", str(caught.value))[1]) - 1]
    run_on_host(SPACES, grid=1, block=1, which=10, **arrays)


def test_workspace_ends_at_its_last_byte() -> None:
    text = """extern "C" __global__ void halves(const float* input, float* partial, float* other) {
    if (threadIdx.x == 0) other[0] = 0.0f;
    partial[threadIdx.x] = input[threadIdx.x] / 2.0f;
}
"""
    x, made = floats(26), Kernel("test/halves.cu", text=text)
    for count in (25, 26):
        one = made().launch(1, count, partial=Scratch(100), other=Scratch(4))
        run = partial(launch.run_launches, [one], ("input",), (x.nbytes,), (), {}, x.ctypes.data)
        if count == 25:
            run()
        else:
            with pytest.raises(pyops.KernelFault, match=r"write of 4 bytes .* 0 bytes past the end of a work"):
                run()


# Mistakes in bounds, offsets and strides: (op, file, code, replacement). The wrong offsets are large, so that none
# reaches another tensor of the call.
MISTAKES = [
    ("rms_norm", "include/row.cuh", "row < num_rows;", "row <= num_rows;"),
    ("rms_norm", "norm/rms_norm.cu", "out + row_offset(at.row,", "out - row_offset(at.row + 100000,"),
    ("rms_norm", "pyops/ops/norm/rms.py", "out_stride0=out_stride0,", "out_stride0=10**7 * out_stride0,"),
    ("reshape_and_cache_flash", "cache/reshape_and_cache_flash.cu", "cache + entry", "cache + (entry << 20)"),
    ("merge_attn_states", "attention/merge_attn_states.cu", "token * output_stride", "(token << 20) * output_stride"),
]


@pytest.mark.parametrize(("name", "file", "old", "new"), MISTAKES)
def test_mistake_in_an_op_is_a_fault(monkeypatch: pytest.MonkeyPatch, name: str, file: str, old: str, new: str) -> None:
    """And the process goes on, though the tensors are ordinary ones. Without the mistake the call is right."""
    op = pyops.registry[name]
    args = example(op, num_tokens=5, **({"hidden_size": 512} if name == "rms_norm" else {}))
    with cpu("kernels"):
        right = expected(op, args)
        with monkeypatch.context() as patch:
            break_at(patch, op, file, old, new)
            with pytest.raises(pyops.KernelFault) as caught:
                op(*clones(args))
        forget(op)
        op(*args)
    fault = caught.value
    assert fault.kind == "out-of-bounds global access"
    assert re.search(r"of \d+ bytes at 0x[0-9a-f]+, \d+ bytes (past the end of|before) \w+$", fault.message)
    assert fault.line
    assert_results(op, right, written(op, args))


def break_at(patch: pytest.MonkeyPatch, op: Op, file: str, old: str, new: str) -> None:
    """Replace code that occurs once in a kernel source or in the file of the op's plan, while `patch` lasts."""
    text = plans.read(file) if file.endswith(".py") else kernels_cu.read(file)
    assert text.count(old) == 1
    broken = text.replace(old, new)
    if file.endswith(".py"):
        mutant = Mutant("", file, "", text.index(old), text.index(old) + len(old), new, "")
        function = plans.function_of(mutant)
        patch.setattr(function, "__code__", function.__code__)  # restored by `patch`
        python.apply(mutant)
    else:
        read = kernels_cu.read
        patch.setattr(kernels_cu, "read", lambda name: broken if name == file else read(name))
    forget(op)


def forget(op: Op) -> None:
    """Drop the op's plans, and the texts of its kernels."""
    op.forget()
    source._flat.cache_clear()
