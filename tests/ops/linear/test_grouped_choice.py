"""The choice of a grouped GEMM's kernel and of the block size of its lists, against times measured on an H200."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pyops._core.op import torch_library
from pyops._core.system import device
from pyops._core.system.device import Device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import describe_new
from pyops.ops.linear.gemm_problem import Operand
from pyops.ops.linear.grouped_blocks import block_size_for, limits, limits_of_experts, of_rows
from pyops.ops.linear.grouped_engines import choose
from pyops.ops.linear.grouped_problem import ACTIVATIONS, ExpertLists, GroupedProblem
from pyops.ops.linear.grouped_shape import GroupedShape, Scales
from pyops.ops.linear.grouped_simt import GroupedSimtConfig
from pyops.ops.linear.grouped_sm80 import GroupedMmaConfig
from pyops.ops.linear.grouped_sm90 import GroupedConfig

HOPPER = device.model("sm_90")
AMPERE = replace(device.model("sm_80"), num_sms=HOPPER.num_sms)  # an H200 that runs as sm_80
FP8, BF16 = dtypes.float8_e4m3fn, dtypes.bfloat16
DEVICES = tuple(map(device.model, ("sm_75", "sm_80", "sm_89", "sm_90", "gfx942", "gfx1100")))


def mixtral(tokens: int, number: int) -> GroupedShape:
    """A product of Mixtral 8x7B: the first with gates and ups, or the second."""
    first = GroupedShape(2 * tokens, 8, 2 * 14336, 4096, 2, gated=1)
    return first if number == 1 else GroupedShape(2 * tokens, 8, 4096, 14336)


def deepseek(tokens: int, number: int) -> GroupedShape:
    """A product of DeepSeek-V3 with block scales."""
    first = GroupedShape(8 * tokens, 256, 4096, 7168, 8, FP8, scales="block", gated=1)
    return first if number == 1 else GroupedShape(8 * tokens, 256, 7168, 2048, 1, FP8, scales="block")


# Times of docs/performance/experts.md, us: products, tile M, tile N, time.
MEASURED = [
    *(((mixtral(4096, 1),), 128, n, us) for n, us in ((256, 3207), (224, 3244), (192, 3428), (128, 3794))),
    ((mixtral(4096, 1),), 64, 256, 5016),
    *(((mixtral(1, 1),), 64, n, us) for n, us in ((224, 113.6), (256, 124), (192, 118), (160, 119))),
    *(((deepseek(tokens, 2),), 64, 224, us) for tokens, us in ((1, 34.1), (2, 62.5), (4, 113.8), (8, 207), (16, 364))),
    *(((deepseek(tokens, 2),), 64, 256, us) for tokens, us in ((1, 36.1), (2, 62.4), (4, 109), (8, 196), (16, 341))),
    *(
        ((deepseek(tokens, 1), deepseek(tokens, 2)), 64, 256, us)
        for tokens, us in ((1024, 2866), (1536, 3010), (2048, 3844), (3072, 4444), (4096, 4794), (8192, 8633))
    ),
    *(
        ((deepseek(tokens, 1), deepseek(tokens, 2)), 192, 128, us)
        for tokens, us in ((1024, 3213), (1536, 3337), (2048, 3667), (3072, 4279), (4096, 4524), (5120, 5516))
    ),
    *(
        ((deepseek(tokens, 1), deepseek(tokens, 2)), m, n, us)
        for tokens, m, n, us in (
            (4096, 128, 256, 4795),
            (8192, 128, 256, 8158),
            (8192, 128, 128, 9994),
            (8192, 192, 128, 9202),
        )
    ),
]


def predicted(shape: GroupedShape, tile_m: int, tile_n: int) -> float:
    """Microseconds of a tile of grouped_gemm_sm90.cu by the model, with blocks of as many slots as its rows."""
    shape, engine = replace(shape, block_size=tile_m), choose.engines[0]
    config = next(
        one for one in engine.configs(shape, HOPPER) if isinstance(one, GroupedConfig) and one.tile_n == tile_n
    )
    assert config.tile_m == tile_m
    return engine.time_us(config, shape, HOPPER, choose.rates_of(HOPPER))


def test_times_of_the_model() -> None:
    """No time is off by more than 15 %; half of them by no more than 5 %."""
    off = [
        abs(math.log(sum(predicted(one, tile_m, tile_n) for one in shapes) / us))
        for shapes, tile_m, tile_n, us in MEASURED
    ]
    assert max(off) < math.log(1.15)
    assert sorted(off)[len(off) // 2] < 0.05


def test_tiles_are_chosen_as_measured() -> None:
    """The tile that the model prefers is at most 9 % slower than the fastest one that was timed for these products."""
    for products in dict.fromkeys(shapes for shapes, *_ in MEASURED):
        timed = [(tile_m, tile_n, us) for shapes, tile_m, tile_n, us in MEASURED if shapes == products]
        best = min(timed, key=lambda one: sum(predicted(shape, *one[:2]) for shape in products))
        assert best[2] <= 1.09 * min(us for *_, us in timed), products


def test_expected_row_tiles() -> None:
    """Two experts, two tokens: one expert has both with a chance of 1/2. A token does not choose an expert twice."""
    assert GroupedShape(2, 2, 8, 8).row_tiles(1) == pytest.approx(2)
    assert GroupedShape(2, 2, 8, 8).row_tiles(2) == pytest.approx(1.5)
    assert GroupedShape(4, 2, 8, 8, top_k=2).row_tiles(2) == pytest.approx(2)
    for rows, experts, top_k in ((8, 256, 8), (4096, 8, 2), (65536, 128, 8), (3, 1, 1)):
        assert GroupedShape(rows, experts, 8, 8, top_k).row_tiles(1) == pytest.approx(rows, rel=1e-6)
    rows_of_experts = [round(1024 + math.sqrt(1024 * 7 / 8) * x / 10) for x in range(-40, 41)]
    weights = [math.exp(-((x / 10) ** 2) / 2) for x in range(-40, 41)]
    mean = sum(w * -(-r // 128) for w, r in zip(weights, rows_of_experts, strict=True)) / sum(weights)
    assert GroupedShape(8192, 8, 8, 8).row_tiles(128) == pytest.approx(8 * mean, rel=0.01)
    assert GroupedShape(0, 8, 8, 8).row_tiles(64) == GroupedShape(8, 0, 8, 8).row_tiles(64) == 0


@pytest.mark.parametrize(
    ("shapes", "rows", "expected"),
    [
        ((mixtral(1, 1), mixtral(1, 2)), 8 * 30, 64),
        ((mixtral(1, 1), mixtral(1, 2)), 8 * 64, 128),  # 694 against 749 us
        ((deepseek(1, 1), deepseek(1, 2)), 256 * 32, 64),
        ((deepseek(1, 1), deepseek(1, 2)), 256 * 128, 192),
    ],
)
def test_block_sizes_that_were_measured(shapes: tuple[GroupedShape, ...], rows: int, expected: int) -> None:
    assert of_rows(rows, limits(HOPPER, *shapes)) == expected


def as_ampere(products: tuple[GroupedShape, ...], size: int, engine: str) -> float:
    """Microseconds of a kernel's best tiles by the model, on an H200 that runs as sm_80, in blocks of `size` slots."""
    shapes = (replace(shape, block_size=size) for shape in products)
    return sum(choose.of_engines(shape, AMPERE)[engine].us for shape in shapes)


