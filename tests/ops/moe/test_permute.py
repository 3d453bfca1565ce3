"""Rows of tokens in the order of experts and back, against Python loops: every row, and ids out of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops.ops._shared import copied_rows
from pyops.testing import same_bits
from tests.ops.moe.test_align import HOSTILE, by_expert, ids_of, local, map_of
from tests.support.calls import DEVICES, refusal

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"]


def rows_of(num_rows: int, hidden_size: int, dtype: str) -> torch.Tensor:
    """Rows of random bytes, so that they contain any element of `dtype`."""
    kind = getattr(torch, dtype)
    random = torch.Generator().manual_seed(num_rows)
    size = (num_rows, hidden_size * kind.itemsize)
    return torch.randint(0, 256, size, generator=random, dtype=torch.uint8).view(kind)


def bits(x: torch.Tensor) -> list[list[int]]:
    found: list[list[int]] = x.contiguous().view(torch.uint8).tolist()
    return found


def check_permute(
    hidden: torch.Tensor, ids: torch.Tensor, num_experts: int, num_local: int, expert_map: torch.Tensor | None
) -> None:
    """The op against a loop; rows of remote experts come last, by expert, and are not copied."""
    num_tokens, topk = ids.shape
    num_rows = num_tokens * topk
    permuted = torch.full((num_rows, hidden.shape[1] * hidden.element_size()), 0x5A, dtype=torch.uint8).to(ids.device)
    offsets = torch.full((num_local + 1,), -7, dtype=torch.int64, device=ids.device)
    inverse = torch.full((num_tokens, topk), -7, dtype=torch.int32, device=ids.device)
    order = torch.full((num_rows,), -7, dtype=torch.int32, device=ids.device)
    indices = torch.arange(num_rows, dtype=torch.int32, device=ids.device).view(num_tokens, topk)
    outputs = permuted.view(hidden.dtype), offsets, inverse, order
    pyops.moe_permute(hidden, ids, indices, expert_map, num_experts, num_local, topk, *outputs)

    experts = [local(expert, num_experts, expert_map) for expert in ids.reshape(-1).tolist()]
    rows = by_expert([expert if expert < num_local else -1 for expert in experts], num_local)
    here = [row for own in rows for row in own]
    known = num_experts if expert_map is None else min(num_experts, len(expert_map))
    numbers = [number if 0 <= number < known else known for number in ids.reshape(-1).tolist()]
    others = set(range(num_rows)) - {*here}
    right = here + [
        row for number in range(known + 1) for row in range(num_rows) if row in others and numbers[row] == number
    ]
    assert offsets.tolist() == [sum(map(len, rows[:expert])) for expert in range(num_local + 1)]
    assert [right[slot] for slot in inverse.reshape(-1).tolist()] == list(range(num_rows))
    assert order.tolist() == here + [num_rows] * (num_rows - len(here))
    alone = [torch.full_like(one, -7) for one in (offsets, inverse, order)]
    pyops.moe_prepare_scatter(ids, indices, expert_map, num_experts, num_local, *alone)
    assert all(same_bits(one, other) for one, other in zip(alone, (offsets, inverse, order), strict=True))
    tokens = bits(hidden)
    assert permuted.tolist()[: len(here)] == [tokens[row // topk] for row in here]
    assert (permuted[len(here) :] == 0x5A).all()


@pytest.mark.parametrize("device", DEVICES)
@given(
    num_tokens=st.integers(1, 40),
    topk=st.sampled_from([1, 2, 8]),
    num_experts=st.sampled_from([1, 16, 257]),
    hidden_size=st.sampled_from([1, 7, 16, 64, 200]),
    dtype=st.sampled_from(DTYPES),
    has_map=st.booleans(),
    is_64_bit=st.booleans(),
)
def test_permute(
    num_tokens: int,
    topk: int,
    num_experts: int,
    hidden_size: int,
    dtype: str,
    has_map: bool,
    is_64_bit: bool,
    device: str,
) -> None:
    hidden = rows_of(num_tokens, hidden_size, dtype).to(device)
    ids = ids_of(num_tokens, topk, num_experts, 8).to(device, torch.int64 if is_64_bit else torch.int32)
    expert_map = map_of(num_experts, 8).to(device) if has_map else None
    check_permute(hidden, ids, num_experts, max(1, num_experts // 2) if has_map else num_experts, expert_map)


@pytest.mark.parametrize("device", DEVICES)
def test_permute_by_several_blocks(device: str) -> None:
    ids = ids_of(700, 8, 128, 2).to(device)
    check_permute(rows_of(700, 2, "bfloat16").to(device), ids, 128, 128, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_local", "map_size"), [(5, 20), (20, 12), (3, None), (30, None)])
def test_permute_on_one_of_several_devices(num_local: int, map_size: int | None, device: str) -> None:
    """Few local experts or many, a map shorter than the number of experts, and no map."""
    expert_map = None
    if map_size is not None:
        expert_map = torch.tensor([n if n < num_local else -1 for n in range(-2, map_size - 2)], dtype=torch.int32)
        expert_map = expert_map.clamp(min=-1).to(device)
    check_permute(rows_of(31, 8, "bfloat16").to(device), ids_of(31, 4, 20, 5).to(device), 20, num_local, expert_map)


@pytest.mark.parametrize("device", DEVICES)
def test_permute_strided_rows(device: str) -> None:
    """Rows of any stride."""
    hidden = rows_of(5, 24, "float16").to(device)[:, 3:19]
    check_permute(hidden, ids_of(5, 4, 16, 2).to(device), 16, 16, None)


@pytest.mark.parametrize("device", DEVICES)
@given(
    num_tokens=st.integers(1, 12),
    topk=st.sampled_from([1, 3, 8, 9, 33]),
    hidden_size=st.sampled_from([1, 8, 40]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    slots=st.integers(1, 50),
    valid=st.none() | st.integers(-2, 60) | st.sampled_from([2**40, -(2**40)]),
)
def test_unpermute(
    num_tokens: int, topk: int, hidden_size: int, dtype: str, slots: int, valid: int | None, device: str
) -> None:
    """Against a sum in float64; slots out of range are skipped, whatever they hold."""
    random = torch.Generator().manual_seed(topk)
    rows = torch.randn(slots, hidden_size, generator=random).to(getattr(torch, dtype))
    limit = slots if valid is None else min(slots, max(valid, 0))
    rows[limit:] = float("nan")
    inverse = torch.randint(-2, slots + 3, (num_tokens, topk), generator=random, dtype=torch.int32)
    inverse[0, 0] = HOSTILE[num_tokens % 4]
    weights = torch.randn(num_tokens, topk, generator=random)
    weights = weights.where((inverse >= 0) & (inverse < limit), float("inf"))
    offsets = None if valid is None else torch.tensor([0, valid], dtype=torch.int64, device=device)
    given_rows, given_weights, given_inverse = (x.to(device) for x in (rows, weights, inverse))
    result = pyops.moe_unpermute.new(given_rows, given_weights, given_inverse, offsets, topk).cpu()
    for token in range(num_tokens):
        right, magnitude = torch.zeros(hidden_size).double(), torch.zeros(hidden_size).double()
        for j in range(topk):
            slot = int(inverse[token, j])
            if 0 <= slot < limit:
                product = rows[slot].double() * weights[token, j].double()
                right, magnitude = right + product, magnitude + product.abs()
        # Each of 2 * topk roundings in float32, and the one to the element type.
        bound = 2 * topk * magnitude * 2.0**-24 + right.abs() * torch.finfo(rows.dtype).eps + 1e-7
        assert ((result[token].double() - right).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
def test_round_trip(device: str) -> None:
    """With weights that add up to 1 exactly in float32, every token comes back."""
    num_tokens, topk = 33, 4
    hidden = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    ids = torch.randint(0, 16, (num_tokens, topk), dtype=torch.int32).to(device)
    permuted = torch.empty(num_tokens * topk, 64, dtype=torch.bfloat16, device=device)
    inverse = torch.empty(num_tokens, topk, dtype=torch.int32, device=device)
    indices = torch.arange(num_tokens * topk, dtype=torch.int32, device=device).view(num_tokens, topk)
    offsets, order = torch.empty(17, dtype=torch.int64).to(device), torch.empty_like(inverse).view(-1)
    pyops.moe_permute(hidden, ids, indices, None, 16, 16, topk, permuted, offsets, inverse, order)
    assert torch.equal(permuted, hidden[order.long() // topk])
    weights = torch.full((num_tokens, topk), 0.25, device=device)
    assert torch.equal(pyops.moe_unpermute.new(permuted, weights, inverse, offsets, topk), hidden)
    assert pyops.moe_permute_unpermute_supported()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("num_tokens", "topk", "hidden_size"), [(1, 6, 511), (33, 2, 128), (5, 9, 1024), (3, 32, 24)])
def test_sum(num_tokens: int, topk: int, hidden_size: int, dtype: str, device: str) -> None:
    """Against a sum in float64: rounded once, also for two to four choices."""
    random = torch.Generator().manual_seed(topk)
    x = torch.randn(num_tokens, topk, hidden_size, generator=random).to(getattr(torch, dtype))
    result = pyops.moe_sum.new(x.to(device)).cpu().double()
    right, magnitude = x.double().sum(1), x.double().abs().sum(1)
    half = torch.finfo(x.dtype).eps / 2
    assert ((result - right).abs() <= right.abs() * half + topk * magnitude * 2.0**-24).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("topk", [1, 6, 8, 11])
def test_sum_without_missing_experts(topk: int, device: str) -> None:
    """Whatever a choice without an expert on this device has computed, its bits included, it adds nothing."""
    random = torch.Generator().manual_seed(topk)
    x = torch.randint(-8, 9, (40, topk, 24), generator=random).bfloat16()  # sums are exact
    ids = torch.randint(-2, 6, (40, topk), generator=random, dtype=torch.int32)
    exists = (ids >= 0) & (ids < 4)
    right = x.where(exists[:, :, None], 0).float().sum(1)
    x[~exists] = torch.tensor(float("nan"))
    result = pyops.moe_sum_experts.new(x.to(device), ids.to(device), 4).cpu()
    assert torch.equal(result.float(), right)


@pytest.mark.parametrize("device", DEVICES)
@given(
    num_sources=st.integers(0, 20),
    num_rows=st.integers(0, 40),
    hidden_size=st.sampled_from([1, 7, 24, 128]),
    dtype=st.sampled_from([*DTYPES, "int32", "int64"]),
    gap=st.sampled_from([0, 3]),
)
def test_shuffle(num_sources: int, num_rows: int, hidden_size: int, dtype: str, gap: int, device: str) -> None:
    source = rows_of(num_sources, hidden_size + gap, dtype).to(device)[:, gap:]
    wanted = torch.randint(-1, num_sources + 1, (num_rows,), generator=torch.Generator().manual_seed(3)).int()
    if num_rows:
        wanted[0] = HOSTILE[num_rows % 4]
    result = bits(pyops.shuffle_rows.new(source, wanted.to(device)).cpu())
    rows = bits(source.cpu())
    width = hidden_size * source.element_size()
    assert result == [rows[row] if 0 <= row < num_sources else [0] * width for row in wanted.tolist()]


@pytest.mark.parametrize("device", DEVICES)
def test_shuffle_reads_one_map_entry_per_row(device: str) -> None:
    source, wanted = (
        torch.arange(40, dtype=torch.int32, device=device).view(5, 8),
        torch.tensor([4, 0, 3, 1], dtype=torch.int32),
    )
    out = torch.empty(3, 8, dtype=torch.int32, device=device)
    pyops.shuffle_rows(source, wanted.to(device), out)
    assert torch.equal(out, source[[4, 0, 3]])


@pytest.mark.parametrize("device", DEVICES)
def test_shuffle_with_several_rows_per_thread(
    device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Also where the last thread has fewer rows than the others."""
    op = pyops.registry["shuffle_rows"]
    request.addfinalizer(op.forget)
    op.forget()
    monkeypatch.setattr(copied_rows, "_BATCH_THREADS", 0)
    for num_rows in (1, 3, 8, 13):
        source = torch.arange(5 * 24, dtype=torch.int32, device=device).view(5, 24)
        wanted = torch.arange(num_rows, dtype=torch.int32, device=device) * 3 % 7 - 1
        memory = torch.full((num_rows + 4, 24), -9, dtype=torch.int32, device=device)
        pyops.shuffle_rows(source, wanted, memory[:num_rows])
        right = [source[i].tolist() if 0 <= i < 5 else [0] * 24 for i in wanted.tolist()]
        assert memory.tolist() == right + [[-9] * 24] * 4


