"""Dequantisation and repacking of AWQ and GPTQ weights, against numpy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops.testing import Layout, same_bits
from tests.support.calls import DEVICES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _quietly() -> Any:
    """Silence numpy: infinite scales are part of the truth."""
    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def words(*shape: int, seed: int) -> torch.Tensor:
    """int32 of random bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)


def bits_of(packed: torch.Tensor) -> Any:
    """The bits of each word, [..., 32], the lowest first."""
    return numpy.unpackbits(packed.numpy().view("uint8"), axis=-1, bitorder="little").reshape(*packed.shape, 32)


def poisoned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """An output to be written, filled with bytes that are never a right answer."""
    size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.full((size,), 0x5A, dtype=torch.uint8).view(dtype).view(shape)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, except for the payload of a NaN."""
    actual = actual.cpu()
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    both = actual.isnan() & expected.isnan()
    wrong = (actual.where(~both, 0.0) != expected.where(~both, 0.0)) | (actual.signbit() != expected.signbit()) & ~both
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"


# AWQ


def awq_truth(qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """In float64, where the product of an integer and a scale is exact."""

    def unpacked(packed: torch.Tensor) -> Any:
        nibbles = bits_of(packed).reshape(*packed.shape, 8, 4) @ numpy.array([1, 2, 4, 8])
        columns = numpy.empty_like(nibbles)
        columns[..., [0, 2, 4, 6, 1, 3, 5, 7]] = nibbles
        return columns.reshape(packed.shape[0], -1).astype("float64")

    group = numpy.arange(len(qweight)) // (len(qweight) // len(scales))
    values = (unpacked(qweight) - unpacked(zeros)[group]) * scales.double().numpy()[group]
    return torch.from_numpy(values).to(scales.dtype)


def awq_case(
    num_groups: int, group_size: int, num_words: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = torch.randn(num_groups, 8 * num_words, generator=torch.Generator().manual_seed(seed)).to(dtype)
    scales.view(-1)[:: 7 + seed % 5] *= 2.0**-20  # products that are subnormal in float16
    kinds = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4]
    for i, value in enumerate(kinds):
        scales.view(-1)[(seed + 37 * i) % scales.numel()] = value
    return words(num_groups * group_size, num_words, seed=seed), scales, words(num_groups, num_words, seed=seed + 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_groups", "group_size", "num_words"),
    [(1, 1, 1), (2, 32, 8), (3, 64, 33), (1, 17, 5), (5, 6, 64), (2, 128, 1), (7, 1, 300)],
)
def test_awq(num_groups: int, group_size: int, num_words: int, dtype: torch.dtype, device: str) -> None:
    """Any number of rows, groups of any size, any number of words; zero, infinite, NaN and subnormal scales."""
    qweight, scales, zeros = awq_case(num_groups, group_size, num_words, dtype, seed=group_size)
    args = [x.to(device) for x in (qweight, scales, zeros)]
    same(pyops.awq_dequantize(*args, 0, 0, 0), awq_truth(qweight, scales, zeros))
    same(pyops.awq_dequantize(*args, 8, 7, -3), awq_truth(qweight, scales, zeros))


@pytest.mark.parametrize("device", DEVICES)
@given(
    groups=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    num_words=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_awq_of_any_shape(
    groups: tuple[int, int], num_words: int, dtype: torch.dtype, offset: int, seed: int, device: str
) -> None:
    qweight, scales, zeros = awq_case(*groups, num_words, dtype, seed)
    place = Layout(offset=offset).place
    out = place(poisoned((len(qweight), scales.shape[1]), dtype).to(device))
    args = (place(tensor.to(device)) for tensor in (qweight, scales, zeros))
    assert pyops.awq_dequantize(*args, 0, 0, 0, out=out) is out
    same(out, awq_truth(qweight, scales, zeros))


def test_awq_every_quant_and_zero_point() -> None:
    """All 256 pairs of a quant and a zero point, in every column of a word."""
    nibbles = torch.arange(16, dtype=torch.int64) * 0x11111111
    qweight = (nibbles.repeat(16).unsqueeze(1) << 32 >> 32).to(torch.int32)
    zeros = (nibbles.unsqueeze(1) << 32 >> 32).to(torch.int32)
    scales = torch.full((16, 8), 0.37, dtype=torch.float16)
    expected = (torch.arange(16).repeat(16) - torch.arange(16).repeat_interleave(16)).double() * scales[0, 0].double()
    same(pyops.awq_dequantize(qweight, scales, zeros, 0, 0, 0), expected.half().unsqueeze(1).expand(-1, 8))


def test_awq_numpy() -> None:
    qweight, scales, zeros = awq_case(2, 16, 9, torch.float16, seed=3)
    found = pyops.awq_dequantize(qweight.numpy(), scales.numpy(), zeros.numpy(), 0, 0, 0)
    same(torch.from_numpy(found), awq_truth(qweight, scales, zeros))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"scales": (3, 64)}, "scales"),  # three groups do not divide 32 rows
        ({"scales": (0, 64)}, "scales"),
        ({"scales": (2, 60)}, "scales"),
        ({"qweight": (32, 9)}, "qweight"),
        ({"zeros": (1, 8)}, "zeros"),
        ({"zeros": (2, 7)}, "zeros"),
        ({"out": (32, 72)}, "out"),
    ],
)
def test_awq_refused(change: dict[str, tuple[int, ...]], argument: str) -> None:
    shapes = {"out": (32, 64), "qweight": (32, 8), "scales": (2, 64), "zeros": (2, 8)} | change
    kinds = {"out": torch.float16, "scales": torch.float16}
    out, *args = (torch.ones(shape, dtype=kinds.get(name, torch.int32)) for name, shape in shapes.items())
    before = out.clone()
    with pytest.raises(pyops.OpError) as caught:
        pyops.awq_dequantize(*args, 0, 0, 0, out=out)
    assert caught.value.argument == argument
    assert same_bits(out, before)


# GPTQ


def gptq_fields(weight: torch.Tensor, bit: int) -> Any:
    """[K, N] quants of a weight as stored, from the bits of each column as one string."""
    bits = bits_of(weight).transpose(0, 2, 1).reshape(-1, bit, weight.shape[1])
    return (bits * (1 << numpy.arange(bit))[:, None]).sum(1)


def gptq_shuffled(quantized: Any, bit: int) -> Any:
    """uint32 words of quants [K, N], packed row by row by the definition."""
    columns = quantized.shape[1]
    quantized = quantized.astype("uint64")
    if bit == 8:
        four = quantized.reshape(-1, 4, columns)
        return sum(four[:, f] << numpy.uint64(8 * f) for f in range(4))
    if bit != 3:
        count = 32 // bit
        split = quantized.reshape(-1, count, columns)
        even = sum(split[:, f] << numpy.uint64(bit * (f // 2)) for f in range(0, count, 2))
        odd = sum(split[:, f] << numpy.uint64(bit * (f // 2)) for f in range(1, count, 2))
        return even | odd << numpy.uint64(16)
    split = quantized.reshape(-1, 32, columns)
    words = numpy.zeros((len(split), 3, columns), "uint64")
    for word in range(3):
        for i in range(5):
            words[:, word] |= split[:, 10 * word + 2 * i] << numpy.uint64(3 * i)
            words[:, word] |= split[:, 10 * word + 2 * i + 1] << numpy.uint64(16 + 3 * i)
        words[:, word] |= (split[:, 30] >> numpy.uint64(word) & numpy.uint64(1)) << numpy.uint64(15)
        words[:, word] |= (split[:, 31] >> numpy.uint64(word) & numpy.uint64(1)) << numpy.uint64(31)
    return words.reshape(-1, columns)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bit", [2, 3, 4, 8])
@given(
    units=st.integers(1, 12),
    columns=st.integers(1, 70) | st.just(300),
    order=st.sampled_from(["none", "empty", "permuted", "any"]),
    offset=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_gptq_shuffle(bit: int, units: int, columns: int, order: str, offset: int, seed: int, device: str) -> None:
    """In any order of rows, some of them twice or out of range; in place, at any address."""
    weight = words(units * (3 if bit == 3 else 1), columns, seed=seed)
    quantized = gptq_fields(weight, bit)
    random = numpy.random.default_rng(seed)
    perm = None
    if order == "empty":
        perm = torch.empty(0, dtype=torch.int32, device=device)
    elif order != "none":
        rows = len(quantized)
        chosen = random.permutation(rows) if order == "permuted" else random.integers(-2, rows + 2, rows)
        chosen[:: 1 + seed] += 0 if order == "permuted" else 2**30
        inside = (chosen >= 0) & (chosen < rows)
        quantized = quantized[numpy.where(inside, chosen, 0)] * inside[:, None]
        perm = torch.from_numpy(chosen.astype("int32")).to(device)
    place = Layout(offset=offset).place
    placed = place(weight.to(device))
    pyops.gptq_shuffle(placed, perm if perm is None else place(perm), bit)
    assert numpy.array_equal(placed.cpu().numpy().view("uint32"), gptq_shuffled(quantized, bit))


@pytest.mark.parametrize("device", DEVICES)
def test_gptq_rows_out_of_range_are_zero(device: str) -> None:
    weight = words(2, 3, seed=0)
    chosen = numpy.array([0, 16, 2, 3, -1, 5, 2**31 - 1, -(2**31), *range(8, 16)])
    exists = (chosen >= 0) & (chosen < 16)
    right = gptq_shuffled(gptq_fields(weight, 4)[numpy.where(exists, chosen, 0)] * exists[:, None], 4)
    placed = weight.to(device)
    pyops.gptq_shuffle(placed, torch.from_numpy(chosen.astype("int32")).to(device), 4)
    assert numpy.array_equal(placed.cpu().numpy().view("uint32"), right)


@pytest.mark.parametrize("device", DEVICES)
def test_gptq_shuffle_of_one_row(device: str) -> None:
    """A single row is contiguous with any row stride: here one, as after a transpose."""
    column = words(8, 1, seed=0).to(device)
    perm = torch.arange(7, -1, -1, dtype=torch.int32, device=device)
    right = gptq_shuffled(gptq_fields(column.T.cpu(), 4)[::-1], 4)
    pyops.gptq_shuffle(column.T, perm, 4)
    assert numpy.array_equal(column.T.cpu().numpy().view("uint32"), right)


def test_gptq_shuffle_of_8_bits_in_order_changes_nothing() -> None:
    weight = words(4, 8, seed=0)
    before = weight.clone()
    pyops.gptq_shuffle(weight, torch.empty(0, dtype=torch.int32), 8)
    assert torch.equal(weight, before)


def test_gptq_rows_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", "1")
    pyops.gptq_shuffle.op.forget()
    perm = torch.tensor([0, 8, 2, 3, -1, 5, 6, 7], dtype=torch.int32)
    with pytest.raises(pyops.OpError, match=r"^gptq_shuffle: q_perm: 2 of 8 indices are out of range, the first"):
        pyops.gptq_shuffle(words(1, 8, seed=0), perm, 4)
    pyops.gptq_shuffle.op.forget()


@pytest.mark.parametrize(
    ("bit", "rows", "entries", "argument"),
    [(5, 3, 0, "bit"), (0, 3, 0, "bit"), (32, 3, 0, "bit"), (3, 4, 0, "q_weight"), (4, 3, 23, "q_perm")],
)
def test_gptq_refused(bit: int, rows: int, entries: int, argument: str) -> None:
    weight = words(rows, 8, seed=0)
    before = weight.clone()
    with pytest.raises(pyops.OpError) as caught:
        pyops.gptq_shuffle(weight, torch.zeros(entries, dtype=torch.int32), bit)
    assert caught.value.argument == argument
    assert torch.equal(weight, before)
