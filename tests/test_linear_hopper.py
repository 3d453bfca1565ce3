"""gemm.cu and gemm_swap.cu: right under every schedule of the host's model of Hopper, and what is chosen for a product."""

from __future__ import annotations

import pytest
import torch

import pyops
from pyops._core import device, dtypes
from pyops._core.host.toolchain import toolchains
from pyops.ops.linear.gemm_hopper import GemmConfig, SwapConfig, choose, serves
from pyops.testing import SCHEDULES, scheduled
from tests.test_linear_products import assert_rounded_once, columns, draw, forced, positive, problem

HOPPER = device.model("sm_90")
needs_compiler = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

# Two waves of tiles, rows and columns and steps that do not fill them; K is no multiple of a step.
GEMM = [
    (GemmConfig(tile_n=128, cluster=2, group=8), 300, 264, 328),
    (GemmConfig(tile_n=64, cluster=1, group=2), 140, 200, 200),
    (GemmConfig(tile_n=224, cluster=2, group=8), 129, 456, 136),
    (GemmConfig(tile_n=256, cluster=1, group=8), 40, 264, 72),
]
SWAP = [
    (SwapConfig(tile_m=16, tile_n=224, splits=1), 13, 456, 328),
    (SwapConfig(tile_m=16, tile_n=32, splits=1), 33, 72, 328),
    (SwapConfig(tile_m=32, tile_n=40, splits=2), 5, 264, 456),
    (SwapConfig(tile_m=16, tile_n=144, splits=4), 16, 200, 584),
    (SwapConfig(tile_m=64, tile_n=8, splits=8), 40, 24, 1160),
]


@needs_compiler
@pytest.mark.parametrize(("one", "m", "n", "k"), GEMM + SWAP, ids=str)
def test_linear(one: GemmConfig | SwapConfig, m: int, n: int, k: int) -> None:
    """The same bits under every schedule, and rounded once."""
    x, bias = draw(m, k, dtype=torch.bfloat16), draw(n, dtype=torch.bfloat16, seed=1)
    weight = draw(n, k, dtype=torch.bfloat16, seed=2)
    first = None
    with forced("linear", one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                out = pyops.linear.new(x, weight, bias)
            first = out if first is None else first
            assert torch.equal(out, first)
    assert_rounded_once(out, x.double() @ weight.double().T + bias.double())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("one", [GEMM[0][0], GEMM[2][0], SWAP[0][0], SWAP[2][0]], ids=str)
def test_scaled_mm(one: GemmConfig | SwapConfig, dtype: torch.dtype) -> None:
    m, n, k = 40, 264, 592
    a, b = draw(m, k, dtype=dtype), columns(draw(k, n, dtype=dtype, seed=1))
    bias, out = draw(n, dtype=torch.float16, seed=2), torch.empty(m, n, dtype=torch.float16)
    a_scales, b_scales = positive(m, 1, seed=3) * 2.0**-6, positive(1, seed=4)
    with forced("cutlass_scaled_mm", one):
        pyops.cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias)
    assert_rounded_once(out, a_scales.double() * b_scales.double() * (a.double() @ b.double()) + bias.double())
    if dtype == torch.int8:
        adj = torch.randint(-900, 900, (n,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
        azp = torch.randint(-90, 90, (m,), generator=torch.Generator().manual_seed(6), dtype=torch.int32)
        with forced("cutlass_scaled_mm_azp", one):
            pyops.cutlass_scaled_mm_azp(out, a, b, a_scales, b_scales, adj, azp, bias)
        sums = a.double() @ b.double() - azp.double()[:, None] * adj.double()
        assert_rounded_once(out, a_scales.double() * b_scales.double() * sums + bias.double())


@needs_compiler
@pytest.mark.parametrize(("one", "m", "n", "k"), [GEMM[0], GEMM[1], *SWAP[:4]], ids=str)
def test_scales_of_blocks(one: GemmConfig | SwapConfig, m: int, n: int, k: int) -> None:
    k, dtype = 2 * k, torch.float8_e4m3fn
    a, b = draw(m, k, dtype=dtype), columns(draw(k, n, dtype=dtype, seed=1))
    a_scales, b_scales = positive(m, -(-k // 128), seed=2), positive(-(-k // 128), -(-n // 128), seed=3)
    wide_a = a_scales.double().repeat_interleave(128, 1)[:, :k]
    wide_b = b_scales.double().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    out = torch.empty(m, n, dtype=torch.bfloat16)
    with forced("cutlass_scaled_mm", one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                pyops.cutlass_scaled_mm(out.fill_(torch.nan), a, b, a_scales, b_scales)
            assert_rounded_once(out, (a.double() * wide_a) @ (b.double() * wide_b))
