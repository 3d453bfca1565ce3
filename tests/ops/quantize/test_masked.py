"""Gated activations of the first tokens of each expert against float64, rounded where the definition rounds."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops.testing import CONTENTS, Layout, filled
from tests.support.calls import DEVICES
from tests.support.quantize_truth import _quietly, absmax, draw, exact, f32, fp8, new

__all__ = ["_quietly"]  # a fixture

FORMATS = ["float", "power", "packed"]


def b(x: Any) -> Any:
    """float64 values rounded to float32, then to bfloat16."""
    return torch.from_numpy(numpy.asarray(x, "float64").astype("float32")).bfloat16().double().numpy()


def truth(x: torch.Tensor, power_of_two: bool) -> tuple[Any, Any]:
    """(quants, scales) of every token."""
    gate, up = numpy.split(exact(x), 2, -1)
    y = b(b(f32(gate / f32(1 + f32(numpy.exp(-gate))))) * up)
    groups = y.reshape(*y.shape[:2], -1, 128)
    scale = b(numpy.maximum(absmax(groups), b(1e-10)) * b(1 / 448))
    if power_of_two:
        scale = numpy.where(numpy.isinf(scale), scale, 2.0 ** numpy.ceil(b(numpy.log2(scale))))
    quotient = b(groups * b(f32(1 / scale)))
    values = numpy.where(numpy.isnan(quotient), -448.0, numpy.clip(quotient, -448, 448))
    return fp8(values).reshape(y.shape), scale[..., 0]


def columns_first(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Scales as DeepGEMM takes them: the scales of one group are consecutive over tokens."""
    return new((shape[0], shape[2], shape[1]), dtype, device).transpose(1, 2)


