"""The host backend against independent truth: number formats, collectives, MMA fragments, atomics, the cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import pyops
from pyops import axes, offline
from pyops._core.launch import launch
from pyops._core.launch.kernel import Kernel
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.dtypes import DType
from pyops.host import run as host
from pyops.host import toolchain
from pyops.host.ranges import Range
from pyops.host.toolchain import toolchains
from pyops.testing import SCHEDULES, Schedule, scheduled
from tests.every_op.test_nvrtc import ARCHS, MISSING
from tests.host.test_faults import ASYNC

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

Run = Callable[..., None]
MakeKernel = Callable[[str, str], Kernel]
ROOT = Path(__file__).parents[2]
NARROW = {
    dtypes.float16: numpy.float16,
    dtypes.bfloat16: ml_dtypes.bfloat16,
    dtypes.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    dtypes.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    dtypes.float8_e5m2: ml_dtypes.float8_e5m2,
}
FORMATS = [pytest.param(dtype, native, id=dtype.name) for dtype, native in NARROW.items()]
WARPS = pytest.mark.parametrize("warp", [32, 64])

WIDEN = """#include "number.cuh"
extern "C" __global__ void convert(float* out, const scalar_t* in, int n) {
    const int i = blockIdx.x * 1024 + threadIdx.x;
    if (i < n) out[i] = to_float(in[i]);
}
"""
NARROWED = """#include "number.cuh"
extern "C" __global__ void narrow(scalar_t* out, const float* in, int n) {
    for (int i = threadIdx.x; i < n; i += 64) out[i] = from_float<scalar_t>(in[i]);
}
"""


def same_or_nan(a: Any, b: Any) -> bool:
    a, b = a.astype(numpy.float32), b.astype(numpy.float32)
    return bool(((a.view(numpy.uint32) == b.view(numpy.uint32)) | (numpy.isnan(a) & numpy.isnan(b))).all())


@pytest.mark.parametrize(("dtype", "native"), FORMATS)
def test_every_narrow_value_upcasts(run_on_host: Run, dtype: DType, native: Any) -> None:
    count = 256**dtype.itemsize
    codes = numpy.arange(count, dtype=f"u{dtype.itemsize}").view(native)
    out = numpy.empty(count, numpy.float32)
    run_on_host(WIDEN, grid=-(-count // 1024), block=1024, scalar_t=dtype, n=count, out=out, **{"in": codes})
    assert same_or_nan(out, codes)


def floats_to_narrow() -> Any:
    """Floats of every exponent, floats around the values and ties of the narrow formats, and special values."""
    rng = numpy.random.default_rng(0)
    some = rng.integers(0, 2**32, 1_000_000, dtype=numpy.uint32)
    near = []
    for native in NARROW.values():
        codes = numpy.arange(256 ** numpy.dtype(native).itemsize, dtype=f"u{numpy.dtype(native).itemsize}").view(native)
        with numpy.errstate(all="ignore"):
            values = codes.astype(numpy.float32)
            finite = numpy.sort(values[numpy.isfinite(values)])
            ties = (finite[1:].astype(float) + finite[:-1].astype(float)) / 2
        near += [finite.view(numpy.uint32), ties.astype(numpy.float32).view(numpy.uint32)]
    bits = numpy.concatenate([some, *[part + numpy.uint32(step % 2**32) for part in near for step in (-1, 0, 1)]])
    special = numpy.array([0, -0.0, numpy.inf, -numpy.inf, numpy.nan, 1e-45, 3.4e38, -3.4e38], numpy.float32)
    return numpy.concatenate([bits.astype(numpy.uint32).view(numpy.float32), special])


@pytest.mark.parametrize(("dtype", "native"), FORMATS)
def test_floats_round_to_the_nearest_narrow_value(run_on_host: Run, dtype: DType, native: Any) -> None:
    """As in ml_dtypes; the 8-bit formats saturate, infinities too."""
    values = floats_to_narrow()
    out = numpy.empty(len(values), native)
    run_on_host(NARROWED, grid=1, block=64, scalar_t=dtype, n=len(values), out=out, **{"in": values})
    limited = values
    if dtype.itemsize == 1:
        largest = float(ml_dtypes.finfo(native).max)
        limited = numpy.clip(values, -largest, largest)
    with numpy.errstate(all="ignore"):
        assert same_or_nan(out, limited.astype(native))


@pytest.mark.parametrize(
    ("parameters", "native"),
    [
        ("3, 0x7e, false", ml_dtypes.float8_e4m3fn),
        ("2, 0x7b, false", ml_dtypes.float8_e5m2),
        ("3, 0x7f, true", ml_dtypes.float8_e4m3fnuz),
    ],
    ids=["e4m3fn", "e5m2", "e4m3fnuz"],
)
def test_formats_by_integer_arithmetic(run_on_host: Run, parameters: str, native: Any) -> None:
    """Conversions of number.cuh for platforms without such a type, against ml_dtypes."""

    def instead(kernel: str) -> str:
        return kernel.replace("scalar_t", "number_t").replace("extern", f"using number_t = Fp8<{parameters}>;\nextern")

    codes = numpy.arange(256, dtype=numpy.uint8).view(native)
    wide = numpy.empty(256, numpy.float32)
    run_on_host(instead(WIDEN), grid=1, block=1024, n=256, out=wide, **{"in": codes})
    assert same_or_nan(wide, codes)
    values = floats_to_narrow()
    out = numpy.empty(len(values), native)
    run_on_host(instead(NARROWED), grid=1, block=64, n=len(values), out=out, **{"in": values})
    largest = float(ml_dtypes.finfo(native).max)
    with numpy.errstate(all="ignore"):
        right = numpy.clip(values, -largest, largest).astype(native)
    assert same_or_nan(out, right)
    nan = {0x80} if native is ml_dtypes.float8_e4m3fnuz else {0x7F}
    assert set(out.view(numpy.uint8)[numpy.isnan(values)].tolist()) == nan


def test_int8_rounds_and_saturates(run_on_host: Run) -> None:
    values = floats_to_narrow()
    out = numpy.empty(len(values), numpy.int8)
    run_on_host(NARROWED, grid=1, block=64, scalar_t=dtypes.int8, n=len(values), out=out, **{"in": values})
    assert (out == numpy.clip(numpy.rint(numpy.nan_to_num(values, nan=0.0)), -128, 127).astype(numpy.int8)).all()


@WARPS
def test_shuffles(run_on_host: Run, warp: int) -> None:
    text = """#include "platform.cuh"
