"""The norm family: references against float64, and the properties of its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pyops
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.ops._shared import geometry
from pyops.ops.norm.rms import FUSED_ADD_RMS_NORM, RMS_NORM
from pyops.ops.norm.static_quant import _WITH_RESIDUAL, _WITHOUT_RESIDUAL
from pyops.testing import Layout
from pyops.testing.calls import assert_results, assert_same, expected, named, run
from tests.support import axes
from tests.support.calls import DEVICES, example, run_accepted, run_in_place

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = 1e-6
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
E4M3 = pytest.mark.parametrize("kind", LARGEST)


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) + shift).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, roundings: int = 2) -> None:
    """Within this number of roundings of a 16-bit dtype; float32 rounds at every step."""
    unit = torch.finfo(actual.dtype).eps * (8 if actual.dtype is torch.float32 else roundings)
    torch.testing.assert_close(actual.double(), expected, rtol=unit, atol=unit * 1e-2)


def rms64(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return y if weight is None else y * weight.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 8, 769, 4096])
def test_norms_match_float64(dtype: torch.dtype, hidden_size: int, device: str) -> None:
    x, residual, weight = (
        draw(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate([(5, hidden_size)] * 2 + [(hidden_size,)])
    )
    bias = draw(hidden_size, dtype=dtype, device=device, seed=3)
    out = torch.empty_like(x)
    pyops.rms_norm(out, x, weight, EPSILON)
    close(out, rms64(x, weight))
    pyops.rms_norm(out, x, None, EPSILON)
    close(out, rms64(x))
    pyops.gemma_rms_norm(out, x, weight, EPSILON)
    close(out, rms64(x) * (1 + weight.double()), roundings=1)
    y, total = x.clone(), residual.clone()
    pyops.fused_add_rms_norm(y, total, weight, EPSILON)
    assert torch.equal(total, x + residual)
    close(y, rms64(total, weight))
    pyops.layer_norm(out, x, weight, bias, EPSILON)
    expected = torch.nn.functional.layer_norm(x.double(), (hidden_size,), weight.double(), bias.double(), EPSILON)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=5e-2 if dtype is torch.bfloat16 else 5e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_gemma_keeps_a_float32_residual_for_float16(device: str) -> None:
    x, residual = (draw(3, 64, dtype=torch.float16, device=device, seed=i) for i in (0, 1))
    weight = draw(64, dtype=torch.float16, device=device, seed=2)
    out, kept = torch.empty_like(x), torch.empty(3, 64, device=device)
    pyops.gemma_rms_norm(out, x, weight, EPSILON, residual, kept)
    assert torch.equal(kept, x.float() + residual.float())
    close(out, rms64(kept) * (1 + weight.double()), roundings=1)
    with pytest.raises(pyops.OpError, match=r"^gemma_rms_norm: residual_out: expected dtype float32, got float16$"):
        pyops.gemma_rms_norm(out, x, weight, EPSILON, residual, torch.empty_like(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_points_of_norms(dtype: torch.dtype, device: str) -> None:
    """A root mean square of 3 gives quotients that must be rounded: before the weight, or for Gemma only after it."""
    hidden_size = 768
    x = torch.tensor([1.0, 5.0, -1.0], dtype=dtype, device=device).repeat(7, hidden_size // 3)
    weight = draw(hidden_size, dtype=dtype, device=device, seed=1)
    out = torch.empty_like(x)
    pyops.rms_norm(out, x, weight, 0.0)
    assert torch.equal(out, (x.double() / 3).to(dtype) * weight)
    pyops.gemma_rms_norm(out, x, weight, 0.0)
    exact = x.double() / 3 * (1 + weight.double())
    half_unit = torch.exp2(torch.frexp(exact)[1].double()) * torch.finfo(dtype).eps / 4
    assert ((out - exact).abs() <= 1.01 * half_unit).all()


@pytest.mark.parametrize("device", DEVICES)
def test_norms_use_the_rounded_residual_sum(device: str) -> None:
    """In bfloat16 both 256 + 1 and 256 + 0 are 256, so the norm of the sum is 1, and the result is the weight."""
    shape, dtype = (7, 768), torch.bfloat16
    x, residual = (torch.full(shape, value, dtype=dtype, device=device) for value in (1.0, 256.0))
    x[:, ::2] = 0.0
    weight = draw(768, dtype=dtype, device=device, seed=1)
    y, total, kept = x.clone(), residual.clone(), torch.empty_like(x)
    pyops.fused_add_rms_norm(y, total, weight, 0.0)
    assert torch.equal(y, weight.expand(shape))
    assert torch.equal(total, residual)
    pyops.gemma_rms_norm(y, x, weight, 0.0, residual, kept)
    assert torch.equal(y, (1 + weight.float()).to(dtype).expand(shape))
    assert torch.equal(kept, residual)
    quantized = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    pyops.fused_add_rms_norm_static_fp8_quant(quantized, x, total, weight, torch.ones(1, device=device), 0.0)
    assert torch.equal(quantized.view(torch.uint8), weight.to(quantized.dtype).expand(shape).view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_gated_groups_match_float64(activation: str, is_rms: bool, groups: int, before: bool, device: str) -> None:
    tokens, hidden_size = 5, 512
    x, z = (draw(tokens, hidden_size, dtype=torch.bfloat16, device=device, seed=i, shift=0.3) for i in (0, 1))
    weight, bias = (draw(hidden_size, dtype=torch.bfloat16, device=device, seed=i) for i in (2, 3))
    out = torch.empty_like(x)
    mean, rstd = (torch.empty(groups * tokens, device=device) for _ in range(2))
    size = hidden_size // groups
    if is_rms:
        pyops.rms_norm_gated(out, x, weight, EPSILON, z, bias, rstd, size, before, activation)
    else:
        pyops.layer_norm(out, x, weight, bias, EPSILON, z, mean, rstd, size, before, activation)
    gate = torch.sigmoid(z.double()) * (1.0 if activation == "sigmoid" else z.double())
    value = x.double() if before else x.double() * gate
    value = value.unflatten(-1, (groups, size))
    m = torch.zeros_like(value[..., :1]) if is_rms else value.mean(-1, keepdim=True)
    r = ((value - m).square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    expected = ((value - m) * r).flatten(-2) * weight.double() + bias.double()
    expected = expected * gate if before else expected
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-7, atol=1e-2)
    torch.testing.assert_close(rstd.double().view(groups, tokens), r[..., 0].t(), rtol=1e-5, atol=0)
    if not is_rms:
        torch.testing.assert_close(mean.double().view(groups, tokens), m[..., 0].t(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 8])
def test_norm_of_mixer2_matches_float64(groups: int, dtype: torch.dtype, device: str) -> None:
    """For gates of any size, where approximations of the exponential could fail."""
    x = draw(9, 512, dtype=dtype, device=device, seed=0)
    gate = (
        draw(9, 512, dtype=dtype, device=device, seed=1)
        * torch.tensor([1.0, 20.0, 200.0], device=device).repeat(3)[:, None]
    )
    weight = draw(512, dtype=dtype, device=device, seed=2)
    gate = gate.to(dtype)
    out = pyops.mixer2_gated_rms_norm(x, gate, weight, EPSILON, groups)
    v = (x.double() * torch.nn.functional.silu(gate.double())).unflatten(-1, (groups, -1))
    right = (v * (v.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).flatten(-2) * weight.double()
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 4e-6
    torch.testing.assert_close(out.double(), right, rtol=rounding, atol=1e-6)
    with pytest.raises(pyops.OpError, match=r"^mixer2_gated_rms_norm: n_groups: expected a divisor of hidden_size"):
        pyops.mixer2_gated_rms_norm(x, gate, weight, EPSILON, 5)


def test_names_of_gate_activations() -> None:
    x, z = draw(2, 3, 64, dtype=torch.float32, device="cpu")
    swish, silu = torch.empty(2, 3, 64)
    pyops.rms_norm_gated(swish, x, None, EPSILON, z)
    pyops.rms_norm_gated(silu, x, None, EPSILON, z, activation="silu")
    assert torch.equal(swish, silu)
    for call in (pyops.rms_norm_gated, lambda out, x, *more, **how: pyops.layer_norm(out, x, None, *more, **how)):
        with pytest.raises(
            pyops.OpError, match=r'norm.*: activation: expected "swish" or "silu" or "sigmoid", got "x"'
        ):
            call(swish, x, None, EPSILON, z, activation="x")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("hidden_size", [781, 4095, 4096, 14336, 20001])
@pytest.mark.parametrize("tokens", [3, 300])
@E4M3
def test_static_quant_equals_norm_then_quantise(
    kind: torch.dtype, tokens: int, hidden_size: int, with_residual: bool, device: str
) -> None:
    """Bit for bit: the fused kernels sum in the same order as the plain ones."""
    if device == "cpu" and tokens > 3:
        pytest.skip("the reference has one order")
    x, residual = (draw(tokens, hidden_size, dtype=torch.bfloat16, device=device, seed=i) for i in (0, 1))
    weight = draw(hidden_size, dtype=torch.bfloat16, device=device, seed=2)
    scale = torch.tensor(0.013, device=device)
    quantized = torch.empty(x.shape, dtype=kind, device=device)
    if with_residual:
        y, total, kept = x.clone(), residual.clone(), residual.clone()
        pyops.fused_add_rms_norm(y, total, weight, EPSILON)
        pyops.fused_add_rms_norm_static_fp8_quant(quantized, x, kept, weight, scale, EPSILON)
        assert torch.equal(kept, total)
    else:
        y = torch.empty_like(x)
        pyops.rms_norm(y, x, weight, EPSILON)
        pyops.rms_norm_static_fp8_quant(quantized, x, weight, scale, EPSILON)
    expected = (y.float() * (1.0 / scale)).clamp(-LARGEST[kind], LARGEST[kind]).to(kind)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_static_quant_under_bad_scales(device: str) -> None:
    """Equals the op that only quantises, also for scales without a finite reciprocal."""
    x, weight = draw(3, 64, dtype=torch.bfloat16, device=device), torch.ones(64, dtype=torch.bfloat16, device=device)
    x[1] = 0.0
    y = torch.empty_like(x)
    pyops.rms_norm(y, x, weight, EPSILON)
    for value in (0.0, -0.0, 1e-40, -1e-39, float("inf"), float("nan")):
        scale = torch.tensor([value], device=device)
        quantized, right = (torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
        pyops.rms_norm_static_fp8_quant(quantized, x, weight, scale, EPSILON)
        pyops.static_scaled_fp8_quant(right, y, scale)
        assert torch.equal(quantized.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_residual", [False, True])
@E4M3
def test_static_quant_of_any_magnitude(kind: torch.dtype, with_residual: bool, device: str) -> None:
    """With rows of 1 the norm is the weight: numbers around the fp8 maximum, infinities, NaN, and values that become
    0."""
    largest, inf, nan = LARGEST[kind], float("inf"), float("nan")
    ends = [largest, largest * 33 / 32, largest * 15 / 14, largest * 2, 1e30, inf]
    weight = torch.tensor([*ends, *(-x for x in ends), nan, 0.0, -0.0, -1e-30], device=device).repeat(4)
    x, scale = torch.ones(3, 64, device=device), torch.ones(1, device=device)
    quantized = torch.empty(3, 64, dtype=kind, device=device)
    if with_residual:
        total = torch.zeros_like(x)
        pyops.fused_add_rms_norm_static_fp8_quant(quantized, x, total, weight, scale, 0.0)
    else:
        pyops.rms_norm_static_fp8_quant(quantized, x, weight, scale, 0.0)
    zero = 0x80 if kind is torch.float8_e4m3fn else 0
    right = [0x7E] * 6 + [0xFE] * 6 + [0x7E, 0, zero, zero]
    assert quantized.view(torch.uint8).tolist() == [right * 4] * 3


# The ops that normalise rows of any size.
ROWS = [
    "rms_norm",
    "fused_add_rms_norm",
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "gemma_rms_norm",
    "layer_norm",
    "rms_norm_gated",
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("hidden_size", [781, 4094, 4095, 4097, 8191, 20001, 32767])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_any_alignment(name: str, hidden_size: int, dtype: str) -> None:
    """Few rows and many: contiguous, with equal and different gaps, and misaligned from the first row."""
    op = pyops.registry[name]
    for num_tokens in (9, 150):
        sizes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "dtype": dtype}
        args = example(op, "cuda", **axes.fullest(op) | sizes)
        results = expected(op, args)
        tensors = list(named(op, args))
        packed = run_accepted(op, args, {})
        assert_results(op, results, packed)
        assert_same(op, run_in_place(op, args), packed)
        for layouts in (
            dict.fromkeys(tensors, Layout(gap=3)),
            {tensor: Layout(gap=1 + 8 * i) for i, tensor in enumerate(tensors)},
            {tensor: Layout(gap=i) for i, tensor in enumerate(tensors)},
            {tensors[-1]: Layout(offset=1)},
            dict.fromkeys(tensors, Layout(offset=1)),
        ):
            assert_results(op, results, run_accepted(op, args, layouts))


@pytest.mark.parametrize(
    ("hidden_size", "gaps", "alignment", "vec_size", "shifted"),
    [
        (4095, (0, 0), 16, 8, True),
        (4095, (3, 3), 16, 8, True),
        (4096, (1, 9), 16, 8, True),
        (769, (0, 0), 16, 8, True),
        (4095, (0, 1), 16, 1, False),
        (4095, (0, 0), 8, 1, False),
        (4100, (0, 0), 8, 4, False),
        (4096, (0, 0), 16, 8, False),
        (257, (0, 0), 16, 1, False),
    ],
)
def test_shifted_rows(hidden_size: int, gaps: tuple[int, int], alignment: int, vec_size: int, shifted: bool) -> None:
    """Vectors are shifted only if all tensors begin aligned, and their rows have the same misalignment."""
    op = pyops.registry["rms_norm"]
    assert op.example is not None
    out, x, weight, epsilon = op.example(ArgMaker(devices.model()), hidden_size=hidden_size)
    out, x = (
        replace(arg, strides=(hidden_size + gap, 1), alignment=alignment)
        for arg, gap in zip((out, x), gaps, strict=True)
    )
    (launch,) = op.launches(out, x, weight, epsilon)
    constants = launch.specialisation.constants
    assert (constants["VEC_SIZE"], constants.get("SHIFTED")) == (vec_size, "true" if shifted else None)


@pytest.mark.parametrize(
    ("name", "arch", "hidden_size", "bounded"),
    [
        ("rms_norm_dynamic_per_token_quant", "sm_90", 4095, True),
        ("rms_norm_dynamic_per_token_quant", "sm_100", 4095, False),
        ("rms_norm_dynamic_per_token_quant", "sm_100", 4096, True),
        ("rms_norm", "sm_100", 4095, True),
    ],
)
def test_registers_are_bounded_unless_the_kernel_would_spill(
    name: str, arch: str, hidden_size: int, bounded: bool
) -> None:
    op = pyops.registry[name]
    assert op.example is not None
    (launch,) = op.launches(*op.example(ArgMaker(devices.model(arch)), num_tokens=4096, hidden_size=hidden_size))
    assert (launch.specialisation.constants["MIN_BLOCKS"] > 1) == bounded


def codes_of(y: torch.Tensor, absmax: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values and scales from float64 quotients, rounded as the specification says."""
    largest = 127.0 if dtype is torch.int8 else LARGEST[dtype]
    smallest = 2.0**-23 if dtype is torch.int8 else 1 / (largest * 512)
    scale = (absmax.double() / largest).float().clamp_min(smallest)
    if dtype is torch.int8:
        product = (y.double() * (1.0 / scale.double()).float().double()).float()
        return product.round().clamp(-128, 127).to(torch.int8), scale
    return (y.double() / scale.double()).float().clamp(-largest, largest).to(dtype), scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quant_dtype", [*LARGEST, torch.int8])
