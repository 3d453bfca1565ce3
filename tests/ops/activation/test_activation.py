"""Activations: equality with eager PyTorch, NaN, thresholds, quantiles, odd sizes, launch geometry."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops import offline
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.ops import activation
from pyops.ops._shared import chunks
from pyops.testing import Layout, assert_close, cpu, same_bits
from pyops.testing.calls import assert_results, eager, expected, named, run
from tests.support.calls import DEVICES, Host, example

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NARROW = [torch.float16, torch.bfloat16]
SQRT_2_PI = math.sqrt(2 / math.pi)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


# {op: (its arguments after the input, its formula in float64)}; g and u are the halves of a row: gate and up.
GATED = {
    "silu_and_mul": ((), lambda g, u: g * sigmoid(g) * u),
    "mul_and_silu": ((), lambda g, u: g * u * sigmoid(u)),
    "gelu_and_mul": ((), lambda g, u: g * torch.special.ndtr(g) * u),
    "gelu_tanh_and_mul": ((), lambda g, u: g / 2 * (1 + torch.tanh(SQRT_2_PI * (g + 0.044715 * g**3))) * u),
    "fatrelu_and_mul": ((0.25,), lambda g, u: torch.where(g > 0.25, g, 0.0) * u),
    "silu_and_mul_with_clamp": (
        (0.75,),
        lambda g, u: g.clamp(max=0.75) * sigmoid(g.clamp(max=0.75)) * u.clamp(-0.75, 0.75),
    ),
    "swiglustep_and_mul": ((1.5,), lambda g, u: (g * sigmoid(g)).clamp(max=1.5) * u.clamp(-1.5, 1.5)),
    "situ_and_mul": ((4.0, 2.5), lambda g, u: 4 * torch.tanh(g / 4) * sigmoid(g) * 2.5 * torch.tanh(u / 2.5)),
}
PLAIN = {
    "gelu_new": ((), lambda x: x / 2 * (1 + torch.tanh(SQRT_2_PI * (x + 0.044715 * x**3)))),
    "gelu_fast": ((), lambda x: x / 2 * (1 + torch.tanh(SQRT_2_PI * (x + 0.044715 * x**3)))),
    "gelu_quick": ((), lambda x: x * sigmoid(1.702 * x)),
    "relu2": ((), lambda x: x.clamp(min=0) ** 2),
    "relu_squared": ((), lambda x: x.clamp(min=0) ** 2),
    "silu": ((), lambda x: x * sigmoid(x)),
}
# The same in eager PyTorch, which kernels equal bit for bit on the same device.
EAGER = {
    "silu_and_mul": ((), lambda g, u: F.silu(g) * u),
    "mul_and_silu": ((), lambda g, u: g * F.silu(u)),
    "gelu_and_mul": ((), lambda g, u: F.gelu(g) * u),
    "gelu_tanh_and_mul": ((), lambda g, u: F.gelu(g, approximate="tanh") * u),
    "silu_and_mul_with_clamp": ((0.75,), lambda g, u: F.silu(g.clamp(max=0.75)) * u.clamp(-0.75, 0.75)),
    "fatrelu_and_mul": ((0.3,), lambda g, u: F.threshold(g, torch.tensor(0.3, dtype=g.dtype).item(), 0.0) * u),
}
# Ops that compute each element independently: `chunks.launch` gives each thread one vector.
OTHERS = {"gelu_and_mul_sparse", "masked_moe_activation", "silu_and_mul_per_block_quant", "situ_and_mul_quant"}
BY_CHUNKS = [name for name in activation.__all__ if name not in OTHERS]


def make(*shape: int, dtype: torch.dtype, where: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 2).to(dtype).to(where)


def call(name: str, x: torch.Tensor, *rest: Any, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The output of the op `name`, with rows of `width` elements."""
    out = torch.full((*x.shape[:-1], width), math.nan, device=x.device).to(dtype or x.dtype)
    getattr(pyops, name)(out, x, *rest)
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, where any NaN equals any NaN."""
    return torch.equal(a.isnan(), b.isnan()) and same_bits(*(x.masked_fill(x.isnan(), 0.0) for x in (a, b)))


def every_value(dtype: torch.dtype, where: str) -> torch.Tensor:
    """Every bit pattern of a two-byte type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=where).view(dtype)