extern "C" __global__ void shuffles(int* out, int n) {
    const int i = threadIdx.x;
    int* row = out + i;
    row[0 * n] = shfl_xor(i, 5);
    row[1 * n] = shfl<8>(i, 3);
    row[2 * n] = __shfl_sync(ALL_LANES, i, 70);
    row[3 * n] = __shfl_up_sync(ALL_LANES, i, 3);
    row[4 * n] = __shfl_up_sync(ALL_LANES, i, 3, 16);
    row[5 * n] = __shfl_down_sync(ALL_LANES, i, 3);
    row[6 * n] = __shfl_down_sync(ALL_LANES, i, 3, 16);
    row[7 * n] = __shfl_xor_sync(ALL_LANES, i, 5, 4);
    row[8 * n] = int(__shfl_sync(ALL_LANES, 0.5 * i, 9) * 2);
}
"""
    n = 128
    i = numpy.arange(n)
    lane, first = i % warp, i - i % warp

    def within(source: Any, width: int) -> Any:
        return numpy.where((source >= i - i % width) & (source < i - i % width + width), source, i)

    crossed = (i ^ 5) % 128
    expected = numpy.stack([
        i ^ 5, i - i % 8 + 3, first + 70 % warp, within(i - 3, warp), within(i - 3, 16), within(i + 3, warp),
        within(i + 3, 16), numpy.where(crossed < i - i % 4 + 4, crossed, i), first + 9 + 0 * lane,
    ])  # fmt: skip
    for schedule in SCHEDULES:
        out = numpy.zeros((9, n), numpy.int32)
        with scheduled(schedule, warp_size=warp):
            run_on_host(text, grid=1, block=n, n=n, out=out)
        assert (out == expected).all()


@WARPS
def test_votes_and_reductions(run_on_host: Run, warp: int) -> None:
    text = """#include "platform.cuh"
