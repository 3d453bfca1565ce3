"""Grouped GEMMs of NVFP4, MXFP4 and MXFP8 against float64: values by ml_dtypes, offsets of scales by their formula."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

import pyops
from pyops import OpError, tuning
from pyops._core.launch.scratch import Scratch
from pyops._core.launch.tensor_map import TensorMap
from pyops._core.op.op import registry
from pyops._core.system.device import model
from pyops.example import ArgMaker
from pyops.ops.linear import grouped_block_scaled
from pyops.ops.linear.block_scaled import MXFP4, MXFP8, NVFP4
from pyops.ops.linear.wq_grouped_configs import WqGroupedSm80Config, WqGroupedSm90Config
from pyops.testing import SCHEDULES, canaries, cpu, scheduled
from tests.ops.linear.test_grouped import forced, needs_compiler
from tests.ops.linear.test_products import assert_rounded_once
from tests.support.calls import DEVICES

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)

FP4, MX4, MX8 = "cutlass_fp4_group_mm", "cutlass_mxfp4_group_mm", "cutlass_mxfp8_grouped_mm"
# {op: (types of values and of scales, values under one scale)}
FORMATS = {
    FP4: ("float4_e2m1fn", "float8_e4m3fn", 16),
    MX4: ("float4_e2m1fn", "float8_e8m0fnu", 32),
    MX8: ("float8_e4m3fn", "float8_e8m0fnu", 32),
}
ANY_FORMAT = pytest.mark.parametrize("name", FORMATS)


def scale_offset(row: int, block: int, columns: int) -> int:
    """The byte offset of the scale of a row's block."""
    return (row // 128 * (columns // 4) + block // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + block % 4


def exact(name: str, codes: Any, scales: Any, first: int = 0) -> Any:
    """float64 values of quantized rows; `first` is the row of the first one in the scale tiles."""
    each = codes.view(torch.uint8).numpy()
    if name != MX8:
        each = numpy.stack((each & 15, each >> 4), -1).reshape(len(each), 2 * each.shape[1])
    of_values, of_scales, size = FORMATS[name]
    values = each.view(getattr(ml_dtypes, of_values)).astype(numpy.float64)
    columns, flat = scales.shape[-1], scales.numpy().reshape(-1).view(getattr(ml_dtypes, of_scales)).astype(float)
    for m in range(len(values)):
        for block in range(values.shape[1] // size):
            values[m, block * size : (block + 1) * size] *= flat[scale_offset(first + m, block, columns)]
    return torch.from_numpy(values)


def alphas_of(name: str, num_experts: int) -> torch.Tensor:
    """The factor of each expert; ones but for NVFP4."""
    return 1.5 + torch.arange(num_experts) if name == FP4 else torch.ones(num_experts)


def draw_codes(name: str, *sizes: int, generator: torch.Generator) -> torch.Tensor:
    """Quantized values [..., K] without NaN."""
    if name != MX8:
        return torch.randint(0, 256, (*sizes[:-1], sizes[-1] // 2), generator=generator, dtype=torch.uint8)
    return torch.randn(*sizes, generator=generator).to(torch.float8_e4m3fn)


def draw_scales(name: str, *sizes: int, generator: torch.Generator) -> torch.Tensor:
    """Bytes of scales without NaN; of NVFP4 with all mantissas."""
    if name == FP4:
        return (torch.randn(*sizes, generator=generator).abs() * 4).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.randint(110, 140, sizes, generator=generator, dtype=torch.uint8)


def call(name: str, out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, *lists: Any) -> None:
    operands = (a, b, a_scales, b_scales, out) if name == MX8 else (out, a, b, a_scales, b_scales)
    alphas = [alphas_of(name, len(b)).to(out.device)] if name == FP4 else []
    getattr(pyops, name)(*operands, *alphas, *lists)


def case(
    name: str, counts: list[int], n: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Any], torch.Tensor]:
    """(arguments of `call`, float64 result). Both contain 7 in rows of no expert and of experts without rows.

    After the rows of each expert there is one unused row, and an unused tile of scales.
    """
    generator = torch.Generator().manual_seed(len(counts) + n)
    firsts = [sum(counts[:e]) + e for e in range(len(counts))]
    tiles = [sum(-(-count // 128) * 128 + 128 for count in counts[:e]) for e in range(len(counts))]
    num_rows, columns = sum(counts) + len(counts), -(-k // (4 * FORMATS[name][2])) * 4
    a, b = (draw_codes(name, *sizes, k, generator=generator) for sizes in ((num_rows,), (len(counts), n)))
    scale_rows = tiles[-1] + -(-counts[-1] // 128) * 128 + 128
    a_scales = draw_scales(name, scale_rows, columns, generator=generator)
    padded = -(-n // 128) * 128
    b_scales = draw_scales(name, len(counts), padded, columns, generator=generator)
    out = torch.full((num_rows, n), 7.0, dtype=dtype)
    right, alphas = out.double(), alphas_of(name, len(counts)).double()
    for e, (count, first, tile) in enumerate(zip(counts, firsts, tiles, strict=True)):
        rows = slice(first, first + count)
        right[rows] = alphas[e] * (exact(name, a[rows], a_scales, tile) @ exact(name, b[e], b_scales[e]).T)
    lists = [torch.tensor(one, dtype=torch.int32) for one in ([[m, n, k] for m in counts], firsts, tiles)]
    return [one.to(device) for one in (out, a, b, a_scales, b_scales, *lists)], right


@ANY_DEVICE
@ANY_FORMAT
@pytest.mark.parametrize(("counts", "n", "k"), [([5, 0, 131], 40, 160), ([1], 136, 32)])
def test_matches_float64(name: str, counts: list[int], n: int, k: int, device: str) -> None:
    (out, *operands), right = case(name, counts, n, k, device)
    call(name, out, *operands)
    assert_rounded_once(out.cpu(), right)


@ANY_DEVICE
@ANY_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("counts", "n", "k"), [([1, 70], 136, 448), ([5, 0, 20], 64, 96), ([300], 64, 128)])
def test_weights_are_dequantized_in_the_main_loop(
    counts: list[int], n: int, k: int, dtype: torch.dtype, name: str, device: str
) -> None:
    """Few rows by mma.sync, more by WGMMA; for 300 rows weights are dequantized first. Float16 outputs are smaller."""
    (out, a, b, a_scales, b_scales, *lists), right = case(name, counts, n, k, device, dtype)
    if dtype is torch.float16 and name != FP4:
        a_scales, right = a_scales - 20, torch.where(right == 7.0, 7.0, right * 2.0**-20)
    call(name, out, a, b, a_scales, b_scales, *lists)
    assert_rounded_once(out.cpu(), right)


@pytest.fixture
def blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists with blocks that the tiles of every forced Config divide."""
    monkeypatch.setattr(grouped_block_scaled, "block_size_for", lambda *_: 16)


FUSED = [
    (WqGroupedSm80Config(8, 3, 1), 64, 416),
    (WqGroupedSm80Config(16, 1, 2), 192, 640),  # five k-tiles or ten of a warp, two tiles of scales
    (WqGroupedSm90Config(16, 256, 64), 200, 192),  # the last tile has missing rows
    (WqGroupedSm90Config(16, 128, 64), 136, 64),
]


@pytest.mark.usefixtures("blocks_of_16")
@needs_compiler
@pytest.mark.parametrize(
    ("name", "one", "n", "k"),
    [
        *((name, *one) for name in FORMATS for one in FUSED),
        *((name, WqGroupedSm90Config(16, 256, 128), 264, 384) for name in (FP4, MX4)),
    ],
    ids=str,
)
def test_fused_dequantization(name: str, one: WqGroupedSm80Config | WqGroupedSm90Config, n: int, k: int) -> None:
    """All schedules give the same bits, rounded once, and write only rows of experts."""
    (out, *operands), right = case(name, [20, 0, 3, 7], n, k, "cpu")
    found = []
    with forced(one, name):
        for schedule in SCHEDULES:
            held = canaries(out)
            with scheduled(schedule):
                call(name, held.tensor, *operands)
            held.check()
            found.append(held.tensor)
        assert tuning.last[name] == one
    assert all(torch.equal(each, found[0]) for each in found)
    assert_rounded_once(found[0], right)


@pytest.mark.usefixtures("blocks_of_16")
@needs_compiler
@pytest.mark.parametrize("one", [None, WqGroupedSm90Config(16, 256, 64)], ids=str)
@ANY_FORMAT
def test_special_values_of_weights(name: str, one: WqGroupedSm90Config | None) -> None:
    """NaN among scales, and among e4m3 values, is NaN in its row of weights alone; the largest products are infinite;
    all values and scales are exact."""
    (out, a, b, a_scales, b_scales, *lists), _ = case(name, [6, 6], 64, 64, "cpu")
    size = FORMATS[name][2]
    a_scales[:] = 0x38 if name == FP4 else 127  # 1
    a.view(torch.uint8)[:] = 0x38 if name == MX8 else 0x22
    bytes_, scales = b.view(torch.uint8), b_scales.view(2, -1)
    bytes_[0, :, :] = 0
    bytes_[0, :, 0] = torch.arange(64) if name != MX8 else 2 * torch.arange(64)  # of the first block, all values
    bytes_[1, :, :] = 0x38 if name == MX8 else 0x22
    for row in range(64):
        for block in range(64 // size):
            scales[0, scale_offset(row, block, b_scales.shape[2])] = 0x30 if name == FP4 else 130
            scales[1, scale_offset(row, block, b_scales.shape[2])] = 2 * row if name == FP4 else 4 * row + 1
    scales[0, scale_offset(9, 1, b_scales.shape[2])] = 0xFF  # NaN in every format
    scales[1, scale_offset(10, 0, b_scales.shape[2])] = 0x7E if name == FP4 else 254
    if name == MX8:
        bytes_[0, 11, 50], bytes_[0, 12, 3], bytes_[1, 10, 2] = 0x7F, 0xFF, 0x7E
    alphas = alphas_of(name, 2).double()
    right = torch.full(out.shape, 7.0, dtype=torch.float64)
    for e, first in enumerate((0, 7)):
        rows = slice(first, first + 6)
        right[rows] = alphas[e] * (torch.ones(6, 64).double() @ exact(name, b[e], b_scales[e]).to(out.dtype).double().T)
    with forced(one, name) if one else cpu("kernels"):
        call(name, out, a, b, a_scales, b_scales, *lists)
    assert one is None or tuning.last[name] == one
    assert right[:6].isnan().sum() == 6 * (3 if name == MX8 else 1)
    assert torch.equal(out.double().nan_to_num(-1.0), right.to(out.dtype).double().nan_to_num(-1.0))


@pytest.mark.usefixtures("blocks_of_16")
@needs_compiler
@pytest.mark.parametrize(("one", "k"), [(None, 64), (None, 160), (WqGroupedSm90Config(16, 256, 64), 64)], ids=str)
@ANY_FORMAT
def test_hostile_lists(name: str, one: WqGroupedSm90Config | None, k: int) -> None:
    """Experts at impossible rows write nothing, rows at impossible scales are zero; other experts are right."""
    (out, a, b, a_scales, b_scales, *lists), right = case(name, [6, 6, 9, 5], 40 if k == 160 else 64, k, "cpu")
    problems, firsts, tiles = lists
    problems[1, 0], firsts[1] = 2**31 - 1, 2**31 - 1
    problems[2, 0], firsts[2] = -5, -(2**31)
    tiles[3] = 2**31 - 128
    right[7:24], right[24:29] = 7.0, 0.0
    held = canaries(out)
    with forced(one, name) if one else cpu("kernels"):
        call(name, held.tensor, a, b, a_scales, b_scales, *lists)
    assert one is None or tuning.last[name] == one
    held.check()
    assert_rounded_once(held.tensor, right)


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024])
@ANY_FORMAT
def test_no_workspace_of_weights(name: str, tokens: int) -> None:
    """No launch for DeepSeek-V3's experts has a workspace as large as the quantized weights, on sm_90."""
    op, experts = registry[name], 256
    for n, k in ((4096, 7168), (7168, 2048)):
        axes = {"num_experts": experts, "output_size": n, "input_size": k}
        launches = op.launches(*op.example(ArgMaker(model("sm_90")), num_tokens=8 * tokens, **axes))
        fixed = [one.tensor if isinstance(one, TensorMap) else one for each in launches for one in each.fixed.values()]
        sizes = [one.nbytes for one in fixed if isinstance(one, Scratch)]
        assert sizes
        assert max(sizes) < experts * n * k // 2


@pytest.mark.parametrize(
    ("axes", "arch", "kernel"),
    [
        ({"num_tokens": 16}, "sm_90", "wq_grouped_gemm_sm80"),
        ({"num_tokens": 16}, "sm_80", "wq_grouped_gemm_sm80"),
        ({"num_tokens": 500}, "sm_90", "wq_grouped_gemm_sm90"),
        ({"num_tokens": 500, "output_size": 4104}, "sm_90", "wq_grouped_gemm_sm90"),
        ({"num_tokens": 8000}, "sm_90", ""),
        ({"num_tokens": 2000}, "sm_80", ""),
        ({"num_tokens": 16, "output_size": 4104}, "sm_90", "wq_grouped_gemm_sm90"),
        ({"num_tokens": 16, "output_size": 4104, "input_size": 160}, "sm_90", ""),
    ],
)
@ANY_FORMAT
def test_choice_of_fused_dequantization(name: str, axes: dict[str, int], arch: str, kernel: str) -> None:
    """For unsupported sizes or many rows, weights are dequantized first."""
    op = registry[name]
    sizes = {"num_experts": 8, "output_size": 4096, "input_size": 4096} | axes
    launches = op.launches(*op.example(ArgMaker(model(arch)), **sizes))
    kernels = [launch.specialisation.kernel.file for launch in launches]
    assert [one for one in kernels if "/wq_grouped_gemm" in one] == ([f"linear/{kernel}.cu"] if kernel else [])
    assert kernels.count("linear/block_scaled_to_bf16.cu") == (1 if kernel else 2)


@ANY_DEVICE
def test_transposed_weight_views(device: str) -> None:
    """vLLM passes weights and their scales as [num_experts, K, N]."""
    name = MX8
    (out, a, b, a_scales, b_scales, *lists), _ = case(name, [3, 4], 128, 128, device)
    other = out.clone()
    call(name, out, a, b, a_scales, b_scales, *lists)
    call(name, other, a, b.transpose(1, 2), a_scales, b_scales.transpose(1, 2), *lists)
    assert torch.equal(out, other)


@ANY_DEVICE
@pytest.mark.parametrize("name", [MX4, MX8])
def test_extreme_scales(name: str, device: str) -> None:
    """The scale byte 0 is 2^-127, the largest 2^127; 255 is NaN. Missing rows have scales of zero."""
    codes = torch.full((1, 16), 0x22, dtype=torch.uint8)  # 1 and 1
    if name == MX8:
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
    for name, format in zip(FORMATS, (NVFP4, MXFP4, MXFP8), strict=True):
        op = registry[name]
        launches = op.launches(*op.example(ArgMaker(model("sm_90")), input_size=160, output_size=136))
        constants = [launch.specialisation.constants for launch in launches[1:3]]
        assert [one["HAS_SIZES"] for one in constants] == [False, True]
        assert {one["SCALE_SIZE"] for one in constants} == {format.scale_size}


def test_refused() -> None:
    (out, a, b, a_scales, b_scales, *lists), _ = case(MX8, [2], 128, 64, "cpu")
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
