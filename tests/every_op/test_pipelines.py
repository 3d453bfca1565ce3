"""Pipelined kernels with far more k-tiles than stages, and tile swizzles with one tile more than a group.

The phase bit of a barrier has the same value in the first and third round over the stages, so a test with few k-tiles
misses a wrong phase. Here kernels have few stages, and a block has several tiles, so that a tile's rounds begin where
those of the previous tile ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

import kernels_cu
import pyops
from pyops import tuning
from pyops._core import config
from pyops._core.launch.kernel import Kernel, Launch, Specialisation
from pyops._core.system import device
from pyops._core.text import source
from pyops.host.toolchain import toolchains
from pyops.ops.attention.prefill_sm90 import PrefillSm90Config
from pyops.ops.linear.gemm_sm80 import MmaConfig
from pyops.ops.linear.gemm_sm90 import GemmConfig, SwapConfig
from pyops.ops.linear.gemm_sm120 import ScaledMmaConfig
from pyops.ops.linear.ggml_configs import GgmlMulMatConfig, GgmlRowConfig, GgmlVecConfig
from pyops.ops.linear.grouped_simt import GroupedSimtConfig
from pyops.ops.linear.grouped_sm80 import GroupedMmaConfig
from pyops.ops.linear.grouped_sm80_small_m import GroupedSmallMConfig
from pyops.ops.linear.grouped_sm90 import GroupedConfig
from pyops.ops.linear.packed_hopper import PackedConfig
from pyops.ops.linear.packed_large import PackedLargeConfig
from pyops.ops.linear.packed_mma import PackedMmaConfig
from pyops.ops.linear.packed_narrow import PackedNarrowConfig
from pyops.ops.linear.wq_grouped_configs import WqGroupedSm80Config, WqGroupedSm90Config
from pyops.ops.mamba._gated_delta_sm90_plan import GatedDeltaSm90Config
from pyops.testing import SCHEDULES
from pyops.testing.calls import assert_results, expected, run
from tests.ops.attention import test_e4m3 as e4m3
from tests.ops.attention import test_hopper as prefill
from tests.ops.attention import test_mla as latent
from tests.ops.attention import test_mqa_logits as indexing
from tests.ops.attention import test_varlen as varlen
from tests.ops.linear import test_gemm_sm120 as scaled
from tests.ops.linear import test_ggml as ggml
from tests.ops.linear import test_grouped as grouped
from tests.ops.linear import test_hopper as dense
from tests.ops.linear import test_packed_kernels as packed
from tests.ops.mamba import test_chunk_scan as chunk_scan
from tests.support.calls import example

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
Rounds = Callable[[Launch], tuple[float, float | None]]
# The fewest stages of kernels that need more than two.
FEWEST = {"linear/wq_gemm_sm90_small_m.cu": 4, "linear/gemm_sm90_swap_ab.cu": 4, "mamba/gated_delta_chunk.cu": 4}


def multiply_ggml(one: Any, m: int) -> None:
    weight, truth = ggml.draw(12, 40, 9 * 256)
    x = torch.randn(m, 9 * 256, generator=torch.Generator().manual_seed(m)).bfloat16()
    ggml.check(ggml.multiply(one, weight, x, 12, 40), x.double() @ truth.T)


def run_example(name: str, **axes: Any) -> None:
    op = pyops.registry[name]
    args = example(op, **axes)
    assert_results(op, expected(op, args), run(op, args))


def codes_of_experts(one: Any, activation: str, k: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        grouped.test_packed_experts(one, activation, k, size, patch)


def small_m(one: Any, arch: str, case: tuple[Any, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        grouped.test_small_m_grouped_gemm(one, arch, case, patch)


def mla(lengths: list[int], heads: int, page_size: int, kind: torch.dtype | None) -> None:
    prefill.test_mla_decode_fp8("cpu", lengths, heads, page_size, 1, BF16, kind)


def indexer() -> None:
    with pytest.MonkeyPatch.context() as patch:
        indexing.test_groups_with_many_tiles(patch)


def on_ampere(call: Callable[[], None]) -> None:
    on_device(call, arch="sm_80", num_sms=2, cluster=1)


def on_one(call: Callable[[], None]) -> None:
    """The call on a device with one SM."""
    on_device(call, num_sms=1)


def on_geforce(call: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYOPS_ARCH", "sm_120")
        call()


def on_device(call: Callable[[], None], **attributes: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device._HOST, 32, replace(device.host(), **attributes))
        call()


def long_prefill(one: PrefillSm90Config, heads: tuple[int, int], size: int, block_size: int) -> None:
    call = prefill.varlen_call(
        [65, 3], [330, 20], heads, dtype=torch.float16, head_size=size, block_size=block_size, on="cpu"
    )
    prefill._varlen(one, **call)


def prefill_on_ampere() -> None:
    varlen._assert_is_attention(varlen._call([65, 70], [290, 330], dtype=torch.float16))


def mla_on_ampere(num_heads: int) -> None:
    latent._assert_is_attention(latent._call([330, 300], num_heads))


# Two prompts; on a device with one SM each is a segment.
LONG_SEGMENTS = partial(chunk_scan.assert_slow_scan, "cpu", [450, 310])
LONG_DELTA_RULE = partial(run_example, "gated_delta_rule", num_tokens=300, head_dim=128, dtype="bfloat16", options=True)


def delta_rule_in_segments(segments: int) -> None:
    with tuning.forced("gated_delta_rule", GatedDeltaSm90Config(64, segments)):
        LONG_DELTA_RULE()


# Stages of kernels that have more than two in every plan.
STAGES = {
    "attention/mla_decode_small_h.cu": 4,
    "attention/mla_decode_sm80.cu": 3,
    "attention/mla_decode_sm90_fp8.cu": 4,
    "mamba/chunk_scan_states.cu": 3,
}
# A call of every kernel with a pipeline that goes round more than twice: see ROUNDS.
CASES: dict[str, list[Callable[[], None]]] = {
    "attention/prefill_mma.cu": [partial(on_ampere, prefill_on_ampere)],
    "attention/prefill_sm90_fp8.cu": [partial(on_one, partial(e4m3.test_long_accumulation_is_exact, "cpu"))],
    "attention/prefill_sm90.cu": [
        partial(long_prefill, PrefillSm90Config(64, 2), (4, 2), 16, 8),
        partial(long_prefill, PrefillSm90Config(48, 3), (4, 2), 64, 16),
    ],
    "attention/mla_decode.cu": [partial(on_ampere, partial(mla_on_ampere, 20))],
    "attention/mla_decode_sm80.cu": [partial(on_ampere, partial(mla_on_ampere, 40))],
    "attention/mla_decode_small_h_fp8.cu": [partial(mla, [330, 300], 16, 20, FP8)],
    "attention/mla_decode_sm90_fp8.cu": [
        partial(mla, [600, 580], 20, 16, FP8),
        partial(mla, [600, 580], 30, 64, FP8),
        partial(prefill.test_mla_queries_of_fp8, "cpu", [600, 580], 40, 64, 1),
    ],
    "attention/mla_decode_small_h.cu": [partial(mla, [330, 600], 11, 16, torch.uint8)],
    "attention/mla_decode_sm90.cu": [partial(prefill.test_mla_decode, "cpu", [330, 300], 24, 16, 1, BF16)],
    "attention/mqa_logits_sm90.cu": [indexer],
    "linear/gemm_sm90.cu": [
        partial(dense.test_linear, GemmConfig(128, cluster=2, group=8), 300, 264, 328),
        partial(dense.test_linear, GemmConfig(48, cluster=1, group=8, ping_pong=True), 140, 168, 328),
        partial(dense.test_linear, GemmConfig(64, cluster=2, group=2, ping_pong=True), 300, 136, 328),
        partial(dense.test_block_scales, GemmConfig(64, cluster=1, group=2), 140, 200, 328),
        partial(dense.test_scaled_mm, GemmConfig(64, cluster=1, group=2), FP8, 592),
    ],
    "linear/gemm_sm80.cu": [
        partial(dense.test_linear, MmaConfig(16, 64, 1, 4, 2, 1, 1), 20, 66, 328),
        partial(grouped.test_mma_and_simt_grouped_gemm, GroupedMmaConfig(16, 64, 1, 4, 2), (20, 66, 328, "silu", BF16)),
    ],
    "linear/gemm_sm120.cu": [
        partial(on_geforce, partial(scaled.test_nvfp4, ScaledMmaConfig(16, 32, 1, 2, 2, 1), 33, 40, 1120))
    ],
    "linear/wq_gemm_sm90.cu": [
        partial(packed.test_packed_gemm, packed.marlin, 4, PackedConfig(32, 128, 2, 1, 1), 40, 320, 384, 3, BF16),
        partial(packed.test_packed_gemm, packed.awq, 4, PackedConfig(32, 256, 2, 2, 1), 40, 320, 640, 10, BF16),
    ],
    "linear/wq_gemm_sm80.cu": [
        partial(packed.test_packed_gemm, packed.marlin, 8, PackedMmaConfig(8, 64, 2, 1, 1), 5, 64, 1024, 1, BF16)
    ],
    "linear/wq_gemm_sm80_large_m.cu": [
        partial(packed.test_packed_gemm, packed.marlin, 4, PackedLargeConfig(16, 2, 2, 1), 40, 320, 384, 3, BF16),
        partial(packed.test_packed_gemm, packed.gptq, 4, PackedLargeConfig(64, 1, 2, 1, 2), 70, 320, 320, 5, BF16),
    ],
    "linear/wq_gemm_sm90_small_m.cu": [
        partial(packed.test_packed_gemm, packed.marlin, 4, PackedNarrowConfig(4), 17, 320, 1296, 1, BF16)
    ],
    "linear/gemm_sm90_swap_ab.cu": [
        partial(dense.test_linear, SwapConfig(16, 112, splits=1), 33, 264, 584),
        partial(dense.test_linear, SwapConfig(16, 32, splits=1), 33, 72, 584),
        partial(dense.test_linear, SwapConfig(16, 72, splits=2), 16, 200, 1160),
        partial(dense.test_scaled_mm, SwapConfig(16, 112, splits=1), FP8, 1168),  # accumulators of half a k-tile
    ],
    "linear/ggml_mul_mat.cu": [partial(multiply_ggml, GgmlMulMatConfig(4, 1, 2, 2, 1), 3)],
    "linear/ggml_mul_mat_row.cu": [partial(multiply_ggml, GgmlRowConfig(2, 2), 1)],
    "linear/ggml_mul_mat_vec.cu": [partial(multiply_ggml, GgmlVecConfig(1, 1, 2, 2), 1)],
    "linear/grouped_gemm_sm90.cu": [
        partial(grouped.test_hopper_grouped_gemm, GroupedConfig(128, 128), (90, 72, 328, "silu", BF16, "none", 128)),
        partial(grouped.test_hopper_grouped_gemm, GroupedConfig(64, 128), (20, 256, 656, "silu", FP8, "block")),
    ],
    "linear/grouped_gemm_sm80_small_m.cu": [
        partial(small_m, GroupedSmallMConfig(8, 1, 2, 1), "sm_80", (9, 64, 656, "silu", FP8, "block", 8))
    ],
    "linear/wq_grouped_gemm_sm80.cu": [partial(codes_of_experts, WqGroupedSm80Config(16, 1, 2), "silu", 640, 128)],
    "linear/wq_grouped_gemm_sm90.cu": [
        partial(codes_of_experts, WqGroupedSm90Config(32, 256, 64), "none", 384, 32),
        partial(codes_of_experts, WqGroupedSm90Config(48, 256, 128), "silu", 640, 128),
    ],
    "mamba/chunk_scan.cu": [partial(on_one, LONG_SEGMENTS)],
    "mamba/chunk_scan_states.cu": [partial(on_one, LONG_SEGMENTS)],
    "mamba/gated_delta_chunk.cu": [partial(on_ampere, LONG_DELTA_RULE)],
    "mamba/gated_delta_segments.cu": [partial(delta_rule_in_segments, 7)],
    "mamba/gated_delta_sm90.cu": [LONG_DELTA_RULE],
    "mamba/kda_chunk.cu": [
        partial(run_example, "kda", num_tokens=300, head_dim=128, dtype="bfloat16", options=True),
    ],
}


def of_products(step: Callable[..., float], tile_m: Callable[..., int] | None = None) -> Rounds:
    """The k-tiles of each block, of `step` elements. `tile_m` gives the rows of a tile, if blocks take several tiles;
    it is None or 0 if a block has one tile. Every expert has rows."""

    def rounds(launch: Launch) -> tuple[float, float | None]:
        of, fixed = launch.specialisation.constants, cast("dict[str, int]", launch.fixed)
        steps = math.ceil(fixed["k"] / step(of)) / of.get("SPLITS", 1) / of.get("WARPS", 1)
        tile = tile_m(of) if tile_m else 0
        if not tile:
            return steps, None
        row_tiles = max(math.ceil(fixed.get("m", fixed.get("num_rows", 0)) / tile), fixed.get("num_experts", 1))
        columns = math.ceil(fixed["n"] * (2 if of.get("GATED") else 1) / of["TILE_N"])
        return steps, row_tiles * columns / launch.grid[0]

    return rounds


def of_keys(keys: int, tokens: int = 0, parts: int = 1) -> Rounds:
    """KV tiles of a sequence, divided among `parts` blocks; `tokens` per tile, or the name of the constant that has
    it."""

    def rounds(launch: Launch) -> tuple[float, float | None]:
        items = launch.fixed.get("num_items")
        tiles = math.ceil(keys / parts / (tokens or launch.specialisation.constants["TOKENS"]))
        return tiles, None if items is None else items / launch.grid[0]

    return rounds


def of_segment(tokens: int = 0) -> Rounds:
    """Tiles of the first segment of LONG_SEGMENTS, a prompt."""

    def rounds(launch: Launch) -> tuple[float, float | None]:
        assert launch.fixed["num_segments"] == 2
        return of_keys(450, tokens)(launch)

    return rounds


def of_indexer(launch: Launch) -> tuple[float, float | None]:
    """Tiles of a block of three groups of rows, with 470, 0 and 499 keys."""
    return 2 * math.ceil(470 / 192) / launch.grid[0], None


def of_row(constants: Mapping[str, Any]) -> float:
    """Elements of 128 bytes."""
    return 128 / float(constants["scalar_t"].itemsize)


# For a launch: k-tiles of a tile, and the tiles of a block where a block takes several.
ROUNDS: dict[str, Rounds] = {
    "attention/prefill_mma.cu": of_keys(330),
    "attention/prefill_sm90_fp8.cu": of_keys(4096),
    "attention/prefill_sm90.cu": of_keys(330),
    "attention/mla_decode.cu": of_keys(330, parts=2),
    "attention/mla_decode_sm80.cu": of_keys(330),
    "attention/mla_decode_small_h_fp8.cu": of_keys(330, 64),
    "attention/mla_decode_small_h.cu": of_keys(600, 64),
    "attention/mla_decode_sm90.cu": of_keys(330, 64),
    "attention/mla_decode_sm90_fp8.cu": of_keys(600, 64),
    "attention/mqa_logits_sm90.cu": of_indexer,
    "linear/gemm_sm90.cu": of_products(of_row, lambda of: 128 * of["CLUSTER_M"]),
    "linear/gemm_sm80.cu": of_products(of_row),
    "linear/gemm_sm120.cu": of_products(lambda of: 128),  # k counts bytes
    "linear/wq_gemm_sm90.cu": of_products(lambda of: 64 * of["BOXES"], lambda of: of["TILE_M"] * (of["SPLITS"] == 1)),
    "linear/wq_gemm_sm80.cu": of_products(lambda of: 4 * 128 / of["BITS"]),
    "linear/wq_gemm_sm80_large_m.cu": of_products(lambda _: 64, lambda of: of["WARPS_M"] * of["TILE_M"]),
    "linear/wq_gemm_sm90_small_m.cu": of_products(lambda _: 128),
    "linear/gemm_sm90_swap_ab.cu": of_products(
        of_row, lambda of: of["TILE_M"] * (of["SPLITS"] == 1 and of["TILE_N"] > 64)
    ),
    "linear/ggml_mul_mat.cu": of_products(lambda of: 256 * of["K_WARPS"]),
    "linear/ggml_mul_mat_row.cu": of_products(lambda of: 256 * of["K_WARPS"]),
    "linear/ggml_mul_mat_vec.cu": of_products(lambda of: 256 * of["K_WARPS"]),
    "linear/grouped_gemm_sm90.cu": of_products(of_row, lambda of: of["TILE_M"]),
    "linear/grouped_gemm_sm80_small_m.cu": of_products(lambda _: 128),
    "linear/wq_grouped_gemm_sm80.cu": of_products(lambda of: 64 * 8 / of["BITS"]),
    "linear/wq_grouped_gemm_sm90.cu": of_products(lambda of: of["TILE_K"], lambda of: of["TILE_M"]),
    "mamba/chunk_scan.cu": of_segment(),
    "mamba/chunk_scan_states.cu": of_segment(64),
    "mamba/gated_delta_chunk.cu": of_keys(300),
    "mamba/gated_delta_segments.cu": lambda launch: (launch.fixed["segments"] - 2, None),
    "mamba/gated_delta_sm90.cu": of_keys(300, 64),
    "mamba/kda_chunk.cu": of_keys(300),
}


# One expert, with one tile in its last group of row tiles, and three tiles of columns.
_EXPERT: tuple[Any, ...] = (72, "none", BF16, "none")
# A call of every kernel with grouped row tiles; their number is above the group size and no multiple of it.
GROUPS: dict[str, list[Callable[[], None]]] = {
    "linear/gemm_sm90.cu": [
        partial(dense.test_linear, GemmConfig(48, cluster=1, group=2), 300, 136, 72),
        partial(dense.test_linear, GemmConfig(48, cluster=2, group=2), 640, 136, 72),
    ],
    "linear/gemm_sm80.cu": [
        partial(dense.test_linear, MmaConfig(16, 64, 1, 4, 2, 1, 1), 9 * 16 - 3, 136, 72),
        partial(
            grouped.test_mma_and_simt_grouped_gemm, GroupedMmaConfig(16, 64, 1, 4, 2), (135, 136, *_EXPERT, 16, 2, 1)
        ),
    ],
    "linear/grouped_gemm_sm90.cu": [
        partial(grouped.test_hopper_grouped_gemm, GroupedConfig(64, 64, group=2), (70, 136, *_EXPERT, 64, 2, 1)),
    ],
    "linear/gemm_simt.cu": [
        partial(grouped.test_mma_and_simt_grouped_gemm, GroupedSimtConfig(16, 64), (135, 136, *_EXPERT, 16, 2, 1))
    ],
}


def test_every_kernel_of_a_kind_has_a_case() -> None:
    kernels = {file for file in kernels_cu.names() if file.endswith(".cu")}
    texts = {file: re.sub("//.*", "", source.inline(file, set())) for file in kernels}
    assert {file for file, text in texts.items() if re.search(r"\bSTAGES\b", text)} == CASES.keys()
    of_groups = re.compile(r"^//     GROUP(_ROWS)? +(row )?(tiles|clusters) |`group_rows`", re.MULTILINE)
    # Tiles of CUDA Tile C++ have no order that a test could tell from another.
    found = {file for file in kernels if of_groups.search(kernels_cu.read(file)) and not source.is_tile(file)}
    assert found == GROUPS.keys()


def cases(table: dict[str, list[Callable[[], None]]]) -> pytest.MarkDecorator:
    found = [pytest.param(file, call, id=f"{file}-{i}") for file in table for i, call in enumerate(table[file])]
    return pytest.mark.parametrize(("file", "call"), found)


@pytest.fixture(autouse=True)
def _two_sms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks have several tiles, under one schedule; plans of other tests are dropped before, and these plans
    afterwards."""
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=2))
    for module in (dense, packed, grouped, prefill, e4m3):
        monkeypatch.setattr(module, "SCHEDULES", SCHEDULES[1:2])
    forget()
    with config.cpu("kernels"):
        yield
    forget()


