"""The custom all-reduce on a GPU: ranks as streams of one process, and as processes that share the GPU by IPC."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from tests.test_collective import in_order, inputs

SIZE = 1 << 20


class Streams:
    """A communicator for each of several ranks, all on one GPU and in one process, each with a stream."""

    def __init__(self, world_size: int) -> None:
        signals = [pyops.allocate_shared_buffer_and_handle(pyops.meta_size() + SIZE)[0] for _ in range(world_size)]
        self.buffers = [pyops.allocate_shared_buffer_and_handle(SIZE)[0] for _ in range(world_size)]
        self.tables = [torch.zeros(4096, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
        self.handles = [pyops.init_custom_ar(signals, table, i, True) for i, table in enumerate(self.tables)]
        for fa in self.handles:
            pyops.register_buffer(fa, self.buffers)
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]
        self.signals = signals

    def all_reduce(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outs = [torch.full_like(value, torch.nan) for value in values]
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                pyops.all_reduce(self.handles[rank], values[rank], outs[rank], self.buffers[rank], SIZE)
        torch.cuda.synchronize()
        return outs

    def close(self) -> None:
        for fa in self.handles:
            pyops.dispose(fa)
        for address in (*self.signals, *self.buffers):
            pyops.free_shared_buffer(address)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 4, 6, 8])
def test_ranks_as_streams(world_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """First with one vector: kernels are loaded before two of them have to run at once."""
    world = Streams(world_size)
    try:
        for algorithm in ("oneshot", "twoshot"):
            monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", algorithm)
            for num_vecs in (1, 67, 600, 40000):
                values = inputs(world_size, num_vecs * 16 // dtype.itemsize, dtype)
                for _ in range(3):
                    for out in world.all_reduce([value.cuda() for value in values]):
                        assert torch.equal(out.cpu(), in_order(values))
    finally:
        world.close()


def _process(rank: int, world_size: int, file: str, results: Any) -> None:
    """One of the processes: eager calls, a graph that is replayed, and the fused norm."""
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=world_size)
    torch.cuda.set_device(0)
    custom = pyops.CustomAllReduce(torch.distributed.group.WORLD, "cuda:0", SIZE)
    values = inputs(world_size, 4096, torch.bfloat16)
    x, expected = values[rank].cuda(), in_order(values)
    eager = [torch.equal(custom.all_reduce(x).cpu(), expected) for _ in range(3)]

    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
    with torch.cuda.graph(graph):
        pyops.all_reduce(custom.fa, x, out, 0, 0)
    every: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(every, pyops.get_graph_buffer_ipc_meta(custom.fa))
    pyops.register_graph_buffers(custom.fa, [handles for handles, _ in every], [offsets for _, offsets in every])
    torch.distributed.barrier()
    for _ in range(3):
        out.zero_()
        graph.replay()
    torch.cuda.synchronize()
    replayed = torch.equal(out.cpu(), expected)

    hidden, sums = x.view(4, 1024).clone(), torch.ones(4, 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.full((1024,), 0.5, dtype=torch.bfloat16, device="cuda")
    right, right_sums = expected.view(4, 1024).cuda(), sums.clone()
    pyops.fused_add_rms_norm(right, right_sums, weight, 1e-6)
    used = custom.add_rms_norm(hidden, sums, weight, 1e-6)
    close = torch.equal(sums, right_sums) and bool(torch.allclose(hidden.float(), right.float(), rtol=2**-7))
    custom.close()
    results.put((rank, eager, replayed, used and close))


@pytest.mark.gpu
def test_processes_share_a_gpu(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results, world_size = context.Queue(), 2
    processes = [
        context.Process(target=_process, args=(rank, world_size, str(tmp_path / "store"), results), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        found = sorted(results.get(timeout=90) for _ in processes)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    assert found == [(rank, [True] * 3, True, True) for rank in range(world_size)]
