"""The suite's own instruments: what the comparison lets pass, and what watched memory notices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pyops
from pyops._core import binding, check
from pyops._core.op import Op, registry
from pyops._core.tensor import Arg
from tests import axes
from tests.calls import Guarded, Layout, as_numpy, assert_results, expected, run
from tests.compare import assert_close, same_bits

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def _next(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The value so many units in the last place further from zero."""
    words = torch.int32 if x.element_size() == 4 else torch.int16
    return (x.view(words) + steps).view(x.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [1.0, 1.984375, -3.5, 1024.0, 3e-5])
def test_units_in_the_last_place(dtype: torch.dtype, value: float) -> None:
    x = torch.full((3,), value, dtype=dtype)
    units = 16 if dtype == torch.float32 else 1
    assert_close(x, x.clone(), 0)
    assert_close(x, _next(x, units), 1)
    assert_close(_next(x, units), x, 1)
    assert_close(x, _next(x, 2 * units), 2)
    with pytest.raises(AssertionError, match="more than 1 ulps away, 3 of 3"):
        assert_close(x, _next(x, 2 * units + 5), 1)
    with pytest.raises(AssertionError):
        assert_close(x, _next(x, 1), 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wrong_element_among_many(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    y = x.clone()
    y[17, 3] += 0.1
    with pytest.raises(AssertionError, match=r"1 of 4096 elements, the first at \(17, 3\)"):
        assert_close(x, y, 1)
    y[17, 3] = float("nan")
    with pytest.raises(AssertionError, match="NaN at other places"):
        assert_close(x, y, 1)


def test_infinity_is_next_to_the_largest() -> None:
    infinite = torch.tensor([float("inf")], dtype=torch.float16)
    assert_close(infinite, infinite.clone(), 0)
    assert_close(infinite, torch.tensor([65504.0], dtype=torch.float16), 1)
    for wrong in (-infinite, torch.tensor([6e4], dtype=torch.float16)):
        with pytest.raises(AssertionError):
            assert_close(infinite, wrong, 1)


def test_flushed_denormals_pass() -> None:
    x = torch.tensor([1e-39, 1.0])
    assert_close(x, torch.tensor([0.0, 1.0]), 0)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1e-25, 1.0]), torch.tensor([0.0, 1.0]), 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes(dtype: torch.dtype) -> None:
    codes = torch.arange(-100, 100).repeat(50).to(torch.int8)
    x = codes.float().to(dtype) if dtype != torch.int8 else codes
    step = x.view(torch.uint8).clone()

    def moved(count: int, by: int) -> torch.Tensor:
        y = step.clone().view(torch.int8)
        y[150 : 150 + count] += by
        return y.view(dtype)

    assert_close(x, moved(0, 0), 0)
    assert_close(x, moved(1, 1), 1)
    assert_close(x, moved(10, 1), 1)
    for count, by, ulps in ((1, 1, 0), (1, 2, 1), (11, 1, 1)):
        with pytest.raises(AssertionError):
            assert_close(x, moved(count, by), ulps)


def test_fp8_signs_and_nan() -> None:
    x = torch.tensor([0.0, 1.0, float("nan")]).to(torch.float8_e4m3fn)
    assert_close(x, torch.tensor([-0.0, 1.0, float("nan")]).to(torch.float8_e4m3fn), 0)
    for wrong in ([0.0, -1.0, float("nan")], [0.0, 1.0, 448.0], [float("nan"), 1.0, float("nan")]):
        with pytest.raises(AssertionError):
            assert_close(x, torch.tensor(wrong).to(torch.float8_e4m3fn), 1)


