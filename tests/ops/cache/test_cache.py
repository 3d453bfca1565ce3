"""Cache ops: fused RoPE and cache writes, many tokens, and launch geometry."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import pytest
import torch

import pyops
from pyops._core.system import device
from pyops._core.tensors.dtypes import float32
from pyops.example import ArgMaker
from pyops.ops.cache import _geometry
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits
from pyops.testing.calls import named, replaced
from tests.support import axes
from tests.support.cache import FAMILY, INT64_MAX, bytes_of, ints, make, on_host, packed
from tests.support.calls import DEVICES, example, refusal


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(("rope_size", "latent_size"), [(64, 512), (20, 36), (6, 5)])
def test_rope_fused(rope_size: int, latent_size: int, is_neox: bool, dtype: torch.dtype, where: str) -> None:
    """Angles and rotations in float64, within three roundings; the cache holds the rotated keys bit for bit."""
    n, num_heads = 9, 3
    both = make(n, rope_size + latent_size, dtype=dtype, where=where)
    k_pe, kv_c = both[:, :rope_size], both[:, rope_size:]
    q_pe = make(n, num_heads, rope_size, dtype=dtype, where=where)
    angle = (
        torch.rand(50, rope_size // 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(where) * 6
    )
    table = torch.cat((angle.cos(), angle.sin()), 1).to(dtype)
    positions, slots = torch.arange(n, device=where) * 5, ints([3, 11, -1, 0, 7, 12, 8, 2, 6], where=where)
    cache = torch.zeros(3, 4, latent_size + rope_size, dtype=dtype, device=where)
    q, k = q_pe.clone(), k_pe.clone()
    pyops.concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, table, is_neox, slots, cache, "auto", 1.0)

    def turned(x: torch.Tensor) -> torch.Tensor:
        cos, sin = table[positions].double().reshape(n, *[1] * (x.ndim - 2), rope_size).chunk(2, -1)
        a, b = x.double().chunk(2, -1) if is_neox else (x.double()[..., ::2], x.double()[..., 1::2])
        parts = a * cos - b * sin, b * cos + a * sin
        return torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)

    within = 3 * torch.finfo(dtype).eps
    assert ((q_pe.double() - turned(q)).abs() <= within * 4).all()
    exists = (slots >= 0) & (slots < 12)
    assert ((k_pe.double() - turned(k))[exists].abs() <= within * 4).all()
    assert same_bits(k_pe[~exists], k[~exists])
    entries = cache.flatten(0, 1)
    assert same_bits(entries[slots[exists]], torch.cat((kv_c, k_pe), 1)[exists])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rope_size", "latent_size"), [(64, 512), (6, 5)])
def test_norm_before_rope(rope_size: int, latent_size: int, dtype: torch.dtype, where: str) -> None:
    """The latent in the cache is the float64 norm, within two roundings; all else is as without a norm, bit for bit."""
    n = 5
    both = make(n, rope_size + latent_size, dtype=dtype, where=where)
    kv_c, weight = both[:, rope_size:], make(latent_size, dtype=dtype, where=where)
    table, positions = make(9, rope_size, dtype=dtype, where=where), ints([8, 0, 3, 9, 1], where=where)
    slots, before, results = ints([3, 11, -1, 0, 7], where=where), both.clone(), []
    for terms in ((weight, 1e-3), ()):
        x, q_pe = both.clone(), make(n, 3, rope_size, dtype=dtype, where=where)
        cache = torch.zeros(3, 4, latent_size + rope_size, dtype=dtype, device=where)
        op = pyops.mla_norm_rope_cache if terms else pyops.concat_and_cache_mla_rope_fused
        op(positions, q_pe, x[:, :rope_size], x[:, rope_size:], table, True, slots, cache, "auto", 1.0, *terms)
        assert same_bits(x[:, rope_size:], before[:, rope_size:])
        results.append((q_pe, x, cache.flatten(0, 1)))
    (q, k, found), (plain_q, plain_k, plain) = results
    assert same_bits(q, plain_q)
    assert same_bits(k, plain_k)
    assert same_bits(found[:, latent_size:], plain[:, latent_size:])
    written = torch.tensor([0, 1, 4], device=where)
    exact = kv_c[written].double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    rows = found[slots[written].long(), :latent_size].double()
    assert ((rows - exact).abs() <= 1.5 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()
    found[slots[written].long()] = 0
    assert not found.any()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("plain_size", "latent_size", "num_heads"), [(128, 512, 16), (7, 40, 3)])
def test_absorbed_queries_in_the_launch_of_an_insert(
    plain_size: int, latent_size: int, num_heads: int, where: str
) -> None:
    """Products of integers are exact; queries, keys and cache are those of a launch without them, bit for bit."""
    n, rope_size = 2, 64
    both, weight = make(n, rope_size + latent_size, where=where), make(latent_size, where=where)
    query = torch.randint(-9, 10, (n, num_heads, plain_size + rope_size), device=where).float()
    up = torch.randint(-9, 10, (num_heads, plain_size + 5, latent_size), device=where).float()
    absorbed = torch.full((num_heads, n, latent_size), 7.0, device=where)
    plain, up_keys = query[..., :plain_size].transpose(0, 1), up[:, :plain_size]
    expected, table = plain.double() @ up_keys.double(), make(9, rope_size, where=where)
    results = []
    for product in ((absorbed, plain, up_keys), ()):
        q, x, cache = query.clone(), both.clone(), torch.zeros(3, 4, latent_size + rope_size, device=where)
        product = (absorbed, q[..., :plain_size].transpose(0, 1), up_keys) if product else ()
        given = ints([8, 3], where=where), q[..., plain_size:], x[:, :rope_size], x[:, rope_size:], table, True
        pyops.mla_norm_rope_cache(*given, ints([11, 0], where=where), cache, "auto", 1.0, weight, 1e-3, *product)
        results.append((q, x, cache))
    assert torch.equal(absorbed.double(), expected)
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))


def test_parts_of_a_product_are_refused() -> None:
    args = example(pyops.registry["mla_norm_rope_cache"], "cpu", num_tokens=2)
    args[-3:] = torch.ones(16, 2, 512), None, None
    assert "none of them" in str(refusal(pyops.registry["mla_norm_rope_cache"], args))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("is_neox", [False, True])
def test_rope_fused_of_padded_tokens_by_a_float32_table(is_neox: bool, where: str) -> None:
    """Tokens without a slot, which CUDA graphs add, are left alone; angles in float32 are rounded first."""
    args = [
        torch.arange(7, device=where),
        *(make(*shape, dtype=torch.bfloat16, where=where) for shape in ((7, 2, 16), (7, 16), (7, 24))),
        make(9, 16, dtype=torch.float32, where=where),
    ]
    slots, results = ints([3, -1, 5, 0], where=where), []
    for count, dtype in ((4, torch.bfloat16), (7, torch.float32)):
        positions, q_pe, k_pe, kv_c, table = (x.clone() for x in args)
        cache = torch.zeros(2, 4, 40, dtype=torch.bfloat16, device=where)
        given = positions, q_pe[:count], k_pe[:count], kv_c[:count], table.to(dtype), is_neox, slots, cache
        pyops.concat_and_cache_mla_rope_fused(*given, "auto", 1.0)
        assert not torch.equal(q_pe[:4], args[1][:4])
        assert torch.equal(q_pe[4:], args[1][4:])
        results.append((q_pe, k_pe, cache))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@pytest.mark.parametrize("where", DEVICES)
def test_unknown_kinds_are_refused(where: str) -> None:
    for name in FAMILY:
        op = pyops.registry[name]
        names = [p.name for p in op.parameters]
        if "kv_cache_dtype" in names and name != "indexer_k_quant_and_cache":
            args = example(op, where, num_tokens=3)
            for kind in ("int8", "fp8_inc", ""):
                args[names.index("kv_cache_dtype")] = kind
                assert refusal(op, args).argument == "kv_cache_dtype"
            args[names.index("kv_cache_dtype")] = "fp8"  # the cache is bfloat16
            assert "cache" in refusal(op, args).argument


@pytest.mark.parametrize("where", DEVICES[1:2])
@pytest.mark.parametrize("name", FAMILY)
def test_many_tokens(name: str, where: str, small: device.Device) -> None:
    """Enough to fill a device, here a small one: blocks take several tokens, the last block fewer."""
    op = pyops.registry[name]
    for case in axes.sample(op, max_cases=3):
        args = example(op, where, num_tokens=151, **case)
        few = op.launches(*op.example(ArgMaker(dataclasses.replace(small, num_sms=999)), num_tokens=151, **case))
        many = op.launches(*op.example(ArgMaker(small), num_tokens=151, **case))
        for constant in {"TOKENS", "ROWS"} & many[0].specialisation.constants.keys():
            assert few[0].specialisation.constants[constant] < many[0].specialisation.constants[constant]
        assert_matches_reference(op, *args, schedules=SCHEDULES[:1])


@on_host
@pytest.mark.parametrize(
    "name", [name for name in FAMILY if {"cu_seq_lens", "seq_lens"} & {p.name for p in pyops.registry[name].tensors}]
)
@pytest.mark.parametrize("more", [20, -20])
def test_rows_after_the_last(name: str, more: int, small: device.Device) -> None:
    """The last block writes no row after the last one, though lengths and owners go on.

    Rows of no sequence are not written either.
    """
    op = pyops.registry[name]
    args = example(op, num_tokens=151)
    lengths = next(key for key in ("cu_seq_lens", "seq_lens") if key in named(op, args))
    others = named(op, args)[lengths].clone()
    others[-1] += more
    changed = {lengths: others}
    if "token_to_seq" in named(op, args):
        owners = named(op, args)["token_to_seq"]
        changed["token_to_seq"] = torch.cat((owners, owners[-1:].expand(20)))
    assert_matches_reference(op, *replaced(op, args, **changed), schedules=SCHEDULES[:1])


@on_host
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_first_of_overlapping_sequences(rows: int, small: device.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences in any order, overlapping, with gaps, empty or hostile: the first one that contains a row owns it."""
    monkeypatch.setattr(import_module("pyops.ops.cache.cp_gather_and_upconvert_fp8_kv_cache"), "_ROWS", rows)
    generator = torch.Generator().manual_seed(rows)
    num_seqs, num_rows = 75, 203
    starts = torch.randint(0, num_rows + 9, (num_seqs,), generator=generator)
    lengths = torch.randint(0, 9, (num_seqs,), generator=generator)
    starts[[3, 40, 74]], lengths[[3, 41, 74]] = ints([-2, -1, 190]), ints([30, -5, 30])
    starts[5], lengths[[4, 5, 33]] = 60, ints([INT64_MAX, INT64_MAX, -(2**63)])
    starts[4] = num_rows - 6
    table = torch.randint(-1, 5, (num_seqs, 8), generator=generator, dtype=torch.int32)
    cache, dst = bytes_of(5, 4, 656, high=60), torch.zeros(num_rows, 576, dtype=torch.bfloat16)
    assert_matches_reference(
        pyops.cp_gather_and_upconvert_fp8_kv_cache, cache, dst, table, lengths, starts, num_seqs, warp_sizes=(32, 64)
    )