extern "C" __global__ void votes(uint64_t* out, const int* in, int n) {
    const int i = threadIdx.x;
    const int x = in[i];
    uint64_t* row = out + i;
    row[0 * n] = __ballot_sync(ALL_LANES, x & 1);
    row[1 * n] = __any_sync(ALL_LANES, x > 90);
    row[2 * n] = __all_sync(ALL_LANES, x < 99);
    row[3 * n] = __reduce_add_sync(ALL_LANES, x);
    row[4 * n] = __reduce_min_sync(ALL_LANES, x);
    row[5 * n] = __reduce_max_sync(ALL_LANES, x);
    row[6 * n] = __reduce_and_sync(ALL_LANES, unsigned(x));
    row[7 * n] = __reduce_or_sync(ALL_LANES, unsigned(x));
    row[8 * n] = __reduce_xor_sync(ALL_LANES, unsigned(x));
    const uint32_t quarter = 0xffu << (threadIdx.x % 32 / 8 * 8);
    row[9 * n] = threadIdx.x % WARP_SIZE < 32 ? __reduce_add_sync(quarter, x) : 0;
}
"""
    n = 192
    values = numpy.random.default_rng(1).integers(0, 100, n, dtype=numpy.int32)
    warps = values.reshape(-1, warp)
    weights = numpy.uint64(1) << numpy.arange(warp, dtype=numpy.uint64)
    rows = [
        ((warps & 1).astype(numpy.uint64) * weights).sum(1), (warps > 90).any(1), (warps < 99).all(1), warps.sum(1),
        warps.min(1), warps.max(1), *(f.reduce(warps, axis=1) for f in (numpy.bitwise_and, numpy.bitwise_or)),
        numpy.bitwise_xor.reduce(warps, axis=1),
    ]  # fmt: skip
    expected = [numpy.repeat(row.astype(numpy.uint64), warp) for row in rows]
    quarters = numpy.repeat(values.reshape(-1, 8).sum(1), 8)
    expected.append(numpy.where(numpy.arange(n) % warp < 32, quarters, 0).astype(numpy.uint64))
    for schedule in SCHEDULES:
        out = numpy.zeros((10, n), numpy.uint64)
        with scheduled(schedule, warp_size=warp):
            run_on_host(text, grid=1, block=n, n=n, out=out, **{"in": values})
        assert (out == numpy.stack(expected)).all()


def test_thread_and_block_indices(run_on_host: Run) -> None:
    text = """#include "platform.cuh"
extern "C" __global__ void indices(int* out) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * blockDim.x + threadIdx.x] += 1 + block * 1000 + threadIdx.x;
}
"""
    for schedule in SCHEDULES:
        out = numpy.zeros((60, 64), numpy.int32)
        with scheduled(schedule):
            run_on_host(text, grid=(3, 4, 5), block=64, out=out)
        assert (out == 1 + 1000 * numpy.arange(60)[:, None] + numpy.arange(64)).all()


def test_atomics(run_on_host: Run) -> None:
    """Against the same operations in sequence; only atomics with results that do not depend on the order."""
    text = """#include "platform.cuh"