def forget() -> None:
    for op in pyops.registry.values():
        op.forget()


def watch(monkeypatch: pytest.MonkeyPatch, fewest: Callable[[str], int] | None = None) -> set[str]:
    """The kernel files that are specialised from now on, with at most as many stages as `fewest` says."""
    specialise, seen = Kernel.__call__, set[str]()

    def noted(self: Kernel, **constants: Any) -> Specialisation:
        seen.add(self.file)
        if fewest and "STAGES" in constants:
            constants["STAGES"] = min(constants["STAGES"], fewest(self.file))
        return specialise(self, **constants)

    monkeypatch.setattr(Kernel, "__call__", noted)
    return seen


@pytest.mark.rotates
@cases(CASES)
def test_more_k_tiles_than_stages(file: str, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With two stages, or as few as the kernel takes. Every tile goes round them more than twice."""
    watch(monkeypatch, lambda name: FEWEST.get(name, 2))
    launch, launches = Specialisation.launch, list[Launch]()

    def noted(self: Specialisation, *args: Any, **fixed: Any) -> Launch:
        launches.append(launch(self, *args, **fixed))
        return launches[-1]

    monkeypatch.setattr(Specialisation, "launch", noted)
    call()
    of_file = [one for one in launches if one.specialisation.kernel.file == file]
    assert of_file, "another kernel was launched"
    for one in of_file:
        steps, tiles = ROUNDS[file](one)
        assert steps >= 2 * stages_of(one) + 1
        assert tiles is None or tiles >= 2


def stages_of(launch: Launch) -> int:
    """From the constants of a launch, or from those in its text."""
    constants, file = launch.specialisation.constants, launch.specialisation.kernel.file
    return int(constants.get("STAGES", STAGES.get(file, 2)))


@cases(GROUPS)
def test_more_row_tiles_than_a_group(file: str, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    call()
    assert file in seen, "another kernel was launched"
