"""Time dispatch and combine of expert parallelism: pyops, and NCCL's collectives.

torchrun --nproc-per-node 4 -m benchmarks.expert_parallel
torchrun --nproc-per-node 4 -m benchmarks.expert_parallel DeepSeek-V3
python -m benchmarks.expert_parallel --predict

Prints a Markdown table of microseconds per call in a CUDA graph of 20 calls, on the slowest rank. Every rank has
`tokens` bfloat16 tokens with random experts. `in fp8` is a dispatch of fp8 rows. `both` is a bfloat16 dispatch and a
combine with nothing in between, `predicted` the estimate of the model in docs/many_gpus.md (`--predict` prints its
table). `link` is the bytes of both over 450 GB/s, a lower bound. `gather` is NCCL's all-gather of rows and expert ids
and its reduce-scatter of results; `all-to-all` exchanges `tokens` rows with every rank in both directions, and sums.
Before a row is timed, each implementation must reproduce exactly known results, and `parallel_fused_experts` must agree
with one GPU that has all experts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil, comb
from typing import Any

import torch
import torch.distributed as dist

import pyops
from pyops.ops.collective.communicator import VEC_BYTES, spread, unroll
from pyops.ops.collective.process_group import reach_each_other

from .all_reduce import FLAG, LATENCY, LAUNCH, NVLINK, RELAXED_FLAG, Way, timed

TOKENS = (1, 8, 32, 64, 128)
_CHANNELS = 128  # intermediate size for checks, so small that all experts fit on one GPU
_TIMEOUT = timedelta(seconds=45)  # NCCL's timeout; kernels of pyops time out after 30 s

Dispatched = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, local expert ids or -1, router weights


@dataclass(frozen=True)
class Model:
    name: str
    hidden_size: int
    num_experts: int
    top_k: int

    def remote_ranks(self, world_size: int) -> float:
        """The average number of other ranks to which a token is sent, for uniformly random experts."""
        others = self.num_experts - self.num_experts // world_size
        return (world_size - 1) * (1 - comb(others, self.top_k) / comb(self.num_experts, self.top_k))

    def nbytes(self, world_size: int, tokens: int) -> float:
        """Bytes of the rows that a rank sends in a dispatch, or receives in a combine."""
        return tokens * self.remote_ranks(world_size) * self.hidden_size * 2


MODELS = (Model("DeepSeek-V3", 7168, 256, 8), Model("Qwen3-30B-A3B", 2048, 128, 8))


def predicted(model: Model, world_size: int, tokens: int) -> tuple[float, float]:
    """Seconds of a dispatch and of a combine: a launch, a barrier, a load latency, and the bytes over the links.

    A combine loads from other GPUs, with up to eight vectors in flight per thread.
    """
    over_links = model.nbytes(world_size, tokens) / NVLINK
    num_vecs = tokens * model.hidden_size * 2 // VEC_BYTES
    blocks, threads = spread(num_vecs)
    times = ceil(num_vecs / (blocks * threads * unroll(world_size)))
    base = (
        LAUNCH + LATENCY
    )  # a dispatch needs release flags for its rows; the inputs of a combine were written by earlier kernels
    return base + FLAG + over_links, base + RELAXED_FLAG + max(over_links, (times - 1) * LATENCY)


def table(worlds: Sequence[int] = (2, 4, 8)) -> str:
    """The table of predictions in docs/many_gpus.md, in microseconds: a dispatch, a combine, the bytes of both."""
    lines = [["model", "tokens", *(text for world in worlds for text in (f"{world} ranks", "link"))]]
    lines.append(["---"] * len(lines[0]))
    for model in MODELS:
        for tokens in TOKENS:
            line = [model.name, str(tokens)]
            for world in worlds:
                there, back = predicted(model, world, tokens)
                link = 2 * model.nbytes(world, tokens) / NVLINK
                line += [f"{1e6 * there:.1f} + {1e6 * back:.1f}", f"{1e6 * link:.1f}"]
            lines.append(line)
    return "\n".join(_row(line) for line in lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@dataclass
class Exchange:
    """An implementation of the exchange. `dispatch` takes rows, ids and weights; `combine` takes the result rows."""

    name: str
    dispatch: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Dispatched]
    combine: Callable[[torch.Tensor], torch.Tensor]


def of_kernels(parallel: pyops.ExpertParallel) -> Exchange:
    return Exchange("pyops", lambda *choices: parallel.dispatch(*choices)[:3], parallel.combine)


def of_codes(parallel: pyops.ExpertParallel) -> Exchange:
    """The exchange by a `parallel` that dispatches fp8 rows."""

    def dispatch(*choices: torch.Tensor) -> Dispatched:
        sent = parallel.dispatch(*choices)
        assert sent.scales is not None
        rows = sent.rows.float().view(*sent.scales.shape, -1) * sent.scales[..., None]
        return rows.view(len(rows), -1).bfloat16(), sent.topk_ids, sent.topk_weights

    return Exchange("pyops, fp8", dispatch, parallel.combine)


def _unpacked(choices: torch.Tensor, experts: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Local expert ids and weights, from words that hold pairs of id and weight."""
    ids, weights = choices.chunk(2, 1)
    local = ids - experts.start
    return local.where((local >= 0) & (local < len(experts)), -1), weights.view(torch.float32)