def test_fp8_on_a_gpu_without_its_mma() -> None:
    """DeepSeek-V3, 64 tokens, as sm_80 on an H200: by grouped_gemm_sm80 whole calls took 4057 us. With few rows each
    weight is converted once (grouped_gemm_sm80_small_m.cu), in blocks of 8 slots.
    """
    both = deepseek(64, 1), deepseek(64, 2)
    assert as_ampere(both, 16, "grouped_gemm_sm80") == pytest.approx(4057, rel=0.05)
    assert as_ampere(both, 8, "grouped_gemm_sm80_small_m.cu") < 2600
    limited = limits(AMPERE, *both)
    assert of_rows(8 * 64, limited) == 8
    assert of_rows(256 * 128, limited) >= 32


def test_experts_with_few_rows_are_not_padded_to_64() -> None:
    """On a GPU without WGMMA, and for float32, a block holds the 20 rows of an expert and little padding."""
    of_mma = block_size_for(GroupedShape(8 * 20, 8, 4096, 4096), device.model("sm_80"))
    of_simt = block_size_for(GroupedShape(8 * 12, 8, 4096, 4096, dtype=dtypes.float32), HOPPER)
    assert of_mma in (32, 48)
    assert of_simt in (16, 32)


def test_block_size_of_a_layer() -> None:
    """Both products count; names that no kernel takes are refused later, by name."""
    sizes = 256, 8, 7168, 2048
    assert limits_of_experts(sizes, "silu", ("bfloat16", "float8_e4m3fn"), "block", -1) == limits(
        device.host(),
        GroupedShape(0, 256, 4096, 7168, 8, FP8, scales="block", gated=1),
        GroupedShape(0, 256, 7168, 2048, 1, FP8, scales="block"),
    )
    assert limits_of_experts(sizes, "silu", ("float64", "mxfp8"), "row", -1)
    with torch_library.observed(lambda *_: None, AMPERE):
        found = limits_of_experts(sizes, "none", ("bfloat16", "bfloat16"), "none", -1)
    assert found == limits(AMPERE, GroupedShape(0, 256, 2048, 7168, 8), GroupedShape(0, 256, 7168, 2048))
    for found in (limits(HOPPER, mixtral(1, 1)), limits(AMPERE, deepseek(1, 2)), limits(HOPPER, mixtral(0, 2))):
        assert [one.rows for one in found] == sorted({one.rows for one in found})
        assert of_rows(0, found) == found[0].block_size
        assert of_rows(2**31, found) == found[-1].block_size


