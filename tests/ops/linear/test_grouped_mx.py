"""Grouped GEMMs of MXFP4 and MXFP8 against float64: values by ml_dtypes, offsets of scales by their formula."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

import pyops
from pyops import OpError
from pyops._core.op.op import registry
from pyops._core.system.device import model
from pyops.example import ArgMaker
from pyops.ops.linear.block_scaled import MXFP4, MXFP8
from tests.ops.linear.test_products import assert_rounded_once
from tests.support.calls import DEVICES

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)

FORMATS = {"cutlass_mxfp4_group_mm": "float4_e2m1fn", "cutlass_mxfp8_grouped_mm": "float8_e4m3fn"}


def place(row: int, block: int, columns: int) -> int:
    """The byte offset of the scale of a row's block."""
    return (row // 128 * (columns // 4) + block // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + block % 4


def exact(name: str, codes: Any, scales: Any, first: int = 0) -> Any:
    """float64 values of quantized rows; `first` is the row of the first one in the scale tiles."""
    each = codes.view(torch.uint8).numpy()
    if name == "cutlass_mxfp4_group_mm":
        each = numpy.stack((each & 15, each >> 4), -1).reshape(len(each), 2 * each.shape[1])
    values = each.view(getattr(ml_dtypes, FORMATS[name])).astype(numpy.float64)
    columns, flat = scales.shape[-1], scales.numpy().reshape(-1).view(ml_dtypes.float8_e8m0fnu).astype(numpy.float64)
    for m in range(len(values)):
        for block in range(values.shape[1] // 32):
            values[m, block * 32 : block * 32 + 32] *= flat[place(first + m, block, columns)]
    return torch.from_numpy(values)


def draw_codes(name: str, *sizes: int, generator: torch.Generator) -> torch.Tensor:
    """Quantized values [..., K] without NaN."""
    if name == "cutlass_mxfp4_group_mm":
        return torch.randint(0, 256, (*sizes[:-1], sizes[-1] // 2), generator=generator, dtype=torch.uint8)
    return torch.randn(*sizes, generator=generator).to(torch.float8_e4m3fn)


def call(name: str, out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, *lists: Any) -> None:
    operands = (
        (a, b, a_scales, b_scales, out) if name == "cutlass_mxfp8_grouped_mm" else (out, a, b, a_scales, b_scales)
    )
    getattr(pyops, name)(*operands, *lists)


def case(name: str, counts: list[int], n: int, k: int, device: str) -> tuple[list[Any], torch.Tensor]:
    """(arguments of `call`, float64 result). Both contain 7 in rows of no expert and of experts without rows.

    After the rows of each expert there is one unused row, and an unused tile of scales.
    """
    generator = torch.Generator().manual_seed(len(counts) + n)
    firsts = [sum(counts[:e]) + e for e in range(len(counts))]
    tiles = [sum(-(-count // 128) * 128 + 128 for count in counts[:e]) for e in range(len(counts))]
    num_rows, columns = sum(counts) + len(counts), -(-k // 128) * 4
    a, b = (draw_codes(name, *sizes, k, generator=generator) for sizes in ((num_rows,), (len(counts), n)))
    scale_rows = tiles[-1] + -(-counts[-1] // 128) * 128 + 128
    a_scales = torch.randint(110, 140, (scale_rows, columns), generator=generator, dtype=torch.uint8)
    padded = -(-n // 128) * 128
    b_scales = torch.randint(110, 140, (len(counts), padded, columns), generator=generator, dtype=torch.uint8)
    out = torch.full((num_rows, n), 7.0, dtype=torch.bfloat16)
    right = out.double()
    for e, (count, first, tile) in enumerate(zip(counts, firsts, tiles, strict=True)):
        rows = slice(first, first + count)
        right[rows] = exact(name, a[rows], a_scales, tile) @ exact(name, b[e], b_scales[e]).T
    lists = [torch.tensor(one, dtype=torch.int32) for one in ([[m, n, k] for m in counts], firsts, tiles)]
    return [one.to(device) for one in (out, a, b, a_scales, b_scales, *lists)], right


@ANY_DEVICE
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("counts", "n", "k"), [([5, 0, 131], 40, 160), ([1], 136, 32)])
def test_matches_float64(name: str, counts: list[int], n: int, k: int, device: str) -> None:
    (out, *operands), right = case(name, counts, n, k, device)
    call(name, out, *operands)
    assert_rounded_once(out.cpu(), right)


@ANY_DEVICE
@pytest.mark.parametrize(("counts", "n", "k"), [([5, 0, 20], 64, 96), ([1, 70], 128, 416), ([300], 64, 128)])
def test_small_m_reads_packed_weights(counts: list[int], n: int, k: int, device: str) -> None:
    """At small M the kernel reads MXFP4 weights; for 300 rows they are dequantised first."""
    name = "cutlass_mxfp4_group_mm"
    (out, *operands), right = case(name, counts, n, k, device)
    call(name, out, *operands)
    assert_rounded_once(out.cpu(), right)


def test_choice_of_packed_weights() -> None:
    """For unsupported sizes or too many rows, weights are dequantised first."""
    op = registry["cutlass_mxfp4_group_mm"]
    for axes, by_codes in (
        ({"num_tokens": 16, "output_size": 64}, "wq_grouped_gemm_sm80"),
        ({"num_tokens": 1000, "output_size": 64}, "wq_grouped_gemm_sm90"),
        ({"num_tokens": 4000, "output_size": 64}, ""),
        ({"num_tokens": 16, "output_size": 72}, ""),
    ):
        launches = op.launches(*op.example(ArgMaker(model("sm_90")), **axes, input_size=128))
        kernels = [launch.specialisation.kernel.file for launch in launches]
        read = [kernel for kernel in kernels if kernel.startswith("linear/wq_grouped_gemm")]
        assert read == ([f"linear/{by_codes}.cu"] if by_codes else [])
        assert ("linear/untile_scales.cu" in kernels) is bool(by_codes)


@ANY_DEVICE
def test_transposed_weight_views(device: str) -> None:
    """vLLM passes weights and their scales as [num_experts, K, N]."""
    name = "cutlass_mxfp8_grouped_mm"
    (out, a, b, a_scales, b_scales, *lists), _ = case(name, [3, 4], 128, 128, device)
    other = out.clone()
    call(name, out, a, b, a_scales, b_scales, *lists)
    call(name, other, a, b.transpose(1, 2), a_scales, b_scales.transpose(1, 2), *lists)
    assert torch.equal(out, other)


@ANY_DEVICE
@pytest.mark.parametrize("name", FORMATS)
def test_extreme_scales(name: str, device: str) -> None:
    """The scale byte 0 is 2^-127, the largest 2^127; 255 is NaN. Missing rows have scales of zero."""
    codes = torch.full((1, 16), 0x22, dtype=torch.uint8)  # 1 and 1
    if name == "cutlass_mxfp8_grouped_mm":
        codes = torch.ones(1, 32).to(torch.float8_e4m3fn)
    lists = [torch.tensor(one, dtype=torch.int32).to(device) for one in ([[1, 1, 32]], [0])]
    for a_scale, b_scale, tile, right in (
        (0, 254, 0, 32.0),
        (254, 0, 0, 32.0),
        (255, 127, 0, float("nan")),
        (127, 127, -128, 0.0),
        (127, 127, 128, 0.0),
    ):
        scales = [torch.full((128, 4), one, dtype=torch.uint8, device=device) for one in (a_scale, b_scale)]
        out, tiles = torch.ones(1, 1).bfloat16().to(device), torch.tensor([tile], dtype=torch.int32, device=device)
        call(name, out, codes.to(device), codes.view(1, 1, -1).to(device), scales[0], scales[1][None], *lists, tiles)
        assert torch.equal(out.cpu().float().nan_to_num(-1), torch.tensor([[right]]).nan_to_num(-1)), (a_scale, tile)


def test_weights_of_idle_experts_are_not_written() -> None:
    """The launch that dequantises weights to bfloat16 gets the row count of each expert."""
    for name, format in zip(FORMATS, (MXFP4, MXFP8), strict=True):
        op = registry[name]
        launches = op.launches(*op.example(ArgMaker(model("sm_90"))))
        constants = [launch.specialisation.constants for launch in launches[1:3]]
        assert [one["HAS_SIZES"] for one in constants] == [False, True]
        assert {one["SCALE_SIZE"] for one in constants} == {format.scale_size}


def test_refused() -> None:
    (out, a, b, a_scales, b_scales, *lists), _ = case("cutlass_mxfp8_grouped_mm", [2], 128, 64, "cpu")
    mm = pyops.cutlass_mxfp8_grouped_mm
    for match, arguments in (
        ("a: expected rows of a multiple of 32 elements", (a[:, :48], b[..., :48], a_scales, b_scales, out, *lists)),
        ("a: expected dtype float8_e4m3fn", (a.view(torch.uint8), b, a_scales, b_scales, out, *lists)),
        ("sfa: expected a multiple of 128 rows", (a, b, a_scales[:130], b_scales, out, *lists)),
        ("sfb: expected shape", (a, b, a_scales, b_scales[:, :, :3], out, *lists)),
        ("sfb: expected dtype float8_e8m0fnu or uint8", (a, b, a_scales, b_scales.int(), out, *lists)),
        ("blockscale_offsets: expected dtype int32", (a, b, a_scales, b_scales, out, *lists[:2], lists[2].long())),
    ):
        with pytest.raises(OpError, match=match):
            mm(*arguments)
