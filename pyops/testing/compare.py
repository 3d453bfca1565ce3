"""The definition of when a kernel's result equals its reference's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from .._core.tensors import dtypes

if TYPE_CHECKING:
    from torch import Tensor

# {float type: (bits of the significand, exponent of the smallest number)}
_FLOATS: dict[Any, tuple[int, int]] = {
    dtypes.float32: (24, -149),
    dtypes.float16: (11, -24),
    dtypes.bfloat16: (8, -133),
}
CODES = (*dtypes.E4M3, dtypes.float8_e5m2, dtypes.int8, dtypes.uint8)

# Kernel and reference both accumulate float32 results in float32, where another order of thousands of terms changes the
# last four bits: one `ulp` of an op is 16 units for float32.
_FLOAT32_UNITS = 16
# Absolute tolerance: CuPy flushes denormals to zero, and a norm may multiply the loss by weight / sqrt(epsilon).
_FLUSHED = 1e-30
# The error that float32 leaves, relative to the largest result, when a few thousand terms of its size cancel.
CANCELLED = 2.0**-22
# A scale is the absmax of values that are rounded to 16 bits. If another order of summation flips the rounding of this
# maximum, the scale changes by one 16-bit ulp: the fraction of scales that may flip, and the relative change.
_FLIPPED, _FLIP = 2e-3, 2.0**-7
# Fraction of quantized values that may differ by one step because the value was close to a rounding tie.
_TIES = 1e-3


def bits(tensor: Tensor) -> Tensor:
    """The bytes of the elements, in order."""
    # `contiguous` may keep odd strides of dimensions of size 1.
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit.

    Examples:
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(bits(a), bits(b)))


def assert_close(
    expected: Tensor,
    actual: Tensor,
    ulps: int,
    what: str = "result",
    is_scale: bool = False,
    atol: float = CANCELLED,
) -> None:
    """Assert that `actual` is within `ulps` of `expected`, plus `cancelled` times its largest magnitude.

    0 ulps means equal values, and NaN must be at the same positions. Quantized values may differ by one step in one
    element or a thousandth of them, plus the number expected to be that close to a rounding tie if `cancelled` times
    the largest value is uncertain. Scales of quantized values may differ by one 16-bit ulp in two elements or a
    five-hundredth of them.

    Examples:
        >>> x = torch.randn(1000)
        >>> assert_close(x, x * (1 + 2**-23), ulps=1)
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
        f"{what}: NaN at other positions, {_worst(expected, actual, nan != actual.isnan())}"
    )
    precision, smallest = _FLOATS[dtypes.of(expected.dtype)]
    # Infinity counts as the next value after the largest: a result that barely overflows is one unit away.
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
    assert int(steps.sum()) <= allowed, f"{what}: {int(steps.sum())} values of {steps.numel()} differ by a step"


def _spacing(dtype: Any, values: Tensor) -> Tensor:
    """The spacing of fp8 or int8 values at these magnitudes."""
    if not dtype.is_floating_point:
        return torch.ones_like(values)
    limits = torch.finfo(dtype)
    return torch.exp2(torch.frexp(values.clamp(min=limits.tiny))[1] - 1.0) * limits.eps


def _ordinal(codes: Tensor) -> Tensor:
    """fp8 or int8 values mapped to consecutive integers. Both zeros are equal, and so are all NaN."""
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