def _packed(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.cat((ids, weights.view(torch.int32)), 1)


def by_gather(experts: range, world_size: int) -> Exchange:
    """NCCL: all-gather of all rows, and reduce-scatter of the results."""

    def gathered(x: torch.Tensor) -> torch.Tensor:
        every = x.new_empty(world_size * len(x), x.shape[1])
        dist.all_gather_into_tensor(every, x)
        return every

    def dispatch(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        return gathered(x), *_unpacked(gathered(_packed(ids, weights)), experts)

    def combine(rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows) // world_size, rows.shape[1])
        dist.reduce_scatter_tensor(out, rows)
        return out

    return Exchange("gather", dispatch, combine)


def by_all_to_all(experts: range, world_size: int) -> Exchange:
    """NCCL: all-to-all with space for all rows of every other rank, so that counts need not be exchanged."""

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    def dispatch(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        return exchanged(x.repeat(world_size, 1)), *_unpacked(
            exchanged(_packed(ids, weights).repeat(world_size, 1)), experts
        )

    def combine(rows: torch.Tensor) -> torch.Tensor:
        return exchanged(rows).view(world_size, -1, rows.shape[1]).sum(0)

    return Exchange("all-to-all", dispatch, combine)


def factors(ids: torch.Tensor, weights: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Stands in for experts: multiplies each row by an integer of up to 96, the sum of one factor per chosen expert."""
    return ((1 + (ids + first) % 4) * weights).where(ids >= 0, 0).sum(1, keepdim=True)


def draw(model: Model, tokens: int, rank: int, device: torch.device) -> Dispatched:
    """(rows, ids, weights) of a rank's tokens, with values for which products with `factors` are exact in bfloat16."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-1, 3, (tokens, model.hidden_size), generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(model.num_experts, generator=generator)[: model.top_k] for _ in range(tokens)])
    weights = torch.randint(1, 4, (tokens, model.top_k), generator=generator).float()
    return x.to(device), ids.int().to(device), weights.to(device)


def check(way: Exchange, experts: range, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """AssertionError unless dispatch and combine give the exact result."""
    for _ in range(3):
        rows, local, here = way.dispatch(x, ids, weights)
        out = way.combine(rows * factors(local, here, experts.start).to(rows.dtype))
        if not torch.equal(out, x * factors(ids, weights).to(x.dtype)):
            raise AssertionError(f"{way.name}: {len(x)} tokens of {x.shape[1]} do not come back as they should")


def check_products(parallel: pyops.ExpertParallel, model: Model, tokens: int, rank: int) -> None:
    """AssertionError unless `parallel_fused_experts` gives the same results as one GPU with all experts."""
    _, ids, weights = draw(model, tokens, rank, parallel.device)
    generator = torch.Generator(parallel.device).manual_seed(1)  # the same weights on all ranks

    def randn(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, dtype=torch.bfloat16, device=parallel.device, generator=generator)
        return values * shape[-1] ** -0.5

    w1 = randn(model.num_experts, 2 * _CHANNELS, model.hidden_size)
    w2 = randn(model.num_experts, model.hidden_size, _CHANNELS)
    x = randn(tokens, model.hidden_size) * model.hidden_size**0.5
    own = slice(parallel.experts.start, parallel.experts.stop)
    right = pyops.fused_experts(x, w1, w2, weights, ids).double()
    out = pyops.parallel_fused_experts(parallel, x, w1[own], w2[own], weights, ids)
    error = float((out.double() - right).abs().max() / right.abs().max())
    if not error <= 2.0**-6:
        raise AssertionError(f"{model.name}: {tokens} tokens differ by {error:.2g} from those of one GPU")


def measure(model: Model, tokens: int, group: Any, device: torch.device) -> list[float]:
    """Microseconds of bfloat16 dispatch, fp8 dispatch, combine and both by pyops, then of both by NCCL."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = model.num_experts, tokens, model.hidden_size, model.top_k
    parallel = pyops.ExpertParallel(group, device, *sizes)
    codes = pyops.ExpertParallel(group, device, *sizes, quant_dtype=torch.float8_e4m3fn)
    x, ids, weights = draw(model, tokens, rank, device)
    ways = [of_kernels(parallel), *(way(parallel.experts, world_size) for way in (by_gather, by_all_to_all))]
    for way in (*ways, of_codes(codes)):
        check(way, parallel.experts, x, ids, weights)
    check_products(parallel, model, tokens, rank)
    out = torch.empty_like(x)

    def combine(_: torch.Tensor) -> torch.Tensor:
        parallel.fetch(out, ids, tokens)
        return out

    def both(way: Exchange) -> Way:
        return Way(way.name, lambda x: way.combine(way.dispatch(x, ids, weights)[0]))

    alone = [
        Way("dispatch", lambda x: parallel.send(x, ids, weights, tokens).rows),
        Way("dispatch, fp8", lambda x: codes.send(x, ids, weights, tokens).results),
        Way("combine", combine),
    ]
    found = [timed(way, x) for way in (*alone, *map(both, ways))]
    parallel.close()
    codes.close()
    return found


def main(arguments: Sequence[str]) -> None:
    if "--predict" in arguments:
        print(table())
        return
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("expected processes of torchrun: torchrun --nproc-per-node 4 -m benchmarks.expert_parallel")
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise SystemExit(f"expected a GPU for each process, got {torch.cuda.device_count()}")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=_TIMEOUT)
    group, world_size = dist.new_group(backend="gloo", timeout=_TIMEOUT), dist.get_world_size()
    if not reach_each_other(group, device):
        raise SystemExit("expected 2, 4, 6 or 8 GPUs of one node, each of which reaches the memory of every other")
    names = ["model", "tokens", "dispatch", "in fp8", "combine", "both", "predicted", "link", "gather", "all-to-all"]
    if dist.get_rank() == 0:
        print(f"{torch.cuda.get_device_name()} x {world_size}\n\n{_row(names)}\n{_row(['---'] * len(names))}")
    for model in MODELS:
        for tokens in TOKENS if not arguments or model.name in arguments else ():
            *kernels, gather, all_to_all = measure(model, tokens, group, device)
            expected, link = sum(predicted(model, world_size, tokens)), 2 * model.nbytes(world_size, tokens) / NVLINK
            if dist.get_rank() == 0:
                numbers = (*kernels, 1e6 * expected, 1e6 * link, gather, all_to_all)
                print(_row([model.name, str(tokens), *(f"{one:.1f}" for one in numbers)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