@pytest.mark.parametrize("group_size", [None, 64, 128])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hidden_size", [1024, 640])  # not a multiple of the elements that a row's threads hold
def test_dynamic_quant_is_exact(
    hidden_size: int, transposed: bool, group_size: int | None, quant_dtype: torch.dtype, device: str
) -> None:
    """With rows of +-1 and a weight the norm equals the weight, so quantized values and scales have one right value."""
    tokens = 7
    x = draw(tokens, hidden_size, dtype=torch.float32, device=device).sign().bfloat16()
    weight = draw(hidden_size, dtype=torch.bfloat16, device=device, seed=1)
    y = x.float() * weight.float()
    quantized = torch.empty(x.shape, dtype=quant_dtype, device=device)
    if group_size is None:
        scale = torch.empty(tokens, 1, device=device)
        pyops.rms_norm_dynamic_per_token_quant(quantized, x, weight, scale, 0.0)
        expected, scales = codes_of(y, y.abs().amax(-1, keepdim=True), quant_dtype)
    else:
        groups = hidden_size // group_size
        scale = (
            torch.empty(groups, tokens, device=device).t() if transposed else torch.empty(tokens, groups, device=device)
        )
        pyops.rms_norm_per_block_quant(quantized, x, weight, scale, 0.0, None, None, group_size, transposed)
        parts = y.unflatten(-1, (groups, group_size))
        expected, scales = codes_of(parts, parts.abs().amax(-1, keepdim=True), quant_dtype)
        expected, scales = expected.flatten(-2), scales[..., 0]
    assert torch.equal(scale, scales)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@E4M3
