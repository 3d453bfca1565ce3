"""What is special to the cache ops: exact codes, layouts, hostile indices, unused slots, odd sizes, lists, devices."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops._core import device
from pyops._core.dtypes import float32
from pyops._core.example import ArgMaker
from pyops._core.host.toolchain import toolchains
from pyops.ops.cache import _geometry
from pyops.testing import SCHEDULES, Layout, assert_matches_reference, same_bits, strategies
from pyops.testing.calls import clones, expected, named, replaced, run
from tests import axes
from tests.calls import DEVICES, example, refusal

on_host = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FNUZ = torch.float8_e4m3fnuz
# Kinds of a cache with the codes that it may have: bytes, but for FNUZ.
CODES = pytest.mark.parametrize(("kind", "code"), [*KINDS.items(), ("fp8", FNUZ), ("fp8_e4m3", FNUZ)])
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
HOSTILE = (-1, -2, -(2**31), -(2**63), INT32_MAX, INT64_MAX, INT64_MAX - 15, 2**62)
packed = import_module("pyops.ops.cache.reshape_and_cache")  # the package has the op under this name
# What returns a tensor is tested apart.
FAMILY = [
    name
    for name, op in pyops.registry.items()
    if op.reference.__module__.startswith("pyops.ops.cache.") and not op.declaration.returned
]


def make(*shape: int, dtype: torch.dtype = torch.float32, where: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(where)


def bytes_of(*shape: int, where: str = "cpu", high: int = 120) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8).to(where)


def ints(values: Any, dtype: torch.dtype = torch.int64, where: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=where)


def quantised(x: torch.Tensor, scale: float, kind: torch.dtype) -> torch.Tensor:
    """Codes by torch's own conversion, the quotient from float64; NaN is 0x7f, or 0x80 where that is no zero."""
    quotient = (x.double() / float(numpy.float32(scale))).float()
    largest = torch.finfo(kind).max
    codes = quotient.clamp(-largest, largest).to(kind).view(torch.uint8)
    return codes.masked_fill(quotient.isnan(), 0x80 if kind == FNUZ else 0x7F)


