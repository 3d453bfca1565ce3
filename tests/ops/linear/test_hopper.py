"""gemm_sm90.cu and gemm_sm90_swap_ab.cu: correct under every schedule of the Hopper emulation of the host; the chosen
configs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pyops
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops.host.toolchain import toolchains
from pyops.ops.linear.gemm_engines import choose
from pyops.ops.linear.gemm_problem import GemmProblem
from pyops.ops.linear.gemm_shape import GemmShape
from pyops.ops.linear.gemm_sm90 import MAX_SWAP_M, GemmConfig, SwapConfig
from pyops.ops.linear.skinny_linear import SkinnyConfig
from pyops.testing import SCHEDULES, scheduled
from tests.ops.linear.test_products import assert_rounded_once, columns, draw, forced, positive, problem

pytestmark = pytest.mark.rotates

HOPPER = device.model("sm_90")
needs_compiler = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gets four SMs, so that CTAs take several tiles."""
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=4))


# Two waves of tiles, with partial tiles in M, N and K.
GEMM = [
    (GemmConfig(tile_n=128, cluster=2, group=8), 300, 264, 328),
    (GemmConfig(tile_n=112, cluster=1, group=2), 140, 264, 200),
    (GemmConfig(tile_n=224, cluster=2, group=8), 129, 456, 136),
    (GemmConfig(tile_n=256, cluster=1, group=8), 40, 264, 72),
    (GemmConfig(tile_n=128, cluster=2, group=2, ping_pong=True), 300, 392, 328),
    (GemmConfig(tile_n=48, cluster=1, group=8, ping_pong=True), 140, 360, 200),
    # Stream-K: tiles of two, three and more CTAs, and full waves before them; the host has four SMs.
    (GemmConfig(tile_n=256, cluster=1, group=8, splits=2), 40, 264, 1032),
    (GemmConfig(tile_n=64, cluster=1, group=2, splits=2), 140, 440, 520),
    (GemmConfig(tile_n=64, cluster=2, group=2, splits=2), 200, 136, 584),
    (GemmConfig(tile_n=128, cluster=1, group=8, splits=4), 20, 104, 1288),
    # Clusters along N: whole and partial row tiles, one of 124 rows, and a column tile past the end of b.
    (GemmConfig(tile_n=64, cluster=2, group=1, along_n=True), 300, 232, 328),
    (GemmConfig(tile_n=96, cluster=2, group=2, along_n=True), 256, 264, 200),
    (GemmConfig(tile_n=64, cluster=2, group=2, along_n=True), 252, 136, 200),
    (GemmConfig(tile_n=48, cluster=2, group=2, ping_pong=True, along_n=True), 140, 360, 200),
    (GemmConfig(tile_n=64, cluster=2, group=2, splits=2, along_n=True), 200, 136, 584),
]
GATED = [
    (GemmConfig(tile_n=128, cluster=2, group=8), 300, 136, 328),
    (GemmConfig(tile_n=96, cluster=1, group=2), 140, 264, 200),
    (GemmConfig(tile_n=256, cluster=1, group=2, splits=4), 40, 120, 520),
    (GemmConfig(tile_n=64, cluster=2, group=2, splits=2), 200, 72, 584),
    (GemmConfig(tile_n=64, cluster=2, group=2, along_n=True), 200, 72, 328),
    (SwapConfig(tile_m=16, tile_n=112, splits=1), 13, 200, 328),
    (SwapConfig(tile_m=16, tile_n=32, splits=1), 33, 40, 328),
    (SwapConfig(tile_m=32, tile_n=48, splits=2), 5, 136, 456),
    (SwapConfig(tile_m=96, tile_n=80, splits=2), 170, 80, 456),
]
BLOCKS = [
    (GemmConfig(tile_n=64, cluster=1, group=2), 140, 200, 200),
    # One set of accumulators: pieces of 128 columns, and tiles that begin in the middle of a scale block.
    (GemmConfig(tile_n=256, cluster=2, group=2), 300, 264, 200),
    (GemmConfig(tile_n=192, cluster=2, group=2, along_n=True), 140, 392, 200),
    (GemmConfig(tile_n=256, cluster=1, group=8, splits=4), 20, 264, 1160),
]
SWAP = [
    (SwapConfig(tile_m=16, tile_n=112, splits=1), 13, 456, 328),
    (SwapConfig(tile_m=16, tile_n=32, splits=1), 33, 72, 328),
    (SwapConfig(tile_m=32, tile_n=40, splits=2), 5, 264, 456),
    (SwapConfig(tile_m=16, tile_n=72, splits=4), 16, 200, 584),
    (SwapConfig(tile_m=64, tile_n=8, splits=8), 40, 24, 1160),
    # Partial accumulators in the place of the ring: of CTAs, of warpgroups, and of both.
    (SwapConfig(tile_m=80, tile_n=128, splits=4), 75, 200, 584),
    (SwapConfig(tile_m=192, tile_n=40, splits=1), 300, 88, 328),
    (SwapConfig(tile_m=112, tile_n=64, splits=2), 200, 136, 520),
]


