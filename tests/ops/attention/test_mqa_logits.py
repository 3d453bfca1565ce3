"""Logits of the indexer: exact for small integers, hostile bounds and block tables, and the top-k that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyops
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.testing import assert_matches_reference, same_bits
from tests.support.calls import DEVICES

ROWS, PAGED = pyops.registry["fp8_mqa_logits"], pyops.registry["fp8_paged_mqa_logits"]
FP8 = torch.float8_e4m3fn
UNTOUCHED = 7.5


def _integers(generator: torch.Generator, *shape: int, largest: int = 4) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


def _right(q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The logits of every row with every key, in float64. Additions of small integers are exact, in float32 too."""
    products = torch.einsum("mhd,nd->mhn", q.double(), keys.double()).relu()
    return torch.einsum("mh,mhn->mn", weights.double(), products) * scales.double()


def _rows(num_rows: int, num_keys: int, num_heads: int, head_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-3, 4, (num_keys,), generator=generator)
    return {
        "q": _integers(generator, num_rows, num_heads, head_size).to(FP8),
        "k": _integers(generator, num_keys, head_size).to(FP8),
        "k_scales": torch.ldexp(torch.ones(num_keys), exponents),
        "weights": _integers(generator, num_rows, num_heads),
    }


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10, deadline=None)
@given(data=st.data(), sizes=st.sampled_from([(64, 128), (33, 64), (3, 32)]), form=st.integers(0, 2))
def test_logits_of_prompts(device: str, data: st.DataObject, sizes: tuple[int, int], form: int) -> None:
    """Bounds anywhere; what has no logit is -inf, or untouched, or, compressed, after the logits of its row."""
    num_rows = data.draw(st.sampled_from([1, 2, 70]))
    num_keys = data.draw(st.sampled_from([1, 31, 256, 600]))
    tensors = _rows(num_rows, num_keys, *sizes, seed=data.draw(st.integers(0, 9)))
    bound = st.integers(-2, num_keys + 2)
    bounds = [torch.tensor(data.draw(st.lists(bound, min_size=num_rows, max_size=num_rows))).int() for _ in "se"]
    clean, compressed = form == 0, form == 2
    columns = max(1, num_keys - 20) if compressed else num_keys
    logits = torch.full((num_rows, columns + 3), UNTOUCHED)
    right = logits.double().clone()
    every = _right(*(tensors[name] for name in ("q", "k", "k_scales", "weights")))
    for m in range(num_rows):
        begin, end = (max(0, min(int(one[m]), num_keys)) for one in bounds)
        shift = begin if compressed else 0
        end = min(end, shift + columns)
        if clean:
            right[m, :columns] = -torch.inf
        if begin < end:
            right[m, begin - shift : end - shift] = every[m, begin:end]
    given_ = {name: x.to(device) for name, x in tensors.items()}
    logits = logits.to(device)
    ROWS(logits[:, :columns], *given_.values(), *(x.to(device) for x in bounds), clean, compressed)
    assert torch.equal(logits.double().cpu(), right)


