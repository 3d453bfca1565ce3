"""GEMMs with packed weights against float64; the tests' own code packs and dequantises the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
from pyops import SCALAR_TYPES, ScalarType
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.ops._shared.packed_layouts import code_bit, column_place, zero_bit
from tests.ops.linear.test_products import assert_rounded_once
from tests.support import packed
from tests.support.calls import DEVICES

pytestmark = pytest.mark.rotates

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)
FP8 = torch.float8_e4m3fn


def activations(m: int, k: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(m)
    if dtype == torch.int8:
        return torch.randint(-128, 128, (m, k), generator=generator, dtype=dtype).to(device)
    return torch.randn(m, k, generator=generator).to(dtype).to(device)


def scales_of(groups: int, n: int, dtype: torch.dtype) -> Tensor:
    """Random scales from 2^-9 to 2^-6 + 2^-9: a quant times its scale may have to be rounded."""
    generator = torch.Generator().manual_seed(n)
    return (torch.rand(groups, n, generator=generator) * 2.0**-6 + 2.0**-9).to(dtype)


def each(rows: Tensor, k: int) -> Tensor:
    """[K, N]: the row of each group, repeated for the rows of the weight that are in the group."""
    return rows.repeat_interleave(k // len(rows), 0)


def check_product(
    out: Tensor, a: Tensor, w: Tensor, factor: Tensor | float = 1.0, shift: Tensor | float = 0.0, rounds: bool = False
) -> None:
    """Assert that `out` is ``factor * (a @ w) + shift``, rounded once.

    With `rounds`, the kernel may have rounded w to the dtype of `out` before the MMA, and the nearer result counts.
    """
    assert out.dtype in (torch.float16, torch.bfloat16)
    exact = factor * (a.cpu().double() @ w.double()) + shift
    if rounds:
        rounded = factor * (a.cpu().double() @ w.float().to(out.dtype).double()) + shift
        nearer = (out.cpu().double() - rounded).abs().max() < (out.cpu().double() - exact).abs().max()
        exact = rounded if nearer else exact
    assert_rounded_once(out.cpu(), exact)


def check_scaled(
    out: Tensor, a: Tensor, difference: Tensor, scales: Tensor, factor: Any = 1.0, shift: Any = 0.0
) -> None:
    """`check_product` of a weight ``difference * scales``, where `difference` is the quants minus the zero points.

    One row of scales, per column, is applied to the accumulators, so nothing is rounded before. With several groups,
    the scaled weight may be rounded.
    """
    if len(scales) == 1:
        check_product(out, a, difference.double(), scales.double() * factor, shift)
    else:
        check_product(out, a, difference.double() * each(scales.double(), len(difference)), factor, shift, rounds=True)


# Layouts


def test_layouts_are_permutations() -> None:
    """No two bits of a weight have the same offset, and no two columns the same index."""
    size = 96, 128
    k, n = torch.arange(size[0])[:, None], torch.arange(size[1])[None]
    for layout, bits in (
        *(("gptq", bits) for bits in (2, 3, 4, 8)),
        *(("exllama", bits) for bits in (2, 3, 4, 8)),
        *((layout, bits) for layout in ("awq", "marlin", "marlin_8", "marlin_24") for bits in (4, 8)),
        *(("bytes", 8), ("n32k16", 8)),
    ):
        places = torch.stack([code_bit(layout, bits, size, k, n, j) for j in range(bits)])
        assert torch.equal(places.flatten().sort().values, torch.arange(places.numel())), (layout, bits)
    for order in ("natural", "marlin_64", "marlin_32", "marlin_fp4", "marlin_24", "n32k16"):
        assert torch.equal(column_place(order, n[0]).sort().values, n[0])
    for layout, bits in (("awq", 4), ("awq", 8), ("gptq", 3), ("marlin", 4), ("marlin", 8), ("marlin_8", 4)):
        places = torch.stack([zero_bit(layout, bits, size[1], k[:3], n, j) for j in range(bits)])
        assert torch.equal(places.flatten().sort().values, torch.arange(places.numel())), (layout, bits)


def test_scalar_types_have_vllms_ids() -> None:
    """An id is a bit field. Widths from bit 0 on: exponent 8, mantissa 8, sign 1, bias 32, finite 1, NaN 8."""
    for name, id in (
        ("uint4", 4 << 8 | 1 << 50),
        ("uint4b8", 4 << 8 | 8 << 17 | 1 << 50),
        ("uint8b128", 8 << 8 | 128 << 17 | 1 << 50),
        ("int4", 3 << 8 | 1 << 16 | 1 << 50),
        ("float8_e4m3fn", 4 | 3 << 8 | 1 << 16 | 1 << 49 | 2 << 50),
        ("float4_e2m1f", 2 | 1 << 8 | 1 << 16 | 1 << 49),
    ):
        assert SCALAR_TYPES[name].id == id
        assert ScalarType.of(id) == SCALAR_TYPES[name]
        assert str(ScalarType.of(id)) == name
    assert str(ScalarType(0, 5, False)) == "(0, 5, False, 0, False, 1)"


@ANY_DEVICE
@pytest.mark.parametrize("is_a_8bit", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_marlin_repack(bits: int, is_a_8bit: bool, device: str) -> None:
    """Repacking weights of GPTQ and AWQ gives, bit for bit, what `packed.marlin` packs."""
    k, n = 64, 128
    codes = packed.draw(0, 1 << bits, k, n, seed=bits)
    expected = packed.marlin(codes, bits, is_a_8bit)
    found = pyops.gptq_marlin_repack(packed.gptq(codes, bits).to(device), None, k, n, bits, is_a_8bit)
    assert torch.equal(found.cpu(), expected)
    found = pyops.awq_marlin_repack(packed.awq(codes, bits).to(device), k, n, bits, is_a_8bit)
    assert torch.equal(found.cpu(), expected)


@ANY_DEVICE
def test_marlin_repack_of_experts_in_any_order(device: str) -> None:
    """Each expert's rows are permuted by its own `perm`; a row with an index out of range is 0."""
    k, n = 32, 64
    codes = packed.draw(0, 16, 2, k, n)
    perm = torch.stack([torch.randperm(k) for _ in range(2)])
    perm[1, 5], perm[1, 7] = -1, k
    moved = torch.stack([weight[order.clamp(0, k - 1)] for weight, order in zip(codes, perm, strict=True)])
    moved[1, [5, 7]] = 0
    raw = torch.stack([packed.gptq(one, 4) for one in codes]).to(device)
    order = perm.int().to(device)
    found = pyops.gptq_marlin_moe_repack(raw, order, k, n, 4)
    assert torch.equal(found.cpu(), torch.stack([packed.marlin(one, 4) for one in moved]))
    for expert in range(2):
        assert torch.equal(pyops.gptq_marlin_repack(raw[expert], order[expert], k, n, 4), found[expert])
    found = pyops.awq_marlin_moe_repack(torch.stack([packed.awq(one) for one in codes]).to(device), None, k, n, 4)
    assert torch.equal(found.cpu(), torch.stack([packed.marlin(one, 4) for one in codes]))


