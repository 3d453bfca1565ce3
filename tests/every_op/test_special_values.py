"""Infinities, NaN, the largest and the smallest numbers, against float64, by kernels and references."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyops
from pyops._core import config
from pyops._core.op.op import Op
from pyops.host.toolchain import toolchains
from pyops.testing.calls import assert_results, expected, named, replaced, run
from tests.support import axes
from tests.support.calls import DEVICES, OF_GROWING_STATES, example

INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max
# A temperature without an inverse in float32; the smallest number; the smallest normal number.
TINY = (1e-42, 2.0**-149, 2.0**-126)


# Sampling

# Logits of a row, repeated.
ROWS = {
    "plain": [1.0, 3.0, 2.0, 3.0],
    "masked": [1.0, -INF, 3.0, -INF, 2.0],
    "largest": [LARGEST, 0.0, -LARGEST, -INF, LARGEST, -LARGEST / 2],
    "negative": [-LARGEST, -LARGEST / 2, -LARGEST],
}


def _probabilities(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """softmax(x / t) in float64 for any t > 0, inf included."""
    wide, divisor = x.double(), t.double()[:, None]
    below = torch.where(wide == -INF, -INF, (wide - wide.amax(-1, keepdim=True)) / divisor)
    weights = torch.exp(below)
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [24, 5000])
@pytest.mark.parametrize("name", ROWS)
def test_softmax_at_any_temperature(name: str, columns: int, device: str) -> None:
    """From the smallest temperature, where the largest logits share all probability, to inf, where all logits do."""
    t = torch.tensor([*TINY, 1e-30, 0.5, 1.0, 3.0, 1e30, 1e38, LARGEST, INF], device=device)
    x = torch.tensor(ROWS[name], device=device).repeat(columns)[:columns].expand(len(t), -1).contiguous()
    right = _probabilities(x, t)
    out = torch.empty_like(x)
    pyops.softmax(out, x, t)
    torch.testing.assert_close(out.double(), right, rtol=2e-6, atol=1e-12)
    pyops.log_softmax(out, x, t)
    torch.testing.assert_close(out.double().exp(), right, rtol=4e-6, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_at_zero_temperature(device: str) -> None:
    """Temperatures below the smallest normal number, 0 and negative ones included, count as that number; NaN gives
    NaN."""
    x = torch.tensor([[1.0, 3.0, 2.0, 3.0]], device=device).repeat(5, 1)
    out = torch.empty_like(x)
    pyops.softmax(out, x, torch.tensor([0.0, -0.0, -1.0, -INF, NAN], device=device))
    assert out[:4].tolist() == [[0.0, 0.5, 0.0, 0.5]] * 4
    assert out[4].isnan().all()
    x[0, 2], x[1, 0], x[2] = NAN, INF, -INF
    for t in (TINY[0], INF):
        pyops.softmax(out, x, torch.full((5,), t, device=device))
        assert out[:3].isnan().all()
        assert not out[3:].isnan().any()


@pytest.mark.rotates
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filters", [(), ("top_p",), ("top_k", "top_p")])
@pytest.mark.parametrize("name", ROWS)
def test_draws_at_any_temperature(name: str, filters: tuple[str, ...], device: str) -> None:
    """Every token as often as its probability says, and no other token. At temperature 0, the first of the most
    likely."""
    rows = 300
    x = torch.tensor(ROWS[name], device=device).expand(rows, -1).contiguous()
    given = {name: torch.full((rows,), 1.0, device=device) for name in filters}
    if "top_k" in filters:
        given["top_k"] = torch.zeros(rows, dtype=torch.int32, device=device)
    samples, seeds = torch.empty(rows, dtype=torch.int32, device=device), torch.arange(rows, device=device)
    for t in (TINY[0], 0.5, 1e38, LARGEST, INF):
        temperature = torch.full((rows,), t, device=device)
        pyops.top_k_top_p_sampling_from_logits(samples, x, seeds, temperature=temperature, **given)
        right = _probabilities(x[:1], temperature[:1])[0].cpu()
        if t < 1e-38:
            right = torch.zeros_like(right).index_fill(0, right.argmax(), 1.0)
        counts = torch.bincount(samples.cpu(), minlength=len(right))
        deviation = (rows * right * (1 - right)).sqrt()
        assert ((counts - rows * right).abs() <= 5 * deviation).all(), (t, counts, rows * right)


# Activations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["swigluoai_and_mul", "swiglustep_and_mul"])
def test_clamped_gates(name: str, dtype: torch.dtype, device: str) -> None:
    """Gates and factors of every size, infinities and NaN: the float64 result, rounded."""
    limits = torch.finfo(dtype)
    sizes = (
        0.0,
        limits.tiny * limits.eps,
        limits.tiny,
        0.1,
        1.0,
        6.9,
        7.0,
        20.0,
        88.5,
        limits.max / 2,
        limits.max,
        INF,
    )
    values = torch.tensor([sign * size for size in sizes for sign in (1, -1)] + [NAN], dtype=torch.float64).to(dtype)
    g, u = (half.flatten() for half in torch.meshgrid(values, values, indexing="ij"))
    is_step = name == "swiglustep_and_mul"
    x = torch.cat((g, u)) if is_step else torch.stack((g, u), 1).flatten()
    out = torch.empty(1, len(g), dtype=dtype, device=device)
    getattr(pyops, name)(out, x[None].to(device))
    wide, factor, limit = g.double(), u.double(), torch.tensor(7.0, dtype=torch.float64)
    if is_step:
        right = (wide / (1 + torch.exp(-wide))).clamp(max=7.0) * factor.clamp(-7.0, 7.0)
    else:
        wide = torch.fmin(wide, limit)
        right = (torch.fmax(torch.fmin(factor, limit), -limit) + 1) * wide / (1 + torch.exp(-1.702 * wide))
    # In float32, the rounding of 1.702 * g, up to 151, changes the exponential by this factor.
    tolerance = 151 * limits.eps if dtype == torch.float32 else 2 * limits.eps
    flushed = 16 * torch.finfo(torch.float32).tiny  # devices flush subnormal floats
    right = right.to(dtype)
    torch.testing.assert_close(
        out[0].cpu(), right, rtol=tolerance, atol=flushed + limits.tiny * limits.eps, equal_nan=True
    )


# float32 sums


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [64, 4096])
def test_rms_norms_with_overflowing_squares(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    """Finite elements become 0, infinite ones NaN. Sums of squares near the largest float are right."""
    largest = torch.finfo(dtype).max
    x = torch.full((4, hidden_size), largest, dtype=dtype, device=device)
    x[1, ::2] = -largest
    x[2, 3], x[2, 5] = INF, -1.0
    x[3] = 2.0**63 / hidden_size**0.5
    weight = torch.ones(hidden_size, dtype=dtype, device=device)
    results = [torch.empty_like(x), torch.empty_like(x), torch.empty_like(x), x.clone()]
    pyops.rms_norm(results[0], x, weight, 1e-6)
    pyops.gemma_rms_norm(results[1], x, weight - 1, 1e-6)
    pyops.rms_norm_gated(results[2], x, weight, 1e-6)
    pyops.fused_add_rms_norm(results[3], torch.zeros_like(x), weight, 1e-6)
    for out in results:
        assert not out[:2].any()
        assert out[2, 3].isnan()
        assert not out[2, 4:].any()
        torch.testing.assert_close(out[3], torch.ones_like(out[3]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layer_norm_with_overflowing_sums(dtype: torch.dtype, device: str) -> None:
    """It gives zeros or NaN, never a plausible number."""
    largest = torch.finfo(dtype).max
    x = torch.randn(4, 256, device=device).to(dtype)
    x[0] = largest
    x[1, ::3] = -largest
    x[2, 7] = largest
    out = torch.empty_like(x)
    pyops.layer_norm(out, x, None, None, 1e-6)
    if dtype == torch.float16:  # its sums do not overflow
        right = torch.nn.functional.layer_norm(x.double(), (256,), eps=1e-6)
        torch.testing.assert_close(out.double(), right, rtol=2e-3, atol=1e-3)
    else:
        assert (out[:3].isnan() | (out[:3] == 0)).all()
        assert out[3].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 4096])
def test_hadamard_of_the_largest_numbers(size: int, dtype: torch.dtype, device: str) -> None:
    """Right as long as a row's magnitudes, divided by the root of its size, add up to a finite float."""
    largest, generator = torch.finfo(dtype).max, torch.Generator().manual_seed(1)
    count = int(size**0.5)
    x = torch.zeros(3, size, dtype=dtype)
    for row in x[:2]:
        places = torch.randperm(size, generator=generator)[:count]
        row[places] = torch.where(torch.rand(count, generator=generator) < 0.5, -largest, largest).to(dtype)
    x[2] = largest / size**0.5
    signs = torch.ones(1, 1, dtype=torch.float64)
    while len(signs) < size:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    right = (x.double() @ signs / size**0.5).to(dtype)
    out = pyops.hadacore_transform(x.to(device), False).cpu()
    assert out.isfinite().all()
    torch.testing.assert_close(out, right, rtol=2 * torch.finfo(dtype).eps, atol=largest * 2.0**-22)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 99), tokens=st.sampled_from([1, 3]), size=st.sampled_from([8, 769, 2048]))
