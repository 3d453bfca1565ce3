"""NVFP4 against float64: quants and scales are exact, for any alignment, contents and scale."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops._core import config
from pyops._core.system.device import model
from pyops.ops.quantize._fp4 import Fp4Config, Fp4Problem, choose
from pyops.testing import CONTENTS, Layout, filled
from tests.support.calls import DEVICES
from tests.support.quantize_truth import _VALUES, _quietly, absmax, draw, exact, f32, fp8, nearest, new

pytestmark = pytest.mark.rotates

__all__ = ["_quietly"]  # a fixture

DTYPES = [torch.float16, torch.bfloat16]
E2M1 = numpy.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIXTH = f32(1 / 6)


# The truth, in numpy: float64 arithmetic, rounded to float32 where the definition does.


def truth(x: Any, g: Any) -> tuple[Any, Any]:
    """(quants, one per element; fp8 bytes of scales) of rows; g is one number or one for each row."""
    blocks = exact(x).reshape(x.shape[0], -1, 16)
    g = f32(numpy.broadcast_to(numpy.asarray(g, "float64"), (x.shape[0],)))[:, None, None]
    scales = fp8(f32(g * f32(absmax(blocks) * SIXTH)))
    s = numpy.where(scales > 127, -1, 1) * _VALUES[scales & 127]
    factor = numpy.where(s == 0, 0.0, f32(1 / f32(s * f32(1 / g))))
    y = f32(blocks * factor)
    code, negative = nearest(y, E2M1)
    quantized = numpy.where(numpy.isnan(y), 7, code | (negative << 3))
    return quantized.reshape(x.shape[0], -1), scales[..., 0]


def values(quantized: torch.Tensor) -> Any:
    """Quants one per element, from two per byte."""
    pairs = quantized.cpu().numpy()
    return numpy.stack((pairs & 15, pairs >> 4), -1).reshape(quantized.shape[0], -1)


def untiled(scales: torch.Tensor, columns: int, rows: int, first: int = 0) -> Any:
    """The scale bytes of rows and columns, from tiles in which they begin at row `first`."""
    flat = scales.cpu().contiguous().view(torch.uint8).flatten().numpy()
    padded = -(-columns // 4) * 4
    m, k = numpy.arange(rows)[:, None], numpy.arange(columns)
    at = (m // 128 * (padded // 4) + k // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4
    return flat[first * padded + at]


def tensor(g: float, device: str) -> torch.Tensor:
    return torch.tensor([g], dtype=torch.float32, device=device)


def quantised(x: torch.Tensor, g: float | torch.Tensor, layout: Layout | None = None) -> tuple[Any, Any]:
    """(quants, scales) of rows; scales in tiles and in rows are the same, and padding is 0."""
    rows, columns = x.shape[0], x.shape[1] // 16
    device = str(x.device)
    scale = g if isinstance(g, torch.Tensor) else tensor(g, device)
    place = layout.place if layout else torch.clone
    quantized = place(new((rows, x.shape[1] // 2), torch.uint8, device))
    scales = new((rows, columns), torch.uint8, device)
    pyops.scaled_fp4_quant(quantized, place(x), scales, scale, False)
    padded = -(-rows // 128) * 128, -(-columns // 4) * 4
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int32):
        tiled = new((padded[0], padded[1] // (4 if dtype == torch.int32 else 1)), dtype, device)
        again = new((rows, x.shape[1] // 2), torch.uint8, device)
        pyops.scaled_fp4_quant(again, x, tiled, scale, True)
        assert torch.equal(again, quantized)
        whole = untiled(tiled, padded[1], padded[0])
        assert (whole[:rows, :columns] == scales.cpu().numpy()).all()
        assert not whole[rows:].any()
        assert not whole[:, columns:].any()
    return values(quantized), scales.cpu().numpy()


def assert_true(x: torch.Tensor, g: float) -> None:
    for found, right in zip(quantised(x, g), truth(x, g), strict=True):
        assert (found == right).all(), (
            f"the first of {numpy.sum(found != right)} at {numpy.argwhere(found != right)[0]}"
        )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [2, 5, 65])
@pytest.mark.parametrize("rows", [20, 300, 1000])
def test_several_rows_per_thread(rows: int, columns: int, device: str) -> None:
    """Rows one by one and in fours; for narrow rows a CTA has several at a time."""
    assert_true(draw(rows, columns * 16, device=device), 5.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 16), (128, 64), (256, 128), (90, 48), (150, 80), (64, 512), (32, 1024), (3, 7152), (2, 14336)]
)
def test_any_shape(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = draw(*shape, dtype=dtype, device=device)
    assert_true(x, 448 * 6 / x.abs().max().item())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(dtype: torch.dtype, device: str) -> None:
    """Several blocks share a row, and each has more than one row."""
    problem = Fp4Problem(24, 128, 1028)
    chosen = choose(problem, model())
    assert chosen.rounds > 1
    assert min(chosen.grid(problem)[:2]) > 1
    assert_true(draw(24, 16448, dtype=dtype, device=device), 40.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [1.0, 37.5, 1e-3, 3e38, 1e-38, 1e-44, -2.0, 0.0, -0.0, float("inf"), float("nan")])
def test_every_value_under_any_scale(g: float, dtype: torch.dtype, device: str) -> None:
    """All 65536 16-bit numbers, adjacent ones and distant ones in one block; NaN is +6 and infinities are +-6."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    for x in (every.view(64, 1024), every.view(16, 4096).t().contiguous().view(64, 1024)):
        assert_true(x, g)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_round_to_even(device: str) -> None:
    """Block scale and global scale are 1."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    right = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    x = torch.tensor([[6.0, *ties, -6.0, *(-tie for tie in ties)]], dtype=torch.bfloat16, device=device)
    quantized, scales = quantised(x, 1.0)
    assert scales.tolist() == [[0x38]]
    signs = numpy.where(quantized[0] > 7, -1, 1)
    assert (signs * E2M1[quantized[0] & 7]).tolist() == [6.0, *right, -6.0, *(-value for value in right)]
    assert quantized[0, 9] == 8  # -0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_next_to_ties(dtype: torch.dtype, device: str) -> None:
    """Products one or two float32 away from a tie: they are rounded to float32, and then to fp4."""
    block = [24.0, 1.0, 3.0, 5.0, 7.0, 10.0, 14.0, 20.0, -1.0, -3.0, -5.0, -7.0, -10.0, -14.0, -20.0, 0.0]
    x = torch.tensor([block], dtype=dtype, device=device)
    quarter = int(torch.tensor(0.25).view(torch.int32))
    ties = set()
    for step in range(-24, 25):
        g = torch.tensor(quarter + step, dtype=torch.int32).view(torch.float32).item()
        assert_true(x, g)
        ties.add(bytes(quantised(x, g)[0]))
    assert len(ties) == 3  # below, at and above


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_any_contents(dtype: torch.dtype, device: str, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 70))
    x = draw(rows, columns * 16, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    x = filled(x, data.draw(st.sampled_from(CONTENTS))).to(device)
    g = data.draw(st.floats(2.0**-126, 2.0**127, width=32) | st.sampled_from([1.0, 1e-30, 1e30]))
    assert_true(x, g)


@pytest.mark.parametrize("device", DEVICES)
def test_special_values(device: str) -> None:
    """Expected values, spelled out by hand."""
    inf, nan = float("inf"), float("nan")
    rows = [
        ([nan, -nan, 1.0, -3.0] + [6.0] * 12, 0x38, [7, 7, 2, 13] + [7] * 12),
        ([nan] * 16, 0, [7] * 16),
        ([0.0, -0.0] * 8, 0, [0, 8] * 8),
        ([inf, -inf, 448.0, -448.0] + [0.0] * 12, 0x7E, [7, 15, 2, 10] + [0] * 12),
        ([1e4, -1e4] + [1.0] * 14, 0x7E, [7, 15] + [0] * 14),
        ([0.0078125] * 16, 1, [6] * 16),  # a scale of 2^-9, the smallest
        ([2.0**-9, -(2.0**-10)] * 8, 0, [0, 8] * 8),  # 2^-9 / 6 rounds to a scale of 0
    ]
    x = torch.tensor([row for row, _, _ in rows], dtype=torch.bfloat16, device=device)
    quantized, scales = quantised(x, 1.0)
    assert scales[:, 0].tolist() == [scale for _, scale, _ in rows]
    assert quantized.tolist() == [code for _, _, code in rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype: torch.dtype, device: str) -> None:
    """Within half of the largest step, a third of the absmax over 2, and the rounding of the scale."""
    x = draw(70, 512, dtype=dtype, device=device)
    g = f32(448 * 6 / exact(x).__abs__().max()).item()
    quantized, scales = quantised(x, g)
    back = numpy.where(quantized > 7, -1, 1) * E2M1[quantized & 7] * numpy.repeat(_VALUES[scales], 16, 1) / g
    absmax_ = numpy.repeat(absmax(exact(x).reshape(70, 32, 16))[..., 0], 16, 1)
    assert (numpy.abs(back - exact(x)) <= absmax_ / 6 * (1 + 1 / 16) * (1 + 1e-6)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [Layout(gap=16), Layout(gap=8), Layout(gap=3), Layout(offset=1), Layout(offset=4)])
def test_strided_rows(layout: Layout, device: str) -> None:
    """Rows of one stride, aligned or not."""
    x = draw(5, 80, device=device)
    quantized, scales = quantised(x, 9.0, layout)
    for found, right in zip((quantized, scales), truth(x, 9.0), strict=True):
        assert (found == right).all()


# Gated


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = numpy.split(exact(x), 2, -1)
    silu = f32(gate / f32(1 + f32(numpy.exp(-gate))))
    return torch.from_numpy(f32(silu * up)).to(x.dtype)


@pytest.mark.parametrize("device", DEVICES[1:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("shape", [(3, 4096), (130, 160), (2, 14336 * 2), (1100, 2080)])
def test_silu_and_mul(shape: tuple[int, int], kind: str, dtype: torch.dtype, device: str) -> None:
    """Rounded once, before quantisation; all padding is 0."""
    if kind != "normal" and shape[0] != 3:
        pytest.skip("contents do not depend on the shape")
    x = filled(draw(*shape, dtype=dtype), kind).to(device)
    rows, columns = shape[0], shape[1] // 32
    quantized = new((rows, columns * 8), torch.uint8, device)
    scales = new((-(-rows // 128) * 128, -(-columns // 4)), torch.int32, device)
    pyops.silu_and_mul_nvfp4_quant(quantized, scales, x, tensor(11.0, device))
    y = gated(x)
    right = truth(y, 11.0)
    assert (values(quantized) == right[0]).all()
    whole = untiled(scales, scales.shape[1] * 4, scales.shape[0])
    assert (whole[:rows, :columns] == right[1]).all()
    assert not whole[rows:].any()
    assert not whole[:, columns:].any()


def bf16(x: Any) -> Any:
    """float32 numbers rounded to bfloat16."""
    return torch.from_numpy(x).float().bfloat16().double().numpy()


@pytest.mark.parametrize("device", DEVICES[1:2])
def test_approximations_of_silu(device: str) -> None:
    """Products that the approximations round to another bfloat16 than the definition; each decides about a quant."""
    gates = (numpy.arange(0x3E00, 0x4240, dtype="uint32") << 16).view("float32").astype("float64")[:, None]
    gates, ups = numpy.broadcast_arrays(numpy.concatenate([gates, -gates]), 1 + numpy.arange(128) / 128)
    shares = f32(1 / f32(1 + f32(numpy.exp2(f32(gates * f32(-1.4426950408889634))))))
    estimates = f32(f32(gates * shares) * ups)
    right = f32(f32(gates / f32(1 + f32(numpy.exp(-gates)))) * ups)
    differ = bf16(estimates) != bf16(right)
    assert (differ & (gates > -5.5)).any()
    assert (differ & (gates < -5.5)).sum() > 4
    gates, ups, right = gates[differ], ups[differ], right[differ]
    for gate, up, y in [*zip(gates, ups, right, strict=True), (-88.0, 2.0**124, -88.0 * numpy.exp(-88.0) * 2.0**124)]:
        # The absmax of the block is so large that its scale is 448, so the factor g / 448 is free. The two candidates
        # for y lie on two sides of the tie 1.25.
        g = 448 * 1.25 / abs(float(y))
        for place in (0, 6, 15):
            x = torch.zeros(1, 32, dtype=torch.bfloat16)
            x[0, place], x[0, 16 + place] = float(gate), float(up)
            x[0, 3], x[0, 16 + 3] = 16.0, float(abs(y))
            quantized = new((1, 8), torch.uint8, device)
            pyops.silu_and_mul_nvfp4_quant(
                quantized, new((128, 1), torch.int32, device), x.to(device), tensor(g, device)
            )
            assert (values(quantized) == truth(gated(x), g)[0]).all(), (gate, up, place)


# Experts


def of_experts(counts: list[int]) -> tuple[list[int], list[int]]:
    offsets, tiles = [0], [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
        tiles.append(tiles[-1] + -(-count // 128) * 128)
    return offsets, tiles


def run_experts(
    x: torch.Tensor, g: list[float], offsets: list[int], tiles: list[int], scale_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    device, columns = str(x.device), x.shape[1] // 16
    quantized = new((x.shape[0], x.shape[1] // 2), torch.uint8, device)
    scales = new((scale_rows, -(-columns // 4)), torch.int32, device)
    of_offsets = [torch.tensor(of, dtype=torch.int32, device=device) for of in (offsets, tiles)]
    pyops.scaled_fp4_experts_quant(quantized, scales, x, torch.tensor(g, device=device), *of_offsets)
    return quantized, scales


def assert_experts(x: torch.Tensor, g: list[float], offsets: list[int], tiles: list[int], scale_rows: int) -> None:
    """Every expert with all rows present has its quants, scales and padding; nothing else is written."""
    quantized, scales = run_experts(x, g, offsets, tiles, scale_rows)
    rows, columns = x.shape[0], x.shape[1] // 16
    padded = -(-columns // 4) * 4
    right = numpy.full((rows, x.shape[1] // 2), 0x55, "uint8")
    written = numpy.zeros(scale_rows * padded, bool)
    for e, (first, end, tile) in enumerate(zip(offsets, offsets[1:], tiles, strict=False)):
        if not 0 <= first <= end <= rows:
            break
        fill = -(-(end - first) // 128) * 128
        if first == end or tile < 0 or tile + fill > scale_rows:
            continue
        code, scale = truth(x[first:end], g[e])
        right[first:end] = code[:, ::2] | code[:, 1::2] << 4
        whole = untiled(scales, padded, fill, tile)
        assert (whole[: end - first, :columns] == scale).all()
        assert not whole[end - first :].any()
        assert not whole[:, columns:].any()
        written[tile * padded : (tile + fill) * padded] = True
    assert (quantized.cpu().numpy() == right).all()
    assert (scales.cpu().view(torch.uint8).flatten().numpy()[~written] == 0x55).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[5], [0, 3, 0, 0, 130, 1], [128, 127, 129], [0, 0], [1] * 70])
@pytest.mark.parametrize("columns", [1, 6, 70])
def test_experts(counts: list[int], columns: int, dtype: torch.dtype, device: str) -> None:
    x = draw(sum(counts), columns * 16, dtype=dtype, device=device)
    offsets, tiles = of_experts(counts)
    assert_experts(x, [f32(3.0 + e / 7).item() for e in range(len(counts))], offsets, tiles, tiles[-1] + 3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [2, 65])
def test_many_rows_of_experts(columns: int, device: str) -> None:
    """Enough that a thread has rows of several units, and several blocks share the tiles of one expert."""
    counts = [399, 0, 2, 700]
    offsets, tiles = of_experts(counts)
    assert_experts(draw(sum(counts), columns * 16, device=device), [2.0, 3.0, 5.0, 7.0], offsets, tiles, tiles[-1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offsets", [[1, 0, 2], [0, 2, 1], [0, -1, 2], [0, 1, 3, 2], [0, 3, 1, 2]])
def test_non_ascending_offsets(offsets: list[int], device: str) -> None:
    """Experts before the first descending offset are written, later ones are not; also where one lane counts the rows
    of several experts."""
    for before in (0, 40):
        all_offsets = [0] * before + offsets
        count = len(all_offsets) - 1
        tiles = list(range(0, 128 * count + 1, 128))
        assert_experts(draw(3, 32, device=device), [5.0] * count, all_offsets, tiles, 128 * count)


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
def test_hostile_offsets(device: str, data: st.DataObject) -> None:
    """Offsets that do not ascend, or out of range. No scale tile is written by two experts, which would race."""
    count, rows = data.draw(st.integers(1, 6) | st.just(70)), data.draw(st.integers(1, 40))
    any_offset = st.integers(-3, rows + 3) | st.sampled_from([-(2**31), 2**31 - 1])
    offsets = data.draw(st.lists(any_offset, min_size=count + 1, max_size=count + 1))
    if data.draw(st.booleans()):
        offsets.sort()
    tiles = [256 * e for e in range(count + 1)]
    for e in data.draw(st.sets(st.integers(0, count))):
        tiles[e] = data.draw(st.sampled_from([-1, -128, 256 * count, 256 * count - 127, -(2**31), 2**31 - 1]))
    assert_experts(draw(rows, 32, device=device), [5.0] * count, offsets, tiles, 256 * count)


@pytest.mark.parametrize("device", DEVICES)
def test_indices_out_of_range_are_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", "1")
    for op in (pyops.scaled_fp4_experts_quant, pyops.silu_and_mul_scaled_fp4_experts_quant):
        op.op.forget()
    x = draw(4, 32, device=device)
    run_experts(x, [1.0, 1.0], [0, 4, 4], [0, 128, 128], 128)
    with pytest.raises(pyops.OpError, match=r"input_offset_by_experts: 1 of 3 indices are out of range.*: 5"):
        run_experts(x, [1.0, 1.0], [0, 4, 5], [0, 128, 256], 256)
    with pytest.raises(pyops.OpError, match=r"output_scale_offset_by_experts: 1 of 3 .* the first at \(1,\): 1$"):
        run_experts(x, [1.0, 1.0], [0, 2, 4], [0, 1, 128], 128)
    with pytest.raises(pyops.OpError, match=r"input_offset_by_experts: 1 of 4 indices are out of range.* \(2,\): 1"):
        run_experts(x, [1.0, 1.0, 1.0], [0, 3, 1, 4], [0, 128, 256, 384], 384)
    for op in (pyops.scaled_fp4_experts_quant, pyops.silu_and_mul_scaled_fp4_experts_quant):
        op.op.forget()


# Ops that allocate


@pytest.mark.parametrize("device", DEVICES)
def test_new_tensors(device: str) -> None:
    x, g = draw(2, 3, 80, device=device), tensor(7.0, device)
    right = truth(x.reshape(6, 80), 7.0)
    for tiled in (True, False):
        quantized, scales = pyops.nvfp4_quant(x, g, tiled)
        assert (values(quantized) == right[0]).all()
        if tiled:
            assert (scales.dtype, tuple(scales.shape)) == (torch.float8_e4m3fn, (128, 8))
            assert (untiled(scales, 5, 6) == right[1]).all()
        else:
            assert (scales.dtype, scales.cpu().tolist()) == (torch.uint8, right[1].tolist())
    rows, counts = draw(9, 160, device=device), [2, 0, 7]
    offsets, tiles = (torch.tensor(of, dtype=torch.int32, device=device) for of in of_experts(counts))
    each = torch.tensor([3.0, 4.0, 5.0], device=device)
    quantized, scales = pyops.nvfp4_experts_quant(rows, each, offsets, tiles, 2)
    right = truth(rows, [3.0, 3.0, *[5.0] * 7])
    assert (values(quantized) == right[0]).all()
    assert (untiled(scales, 10, 2) == right[1][:2]).all()
    assert (untiled(scales, 10, 7, 128) == right[1][2:]).all()
    quantized, scales = pyops.silu_and_mul_nvfp4_experts_quant(rows, each, offsets, tiles, 2)
    assert quantized.shape == (9, 40)
    alone = new((2, 40), torch.uint8, device), new((128, 2), torch.int32, device)
    pyops.silu_and_mul_nvfp4_quant(*alone, rows[:2].contiguous(), each[:1])
    assert torch.equal(quantized[:2], alone[0])
    assert (untiled(scales, 5, 2) == untiled(alone[1], 5, 2)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_graph_break(device: str) -> None:
    def call(x: torch.Tensor, g: torch.Tensor) -> list[Any]:
        return [*pyops.nvfp4_quant(x, g), *pyops.nvfp4_quant(x, g, False)]

    x, g = draw(4, 64, device=device), tensor(2.0, device)
    eager = call(x, g)
    torch._dynamo.reset()
    for one, other in zip(eager, torch.compile(call, fullgraph=True, backend="aot_eager")(x, g), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_empty() -> None:
    for mode in ("reference", "kernels"):
        with config.cpu(mode):
            for rows, size in ((0, 64), (3, 0)):
                for tiled in (True, False):
                    quantized, _ = pyops.nvfp4_quant(torch.ones(rows, size).bfloat16(), torch.ones(1), tiled)
                    assert quantized.shape == (rows, size // 2)


@pytest.mark.parametrize("device", DEVICES)
def test_no_experts(device: str) -> None:
    """No expert owns a row, though the rows would fill tiles: nothing is written, and no offset is read."""
    x = draw(130, 64, device=device)
    nothing, offsets = torch.empty(0, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    quantized = torch.full((130, 32), 7, dtype=torch.uint8, device=device)
    scales = torch.full((256, 4), 7, dtype=torch.uint8, device=device)
    pyops.scaled_fp4_experts_quant(quantized, scales, x, nothing, offsets, offsets)
    assert (quantized == 7).all()
    assert (scales == 7).all()
    if device == "cpu":
        rows = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        codes_, scales_, nothing_, offsets_ = (t.numpy() for t in (quantized, scales, nothing, offsets))
        pyops.scaled_fp4_experts_quant(codes_, scales_, rows, nothing_, offsets_, offsets_)


def _refusal(function: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(pyops.OpError) as caught:
        function(*args, **more)
    return str(caught.value).partition(": ")[2]


def test_refused() -> None:
    x, g = torch.ones(4, 64).bfloat16(), torch.ones(1)
    quantized, tiled, plain = (torch.zeros(size, dtype=torch.uint8) for size in ((4, 32), (128, 4), (4, 4)))

    def plain_quant(*, o: Any = quantized, i: Any = x, s: Any = tiled, g: Any = g, swizzled: bool = True) -> str:
        return _refusal(pyops.scaled_fp4_quant, o, i, s, g, swizzled)

    assert plain_quant(i=x.float()) == "input: expected dtype float16 or bfloat16, got float32"
    assert plain_quant(i=x[:, :40]) == "input: expected a last dimension of multiples of 16, got shape (4, 40)"
    assert (
        plain_quant(o=quantized[:, :31]) == "output: expected shape (4, 32) for an input of shape (4, 64), got (4, 31)"
    )
    assert plain_quant(o=quantized.view(torch.int8)).startswith("output: expected dtype uint8")
    assert plain_quant(s=plain) == "output_scale: expected shape (rows=128, columns=4), got (4, 4)"
    assert plain_quant(swizzled=False) == "output_scale: expected shape (rows=4, columns=4), got (128, 4)"
    assert plain_quant(s=torch.zeros(256, 4, dtype=torch.uint8)[::2]).startswith("output_scale: expected a contiguous")
    assert plain_quant(s=torch.zeros(128, 4)).startswith("output_scale: expected dtype")
    assert plain_quant(g=torch.ones(2)).startswith("input_scale: expected one element")
    odd = torch.ones(4, 80).bfloat16()
    five = torch.zeros(4, 5, dtype=torch.int32)
    assert _refusal(pyops.scaled_fp4_quant, torch.zeros(4, 40, dtype=torch.uint8), odd, five, g, False) == (
        "output_scale: expected dtype float8_e4m3fn or uint8, got int32"
    )
    offsets = torch.zeros(3, dtype=torch.int32)
    assert _refusal(pyops.scaled_fp4_experts_quant, quantized, tiled, x, g, offsets, offsets) == (
        "input_offset_by_experts: expected shape (num_offsets=2), got (3,)"
    ).replace("(num_offsets=2)", "(num_offsets=2,)")
    assert _refusal(pyops.nvfp4_quant, x, g, backend="trtllm").startswith("backend: tiles of 8 rows")
    assert _refusal(pyops.nvfp4_quant, torch.ones(()).bfloat16(), g).startswith("input: expected at least one")
    assert _refusal(pyops.nvfp4_experts_quant, x[0, 0], g, offsets, offsets, 1).startswith("input: expected 2 dim")
    assert pyops.nvfp4_quant(torch.ones(33, 64).bfloat16(), g, backend="flashinfer-trtllm")[1].shape == (128, 4)


@pytest.mark.parametrize(
    ("problem", "arch", "expected"),
    [
        (Fp4Problem(1, 128, 256), "sm_90", Fp4Config(128, unit=4, rounds=4, min_blocks=8)),
        (Fp4Problem(256, 256, 256), "sm_90", Fp4Config(128, unit=1, rounds=1, min_blocks=8)),
        (Fp4Problem(4096, 4096, 256), "sm_90", Fp4Config(128, unit=4, rounds=8, min_blocks=8)),
        (Fp4Problem(256, 256, 256, tiled=False), "sm_90", Fp4Config(128, unit=1, rounds=1, min_blocks=8)),
        (Fp4Problem(16384, 16384, 8, tiled=False), "sm_90", Fp4Config(8, unit=1, rounds=2, min_blocks=5)),
        (Fp4Problem(256, 1024, 256, experts=True), "sm_90", Fp4Config(128, unit=4, rounds=4, min_blocks=9)),
        (
            Fp4Problem(256, 1024, 256, experts=True, gated=True),
            "sm_100",
            Fp4Config(128, unit=4, rounds=4, min_blocks=5),
        ),
    ],
)
def test_geometry(problem: Fp4Problem, arch: str, expected: Fp4Config) -> None:
    """Units of four rows for few and many rows and for experts, single rows in between; blocks by registers."""
    assert choose(problem, model(arch)) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offsets", [[0, 2, 4], [0, 3, 2**31 - 1], [1, 4, 4]])
def test_expert_with_missing_rows(offsets: list[int], device: str) -> None:
    """With three rows, the expert and those after it write nothing; nothing is read after the last row."""
    assert_experts(draw(3, 32, device=device), [5.0] * 2, offsets, [0, 128, 256], 256)