def test_dynamic_quant_of_nan_and_zeros(kind: torch.dtype, device: str) -> None:
    """The absmax ignores NaN, which becomes the fp8 maximum; rows of zeros take the smallest scale."""
    x = torch.ones(3, 64, device=device)
    x[2] = 0.0
    weight = torch.ones(64, device=device)
    weight[1] = 2.0
    weight[3] = weight[5] = float("nan")
    quantized, largest = torch.empty(3, 64, dtype=kind, device=device), LARGEST[kind]
    scale = torch.empty(3, device=device)
    pyops.rms_norm_dynamic_per_token_quant(quantized, x, weight, scale, 1e-6)
    assert quantized.float()[:, 5].tolist() == [largest, largest, largest]
    assert quantized.float()[0, :2].tolist() == [largest / 2, largest]
    assert scale[2].item() == pytest.approx(1 / (largest * 512), rel=1e-7)
    eights = torch.empty(3, 64, dtype=torch.int8, device=device)
    pyops.rms_norm_dynamic_per_token_quant(eights, x, weight, scale, 1e-6)
    assert eights[:, 5].tolist() == [0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("quant_dtype", "bound"),
    [("int8", False), *((dtype, bound) for dtype in ("float8_e4m3fn", "float8_e4m3fnuz") for bound in (False, True))],
)
@pytest.mark.parametrize("extreme", [1e36, float("inf")])
def test_dynamic_quant_of_extreme_weights(extreme: float, quant_dtype: str, bound: bool, device: str) -> None:
    """Weights that are infinite, or become infinite when divided by their scale, of either sign."""
    op = pyops.registry["rms_norm_dynamic_per_token_quant"]
    args = example(op, device, dtype="float32", hidden_size=256, quant_dtype=quant_dtype, with_bound=bound)
    if bound:
        named(op, args)["scale_ub"].fill_(1e-3)
    named(op, args)["weight"][::50] = extreme
    assert_results(op, expected(op, args), run(op, args))


