"""MXFP8 of experts' rows against float64: quants and scales are exact, for any contents and offsets."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

import pyops
from pyops import OpError
from tests.ops.quantize.test_fp4 import DTYPES, untiled
from tests.ops.quantize.test_mxfp4_experts import rows_of
from tests.support.calls import DEVICES
from tests.support.quantize_truth import _quietly, absmax, exact, f32, new

__all__ = ["_quietly"]  # a fixture


def truth(x: Any) -> tuple[Any, Any]:
    """(float64 values of quants, exponents of scales) of rows."""
    blocks = exact(x).reshape(x.shape[0], -1, 32)
    share = f32(absmax(blocks) * f32(1 / 448))
    powers = 2.0 ** numpy.arange(-127, 128)
    exponents = numpy.minimum(numpy.searchsorted(powers, share), 254)
    y = numpy.clip(blocks * 2.0 ** (127.0 - exponents), -448, 448)
    quantized = y.astype(ml_dtypes.float8_e4m3fn).astype(numpy.float64)
    return quantized.reshape(x.shape[0], -1), exponents[..., 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "firsts", "tiles", "scale_rows"),
    [
        ([5, 0, 130, 1], [0, 5, 6, 137], [0, 128, 128, 384], 515),  # with a row of no expert, and rows of no tile
        ([4, -300, 3], [8, 0, 4], [256, 0, 0], 384),  # in no order; a size below 0
        ([4, 9, 3, 2], [-1, 15, 2**31 - 2, 5], [0, 128, 256, 256], 384),  # rows that are not there
        ([4, 5, 3], [0, 4, 9], [-128, 256, 0], 300),  # tiles before the first row and beyond the last
    ],
)
def test_experts(
    sizes: list[int], firsts: list[int], tiles: list[int], scale_rows: int, dtype: torch.dtype, device: str
) -> None:
    num_rows, blocks, padded = max(12, 2 + sum(sizes)), 5, 8
    x = rows_of(num_rows, blocks * 32, dtype).to(device)
    quantized = new((num_rows, blocks * 32), torch.uint8, device)
    scales = new((scale_rows, padded), torch.uint8, device)
    lists = [[[rows, 7, blocks * 32] for rows in sizes], firsts, tiles]
    arguments = [torch.tensor(one, dtype=torch.int32, device=device) for one in lists]
    pyops.mxfp8_experts_quant(x, *arguments, quantized.view(torch.float8_e4m3fn), scales)
    unwritten_rows, unwritten = numpy.ones(num_rows, bool), numpy.ones(scale_rows * padded, bool)
    for rows, first, tile in zip(sizes, firsts, tiles, strict=True):
        fill = -(-rows // 128) * 128
        if rows <= 0 or not 0 <= first <= num_rows - rows or not 0 <= tile <= scale_rows - fill:
            continue
        right, scale = truth(x[first : first + rows])
        found = quantized[first : first + rows].cpu().view(torch.float8_e4m3fn).double().numpy()
        assert numpy.array_equal(found, right, equal_nan=True)
        assert (numpy.signbit(found) == numpy.signbit(right))[~numpy.isnan(right)].all()
        whole = untiled(scales, padded, fill, tile)
        assert (whole[:rows, :blocks] == scale).all()
        assert not whole[rows:].any()
        assert not whole[:, blocks:].any()
        unwritten_rows[first : first + rows] = False
        unwritten[tile * padded : (tile + fill) * padded] = False
    assert (quantized.cpu().numpy()[unwritten_rows] == 0x55).all()
    assert (scales.cpu().flatten().numpy()[unwritten] == 0x55).all()


@pytest.mark.parametrize("device", DEVICES)
def test_scales_at_their_bounds(device: str) -> None:
    """448 times a power of two has that power as its scale, and the next number the next power."""
    magnitudes = [448.0, 450.0, 447.0, 2.0**-126, 448 * 2.0**-127, 452 * 2.0**-127, 2.0**-133, 0.0, 3e38, float("inf")]
    x = torch.zeros(len(magnitudes), 32, dtype=torch.bfloat16)
    x[:, 3] = -torch.tensor(magnitudes)
    lists = [torch.tensor(one, dtype=torch.int32, device=device) for one in ([[len(x), 0, 0]], [0], [0])]
    quantized, scales = new((len(x), 32), torch.uint8, device), new((128, 4), torch.uint8, device)
    pyops.mxfp8_experts_quant(x.to(device), *lists, quantized.view(torch.float8_e4m3fn), scales)
    right, scale = truth(x)
    assert scale[:, 0].tolist() == [127, 128, 127, 0, 0, 1, 0, 0, 247, 254]
    assert (untiled(scales, 4, len(x))[:, :1] == scale).all()
    assert numpy.array_equal(quantized.cpu().view(torch.float8_e4m3fn).double().numpy(), right)


def test_refused() -> None:
    x, quantized = torch.zeros(2, 64).half(), torch.zeros(2, 64).to(torch.float8_e4m3fn)
    scales, sizes, offsets = torch.zeros(128, 4).byte(), torch.zeros(1, 3).int(), torch.zeros(1).int()
    for match, arguments in (
        (
            "input: expected a last dimension of multiples of 32",
            (x[:, :48], sizes, offsets, offsets, quantized, scales),
        ),
        ("input: expected 2 dimensions", (x[0], sizes, offsets, offsets, quantized, scales)),
        ("problem_sizes: expected shape", (x, sizes[:, :2], offsets, offsets, quantized, scales)),
        ("expert_offsets: expected dtype int32", (x, sizes, offsets.long(), offsets, quantized, scales)),
        ("quant_output: expected dtype float8_e4m3fn", (x, sizes, offsets, offsets, x, scales)),
        ("scale_factor: expected shape", (x, sizes, offsets, offsets, quantized, scales[:, :2])),
    ):
        with pytest.raises(OpError, match=match):
            pyops.mxfp8_experts_quant(*arguments)