@needs_compiler
@pytest.mark.parametrize(("one", "m", "n", "k"), GEMM + SWAP, ids=str)
def test_linear(one: GemmConfig | SwapConfig, m: int, n: int, k: int) -> None:
    """All schedules give the same bits, rounded once."""
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
@pytest.mark.parametrize(
    ("one", "m", "n", "k", "activation"),
    [(*SWAP[1], "none"), (SWAP[3][0], 16, 200, 3000, "none"), (*GATED[8], "silu_and_mul")],
    ids=str,
)
def test_constant_weight(one: SwapConfig, m: int, n: int, k: int, activation: str) -> None:
    """Tiles after the first one, more k-tiles than stages, and a partial row tile give the same bits."""
    x, weight = draw(m, k, dtype=torch.bfloat16), draw(2 * n, k, dtype=torch.bfloat16, seed=2)
    with forced("linear", one):
        plain = pyops.linear.new(x, weight, None, activation)
        for schedule in SCHEDULES:
            with scheduled(schedule):
                out = pyops.linear.new(x, weight, None, activation, constant_weight=True)
            assert torch.equal(out, plain)


@needs_compiler
@pytest.mark.parametrize(("one", "m", "n", "k"), [SWAP[1], (SWAP[3][0], 16, 200, 3000)], ids=str)
def test_a_bias_for_each_element(one: SwapConfig, m: int, n: int, k: int) -> None:
    """As many elements as the result has, in any shape; not as many as some of its rows have."""
    x, weight = draw(m, k, dtype=torch.bfloat16), draw(n, k, dtype=torch.bfloat16, seed=1)
    bias = draw(m, n, dtype=torch.bfloat16, seed=2)
    with forced("linear", one):
        for given in (bias, bias.view(-1)):
            assert_rounded_once(pyops.linear.new(x, weight, given), x.double() @ weight.double().T + bias.double())
    with pytest.raises(pyops.OpError, match=f"bias: expected {n} elements, got shape"):
        pyops.linear.new(x, weight, bias[1:])


@needs_compiler
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("one", "m", "n", "k"), GATED, ids=str)
def test_gated_linear(one: GemmConfig | SwapConfig, m: int, n: int, k: int, with_bias: bool) -> None:
    """Gates and ups of a tile are runs of rows of the weight that lie apart."""
    x, bias = draw(m, k, dtype=torch.bfloat16), draw(2 * n, dtype=torch.bfloat16, seed=1)
    weight = draw(2 * n, k, dtype=torch.bfloat16, seed=2)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    with forced("linear", one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                out = pyops.linear.new(x, weight, bias if with_bias else None, "silu_and_mul")
            assert_rounded_once(out, torch.nn.functional.silu(exact[:, :n]) * exact[:, n:])


@needs_compiler
@pytest.mark.parametrize("k", [592])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    "one", [GEMM[0][0], GEMM[1][0], GEMM[4][0], GEMM[7][0], SWAP[0][0], SWAP[2][0], SWAP[5][0], SWAP[7][0]], ids=str
)
def test_scaled_mm(one: GemmConfig | SwapConfig, dtype: torch.dtype, k: int) -> None:
    m, n = 40, 264
    a, b = draw(m, k, dtype=dtype), columns(draw(k, n, dtype=dtype, seed=1))
    out_dtype = torch.bfloat16 if isinstance(one, GemmConfig) and one.ping_pong else torch.float16
    bias, out = draw(n, dtype=out_dtype, seed=2), torch.empty(m, n, dtype=out_dtype)
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
@pytest.mark.parametrize(("one", "m", "n", "k"), [GEMM[0], *BLOCKS, GEMM[7], GEMM[8], GEMM[10], *SWAP[:4]], ids=str)
def test_block_scales(one: GemmConfig | SwapConfig, m: int, n: int, k: int) -> None:
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