@ANY_DEVICE
@pytest.mark.parametrize("columns", [96, 70])
def test_allspark_layout(columns: int, device: str) -> None:
    k, padded = 48, 96
    codes, scales = packed.draw(0, 256, k, columns), scales_of(2, columns, torch.float16)
    weight = torch.empty(padded, k, dtype=torch.uint8, device=device)
    ordered = torch.empty(2, 1, padded, dtype=torch.float16, device=device)
    args = [codes.to(torch.uint8).to(device), scales[:1].to(device), scales[1:].to(device)]
    pyops.rearrange_kn_weight_as_n32k16_order(*args, True, weight, *ordered, k, columns, padded)
    assert torch.equal(weight.cpu(), packed.n32k16(codes))
    assert torch.equal(ordered[0].cpu(), packed.n32k16_columns(scales[:1]))
    assert torch.equal(ordered[1].cpu(), packed.n32k16_columns(scales[1:]))


@ANY_DEVICE
def test_int4_fp8_preprocess(device: str) -> None:
    """Every quant, without zero points and with each zero point: a quant below its zero point q becomes 15 - q."""
    codes, zeros = torch.arange(16).repeat(16, 1).T.repeat_interleave(2, 0), torch.arange(16).view(1, -1)
    right = torch.where(codes >= 8, codes - 8, 15 - codes)
    found = pyops.marlin_int4_fp8_preprocess(packed.awq(codes).to(device))
    assert torch.equal(found.cpu(), packed.awq(right))
    right = torch.where(codes >= zeros, codes - zeros, 15 - codes)
    weight = packed.awq(codes).to(device)
    found = pyops.marlin_int4_fp8_preprocess(weight, packed.awq(zeros).to(device), inplace=True)
    assert found is weight
    assert torch.equal(found.cpu(), packed.awq(right))


