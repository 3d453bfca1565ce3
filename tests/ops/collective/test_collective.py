"""Collectives: ranks on the host backend, which checks flags for races, and processes that share one GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernels_cu
import pyops
from pyops import offline
from pyops._core.launch.kernel import Kernel, Specialisation
from pyops.host import ranks as worlds
from pyops.ops.collective import custom_all_reduce, minimax
from pyops.ops.collective.communicator import (
    MAX_BLOCKS,
    MAX_RANKS,
    by_packets,
    geometry,
    lost_record,
    naming_lost_ranks,
    spread,
    two_shot,
)
from pyops.ops.collective.shared_memory import PACKET_BYTES, SIGNAL_BYTES
from pyops.testing import SCHEDULES, Schedule, assert_close, ranks, scheduled
from tests.hip.specialisations import of_ranks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZE = 1 << 15  # bytes of the largest message


def communicate(world_size: int, body: Callable[[int, int, int], Any], seconds: float = 20.0) -> list[Any]:
    """``body(rank, fa, reg_buffer)`` on every rank, each with a communicator made as vLLM makes it."""

    def one(rank: int) -> Any:
        signals, own = pyops.allocate_shared_buffer_and_handle(pyops.meta_size() + SIZE)
        buffer, own_buffer = pyops.allocate_shared_buffer_and_handle(SIZE)
        here = worlds.here()
        assert here is not None
        handles: list[Any] = here.world.meet(rank, "exchange", (own, own_buffer), list)
        table = torch.zeros(256, dtype=torch.uint8)
        fa = pyops.init_custom_ar([pyops.open_mem_handle(a) for a, _ in handles], table, rank, True)
        pyops.register_buffer(fa, [pyops.open_mem_handle(b) for _, b in handles])
        found = body(rank, fa, buffer)
        pyops.dispose(fa)
        pyops.free_shared_buffer(buffer)
        pyops.free_shared_buffer(signals)
        return found

    return ranks(world_size, seconds).run(one)


def inputs(world_size: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world_size)]


def in_order(values: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, in the order of ranks, rounded once."""
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    return total.to(values[0].dtype)


def reduced(values: list[torch.Tensor], calls: int = 1) -> list[torch.Tensor]:
    def body(rank: int, fa: int, buffer: int) -> torch.Tensor:
        out = torch.full_like(values[rank], torch.nan)
        for _ in range(calls):
            pyops.all_reduce(fa, values[rank], out, buffer, SIZE)
        return out

    return communicate(len(values), body)


