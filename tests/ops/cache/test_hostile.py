"""Indices out of range, and the lengths, scales and groups that cache ops refuse."""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pyops
from pyops.testing import same_bits
from pyops.testing.calls import assert_results, clones, expected, named, replaced, run
from tests.support import axes
from tests.support.cache import FAMILY, HOSTILE, bytes_of, ints, make
from tests.support.calls import DEVICES, example, refusal

pytestmark = pytest.mark.rotates

WITH_SLOTS = [name for name in FAMILY if "slot_mapping" in {p.name for p in pyops.registry[name].tensors}]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("name", WITH_SLOTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hostile_slots(name: str, dtype: torch.dtype, where: str) -> None:
    """A slot out of range is not written, whatever its number; all other slots are."""
    _check_hostile_slots(name, dtype, where, 20)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("where", DEVICES[1:2])
@pytest.mark.parametrize("name", WITH_SLOTS)
def test_hostile_slots_among_many_tokens(name: str, where: str) -> None:
    """Enough tokens to fill a device, where `reshape_and_cache` looks up the tokens of groups of slots."""
    _check_hostile_slots(name, torch.int64, where, 40)


def _check_hostile_slots(name: str, dtype: torch.dtype, where: str, num_tokens: int) -> None:
    op = pyops.registry[name]
    assert op.example is not None
    # With a cache; and without norms where that is an option, because sums of squares depend on their order.
    axes_of = inspect.signature(op.example).parameters
    with_cache = {name: value for name, value in {"insert": True, "norms": False}.items() if name in axes_of}
    for case in axes.sample(op, max_cases=2):
        args = example(op, where, num_tokens=num_tokens, **case | with_cache)
        slots = named(op, args)["slot_mapping"]
        top = torch.iinfo(dtype).max
        cache = next(value for key, value in named(op, args).items() if key in ("key_cache", "kv_cache", "k_cache"))
        own = ("block_size", "cache_block_size")
        sizes = [size for p, size in zip(op.parameters, args, strict=True) if p.name in own]
        pages = {"reshape_and_cache": 16, "reshape_and_cache_flash": 16, "fused_qknorm_rope_cache": cache.shape[1]}
        pages["fused_qk_rope_cache"] = cache.shape[1]
        end = len(cache) * (block_size := sizes[0] if sizes else pages.get(name, 64))
        hostile = [value for value in (*HOSTILE, end, end + block_size, end + 65) if -top - 1 <= value <= top]
        slots = slots.to(dtype)
        slots[1 : 1 + len(hostile)] = ints(hostile, dtype, where)
        args = replaced(op, args, slot_mapping=slots)
        if (of_index := named(op, args).get("index_slot_mapping")) is not None:
            args = replaced(op, args, index_slot_mapping=of_index.to(dtype))
        assert_results(op, expected(op, args), run(op, args))
        slots.fill_(-1)
        for tensor, value in run(op, args).items():
            if tensor.endswith("_cache") and tensor != "index_cache":
                assert same_bits(value, named(op, args)[tensor]), f"{tensor} {case}"


def _gathers(where: str) -> list[Any]:
    cases = []
    for name in FAMILY:
        op = pyops.registry[name]
        if "block_table" in {p.name for p in op.tensors}:
            # Not a multiple of the tokens of a block of threads.
            cases.append((op, example(op, where, num_tokens=21, **axes.fullest(op))))
    return cases


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("wide", [False, True])
def test_hostile_tables(wide: bool, where: str) -> None:
    """No block, length, start or owner leads outside; a row without a table entry is left alone."""
    dtype = torch.int64 if wide else torch.int32
    top = torch.iinfo(dtype).max
    hostile = [value for value in HOSTILE if -top - 1 <= value <= top]
    for op, args in _gathers(where):
        names = {p.name: i for i, p in enumerate(op.parameters)}
        tables = [n for n, x in named(op, args).items() if x.dtype == torch.int32]
        num_blocks = next(len(x) for n, x in named(op, args).items() if n.endswith("_cache"))
        wide_args = [arg.to(dtype) if n in tables else arg for n, arg in zip(names, args, strict=True)]
        for table in tables:
            rows = wide_args[names[table]].shape[0]
            for at in {*range(min(3, rows)), rows - 1}:
                for value in (*hostile, 1, 30, num_blocks):
                    broken = clones(wide_args)
                    broken[names[table]][at] = value
                    # The reference is thousands of small calls, which are fast only on a CPU.
                    right = expected(op, [x.cpu() if isinstance(x, torch.Tensor) else x for x in broken])
                    results = run(op, broken)
                    for tensor in right:
                        assert same_bits(right[tensor], results[tensor].cpu()), f"{op.name} {table}[{at}] = {value}"


@pytest.mark.parametrize("where", DEVICES)
def test_hostile_positions_and_pairs(where: str) -> None:
    op = pyops.registry["concat_and_cache_mla_rope_fused"]
    args = example(op, where, num_tokens=12, is_neox=True)
    args[0][: len(HOSTILE)] = ints(HOSTILE, where=where)
    args[0][9] = 4096
    right, results = expected(op, args), run(op, args)
    for name, value in right.items():
        assert same_bits(value, results[name]), name
    assert same_bits(results["q_pe"][:8], args[1][:8])
    op = pyops.registry["copy_cache_blocks"]
    args = example(op, where, num_tokens=20)
    args[2][1:9, 0], args[2][10:18, 1] = ints(HOSTILE, where=where), ints(HOSTILE, where=where)
    args[2][18, 0] = args[2][19, 1] = len(args[0])
    right, results = expected(op, args), run(op, args)
    assert same_bits(right["key_cache"], results["key_cache"])


@pytest.fixture
def _checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PYOPS_CHECK is on."""
    with monkeypatch.context() as patch:
        patch.setenv("PYOPS_CHECK", "1")
        for name in FAMILY:
            pyops.registry[name].forget()
        yield
    for name in FAMILY:
        pyops.registry[name].forget()


@pytest.mark.usefixtures("_checking")
def test_hostile_lengths_read_nothing_beyond() -> None:
    """PYOPS_CHECK names values out of range, but not negative slots nor table entries that no sequence uses."""
    op = pyops.registry["reshape_and_cache_flash"]
    args = example(op, num_tokens=5)
    args[4][1] = -1
    op(*args)
    args[4][3] = 10**6
    with pytest.raises(pyops.OpError, match=r"slot_mapping: 1 of 5 indices .* \(3,\): 1000000"):
        op(*args)
    for op, args in _gathers("cpu"):
        names = [p.name for p in op.parameters]
        table = args[names.index("block_table")]
        starts = named(op, args).get("seq_starts")
        first = 0 if starts is None else int(starts[2]) // 64
        table[:, -1] = 10**6
        table[2, :first] = -1
        op(*args)
        table[2, first] = -1
        with pytest.raises(pyops.OpError, match=rf"block_table: 1 of \d+ indices .* \(2, {first}\): -1$"):
            op(*args)


@pytest.mark.usefixtures("_checking")
def test_lengths_and_starts_out_of_range_are_named() -> None:
    """A table of two blocks of four slots, and eight rows."""
    cache, table = torch.zeros(3, 4, 8), ints([[0, 1], [1, -1]], torch.int32)
    entries, codes = torch.zeros(3, 4, 656, dtype=torch.uint8), torch.zeros(8, 576, dtype=torch.bfloat16)

    def gather(ends: list[int], starts: list[int]) -> None:
        pyops.cp_gather_cache(cache, torch.zeros(8, 8), table, ints(ends, torch.int32), 2, ints(starts, torch.int32))

    def upconvert(lengths: list[int] | None, rows: list[int], first: tuple[int, int] = (0, 0)) -> None:
        upconvert_ = pyops.cp_gather_and_upconvert_fp8_kv_cache
        sizes = None if lengths is None else ints(lengths, torch.int32)
        upconvert_(entries, codes, table, sizes, ints(rows, torch.int32), 2, ints(list(first), torch.int32))

    gather([0, 8, 8], [0, 4])  # sequence 1 has no rows, so its block does not matter
    gather([0, 4, 8], [4, 0])
    upconvert([8, 0], [0, 99])
    upconvert(None, [0, 4])
    upconvert([4, 4], [0, 4], (4, 0))
    for call, values, message in (
        (gather, ([0, 4, 8], [-3, 0]), r"seq_starts: 1 of 2 .* \(0,\): -3"),
        (gather, ([0, 4, 8], [9, 0]), r"cu_seq_lens: 1 of 3 .* \(1,\): 4; seq_starts: 1 of 2 .* \(0,\): 9"),
        (gather, ([0, 5, 8], [4, 0]), r"cu_seq_lens: 1 of 3 .* \(1,\): 5"),
        (gather, ([-5, 2, 4], [0, 0]), r"cu_seq_lens: 1 of 3 .* \(0,\): -5"),
        (gather, ([0, 4, 2], [0, 0]), r"cu_seq_lens: 1 of 3 .* \(2,\): 2"),
        (gather, ([0, 8, 9], [0, 0]), r"cu_seq_lens: 1 of 3 .* \(2,\): 9"),
        (upconvert, ([9, 0], [0, 0]), r"seq_lens: 1 of 2 .* \(0,\): 9; workspace_starts: 1 of 2"),
        (upconvert, ([-4, 4], [0, 0]), r"seq_lens: 1 of 2 .* \(0,\): -4"),
        (upconvert, ([4, 4], [0, 5]), r"workspace_starts: 1 of 2 .* \(1,\): 5"),
        (upconvert, ([4, 4], [-1, 4]), r"workspace_starts: 1 of 2 .* \(0,\): -1"),
        (upconvert, ([4, 5], [0, 3]), r"block_table: 1 of 4 .* \(1, 1\): -1"),
        (upconvert, ([5, 4], [0, 4], (4, 0)), r"seq_lens: 1 of 2 .* \(0,\): 5"),
        (upconvert, ([4, 4], [0, 4], (0, -1)), r"seq_starts: 1 of 2 .* \(1,\): -1"),
        (upconvert, (None, [4, 0]), r"workspace_starts: 1 of 2 .* \(0,\): 4"),
    ):
        with pytest.raises(pyops.OpError, match=message):
            call(*values)


def test_bad_cache_scales_are_refused() -> None:
    op = pyops.registry["reshape_and_cache_flash"]
    args = example(op)
    for name in ("k_scale", "v_scale"):
        place = [p.name for p in op.parameters].index(name)
        for wrong in (torch.ones(1, dtype=torch.float64), torch.ones(2)):
            assert refusal(op, [*args[:place], wrong, *args[place + 1 :]]).argument == name


def test_bad_indexer_groups_are_refused() -> None:
    for group in (0, -128, 48):
        with pytest.raises(pyops.OpError, match="quant_block_size: expected a divisor of head_size=128, got"):
            pyops.indexer_k_quant_and_cache(make(2, 128), bytes_of(3, 4, 132), ints([0, 1]), group, "auto")


def test_indexer_blocks_fit_in_32_bits() -> None:
    cache, slots = _sparse(1, 20_000_000, 132, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(pyops.OpError, match=r"kv_cache: expected blocks of at most 2\^30 bytes"):
        pyops.indexer_k_quant_and_cache(torch.zeros(1, 128), cache, slots, 128, "auto")


@pytest.mark.parametrize("where", DEVICES)
def test_gathers_without_sequences(where: str) -> None:
    """No sequence owns a row, whatever the table and the owners hold; nothing is written."""
    cache, table = make(3, 4, 8, where=where), ints([[2]], torch.int32, where)
    none, owners = ints([0], torch.int32, where), ints([0, 0], torch.int32, where)
    dst = torch.full((2, 8), -1.0, device=where)
    pyops.gather_and_maybe_dequant_cache(cache, dst, table, none, owners, 2, "auto", 1.0)
    pyops.cp_gather_cache(cache, dst, table, none, 0)
    entries, rows = torch.ones(3, 4, 656, dtype=torch.uint8, device=where), torch.ones(2, 576, device=where).bfloat16()
    pyops.cp_gather_and_upconvert_fp8_kv_cache(entries, rows, table, none[:0], none[:0], 0)
    assert (dst == -1).all()
    assert (rows == 1).all()


def _sparse(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in memory that the system provides only when it is touched."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    # On Linux 0x4000 is MAP_NORESERVE, which mmap names since Python 3.13.
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("where", DEVICES[1:2])
def test_caches_beyond_32_bits(where: str) -> None:
    """Slots more than 2^31 elements, and 2^32 bytes, into a cache: written there and read from there."""
    num_blocks, block_size, size = 2**18, 16, 576
    last = num_blocks * block_size - 1
    slots = ints([last, 0, last - block_size, 2**31 // size + 5])
    kv_c, k_pe = make(4, 512, dtype=torch.bfloat16), make(4, 64, dtype=torch.bfloat16)
    cache = _sparse(num_blocks, block_size, size, dtype=torch.bfloat16)
    pyops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "auto", 1.0)
    for t, slot in enumerate(slots.tolist()):
        assert same_bits(cache[slot // block_size, slot % block_size], torch.cat((kv_c[t], k_pe[t])))
    dst = torch.zeros(4, size, dtype=torch.bfloat16)
    table = (slots // block_size).reshape(4, 1)
    pyops.cp_gather_cache(cache, dst, table, torch.arange(5), 4, slots % block_size)
    assert same_bits(dst, torch.cat((kv_c, k_pe), 1))
    pairs = ints([[int(slots[0]) // block_size, 5], [0, num_blocks - 2 - 7]])
    pyops.copy_blocks_mla([cache], pairs)
    assert same_bits(cache[5], cache[-1])
    assert same_bits(cache[num_blocks - 9], cache[0])

    key = make(2, 8, 128, dtype=torch.bfloat16)
    packed = [_sparse(2**18, 8, *rest, dtype=torch.bfloat16) for rest in ((16, 16, 8), (128, 16))]
    flash = [_sparse(2**18, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    far = ints([2**22 - 1, 2**22 - 40])
    pyops.reshape_and_cache(key, key, *packed, far, "auto", 1.0, 1.0)
    pyops.reshape_and_cache_flash(key, key, *flash, far, "auto", 1.0, 1.0)
    for t, slot in enumerate(far.tolist()):
        block, offset = divmod(slot, 16)
        assert same_bits(packed[0][block, :, :, offset].reshape(8, 128), key[t])
        assert same_bits(packed[1][block, :, :, offset], key[t])
        assert same_bits(flash[0][block, offset], key[t])
