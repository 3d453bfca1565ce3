"""Cache layouts: slots of tokens under any strides, and what gathers read of them."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops._core.system import device
from pyops.ops.cache import _geometry
from pyops.testing import SCHEDULES, Layout, assert_matches_reference, cpu, same_bits, strategies
from pyops.testing.calls import named, replaced, run
from tests.support import axes
from tests.support.cache import FAMILY, INT32_MAX, KINDS, bytes_of, ints, make, on_host, packed, quantised
from tests.support.calls import DEVICES, example


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("num_heads", "head_size"), [(2, 64), (3, 5), (1, 7)])
def test_flash_layouts(num_heads: int, head_size: int, joint: bool, heads_first: bool, kind: str, where: str) -> None:
    """Heads before slots, both caches in one buffer, strides per cache, a scale per head."""
    num_blocks, block_size, n = 3, 5, 9
    dtype = torch.bfloat16 if kind == "auto" else torch.uint8
    inner = (num_heads, block_size) if heads_first else (block_size, num_heads)

    def caches() -> list[torch.Tensor]:
        if joint:
            made = list(torch.zeros(num_blocks, 2, *inner, head_size, dtype=dtype, device=where).unbind(1))
        else:
            made = [torch.zeros(num_blocks + i, *inner, head_size + i, dtype=dtype, device=where) for i in (0, 1)]
            made = [cache[:num_blocks, ..., :head_size] for cache in made]
        return [cache.transpose(1, 2) if heads_first else cache for cache in made]

    qkv = make(n + 2, 3, num_heads, head_size, dtype=torch.bfloat16, where=where)
    key, value = qkv[:, 1], qkv[:, 2]
    slots = ints([14, 0, 3, -1, 7, 15, 8, 2, 10], where=where)
    scales = [torch.linspace(0.05, 0.4, num_heads, device=where) + i for i in (0, 1)]
    key_cache, value_cache = caches()
    pyops.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kind, *scales)
    for cache, x, scale in ((key_cache, key, scales[0]), (value_cache, value, scales[1])):
        right = torch.zeros(num_blocks * block_size, num_heads, head_size, dtype=dtype, device=where)
        for t, slot in enumerate(slots.tolist()):
            if 0 <= slot < 15:
                for head in range(num_heads):
                    row = x[t, head]
                    right[slot, head] = row if kind == "auto" else quantised(row, float(scale[head]), KINDS["fp8"])
        assert same_bits(cache.reshape(-1, num_heads, head_size), right)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "grouped"), [(8, False), (16, False), (5, False), (16, True), (48, True)])
def test_packed(
    block_size: int,
    grouped: bool,
    dtype: torch.dtype,
    kind: str,
    where: str,
    small: device.Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of slots that begin at any token, consecutive or scattered; more heads than threads.

    Few tokens are written in their order, many by groups of slots, in any order.
    """
    monkeypatch.setattr(packed, "_MAX_UNGROUPED_TOKENS", -1 if grouped else 1000)
    pyops.registry["reshape_and_cache"].forget()
    num_heads, head_size = 3, 112 if grouped else 48
    x = 16 // dtype.itemsize if kind == "auto" else 16
    for n in (3, 70):
        num_blocks = n // block_size + 4
        every = num_blocks * block_size
        runs = [*range(block_size, min(block_size + 37, every - 3)), *range(every - 3, every), -1, every, 0, 2]
        slots = ints((runs + [s for s in range(every) if s not in runs])[:n], where=where)
        slots = slots[torch.randperm(n, generator=torch.Generator().manual_seed(n))] if grouped else slots
        key = make(n, num_heads, head_size, dtype=dtype, where=where)
        value = make(n, 2, num_heads, head_size, dtype=dtype, where=where)[:, 1]
        stored = dtype if kind == "auto" else torch.uint8
        key_cache = torch.zeros(num_blocks, num_heads, head_size // x, block_size, x, dtype=stored, device=where)
        value_cache = torch.zeros(num_blocks, num_heads, head_size, block_size, dtype=stored, device=where)
        if block_size in (5, 48):  # neither block size begins aligned
            key_cache, value_cache = (Layout(1, 0, None).place(cache) for cache in (key_cache, value_cache))
        pyops.reshape_and_cache(key, value, key_cache, value_cache, slots, kind, 0.1, 0.3)
        exists = (slots >= 0) & (slots < every)
        for cache, source, scale in ((key_cache, key, 0.1), (value_cache, value, 0.3)):
            right = torch.zeros(every, num_heads, head_size, dtype=stored, device=where)
            right[slots[exists]] = source[exists] if kind == "auto" else quantised(source[exists], scale, KINDS[kind])
            if cache is key_cache:
                got = cache.permute(0, 3, 1, 2, 4).reshape(every, num_heads, head_size)
            else:
                got = cache.permute(0, 3, 1, 2).reshape(every, num_heads, head_size)
            assert same_bits(got, right)
    pyops.registry["reshape_and_cache"].forget()


@pytest.mark.parametrize("where", DEVICES[1:])
def test_packed_slot_with_several_tokens_keeps_one(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which token wins is not specified, but key and value are of the same one."""
    op = pyops.registry["reshape_and_cache"]
    monkeypatch.setattr(packed, "_MAX_UNGROUPED_TOKENS", -1)
    op.forget()
    n = 300
    key = torch.arange(n, dtype=torch.float32)[:, None, None].expand(n, 1, 16).contiguous().to(where)
    slots = ints([t % 7 * 5 for t in range(n)], where=where)
    key_cache = torch.full((4, 1, 4, 8, 4), -1.0, device=where)
    value_cache = torch.full((4, 1, 16, 8), -1.0, device=where)
    args = [key, key + 0.5, key_cache, value_cache, slots, "auto", torch.ones(1), torch.ones(1)]
    results = run(op, [arg.to(where) if isinstance(arg, torch.Tensor) else arg for arg in args])
    keys = results["key_cache"].permute(0, 3, 1, 2, 4).reshape(32, 16)
    values = results["value_cache"].permute(0, 3, 1, 2).reshape(32, 16)
    for slot in range(32):
        token = float(keys[slot, 0])
        assert (slot % 5 == 0 and token % 7 == slot // 5) if slot <= 30 and slot % 5 == 0 else token == -1.0
        assert (keys[slot] == token).all()
        assert (values[slot] == (token + 0.5 if token >= 0 else -1.0)).all()
    op.forget()


@pytest.mark.parametrize("where", DEVICES)
def test_packed_with_many_heads(where: str) -> None:
    """No chunk of a token is left out, for any number of heads."""
    key = make(2, 70, 128, dtype=torch.float16, where=where)
    key_cache = torch.zeros(2, 70, 16, 4, 8, dtype=torch.float16, device=where)
    value_cache = torch.zeros(2, 70, 128, 4, dtype=torch.float16, device=where)
    pyops.reshape_and_cache(key, key, key_cache, value_cache, ints([6, 1], where=where), "auto", 1.0, 1.0)
    assert same_bits(key_cache[1, :, :, 2].reshape(70, 128), key[0])
    assert same_bits(value_cache[0, :, :, 1], key[1])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_tensors(dtype: torch.dtype, where: str) -> None:
    """Indices of 32 or 64 bits, with gaps between their elements, or expanded."""
    kv_c, k_pe = make(4, 24, where=where), make(4, 8, where=where)
    slots = ints([5, 2, 0, 7], dtype, where)
    cache = torch.zeros(2, 4, 32, device=where)
    pyops.concat_and_cache_mla(kv_c, k_pe, cache, torch.stack((slots, slots * 0 + 99), 1)[:, 0], "auto", 1.0)
    assert torch.equal(cache.flatten(0, 1)[slots.long()], torch.cat((kv_c, k_pe), 1))
    table = ints([1, 0], dtype, where).expand(3, 2)
    lens = torch.stack([ints([0, 3, 3, 8], dtype, where)] * 2, 1)[:, 1]
    starts = ints([2], dtype, where).expand(3)
    owners = ints([0, 0, 0, 2, 2, 2, 2, 2], dtype, where)
    results = [torch.zeros(8, 32, device=where) for _ in range(2)]
    pyops.gather_and_maybe_dequant_cache(cache, results[0], table, lens, owners, 8, "auto", 1.0, starts)
    pyops.cp_gather_cache(cache, results[1], table, lens, 3, starts)
    entries = torch.cat((cache[1], cache[0]))
    for result in results:
        assert torch.equal(result, torch.cat((entries[2:5], entries[2:7])))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("name", FAMILY)
def test_strided_indices(name: str, where: str) -> None:
    """The memory between the elements of an index tensor does not matter."""
    op = pyops.registry[name]
    args = example(op, where, num_tokens=9, **axes.fullest(op))
    indices = {n: x for n, x in named(op, args).items() if x.dtype in (torch.int32, torch.int64)}
    apart = {n: torch.stack((x, torch.full_like(x, -7)), -1)[..., 0] for n, x in indices.items()}
    first, second = run(op, args), run(op, replaced(op, args, **apart))
    for output, value in first.items():
        assert same_bits(value, second[output])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.float32, torch.int32])
def test_gather_of_any_shape_and_dtype(dtype: torch.dtype, where: str) -> None:
    """Slots of any shape and element type are copied bit for bit."""
    for entry in ((7,), (3, 8), (2, 2, 16)):
        raw = bytes_of(3, 4, *entry[:-1], entry[-1] * dtype.itemsize, where=where, high=256)
        cache = raw.view(dtype)
        dst = torch.zeros(6, *entry[:-1], entry[-1] * dtype.itemsize, dtype=torch.uint8, device=where)
        table, lens = ints([[2, 0], [1, 1]], torch.int32, where), ints([0, 5, 6], torch.int32, where)
        pyops.cp_gather_cache(cache, dst.view(dtype), table, lens, 2)
        assert torch.equal(dst, torch.cat((raw[2], raw[0, :1], raw[1, :1])))


@pytest.mark.parametrize("where", DEVICES)
@given(data=st.data())
def test_gather_from_paged_caches(where: str, data: st.DataObject) -> None:
    """Shared blocks, broken tables and slots full of NaN: the result is what the tables select and nothing else."""
    paged = data.draw(strategies.paged_caches("float32", layout="flash", num_heads=1, head_size=12, broken=True))
    cache = paged.key_cache[:, :, 0].to(where)
    offsets = torch.zeros(len(paged.seq_lens) + 1, dtype=torch.int32)
    offsets[1:] = paged.seq_lens.cumsum(0)
    total = int(offsets[-1]) + 2
    owners = torch.repeat_interleave(torch.arange(len(paged.seq_lens)), paged.seq_lens.long())
    owners = torch.cat((owners, ints([len(paged.seq_lens) - 1, -1]))).int().to(where)
    slots = torch.cat([paged.slots(i) for i in range(len(paged.seq_lens))] + [ints([-1, -1])])
    right = torch.full((total, 12), 5.0)
    right[slots >= 0] = paged.key_cache[:, :, 0].flatten(0, 1)[slots[slots >= 0]]
    table, lens = paged.block_tables.to(where), offsets.to(where)
    for op, rest in (
        (pyops.gather_and_maybe_dequant_cache, (owners, total, "auto", 1.0)),
        (pyops.cp_gather_cache, (len(paged.seq_lens),)),
    ):
        dst = torch.full((total, 12), 5.0, device=where)
        op(cache, dst, table, lens, *rest)
        assert not dst.isnan().any()
        assert torch.equal(dst.cpu(), right)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("num_seqs", [31, 32])
def test_gather_of_many_sequences(where: str, num_seqs: int) -> None:
    """The number of sequences that one load of a warp covers, and one more; most are empty, with rows after the
    last."""
    lengths = torch.zeros(num_seqs, dtype=torch.int64)
    lengths[[0, 1, 16, -1]] = ints([3, 1, 6, 5])
    owners = torch.arange(num_seqs).repeat_interleave(lengths)
    lens = torch.cat((ints([0]), lengths.cumsum(0))).int()
    positions = torch.arange(15) - lens[owners]
    tables = torch.randperm(2 * num_seqs).int().view(num_seqs, 2)
    cache, dst = make(2 * num_seqs, 4, 8, where=where), torch.full((18, 8), 5.0, device=where)
    pyops.cp_gather_cache(cache, dst, tables.to(where), lens.to(where), num_seqs)
    assert torch.equal(dst[:15], cache[tables[owners, positions // 4].long(), positions % 4])
    assert (dst[15:] == 5.0).all()


@on_host
@pytest.mark.parametrize(
    "name", ["gather_and_maybe_dequant_cache", "cp_gather_cache", "cp_gather_and_upconvert_fp8_kv_cache"]
)
def test_early_table_lookup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that load table entries before the previous kernel has ended, and blocks that do not; tables of any
    numbers.
    """
    op = pyops.registry[name]
    op.forget()
    monkeypatch.setattr(_geometry, "early_blocks", lambda num_blocks, _: num_blocks // 2 + 1)
    args = example(op, num_tokens=40)
    broken = named(op, args)["block_table"].clone()
    broken[:, 0] = ints([-1, INT32_MAX, 9])
    for table in (named(op, args)["block_table"], broken):
        assert_matches_reference(
            op, *replaced(op, args, block_table=table), schedules=SCHEDULES[:1], warp_sizes=(32, 64)
        )
    op.forget()


@pytest.mark.gpu
def test_indices_written_by_the_kernel_before() -> None:
    """A gather starts while its block table, owners and starts are being written, and reads the new values."""
    num_tokens, size = 16384, 576
    cache = torch.arange(256, device="cuda").half()[:, None, None].expand(256, 64, size).contiguous()
    tables = torch.stack([torch.randperm(256, device="cuda")[None].int() for _ in range(16)])
    lens = ints([0, num_tokens], torch.int32, "cuda")
    owners = torch.zeros(num_tokens, dtype=torch.int32, device="cuda")
    one_row, at_0 = ints([0, 1], torch.int32, "cuda"), ints([[0]], torch.int32, "cuda")
    table = tables[0].clone()
    found = [torch.empty(num_tokens, size, dtype=torch.float16, device="cuda") for _ in tables]
    for new, dst in zip(tables, found, strict=True):
        pyops.cp_gather_cache(new[None], table, at_0, one_row, 1)
        pyops.gather_and_maybe_dequant_cache(cache, dst, table, lens, owners, num_tokens, "auto", 1.0)
    for new, dst in zip(tables, found, strict=True):
        assert torch.equal(dst[:, 0], new[0].repeat_interleave(64).half())


@pytest.mark.parametrize("backend", ["reference", "kernels"])
def test_nvfp4_entries_of_latents(backend: Literal["reference", "kernels"]) -> None:
    """Each value is the product of its nibble and its scale; scales are permuted, and the rotary key has none."""
    magnitudes = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
    generator = torch.Generator().manual_seed(9)
    cache = torch.randint(0, 256, (3, 4, 360), generator=generator, dtype=torch.uint8)[..., :352]
    cache[..., 256:] &= 0x7E  # no NaN
    table, starts = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32), torch.tensor([1, 6], dtype=torch.int32)
    dst = torch.full((9, 576), 7.0, dtype=torch.bfloat16)
    with cpu(backend):
        pyops.cp_gather_and_upconvert_nvfp4_kv_cache(cache, dst, table, starts, 2)
    assert (dst[0] == 7).all()
    small = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    for row in range(1, 9):
        sequence, position = (0, row - 1) if row < 6 else (1, row - 6)
        entry = cache[table[sequence, position // 4], position % 4].tolist()
        for i in range(512):
            code, group = entry[i // 2] >> 4 * (i % 2) & 15, i // 16
            value = magnitudes[code % 8] * (-1 if code & 8 else 1)
            assert dst[row, i].item() == value * small[entry[320 + 8 * (group % 4) + group // 4]]
        assert dst[row, 512:].tolist() == [small[one] for one in entry[256:320]]
