"""Rows of experts, aligned to blocks and counted, against Python loops: every slot, and ids out of range."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.ops.moe import _sort
from tests.support.calls import DEVICES, refusal

HOSTILE = (-1, -7, 2**31 - 1, -(2**31))


def ids_of(num_tokens: int, topk: int, num_experts: int, seed: int, skewed: bool = False) -> torch.Tensor:
    """Expert ids of tokens, one in ten out of range; nearly all the same if `skewed`."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_experts, (num_tokens, topk), generator=random, dtype=torch.int32)
    if skewed:
        ids = ids.where(torch.rand(ids.shape, generator=random) < 0.1, num_experts - 1)
    wrong = torch.tensor((*HOSTILE, num_experts), dtype=torch.int32)
    wrong = wrong[torch.randint(0, len(wrong), ids.shape, generator=random)]
    return torch.where(torch.rand(ids.shape, generator=random) < 0.1, wrong, ids)


def map_of(num_experts: int, seed: int) -> torch.Tensor:
    """The local index of each expert on a device that has about half of them; some indices are out of range."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-1, num_experts, (num_experts,), generator=random, dtype=torch.int32)
    numbers[torch.rand(num_experts, generator=random) < 0.4] = -1
    numbers[torch.rand(num_experts, generator=random) < 0.1] = HOSTILE[2]
    return numbers


def local(expert: int, num_experts: int, expert_map: torch.Tensor | None) -> int:
    """The local index of an expert, or -1."""
    if not 0 <= expert < (num_experts if expert_map is None else min(num_experts, len(expert_map))):
        return -1
    number = expert if expert_map is None else int(expert_map[expert])
    return number if 0 <= number < num_experts else -1


def by_expert(experts: list[int], num_experts: int) -> list[list[int]]:
    """The rows of each expert, by appending one after another."""
    rows: list[list[int]] = [[] for _ in range(num_experts)]
    for row, expert in enumerate(experts):
        if expert >= 0:
            rows[expert].append(row)
    return rows


def aligned(rows: list[list[int]], block_size: int, pad: int) -> tuple[list[int], list[int]]:
    """(slots, experts of blocks) up to the last expert."""
    slots: list[int] = []
    blocks: list[int] = []
    for expert, own in enumerate(rows):
        num_blocks = -(-len(own) // block_size)
        slots += own + [pad] * (num_blocks * block_size - len(own))
        blocks += [expert] * num_blocks
    return slots, blocks


def filled(values: list[int], size: int, value: int) -> list[int]:
    return values + [value] * (size - len(values))


def check_align(ids: torch.Tensor, num_experts: int, block_size: int, expert_map: torch.Tensor | None) -> None:
    """The op against a loop; its result fits any distribution, and is not longer."""
    result = pyops.moe_align_block_size.new(ids, num_experts, block_size, expert_map)
    slots, blocks, total = (x.tolist() for x in result)
    experts = [local(expert, num_experts, expert_map) for expert in ids.reshape(-1).tolist()]
    right, right_blocks = aligned(by_expert(experts, num_experts), block_size, ids.numel())
    assert total == [len(right)]
    assert slots == filled(right, len(slots), ids.numel())
    assert blocks == filled(right_blocks, len(blocks), -1)


@pytest.mark.parametrize("device", DEVICES)
@given(
    num_tokens=st.integers(1, 40) | st.sampled_from([77, 150]),
    topk=st.sampled_from([1, 2, 6, 8, 32]),
    num_experts=st.sampled_from([1, 2, 31, 64, 257, 512]),
    block_size=st.sampled_from([1, 16, 48, 64]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    has_map=st.booleans(),
    skewed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_align(
    num_tokens: int,
    topk: int,
    num_experts: int,
    block_size: int,
    dtype: Any,
    has_map: bool,
    skewed: bool,
    seed: int,
    device: str,
) -> None:
    ids = ids_of(num_tokens, topk, num_experts, seed, skewed).to(device, dtype)
    expert_map = map_of(num_experts, seed).to(device) if has_map else None
    check_align(ids, num_experts, block_size, expert_map)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 150, 2111])  # rows in registers, by a cluster, and read again
def test_scatter_indices(num_tokens: int, has_map: bool, device: str) -> None:
    """The number of each row with an expert, -1 for the others; the other outputs do not change."""
    ids = ids_of(num_tokens, 6, 64, num_tokens).to(device)
    expert_map = map_of(64, 3).to(device) if has_map else None
    found = []
    for scatter_idx in (None, torch.full((num_tokens, 6), -7, dtype=torch.int32, device=device)):
        results = [torch.full((n,), -9, dtype=torch.int32, device=device) for n in (num_tokens * 6 + 64 * 15, 9000, 1)]
        pyops.moe_align_block_size(ids, 64, 16, *results, expert_map, scatter_idx)
        found.append(results)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    right = [t if local(e, 64, expert_map) >= 0 else -1 for t, e in enumerate(ids.flatten().tolist())]
    assert scatter_idx is not None
    assert scatter_idx.flatten().tolist() == right


def test_scatter_indices_refused() -> None:
    ids, results = torch.zeros(2, 2, dtype=torch.int32), [torch.zeros(n, dtype=torch.int32) for n in (64, 4, 1)]
    for wrong, message in (
        (torch.zeros(3, dtype=torch.int32), "expected 4 elements, one for each id"),
        (torch.zeros(4, dtype=torch.int64), "expected dtype int32"),
        (torch.zeros(2, 4, dtype=torch.int32)[:, ::2], "contiguous"),
    ):
        with pytest.raises(pyops.OpError, match=f"moe_align_block_size: scatter_idx: .*{message}"):
            pyops.moe_align_block_size(ids, 4, 16, *results, None, wrong)


@pytest.mark.parametrize("device", DEVICES)
def test_map_to_an_expert_out_of_range_is_ignored(device: str) -> None:
    expert_map = torch.tensor([0, 4, 2, 3], dtype=torch.int32, device=device)
    check_align(torch.tensor([[0, 1], [1, 2]], dtype=torch.int32, device=device), 4, 4, expert_map)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(530, 8), (700, 128), (1100, 512), (2111, 64), (3, 4096), (600, 6000)]
)
def test_align_with_clusters(num_tokens: int, num_experts: int, device: str) -> None:
    """Clusters of 2 to 8 CTAs with partial shares, and as many experts as fit in one CTA's shared memory."""
    if device == "cuda" and num_experts == 6000 and devices.get(0).shared_memory < 99 << 10:
        pytest.skip("6000 experts need more shared memory")
    for skewed in (False, True):
        check_align(ids_of(num_tokens, 8, num_experts, 1, skewed).to(device), num_experts, 16, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [5, 150, 600])