# Engines


def problem(shape: GroupedShape, activation: str, on: Device, padded: int = 0) -> GroupedProblem:
    """A problem with the sizes of the shape; rows of b are `padded` elements longer than K."""

    def arg(name: str, *sizes: int, dtype: Any) -> Any:
        return describe_new("grouped_gemm", name, sizes, dtype, on)

    rows, experts, n, k = shape.rows, shape.num_experts, shape.n, shape.k
    places = rows + min(rows, experts) * (shape.block_size - 1)
    lists = (arg(name, places, dtype=dtypes.int32) for name in ("sorted_token_ids", "expert_ids"))
    total = arg("num_tokens_post_pad", 1, dtype=dtypes.int32)
    blocks = -(-n // 128), -(-k // 128)
    of_a, of_b = {"none": ((), ()), "row": ((1,), (experts, n)), "block": ((rows, blocks[1]), (experts, *blocks))}[
        shape.scales
    ]
    scales = {
        name: arg(name, *sizes, dtype=dtypes.float32) if sizes else None
        for name, sizes in (("a_scales", of_a), ("b_scales", of_b))
    }
    a, b = arg("a", rows // shape.top_k, k, dtype=shape.dtype), arg("b", experts, n, k + padded, dtype=shape.dtype)
    out = arg("out", rows, shape.columns, dtype=shape.out_dtype)
    operands = Operand.of_rows(a), Operand.of_rows(replace(b, shape=(experts, n, k))), experts, k
    of = ExpertLists.of(*lists, total, shape.block_size)
    blocked = shape.scales == "block"
    more = {"top_k": shape.top_k, "activation": activation, "block_scaled": blocked}
    return GroupedProblem(out, *operands, of, None, *scales.values(), **more)


def shapes_of(on: Device) -> list[tuple[GroupedShape, str]]:
    found = []
    scaled: tuple[tuple[dtypes.DType, Scales], ...] = (
        (BF16, "none"),
        (BF16, "row"),
        (FP8, "row"),
        (FP8, "block"),
        (dtypes.int8, "row"),
        (dtypes.int8, "block"),
        (dtypes.float32, "none"),
    )
    for dtype, scales in scaled:
        for activation in ("silu", "none", "swigluoai"):
            for block_size, rows, n, k in (
                (16, 64, 256, 64),
                (48, 256, 192, 200),
                (192, 4096, 512, 136),
                (128, 6, 64, 16),
            ):
                out_dtype = dtype if dtype is dtypes.float32 else BF16
                gated = ACTIVATIONS[activation]
                shape = GroupedShape(rows, 8, n, k, 2, dtype, out_dtype, scales, gated, block_size)
                found.append((GroupedShape.of(problem(shape, activation, on)), activation))
    return found


@pytest.mark.parametrize("on", DEVICES, ids=lambda on: on.arch)
def test_every_config_of_an_engine_can_be_launched(on: Device) -> None:
    """And fits into shared memory; tiles divide blocks. Some engine serves every shape."""
    for shape, activation in shapes_of(on):
        one, found = problem(shape, activation, on), choose.candidates(shape, on)
        assert found
        assert choose(one, on) == min(found, key=lambda one: one.us).config
        for candidate in found:
            launch = candidate.config.launch(one)
            assert launch.shared <= on.shared_memory, candidate
            assert launch.fixed["block_tiles"] * candidate.config.tile_m == shape.block_size
            assert candidate.us > 0


def test_refusals() -> None:
    """Each reason, for a shape that differs from one that grouped_gemm_sm90.cu serves in this respect."""
    first, second, few, third, _ = choose.engines
    served, blocked = mixtral(16, 1), deepseek(16, 1)
    assert first.refusal(served, HOPPER) is None
    assert first.refusal(blocked, HOPPER) is None
    for shape, on, words in (
        (served, device.model("sm_80"), "no WGMMA"),
        (replace(served, dtype=dtypes.float32), HOPPER, "no WGMMA of float32"),
        (replace(served, dtype=dtypes.float8_e4m3fnuz), HOPPER, "no WGMMA of float8_e4m3fnuz"),
        (replace(served, rows=0), HOPPER, "empty"),
        (replace(served, k=0), HOPPER, "empty"),
        (replace(served, access=8), HOPPER, "multiples of 16 bytes"),
        (replace(served, block_size=48), HOPPER, "blocks of the lists have 48 slots"),
        (replace(blocked, dtype=dtypes.int8), HOPPER, "block scales are for fp8"),
        (replace(blocked, n=4096 - 128), HOPPER, "ups begin inside a block"),
    ):
        assert words in (first.refusal(shape, on) or "")
    ampere = device.model("sm_80")
    assert few.refusal(blocked, ampere) is None
    for shape, on, words in (
        (blocked, HOPPER, "WGMMA multiplies faster"),
        (blocked, device.model("gfx942"), "no mma.sync"),
        (served, ampere, "not bfloat16"),
        (replace(blocked, rows=0), ampere, "empty"),
        (replace(blocked, access=8), ampere, "multiples of 16 bytes"),
        (replace(blocked, n=4096 - 32), ampere, "no multiple of 64"),
        (replace(blocked, block_size=20), ampere, "do not divide 20 slots"),
    ):
        assert words in (few.refusal(shape, on) or "")
    assert "no tensor cores" in (second.refusal(replace(served, dtype=dtypes.float32), HOPPER) or "")
    assert "do not divide" in (second.refusal(replace(served, block_size=8), HOPPER) or "")
    assert third.refusal(replace(served, block_size=8), HOPPER) is None
    assert "do not divide" in (third.refusal(replace(served, block_size=4), HOPPER) or "")


def test_misaligned_and_empty_problems() -> None:
    """They are left to the other kernels."""
    one = problem(GroupedShape(16, 4, 64, 72), "none", HOPPER, padded=1)
    assert isinstance(choose(one, HOPPER), GroupedMmaConfig)
    one = problem(GroupedShape(16, 4, 64, 72, dtype=dtypes.float32, out_dtype=dtypes.float32), "none", HOPPER)
    assert isinstance(choose(one, HOPPER), GroupedSimtConfig)
    for empty in (GroupedShape(0, 4, 64, 64), GroupedShape(16, 4, 0, 64), GroupedShape(16, 0, 64, 64)):
        one = problem(empty, "none", HOPPER)
        found = choose(one, HOPPER)
        assert not isinstance(found, GroupedConfig)
        found.launch(one)


def test_candidates_of_tuning_fit() -> None:
    for shape, activation in shapes_of(HOPPER):
        one = problem(shape, activation, HOPPER)
        for config in choose(one, HOPPER).candidates(one, HOPPER):
            assert config.launch(one).shared <= HOPPER.shared_memory