# AWQ and GPTQ


@ANY_DEVICE
@pytest.mark.parametrize(
    ("m", "groups", "n", "dtype"), [(1, 3, 40, torch.float16), (19, 2, 72, torch.bfloat16), (5, 1, 64, torch.float16)]
)
def test_awq_gemm(m: int, groups: int, n: int, dtype: torch.dtype, device: str) -> None:
    k = 96
    codes, zeros, scales = packed.draw(0, 16, k, n), packed.draw(0, 16, groups, n, seed=1), scales_of(groups, n, dtype)
    a = activations(m, k, dtype, device)
    out = pyops.awq_gemm(a, *(x.to(device) for x in (packed.awq(codes), scales, packed.awq(zeros))), 8)
    check_scaled(out, a, codes - each(zeros, k), scales)


@ANY_DEVICE
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_gptq_gemm(bits: int, v2: bool, device: str) -> None:
    """A weight as GPTQ stores it, with g_idx in any order; then one after `gptq_shuffle`, with rows in any order."""
    k, n, groups, dtype = 96, 64, 3, torch.float16
    codes, zeros = packed.draw(0, 1 << bits, k, n), packed.draw(0, 1 << bits, groups, n, seed=1)
    zeros[0, :3] = (1 << bits) - 1  # format v1 means one more, which does not fit into `bits`
    scales, a = scales_of(groups, n, dtype), activations(7, k, dtype, device)
    g_idx = packed.draw(0, groups, k, seed=2)
    stored = packed.gptq_zeros(zeros, bits).to(device)
    points = zeros + (0 if v2 else 1)
    raw = packed.gptq(codes, bits).to(device)
    out = pyops.gptq_gemm(a, raw, stored, scales.to(device), g_idx.int().to(device), False, v2, bits)
    check_product(out, a, (codes - points[g_idx]).double() * scales.double()[g_idx], rounds=True)
    # A row of the shuffled weight multiplies the column of a that the permutation names.
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(bits)).int().to(device)
    shuffled = raw.clone()
    pyops.gptq_shuffle(shuffled, perm, bits)
    out = pyops.gptq_gemm(a, shuffled, stored, scales.to(device), perm, True, v2, bits)
    rows = perm.cpu().long()
    check_scaled(out, a[:, rows.to(device)], codes[rows] - each(points, k), scales)


