"""All-reduce among the GPUs of a node: these kernels, NCCL, and vLLM's where its library is loaded.

torchrun --nproc-per-node 2 -m benchmarks.all_reduce
torchrun --nproc-per-node 8 -m benchmarks.all_reduce 8192 1048576

A number is a message's bytes; elements are bfloat16. Times are microseconds of a call in a CUDA graph of 20, of the
slowest rank; `predicted` is that of the model in docs/many_gpus.md. A wrong sum is an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import pyops
from pyops.ops.collective.communicator import VEC_BYTES, geometry, two_shot

SIZES = tuple(8192 << i for i in range(11))  # 8 KiB to 8 MiB
NVLINK, LATENCY, FLAG, LAUNCH = 450e9, 1e-6, 1.5e-6, 2.5e-6  # bytes a second each way; seconds
_CALLS, _REPLAYS = 20, 20


def predicted(world_size: int, nbytes: int) -> float:
    """Seconds: a launch, two meetings of ranks, a load's latency for each shot, and the bytes over a GPU's links."""
    two, others = two_shot(world_size, nbytes, True), world_size - 1
    part = nbytes / world_size if two else nbytes
    blocks, threads = geometry(max(1, int(part) // VEC_BYTES))
    rate = min(NVLINK, blocks * threads * others * VEC_BYTES / LATENCY)  # a thread has a load for each other rank
    shots = 2 if two else 1
    return LAUNCH + 2 * FLAG + shots * (LATENCY + part * others / rate)


def measure(call: Callable[[], object]) -> float:
    """Microseconds of a call; every rank measures at the same time."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    slowest = torch.tensor(start.elapsed_time(end) * 1e3 / (_CALLS * _REPLAYS), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main(arguments: Sequence[str]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    custom = pyops.CustomAllReduce(dist.new_group(backend="gloo"), torch.device("cuda", torch.cuda.current_device()))
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {world_size}\n{'bytes':>9} {'pyops':>8} {'predicted':>9} {'nccl':>8}")
    for nbytes in map(int, arguments or SIZES):
        x = torch.randint(1, 16, (nbytes // 2,), device="cuda").bfloat16()
        right = x.clone()
        dist.all_reduce(right)
        if not torch.equal(custom.all_reduce(x), right):
            raise AssertionError(f"{nbytes} bytes: the sum is wrong")
        out, other = torch.empty_like(x), x.clone()
        own = measure(lambda x=x, out=out: pyops.all_reduce(custom.fa, x, out, custom.buffer, custom.max_size))  # type: ignore[misc]
        nccl = measure(lambda other=other: dist.all_reduce(other))  # type: ignore[misc]
        if rank == 0:
            print(f"{nbytes:9} {own:8.1f} {1e6 * predicted(world_size, nbytes):9.1f} {nccl:8.1f}", flush=True)
    custom.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
