"""The choice for grouped GEMMs with K-major quantized weights: measured times, refusals, Configs that launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pyops import SCALAR_TYPES, gpus
from pyops._core.system import device
from pyops._core.system.device import Device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import describe_new
from pyops.ops.linear.grouped_problem import ExpertLists
from pyops.ops.linear.packed_engines import large_experts_us
from pyops.ops.linear.quantized_experts import check_quants
from pyops.ops.linear.wq_grouped_configs import WqGroupedSm80Config, WqGroupedSm90Config, large_configs
from pyops.ops.linear.wq_grouped_engines import choose
from pyops.ops.linear.wq_grouped_problem import WqGroupedProblem, WqGroupedShape
from pyops.tuning.engines import overlapped

HOPPER = device.model("sm_90")
AMPERE = replace(device.model("sm_80"), num_sms=HOPPER.num_sms)  # an H200 that runs as sm_80
BF16 = dtypes.bfloat16
DEVICES = tuple(map(device.model, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_120", "gfx942", "gfx1100")))
SM120, SM80, LARGE, SM90, CDNA, DENSE = choose.engines


def mixtral(tokens: int, number: int, block_size: int = 16) -> WqGroupedShape:
    """A product of Mixtral 8x7B with int4 in groups of 128: the first with gates and ups, or the second."""
    n, k, top_k = (28672, 4096, 2) if number == 1 else (4096, 14336, 1)
    of: Any = {"type": SCALAR_TYPES["uint4"], "group_size": 128, "scale_dtype": BF16, "gated": top_k - 1}
    return WqGroupedShape(2 * tokens, 8, n, k, top_k, block_size=block_size, **of)


def gpt_oss(tokens: int, number: int, block_size: int = 16, *, is_tiled: bool = False) -> WqGroupedShape:
    """A product of gpt-oss 120B with mxfp4; with scales in tiles, of rows that are sorted and not activated."""
    n, top_k = (5760, 4) if number == 1 and not is_tiled else (5760 if number == 1 else 2880, 1)
    of: Any = {"type": SCALAR_TYPES["float4_e2m1f"], "group_size": 32, "scale_dtype": dtypes.uint8}
    of |= {"gated": 2 if top_k > 1 else 0, "is_tiled": is_tiled}
    return WqGroupedShape(4 * tokens, 128, n, 2880, top_k, block_size=block_size, **of)


def deepseek(tokens: int, number: int, block_size: int, name: str) -> WqGroupedShape:
    """A product of DeepSeek-V3 with NVFP4 or MXFP8."""
    of: Any = {"type": SCALAR_TYPES[name], "group_size": 16, "scale_dtype": dtypes.float8_e4m3fn, "is_tiled": True}
    if name == "float8_e4m3fn":
        of |= {"group_size": 32, "scale_dtype": dtypes.uint8}
    return WqGroupedShape(
        8 * tokens, 256, *((4096, 7168) if number == 1 else (7168, 2048)), block_size=block_size, **of
    )


def sm90(tile_m: int, step: int) -> WqGroupedSm90Config:
    return WqGroupedSm90Config(tile_m, 256 if tile_m <= 96 else 128, step)


# Times of docs/performance/experts.md, us: engine, [(shape, tile or Config)], time. None: the engine's fastest tile.
_PAIRS: list[tuple[Any, int, Any, float, float]] = [
    (SM80, 1, 8, 49, 22),
    *((SM80, tokens, tile, *us) for tokens, tile, *us in ((16, 8, 156, 93), (32, 8, 236, 142), (64, 16, 330, 191))),
    (SM80, 256, 16, 1059, 566),
    *((SM90, tokens, sm90(16, 128), *us) for tokens, *us in ((16, 163, 86), (32, 170, 87))),
    *((SM90, 64, sm90(32, step), *us) for step, *us in ((128, 185, 96), (64, 217, 110))),
    *((SM90, 256, sm90(96, step), *us) for step, *us in ((128, 322, 167), (64, 346, 163))),
    *((SM90, 1024, sm90(tile, 128), *us) for tile, *us in ((96, 999, 508), (128, 1084, 547))),
]
MEASURED = [
    (engine, [(mixtral(tokens, i, getattr(one, "tile_m", one)), one)], us)
    for engine, tokens, one, *both in _PAIRS
    for i, us in zip((1, 2), both, strict=True)
]
MEASURED += [
    (SM90, [(gpt_oss(4096, i, tile), sm90(tile, 64))], us)
    for tile, *both in ((160, 1945, 1269), (96, 2086, 1294), (128, 2368, 1435))
    for i, us in zip((1, 2), both, strict=True)
]
_NVFP4, _MXFP8 = "float4_e2m1f", "float8_e4m3fn"
MEASURED += [
    (SM80, [(gpt_oss(64, i, 8, is_tiled=True), 8) for i in (1, 2)], 623),
    (SM90, [(gpt_oss(1024, i, 48, is_tiled=True), sm90(48, 64)) for i in (1, 2)], 1333),
    (SM80, [(deepseek(16, i, 8, _NVFP4), 8) for i in (1, 2)], 968),
    (SM90, [(deepseek(256, i, 16, _NVFP4), sm90(16, 128)) for i in (1, 2)], 2649),
    (SM80, [(deepseek(64, i, 8, _MXFP8), 8) for i in (1, 2)], 3019),
    *((DENSE, [(gpt_oss(t, i, 64, is_tiled=True), None) for i in (1, 2)], us) for t, us in ((64, 3619), (1024, 4186))),
    *((DENSE, [(deepseek(t, i, 64, _NVFP4), None) for i in (1, 2)], us) for t, us in ((16, 6140), (256, 14084))),
    (DENSE, [(deepseek(64, i, 64, _MXFP8), None) for i in (1, 2)], 12474),
]


def predicted(engine: Any, shape: WqGroupedShape, one: Any) -> float:
    """Microseconds by the model: of a Config, or of the engine's Config with this tile."""
    assert engine.refusal(shape, HOPPER) is None
    rates = choose.rates_of(HOPPER)
    configs = [one] if isinstance(one, WqGroupedSm90Config) else list(engine.configs(shape, HOPPER))
    fitting = [config for config in configs if not isinstance(one, int) or config.tile_m == one]
    return min(engine.time_us(config, shape, HOPPER, rates) for config in fitting)


