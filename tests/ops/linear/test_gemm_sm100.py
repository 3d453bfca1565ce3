"""gemm_sm100.cu, in CUDA Tile C++, by the host backend; python -m tests.tiles compiles it for Blackwell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pyops
from pyops._core.tensors import dtypes
from pyops.ops.linear.gemm_engines import choose
from pyops.ops.linear.gemm_sm100 import TileConfig
from tests.ops.linear.test_products import assert_rounded_once, columns, draw, forced, needs_compiler, positive, problem
from tests.support.blackwell import BLACKWELL

# Partial tiles in M, N and K; two groups of row tiles.
TILES = [
    (TileConfig(64, 16, group=1), 70, 40, 136),
    (TileConfig(64, 16, wide=True, group=2), 130, 72, 72),
    (TileConfig(16, 64, group=2), 40, 72, 136),
    (TileConfig(16, 64, wide=True), 9, 136, 200),
]


@needs_compiler
@pytest.mark.parametrize(("one", "m", "n", "k"), TILES, ids=str)
def test_linear(one: TileConfig, m: int, n: int, k: int) -> None:
    x, bias = draw(m, k, dtype=torch.bfloat16), draw(n, dtype=torch.bfloat16, seed=1)
    weight = draw(n, k, dtype=torch.bfloat16, seed=2)
    with forced("linear", one):
        out = pyops.linear.new(x, weight, bias)
    assert_rounded_once(out, x.double() @ weight.double().T + bias.double())


@needs_compiler
@pytest.mark.parametrize("one", [TileConfig(64, 16), TileConfig(16, 64)], ids=str)
def test_gated_linear(one: TileConfig) -> None:
    m, n, k = 20, 72, 72
    x, bias = draw(m, k, dtype=torch.bfloat16), draw(2 * n, dtype=torch.bfloat16, seed=1)
    weight = draw(2 * n, k, dtype=torch.bfloat16, seed=2)
    with forced("linear", one):
        out = pyops.linear.new(x, weight, bias, "silu_and_mul")
    exact = x.double() @ weight.double().T + bias.double()
    assert_rounded_once(out, torch.nn.functional.silu(exact[:, :n]) * exact[:, n:])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("one", [TileConfig(64, 16, wide=True), TileConfig(16, 64)], ids=str)
def test_scaled_mm(one: TileConfig, dtype: torch.dtype) -> None:
    m, n, k = 20, 72, 144
    a, b = draw(m, k, dtype=dtype), columns(draw(k, n, dtype=dtype, seed=1))
    bias, out = draw(n, dtype=torch.float16, seed=2), torch.empty(m, n, dtype=torch.float16)
    a_scales, b_scales = positive(m, 1, seed=3) * 2.0**-6, positive(n, seed=4)
    with forced("cutlass_scaled_mm", one):
        pyops.cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias)
    assert_rounded_once(out, a_scales.double() * b_scales.double() * (a.double() @ b.double()) + bias.double())
    if dtype == torch.int8:
        adj = torch.randint(-900, 900, (n,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
        azp = torch.randint(-90, 90, (m,), generator=torch.Generator().manual_seed(6), dtype=torch.int32)
        with forced("cutlass_scaled_mm_azp", one):
            pyops.cutlass_scaled_mm_azp(out, a, b, a_scales, b_scales, adj, azp, bias)
        accum = a.double() @ b.double() - azp.double()[:, None] * adj.double()
        assert_rounded_once(out, a_scales.double() * b_scales.double() * accum + bias.double())


@needs_compiler
def test_block_scales() -> None:
    m, n, k = 70, 144, 272
    a, b = draw(m, k, dtype=torch.float8_e4m3fn), columns(draw(k, n, dtype=torch.float8_e4m3fn, seed=1))
    a_scales, b_scales = positive(m, -(-k // 128), seed=2), positive(-(-k // 128), -(-n // 128), seed=3)
    wide_a = a_scales.double().repeat_interleave(128, 1)[:, :k]
    wide_b = b_scales.double().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    out = torch.empty(m, n, dtype=torch.bfloat16)
    for one in TileConfig(64, 32), TileConfig(16, 64, wide=True):
        with forced("cutlass_scaled_mm", one):
            pyops.cutlass_scaled_mm(out.fill_(torch.nan), a, b, a_scales, b_scales)
        assert_rounded_once(out, (a.double() * wide_a) @ (b.double() * wide_b))


def test_blackwell_prefers_tcgen05() -> None:
    """But not without NVRTC and a driver that compile CUDA Tile C++, nor what it cannot load."""
    for m, n, k in (4096, 28672, 4096), (64, 28672, 4096), (300, 4096, 16384):
        one = problem(m, n, k, dtypes.bfloat16, BLACKWELL)
        found = choose(one, BLACKWELL)
        assert isinstance(found, TileConfig)
        launch = found.launch(one)
        assert launch.block == (1, 1, 1)
        assert launch.grid[0] == found.blocks(m, n)
    older = replace(BLACKWELL, tiles=False)
    assert not isinstance(choose(problem(4096, 28672, 4096, dtypes.bfloat16, older), older), TileConfig)
    no_integers = replace(BLACKWELL, arch="sm_103")
    for on, n, k, dtype in (
        (BLACKWELL, 1000, 4100, dtypes.bfloat16),
        (BLACKWELL, 1001, 4096, dtypes.bfloat16),
        (BLACKWELL, 1024, 4096, dtypes.float32),
        (no_integers, 1024, 4096, dtypes.int8),
    ):
        assert not isinstance(choose(problem(64, n, k, dtype, on), on), TileConfig)
    with pytest.raises(ValueError, match="no geometry"):
        TileConfig(96, 128)
