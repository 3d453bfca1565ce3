"""All-reduce among the GPUs of a node: pyops, NCCL, and vLLM if its library can be loaded.

torchrun --nproc-per-node 2 -m benchmarks.all_reduce
torchrun --nproc-per-node 8 -m benchmarks.all_reduce 8192 1048576
torchrun --nproc-per-node 4 -m benchmarks.all_reduce --norm
torchrun --nproc-per-node 4 -m benchmarks.all_reduce --quick
python -m benchmarks.all_reduce --predict

Arguments are message sizes in bytes; elements are bfloat16. Times are microseconds per call in a CUDA graph of 20
calls, on the slowest rank. `pyops` copies its input to a registered buffer; `in place` registers the input itself, as
vLLM does in graphs; `predicted` is the estimate of the model in docs/many_gpus.md (`--predict` prints its table). A
wrong sum is an error. `--norm` adds a residual and normalises rows of 4096 elements after the all-reduce: `fused` in
the same kernel, the others in a second kernel. `--quick` times quick reduce with 16, 8, 6 and 4 bits on the links.
Without GPUs, processes on CPUs time `pyops.models.Group` and gloo's own all-reduce.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import pyops
from pyops.models import Group
from pyops.ops.collective.communicator import VEC_BYTES, by_packets, geometry, two_shot, unroll
from pyops.ops.collective.process_group import reach_each_other

from .installed import libraries, load_vllm, reason

SIZES = tuple(8192 << i for i in range(11))  # 8 KiB to 8 MiB
PREDICTED_SIZES = tuple(1024 * kib for kib in (8, 64, 256, 512, 1024, 8192))
NVLINK, LATENCY, FLAG, LAUNCH = 450e9, 1e-6, 1.5e-6, 1.5e-6  # bytes/s per direction; seconds
# Constants of the model, fitted to two H200s within 3 % from 1 MiB on: a barrier with relaxed flags, s; loads of 36 SMs
# from another GPU, bytes/s; the copy to a registered buffer, s and bytes/s; the packet kernel's launch, loads, last
# poll and sum, s; packets, bytes/s; the fence of vLLM's release flags, s.
RELAXED_FLAG, LOADS, COPY, COPIES = 0.45e-6, 318e9, 1.55e-6, 4.5e12
PACKET_LAUNCH, PACKETS, FENCE = 1.3e-6, 300e9, 0.65e-6
_CALLS, _REPLAYS, _HIDDEN = 20, 20, 4096

Call = Callable[[torch.Tensor], torch.Tensor]


def predicted(world_size: int, nbytes: int, by_vllm: bool = False) -> float:
    """Seconds of an all-reduce: packets over a GPU's links; or two barriers, a load latency per shot, and the bytes.

    vLLM's kernels read registered inputs in place; the kernels of pyops include the copy to a registered buffer.
    """
    two, others = two_shot(world_size, nbytes, True), world_size - 1
    if not by_vllm and by_packets(world_size, nbytes):
        return PACKET_LAUNCH + LATENCY + 2 * nbytes * others / PACKETS
    part = nbytes / world_size if two else nbytes
    blocks, threads = geometry(max(1, int(part) // VEC_BYTES))
    in_flight = blocks * threads * others * VEC_BYTES  # each thread of vLLM's kernels has one load in flight per peer
    if by_vllm:
        flags, copy = 2 * FLAG - (1 if two else 2) * FENCE, 0.0
    else:
        flags, copy = RELAXED_FLAG + (FLAG if two else RELAXED_FLAG), COPY + nbytes / COPIES
        in_flight *= unroll(world_size)
    rate = min(LOADS, in_flight / LATENCY)
    return LAUNCH + flags + copy + (2 if two else 1) * (LATENCY + part * others / rate)


def table() -> str:
    """The table of predictions in docs/many_gpus.md, in microseconds."""
    worlds = (2, 4, 8)
    lines = [["bytes", *(text for world in worlds for text in (f"{world} ranks", "vLLM"))]]
    lines.append(["---"] * len(lines[0]))
    for nbytes in PREDICTED_SIZES:
        size = f"{nbytes // 1024} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
        line = [size]
        for world in worlds:
            way = ", packets" if by_packets(world, nbytes) else ", two shots" if two_shot(world, nbytes, True) else ""
            line += [f"{1e6 * predicted(world, nbytes):.1f}{way}", f"{1e6 * predicted(world, nbytes, True):.1f}"]
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass
class Way:
    """An all-reduce implementation. `captured` is called after graph capture and before the first replay."""

    name: str
    call: Call
    captured: Callable[[], object] = lambda: None
    serves: Callable[[torch.Tensor], bool] = lambda x: True
    error: float = 0.0  # tolerance, relative to the largest sum


def measure(way: Way, x: torch.Tensor, right: torch.Tensor) -> float:
    """Check the sum, then return `timed`. NaN if the implementation does not support `x`."""
    if not way.serves(x):
        return float("nan")
    if float((way.call(x.clone()).view_as(right) - right).abs().max()) > way.error * float(right.abs().max()):
        raise AssertionError(f"{way.name}, {x.nbytes} bytes: the sum is wrong")
    return timed(way, x)


def timed(way: Way, x: torch.Tensor) -> float:
    """Microseconds per call on the slowest rank. All ranks must measure at the same time."""
    x = x.clone()  # some implementations write their input
    elapsed = _on_gpu(way, x) if x.is_cuda else _on_cpu(way, x)
    slowest = torch.tensor(elapsed, device=x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _on_gpu(way: Way, x: torch.Tensor) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    # NCCL's watchdog thread queries events in the meantime, which would invalidate a capture in mode "global".
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            way.call(x)
    way.captured()
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    dist.barrier()  # no rank may still read the graph's buffers when it is destroyed
    elapsed: float = start.elapsed_time(end) * 1e3 / (_CALLS * _REPLAYS)
    return elapsed


def _on_cpu(way: Way, x: torch.Tensor) -> float:
    found = []
    for _ in range(_CALLS):
        dist.barrier()
        start = time.perf_counter()
        way.call(x)
        found.append(time.perf_counter() - start)
    return 1e6 * median(found)


def _summed(x: torch.Tensor) -> torch.Tensor:
    """The all-reduce of the process group, in place: the contents of `x` are not used afterwards."""
    dist.all_reduce(x)
    return x


def _of_gpus(host: Any, device: torch.device, arguments: Sequence[str] = ()) -> tuple[list[Way], Callable[[], None]]:
    """(implementations on GPUs, a function that frees their memory)."""
    if not reach_each_other(host, device):
        raise SystemExit("expected 2, 4, 6 or 8 GPUs of one node, each of which reaches the memory of every other")
    custom = pyops.CustomAllReduce(host, device)

    def copied(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        pyops.all_reduce(custom.fa, x, out, custom.buffer, custom.max_size)
        return out

    in_place = _in_place("in place", pyops, custom.fa, custom.buffer, custom.max_size, host)
    ways, close = [Way("pyops", copied), in_place, Way("nccl", _summed)], [custom.close]
    try:
        theirs, dispose = _of_vllm(host, device, custom.max_size)
    except Exception as error:
        if dist.get_rank() == 0:
            print(f"skipped vllm: {reason(error)}", file=sys.stderr)
    else:
        ways.append(theirs)
        close.append(dispose)

    if "--norm" in arguments:
        fused, dispose = _fused(host, device)
        ways = [fused, *(replace(_then_norm(way), error=2**-7) for way in ways)]
        close.append(dispose)
    if "--quick" in arguments:
        rounded, dispose = _quick(host)
        ways += rounded
        close.append(dispose)

    def close_all() -> None:
        for one in close:
            one()

    return ways, close_all


def _residual_and_weight(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual of zeros, to which the calls add, and weights of one."""
    residual = torch.zeros(num_rows, _HIDDEN, dtype=torch.bfloat16, device=device)
    return residual, torch.ones_like(residual[0])


