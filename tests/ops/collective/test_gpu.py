"""The custom all-reduce on a GPU: ranks as streams of one process, and as processes that share the GPU by IPC."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from pyops.models import Decoder, Group, ParallelDecoder
from pyops.ops.collective.communicator import Communicator
from pyops.ops.collective.quick_all_reduce import _states
from tests.models.test_parallel import CONFIGS, texts
from tests.ops.collective.test_collective import in_order, inputs, quick

SIZE = 1 << 20


class Streams:
    """A communicator for each of several ranks on one GPU in one process, each with a stream."""

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
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (4, torch.float16), (6, torch.bfloat16)])
def test_ranks_as_streams(world_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of all ranks run at the same time, on one GPU. Its streams may share hardware queues, which a waiting
    kernel would block."""
    world = Streams(world_size)
    try:
        for algorithm in ("", "oneshot", "twoshot"):  # packets by default, where they fit
            monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", algorithm)
            for num_vecs in (67, 10000, 40000):
                values = inputs(world_size, num_vecs * 16 // dtype.itemsize, dtype)
                for _ in range(3):
                    for out in world.all_reduce([value.cuda() for value in values]):
                        assert torch.equal(out.cpu(), in_order(values))
    finally:
        world.close()


@pytest.mark.gpu
def test_packets_of_consecutive_calls() -> None:
    """No rank waits for the host between calls. At times one rank is late, and the others are one call ahead."""
    world_size, calls = 2, 200
    values = [inputs(world_size, numel, torch.bfloat16) for numel in (2048, 40960, 8)]
    world = Streams(world_size)
    try:
        own = [[value.cuda() for value in one] for one in values]
        outs: list[list[torch.Tensor]] = [[], []]
        for one in own:
            world.all_reduce(one)  # compiled
        for call in range(calls):
            for rank, stream in enumerate(world.streams):
                with torch.cuda.stream(stream):
                    if call * 7 % 11 == rank:
                        torch.cuda._sleep(20000)
                    x = own[call % 3][rank]
                    outs[rank].append(torch.full_like(x, torch.nan))
                    pyops.all_reduce(world.handles[rank], x, outs[rank][-1], 0, 0)
        torch.cuda.synchronize()
        for rank in range(world_size):
            for call, out in enumerate(outs[rank]):
                assert torch.equal(out.cpu(), in_order(values[call % 3])), (rank, call)
    finally:
        world.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("level", "dtype"), [(0, torch.float16), (1, torch.bfloat16), (2, torch.float16), (3, torch.bfloat16)]
)
def test_quick_all_reduce_of_streams(level: int, dtype: torch.dtype) -> None:
    """As on the host, where test_collective.py compares the results with the formula: within a rounding of a scale."""
    world_size, values = 4, inputs(4, 9000, dtype)
    handles = [pyops.init_custom_qr(rank, world_size, SIZE) for rank in range(world_size)]
    signals = [_states[fa].own for fa in handles]
    for rank, fa in enumerate(handles):
        table = torch.zeros(64, dtype=torch.uint8, device="cuda")
        _states[fa].communicator = Communicator(signals, table, rank, True)
    outs, streams = [value.cuda() for value in values], [torch.cuda.Stream() for _ in values]
    torch.cuda.synchronize()
    for fa, out, stream in zip(handles, outs, streams, strict=True):
        with torch.cuda.stream(stream):
            pyops.qr_all_reduce(fa, out, out, level)
    torch.cuda.synchronize()
    expected = quick(values, level)[0]
    for fa, out in zip(handles, outs, strict=True):
        assert torch.equal(out, outs[0])
        steps = (out.cpu().double() - expected.double()).abs()
        assert int((steps > 0).sum()) <= 9000 // 500  # ties of a division that a GPU rounds differently
        pyops.qr_destroy(fa)


def _generate(rank: int, world_size: int, file: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=world_size)
    torch.cuda.set_device(0)
    group = Group("cuda:0")
    with torch.no_grad():
        model = ParallelDecoder(CONFIGS["llama"], group).randomise(0, 4.0)
        found = texts(model)
    results.put((rank, group.custom is not None, found))
    torch.distributed.barrier()


