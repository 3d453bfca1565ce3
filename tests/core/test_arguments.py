"""Arguments of every kind: numpy scalars are scalars; an argument that no kernel takes is an OpError with its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

import pyops
from pyops._core import config
from pyops._core.launch.kernel import Kernel, Launch
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.example import ArgMaker

if TYPE_CHECKING:
    from torch import Tensor

TEXT = """
// out = a + b + c + d + e[0] + e[1]
#include "number.cuh"
extern "C" __global__ void total(float* out, int a, int b, float c, float d, int first, int second) {
if (FLAG) {
    if (threadIdx.x == 0) *out = a + b + c + d + first + second;
    }
}
"""


@pytest.fixture
def total() -> Any:
    @pyops.op(out="out", keyed="c", ulps=0)
    def total(out: Tensor, a: int, b: bool, c: float, d: float, e: tuple[int, int], f: Tensor | None = None) -> None:
        out.fill_(a + b + c + d + sum(e))

    @total.plan
    def plan_total(a: int, b: bool, e: tuple[int, int]) -> Launch:
        first, second = e
        return Kernel("test/total.cu", text=TEXT)(FLAG=isinstance(b, bool)).launch(1, 32, first=first, second=second)

    return total


@pytest.fixture(params=["kernels", "reference"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with config.cpu(request.param):
        yield request.param


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("numpys_first", [True, False])
def test_numpy_scalars_are_scalars(total: Any, numpys_first: bool) -> None:
    plain = (3, True, 0.5, 0.25, (1, 2))
    pair = numpy.int64(1), numpy.int32(2)
    others = (numpy.int64(3), numpy.bool_(True), numpy.float32(0.5), numpy.float16(0.25), pair)
    for values in [others, plain, others] if numpys_first else [plain, others, plain]:
        out = torch.zeros(1)
        total(out, *values)
        assert out.item() == 7.75
    for i, value in enumerate(others):
        out = torch.zeros(1)
        total(out, *plain[:i], value, *plain[i + 1 :])
        assert out.item() == 7.75


@pytest.mark.usefixtures("mode")
def test_any_number_type_is_a_number(total: Any) -> None:
    """Other integers than Python's, and integers that float32 rounds but torch would not take."""
    for a, d in ((Index(3), 0.25), (numpy.array(3), numpy.array(0.25)), (torch.tensor(3), torch.tensor(0.25))):
        out = torch.zeros(1)
        total(out, a, Index(1), 0.5, d, (1, 2))
        assert out.item() == 7.75
    for large in (2**70, numpy.uint64(2**63)):
        out = torch.zeros(1)
        total(out, 0, False, 0.0, large, (0, 0))
        assert out.item() == float(large)


