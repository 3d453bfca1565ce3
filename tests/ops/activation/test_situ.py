"""SituGLU against float64 for every 16-bit gate, its quantized form, and activations of the rows of experts that exist.

The formula here is that of Kimi K3's gate: a bounded gate times its sigmoid, times a factor that is bounded, too.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pyops
from pyops.testing import cpu, same_bits
from tests.support.calls import DEVICES

NARROW = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *NARROW]


def situ(g: torch.Tensor, u: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    g, u = g.double(), u.double()
    if linear_beta > 0:
        u = linear_beta * torch.tanh(u / linear_beta)
    return beta * torch.tanh(g / beta) / (1 + torch.exp(-g)) * u


def bits(dtype: torch.dtype, where: str) -> torch.Tensor:
    """Every value of a 16-bit type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=where).view(dtype)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("betas", [(4.0, 25.0), (1.0, -1.0), (0.7, 1.3), (30.0, 0.0)])
@pytest.mark.parametrize("half", ["gate", "factor"])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_value(dtype: torch.dtype, half: str, betas: tuple[float, float], where: str) -> None:
    """At most half a ulp from float64, and a hundredth of one for the arithmetic, whichever half takes all values.

    The sigmoid is 0 where exp(-|g|) is not a normal float32.
    """
    values = bits(dtype, where).reshape(256, 256)
    other = torch.full_like(values, 1.3)
    g, u = (values, other) if half == "gate" else (other, values)
    out = torch.empty_like(values)
    pyops.situ_and_mul(out, torch.cat((g, u), -1), *betas)
    right = situ(g, u, *betas)
    assert torch.equal(out.isnan(), right.isnan())
    exists = ~right.isnan()
    found, exact = out[exists].double(), right[exists]
    eps = torch.finfo(dtype).eps
    smallest = torch.finfo(dtype).smallest_normal
    unit = eps * torch.exp2(torch.frexp(exact.abs().clamp(smallest, torch.finfo(dtype).max))[1].double() - 1)
    finite = exact.abs() <= torch.finfo(dtype).max
    off = (found - exact).abs()[finite]
    flushed = 2.0**-126 * 2 * betas[0]
    assert (off <= 0.51 * unit[finite] + flushed).all()
    assert torch.equal(found[~finite].sign(), exact[~finite].sign())


@pytest.mark.parametrize("where", DEVICES)
def test_small_arguments_keep_their_digits(where: str) -> None:
    """The hyperbolic tangent of a tiny gate is the gate: 1 - exp(-2x) would cancel. Both sides of the switch."""
    g = torch.cat([2.0**k * torch.tensor([0.9999, 1.0, 1.0001], dtype=torch.float64) for k in range(-30, 3)])
    g = torch.cat((g, -g)).half().to(where).reshape(1, -1)
    out = torch.empty_like(g)
    pyops.situ_and_mul(out, torch.cat((g, torch.ones_like(g)), -1), 1.0, -1.0)
    right = situ(g, torch.ones_like(g), 1.0, -1.0)
    assert ((out.double() - right).abs() <= 2.0**-11 * 1.01 * right.abs() + 2.0**-25).all()


def test_signature_is_that_of_vllm() -> None:
    x = torch.randn(3, 8)
    out, same = torch.empty(3, 4), torch.empty(3, 4)
    pyops.situ_and_mul(out, x)
    pyops.situ_and_mul(same, x, beta=1.0, linear_beta=-1.0)
    assert same_bits(out, same)


# Quantized