def tolerance(dtype: torch.dtype, roundings: int) -> float:
    """The relative error of `roundings` roundings, with a safety factor of two: one rounding is off by eps / 2."""
    return roundings * torch.finfo(dtype).eps


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED)
def test_gated_matches_float64(name: str, dtype: torch.dtype, where: str) -> None:
    rest, formula = GATED[name]
    x = make(37, 2 * 96, dtype=dtype, where=where)
    expected = formula(*x.double().chunk(2, dim=-1))
    error = (call(name, x, *rest, width=96).double() - expected).abs()
    # The kernel rounds to T twice; `atol` covers the cancellation in 1 + erf and 1 + tanh, which are float32.
    atol = 8 * 2.0**-24 * x.double().abs().amax() ** 2
    assert (error <= tolerance(dtype, 1) * expected.abs() + atol).all()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EAGER)
def test_gated_equals_eager(name: str, dtype: torch.dtype, where: str) -> None:
    rest, function = EAGER[name]
    x = make(37, 2 * 513, dtype=dtype, where=where)
    with eager():
        expected = function(*x.chunk(2, dim=-1))
    assert same(call(name, x, *rest, width=513), expected)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", EAGER)
def test_gated_equals_eager_for_every_value(name: str, dtype: torch.dtype, where: str) -> None:
    """The activated half takes every value of the dtype, with subnormal numbers, infinities and NaN."""
    rest, function = EAGER[name]
    values = every_value(dtype, where)
    for other in (1.0, 1.0078125, -3.25e-3):
        halves = values, torch.full_like(values, other)
        if name == "mul_and_silu":
            halves = halves[1], halves[0]
        x = torch.stack([half.reshape(256, 256) for half in halves], dim=1).reshape(256, 512)
        with eager():
            expected = function(*x.chunk(2, dim=-1))
        assert same(call(name, x, *rest, width=256), expected)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_against_float64(name: str, dtype: torch.dtype, where: str) -> None:
    rest, formula = PLAIN[name]
    x = make(37, 96, dtype=dtype, where=where)
    expected = formula(x.double())
    error = (call(name, x, *rest, width=96).double() - expected).abs()
    # The tanh forms round 1 + tanh to T, which is a large relative error for a result close to zero.
    coarse = tolerance(dtype, 2) * x.double().abs() if name in ("gelu_new", "gelu_fast") else 2.0**-24
    assert (error <= tolerance(dtype, 4) * expected.abs() + coarse).all()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_for_every_value(name: str, dtype: torch.dtype, where: str) -> None:
    values = every_value(dtype, where)
    expected = torch.empty_like(values)
    with eager():
        getattr(pyops, name).reference(expected, values)
    result = call(name, values, width=len(values))
    if name == "gelu_quick" and dtype is torch.bfloat16 and (where != "cpu" or isinstance(where, Host)):
        # The kernel approximates the exponential: one value lies so close to a tie that it is rounded the other way.
        wrong = (result != expected) & ~(result.isnan() & expected.isnan())
        assert wrong.sum() <= 1
        assert_close(expected[wrong], result[wrong], ulps=1)
    else:
        assert same(result, expected)


def test_errors_of_tanh_that_bfloat16_sums_with_1_absorb() -> None:
    """math.cuh, tanh_for_sum_with_1: no error below 2^-19 changes bf16(1 + bf16(tanh(x)))."""
    x = every_value(torch.bfloat16, "cpu")
    tanh = x[~x.isnan()].double().tanh()
    exact, least, most = (1 + (tanh + error).float().bfloat16() for error in (0, -(2.0**-19), 2.0**-19))
    assert torch.equal(least, exact)
    assert torch.equal(most, exact)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamps_use_the_rounded_limit(dtype: torch.dtype, where: str) -> None:
    for limit in (0.1, 0.3, 7.0, 0.0):
        rounded = torch.tensor(limit, dtype=dtype)
        gate = torch.tensor([3.0, 9.0, -9.0, math.nan, math.inf, -math.inf], dtype=dtype, device=where)
        up = torch.tensor([9.0, -9.0, 0.05, 1.0, -math.inf, math.nan], dtype=dtype, device=where)
        expected = F.silu(gate.clamp(max=rounded.item())) * up.clamp(-rounded.item(), rounded.item())
        assert same(call("silu_and_mul_with_clamp", torch.cat((gate, up))[None], limit, width=6), expected[None])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("alpha", "beta"), [(1.702, 1.0), (1.0, 0.5), (0.5, 0.0), (-2.0, -1.0), (-90.0, 0.0)])