def _paged(
    num_seqs: int, next_n: int, num_heads: int, head_size: int, block_size: int, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A cache with gaps between its blocks, and with NaN in them; block numbers out of range are among the table's."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks, max_blocks = 6, 5
    keys = _integers(generator, num_blocks, block_size, head_size).to(FP8).view(torch.uint8).flatten(1)
    exponents = torch.randint(-3, 4, (num_blocks, block_size), generator=generator)
    scales = torch.ldexp(torch.ones(num_blocks, block_size), exponents).view(torch.uint8)
    whole = torch.full((num_blocks, block_size * (head_size + 4) + 32), 255, dtype=torch.uint8)
    whole[:, :-32] = torch.cat((keys, scales), 1)
    strides = (whole.stride(0), head_size + 4, 1)
    return {
        "q": _integers(generator, num_seqs, next_n, num_heads, head_size).to(FP8),
        "kv_cache": whole.as_strided((num_blocks, block_size, head_size + 4), strides),
        "weights": _integers(generator, num_seqs * next_n, num_heads),
        "block_tables": torch.randint(-1, num_blocks + 1, (num_seqs, max_blocks), generator=generator).int(),
    }


def _right_of_pages(call: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of every row with every position; -inf where a block does not exist."""
    num_seqs, next_n, _, head_size = call["q"].shape
    num_blocks, block_size, _ = call["kv_cache"].shape
    found = []
    for s in range(num_seqs):
        of_blocks = []
        for block in call["block_tables"][s].tolist():
            if not 0 <= block < num_blocks:
                of_blocks.append(torch.full((next_n, block_size), -torch.inf, dtype=torch.float64))
                continue
            raw = torch.as_strided(
                call["kv_cache"], (block_size * (head_size + 4),), (1,), block * call["kv_cache"].stride(0)
            )
            keys = raw[: block_size * head_size].view(FP8).view(block_size, head_size)
            scales = raw[block_size * head_size :].clone().view(torch.float32)
            rows = slice(s * next_n, (s + 1) * next_n)
            of_blocks.append(_right(call["q"][s], keys, scales, call["weights"][rows]))
        found.append(torch.cat(of_blocks, 1))
    return torch.cat(found)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10, deadline=None)
@given(
    data=st.data(),
    sizes=st.sampled_from([(64, 128, 64), (20, 64, 5), (3, 24, 16)]),
    clean=st.booleans(),
    per_row=st.booleans(),
)
def test_logits_of_pages(
    device: str, data: st.DataObject, sizes: tuple[int, int, int], clean: bool, per_row: bool
) -> None:
    num_seqs, next_n = data.draw(st.sampled_from([(1, 1), (3, 1), (2, 3)]))
    call = _paged(num_seqs, next_n, *sizes, seed=data.draw(st.integers(0, 9)))
    capacity = 5 * sizes[2]
    columns = data.draw(st.sampled_from([capacity, capacity - 3, capacity + 9]))
    shape = (num_seqs, next_n) if per_row else (num_seqs,)
    count = num_seqs * (next_n if per_row else 1)
    lengths = data.draw(st.lists(st.integers(-3, capacity + 12), min_size=count, max_size=count))
    context_lens = torch.tensor(lengths, dtype=torch.int32).view(shape)
    logits = torch.full((num_seqs * next_n, columns + 2), UNTOUCHED)
    right = logits.double().clone()
    if clean:
        right[:, :columns] = -torch.inf
    every = _right_of_pages(call)
    for row in range(num_seqs * next_n):
        s, j = divmod(row, next_n)
        length = int(context_lens[s, j]) if per_row else int(context_lens[s]) - (next_n - 1 - j)
        end = max(0, min(length, capacity, columns))
        right[row, :end] = every[row, :end]
    logits, given_ = logits.to(device), {name: x.to(device) for name, x in call.items() if name != "kv_cache"}
    cache = call["kv_cache"]
    base = torch.as_strided(cache, (len(cache), cache.stride(0)), (cache.stride(0), 1)).to(device)
    given_["kv_cache"] = base.as_strided(cache.shape, cache.stride())
    order = (given_[name] for name in ("q", "kv_cache", "weights"))
    PAGED(logits[:, :columns], *order, context_lens.to(device), given_["block_tables"], clean)
    assert torch.equal(logits.double().cpu(), right)


@pytest.mark.parametrize("head_size", [128, 40])
def test_hostile_indices(head_size: int) -> None:
    """Bounds, lengths and block numbers at the ends of their types, under every schedule."""
    far = torch.tensor([2**31 - 1, -(2**31), 5, 0], dtype=torch.int32)
    tensors = _rows(4, 40, 4, head_size)
    logits = torch.full((4, 40), UNTOUCHED)
    assert_matches_reference(ROWS, logits, *tensors.values(), far.flip(0), far, True, False, warp_sizes=(32, 64))
    assert_matches_reference(ROWS, logits[:, :9], *tensors.values(), far.flip(0), far, False, True)
    call = _paged(4, 2, 4, head_size, 8)
    call["block_tables"] = torch.tensor([[2**62, 1, -(2**62), 3, 2**31]] * 4)
    lengths = torch.tensor([2**63 - 1, -(2**63), 2**32 + 3, 39])
    order = [call[name] for name in ("q", "kv_cache", "weights")]
    logits = torch.full((8, 50), UNTOUCHED)
    assert_matches_reference(PAGED, logits, *order, lengths, call["block_tables"], True, warp_sizes=(32, 64))


@pytest.mark.parametrize(("block_size", "next_n", "num_heads"), [(256, 2, 20), (200, 1, 20), (64, 5, 40), (64, 8, 40)])
def test_blocks_with_many_tiles(block_size: int, next_n: int, num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and queries go around their stages, in boxes of 64 or 8 keys; weights stay in registers, or do not."""
    monkeypatch.setitem(devices._HOST, 32, replace(devices.host(), num_sms=1))
    lengths = torch.tensor([5 * block_size, 129, 1, 70])
    call = _paged(len(lengths), next_n, num_heads, 64, block_size)
    call["block_tables"].clamp_(min=0)[0, 2] = 6
    order = [call[name] for name in ("q", "kv_cache", "weights")]
    logits = torch.full((len(lengths) * next_n, 5 * block_size), UNTOUCHED)
    assert_matches_reference(PAGED, logits, *order, lengths, call["block_tables"], False)


def test_groups_with_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block goes through the tiles of groups of eight rows, the last one with fewer rows, some without a key."""
    monkeypatch.setitem(devices._HOST, 32, replace(devices.host(), num_sms=1))
    tensors = _rows(19, 700, 20, 64)
    begin = torch.tensor([9, 0, 33] + [700] * 13 + [17, 450, 0]).int()
    end = torch.tensor([470, 16, 401] + [700] * 13 + [499, 455, 1]).int()
    assert_matches_reference(ROWS, torch.full((19, 700), UNTOUCHED), *tensors.values(), begin, end, False, False)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "gfx942"])
def test_kernel_of_a_device(arch: str) -> None:
    """Tensor cores for head sizes of 64 and 128, and keys that are aligned; any GPU serves every call."""
    make = ArgMaker(devices.model(arch))
    for head_size, kernel in ((128, "mqa_logits"), (64, "mqa_logits"), (40, "mqa_logits_simt")):
        for example in (ROWS.example, PAGED.example):
            assert example is not None
            op = ROWS if example is ROWS.example else PAGED
            (launch,) = op.launches(*example(make, head_size=head_size))
            right = "mqa_logits_simt" if arch == "gfx942" else kernel
            if (arch, kernel) == ("sm_90", "mqa_logits"):
                right = "mqa_logits_sm90"
            assert launch.specialisation.kernel.file == f"attention/{right}.cu"
    if arch != "sm_90":
        return
    # {(sequences, rows of a sequence, pages of 64 tokens): blocks}: one per SM, and no more than tiles.
    grids = {(64, 1, 512): 132, (16, 3, 128): 132, (2, 1, 4): 2, (8, 4, 512): 132}
    for (num_seqs, next_n, pages), blocks in grids.items():
        call = PAGED.example(make, num_tokens=num_seqs * next_n, next_n=next_n, max_blocks=pages)  # type: ignore[misc]
        (launch,) = PAGED.launches(*call)
        assert launch.grid[0] == blocks
    # {tokens of a prompt: (rows of a group, tiles in flight)}
    for num_tokens, sizes in {1: (1, 4), 3: (4, 3), 1000: (4, 3)}.items():
        (launch,) = ROWS.launches(*ROWS.example(make, num_tokens=num_tokens))  # type: ignore[misc]
        constants = launch.specialisation.constants
        assert (constants["ROWS"], constants["STAGES"]) == sizes
    (launch,) = PAGED.launches(*PAGED.example(make, num_tokens=18, next_n=9))  # type: ignore[misc]
    assert launch.specialisation.kernel.file == "attention/mqa_logits.cu"


@pytest.mark.parametrize("device", DEVICES)
def test_indexer_of_a_decode_step(device: str) -> None:
    """Keys written by indexer_k_quant_and_cache have the logits of gathered ones, and the same tokens are chosen."""
    generator = torch.Generator().manual_seed(3)
    num_keys, head_size, block_size, top_k = 90, 128, 64, 16
    cache = torch.zeros(4, block_size, head_size + 4, dtype=torch.uint8, device=device)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    slots = torch.cat([torch.arange(64) + 128, torch.arange(26)]).to(device)
    k = torch.randn(num_keys, head_size, generator=generator).bfloat16().to(device)
    pyops.indexer_k_quant_and_cache(k, cache, slots, head_size, "ue8m0")
    q = torch.randn(1, 1, 64, head_size, generator=generator).to(FP8).to(device)
    weights = torch.randn(1, 64, generator=generator).to(device)
    lengths = torch.tensor([num_keys], dtype=torch.int32, device=device)
    paged = torch.full((1, 128), UNTOUCHED, device=device)
    pyops.fp8_paged_mqa_logits(paged, q, cache, weights, lengths, table, False)
    quants = torch.zeros(num_keys, head_size, dtype=torch.uint8, device=device)
    scales = torch.zeros(num_keys, 4, dtype=torch.uint8, device=device)
    bounds = torch.tensor([0, num_keys], dtype=torch.int32, device=device)
    pyops.cp_gather_indexer_k_quant_cache(cache, quants, scales, table, bounds)
    rows = torch.full((1, num_keys), UNTOUCHED, device=device)
    gathered = quants, scales.view(torch.float32)[:, 0]
    pyops.fp8_mqa_logits(rows, q[0], *gathered, weights, bounds[:1], bounds[1:], False, False)
    assert same_bits(paged[:, :num_keys].contiguous(), rows)
    chosen = pyops.top_k_per_row_decode.new(paged, 1, lengths, 1, 128, 1, top_k)
    assert set(chosen[0].tolist()) == set(rows[0].topk(top_k)[1].tolist())


WRONG: list[tuple[str, Any]] = [
    ("logits", torch.zeros(4, 39)),
    ("logits", torch.zeros(4, 40, dtype=torch.float16)),
    ("logits", torch.zeros(40, 4).T),
    ("q", torch.zeros(4, 4, 128)),
    ("k", torch.zeros(40, 64, dtype=FP8)),
    ("k_scales", torch.zeros(41)),
    ("weights", torch.zeros(4, 3)),
    ("cu_seqlen_ks", torch.zeros(4, dtype=torch.int64)),
    ("cu_seqlen_ke", torch.zeros(5, dtype=torch.int32)),
    ("compressed", True),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_refused(name: str, value: Any) -> None:
    bounds = torch.zeros(4, dtype=torch.int32)
    call: dict[str, Any] = {"logits": torch.full((4, 40), UNTOUCHED), **_rows(4, 40, 4, 128)}
    call |= {"cu_seqlen_ks": bounds, "cu_seqlen_ke": bounds, "clean_logits": True, "compressed": False}
    with pytest.raises(pyops.OpError) as caught:
        ROWS.wrapper(**call | {name: value})
    assert caught.value.argument == {"compressed": "clean_logits"}.get(name, name)
    assert (call["logits"] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(3, 40)),
        ("q", torch.zeros(2, 2, 4, 128)),
        ("kv_cache", torch.zeros(6, 8, 131, dtype=torch.uint8)),
        ("kv_cache", torch.zeros(6, 0, 132, dtype=torch.uint8)),
        ("context_lens", torch.zeros(3, dtype=torch.int32)),
        ("context_lens", torch.zeros(2, 3, dtype=torch.int32)),
        ("block_tables", torch.zeros(3, 5, dtype=torch.int32)),
    ],
)
def test_paged_refused(name: str, value: torch.Tensor) -> None:
    call: dict[str, Any] = {"logits": torch.full((4, 40), UNTOUCHED), **_paged(2, 2, 4, 128, 8)}
    call |= {"context_lens": torch.zeros(2, dtype=torch.int32), "clean_logits": False}
    with pytest.raises(pyops.OpError) as caught:
        PAGED.wrapper(**call | {name: value})
    assert caught.value.argument == name
    assert (call["logits"] == UNTOUCHED).all()
