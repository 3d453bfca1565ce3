"""Expert parallelism among processes that share one GPU by IPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from benchmarks.expert_parallel import Model, check, check_products, draw, factors, of_kernels
from tests.ops.collective.test_gpu import _run

MODEL = Model("small", 1024, 16, 4)


def _replayed(parallel: pyops.ExpertParallel, rank: int) -> bool:
    """Whether a graph of two calls gives the right results at every replay, each with other tokens."""
    x, ids, weights = draw(MODEL, 5, rank, parallel.device)
    outs = [torch.empty_like(x) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            rows, local, here, *_ = parallel.dispatch(x, ids, weights, 7)
            rows.mul_(factors(local, here, parallel.experts.start).to(rows.dtype))
            parallel.combine(rows, out)
    found = []
    for seed in range(4):
        others = draw(MODEL, 5, rank + 2 * seed, parallel.device)
        for own, other in zip((x, ids, weights), others, strict=True):
            own.copy_(other)
        graph.replay()
        right = x * factors(ids, weights).to(x.dtype)
        found += [torch.equal(out, right) for out in outs]
    return all(found)


def _process(rank: int, world_size: int, file: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=world_size)
    torch.cuda.set_device(0)
    sizes = MODEL.num_experts, 40, MODEL.hidden_size, MODEL.top_k
    parallel = pyops.ExpertParallel(torch.distributed.group.WORLD, "cuda:0", *sizes)
    for tokens in (1, 40):
        check(of_kernels(parallel), parallel.experts, *draw(MODEL, tokens, rank, parallel.device))
        check_products(parallel, MODEL, tokens, rank)
    hostile = torch.full((3, MODEL.top_k), 2**62, device="cuda")
    hostile[1], hostile[2, 0] = -(2**63), 5
    x, weights = torch.ones(3, MODEL.hidden_size, dtype=torch.bfloat16, device="cuda"), torch.ones(3, 4, device="cuda")
    sums = parallel.combine(parallel.dispatch(x, hostile, weights).rows)[:, 0].tolist()
    replayed = _replayed(parallel, rank)
    parallel.close()
    results.put((rank, sums, replayed))


@pytest.mark.gpu
def test_processes_share_a_gpu(tmp_path: Path) -> None:
    assert _run(_process, 2, tmp_path / "store") == [(rank, [0.0, 0.0, 1.0], True) for rank in range(2)]