def test_clamp_with_slope_and_offset(alpha: float, beta: float, dtype: torch.dtype, where: str) -> None:
    x = make(37, 2 * 96, dtype=dtype, where=where)
    g, u = x.double().chunk(2, dim=-1)
    g, u = g.clamp(max=0.75), u.clamp(-0.75, 0.75)
    expected = g * sigmoid(alpha * g) * (u + beta)
    error = (call("silu_and_mul_with_clamp", x, 0.75, alpha, beta, width=96).double() - expected).abs()
    # Roundings: the share of g to T, the sum and the result; and exp(-y), for which y is rounded, by |y| ulps at most.
    # The share and the result may be subnormal, and smaller numbers may be 0.
    relative = tolerance(dtype, 2) + 2.0**-23 * (2 + (alpha * g).abs())
    subnormal = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert (error <= relative * expected.abs() + (1 + (u + beta).abs()) / 2 * subnormal + 2.0**-126).all()


@pytest.mark.parametrize("where", DEVICES)
def test_clamp_keeps_the_sign_of_zero(where: str) -> None:
    """An offset of 0 is not added: -0 + 0 is +0."""
    x = torch.tensor([[1.0, -0.0]], device=where)
    assert call("silu_and_mul_with_clamp", x, 1.0, 1.702, 0.0, width=1).signbit().all()


def _lesser(x: float, limit: float) -> float:
    """The minimum of both; x if either is NaN."""
    return limit if x > limit else x


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("limit", [-1.0, 0.0, math.inf, -math.inf, math.nan])
def test_clamp_order_with_inverted_limits(limit: float, where: str) -> None:
    """With a negative limit the bounds of [-limit, limit] are swapped, so the order of the two clamps decides.

    The order is vLLM's: the upper bound first in silu_and_mul_with_clamp and swigluoai_and_mul, the lower bound first
    in swiglustep_and_mul.
    """
    gate = [3.0, -9.0, 0.5, -0.5, 2.0, -3.0]
    up = [9.0, -9.0, 0.25, -1.0, -0.5, 2.0]
    g, u = (torch.tensor([half], dtype=torch.float32, device=where) for half in (gate, up))
    clamped = torch.tensor([[_lesser(x, limit) for x in gate]])
    min_first = torch.tensor([[-_lesser(-_lesser(x, limit), limit) for x in up]])
    max_first = torch.tensor([[_lesser(-_lesser(-x, limit), limit) for x in up]])
    silu = torch.tensor([[_lesser(x, limit) for x in F.silu(g)[0].tolist()]])
    halves, pairs = torch.cat((g, u), -1), torch.stack((g, u), -1).reshape(1, 12)
    for name, args, wanted in (
        ("silu_and_mul_with_clamp", (halves, limit), F.silu(clamped.double()) * min_first.double()),
        ("swiglustep_and_mul", (halves, limit), silu.double() * max_first.double()),
        (
            "swigluoai_and_mul",
            (pairs, 1.702, limit),
            clamped * sigmoid(1.702 * clamped.double()) * (min_first + 1).double(),
        ),
    ):
        actual = call(name, *args, width=6).cpu().double()
        torch.testing.assert_close(actual, wanted, rtol=8 * 2.0**-23, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fatrelu_compares_with_the_rounded_threshold(dtype: torch.dtype, where: str) -> None:
    for threshold in (0.1, 0.2, 0.3, 0.7, -0.3, 0.0):
        rounded = torch.tensor(threshold, dtype=dtype)
        above, below = (torch.nextafter(rounded, rounded.new_tensor(end)).item() for end in (9, -9))
        gate = [below, rounded.item(), above, math.nan]
        x = torch.tensor([gate + [1.0] * 4], dtype=dtype, device=where)
        expected = torch.tensor([[0.0, 0.0, above, math.nan]], dtype=dtype, device=where)
        assert same(call("fatrelu_and_mul", x, threshold, width=4), expected)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swigluoai_interleaves_clamps_and_drops_nan(dtype: torch.dtype, where: str) -> None:
    gate = [0.5, -3.0, 9.0, math.nan, 1.0, -math.inf]
    up = [1.5, 20.0, -20.0, 2.0, math.nan, 2.0]
    x = torch.tensor([gate, up], dtype=dtype, device=where).T.reshape(1, 12)
    g, u = (torch.tensor([half], dtype=dtype).double() for half in (gate, up))
    g, u = torch.fmin(g, torch.tensor(7.0)), torch.fmax(torch.fmin(u, torch.tensor(7.0)), torch.tensor(-7.0))
    expected = ((u + 1) * g * sigmoid(1.702 * g)).to(dtype)
    actual = call("swigluoai_and_mul", x, width=6).cpu()
    torch.testing.assert_close(actual, expected, rtol=tolerance(dtype, 1) * 4, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", DEVICES)
def test_swigluoai_float32_far_below_zero(where: str) -> None:
    """float32 must not use the fast functions for 16-bit dtypes, which get the last six bits of these results wrong.

    With alpha = 1, alpha * gate is exact.
    """
    gate = torch.linspace(-87.0, -20.0, 64 * 40).reshape(40, 64)
    x = torch.stack((gate, torch.zeros_like(gate)), -1).reshape(40, 128).to(where)
    expected = gate.double() * sigmoid(gate.double())
    actual = call("swigluoai_and_mul", x, 1.0, 7.0, width=64).cpu()
    torch.testing.assert_close(actual.double(), expected, rtol=4 * 2.0**-23, atol=0)


@pytest.mark.parametrize("where", DEVICES)
def test_swiglustep_keeps_nan(where: str) -> None:
    x = torch.tensor([[math.nan, 1.0, 30.0, 30.0, 1.0, math.nan, 30.0, -30.0]], device=where)
    expected = torch.tensor([[math.nan, math.nan, 49.0, -49.0]], device=where)
    assert same(call("swiglustep_and_mul", x, width=4), expected)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 63, 512, 781])
