"""Expert parallelism on the host backend: dispatch, combine, and the order of memory accesses between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernels_cu
import pyops
from pyops._core.launch.kernel import Kernel
from pyops.fused import parallel_experts
from pyops.ops.collective import expert_parallel
from pyops.ops.collective.shared_memory import SIGNAL_BYTES
from pyops.testing import SCHEDULES, Schedule, cpu, ranks, scheduled
from tests.ops.linear.test_grouped import needs_compiler
from tests.ops.linear.test_products import draw, positive
from tests.ops.moe.test_experts import experts_in_float64, quantised

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HIDDEN, TOP_K, MAX_TOKENS = 72, 3, 9
LEAST = torch.iinfo(torch.int64).min
HOSTILE = (-1, LEAST, LEAST + 1, 2**31, 2**32, 2**63 - 1)

Case = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def case(world_size: int, dtype: torch.dtype, most: int, id_t: torch.dtype = torch.int64, seed: int = 0) -> Case:
    """(rows, ids, weights) of each rank; one rank has `most` tokens, another none; a tenth of the ids name no
    expert."""
    generator = torch.Generator().manual_seed(seed)
    counts = [most, 0, *torch.randint(0, most + 1, (world_size,), generator=generator).tolist()][:world_size]
    xs = [torch.randint(-1, 3, (n, HIDDEN), generator=generator).to(dtype) for n in counts]
    ids = [torch.randint(-1, 2 * world_size + 1, (n, TOP_K), generator=generator).to(id_t) for n in counts]
    weights = [torch.randint(1, 5, (n, TOP_K), generator=generator).float() for n in counts]
    return xs, ids, weights


def divided(
    world_size: int,
    body: Callable[[int, pyops.ExpertParallel], Any],
    dtype: torch.dtype = torch.float32,
    seconds: int = 20,
) -> list[Any]:
    """``body(rank, parallel)`` on every rank, each with two experts."""

    def one(rank: int) -> Any:
        parallel = pyops.ExpertParallel(None, "cpu", 2 * world_size, MAX_TOKENS, HIDDEN, TOP_K, dtype)
        assert parallel.experts == range(2 * rank, 2 * rank + 2)
        found = body(rank, parallel)
        parallel.close()
        return found

    return ranks(world_size, seconds).run(one)


def multiplied(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rank: int) -> None:
    """In place: each row times the sum of weight * (expert + 1) over its choices, a stand-in for the experts."""
    rows *= (weights * (ids + 1 + 2 * rank)).where(ids >= 0, 0).sum(1, keepdim=True)


def combined(xs: list[torch.Tensor], ids: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result of `multiplied` and of the float32 sum in the order of ranks; all of it is exact."""
    num_experts, outs = 2 * len(xs), []
    for x, own, weight in zip(xs, ids, weights, strict=True):
        factor = (weight.double() * (own.double() + 1)).where((own >= 0) & (own < num_experts), 0).sum(1, keepdim=True)
        outs.append((x.double() * factor).to(x.dtype))
    return outs