def as_given(cache: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """A cache of bytes as a call gets it: that its codes are FNUZ, it says itself."""
    return cache.view(code) if code == FNUZ else cache


def every_value(dtype: torch.dtype, where: str) -> torch.Tensor:
    """Every bit pattern of a two-byte type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=where).view(dtype)


# Codes.


@pytest.mark.parametrize("where", DEVICES)
@CODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0e-3, 7.0, 1e-30, 1e30, -0.3, 0.0, 2.0**-140, float("inf")])
def test_codes_of_every_value(dtype: torch.dtype, kind: str, code: torch.dtype, scale: float, where: str) -> None:
    """A true division, to the nearest, saturating; infinities are the largest code, NaN stays; signs of zeros, too."""
    x = every_value(dtype, where).reshape(256, 256)
    cache = torch.zeros(16, 16, 256, dtype=torch.uint8, device=where)
    slots = torch.arange(256, device=where)
    s = torch.tensor([scale], device=where)
    pyops.concat_and_cache_mla(x[:, :192], x[:, 192:], as_given(cache, code), slots, kind, s)
    assert torch.equal(cache.view(256, 256), quantised(x, scale, code))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.7e-3, 2.0**-100])
@pytest.mark.parametrize("code", [torch.float8_e4m3fn, FNUZ])
def test_codes_of_float32(code: torch.dtype, scale: float, where: str) -> None:
    """Quotients beside every tie between two codes: a division that is off in the last place would show."""
    codes = torch.arange(0x7E if code != FNUZ else 0x80, dtype=torch.uint8).view(code).double()
    ties = ((codes[1:] + codes[:-1]) / 2 * float(numpy.float32(scale))).float()
    around = torch.stack([ties, *(torch.nextafter(ties, torch.tensor(to)) for to in (0.0, 1e38))]).to(where)
    x = torch.cat((around, -around)).reshape(6, -1)
    output = torch.zeros(x.shape, dtype=torch.uint8, device=where)
    pyops.convert_fp8(as_given(output, code), x, scale)
    assert torch.equal(output, quantised(x, scale, code))


@pytest.mark.parametrize("where", DEVICES)
@CODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_every_code(dtype: torch.dtype, kind: str, code: torch.dtype, where: str) -> None:
    cache = torch.arange(256, dtype=torch.uint8, device=where).reshape(1, 4, 64)
    dst = torch.zeros(4, 64, dtype=dtype, device=where)
    table, lens = ints([[0]], torch.int32, where), ints([0, 4], torch.int32, where)
    owners = torch.zeros(4, dtype=torch.int32, device=where)
    for scale in (1.0, 0.37, 1e5, 1e-6):
        pyops.gather_and_maybe_dequant_cache(as_given(cache, code), dst, table, lens, owners, 4, kind, scale)
        right = (cache[0].view(code).double() * float(numpy.float32(scale))).float().to(dtype)
        assert torch.equal(dst.isnan(), right.isnan())
        assert same_bits(dst.nan_to_num(nan=0.0), right.nan_to_num(nan=0.0))


@pytest.mark.parametrize("where", DEVICES)
def test_a_cache_of_fnuz(where: str) -> None:
    """Every writer of codes; both caches of a call have the same, and no other kind is taken for it."""
    x, slots = make(5, 2, 16, where=where), ints([3, 0, 9, 7, 12], where=where)
    right = quantised(x, 0.1, FNUZ)

    def caches(*shape: int, dtype: torch.dtype = FNUZ) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=torch.uint8, device=where).view(dtype) for _ in range(2)]

    flash = caches(2, 8, 2, 16)
    pyops.reshape_and_cache_flash(x, x, *flash, slots, "fp8", 0.1, 0.1)
    for cache in flash:
        assert torch.equal(cache.view(torch.uint8).flatten(0, 1)[slots], right)
    (keys, _), (_, values) = caches(2, 2, 1, 8, 16), caches(2, 2, 16, 8)
    pyops.reshape_and_cache(x, x, keys, values, slots, "fp8_e4m3", 0.1, 0.1)
    assert torch.equal(keys.view(torch.uint8).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2)[slots], right)
    assert torch.equal(values.view(torch.uint8).permute(0, 3, 1, 2).flatten(0, 1)[slots], right)
    (joint, _), k_pe, table = caches(2, 8, 32), x[:, 1].clone(), torch.ones(4, 16, device=where)
    table[:, 8:] = 0.0  # no rotation
    positions, q_pe = ints([0, 1, 2, 3, 0], where=where), x.clone()
    pyops.concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, x[:, 0], table, True, slots, joint, "fp8", 0.1)
    assert torch.equal(joint.view(torch.uint8).flatten(0, 1)[slots], right.flatten(1))
    half = x.half()
    pyops.convert_fp8(half, right.view(FNUZ), 0.1)
    assert same_bits(half, (right.view(FNUZ).float() * 0.1).half())

    for kind, pair in (
        ("fp8_e5m2", flash),
        ("auto", flash),
        ("fp8", [flash[0], caches(2, 8, 2, 16, dtype=torch.float8_e4m3fn)[0]]),
    ):
        with pytest.raises(pyops.OpError, match=r"(key|value)_cache: expected dtype"):
            pyops.reshape_and_cache_flash(x, x, *pair, slots, kind, 0.1, 0.1)


@pytest.mark.parametrize(("arch", "own"), [("gfx942", "float8_e4m3fnuz"), ("sm_90", "float8_e4m3fn")])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {"kv_cache_dtype": "fp8"}) for name in ("reshape_and_cache", "reshape_and_cache_flash")),
        *((name, {"kv_cache_dtype": "fp8"}) for name in ("concat_and_cache_mla", "concat_and_cache_mla_rope_fused")),
        ("gather_and_maybe_dequant_cache", {"kv_cache_dtype": "fp8"}),
        *(("convert_fp8", {"to_codes": to_codes}) for to_codes in (True, False)),
    ],
)
def test_bytes_are_codes_of_the_device(name: str, more: dict[str, Any], arch: str, own: str) -> None:
    """Of its own e4m3, whoever reads or writes them."""
    op = pyops.registry[name]
    assert op.example is not None
    launches = op.launches(*op.example(ArgMaker(device.model(arch)), **more))
    types = {str(value) for launch in launches for value in launch.specialisation.constants.values()}
    assert types & {"float8_e4m3fn", "float8_e4m3fnuz"} == {own}


@pytest.mark.parametrize("where", DEVICES)
def test_a_cache_of_float8(where: str) -> None:
    """Codes may be given as uint8 or as the float8 that they are, numbers for scales as numbers."""
    x, slots = make(5, 2, 16, where=where), ints([3, 0, 9, 7, 12], where=where)
    for kind, dtype in KINDS.items():
        caches = [torch.zeros(2, 8, 2, 16, dtype=torch.uint8, device=where) for _ in range(4)]
        pyops.reshape_and_cache_flash(x, x, caches[0], caches[1], slots, kind, 0.1, 0.2)
        scales = [torch.tensor([s], device=where) for s in (0.1, 0.2)]
        floats = [cache.view(dtype) for cache in caches[2:]]
        pyops.reshape_and_cache_flash(x, x, *floats, slots, kind, *scales)
        for cache, same, scale in zip(caches[:2], caches[2:], (0.1, 0.2), strict=True):
            assert torch.equal(cache, same)
            assert torch.equal(cache.flatten(0, 1)[slots], quantised(x, scale, dtype))
        wrong = torch.float8_e5m2 if dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
        with pytest.raises(pyops.OpError, match="key_cache: expected dtype"):
            pyops.reshape_and_cache_flash(x, x, *(cache.view(wrong) for cache in caches[2:]), slots, kind, *scales)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ds_mla_entry(dtype: torch.dtype, where: str) -> None:
    """656 bytes: codes, scales that are never below 2^-126, and the rope as it is; by another route, from float64."""
    kv_c, k_pe = make(6, 512, dtype=dtype, where=where), make(6, 64, dtype=dtype, where=where)
    kv_c[1, :128] = 0.0
    kv_c[2, 130] = float("nan")
    kv_c[3, 300] = float("inf")
    kv_c[4] *= 2.0**-12
    k_pe[5, 3] = float("nan")
    cache = bytes_of(2, 4, 656, where=where)
    before = cache.clone()
    slots = ints([0, 7, 3, 2, 6, -1], where=where)
    pyops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "fp8_ds_mla", 1.0)
    entries = cache.flatten(0, 1)[slots[:5]]
    scales = entries[:, 512:528].contiguous().view(torch.float32)
    tiles = kv_c[:5].double().unflatten(1, (4, 128))
    absmax_ = tiles.abs().masked_fill(tiles.isnan(), 0.0).amax(-1)
    assert torch.equal(scales, (absmax_ / 448).float().clamp(min=2.0**-126))
    for t in range(5):
        for tile in range(4):
            scale = float(scales[t, tile])
            right = quantised(kv_c[t, 128 * tile : 128 * (tile + 1)], scale, torch.float8_e4m3fn)
            assert torch.equal(entries[t, 128 * tile : 128 * (tile + 1)], right)
    assert same_bits(entries[:, 528:].contiguous().view(dtype), k_pe[:5])
    unused = ints([1, 4, 5], where=where)
    assert torch.equal(cache.flatten(0, 1)[unused], before.flatten(0, 1)[unused])


@pytest.mark.parametrize("where", DEVICES)
def test_ds_mla_round_trip(where: str) -> None:
    """What is written as fp8_ds_mla comes back as bfloat16, within half a step of the codes."""
    kv_c, k_pe = (make(40, size, dtype=torch.bfloat16, where=where) for size in (512, 64))
    cache = torch.zeros(4, 16, 656, dtype=torch.uint8, device=where)
    table = ints([[2, 0], [3, 1]], torch.int32, where)
    slots = torch.cat([table[i, j] * 16 + torch.arange(16, device=where) for i in (0, 1) for j in (0, 1)])
    slots = torch.cat((slots[:20], slots[32:52]))
    pyops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "fp8_ds_mla", 1.0)
    dst = torch.full((44, 576), 7.0, dtype=torch.bfloat16, device=where)
    lens, starts = ints([20, 20], torch.int32, where), ints([22, 1], torch.int32, where)
    pyops.cp_gather_and_upconvert_fp8_kv_cache(cache, dst, table, lens, starts, 2)
    got = torch.cat((dst[22:42], dst[1:21]))
    assert same_bits(got[:, 512:], k_pe)
    scale = kv_c.float().unflatten(1, (4, 128)).abs().amax(-1, keepdim=True) / 448
    step = (kv_c.float().unflatten(1, (4, 128)).abs() / 16).clamp(min=scale.expand(-1, -1, 128) * 2.0**-9)
    assert ((got[:, :512].float() - kv_c.float()).unflatten(1, (4, 128)).abs() <= step * 1.1).all()
    assert (dst[[0, 21, 42, 43]] == 7.0).all()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_size", "group"), [(128, 128), (128, 32), (96, 96), (100, 25), (512, 256)])
def test_indexer_block(head_size: int, group: int, dtype: torch.dtype, where: str) -> None:
    """Codes of all slots, then scales of all slots; powers of two by their logarithm in float64."""
    k = make(7, head_size, dtype=dtype, where=where)
    k[0] = 0.0
    k[1, 3] = float("nan")
    k[2, 5] = 448.0
    groups = head_size // group
    slots = ints([5, 0, 11, -1, 3, 7, 99], where=where)
    for kind in ("ue8m0", "auto"):
        cache = bytes_of(3, 4, head_size + 4 * groups, where=where)
        pyops.indexer_k_quant_and_cache(k, cache, slots, group, kind)
        rows = k.double().unflatten(1, (groups, group))
        absmax_ = rows.abs().masked_fill(rows.isnan(), 0.0).amax(-1).clamp(min=float(numpy.float32(1e-4)))
        scales = (absmax_ / 448).float()
        if kind == "ue8m0":
            scales = torch.exp2(torch.ceil(torch.log2(scales.double()))).float()
        for t, slot in enumerate(slots.tolist()):
            if 0 <= slot < 12:
                block, offset = cache[slot // 4].flatten(), slot % 4
                of_keys, of_scales = block[: 4 * head_size], block[4 * head_size :]
                assert torch.equal(of_scales.reshape(4, -1)[offset].contiguous().view(torch.float32), scales[t])
                right = [quantised(k[t, g * group :][:group], float(scales[t, g]), KINDS["fp8"]) for g in range(groups)]
                assert torch.equal(of_keys.reshape(4, -1)[offset], torch.cat(right))
        keys = torch.zeros(12, head_size, dtype=torch.uint8, device=where)
        kept = torch.zeros(12, 4 * groups, dtype=torch.uint8, device=where)
        # The entries of a sequence lie apart.
        table, lens = ints([[2, 1], [0, 9]], torch.int32, where).T, ints([0, 8, 12], torch.int32, where)
        pyops.cp_gather_indexer_k_quant_cache(cache, keys, kept, table, lens)
        order = [2, 0, 1]
        assert torch.equal(keys, torch.cat([cache[b].flatten()[: 4 * head_size].reshape(4, -1) for b in order]))
        assert torch.equal(kept, torch.cat([cache[b].flatten()[4 * head_size :].reshape(4, -1) for b in order]))


# Layouts.


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("num_heads", "head_size"), [(2, 64), (3, 5), (1, 7)])
def test_flash_layouts(num_heads: int, head_size: int, joint: bool, heads_first: bool, kind: str, where: str) -> None:
    """Heads before slots, both caches in one buffer, each cache with strides of its own, a scale for every head."""
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
    """Runs of slots that begin anywhere among the tokens, one after another and scattered; more heads than threads.

    Few tokens are written as they come, many by groups of slots, in whatever order they come.
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
        if block_size in (5, 48):  # neither begins aligned
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
def test_packed_groups_keep_one_of_the_tokens_of_a_slot(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is not specified; its key and its value are."""
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
    """No chunk of a token is left out, however many there are."""
    key = make(2, 70, 128, dtype=torch.float16, where=where)
    key_cache = torch.zeros(2, 70, 16, 4, 8, dtype=torch.float16, device=where)
    value_cache = torch.zeros(2, 70, 128, 4, dtype=torch.float16, device=where)
    pyops.reshape_and_cache(key, key, key_cache, value_cache, ints([6, 1], where=where), "auto", 1.0, 1.0)
    assert same_bits(key_cache[1, :, :, 2].reshape(70, 128), key[0])
    assert same_bits(value_cache[0, :, :, 1], key[1])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_tensors(dtype: torch.dtype, where: str) -> None:
    """Of 32 or 64 bits, with gaps between their elements, or expanded."""
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
def test_indices_apart(name: str, where: str) -> None:
    """Whatever lies between the elements of an index tensor, the results are the same."""
    op = pyops.registry[name]
    args = example(op, where, num_tokens=9, **axes.fullest(op))
    indices = {n: x for n, x in named(op, args).items() if x.dtype in (torch.int32, torch.int64)}
    apart = {n: torch.stack((x, torch.full_like(x, -7)), -1)[..., 0] for n, x in indices.items()}
    first, second = run(op, args), run(op, replaced(op, args, **apart))
    for output, value in first.items():
        assert same_bits(value, second[output])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.float32, torch.int32])
def test_gather_of_any_entry(dtype: torch.dtype, where: str) -> None:
    """Entries of any shape and element type come as they are, to the bit."""
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
    """Shared blocks, broken tables and slots full of NaN: what comes is what the tables say and nothing else."""
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
    """As many as one load of a warp's lanes bounds, and one more; most of them empty, and rows behind the last."""
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
def test_entries_are_asked_for_early(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that look their entries up before the kernel before has ended, and others; with a table of any numbers."""
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
def test_indices_that_the_kernel_before_writes() -> None:
    """A gather that starts while its block table, owners and starts are written takes what they become."""
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


# Indices out of range.


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(
    "name", [name for name in FAMILY if "slot_mapping" in {p.name for p in pyops.registry[name].tensors}]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hostile_slots(name: str, dtype: torch.dtype, where: str) -> None:
    """No slot leads outside: those that do not exist are not written, whatever they are, and all else is."""
    op = pyops.registry[name]
    for case in axes.sample(op, max_cases=2):
        args = example(op, where, num_tokens=20, **case)
        slots = named(op, args)["slot_mapping"]
        top = torch.iinfo(dtype).max
        block_size = {"reshape_and_cache": 16, "reshape_and_cache_flash": 16}.get(name, 64)
        cache = next(value for key, value in named(op, args).items() if key in ("key_cache", "kv_cache"))
        end = len(cache) * block_size
        hostile = [value for value in (*HOSTILE, end, end + block_size, end + 65) if -top - 1 <= value <= top]
        slots = slots.to(dtype)
        slots[1 : 1 + len(hostile)] = ints(hostile, dtype, where)
        args[[p.name for p in op.parameters].index("slot_mapping")] = slots
        right = expected(op, args)
        results = run(op, args)
        for tensor, value in right.items():
            assert same_bits(value, results[tensor]), f"{tensor} {case}"
        slots.fill_(-1)
        for tensor, value in run(op, args).items():
            if tensor in ("key_cache", "value_cache", "kv_cache"):
                assert same_bits(value, named(op, args)[tensor]), f"{tensor} {case}"


def _gathers(where: str) -> list[Any]:
    cases = []
    for name in FAMILY:
        op = pyops.registry[name]
        if "block_table" in {p.name for p in op.tensors}:
            # No multiple of what a block of threads has.
            cases.append((op, example(op, where, num_tokens=21, **axes.fullest(op))))
    return cases


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("wide", [False, True])
def test_hostile_tables(wide: bool, where: str) -> None:
    """No block, length, start or owner leads outside; a row whose entry does not exist is left as it is."""
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
                    # The reference is thousands of small calls: of them only those on a CPU are fast.
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
def test_hostile_lengths_are_not_read_beyond() -> None:
    """PYOPS_CHECK names what is out of range, and not the slots that are negative nor entries that no sequence uses."""
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

    def upconvert(lengths: list[int], rows: list[int]) -> None:
        upconvert_ = pyops.cp_gather_and_upconvert_fp8_kv_cache
        upconvert_(entries, codes, table, ints(lengths, torch.int32), ints(rows, torch.int32), 2)

    gather([0, 8, 8], [0, 4])  # the second has no rows, so that its block is not needed
    gather([0, 4, 8], [4, 0])
    upconvert([8, 0], [0, 99])
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
    ):
        with pytest.raises(pyops.OpError, match=message):
            call(*values)


def test_scales_of_a_cache_are_refused() -> None:
    op = pyops.registry["reshape_and_cache_flash"]
    args = example(op)
    for name in ("k_scale", "v_scale"):
        place = [p.name for p in op.parameters].index(name)
        for wrong in (torch.ones(1, dtype=torch.float64), torch.ones(2)):
            assert refusal(op, [*args[:place], wrong, *args[place + 1 :]]).argument == name


def test_indexer_groups_are_refused() -> None:
    for group in (0, -128, 48):
        with pytest.raises(pyops.OpError, match="quant_block_size: expected a divisor of head_size=128, got"):
            pyops.indexer_k_quant_and_cache(make(2, 128), bytes_of(3, 4, 132), ints([0, 1]), group, "auto")


def test_indexer_blocks_are_counted_in_32_bits() -> None:
    cache, slots = _sparse(1, 20_000_000, 132, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(pyops.OpError, match=r"kv_cache: expected blocks of at most 2\^30 bytes"):
        pyops.indexer_k_quant_and_cache(torch.zeros(1, 128), cache, slots, 128, "auto")


@pytest.mark.parametrize("where", DEVICES)
def test_gathers_without_sequences(where: str) -> None:
    """No row is anyone's, whatever the table and the owners hold; nothing is written."""
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
    """A tensor in memory that is none before it is touched."""
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


# Blocks.


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_copy_blocks(dtype: torch.dtype, where: str) -> None:
    """Lists of layers, blocks that are padded or whose heads come first, a source that is copied twice."""
    layers = [make(7, 4, 3, 5, where=where, seed=i).to(dtype) for i in range(4)]
    layers[2] = make(7, 3, 4, 6, where=where).to(dtype).transpose(1, 2)[..., :5].contiguous().transpose(1, 2)
    layers[2] = layers[2].transpose(1, 2)
    padded = make(7, 77, where=where).to(dtype)[:, :60].unflatten(1, (4, 3, 5))
    layers[3] = padded
    pairs = [[0, 3], [0, 4], [5, 1], [6, 6], [-1, 2], [2, 7]]
    before = [layer.clone() for layer in layers]
    pyops.copy_blocks(layers[:2], layers[2:], ints(pairs, where=where))
    for layer, old in zip(layers, before, strict=True):
        for block in range(7):
            assert same_bits(layer[block].contiguous(), old[{3: 0, 4: 0, 1: 5}.get(block, block)].contiguous())
    pyops.copy_blocks_mla([layers[0]], ints([[3, 2]], where=where))
    assert same_bits(layers[0][2], before[0][0])
    pyops.copy_blocks([], [], ints(pairs, where=where))
    with pytest.raises(pyops.OpError, match=r"^copy_blocks: value_caches: expected 2 tensors like key_caches, got 1$"):
        pyops.copy_blocks(layers[:2], layers[:1], ints(pairs, where=where))
    held = layers[0].clone()
    for other in (layers[1].flatten(), 3, layers[0]._neg_view()):
        with pytest.raises(pyops.OpError, match=r"^copy_cache_blocks: key_cache: (expected|its elements)"):
            pyops.copy_blocks_mla([layers[0], other], ints(pairs, where=where))
    assert same_bits(layers[0], held)  # nor has the layer before been written


@pytest.mark.parametrize("as_what", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_swap_blocks_on_the_host(dtype: torch.dtype, as_what: str) -> None:
    src, dst = make(9, 3, 5), torch.zeros(8, 3, 5)
    pairs = ints([[0, 1], [1, 2], [2, 3], [8, 0], [7, 4], [5, 8], [9, 5], [-1, 6], [3, -2], [4, 7]], dtype)
    right = torch.zeros_like(dst)
    for source, target in ((0, 1), (1, 2), (2, 3), (8, 0), (7, 4), (4, 7)):
        right[target] = src[source]
    if as_what == "numpy":
        pyops.swap_blocks(src.numpy(), dst.numpy(), 60, pairs.numpy())
    else:
        pyops.swap_blocks(src, dst, 60, pairs)
    assert same_bits(dst, right)
    pyops.swap_blocks(src, dst, 60, torch.zeros(0, 2, dtype=dtype))
    pyops.swap_blocks(src[3:5], dst[6:], 60, [[0, 1]])
    assert same_bits(dst[7], src[3])


def test_swap_blocks_merges_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyops.ops.cache import blocks

    made: list[tuple[int, int, int]] = []
    monkeypatch.setattr(blocks, "_copier", lambda src, dst: lambda *copy: made.append(copy))
    pyops.swap_blocks(make(8, 4), make(8, 4), 16, [[0, 4], [1, 5], [2, 6], [4, 7], [5, 0], [7, 2], [6, 1]])
    assert made == [(0, 64, 48), (64, 112, 16), (80, 0, 16), (112, 32, 16), (96, 16, 16)]


@pytest.mark.parametrize(
    ("argument", "args"),
    [
        ("block_mapping", (torch.zeros(4, 4), torch.zeros(4, 4), 16, torch.zeros(2, 3, dtype=torch.int64))),
        ("block_mapping", (torch.zeros(4, 4), torch.zeros(4, 4), 16, torch.zeros(2, 2))),
        ("block_size_in_bytes", (torch.zeros(4, 4), torch.zeros(4, 4), 0, [[0, 1]])),
        ("src", (torch.zeros(4, 4)[:, :2], torch.zeros(4, 4), 16, [[0, 1]])),
        ("dst", (torch.zeros(4, 4), numpy.zeros((4, 4)), 16, [[0, 1]])),
        ("dst", (torch.zeros(4, 4), 3, 16, [[0, 1]])),
        ("block_size_in_bytes", (torch.zeros(4, 4), torch.zeros(4, 4), True, [[0, 1]])),
        ("block_size_in_bytes", (torch.zeros(4, 4), torch.zeros(4, 4), 16.0, [[0, 1]])),
        ("block_mapping", (torch.zeros(4, 4), torch.zeros(4, 4), 16, [[0, 1], [2]])),
        ("src", (torch.zeros(4, 4)._neg_view(), torch.zeros(4, 4), 16, [[0, 1]])),
        ("dst", (torch.zeros(4, 4), torch.zeros(4, 2, dtype=torch.cfloat).conj(), 16, [[0, 1]])),
    ],
)
def test_swap_blocks_refuses(argument: str, args: Any) -> None:
    with pytest.raises(pyops.OpError, match=f"^swap_blocks: {argument}: "):
        pyops.swap_blocks(*args)


def test_blocks_of_any_dtype() -> None:
    for dtype in (torch.int16, torch.uint16, torch.float64, torch.complex64, torch.float8_e4m3fnuz):
        src = torch.arange(240, dtype=torch.uint8).view(dtype)
        dst = torch.zeros_like(src)
        pyops.swap_blocks(src, dst, numpy.int64(16), [[0, 2]])
        assert torch.equal(dst.view(torch.uint8)[32:48], src.view(torch.uint8)[:16])


def test_swap_blocks_within_a_tensor() -> None:
    """A destination may be no source, not in part either; then nothing is written."""
    x = make(4, 4)
    before = x.clone()
    for src, dst, mapping in ((x, x, [[3, 2], [0, 1], [1, 0]]), (x, x, [[0, 0]]), (x[1:], x, [[0, 2], [1, 0]])):
        with pytest.raises(pyops.OpError, match=r"^swap_blocks: block_mapping: a destination overlaps a source$"):
            pyops.swap_blocks(src, dst, 16, mapping)
    flat = x.view(-1)
    with pytest.raises(pyops.OpError, match="overlaps"):
        pyops.swap_blocks(flat[2:], flat, 16, [[0, 1]])
    assert torch.equal(x, before)
    pyops.swap_blocks(x, x, 16, [[0, 3], [1, 2]])
    assert torch.equal(x, before[[0, 1, 1, 0]])


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("way", ["to host", "to device", "on device"])
def test_swap_blocks_between_devices(way: str, pinned: bool) -> None:
    src, dst = make(300, 3, 5), torch.zeros(300, 3, 5)
    if pinned:
        src, dst = src.pin_memory(), dst.pin_memory()
    given = (src if way == "to device" else src.cuda()), (dst if way == "to host" else dst.cuda())
    sources = torch.cat((torch.arange(40), torch.randint(0, 300, (260,))))
    pyops.swap_blocks(*given, 60, torch.stack((sources, torch.arange(300)), 1))
    torch.cuda.synchronize()
    assert same_bits(given[1].cpu(), src[sources])


@pytest.mark.parametrize("where", DEVICES)
def test_convert_fp8_layouts(where: str) -> None:
    """Permuted, sliced and flat tensors: elements pair up by their indices, and nothing between them is written."""
    for shape, dims in (((3, 4, 5, 8), (0, 2, 1, 3)), ((6, 7), (1, 0)), ((9,), (0,)), ((2, 3, 4), (2, 0, 1))):
        x = make(*shape, where=where).permute(dims)
        output = torch.zeros(shape, dtype=torch.uint8, device=where).permute(dims)
        pyops.convert_fp8(output, x, 0.1)
        right = quantised(x, 0.1, torch.float8_e4m3fn)
        assert torch.equal(output, right)
        back = torch.zeros(shape, dtype=torch.float16, device=where).permute(dims)
        pyops.convert_fp8(back, output.view(torch.float8_e4m3fn), 0.1, "fp8_e4m3")
        assert same_bits(back.contiguous(), (right.view(torch.float8_e4m3fn).float() * 0.1).half().contiguous())
    column, single = make(5, 3, where=where)[:, 1:2], torch.zeros(5, 4, dtype=torch.uint8, device=where)
    pyops.convert_fp8(single[:, 2:3], column)
    assert torch.equal(single[:, 2:3], quantised(column, 1.0, torch.float8_e4m3fn))
    wide, codes = make(5, 12, where=where), torch.zeros(5, 16, dtype=torch.uint8, device=where)
    pyops.convert_fp8(codes[:, 3:10], wide[:, 2:9])
    assert torch.equal(codes[:, 3:10], quantised(wide[:, 2:9], 1.0, torch.float8_e4m3fn))
    assert not codes[:, :3].any()
    assert not codes[:, 10:].any()


@pytest.mark.parametrize("where", DEVICES)
def test_convert_fp8_of_more_rows_than_a_grid_has(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("pyops.ops.cache.convert_fp8"), "_MAX_ROWS", 2)
    pyops.registry["convert_fp8"].forget()
    x, codes = make(7, 12, where=where)[:, :9], torch.zeros(7, 9, dtype=torch.uint8, device=where)
    pyops.convert_fp8(codes, x)
    assert torch.equal(codes, quantised(x, 1.0, torch.float8_e4m3fn))
    pyops.registry["convert_fp8"].forget()


@pytest.mark.parametrize("where", DEVICES)
def test_convert_fp8_refuses(where: str) -> None:
    op = pyops.registry["convert_fp8"]
    x, codes = make(4, 6, where=where), torch.zeros(4, 6, dtype=torch.uint8, device=where)
    for kind in ("auto", "fp8_e5m2", "int8"):
        assert refusal(op, [codes, x, 1.0, kind]).argument == "kv_dtype"
    assert refusal(op, [x.clone(), x, 1.0, "fp8"]).argument == "output"
    assert refusal(op, [codes.clone(), codes, 1.0, "fp8"]).argument == "output"
    assert refusal(op, [codes.t().contiguous().t(), x, 1.0, "fp8"]).argument == "output"
    apart = torch.zeros(2, 3, 4, dtype=torch.uint8, device=where)[:, ::2, ::2]
    assert refusal(op, [apart, make(2, 2, 2, where=where), 1.0, "fp8"]).argument == "output"


# The rest.


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(("rope_size", "latent_size"), [(64, 512), (20, 36), (6, 5)])
def test_rope_fused(rope_size: int, latent_size: int, is_neox: bool, dtype: torch.dtype, where: str) -> None:
    """Angles and turns from float64, within three roundings; the cache holds what was turned, to the bit."""
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
    """As many as fill a device, which here is a small one: blocks take several tokens, the last one fewer."""
    op = pyops.registry[name]
    for case in axes.sample(op, max_cases=3):
        args = example(op, where, num_tokens=151, **case)
        few = op.launches(
            *op.example(ArgMaker(dataclasses.replace(small, multiprocessors=999)), num_tokens=151, **case)
        )
        many = op.launches(*op.example(ArgMaker(small), num_tokens=151, **case))
        for constant in {"TOKENS", "ROWS"} & many[0].specialisation.constants.keys():
            assert few[0].specialisation.constants[constant] < many[0].specialisation.constants[constant]
        assert_matches_reference(op, *args, schedules=SCHEDULES[:1])


@on_host
@pytest.mark.parametrize(
    "name", [name for name in FAMILY if "block_table" in {p.name for p in pyops.registry[name].tensors}]
)
@pytest.mark.parametrize("more", [20, -20])
def test_rows_behind_the_last(name: str, more: int, small: device.Device) -> None:
    """What the last block has beside the last row is not written, though lengths and owners go on.

    Nor are rows of no sequence.
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
def test_first_of_many_sequences(rows: int, small: device.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences in any order that overlap, leave gaps, are empty or hostile, the first one has a row."""
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
def test_tokens_beyond_the_slots_are_padding() -> None:
    """Keys and values may be longer than slot_mapping, whose length is the number of tokens."""
    key = make(9, 2, 16)
    caches = [torch.zeros(2, 4, 2, 16) for _ in range(2)]
    scales = torch.ones(()), torch.ones(1)
    assert_matches_reference(pyops.reshape_and_cache_flash, key, key[:7], *caches, ints([3, 0, 6]), "auto", *scales)
    with pytest.raises(pyops.OpError, match="value: expected at least num_tokens=8 rows"):
        pyops.reshape_and_cache_flash(key, key[:7], *caches, torch.arange(8), "auto", 1.0, 1.0)


@pytest.mark.parametrize(
    ("num_tokens", "token_vecs", "config"),
    [
        (1, 72, _geometry.Config(tokens=1, batch=1, num_threads=128)),
        (1, 4, _geometry.Config(tokens=16, batch=1, num_threads=64)),
        (528, 128, _geometry.Config(tokens=2, batch=1, num_threads=256)),
        (2111, 128, _geometry.Config(tokens=2, batch=1, num_threads=256)),
        (2112, 128, _geometry.Config(tokens=8, batch=4, num_threads=256)),
        (100000, 1, _geometry.Config(tokens=64, batch=1, num_threads=256)),
        (100000, 5000, _geometry.Config(tokens=1, batch=4, num_threads=256)),
    ],
)
def test_geometry_of_tokens(num_tokens: int, token_vecs: int, config: _geometry.Config) -> None:
    """Few tokens: small blocks. Some: one vector to a thread. Many: four. On 132 multiprocessors."""
    assert _geometry.choose(_geometry.Problem(num_tokens, token_vecs, float32), device.model()) == config


def test_geometry_of_early_blocks() -> None:
    """Smaller blocks, where there are more than those that look up early: four on each of 132 multiprocessors."""
    few, many = (_geometry.Problem(num_tokens, 72, float32, early=True) for num_tokens in (2115, 2116))
    assert _geometry.choose(many, device.model()) == _geometry.Config(tokens=4, batch=2, num_threads=160)
    assert _geometry.choose(few, device.model()) == _geometry.Config(tokens=3, batch=1, num_threads=256)
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
    problem = packed.Problem(num_tokens, num_slots, block_size, row_size=1024, load_vec=8, many=num_tokens > 16 * 132)
    assert packed.choose(problem, device.model()) == config