@pytest.mark.parametrize("scale", [0.02, -0.3, 1e-4])
@pytest.mark.parametrize(("kind", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e4m3fnuz, 224.0)])
def test_quant_equals_silu_and_mul_then_quantise(
    kind: torch.dtype, largest: float, scale: float, width: int, dtype: torch.dtype, where: str
) -> None:
    x = make(17, 2 * width, dtype=dtype, where=where)
    y = call("silu_and_mul", x, width=width).cpu().float()
    scale_tensor = torch.tensor([scale])
    expected = (y * (1 / scale_tensor)).clamp(-largest, largest).to(kind)
    actual = call("silu_and_mul_quant", x, scale_tensor.to(where), width=width, dtype=kind)
    assert torch.equal(actual.cpu().view(torch.uint8), expected.view(torch.uint8))


BAD_SCALES = [0.0, -0.0, 1e-40, -1e-39, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("scale", BAD_SCALES)
def test_bad_scales_as_in_the_quantising_op(scale: float, where: str) -> None:
    x = torch.tensor([[1.0, -2.0, 0.0, math.inf, math.nan] * 2], dtype=torch.bfloat16, device=where)
    given = torch.tensor([scale], device=where)
    quantized = call("silu_and_mul_quant", x, given, width=5, dtype=torch.float8_e4m3fn)
    y = call("silu_and_mul", x, width=5)
    right = torch.empty_like(quantized)
    pyops.static_scaled_fp8_quant(right, y, given)
    assert torch.equal(quantized.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("where", DEVICES)
def test_quant_saturates_and_maps_nan_to_the_maximum(where: str) -> None:
    gate, up = [math.nan, 1e4, 1e4, 1.0], [1.0, 1e4, -1e4, math.nan]
    x = torch.tensor([gate + up], dtype=torch.bfloat16, device=where)
    quantized = call("silu_and_mul_quant", x, torch.ones(1, device=where), width=4, dtype=torch.float8_e4m3fn)
    assert quantized.float().tolist() == [[448.0, 448.0, -448.0, 448.0]]
    quantized = call("silu_and_mul_quant", x, torch.ones(1, device=where), width=4, dtype=torch.float8_e4m3fnuz)
    assert quantized.float().tolist() == [[224.0, 224.0, -224.0, 224.0]]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu_matches_float64(dtype: torch.dtype, where: str) -> None:
    x = make(37, 96, dtype=dtype, where=where)
    alphas = [torch.tensor([value], dtype=dtype, device=where) for value in (0.2, -1.05)]
    p, n = (F.softplus(alpha.double()) for alpha in alphas)
    wide = x.double()
    negative = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * (0.5 + n) + 0.5 * wide
    expected = torch.where(wide > 0, p * wide * wide + 0.5 * wide, negative)
    actual = call("xielu", x, *alphas, width=96).double()
    # On the negative side, terms of up to |x|, each rounded to T, cancel.
    assert ((actual - expected).abs() <= tolerance(dtype, 4) * (expected.abs() + wide.abs())).all()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", NARROW)
def test_xielu_is_exact_without_exponential(dtype: torch.dtype, where: str) -> None:
    """A positive x has the exact formula ``softplus(alpha_p) * x * x + beta * x``; alpha = 100 is its own softplus.

    The slope beta = 0.3 has to be rounded to the dtype first. x takes every positive value, and infinity and NaN.
    """
    x = torch.arange(2**15, dtype=torch.int16, device=where).view(dtype)  # x[0] is 0, which takes the other branch
    alpha = torch.full((1,), 100.0, dtype=dtype, device=where)
    strength, slope = alpha, torch.full_like(alpha, 0.3)
    assert same(call("xielu", x, alpha, alpha, 0.3, width=len(x))[1:], (strength * x * x + slope * x)[1:])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "slope", "alpha"), [(torch.bfloat16, 0.312, 20.125), (torch.float16, 0.3203025, 20.015625)]
)
def test_xielu_rounds_the_slope_before_adding(dtype: torch.dtype, slope: float, alpha: float, where: str) -> None:
    """x is so negative that exp(x) vanishes; the slope beta must be rounded, and then its sum with softplus(alpha_n).

    The two values are such that rounding only the sum gives another number.
    """
    x = torch.linspace(-1000, -32, 96, device=where).to(dtype)
    strength, rounded = (torch.full((1,), value, dtype=dtype, device=where) for value in (alpha, slope))
    assert rounded + strength != (slope + strength.double()).to(dtype)
    expected = (-1 - x) * (rounded + strength) + rounded * x
    assert same(call("xielu", x, strength, strength, slope, width=96), expected)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_matches_float64(dtype: torch.dtype, approximate: str, where: str) -> None:
    x = make(37, 2 * 2048, dtype=dtype, where=where)
    gate, up = x.double().chunk(2, dim=-1)
    quantile = torch.special.ndtri(torch.tensor(0.9, dtype=torch.float64)).item()
    cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, correction=0, keepdim=True) * quantile
    expected = F.gelu((gate - cutoff).clamp(min=0), approximate=approximate) * up
    actual = call("gelu_and_mul_sparse", x, 0.9, approximate, width=2048).double()
    # The cutoff is a sum of two rounded terms; the elements above it inherit its absolute error.
    allowed = tolerance(dtype, 3) * (expected.abs() + 2 * cutoff.abs() * up.abs())
    assert ((actual - expected).abs() <= allowed).all()
    assert 0.88 < (actual == 0).double().mean() < 0.92