# The device model's choices for the layers of Llama 3 70B and 8B, and other measured cases
# (docs/performance/products.md).
CHOICES = [
    (16, 28672, 4096, dtypes.bfloat16, False, SwapConfig(16, 112, 1)),
    (64, 28672, 4096, dtypes.bfloat16, False, GemmConfig(224, 1, 16)),
    (16, 4096, 4096, dtypes.bfloat16, False, SwapConfig(16, 64, 2)),
    (64, 2048, 8192, dtypes.bfloat16, False, SwapConfig(64, 72, 4)),  # not two row tiles, which load b twice
    (64, 7168, 5120, dtypes.bfloat16, False, SwapConfig(64, 112, 2)),
    (3, 4096, 14336, dtypes.float8_e4m3fn, True, SwapConfig(16, 64, 2)),
    (256, 28672, 4096, dtypes.float8_e4m3fn, False, GemmConfig(224, 2, 16)),
    (4096, 28672, 4096, dtypes.int8, False, GemmConfig(192, 2, 16, ping_pong=True)),
    (4096, 28672, 4096, dtypes.bfloat16, False, GemmConfig(256, 2, 8)),
    (3000, 28672, 4096, dtypes.float8_e4m3fn, True, GemmConfig(256, 2, 16)),
]


def serves(one: GemmProblem, on: device.Device) -> bool:
    """Whether a WGMMA kernel serves the problem."""
    refusals = (engine.refusal(GemmShape.of(one), on) for engine in choose.engines if "sm90" in engine.name)
    return None in refusals


@pytest.mark.parametrize(("m", "n", "k", "dtype", "blocks", "expected"), CHOICES)
def test_choice_of_kernel(
    m: int, n: int, k: int, dtype: dtypes.DType, blocks: bool, expected: GemmConfig | SwapConfig
) -> None:
    one = problem(m, n, k, dtype, HOPPER, blocks)
    assert serves(one, HOPPER)
    assert choose(one, HOPPER) == expected


def test_choices_fit() -> None:
    """Into shared memory, with a k-tile for every split; so do the candidates of tuning."""
    for m in (3, 17, 33, 65, 129, 1000, 8192):
        for n in (1, 104, 4096, 28672, 128256):
            for k in (16, 64, 4112, 16384):
                for dtype, blocks in ((dtypes.bfloat16, False), (dtypes.float8_e4m3fn, True), (dtypes.int8, False)):
                    one = problem(m, n, k, dtype, HOPPER, blocks)
                    if not serves(one, HOPPER):
                        assert m > MAX_SWAP_M
                        assert n == 1  # rows of out are misaligned
                        continue
                    found = choose(one, HOPPER)
                    for config in (found, *found.candidates(one, HOPPER)):
                        launch = config.launch(one)
                        constants = launch.specialisation.constants
                        assert launch.shared <= HOPPER.shared_memory
                        assert isinstance(config, SkinnyConfig) or constants["STAGES"] >= 2
                        if isinstance(config, SwapConfig):
                            assert config.parts <= -(-k * dtype.itemsize // 128)
                        elif isinstance(config, GemmConfig):
                            assert launch.grid[0] * launch.grid[1] <= 132


def test_cases_left_to_other_kernels() -> None:
    for one in (
        problem(16, 64, 50, dtypes.bfloat16, HOPPER),  # no tensor map can describe these rows
        problem(0, 64, 64, dtypes.bfloat16, HOPPER),
        problem(16, 33, 64, dtypes.bfloat16, HOPPER, activation="silu_and_mul"),  # rows of out that TMA cannot store
        problem(16, 64, 64, dtypes.float8_e4m3fnuz, HOPPER),
        problem(16, 64, 64, dtypes.float32, HOPPER),
        problem(16, 64, 256, dtypes.int8, HOPPER, blocks=True),
    ):
        assert not serves(one, HOPPER)
    assert not serves(problem(16, 64, 64, dtypes.bfloat16, HOPPER), device.model("sm_100"))
    for wrong in (lambda: GemmConfig(100, 1, 8), lambda: SwapConfig(24, 64, 1), lambda: SwapConfig(16, 64, 3)):
        with pytest.raises(ValueError, match="no geometry"):
            wrong()