@pytest.mark.parametrize("device", DEVICES)
def test_int8_ties_round_to_even(device: str) -> None:
    """With an absmax of 127 the scale is 1, and halves are ties."""
    weight = torch.arange(-127.0, 128.0, device=device) / 2
    weight = torch.cat((weight, weight.new_tensor([127.0])))
    quantized = torch.empty(1, 256, dtype=torch.int8, device=device)
    scale = torch.empty(1, device=device)
    pyops.rms_norm_dynamic_per_token_quant(quantized, torch.ones(1, 256, device=device), weight, scale, 0.0)
    assert scale.item() == 1.0
    assert torch.equal(quantized[0], weight.round().to(torch.int8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bound", [0.25, -1.0])
@E4M3
def test_scale_ub_caps_the_scale(kind: torch.dtype, bound: float, device: str) -> None:
    """scale_ub caps the scale, down to the smallest one; larger values saturate."""
    x = draw(4, 256, dtype=torch.float32, device=device).sign()
    weight = draw(256, dtype=torch.float32, device=device, seed=1)
    quantized = torch.empty(4, 256, dtype=kind, device=device)
    scale = torch.empty(4, 1, device=device)
    pyops.rms_norm_dynamic_per_token_quant(quantized, x, weight, scale, 0.0, torch.tensor([bound], device=device))
    expected, scales = codes_of(x * weight, torch.full((4, 1), bound, device=device), kind)
    assert torch.equal(scale, scales)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [128, 64, 20])
@pytest.mark.parametrize("tokens", [4, 200])
def test_qk_norm_rope_matches_complex_rotation(tokens: int, rotary_dim: int, is_neox: bool, device: str) -> None:
    heads, head_dim, positions = (5, 2, 3), 128, 50
    qkv = draw(tokens, sum(heads) * head_dim, dtype=torch.float16, device=device)
    q_weight, k_weight = (draw(head_dim, dtype=torch.float16, device=device, seed=i, shift=1.0) for i in (1, 2))
    angle = draw(positions, rotary_dim // 2, dtype=torch.float32, device=device, seed=3)
    cache = torch.cat((angle.cos(), angle.sin()), -1)
    ids = torch.arange(tokens, device=device) % (positions + 2) - 1  # the first and some others are out of range
    if is_neox:  # any stride
        ids = torch.stack((torch.full_like(ids, 3), ids), 1)[:, 1]
    before = qkv.clone()
    pyops.fused_qk_norm_rope(qkv, *heads, head_dim, EPSILON, q_weight, k_weight, cache, is_neox, ids)

    x = before.double().unflatten(-1, (-1, head_dim))
    weight = torch.stack([q_weight] * heads[0] + [k_weight] * heads[1]).double()
    n = rms64(x[:, : heads[0] + heads[1]]) * weight
    inside = (ids >= 0) & (ids < positions)
    turn = torch.polar(torch.ones_like(angle), angle).cdouble()[ids.where(inside, 0)].unsqueeze(1)
    part = n[..., :rotary_dim]
    pair = part.chunk(2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
    turned = torch.complex(*pair) * turn
    part = torch.cat((turned.real, turned.imag), -1) if is_neox else torch.view_as_real(turned).flatten(-2)
    expected = torch.cat((part, n[..., rotary_dim:]), -1)
    after = qkv.unflatten(-1, (-1, head_dim))
    torch.testing.assert_close(after[inside][:, : heads[0] + heads[1]].double(), expected[inside], rtol=2e-3, atol=2e-3)
    assert torch.equal(after[~inside], before.unflatten(-1, (-1, head_dim))[~inside])
    assert torch.equal(after[:, heads[0] + heads[1] :], before.unflatten(-1, (-1, head_dim))[:, heads[0] + heads[1] :])


def test_weight_may_be_a_row_of_the_input() -> None:
    """Only written tensors may share no memory."""
    x = torch.randn(3, 16)
    out = torch.empty_like(x)
    pyops.rms_norm(out, x, x[0], 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (16,), x[0], 1e-6))
    with pytest.raises(pyops.OpError, match="out: is written, but shares memory with input"):
        pyops.rms_norm(x[:2], x[1:], None, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_of_heads_in_a_fused_projection(device: str) -> None:
    """Query heads as a strided view, in three and four dimensions, without a copy."""
    qkv = draw(6, 10, 128, dtype=torch.bfloat16, device=device)
    weight = draw(128, dtype=torch.bfloat16, device=device, seed=1)
    query = qkv[:, 2:7]
    out = torch.empty(query.shape, dtype=query.dtype, device=device)
    pyops.rms_norm(out, query, weight, EPSILON)
    close(out, rms64(query, weight))
    pyops.rms_norm(query, query, weight, EPSILON)
    assert torch.equal(query, out)
    deep = draw(2, 4, 10, 128, dtype=torch.bfloat16, device=device)[:, :3, 2:7]
    out = torch.empty(deep.shape, dtype=deep.dtype, device=device)
    pyops.rms_norm(out, deep, weight, EPSILON)
    close(out, rms64(deep, weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("is_scale_transposed", [False, True])
def test_per_block_quant_scales_of_any_stride(is_scale_transposed: bool, groups: int, device: str) -> None:
    """Scales have any row stride, and any column stride, because TMA wants columns to begin at multiples of 16
    bytes."""
    tokens, width = 5, 128 * groups
    x, weight = (draw(*shape, dtype=torch.bfloat16, device=device) for shape in ((tokens, width), (width,)))

    def quantised(scale: torch.Tensor) -> torch.Tensor:
        quantized = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=device)
        pyops.rms_norm_per_block_quant(quantized, x, weight, scale, EPSILON, None, None, 128, is_scale_transposed)
        return quantized.view(torch.uint8)

    shape = (groups, tokens) if is_scale_transposed else (tokens, groups)
    packed, memory = torch.empty(shape, device=device), torch.full((shape[0], 8), -1.0, device=device)
    apart = memory[:, : shape[1]]
    if is_scale_transposed:
        assert torch.equal(quantised(packed.t()), quantised(apart.t()))
    else:
        assert torch.equal(quantised(packed), quantised(apart))
    assert torch.equal(packed, apart)
    assert (memory[:, shape[1] :] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_per_block_quant_scales_by_groups(rows: int, device: str) -> None:
    """Transposed scales may be [groups, tokens], contiguous, also where both counts are equal."""
    x = draw(rows, 256, dtype=torch.bfloat16, device=device)
    weight = draw(256, dtype=torch.bfloat16, device=device)
    quantized = torch.empty(rows, 256, dtype=torch.int8, device=device)
    scale, transposed = torch.empty(rows, 2, device=device), torch.zeros(2, rows, device=device)
    pyops.rms_norm_per_block_quant(quantized, x, weight, scale, EPSILON, None, None, 128, False)
    pyops.rms_norm_per_block_quant(quantized, x, weight, transposed, EPSILON, None, None, 128, True)
    assert torch.equal(transposed.t(), scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 32}, "group_size: expected 64 or 128, got 32"),
        ({"width": 96}, "input: expected a last dimension that is a multiple of group_size=64, got 96"),
        (
            {"transposed": True, "scale": torch.empty(2, 4)[:, :2]},
            "scale: expected tokens of stride 1 with is_scale_transposed=True, got strides (4, 1)",
        ),
        (
            {"scale": torch.empty(2, 2).t()},
            "scale: expected groups of stride 1 with is_scale_transposed=False, got strides (1, 2)",
        ),
        ({"scale": torch.empty(2, 3)}, "scale: expected shape (num_tokens=2, groups=2), got (2, 3)"),
        ({"bound": True}, "scale_ub: is only taken with a result of fp8, got int8"),
    ],
)
def test_per_block_quant_refused(change: dict[str, Any], message: str) -> None:
    width, group_size = change.get("width", 128), change.get("group_size", 64)
    x = torch.ones(2, width)
    bound = torch.ones(1) if change.get("bound") else None
    with pytest.raises(pyops.OpError) as caught:
        pyops.rms_norm_per_block_quant(
            torch.empty(2, width, dtype=torch.int8),
            x,
            torch.ones(width),
            change.get("scale", torch.empty(2, max(1, width // 64))),
            EPSILON,
            bound,
            None,
            group_size,
            change.get("transposed", False),
        )
    assert str(caught.value) == f"rms_norm_per_block_quant: {message}"


def test_rows_beyond_32_bit_counts_are_refused() -> None:
    row = ArgMaker(devices.model()).empty(1, 2**30 + 8, dtype="bfloat16")
    vectors = geometry.row_vectors(2**30 + 8, (2**30 + 8,), row)
    with pytest.raises(pyops.OpError, match=r"expected rows of at most 2\^30 elements"):
        geometry.choose_rows(row, 1, vectors, RMS_NORM)


@pytest.mark.parametrize(("wanted_vecs", "threads"), [(4, 448), (6, 320), (7, 256)])
def test_measured_shapes_for_rows_of_14336(wanted_vecs: int, threads: int) -> None:
    """docs/performance/rows.md: 448 threads of 4 vectors, 320 of 6 or 256 of 7."""
    assert geometry.threads_for_row(14336 // 8, wanted_vecs, wanted_vecs + 2) == threads


@pytest.mark.parametrize("measured", [RMS_NORM, FUSED_ADD_RMS_NORM])
@pytest.mark.parametrize("hidden_size", [1024, 4096, 5120, 7168, 8192, 14336])
def test_weight_is_read_early_while_an_sm_holds_all_its_rows(hidden_size: int, measured: geometry.RowTuning) -> None:
    """With a row more for each SM, rows wait for others, and the measured geometry for many rows is taken."""
    device = devices.model()
    row = ArgMaker(device).empty(1, hidden_size, dtype="bfloat16")
    vectors = geometry.row_vectors(hidden_size, (hidden_size,), row)
    found = {n: geometry.choose_rows(row, n * device.num_sms, vectors, measured) for n in range(1, 65)}
    many = found.pop(64)
    held = {n: one for n, one in found.items() if one != many}
    assert list(held) == list(range(1, len(held) + 1))
    for n, one in held.items():
        assert one.keep_weight
        rows = one.min_blocks * (one.num_threads // one.row_threads)
        assert n <= max(rows, 1)
        registers = 65536 // (one.min_blocks * one.num_threads) // 8 * 8
        vecs = -(-(hidden_size // 8) // one.row_threads)
        assert registers >= 24 + (measured.rows + 1) * vecs * 4 or n == 1


@pytest.mark.parametrize(
    ("measured", "hidden_size", "num_rows", "expected"),
    [
        (RMS_NORM, 4096, 528, (256, True, 5)),
        (RMS_NORM, 4096, 777, (128, True, 8)),
        (RMS_NORM, 4096, 4096, (128, True, 8)),
        (RMS_NORM, 5120, 777, (128, True, 6)),
        (RMS_NORM, 5120, 793, (128, False, 7)),
        (FUSED_ADD_RMS_NORM, 4096, 777, (128, True, 6)),
        (FUSED_ADD_RMS_NORM, 4096, 1000, (128, False, 9)),
    ],
)
def test_geometry_of_rows(measured: geometry.RowTuning, hidden_size: int, num_rows: int, expected: Any) -> None:
    """(threads, whether the weight is kept, blocks) on 132 SMs."""
    row = ArgMaker(devices.model()).empty(num_rows, hidden_size, dtype="bfloat16")
    vectors = geometry.row_vectors(hidden_size, (hidden_size,), row)
    config = geometry.choose_rows(row, num_rows, vectors, measured)
    assert (config.num_threads, config.keep_weight, config.min_blocks) == expected


@pytest.mark.parametrize("num_rows", [1, 200, 500, 777, 1200, 4096])
@pytest.mark.parametrize("hidden_size", [64, 769, 4096, 5120, 14336, 32768])
def test_static_quant_splits_rows_like_the_norms(hidden_size: int, num_rows: int) -> None:
    """So that sums agree bit for bit."""
    row = ArgMaker(devices.model()).empty(num_rows, hidden_size, dtype="bfloat16")
    vectors = geometry.row_vectors(hidden_size, (hidden_size,), row)
    for tuning, other in ((RMS_NORM, _WITHOUT_RESIDUAL), (FUSED_ADD_RMS_NORM, _WITH_RESIDUAL)):
        one = geometry.choose_rows(row, num_rows, vectors, tuning)
        two = geometry.choose_rows(row, num_rows, vectors, other, bound_registers=False)
        assert (one.vec_size, one.shifted, one.row_threads) == (two.vec_size, two.shifted, two.row_threads)


def test_choice_is_made_once_and_printed() -> None:
    """A plan miss looks it up; the config of a kernel that cannot bound its registers differs in one field."""
    row = ArgMaker(devices.model()).empty(4096, 4096, dtype="bfloat16")
    vectors = geometry.row_vectors(4096, (4096,), row)
    config = geometry.choose_rows(row, 4096, vectors, RMS_NORM)
    assert config is geometry.choose_rows(row, 4000, vectors, RMS_NORM)
    assert repr(config) == (
        "RowConfig(vec_size=8, shifted=False, num_threads=128, row_threads=128, keep_row=True, keep_weight=True, "
        "min_blocks=8)"
    )
    assert geometry.choose_rows(row, 4096, vectors, RMS_NORM, bound_registers=False) == replace(config, min_blocks=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("present", ["neither", "weight", "bias"])
def test_layer_norm_without_weight_or_bias(present: str, device: str) -> None:
    x = draw(5, 256, dtype=torch.float32, device=device, seed=0, shift=0.3)
    vectors = {name: draw(256, dtype=torch.float32, device=device, seed=i) for i, name in enumerate(("weight", "bias"))}
    given = {name: vector if name == present else None for name, vector in vectors.items()}
    out = torch.empty_like(x)
    pyops.layer_norm(out, x, epsilon=EPSILON, **given)
    exact = {name: vector if vector is None else vector.double() for name, vector in given.items()}
    expected = torch.nn.functional.layer_norm(x.double(), (256,), **exact, eps=EPSILON)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)
