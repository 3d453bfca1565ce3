"""The quantising ops against float64: codes and scales are exact, whatever the contents, the strides and the scale."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops._core import config, dtypes
from pyops._core import device as devices
from pyops._core.example import ArgMaker
from pyops.ops._shared.fp8 import converts_fp8, native_fp8, own_fp8
from pyops.ops.quantize import scaled
from pyops.testing import CONTENTS, Layout, filled, strategies
from tests.calls import DEVICES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8, FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
LARGEST = {FP8: 448.0, FNUZ: 224.0}
LIMITS = {FP8: (-448.0, 448.0), FNUZ: (-224.0, 224.0), INT8: (-128.0, 127.0)}
E4M3 = pytest.mark.parametrize("kind", LARGEST)


@pytest.fixture(autouse=True)
def _quietly() -> Any:
    """Divisions by zero and overflows are part of the truth."""
    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * 8).to(dtype)


def new(shape: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory to be written, of bytes that are no right answer."""
    size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.full((size,), 0x55, dtype=torch.uint8, device=device).view(dtype).view(shape)


# The truth, in numpy: float64 arithmetic, rounded to float32 where the definition does.


def exact(x: Any) -> Any:
    return (x.detach().cpu().double().numpy() if isinstance(x, torch.Tensor) else numpy.asarray(x)).astype("float64")


def f32(x: Any) -> Any:
    """float64 values rounded to float32. (A quotient or product of two float32 is then rounded as if once.)"""
    return numpy.asarray(x, "float64").astype("float32").astype("float64")


# The value of every code of e4m3fn without a sign; of e4m3fnuz, whose bias is one more, it is half as much.
_VALUES = numpy.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
)


def nearest(x: Any, values: Any) -> tuple[Any, Any]:
    """(the index of the nearest of these magnitudes, ties to the even one, saturating; whether x is negative)."""
    magnitude = numpy.minimum(numpy.nan_to_num(numpy.abs(x), nan=0.0, posinf=values[-1]), values[-1])
    above = numpy.searchsorted(values, magnitude)
    below = numpy.maximum(above - 1, 0)
    to_below, to_above = magnitude - values[below], values[above] - magnitude
    code = numpy.where(to_below < to_above, below, above)
    code = numpy.where((to_below == to_above) & (below % 2 == 0), below, code)
    return code, numpy.signbit(x)


def fp8(x: Any, nan: int = 0x7E, kind: torch.dtype = FP8) -> Any:
    """Codes of e4m3; those of e4m3fnuz up to the type's own largest."""
    code, negative = nearest(x, _VALUES[:127] if kind is FP8 else _VALUES / 2)
    if kind is FNUZ:
        negative &= code != 0
    return numpy.where(numpy.isnan(x), nan, code | (negative << 7)).astype("uint8")


def int8(x: Any) -> Any:
    """To nearest even, saturating; NaN is 0."""
    return numpy.clip(numpy.rint(numpy.nan_to_num(x, nan=0.0)), -128, 127).astype("int8")


def int32(x: Any) -> Any:
    """To nearest even, saturating; NaN is 0. As int64."""
    return numpy.clip(numpy.rint(numpy.nan_to_num(x, nan=0.0)), -(2.0**31), 2.0**31 - 1).astype("int64")


def absmax(x: Any) -> Any:
    return numpy.nan_to_num(numpy.abs(x), nan=0.0, posinf=numpy.inf).max(-1, keepdims=True)


def saturated(x: Any, kind: torch.dtype) -> Any:
    """Codes of e4m3 that are no larger than quantisation makes them."""
    return fp8(numpy.clip(x, -LARGEST[kind], LARGEST[kind]), kind=kind)


def static_fp8(x: Any, scale: Any, kind: torch.dtype = FP8) -> Any:
    reciprocal = f32(1.0 / f32(scale))
    return saturated(f32(x * numpy.where(numpy.isinf(reciprocal), 0.0, reciprocal)), kind)


def static_int8(x: Any, scale: Any, azp: int | None) -> Any:
    if azp is None:
        return int8(f32(x / f32(scale)))
    return numpy.clip(int32(f32(x * f32(1.0 / f32(scale)))) + azp, -128, 127).astype("int8")


def token_fp8(x: Any, bound: float | None, kind: torch.dtype = FP8) -> tuple[Any, Any]:
    absmax_ = absmax(x) if bound is None else numpy.fmin(absmax(x), bound)
    scale = numpy.maximum(f32(absmax_ / LARGEST[kind]), f32(1 / (LARGEST[kind] * 512)))
    return saturated(f32(x / scale), kind), scale


def token_int8(x: Any) -> tuple[Any, Any]:
    absmax_ = absmax(x)
    factor = f32(127 / absmax_)
    return int8(f32(x * numpy.where(numpy.isinf(factor), 0.0, factor))), f32(absmax_ / 127)


def token_azp(x: Any) -> tuple[Any, Any, Any]:
    """Row by row."""
    codes, scales, zeros = [], [], []
    for row in x.reshape(-1, x.shape[-1]):
        numbers = row[~numpy.isnan(row)]
        low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 0.0)
        scale = f32(f32(high - low) / 255)
        if not numpy.isfinite(f32(1 / scale)):
            low, high = min(low, 0.0), max(high, 0.0)
            scale = f32(f32(high - low) / 255)
        if numpy.isinf(f32(1 / scale)):
            scale = numpy.float64(1.0)
        zero = int32(f32(-128 - f32(low / scale)))
        codes.append(numpy.clip(int32(f32(row * f32(1 / scale))) + zero, -128, 127).astype("int8"))
        scales.append(scale)
        zeros.append(zero)
    return numpy.array(codes), numpy.array(scales)[:, None], numpy.array(zeros)[:, None]


