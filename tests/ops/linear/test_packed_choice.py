"""The choice among kernels that read packed weights: refusals, Configs that launch, registers of their kernels."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest

import kernels_cu
from pyops import SCALAR_TYPES, offline, tuning
from pyops._core.system import device
from pyops._core.system.device import Device
from pyops.example import ArgMaker
from pyops.ops._shared.packed_layouts import LAYOUTS
from pyops.ops._shared.scalar_type import ScalarType
from pyops.ops.linear import (
    dequantize_packed,
    gemm_simt,
    packed_engines,
    packed_hopper,
    packed_large,
    packed_mma,
    packed_narrow,
    packed_shape,
    packed_tile,
)
from pyops.ops.linear.dequantize_packed import DequantizeConfig
from pyops.ops.linear.gemm_problem import Epilogue, Operand
from pyops.ops.linear.packed_engines import choose
from pyops.ops.linear.packed_hopper import PackedConfig, box_rows_of
from pyops.ops.linear.packed_large import PackedLargeConfig
from pyops.ops.linear.packed_mma import PackedMmaConfig, choose_mma
from pyops.ops.linear.packed_narrow import PackedNarrowConfig
from pyops.ops.linear.packed_plan import plan
from pyops.ops.linear.packed_problem import PackedProblem, PackedWeight
from pyops.ops.linear.packed_shape import PackedShape
from pyops.ops.linear.packed_tile import PackedTileConfig
from pyops.ops.linear.w4a8_mm import weight_of
from tests.every_op.test_nvrtc import MISSING
from tests.support.profiles import few

HOPPER = device.model("sm_90")


def problem(m: int, n: int, k: int, on: Device, layout: Any = "marlin", group_size: int = 128, **given: Any) -> Any:
    """A GEMM with 4-bit weights, offset by 8; `given` changes the weight."""
    make = ArgMaker(on)
    a, out = make.empty(m, k, dtype="bfloat16"), make.empty(m, n, dtype="bfloat16")
    kind = given.get("type", SCALAR_TYPES["uint4b8"])
    quants = make.empty(k * n * kind.size_bits // 32, dtype="int32")
    groups = -(-k // group_size)
    scales = make.empty(groups, n, dtype="bfloat16") if groups > 1 else None
    weight = PackedWeight(quants, layout, kind, k, n, groups, min(group_size, k), scales, "natural")
    return PackedProblem(Operand.of_rows(a), replace(weight, **given), Epilogue(out))


_WAVE = PackedConfig(256, 128, 1, 1, 1)  # the largest tile
CHOICES = [
    ("sm_90", 1, 28672, 4096, PackedMmaConfig(1, 64, 4, 1, 4)),
    ("sm_90", 6, 28672, 4096, PackedMmaConfig(8, 64, 4, 1, 4)),
    ("sm_90", 16, 28672, 4096, PackedNarrowConfig()),
    ("sm_90", 1, 4096, 4096, PackedMmaConfig(1, 64, 8, 2, 2)),
    ("sm_90", 50, 28672, 4096, PackedConfig(64, 256, 2, 1, 1)),
    ("sm_90", 256, 28672, 4096, replace(_WAVE, sharers=4, shared=3)),
    ("sm_90", 256, 4096, 4096, PackedConfig(128, 128, 2, 1, 1, 2)),
    ("sm_90", 1024, 28672, 4096, replace(_WAVE, neighbours=2)),
    ("sm_90", 8192, 4992, 4096, replace(_WAVE, sharers=2)),  # an odd number of tiles side by side
    ("sm_80", 20, 4096, 4096, PackedMmaConfig(8, 64, 8, 1, 2)),
    ("sm_80", 64, 28672, 4096, PackedLargeConfig(64, 1, 4, 2, 2)),
    ("sm_80", 64, 24576, 4096, PackedLargeConfig(64, 1, 4, 1, warps_k=2)),
    ("sm_86", 256, 28672, 4096, PackedLargeConfig(64, 2, 4, 1, 8)),
    ("sm_80", 1000, 4096, 4096, PackedLargeConfig(64, 2, 4, 1, 4)),
    ("sm_75", 256, 28672, 4096, DequantizeConfig),
    ("gfx942", 1, 4096, 4096, PackedTileConfig(16, 64, 1, 2, 4, 8)),
    ("gfx942", 16, 28672, 4096, PackedTileConfig(16, 64, 1, 2, 4, 2)),
    ("gfx1100", 20, 4096, 4096, PackedTileConfig(32, 64, 1, 4, 4, 2)),
    ("gfx942", 512, 28672, 4096, PackedTileConfig(128, 128, 2, 4, 2, 1)),
    ("gfx942", 4000, 28672, 4096, DequantizeConfig),
]


@pytest.mark.parametrize(("arch", "m", "n", "k", "expected"), CHOICES)
def test_choice_of_config(arch: str, m: int, n: int, k: int, expected: Any) -> None:
    for layout in ("marlin", "gptq", "exllama", "awq"):
        on = device.model(arch)
        found = choose(problem(m, n, k, on, layout), on)
        if isinstance(expected, type):
            assert isinstance(found, expected)
        elif isinstance(expected, PackedLargeConfig) and layout != "marlin":  # more rows of a warp would spill
            assert isinstance(found, PackedLargeConfig)
            assert found.tile_m <= 48 or found.warps_m == 1
        elif layout == "awq" and m <= 8 and arch == "sm_90" and n == 28672:  # 64 columns are only 32 bytes of a row
            assert found == replace(expected, tile_n=128, warps=6, min_blocks=2)
        elif layout == "gptq" and expected == PackedNarrowConfig():
            assert found == PackedMmaConfig(16, 64, 4, 1, 3)
        elif layout == "marlin" and isinstance(expected, PackedConfig) and expected.tile_m <= 128:
            assert found == replace(expected, boxes=2)  # k-tiles of 128 rows, where they leave four stages
        elif layout in ("gptq", "exllama") and m <= 8 and n == 28672:  # lanes prefetch the quants of the next k-tile
            assert found == replace(expected, held=True)
        else:
            assert found == expected


ROWS = [
    # (m, n, k, microseconds): layers of models where tiles of a power of two of rows, or a last wave of few tiles, cost
    # most; the model's time may not exceed these.
    (17, 37888, 3584, 43.0),
    (174, 6144, 4096, 25.0),
    (200, 3584, 18944, 55.0),
    (146, 4608, 16384, 50.0),
    (22, 25088, 5120, 37.0),
]


@pytest.mark.parametrize(("m", "n", "k", "us"), ROWS)
def test_tiles_have_the_rows_that_there_are(m: int, n: int, k: int, us: float) -> None:
    shape = PackedShape.of(problem(m, n, k, HOPPER))
    found = choose.fastest(shape, HOPPER)
    assert found.us <= us
    if isinstance(found.config, PackedConfig):
        assert -(-shape.m // found.config.tile_m) * found.config.tile_m - shape.m < 32


@pytest.mark.parametrize(("m", "us"), [(64, 50.4), (256, 172.7), (4096, 2622)])
def test_times_without_wgmma(m: int, us: float) -> None:
    """By wq_gemm_sm80_large_m.cu, of an H200 that runs as sm_80."""
    on = replace(device.model("sm_80"), num_sms=HOPPER.num_sms)
    of_engines = choose.of_engines(PackedShape.of(problem(m, 28672, 4096, on)), on)
    assert of_engines["wq_gemm_sm80_large_m.cu"].us == pytest.approx(us, rel=0.08)


SHARERS = [
    # (sharers, shared, tiles of the last wave, k-tiles of a tile, CTAs of 132 that share these tiles)
    (4, 3, 92, 64, 122),
    (5, 4, 104, 64, 130),
    (4, 1, 20, 64, 80),
    (8, 1, 20, 64, 132),  # as many as there are
    (2, 1, 92, 64, 132),
    (4, 1, 20, 1, 20),  # no k-tile for a second CTA
    (8, 1, 1, 3, 3),
    (4, 1, 0, 64, 0),
    (1, 1, 92, 64, 92),
]


@pytest.mark.parametrize(("sharers", "shared", "rest", "k_tiles", "expected"), SHARERS)
def test_ctas_that_share_the_last_wave(sharers: int, shared: int, rest: int, k_tiles: int, expected: int) -> None:
    config = replace(_WAVE, sharers=sharers, shared=shared)
    assert config.num_sharers(config.waves(256 * (132 + rest), 128, HOPPER), k_tiles) == expected


def test_stream_k_workspace() -> None:
    """Each part of a tile has its own slot among the partial sums, and each tile its own counters."""
    (launch,) = replace(_WAVE, sharers=4, shared=3).launches(problem(256, 28672, 4096, HOPPER))
    rest, steps, sharers = 224 - 132, 64, launch.fixed["sharers"]
    begins = [rest * steps * block // sharers for block in range(sharers + 1)]
    parts = {(block, at // steps) for block in range(sharers) for at in range(begins[block], begins[block + 1])}
    slots = {block + tile for block, tile in parts}
    assert len(slots) == len(parts)
    assert launch.fixed["partial"].nbytes == (max(slots) + 1) * 256 * 128 * 4
    assert launch.fixed["arrived"].nbytes == rest * 8 * 4


BOXES = [
    # (rows of a, tile M, neighbours, rows of a box)
    (256, 128, 1, 128),
    (256, 128, 2, 64),
    (1, 16, 1, 8),
    (71, 96, 1, 72),
    (162, 112, 1, 16),
    (200, 96, 1, 32),
    (120, 96, 2, 32),
    (70, 80, 2, 16),
]


@pytest.mark.parametrize(("m", "tile_m", "neighbours", "expected"), BOXES)
def test_boxes_of_rows_that_exist(m: int, tile_m: int, neighbours: int, expected: int) -> None:
    """Whole swizzle atoms of 8 rows that divide a tile, or all rows of the only one; at most 7 rows past the end where
    there is one tile."""
    assert box_rows_of(m, tile_m, neighbours) == expected
    (launch,) = PackedConfig(tile_m, 128, 2, 1, 1, neighbours=neighbours).launches(problem(m, 512, 512, HOPPER))
    assert launch.fixed["a_box_rows"] == expected
    assert launch.fixed["a_map"].box == (64, expected)


def refusals(one: PackedProblem, on: Device) -> dict[str, str | None]:
    """{kernel: why it does not serve the problem}."""
    shape = PackedShape.of(one)
    return {engine.name: engine.refusal(shape, on) for engine in choose.engines}


def serves(one: PackedProblem, on: Device) -> bool:
    """Whether a kernel with fused dequantization serves the problem."""
    return any(reason is None and "wq_gemm" in name for name, reason in refusals(one, on).items())


def test_8_bit_activations_at_large_m() -> None:
    """wq_gemm_sm90.cu upcasts and multiplies them, except under scales that 16 bits do not hold."""
    make = ArgMaker(HOPPER)
    one = problem(256, 28672, 4096, HOPPER, "marlin_8", recoding="marlin_fp8")
    one = replace(one, a=Operand.of_rows(make.empty(256, 4096, dtype="float8_e4m3fn")))
    assert isinstance(choose(one, HOPPER), PackedConfig)
    assert [launch.specialisation.kernel.file for launch in plan(one)] == [
        "linear/gather_columns.cu",
        "linear/wq_gemm_sm90.cu",
    ]
    half = Epilogue(make.empty(256, 28672, dtype="float16"))
    scales = replace(one.weight, scale_kind="e8m0")
    assert refusals(replace(one, weight=scales), HOPPER)["wq_gemm_sm90.cu"] is None
    for other in (
        replace(one, weight=replace(one.weight, scale_kind="int16")),
        replace(one, weight=scales, epilogue=half),
    ):
        assert refusals(other, HOPPER)["wq_gemm_sm90.cu"] == "scales that 16 bits do not hold"
        assert isinstance(choose(other, HOPPER), DequantizeConfig)


def test_kernels_and_engines_name_no_layout() -> None:
    """A new layout is a header, a declaration and a test."""
    names = "|".join(LAYOUTS)
    kernels = {name: kernels_cu.read(name) for name in kernels_cu.names() if not name.startswith("linear/layout_")}
    found = {name for name, text in kernels.items() if re.search(rf"\blayout_({names})\b", re.sub("//.*", "", text))}
    modules = [dequantize_packed, packed_engines, packed_hopper, packed_large, packed_mma, packed_narrow, packed_shape]
    modules.append(packed_tile)
    found |= {one.__name__ for one in modules if re.search(rf'"({names})"', inspect.getsource(one))}
    assert found == set()
    assert {f"linear/layout_{name}.cuh" for name in LAYOUTS} <= set(kernels_cu.names())


def test_several_groups_in_a_k_tile() -> None:
    """Threads have twice the registers, and tiles eight rows at most."""
    for m, n, size in ((16, 28672, 64), (1, 4096, 32)):
        shape = PackedShape.of(problem(m, n, 4096, HOPPER, group_size=size))
        found = list(packed_mma.configs(shape, HOPPER))
        assert found
        assert all(one.tile_m <= 8 and one.warps * one.min_blocks <= 8 for one in found)


FITTING = [(layout, size) for layout in ("marlin", "awq", "gptq") for size in (32, 128, 14336)]


@pytest.mark.parametrize(("layout", "group_size"), FITTING)
def test_configs_launch(layout: str, group_size: int) -> None:
    """Every Config of every engine that does not refuse launches, with two stages at least in shared memory."""
    for on in (HOPPER, device.model("sm_80"), device.model("gfx942")):
        for m in (1, 3, 17, 65, 200, 1000, 8192):
            for n, k in ((64, 64), (192, 1088), (4096, 14336), (28672, 4096)):
                one = problem(m, n, k, on, layout, group_size=min(group_size, k))
                shape = PackedShape.of(one)
                assert serves(one, on)
                found = choose.candidates(shape, on)
                assert all(other.us > 0 for other in found)
                for other in {repr(other.config): other for other in found}.values():
                    for launch in other.config.launches(one):
                        assert launch.shared <= on.shared_memory
                        assert launch.specialisation.constants.get("STAGES", 2) >= 2
                        assert launch.specialisation.constants.get("BOXES", 1) == 1 or (
                            launch.specialisation.constants["STAGES"] >= 4
                        )
                for other in choose(one, on).candidates(one, on):
                    assert all(launch.shared <= on.shared_memory for launch in other.launches(one))


def test_warps_limited_by_shared_memory() -> None:
    """For eight rows, a warp has 4096 bytes of quants, 2048 of a and 128 of scales per k-tile, and two stages at
    least."""
    small = replace(HOPPER, shared_memory=2 * 3 * 6272)
    shape = PackedShape.of(problem(8, 4096, 4096, small))
    assert packed_mma.fitting(PackedMmaConfig(8, 64, 8, 2, 2), shape, small) == PackedMmaConfig(8, 64, 3, 2, 2)
    assert max(one.warps for one in packed_mma.configs(shape, small)) == 3
    (launch,) = PackedMmaConfig(8, 64, 3, 2, 1).launches(problem(8, 4096, 4096, small))
    assert launch.shared == small.shared_memory
    assert launch.specialisation.constants["STAGES"] == 2


REFUSED = [
    ({"g_idx": ArgMaker(HOPPER).empty(256, dtype="int32")}, "groups of rows that are not consecutive"),
    ({"type": SCALAR_TYPES["int4"]}, "no instance for int4 in layout marlin"),
    ({"recoding": "marlin_fp8"}, "quants that are transformed"),
    ({"zero_kind": "codes", "zero_layout": "marlin_8"}, "zero points in layout marlin_8"),
    ({"layout": "gptq", "type": ScalarType(0, 3, False)}, "in layout gptq"),  # pairs of raw quants straddle words
    ({"group_size": 48}, "groups of 48 rows"),
]


@pytest.mark.parametrize(("given", "reason"), REFUSED)
def test_weights_that_are_dequantised_first(given: dict[str, Any], reason: str) -> None:
    """Weights for which the packed kernels have no instance."""
    one = problem(4, 128, 256, HOPPER, **given)
    assert not serves(one, HOPPER)
    assert reason in (refusals(one, HOPPER)["wq_gemm_sm80.cu"] or "")
    assert isinstance(choose(one, HOPPER), DequantizeConfig)


def test_activations_that_no_packed_kernel_reads() -> None:
    one = problem(4, 128, 256, HOPPER)
    assert serves(one, HOPPER)
    for a in (replace(one.a, stride=260), replace(one.a, alignment=8)):
        assert not serves(replace(one, a=a), HOPPER)
    assert not serves(problem(4, 72, 256, HOPPER), HOPPER)


def test_permuted_activations_are_gathered_before_any_kernel() -> None:
    """Gathered rows are aligned, whatever the stride of those of the caller."""
    one = problem(4, 128, 256, HOPPER, perm=ArgMaker(HOPPER).empty(256, dtype="int32"))
    one = replace(one, a=replace(one.a, stride=260))
    files = [launch.specialisation.kernel.file for launch in plan(one)]
    assert files == ["linear/gather_columns.cu", "linear/wq_gemm_sm80.cu"]
    with tuning.forced(one.op, DequantizeConfig(gemm_simt.GemmSimtConfig(16, 64))):
        files = [launch.specialisation.kernel.file for launch in plan(one)]
    assert files == [f"linear/{name}.cu" for name in ("gather_columns", "dequantize_packed", "gemm_simt")]


def test_w4a8_of_float16() -> None:
    """Tiles with two sets of accumulators in registers."""
    make = ArgMaker(HOPPER)

    def of(m: int) -> PackedProblem:
        quants, tables = make.empty(512, 28672, dtype="int32"), make.empty(32 * 28672 * 8, dtype="float8_e4m3fn")
        out = Epilogue(make.empty(m, 28672, dtype="float16"))
        weight = weight_of(quants, 28672, 4096, tables, 128)
        return PackedProblem(Operand.of_rows(make.empty(m, 4096, dtype="float8_e4m3fn")), weight, out)

    for m in (16, 256, 4096):
        for one in choose.candidates(PackedShape.of(of(m)), HOPPER):
            if isinstance(one.config, PackedConfig):
                assert one.config.tile_m * one.config.tile_n <= 128 * 128
                (launch,) = one.config.launches(of(m))
                assert launch.specialisation.constants["APART"]
    assert isinstance(choose(of(16), HOPPER), PackedConfig)
    assert isinstance(choose(of(256), HOPPER), PackedConfig)


_ZEROS = {"zero_kind": "codes"}
# Tiles with rows that are no power of two, and stream-K of tiles that threads store.
COMPILED = [
    ("marlin", PackedConfig(208, 128, 2, 1, 1, 2), {}),
    ("marlin", PackedConfig(112, 256, 2, 1, 1, 2, boxes=2), {}),
    ("awq", PackedConfig(240, 128, 1, 1, 1, 4, 3), _ZEROS),
    ("exllama", PackedConfig(112, 256, 2, 1, 1, 2), {}),
    ("gptq", PackedConfig(48, 256, 2, 1, 1, 2), {}),
    ("awq", PackedConfig(64, 256, 2, 1, 1, 4, 3), {}),
    ("n32k16", PackedConfig(176, 128, 2, 1, 1, 2), {"type": SCALAR_TYPES["uint8b128"]}),
    ("marlin", PackedConfig(224, 128, 2, 1, 1, 2, neighbours=2), {"type": SCALAR_TYPES["float8_e4m3fn"]}),
    # 128 accumulators of a thread, and zero points in registers.
    ("marlin", PackedLargeConfig(64, 2, 4, 1, 2), _ZEROS),
    ("gptq", PackedLargeConfig(48, 2, 4, 1, 2), _ZEROS),
    ("awq", PackedLargeConfig(48, 1, 4, 2, 4), {**_ZEROS, "group_size": 32}),
    ("awq", PackedLargeConfig(64, 1, 4, 2, 4), _ZEROS),
    ("gptq", PackedLargeConfig(64, 1, 4, 2, 2), _ZEROS),
    ("gptq", PackedLargeConfig(64, 1, 4, 1, warps_k=2), _ZEROS),
    ("n32k16", PackedLargeConfig(64, 1, 2, 4), {"type": SCALAR_TYPES["uint8b128"]}),
]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(("layout", "config", "given"), few(COMPILED, 4))
def test_tiles_fit_into_registers(layout: str, config: Any, given: dict[str, Any]) -> None:
    on = HOPPER if isinstance(config, PackedConfig) else device.model("sm_80")
    if given.get("zero_kind") == "codes":
        given = {**given, "zeros": ArgMaker(on).empty(32, 4096 // 8, dtype="int32"), "zero_layout": layout}
    (launch,) = config.launches(problem(300, 4096, 4096, on, layout, **given))
    one = launch.specialisation
    report = offline.compile(one.kernel.file, str(one.constants), one.text, on.arch_feature)
    assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ())


def test_invalid_geometries() -> None:
    for wrong in (
        lambda: PackedConfig(24, 128, 1, 1, 1),
        lambda: PackedConfig(128, 128, 1, 2, 1),
        lambda: PackedConfig(256, 256, 1, 1, 1),
        lambda: PackedConfig(64, 256, 1, 2, 1, 4),
        lambda: PackedConfig(128, 128, 1, 1, 1, 0),
        lambda: PackedConfig(128, 128, 1, 1, 1, 3, 4),
        lambda: PackedConfig(64, 256, 1, 1, 1, neighbours=2),
        lambda: PackedLargeConfig(80, 1, 4, 1),
        lambda: PackedLargeConfig(64, 2, 4, 2),
        lambda: PackedMmaConfig(12, 64, 4, 1, 1),
        lambda: PackedMmaConfig(16, 64, 4, 1, 4),
        lambda: PackedMmaConfig(8, 64, 4, 3, 1),
    ):
        with pytest.raises(ValueError, match="no geometry"):
            wrong()
    assert choose_mma(1, 64, 64, 1, HOPPER) == PackedMmaConfig(1, 64, 1, 1, 16)
    # 128 tiles, for which clusters of two do not fit: all warps of an SM, if the K range of each warp is long.
    assert choose_mma(8, 64, 4096, 112, HOPPER, weights=2) == PackedMmaConfig(8, 64, 16, 1, 1)
    assert choose_mma(8, 64, 4096, 32, HOPPER, weights=2) == PackedMmaConfig(8, 64, 8, 1, 2)
    # With several groups in a k-tile, tiles have 8 rows: twice as many tiles as with 16.
    assert choose_mma(16, 64, 4096, 112, HOPPER, True, weights=2) == PackedMmaConfig(8, 64, 4, 1, 2)
