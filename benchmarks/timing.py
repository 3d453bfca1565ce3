"""Timing of calls: on the GPU by replays of CUDA graphs, on the host by a clock around eager calls."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice, repeat
from typing import Any, NamedTuple

import torch

from pyops._core.text import source

Call = Callable[[], Any]

_MIN_CALLS = 40
_SLOW_US = 1000.0  # slower calls may have fewer than _MIN_CALLS in a graph
_MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class Effort:
    """The numbers of calls and repetitions for one measured time."""

    replays: int = 15
    sets: int = 64
    eager_calls: int = 10_000

    @property
    def method(self) -> str:
        """The method of measurement, as text for the report."""
        return (
            f"GPU time: {self.replays} CUDA-graph replays of at least {_MIN_CALLS} calls (or of 40 ms of them) that "
            "rotate over sets of arguments, together larger than three times L2 unless there would be more than "
            f"{self.sets}; what calls edit is put back before each; median, lowest and highest. GB/s counts each byte "
            "that a call must move once. "
            f"Host time: {self.eager_calls} eager calls, the device awaited after every 500 outside the clock; median "
            "of 5 runs."
        )


FULL, QUICK = Effort(), Effort(replays=5, sets=16, eager_calls=2_000)


class Spread(NamedTuple):
    """Median, minimum and maximum of a set of times."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def num_sets(nbytes: int, l2_bytes: int, max_sets: int) -> int:
    """The number of argument sets of `nbytes` that exceed three times L2, limited by `max_sets` and memory."""
    nbytes = max(1, nbytes)
    return max(1, min(3 * l2_bytes // nbytes + 1, max_sets, _MAX_BYTES // nbytes))


def num_calls(sets: int, us: float) -> int:
    """The number of calls in a graph, a multiple of `sets`, if a call takes about `us`."""
    calls = _MIN_CALLS if us <= _SLOW_US else _MIN_CALLS * _SLOW_US / us
    return int(-(-calls // sets)) * sets


def gpu_us(calls: Sequence[Call], effort: Effort, renew: Sequence[Call] = ()) -> Spread:
    """Microseconds of GPU time per call, rotating over `calls`. `renew` restores edited tensors, untimed."""
    return timer(calls, effort, renew)()


def timer(calls: Sequence[Call], effort: Effort, renew: Sequence[Call] = ()) -> Callable[[], Spread]:
    """A function that measures `gpu_us` of calls that are captured here, once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # warm-up: kernels cannot be compiled, nor memory pools grown, during capture
            call()
        count = num_calls(len(calls), _eager_us(calls))
        graph = _capture(islice(cycle(calls), count))
        renewal = _capture(renew) if renew else None

    def measure(_keep_alive: Sequence[Call] = calls) -> Spread:
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(effort.replays + 2)]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # 1 ms, in which the host queues the replays, so that no gaps are timed
            for start, end in spans:
                if renewal:
                    renewal.replay()
                start.record()
                graph.replay()
                end.record()
            stream.synchronize()
        return spread([start.elapsed_time(end) * 1e3 / count for start, end in spans[2:]])

    return measure


def _eager_us(calls: Sequence[Call]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / len(calls)


def _capture(calls: Iterable[Call]) -> Any:
    """Capture the calls. (`torch.cuda.graph` also collects garbage and empties the pool, which takes 0.1 s.)"""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    except BaseException:
        with suppress(RuntimeError):  # suppressed, because it would hide the error that ended the capture
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


def host_us(
    call: Call,
    *,
    calls: int,
    chunk: int = 500,
    runs: int = 5,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> Spread:
    """Microseconds of host time per eager call. The device is synchronised, untimed, after every `chunk` calls."""

    def run() -> float:
        total = 0
        for _ in range(calls // chunk):
            start = time.perf_counter_ns()
            for _ in repeat(None, chunk):
                call()
            total += time.perf_counter_ns() - start
            synchronize()
        return total / 1e3 / (calls // chunk * chunk)

    for _ in repeat(None, chunk):
        call()
    synchronize()
    return spread([run() for _ in range(runs)])


# Kernels for the limits of the device: one does nothing, one only copies.

FLOOR_SOURCE = source.inline(
    "floor.cu",
    text=r"""
#include "memory.cuh"

extern "C" __global__ void nothing() {}

// Each of 256 threads copies 4 vectors of 16 bytes, 256 vectors apart.
extern "C" __global__ void copy(uint4* out, const uint4* input) {
    const int64_t first = int64_t(blockIdx.x) * 1024 + threadIdx.x;
    uint4 vecs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) vecs[i] = load_streaming(input + first + 256 * i);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_streaming(out + first + 256 * i, vecs[i]);
}
""",
)


def launch_floor_us(effort: Effort) -> float:
    """Microseconds per call of a kernel that does nothing."""
    return gpu_us([_raw_call("nothing", 1, 32)], effort).median


def streaming_gbs(effort: Effort, nbytes: int = 1 << 30) -> float:
    """GB/s of a copy of `nbytes`, bytes read and bytes written together."""
    out, input = (torch.full((nbytes,), byte, dtype=torch.uint8, device="cuda") for byte in (0, 1))
    call = _raw_call("copy", nbytes // (16 * 1024), 256, out.data_ptr(), input.data_ptr())
    us = gpu_us([call], effort).median
    assert torch.equal(out, input)
    return 2 * nbytes / us / 1e3


def _raw_call(entry: str, grid: int, block: int, *args: int) -> Call:
    """A launch on torch's current stream. The kernel gets each of `args` as 8 bytes."""
    import cupy
    from cupy_backends.cuda.api import driver

    function = cupy.RawModule(code=FLOOR_SOURCE).get_function(entry).kernel
    values = (ctypes.c_uint64 * len(args))(*args)
    pointers = (ctypes.c_void_p * max(1, len(args)))(*(ctypes.addressof(values) + 8 * i for i in range(len(args))))

    def call(_keep_alive: Any = values) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        driver.launchKernel(function.ptr, grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(pointers), 0)

    return call
