"""mbarriers, named barriers, bulk copies and proxy fences on the host, one by one.

Whole kernels are in test_host_hopper.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

import pyops
from pyops.host import toolchain
from pyops.testing import SCHEDULES, scheduled
from tests.host.hopper import mapped
from tests.support.kernels import Run
from tests.support.profiles import few

pytestmark = pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")

Caught = Callable[..., pyops.KernelFault]
RACE, MISSING, DEADLOCK, MISUSE = "shared memory race", "missing proxy fence", "deadlock", "mbarrier misuse"
NOT_WAITED, UNWRITTEN = "async copy not waited for", "uninitialised shared memory"
INIT = """    if (threadIdx.x == 0) {
        mbarrier_init(barrier, ARRIVALS);
        fence_mbarrier_init();
    }
    __syncthreads();
"""


def words(count: int, start: int = 0) -> Any:
    return numpy.arange(start, start + count, dtype=numpy.int32)


# Half of the block writes, the other half reads in reverse, for some rounds.
PASSED_ON = """#include "barrier.cuh"
extern "C" __global__ void passed_on(int* out, int rounds) {
    __shared__ uint64_t barrier[1];
    __shared__ uint64_t empty[1];
    __shared__ int tile[64];
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, /*FAULT:COUNT*/64/*END*/);
        mbarrier_init(empty, 64);
    }
    /*FAULT:INIT*/__syncthreads();/*END*/
    const int i = threadIdx.x % 64;
    for (int round = 0; round < rounds; ++round) {
        if (threadIdx.x < 64) {
            /*FAULT:EMPTY*/mbarrier_wait(empty, (round & 1) ^ 1);/*END*/
            tile[i] = 100 * round + i;
            /*FAULT:ARRIVE*/mbarrier_arrive(barrier);/*END*/
        } else {
            /*FAULT:WAIT*/mbarrier_wait(barrier, round & 1);/*END*/
            out[64 * round + i] = tile[63 - i];
            mbarrier_arrive(empty);
        }
    }
}
"""


@pytest.mark.parametrize(
    ("which", "instead", "kinds"),
    few(
        [
            ("EMPTY", "", (RACE, MISUSE, DEADLOCK, UNWRITTEN)),
            ("ARRIVE", "if (i) mbarrier_arrive(barrier);", DEADLOCK),
            ("ARRIVE", "mbarrier_arrive(barrier); if (i == 5) mbarrier_arrive(barrier);", (RACE, MISUSE, UNWRITTEN)),
            ("WAIT", "", (RACE, UNWRITTEN)),
            ("WAIT", "mbarrier_wait(barrier, (round & 1) ^ 1);", (RACE, UNWRITTEN, DEADLOCK, MISUSE)),
            ("INIT", "", (RACE, MISUSE)),
            ("COUNT", "63", (RACE, MISUSE, UNWRITTEN)),
            ("COUNT", "65", DEADLOCK),
            ("COUNT", "0", MISUSE),
        ],
        3,
    ),
)
def test_mbarrier_phases(caught: Caught, which: str, instead: str, kinds: Any) -> None:
    out = words(3 * 64)
    right = numpy.arange(3)[:, None] * 100 + numpy.arange(63, -1, -1)
    text = only(PASSED_ON, which, instead)
    caught(kinds, text, lambda: bool((out.reshape(3, 64) == right).all()), grid=1, block=128, rounds=3, out=out)


def only(text: str, which: str, instead: str) -> str:
    """The text with only the fault of this name."""
    for part in text.split("/*FAULT:")[1:]:
        name, _, rest = part.partition("*/")
        old = rest.partition("/*END*/")[0]
        marked = f"/*FAULT:{name}*/{old}/*END*/"
        text = text.replace(marked, f"/*FAULT:{instead}*/{old}/*END*/" if name == which else old)
    return text


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    few(
        [
            ("mbarrier_arrive(barrier + 1);", MISUSE, "has not initialised"),
            ("mbarrier_init(barrier, 1);", MISUSE, "initialisation of the bytes of an mbarrier"),
            ("barrier[0] = 3;", MISUSE, "write of the bytes of an mbarrier"),
            ("mbarrier_wait(barrier, 2);", MISUSE, "parity 2"),
            ("mbarrier_arrive(reinterpret_cast<uint64_t*>(out));", "out-of-bounds shared access", "outside every"),
            ("mbarrier_arrive_cluster(barrier, 1);", MISUSE, "in block 1 of a cluster of 1"),
            ("named_barrier_sync(16, 32);", "divergent barrier", "expected 1 to 15"),
            ("named_barrier_sync<1>(33);", "divergent barrier", "a multiple of 32"),
            ("bulk_load(tile, out, 8, barrier);", "misaligned access", "expected multiples of 16"),
            ("bulk_load(tile, out + 1, 16, barrier);", "misaligned access", "expected multiples of 16"),
            ("bulk_load(tile + 28, out, 32, barrier);", "out-of-bounds shared access", "outside every shared array"),
            ("bulk_load(tile, out + 32, 16, barrier);", "out-of-bounds global access", "read of 16 bytes"),
            ("bulk_store(out, tile, 16);", UNWRITTEN, "read by a bulk store"),
            (
                "tma_load(tile, reinterpret_cast<const TensorMap*>(out), barrier, 0, 0);",
                "bad tensor map",
                "no tensor map",
            ),
            ("bulk_load(tile, out, 16, barrier);", NOT_WAITED, "the block ends before"),
        ],
        6,
    ),
)
def test_refused(run_on_host: Run, line: str, kind: str, message: str) -> None:
    text = f"""#include "tma.cuh"