extern "C" __global__ void atomics(int* out, float* sum, unsigned long long* wide, const int* in) {
    const int x = in[blockIdx.x * 64 + threadIdx.x];
    atomicAdd(out + 0, x);
    atomicSub(out + 1, x);
    atomicMin(out + 2, x);
    atomicMax(out + 3, x);
    atomicAnd(out + 4, x);
    atomicOr(out + 5, x);
    atomicXor(out + 6, x);
    atomicInc(reinterpret_cast<unsigned*>(out + 7), 9u);
    atomicDec(reinterpret_cast<unsigned*>(out + 8), 9u);
    for (int old = out[9]; old != atomicCAS(out + 9, old, old + x); old = out[9]) {}
    atomicAdd(sum, 0.25f * x);
    atomicAdd(wide, 1ull << 33);
    if (threadIdx.x == 0 && blockIdx.x == 0) atomicExch(out + 10, x);
}
"""
    values = numpy.random.default_rng(2).integers(0, 1000, 192, dtype=numpy.int32)
    for schedule in SCHEDULES:
        out = numpy.array([0, 0, 500, 500, -1, 0, 0, 0, 0, 0, 0], numpy.int32)
        total, wide = numpy.zeros(1, numpy.float32), numpy.zeros(1, numpy.uint64)
        with scheduled(schedule):
            run_on_host(text, grid=3, block=64, out=out, sum=total, wide=wide, **{"in": values})
        bits = [f.reduce(values) for f in (numpy.bitwise_and, numpy.bitwise_or, numpy.bitwise_xor)]
        sums = [values.sum(), -values.sum(), values.min(), values.max(), *bits]
        assert out.tolist() == [*sums, 192 % 10, (10 - 192 % 10) % 10, values.sum(), values[0]]
        assert total[0] == 0.25 * values.sum()
        assert wide[0] == 192 << 33


MMA = """#include "mma.cuh"
extern "C" __global__ void product(float* d, const scalar_t* a, const scalar_t* b) {
    __shared__ alignas(16) scalar_t A[16][24];
    __shared__ alignas(16) scalar_t B[16][8];
    __shared__ alignas(16) scalar_t BT[8][24];
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) A[i / 16][i % 16] = a[i];
    for (int i = lane; i < 128; i += 32) {
        B[i / 8][i % 8] = b[i];
        BT[i % 8][i / 8] = b[i];
    }
    __syncthreads();
    uint32_t fa[4], fb[2], low[1], high[1];
    ldmatrix<4>(fa, &A[lane % 16][lane / 16 * 8]);
    ldmatrix<2, true>(fb, &B[lane % 16][0]);
    ldmatrix<1>(low, &BT[lane % 8][0]);
    ldmatrix<1>(high, &BT[lane % 8][8]);
    float sum[4];
    const int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) sum[i] = d[(row + i / 2 * 8) * 8 + column + i % 2];
    mma_m16n8k16<scalar_t>(sum, fa, fb);
    const bool same_loads = fb[0] == low[0] && fb[1] == high[0];
    for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + column + i % 2] = same_loads ? sum[i] : 1e30f;
}
"""


MATRICES = pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)


def matrices(dtype: DType) -> tuple[Any, Any, Any, Any]:
    """(d, a, b, d + a @ b in double)."""
    rng = numpy.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(NARROW[dtype]) for shape in ((16, 16), (16, 8)))
    d = rng.standard_normal((16, 8)).astype(numpy.float32)
    return d, a, b, d.astype(float) + a.astype(float) @ b.astype(float)


@MATRICES
def test_mma(run_on_host: Run, dtype: DType) -> None:
    """Fragments through shared memory, against numpy in double."""
    start, a, b, expected = matrices(dtype)
    for schedule in SCHEDULES:
        d = start.copy()
        with scheduled(schedule):
            run_on_host(MMA, grid=1, block=32, scalar_t=dtype, d=d, a=a, b=b)
        assert numpy.abs(d - expected).max() <= 2**-24 * numpy.abs(expected).max() + 1e-12


WORDS = """#include "mma.cuh"
extern "C" __global__ void product(sum_t* d, const uint32_t* a, const uint32_t* b) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const uint32_t fa[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
    const uint32_t fb[2] = {b[g * 8 + t], b[g * 8 + t + 4]};
    sum_t sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    PRODUCT(sum, fa, fb);
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}
"""


@pytest.mark.parametrize("dtype", [dtypes.int8, dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.float32], ids=str)
def test_mma_of_words(run_on_host: Run, dtype: DType) -> None:
    """Words of four bytes, or of one TF32. Nothing is rounded; b is given by its columns."""
    rng = numpy.random.default_rng(4)
    is_integer, is_wide = dtype is dtypes.int8, dtype is dtypes.float32
    k = 8 if is_wide else 32
    a, b = (rng.integers(-128, 128, shape) / (1 if is_integer else 64) for shape in ((16, k), (8, k)))
    narrow = numpy.int8 if is_integer else numpy.float32 if is_wide else getattr(ml_dtypes, dtype.name)
    codes = [one.astype(narrow) for one in (a, b)]
    start = rng.integers(-1000, 1000, (16, 8)).astype(numpy.int32 if is_integer else numpy.float32)
    exact = start.astype(float) + codes[0].astype(float) @ codes[1].astype(float).T
    for schedule in SCHEDULES:
        d = start.copy()
        with scheduled(schedule):
            words = {name: one.view(numpy.uint32) for name, one in zip("ab", codes, strict=True)}
            sum_t = dtypes.int32 if is_integer else dtypes.float32
            call = "mma_m16n8k8" if is_wide else "mma_m16n8k32<scalar_t>"
            run_on_host(WORDS.replace("PRODUCT", call), grid=1, block=32, scalar_t=dtype, sum_t=sum_t, d=d, **words)
        assert numpy.array_equal(d, exact.astype(d.dtype))


HALVES = """#include "mma.cuh"
extern "C" __global__ void convert(uint32_t* out, const uint32_t* codes) {
    uint32_t halves[2];
    fp8_to_half<scalar_t>(codes[threadIdx.x], halves);
    for (int i = 0; i < 2; ++i) out[2 * threadIdx.x + i] = halves[i];
}
"""


@pytest.mark.parametrize("dtype", [dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.float8_e4m3fnuz], ids=str)
def test_every_fp8_value_as_float16(run_on_host: Run, dtype: DType) -> None:
    codes, out = numpy.arange(256, dtype=numpy.uint8), numpy.empty(128, numpy.uint32)
    run_on_host(HALVES, grid=1, block=64, scalar_t=dtype, out=out, codes=codes.view(numpy.uint32))
    expected = codes.view(getattr(ml_dtypes, dtype.name)).astype(numpy.float16)
    result = out.view(numpy.float16)
    assert numpy.array_equal(numpy.isnan(result), numpy.isnan(expected))
    numbers = ~numpy.isnan(expected)
    assert numpy.array_equal(result.view(numpy.uint16)[numbers], expected.view(numpy.uint16)[numbers])


def run_on_device(kernel: MakeKernel, text: str, name: str, block: int, constants: Any, **arrays: Any) -> Any:
    """Run the kernel of a text on the GPU; returns the first array afterwards."""
    import cupy

    held = {key: cupy.asarray(value.view(f"u{value.itemsize}")) for key, value in arrays.items()}
    one = kernel(name, text)(**constants).launch(1, block)
    function = one.specialisation.load(0).function
    bound = launch.bind(name, 0, [one], [function], tuple(held), (), {})
    bound.pack(bound.buffer, 0, *(value.data.ptr for value in held.values()))
    assert not bound.fire[0]()
    cupy.cuda.runtime.deviceSynchronize()
    first = next(iter(arrays))
    return held[first].get().view(arrays[first].dtype)


@pytest.mark.gpu
@MATRICES
def test_mma_on_the_device(kernel: MakeKernel, dtype: DType) -> None:
    if dtype is dtypes.bfloat16 and not device.get(0).supports("bfloat16_products"):
        pytest.skip("Turing has no such MMA")
    d, a, b, expected = matrices(dtype)
    result = run_on_device(kernel, MMA, "product", 32, {"scalar_t": dtype}, d=d, a=a, b=b)
    assert numpy.abs(result - expected).max() <= 2**-20 * numpy.abs(expected).max()


@pytest.mark.gpu
def test_async_copies_on_the_device(kernel: MakeKernel, run_on_host: Run) -> None:
    text = re.sub(r"/\*FAULT:.*?\*/|/\*END\*/", "", ASYNC)
    values, expected = (numpy.arange(count, dtype=numpy.float32) for count in (256, 32))
    run_on_host(text, grid=1, block=32, out=expected, **{"in": values})
    actual = run_on_device(kernel, text, "staged", 32, {}, out=expected * 0, **{"in": values})
    assert (actual == expected).all()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_takes_the_same_texts(kernel: MakeKernel, arch: str) -> None:
    for name, text, constants in (
        ("product", MMA, {"scalar_t": dtypes.float16}),
        ("product", MMA, {"scalar_t": dtypes.bfloat16}),
        ("staged", ASYNC, {}),
    ):
        if arch == "sm_75" and constants.get("scalar_t") is dtypes.bfloat16:
            continue  # Turing has no such MMA
        specialisation = kernel(name, text)(**constants)
        assert offline.compile(name, str(specialisation), specialisation.text, arch).spill_bytes == 0


def test_ldmatrix_needs_aligned_rows(run_on_host: Run) -> None:
    text = MMA.replace("scalar_t A[16][24]", "scalar_t A[16][20]")
    operands = {"d": numpy.zeros(128, "f"), "a": numpy.zeros(256, "e"), "b": numpy.zeros(128, "e")}
    with pytest.raises(pyops.KernelFault, match="misaligned access: ldmatrix"):
        run_on_host(text, grid=1, block=32, scalar_t=dtypes.float16, **operands)


def test_arithmetic_is_rounded_once(run_on_host: Run) -> None:
    """No multiply-add is fused, functions are correctly rounded, minima and maxima drop NaN and distinguish -0."""
    text = """#include "platform.cuh"
