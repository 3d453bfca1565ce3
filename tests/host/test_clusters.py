"""Clusters of CTAs on the host: shared data, and faults of a CTA that shares too early or too late."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import pyops
from pyops.host import toolchain
from pyops.testing import SCHEDULES, scheduled
from tests.support.kernels import Run

pytestmark = pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")

# Every CTA sends its words to the previous one, round after round.
ROUNDS = """#include "cluster.cuh"
extern "C" __global__ void CLUSTER_OF(BLOCKS) rounds(int* out, int rounds) {
    __shared__ int words[64];
    const int thread = threadIdx.x, block = blockIdx.y % BLOCKS;
    int word = blockIdx.y * 1000 + blockIdx.x * 100 + thread;
    for (int i = 0; i < rounds; ++i) {
        words[thread] = word;
        /*FAULT:EARLY*/ sync_cluster<BLOCKS>(); /*END*/
        word = int(load_of_block<BLOCKS>(reinterpret_cast<uint32_t*>(words + thread), (block + 1) % BLOCKS));
        /*FAULT:LATE*/ sync_cluster<BLOCKS>(); /*END*/
    }
    out[(blockIdx.x * gridDim.y + blockIdx.y) * 64 + thread] = word;
}
"""


@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
def test_words_circulate(run_on_host: Run, blocks: int) -> None:
    for schedule in SCHEDULES:
        out = numpy.zeros((2, 2 * blocks, 64), numpy.int32)
        with scheduled(schedule):
            run_on_host(ROUNDS, grid=(2, 2 * blocks), block=64, out=out, BLOCKS=blocks, rounds=5)
        block = numpy.arange(2 * blocks)
        source = block // blocks * blocks + (block + 5) % blocks
        right = source[None, :, None] * 1000 + numpy.arange(2)[:, None, None] * 100 + numpy.arange(64)
        numpy.testing.assert_array_equal(out, right)


def _run(run_on_host: Run, text: str, blocks: int = 2, **how: Any) -> None:
    given = {"grid": (1, 2 * blocks), "block": 64, "out": numpy.zeros(2 * blocks * 64, numpy.int32), "rounds": 2}
    run_on_host(text, **given | how, BLOCKS=blocks)


def test_missing_cluster_barrier(caught: Any) -> None:
    """Before a word is read, or before it is written again."""
    how = {"grid": (1, 4), "block": 64, "out": numpy.zeros(256, numpy.int32), "BLOCKS": 2, "rounds": 2}
    early = ROUNDS.replace("EARLY", "__syncthreads();").replace(
        "/*FAULT:LATE*/ sync_cluster<BLOCKS>(); /*END*/", "sync_cluster<BLOCKS>();"
    )
    fault = caught(("uninitialised shared memory", "shared memory race"), early, **how)
    assert "of the cluster" in fault.message
    late = ROUNDS.replace("LATE", "__syncthreads();").replace(
        "/*FAULT:EARLY*/ sync_cluster<BLOCKS>(); /*END*/", "sync_cluster<BLOCKS>();"
    )
    fault = caught("shared memory race", late, **how)
    assert "of the cluster" in fault.message


def test_block_exits_while_another_reads_it(caught: Any) -> None:
    text = ROUNDS.replace("/*FAULT:EARLY*/ sync_cluster<BLOCKS>(); /*END*/", "sync_cluster<BLOCKS>();").replace(
        "LATE", ""
    )
    how = {"grid": (1, 2), "block": 64, "out": numpy.zeros(128, numpy.int32), "BLOCKS": 2, "rounds": 1}
    fault = caught(
        "early exit", text.replace("sync_cluster<BLOCKS>(); /*END*/", "leave_cluster<BLOCKS>(); /*END*/"), **how
    )
    assert "has ended" in fault.message


def test_thread_that_exits_first(caught: Any) -> None:
    text = """#include "cluster.cuh"
extern "C" __global__ void CLUSTER_OF(2) leaves(int* out) {
    if (/*FAULT:threadIdx.x == 3*/ false /*END*/) return;
    sync_cluster<2>();
    out[blockIdx.y * 32 + threadIdx.x] = 1;
}
"""
    fault = caught("early exit", text, grid=(1, 2), block=32, out=numpy.zeros(64, numpy.int32))
    assert "sync_cluster" in fault.message


def test_global_memory(caught: Any) -> None:
    """A barrier of the cluster orders its CTAs' accesses there."""
    text = """#include "cluster.cuh"
extern "C" __global__ void CLUSTER_OF(2) swap(int* out) {
    const int own = blockIdx.y * 32 + threadIdx.x, other = own ^ 32;
    out[own] = own;
    /*FAULT:__syncthreads();*/ sync_cluster<2>(); /*END*/
    const int found = out[other];
    sync_cluster<2>();
    out[own] = found;
}
"""
    out = numpy.zeros(64, numpy.int32)
    caught(
        "global memory race", text, lambda: list(out) == [*range(32, 64), *range(32)], grid=(1, 2), block=32, out=out
    )


def test_fault_leaves_nothing_behind(run_on_host: Run) -> None:
    """The next launch is unaffected, whichever CTA ran last."""
    out = numpy.zeros(64, numpy.int32)
    text = """#include "cluster.cuh"
extern "C" __global__ void CLUSTER_OF(2) fails(int* out, int divisor) {
    out[blockIdx.y * 32 + threadIdx.x] = 1;
    sync_cluster<2>();
    if (blockIdx.y == 0) out[threadIdx.x] = 1 / divisor;
}
"""
    plain = """extern "C" __global__ void shift(int* out) { out[threadIdx.x] = out[threadIdx.x + 32]; }"""
    for schedule in SCHEDULES:
        with scheduled(schedule):
            with pytest.raises(pyops.KernelFault, match="division by zero"):
                run_on_host(text, grid=(1, 2), block=32, out=out, divisor=0)
            run_on_host(plain, grid=1, block=32, out=out)


@pytest.mark.slow
def test_epochs_wrap_around(run_on_host: Run) -> None:
    """More launches than epoch numbers: old writes are not held against a new launch."""
    text = """#include "cluster.cuh"
extern "C" __global__ void CLUSTER_OF(8) many(int* out, const int* in) {
    sync_cluster<8>();
    const int found = in[blockIdx.y];
    if (blockIdx.x == 0) out[blockIdx.y] = found + 1;
}
"""
    pair = [numpy.zeros(8, numpy.int32) for _ in range(2)]
    for _ in range(20):  # 20 launches of 30,000 x 8 blocks, each with a barrier
        pair.reverse()
        run_on_host(text, grid=(30_000, 8), block=1, out=pair[0], **{"in": pair[1]})
    assert pair[0].tolist() == [20] * 8


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        (("(block + 1) % BLOCKS", "BLOCKS"), {}, "out-of-bounds shared access: read of block 2 of a cluster of 2"),
        (("words + thread", "words + 64 + thread"), {}, "out-of-bounds shared access"),
        (("", ""), {"grid": (1, 3)}, "bad launch: 3 blocks in y, clusters of 2"),
        (("", ""), {"blocks": 32}, "bad launch: 64 blocks in y, clusters of 32"),
    ],
)
def test_refused(run_on_host: Run, change: tuple[str, str], how: dict[str, Any], message: str) -> None:
    text = ROUNDS.replace("/*FAULT:EARLY*/", "").replace("/*FAULT:LATE*/", "").replace("/*END*/", "")
    with pytest.raises(pyops.KernelFault, match=message):
        _run(run_on_host, text.replace(*change) if change[0] else text, **how)