def test_shape_and_dtype_count() -> None:
    x = torch.zeros(2, 3)
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float16)):
        with pytest.raises(AssertionError):
            assert_close(x, wrong, 5)
        assert not same_bits(x, wrong)
    assert not same_bits(x, -x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_guards_notice_every_byte_around(dtype: torch.dtype) -> None:
    value = torch.arange(15).reshape(3, 5).to(torch.float32).to(dtype)
    guard = Guarded(value, Layout(offset=3, gap=2))
    assert same_bits(guard.tensor, value)
    assert guard.tensor.stride() == (7, 1)
    assert guard.intact()
    guard.poison(0xFF)
    assert guard.intact()
    itemsize = value.element_size()
    inside = {
        guard.start * itemsize + (7 * row + i) * itemsize + byte
        for row in range(3)
        for i in range(5)
        for byte in range(itemsize)
    }
    assert min(inside) >= 256
    assert max(inside) + 256 <= guard.memory.numel()
    for byte in range(guard.memory.numel()):
        if byte not in inside:
            guard.memory[byte] ^= 1
            assert not guard.intact()
            guard.memory[byte] ^= 1


def test_numpy_views_share_memory() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        value = torch.ones(2, 3).to(dtype)
        array = as_numpy(value)
        assert str(array.dtype) == str(value.dtype).removeprefix("torch.")
        assert array.ctypes.data == value.data_ptr()


# An op with one fault each, which the tests of every op must find.


@pytest.fixture
def declared() -> Iterator[Any]:
    """declared(reference): an op that lives for one test."""
    before = set(registry)

    def declare(reference: Any, **more: Any) -> Op:
        wrapper = pyops.op(out="out", **more)(reference)

        @wrapper.plan
        def _(out: Arg, input: Arg) -> list[Any]:
            check.like(out, input)
            return []

        return wrapper.op

    yield declare
    for name in set(registry) - before:
        binding._ops.remove(registry.pop(name))


def _args() -> list[Any]:
    return [torch.zeros(3, 5), torch.randn(3, 5)]


def test_a_write_beside_the_output_is_found(declared: Any) -> None:
    def writes_beside(out: Tensor, input: Tensor) -> None:
        out.copy_(input)
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()

    with pytest.raises(AssertionError, match="bytes around out were written"):
        run(declared(writes_beside), _args())


def test_a_written_input_is_found(declared: Any) -> None:
    def writes_input(out: Tensor, input: Tensor) -> None:
        out.copy_(input)
        input[1, 2] = 0

    with pytest.raises(AssertionError, match="the input input was written"):
        run(declared(writes_input), _args())


def test_an_element_left_out_is_found(declared: Any) -> None:
    def leaves_out(out: Tensor, input: Tensor) -> None:
        out[:, :4] = input[:, :4]

    op = declared(leaves_out)
    first, second = (run(op, _args(), poison=byte)["out"] for byte in (0xFF, 0x00))
    assert not same_bits(first, second)


def test_a_write_before_a_refusal_is_found(declared: Any) -> None:
    def writes_then_refuses(out: Tensor, input: Tensor) -> None:
        out.zero_()
        raise pyops.OpError("writes_then_refuses", "input", "too late")

    with pytest.raises(AssertionError, match="out was written before the call was refused"):
        run(declared(writes_then_refuses), _args())


def test_a_wrong_result_is_found(declared: Any) -> None:
    def adds(out: Tensor, input: Tensor) -> None:
        out.copy_(input + 1)

    op = declared(adds)
    args = _args()
    right = expected(op, args)
    assert_results(op, right, run(op, args))
    with pytest.raises(AssertionError, match="adds: out: more than 1 ulps away"):
        assert_results(op, right, {"out": right["out"] * 1.001})


def test_an_unknown_axis_is_named(declared: Any) -> None:
    def unknown_axis(out: Tensor, input: Tensor) -> None: ...

    op = declared(unknown_axis)

    @op.wrapper.example
    def _(make: Any, *, num_tokens: int = 1, wingspan: int = 3) -> tuple[Any, ...]:
        return ()

    with pytest.raises(LookupError, match="unknown_axis: the axis 'wingspan' of its example is unknown"):
        axes.compiled(op)