@pytest.mark.parametrize("algorithm", ["", "oneshot", "twoshot"], ids=["packets", "oneshot", "twoshot"])
@pytest.mark.parametrize(("world_size", "dtype"), zip(range(1, 9), (*DTYPES, *DTYPES, *DTYPES), strict=False))
def test_all_reduce_is_exact_in_the_order_of_ranks(
    world_size: int, dtype: torch.dtype, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", algorithm)
    for schedule, num_vecs in zip(SCHEDULES[::2], (1, 67, 600), strict=False):
        values = inputs(world_size, num_vecs * 16 // dtype.itemsize, dtype)
        with scheduled(schedule):
            for out in reduced(values, calls=2):
                assert torch.equal(out, in_order(values))


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_gather_and_scatter(world_size: int) -> None:
    """Bits are gathered; a rank's slice of a sum has the bits of the all-reduce. Calls may follow each other."""
    dtype = DTYPES[world_size % 3]
    for schedule, num_vecs in zip(SCHEDULES[::2], (1, 67, 260), strict=False):
        values = inputs(world_size, num_vecs * 16 // dtype.itemsize, dtype)
        wide = inputs(world_size, world_size * values[0].numel(), dtype)

        def body(
            rank: int, fa: int, buffer: int, values: list[torch.Tensor] = values, wide: list[torch.Tensor] = wide
        ) -> Any:
            whole, part = torch.full_like(wide[rank], torch.nan), torch.full_like(values[rank], torch.nan)
            for _ in range(2):
                pyops.custom_all_gather(fa, values[rank], whole, buffer, SIZE)
                pyops.custom_reduce_scatter(fa, wide[rank], part, buffer, SIZE)
            return whole, part

        with scheduled(schedule):
            for (whole, part), right in zip(
                communicate(world_size, body), in_order(wide).chunk(world_size), strict=True
            ):
                assert torch.equal(whole, torch.cat(values))
                assert torch.equal(part, right)


def test_refusals_of_gather_and_scatter() -> None:
    def body(rank: int, fa: int, buffer: int) -> None:
        x = torch.zeros(16)
        for name, inp, out, argument in (
            ("custom_all_gather", x, torch.zeros(16), "out"),
            ("custom_all_gather", x[:3], torch.zeros(6), "inp"),
            ("custom_all_gather", x[:8], x, "out"),
            ("custom_reduce_scatter", x, torch.zeros(16), "inp"),
            ("custom_reduce_scatter", x.int(), torch.zeros(8).int(), "inp"),
        ):
            with pytest.raises(pyops.OpError, match=f"{name}: {argument}: "):
                getattr(pyops, name)(fa, inp, out, buffer, SIZE)
        with pytest.raises(pyops.OpError, match="reg_buffer_sz_bytes"):
            pyops.custom_all_gather(fa, x, torch.zeros(32), buffer, 8)

    communicate(2, body)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_add_rms_norm(dtype: torch.dtype) -> None:
    shape, world_size = (5, 96), 4
    values = [value.view(shape) for value in inputs(world_size, 480, dtype)]
    residual, weight = inputs(2, 480, dtype)[1].view(shape), inputs(1, 96, dtype)[0]

    def body(rank: int, fa: int, buffer: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, own = values[rank].clone(), residual.clone()
        pyops.all_reduce_add_rms_norm(fa, out, out, own, weight, 1e-6)
        return out, own

    expected, sums = in_order(values), residual.clone()
    pyops.fused_add_rms_norm(expected, sums, weight, 1e-6)
    for out, own in communicate(world_size, body):
        assert torch.equal(own, sums)
        assert_close(expected, out, 1)


def test_packets_of_consecutive_calls_use_separate_buffers() -> None:
    """The input is the output. Every packet in both halves of the buffer carries the number of its barrier."""
    values = inputs(3, 320, torch.bfloat16)
    num_packets = 3 * 320 // 2

    def body(rank: int, fa: int, buffer: int) -> Any:
        out, outs, memory = values[rank].clone(), [], custom_all_reduce.communicator("test", fa).signals[rank]
        for _ in range(2):
            pyops.all_reduce(fa, out, out, 0, 0)
            outs.append(out.clone())
        halves = (ctypes.c_uint32 * (PACKET_BYTES // 4)).from_address(memory + SIGNAL_BYTES)
        words = torch.frombuffer(halves, dtype=torch.int32).view(2, -1, 2).clone()
        return outs, [half[:num_packets, 1].unique().tolist() for half in words], words[:, num_packets:].any()

    once = in_order(values)
    for outs, numbers, others in communicate(3, body):
        assert torch.equal(outs[0], once)
        assert torch.equal(outs[1], in_order([once] * 3))
        assert (numbers, bool(others)) == ([[2], [1]], False)


def test_every_block_has_the_number_of_the_last_barrier() -> None:
    """Launches of one block and of many alternate, so that packets of all blocks of a launch carry one number."""
    few, many = (inputs(2, numel, torch.float32) for numel in (8, 4096))

    def body(rank: int, fa: int, buffer: int) -> None:
        for values in (few, many, few, many):
            out = torch.empty_like(values[rank])
            pyops.all_reduce(fa, values[rank], out, buffer, SIZE)
            assert torch.equal(out, in_order(values))
        signals = custom_all_reduce.communicator("test", fa).signals[rank]
        flags = 4 * MAX_BLOCKS * MAX_RANKS
        assert list((ctypes.c_uint32 * MAX_BLOCKS).from_address(signals + flags)) == [4] * MAX_BLOCKS

    communicate(2, body)


@pytest.mark.parametrize("world_size", [1, 2, 4, 6, 8])
def test_packets_of_a_message_fit(world_size: int) -> None:
    most = max(nbytes for nbytes in range(16, 2 << 20, 16) if by_packets(world_size, nbytes))
    assert 2 * world_size * most <= PACKET_BYTES // 2 < 2 * world_size * (most + 16)
    num_vecs = most // 16
    grid, num_threads = spread(num_vecs)
    assert grid <= MAX_BLOCKS
    assert grid * num_threads >= min(num_vecs, MAX_BLOCKS * 512)
    assert (spread(1), spread(512)) == ((1, 64), (8, 64))


MISTAKES = {
    "no meeting before others' inputs are read": ("world.meet<Flagged::START>();\n    for", "for"),
    "a flag of sums that does not release them": ("TWO_SHOT ? Flagged::ALL : Flagged::READS", "Flagged::READS"),
    "a flag that tells of no reads": ("TWO_SHOT ? Flagged::ALL : Flagged::READS", "Flagged::START"),
    "no meeting behind them": ("world.meet<TWO_SHOT ? Flagged::ALL : Flagged::READS>();", ""),
    "no barrier before the flag is stored": ("++meeting;\n        __syncthreads();", "++meeting;"),
    "no barrier behind the flag": ("lost);\n        }\n        __syncthreads();", "lost);\n        }"),
    "another rank's slice is summed": ("begin = TWO_SHOT || SCATTER ? rank *", "begin = TWO_SHOT ? (rank ^ 1) *"),
}


@pytest.mark.parametrize("algorithm", ["oneshot", "twoshot"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_missing_flag_is_a_fault(mistake: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", algorithm)
    file, header = "collective/all_reduce.cu", kernels_cu.read("collective/rank_barrier.cuh")
    text = kernels_cu.read(file).replace('#include "rank_barrier.cuh"', header.replace("#pragma once", ""))
    right, wrong = MISTAKES[mistake]
    assert text.count(right) == 1
    monkeypatch.setattr(custom_all_reduce, "_all_reduce", Kernel(file, text=text.replace(right, wrong)))
    values = inputs(2, 1600, torch.float32)
    if "slice" in mistake:
        assert algorithm == "oneshot" or not torch.equal(reduced(values)[0], in_order(values))
    elif algorithm == "oneshot" and "release" in mistake:  # other ranks read no partial sums of one-shot
        assert torch.equal(reduced(values)[0], in_order(values))
    else:
        with pytest.raises(pyops.KernelFault) as raised:
            reduced(values)
        assert raised.value.kind == "missing flag"
        assert raised.value.message.startswith("rank ")


def test_ranks_that_wait_for_a_flag_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", "oneshot")
    file, header = "collective/all_reduce.cu", kernels_cu.read("collective/rank_barrier.cuh")
    text = kernels_cu.read(file).replace('#include "rank_barrier.cuh"', header.replace("#pragma once", ""))
    stored = "store_signal<WHAT>(&others->flags[blockIdx.x][rank], meeting);"
    assert text.count(stored) == 1
    text = text.replace(stored, f"if (rank != 1) {stored}")
    monkeypatch.setattr(custom_all_reduce, "_all_reduce", Kernel(file, text=text))
    with pytest.raises(pyops.KernelFault, match=r"rank 0 waits for rank 1 \(its flag is 0, expected 1\)") as raised:
        reduced(inputs(3, 1600, torch.float32))
    assert raised.value.kind == "deadlock"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_ranks_given_up_by_a_kernel_are_reported(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of ranks 1 and 3 end at once, like those of processes that die."""
    monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", "oneshot")
    file, text = "collective/all_reduce.cu", kernels_cu.read("collective/all_reduce.cu")
    first, second = "    world.meet<Flagged::START>();", "    world.meet<TWO_SHOT ?"
    assert text.count(first) == text.count(second) == 1
    text = text.replace(first, f"    if (rank % 2) return;\n{first}")
    monkeypatch.setattr(custom_all_reduce, "_all_reduce", Kernel(file, text=text))
    value = torch.ones(8)

    def body(rank: int, fa: int, buffer: int) -> Any:
        assert pyops.lost_ranks(fa) == {}
        with pytest.raises(pyops.KernelFault, match=r"rank 0 waits for rank 1 .* rank 2 waits for rank 3") as raised:
            pyops.all_reduce(fa, value, torch.empty(8), buffer, SIZE)
        assert raised.value.kind == "deadlock"
        return pyops.lost_ranks(fa)

    with scheduled(schedule):
        found = communicate(4, body)
    assert found == [{1: (0, 1), 3: (0, 1)}, {}, {1: (0, 1), 3: (0, 1)}, {}]


def test_failed_barrier_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank dies between the two barriers of its second call."""
    file, text = "collective/all_reduce.cu", kernels_cu.read("collective/all_reduce.cu")
    second = "    world.meet<TWO_SHOT ?"
    assert text.count(second) == 1
    text = text.replace(second, f"    if (rank == 1 && world.meeting == 3) return;\n{second}")
    monkeypatch.setattr(custom_all_reduce, "_all_reduce", Kernel(file, text=text))
    monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", "twoshot")

    def body(rank: int, fa: int, buffer: int) -> Any:
        value = torch.ones(8)
        pyops.all_reduce(fa, value, torch.empty(8), buffer, SIZE)
        with pytest.raises(pyops.KernelFault):
            pyops.all_reduce(fa, value, torch.empty(8), buffer, SIZE)
        return pyops.lost_ranks(fa)

    assert communicate(3, body) == [{1: (0, 4)}, {}, {1: (0, 4)}]


def test_device_error_names_the_ranks_given_up() -> None:
    lost = lost_record(torch.device("cpu"))
    failure = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError) as raised, naming_lost_ranks("all_reduce", lost):
        raise failure
    assert raised.value is failure
    lost[3], lost[5] = torch.tensor([1, 7]), torch.tensor([36, 8])
    with pytest.raises(pyops.RankError) as raised, naming_lost_ranks("all_reduce", lost):
        raise failure
    assert raised.value.ranks == (3, 5)
    named = "rank 3 (block 0, meeting 7), rank 5 (block 35, meeting 8)"
    assert str(raised.value) == f"all_reduce: a kernel has given up waiting for {named}"
    assert raised.value.__cause__ is failure
    already = pyops.RankError("named", (1,))
    with pytest.raises(pyops.RankError) as raised, naming_lost_ranks("all_reduce", lost):
        raise already
    assert raised.value is already


def test_kernel_reports_before_it_traps() -> None:
    """In the CUDA source, the write to host memory comes before a system-wide fence, and the trap after it."""
    wait = kernels_cu.read("collective/rank_barrier.cuh").partition("DEVICE void tell_lost")[2]
    steps = (
        "lost->meeting = meeting",
        "lost->block = blockIdx.x + 1",
        "fence.sc.sys",
        "tell_all(missing, meeting, lost)",
        "trap;",
    )
    places = [wait.index(step) for step in steps]
    assert places == sorted(places)
    assert lost_record(torch.device("cpu")).nbytes == MAX_RANKS * 8


@pytest.mark.parametrize("how", ["late", "dead", "returned"])
def test_absent_rank_is_named(how: str) -> None:
    values = inputs(3, 64, torch.float32)
    caught: list[pyops.RankError] = []

    def body(rank: int, fa: int, buffer: int) -> None:
        if rank == 1 and how == "dead":
            raise ZeroDivisionError("of rank 1")
        if rank == 1 and how == "returned":
            return
        if rank == 1:
            while len(caught) < 2:
                time.sleep(0.01)
            return
        try:
            pyops.all_reduce(fa, values[rank], torch.empty_like(values[rank]), buffer, SIZE)
        except pyops.RankError as error:
            caught.append(error)

    if how == "dead":
        with pytest.raises(ZeroDivisionError):
            communicate(3, body, seconds=20)
    else:
        communicate(3, body, seconds=0.5 if how == "late" else 20)
    assert len(caught) == 2
    for error in caught:
        assert error.ranks == (1,)
        assert "for rank 1" in str(error)


def test_bad_calls_are_refused() -> None:
    def body(rank: int, fa: int, buffer: int) -> None:
        x, long = torch.zeros(64), torch.zeros(1 << 18)
        for inp, out, reg_buffer, size, name in (
            (x.double(), x.double(), buffer, SIZE, "inp"),
            (x, x[:32], buffer, SIZE, "out"),
            (x[:48], x[16:], buffer, SIZE, "out"),
            (long, long, 0, 0, "out"),
            (x[:62], torch.zeros(62), buffer, SIZE, "inp"),
            (long, torch.zeros_like(long), buffer, 128, "reg_buffer_sz_bytes"),
            (long, torch.zeros_like(long), 0, 0, "inp"),
            (torch.zeros(64, 2)[:, 0], torch.zeros(64), buffer, SIZE, "inp"),
        ):
            with pytest.raises(pyops.OpError, match=name):
                pyops.all_reduce(fa, inp, out, reg_buffer, size)
        with pytest.raises(pyops.OpError, match="inp: expected 1048576 bytes of all ranks, got 2097152"):
            pyops.all_reduce_add_rms_norm(fa, long, torch.zeros_like(long), torch.zeros_like(long), x, 1e-6)
        with pytest.raises(pyops.OpError, match="fa"):
            pyops.all_reduce(-1, x, torch.zeros(64), buffer, SIZE)
        with pytest.raises(pyops.OpError, match="ipc_tensors"):
            pyops.register_buffer(fa, [buffer])

    communicate(2, body)


def test_private_memory_of_another_rank_is_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", "oneshot")
    values = inputs(2, 64, torch.float32)

    def body(rank: int, fa: int, buffer: int) -> None:
        here = worlds.here()
        assert here is not None
        addresses = here.world.meet(rank, "addresses", values[rank].data_ptr(), list)
        pyops.register_buffer(fa, addresses)
        pyops.all_reduce(fa, values[rank], torch.empty(64), 0, 0)

    with pytest.raises(pyops.KernelFault) as raised:
        communicate(2, body)
    assert raised.value.kind == "out-of-bounds global access"


def quick(values: list[torch.Tensor], level: int, half: bool = False) -> list[torch.Tensor]:
    world_size = len(values)

    def one(rank: int) -> torch.Tensor:
        here = worlds.here()
        assert here is not None
        fa = pyops.init_custom_qr(rank, world_size, SIZE)
        pyops.qr_open_handles(fa, here.world.meet(rank, "exchange", pyops.qr_get_handle(fa), list))
        out = torch.full_like(values[rank], torch.nan)
        for _ in range(2):
            pyops.qr_all_reduce(fa, values[rank], out, level, half)
        pyops.qr_destroy(fa)
        return out

    return ranks(world_size, 20).run(one)


def coded(x: torch.Tensor, level: int) -> torch.Tensor:
    """Encode and decode by the formula, in float64 except for the roundings to the dtype of `x`."""
    if level == 0:
        return x
    half = 2 ** ((8, 6, 4)[level - 1] - 1)
    padded = torch.zeros(-(-x.numel() // 64) * 64, dtype=torch.float64)
    padded[: x.numel()] = x.double()
    blocks = padded.view(-1, 32, 2)
    most, least = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    scale = (-torch.where(most > -least, most, least) / half).to(x.dtype).double()
    ratio = (blocks.float() / scale.float()).nan_to_num(0.0)
    codes = ratio.round().clamp(-half, half - 1).double()
    return (codes * scale).to(x.dtype).reshape(-1)[: x.numel()]


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float16), (4, torch.bfloat16), (8, torch.float16)])
def test_quick_all_reduce_matches_its_formula(world_size: int, dtype: torch.dtype, level: int) -> None:
    for schedule, numel in zip(SCHEDULES[::2], (8, 1000, 9000), strict=False):
        values = inputs(world_size, numel, dtype)
        part = -(-numel // (64 * world_size)) * 64
        total = torch.cat([coded(value, level) for value in values[0].split(part)])
        for value in values[1:]:
            total = total + torch.cat([coded(one, level) for one in value.split(part)])
        expected = torch.cat([coded(one, level) for one in total.split(part)])
        with scheduled(schedule):
            for out in quick(values, level):
                assert torch.equal(out, expected)


def test_quick_all_reduce_of_extremes() -> None:
    """The largest element of a block is exact; NaN is kept; bfloat16 may be computed as float16."""
    x = torch.zeros(128, dtype=torch.float16)
    x[6], x[7], x[9], x[70] = 1000.0, -3.0, 3.0, torch.nan
    for out in quick([x, torch.zeros_like(x)], 3):
        assert (out[6], out[7], out[9]) == (1000.0, -3.0, 2.625)
        assert out[64::2].isnan().all()
        assert not out[:64].isnan().any()
        assert not out[65::2].isnan().any()
    values = inputs(2, 64, torch.bfloat16)
    expected = torch.cat([coded(value.half(), 1) for value in values]).view(2, 64).sum(0, dtype=torch.float16)
    for out in quick(values, 1, half=True):
        assert torch.equal(out, coded(expected, 1).bfloat16())


def norms(
    values: list[torch.Tensor], weight: torch.Tensor, q_size: int, kv_size: int, calls: tuple[int, ...]
) -> list[list[torch.Tensor]]:
    """The results of each rank for calls with these numbers of rows. As vLLM does, shared memory of ranks begins as
    -0.0."""

    def one(rank: int) -> list[torch.Tensor]:
        here, size = worlds.here(), 1536 + 16 * len(values[0])
        assert here is not None
        address, handle = pyops.allocate_shared_buffer_and_handle(size)
        custom_all_reduce.keep(address)
        torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.float32).fill_(-0.0)
        handles = here.world.meet(rank, "exchange", handle, list)
        workspace = torch.tensor([0] * 2 * len(values) + [pyops.open_mem_handle(h) for h in handles] + [0] * 2)
        shared, found = (workspace, rank, len(values), 1e-6), []
        for few in calls:
            own = values[rank][:few]
            weights = weight, weight[:kv_size]
            found += pyops.minimax_allreduce_rms_qk(own, *weights, workspace, q_size, kv_size, *shared[1:])
            found.append(pyops.minimax_allreduce_rms(own[:, :q_size].contiguous(), weight, *shared))
        return found

    return ranks(len(values), 20).run(one)


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (4, torch.float32), (8, torch.float16)])
def test_norms_of_rows_divided_among_ranks(world_size: int, dtype: torch.dtype) -> None:
    """Consecutive calls have different numbers of rows."""
    tokens, q_size, kv_size = 41, 48, 16
    values = [one.view(tokens, -1) for one in inputs(world_size, tokens * (q_size + 2 * kv_size), dtype)]
    weight = inputs(1, q_size, dtype)[0]

    def normalised(first: int, size: int, few: int, rank: int) -> torch.Tensor:
        parts = torch.stack([value[:few, first : first + size].double() for value in values])
        scale = (parts.square().sum((0, 2)) / (size * world_size) + 1e-6).rsqrt()
        return (parts[rank] * scale[:, None] * weight[:size].double()).to(dtype)

    calls = tokens, 3, tokens
    for rank, found in enumerate(norms(values, weight, q_size, kv_size, calls)):
        for i, few in enumerate(calls):
            q, k, alone = found[3 * i : 3 * i + 3]
            assert_close(normalised(0, q_size, few, rank), q, 1)
            assert_close(normalised(q_size, kv_size, few, rank), k, 1)
            assert torch.equal(alone, q)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ("", "missing flag", "rank 0: read of memory of rank 1, of whose start no flag has told"),
        (
            "if (rank == 1) return;\n    world.meet<Flagged::ALL>();",
            "deadlock",
            "rank 0 waits for rank 1 .*; rank 2 waits for rank 1",
        ),
    ],
    ids=["no meeting", "a rank that ends before it"],
)
def test_norm_without_the_barrier_is_a_fault(
    wrong: str, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, right = "collective/allreduce_rms.cu", "world.meet<Flagged::ALL>();"
    text = kernels_cu.read(file)
    assert text.count(right) == 1
    monkeypatch.setattr(minimax, "_kernel", Kernel(file, text=text.replace(right, wrong)))
    values = [one.view(3, -1) for one in inputs(3, 3 * 80, torch.float32)]
    with pytest.raises(pyops.KernelFault, match=message) as raised:
        norms(values, inputs(1, 48, torch.float32)[0], 48, 16, (3,))
    assert raised.value.kind == kind


@pytest.mark.parametrize("specialisation", of_ranks(), ids=str)
def test_kernels_compile_without_local_memory(specialisation: Specialisation) -> None:
    file = specialisation.kernel.file
    report = offline.compile(file, str(specialisation), specialisation.text, "sm_90a")
    assert (report.stack_bytes, report.spill_bytes, report.advice) == (0, 0, ())


@pytest.mark.parametrize(
    ("world_size", "nbytes", "fully_connected", "two"),
    [
        (2, 8 << 20, False, False),
        (4, (512 << 10) - 16, True, False),
        (4, 512 << 10, True, True),
        (4, 1024, False, True),
        (6, 256 << 10, True, True),
        (8, (256 << 10) - 16, True, False),
    ],
)
def test_two_shots_are_chosen_where_they_are_faster(
    world_size: int, nbytes: int, fully_connected: bool, two: bool
) -> None:
    assert two_shot(world_size, nbytes, fully_connected) == two


def test_switch_of_the_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CUSTOM_ALLREDUCE_ALGO", "3stage")
    with pytest.raises(pyops.OpError, match="3stage"):
        two_shot(2, 16, True)
    assert geometry(1) == (1, 64)
    assert geometry(1 << 20) == (36, 512)
