"""Quantisation under a scale for each group of consecutive elements: quants and scales are exact."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops.testing import CONTENTS, Layout, filled, strategies
from tests.support.calls import DEVICES
from tests.support.quantize_truth import E4M3, FNUZ, FP8, INT8, LIMITS, _quietly, draw, exact, grouped, new, same

__all__ = ["_quietly"]  # a fixture


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
    """Any group size, in any order of the scales; gaps between columns are left alone."""
    x = draw(*shape, device=device)
    for kind, power_of_two in ((FP8, False), (FP8, True), (FNUZ, False), (FNUZ, True)):
        quantized, s = new(shape, kind, device), _scales(shape[0], shape[1] // group_size, scales, device)
        pyops.per_token_group_fp8_quant(x, quantized, s, group_size, 1e-10, *LIMITS[kind], power_of_two)
        right, right_scale = grouped(exact(x), group_size, kind, power_of_two)
        same(s, right_scale)
        same(quantized, right)
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
        quantized = layout.place(new(x.shape, dtype, device))
        s = new((5, 192 // group_size), torch.float32, device)
        if dtype is not INT8:
            pyops.per_token_group_fp8_quant(placed, quantized, s, group_size, eps, *limits, power_of_two)
        else:
            pyops.per_token_group_quant_int8(placed, quantized, s, group_size, eps, *limits)
        right, right_scale = grouped(exact(x), group_size, dtype, power_of_two and dtype is not INT8, eps, limits)
        same(s, right_scale)
        same(quantized, right)


@pytest.mark.parametrize("device", DEVICES)
def test_power_of_two_scales(device: str) -> None:
    """A magnitude of 448 times a power of two has that power as its scale, and a slightly larger one the next."""
    powers = 2.0 ** torch.arange(-30, 31, device=device)
    x = torch.stack((powers * 448, (powers * 448).nextafter(powers * 1000), powers * 447), -1)
    quantized, s = new(x.shape, FP8, device), new(x.shape, torch.float32, device)
    pyops.per_token_group_fp8_quant(x, quantized, s, 1, 1e-10, -448.0, 448.0, True)
    assert torch.equal(s, torch.stack((powers, powers * 2, powers), -1))
    zeros = torch.zeros(1, 4, device=device)
    pyops.per_token_group_fp8_quant(
        zeros, quantized[:1, :1].expand(1, 1).new_empty(1, 4), s[:1, :1], 4, 1e-12, -448.0, 448.0, True
    )
    assert s[0, 0].item() == 2.0**-33  # the next power after 1e-10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (5, 3), (8, 4), (6, 9)])
@pytest.mark.parametrize("padded", [False, True])
@E4M3
def test_packed_exponents(kind: torch.dtype, padded: bool, rows: int, groups: int, device: str) -> None:
    """Four exponents per word, the first in its lowest byte; zeros where there are no groups or tokens."""
    x = draw(rows, groups * 64, device=device) * torch.arange(1, rows + 1, device=device)[:, None].bfloat16()
    stride, words = -(-rows // 4) * 4, -(-groups // 4)
    packed = new((words, stride), torch.int32, device).t()
    before = packed.clone()
    quantized = new(x.shape, kind, device)
    given_rows = stride if padded else rows
    pyops.per_token_group_fp8_quant_packed(x, quantized, packed[:given_rows], 64, 1e-10, *LIMITS[kind])
    right, scale = grouped(exact(x), 64, kind, power_of_two=True)
    same(quantized, right)
    exponents = numpy.zeros((given_rows, words * 4), "int64")
    exponents[:rows, :groups] = numpy.log2(scale) + 127
    right_words = sum(exponents[:, byte::4] << 8 * byte for byte in range(4))
    assert packed[:given_rows].cpu().numpy().astype("uint32").tolist() == right_words.tolist()
    assert not packed[given_rows:, :-1].any()  # between the columns
    assert torch.equal(packed[given_rows:, -1], before[given_rows:, -1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "code_rows", "zeros"), [(1, 4, 3), (5, 7, 2), (5, 11, 3), (8, 9, 0), (0, 2, 0)])
def test_packed_exponents_with_padded_rows(rows: int, code_rows: int, zeros: int, device: str) -> None:
    """Rows after the tokens become 0 up to a multiple of 4; scales have no such rows here."""
    x = draw(rows, 320, device=device)
    memory = torch.full((code_rows, 400), 7, dtype=torch.uint8, device=device)
    right = torch.full((code_rows, 320), 7, dtype=torch.uint8, device=device)
    scales, expected = (torch.full((rows + 5, 2), -1, dtype=torch.int32, device=device) for _ in range(2))
    limits = 1e-10, *LIMITS[FP8]
    pyops.per_token_group_fp8_quant_packed(x, right[:rows], expected[:rows], 64, *limits)
    right[rows : rows + zeros] = 0
    pyops.per_token_group_fp8_quant_packed(x, memory[:, :320], scales[:rows], 64, *limits)
    assert torch.equal(memory[:, :320], right)
    assert (memory[:, 320:] == 7).all()
    assert torch.equal(scales, expected)
    with pytest.raises(pyops.OpError, match=r"output_q: expected at least 3 rows of 320 elements, got \(2, 320\)"):
        pyops.per_token_group_fp8_quant_packed(draw(3, 320, device=device), right[:2], scales[:3], 64, *limits)
