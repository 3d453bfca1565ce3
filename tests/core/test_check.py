"""Checks and choices of plans, against all the addresses that a layout reaches."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops import check
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import TensorArg


def arg(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, **more: Any) -> TensorArg:
    """A contiguous float32 Arg named x by default."""
    if strides is None:
        strides = tuple(_product(shape[i + 1 :]) for i in range(len(shape)))
    values = {"op": "op", "name": "x", "dtype": dtypes.float32, "alignment": 16, "device": device.model()} | more
    return TensorArg(shape=shape, strides=strides, **values)


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Offset of every element, in row-major order."""
    return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in product(*map(range, shape))]


@st.composite
def _strided(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor of that shape with its dimensions in some order in memory, with gaps."""
    order = draw(st.permutations(range(len(shape) - 1)))
    strides, step = [1] * len(shape), shape[-1] + draw(st.integers(0, 2))
    for dim in order:
        strides[dim] = step
        step = step * shape[dim] + draw(st.sampled_from([0, 0, 1, 8]))
    return tuple(strides)


_SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


@given(data=st.data())
def test_leading_visits_every_row_in_order(data: st.DataObject) -> None:
    shape = data.draw(_SHAPES)
    tensors = [arg(shape, data.draw(_strided(shape)), name=name) for name in "xy"]
    merged = check.leading(*tensors, max_dims=len(shape))
    for i, tensor in enumerate(tensors):
        sizes = tuple(size for size, _ in merged)
        strides = tuple(strides[i] for _, strides in merged)
        assert _offsets(sizes, strides) == _offsets(shape[:-1], tensor.strides[:-1])
    # No two adjacent dimensions could still be merged.
    for (_, outer), (size, inner) in pairwise(merged):
        assert any(a != size * b for a, b in zip(outer, inner, strict=True))


@given(data=st.data(), max_dims=st.integers(1, 3))
def test_leading_refuses_too_many(data: st.DataObject, max_dims: int) -> None:
    shape = data.draw(_SHAPES)
    tensors = [arg(shape, data.draw(_strided(shape)), name=name) for name in "xy"]
    needed = len(check.leading(*tensors, max_dims=len(shape)))
    if needed <= max_dims:
        assert len(check.leading(*tensors, max_dims=max_dims)) == needed
    else:
        with pytest.raises(pyops.OpError, match=rf"op: [xy]: expected leading dimensions that merge into {max_dims}"):
            check.leading(*tensors, max_dims=max_dims)


def test_row_stride() -> None:
    assert check.row_stride(arg((7, 5))) == 5
    assert check.row_stride(arg((7, 5), (9, 1))) == 9
    assert check.row_stride(arg((2, 3, 5), (27, 9, 1))) == 9
    assert check.row_stride(arg((1, 5), (1000, 1))) == 5
    with pytest.raises(pyops.OpError, match="merge into 1"):
        check.row_stride(arg((2, 3, 5), (9, 27, 1)))


@given(data=st.data(), size=st.integers(0, 40), widest=st.sampled_from([4, 8, 16]))
def test_vector_width_is_the_widest_that_fits(data: st.DataObject, size: int, widest: int) -> None:
    tensors = []
    for _ in range(data.draw(st.integers(1, 3))):
        dtype = data.draw(st.sampled_from([dtypes.float32, dtypes.bfloat16, dtypes.float8_e4m3fn]))
        shape = (*data.draw(st.lists(st.integers(0, 4), max_size=2)), size)
        strides = (*(data.draw(st.integers(0, 64)) for _ in shape[:-1]), 1)
        alignment = data.draw(st.sampled_from([1, 2, 4, 8, 16]).filter(lambda a, d=dtype: a >= d.itemsize))
        tensors.append(arg(shape, strides, dtype=dtype, alignment=alignment))

    def fits(width: int) -> bool:
        """Every row splits into aligned vectors of at most the given size."""
        return size % width == 0 and all(
            width * t.dtype.itemsize <= max(widest, t.dtype.itemsize)
            and all(
                (t.alignment + row * t.dtype.itemsize) % (width * t.dtype.itemsize) == 0
                for row in _offsets(t.shape[:-1], t.strides[:-1])
            )
            for t in tensors
        )

    width = check.vector_width(size, *tensors, widest=widest)
    assert width & (width - 1) == 0
    assert fits(width)
    reach = width * 2 * max(t.dtype.itemsize for t in tensors)
    every_row_exists = all(
        extent > 1 or stride == 0 for t in tensors for extent, stride in zip(t.shape[:-1], t.strides[:-1], strict=True)
    )
    if every_row_exists and reach <= widest:
        assert not fits(width * 2)


@given(needed=st.integers(0, 5000), max_threads=st.sampled_from([64, 128, 512, 1024]))
def test_threads(needed: int, max_threads: int) -> None:
    threads = check.threads(needed, max_threads=max_threads)
    assert threads % 64 == 0
    assert 64 <= threads <= max_threads
    assert threads >= min(needed, max_threads)
    assert threads < needed + 64 or threads == 64


@given(data=st.data())
def test_contiguous_as_in_numpy(data: st.DataObject) -> None:
    import numpy

    shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple))
    strides = tuple(data.draw(st.integers(0, 12)) for _ in shape)
    base = numpy.zeros(200, numpy.float32)
    view = numpy.lib.stride_tricks.as_strided(base, shape, tuple(4 * s for s in strides))
    if view.flags.c_contiguous:
        check.contiguous(arg(shape, strides))
    else:
        with pytest.raises(pyops.OpError, match="op: x: expected a contiguous tensor"):
            check.contiguous(arg(shape, strides))


REFUSED = [
    (lambda: check.dtype(arg((2,)), dtypes.float16), "op: x: expected dtype float16, got float32"),
    (
        lambda: check.floating(arg((2,), dtype=dtypes.int8)),
        "op: x: expected dtype float32 or float16 or bfloat16, got int8",
    ),
    (lambda: check.like(arg((2, 3)), arg((3, 2), name="y")), r"op: x: expected shape \(3, 2\) like y, got \(2, 3\)"),
    (lambda: check.like(arg((2,)), arg((2,), dtype=dtypes.int8)), "op: x: expected dtype int8, got float32"),
    (
        lambda: check.shape(arg((4095,)), hidden_size=4096),
        r"op: x: expected shape \(hidden_size=4096,\), got \(4095,\)",
    ),
    (lambda: check.shape(arg((2, 3)), rows=2, columns=4), r"op: x: expected shape \(rows=2, columns=4\), got \(2, 3\)"),
    (lambda: check.shape(arg((4,), (2,)), hidden_size=4), "op: x: expected a contiguous tensor"),
    (lambda: check.scalar(arg((2,))), r"op: x: expected one element, got shape \(2,\)"),
    (lambda: check.scalar(arg((1,), dtype=dtypes.float16)), "op: x: expected dtype float32, got float16"),
    (lambda: check.row_size(arg(())), "op: x: expected at least one dimension, got a scalar"),
    (
        lambda: check.row_size(arg((3, 4), (1, 3))),
        r"op: x: expected a last dimension of stride 1, got strides \(1, 3\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_error_messages(call: Any, message: str) -> None:
    with pytest.raises(pyops.OpError, match=f"^{message}"):
        call()


def test_absent_tensors_pass() -> None:
    check.dtype(None, dtypes.float16)
    check.like(None, arg((2,)))
    check.shape(None, hidden_size=3)
    check.scalar(None)
    check.scalar(arg(()))
    check.scalar(arg((1, 1)))


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((2, 3), {"rows": 2, "columns": 3}, ""),
        ((2, 3), {"rows": None, "columns": 3}, ""),
        ((2, 3, 1), {"rows": 2, "columns": 3}, r"expected shape \(rows=2, columns=3\), got \(2, 3, 1\)"),
        ((2,), {"rows": 2, "columns": 3}, r"expected shape \(rows=2, columns=3\), got \(2,\)"),
        ((2, 4), {"rows": None, "columns": 3}, r"expected shape \(rows, columns=3\), got \(2, 4\)"),
        ((), {"rows": 1}, r"expected shape \(rows=1,\), got \(\)"),
    ],
)
def test_sizes_by_name(shape: tuple[int, ...], sizes: dict[str, int | None], message: str) -> None:
    if not message:
        check.sizes(arg(shape), **sizes)
        return
    with pytest.raises(pyops.OpError, match=f"^op: x: {message}$"):
        check.sizes(arg(shape), **sizes)


def test_dimensions_merge_where_all_tensors_allow_it() -> None:
    one, gaps = arg((2, 3, 4)), arg((2, 3, 4), (100, 4, 1))
    assert check.leading(one, max_dims=1) == [(6, (4,))]
    assert check.leading(one, gaps, max_dims=2) == check.leading(one, gaps, max_dims=3) == [(2, (12, 100)), (3, (4, 4))]
    with pytest.raises(pyops.OpError, match="expected leading dimensions that merge into 1"):
        check.leading(one, gaps, max_dims=1)


def test_longest_rows_with_32_bit_indices() -> None:
    check.narrow(arg((1, 2**30)))
    with pytest.raises(pyops.OpError, match=r"expected rows of at most 2\^30 elements"):
        check.narrow(arg((1, 2**30 + 1)))
