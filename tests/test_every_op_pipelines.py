"""Kernels with stages, with far more steps than stages; kernels that group tiles, with one tile more than a group.

The phase bit of a barrier is the same for the first round over the stages and the third, so a test with few steps does
not see a phase that goes wrong. Stages are few here, and a block has several tiles, so that the rounds of one tile
begin where those of the tile before ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import kernels_cu
import pyops
from pyops._core import config, device, source
from pyops._core.host.toolchain import toolchains
from pyops._core.kernel import Kernel, Specialisation
from pyops.ops.attention.varlen_hopper import HopperConfig
from pyops.ops.linear.coded_hopper import CodedHopperConfig
from pyops.ops.linear.coded_plan import CodedConfig
from pyops.ops.linear.gemm_hopper import GemmConfig, SwapConfig
from pyops.ops.linear.gemm_plan import MmaConfig
from pyops.ops.linear.ggml_plan import DigitsConfig, MulMatConfig, VecConfig
from pyops.ops.linear.grouped_plan import GroupedConfig, GroupedMmaConfig, GroupedSimtConfig
from pyops.ops.linear.packed_hopper import PackedConfig
from pyops.ops.linear.packed_narrow import PackedNarrowConfig
from pyops.ops.linear.packed_plan import PackedMmaConfig
from pyops.testing import SCHEDULES
from pyops.testing.calls import assert_results, expected, run
from tests import test_attention_e4m3 as e4m3
from tests import test_attention_hopper as prefill
from tests import test_attention_mla as latent
from tests import test_attention_varlen as varlen
from tests import test_linear_ggml as ggml
from tests import test_linear_grouped as grouped
from tests import test_linear_hopper as dense
from tests import test_linear_packed_kernels as packed
from tests import test_mamba_chunk_scan as chunk_scan
from tests.calls import example

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
# The fewest stages of kernels that need more than two.
FEWEST = {"linear/gemm_packed_narrow.cu": 4, "linear/gemm_swap.cu": 4, "mamba/gated_delta_chunk.cu": 4}


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
        grouped.test_codes_of_experts(one, activation, k, size, patch)


def mla(lengths: list[int], heads: int, page_size: int, kind: torch.dtype | None) -> None:
    prefill.test_mla_codes("cpu", lengths, heads, page_size, 1, BF16, kind)


def on_ampere(call: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device._HOST, 32, replace(device.host(), arch="sm_80", multiprocessors=2, cluster=1))
        call()


def prefill_on_ampere() -> None:
    varlen._assert_is_attention(varlen._call([65, 70], [290, 330], dtype=torch.float16))


def mla_on_ampere() -> None:
    latent._assert_is_attention(latent._call([330, 300], 20))


# A call of every kernel, with at least four steps of each of several tiles.
CASES: dict[str, list[Callable[[], None]]] = {
    "attention/attention_varlen.cu": [partial(on_ampere, prefill_on_ampere)],
    "attention/attention_varlen_e4m3.cu": [partial(e4m3.test_long_sums_are_exact, "cpu")],
    "attention/attention_varlen_hopper.cu": [
        partial(prefill.test_geometries, "cpu", HopperConfig(64, 2), (4, 2), 16, 8),
        partial(prefill.test_geometries, "cpu", HopperConfig(48, 3), (4, 2), 64, 16),
    ],
    "attention/mla_decode.cu": [partial(on_ampere, mla_on_ampere)],
    "attention/mla_decode_codes.cu": [partial(mla, [330, 300], 16, 16, FP8)],
    "attention/mla_decode_few_heads.cu": [partial(mla, [330, 600], 11, 16, torch.uint8)],
    "attention/mla_decode_hopper.cu": [partial(prefill.test_mla, "cpu", [330, 300], 24, 16, 1, BF16)],
    "linear/gemm.cu": [
        partial(dense.test_linear, GemmConfig(128, cluster=2, group=8), 300, 264, 328),
        partial(dense.test_linear, GemmConfig(48, cluster=1, group=8, ping_pong=True), 140, 168, 328),
        partial(dense.test_linear, GemmConfig(64, cluster=2, group=2, ping_pong=True), 300, 136, 328),
        partial(dense.test_scales_of_blocks, GemmConfig(64, cluster=1, group=2), 140, 200, 328),
        partial(dense.test_scaled_mm, GemmConfig(64, cluster=1, group=2), FP8),
    ],
    "linear/gemm_mma.cu": [partial(dense.test_linear, MmaConfig(16, 64, 1, 4, 2, 1, 1), 20, 66, 328)],
    "linear/gemm_packed.cu": [
        partial(packed.test_product, packed.marlin, 4, PackedConfig(32, 128, 2, 1, 1), 40, 320, 384, 3, BF16),
        partial(packed.test_product, packed.awq, 4, PackedConfig(32, 256, 2, 2, 1), 40, 320, 640, 10, BF16),
    ],
    "linear/gemm_packed_mma.cu": [
        partial(packed.test_product, packed.marlin, 8, PackedMmaConfig(8, 64, 2, 1, 1), 5, 64, 1024, 1, BF16)
    ],
    "linear/gemm_packed_narrow.cu": [
        partial(packed.test_product, packed.marlin, 4, PackedNarrowConfig(4), 17, 320, 1296, 1, BF16)
    ],
    "linear/gemm_swap.cu": [
        partial(dense.test_linear, SwapConfig(16, 112, splits=1), 33, 264, 584),
        partial(dense.test_linear, SwapConfig(16, 32, splits=1), 33, 72, 584),
        partial(dense.test_linear, SwapConfig(16, 72, splits=2), 16, 200, 584),
        partial(dense.test_scaled_mm, SwapConfig(16, 112, splits=1), FP8),  # sums of half a step
    ],
    "linear/ggml_mul_mat.cu": [partial(multiply_ggml, MulMatConfig(4, 1, 2, 2, 1), 3)],
    "linear/ggml_mul_mat_digits.cu": [partial(multiply_ggml, DigitsConfig(2, 2), 1)],
    "linear/ggml_mul_mat_vec.cu": [partial(multiply_ggml, VecConfig(1, 1, 2, 2), 1)],
    "linear/grouped_gemm.cu": [
        partial(grouped.test_hopper, GroupedConfig(128, 128), (90, 72, 328, "silu", BF16, "none", 128)),
        partial(grouped.test_hopper, GroupedConfig(64, 128), (20, 256, 656, "silu", FP8, "block")),
    ],
    "linear/grouped_gemm_mma.cu": [
        partial(grouped.test_other_kernels, GroupedMmaConfig(16, 64, 1, 4, 2), (20, 66, 328, "silu", BF16))
    ],
    "linear/grouped_gemm_packed.cu": [partial(codes_of_experts, CodedConfig(16, 1, 2), "silu", 640, 128)],
    "linear/grouped_gemm_packed_hopper.cu": [
        partial(codes_of_experts, CodedHopperConfig(32, 256, 64), "none", 384, 32),
        partial(codes_of_experts, CodedHopperConfig(48, 256, 128), "silu", 640, 128),
    ],
    "mamba/chunk_scan.cu": [partial(chunk_scan.test_segments_of_several_tiles, "cpu")],
    "mamba/chunk_scan_states.cu": [partial(chunk_scan.test_segments_of_several_tiles, "cpu")],
    "mamba/gated_delta_chunk.cu": [
        partial(run_example, "gated_delta_rule", num_tokens=300, head_dim=128, dtype="bfloat16")
    ],
}


# One expert, whose last group of row tiles has one tile, and three tiles of columns.
_EXPERT: tuple[Any, ...] = (72, "none", BF16, "none")
# A call of every kernel that counts its tiles in groups of rows, with more of them than a group and no multiple.
GROUPS: dict[str, list[Callable[[], None]]] = {
    "linear/gemm.cu": [
        partial(dense.test_linear, GemmConfig(48, cluster=1, group=2), 300, 136, 72),
        partial(dense.test_linear, GemmConfig(48, cluster=2, group=2), 640, 136, 72),
    ],
    "linear/gemm_mma.cu": [partial(dense.test_linear, MmaConfig(16, 64, 1, 4, 2, 1, 1), 9 * 16 - 3, 136, 72)],
    "linear/grouped_gemm.cu": [
        partial(grouped.test_hopper, GroupedConfig(64, 64, group=2), (70, 136, *_EXPERT, 64, 2, 1)),
    ],
    "linear/grouped_gemm_mma.cu": [
        partial(grouped.test_other_kernels, GroupedMmaConfig(16, 64, 1, 4, 2), (135, 136, *_EXPERT, 16, 2, 1))
    ],
    "linear/grouped_gemm_simt.cu": [
        partial(grouped.test_other_kernels, GroupedSimtConfig(16, 64), (135, 136, *_EXPERT, 16, 2, 1))
    ],
}


def test_every_kernel_of_a_kind_has_a_case() -> None:
    kernels = {file for file in kernels_cu.names() if file.endswith(".cu")}
    texts = {file: re.sub("//.*", "", source.inline(file, set())) for file in kernels}
    assert {file for file, text in texts.items() if re.search(r"\bSTAGES\b", text)} == CASES.keys()
    of_groups = re.compile(r"^//     GROUP(_ROWS)? +(tiles|clusters) ", re.MULTILINE)
    assert {file for file in kernels if of_groups.search(kernels_cu.read(file))} == GROUPS.keys()


def cases(table: dict[str, list[Callable[[], None]]]) -> pytest.MarkDecorator:
    found = [pytest.param(file, call, id=f"{file}-{i}") for file in table for i, call in enumerate(table[file])]
    return pytest.mark.parametrize(("file", "call"), found)


@pytest.fixture(autouse=True)
def _two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks have several tiles, under one schedule; no plan of another test is left, nor one of these behind."""
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), multiprocessors=2))
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
    """The files of the kernels that are specialised from now on, with no more stages than `fewest` says."""
    specialise, seen = Kernel.__call__, set[str]()

    def noted(self: Kernel, **constants: Any) -> Specialisation:
        seen.add(self.file)
        if fewest and "STAGES" in constants:
            constants["STAGES"] = min(constants["STAGES"], fewest(self.file))
        return specialise(self, **constants)

    monkeypatch.setattr(Kernel, "__call__", noted)
    return seen


@cases(CASES)
def test_more_steps_than_stages(file: str, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With two stages, or as few as the kernel takes."""
    seen = watch(monkeypatch, lambda name: FEWEST.get(name, 2))
    call()
    assert file in seen, "another kernel was launched"


@cases(GROUPS)
def test_more_row_tiles_than_a_group(file: str, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    call()
    assert file in seen, "another kernel was launched"