def assert_true(x: torch.Tensor, counts: list[int], scales: str, column_major: bool = True, placed: Any = None) -> None:
    device = str(x.device)
    experts, tokens, groups = x.shape[0], x.shape[1], x.shape[2] // 256
    place = placed or torch.clone
    quantized = place(new((experts, tokens, groups * 128), torch.float8_e4m3fn, device))
    shape = experts, tokens, -(-groups // 4) if scales == "packed" else groups
    dtype = torch.int32 if scales == "packed" else torch.float32
    found = columns_first(shape, dtype, device) if column_major else new(shape, dtype, device)
    untouched = found.clone()
    of_counts = torch.tensor(counts, dtype=torch.int32, device=device)
    pyops.persistent_masked_m_silu_mul_quant(place(x), of_counts, quantized, found, scales != "float")
    right, right_scales = truth(x, scales != "float")
    counted = numpy.arange(tokens) < numpy.array(counts)[:, None]
    right = numpy.where(counted[..., None], right, 0x55)
    assert (quantized.cpu().view(torch.uint8).numpy() == right).all()
    if scales == "packed":
        exponents = numpy.full((experts, tokens, shape[2] * 4), 0x55, "uint8")
        bits = right_scales.astype("float32").view("uint32") >> 23
        exponents[..., :groups] = numpy.where(counted[..., None], bits, 0x55)
        assert (numpy.array(found.cpu().numpy(), order="C").view("uint8") == exponents).all()
    else:
        expected = numpy.where(counted[..., None], right_scales, exact(untouched))
        assert (exact(found) == expected).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", FORMATS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 128), (1, 4, 128 * 3), (2, 3, 128 * 5), (8, 16, 128 * 7), (33, 7, 256), (256, 4, 128), (3, 5, 7168)],
)
def test_any_shape(shape: tuple[int, int, int], scales: str, device: str) -> None:
    """Each row of one magnitude, from 2 to 2^19; some experts with no tokens, some with all."""
    experts, tokens, size = shape
    generator = numpy.random.default_rng(experts * tokens)
    counts = generator.integers(0, tokens + 1, experts)
    counts[generator.random(experts) < 0.3] = 0
    counts[-1] = tokens
    x = draw(experts, tokens, 2 * size, device=device) / 8
    x = x * 2.0 ** torch.randint(1, 20, (experts, tokens, 1), device=device)
    assert_true(x.bfloat16(), counts.tolist(), scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", FORMATS)
@given(data=st.data())
def test_any_counts_and_contents(scales: str, device: str, data: st.DataObject) -> None:
    """Counts beyond the tokens mean all of them, counts below 0 none."""
    experts, tokens = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 5))
    any_count = st.integers(-1, tokens + 1) | st.sampled_from([0, tokens, -(2**31), 2**31 - 1])
    counts = data.draw(st.lists(any_count, min_size=experts, max_size=experts))
    x = filled(draw(experts, tokens, 256 * data.draw(st.integers(1, 3))), data.draw(st.sampled_from(CONTENTS)))
    assert_true(x.to(device), counts, scales, column_major=data.draw(st.booleans()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", FORMATS)
def test_every_scale(scales: str, device: str) -> None:
    """The absmax takes every positive bfloat16 value, NaN and infinity among them."""
    largest = torch.arange(32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    x = torch.cat((torch.full((32768, 128), 64.0), (largest.double() / 64).bfloat16().expand(-1, 128)), -1)
    x[:, 129:] = x[:, 129:] / 3
    x = x.bfloat16()[:: 1 if device == "cuda" else 7]
    assert_true(x[None].to(device), [x.shape[0]], scales)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows(device: str) -> None:
    x = draw(3, 4, 512, device=device)
    for layout in (Layout(gap=8), Layout(gap=3), Layout(offset=1)):
        assert_true(x, [4, 0, 2], "float", placed=layout.place)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES[1:])
def test_more_items_than_warps(device: str) -> None:
    """Each warp takes consecutive items, which begin anywhere in a token and may continue with a later expert."""
    assert_true(draw(3, 50, 2 * 128 * 29, device=device), [50, 17, 49], "packed")
    assert_true(draw(36, 150, 2 * 128, device=device), [150, 0, 149, 0, 0, 150] * 6, "float")


@pytest.mark.parametrize("device", DEVICES)
def test_special_values(device: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.ones(1, 4, 256, dtype=torch.bfloat16, device=device) * 100
    x[0, :, 128] = torch.tensor([nan, inf, -inf, 0.0])
    x[0, 3, 128:] = 0.0
    quantized, scales = new((1, 4, 128), torch.uint8, device), new((1, 4, 1), torch.float32, device)
    pyops.persistent_masked_m_silu_mul_quant(
        x, torch.tensor([4], dtype=torch.int32, device=device), quantized, scales, False
    )
    assert quantized[0, :, 0].tolist() == [0xFE, 0xFE, 0xFE, 0]  # -448
    assert set(quantized[0, 1:, 1:].flatten().tolist()) == {0}
    assert scales.flatten()[1:].tolist() == [inf, inf, b(b(1e-10) * b(1 / 448)).item()]
    assert scales[0, 0, 0].isfinite()


def test_refused() -> None:
    x, counts = torch.ones(2, 3, 256).bfloat16(), torch.ones(2, dtype=torch.int32)
    quantized, floats, words = (
        torch.ones(2, 3, 128).to(torch.float8_e4m3fn),
        torch.ones(2, 3, 1),
        torch.ones(2, 3, 1).int(),
    )

    def refusal(*, i: Any = x, c: Any = counts, q: Any = quantized, s: Any = floats, power: bool = False) -> str:
        with pytest.raises(pyops.OpError) as caught:
            pyops.persistent_masked_m_silu_mul_quant(i, c, q, s, power)
        return str(caught.value).partition(": ")[2]

    assert refusal(i=x.half()) == "input: expected dtype bfloat16, got float16"
    assert refusal(i=x[..., :192]) == "input: expected a last dimension of multiples of 256, got shape (2, 3, 192)"
    assert refusal(i=x[0]).startswith("input: expected shape (num_experts, num_tokens, columns)")
    assert refusal(c=counts[:1]) == "counts: expected shape (num_experts=2,), got (1,)"
    assert refusal(c=counts.long()).startswith("counts: expected dtype int32")
    assert refusal(q=quantized[:, :2]).startswith("y_q: expected shape (num_experts=2, num_tokens=3, hidden_size=128)")
    assert refusal(s=words) == "y_s: expected dtype float32, got int32"
    assert refusal(s=floats.expand(2, 3, 2).clone(), power=True) == (
        "y_s: expected shape (num_experts=2, num_tokens=3, groups=1), got (2, 3, 2)"
    )
    pyops.persistent_masked_m_silu_mul_quant(x, counts, quantized, words, True)


def test_counts_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", "1")
    op = pyops.persistent_masked_m_silu_mul_quant
    op.op.forget()
    x, quantized = torch.ones(2, 3, 256).bfloat16(), torch.ones(2, 3, 128).to(torch.float8_e4m3fn)
    with pytest.raises(pyops.OpError, match=r"counts: 2 of 2 indices are out of range, the first at \(0,\): 4"):
        op(x, torch.tensor([4, -1], dtype=torch.int32), quantized, torch.ones(2, 3, 1), False)
    op.op.forget()
