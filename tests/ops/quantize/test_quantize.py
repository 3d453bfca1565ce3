"""Quantising ops against float64: quants and scales are exact, for any contents, strides and scales."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops._core import config
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.testing import CONTENTS, Layout, filled, strategies
from tests.support.calls import DEVICES
from tests.support.quantize_truth import (
    _VALUES,
    DTYPES,
    E4M3,
    FNUZ,
    FP8,
    INT8,
    LARGEST,
    _quietly,
    absmax,
    draw,
    exact,
    f32,
    fp8,
    new,
    same,
    static_fp8,
    static_int8,
    token_azp,
    token_fp8,
    token_int8,
)

__all__ = ["_quietly"]  # a fixture

# Given scales


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
    """Block scales in two dimensions and, where possible, in one; with any strides."""
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
def test_static_fp8_at_large_m(gap: int, dtype: torch.dtype, small: devices.Device) -> None:
    """Enough rows to fill a device, here a small one: a thread reads two vectors where output vectors are wide."""
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
def test_static_fp8_strided_rows(device: str) -> None:
    """Rows of one stride, contiguous or not, of three dimensions, aligned or not, of sizes that vectors divide or
    not."""
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
    """All 65536 bit patterns under scales that reach every fp8 value, saturate, and make ties."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(256, 256).to(device)
    for scale in (1.0, 0.5, -3.0, 0.0371, 2.0**-9, 2.0**20):
        quantized = new(x.shape, kind, device)
        pyops.static_scaled_fp8_quant(quantized, x, torch.tensor(scale, device=device))
        same(quantized, static_fp8(exact(x), exact(torch.tensor(scale)), kind))


@pytest.mark.parametrize("device", DEVICES)
def test_fnuz_limits(device: str) -> None:
    """It saturates at 224, though the type goes up to 240; no result is -0, and NaN only for NaN."""
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
    quantized = new(x.shape, FNUZ, device)
    pyops.static_scaled_fp8_quant(quantized, x, torch.ones(1, device=device))
    plus, minus = quantized.view(torch.uint8).tolist()
    assert plus == [0x7E] * 8 + [1] + [0] * 4
    assert minus == [0xFE] * 7 + [0x7E, 0x81] + [0] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", BAD)
@E4M3
def test_bad_scales(kind: torch.dtype, scale: float, device: str) -> None:
    """Zero, negative, infinite, NaN and subnormal scales, for all kinds of values; -0 keeps its sign."""
    x = torch.tensor(SPECIAL, device=device)
    s = torch.tensor([scale], device=device)
    quantized, eights = new(x.shape, kind, device), new(x.shape, INT8, device)
    pyops.static_scaled_fp8_quant(quantized, x, s)
    same(quantized, static_fp8(exact(x), exact(s), kind))
    if scale == 0.0:
        assert quantized.float()[:8].tolist() == [0.0] * 8
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
def test_static_int8_saturates_before_and_after_the_zero_point(device: str) -> None:
    """Values next to the ends of int32, and zero points of the same sign: nothing wraps around."""
    ends = torch.tensor([2.0**31, -(2.0**31)], device=device)
    x = torch.stack([ends.nextafter(ends * 0), ends, ends.nextafter(ends * 2), ends * 1e9]).flatten()
    one, result = torch.ones((), device=device), new(x.shape, INT8, device)
    for azp in (0, 100, -100, 2**31 - 1, -(2**31)):
        pyops.static_scaled_int8_quant(result, x, one, torch.tensor(azp, dtype=torch.int32, device=device))
        same(result, static_int8(exact(x), 1.0, azp))
    assert static_int8(exact(x), 1.0, 100).tolist() == [127, -128] * 4