extern "C" __global__ void refused(int* out) {{
    __shared__ uint64_t barrier[2];
    __shared__ alignas(128) int tile[32];
    if (threadIdx.x == 0) {{
        mbarrier_init(barrier, 2);
        fence_mbarrier_init();
        {line}
    }}
}}
"""
    with pytest.raises(pyops.KernelFault, match=message) as caught:
        run_on_host(text, grid=1, block=32, out=aligned(32))
    assert caught.value.kind == kind


def aligned(count: int, start: int = 0) -> Any:
    """int32 numbers from `start` on, at a multiple of 16 bytes."""
    memory = numpy.empty(count + 3, numpy.int32)
    first = -memory.ctypes.data // 4 % 4
    memory[first : first + count] = words(count, start)
    return memory[first : first + count]


# Tiles come in by one kind of copy and go out, doubled, by another.
THROUGH = """#include "tma.cuh"
extern "C" __global__ void through(int* out, const int* in, int tiles) {
    __shared__ uint64_t barrier[1];
    __shared__ alignas(128) int tile[64];
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        bulk_prefetch(in, 64 * 4);
    }
    __syncthreads();
    for (int i = 0; i < tiles; ++i) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(barrier, /*FAULT:BYTES*/256/*END*/);
            bulk_load(tile, in + 64 * i, 256, barrier);
        }
        /*FAULT:WAIT*/mbarrier_wait(barrier, i & 1);/*END*/
        tile[threadIdx.x] *= 2;
        /*FAULT:FENCE*/fence_proxy_async();/*END*/
        __syncthreads();
        if (threadIdx.x == 0) {
            bulk_store(out + 64 * i, tile, 256);
            /*FAULT:COMMIT*/tma_store_commit();/*END*/
            /*FAULT:READ*/tma_store_wait_read<0>();/*END*/
        }
        __syncthreads();
    }
}
"""


@pytest.mark.parametrize(
    ("which", "instead", "kinds"),
    few(
        [
            ("BYTES", "240", ("wrong transaction bytes", NOT_WAITED, DEADLOCK, RACE, "mbarrier misuse")),
            ("BYTES", "272", DEADLOCK),
            ("WAIT", "", (NOT_WAITED, RACE, UNWRITTEN)),
            ("FENCE", "", MISSING),
            ("COMMIT", "", (RACE, NOT_WAITED)),
            ("READ", "", (RACE, NOT_WAITED)),
        ],
        3,
    ),
)
def test_bulk_copies_in_and_out(caught: Caught, which: str, instead: str, kinds: Any) -> None:
    out, given = aligned(192), aligned(192, 7)
    text = only(THROUGH, which, instead)
    caught(kinds, text, lambda: bool((out == 2 * given).all()), grid=1, block=64, tiles=3, out=out, **{"in": given})


# CTAs of a cluster: the first loads for all, and each sends its data to the next.
SENT_ON = """#include "cluster.cuh"
#include "tma.cuh"
extern "C" __global__ void CLUSTER_OF(2) sent_on(int* out, const int* in) {
    __shared__ uint64_t barrier[2];
    __shared__ alignas(128) int tile[64];
    __shared__ alignas(128) int received[64];
    const int rank = blockIdx.y % 2;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init(barrier + 1, 1);
        /*FAULT:INIT*/fence_mbarrier_init();/*END*/
        mbarrier_arrive_expect_tx(barrier, 256);
        mbarrier_arrive_expect_tx(barrier + 1, 256);
    }
    /*FAULT:CLUSTER*/sync_cluster<2>();/*END*/
    if (rank == 0 && threadIdx.x == 0) bulk_load_multicast(tile, in, 256, barrier, /*FAULT:BLOCKS*/3/*END*/);
    /*FAULT:WAIT*/mbarrier_wait(barrier, 0);/*END*/
    tile[threadIdx.x] += 100 * rank;
    /*FAULT:FENCE*/fence_proxy_async();/*END*/
    __syncthreads();
    if (threadIdx.x == 0) bulk_copy_to_block(received, tile, 256, barrier + 1, rank ^ 1);
    /*FAULT:RECEIVED*/mbarrier_wait(barrier + 1, 0);/*END*/
    out[64 * rank + threadIdx.x] = received[threadIdx.x];
    /*FAULT:LEAVE*/leave_cluster<2>();/*END*/
}
"""


@pytest.mark.parametrize(
    ("which", "instead", "kinds"),
    few(
        [
            ("INIT", "", MISSING),
            ("CLUSTER", "__syncthreads();", (MISUSE, RACE, NOT_WAITED, UNWRITTEN)),
            ("BLOCKS", "1", DEADLOCK),
            ("BLOCKS", "5", MISUSE),
            ("WAIT", "", (NOT_WAITED, UNWRITTEN, RACE)),
            ("FENCE", "", MISSING),
            ("RECEIVED", "", (NOT_WAITED, UNWRITTEN, RACE)),
        ],
        3,
    ),
)
def test_clusters(caught: Caught, which: str, instead: str, kinds: Any) -> None:
    out, given = aligned(128), aligned(64, 7)

    def right() -> bool:
        return bool((out == numpy.concatenate([given + 100, given])).all())

    caught(kinds, only(SENT_ON, which, instead), right, grid=(1, 2), block=64, out=out, **{"in": given})


# Threads copy by cp_async and go on; others wait for the copies at an mbarrier.
BY_THREADS = """#include "async.cuh"
#include "barrier.cuh"
extern "C" __global__ void by_threads(int* out, const int* in, int tiles) {
    __shared__ uint64_t full[1];
    __shared__ uint64_t empty[1];
    __shared__ alignas(16) int tile[256];
    if (threadIdx.x == 0) {
        mbarrier_init(full, 64);
        mbarrier_init(empty, 64);
    }
    __syncthreads();
    const int i = threadIdx.x % 64;
    for (int j = 0; j < tiles; ++j) {
        if (threadIdx.x < 64) {
            /*FAULT:EMPTY*/mbarrier_wait(empty, (j & 1) ^ 1);/*END*/
            cp_async<16>(tile + 4 * i, in + 256 * j + 4 * i);
            /*FAULT:ARRIVE*/cp_async_mbarrier_arrive_noinc(full);/*END*/
        } else {
            /*FAULT:FULL*/mbarrier_wait(full, j & 1);/*END*/
            for (int k = 0; k < 4; ++k) out[256 * j + 64 * k + i] = tile[255 - 64 * k - i];
            mbarrier_arrive(empty);
        }
    }
}
"""


@pytest.mark.parametrize(
    ("which", "instead", "kinds"),
    few(
        [
            ("EMPTY", "", (RACE, NOT_WAITED, MISUSE)),
            ("ARRIVE", "mbarrier_arrive(full);", NOT_WAITED),
            ("ARRIVE", "", (DEADLOCK, NOT_WAITED)),
            ("FULL", "", (RACE, NOT_WAITED, UNWRITTEN)),
        ],
        2,
    ),
)
def test_cp_async_arrives_at_an_mbarrier(caught: Caught, which: str, instead: str, kinds: Any) -> None:
    out, given = words(768), aligned(768, 5)

    def right() -> bool:
        return bool((out.reshape(3, 256) == given.reshape(3, 256)[:, ::-1]).all())

    caught(kinds, only(BY_THREADS, which, instead), right, grid=1, block=128, tiles=3, out=out, **{"in": given})


# Two halves of a block alternate at a word.
TURNS = """#include "barrier.cuh"
extern "C" __global__ void turns(int* out, int rounds) {
    __shared__ int word[1];
    const int half = threadIdx.x / 64;
    if (threadIdx.x == 0) word[0] = 0;
    __syncthreads();
    if (half == 1) /*FAULT:FIRST*/named_barrier_arrive<1>(128);/*END*/
    for (int round = 0; round < rounds; ++round) {
        /*FAULT:TURN*/named_barrier_sync(1 + half, 128);/*END*/
        if (threadIdx.x % 64 == 0) word[0] = 3 * word[0] + half;
        if (half == 0 || round + 1 < rounds) /*FAULT:NEXT*/named_barrier_arrive(2 - half, 128);/*END*/
    }
    __syncthreads();
    if (threadIdx.x == 0) out[0] = word[0];
}
"""


@pytest.mark.parametrize(
    ("which", "instead", "kinds"),
    few(
        [
            ("FIRST", ";", DEADLOCK),
            ("TURN", "", (RACE, DEADLOCK, "divergent barrier")),
            ("TURN", "named_barrier_sync(1 + half, 64);", (RACE, "divergent barrier")),
            ("NEXT", ";", DEADLOCK),
        ],
        2,
    ),
)
def test_named_barriers_alternate(caught: Caught, which: str, instead: str, kinds: Any) -> None:
    out, right = words(1), 0
    for half in (0, 1) * 4:
        right = 3 * right + half
    caught(kinds, only(TURNS, which, instead), lambda: bool(out[0] == right), grid=1, block=128, rounds=4, out=out)


@pytest.mark.parametrize(("dimensions", "swizzle"), few([(2, 0), (2, 32), (2, 64), (2, 128), (3, 128), (3, 0)], 3))
def test_tma_boxes(run_on_host: Run, dimensions: int, swizzle: int) -> None:
    """Boxes across every edge: zeros come in, nothing goes out, and 16-byte units are where the swizzle puts them."""
    columns = (swizzle or 64) // 4
    text = f"""#include "tma.cuh"