@ANY_DEVICE
def test_hostile_g_idx_and_permutation(device: str) -> None:
    """Weight rows with a g_idx out of range count as zeros, and so do columns of `a` with a perm out of range."""
    k, n, groups, dtype = 64, 64, 2, torch.float16
    codes, zeros, scales = packed.draw(0, 16, k, n), packed.draw(0, 16, groups, n), scales_of(groups, n, dtype)
    a, raw = activations(3, k, dtype, device), packed.gptq(codes, 4)
    given = [packed.gptq_zeros(zeros, 4).to(device), scales.to(device)]
    g_idx = torch.arange(k) // (k // groups)
    hostile = g_idx.clone()
    hostile[3], hostile[9], hostile[40] = -1, groups, 2**31 - 1
    w = (codes - zeros[g_idx]).double() * scales.double()[g_idx]
    w[[3, 9, 40]] = 0.0
    out = pyops.gptq_gemm(a, raw.to(device), *given, hostile.int().to(device), False, True, 4)
    check_product(out, a, w, rounds=True)
    perm = torch.arange(k)
    perm[3], perm[9], perm[10], perm[40] = -(2**31), k, 11, 2**31 - 1
    inside = (perm >= 0) & (perm < k)
    moved = a.cpu()[:, perm.where(inside, 0)] * inside
    shuffled = raw.clone().to(device)
    pyops.gptq_shuffle(shuffled, None, 4)
    out = pyops.gptq_gemm(a, shuffled, *given, perm.int().to(device), True, True, 4)
    check_scaled(out, moved, codes - each(zeros, k), scales)


# Marlin


def marlin_gemm(a: Tensor, weight: Tensor, kind: str, scales: Tensor, n: int, device: str, **given: Any) -> Tensor:
    """`pyops.marlin_gemm` on `device`, of arguments on the CPU; `a` is on the device already."""
    names = ("b_bias", "a_scales", "global_scale", "b_zeros", "g_idx", "perm")
    bias, a_scales, global_scale, zeros, g_idx, perm = (
        None if given.get(name) is None else given[name].to(device) for name in names
    )
    more = {name: value for name, value in given.items() if name in ("is_k_full", "is_zp_float", "c")}
    args = (a, weight.to(device), bias, scales.to(device), a_scales, global_scale, zeros, g_idx, perm, None)
    out: Tensor = pyops.marlin_gemm(*args, SCALAR_TYPES[kind].id, a.shape[0], n, a.shape[1], **more)
    return out


# (type of the quants, dtype of the activations, number of groups).
INTEGERS = [
    ("uint4b8", torch.bfloat16, 4),
    ("uint4b8", torch.float16, 1),
    ("uint8b128", torch.bfloat16, 1),
    ("uint8b128", torch.float16, 4),
    ("uint4", torch.bfloat16, 4),
    ("uint4", torch.float16, 1),
    ("uint8", torch.bfloat16, 4),
    ("uint4b8", torch.int8, 1),
    ("uint4", torch.int8, 1),
    ("uint8b128", torch.int8, 1),
    ("uint4", torch.int8, 2),
    ("uint4b8", torch.int8, 2),
    ("uint4b8", FP8, 1),
    ("uint4", FP8, 1),
    ("uint4b8", FP8, 2),
    ("uint4", FP8, 2),
]


@ANY_DEVICE
@pytest.mark.parametrize(("kind", "dtype", "groups"), INTEGERS)
def test_marlin_gemm_of_integers(kind: str, dtype: torch.dtype, groups: int, device: str) -> None:
    """With a bias, and activations with a row stride. Scales for 8-bit activations are as vLLM passes them."""
    m, k, n, type = 5, 128, 128, SCALAR_TYPES[kind]
    bits, is_a_8bit = type.size_bits, dtype.itemsize == 1
    T = torch.float16 if is_a_8bit else dtype
    codes, points = packed.draw(0, 1 << bits, k, n), torch.full((groups, n), type.bias)
    zeros = torch.empty(0, dtype=torch.int32)  # what vLLM's layers pass without zero points
    if type.bias == 0:
        points = packed.draw(0, 1 << bits, groups, n, seed=1)
        zeros = packed.marlin_zeros(points, bits, is_a_8bit)
    scales, given = scales_of(groups, n, T), codes
    stored, exponent = scales, 0
    if dtype == FP8:  # quants as `marlin_int4_fp8_preprocess` recodes them, with scales times 2^9
        stored, point = scales * 2.0**9, each(points, k)
        given = torch.where(codes >= point, codes - point, 15 - codes)
    elif dtype == torch.int8 and groups > 1:  # scales are int16, stored as the bits of T; a_scales are small instead
        scales = packed.draw(1, 4097, groups, n, seed=3).double()
        stored, exponent = scales.to(torch.int16).view(T), -20
    a = activations(m, k + 16, dtype, device)[:, :k]
    a_scales = (torch.rand(m, 1, generator=torch.Generator().manual_seed(4)) + 0.5) * 2.0**exponent
    bias = torch.randn(n, generator=torch.Generator().manual_seed(5)).to(T)
    out = marlin_gemm(
        *(a, packed.marlin(given, bits, is_a_8bit), kind, packed.marlin_scales(stored, is_a_8bit), n, device),
        b_bias=packed.blocks(bias, packed.PERM_32),
        a_scales=a_scales if is_a_8bit else None,
        b_zeros=zeros,
    )
    assert out.dtype == T
    check_scaled(out, a, codes - each(points, k), scales, a_scales.double() if is_a_8bit else 1.0, bias.double())