@pytest.mark.parametrize(("world_size", "dtype"), zip((1, 2, 3, 4, 6, 8), DTYPES * 2, strict=True))
def test_dispatch_and_combine_are_exact(world_size: int, dtype: torch.dtype) -> None:
    """Over consecutive calls with different numbers of tokens: rows and ids match the formula, and sums are exact."""
    id_t = (torch.int64, torch.int32)[world_size % 4 // 2]
    calls = [(most, *case(world_size, dtype, most, id_t, seed=most)) for most in (1, MAX_TOKENS, 4)]

    def body(rank: int, parallel: pyops.ExpertParallel) -> None:
        for most, xs, ids, weights in calls:
            rows, own, own_weights, *_ = parallel.dispatch(xs[rank], ids[rank], weights[rank], most)
            assert (len(rows), len(own), len(own_weights)) == (most * world_size,) * 3
            for r in range(world_size):
                for t in range(most):
                    here = own[t * world_size + r]
                    if t >= len(ids[r]):
                        assert (here == -1).all()
                        continue
                    local = ids[r][t] - 2 * rank
                    is_here = (local >= 0) & (local < 2)
                    assert torch.equal(here.long(), local.where(is_here, -1).long())
                    assert torch.equal(own_weights[t * world_size + r], weights[r][t].where(is_here, 0.0))
                    assert not is_here.any() or torch.equal(rows[t * world_size + r], xs[r][t])
            multiplied(rows, own, own_weights, rank)
            assert torch.equal(parallel.combine(rows), combined(xs, ids, weights)[rank])

    for schedule in SCHEDULES[::2]:
        with scheduled(schedule):
            divided(world_size, body, dtype)


def test_combine_adds_in_float32_in_rank_order() -> None:
    """The four ranks' results are such that another order, or a rounding in between, would change the sum."""
    results = torch.tensor([1.0, 2.0**-9, 2.0**-9, -1.0]).bfloat16()

    def body(rank: int, parallel: pyops.ExpertParallel) -> torch.Tensor:
        x, ids = torch.zeros(2, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 3, 4], [7, 2, 5]])
        rows = parallel.dispatch(x, ids, torch.ones(2, TOP_K)).rows
        return parallel.combine(torch.full_like(rows, float(results[rank])))

    for out in divided(4, body, torch.bfloat16):
        assert out[0].unique().tolist() == [float((torch.tensor(1.0) + 2.0**-8).bfloat16())]
        assert out[1].unique().tolist() == [float((torch.tensor(2.0**-8) - 1).bfloat16())]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_ids_without_an_expert_are_ignored(schedule: Schedule) -> None:
    """The host reports a read or write outside of the ranks' shared memory. A token with only such ids becomes 0."""
    ids = torch.tensor([HOSTILE[:3], HOSTILE[3:], (HOSTILE[5], 5, LEAST)])
    x = torch.ones(3, HIDDEN)

    def body(rank: int, parallel: pyops.ExpertParallel) -> None:
        out = torch.full_like(x, torch.nan)
        rows, own, weights, *_ = parallel.dispatch(x, ids, torch.ones(3, TOP_K))
        assert own.max().item() == (1 if rank == 2 else -1)
        multiplied(rows, own, weights, rank)
        assert parallel.combine(rows, out) is out
        assert torch.equal(out, torch.tensor([0.0, 0.0, 6.0])[:, None].expand_as(out))

    with scheduled(schedule):
        divided(3, body)


def one_kernel(text: str) -> Kernel:
    """Three calls in one kernel, so that the host backend sees one rank in a call while others are in another.

    A rank is one block; its barriers stand for the ends of kernels. `multiplied` stands for the experts.
    """
    return Kernel(
        "collective/expert_dispatch.cu",
        text=text
        + """
extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
expert_dispatch(scalar_t* out, const scalar_t* x, const id_t* topk_ids, const float* topk_weights,
                const uint64_t* signals, LostRank* lost, Signals* own_signals, int num_tokens, int most_tokens,
                int64_t ids_offset, int64_t weights_offset, int64_t scales_offset, int rank) {
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    ExpertRows rows(world);
    world.meet<Flagged::ALL>();
    for (int call = 0; call < 3; ++call) {
        const int64_t first = int64_t(call) * num_tokens;
        const id_t* const ids = topk_ids + first * TOP_K;
        rows.dispatch(x + first * HIDDEN_SIZE, ids, topk_weights + first * TOP_K, num_tokens, most_tokens, ids_offset,
                      weights_offset, scales_offset);
        scalar_t* const own = rows.memory<scalar_t>(rank, SIGNAL_BYTES);
        for (int row = threadIdx.x; row < most_tokens * WORLD_SIZE; row += NUM_THREADS) {
            float factor = 0;
            for (int i = row * TOP_K; i < (row + 1) * TOP_K; ++i) {
                const int id = rows.memory<int32_t>(rank, ids_offset)[i];
                if (id >= 0) factor += rows.memory<float>(rank, weights_offset)[i] * (id + 1 + 2 * rank);
            }
            if (factor == 0) continue;
            for (int i = row * HIDDEN_SIZE; i < (row + 1) * HIDDEN_SIZE; ++i) own[i] *= factor;
        }
        rows.combine(out + first * HIDDEN_SIZE, ids, num_tokens);
        __syncthreads();
    }
    world.meet<Flagged::ALL>();
    world.leave();
}
""",
    )