def grouped(
    x: Any,
    size: int,
    dtype: torch.dtype,
    power_of_two: bool = False,
    eps: float = 1e-10,
    limits: Any = None,
    rounded: Any = numpy.trunc,
) -> tuple[Any, Any]:
    low, high = limits or LIMITS[dtype]
    groups = x.reshape(-1, x.shape[-1] // size, size)
    scale = f32(numpy.maximum(absmax(groups), f32(eps)) / high)
    if power_of_two:
        mantissa, exponent = numpy.frexp(numpy.maximum(scale, f32(1e-10)))  # 0.5 is a power of two, 0.75 is none
        scale = numpy.where(numpy.isinf(scale), scale, numpy.ldexp(1.0, exponent - (mantissa == 0.5)))
    quotient = f32(groups / scale)
    y = numpy.where(numpy.isnan(quotient), low, numpy.clip(quotient, low, high)).reshape(x.shape)
    return (rounded(y).astype("int8") if dtype is INT8 else fp8(y, kind=dtype)), scale[..., 0]


def same(actual: torch.Tensor, expected: Any) -> None:
    """Codes by their bits; scales as numbers."""
    found = actual.cpu()
    if found.dtype in LARGEST:
        found = found.view(torch.uint8)
    wanted = numpy.asarray(expected).reshape(tuple(actual.shape))
    wrong = numpy.argwhere(
        ~numpy.equal(exact(found), wanted.astype("float64"))
        & ~(numpy.isnan(exact(found)) & numpy.isnan(wanted.astype("float64")))
    )
    assert not len(wrong), (
        f"{len(wrong)} of {found.numel()}, the first at {wrong[0]}: "
        f"expected {wanted[tuple(wrong[0])]}, got {exact(found)[tuple(wrong[0])]}"
    )


# Under given scales


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ((8, 512), (-1, -1)),
        ((8, 512), (-1, 1)),
        ((8, 512), (1, -1)),
        ((8, 512), (-1, 128)),
        ((8, 512), (1, 128)),
        ((8, 512), (4, 128)),
        ((8, 256), (1, 16)),
        ((8, 512), (4, 256)),
        ((8, 512), (2, 4)),
        ((6, 33), (3, 11)),
        ((6, 33), (2, -1)),
        ((1, 64), (1, 1)),
    ],
)
def test_static_fp8_groups(shape: tuple[int, int], group: tuple[int, int], device: str) -> None:
    """A scale for each block, given in two dimensions and, where it can be, in one; of any strides."""
    x = draw(*shape, device=device)
    rows, columns = (full if size == -1 else size for size, full in zip(group, shape, strict=True))
    scale = draw(shape[0] // rows, shape[1] // columns, dtype=torch.float32, device=device, seed=1) * 0.01
    right = static_fp8(exact(x), exact(scale).repeat(rows, 0).repeat(columns, 1))
    ways: list[tuple[torch.Tensor, Any]] = [(scale, None), (scale, group), (scale.t().contiguous().t(), group)]
    if 1 in scale.shape:
        ways += [(scale.reshape(-1), group), (torch.stack((scale, scale), -1)[..., 0].reshape(-1), group)]
        ways += [(scale.reshape(-1).repeat_interleave(2)[::2], group)]
    for given_scale, group_shape in ways:
        result = new(shape, FP8, device)
        pyops.static_scaled_fp8_quant(result, x, given_scale, group_shape)
        same(result, right)
    as_bytes = new(shape, torch.uint8, device)
    pyops.static_scaled_fp8_quant(as_bytes, x, scale, group)
    same(as_bytes, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gap", [0, 16, 8])
def test_static_fp8_of_many_rows(gap: int, dtype: torch.dtype, small: devices.Device) -> None:
    """As many as fill a device, which here is a small one: a thread reads two vectors where codes have wide ones."""
    op = pyops.registry["static_scaled_fp8_quant"]
    x = Layout(gap=gap).place(draw(70, 512, dtype=dtype))
    result, scale = (
        Layout(gap=gap).place(new(x.shape, FP8, "cpu")),
        draw(70, 1, dtype=torch.float32, seed=1).abs() + 0.1,
    )
    with config.cpu("kernels"):
        op.wrapper(result, x, scale, (1, -1))
        _, (launch,) = op.check(result, x, scale, (1, -1))
    assert launch.specialisation.constants["VEC_SIZE"] == (8 if dtype is torch.float32 or gap == 8 else 16)
    same(result, static_fp8(exact(x), exact(scale)))


@pytest.mark.parametrize("device", DEVICES)
def test_static_fp8_rows_apart(device: str) -> None:
    """Rows of one stride, packed or not, of three dimensions, aligned or not, of sizes that vectors divide or not."""
    for size in (64, 65):
        for layout in (Layout(), Layout(gap=8), Layout(gap=3), Layout(offset=1)):
            x = draw(2, 3, size, device=device)
            scale = draw(6, 1, dtype=torch.float32, device=device, seed=1)
            result = layout.place(new(x.shape, FP8, device))
            pyops.static_scaled_fp8_quant(result, layout.place(x), scale, (1, -1))
            same(result, static_fp8(exact(x).reshape(6, size), exact(scale)))


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40]
BAD = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), -0.5, 1e-45, -1e-39, 2.9e-39, 3e-39, 1e-20, 1e30, 3e38]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@E4M3
def test_static_fp8_of_every_value(kind: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """Every bit pattern of two bytes under scales that reach all codes, saturate, and make ties."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(256, 256).to(device)
    for scale in (1.0, 0.5, -3.0, 0.0371, 2.0**-9, 2.0**20):
        codes = new(x.shape, kind, device)
        pyops.static_scaled_fp8_quant(codes, x, torch.tensor(scale, device=device))
        same(codes, static_fp8(exact(x), exact(torch.tensor(scale)), kind))


@pytest.mark.parametrize("device", DEVICES)
def test_fnuz_at_its_limits(device: str) -> None:
    """Saturated at 224, though the type goes on to 240; nothing is -0 or, but by NaN of the input, NaN."""
    tiny = 2.0**-11  # half of the smallest number
    values = [
        224.0,
        231.0,
        232.0,
        233.0,
        240.0,
        1e9,
        float("inf"),
        float("nan"),
        1.5 * tiny,
        tiny,
        0.9 * tiny,
        1e-40,
        0.0,
    ]
    x = torch.tensor([values, [-value for value in values]], device=device)
    codes = new(x.shape, FNUZ, device)
    pyops.static_scaled_fp8_quant(codes, x, torch.ones(1, device=device))
    plus, minus = codes.view(torch.uint8).tolist()
    assert plus == [0x7E] * 8 + [1] + [0] * 4
    assert minus == [0xFE] * 7 + [0x7E, 0x81] + [0] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", BAD)
@E4M3
def test_bad_scales(kind: torch.dtype, scale: float, device: str) -> None:
    """Zero, negative, infinite, NaN and subnormal ones, for all kinds of values; -0 keeps its sign."""
    x = torch.tensor(SPECIAL, device=device)
    s = torch.tensor([scale], device=device)
    codes, eights = new(x.shape, kind, device), new(x.shape, INT8, device)
    pyops.static_scaled_fp8_quant(codes, x, s)
    same(codes, static_fp8(exact(x), exact(s), kind))
    if scale == 0.0:
        assert codes.float()[:8].tolist() == [0.0] * 8
    for azp in (None, 54):
        zero = None if azp is None else torch.tensor(azp, dtype=torch.int32, device=device)
        pyops.static_scaled_int8_quant(eights, x, s, zero)
        same(eights, static_int8(exact(x), exact(s), azp))
    if scale == 0.0:
        pyops.static_scaled_int8_quant(eights, x.abs(), s.abs(), None)
        assert eights[:3].tolist() == [0, 0, 127]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("azp", [None, -255, 54, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("scale", [0.1, 2.1])
def test_static_int8(scale: float, azp: int | None, dtype: torch.dtype, device: str) -> None:
    x = draw(7, 129, dtype=dtype, device=device) * 100
    result = new(x.shape, INT8, device)
    zero = None if azp is None else torch.tensor([azp], dtype=torch.int32, device=device)
    pyops.static_scaled_int8_quant(result, x, torch.tensor(scale, device=device), zero)
    same(result, static_int8(exact(x), exact(torch.tensor(scale)), azp))


@pytest.mark.parametrize("device", DEVICES)
def test_static_int8_saturates_at_every_step(device: str) -> None:
    """Neighbours of the ends of int32, and zero points of the same sign: nothing wraps."""
    ends = torch.tensor([2.0**31, -(2.0**31)], device=device)
    x = torch.stack([ends.nextafter(ends * 0), ends, ends.nextafter(ends * 2), ends * 1e9]).flatten()
    one, result = torch.ones((), device=device), new(x.shape, INT8, device)
    for azp in (0, 100, -100, 2**31 - 1, -(2**31)):
        pyops.static_scaled_int8_quant(result, x, one, torch.tensor(azp, dtype=torch.int32, device=device))
        same(result, static_int8(exact(x), 1.0, azp))
    assert static_int8(exact(x), 1.0, 100).tolist() == [127, -128] * 4


@pytest.mark.parametrize("device", DEVICES)
@E4M3
def test_ties(kind: torch.dtype, device: str) -> None:
    """Halfway between two codes, and the float32 numbers beside it, for every code and many scales."""
    ties8, largest = numpy.arange(-129.5, 129, 1.0), LARGEST[kind]
    ties = (_VALUES[:127] + _VALUES[1:128]) / 2 * (largest / 448)  # the last lies between 448 and what is no code
    generator = numpy.random.default_rng(0)
    few_bits = generator.integers(128, 256, 40) * 2.0**-7 + generator.integers(-3, 4, 40) * 2.0**-23
    for scale in (*few_bits, *generator.uniform(0.5, 2, 40), 2 - 2.0**-23, 1 + 2.0**-23):
        scale = float(f32(scale))
        s = torch.tensor([scale], device=device)
        near = f32(numpy.concatenate((ties8, ties, -ties)) * scale)
        beside = [numpy.nextafter(near.astype("float32"), numpy.float32(to * numpy.inf)) for to in (-1, 1)]
        x = torch.tensor(numpy.concatenate((near, *beside)), dtype=torch.float32, device=device)
        codes, eights, scales = (
            new(x.shape, kind, device),
            new(x.shape, INT8, device),
            new((1, 1), torch.float32, device),
        )
        pyops.static_scaled_fp8_quant(codes, x, s)
        same(codes, static_fp8(exact(x), scale, kind))
        pyops.static_scaled_int8_quant(eights, x, s, None)
        same(eights, static_int8(exact(x), scale, None))
        # The same values under a scale that is found: the largest of them is the largest code times it.
        absmax_ = largest * scale
        row = torch.cat((x.clamp(-absmax_, absmax_), torch.tensor([absmax_], device=device)))[None]
        codes = new(row.shape, kind, device)
        pyops.dynamic_per_token_scaled_fp8_quant(codes, row, scales, None)
        right, right_scale = token_fp8(exact(row), None, kind)
        same(scales, right_scale)
        same(codes, right)


# One scale for a tensor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 17), (7, 1024), (3, 5137), (2, 3, 64)])
@E4M3
def test_dynamic_tensor(kind: torch.dtype, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    for seed, layout in enumerate((Layout(), Layout(gap=5), Layout(offset=1))):
        x = draw(*shape, dtype=dtype, device=device, seed=seed)
        result, scale = layout.place(new(shape, kind, device)), new((1,), torch.float32, device)
        pyops.dynamic_scaled_fp8_quant(result, layout.place(x), scale)
        right = f32(absmax(exact(x).reshape(1, -1)).item() / LARGEST[kind])
        same(scale, right)
        same(result, static_fp8(exact(x), right, kind))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [570, 600])
def test_the_largest_of_a_tensor_may_be_anywhere(rows: int, device: str) -> None:
    """With more chunks than blocks, and more than one vector in flight where there are enough elements."""
    base = torch.zeros(rows, 1925, device=device)[:, : 1901 if rows == 570 else 255]
    result, scale = new(base.shape, FP8, device), new((), torch.float32, device)
    places = [(0, 0), (rows - 1, base.shape[1] - 1), (rows // 2, 77), (rows - 3, 254)]
    for row, column in places[: 2 if rows == 570 else None]:
        x = base.clone().fill_(0.5)
        x[row, column] = -896.0
        placed = base.copy_(x)
        pyops.dynamic_scaled_fp8_quant(result, placed, scale)
        assert scale.item() == 2.0
        same(result, static_fp8(exact(x), 2.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("values", "scale", "codes"),
    [
        ([0.0, -0.0, 0.0], 0.0, [0.0, 0.0, 0.0]),
        ([1e-37, -1e-37, 0.0], None, [0.0, 0.0, 0.0]),
        ([2e-36, -1e-36, 0.0], None, [448.0, -224.0, 0.0]),
        ([float("nan"), 448.0, -1.0], 1.0, [448.0, 448.0, -1.0]),
        ([float("inf"), float("-inf"), -1.0], float("inf"), [448.0, 448.0, 0.0]),
        ([float("nan"), float("nan"), float("nan")], 0.0, [448.0, 448.0, 448.0]),
    ],
)
@E4M3
def test_dynamic_tensor_of_special_values(
    kind: torch.dtype, values: list[float], scale: float | None, codes: list[float], device: str
) -> None:
    x, found = torch.tensor([values], device=device) * (LARGEST[kind] / 448), new((1,), torch.float32, device)
    result = new(x.shape, kind, device)
    pyops.dynamic_scaled_fp8_quant(result, x, found)
    assert result.float()[0].tolist() == [code * LARGEST[kind] / 448 for code in codes]
    same(found, f32(absmax(exact(x)).item() / LARGEST[kind]) if scale is None else scale)


# A scale for each token


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "hidden_size", "dtype"),
    [
        (1, 1, torch.bfloat16),
        (7, 17, torch.bfloat16),
        (7, 17, torch.float32),
        (7, 1024, torch.float16),
        (7, 1025, torch.bfloat16),
        (7, 1026, torch.float32),
        (1, 5137, torch.bfloat16),
    ],
)
@E4M3
def test_dynamic_tokens(kind: torch.dtype, tokens: int, hidden_size: int, dtype: torch.dtype, device: str) -> None:
    """fp8 with and without a bound, int8 with and without a zero point."""
    x = draw(tokens, hidden_size, dtype=dtype, device=device) + 3
    codes, eights = new(x.shape, kind, device), new(x.shape, INT8, device)
    scale, azp = new((tokens, 1), torch.float32, device), new((tokens, 1), torch.int32, device)
    for bound in (None, 5.0, -1.0, float("nan"), float("inf")):
        limit = None if bound is None else torch.tensor([bound], device=device)
        pyops.dynamic_per_token_scaled_fp8_quant(codes, x, scale, limit)
        right, right_scale = token_fp8(exact(x), bound, kind)
        same(scale, right_scale)
        same(codes, right)
    pyops.dynamic_scaled_int8_quant(eights, x, scale, None)
    right, right_scale = token_int8(exact(x))
    same(scale, right_scale)
    same(eights, right)
    for values in (x, x.abs() + 1):  # of both signs, and nothing near 0
        pyops.dynamic_scaled_int8_quant(eights, values, scale, azp)
        right, right_scale, right_azp = token_azp(exact(values))
        same(scale, right_scale)
        same(azp, right_azp)
        same(eights, right)
        off = (scale.double() * (eights.double() - azp) - values.double()).abs()
        assert (off <= scale.double() * 1.01).all()


ROWS = [
    SPECIAL,
    [0.0] * 13,
    [-0.0] * 13,
    [float("nan")] * 13,
    [float("inf")] * 13,
    [float("-inf")] * 13,
    [*SPECIAL[:4], float("nan")] + [5.0] * 8,
    [*SPECIAL[:4], float("inf")] + [5.0] * 8,
    [*SPECIAL[:4], float("-inf")] + [5.0] * 8,
    [3e38, -3e38] + [1.0] * 11,
    [1e-36, -1e-37, 1e-38] + [0.0] * 10,
    [1e-37, -1e-37] + [-0.0] * 11,
    [1e-39, -1e-40] + [0.0] * 11,
    [7.0] * 13,
    [-7.0] * 13,
    [1e-38] * 13,
    [1.0, 1.0000001] + [1.0] * 11,
    [1e30, 1.0000001e30] + [1e30] * 11,
    [float("nan"), 2.0] + [2.0] * 11,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@E4M3
def test_rows_of_special_values(kind: torch.dtype, dtype: torch.dtype, device: str) -> None:
    x = torch.tensor(ROWS, device=device).to(dtype)
    codes, eights = new(x.shape, kind, device), new(x.shape, INT8, device)
    scale, azp = new((len(ROWS),), torch.float32, device), new((len(ROWS),), torch.int32, device)
    pyops.dynamic_per_token_scaled_fp8_quant(codes, x, scale)
    right, right_scale = token_fp8(exact(x), None, kind)
    same(scale, right_scale)
    same(codes, right)
    pyops.dynamic_scaled_int8_quant(eights, x, scale, None)
    right, right_scale = token_int8(exact(x))
    same(scale, right_scale)
    same(eights, right)
    pyops.dynamic_scaled_int8_quant(eights, x, scale, azp)
    right, right_scale, right_azp = token_azp(exact(x))
    same(scale, right_scale)
    same(azp, right_azp)
    same(eights, right)
    for row in (1, 13, 14):  # constant: the value comes back
        back = scale.double()[row] * (eights[row].double() - azp.double()[row])
        torch.testing.assert_close(back, x[row].double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@given(
    x=strategies.tensors((6, 129), "float32") | strategies.tensors((6, 200), "bfloat16"),
    layout=strategies.layouts(),
    kind=st.sampled_from(CONTENTS),
    bound=st.none() | st.floats(0, 100, width=32),
    e4m3=st.sampled_from([FP8, FNUZ]),
)
def test_dynamic_codes_of_any_contents(
    x: torch.Tensor, layout: Layout, kind: str, bound: float | None, e4m3: torch.dtype, device: str
) -> None:
    x = filled(x, kind).to(device)
    codes, scale = layout.place(new(x.shape, e4m3, device)), new((6,), torch.float32, device)
    limit = None if bound is None else torch.tensor(bound, device=device)
    pyops.dynamic_per_token_scaled_fp8_quant(codes, layout.place(x), scale, limit)
    right, right_scale = token_fp8(exact(x), bound, e4m3)
    same(scale, right_scale)
    same(codes, right)
    eights, azp = new(x.shape, INT8, device), new((6,), torch.int32, device)
    pyops.dynamic_scaled_int8_quant(eights, x.contiguous(), scale, azp)
    right, right_scale, right_azp = token_azp(exact(x))
    same(scale, right_scale)
    same(azp, right_azp)
    same(eights, right)
    one = new((), torch.float32, device)
    pyops.dynamic_scaled_fp8_quant(codes, layout.place(x), one)
    right_scale = f32(absmax(exact(x).reshape(1, -1)).item() / LARGEST[e4m3])
    same(one, right_scale)
    same(codes, static_fp8(exact(x), right_scale, e4m3))


@pytest.mark.parametrize("device", DEVICES)
@given(
    x=strategies.tensors((5, 96), "float32"),
    kind=st.sampled_from(CONTENTS),
    scale=st.floats(width=32),
    azp=st.none() | st.integers(-(2**31), 2**31 - 1),
    e4m3=st.sampled_from([FP8, FNUZ]),
)
def test_static_codes_under_any_scale(
    x: torch.Tensor, kind: str, scale: float, azp: int | None, e4m3: torch.dtype, device: str
) -> None:
    x = filled(x, kind).to(device).contiguous()
    s = torch.tensor([scale], device=device)
    codes, eights = new(x.shape, e4m3, device), new(x.shape, INT8, device)
    pyops.static_scaled_fp8_quant(codes, x, s)
    same(codes, static_fp8(exact(x), scale, e4m3))
    zero = None if azp is None else torch.tensor([azp], dtype=torch.int32, device=device)
    pyops.static_scaled_int8_quant(eights, x, s, zero)
    same(eights, static_int8(exact(x), scale, azp))


# A scale for each group


def _scales(rows: int, columns: int, kind: str, device: str) -> torch.Tensor:
    if kind == "row":
        return new((rows, columns), torch.float32, device)
    stride = -(-rows // 4) * 4 if kind == "tma" else rows
    return new((columns, stride), torch.float32, device).t()[:rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "group_size", "scales"),
    [
        ((31, 128), 64, "row"),
        ((31, 128), 128, "tma"),
        ((63, 256), 64, "column"),
        ((16, 512), 128, "row"),
        ((16, 512), 32, "tma"),
        ((7, 513), 27, "row"),
        ((5, 99), 33, "column"),
        ((3, 36), 1, "row"),
        ((2, 2000), 1000, "row"),
        ((2, 14336), 14336, "row"),
        ((3, 5), 5, "column"),
    ],
)
def test_groups(shape: tuple[int, int], group_size: int, scales: str, device: str) -> None:
    """Any group size, in any order of the scales; what lies between columns is left."""
    x = draw(*shape, device=device)
    for kind, power_of_two in ((FP8, False), (FP8, True), (FNUZ, False), (FNUZ, True)):
        codes, s = new(shape, kind, device), _scales(shape[0], shape[1] // group_size, scales, device)
        pyops.per_token_group_fp8_quant(x, codes, s, group_size, 1e-10, *LIMITS[kind], power_of_two)
        right, right_scale = grouped(exact(x), group_size, kind, power_of_two)
        same(s, right_scale)
        same(codes, right)
    eights = new(shape, INT8, device)
    pyops.per_token_group_quant_int8(x, eights, s, group_size, 1e-10, -128.0, 127.0)
    right, right_scale = grouped(exact(x), group_size, INT8)
    same(s, right_scale)
    same(eights, right)


@pytest.mark.parametrize("device", DEVICES)
@given(
    x=strategies.tensors((5, 192), "float32"),
    layout=strategies.layouts(),
    kind=st.sampled_from(CONTENTS),
    group_size=st.sampled_from([3, 64, 192]),
    eps=st.sampled_from([1e-10, 1e-4, 3.0, 1e20]),
    power_of_two=st.booleans(),
)
def test_groups_of_any_contents(
    x: torch.Tensor, layout: Layout, kind: str, group_size: int, eps: float, power_of_two: bool, device: str
) -> None:
    x = filled(x, kind).to(device)
    placed = layout.place(x)
    for dtype, limits in (
        *((FP8, (-448.0, 448.0)), (FP8, (-240.0, 240.0))),
        *((FNUZ, (-224.0, 224.0)), (FNUZ, (-240.0, 240.0))),
        *((INT8, (-128.0, 127.0)), (INT8, (0.0, 7.0))),
    ):
        codes = layout.place(new(x.shape, dtype, device))
        s = new((5, 192 // group_size), torch.float32, device)
        if dtype is not INT8:
            pyops.per_token_group_fp8_quant(placed, codes, s, group_size, eps, *limits, power_of_two)
        else:
            pyops.per_token_group_quant_int8(placed, codes, s, group_size, eps, *limits)
        right, right_scale = grouped(exact(x), group_size, dtype, power_of_two and dtype is not INT8, eps, limits)
        same(s, right_scale)
        same(codes, right)


@pytest.mark.parametrize("device", DEVICES)
def test_powers_of_two(device: str) -> None:
    """A magnitude of 448 times a power of two has it for a scale, and one that is a little larger the next."""
    powers = 2.0 ** torch.arange(-30, 31, device=device)
    x = torch.stack((powers * 448, (powers * 448).nextafter(powers * 1000), powers * 447), -1)
    codes, s = new(x.shape, FP8, device), new(x.shape, torch.float32, device)
    pyops.per_token_group_fp8_quant(x, codes, s, 1, 1e-10, -448.0, 448.0, True)
    assert torch.equal(s, torch.stack((powers, powers * 2, powers), -1))
    zeros = torch.zeros(1, 4, device=device)
    pyops.per_token_group_fp8_quant(
        zeros, codes[:1, :1].expand(1, 1).new_empty(1, 4), s[:1, :1], 4, 1e-12, -448.0, 448.0, True
    )
    assert s[0, 0].item() == 2.0**-33  # the next after 1e-10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (5, 3), (8, 4), (6, 9)])
@pytest.mark.parametrize("padded", [False, True])
@E4M3
def test_packed(kind: torch.dtype, padded: bool, rows: int, groups: int, device: str) -> None:
    """Four exponents to a word, the first in its lowest byte; nothing but zeros where there are no groups or tokens."""
    x = draw(rows, groups * 64, device=device) * torch.arange(1, rows + 1, device=device)[:, None].bfloat16()
    stride, words = -(-rows // 4) * 4, -(-groups // 4)
    packed = new((words, stride), torch.int32, device).t()
    before = packed.clone()
    codes = new(x.shape, kind, device)
    given_rows = stride if padded else rows
    pyops.per_token_group_fp8_quant_packed(x, codes, packed[:given_rows], 64, 1e-10, *LIMITS[kind])
    right, scale = grouped(exact(x), 64, kind, power_of_two=True)
    same(codes, right)
    exponents = numpy.zeros((given_rows, words * 4), "int64")
    exponents[:rows, :groups] = numpy.log2(scale) + 127
    right_words = sum(exponents[:, byte::4] << 8 * byte for byte in range(4))
    assert packed[:given_rows].cpu().numpy().astype("uint32").tolist() == right_words.tolist()
    assert torch.equal(packed[given_rows:], before[given_rows:])


# Columns


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 512), (5, 1000), (300, 64), (271, 33), (2, 3, 8), (2, 120000)])
def test_permute_cols(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """A random order, one with repetitions, and bits of no number. (The last shape has no room in shared memory.)"""
    a = torch.randint(-(2**15), 2**15, (*shape, dtype.itemsize // 2), dtype=torch.int16, device=device).view(dtype)[
        ..., 0
    ]
    a = a.contiguous()
    generator = torch.Generator().manual_seed(0)
    for perm in (
        torch.randperm(shape[-1], generator=generator),
        torch.randint(0, shape[-1], shape[-1:], generator=generator),
    ):
        words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        result = pyops.permute_cols(a, perm.int().to(device))
        assert torch.equal(result.view(words), a.view(words)[..., perm.to(device)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [3, 300])
def test_columns_that_do_not_exist_are_zero(rows: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = draw(rows, 24, device=device) + 100
    perm = torch.arange(24, dtype=torch.int32, device=device)
    perm[[0, 5, 8, 23]] = torch.tensor([-1, 24, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    result = pyops.permute_cols(a, perm)
    wanted = a.clone()
    wanted[:, [0, 5, 8, 23]] = 0.0
    assert torch.equal(result, wanted)
    monkeypatch.setenv("PYOPS_CHECK", "1")
    pyops.registry["permute_cols"].forget()
    try:
        with pytest.raises(pyops.OpError, match=r"^permute_cols: perm: 4 of 24 indices are out of range, the first"):
            pyops.permute_cols(a, perm)
    finally:
        pyops.registry["permute_cols"].forget()


# Into new tensors


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_fp8_quant(device: str) -> None:
    x = draw(5, 96, device=device)
    codes, scale = pyops.scaled_fp8_quant(x)
    right_scale = f32(absmax(exact(x).reshape(1, -1)).item() / 448)
    assert (codes.dtype, scale.shape, scale.dtype) == (FP8, (1,), torch.float32)
    same(scale, right_scale)
    same(codes, static_fp8(exact(x), right_scale))
    bound = torch.tensor(4.0, device=device)
    codes, scale = pyops.scaled_fp8_quant(x, num_token_padding=17, scale_ub=bound, use_per_token_if_dynamic=True)
    assert (codes.shape, scale.shape) == ((17, 96), (17, 1))
    right, rights = token_fp8(exact(x), 4.0)
    same(codes[:5], right)
    same(scale[:5], rights)
    given_scale = torch.full((5, 1), 0.1, device=device)
    output = new((5, 96), FP8, device)
    codes, scale = pyops.scaled_fp8_quant(x, given_scale, output=output, group_shape=(1, 96))
    assert codes is output
    assert scale is given_scale
    same(codes, static_fp8(exact(x), exact(given_scale)))
    assert pyops.scaled_fp8_quant(x, num_token_padding=2)[0].shape == (5, 96)


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_int8_quant(device: str) -> None:
    x = draw(96, 5, device=device).t() + 2
    codes, scale, azp = pyops.scaled_int8_quant(x)
    right, right_scale = token_int8(exact(x))
    assert azp is None
    same(codes, right)
    same(scale, right_scale)
    codes, scale, azp = pyops.scaled_int8_quant(x, symmetric=False)
    right, right_scale, right_azp = token_azp(exact(x))
    same(codes, right)
    same(scale, right_scale)
    same(azp, right_azp)
    apart = torch.nn.functional.pad(x, (0, 7))[:, :96]
    same(pyops.scaled_int8_quant(apart, symmetric=False)[0], right)
    assert (scale.shape, azp.shape, azp.dtype) == ((5, 1), (5, 1), torch.int32)
    s, zero = torch.tensor(0.1, device=device), torch.tensor(3, dtype=torch.int32, device=device)
    x = x.contiguous()
    same(pyops.scaled_int8_quant(x, s)[0], static_int8(exact(x), exact(s), None))
    same(pyops.scaled_int8_quant(apart, s)[0], static_int8(exact(apart), exact(s), None))
    codes, scale, azp = pyops.scaled_int8_quant(x, s, zero, symmetric=False)
    assert scale is s
    assert azp is zero
    same(codes, static_int8(exact(x), exact(s), 3))


@pytest.mark.parametrize("device", DEVICES)
def test_group_quant_into_new_tensors(device: str) -> None:
    x = draw(5, 256, device=device)
    right, right_scale = grouped(exact(x), 64, FP8)
    for options, strides in (
        ({}, (4, 1)),
        ({"column_major_scales": True}, (1, 5)),
        ({"column_major_scales": True, "tma_aligned_scales": True}, (1, 8)),
    ):
        codes, scale = pyops.per_token_group_quant_fp8(x, 64, **options)
        assert scale.stride() == strides
        same(codes, right)
        same(scale, right_scale)
    output = new(x.shape, FP8, device)
    codes, scale = pyops.per_token_group_quant_fp8(x, 64, dtype=FP8, out_q=output, use_ue8m0=True)
    assert codes is output
    right, right_scale = grouped(exact(x), 64, FP8, power_of_two=True)
    same(codes, right)
    same(scale, right_scale)
    for major, strides in ((False, (4, 2, 1)), (True, (4, 1, 2))):
        codes, scale = pyops.per_token_group_quant_fp8(x.view(5, 2, 128), 64, column_major_scales=major)
        assert (scale.shape, scale.stride()) == ((5, 2, 2), strides)
        same(scale.flatten(1), grouped(exact(x), 64, FP8)[1])
    packed_codes, packed = pyops.per_token_group_quant_fp8_packed_for_deepgemm(x, 64)
    assert (packed.shape, packed.stride(), packed.dtype) == ((5, 1), (1, 8), torch.int32)
    same(packed_codes, right)
    whole = packed.as_strided((8, 1), (1, 8)).cpu().numpy().view("uint8").reshape(8, 4)
    assert (whole[:5] == numpy.log2(right_scale) + 127).all()
    assert not whole[5:].any()
    columns = pyops.per_token_group_quant_fp8_packed_for_deepgemm(x.t().contiguous().t(), 64)
    assert torch.equal(columns[0].view(torch.uint8), packed_codes.view(torch.uint8))
    assert torch.equal(columns[1], packed)


@pytest.mark.parametrize("device", DEVICES)
def test_more_scales_than_needed(device: str) -> None:
    """The first are written, the others stay."""
    x = draw(5, 64, device=device)
    for op, shape, count in (
        (pyops.dynamic_per_token_scaled_fp8_quant, (8, 1), 5),
        (pyops.dynamic_per_token_scaled_fp8_quant, (5,), 5),
        (pyops.dynamic_scaled_fp8_quant, (3,), 1),
    ):
        codes, scale = new(x.shape, FP8, device), torch.full(shape, 7.0, device=device)
        op(codes, x, scale)
        right_codes, right = new(x.shape, FP8, device), torch.empty(count, device=device)
        op(right_codes, x, right)
        assert torch.equal(scale.flatten()[:count], right)
        assert (scale.flatten()[count:] == 7.0).all()
        assert torch.equal(codes.view(torch.uint8), right_codes.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_int8_codes_of_groups_to_nearest(device: str) -> None:
    """Halves are even, and what saturates does so before it is rounded."""
    x = draw(6, 128, device=device)
    x[0, :5] = torch.tensor([127.0, 2.5, 3.5, -0.5, -126.5])  # under a scale of 1
    x[0, 5:] = 0.0
    for limits in ((-128.0, 127.0), (-20.5, 100.0)):
        codes, scale = new(x.shape, INT8, device), torch.empty(6, 2, device=device)
        pyops.per_token_group_quant_int8(x, codes, scale, 64, 1e-10, *limits, True)
        right, right_scale = grouped(exact(x), 64, INT8, limits=limits, rounded=numpy.rint)
        same(codes, right)
        same(scale, right_scale)


@pytest.mark.parametrize("device", DEVICES)
def test_codes_of_groups_from_zero_on(device: str) -> None:
    """Where the smallest code is 0, nothing is -0."""
    x = torch.tensor([[-1.0, -0.0, 0.0, 2.0]], device=device)
    codes, scale = new(x.shape, FP8, device), torch.empty(1, 1, device=device)
    pyops.per_token_group_fp8_quant(x, codes, scale, 4, 1e-10, 0.0, 448.0, False)
    assert codes.view(torch.uint8).tolist() == [[0, 0, 0, 0x7E]]


@pytest.mark.parametrize("device", DEVICES)
def test_new_tensors_are_of_the_own_e4m3(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is e4m3fnuz, with its limits; a tensor or dtype that is given has the last word."""
    x = draw(5, 256, device=device)
    for kind in (FP8, FNUZ):
        codes, scale = pyops.scaled_fp8_quant(x, output=new(x.shape, kind, device))
        right_scale = f32(absmax(exact(x).reshape(1, -1)).item() / LARGEST[kind])
        same(scale, right_scale)
        same(codes, static_fp8(exact(x), right_scale, kind))
        for options in ({"dtype": kind}, {"out_q": new(x.shape, kind, device)}):
            codes, scale = pyops.per_token_group_quant_fp8(x, 64, **options)
            assert codes.dtype is kind
            right, right_scale = grouped(exact(x), 64, kind)
            same(codes, right)
            same(scale, right_scale)
    for out_q in (new(x.shape, FNUZ, device), new(x.shape, torch.int8, device)):
        with pytest.raises(pyops.OpError, match=f"out_q: expected codes of torch.float8_e4m3fn, got {out_q.dtype}"):
            pyops.per_token_group_quant_fp8(x, 64, dtype=FP8, out_q=out_q)
    as_bytes, scale = pyops.per_token_group_quant_fp8(x, 64, dtype=FP8, out_q=new(x.shape, torch.uint8, device))
    same(as_bytes, grouped(exact(x), 64, FP8)[0])

    monkeypatch.setattr(scaled, "own_fp8", lambda _: "float8_e4m3fnuz")
    for more in ({}, {"use_per_token_if_dynamic": True}, {"scale": torch.ones(1, device=device)}):
        codes, scale = pyops.scaled_fp8_quant(x, **more)
        assert codes.dtype is FNUZ
        right, right_scale = token_fp8(exact(x), None, FNUZ)
        same(codes, right if "use_per_token_if_dynamic" in more else static_fp8(exact(x), exact(scale), FNUZ))
        if "use_per_token_if_dynamic" in more:
            same(scale, right_scale)
    right, right_scale = grouped(exact(x), 64, FNUZ, power_of_two=True)
    for codes in (
        pyops.per_token_group_quant_fp8(x, 64, use_ue8m0=True)[0],
        pyops.per_token_group_quant_fp8_packed_for_deepgemm(x, 64)[0],
    ):
        assert codes.dtype is FNUZ
        same(codes, right)


def test_the_own_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the architecture, which torch knows of a GPU of AMD's by more than its name."""
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert native_fp8(devices.model(arch)) is dtypes.float8_e4m3fn
        assert converts_fp8(devices.model(arch)) is (arch != "sm_80")
    old = devices.model("gfx942")
    assert (native_fp8(old), converts_fp8(old)) == (dtypes.float8_e4m3fnuz, False)
    assert native_fp8(replace(old, arch="gfx940")) is dtypes.float8_e4m3fnuz
    for arch in ("gfx950", "gfx1200"):
        new = replace(old, arch=arch)
        assert (native_fp8(new), converts_fp8(new)) == (dtypes.float8_e4m3fn, True)
    assert not converts_fp8(replace(old, arch="gfx90a"))
    assert own_fp8(torch.ones(1)) == own_fp8(numpy.ones(1)) == "float8_e4m3fn"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert own_fp8(torch.ones(1)) == "float8_e4m3fn"
    for name, kind in (("gfx942:sramecc+:xnack-", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")):
        properties = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        gpu_tensor = SimpleNamespace(is_cuda=True, device="cuda:0", new_empty=None)
        assert own_fp8(gpu_tensor) == kind
    array = SimpleNamespace(device=SimpleNamespace(id=1))  # as CuPy has it
    monkeypatch.setattr(devices, "get", lambda index: replace(old, index=index))
    assert own_fp8(array) == "float8_e4m3fnuz"


def test_threads_for_codes_without_an_instruction() -> None:
    """The blocks of a multiprocessor that a kernel asks for where conversion takes integers: one, of either e4m3."""
    for arch, native in (("sm_90", FP8), ("sm_80", None), ("gfx942", FNUZ)):
        for kind in LARGEST:
            for name in ("dynamic_scaled_fp8_quant", "static_scaled_fp8_quant", "rms_norm_per_block_quant"):
                op = pyops.registry[name]
                assert op.example is not None
                dtype = str(kind).removeprefix("torch.")
                args = op.example(ArgMaker(devices.model(arch)), num_tokens=4096, hidden_size=4096, quant_dtype=dtype)
                blocks = op.launches(*args)[-1].specialisation.constants["MIN_BLOCKS"]
                assert (blocks > 1) is (kind is native), (name, arch, kind)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_graph_break(device: str) -> None:
    """What makes new tensors, and an op with a pair of integers."""

    def call(x: torch.Tensor, scale: torch.Tensor) -> list[Any]:
        return [
            *pyops.scaled_fp8_quant(x),
            *pyops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
            pyops.scaled_fp8_quant(x, scale, group_shape=(1, -1))[0],
            *pyops.scaled_int8_quant(x, symmetric=False),
            *pyops.per_token_group_quant_fp8(x, 32, column_major_scales=True),
            *pyops.per_token_group_quant_fp8_packed_for_deepgemm(x, 32),
        ]

    x, scale = draw(4, 64, device=device), torch.full((4,), 0.1, device=device)
    eager = call(x, scale)
    torch._dynamo.reset()
    for one, other in zip(eager, torch.compile(call, fullgraph=True, backend="aot_eager")(x, scale), strict=True):
        same(other, exact(one.view(torch.uint8) if one.dtype is FP8 else one))


# What is refused


def _refusal(function: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(pyops.OpError) as caught:
        function(*args, **more)
    return str(caught.value).partition(": ")[2]


@pytest.mark.parametrize(
    ("shape", "group_shape", "message"),
    [
        ((4,), None, "scale: expected group_shape with a scale of shape (4,)"),
        ((4,), (-1, 1), "scale: expected groups of rows or of columns, (1, 64), to be as many, got (4,)"),
        ((8,), (2, 16), "scale: expected groups of rows or of columns, (2, 4), to be as many, got (8,)"),
        ((4,), (3, -1), "group_shape: expected -1 or divisors of 4 rows and 64 columns, got (3, -1)"),
        ((4,), (0, -1), "group_shape: expected -1 or divisors of 4 rows and 64 columns, got (0, -1)"),
        ((2, 3), None, "scale: expected divisors of 4 rows and 64 columns, got (2, 3)"),
        ((2, 4), (2, 8), "group_shape: expected (2, 16) for a scale of shape (2, 4), got (2, 8)"),
        ((1, 2, 2), None, "scale: expected at most 2 dimensions, got shape (1, 2, 2)"),
    ],
)
def test_static_fp8_refuses(shape: tuple[int, ...], group_shape: Any, message: str) -> None:
    x = torch.ones(4, 64)
    assert _refusal(pyops.static_scaled_fp8_quant, x.to(FP8), x, torch.ones(shape), group_shape) == message


def test_group_shape_is_a_pair() -> None:
    x = torch.ones(4, 64)
    for wrong in ([1, -1], (1, 2, 3), (1.0, 2), 5):
        message = _refusal(pyops.static_scaled_fp8_quant, x.to(FP8), x, torch.ones(1), wrong)
        assert message == f"group_shape: expected tuple[int, int], got {type(wrong).__name__}"
    result = x.to(FP8)
    torch.ops.pyops.static_scaled_fp8_quant(result, x, torch.ones(4), (1, -1))
    same(result, fp8(exact(x)))


def test_other_refusals() -> None:
    x = torch.ones(4, 64)
    fp8_codes, int8_codes, scale = x.to(FP8), x.to(INT8), torch.ones(4)
    azp = torch.ones(1, dtype=torch.int32)
    groups = torch.ones(4, 2)
    turned = torch.ones(64, 4).t()
    assert "stride 1" in _refusal(pyops.static_scaled_int8_quant, int8_codes, turned, scale[:1], None)
    assert "stride 1" in _refusal(pyops.dynamic_scaled_int8_quant, int8_codes, turned, scale, None)
    assert "stride 1" in _refusal(pyops.permute_cols, turned, torch.arange(64).int())
    assert _refusal(pyops.static_scaled_int8_quant, int8_codes, x, scale, None).startswith(
        "scale: expected one element"
    )
    assert _refusal(pyops.static_scaled_int8_quant, int8_codes, x, scale[:1], scale[:1]).startswith(
        "azp: expected dtype"
    )
    assert _refusal(pyops.static_scaled_int8_quant, fp8_codes, x, scale[:1], azp).startswith(
        "result: expected dtype int8"
    )
    assert _refusal(pyops.dynamic_scaled_int8_quant, int8_codes, x, scale[:3], None).startswith(
        "scale: expected one el"
    )
    assert _refusal(pyops.dynamic_scaled_int8_quant, int8_codes, x, scale, azp).startswith(
        "azp: expected one element per"
    )
    few = "scale: expected at least {}, got shape ({},)"
    assert _refusal(pyops.dynamic_scaled_fp8_quant, fp8_codes, x, scale[:0]) == few.format("1 element", 0)
    per_token = pyops.dynamic_per_token_scaled_fp8_quant
    assert _refusal(per_token, fp8_codes, x, scale.flatten()[:3], None) == few.format("4 elements", 3)

    def group(size: int = 32, eps: float = 1e-10, low: float = -448.0, high: float = 448.0, s: Any = groups) -> str:
        return _refusal(pyops.per_token_group_fp8_quant, x, fp8_codes, s, size, eps, low, high, False)

    assert group(size=33) == "group_size: expected a divisor of hidden_size=64, got 33"
    assert group(size=0) == "group_size: expected a divisor of hidden_size=64, got 0"
    for eps in (0.0, -1.0, float("nan"), float("inf"), 1e-40):
        assert group(eps=eps).startswith("eps: expected a positive number")
    assert group(low=1.0) == "fp8_min: expected -448.0 to 0, got 1.0"
    assert group(high=500.0) == "fp8_max: expected 1 to 448.0, got 500.0"
    assert group(high=float("nan")).startswith("fp8_max: ")
    fnuz = partial(_refusal, pyops.per_token_group_fp8_quant, x, x.to(FNUZ), groups, 32, 1e-10)
    assert fnuz(-448.0, 224.0, False) == "fp8_min: expected -240.0 to 0, got -448.0"
    assert fnuz(-224.0, 448.0, False) == "fp8_max: expected 1 to 240.0, got 448.0"
    assert group(s=torch.ones(2, 4)) == "output_s: expected shape (num_tokens=4, groups=2), got (2, 4)"
    message = _refusal(pyops.per_token_group_quant_int8, x, int8_codes, groups, 32, 1e-10, -129.0, 127.0)
    assert message == "int8_min: expected -128.0 to 0, got -129.0"
    with pytest.raises(pyops.OpError, match="output_s_packed: expected shape"):
        pyops.per_token_group_fp8_quant_packed(
            x, fp8_codes, torch.ones(5, 1, dtype=torch.int32), 32, 1e-10, -448.0, 448.0
        )
    assert _refusal(pyops.scaled_fp8_quant, x[0]).startswith("input: expected 2 dimensions")
    assert _refusal(pyops.scaled_fp8_quant, x, num_token_padding=8, output=fp8_codes) == (
        "num_token_padding: is given with output"
    )
    assert _refusal(pyops.scaled_fp8_quant, x, output=int8_codes).startswith("output: expected dtype")
    assert _refusal(pyops.scaled_int8_quant, x, scale[:1], azp).startswith("azp: expected None with symmetric=True")
    assert _refusal(pyops.scaled_int8_quant, x, scale[:1], symmetric=False).startswith("azp: expected one with")
    assert _refusal(pyops.per_token_group_quant_fp8, x, 32, dtype=INT8).startswith("dtype: expected")
    assert _refusal(pyops.per_token_group_quant_fp8_packed_for_deepgemm, x, 32, use_ue8m0=False).startswith("use_ue8m0")
    assert _refusal(pyops.per_token_group_quant_fp8, x[0, 0], 32).startswith("x: expected at least one dimension")
    tma = {"column_major_scales": True, "tma_aligned_scales": True}
    assert _refusal(pyops.per_token_group_quant_fp8, x[None], 32, **tma).startswith("tma_aligned_scales: expected a m")
    assert _refusal(pyops.permute_cols, x, torch.arange(64)).startswith("perm: expected dtype int32")
    assert _refusal(pyops.permute_cols, x, torch.arange(63).int()).startswith("perm: expected shape")


def test_empty() -> None:
    for device in ("reference", "kernels"):
        with config.cpu(device):
            for shape in ((0, 64), (3, 0)):
                x = torch.ones(shape)
                for codes, scale in (pyops.scaled_fp8_quant(x), pyops.scaled_fp8_quant(x, torch.ones(1))):
                    assert codes.shape == shape
                    assert scale.shape == (1,)
                assert pyops.scaled_int8_quant(x)[0].shape == shape
                assert pyops.permute_cols(x, torch.arange(shape[1]).int()).shape == shape


def test_how_many_blocks_look_for_the_largest() -> None:
    """No more than two for each multiprocessor, whose results every block of the second kernel reads."""
    op = pyops.registry["dynamic_scaled_fp8_quant"]
    assert op.example is not None
    for num_tokens, blocks, batch in ((1, 1, 1), (16, 16, 1), (256, 256, 1), (4096, 264, 8)):
        first, second = op.launches(*op.example(ArgMaker(devices.model()), num_tokens=num_tokens))
        assert (first.grid[0], first.specialisation.constants["BATCH"]) == (blocks, batch)
        assert second.fixed["num_partial"] == blocks
