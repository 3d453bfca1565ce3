"""GEMM against float64, exact where sums are exact; in any layout, at the edges of tiles, under any Config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops import tuning
from pyops._core import config
from pyops._core.system import device
from pyops._core.system.device import Device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import TensorArg
from pyops.host.toolchain import toolchains
from pyops.ops.linear import gemm_sm80
from pyops.ops.linear.gemm_converted import ConvertedConfig
from pyops.ops.linear.gemm_engines import choose
from pyops.ops.linear.gemm_problem import Epilogue, GemmProblem, Operand
from pyops.ops.linear.gemm_shape import GemmShape
from pyops.ops.linear.gemm_simt import GemmSimtConfig
from pyops.ops.linear.gemm_sm80 import MmaConfig
from pyops.ops.linear.gemm_sm90 import GemmConfig, SwapConfig
from pyops.ops.linear.skinny_linear import SkinnyConfig
from pyops.testing import SCHEDULES, same_bits, scheduled
from tests.support.calls import DEVICES, KERNELS

pytestmark = pytest.mark.rotates

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)
needs_compiler = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=generator, dtype=dtype).to(device)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def positive(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(device)


def assert_rounded_once(out: torch.Tensor, exact: torch.Tensor) -> None:
    """The largest error is at most 1.5 times that of rounding once."""
    once = (exact.to(out.dtype).double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 1.5 * once


def columns(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` in column-major order."""
    return matrix.t().contiguous().t()


@contextmanager
def forced(op: str, one: Any) -> Iterator[None]:
    """In this context, `op` runs with this Config, on the CPU, too."""
    pyops.registry[op].forget()
    try:
        with tuning.forced(op, one), config.cpu("kernels"):
            yield
    finally:
        pyops.registry[op].forget()


# Linear layers


