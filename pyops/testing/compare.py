"""The one definition of "the kernel's result is the reference's"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from .._core.tensors import dtypes

if TYPE_CHECKING:
    from torch import Tensor

# The bits of a number's significand, and the exponent of the smallest one.
_FLOATS: dict[Any, tuple[int, int]] = {
    dtypes.float32: (24, -149),
    dtypes.float16: (11, -24),
    dtypes.bfloat16: (8, -133),
}
CODES = (*dtypes.E4M3, dtypes.float8_e5m2, dtypes.int8, dtypes.uint8)

# Both sides of a float32 result compute in float32, where a sum of thousands of terms in another order moves the last
# four bits: one `ulp` of an op counts as 16 units there.
_FLOAT32_UNITS = 16
# CuPy compiles with denormals flushed to zero, and a norm may scale what was lost by 1 / sqrt(epsilon) and a weight.
_FLUSHED = 1e-30
# Where terms of the size of the largest result cancel, float32 leaves this much of it in a sum of a few thousand.
CANCELLED = 2.0**-22
# A scale is the largest of values rounded to 16 bits. Where a sum in another order rounds that one the other way, the
# scale moves by a unit of the 16 bits: in so many scales, by so much.
_FLIPPED, _FLIP = 2e-3, 2.0**-7
# Fraction of quantized values that may differ by one step, because the value before rounding was next to a tie.
_TIES = 1e-3


def bits(tensor: Tensor) -> Tensor:
    """Bytes of the elements, in order."""
    # contiguous() would keep any stride of a dimension of size 1.
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(bits(a), bits(b)))


def assert_close(
    expected: Tensor,
    actual: Tensor,
    ulps: int,
    what: str = "result",
    is_scale: bool = False,
    atol: float = CANCELLED,
) -> None:
    """`actual` lies within `ulps` units in the last place of `expected`, or `cancelled` times its largest magnitude.

    0 ulps means equal values.

    Quantized values may differ by one step, in one element or a thousandth of them, and in as many more as may lie
    next to a tie if `cancelled` of the largest is uncertain; scales that came with them, by the unit of a 16-bit value,
    in two elements or a five-hundredth. NaN must meet NaN.
    """
    assert expected.shape == actual.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert expected.dtype == actual.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    dtype = dtypes.of(expected.dtype)
    if dtype in CODES:
        _assert_codes_close(expected, actual, ulps, what, atol)
    elif dtype in _FLOATS:
        _assert_floats_close(expected, actual, ulps, what, is_scale, atol)
    else:
        assert torch.equal(expected, actual), f"{what}: {_worst(expected, actual, expected != actual)}"


def _assert_floats_close(expected: Tensor, actual: Tensor, ulps: int, what: str, is_scale: bool, atol: float) -> None:
    nan = expected.isnan()
    assert torch.equal(nan, actual.isnan()), (
        f"{what}: NaN at other places, {_worst(expected, actual, nan != actual.isnan())}"
    )
    precision, smallest = _FLOATS[dtypes.of(expected.dtype)]
    # Infinity is the value after the largest: a result that only just overflows is one unit away.
    beyond = 2.0 * 2.0 ** (127 if expected.dtype != torch.float16 else 15)
    a, b = (x.double().nan_to_num(nan=0.0, posinf=beyond, neginf=-beyond) for x in (expected, actual))
    exponent = torch.frexp(a)[1].double()
    units = ulps * (_FLOAT32_UNITS if expected.dtype == torch.float32 else 1)
    allowed = units * torch.exp2(torch.clamp(exponent - precision, min=smallest)) + _FLUSHED
    if ulps:
        finite = a[a.abs() < beyond]
        allowed += atol * (finite.abs().max() if finite.numel() else 0.0)
    wrong = (a - b).abs() > allowed
    if is_scale and int(wrong.sum()) <= max(2, int(_FLIPPED * wrong.numel())):
        wrong &= (a - b).abs() > _FLIP * a.abs()
    assert not wrong.any(), f"{what}: more than {ulps} ulps away, {_worst(expected, actual, wrong)}"


def _assert_codes_close(expected: Tensor, actual: Tensor, ulps: int, what: str, atol: float) -> None:
    a, b = _ordinal(expected), _ordinal(actual)
    steps = (a - b).abs()
    assert steps.numel() == 0 or int(steps.max()) <= min(1, ulps), (
        f"{what}: {_worst(expected, actual, steps > min(1, ulps))}"
    )
    allowed = 0
    if ulps:
        values = expected.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
        uncertain = 2.0 * atol * values.max() / _spacing(expected.dtype, values) if values.numel() else values
        allowed = max(1, int(_TIES * steps.numel() + uncertain.clamp(max=1.0).sum()))
    assert int(steps.sum()) <= allowed, f"{what}: {int(steps.sum())} codes of {steps.numel()} differ by a step"


def _spacing(dtype: Any, values: Tensor) -> Tensor:
    """The distance from fp8 or int8 values of these magnitudes to the next."""
    if not dtype.is_floating_point:
        return torch.ones_like(values)
    limits = torch.finfo(dtype)
    return torch.exp2(torch.frexp(values.clamp(min=limits.tiny))[1] - 1.0) * limits.eps


def _ordinal(codes: Tensor) -> Tensor:
    """fp8 or int8 values as integers that count the steps between them; both zeros are equal, and so are all NaN."""
    if not codes.dtype.is_floating_point:
        return codes.int()
    nan = codes.float().isnan()
    raw = codes.view(torch.uint8).int()
    magnitude = raw & 0x7F
    return torch.where(raw > 0x7F, -magnitude, magnitude).masked_fill(nan, 1000)


def _worst(expected: Tensor, actual: Tensor, wrong: Tensor) -> str:
    at: Any = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements, the first at {at}: "
        f"expected {expected[at].item()!r}, got {actual[at].item()!r}"
    )
