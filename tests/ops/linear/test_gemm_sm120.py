"""gemm_sm120.cu by the host backend, and the choice of it; NVRTC compiles it for sm_120a and sm_121a."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import pyops
from pyops import offline, tuning
from pyops._core.launch.kernel import Launch
from pyops._core.system import device
from pyops._core.tensors.tensor import TensorArg
from pyops.example import ArgMaker
from pyops.ops.linear import gemm_sm120, grouped_block_scaled
from pyops.ops.linear.block_scaled import MXFP4, MXFP8, NVFP4
from pyops.ops.linear.gemm_sm120 import GroupedScaledMmaConfig, ScaledMmaConfig
from pyops.testing import SCHEDULES, canaries, scheduled
from tests.every_op.test_nvrtc import MISSING
from tests.ops.linear import test_grouped_mx as grouped
from tests.ops.linear.test_products import forced, needs_compiler

DENSE = "cutlass_scaled_fp4_mm"
# {the format of a name of test_grouped_mx}
FORMATS = {grouped.FP4: NVFP4, grouped.MX4: MXFP4, grouped.MX8: MXFP8}


@pytest.fixture
def geforce(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are planned for sm_120."""
    monkeypatch.setenv("PYOPS_ARCH", "sm_120")
    for op in pyops.registry.values():
        op.forget()
    yield
    for op in pyops.registry.values():
        op.forget()