@ANY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
def test_marlin_gemm_of_fp8(dtype: torch.dtype, groups: int, device: str) -> None:
    """Weights are any e4m3 values but NaN. Callers pass scales times 2^8 (float16) or 2^120 (bfloat16)."""
    k, n = 128, 64
    codes = packed.draw(0, 256, k, n)
    codes[codes % 128 == 127] = 0
    numbers = codes.to(torch.uint8).view(FP8).double()
    scales = scales_of(groups, n, dtype)
    stored = scales * 2.0 ** (8 if dtype == torch.float16 else 120)
    a = activations(3, k, dtype, device)
    out = marlin_gemm(a, packed.marlin(codes, 8), "float8_e4m3fn", packed.marlin_scales(stored), n, device)
    check_scaled(out, a, numbers, scales)


@ANY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_scale_wide", [False, True])
def test_marlin_gemm_of_nvfp4(dtype: torch.dtype, is_scale_wide: bool, device: str) -> None:
    """Block scales are non-negative e4m3 values of any size. They and the global scale are as callers pass them."""
    k, n = 64, 64
    codes = packed.draw(0, 16, k, n)
    scales = packed.draw(0, 0x7F, k // 16, n, seed=1).to(torch.uint8).view(FP8)
    halves = packed.blocks(packed.blocks(scales.half(), packed.PERM_64), [0, 2, 1, 3]) * 2.0**7
    stored = (halves.view(torch.int16) << 1 >> 8).to(torch.uint8).view(FP8)
    scale = torch.tensor([0.3], dtype=torch.float32 if is_scale_wide else dtype)
    given = scale * 2.0 ** (7 if dtype == torch.float16 else 119)
    a = activations(4, k, dtype, device)
    out = marlin_gemm(a, packed.marlin(codes, 4), "float4_e2m1f", stored, n, device, global_scale=given)
    check_product(out, a, packed.E2M1.double()[codes] * each(scales.double(), k), scale.item())


@ANY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_marlin_gemm_of_mxfp4(dtype: torch.dtype, device: str) -> None:
    k, n, is_a_8bit = 64, 64, dtype == FP8
    codes, exponents = packed.draw(0, 16, k, n), packed.draw(110, 132, k // 32, n, seed=1)
    stored = packed.blocks(exponents, packed.PERM_32 if is_a_8bit else packed.PERM_64)
    stored = stored + 6 if is_a_8bit else packed.blocks(stored, [0, 2, 1, 3])
    a, a_scales = activations(4, k, dtype, device), torch.full((4, 1), 0.75)
    for scales in (stored.to(torch.uint8), stored.to(torch.uint8).view(torch.float8_e8m0fnu)):
        out = marlin_gemm(
            *(a, packed.marlin(codes, 4, is_a_8bit), "float4_e2m1f", scales, n, device),
            a_scales=a_scales if is_a_8bit else None,
        )
        w = packed.E2M1.double()[codes] * torch.exp2(each(exponents, k).double() - 127.0)
        check_product(out, a, w, 0.75 if is_a_8bit else 1.0)


@ANY_DEVICE
@pytest.mark.parametrize("is_k_full", [True, False])
def test_marlin_gemm_with_act_order(is_k_full: bool, device: str) -> None:
    """Row k of the weight multiplies column perm[k] of `a`; without is_k_full, a shard, its group is g_idx[k]."""
    k, n, groups, dtype = 128, 64, 4, torch.bfloat16
    codes, scales, a = packed.draw(0, 16, k, n), scales_of(groups, n, dtype), activations(6, k, dtype, device)
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    g_idx = torch.arange(k) // 32 if is_k_full else packed.draw(1, groups, k, seed=2).sort().values
    c = torch.full((6, n), torch.nan, dtype=dtype, device=device)
    out = marlin_gemm(
        *(a, packed.marlin(codes, 4), "uint4b8", packed.marlin_scales(scales), n, device),
        g_idx=g_idx.int(),
        perm=perm.int(),
        is_k_full=is_k_full,
        c=c,
    )
    assert out is c
    check_product(c, a[:, perm.to(device)], (codes - 8).double() * scales.double()[g_idx], rounds=True)


@ANY_DEVICE
@pytest.mark.parametrize("groups", [1, 2])
def test_marlin_gemm_with_float_zero_points(groups: int, device: str) -> None:
    k, n, dtype = 64, 64, torch.float16
    codes, scales = packed.draw(0, 16, k, n), scales_of(groups, n, dtype)
    zeros = (torch.rand(groups, n, generator=torch.Generator().manual_seed(1)) * 15).to(dtype)
    a = activations(3, k, dtype, device)
    weight, ordered = packed.marlin(codes, 4), packed.marlin_scales(zeros)
    given = {"b_zeros": ordered, "is_zp_float": True}
    out = marlin_gemm(a, weight, "uint4", packed.marlin_scales(scales), n, device, **given)
    check_product(out, a, (codes - each(zeros.double(), k)) * each(scales.double(), k), rounds=True)


@ANY_DEVICE
@pytest.mark.parametrize(("kind", "groups"), [("uint4b8", 1), ("uint4b8", 2), ("uint8b128", 2)])
def test_gptq_marlin_24_gemm(kind: str, groups: int, device: str) -> None:
    """The metadata keeps any two rows of four. If it names one row twice, the second value counts."""
    k, n, dtype, type = 64, 64, torch.float16, SCALAR_TYPES[kind]
    codes, scales = packed.draw(0, 1 << type.size_bits, k // 2, n), scales_of(groups, n, dtype)
    first, second = packed.draw(0, 4, 2, k // 4, n, seed=1)
    dense = torch.full((k, n), type.bias)
    for quad in range(k // 4):
        for column in range(n):
            dense[4 * quad + first[quad, column], column] = codes[2 * quad, column]
            dense[4 * quad + second[quad, column], column] = codes[2 * quad + 1, column]
    stored = scales if groups == 1 else packed.blocks(scales, packed.ORDER_24)
    weight = packed.marlin(codes, type.size_bits, sparse=True)
    a = activations(5, k, dtype, device)
    given = (x.to(device) for x in (weight, packed.places_24(first | second << 2), stored))
    out = pyops.gptq_marlin_24_gemm(a, *given, None, type.id, 5, n, k)
    check_scaled(out, a, dense - type.bias, scales)


# Machete, W4A8, AllSpark


@ANY_DEVICE
@pytest.mark.parametrize(
    ("kind", "group_size", "dtype"),
    [
        ("uint4b8", 64, torch.bfloat16),
        ("uint8b128", -1, torch.float16),
        ("uint4", -1, torch.bfloat16),
        ("uint8", 64, torch.float16),
    ],
)
def test_machete(kind: str, group_size: int, dtype: torch.dtype, device: str) -> None:
    """K = 144 is no multiple of the group size 64: the last group has fewer rows."""
    m, k, n, type = 17 if group_size == -1 else 9, 144, 128, SCALAR_TYPES[kind]  # M for the large-M and small-M kernels
    codes = packed.draw(0, 1 << type.size_bits, k, n)
    rows = k if group_size == -1 else group_size
    groups = -(-k // rows)
    scales, g = scales_of(groups, n, dtype), torch.arange(k) // rows
    zeros = None if type.bias else torch.randn(groups, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    raw = packed.gptq(codes, type.size_bits).t().contiguous().t().to(device)
    weight = pyops.machete_prepack_B(raw, dtype, type.id, dtype)
    a = activations(m, k + 8, dtype, device)[:, :k]
    (schedule,) = pyops.machete_supported_schedules(dtype, type.id, dtype, None if zeros is None else dtype)
    more = {"group_scales": scales.to(device), "group_zeros": None if zeros is None else zeros.to(device)}
    out = pyops.machete_mm(a, weight, type.id, group_size=group_size, schedule=schedule, **more)
    if zeros is None and groups == 1:
        check_product(out, a, codes - type.bias, scales.double())
    else:
        shift = 0.0 if zeros is None else zeros.double()[g]
        check_product(out, a, (codes - type.bias).double() * scales.double()[g] + shift, rounds=True)
    with pytest.raises(pyops.OpError, match="machete_mm: B: expected a contiguous tensor, as machete_prepack_B"):
        pyops.machete_mm(a, raw, type.id, group_size=group_size, **more)


def test_machete_supports_its_types() -> None:
    half, id = torch.float16, SCALAR_TYPES["uint4b8"].id
    assert pyops.machete_supported_schedules(half, id, half) == ["default"]
    for wrong in (
        (torch.float32, id, torch.float32),
        (half, id, None),
        (half, id, torch.bfloat16),
        (half, id, half, half),
        (half, SCALAR_TYPES["uint4"].id, half),
        (half, SCALAR_TYPES["int4"].id, half),
        (half, id, half, None, torch.float32),
        (half, id, half, None, None, None, torch.bfloat16),
    ):
        assert pyops.machete_supported_schedules(*wrong) == []


@ANY_DEVICE
@pytest.mark.parametrize("n", [96, 48])
def test_w4a8(n: int, device: str) -> None:
    """The weight is quant * scale, rounded to e4m3 and saturated. With n = 48 its last tile has half the columns."""
    m, k, rows = 7, 128, 32
    codes = packed.draw(-8, 8, k, n)
    scales = (torch.randn(k // rows, n, generator=torch.Generator().manual_seed(1)) * 20.0).to(FP8)
    w = (codes * each(scales.double(), k)).clamp(-448.0, 448.0).to(FP8).double()
    raw = packed.gptq(codes & 15, 4).t().contiguous().t().to(device)
    weight = pyops.cutlass_encode_and_reorder_int4b(raw)
    assert weight.is_contiguous()
    products = pyops.cutlass_pack_scale_fp8(scales.to(device))
    assert products.shape == (8 * scales.numel(),)
    channel, token = (torch.rand(size, generator=torch.Generator().manual_seed(size)) + 0.5 for size in (n, m))
    a = activations(m, k, FP8, device)
    for out_type in (torch.bfloat16, torch.float16):
        given = products, rows, channel.to(device) * 2.0**-6, token.to(device)[:, None]
        out = pyops.cutlass_w4a8_mm(a, weight, *given, out_type, "128x16_1x1x1")
        check_product(out, a, w, channel.double() * 2.0**-6 * token.double()[:, None])
    with pytest.raises(pyops.OpError, match="cutlass_w4a8_mm: B: expected a contiguous tensor, as cutlass_encode"):
        pyops.cutlass_w4a8_mm(a, raw, *given)
    several, layout = pyops.cutlass_encode_and_reorder_int4b_grouped(torch.stack([raw.t(), raw.t()]).contiguous())
    assert torch.equal(several[1].view(weight.shape), weight)
    assert layout.shape == (2, 0)


@ANY_DEVICE
@pytest.mark.parametrize(("has_zp", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_allspark(has_zp: bool, dtype: torch.dtype, device: str) -> None:
    m, k, n = 11, 48, 72
    codes, scales = packed.draw(0, 256, k, n), scales_of(1, n, dtype)
    zeros = (torch.randn(1, n, generator=torch.Generator().manual_seed(1)) * 8.0).to(dtype)
    a = activations(m, k, dtype, device)
    points = packed.n32k16_columns(zeros).to(device) if has_zp else None
    given = packed.n32k16(codes).to(device), packed.n32k16_columns(scales).to(device), points
    out = pyops.allspark_w8a16_gemm(a, *given, n, -1, 132, 90, 1024, has_zp, True)
    difference = (codes - 128).double() - (zeros.double() if has_zp else 0.0)
    check_product(out, a, difference, scales.double(), rounds=True)


# Refusals


def refused(op: Any, argument: str, change: dict[str, Any], message: str, **axes: Any) -> None:
    args = op.op.example(ArgMaker(devices.model()), **axes)
    given = dict(zip((p.name for p in op.op.parameters), args, strict=True)) | change
    with pytest.raises(pyops.OpError, match=message) as caught:
        op.op.launches(*given.values())
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("op", "argument", "change", "message"),
    [
        ("marlin_gemm", "b_type_id", {"b_type_id": 7}, "expected uint4b8"),
        ("marlin_gemm", "size_n", {"size_n": 40}, "expected a multiple of 64, got 40"),
        ("marlin_gemm", "size_k", {"size_k": 8, "a": (16, 8)}, "expected a multiple of 16, got 8"),
        ("marlin_gemm", "b_zeros", {"b_zeros": (4, 8)}, "expected None with uint4b8 codes"),
        ("marlin_gemm", "b_scales", {"b_scales": (3, 64)}, "expected groups that divide K, 128, got 3"),
        ("marlin_gemm", "is_zp_float", {"is_zp_float": True}, "expected False"),
        ("gptq_gemm", "bit", {"bit": 5}, "expected one of"),
        ("awq_gemm", "scales", {"scales": (3, 72)}, "expected groups that divide K, 160, got 3"),
        ("machete_mm", "schedule", {"schedule": "fast"}, "expected None or one of"),
        ("machete_mm", "group_size", {"group_size": 0}, "expected 1 or more, -1 or None, got 0"),
        ("machete_mm", "group_scales", {"group_scales": None}, "expected scales, got None"),
        ("cutlass_w4a8_mm", "group_size", {"group_size": 7}, "expected a number that divides K, 128, got 7"),
        ("cutlass_w4a8_mm", "maybe_schedule", {"maybe_schedule": "x"}, "expected None or one of"),
        ("allspark_w8a16_gemm", "group_size", {"group_size": 64}, "expected -1, got 64"),
        ("allspark_w8a16_gemm", "n32k16_reorder", {"n32k16_reorder": False}, "expected True"),
        ("gptq_marlin_repack", "num_bits", {"num_bits": 3}, "expected one of"),
        ("gptq_marlin_24_gemm", "b_q_type", {"b_q_type": SCALAR_TYPES["uint4"].id}, "expected uint4b8"),
    ],
)
def test_refused(op: str, argument: str, change: dict[str, Any], message: str) -> None:
    make = ArgMaker(devices.model(), op)
    dtypes = {"b_zeros": "int32", "a": "bfloat16", "b_scales": "bfloat16", "scales": "float16"}
    change = {
        name: make.empty(*one, dtype=dtypes[name]) if isinstance(one, tuple) else one for name, one in change.items()
    }
    refused(getattr(pyops, op), argument, change, message)