def _then_norm(way: Way) -> Way:
    """`way`, followed by the residual addition and the norm in a second kernel."""

    rows_of = cache(_residual_and_weight)

    def call(x: torch.Tensor) -> torch.Tensor:
        out = way.call(x).view(-1, _HIDDEN)
        pyops.fused_add_rms_norm(out, *rows_of(len(out), out.device), 1e-6)
        return out

    return replace(way, call=call)


def _fused(host: Any, device: torch.device) -> tuple[Way, Callable[[], None]]:
    custom, rows_of = pyops.CustomAllReduce(host, device), cache(_residual_and_weight)

    def call(x: torch.Tensor) -> torch.Tensor:
        out = x.view(-1, _HIDDEN)
        if not custom.add_rms_norm(out, *rows_of(len(out), device), 1e-6):
            raise AssertionError(f"{x.nbytes} bytes are not sent as packets")
        return out

    return Way("fused", call, serves=lambda x: by_packets(custom.world_size, x.nbytes), error=2**-7), custom.close


def _quick(host: Any) -> tuple[list[Way], Callable[[], None]]:
    """Quick reduce: an all-reduce that sends quantized values over the links."""
    fa = pyops.init_custom_qr(dist.get_rank(), dist.get_world_size(), SIZES[-1])
    pyops.qr_open_handles(fa, _gathered(pyops.qr_get_handle(fa), host))

    def at(level: int) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            pyops.qr_all_reduce(fa, x, out, level)
            return out

        return call

    ways = [Way(f"{bits} bits", at(level), error=2.0 ** (2 - bits)) for level, bits in enumerate((16, 8, 6, 4))]
    return ways, lambda: pyops.qr_destroy(fa)