@pytest.mark.parametrize("device", DEVICES)
@E4M3
def test_ties_round_to_even(kind: torch.dtype, device: str) -> None:
    """Halfway between two fp8 values, and the float32 numbers next to it, for every value and many scales."""
    ties8, largest = numpy.arange(-129.5, 129, 1.0), LARGEST[kind]
    ties = (_VALUES[:127] + _VALUES[1:128]) / 2 * (largest / 448)  # the last lies above 448, the largest value
    generator = numpy.random.default_rng(0)
    few_bits = generator.integers(128, 256, 40) * 2.0**-7 + generator.integers(-3, 4, 40) * 2.0**-23
    for scale in (*few_bits, *generator.uniform(0.5, 2, 40), 2 - 2.0**-23, 1 + 2.0**-23):
        scale = float(f32(scale))
        s = torch.tensor([scale], device=device)
        near = f32(numpy.concatenate((ties8, ties, -ties)) * scale)
        beside = [numpy.nextafter(near.astype("float32"), numpy.float32(to * numpy.inf)) for to in (-1, 1)]
        x = torch.tensor(numpy.concatenate((near, *beside)), dtype=torch.float32, device=device)
        quantized, eights, scales = (
            new(x.shape, kind, device),
            new(x.shape, INT8, device),
            new((1, 1), torch.float32, device),
        )
        pyops.static_scaled_fp8_quant(quantized, x, s)
        same(quantized, static_fp8(exact(x), scale, kind))
        pyops.static_scaled_int8_quant(eights, x, s, None)
        same(eights, static_int8(exact(x), scale, None))
        # The same values under a dynamic scale: their absmax is the fp8 maximum times it.
        absmax_ = largest * scale
        row = torch.cat((x.clamp(-absmax_, absmax_), torch.tensor([absmax_], device=device)))[None]
        quantized = new(row.shape, kind, device)
        pyops.dynamic_per_token_scaled_fp8_quant(quantized, row, scales, None)
        right, right_scale = token_fp8(exact(row), None, kind)
        same(scales, right_scale)
        same(quantized, right)


# Per-tensor dynamic scales


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
def test_absmax_may_be_anywhere_in_the_tensor(rows: int, device: str) -> None:
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
    ("values", "scale", "quantized"),
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
    kind: torch.dtype, values: list[float], scale: float | None, quantized: list[float], device: str
) -> None:
    x, found = torch.tensor([values], device=device) * (LARGEST[kind] / 448), new((1,), torch.float32, device)
    result = new(x.shape, kind, device)
    pyops.dynamic_scaled_fp8_quant(result, x, found)
    assert result.float()[0].tolist() == [code * LARGEST[kind] / 448 for code in quantized]
    same(found, f32(absmax(exact(x)).item() / LARGEST[kind]) if scale is None else scale)