@pytest.mark.parametrize("where", DEVICES)
def test_sparse_cutoff_far_from_zero(where: str) -> None:
    """With mean 1000 and deviation 1, the sum of squares must not lose the deviation."""
    x = make(5, 2 * 4096, dtype=torch.float32, where=where) / 2 + 1000
    gate = x.double()[:, :4096]
    quantile = torch.special.ndtri(torch.tensor(0.95, dtype=torch.float64)).item()
    cutoff = (gate.mean(-1) + gate.std(-1, correction=0) * quantile).float()
    cut = gate.float() <= cutoff[:, None]
    assert torch.equal(call("gelu_and_mul_sparse", x, 0.95, width=4096) == 0, cut)


@pytest.mark.parametrize(
    ("hidden_size", "alignment", "dtype", "approximate"),
    [
        (2048, 16, "float16", "none"),  # limited to 64 registers, NVRTC spilled 8 bytes for an H200
        (1536, 4, "bfloat16", "none"),
        (2048, 4, "float16", "none"),
        (5120, 4, "float16", "tanh"),
        (6144, 4, "bfloat16", "none"),
    ],
)
def test_sparse_has_registers_for_both_halves(hidden_size: int, alignment: int, dtype: str, approximate: str) -> None:
    """A thread that holds 9 to 16 values of each half of a row needs more than 64 registers for erf or narrow
    vectors."""
    op = pyops.registry["gelu_and_mul_sparse"]
    args = op.example(ArgMaker(device.model()), hidden_size=hidden_size, dtype=dtype, approximate=approximate)
    out, input = (replace(arg, alignment=alignment) for arg in args[:2])
    (launch,) = op.launches(out, input, *args[2:])
    one = launch.specialisation
    assert one.constants["VEC_SIZE"] == alignment // 2
    assert one.constants["MIN_BLOCKS"] * launch.block[0] < 1024  # 65536 registers for 1024 threads are 64 each
    report = offline.compile(one.kernel.file, str(one), one.text, "sm_90", one.kernel.options)
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("bound", [None, 0.001, 1e-9])
def test_silu_and_mul_group_quant(bound: float | None, group_size: int, where: str) -> None:
    """Equals eager's activation divided by the scale of each group, without a reciprocal; NaN becomes the fp8 maximum
    and is ignored by the absmax."""
    x = make(5, 512, dtype=torch.bfloat16, where=where)
    x[0, 3], x[1, 256] = float("nan"), float("inf")
    y = (F.silu(x[:, :256]) * x[:, 256:]).float().unflatten(1, (-1, group_size))
    largest = torch.where(y.isnan(), 0.0, y.abs()).amax(-1)
    scales = largest / torch.tensor(448.0, device=where)
    scales = (scales if bound is None else scales.clamp(max=bound)).clamp(min=1 / (448 * 512))
    quantized = (y / scales[..., None]).nan_to_num(nan=448.0).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    out, found = torch.empty_like(quantized), torch.empty_like(scales)
    scale_ub = None if bound is None else torch.tensor([bound], device=where)
    with nullcontext() if where == "cuda" else cpu("kernels" if isinstance(where, Host) else "reference"):
        pyops.silu_and_mul_per_block_quant(out, x, found, group_size, scale_ub)
    finite = scales.isfinite().repeat_interleave(group_size, 1)
    assert torch.equal(found, scales)
    assert torch.equal(out.view(torch.uint8)[finite], quantized.view(torch.uint8)[finite])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_silu_and_mul_group_quant_transposed(num_tokens: int, where: str) -> None:
    """Transposed scales are [tokens, groups] with any strides, or [groups, tokens], also where both counts are
    equal."""
    x = make(num_tokens, 256, dtype=torch.bfloat16, where=where)
    quantized = torch.empty(num_tokens, 128, dtype=torch.int8, device=where)
    scales = torch.empty(num_tokens, 2, device=where)
    by_columns, by_groups = (torch.zeros(2, num_tokens, device=where) for _ in range(2))
    with nullcontext() if where == "cuda" else cpu("kernels" if isinstance(where, Host) else "reference"):
        pyops.silu_and_mul_per_block_quant(quantized, x, scales, 64)
        for given in (by_columns.t(), by_groups):
            pyops.silu_and_mul_per_block_quant(quantized, x, given, 64, None, True)
        assert torch.equal(by_columns.t(), scales)
        assert torch.equal(by_groups.t(), scales)
        if num_tokens == 5:
            with pytest.raises(pyops.OpError, match="scales: expected shape"):
                pyops.silu_and_mul_per_block_quant(quantized, x, by_groups, 64, None, False)
            with pytest.raises(pyops.OpError, match="scales: expected shape"):
                pyops.silu_and_mul_per_block_quant(quantized, x, torch.empty(2, 7, device=where)[:, :5], 64, None, True)


