"""Kernels that read packed weights: correct under every schedule, at the edges of tiles; the chosen configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
from pyops import SCALAR_TYPES
from pyops._core.system import device
from pyops.host.toolchain import toolchains
from pyops.ops.linear.dequantize_packed import DequantizeConfig
from pyops.ops.linear.gemm_simt import GemmSimtConfig
from pyops.ops.linear.packed_hopper import PackedConfig
from pyops.ops.linear.packed_large import PackedLargeConfig
from pyops.ops.linear.packed_mma import PackedMmaConfig
from pyops.ops.linear.packed_narrow import PackedNarrowConfig
from pyops.ops.linear.packed_tile import PackedTileConfig
from pyops.testing import SCHEDULES, scheduled
from tests.hip.host import on_matrix_core
from tests.ops.linear.test_packed import activations, check_product, check_scaled, each, scales_of
from tests.ops.linear.test_products import forced
from tests.support import packed

pytestmark = pytest.mark.rotates

HOPPER = device.model("sm_90")
needs_compiler = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")


def awq(a: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> Tensor:
    return pyops.awq_gemm(a, packed.awq(codes, bits), scales, packed.awq(zeros, bits), 8)


def gptq(a: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, exllama: bool = False) -> Tensor:
    weight, order = packed.gptq(codes, bits), torch.empty(0, dtype=torch.int32)
    if exllama:
        pyops.gptq_shuffle(weight, order, bits)
    return pyops.gptq_gemm(a, weight, packed.gptq_zeros(zeros, bits), scales, order, exllama, True, bits)


def exllama(a: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> Tensor:
    return gptq(a, codes, zeros, scales, bits, exllama=True)


def marlin(a: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Zero points are given for 4 bits; for 8 bits they are all 128."""
    (k, n), kind = codes.shape, SCALAR_TYPES["uint4" if bits == 4 else "uint8b128"]
    points = packed.marlin_zeros(zeros, bits) if bits == 4 else None
    weight = packed.marlin(codes, bits), None, packed.marlin_scales(scales), None, None
    return pyops.marlin_gemm(a, *weight, points, None, None, None, kind.id, len(a), n, k)


