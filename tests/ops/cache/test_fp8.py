"""fp8 conversion in cache ops: every value, against torch's own conversions and float64."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import pyops
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.testing import same_bits
from tests.support.cache import CODES, FNUZ, KINDS, as_given, bytes_of, every_value, ints, make, quantised
from tests.support.calls import DEVICES


@pytest.mark.parametrize("where", DEVICES)
@CODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0e-3, 7.0, 1e-30, 1e30, -0.3, 0.0, 2.0**-140, float("inf")])
def test_fp8_of_every_value(dtype: torch.dtype, kind: str, code: torch.dtype, scale: float, where: str) -> None:
    """A true division, rounded to nearest, saturating; infinities become the largest value, NaN and the sign of zero
    stay.
    """
    x = every_value(dtype, where).reshape(256, 256)
    cache = torch.zeros(16, 16, 256, dtype=torch.uint8, device=where)
    slots = torch.arange(256, device=where)
    s = torch.tensor([scale], device=where)
    pyops.concat_and_cache_mla(x[:, :192], x[:, 192:], as_given(cache, code), slots, kind, s)
    assert torch.equal(cache.view(256, 256), quantised(x, scale, code))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.7e-3, 2.0**-100])
@pytest.mark.parametrize("code", [torch.float8_e4m3fn, FNUZ])
def test_fp8_of_float32(code: torch.dtype, scale: float, where: str) -> None:
    """Quotients next to every tie between two fp8 values, so that a division off by one ulp would show."""
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
def test_floats_of_every_fp8_value(dtype: torch.dtype, kind: str, code: torch.dtype, where: str) -> None:
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
def test_fnuz_cache(where: str) -> None:
    """Every op that writes fp8; both caches of a call have the same type, and no other type is taken for FNUZ."""
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
def test_bytes_have_the_fp8_type_of_the_device(name: str, more: dict[str, Any], arch: str, own: str) -> None:
    """A byte cache holds the device's own e4m3 type, for ops that read and that write."""
    op = pyops.registry[name]
    assert op.example is not None
    launches = op.launches(*op.example(ArgMaker(device.model(arch)), **more))
    types = {str(value) for launch in launches for value in launch.specialisation.constants.values()}
    assert types & {"float8_e4m3fn", "float8_e4m3fnuz"} == {own}


@pytest.mark.parametrize("where", DEVICES)
def test_float8_cache(where: str) -> None:
    """A cache may be uint8 or float8; scales may be Python numbers."""
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
def test_ds_mla_latent(dtype: torch.dtype, where: str) -> None:
    """656 bytes: fp8 values, scales of at least 2^-126, and the unquantized rope part; derived from float64 in another
    way.
    """
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
    """A round trip through fp8_ds_mla to bfloat16, within half an ulp of fp8."""
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
    """fp8 values of all slots, then scales of all slots; power-of-two scales by their logarithm in float64."""
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
        # The tokens of a sequence are not consecutive in the cache.
        table, lens = ints([[2, 1], [0, 9]], torch.int32, where).T, ints([0, 8, 12], torch.int32, where)
        pyops.cp_gather_indexer_k_quant_cache(cache, keys, kept, table, lens)
        order = [2, 0, 1]
        assert torch.equal(keys, torch.cat([cache[b].flatten()[: 4 * head_size].reshape(4, -1) for b in order]))
        assert torch.equal(kept, torch.cat([cache[b].flatten()[4 * head_size :].reshape(4, -1) for b in order]))