@pytest.mark.parametrize("where", DEVICES)
def test_sparse_rows_of_one_value(where: str) -> None:
    """A row of equal values has variance 0, or just below 0 by rounding: every element is cut off."""
    for width in (96, 1000):
        x = make(37, 1, dtype=torch.float32, where=where).expand(37, 2 * width).contiguous()
        assert torch.equal(call("gelu_and_mul_sparse", x, 0.9, width=width), torch.zeros(37, width, device=where))


def test_sparsity_is_checked_at_every_call() -> None:
    x, out = make(3, 64, dtype=torch.float32), torch.empty(3, 32)
    pyops.gelu_and_mul_sparse(out, x, 0.5)
    for bad in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(pyops.OpError, match="activation_sparsity: expected a number above 0 and below 1"):
            pyops.gelu_and_mul_sparse(out, x, bad)
    with pytest.raises(pyops.OpError, match='approximate: expected "none" or "tanh", got "sigmoid"'):
        pyops.gelu_and_mul_sparse(out, x, 0.5, "sigmoid")


def test_refused() -> None:
    with pytest.raises(pyops.OpError, match="input: expected a last dimension of even size"):
        pyops.silu_and_mul(torch.empty(2, 3), torch.empty(2, 7))
    with pytest.raises(pyops.OpError, match=r"out: expected shape \(2, 4\)"):
        pyops.silu_and_mul(torch.empty(2, 8), torch.empty(2, 8))
    with pytest.raises(pyops.OpError, match="input: expected leading dimensions that merge into 1"):
        pyops.silu_and_mul(torch.empty(3, 2, 4), torch.empty(2, 3, 8).transpose(0, 1))
    x = torch.empty(1, 8)
    with pytest.raises(pyops.OpError, match="out: is written, but shares memory with input"):
        pyops.silu_and_mul(x[:, :4], x)
    with pytest.raises(pyops.OpError, match="input: expected dtype float16 or bfloat16"):
        pyops.silu_and_mul_quant(torch.empty(2, 4, dtype=torch.float8_e4m3fn), torch.empty(2, 8), torch.ones(1))
    with pytest.raises(pyops.OpError, match="alpha_n: expected shape"):
        pyops.xielu(torch.empty(2, 4), torch.empty(2, 4), torch.ones(1), torch.ones(2))