def test_skinny_linear_near_the_float32_maximum(
    dtype: torch.dtype, device: str, seed: int, tokens: int, size: int
) -> None:
    """Right where the magnitudes of the products add up to a finite float; right, infinite or NaN where they do not."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, size, generator=generator)
    weight = torch.randn(5, size, generator=generator)
    for share in (0.9, 3.0):
        factor = share * LARGEST / float((x.abs() @ weight.abs().T).max())
        given = (x * factor**0.5).to(dtype), (weight * factor**0.5).to(dtype)
        out = torch.empty(tokens, 5, dtype=dtype, device=device)
        pyops.skinny_linear(out, *(one.to(device) for one in given))
        right = given[0].double() @ given[1].double().T
        finite = out.isfinite().cpu()
        assert finite.all() or share > 1
        wrong = (out.cpu().double() - right).abs() > torch.finfo(dtype).eps * right.abs() + LARGEST * 2.0**-18
        assert not (wrong & finite).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merge_of_the_largest_outputs(dtype: torch.dtype, device: str) -> None:
    """Outputs as large as their dtype allows, under any weights; infinity under a weight of 0 in float32 gives NaN."""
    lses = [-LARGEST, -200.0, -60.0, -1.0, 0.0, 1e-40, 87.0, LARGEST]
    p, s = (half.flatten()[None] for half in torch.meshgrid(torch.tensor(lses), torch.tensor(lses), indexing="ij"))
    largest = torch.finfo(dtype).max * (1 - 2.0**-20 if dtype == torch.float32 else 1.0)
    values = [largest, -largest, largest / 2, 0.0, 1.0]
    prefix, suffix = (
        half.flatten().to(dtype).expand(p.shape[1], 1, -1).contiguous()
        for half in torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij")
    )
    out, lse = torch.empty_like(prefix, device=device), torch.empty_like(p, device=device)
    pyops.merge_attn_states(out, *(one.to(device) for one in (prefix, p, suffix, s)), lse)
    wide_p, wide_s = (one.double().T[..., None] for one in (p, s))
    share = torch.sigmoid(wide_p - wide_s)
    right = prefix.double() * share + suffix.double() * torch.sigmoid(wide_s - wide_p)
    assert out.isfinite().all()
    assert ((out.cpu().double() - right).abs() <= 4 * torch.finfo(dtype).eps * right.abs() + largest * 2.0**-22).all()
    torch.testing.assert_close(lse.cpu().double(), torch.logaddexp(p.double(), s.double()), rtol=1e-6, atol=1e-6)
    suffix[..., 0] = INF
    pyops.merge_attn_states(out, *(one.to(device) for one in (prefix, p, suffix, s)))
    lost = wide_s - wide_p < -110
    assert out.cpu()[..., 0][lost[..., 0]].isnan().all()
    assert (out.cpu()[..., 0][(wide_s - wide_p > -80)[..., 0]] == INF).all()


# Every op without sums that overflow in one order and not in another

SUMS = {"skinny_linear", "layer_norm", "rms_norm_gated", "hadacore_transform_out"}
SUMS |= {"selective_scan_fwd", "selective_state_update"}
SUMS |= {"mamba_chunk_scan_varlen"}  # exponents of decays are differences of sums of dt * A, which may be infinite
SUMS |= {
    "linear",
    "LLMM1",
    "wvSplitK",
    "wvSplitKrc",
    "dsv3_fused_a_gemm",
    "dsv3_router_gemm",
    "cutlass_scaled_sparse_mm",
    "cutlass_blockwise_scaled_grouped_mm",  # partial sums of blocks of K under scales of 3e38
}
OPS = [
    op for name, op in pyops.registry.items() if name not in SUMS and not re.search("attention|mla_decode|conv1d", name)
]
# Two scales for each sum, or for each partial sum of K: the order decides whether one is infinite, or zero, on the way.
OF_TWO_SCALES = {"cutlass_scaled_mm", "cutlass_w4a8_moe_mm", "grouped_gemm"}
# Growing states become infinite earlier in one order than in another, and so does the mean of two largest numbers, or
# the sum over heads under the largest weights, or over K: a product overflows unless it is added to -inf.
WITHOUT_LARGEST = OF_GROWING_STATES | {"merge_attn_states", "fp8_mqa_logits", "fp8_paged_mqa_logits"}
WITHOUT_LARGEST |= {"fused_moe_lora_expand", "fused_moe_lora_shrink", "lora_expand", "lora_shrink"}
# Norms round a subnormal key to zero, and zero times an infinite change of the state is NaN.
WITHOUT_SUBNORMAL = {name for name in pyops.registry if re.search("gated_delta_rule|kda", name)}
SCALES = (0.0, -0.0, 2.0**-149, -1e-42, 2.0**-127, 2.0**-126, 1e-30, -1.0, 3e38, INF, NAN)


def _special(x: torch.Tensor, seed: int, has_largest: bool, has_subnormal: bool = True) -> torch.Tensor:
    """A copy in which about every second element is a special value; the largest and the smallest number if asked."""
    limits, generator = torch.finfo(x.dtype), torch.Generator().manual_seed(seed)
    optional = [limits.tiny * limits.eps] * has_subnormal + [limits.max] * has_largest
    sizes = 0.0, limits.tiny, *optional, INF
    values = [sign * size for size in sizes for sign in (1, -1)]
    values.append(NAN)
    which = torch.randint(0, 2 * len(values), x.shape, generator=generator)
    special = torch.tensor(values * 2, dtype=torch.float64).to(x.dtype)[which]
    return torch.where(which < len(values), special, x)


@pytest.mark.rotates
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in OPS])
@settings(max_examples=6)
@given(data=st.data())
def test_equals_the_reference_for_special_values(op: Op, data: st.DataObject) -> None:
    """For any contents of its token tensors, and under any scale."""
    args = example(op, num_tokens=5, **data.draw(st.sampled_from([*axes.sample(op, 3), axes.fullest(op)])))
    seed, is_special = data.draw(st.integers(0, 99)), data.draw(st.booleans())
    of_two_scales = op.name in OF_TWO_SCALES
    scale = data.draw(st.sampled_from([one for one in SCALES if not (of_two_scales and one in (3e38, INF))]))
    changed = {}
    for p in op.tensors:
        value = named(op, args).get(p.name)
        if value is None or p.role == "out" or value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            continue
        if value.dtype == torch.float32 and re.search("scale|_ub", p.name) and data.draw(st.booleans()):
            changed[p.name] = torch.full_like(value, scale)
        elif value.ndim > 1 and is_special and not (of_two_scales and "scale" in p.name):
            has = op.name not in WITHOUT_LARGEST, op.name not in WITHOUT_SUBNORMAL
            changed[p.name] = _special(value, seed, *has)
    args = replaced(op, args, **changed)
    with config.cpu("kernels"):
        assert_results(op, expected(op, args), run(op, args))