@on_host
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_sequences_from_a_position(
    with_lengths: bool, rows: int, small: device.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lengths a sequence ends where the next begins, the last with the rows; positions may be hostile."""
    monkeypatch.setattr(import_module("pyops.ops.cache.cp_gather_and_upconvert_fp8_kv_cache"), "_ROWS", rows)
    generator = torch.Generator().manual_seed(rows)
    num_seqs, num_rows = 40, 203
    starts = torch.randint(0, num_rows, (num_seqs,), generator=generator).sort()[0]
    starts[[7, 20, 39]] = ints([-5, INT64_MAX, num_rows - 3])
    lengths = torch.randint(0, 9, (num_seqs,), generator=generator) if with_lengths else None
    first = torch.randint(0, 20, (num_seqs,), generator=generator)
    first[[2, 9, 11, 30]] = ints([-1, INT64_MAX, -(2**63), 32])
    table = torch.randint(-1, 5, (num_seqs, 8), generator=generator, dtype=torch.int32)
    cache, dst = bytes_of(5, 4, 656, high=60), torch.zeros(num_rows, 576, dtype=torch.bfloat16)
    op = pyops.cp_gather_and_upconvert_fp8_kv_cache
    assert_matches_reference(op, cache, dst, table, lengths, starts, num_seqs, first, warp_sizes=(32, 64))


@pytest.mark.parametrize("where", DEVICES)
def test_rows_of_sequences_from_a_position(where: str) -> None:
    """Entry p of a sequence is block p // 4 of its row of the table: a loop over rows, without lengths."""
    cache, dst = bytes_of(6, 4, 656, high=60).to(where), torch.zeros(9, 576, dtype=torch.bfloat16, device=where)
    table = ints([[5, 1, 0], [2, 4, 3]], torch.int32, where)
    starts, first = ints([1, 4], torch.int32, where), ints([6, 3], torch.int32, where)
    pyops.cp_gather_and_upconvert_fp8_kv_cache(cache, dst, table, None, starts, 2, first)
    assert not dst[0].any()
    for row in range(1, 9):
        b = int(row >= 4)
        p = row - int(starts[b]) + int(first[b])
        entry = cache[table[b, p // 4], p % 4].cpu()
        scales = entry[512:528].view(torch.float32).repeat_interleave(128)
        latent = (entry[:512].view(torch.float8_e4m3fn).float() * scales).bfloat16()
        assert same_bits(dst[row].cpu(), torch.cat((latent, entry[528:].view(torch.bfloat16))))


@on_host
def test_tokens_beyond_the_slots_are_padding() -> None:
    """Keys and values may be longer than slot_mapping, which fixes the number of tokens."""
    key = make(9, 2, 16)
    caches = [torch.zeros(2, 4, 2, 16) for _ in range(2)]
    scales = torch.ones(()), torch.ones(1)
    assert_matches_reference(pyops.reshape_and_cache_flash, key, key[:7], *caches, ints([3, 0, 6]), "auto", *scales)
    with pytest.raises(pyops.OpError, match="value: expected at least num_tokens=8 rows"):
        pyops.reshape_and_cache_flash(key, key[:7], *caches, torch.arange(8), "auto", 1.0, 1.0)


@pytest.mark.parametrize(
    ("num_tokens", "token_vecs", "config"),
    [
        (1, 72, _geometry.CacheConfig(tokens=1, batch=1, num_threads=128)),
        (1, 4, _geometry.CacheConfig(tokens=16, batch=1, num_threads=64)),
        (528, 128, _geometry.CacheConfig(tokens=2, batch=1, num_threads=256)),
        (2111, 128, _geometry.CacheConfig(tokens=2, batch=1, num_threads=256)),
        (2112, 128, _geometry.CacheConfig(tokens=8, batch=4, num_threads=256)),
        (100000, 1, _geometry.CacheConfig(tokens=64, batch=1, num_threads=256)),
        (100000, 5000, _geometry.CacheConfig(tokens=1, batch=4, num_threads=256)),
    ],
)
def test_geometry_of_tokens(num_tokens: int, token_vecs: int, config: _geometry.CacheConfig) -> None:
    """On 132 SMs: few tokens take small blocks; more take one vector per thread; many take four vectors per thread."""
    assert _geometry.choose(_geometry.CacheProblem(num_tokens, token_vecs, float32), device.model()) == config


def test_geometry_of_early_blocks() -> None:
    """Smaller blocks, if there are more blocks than the early lookup serves: four on each of 132 SMs."""
    few, many = (_geometry.CacheProblem(num_tokens, 72, float32, early=True) for num_tokens in (2115, 2116))
    assert _geometry.choose(many, device.model()) == _geometry.CacheConfig(tokens=4, batch=2, num_threads=160)
    assert _geometry.choose(few, device.model()) == _geometry.CacheConfig(tokens=3, batch=1, num_threads=256)
    assert _geometry.choose(many, device.model("sm_80")).num_threads == 256
    assert [_geometry.early_blocks(count, device.model()) for count in (528, 529)] == [0, 528]


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "num_slots", "config"),
    [
        (32, 16, 4096, packed.Tiles(tokens=4, columns=128, num_threads=128)),
        (2112, 16, 4096, packed.Tiles(tokens=16, columns=64, num_threads=128)),
        (2113, 16, 4096, packed.Groups(group=16, columns=256, batch=2, num_threads=256, max_blocks=1584)),
        (2113, 64, 4096, packed.Groups(group=32, columns=256, batch=4, num_threads=256, max_blocks=1584)),
        (2113, 4, 4096, packed.Tiles(tokens=32, columns=128, num_threads=256)),
        (2113, 16, 2**25, packed.Tiles(tokens=32, columns=128, num_threads=256)),
    ],
)
def test_geometry_of_packed_tokens(num_tokens: int, block_size: int, num_slots: int, config: Any) -> None:
    """Groups of slots for many tokens, if the cache has groups and is not too large."""
    problem = packed.ReshapeProblem(
        num_tokens, num_slots, block_size, row_size=1024, load_vec=8, many=num_tokens > 16 * 132
    )
    assert packed.choose(problem, device.model()) == config