@ANY_DEVICE
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (1, 3, 8, torch.float32),
        (17, 66, 200, torch.bfloat16),
        (65, 130, 72, torch.float16),
        (20, 33, 51, torch.float32),
    ],
)
def test_linear_matches_float64(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    x, bias = (draw(*shape, dtype=dtype, device=device, seed=k) for shape in ((m, k), (2 * n,)))
    weight = draw(2 * n, k, dtype=dtype, device=device, seed=n) * k**-0.5
    sums = x.double() @ weight.double().T + bias.double()
    for activation, exact in (
        ("none", sums),
        ("gelu", torch.nn.functional.gelu(sums)),
        ("silu_and_mul", torch.nn.functional.silu(sums[:, :n]) * sums[:, n:]),
    ):
        out = pyops.linear.new(x, weight, bias, activation)
        if dtype == torch.float32:  # that many float32 roundings
            assert (out.double() - exact).abs().max() <= 2.0**-24 * k**0.5 * 4 * exact.abs().max()
        else:
            assert_rounded_once(out, exact)


@pytest.mark.parametrize("device", KERNELS)
def test_float32_uses_fused_multiply_add(device: str) -> None:
    """``x * x - y``, where y is x * x rounded to float32, leaves exactly the rounding error."""
    x = 1 + 2.0**-12
    out, input = (torch.empty(5, 3, device=device), torch.tensor([[1.0, x]] * 5, device=device))
    rounded = torch.tensor(x * x, dtype=torch.float32).item()
    pyops.linear(out, input, torch.tensor([[-rounded, x]] * 3, device=device), None)
    assert out.unique().tolist() == [x * x - rounded] == [2.0**-24]


@ANY_DEVICE
def test_empty_m_n_and_k(device: str) -> None:
    """An empty sum is 0, to which the bias is added."""
    for m, n in ((0, 5), (3, 0)):
        empty = torch.empty(m, n, device=device).bfloat16()
        x, weight = (torch.ones(rows, 8, device=device).bfloat16() for rows in (m, n))
        pyops.linear(empty, x, weight)
    bias = draw(5, dtype=torch.bfloat16, device=device)
    for rows in (1, 40):
        x, weight = (torch.empty(count, 0, device=device).bfloat16() for count in (rows, 5))
        assert torch.equal(pyops.linear.new(x, weight, bias), bias.expand(rows, 5))


@ANY_DEVICE
def test_nan_and_infinity_stay_in_their_row(device: str) -> None:
    x, weight = torch.ones(20, 64, device=device).bfloat16(), torch.ones(40, 64, device=device).bfloat16()
    x[1, 5], weight[2, 9] = torch.inf, torch.nan
    out = pyops.linear.new(x, weight)
    assert out[:, 2].isnan().all()
    assert (out[1, 3:] == torch.inf).all()
    out[1], out[:, 2] = 64.0, 64.0
    assert (out == 64.0).all()


# GEMM of 8-bit operands


@ANY_DEVICE
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_scaled_mm_matches_float64(dtype: torch.dtype, device: str) -> None:
    """Scales of the matrix, of rows and of columns, mixed."""
    m, k, n = 19, 272, 70
    a, b = draw(m, k, dtype=dtype, device=device), columns(draw(n, k, dtype=dtype, device=device, seed=1).t())
    sums = a.double() @ b.double()
    bias = draw(n, dtype=torch.float16, device=device)
    factor = 0.001 if dtype == torch.int8 else 1.0
    for a_scales in (factor * positive(1, device=device), factor * positive(m, 1, device=device, seed=2)):
        for b_scales in (positive(1, 1, device=device, seed=3), positive(n, device=device, seed=4)):
            scaled = a_scales.double().view(-1, 1) * b_scales.double().view(1, -1) * sums
            for shift in (None, bias):
                out = torch.empty(m, n, dtype=torch.float16, device=device)
                pyops.cutlass_scaled_mm(out, a, b, a_scales, b_scales, shift)
                assert_rounded_once(out, scaled if shift is None else scaled + shift.double())


@ANY_DEVICE
@pytest.mark.parametrize("k", [16, 1040])
def test_int32_accumulation_is_exact(k: int, device: str) -> None:
    """Also where float32 is not: every sum is -2^14 k + 1."""
    a = torch.full((18, k), -128, dtype=torch.int8, device=device)
    b = columns(torch.full((k, 33), -128, dtype=torch.int8, device=device))
    a[:, 0] = b[0] = 1
    one = torch.ones(1, device=device)
    high = (k - 1) * 2**14  # the sum without the odd 1, as a zero point
    out = torch.empty(18, 33, dtype=torch.bfloat16, device=device)
    pyops.cutlass_scaled_mm_azp(out, a, b, one, one, torch.full((33,), high, dtype=torch.int32, device=device))
    assert (out == 1.0).all()


@ANY_DEVICE
def test_zero_points(device: str) -> None:
    """Per row and for the whole matrix; the difference wraps around as int32 does."""
    m, k, n = 33, 96, 20
    a = draw(m, k, dtype=torch.int8, device=device)
    b = columns(draw(k, n, dtype=torch.int8, device=device, seed=1))
    a_scales, b_scales = positive(m, device=device), positive(n, device=device)
    adj = b.int().sum(0, dtype=torch.int32)
    azp = torch.arange(-16, 17, dtype=torch.int32, device=device)
    exact = a_scales.double()[:, None] * b_scales.double() * ((a.double() - azp.double()[:, None]) @ b.double())
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    pyops.cutlass_scaled_mm_azp(out, a, b, a_scales, b_scales, adj, azp[:, None])
    assert_rounded_once(out, exact)
    pyops.cutlass_scaled_mm_azp(out, a, b, a_scales, b_scales, 3 * adj[None])
    exact = a_scales.double()[:, None] * b_scales.double() * ((a.double() - 3.0) @ b.double())
    assert_rounded_once(out, exact)
    low = torch.full((n,), -(2**31), dtype=torch.int32, device=device)
    pyops.cutlass_scaled_mm_azp(out, a, b, a_scales, b_scales, low)
    wrapped = (a.double() @ b.double()).long() + 2**31
    wrapped = torch.where(wrapped >= 2**31, wrapped - 2**32, wrapped)
    assert_rounded_once(out, a_scales.double()[:, None] * b_scales.double() * wrapped.double())


@ANY_DEVICE
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(5, 130, 300, torch.float8_e4m3fn), (40, 128, 128, torch.int8), (129, 264, 512, torch.float8_e4m3fn)],
)
def test_block_scales(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    """Scales in every memory order; blocks at the end are partial."""
    a, b = draw(m, k, dtype=dtype, device=device), columns(draw(k, n, dtype=dtype, device=device, seed=1))
    factor = 0.001 if dtype == torch.int8 else 1.0
    a_scales = factor * positive(m, -(-k // 128), device=device, seed=2)
    b_scales = positive(-(-k // 128), -(-n // 128), device=device, seed=3)
    each = a_scales.double().repeat_interleave(128, 1)[:, :k], b_scales.double().repeat_interleave(128, 0)[:k]
    exact = (a.double() * each[0]) @ (b.double() * each[1].repeat_interleave(128, 1)[:, :n])
    for of_a, of_b in ((a_scales, b_scales), (columns(a_scales), columns(b_scales))):
        out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        pyops.cutlass_scaled_mm(out, a, b, of_a, of_b)
        assert_rounded_once(out, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_more_tiles_than_sms(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Blocks take several tiles, their warpgroups in ping-pong order; three runs give the same bits."""
    m, n, k = 1000, 6000, 520 if dtype == torch.bfloat16 else 528
    a, b = draw(m, k, dtype=dtype, device="cuda"), columns(draw(k, n, dtype=dtype, device="cuda", seed=1))
    exact, out = a.double() @ b.double(), torch.empty(m, n, dtype=out_dtype, device="cuda")
    a_scales, b_scales = (0.01 * positive(size, device="cuda", seed=size) for size in (m, n))
    if dtype == torch.bfloat16:
        out, call = out.to(dtype), partial(pyops.linear, input=a, weight=b.t())
    else:
        exact = a_scales.double()[:, None] * b_scales.double() * exact
        call = partial(pyops.cutlass_scaled_mm, a=a, b=b, a_scales=a_scales, b_scales=b_scales)
    first = None
    for _ in range(3):
        call(out=out.fill_(torch.nan))
        first = out.clone() if first is None else first
        assert same_bits(out, first)
    assert_rounded_once(out, exact)


# GEMM of NVFP4, and with 2:4 sparse weights


def exact_nvfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 values: quants by ml_dtypes, the offset of each scale by the formula of its tile."""
    each = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    values = torch.from_numpy(each.cpu().numpy().view(ml_dtypes.float4_e2m1fn).astype(numpy.float64))
    columns = scales.shape[1]
    flat = scales.cpu().double().flatten()
    for m in range(codes.shape[0]):
        for k in range(each.shape[1] // 16):
            place = (m // 128 * (columns // 4) + k // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4
            values[m, k * 16 : k * 16 + 16] *= flat[place]
    return values


@ANY_DEVICE
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 16), (130, 40, 112)])
def test_fp4_mm_matches_float64(m: int, n: int, k: int, device: str) -> None:
    codes = [torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device) for rows in (m, n)]
    sizes = [(-(-rows // 128) * 128, -(-k // 64) * 4) for rows in (m, n)]
    scales = [positive(*size, device=device, seed=i).to(torch.float8_e4m3fn) for i, size in enumerate(sizes)]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    pyops.cutlass_scaled_fp4_mm(out, *codes, *scales, torch.full((1,), 0.375, device=device))
    values = [exact_nvfp4(*pair) for pair in zip(codes, scales, strict=True)]
    assert_rounded_once(out.cpu(), 0.375 * (values[0] @ values[1].T))


@ANY_DEVICE
def test_fp4_mm_of_quantised_tensors(device: str) -> None:
    """`scaled_fp4_quant` writes the operands; the result is close to that of the unquantized tensors."""
    x, weight = draw(20, 128, dtype=torch.bfloat16, device=device), draw(48, 128, dtype=torch.bfloat16, device=device)
    g = [(448 * 6 / one.abs().max().float()).view(1) for one in (x, weight)]
    (a, a_scales), (b, b_scales) = (
        pyops.scaled_fp4_quant.new(one, scale, True) for one, scale in zip((x, weight), g, strict=True)
    )
    out = torch.empty(20, 48, dtype=torch.bfloat16, device=device)
    pyops.cutlass_scaled_fp4_mm(out, a, b, a_scales, b_scales, 1 / (g[0] * g[1]))
    right = x.double() @ weight.double().T
    assert (out.double() - right).norm() <= 0.15 * right.norm()


@ANY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_compressed_weight_equals_the_weight(dtype: torch.dtype, device: str) -> None:
    """The identity times a compressed weight is the weight, and any GEMM gives the result of the weight."""
    n, k = 24, 64
    weight = draw(n, k, dtype=dtype, device=device).double()
    if dtype == torch.int8:
        weight = weight.clamp(-100, 100)  # the results are exact in 16 bits
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(n, k // 4, 4, generator=generator).argsort(-1).flatten(1).to(device)
    weight[(order < 2) | (torch.rand(n, k, generator=generator) < 0.2).to(device)] = 0.0
    nzs, meta = pyops.cutlass_sparse_compress(weight.to(dtype))
    out_dtype = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    one = torch.ones(1, device=device)
    out = torch.empty(k, n, dtype=out_dtype, device=device)
    pyops.cutlass_scaled_sparse_mm(out, torch.eye(k, device=device).to(dtype), nzs, meta, one, one)
    assert torch.equal(out.double(), weight.t())
    a, out = draw(5, k, dtype=dtype, device=device, seed=2), out.new_empty(5, n)
    a_scales, b_scales = positive(5, device=device), positive(n, device=device, seed=1)
    pyops.cutlass_scaled_sparse_mm(out, a, nzs, meta, a_scales, b_scales)
    assert_rounded_once(out, a_scales.double()[:, None] * b_scales.double() * (a.double() @ weight.T))


@ANY_DEVICE
def test_compression_of_every_group(device: str) -> None:
    """Of the nonzero values the first two are kept; zeros fill up if there are fewer."""
    groups = torch.tensor([[i >> bit & 1 for bit in range(4)] for i in range(16)], device=device)
    nzs, meta = pyops.cutlass_sparse_compress((groups * torch.tensor([1, 2, 3, 4], device=device)).half().view(1, 64))
    places = torch.stack([meta.flatten() >> shift & 3 for shift in (0, 2, 4, 6)], -1).view(16, 2).tolist()
    for group, kept, (low, high) in zip(groups.tolist(), nzs.view(16, 2).tolist(), places, strict=True):
        assert low < high
        assert [group[place] * (place + 1) for place in (low, high)] == kept
        assert [value for value in kept if value] == [place + 1 for place in range(4) if group[place]][:2]


# Layouts


@ANY_DEVICE
def test_matrices_of_any_strides(device: str) -> None:
    """Transposed, misaligned, with gaps: all kernels give the same bits, because sums of small integers are exact.

    The gaps of out are left alone.
    """
    m, k, n, dtype = 20, 176, 48, torch.float8_e4m3fn
    a, b = (
        draw(*shape, dtype=torch.int8, device=device, seed=seed).remainder(5).sub(2).to(dtype)
        for seed, shape in enumerate(((m, k), (k, n)))
    )
    scale, right = torch.full((1,), 0.01, device=device), torch.empty(m, n, dtype=torch.bfloat16, device=device)
    pyops.cutlass_scaled_mm(right, a, columns(b), scale, scale)

    def shifted(x: torch.Tensor, offset: int, gap: int) -> torch.Tensor:
        memory = torch.full((offset + x.shape[0] * (x.shape[1] + gap),), 77, dtype=torch.uint8, device=device)
        place = memory.view(x.dtype)[offset:].view(x.shape[0], -1)[:, : x.shape[1]]
        return place.copy_(x)

    each_a = (a, columns(a), shifted(a, 1, 0), shifted(a, 8, 4), shifted(a, 0, 7), shifted(a, 0, 2))
    each_b = (b, columns(b), shifted(b.t(), 4, 0).t(), shifted(b.t(), 0, 1).t())
    # A kernel takes an operand only in the layout that it reads: here one operand has another layout, in the last pair
    # both.
    for one, other in [*((one, columns(b)) for one in each_a), *((a, other) for other in each_b), (each_a[1], b)]:
        whole = torch.full((m, n + 3), 7.0, dtype=torch.bfloat16, device=device)
        pyops.cutlass_scaled_mm(whole[:, :n], one, other, scale, scale)
        assert same_bits(whole[:, :n].contiguous(), right)
        assert (whole[:, n:] == 7.0).all()


@ANY_DEVICE
@pytest.mark.parametrize("tokens", [1, 33])
def test_small_m_entry_points(tokens: int, device: str) -> None:
    """vLLM's names for the same GEMM: a bias per column, or per element."""
    weight, x = (
        draw(40, 136, dtype=torch.bfloat16, device=device),
        draw(tokens, 136, dtype=torch.bfloat16, device=device),
    )
    sums = x.double() @ weight.double().T
    assert_rounded_once(pyops.LLMM1(weight, x, 4), sums)
    for shape in ((40,), (1, 40), (tokens, 40)):
        bias = draw(*shape, dtype=torch.bfloat16, device=device)
        for split in (pyops.wvSplitK, pyops.wvSplitKrc):
            assert_rounded_once(split(weight, x, bias, 80), sums + bias.double())
    out = torch.empty(tokens, 40, device=device)
    pyops.dsv3_router_gemm(out, x, weight)
    assert (out.double() - sums).abs().max() <= 2.0**-24 * 50 * sums.abs().max()
    rounded = torch.empty_like(out, dtype=torch.bfloat16)
    pyops.dsv3_router_gemm(rounded, x, weight)
    assert_rounded_once(rounded, sums)
    pyops.dsv3_fused_a_gemm(rounded, x, weight.t())
    assert_rounded_once(rounded, sums)
    codes = [one.to(torch.float8_e4m3fn) for one in (weight, x)]
    scales = [torch.full((), value, device=device) for value in (0.5, 3.0)]
    pyops.wvSplitKQ(*codes, None, rounded, *scales, 80)
    assert_rounded_once(rounded, 1.5 * (codes[1].double() @ codes[0].double().T))


# Configs

SMALL = MmaConfig(tile_m=16, tile_n=64, warps_m=1, warps_n=4, stages=2, splits=1, min_blocks=1)
TALL = MmaConfig(tile_m=64, tile_n=32, warps_m=4, warps_n=1, stages=3, splits=1, min_blocks=1)
TEAMS = MmaConfig(tile_m=32, tile_n=32, warps_m=1, warps_n=2, stages=2, splits=1, min_blocks=1, warps_k=2)
ODD = MmaConfig(tile_m=16, tile_n=48, warps_m=1, warps_n=2, stages=2, splits=1, min_blocks=1)

# Rows of out that are multiples of 16 bytes, too: 8 elements of them are stored at a time.
_COLUMNS = st.integers(1, 70) | st.integers(1, 9).map(lambda n: 8 * n)


@needs_compiler
@pytest.mark.parametrize(
    "one",
    [SMALL, replace(SMALL, splits=4), TALL, TEAMS, replace(TEAMS, splits=2), ODD, GemmSimtConfig(16, 64)],
    ids=str,
)
@given(m=st.integers(1, 34), n=_COLUMNS, k=st.integers(1, 40), seed=st.integers(0, 99))
def test_edges_of_tiles(one: Any, m: int, n: int, k: int, seed: int) -> None:
    """Any sizes, several k-tiles, more splits than k-tiles: exact for integers, with the same bits under every
    schedule."""
    a = draw(m, 8 * k, dtype=torch.int8, seed=seed)
    b = columns(draw(8 * k, n, dtype=torch.int8, seed=seed + 1))
    scale, out = torch.full((1,), 2.0**-9), torch.empty(m, n, dtype=torch.bfloat16)
    right = (a.double() @ b.double() * 2.0**-18).bfloat16()
    with forced("cutlass_scaled_mm", one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                pyops.cutlass_scaled_mm(out.fill_(torch.nan), a, b, scale, scale)
            assert torch.equal(out, right)


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("one", [SMALL, TALL, TEAMS, ODD], ids=str)
def test_tiles_of_a_block(monkeypatch: pytest.MonkeyPatch, one: MmaConfig, blocks: int) -> None:
    """A block takes several tiles, not all blocks as many, in groups of rows that end early: exact for integers."""
    on = replace(device.host(), num_sms=blocks, shared_memory=one.shared_memory)
    monkeypatch.setitem(device._HOST, 32, on)
    m, n, k = 17 * one.tile_m + 3, 2 * one.tile_n + 10, 328
    a, b = draw(m, k, dtype=torch.int8), columns(draw(k, n, dtype=torch.int8, seed=1))
    a_scales = 2.0 ** torch.arange(m)[:, None].remainder(3)
    b_scales, out = 2.0 ** -torch.arange(9.0, 9 + n).remainder(5)[None], torch.empty(m, n, dtype=torch.bfloat16)
    right = (a.double() @ b.double() * a_scales * b_scales).bfloat16()
    with forced("cutlass_scaled_mm", one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                pyops.cutlass_scaled_mm(out.fill_(torch.nan), a, b, a_scales.float(), b_scales)
            assert torch.equal(out, right)


@needs_compiler
@pytest.mark.parametrize("one", [replace(SMALL, splits=4), TALL], ids=str)
@pytest.mark.parametrize("activation", ["none", "silu_and_mul"])
def test_rows_do_not_depend_on_others(one: Any, activation: str) -> None:
    """Under one Config a row has the same bits, whatever rows follow and whatever the schedule."""
    weight = draw(80, 200, dtype=torch.bfloat16)
    x = draw(70, 200, dtype=torch.bfloat16, seed=1)
    x[50:] = torch.nan
    with forced("linear", one):
        whole = pyops.linear.new(x, weight, None, activation)[:50]
        for schedule in SCHEDULES:
            for rows in (1, 16, 17, 50):
                with scheduled(schedule):
                    assert same_bits(pyops.linear.new(x[:rows], weight, None, activation), whole[:rows])
    sums = x[:50].double() @ weight.double().T
    exact = sums if activation == "none" else torch.nn.functional.silu(sums[:, :40]) * sums[:, 40:]
    assert_rounded_once(whole, exact)


@needs_compiler
@pytest.mark.parametrize("one", [SMALL, replace(SMALL, splits=4), TALL], ids=str)
def test_edges_of_tiles_by_mfma(one: Any) -> None:
    """In warps of 64 lanes, with several k-tiles and interleaved gate and up columns: exact for integers."""
    a, b = draw(35, 328, dtype=torch.int8), draw(72, 328, dtype=torch.int8, seed=1)
    scale, out = torch.full((1,), 2.0**-9), torch.empty(35, 72, dtype=torch.bfloat16)
    x, weight = draw(35, 200, dtype=torch.bfloat16), draw(72, 200, dtype=torch.bfloat16, seed=1)
    sums = x.double() @ weight.double().T
    for schedule in (SCHEDULES[0], SCHEDULES[3]):
        with scheduled(schedule, warp_size=64):
            with forced("cutlass_scaled_mm", one):
                pyops.cutlass_scaled_mm(out.fill_(torch.nan), a, b.T, scale, scale)
            assert torch.equal(out, (a.double() @ b.double().T * 2.0**-18).bfloat16())
            with forced("linear", one):
                gated = pyops.linear.new(x, weight, None, "silu_and_mul")
            assert_rounded_once(gated, torch.nn.functional.silu(sums[:, :36]) * sums[:, 36:])


@needs_compiler
@pytest.mark.parametrize(
    ("one", "dtype"),
    [
        (SMALL, torch.float8_e4m3fn),
        (replace(SMALL, splits=8), torch.float8_e4m3fn),
        (replace(SMALL, splits=8), torch.float8_e4m3fnuz),
        (GemmSimtConfig(16, 64), torch.float8_e5m2),
        (GemmSimtConfig(64, 64), torch.int8),
    ],
    ids=str,
)
def test_block_scale_promotion(one: Any, dtype: torch.dtype) -> None:
    """Splits begin at any scale block; fp8 by its own MMA and as float16; by multiply-adds."""
    m, n, k = 18, 40, 900
    a, b = draw(m, k, dtype=dtype), columns(draw(k, n, dtype=dtype, seed=1))
    factor = 0.001 if dtype == torch.int8 else 1.0
    a_scales, b_scales = factor * positive(m, 8, seed=2), positive(8, 1, seed=3)
    each = a_scales.double().repeat_interleave(128, 1)[:, :k] * b_scales.double().repeat_interleave(128)[:k]
    out = torch.empty(m, n, dtype=torch.float16)
    with forced("cutlass_scaled_mm", one):
        pyops.cutlass_scaled_mm(out, a, b, a_scales, b_scales)
    assert_rounded_once(out, (a.double() * each) @ b.double())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("k", [37, 200])
def test_converted_first(dtype: torch.dtype, k: int) -> None:
    """Operands converted to float16 in a workspace, from rows with a stride: subnormal numbers and NaN, too."""
    wide, tiny = draw(18, k + 5, dtype=dtype), torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    a, b = wide[:, :k], columns(draw(k, 40, dtype=dtype, seed=1))
    a[3, :4] = tiny.view(dtype)
    a[17, 20] = torch.nan
    a_scales, b_scales, out = positive(18, 1, seed=2), positive(1, 40, seed=3), torch.empty(18, 40).bfloat16()
    with forced("cutlass_scaled_mm", ConvertedConfig(SMALL)):
        pyops.cutlass_scaled_mm(out, a, b, a_scales, b_scales)
    assert out[17].isnan().all()
    exact = a.double() @ b.double() * (a_scales.double() * b_scales.double())
    assert_rounded_once(out[:17], exact[:17])


def problem(
    m: int, n: int, k: int, dtype: dtypes.DType, on: Device, blocks: bool = False, **options: Any
) -> GemmProblem:
    """A GEMM of contiguous matrices, planned for a device."""

    def arg(name: str, kind: dtypes.DType, *shape: int) -> TensorArg:
        return TensorArg("op", name, kind, shape, (*shape[1:], 1), 16, on)

    float32, out = dtypes.float32, arg("out", dtypes.bfloat16, m, n)
    if blocks:
        scales = arg("a_scales", float32, m, -(-k // 128)), arg("b_scales", float32, -(-k // 128), -(-n // 128))
        epilogue = Epilogue(out, *scales, block_scaled=True)
    else:
        epilogue = Epilogue(out, **options)
    rows = 2 * n if epilogue.is_gated else n
    operands = (Operand.of_matrix(arg(name, dtype, count, k)) for name, count in (("a", m), ("b", rows)))
    return GemmProblem(*operands, k, epilogue)


AMPERE, HOPPER, BLACKWELL = device.model("sm_80"), device.model("sm_90"), device.model("sm_100")
ADA = Device(-1, "sm_89", 142, 32, 99 * 1024)
GEFORCE = Device(-1, "sm_120", 170, 32, 99 * 1024, 8)
INSTINCT = device.model("gfx942")


@pytest.mark.parametrize(
    ("k", "stride", "alignment", "expected"),
    [(64, 64, 16, 8), (64, 72, 8, 8), (64, 72, 4, 1), (64, 68, 16, 1), (60, 64, 16, 1)],
)
def test_access_of_a_conversion(k: int, stride: int, alignment: int, expected: int) -> None:
    """Eight elements are loaded at a time where the address of each eight is a multiple of eight."""
    one = problem(256, 256, k, dtypes.float8_e4m3fn, AMPERE)
    one = replace(one, a=replace(one.a, stride=stride, alignment=alignment))
    first, *_ = ConvertedConfig(SMALL).launches(one)
    assert first.specialisation.constants["A_ACCESS"] == expected


@pytest.mark.parametrize(
    ("on", "m", "n", "k", "dtype", "expected"),
    [
        (AMPERE, 1, 4096, 4096, dtypes.bfloat16, SkinnyConfig),
        (AMPERE, 16, 4096, 4096, dtypes.bfloat16, MmaConfig(16, 64, 1, 4, 8, 1, 1)),
        (AMPERE, 4096, 4096, 4096, dtypes.bfloat16, MmaConfig(128, 256, 2, 4, 3, 1, 1)),
        (AMPERE, 4096, 28672, 4096, dtypes.float8_e4m3fn, ConvertedConfig),
        (AMPERE, 64, 28672, 4096, dtypes.float8_e4m3fn, MmaConfig),
        (ADA, 16, 4096, 14336, dtypes.float8_e4m3fn, MmaConfig(16, 32, 1, 2, 8, 1, 1, 2)),
        (ADA, 4096, 4096, 4096, dtypes.float8_e4m3fn, MmaConfig(128, 256, 2, 4, 2, 1, 1)),
        (BLACKWELL, 1, 4096, 4096, dtypes.int8, MmaConfig(16, 32, 1, 2, 8, 1, 1, 2)),
        (BLACKWELL, 64, 4096, 4096, dtypes.int8, MmaConfig(64, 32, 2, 1, 8, 1, 1, 2)),
        (HOPPER, 64, 4096, 4100, dtypes.int8, MmaConfig(32, 64, 1, 4, 8, 1, 1)),
        (HOPPER, 256, 28672, 4096, dtypes.bfloat16, GemmConfig),
        (HOPPER, 1, 4096, 4096, dtypes.bfloat16, SwapConfig),
        (HOPPER, 1, 28672, 4096, dtypes.bfloat16, SwapConfig),
        (HOPPER, 1, 4096, 14336, dtypes.float16, SwapConfig),
        (HOPPER, 2, 4096, 4096, dtypes.bfloat16, SwapConfig),
        (HOPPER, 4, 256, 7168, dtypes.bfloat16, SkinnyConfig),
        (AMPERE, 2, 4096, 4096, dtypes.bfloat16, MmaConfig(16, 64, 1, 4, 8, 1, 1)),
        (BLACKWELL, 256, 1024, 4096, dtypes.float16, MmaConfig(64, 32, 2, 1, 8, 1, 1, 2)),
        (GEFORCE, 4096, 28672, 4096, dtypes.bfloat16, MmaConfig(128, 256, 2, 4, 2, 1, 1)),
        (GEFORCE, 8, 512, 64, dtypes.bfloat16, SkinnyConfig),
        (HOPPER, 16, 256, 7168, dtypes.float32, GemmSimtConfig(16, 64)),
        (INSTINCT, 512, 256, 7168, dtypes.float8_e4m3fnuz, MmaConfig(16, 64, 1, 4, 2, 1, 1)),
        (INSTINCT, 512, 256, 7168, dtypes.float32, GemmSimtConfig(64, 64)),
    ],
)
def test_choice_of_config(on: Device, m: int, n: int, k: int, dtype: dtypes.DType, expected: Any) -> None:
    one = problem(m, n, k, dtype, on)
    found = choose(one, on)
    assert isinstance(found, expected) if isinstance(expected, type) else found == expected


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [
        (16, 4096, MmaConfig(16, 32, 1, 2, 8, 1, 1, 2)),  # 11.3 us
        (64, 4096, MmaConfig(64, 32, 2, 1, 6, 1, 1, 2)),  # 13.2
        (256, 4096, MmaConfig(128, 64, 2, 2, 3, 1, 1, 2)),  # 26.5
        (256, 28672, MmaConfig(128, 224, 2, 4, 3, 1, 1)),  # 151.5
        (4096, 28672, MmaConfig(128, 256, 2, 4, 3, 1, 1)),  # 2211.6
    ],
)
def test_choices_of_an_h200_as_ampere(m: int, n: int, expected: MmaConfig) -> None:
    """Those that were fastest of 2 to 19 in bfloat16, with K of 4096."""
    on = replace(AMPERE, num_sms=HOPPER.num_sms)
    assert choose(problem(m, n, 4096, dtypes.bfloat16, on), on) == expected


@pytest.mark.parametrize("on", [AMPERE, ADA, BLACKWELL, GEFORCE], ids=lambda on: on.arch)
def test_choices_fit(on: Device) -> None:
    """Into shared memory, with enough K for every split, in a grid that covers the output."""
    for m in (3, 17, 33, 65, 129, 1000, 8192):
        for n in (1, 100, 4096, 28672):
            for k in (1, 64, 4097, 16384):
                for one in (
                    problem(m, n, k, dtypes.bfloat16, on),
                    problem(m, n, k, dtypes.float8_e4m3fn, on, blocks=True),
                    problem(m, n, k, dtypes.float16, on, activation="silu_and_mul"),
                ):
                    for found in gemm_sm80.configs(GemmShape.of(one), on):
                        assert found.shared_memory <= on.shared_memory // found.min_blocks
                        assert found.splits == 1 or found.splits * 512 <= k * one.dtype.itemsize
                    launch = found.launch(one)
                    assert launch.shared == found.shared_memory
                    tiles, resident = -(-m // found.tile_m) * -(-one.b.rows // found.tile_n), on.num_sms
                    resident *= max(1, on.shared_memory // found.shared_memory)
                    whole = found.splits > 1 or (found.tile_m, found.tile_n) == (64, 256)
                    assert launch.grid == (tiles if whole else min(tiles, resident), found.splits, 1)


def test_warps_must_divide_the_tile() -> None:
    with pytest.raises(ValueError, match="warps do not divide the tile"):
        replace(SMALL, tile_n=16)


# Refusals


def test_refused() -> None:
    codes, one = torch.zeros(4, 16, dtype=torch.int8), torch.ones(1)
    b, out = torch.zeros(16, 8, dtype=torch.int8), torch.zeros(4, 8, dtype=torch.bfloat16)
    blocks, half = torch.ones(4, 2), torch.zeros(4, 16).half()
    fp4, tiles = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.float8_e4m3fn)
    nzs, meta = torch.zeros(8, 8, dtype=torch.int8), torch.zeros(8, 2, dtype=torch.uint8)
    scaled, azp, sparse = pyops.cutlass_scaled_mm, pyops.cutlass_scaled_mm_azp, pyops.cutlass_scaled_sparse_mm
    adj = torch.zeros(8, dtype=torch.int32)
    for call, args, message in (
        (scaled, (out, codes, b[:8], one, one), "b: expected shape (K=16, N), got (8, 8)"),
        (scaled, (out[:3], codes, b, one, one), "out: expected shape (M=4, N=8), got (3, 8)"),
        (scaled, (out.float(), codes, b, one, one), "out: expected dtype float16 or bfloat16, got float32"),
        (scaled, (out, codes, b.float(), one, one), "b: expected dtype int8, got float32"),
        (scaled, (out, half, b, one, one), "a: expected dtype int8 or float8_e4m3fn or float8_e4m3fnuz or float8_e5m2"),
        (scaled, (out, codes, b, torch.ones(3), one), "a_scales: expected 1 or 4 elements, or shape (4, 1), got shape"),
        (scaled, (out, codes, b, blocks, one), "a_scales: expected 1 or 4 elements, or shape (4, 1), got shape (4, 2)"),
        (scaled, (out, codes, b, one, one, out[0].float()), "bias: expected dtype bfloat16, got float32"),
        (scaled, (out, codes, b, torch.ones(4, 2)[:, 0], one), "a_scales: expected a contiguous tensor"),
        (azp, (out, half, b, one, one, adj), "a: expected dtype int8, got float16"),
        (azp, (out, codes, b, one, one, adj[:7]), "azp_adj: expected 8 elements, got shape (7,)"),
        (azp, (out, codes, b, one, one, adj, adj), "azp: expected 4 elements, got shape (8,)"),
        (azp, (out, codes, b, one, torch.ones(2), adj), "b_scales: expected 1 or 8 elements, got shape (2,)"),
        (pyops.cutlass_scaled_fp4_mm, (out, fp4[:, :7], fp4, tiles, tiles, one), "a: expected rows of a multiple of 8"),
        (
            pyops.cutlass_scaled_fp4_mm,
            (out[:, :4], fp4, fp4, tiles[:4], tiles, one),
            "block_scale_a: expected shape (ro",
        ),
        (
            pyops.cutlass_scaled_fp4_mm,
            (out[:, :4], fp4, fp4, tiles, tiles, blocks),
            "alpha: expected one element, got s",
        ),
        (
            pyops.cutlass_sparse_compress,
            (half[:, :12],),
            "a: expected rows of a multiple of 8 elements, got shape (4, 12",
        ),
        (sparse, (out, codes, nzs[:, :7], meta, one, one), "bt_nzs: expected shape (N, half=8), got (8, 7)"),
        (sparse, (out, codes, nzs, meta[:7], one, one), "bt_meta: expected shape (N=8, eighth=2), got (7, 2)"),
        (sparse, (out, half, nzs.half(), meta, one, one), "out: expected dtype float16, got bfloat16"),
        (pyops.LLMM1, (half, half[:, :8], 4), "in_b: expected shape (tokens, K=16), got (4, 8)"),
        (pyops.wvSplitK, (half, half, half, 80), "in_bias: expected shape (4,) or (4, 4), got (4, 16)"),
        (pyops.dsv3_router_gemm, (torch.zeros(4, 4), half, half), "mat_a: expected dtype bfloat16, got float16"),
    ):
        with pytest.raises(pyops.OpError) as caught:
            call(*args)
        assert str(caught.value).startswith(f"{call.op.name}: {message}")
    for activation in ("relu", ""):
        with pytest.raises(pyops.OpError, match="linear: activation: expected none or gelu or silu_and_mul, got"):
            pyops.linear(torch.zeros(4, 4).half(), half, half, None, activation)
    big = torch.zeros(4, 256, dtype=torch.int8)
    with pytest.raises(pyops.OpError, match="bias: expected None with scales of blocks"):
        pyops.cutlass_scaled_mm(out, big, torch.zeros(256, 8, dtype=torch.int8), blocks, torch.ones(2, 1), out[0])
