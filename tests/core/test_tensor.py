"""Descriptions of tensors, and which tensors share memory, against numpy and against every address."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import pyops
from pyops._core.system import device
from pyops._core.tensors import dtypes, tensor
from pyops._core.tensors.tensor import TensorArg


def _arg(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: dtypes.DType = dtypes.float32, name: str = "x"
) -> TensorArg:
    return TensorArg("op", name, dtype, shape, strides, 16, device.model())


def _addresses(arg: TensorArg, start: int) -> list[int]:
    """Address of every element."""
    return [
        start + arg.dtype.itemsize * sum(i * stride for i, stride in zip(index, arg.strides, strict=True))
        for index in product(*map(range, arg.shape))
    ]


_LAYOUT = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=3)
_DTYPES = st.sampled_from([dtypes.float32, dtypes.bfloat16, dtypes.int8])


@example(layout=[(3, 2), (4, 1)])  # rows of 4 elements with a stride of 2
@given(layout=_LAYOUT)
def test_no_overlap_within_a_tensor_is_missed(layout: list[tuple[int, int]]) -> None:
    arg = _arg(tuple(size for size, _ in layout), tuple(stride for _, stride in layout))
    addresses = _addresses(arg, 0)
    if len(set(addresses)) < len(addresses):
        with pytest.raises(pyops.OpError, match=r"^op: x: is written, but its elements overlap"):
            tensor._check_no_self_overlap(arg)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_dimensions_in_any_order_with_gaps_do_not_overlap(sizes: list[int], data: st.DataObject) -> None:
    strides, step = [0] * len(sizes), 1
    for dim in data.draw(st.permutations(range(len(sizes)))):
        strides[dim] = step
        step = step * sizes[dim] + data.draw(st.integers(0, 3))
    tensor._check_no_self_overlap(_arg(tuple(sizes), tuple(strides)))


@given(first=_LAYOUT, second=_LAYOUT, dtype=_DTYPES, other=_DTYPES, distance=st.integers(-60, 60))
def test_shared_memory_is_exact(
    first: Any, second: Any, dtype: dtypes.DType, other: dtypes.DType, distance: int
) -> None:
    a, b = (
        _arg(tuple(size for size, _ in layout), tuple(stride for _, stride in layout), kind)
        for layout, kind in ((first, dtype), (second, other))
    )
    at_a, at_b = 4096, 4096 + distance
    theirs, ours = (
        {address + byte for address in _addresses(arg, start) for byte in range(arg.dtype.itemsize)}
        for arg, start in ((a, at_a), (b, at_b))
    )
    assume(theirs)
    assume(ours)
    assert tensor.shares_memory(a, at_a, b, at_b) == bool(theirs & ours)
    # The quick test of a call, by extents, may report an overlap where there is none, never the reverse.
    assert (at_a < at_b + b.extent and at_b < at_a + a.extent) or not theirs & ours


@given(layout=_LAYOUT, dtype=_DTYPES)
def test_sizes_of_an_arg(layout: list[tuple[int, int]], dtype: dtypes.DType) -> None:
    arg = _arg(tuple(size for size, _ in layout), tuple(stride for _, stride in layout), dtype)
    addresses = _addresses(arg, 0)
    assert arg.numel == len(addresses)
    assert arg.nbytes == len(addresses) * dtype.itemsize
    assert arg.extent == (max(addresses) + dtype.itemsize if addresses else 0)


@pytest.mark.parametrize("dtype", dtypes._TABLE.values(), ids=repr)
def test_dtypes_are_equal_across_libraries(dtype: dtypes.DType) -> None:
    native = getattr(torch, dtype.name)
    array = numpy.dtype(getattr(ml_dtypes, dtype.name, None) or dtype.name)
    assert dtypes.of(native) is dtypes.of(array) is dtypes.of(dtype.name) is dtype
    assert native.itemsize == array.itemsize == dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.uint16, torch.float8_e5m2fnuz])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    assert dtypes.of(dtype) is None
    with pytest.raises(pyops.OpError, match=f"^op: x: dtype {dtype} is not supported"):
        tensor.describe("op", "x", torch.zeros(2, dtype=dtype), "torch", written=False)


def test_address_between_elements_is_refused() -> None:
    memory = numpy.zeros(64, numpy.uint8)
    start = -memory.ctypes.data % 16
    assert tensor.describe("op", "x", memory[start + 4 :][:8].view(numpy.float32), "numpy", False).alignment == 4
    for offset in (1, 2, 3, 6):
        odd = memory[start + offset :][:8].view(numpy.float32)
        with pytest.raises(pyops.OpError, match=r"^op: x: expected an address that is a multiple of 4 bytes, got 0x"):
            tensor.describe("op", "x", odd, "numpy", written=False)


def test_empty_tensors_do_not_overlap() -> None:
    """With any strides that numpy gives them."""
    for shape, strides in (((0, 8), (0, 0)), ((3, 0), (4, 4))):
        empty = numpy.lib.stride_tricks.as_strided(numpy.zeros(0, numpy.float32), shape, strides)
        assert tensor.describe("op", "x", empty, "numpy", written=True).numel == 0


@given(offset=st.integers(0, 40), rows=st.integers(1, 3), gap=st.integers(0, 3))
def test_descriptions_of_torch_and_numpy_agree(offset: int, rows: int, gap: int) -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    base = -memory.data_ptr() % 64  # from here on addresses are multiples of 64
    for dtype, itemsize in ((torch.float32, 4), (torch.int8, 1)):
        start = base + offset * itemsize
        window = memory[start : start + 96].view(dtype).as_strided((rows, 5), (5 + gap, 1))
        found = [
            tensor.describe("op", "x", value, kind, written=True)
            for value, kind in ((window, "torch"), (window.numpy(), "numpy"))
        ]
        for arg in found:
            assert (arg.shape, arg.strides) == ((rows, 5), (5 + gap, 1))
            assert arg.alignment == max(a for a in (1, 2, 4, 8, 16) if (start - base) % a == 0)
            assert arg.device.index == -1


def test_unsupported_numpy_arrays() -> None:
    backwards = numpy.zeros(8, numpy.float32)[::-1]
    with pytest.raises(pyops.OpError, match="not negative"):
        tensor.describe("op", "x", backwards, "numpy", written=False)
    fields = numpy.zeros(4, [("a", numpy.int8), ("b", numpy.float32)])["b"]
    with pytest.raises(pyops.OpError, match="whole elements"):
        tensor.describe("op", "x", fields, "numpy", written=False)
    fixed = numpy.zeros(4, numpy.float32)
    fixed.flags.writeable = False
    with pytest.raises(pyops.OpError, match="read-only"):
        tensor.describe("op", "x", fixed, "numpy", written=True)
    tensor.describe("op", "x", fixed, "numpy", written=False)


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float16", "int8", "int64"]
)
def test_to_torch_shares_memory_and_bits(name: str) -> None:
    array = numpy.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name, None) or name)
    value = tensor.to_torch(array)
    assert str(value.dtype) == f"torch.{name}"
    assert value.data_ptr() == array.ctypes.data
    assert value.float().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_double_that_rounds_to_infinity_is_not_converted() -> None:
    """It stays a double, to be refused by the name of its argument; the double below it rounds to the largest
    float32."""
    like, least = torch.ones(1), tensor.MAX_FLOAT
    below = numpy.nextafter(least, 0.0)
    with numpy.errstate(over="ignore"):
        assert numpy.isinf(numpy.float32(least))
    for sign in (1, -1):
        found = tensor.held_number(sign * least, like)
        assert isinstance(found, float)
        assert found == sign * least
        assert tensor.held_number(sign * below, like).item() == sign * torch.finfo(torch.float32).max
