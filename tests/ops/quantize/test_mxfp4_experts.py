"""MXFP4 of experts' rows against float64: quants and scales are exact, for any contents and offsets."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import pyops
from pyops import OpError
from tests.ops.quantize.test_fp4 import DTYPES, E2M1, SIXTH, of_experts, untiled
from tests.support.calls import DEVICES
from tests.support.quantize_truth import _quietly, absmax, exact, f32, nearest, new

__all__ = ["_quietly"]  # a fixture


def truth(x: Any) -> tuple[Any, Any]:
    """(quants, two per byte; exponents of scales) of rows."""
    blocks = exact(x).reshape(x.shape[0], -1, 32)
    share = f32(absmax(blocks) * SIXTH)
    exponents = numpy.where(numpy.isinf(share), 255, numpy.maximum(numpy.frexp(share)[1] + 126, 0))
    exponents = numpy.where(share == 0, 0, exponents).astype("int64")
    factor = numpy.where((exponents == 0) | (exponents == 255), 0.0, 2.0 ** (127.0 - exponents))
    y = f32(blocks * factor)
    code, negative = nearest(y, E2M1)
    quantized = numpy.where(numpy.isnan(y), 7, code | (negative << 3)).reshape(x.shape[0], -1)
    return quantized[:, ::2] | quantized[:, 1::2] << 4, exponents[..., 0]


def rows_of(num_rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows of many magnitudes; the first ones have NaN, infinity, zeros of both signs and tiny numbers."""
    generator = torch.Generator().manual_seed(num_rows + columns)
    x = torch.randn(num_rows, columns, generator=generator)
    x = (x * 2.0 ** torch.randint(-12, 12, (num_rows, 1), generator=generator)).to(dtype)
    specials = [float("nan"), float("inf"), -0.0, -torch.finfo(dtype).tiny]
    for row, special in zip(x[:4], specials, strict=False):
        row[5 if special != 0 else slice(None)] = special
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("offsets", "tiles", "scale_rows"),
    [
        (*of_experts([5, 0, 130, 1]), 515),
        ([0, 4, 3, 9], [0, 128, 256, 384], 384),  # ends at a descending offset
        ([0, 4, 9, 99], [0, -128, 128, 256], 256),  # tiles before the first row; rows out of range
        ([0, 4, 9, 12], [0, 128, 256, 384], 300),  # tiles that extend beyond the scales
    ],
)
def test_experts(offsets: list[int], tiles: list[int], scale_rows: int, dtype: torch.dtype, device: str) -> None:
    num_rows, blocks, padded = offsets[-1] if offsets[-1] < 99 else 12, 5, 8
    x = rows_of(num_rows, blocks * 32, dtype).to(device)
    quantized, scales = new((num_rows, blocks * 16), torch.uint8, device), new((scale_rows, 2), torch.int32, device)
    of_offsets = [torch.tensor(of, dtype=torch.int32, device=device) for of in (offsets, tiles)]
    pyops.mxfp4_experts_quant(quantized, scales, x, *of_offsets, len(offsets) - 1)
    right, written = numpy.full((num_rows, blocks * 16), 0x55, "uint8"), numpy.zeros(scale_rows * padded, bool)
    for first, end, tile in zip(offsets, offsets[1:], tiles, strict=False):
        if not 0 <= first <= end <= num_rows:
            break
        fill = -(-(end - first) // 128) * 128
        if first == end or tile < 0 or tile + fill > scale_rows:
            continue
        right[first:end], scale = truth(x[first:end])
        whole = untiled(scales, padded, fill, tile)
        assert (whole[: end - first, :blocks] == scale).all()
        assert not whole[end - first :].any()
        assert not whole[:, blocks:].any()
        written[tile * padded : (tile + fill) * padded] = True
    assert (quantized.cpu().numpy() == right).all()
    assert (scales.cpu().view(torch.uint8).flatten().numpy()[~written] == 0x55).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(dtype: torch.dtype, device: str) -> None:
    """The quants are those of the gated activation, rounded once."""
    x = torch.randn(9, 2 * 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate, up = x.float().chunk(2, dim=-1)
    product = (torch.nn.functional.silu(gate) * up).to(dtype)
    quantized, scales = new((9, 48), torch.uint8, device), new((128, 1), torch.int32, device)
    offsets = [torch.tensor(of, dtype=torch.int32, device=device) for of in ([0, 9], [0, 128])]
    pyops.silu_and_mul_mxfp4_experts_quant(quantized, scales, x.to(device), *offsets, 1)
    right, scale = truth(product)
    assert (quantized.cpu().numpy() == right).all()
    assert (untiled(scales, 3, 9) == scale).all()


def test_refused() -> None:
    quantized, scales, offsets = (
        torch.zeros(2, 24, dtype=torch.uint8),
        torch.zeros(128, 1, dtype=torch.int32),
        torch.zeros(2),
    )
    with pytest.raises(OpError, match="input: expected a last dimension of multiples of 32"):
        pyops.mxfp4_experts_quant(quantized, scales, torch.zeros(2, 48).half(), offsets.int(), offsets.int(), 1)
    quantized = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(OpError, match="input_offset_by_experts"):
        pyops.mxfp4_experts_quant(quantized, scales, torch.zeros(2, 32).half(), offsets.int(), offsets.int(), 3)