def test_align_of_more_rows_than_registers_hold(
    num_tokens: int, device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The ids are read twice, by one CTA and by a cluster."""
    op = pyops.registry["moe_align_block_size"]
    request.addfinalizer(op.forget)
    op.forget()
    monkeypatch.setattr(_sort, "_KEPT_ROWS", 0)
    monkeypatch.setattr(_sort, "_LANE_ROWS", 9)
    for skewed in (False, True):
        check_align(ids_of(num_tokens, 8, 40, 1, skewed).to(device), 40, 16, None)


@pytest.mark.parametrize("device", DEVICES)
def test_align_of_outputs_at_any_address(device: str) -> None:
    """Outputs that begin and end within a 16-byte word; nothing outside of them is written."""
    ids = ids_of(7, 3, 5, 1).to(device)
    rows = by_expert([local(expert, 5, None) for expert in ids.reshape(-1).tolist()], 5)
    right, right_blocks = aligned(rows, 4, ids.numel())
    for begin in range(4):
        memory = [torch.full((size + 8,), -9, dtype=torch.int32, device=device) for size in (37 + begin, 10)]
        slots, blocks = memory[0][begin:-8], memory[1][begin : begin + 10]
        total = torch.zeros(1, dtype=torch.int32, device=device)
        pyops.moe_align_block_size(ids, 5, 4, slots, blocks, total)
        assert slots.tolist() == filled(right, 37, ids.numel())
        assert blocks.tolist() == filled(right_blocks, 10, -1)
        assert [(x == -9).sum().item() for x in memory] == [begin + 8, 8]


@pytest.mark.parametrize("device", DEVICES)
def test_align_64_bit_ids(device: str) -> None:
    """No id is cut to 32 bits."""
    ids = torch.tensor([[3, 2**32 + 3], [-(2**40) + 1, 1]], device=device)
    check_align(ids, 4, 2, None)


def test_align_is_one_launch_with_space_for_4096_experts() -> None:
    """On every device, for few rows and for many."""
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1100"):
        for num_tokens in (1, 16, 4096, 16384):
            model = devices.model(arch)
            ids = ArgMaker(model, "moe_align_block_size").empty(num_tokens, 8, dtype="int32")
            slots = num_tokens * 8 * 64
            outputs = [ArgMaker(model).empty(size, dtype="int32") for size in (slots, slots // 64, 1)]
            (launch,) = pyops.registry["moe_align_block_size"].launches(ids, 4096, 64, *outputs, None)
            assert launch.shared + 2048 <= model.shared_memory
            assert launch.grid[1] == (8 if model.cluster == 8 and num_tokens >= 16 else 1)


@pytest.mark.parametrize("device", DEVICES)
@given(
    num_tokens=st.integers(1, 40),
    num_experts=st.sampled_from([4, 64, 300]),
    block_size=st.sampled_from([16, 33]),
    pad=st.booleans(),
    ignores=st.booleans(),
    has_map=st.booleans(),
)
def test_moe_align(
    num_tokens: int, num_experts: int, block_size: int, pad: bool, ignores: bool, has_map: bool, device: str
) -> None:
    """Sizes are vLLM's, and the map is applied before the sort or after it."""
    ids = ids_of(num_tokens, 3, num_experts, 5).to(device)
    expert_map = map_of(num_experts, 5).to(device) if has_map else None
    size = ids.numel() + num_experts * (block_size - 1)
    size = -(-size // block_size) * block_size if pad else size
    size = min(size, ids.numel() * block_size) if ids.numel() < num_experts else size
    slots, blocks, total = pyops.moe_align(ids, block_size, num_experts, expert_map, pad, ignores)
    assert len(slots) == size
    assert len(blocks) == -(-size // block_size)
    used_map = expert_map if ignores else None
    experts = [local(expert, num_experts, used_map) for expert in ids.reshape(-1).tolist()]
    right, right_blocks = aligned(by_expert(experts, num_experts), block_size, ids.numel())
    right_blocks = filled(right_blocks, len(blocks), -1)
    if expert_map is not None and not ignores:
        right_blocks = [int(expert_map[expert]) for expert in right_blocks]
    assert (slots.tolist(), blocks.tolist()) == (filled(right, size, ids.numel()), right_blocks)
    assert total.tolist() == [len(right)]


def test_align_without_tokens() -> None:
    ids = torch.zeros(0, 8, dtype=torch.int32)
    slots, blocks, total = pyops.moe_align(ids, 64, 128)
    assert (slots.numel(), blocks.numel(), total.tolist()) == (0, 0, [0])
    slots, blocks = torch.full((64,), 7, dtype=torch.int32), torch.full((1,), 7, dtype=torch.int32)
    pyops.moe_align_block_size(ids, 128, 64, slots, blocks, total)
    assert (slots.tolist(), blocks.tolist()) == ([0] * 64, [-1])


def test_align_refuses_too_little_space() -> None:
    op = pyops.registry["moe_align_block_size"]
    ids = torch.zeros(3, 2, dtype=torch.int32)
    for slots, blocks, argument in ((95, 6, "sorted_token_ids"), (96, 5, "experts_ids")):
        outputs = [torch.zeros(size, dtype=torch.int32) for size in (slots, blocks, 1)]
        assert refusal(op, [ids, 128, 16, *outputs, None]).argument == argument
    outputs = [torch.zeros(size, dtype=torch.int32) for size in (96, 6, 1)]
    for num_experts, block_size, argument in (
        (0, 16, "num_experts"),
        (128, 0, "block_size"),
        (128, 2**30, "block_size"),
    ):
        assert refusal(op, [ids, num_experts, block_size, *outputs, None]).argument == argument
    # One row takes 2^31 - 1 slots, which 32 bits can still count, but no memory can hold.
    assert refusal(op, [ids[:1, :1], 128, 2**31 - 1, *outputs, None]).argument == "sorted_token_ids"


@pytest.mark.parametrize("device", DEVICES)
@given(
    counts=st.lists(st.integers(-3, 60) | st.sampled_from(HOSTILE), min_size=1, max_size=40),
    max_tokens=st.sampled_from([0, 1, 13, 50]),
    block_size=st.sampled_from([1, 16, 24]),
)
def test_batched(counts: list[int], max_tokens: int, block_size: int, device: str) -> None:
    tensor = torch.tensor(counts, dtype=torch.int32, device=device)
    slots, blocks, total = pyops.batched_moe_align_block_size.new(max_tokens, block_size, tensor)
    rows = [
        [expert * max_tokens + i for i in range(min(max(count, 0), max_tokens))] for expert, count in enumerate(counts)
    ]
    right, right_blocks = aligned(rows, block_size, len(counts) * max_tokens)
    assert len(slots) == len(counts) * (-(-max_tokens // block_size) * block_size)
    assert slots.tolist() == filled(right, len(slots), len(counts) * max_tokens)
    assert blocks.tolist() == filled(right_blocks, len(blocks), -1)
    assert total.tolist() == [len(right)]


def test_batched_with_many_experts() -> None:
    """More experts than threads in a CTA."""
    counts = torch.arange(1500, dtype=torch.int32) % 5
    slots, _, total = pyops.batched_moe_align_block_size.new(4, 2, counts)
    rows = [[expert * 4 + i for i in range(count)] for expert, count in enumerate(counts.tolist())]
    right, _ = aligned(rows, 2, 6000)
    assert slots.tolist() == filled(right, len(slots), 6000)
    assert total.tolist() == [len(right)]


@pytest.mark.parametrize("device", DEVICES)
@given(
    num_tokens=st.integers(1, 40),
    max_loras=st.integers(1, 5),
    lora_ids=st.lists(st.integers(-1, 7) | st.sampled_from(HOSTILE), min_size=0, max_size=6),
    enabled=st.integers(0, 63),
    has_map=st.booleans(),
)
def test_lora(num_tokens: int, max_loras: int, lora_ids: list[int], enabled: int, has_map: bool, device: str) -> None:
    """Every adapter that is named and enabled, in any position; the output of the others is left alone."""
    topk, num_experts, block_size = 6, 64, 16
    ids = ids_of(num_tokens, topk, num_experts, 3)
    owners = torch.randint(-1, max_loras + 1, (num_tokens,), generator=torch.Generator().manual_seed(4)).int()
    expert_map = map_of(num_experts, 3) if has_map else None
    slots, num_blocks = ids.numel() + num_experts * 15 + 5, 200 + ids.numel() // 16
    is_enabled = torch.tensor([enabled >> i & 1 for i in range(max_loras + 1)], dtype=torch.int32)
    outputs = [torch.full((max_loras, *size), 77, dtype=torch.int32) for size in ((slots,), (num_blocks,), ())]
    arguments = (ids, owners, num_experts, block_size, max_loras, slots, num_blocks)
    named = torch.tensor(lora_ids, dtype=torch.int32)
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in (*arguments, *outputs, is_enabled, named)]
    pyops.moe_lora_align_block_size(*moved, None if expert_map is None else expert_map.to(device))
    results = [x.tolist() for x in moved[7:10]]
    experts = [local(expert, num_experts, expert_map) for expert in ids.reshape(-1).tolist()]
    for lora in range(max_loras):
        found = tuple(result[lora] for result in results)
        if lora not in lora_ids or not enabled >> lora & 1:
            assert found == ([77] * slots, [77] * num_blocks, 77)
            continue
        own = [expert if owners[row // topk] == lora else -1 for row, expert in enumerate(experts)]
        right, right_blocks = aligned(by_expert(own, num_experts), block_size, ids.numel())
        assert found == (filled(right, slots, ids.numel()), filled(right_blocks, num_blocks, -1), len(right))


def problem_sizes(counts: list[int], first_n: int, n: int, k: int, swap: bool) -> tuple[list[Any], list[Any]]:
    tables: tuple[list[Any], list[Any]] = ([], [])
    for rows in counts:
        for table, columns, depth in zip(tables, (first_n, k), (k, n), strict=True):
            table.append([columns, rows, depth] if swap else [rows, columns, depth])
    return tables


def check_mm_data(num_tokens: int, num_experts: int, blockscale: bool, gated: bool, device: str) -> None:
    """The op with permutations, and the one without, against a loop."""
    topk, n, k = 8, 100, 200
    ids = ids_of(num_tokens, topk, num_experts, 6).to(device)
    sizes = [(num_experts + 1,), (num_experts, 3), (num_experts, 3), (ids.numel(),), (ids.numel(),)]
    outputs = [torch.full(size, -77, dtype=torch.int32, device=device) for size in sizes]
    scale_offsets = torch.full(sizes[0], -77, dtype=torch.int32, device=device) if blockscale else None
    pyops.get_cutlass_moe_mm_data(ids, *outputs, num_experts, n, k, scale_offsets, gated)
    offsets, sizes1, sizes2, tokens, slots = (x.tolist() for x in outputs)

    rows = by_expert([local(expert, num_experts, None) for expert in ids.reshape(-1).tolist()], num_experts)
    order = [row for own in rows for row in own]
    assert offsets == [sum(map(len, rows[:expert])) for expert in range(num_experts + 1)]
    assert tokens == filled([row // topk for row in order], ids.numel(), 0)
    slot_of = {row: slot for slot, row in enumerate(order)}
    assert slots == [slot_of.get(row, len(order)) for row in range(ids.numel())]
    swap = not blockscale and num_tokens * topk <= 64
    counts = list(map(len, rows))
    assert (sizes1, sizes2) == problem_sizes(counts, (1 + gated) * n, n, k, swap)
    if scale_offsets is not None:
        padded = [-(-count // 128) * 128 for count in counts]
        assert scale_offsets.tolist() == [sum(padded[:expert]) for expert in range(num_experts + 1)]

    for forced in (None, False, True):
        tables = [torch.zeros(num_experts, 3, dtype=torch.int32, device=device) for _ in range(2)]
        pyops.get_cutlass_moe_mm_problem_sizes(ids, *tables, num_experts, n, k, scale_offsets, forced)
        right = problem_sizes(counts, 2 * n, n, k, swap if forced is None else forced)
        assert tuple(table.tolist() for table in tables) == right


@pytest.mark.parametrize("device", DEVICES)
@given(
    num_tokens=st.sampled_from([1, 7, 8, 9, 25]),
    num_experts=st.sampled_from([1, 40, 300]),
    blockscale=st.booleans(),
    gated=st.booleans(),
)
def test_mm_data(num_tokens: int, num_experts: int, blockscale: bool, gated: bool, device: str) -> None:
    check_mm_data(num_tokens, num_experts, blockscale, gated, device)


@pytest.mark.parametrize("device", DEVICES)
def test_mm_data_by_several_blocks(device: str) -> None:
    check_mm_data(530, 40, True, True, device)


@pytest.mark.parametrize("device", DEVICES)
@given(
    counts=st.lists(st.integers(0, 50), min_size=0, max_size=150),
    swap=st.booleans(),
    wrong=st.sampled_from([None, -(2**63), 2**63 - 1, 2**40]),
)
def test_sizes_from_offsets(counts: list[int], swap: bool, wrong: int | None, device: str) -> None:
    offsets = [sum(counts[:expert]) for expert in range(len(counts) + 1)]
    if wrong is not None:
        offsets[len(counts) // 2] = wrong
    tables = [torch.zeros(len(counts), 3, dtype=torch.int32, device=device) for _ in range(2)]
    tensor = torch.tensor(offsets, device=device)
    pyops.get_cutlass_moe_mm_problem_sizes_from_expert_offsets(tensor, *tables, 100, 200, swap)
    rows = [min(max(end - first, 0), 2**31 - 1) for first, end in pairwise(offsets)]
    assert tuple(table.tolist() for table in tables) == problem_sizes(rows, 200, 100, 200, swap)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["get_cutlass_batched_moe_mm_data", "get_cutlass_pplx_moe_mm_data"])
@given(
    counts=st.lists(st.integers(-2, 50) | st.sampled_from(HOSTILE), min_size=1, max_size=150),
    padded_m=st.sampled_from([0, 1, 8, 32, 50]),
)
def test_sizes_of_batches(name: str, counts: list[int], padded_m: int, device: str) -> None:
    count = len(counts)
    tensors = [torch.zeros(size, dtype=torch.int32, device=device) for size in ((count,), (count, 3), (count, 3))]
    given_counts = torch.tensor(counts, dtype=torch.int32, device=device)
    getattr(pyops, name)(*tensors, given_counts, count, padded_m, 100, 200)
    offsets, *tables = (x.tolist() for x in tensors)
    rows = [min(max(rows, 0), padded_m) for rows in counts]
    assert offsets == [expert * padded_m for expert in range(count)]
    assert tuple(tables) == problem_sizes(rows, 200, 100, 200, count * padded_m <= 64)