def test_times_of_the_model() -> None:
    """No time is off by more than 21 %; half of them by no more than 4 %."""
    off = [abs(math.log(sum(predicted(engine, *one) for one in parts) / us)) for engine, parts, us in MEASURED]
    assert max(off) < math.log(1.21)
    assert sorted(off)[len(off) // 2] < 0.04


@pytest.mark.parametrize(
    ("tokens", "block_size", "code", "us"),
    [(64, 32, 1.0, 424), (256, 96, 1.0, 880), (4096, 96, 1.0, 8963), (64, 32, None, 596), (256, 96, None, 1052)],
)
def test_times_without_wgmma(tokens: int, block_size: int, code: float | None, us: float) -> None:
    """Whole calls of Mixtral by wq_gemm_sm80_large_m.cu, on an H200 as sm_80: in Marlin's layout, and along K."""
    total, rates = 0.0, choose.rates_of(AMPERE)
    for shape in (mixtral(tokens, 1, block_size), mixtral(tokens, 2, block_size)):
        of_column, factor = shape.expert_bytes / (shape.n * shape.k), code or rates.large_code
        loops = [large_experts_us(one, shape, of_column, AMPERE, factor) for one in large_configs(shape, AMPERE)]
        total += rates.launch + overlapped(min(loops), shape.nbytes / rates.bytes_per_us)
    assert total == pytest.approx(us, rel=0.06)


def test_choices_that_were_measured() -> None:
    """One row per expert by mma.sync, eight and more by WGMMA, in the tiles that were the fastest; thousands dense."""
    for number in (1, 2):
        assert choose.fastest(mixtral(1, number), HOPPER).engine == SM80.name
        for tokens, size in ((32, 16), (64, 32), (256, 96), (1024, 96)):
            found = choose.fastest(mixtral(tokens, number, size), HOPPER).config
            assert found == WqGroupedSm90Config(size, 256, 128)
        assert choose.fastest(gpt_oss(4096, number, 160), HOPPER).config == WqGroupedSm90Config(160, 128, 64)
        assert choose.fastest(mixtral(65536, number, 128), HOPPER).engine == DENSE.name


def test_refusals() -> None:
    """Each reason, for a shape that differs from one that the engine serves in this respect."""
    served, tiled = mixtral(16, 1), deepseek(16, 1, 16, _NVFP4)
    for engine, shape in ((SM80, served), (SM90, served), (SM80, tiled), (SM90, tiled)):
        assert engine.refusal(shape, HOPPER) is None
    cdna, amd = replace(gpt_oss(16, 1, 16, is_tiled=True), k=2048), device.model("gfx942")
    assert CDNA.refusal(cdna, amd) is None
    of_all = (
        (replace(served, rows=0), "empty"),
        (replace(served, k=0), "empty"),
        (replace(served, is_contiguous=False), "gaps between rows"),
        (replace(served, is_aligned=False), "multiples of 16 bytes"),
        (replace(served, access=8), "multiples of 16 bytes"),
        (replace(served, k=4112, group_size=4112), "rows of 2056 bytes of quants: K must be a multiple of 32"),
        (replace(served, block_size=20), "do not divide 20 slots"),
        (replace(served, group_size=16), "groups of 16 elements"),
        (replace(served, n=2**28, group_size=32), "more scales of an expert than 32 bits"),
        (replace(gpt_oss(1, 1), dtype=dtypes.float16), "float16 does not hold the scales"),
    )
    ampere, geforce, scaled = device.model("sm_80"), device.model("sm_120"), replace(tiled, scales_rows=True)
    assert LARGE.refusal(served, ampere) is None
    assert SM120.refusal(scaled, geforce) is None
    for engine, shape, on, words in (
        (SM120, scaled, HOPPER, "no mma.sync with block scales"),
        (SM120, tiled, geforce, "rows of a or b not at multiples of 16 bytes"),
        (SM120, served, geforce, "no block scales of both operands"),
        (SM120, replace(scaled, block_size=8), geforce, "do not divide 8 slots"),
        (SM80, served, amd, "no mma.sync"),
        (SM80, served, device.model("sm_75"), "no tensor cores for bfloat16"),
        (SM80, replace(served, n=72), HOPPER, "72 rows of the weight of an expert"),
        *((SM80, shape, HOPPER, words) for shape, words in of_all),
        (LARGE, served, HOPPER, "WGMMA multiplies faster"),
        (LARGE, replace(served, dtype=dtypes.float16), device.model("sm_75"), "no cp.async"),
        (LARGE, tiled, ampere, "neither scales in tiles"),
        (LARGE, replace(served, k=4128, group_size=32), ampere, "K = 4128 in groups of 32 elements"),
        (LARGE, replace(served, block_size=24), ampere, "do not divide 24 slots"),
        (LARGE, replace(served, out_is_aligned=False), ampere, "rows of out"),
        (LARGE, replace(served, n=72), ampere, "72 rows of the weight of an expert"),
        (SM90, served, ampere, "no WGMMA"),
        (SM90, replace(served, type=SCALAR_TYPES["uint8"]), HOPPER, "dequantizes 4 bits and float8_e4m3fn"),
        (SM90, replace(served, block_size=8), HOPPER, "do not divide 8 slots"),
        *((SM90, shape, HOPPER, words) for shape, words in of_all),
        (SM90, replace(served, k=4128, group_size=32), HOPPER, "no k-tile of 128 or 64 elements divides K = 4128"),
        (CDNA, cdna, HOPPER, "AMD's matrix cores"),
        (CDNA, tiled, amd, "neither quants nor scales of float8_e4m3fn"),
        (CDNA, deepseek(16, 1, 16, _MXFP8), amd, "neither quants nor scales of float8_e4m3fn"),
        (CDNA, replace(served, k=4032, group_size=96), amd, "groups of 96 elements"),
        *((CDNA, shape, amd, words) for shape, words in of_all[:8]),
    ):
        assert words in (engine.refusal(shape, on) or ""), (engine.name, words)


@pytest.mark.parametrize(
    ("gpu", "tokens", "block_size", "engine"),
    [
        ("a100", 1, 8, SM80),
        ("a100", 64, 32, SM80),
        ("a100", 256, 96, LARGE),
        ("a100", 4096, 128, DENSE),
        ("a10", 16, 8, SM80),
        ("l4", 256, 96, LARGE),
        ("rtx-4090", 1, 8, SM80),
        ("rtx-4090", 1024, 96, LARGE),
    ],
)
def test_choices_of_older_gpus(gpu: str, tokens: int, block_size: int, engine: Any) -> None:
    """The rates are an H200's. With the bandwidth of the GPU itself no other Config would be 1 % faster."""
    on, shape = gpus.model(gpu), mixtral(tokens, 1, block_size)
    found, speed = choose.fastest(shape, on), gpus.GPUS[gpu].gbs / gpus.GPUS["h200"].gbs
    assert found.engine == engine.name
    rates = choose.rates_of(on)
    own = replace(
        rates,
        bytes_per_us=rates.bytes_per_us * speed,
        written_bytes_per_us=rates.written_bytes_per_us * speed,
    )
    times = {
        one.config: other.time_us(one.config, shape, on, own)
        for one in choose.candidates(shape, on)
        for other in choose.engines
        if other.name == one.engine
    }
    assert times[found.config] <= 1.01 * min(times.values())


def problem(shape: WqGroupedShape, on: Device) -> WqGroupedProblem:
    """A problem of `grouped_gemm_packed` with the sizes of the shape."""

    def arg(name: str, *sizes: int, dtype: Any = dtypes.int32) -> Any:
        return describe_new("grouped_gemm_packed", name, sizes, dtype, on)

    kind, experts, n, k = str(shape.type), shape.num_experts, shape.n, shape.k
    quants = arg("b", experts, n, shape.row_bytes, dtype=dtypes.int8 if kind == "int8" else dtypes.uint8)
    groups = k // shape.group_size
    scales = arg("b_scales", experts, n, groups, dtype=shape.scale_dtype)
    if kind == "int8":
        scales = arg("b_scales", experts, n, dtype=dtypes.float32)
    zeros = arg("b_zeros", experts, n * shape.bits // 8, groups, dtype=dtypes.uint8) if shape.has_zeros else None
    weight = check_quants(quants, scales, zeros, kind, shape.dtype, n, k)
    slots = shape.rows + min(shape.rows, experts) * (shape.block_size - 1)
    lists = ExpertLists.of(
        arg("sorted_token_ids", slots), arg("expert_ids", slots), arg("count", 1), shape.block_size, multiple=8
    )
    out, a = arg("out", shape.rows, n, dtype=shape.dtype), arg("a", shape.rows, k, dtype=shape.dtype)
    return WqGroupedProblem.of(out, a, weight, lists, b_scales=scales if kind == "int8" else None)


_SIZES = (2, 64, 128, 8), (64, 200, 384, 16), (600, 1024, 640, 96), (4096, 256, 512, 160)  # rows, N, K, block size


def shapes() -> Iterator[WqGroupedShape]:
    of: list[tuple[str, Any, Any]] = [
        ("uint4", 128, BF16),
        ("uint4", 32, dtypes.float16),
        ("uint8", 64, BF16),
        ("int8", 0, None),
        ("float4_e2m1f", 32, dtypes.uint8),
    ]
    for kind, group_size, scale_dtype in of:
        for rows, n, k, block_size in (
            (2, 64, 128, 8),
            (64, 200, 384, 16),
            (600, 1024, 640, 96),
            (4096, 256, 512, 160),
        ):
            yield WqGroupedShape(
                rows,
                8,
                n,
                k,
                dtype=scale_dtype if scale_dtype is dtypes.float16 else BF16,
                out_dtype=scale_dtype if scale_dtype is dtypes.float16 else BF16,
                scales="row" if scale_dtype is None else "none",
                block_size=block_size,
                type=SCALAR_TYPES[kind],
                group_size=group_size or k,
                scale_dtype=scale_dtype,
                has_zeros=kind in ("uint4", "uint8") and rows > 100,
            )


@pytest.mark.parametrize("on", DEVICES, ids=lambda on: on.arch)
def test_every_config_of_an_engine_can_be_launched(on: Device) -> None:
    """The choice is the Config with the least time; all fit into shared memory, and tiles divide blocks."""
    for shape in shapes():
        one = problem(shape, on)
        shape = WqGroupedShape.of_problem(one)
        found = choose.candidates(shape, on)
        assert choose(one, on) == min(found, key=lambda one: one.us).config
        assert DENSE.name in choose.of_engines(shape, on)
        for candidate in found:
            *_, launch = candidate.config.launches(one)
            assert launch.shared <= on.shared_memory, candidate
            assert candidate.us > 0
            tile = getattr(candidate.config, "tile_m", 0)
            assert (
                not isinstance(candidate.config, WqGroupedSm80Config)
                or launch.fixed["block_tiles"] * tile == shape.block_size
            )
            for other in candidate.config.candidates(one, on):
                assert other.launches(one)