def allspark(a: Tensor, quants: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Zero points are all 128."""
    given = packed.n32k16(quants), packed.n32k16_columns(scales), None
    return pyops.allspark_w8a16_gemm(a, *given, quants.shape[1], -1, 132, 90, 1024, False, True)


FEW = [
    (marlin, 4, PackedMmaConfig(1, 64, 3, 2, 4), 2, 128, 1024, 4),
    (marlin, 4, PackedMmaConfig(16, 64, 2, 1, 1), 17, 64, 272, 17),  # the last k-tile has 16 rows
    (marlin, 8, PackedMmaConfig(8, 64, 2, 1, 1), 5, 64, 512, 1),
    (allspark, 8, PackedMmaConfig(1, 64, 3, 2, 1, held=True), 1, 128, 512, 1),
    (allspark, 8, PackedMmaConfig(16, 64, 2, 1, 1), 17, 192, 80, 1),  # the last k-tile has 16 rows
    (gptq, 4, PackedMmaConfig(4, 64, 1, 2, 1), 9, 64, 512, 16),
    (gptq, 8, PackedMmaConfig(2, 64, 2, 1, 1), 2, 128, 200, 1),
    (gptq, 4, PackedMmaConfig(4, 64, 1, 2, 1, held=True), 3, 128, 424, 1),  # the last k-tile has 40 rows
    (marlin, 8, PackedMmaConfig(16, 64, 2, 1, 1, held=True), 9, 64, 512, 4),
    (exllama, 4, PackedMmaConfig(16, 64, 2, 1, 1), 30, 64, 256, 2),
    (gptq, 2, PackedMmaConfig(8, 64, 2, 1, 1), 7, 64, 640, 5),  # groups of half a k-tile; the last k-tile has 128 rows
    (exllama, 2, PackedMmaConfig(16, 64, 1, 2, 1), 17, 64, 528, 1),
    (exllama, 3, PackedMmaConfig(2, 64, 3, 1, 2), 3, 128, 416, 1),  # the last k-tile has 32 rows
    (exllama, 3, PackedMmaConfig(16, 64, 2, 2, 1), 17, 64, 1024, 4),  # groups of two k-tiles
    (awq, 4, PackedMmaConfig(8, 64, 2, 4, 1), 8, 64, 1088, 1),
    (awq, 4, PackedMmaConfig(1, 128, 2, 2, 1), 1, 256, 640, 5),  # groups of two k-tiles, which splits of K may cut
    (awq, 4, PackedMmaConfig(16, 128, 2, 1, 1), 20, 128, 288, 9),
    (marlin, 4, PackedMmaConfig(8, 64, 2, 1, 1), 5, 64, 272, 17),  # groups of one of a unit's two MMAs
]
NARROW = [
    (marlin, 4, PackedNarrowConfig(4), 13, 320, 1296, 1),  # the last k-tile has 16 rows
    (marlin, 4, PackedNarrowConfig(4), 17, 64, 768, 3),  # a second tile of rows
    (awq, 4, PackedNarrowConfig(8), 16, 576, 1024, 8),
    (awq, 4, PackedNarrowConfig(8), 1, 128, 200, 1),
    (exllama, 4, PackedNarrowConfig(4), 16, 320, 552, 1),  # the last k-tile has 40 rows
]
MANY = [
    (marlin, 4, PackedConfig(16, 128, 2, 4, 1), 13, 192, 272, 17),
    (marlin, 4, PackedConfig(128, 256, 1, 1, 1), 130, 320, 192, 3),
    (marlin, 8, PackedConfig(32, 256, 1, 2, 1), 20, 64, 256, 2),
    (allspark, 8, PackedConfig(16, 128, 2, 2, 1), 13, 192, 144, 1),
    (allspark, 8, PackedConfig(64, 256, 2, 1, 1), 70, 320, 128, 1),
    (gptq, 4, PackedConfig(80, 128, 2, 1, 1), 20, 192, 160, 5),
    (gptq, 8, PackedConfig(64, 128, 2, 1, 1), 70, 64, 72, 1),
    (exllama, 4, PackedConfig(256, 128, 1, 1, 1), 40, 128, 64, 1),
    (gptq, 2, PackedConfig(16, 256, 2, 1, 1), 13, 320, 144, 1),
    (exllama, 2, PackedConfig(48, 128, 2, 1, 1), 40, 192, 192, 3),
    (awq, 4, PackedConfig(32, 256, 2, 2, 1), 30, 320, 256, 4),
    (awq, 4, PackedConfig(48, 128, 1, 1, 2), 50, 64, 72, 1),
    # The last tile of 112 rows has 50, in boxes of 16; the only tile of 96 rows has 71.
    (marlin, 4, PackedConfig(112, 128, 2, 1, 1), 162, 192, 192, 3),
    (gptq, 4, PackedConfig(96, 256, 2, 1, 1), 71, 320, 128, 2),
    (marlin, 4, PackedConfig(48, 256, 2, 1, 1, boxes=2), 60, 320, 256, 2),  # k-tiles of two boxes of 128 bytes
    # A cluster multicasts boxes of 32 rows, of a last tile that has one of them.
    (marlin, 4, PackedConfig(96, 128, 2, 1, 1, neighbours=2), 120, 512, 192, 3),
]
LARGE = [
    (marlin, 4, PackedLargeConfig(64, 2, 2, 1), 130, 192, 256, 2),  # a second tile of rows; warps without columns
    (marlin, 4, PackedLargeConfig(16, 1, 2, 2, 4), 13, 192, 448, 28),  # four groups in a k-tile; stream-K
    (marlin, 8, PackedLargeConfig(48, 1, 2, 4, 2), 40, 64, 320, 5),
    (allspark, 8, PackedLargeConfig(32, 1, 2, 1), 20, 192, 128, 1),
    (marlin, 4, PackedLargeConfig(32, 1, 2, 1, 2, warps_k=2), 30, 192, 384, 6),  # two teams; stream-K
    (exllama, 4, PackedLargeConfig(16, 1, 2, 1, warps_k=4), 13, 128, 512, 4),
    (gptq, 4, PackedLargeConfig(64, 1, 2, 1), 64, 128, 192, 6),  # two groups in a k-tile
    (exllama, 8, PackedLargeConfig(16, 2, 2, 1), 30, 128, 128, 1),
    (gptq, 2, PackedLargeConfig(16, 2, 2, 1, 3), 70, 64, 320, 5),
    (awq, 4, PackedLargeConfig(16, 1, 4, 2), 17, 320, 192, 6),
]


@needs_compiler
@pytest.mark.parametrize(
    ("call", "bits", "one", "m", "n", "k", "groups", "dtype"),
    [(*case, (torch.bfloat16, torch.float16)[i % 2]) for i, case in enumerate(FEW + NARROW + MANY + LARGE)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_packed_gemm(
    call: Callable[..., Tensor], bits: int, one: Any, m: int, n: int, k: int, groups: int, dtype: torch.dtype
) -> None:
    """All schedules give the same bits, rounded once."""
    codes, zeros = packed.draw(0, 1 << bits, k, n), packed.draw(0, 1 << bits, groups, n, seed=1)
    if call in (marlin, allspark) and bits == 8:
        zeros.fill_(128)
    a, scales = activations(m, k + 8, dtype, "cpu")[:, :k], scales_of(groups, n, dtype)
    name, first = {awq: "awq_gemm", marlin: "marlin_gemm", allspark: "allspark_w8a16_gemm"}.get(call, "gptq_gemm"), None
    with forced(name, one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                out = call(a, codes, zeros, scales, bits)
            first = out if first is None else first
            assert torch.equal(out, first)
    check_scaled(out, a, codes - each(zeros, k), scales)


SPARSE = [
    ("uint4b8", PackedMmaConfig(2, 64, 3, 1, 1), 3, 128, 416, 1, torch.bfloat16),  # the last k-tile has 32 rows
    ("uint4b8", PackedMmaConfig(16, 64, 2, 2, 1), 17, 64, 512, 8, torch.float16),  # groups of half a k-tile
    ("uint8b128", PackedMmaConfig(8, 64, 2, 1, 1), 5, 64, 384, 3, torch.bfloat16),
]


@needs_compiler
@pytest.mark.parametrize(("kind", "one", "m", "n", "k", "groups", "dtype"), SPARSE)
def test_sparse_2_4_weights(
    kind: str, one: PackedMmaConfig, m: int, n: int, k: int, groups: int, dtype: torch.dtype
) -> None:
    """Any two rows of four have quants; if the metadata names one position twice, the second quant counts."""
    type = SCALAR_TYPES[kind]
    kept, places = packed.draw(0, 1 << type.size_bits, k // 4, 2, n), packed.draw(0, 4, k // 4, 2, n, seed=1)
    quads = torch.full((k // 4, 4, n), type.bias)
    for i in range(2):
        quads.scatter_(1, places[:, i : i + 1], kept[:, i : i + 1])
    codes, stored = kept.view(k // 2, n), packed.places_24(places[:, 0] | places[:, 1] << 2)
    a, scales, first = activations(m, k, dtype, "cpu"), scales_of(groups, n, dtype), None
    ordered = scales if groups == 1 else packed.blocks(scales, packed.ORDER_24)
    weight = packed.marlin(codes, type.size_bits, sparse=True)
    with forced("gptq_marlin_24_gemm", one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                out = pyops.gptq_marlin_24_gemm(a, weight, stored, ordered, None, type.id, m, n, k)
            first = out if first is None else first
            assert torch.equal(out, first)
    check_scaled(out, a, quads.view(k, n) - type.bias, scales)


TILE = [
    # (matrix core, ...): of MFMA, warps of 64 lanes
    ("MFMA", marlin, 4, PackedTileConfig(32, 128, 1, 2, 2, 2), 17, 192, 272, 17),  # the last k-tile has 16 rows
    ("MFMA", awq, 4, PackedTileConfig(16, 64, 1, 2, 4, 4), 20, 64, 1088, 17),  # splits of four and of five k-tiles
    ("MFMA", allspark, 8, PackedTileConfig(16, 64, 1, 2, 4, 2), 3, 128, 80, 1),  # a split is one k-tile of 16 rows
    ("MFMA", gptq, 8, PackedTileConfig(128, 128, 2, 4, 2, 1), 130, 64, 72, 1),
    ("WMMA_12", gptq, 2, PackedTileConfig(16, 64, 1, 4, 4, 1), 7, 64, 640, 5),  # half of the threads load
    ("WMMA_12", marlin, 8, PackedTileConfig(32, 64, 1, 4, 2, 1), 20, 64, 512, 1),
    ("WMMA_11", exllama, 4, PackedTileConfig(64, 64, 2, 2, 2, 1), 70, 128, 256, 2),
]


@needs_compiler
@pytest.mark.parametrize(
    ("core", "call", "bits", "one", "m", "n", "k", "groups"),
    TILE,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_packed_gemm_on_matrix_cores(
    monkeypatch: pytest.MonkeyPatch,
    core: str,
    call: Callable[..., Tensor],
    bits: int,
    one: PackedTileConfig,
    m: int,
    n: int,
    k: int,
    groups: int,
) -> None:
    """Several schedules give the same bits, rounded once; float16 in pairs."""
    dtype = torch.float16 if call in (awq, exllama) else torch.bfloat16
    codes, zeros = packed.draw(0, 1 << bits, k, n), packed.draw(0, 1 << bits, groups, n, seed=1)
    if call in (marlin, allspark) and bits == 8:
        zeros.fill_(128)
    a, scales = activations(m, k + 8, dtype, "cpu")[:, :k], scales_of(groups, n, dtype)
    name, first = {awq: "awq_gemm", marlin: "marlin_gemm", allspark: "allspark_w8a16_gemm"}.get(call, "gptq_gemm"), None
    with on_matrix_core(core, monkeypatch) as lanes, forced(name, one):
        for schedule in (SCHEDULES[0], SCHEDULES[-1]):
            with scheduled(schedule, warp_size=lanes):
                out = call(a, codes, zeros, scales, bits)
            first = out if first is None else first
            assert torch.equal(out, first)
    check_scaled(out, a, codes - each(zeros, k), scales)


CUT = [
    # (call, dtype, config, m, n, k, SMs): tiles of 80 x 128 have a k-tile of 64
    # A wave, then two tiles by three CTAs: more k-tiles than stages.
    (awq, torch.float16, PackedConfig(80, 128, 2, 1, 1, 3, 2), 70, 640, 320, 3),
    (gptq, torch.bfloat16, PackedConfig(80, 128, 2, 1, 1, 5, 1), 70, 128, 320, 6),  # a tile by five CTAs, a k-tile each
    # A wave of two clusters, which share the last tile and no other.
    (gptq, torch.float16, PackedConfig(80, 128, 2, 1, 1, 2, 1, neighbours=2), 70, 640, 320, 4),
    (marlin, torch.bfloat16, PackedConfig(16, 128, 2, 1, 1, 3, 1), 13, 512, 320, 3),  # a tile that threads store
    (awq, torch.bfloat16, PackedConfig(48, 256, 2, 1, 1, 4, 3), 41, 768, 256, 4),
]


@needs_compiler
@pytest.mark.parametrize(("call", "dtype", "one", "m", "n", "k", "num_sms"), CUT)
def test_stream_k_last_wave(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., Tensor],
    dtype: torch.dtype,
    one: Any,
    m: int,
    n: int,
    k: int,
    num_sms: int,
) -> None:
    """Partial sums are added in the order of K, whichever block arrives last."""
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=num_sms))
    groups = k // 64
    codes, zeros = packed.draw(0, 16, k, n), packed.draw(0, 16, groups, n, seed=1)
    a, scales, first = activations(m, k, dtype, "cpu"), scales_of(groups, n, dtype), None
    with forced({awq: "awq_gemm", marlin: "marlin_gemm"}.get(call, "gptq_gemm"), one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                out = call(a, codes, zeros, scales, 4)
            first = out if first is None else first
            assert torch.equal(out, first)
    check_scaled(out, a, codes - each(zeros, k), scales)


FLOATS = [  # the small-M kernel rounds no weight; the large-M kernel rounds weight minus zero point
    (marlin, PackedMmaConfig(16, 64, 2, 1, 1), 11, 64, 272, 17, False),
    (marlin, PackedNarrowConfig(4), 11, 64, 256, 2, False),
    (allspark, PackedMmaConfig(4, 64, 1, 2, 1), 3, 128, 512, 1, False),
    (allspark, PackedConfig(16, 128, 2, 2, 1), 13, 192, 144, 1, True),
]


@needs_compiler
@pytest.mark.parametrize(("call", "one", "m", "n", "k", "groups", "rounds"), FLOATS)
def test_float_zero_points(
    call: Callable[..., Tensor], one: Any, m: int, n: int, k: int, groups: int, rounds: bool
) -> None:
    dtype, first = torch.bfloat16, None
    bits = 4 if call is marlin else 8
    codes, scales = packed.draw(0, 1 << bits, k, n), scales_of(groups, n, dtype)
    zeros = (torch.randn(groups, n, generator=torch.Generator().manual_seed(1)) * 8.0).to(dtype)
    a = activations(m, k, dtype, "cpu")
    with forced("marlin_gemm" if call is marlin else "allspark_w8a16_gemm", one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                if call is marlin:
                    given = packed.marlin(codes, 4), None, packed.marlin_scales(scales), None, None
                    points = packed.marlin_scales(zeros), None, None, None, SCALAR_TYPES["uint4"].id
                    out = pyops.marlin_gemm(a, *given, *points, m, n, k, is_zp_float=True)
                else:
                    words = packed.n32k16(codes), packed.n32k16_columns(scales), packed.n32k16_columns(zeros)
                    out = pyops.allspark_w8a16_gemm(a, *words, n, -1, 132, 90, 1024, True, True)
            first = out if first is None else first
            assert torch.equal(out, first)
    w = codes - 128.0 * (call is allspark) - each(zeros.double(), k)
    if groups > 1:
        check_product(out, a, w * each(scales.double(), k))
    else:
        check_product(out, a, w.to(dtype).double() if rounds else w, scales.double())


EIGHT_BIT = [
    ("uint4b8", torch.int8, PackedMmaConfig(1, 64, 2, 2, 1), 1, 128, 512, 128),
    ("uint4b8", torch.float8_e4m3fn, PackedMmaConfig(16, 64, 2, 1, 1), 17, 64, 288, 32),  # the last k-tile has 32 rows
    ("uint4b8", torch.float8_e4m3fn, PackedMmaConfig(8, 64, 2, 1, 1), 5, 64, 256, 32),
    ("float4_e2m1f", torch.float8_e4m3fn, PackedMmaConfig(2, 64, 1, 2, 1), 3, 128, 256, 32),
    ("uint4b8", torch.float8_e4m3fn, PackedConfig(16, 256, 2, 2, 1), 20, 320, 160, 32),  # the last k-tile has 32 rows
    ("float4_e2m1f", torch.float8_e4m3fn, PackedConfig(80, 128, 2, 1, 1), 70, 64, 128, 32),
    ("uint4b8", torch.float8_e4m3fn, PackedTileConfig(16, 64, 1, 2, 2, 1), 3, 64, 96, 32),  # 32 rows in the last k-tile
]


@needs_compiler
@pytest.mark.parametrize(("kind", "dtype", "one", "m", "n", "k", "group_size"), EIGHT_BIT)
def test_8_bit_activations(kind: str, dtype: torch.dtype, one: Any, m: int, n: int, k: int, group_size: int) -> None:
    """Activations are upcast and multiplied with the quants as they are stored."""
    is_int, groups = dtype == torch.int8, k // group_size
    codes, scales = packed.draw(0, 16, k, n), packed.draw(110, 120, groups, n, seed=1)
    a = activations(m, k, dtype, "cpu")
    factors, given, w = 2.0 ** (scales.double() - 127.0), codes, codes.double() - 8.0
    stored = packed.blocks(scales + 6, packed.PERM_32).to(torch.uint8)
    if kind == "float4_e2m1f":
        w = packed.E2M1.double()[codes]
    elif is_int:
        factors = scales.double()
        stored = packed.blocks(scales, packed.PERM_32).to(torch.int16).view(torch.bfloat16)
    else:
        given = torch.where(codes >= 8, codes - 8, 15 - codes)
        stored = packed.blocks(factors * 2.0**9, packed.PERM_32).to(torch.bfloat16)
    first, rest = None, (None,) * 5
    with forced("marlin_gemm", one):
        for schedule in SCHEDULES:
            with scheduled(schedule, warp_size=64 if isinstance(one, PackedTileConfig) else 32):
                args = a, packed.marlin(given, 4, is_a_8bit=True), None, stored, torch.full((m, 1), 0.5)
                out = pyops.marlin_gemm(*args, *rest, SCALAR_TYPES[kind].id, m, n, k)
            first = out if first is None else first
            assert torch.equal(out, first)
    assert out.dtype == torch.bfloat16
    check_product(out, a, w * each(factors, k), 0.5)


DEQUANTIZED = (96, 544, 32), (64, 96, 12), (48, 64, 2), (16, 32, 1)
W4A8 = [
    (PackedConfig(16, 128, 2, 4, 1), 13, 96, 800, 32, torch.bfloat16),  # the last k-tile has 32 rows
    (PackedConfig(32, 256, 1, 1, 1), 20, 320, 256, 128, torch.bfloat16),
    (PackedConfig(128, 256, 1, 1, 1), 130, 288, 256, 256, torch.bfloat16),
    (PackedConfig(16, 256, 2, 2, 1), 13, 288, 544, 32, torch.float16),
    # Dequantized first: whole tiles and half a tile, and tables of 16, of 4 and of fewer rows.
    *((DequantizeConfig(GemmSimtConfig(16, 64)), 5, *sizes, torch.bfloat16) for sizes in DEQUANTIZED),
]


@needs_compiler
@pytest.mark.parametrize(("one", "m", "n", "k", "group_size", "dtype"), W4A8)
def test_w4a8(
    one: PackedConfig | DequantizeConfig, m: int, n: int, k: int, group_size: int, dtype: torch.dtype
) -> None:
    """Arbitrary entries of lookup tables: every quant, zero too, in every group and column.

    Numbers are small integers, so that the truncation of fp8 accumulators is smaller than one.
    """
    e4m3 = torch.float8_e4m3fn
    codes = packed.draw(-8, 8, k, n)
    weight = pyops.cutlass_encode_and_reorder_int4b(packed.gptq(codes & 15, 4).t().contiguous().t())
    tables = packed.draw(-8, 9, k // group_size * n, 8, seed=1).to(torch.float32).to(e4m3)
    entries = tables.view(k // group_size, n, 8).double().repeat_interleave(group_size, 0)
    signed = entries.gather(2, torch.where(codes < 0, codes + 8, 8 - codes.clamp(min=1)).long()[..., None])[..., 0]
    w = signed * -codes.sign()
    a = packed.draw(-4, 5, m, k, seed=2).to(torch.float32).to(e4m3)
    channel, token = (torch.rand(size, generator=torch.Generator().manual_seed(size)) + 0.5 for size in (n, m))
    tables = tables.view(-1)
    if isinstance(one, DequantizeConfig):  # which also reads tables at odd addresses
        tables = torch.cat((tables[:1], tables))[1:]
    first = None
    with forced("cutlass_w4a8_mm", one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                out = pyops.cutlass_w4a8_mm(a, weight, tables, group_size, channel, token, dtype)
            first = out if first is None else first
            assert torch.equal(out, first)
    check_product(out, a, w, channel.double() * token.double()[:, None])


@needs_compiler
def test_w4a8_of_float16_is_rounded_once() -> None:
    """Tensor core accumulators have 14 bits. They are promoted every 64 elements of K; without promotion the error is
    three times the bound."""
    m, n, k, make = 16, 128, 2048, torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=make).to(torch.float8_e4m3fn)
    codes, scales = packed.draw(-8, 8, k, n), (torch.rand(k // 128, n, generator=make) + 0.5).to(torch.float8_e4m3fn)
    weight = pyops.cutlass_encode_and_reorder_int4b(packed.gptq(codes & 15, 4).t().contiguous().t())
    tables, one = pyops.cutlass_pack_scale_fp8(scales), torch.ones(1)
    with forced("cutlass_w4a8_mm", PackedConfig(16, 128, 2, 1, 1)):
        out = pyops.cutlass_w4a8_mm(a, weight, tables, 128, one / 4, one, torch.float16)
    w = (codes.double() * each(scales.double(), k)).to(torch.float8_e4m3fn).double()
    exact = a.double() @ w / 4
    assert (out.double() - exact).abs().max() <= 2.0**-11 * exact.abs().max()
