"""The expected results of quantising ops, computed in numpy, independently of pyops.

The arithmetic is float64. `f32` rounds a value to float32 wherever the op's definition does.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8, FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
LARGEST = {FP8: 448.0, FNUZ: 224.0}  # the largest magnitude that quantisation writes; e4m3fnuz itself reaches 240
LIMITS = {FP8: (-448.0, 448.0), FNUZ: (-224.0, 224.0), INT8: (-128.0, 127.0)}
E4M3 = pytest.mark.parametrize("kind", LARGEST)  # tests with this mark run for both e4m3 dtypes


@pytest.fixture(autouse=True)
def _quietly() -> Any:
    """Silence numpy: divisions by zero and overflows are intended here."""
    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * 8).to(dtype)


def new(shape: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    """An output to be written, filled with 0x55 bytes, which the tests expect nowhere."""
    size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.full((size,), 0x55, dtype=torch.uint8, device=device).view(dtype).view(shape)


def exact(x: Any) -> Any:
    """The values of a tensor or an array as a float64 array."""
    return (x.detach().cpu().double().numpy() if isinstance(x, torch.Tensor) else numpy.asarray(x)).astype("float64")


def f32(x: Any) -> Any:
    """float64 values rounded to float32, as float64.

    The quotient or product of two float32 values, computed in float64 and passed to `f32`, is what float32 arithmetic
    gives: float64 has enough bits that rounding twice does no harm.
    """
    return numpy.asarray(x, "float64").astype("float32").astype("float64")


# Magnitudes of all e4m3fn encodings; those of e4m3fnuz are half as large, because its exponent bias is one more.
_VALUES = numpy.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
)


def nearest(x: Any, values: Any) -> tuple[Any, Any]:
    """(index of the magnitude in `values` nearest to abs(x), whether x is negative).

    A tie takes the even index, which has an even mantissa. Magnitudes above the last saturate; NaN counts as 0.
    """
    magnitude = numpy.minimum(numpy.nan_to_num(numpy.abs(x), nan=0.0, posinf=values[-1]), values[-1])
    above = numpy.searchsorted(values, magnitude)
    below = numpy.maximum(above - 1, 0)
    to_below, to_above = magnitude - values[below], values[above] - magnitude
    code = numpy.where(to_below < to_above, below, above)
    code = numpy.where((to_below == to_above) & (below % 2 == 0), below, code)
    return code, numpy.signbit(x)


def fp8(x: Any, nan: int = 0x7E, kind: torch.dtype = FP8) -> Any:
    """The nearest e4m3 encodings, saturating at 448, or at 240 for e4m3fnuz. NaN becomes the encoding `nan`.

    The default 0x7E is what quantisation writes for NaN: 448, or 224 for e4m3fnuz.
    """
    code, negative = nearest(x, _VALUES[:127] if kind is FP8 else _VALUES / 2)
    if kind is FNUZ:
        negative &= code != 0  # e4m3fnuz has no -0: 0x80 is its NaN
    return numpy.where(numpy.isnan(x), nan, code | (negative << 7)).astype("uint8")


def int8(x: Any) -> Any:
    """Rounds to nearest even, saturating; NaN becomes 0."""
    return numpy.clip(numpy.rint(numpy.nan_to_num(x, nan=0.0)), -128, 127).astype("int8")


def int32(x: Any) -> Any:
    """Rounds to nearest even, saturating at the limits of int32; NaN becomes 0. The result is an int64 array."""
    return numpy.clip(numpy.rint(numpy.nan_to_num(x, nan=0.0)), -(2.0**31), 2.0**31 - 1).astype("int64")


def absmax(x: Any) -> Any:
    """The largest magnitude of each row, NaN ignored."""
    return numpy.nan_to_num(numpy.abs(x), nan=0.0, posinf=numpy.inf).max(-1, keepdims=True)


def saturated(x: Any, kind: torch.dtype) -> Any:
    """e4m3 encodings, saturating at `LARGEST`, as quantisation does."""
    return fp8(numpy.clip(x, -LARGEST[kind], LARGEST[kind]), kind=kind)


def static_fp8(x: Any, scale: Any, kind: torch.dtype = FP8) -> Any:
    reciprocal = f32(1.0 / f32(scale))
    return saturated(f32(x * numpy.where(numpy.isinf(reciprocal), 0.0, reciprocal)), kind)


def static_int8(x: Any, scale: Any, azp: int | None) -> Any:
    """int8 with a given scale and, for asymmetric quantisation, the zero point `azp`."""
    if azp is None:
        return int8(f32(x / f32(scale)))
    return numpy.clip(int32(f32(x * f32(1.0 / f32(scale)))) + azp, -128, 127).astype("int8")


def token_fp8(x: Any, bound: float | None, kind: torch.dtype = FP8) -> tuple[Any, Any]:
    """(encodings, a dynamic scale for each row). `bound` is an upper bound of the absmax, not of the scale."""
    absmax_ = absmax(x) if bound is None else numpy.fmin(absmax(x), bound)
    scale = numpy.maximum(f32(absmax_ / LARGEST[kind]), f32(1 / (LARGEST[kind] * 512)))
    return saturated(f32(x / scale), kind), scale


def token_int8(x: Any) -> tuple[Any, Any]:
    absmax_ = absmax(x)
    factor = f32(127 / absmax_)
    return int8(f32(x * numpy.where(numpy.isinf(factor), 0.0, factor))), f32(absmax_ / 127)


def token_azp(x: Any) -> tuple[Any, Any, Any]:
    """(int8 values, scales, zero points) of asymmetric dynamic quantisation, row by row."""
    quantized, scales, zeros = [], [], []
    for row in x.reshape(-1, x.shape[-1]):
        numbers = row[~numpy.isnan(row)]
        low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 0.0)
        scale = f32(f32(high - low) / 255)
        if not numpy.isfinite(f32(1 / scale)):  # as for a constant row: the range is extended to include 0
            low, high = min(low, 0.0), max(high, 0.0)
            scale = f32(f32(high - low) / 255)
        if numpy.isinf(f32(1 / scale)):  # still, as for a row of zeros
            scale = numpy.float64(1.0)
        zero = int32(f32(-128 - f32(low / scale)))
        quantized.append(numpy.clip(int32(f32(row * f32(1 / scale))) + zero, -128, 127).astype("int8"))
        scales.append(scale)
        zeros.append(zero)
    return numpy.array(quantized), numpy.array(scales)[:, None], numpy.array(zeros)[:, None]


def grouped(
    x: Any,
    size: int,
    dtype: torch.dtype,
    power_of_two: bool = False,
    eps: float = 1e-10,
    limits: Any = None,
    rounded: Any = numpy.trunc,
) -> tuple[Any, Any]:
    """(values, scales) with one dynamic scale for each `size` adjacent elements.

    The scale maps the absmax of a group, at least `eps`, to the upper one of `limits`; `power_of_two` rounds it up to a
    power of two. `rounded` rounds to int8. NaN becomes the lower limit.
    """
    low, high = limits or LIMITS[dtype]
    groups = x.reshape(-1, x.shape[-1] // size, size)
    scale = f32(numpy.maximum(absmax(groups), f32(eps)) / high)
    if power_of_two:
        mantissa, exponent = numpy.frexp(numpy.maximum(scale, f32(1e-10)))  # mantissa 0.5: already a power of two
        scale = numpy.where(numpy.isinf(scale), scale, numpy.ldexp(1.0, exponent - (mantissa == 0.5)))
    quotient = f32(groups / scale)
    y = numpy.where(numpy.isnan(quotient), low, numpy.clip(quotient, low, high)).reshape(x.shape)
    return (rounded(y).astype("int8") if dtype is INT8 else fp8(y, kind=dtype)), scale[..., 0]


def same(actual: torch.Tensor, expected: Any) -> None:
    """Assert that fp8 values have equal bits and that other values are equal numbers, or both NaN."""
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
