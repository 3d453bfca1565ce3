"""gemm_sm100_scaled.cu, in CUDA Tile C++, by the host backend; python -m tests.tiles compiles it for Blackwell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pyops
from pyops.ops._shared.fp4_tiles import TILE_ROWS, rounded_up
from pyops.ops.linear import gemm_sm100_scaled
from tests.ops.linear.test_grouped_mx import FORMATS, FP4, MX8, call, case, draw_codes, draw_scales, exact
from tests.ops.linear.test_products import assert_rounded_once, needs_compiler
from tests.support.blackwell import mistaken, on_blackwell

FILE = "linear/gemm_sm100_scaled.cu"
OPS = "cutlass_scaled_fp4_mm", *FORMATS


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host backend in place of a Blackwell GPU, with tiles that fit its stack."""
    monkeypatch.setattr(gemm_sm100_scaled, "TILE_M", 32)
    monkeypatch.setattr(gemm_sm100_scaled, "_TILES_N", (16,))
    with on_blackwell(monkeypatch, *(pyops.registry[name] for name in OPS)):
        yield


def dense(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, float64 result) of the GEMM of NVFP4."""
    generator = torch.Generator().manual_seed(m)
    quants = [draw_codes(FP4, rows, k, generator=generator) for rows in (m, n)]
    scales = [draw_scales(FP4, rounded_up(rows, TILE_ROWS), k // 16, generator=generator) for rows in (m, n)]
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    pyops.cutlass_scaled_fp4_mm(out, *quants, *scales, torch.full((1,), 0.375))
    x, weight = (exact(FP4, *pair) for pair in zip(quants, scales, strict=True))
    return out, 0.375 * (x @ weight.T)


def grouped(name: str, counts: list[int], n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    (out, *operands), right = case(name, counts, n, k, "cpu")
    call(name, out, *operands)
    return out, right


def kernels_of(name: str) -> set[str]:
    return {one.kernel.file for one in pyops.registry[name].specialisations.values()}


# Partial tiles in M, N and K; tiles in the second tile of scales.
@needs_compiler
@pytest.mark.parametrize(("m", "n", "k"), [(170, 40, 320), (3, 136, 64)])
def test_dense_matches_float64(m: int, n: int, k: int) -> None:
    pyops.registry[OPS[0]].specialisations.clear()
    assert_rounded_once(*dense(m, n, k))
    assert kernels_of(OPS[0]) == {FILE}


@needs_compiler
@pytest.mark.parametrize("name", FORMATS)
def test_grouped_matches_float64(name: str) -> None:
    """Experts without rows, with a part of a tile, and with tiles in two tiles of scales; other rows keep their 7."""
    pyops.registry[name].specialisations.clear()
    assert_rounded_once(*grouped(name, [5, 0, 131], 40, 384))
    assert kernels_of(name) == {"linear/group_rows.cu", FILE}


@needs_compiler
def test_hostile_lists_touch_nothing_else() -> None:
    """The host backend finds any access outside of the tensors; rows without scales are zeros."""
    (out, a, b, a_scales, b_scales, sizes, firsts, tiles), right = case(MX8, [40, 33, 20], 40, 384, "cpu")
    tiles[1] = 2**30
    firsts[2], sizes[2, 0] = len(out) - 3, 2**31 - 1
    call(MX8, out, a, b, a_scales, b_scales, sizes, firsts, tiles)
    assert_rounded_once(out[:41], right[:41])
    assert out[41:74].eq(0).all()
    firsts[:] = torch.tensor([-5, 2**31 - 1, -(2**31)])
    call(MX8, out.fill_(7), a, b, a_scales, b_scales, sizes, firsts, tiles)
    assert out.eq(7).all()


MISTAKES = {
    "k-tiles of b exchanged": ("b_view.load(column, i)", "b_view.load(column, i ^ 1)"),
    "missed tail of K": ("i * TILE_K < k_end", "(i + 1) * TILE_K <= k_end"),
    "scales of the first k-tile": (
        "a_scale_view.load(scale_row / SCALE_ROWS, i)",
        "a_scale_view.load(scale_row / SCALE_ROWS, 0)",
    ),
    "scales of the first rows": ("scale_row % SCALE_ROWS / TILE_M", "0"),
    "scales of the first tile of rows": ("scale_row / SCALE_ROWS, i)", "0, i)"),
    "scales of the next columns": ("column % COLUMN_TILES", "(column + 1) % COLUMN_TILES"),
    "scales of the first expert": ("expert * b_scale_tiles * scale_pitch", "0 * expert"),
    "weights of the first expert": ("b + expert * n * b_pitch", "b + 0 * expert"),
    "rows of the next expert": ("count, columns, out_pitch}", "rows - first, columns, out_pitch}"),
    "factor of the first expert": ("alpha[expert]", "alpha[0]"),
    "rows from the start of the tile on": ("a_view.load_from(first, i)", "a_view.load(first / TILE_M, i)"),
    "size from the wrong column": ("sizes[1] == n ? sizes[0] : sizes[1]", "sizes[1]"),
}


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(gemm_sm100_scaled, "_gemm_sm100_scaled", mistaken(FILE, *MISTAKES[mistake]))
    with pytest.raises((AssertionError, pyops.KernelFault)):
        assert_rounded_once(*grouped(FP4, [5, 0, 131], 40, 576))


def test_refusals() -> None:
    """Matrices that TMA cannot load, or with scales that pad rows, are dequantized first."""
    (out, a, b, a_scales, b_scales, *lists), _ = case(FP4, [3], 40, 96, "cpu")
    described, _ = pyops.registry[FP4].check(out, a, b, a_scales, b_scales, torch.ones(1), *lists)
    assert described[0] is not None
    launches = pyops.registry[FP4].launches(*described)
    assert all(one.specialisation.kernel.file != FILE for one in launches)