def quantized(y: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(values before the conversion to fp8, scales) of rows that are rounded to 16 bits, in float32 steps."""
    groups = y.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) * torch.tensor(1 / largest, dtype=torch.float32)
    return (groups * (1 / scale)).flatten(-2), scale.squeeze(-1)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("count", [None, -3, 0, 2, 5, 100])
@pytest.mark.parametrize("dtype", NARROW)
def test_quantized_is_the_plain_op_and_then_its_quantization(dtype: torch.dtype, count: int | None, where: str) -> None:
    """Bit for bit: `situ_and_mul` of the same device is the input of the formula."""
    rows, topk = 11, 2
    x = (torch.randn(rows, 2 * 384, generator=torch.Generator().manual_seed(3)) * 3).to(dtype).to(where)
    x[1, :384] = 0  # a group of zeros has the smallest scale
    out = torch.full((rows, 384), 0x55, dtype=torch.uint8, device=where).view(torch.float8_e4m3fn)
    scale = torch.full((rows, 3), math.nan, device=where)
    valid = None if count is None else torch.tensor([count], dtype=torch.int32, device=where)
    pyops.situ_and_mul_quant(out, scale, x, 4.0, 25.0, 128, valid, topk)
    y = torch.empty(rows, 384, dtype=dtype, device=where)
    pyops.situ_and_mul(y, x, 4.0, 25.0)
    values, scales = quantized(y, 448.0)
    end = rows if count is None else min(rows, max(0, count * topk))
    assert same_bits(scale[:end], scales[:end])
    assert scale[end:].tolist() == [[1.0] * 3] * (rows - end)
    quants = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out[:end].view(torch.uint8), quants[:end].view(torch.uint8))
    assert (out[end:].view(torch.uint8) == 0x55).all()


@pytest.mark.parametrize("where", DEVICES)
def test_infinities_and_nan_are_quantized_to_the_largest_value(where: str) -> None:
    x = torch.ones(2, 256, dtype=torch.bfloat16, device=where)
    x[0, 128 + 5], x[1, 128 + 7] = math.inf, math.nan
    out = torch.empty(2, 128, dtype=torch.float8_e4m3fn, device=where)
    scale = torch.empty(2, 1, device=where)
    pyops.situ_and_mul_quant(out, scale, x, 4.0, -1.0, 128)
    assert math.isinf(scale[0, 0])
    assert out[0].float().nonzero().tolist() == [[5]]
    assert out[0, 5].float() == 448 == out[1, 7].float()
    assert not scale[1].isnan().any()


@pytest.mark.parametrize(("group_size", "topk"), [(0, 1), (64, 1), (128, 0)])
def test_quantized_refuses(group_size: int, topk: int) -> None:
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    out, scale = torch.empty(2, 128, dtype=torch.float8_e4m3fn), torch.empty(2, 1)
    with pytest.raises(pyops.OpError, match=r"situ_and_mul_quant: (group_size|topk): expected"):
        pyops.situ_and_mul_quant(out, scale, x, 4.0, 25.0, group_size, None, topk)


# Of the rows of experts


LIMIT, ALPHA, BETA = 1.5, 1.7, 0.5
SQRT_2_PI = math.sqrt(2 / math.pi)


def _clamped(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    g = g.clamp(max=LIMIT)
    return g / (1 + torch.exp(-ALPHA * g)) * (u.clamp(-LIMIT, LIMIT) + BETA)


# {activation: its formula in float64}, of halves g and u; of pairs for swigluoai.
FORMULAS: dict[str, Any] = {
    "silu": lambda g, u: g / (1 + torch.exp(-g)) * u,
    "gelu": lambda g, u: g * torch.special.ndtr(g) * u,
    "gelu_tanh": lambda g, u: g / 2 * (1 + torch.tanh(SQRT_2_PI * (g + 0.044715 * g**3))) * u,
    "silu_with_clamp": _clamped,
    "swigluoai_uninterleave": _clamped,
    "swigluoai": lambda g, u: (
        g.clamp(max=LIMIT) / (1 + torch.exp(-ALPHA * g.clamp(max=LIMIT))) * (u.clamp(-LIMIT, LIMIT) + 1)
    ),
    "swiglustep": lambda g, u: (g / (1 + torch.exp(-g))).clamp(max=LIMIT) * u.clamp(-LIMIT, LIMIT),
    "situ": lambda g, u: situ(g, u, 4.0, 2.5),
    "silu_no_mul": lambda x: x / (1 + torch.exp(-x)),
    "gelu_no_mul": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh_no_mul": lambda x: x / 2 * (1 + torch.tanh(SQRT_2_PI * (x + 0.044715 * x**3))),
    "relu2_no_mul": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_rows_of_experts_against_float64(name: str, dtype: torch.dtype, where: str) -> None:
    """Rows that are counted equal the formula, others keep their bits; counts beyond the rows are clamped."""
    width = 1 if name.endswith("_no_mul") else 2
    counts = [0, 3, 9, -4, 5, 1, 0, 20]
    x = (torch.randn(8, 9, width * 80, generator=torch.Generator().manual_seed(5)) * 2).to(dtype).to(where)
    out = torch.full((8, 9, 80), 77.0, dtype=dtype, device=where)
    of_counts = torch.tensor(counts, dtype=torch.int32, device=where)
    pyops.masked_moe_activation(out, x, of_counts, name, LIMIT, ALPHA, BETA, 4.0, 2.5)
    wide = x.double()
    halves = (wide,) if width == 1 else (wide[..., ::2], wide[..., 1::2]) if name == "swigluoai" else wide.chunk(2, -1)
    right = FORMULAS[name](*halves)
    eps = torch.finfo(dtype).eps
    atol = 8 * 2.0**-24 * float(x.double().abs().amax()) ** 2
    for expert, count in enumerate(counts):
        count = min(max(count, 0), 9)
        error = (out[expert, :count].double() - right[expert, :count]).abs()
        assert (error <= 2 * eps * right[expert, :count].abs() + atol).all()
        assert (out[expert, count:] == 77.0).all()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("count", [-1, 0, 4, 7, 8])
def test_rows_without_experts(count: int, where: str) -> None:
    """Bit for bit the rows of `silu_and_mul`, for a matrix with any row stride."""
    x = torch.randn(7, 300, device=where).bfloat16()[:, :256]
    out = torch.full((7, 128), 77.0, dtype=torch.bfloat16, device=where)
    pyops.masked_moe_activation(out, x, torch.tensor([count], dtype=torch.int32, device=where), "silu")
    right = torch.empty_like(out)
    pyops.silu_and_mul(right, x)
    end = min(max(count, 0), 7)
    assert same_bits(out[:end], right[:end])
    assert (out[end:] == 77.0).all()


def test_unknown_activations_are_refused() -> None:
    x, out, counts = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.ones(2, dtype=torch.int32)
    before = out.clone()
    for name in ("relu", "SILU", ""):
        with pytest.raises(pyops.OpError, match="masked_moe_activation: activation: expected one of silu"):
            pyops.masked_moe_activation(out, x, counts, name)
    with pytest.raises(pyops.OpError, match="masked_moe_activation: out"):
        pyops.masked_moe_activation(out, x, counts, "silu_no_mul")
    assert same_bits(out, before)
    pyops.masked_moe_activation(out, x, counts, "silu")
    right = F.silu(x[:, 0, :4]) * x[:, 0, 4:]
    torch.testing.assert_close(out[:, 0], right)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_soft_cap(kind: torch.dtype) -> None:
    x = torch.linspace(-300, 300, 3 * 77).to(kind).view(3, 77)
    out = torch.empty(3, 77)
    with cpu("kernels"):
        pyops.muse_spark_mul_tanh_soft_cap(out, x, 0.25, 30.0)
    torch.testing.assert_close(out.double(), 30 * torch.tanh(x.double() * 0.25 / 30), rtol=2**-21, atol=0)