def test_bad_calls_are_refused() -> None:
    op = pyops.registry["moe_permute"]
    sizes: list[Any] = [(3, 8), (3, 2), (3, 2), None, 4, 4, 2, (6, 8), (5,), (3, 2), (6,)]
    kinds = {1: torch.int32, 2: torch.int32, 8: torch.int64, 9: torch.int32, 10: torch.int32}
    args = [
        torch.zeros(size, dtype=kinds.get(i, torch.float16)) if isinstance(size, tuple) else size
        for i, size in enumerate(sizes)
    ]
    op(*args)
    for at, wrong, argument in (
        (6, 3, "topk_ids"),
        (4, 0, "n_expert"),
        (5, 3, "expert_first_token_offset"),
        (7, torch.zeros(7, 8, dtype=torch.float16), "permuted_input"),
        (7, torch.zeros(6, 16, dtype=torch.float16)[:, ::2], "permuted_input"),
        (9, torch.zeros(3, 3, dtype=torch.int32), "inv_permuted_idx"),
    ):
        assert refusal(op, [*args[:at], wrong, *args[at + 1 :]]).argument == argument
    empty = torch.zeros(0, 8), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32), None, 2, torch.zeros(3, 8)
    assert refusal(pyops.registry["moe_unpermute"], list(empty)).argument == "permuted_hidden_states"