extern "C" __global__ void boxes(int* out, int* chunks, const __grid_constant__ TensorMap from_map,
                                 const __grid_constant__ TensorMap to_map, int x, int y, int z) {{
    __shared__ alignas(1024) int tile[256];
    __shared__ uint64_t barrier[1];
    if (threadIdx.x == 0) {{
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, {8 * columns * 4});
        tma_load(tile, &from_map, barrier, x, y{", z" * (dimensions == 3)});
        mbarrier_wait(barrier, 0);
        for (int i = 0; i < {8 * columns}; ++i) chunks[i] = tile[i];
        tma_store(&to_map, tile, x, y{", z" * (dimensions == 3)});
        tma_store_commit();
        tma_store_wait<0>();
    }}
}}
"""
    given = aligned(4 * 12 * 48, 1).reshape(4, 12, 48)
    box = (columns, 2, 4) if dimensions == 3 else (columns, 8)
    place = numpy.arange(8 * columns) * 4
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    place ^= (place >> 7 & mask) << 4
    for number, (x, y, z) in enumerate([(0, 0, 0), (-3, -1, -2), (43, 9, 2), (60, 0, 0), (5, 3, 1)]):
        out, chunks = numpy.zeros_like(given), words(8 * columns)
        maps = {}
        for name, array in (("given", given), ("out", out)):
            maps[name] = mapped(name, array if dimensions == 3 else array[0], box, swizzle)
        with scheduled(SCHEDULES[number]):
            run_on_host(
                text,
                1,
                32,
                out=out,
                chunks=chunks,
                given=given,
                from_map=maps["given"],
                to_map=maps["out"],
                x=x,
                y=y,
                z=z,
            )
        index = numpy.indices(box[::-1])
        at = (
            [*(index[0] + z, index[1] + y, index[2] + x)]
            if dimensions == 3
            else [index[0] * 0, index[0] + y, index[1] + x]
        )
        inside = numpy.all([(one >= 0) & (one < size) for one, size in zip(at, given.shape, strict=True)], axis=0)
        loaded = numpy.zeros(box[::-1], numpy.int32)
        loaded[inside] = given[tuple(one[inside] for one in at)]
        numpy.testing.assert_array_equal(chunks[place // 4], loaded.reshape(-1))
        stored = numpy.zeros_like(given)
        stored[tuple(one[inside] for one in at)] = loaded[inside]
        numpy.testing.assert_array_equal(out, stored)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(run_on_host: Run, count: int, transposed: bool) -> None:
    """Matrices loaded by ldmatrix are stored to the same addresses, and transposed ones to those of their transpose."""
    text = """#include "mma.cuh"
extern "C" __global__ void stored(half_t* out, const half_t* in) {
    __shared__ alignas(16) half_t from[N * 64];
    __shared__ alignas(16) half_t to[N * 64];
    for (int i = threadIdx.x; i < N * 64; i += 32) from[i] = in[i];
    __syncthreads();
    uint32_t fragment[N];
    ldmatrix<N>(fragment, from + threadIdx.x * 8 % (N * 64));
    stmatrix<N, TRANSPOSED>(to + threadIdx.x * 8 % (N * 64), fragment);
    __syncthreads();
    for (int i = threadIdx.x; i < N * 64; i += 32) out[i] = to[i];
}
"""
    given = numpy.arange(count * 64).astype(numpy.float16).reshape(count, 8, 8)
    out = numpy.zeros_like(given)
    run_on_host(text, grid=1, block=32, out=out, N=count, TRANSPOSED=transposed, **{"in": given})
    numpy.testing.assert_array_equal(out, given.transpose(0, 2, 1) if transposed else given)