def matrix(name: str, rows: int, k: int, seed: int, experts: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """(values, scales in tiles) with exact products: small numbers, and powers of two as scales. Scales of no values
    are NaN."""
    generator, form = torch.Generator().manual_seed(seed), FORMATS[name]
    if form.code_bits == 4:
        values = torch.randint(0, 256, (*experts, rows, k // 2), generator=generator, dtype=torch.uint8)
    else:
        numbers = torch.randint(-6, 7, (*experts, rows, k), generator=generator)
        values = numbers.to(torch.float8_e4m3fn)
    padded, columns = form.scale_sizes(rows, k)
    low = 0x30 if form is NVFP4 else 126  # 0.5 to 2
    scales = low + (8 if form is NVFP4 else 1) * torch.randint(0, 3, (*experts, padded, columns), generator=generator)
    scales = scales.to(torch.uint8)
    blocks = k // form.scale_size
    for one in scales.view(-1, padded, columns):
        flat = one.view(-1)
        for row in range(padded):
            for block in range(blocks if row < rows else 0, columns):
                flat[grouped.scale_offset(row, block, columns)] = 0xFF
    return values, scales


# Rows and columns that are no multiples of the tile, K of partial k-tiles and partial words of scales, split-K.
CONFIGS = [
    (ScaledMmaConfig(16, 64, 1, 4, 4, 2), 5, 70, 32),
    (ScaledMmaConfig(16, 32, 1, 2, 2, 1, 2), 33, 40, 1120),
    (ScaledMmaConfig(48, 64, 1, 2, 3, 1), 50, 66, 288),
    (ScaledMmaConfig(128, 128, 2, 4, 2, 1), 140, 33, 96),
]


@pytest.mark.usefixtures("geforce")
@needs_compiler
@pytest.mark.parametrize(("one", "m", "n", "k"), CONFIGS, ids=str)
def test_nvfp4(one: ScaledMmaConfig, m: int, n: int, k: int) -> None:
    """Exactly, under two schedules; nothing next to out is written."""
    (a, a_scales), (b, b_scales) = matrix(grouped.FP4, m, k, 1), matrix(grouped.FP4, n, k, 2)
    exact = grouped.exact(grouped.FP4, a, a_scales) @ grouped.exact(grouped.FP4, b, b_scales).T
    alpha = torch.tensor([0.25])
    with forced(DENSE, one):
        for schedule in (SCHEDULES[0], SCHEDULES[-1]):
            held = canaries(torch.empty(m, n, dtype=torch.float16))
            with scheduled(schedule):
                pyops.cutlass_scaled_fp4_mm(held.tensor, a, b, a_scales, b_scales, alpha)
            held.check()
            assert torch.equal(held.tensor, (0.25 * exact).half())
        assert tuning.last[DENSE] == one


GROUPED = [
    (grouped.FP4, GroupedScaledMmaConfig(16, 64, 1, 4, 3, 2), 70, 160),
    (grouped.MX4, GroupedScaledMmaConfig(32, 64, 1, 2, 2, 2), 33, 576),
    (grouped.MX8, GroupedScaledMmaConfig(64, 128, 2, 4, 2, 1), 130, 288),
]


@pytest.mark.usefixtures("geforce")
@needs_compiler
@pytest.mark.parametrize(("name", "one", "n", "k"), GROUPED, ids=str)
def test_experts(name: str, one: GroupedScaledMmaConfig, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, under two schedules. Rows of no expert are not written; scales out of range stand for zeros."""
    monkeypatch.setattr(grouped_block_scaled, "block_size_for", lambda *_: 64)
    counts, form = [20, 0, 3, 66], FORMATS[name]
    firsts = [sum(counts[:e]) + e for e in range(len(counts))]
    a, _ = matrix(name, sum(counts) + len(counts), k, 3)
    b, b_scales = matrix(name, n, k, 4, (len(counts),))
    tiles, parts = [0, 0, 128, 256], []
    for e, count in enumerate(counts):
        parts.append(matrix(name, count, k, 5 + e)[1] if count else torch.empty(0, form.scale_sizes(1, k)[1]))
    a_scales = torch.cat([part.to(torch.uint8) for part in parts])
    out = torch.full((len(a), n), 7.0, dtype=torch.bfloat16)
    right, alphas = out.double(), grouped.alphas_of(name, len(counts)).double()
    for e, (count, first, tile) in enumerate(zip(counts, firsts, tiles, strict=True)):
        rows = slice(first, first + count)
        if count:
            right[rows] = alphas[e] * (
                grouped.exact(name, a[rows], a_scales, tile) @ grouped.exact(name, b[e], b_scales[e]).T
            )
    sizes = torch.tensor([[count, n, k] for count in counts], dtype=torch.int32)
    lists = [sizes, *(torch.tensor(each, dtype=torch.int32) for each in (firsts, tiles))]
    with forced(name, one):
        for schedule in (SCHEDULES[0], SCHEDULES[-1]):
            held = canaries(out)
            with scheduled(schedule):
                grouped.call(name, held.tensor, a, b, a_scales, b_scales, *lists)
            held.check()
            assert torch.equal(held.tensor, right.bfloat16())
        assert tuning.last[name] == one
        lists[2][2] = 2**31 - 2
        grouped.call(name, held.tensor, a, b, a_scales, b_scales, *lists)
        right[firsts[2] : firsts[2] + counts[2]] = 0
        assert torch.equal(held.tensor, right.bfloat16())


def launches(name: str, arch: str, num_tokens: int, **changes: Any) -> list[Launch]:
    """Those of the op's example on a device, with K = 1024 and properties of its tensors changed."""
    op = pyops.registry[name]
    assert op.example is not None
    args = op.example(ArgMaker(device.model(arch), name), num_tokens=num_tokens, input_size=1024)
    return op.launches(*(replace(one, **changes) if isinstance(one, TensorArg) else one for one in args))


@pytest.mark.parametrize("name", [DENSE, *FORMATS])
def test_choice(name: str) -> None:
    """sm_120 and sm_121 have the instruction, but not PTX of sm_120 that a newer GPU runs; rows must be aligned."""
    for arch in ("sm_120", "sm_121"):
        *before, last = (one.specialisation.kernel for one in launches(name, arch, 300))
        assert (last.file, last.options) == ("linear/gemm_sm120.cu", (f"--gpu-architecture={arch}a",))
        assert "linear/block_scaled_to_bf16.cu" not in {one.file for one in before}
        assert launches(name, arch, 300, alignment=8)[-1].specialisation.kernel.file != "linear/gemm_sm120.cu"
    for arch in ("sm_75", "sm_89", "sm_90", "sm_100", "gfx942"):
        found = {one.specialisation.kernel.file for one in launches(name, arch, 300)}
        assert "linear/block_scaled_to_bf16.cu" in found
        assert "linear/gemm_sm120.cu" not in found
    assert not replace(device.model("sm_120"), translates=True).supports("block_scaled_products")


def test_no_geometry() -> None:
    for sizes in (
        (128, 128, 1, 2, 2, 1),
        (16, 32, 1, 1, 2, 1),
        (16, 96, 1, 2, 2, 1),
        (24, 64, 1, 2, 2, 1),
        (16, 64, 1, 4, 1, 1),
    ):
        with pytest.raises(ValueError, match="no geometry"):
            ScaledMmaConfig(*sizes)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("name", [DENSE, *FORMATS])
def test_tiles_compile_without_spills(name: str) -> None:
    """And fits into shared memory, for CTAs as many as the plan expects."""
    on = device.model("sm_121")
    assert launches(name, "sm_121", 5000)
    problem = tuning.last_choice[name][0]
    if name == DENSE:
        first, *_, last = gemm_sm120.configs(5000, 4096, 1024, 4, 16, on)
        chosen = [replace(first, splits=2), last]
    else:
        form = FORMATS[name]
        chosen = list(gemm_sm120.grouped_configs(form.code_bits, form.scale_size, 128, on))[-1:]
    for one in chosen:
        (launch,) = one.launches(problem)
        made = launch.specialisation
        report = offline.compile(made.kernel.file, str(made), made.text, "sm_121", made.kernel.options)
        assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ()), made
        assert (launch.shared + report.shared_bytes + 1024) * one.min_blocks <= on.shared_memory + 1024