# Per-token dynamic scales


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
    """fp8 with and without scale_ub, int8 with and without zero points."""
    x = draw(tokens, hidden_size, dtype=dtype, device=device) + 3
    quantized, eights = new(x.shape, kind, device), new(x.shape, INT8, device)
    scale, azp = new((tokens, 1), torch.float32, device), new((tokens, 1), torch.int32, device)
    for bound in (None, 5.0, -1.0, float("nan"), float("inf")):
        limit = None if bound is None else torch.tensor([bound], device=device)
        pyops.dynamic_per_token_scaled_fp8_quant(quantized, x, scale, limit)
        right, right_scale = token_fp8(exact(x), bound, kind)
        same(scale, right_scale)
        same(quantized, right)
    pyops.dynamic_scaled_int8_quant(eights, x, scale, None)
    right, right_scale = token_int8(exact(x))
    same(scale, right_scale)
    same(eights, right)
    for values in (x, x.abs() + 1):  # of both signs, and positive ones away from 0
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
    quantized, eights = new(x.shape, kind, device), new(x.shape, INT8, device)
    scale, azp = new((len(ROWS),), torch.float32, device), new((len(ROWS),), torch.int32, device)
    pyops.dynamic_per_token_scaled_fp8_quant(quantized, x, scale)
    right, right_scale = token_fp8(exact(x), None, kind)
    same(scale, right_scale)
    same(quantized, right)
    pyops.dynamic_scaled_int8_quant(eights, x, scale, None)
    right, right_scale = token_int8(exact(x))
    same(scale, right_scale)
    same(eights, right)
    pyops.dynamic_scaled_int8_quant(eights, x, scale, azp)
    right, right_scale, right_azp = token_azp(exact(x))
    same(scale, right_scale)
    same(azp, right_azp)
    same(eights, right)
    for row in (1, 13, 14):  # constant rows come back exactly
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
def test_dynamic_quant_of_any_contents(
    x: torch.Tensor, layout: Layout, kind: str, bound: float | None, e4m3: torch.dtype, device: str
) -> None:
    x = filled(x, kind).to(device)
    quantized, scale = layout.place(new(x.shape, e4m3, device)), new((6,), torch.float32, device)
    limit = None if bound is None else torch.tensor(bound, device=device)
    pyops.dynamic_per_token_scaled_fp8_quant(quantized, layout.place(x), scale, limit)
    right, right_scale = token_fp8(exact(x), bound, e4m3)
    same(scale, right_scale)
    same(quantized, right)
    eights, azp = new(x.shape, INT8, device), new((6,), torch.int32, device)
    pyops.dynamic_scaled_int8_quant(eights, x.contiguous(), scale, azp)
    right, right_scale, right_azp = token_azp(exact(x))
    same(scale, right_scale)
    same(azp, right_azp)
    same(eights, right)
    one = new((), torch.float32, device)
    pyops.dynamic_scaled_fp8_quant(quantized, layout.place(x), one)
    right_scale = f32(absmax(exact(x).reshape(1, -1)).item() / LARGEST[e4m3])
    same(one, right_scale)
    same(quantized, static_fp8(exact(x), right_scale, e4m3))


@pytest.mark.parametrize("device", DEVICES)
@given(
    x=strategies.tensors((5, 96), "float32"),
    kind=st.sampled_from(CONTENTS),
    scale=st.floats(width=32),
    azp=st.none() | st.integers(-(2**31), 2**31 - 1),
    e4m3=st.sampled_from([FP8, FNUZ]),
)
def test_static_quant_under_any_scale(
    x: torch.Tensor, kind: str, scale: float, azp: int | None, e4m3: torch.dtype, device: str
) -> None:
    x = filled(x, kind).to(device).contiguous()
    s = torch.tensor([scale], device=device)
    quantized, eights = new(x.shape, e4m3, device), new(x.shape, INT8, device)
    pyops.static_scaled_fp8_quant(quantized, x, s)
    same(quantized, static_fp8(exact(x), scale, e4m3))
    zero = None if azp is None else torch.tensor([azp], dtype=torch.int32, device=device)
    pyops.static_scaled_int8_quant(eights, x, s, zero)
    same(eights, static_int8(exact(x), scale, azp))


# Refusals


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
def test_static_fp8_refused(shape: tuple[int, ...], group_shape: Any, message: str) -> None:
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


def test_other_arguments_refused() -> None:
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
                for quantized, scale in (pyops.scaled_fp8_quant(x), pyops.scaled_fp8_quant(x, torch.ones(1))):
                    assert quantized.shape == shape
                    assert scale.shape == (1,)
                assert pyops.scaled_int8_quant(x)[0].shape == shape
                assert pyops.permute_cols(x, torch.arange(shape[1]).int()).shape == shape


def test_blocks_of_the_absmax_kernel() -> None:
    """At most two blocks per SM, because every block of the second kernel reads the results of all of them."""
    op = pyops.registry["dynamic_scaled_fp8_quant"]
    assert op.example is not None
    for num_tokens, blocks, batch in ((1, 1, 1), (16, 16, 1), (256, 256, 1), (4096, 264, 8)):
        first, second = op.launches(*op.example(ArgMaker(devices.model()), num_tokens=num_tokens))
        assert (first.grid[0], first.specialisation.constants["BATCH"]) == (blocks, batch)
        assert second.fixed["num_partial"] == blocks