def _process(rank: int, world_size: int, file: str, results: Any) -> None:
    """The work of one process: eager calls, a graph that is replayed, and the fused norm."""
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=world_size)
    torch.cuda.set_device(0)
    custom = pyops.CustomAllReduce(torch.distributed.group.WORLD, "cuda:0", SIZE)
    values = inputs(world_size, 4096, torch.bfloat16)
    x, expected = values[rank].cuda(), in_order(values)
    eager = [torch.equal(custom.all_reduce(x).cpu(), expected) for _ in range(3)]

    replayed = True
    for algorithm in ("", "oneshot"):  # sent as packets; read where it is
        os.environ["VLLM_CUSTOM_ALLREDUCE_ALGO"] = algorithm
        custom.all_reduce(x)
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
        replayed = replayed and torch.equal(out.cpu(), expected)
    del os.environ["VLLM_CUSTOM_ALLREDUCE_ALGO"]

    hidden, sums = x.view(4, 1024).clone(), torch.ones(4, 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.full((1024,), 0.5, dtype=torch.bfloat16, device="cuda")
    right, right_sums = expected.view(4, 1024).cuda(), sums.clone()
    pyops.fused_add_rms_norm(right, right_sums, weight, 1e-6)
    used = custom.add_rms_norm(hidden, sums, weight, 1e-6)
    close = torch.equal(sums, right_sums) and bool(torch.allclose(hidden.float(), right.float(), rtol=2**-7))
    custom.close()
    results.put((rank, eager, replayed, used and close))


def _dying(rank: int, world_size: int, file: str, results: Any) -> None:
    """Rank 1 ends after the first call, which all ranks complete."""
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=world_size)
    torch.cuda.set_device(0)
    custom = pyops.CustomAllReduce(torch.distributed.group.WORLD, "cuda:0", SIZE)
    x = torch.ones(64, device="cuda")  # for one block
    custom.all_reduce(x)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    if rank == 1:
        time.sleep(1)  # kernels of others may still read
        os._exit(1)
    time.sleep(2)
    started = time.monotonic()
    try:
        with custom.naming("a model"):
            custom.all_reduce(x)
            torch.cuda.synchronize()
    except pyops.RankError as error:
        results.put((rank, error.ranks, pyops.lost_ranks(custom.fa), time.monotonic() - started < 60))
    else:
        results.put((rank, "no error"))
    results.close()
    results.join_thread()
    os._exit(0)  # the device has failed for this process: nothing can be freed


def _run(target: Any, world_size: int, store: Path) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=target, args=(rank, world_size, str(store), results), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return sorted(results.get(timeout=90) for _ in processes)
    finally:
        for process in processes:
            process.join(5)
            process.kill()


@pytest.mark.gpu
def test_processes_share_a_gpu(tmp_path: Path) -> None:
    assert _run(_process, 2, tmp_path / "store") == [(rank, [True] * 3, True, True) for rank in range(2)]


@pytest.mark.gpu
def test_process_that_dies_is_named(tmp_path: Path) -> None:
    """The kernel of the other process waits 31 seconds and ends with a trap; its report can be read afterwards."""
    context, file = multiprocessing.get_context("spawn"), str(tmp_path / "store")
    results = context.Queue()
    processes = [context.Process(target=_dying, args=(rank, 2, file, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    assert results.get(timeout=90) == (0, (1,), {1: (0, 2)}, True)
    for process in processes:
        process.join(30)


@pytest.mark.gpu
def test_tensor_parallel_tokens_equal_one_process(tmp_path: Path) -> None:
    """Under graphs, which use the all-reduce kernels."""
    with torch.no_grad():
        whole = Decoder(CONFIGS["llama"]).randomise(0, 4.0)
        expected = texts(whole)
    assert _run(_generate, 2, tmp_path / "store") == [(rank, True, expected) for rank in range(2)]