extern "C" __global__ void arithmetic(float* out, const float* x, const float* y, int n) {
    for (int i = threadIdx.x; i < n; i += 64) {
        float* row = out + i;
        row[0 * n] = x[i] * y[i] + 1.0f;
        row[1 * n] = fmaf(x[i], y[i], 1.0f);
        row[2 * n] = expf(x[i]);
        row[3 * n] = tanhf(x[i]);
        row[4 * n] = rsqrtf(fabsf(x[i]));
        row[5 * n] = estimate_exp2(x[i]);
        row[6 * n] = estimate_reciprocal(x[i]);
        row[7 * n] = fminf(x[i], y[i]);
        row[8 * n] = fmaxf(x[i], y[i]);
    }
}
"""
    rng = numpy.random.default_rng(4)
    x, y = (rng.standard_normal(10_000).astype(numpy.float32) for _ in range(2))
    x[:4], y[:4] = (numpy.nan, 1, -0.0, 0), (1, numpy.nan, 0, -0.0)
    n = len(x)
    out = numpy.empty((9, n), numpy.float32)
    run_on_host(text, grid=1, block=64, n=n, out=out, x=x, y=y)
    wide = x.astype(numpy.longdouble)
    with numpy.errstate(all="ignore"):
        exact = [
            x * y + numpy.float32(1), wide * y.astype(numpy.longdouble) + 1, numpy.exp(wide), numpy.tanh(wide),
            1 / numpy.sqrt(numpy.abs(wide)), numpy.exp2(wide), 1 / wide, numpy.fmin(x, y), numpy.fmax(x, y),
        ]  # fmt: skip
    for row, truth in zip(out[:7], exact[:7], strict=True):
        assert same_or_nan(row[4:], truth.astype(numpy.float32)[4:])
    assert numpy.array_equal(out[7:, 4:], numpy.stack(exact[7:])[:, 4:])
    assert out[7, :4].tolist() == [1, 1, 0, 0] == out[8, :4].tolist()
    assert numpy.signbit(out[7:, 2:4]).tolist() == [[True, True], [False, False]]
    # Approximate functions flush subnormal inputs and results.
    extreme = numpy.array([1e-39, -127.5, 2.0**126.5, 1.0], numpy.float32)
    out = numpy.empty((9, 4), numpy.float32)
    run_on_host(text, grid=1, block=64, n=4, out=out, x=extreme, y=extreme)
    assert out[5:7].tolist() == [[1, 0, numpy.inf, 2], [numpy.inf, numpy.float32(-1 / 127.5), 0, 1]]


def test_block_of_1024_threads(run_on_host: Run) -> None:
    text = """#include "reduce.cuh"