class Index:
    """An integer by its `__index__`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> Any:
        return self.value


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "int past 64 bits": ({"a": 2**70}, "a: expected an integer of 64 bits, got 1180591620717411303424"),
    "int before 64 bits": ({"a": -(2**70)}, "a: expected an integer of 64 bits"),
    "cap": ({"c": 1e300}, "c: expected a number that float32 can hold, got 1e\\+300"),
    "float": ({"d": -1e300}, "d: expected a number that float32 can hold, got -1e\\+300"),
    "text": ({"c": "1.5"}, "c: expected float, got str"),
    "bytes": ({"d": b"1.5"}, "d: expected float, got bytes"),
    "number past floats": ({"d": 10**400}, "d: expected a number that float32 can hold, got one of 1329 bits"),
    "digits past strings": ({"a": -(10**5000)}, "a: expected an integer of 64 bits, got one of 16610 bits"),
    "neither true nor false": ({"b": 2}, "b: expected True or False, got 2"),
    "just past 64 bits": ({"a": 2**63}, "a: expected an integer of 64 bits, got 9223372036854775808"),
    "just past 64 bits, negative": ({"a": -(2**63) - 1}, "a: expected an integer of 64 bits, got -9223372036854775809"),
    "what says it is an integer": (
        {"a": Index(2**70)},
        "a: expected an integer of 64 bits, got 1180591620717411303424",
    ),
    "what fails to be one": ({"a": Index("x")}, "a: expected int, got Index: __index__ returned non-int"),
    "what fails to be a bool": ({"b": Index("x")}, "b: expected bool, got Index: __index__ returned non-int"),
    "float without data": ({"c": torch.ones((), device="meta")}, "c: expected float, got Tensor: Tensor.item"),
    "late float without data": ({"d": torch.ones((), device="meta")}, "d: expected float, got Tensor: Tensor.item"),
    "integer without data": ({"a": torch.ones((), device="meta", dtype=torch.int64)}, "a: expected int, got Tensor"),
    "tensor of several": ({"c": torch.ones(2)}, "c: expected float, got Tensor"),
    "pair": ({"e": (1, 2.0)}, "e: expected tuple\\[int, int\\], got tuple"),
}


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("planned", [True, False])
def test_unsupported_scalars(total: Any, name: str, planned: bool) -> None:
    values = {"a": 3, "b": True, "c": 0.5, "d": 0.25, "e": (1, 2)}
    changed, message = BAD[name]
    out = torch.zeros(1)
    if planned:
        total(out, **values)
        out.zero_()
    with pytest.raises(pyops.OpError, match=f"^total: {message}"):
        total(out, **values | changed)
    assert not out.any()


def test_32_bit_integer_parameter(total: Any) -> None:
    with config.cpu("kernels"), pytest.raises(pyops.OpError, match=r"^total: a: got 1099511627776: "):
        total(torch.zeros(1), 2**40, True, 0.5, 0.25, (1, 2))


def without_storage() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.ones(8, device="meta"), "has no memory"),
    "no storage": (without_storage, "has no memory"),
    "sparse": (lambda: torch.ones(8).to_sparse(), "expected a dense tensor, got one of layout torch.sparse_coo"),
    "mkldnn": (lambda: torch.ones(1, 8).to_mkldnn(), "expected a dense tensor, got one of layout torch._mkldnn"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(8)], layout=torch.jagged),
        "expected a dense tensor, got a nested one",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(8)]), "expected a dense tensor, got a nested one"),
    "negated": (lambda: torch.ones(8)._neg_view(), r"its elements in memory are not its values yet: call resolve_neg"),
    "imaginary": (lambda: torch.ones(8, dtype=torch.cfloat).conj().imag, "its elements .* call resolve_neg"),
    "complex": (lambda: torch.ones(8, dtype=torch.cfloat).conj(), "dtype torch.complex64 is not supported"),
}


@pytest.mark.usefixtures("mode")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("planned", [True, False])
def test_unsupported_tensors(total: Any, kind: str, planned: bool) -> None:
    make, message = TENSORS[kind]
    out = torch.zeros(1)
    if planned:
        total(out, 3, True, 0.5, 0.25, (1, 2), torch.ones(8))
        out.zero_()
    with pytest.raises(pyops.OpError, match=f"^total: f: {message}"):
        total(out, 3, True, 0.5, 0.25, (1, 2), make())
    assert not out.any()


def test_transforms_of_torch_are_refused(total: Any) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        total(torch.zeros(1), 3, True, 0.5, 0.25, (1, 2), x)
        return x.sum()

    x = torch.ones(2, 8)
    for transformed in (torch.vmap(call), torch.func.grad(call), lambda x: torch.func.jvp(call, (x,), (x,))):
        with pytest.raises(pyops.OpError, match=r"^total: (out|f): (is transformed by torch\.func|requires grad)"):
            transformed(x)


def test_guarded_plan_refuses_optional_tensor_without_memory() -> None:
    from benchmarks.fake_driver import fake_driver

    out, x, weight = torch.empty(2, 8), torch.randn(2, 8), torch.ones(8)
    with fake_driver():
        for _ in range(3):
            pyops.rms_norm(out, x, weight, 1e-6)
        with pytest.raises(pyops.OpError, match=r"^rms_norm: weight: has no memory"):
            pyops.rms_norm(out, x, without_storage(), 1e-6)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("between", [False, True])
def test_negated_tensor_finds_no_plan(position: int, calls: int, between: bool) -> None:
    """Neither by guard nor by key, as an input, an output or an optional tensor, and after any other call."""
    from benchmarks.fake_driver import fake_driver

    def args(rows: int) -> list[torch.Tensor]:
        return [torch.empty(rows, 8), torch.randn(rows, 8), torch.ones(8)]

    negated = args(2)
    negated[position] = negated[position]._neg_view()
    name = ("out", "input", "weight")[position]
    with fake_driver():
        for _ in range(calls):
            pyops.rms_norm(*args(2), 1e-6)
        if between:
            pyops.rms_norm(*args(3), 1e-6)
        for _ in range(4):
            with pytest.raises(pyops.OpError, match=rf"^rms_norm: {name}: its elements .* call resolve_neg\(\) first"):
                pyops.rms_norm(*negated, 1e-6)
        pyops.rms_norm(*args(2), 1e-6)


@pytest.mark.parametrize("name", ["out", "input", "weight"])
def test_negated_tensor_is_refused_through_torch(name: str) -> None:
    args = {"out": torch.empty(2, 8), "input": torch.randn(2, 8), "weight": torch.ones(8)}
    args[name] = args[name]._neg_view()
    with pytest.raises(pyops.OpError, match=rf"^rms_norm: {name}: its elements .* call resolve_neg\(\) first"):
        torch.ops.pyops.rms_norm(**args, epsilon=1e-6)


@pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in pyops.registry.items()])
def test_0d_tensor_is_refused_or_right(op: Op) -> None:
    assert op.example is not None
    args = list(op.example(ArgMaker(device.host(), op.name)))
    for i, p in zip(op.declaration.tensor_positions, op.tensors, strict=True):
        if args[i] is not None:
            scalar = replace(args[i], name=p.name, shape=(), strides=())
            with suppress(pyops.OpError):
                op.launches(*args[:i], scalar, *args[i + 1 :])