def test_plain_ops_work_in_place() -> None:
    x = make(3, 64, dtype=torch.bfloat16)
    expected = call("relu2", x, width=64)
    pyops.relu2(x, x)
    assert torch.equal(x, expected)


def test_rows_of_odd_size_use_full_vectors() -> None:
    args = pyops.registry["gelu_quick"].example(ArgMaker(device.model()), num_tokens=16, hidden_size=781)
    (launch,) = pyops.registry["gelu_quick"].launches(*args)
    assert launch.specialisation.constants["VEC_SIZE"] == 8


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("hidden_size", [64, 4096])
@pytest.mark.parametrize("name", BY_CHUNKS)
def test_more_rows_than_the_grid_has_in_y(
    name: str, hidden_size: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid limit is lowered, because the real limit takes too many rows for a test."""
    op = pyops.registry[name]
    args = example(op, where, num_tokens=37, hidden_size=hidden_size)
    results = expected(op, args)
    monkeypatch.setattr(chunks, "MAX_GRID_YZ", 2)
    op.forget()
    assert_results(op, results, run(op, args, dict.fromkeys(named(op, args), Layout(gap=8))))
    op.forget()


@given(st.integers(1, 2**38), st.integers(1, 2**16))
def test_every_element_has_a_thread(elements: int, hidden_size: int) -> None:
    """For up to 2^38 elements, more than the memory of any GPU."""
    num_rows = max(1, elements // hidden_size)
    args = pyops.registry["silu_and_mul"].example(
        ArgMaker(device.model()), num_tokens=num_rows, hidden_size=hidden_size
    )
    (launch,) = pyops.registry["silu_and_mul"].launches(*args)
    x, y, z = launch.grid
    constants, row_threads = launch.specialisation.constants, launch.specialisation.constants["ROW_THREADS"]
    block_rows, row_vecs = constants["NUM_THREADS"] // row_threads, hidden_size // constants["VEC_SIZE"]
    assert hidden_size % constants["VEC_SIZE"] == 0
    assert row_threads * block_rows == launch.block[0] == constants["NUM_THREADS"]
    assert x < 2**31
    assert max(y, z) <= 65535
    # All elements are covered, and no block is without work.
    assert (x - 1) * row_threads < row_vecs <= x * row_threads
    assert num_rows <= y * z * block_rows < num_rows + z * block_rows
    # Few threads of a row are idle, unless one warp covers the row.
    assert x * row_threads - row_vecs <= max(row_vecs // 16, 31)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("limits", [(-87.4, -86.6), (-88.7, -87.0), (-104.0, -88.6)])
def test_float32_silu_where_the_exponential_overflows(limits: tuple[float, float], where: str) -> None:
    """exp(-x) passes 2^126 at x = -87.3 and the float32 maximum at x = -88.7. All gates lie between the `limits`."""
    gate = torch.linspace(*limits, 40 * 64, device=where).reshape(40, 64)
    with eager():
        expected = F.silu(gate)
    got = call("silu_and_mul", torch.cat((gate, torch.ones_like(gate)), dim=1), width=64)
    assert same(got, expected)
    exact = gate.double() * sigmoid(gate.double())
    allowed = exact.abs() * 2.0**-22
    assert ((got.double() - exact).abs() <= allowed + 2.0**-140)[gate > -88.7].all()
    assert (got[gate < -88.75] == 0).all()