extern "C" __global__ void total(float* out, const float* in) {
    __shared__ float partial[1024 / WARP_SIZE];
    out[blockIdx.x * 1024 + threadIdx.x] = row_reduce<Sum, 1024>(in[threadIdx.x], partial);
}
"""
    values = numpy.arange(1024, dtype=numpy.float32)
    out = numpy.empty(3 * 1024, numpy.float32)
    for warp in (32, 64):
        with scheduled(Schedule("shuffled", 9), warp_size=warp):
            run_on_host(text, grid=3, block=1024, out=out, **{"in": values})
        assert (out == values.sum()).all()


@pytest.mark.parametrize(("block", "shared"), [(1025, 0), (0, 0), (64, 300 * 1024)])
def test_impossible_launch_is_refused(run_on_host: Run, block: int, shared: int) -> None:
    text = 'extern "C" __global__ void nothing(float* out) {}'
    with pytest.raises(pyops.KernelFault, match="bad launch"):
        run_on_host(text, grid=1, block=block, shared=shared, out=numpy.zeros(1, "f"))


def test_threads_wait_for_each_other(run_on_host: Run) -> None:
    text = """extern "C" __global__ void add(int* out) {
    for (int i = 0; i < 100; ++i) { __syncthreads(); out[threadIdx.x] += 1; }
}
"""
    run_on_host(text, grid=1, block=64, out=numpy.zeros(64, numpy.int32))
    (function,) = (one for (key, _), one in host._loaded.items() if "void add(int* out)" in key)
    arrays = [numpy.zeros(64, numpy.int32) for _ in range(8)]

    def launch(array: Any) -> None:
        word = numpy.array([array.ctypes.data, 0], numpy.uint64)
        word[1] = word.ctypes.data
        for _ in range(10):
            tensors = [Range("out", array.ctypes.data, array.nbytes)]
            function.launch((1, 1, 1), (64, 1, 1), 0, word.ctypes.data + 8, tensors)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(launch, arrays))
    assert all((array == 1000).all() for array in arrays)


def test_an_op_lists_the_kernels_that_it_has_run() -> None:
    op = pyops.registry["relu2"]
    x = numpy.full((3, 1352), 2, numpy.float16)
    out = numpy.empty_like(x)

    def launched() -> set[str]:
        return {one.constants for one in op.compiled() if (one.arch, one.device) == ("host", -1)}

    op.specialisations.clear()
    with pyops.testing.cpu("reference"):
        pyops.relu2(out, x)
    assert not launched()
    with pyops.testing.cpu("kernels"):
        pyops.relu2(out, x)
        (one,) = axes.launches(op, {"dtype": "float16", "hidden_size": 1352}, device.model())
        assert launched() == {str(one.specialisation)}
        (held,) = pyops.warmup("relu2", dtype="float16", hidden_size=1352)
    assert held in op.compiled()
    assert held.origin in ("compiled", "disk")
    assert held.milliseconds > 0


def test_compile_error_names_the_kernels_own_line(run_on_host: Run) -> None:
    text = '#include "vec.cuh"\nextern "C" __global__ void broken(float* out) {\n    *out = undeclared;\n}\n'
    with pytest.raises(pyops.CompileError, match=r"kernels_cu/test/broken\.cu:3:.*undeclared"):
        run_on_host(text, grid=1, block=32, out=numpy.zeros(1, "f"))


def test_unsupported_shared_arrays(run_on_host: Run) -> None:
    text = 'extern "C" __global__ void odd(float* out) {\n    __shared__ struct { int x; } a;\n}\n'
    with pytest.raises(pyops.CompileError, match="the_host_backend_takes_one_shared_array"):
        run_on_host(text, grid=1, block=32, out=numpy.zeros(1, "f"))


KERNEL = 'extern "C" __global__ void one(int* out) { *out = 1; }'
SCRIPT = f"""
import sys, time, warnings
import numpy
from pyops._core.launch.kernel import Kernel
from pyops.host import ranges, run as host, toolchain
chosen = sys.argv[1]
toolchain.toolchains = lambda found=toolchain.toolchains(): {{chosen: found[chosen]}} if chosen else found
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    function = host.load(Kernel("test/one.cu", text={KERNEL!r})())
out = numpy.zeros(1, numpy.int32)
words = numpy.array([out.ctypes.data, 0], numpy.uint64)
words[1] = words.ctypes.data
function.launch((1, 1, 1), (1, 1, 1), 0, words.ctypes.data + 8, [ranges.Range("out", out.ctypes.data, 4)])
assert out[0] == 1
print(len(warned), function.library)
"""


def in_a_process(folder: Path, chosen: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, chosen],
        env=os.environ | {"CUPY_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warned, path = done.stdout.split()
    return int(warned), path


@pytest.mark.slow
def test_disk_cache(tmp_path: Path) -> None:
    """Three files: the runtime, the kernel, and the precompiled prelude. The second process compiles nothing."""
    warned, path = in_a_process(tmp_path)
    assert warned == 0
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "pyops-host").iterdir()}
    assert Path(path) in files
    assert len(files) == 3
    assert in_a_process(tmp_path) == (0, path)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "pyops-host").iterdir()} == files


def test_unwritable_cache_folder(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    warned, path = in_a_process(blocked)
    assert warned == 1
    assert not path.startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["g++", "clang++", "ziglang"])
def test_every_toolchain(tmp_path: Path, name: str) -> None:
    if name not in toolchains():
        pytest.skip(f"no {name}")
    assert in_a_process(tmp_path, name)[0] == 0


def test_no_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "toolchains", dict)
    with pytest.raises(pyops.MissingDependencyError, match=r"C\+\+ compiler.*\[cpu\]"):
        host.load(Kernel("test/none.cu", text='extern "C" __global__ void none(int* out) {}')())


def test_unknown_order() -> None:
    with pytest.raises(ValueError, match="order"):
        Schedule("random")