def three_calls(world_size: int, text: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the results of three calls in one kernel are right on all ranks."""
    monkeypatch.setattr(expert_parallel, "_dispatch", one_kernel(text))
    monkeypatch.setattr(expert_parallel, "spread", lambda num_vecs: (1, 64))
    few = 4
    calls = [case(world_size, torch.float32, few, seed=call) for call in range(3)]

    def of(rank: int, which: int) -> torch.Tensor:
        """The calls, with rows of 0 and ids of -1 up to `few` tokens."""
        parts = [torch.nn.functional.pad(one[which][rank] + 1, (0, 0, 0, few - len(one[0][rank]))) for one in calls]
        return torch.cat(parts) - 1

    xs, ids, weights = ([of(rank, which) for rank in range(world_size)] for which in range(3))

    def body(rank: int, parallel: pyops.ExpertParallel) -> torch.Tensor:
        out = torch.full_like(xs[rank], torch.nan)
        fixed = parallel._offsets | {"num_tokens": few, "most_tokens": few}
        tensors = {"out": out, "x": xs[rank], "topk_ids": ids[rank], "topk_weights": weights[rank]}
        parallel._launch("dispatch", expert_parallel._dispatch, few, fixed, tensors)
        return out

    expected = combined(xs, ids, weights)
    return all(map(torch.equal, divided(world_size, body), expected))


# In one kernel, a flag must release the writes that the end of the previous kernel would release.
HEADER = kernels_cu.read("collective/expert_rows.cuh").replace("#pragma once", "").replace("::START", "::ALL")
MISTAKES = {
    "no meeting behind the rows": (
        "        world.meet<Flagged::ALL>();\n    }\n    // Meets, and sums",
        "    }\n    // Meets, and sums",
    ),
    "a flag that does not release the rows": (
        "world.meet<Flagged::ALL>();\n    }",
        "world.meet<Flagged::READS>();\n    }",
    ),
    "no meeting before the results": ("world.meet<Flagged::ALL>();  // earlier ker", "// earlier ker"),
    "ranks share a row": ("* WORLD_SIZE + world.rank; }", "* WORLD_SIZE; }"),
    "ranks share ids": ("const int at = (token * WORLD_SIZE + world.rank)", "const int at = (token * WORLD_SIZE)"),
    "a row of another token": ("return int64_t(i / ROW_VECS)", "return int64_t(i / ROW_VECS ^ 1)"),
    "a token of all its ranks but one": ("ranks[b] |= 1u <<", "ranks[b] = 1u <<"),
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_rank_may_be_a_call_ahead(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every access to the rows of a call is ordered with those of adjacent calls, by the flags of two barriers."""
    with scheduled(schedule):
        assert three_calls(3, HEADER, monkeypatch)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MISTAKES[mistake]
    assert HEADER.count(right) == 1
    if mistake.startswith("a ") and "flag" not in mistake:
        assert not three_calls(3, HEADER.replace(right, wrong), monkeypatch)
        return
    with pytest.raises(pyops.KernelFault) as raised:
        three_calls(3, HEADER.replace(right, wrong), monkeypatch)
    assert raised.value.kind in ("missing flag", "global memory race")


@pytest.mark.parametrize("which", ["dispatch", "combine"])
def test_rank_that_dies_is_named(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of rank 1 ends at once, like that of a process that dies."""
    file = f"collective/expert_{which}.cu"
    text, begin = kernels_cu.read(file), "    ExpertRows rows(world);"
    assert text.count(begin) == 1
    text = text.replace(begin, f"    if (rank == 1) return;\n{begin}")
    monkeypatch.setattr(expert_parallel, f"_{which}", Kernel(file, text=text))
    x, ids = torch.ones(1, HIDDEN), torch.tensor([[0, 2, 4]])

    def body(rank: int, parallel: pyops.ExpertParallel) -> Any:
        with pytest.raises(pyops.KernelFault, match="waits for rank 1"):
            parallel.combine(parallel.dispatch(x, ids, torch.ones(1, TOP_K), 1).rows)
        return parallel.lost_ranks()

    meeting = 1 if which == "dispatch" else 2
    assert divided(3, body) == [{1: (0, meeting)}, {}, {1: (0, meeting)}]


def test_device_error_names_the_ranks_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any next call: here the experts' GEMM, after a dispatch that waited for a rank."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(parallel_experts, "experts_into", fail)

    def body(rank: int, parallel: pyops.ExpertParallel) -> None:
        parallel._ranks.lost[1 - rank] = torch.tensor([1, 5])
        x, ids = torch.ones(1, HIDDEN), torch.zeros(1, TOP_K, dtype=torch.int32)
        w1, w2 = torch.ones(2, 8, HIDDEN), torch.ones(2, HIDDEN, 4)
        named = rf"parallel_fused_experts: a kernel has given up waiting for rank {1 - rank} \(block 0, meeting 5\)"
        with pytest.raises(pyops.RankError, match=named):
            pyops.parallel_fused_experts(parallel, x, w1, w2, torch.ones(1, TOP_K), ids)

    divided(2, body)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_parallel_equals_one_rank(dtype: torch.dtype) -> None:
    """Against float64, and against one rank with all experts; by references, and by kernels once."""
    world_size, experts, hidden, channels = 2, 4, 64, 32
    w1 = draw(experts, 2 * channels, hidden, dtype=dtype, seed=1) * hidden**-0.5
    w2 = draw(experts, hidden, channels, dtype=dtype, seed=2) * channels**-0.5
    generator = torch.Generator().manual_seed(4)
    xs = [draw(tokens, hidden, dtype=dtype, seed=tokens) for tokens in (7, 4)]
    ids = [torch.randint(-1, experts + 1, (len(x), TOP_K), generator=generator) for x in xs]
    weights = [positive(len(x), TOP_K, seed=len(x)) for x in xs]

    def body(rank: int) -> torch.Tensor:
        parallel = pyops.ExpertParallel(None, "cpu", experts, 16, hidden, TOP_K, dtype)
        own = slice(parallel.experts.start, parallel.experts.stop)
        out = xs[rank].clone()
        call = parallel, out, w1[own], w2[own], weights[rank], ids[rank]
        assert pyops.parallel_fused_experts(*call, most_tokens=8, out=out) is out
        parallel.close()
        return out

    for mode in ("reference", "kernels") if dtype == torch.bfloat16 else ("reference",):
        with cpu(mode):
            outs = ranks(world_size, 60).run(body)
        for rank, out in enumerate(outs):
            exact = experts_in_float64(xs[rank], w1, w2, weights[rank], ids[rank])
            whole = pyops.fused_experts(xs[rank], w1, w2, weights[rank], ids[rank])
            bound = 2.0**-20 if dtype == torch.float32 else 2.0**-7
            assert (out.double() - exact).abs().max() / exact.abs().max() <= bound
            assert (out.double() - whole.double()).abs().max() / exact.abs().max() <= bound


def test_bad_calls_are_refused() -> None:
    """Before anything is launched, so that no rank waits."""

    def body(rank: int, parallel: pyops.ExpertParallel) -> None:
        x, ids, weights = torch.ones(2, HIDDEN), torch.zeros(2, TOP_K, dtype=torch.int32), torch.ones(2, TOP_K)
        for args, most, name in (
            ((x.half(), ids, weights), None, "x"),
            ((x[:, :64], ids, weights), None, "x"),
            ((x.expand(2, 2, HIDDEN)[:, 0], ids, weights), None, "x"),
            ((torch.ones(HIDDEN, 2).T, ids, weights), None, "x"),
            ((torch.ones(10, HIDDEN), ids, weights), None, "x"),
            ((x, ids, weights), 1, "x"),
            ((x, ids, weights), 10, "most_tokens"),
            ((x, ids[:1], weights), None, "topk_ids"),
            ((x, ids.short(), weights), None, "topk_ids"),
            ((x, ids, weights.half()), None, "topk_weights"),
            ((x, ids, weights.T.contiguous().T), None, "topk_weights"),
        ):
            with pytest.raises(pyops.OpError, match=f"^dispatch: {name}: "):
                parallel.dispatch(*args, most)
        with pytest.raises(pyops.OpError, match="rows: expected a dispatch before"):
            parallel.combine(x)
        rows = parallel.dispatch(x, ids, weights, 2).rows
        with pytest.raises(pyops.OpError, match="expected a combine of what was dispatched before"):
            parallel.dispatch(x, ids, weights)
        with pytest.raises(pyops.OpError, match=r"^combine: rows: "):
            parallel.combine(rows[:2])
        with pytest.raises(pyops.OpError, match=r"^combine: out: "):
            parallel.combine(rows, torch.ones(3, HIDDEN))
        parallel.combine(rows)
        w1, w2 = torch.ones(3, 8, HIDDEN), torch.ones(3, HIDDEN, 4)
        with pytest.raises(pyops.OpError, match="w1: expected the 2 experts of this rank, got 3"):
            pyops.parallel_fused_experts(parallel, x, w1, w2, weights, ids)
        config = pyops.FusedMoEQuantConfig(quant_dtype=torch.float8_e4m3fn)
        with pytest.raises(pyops.OpError, match="quant_config: expected an a1_scale"):
            pyops.parallel_fused_experts(parallel, x, w1[:2], w2[:2], weights, ids, quant_config=config)

    divided(2, body)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((5, 8, 64, 2), "num_experts"),
        ((4, 0, 64, 2), "max_tokens"),
        ((4, 1 << 25, 64, 2), "max_tokens"),
        ((4, 8, 6, 2), "hidden_size"),
        ((4, 8, 64, 0), "top_k"),
        ((4, 8, 64, 2, torch.float64), "dtype"),
        ((4, 8, 128, 2, None, torch.int8), "quant_dtype"),
        ((4, 8, 64, 2, None, torch.float8_e4m3fn), "quant_dtype"),
    ],
)
def test_bad_sizes_are_refused(sizes: tuple[Any, ...], name: str) -> None:
    with pytest.raises(pyops.OpError, match=f"^ExpertParallel: {name}: "):
        ranks(2, 20).run(lambda rank: pyops.ExpertParallel(None, "cpu", *sizes))
    assert SIGNAL_BYTES % 256 == 0  # rows after the signals are as aligned as the memory


@pytest.mark.parametrize("dtype", DTYPES)
def test_dispatch_quantises_to_fp8(dtype: torch.dtype) -> None:
    """fp8 values and scales equal those of `per_token_group_quant_fp8`, bit for bit. Results have the requested
    dtype."""
    hidden, tokens = 384, 5
    x = draw(tokens, hidden, dtype=torch.float32) * torch.logspace(-9, 4, tokens)[:, None]
    x[1, 3], x[2, 130], x[3, :128], x[4, 256:] = torch.nan, torch.inf, 0.0, -0.0
    x[0, :2] = torch.tensor([3e38, 1e-30])
    x = x.to(dtype)
    codes, scales = pyops.per_token_group_quant_fp8(x, 128)
    ids = torch.tensor([[1, 2], [0, 1], [3, -1], [2, 2], [3, 0]])

    def body(rank: int) -> None:
        parallel = pyops.ExpertParallel(None, "cpu", 4, 6, hidden, 2, dtype, torch.float8_e4m3fn)
        count = tokens * rank  # rank 0 has none
        sent = parallel.dispatch(x[:count], ids[:count], ids[:count].float())
        assert sent.scales is not None
        assert sent.rows.dtype == torch.float8_e4m3fn
        here = (ids // 2 == rank).any(1)
        rows = torch.arange(tokens)[here] * 2 + 1
        assert torch.equal(sent.rows.view(torch.uint8)[rows], codes.view(torch.uint8)[here])
        assert torch.equal(sent.scales[rows].view(torch.int32), scales[here].view(torch.int32))
        sent.results.fill_(rank + 1)
        sums = parallel.combine(sent.results)
        assert sums.dtype == dtype
        assert sums[:, 0].tolist() == [3.0, 1.0, 2.0, 2.0, 3.0][:count]
        parallel.close()

    ranks(2, 20).run(body)


@needs_compiler
@pytest.mark.parametrize("mode", ["reference", "kernels"])
def test_fp8_dispatch_equals_16_bit_dispatch(mode: str) -> None:
    """Bit for bit, because the 8-bit experts quantise rows in the same groups."""
    experts, hidden, channels, tokens = 4, 128, 128, 3
    (c1, s1, _), (c2, s2, _) = (
        quantised(draw(experts, *size, dtype=torch.float32), "fp8 block")
        for size in ((256, hidden), (hidden, channels))
    )
    ids = torch.tensor([[0, 1], [2, 9], [3, 1]])

    def body(rank: int) -> list[torch.Tensor]:
        x, own, outs = draw(tokens, hidden, dtype=torch.bfloat16, seed=rank), slice(2 * rank, 2 * rank + 2), []
        blocks = {"block_shape": [128, 128], "w1_scale": s1[own], "w2_scale": s2[own]}
        config = pyops.FusedMoEQuantConfig(quant_dtype=torch.float8_e4m3fn, **blocks)
        for quant_dtype in (None, torch.float8_e4m3fn):
            parallel = pyops.ExpertParallel(None, "cpu", experts, tokens, hidden, 2, None, quant_dtype)
            call = parallel, x, c1[own], c2[own], positive(tokens, 2), ids
            if quant_dtype is not None:
                with pytest.raises(pyops.OpError, match="quant_config: expected blocks of 128 x 128"):
                    pyops.parallel_fused_experts(*call)
            outs.append(pyops.parallel_fused_experts(*call, quant_config=config))
            parallel.close()
        return outs

    with cpu(mode):
        for by_rows, by_codes in ranks(2, 60).run(body):
            assert by_rows.any(1).all()
            assert torch.equal(by_rows, by_codes)