def _in_place(name: str, ops: Any, fa: int, buffer: int, max_size: int, host: Any) -> Way:
    """The all-reduce ops with vLLM's names, from either library. Captured calls read their input in place."""

    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.all_reduce(fa, x, out, *((0, 0) if torch.cuda.is_current_stream_capturing() else (buffer, max_size)))
        return out

    def register() -> None:
        every = _gathered(ops.get_graph_buffer_ipc_meta(fa), host)
        ops.register_graph_buffers(fa, [handles for handles, _ in every], [offsets for _, offsets in every])
        dist.barrier(group=host)

    return Way(name, call, register)


def _of_vllm(host: Any, device: torch.device, max_size: int) -> tuple[Way, Callable[[], None]]:
    """(vLLM's all-reduce, set up as in its ``CustomAllreduce``, a function that frees its memory)."""
    if trouble := load_vllm(libraries()):
        raise RuntimeError(trouble)
    ops, rank = torch.ops._C_custom_ar, dist.get_rank()

    def shared(nbytes: int) -> list[int]:
        address, handle = ops.allocate_shared_buffer_and_handle(nbytes)
        handles = _gathered(handle, host)
        return [address if i == rank else ops.open_mem_handle(one) for i, one in enumerate(handles)]

    signals, buffers = shared(ops.meta_size() + max_size), shared(max_size)
    rank_data = torch.empty(8 << 20, dtype=torch.uint8, device=device)
    fa = ops.init_custom_ar(signals, rank_data, rank, True)
    ops.register_buffer(fa, buffers)

    def close() -> None:
        ops.dispose(fa)
        for addresses in (signals, buffers):
            ops.free_shared_buffer(addresses[rank])
        rank_data.zero_()  # keeps it alive until here, because `fa` holds its address

    return _in_place("vllm", ops, fa, buffers[rank], max_size, host), close


def _gathered(mine: Any, host: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group=host)
    return every


def main(arguments: Sequence[str]) -> None:
    if "--predict" in arguments:
        print(table())
        return
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("expected processes of torchrun: torchrun --nproc-per-node 2 -m benchmarks.all_reduce")
    on_gpu, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if on_gpu and local >= torch.cuda.device_count():
        raise SystemExit(f"expected a GPU for each process, got {torch.cuda.device_count()}")
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if on_gpu:
        ways, close = _of_gpus(dist.new_group(backend="gloo"), device, arguments)
    else:
        ways, close = [Way("pyops", Group().all_reduce), Way("gloo", _summed)], lambda: None
    if rank == 0:
        names = "".join(f"{way.name:>10}" for way in ways)
        print(
            f"{torch.cuda.get_device_name() if on_gpu else 'CPU'} x {world_size}\n{'bytes':>9} {'predicted':>10}{names}"
        )
    generator = torch.Generator().manual_seed(rank)
    for nbytes in [int(one) for one in arguments if one.isdigit()] or SIZES:
        x = torch.randint(1, 16, (nbytes // 2,), generator=generator).bfloat16().to(device)  # exact sums
        right = _summed(x.clone())
        if "--norm" in arguments:
            rows = right.view(-1, _HIDDEN).float()
            right = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        found = "".join(f"{measure(way, x, right):10.1f}" for way in ways)
        if rank == 0:
            expected = f"{1e6 * predicted(world_size, nbytes):10.1f}" if on_gpu else f"{'-':>10}"
            print(f"{nbytes:9} {expected}{found}", flush=True)
    close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
