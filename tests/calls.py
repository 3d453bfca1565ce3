"""Calling any op on memory that is watched: guards around every argument, poison in every output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import pyops
from pyops._core.example import TorchMaker
from pyops._core.op import Op
from tests.compare import CODES, assert_close, same_bits

# Every op on the host, and where there is a device also on it. On the host the wrapper runs the reference, so there
# the same tests hold the references and the dispatch to their promises.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

_GUARD = 256  # bytes around an argument
_PATTERN = 0xA5
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Layout(NamedTuple):
    """How an argument lies in memory: `offset` elements into a buffer, with `gap` elements between two rows."""

    offset: int = 0
    gap: int = 0


PACKED = Layout()


class Guarded:
    """The values of a tensor inside a larger buffer whose other bytes, the gaps between rows included, are watched."""

    def __init__(self, value: torch.Tensor, layout: Layout = PACKED) -> None:
        itemsize = value.element_size()
        strides, step = [], 1
        for size in reversed(value.shape):
            strides.append(step)
            step = step * size + (layout.gap if len(strides) == 1 else 0)
        self.shape, self.strides = tuple(value.shape), tuple(reversed(strides))
        self.start = _GUARD // itemsize + layout.offset
        size = (self.start + max(1, step)) * itemsize + _GUARD
        self.memory = torch.full((size - size % itemsize,), _PATTERN, dtype=torch.uint8, device=value.device)
        self.tensor = self.memory.view(value.dtype).as_strided(self.shape, self.strides, self.start)
        self.tensor.copy_(value)

    def _bytes(self, memory: torch.Tensor) -> torch.Tensor:
        """The bytes of the tensor's elements in `memory`."""
        itemsize = self.tensor.element_size()
        strides = (*(stride * itemsize for stride in self.strides), 1)
        return memory.as_strided((*self.shape, itemsize), strides, self.start * itemsize)

    def poison(self, byte: int) -> None:
        """Fill the tensor's elements."""
        self._bytes(self.memory).fill_(byte)

    def intact(self) -> bool:
        """Whether every byte outside the tensor's elements is as it was."""
        memory = self.memory.clone()
        self._bytes(memory).fill_(_PATTERN)
        return bool((memory == _PATTERN).all())


def example(op: Op, device: str = "cpu", seed: int = 0, **axes: Any) -> list[Any]:
    """The op's example arguments with data."""
    assert op.example is not None
    return list(op.example(TorchMaker(device, seed), **axes))


def named(op: Op, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors among `args` by parameter."""
    return {p.name: arg for p, arg in zip(op.parameters, args, strict=True) if isinstance(arg, torch.Tensor)}


def written(op: Op, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors among `args` that the op writes."""
    return {p.name: arg for p, arg in zip(op.parameters, args, strict=True) if p.written and arg is not None}


def clones(args: Sequence[Any]) -> list[Any]:
    return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]


def expected(op: Op, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What the reference makes of `args`, which stay as they are."""
    copies = clones(args)
    with torch.no_grad():
        op.reference(*copies)
    return written(op, copies)


def replaced(op: Op, args: Sequence[Any], **values: Any) -> list[Any]:
    """`args` with some of them, by name, replaced."""
    assert values.keys() <= {p.name for p in op.parameters}
    return [values.get(p.name, arg) for p, arg in zip(op.parameters, args, strict=True)]


def run(
    op: Op,
    args: Sequence[Any],
    layouts: dict[str, Layout] | None = None,
    *,
    poison: int = 0xFF,
    call: Callable[..., None] | None = None,
) -> dict[str, torch.Tensor]:
    """Call the op on guarded copies of `args` and return what it wrote.

    Outputs hold `poison` before the call; inputs must be what they were after it, and so must every byte around.
    """
    layouts = layouts or {}
    guards = {name: Guarded(tensor, layouts.get(name, PACKED)) for name, tensor in named(op, args).items()}
    for p in op.tensors:
        if p.role == "out" and p.name in guards:
            guards[p.name].poison(poison)
    before = {name: guard.tensor.clone() for name, guard in guards.items()}
    try:
        (call or op.wrapper)(*replaced(op, args, **{name: guard.tensor for name, guard in guards.items()}))
    except pyops.OpError:
        for name, guard in guards.items():
            assert same_bits(before[name], guard.tensor), f"{op.name}: {name} was written before the call was refused"
        raise
    for p in op.tensors:
        if guard := guards.get(p.name):
            assert guard.intact(), f"{op.name}: bytes around {p.name} were written"
            assert p.written or same_bits(before[p.name], guard.tensor), f"{op.name}: the input {p.name} was written"
    return {name: tensor.clone() for name, tensor in written(op, _tensors(op, args, guards)).items()}


def _tensors(op: Op, args: Sequence[Any], guards: dict[str, Guarded]) -> list[Any]:
    return replaced(op, args, **{name: guard.tensor for name, guard in guards.items()})


def assert_results(op: Op, expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    """Every output within the op's tolerance."""
    assert expected.keys() == actual.keys()
    quantised = any(value.dtype in CODES for value in expected.values())
    for name, value in expected.items():
        assert_close(value, actual[name], op.ulps, f"{op.name}: {name}", is_scale=quantised and name == "scale")


def assert_same(op: Op, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Every output equal bit for bit."""
    for name, value in first.items():
        assert same_bits(value, second[name]), f"{op.name}: {name} differs"


def refusal(op: Op, args: Sequence[Any], call: Callable[..., None] | None = None) -> pyops.OpError:
    """The OpError the call must raise, naming an argument of the op, without a byte of any argument written."""
    values = [arg for arg in args if isinstance(arg, torch.Tensor)]
    before = [value.clone() for value in values]
    with pytest.raises(pyops.OpError) as caught:
        (call or op.wrapper)(*args)
    error = caught.value
    assert error.op == op.name
    assert error.argument in {p.name for p in op.parameters}
    assert str(error) == f"{op.name}: {error.argument}: {error.message}"
    for value, copy in zip(values, before, strict=True):
        assert same_bits(value, copy), f"{op.name}: an argument was written before the call was refused"
    return error


def as_numpy(value: Any) -> Any:
    """A numpy array over the memory of a host tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.view(_WORDS[value.element_size()]).numpy().view(_element_type(value))


def as_cupy(value: Any) -> Any:
    """A cupy array over the memory of a device tensor; anything else as it is."""
    import cupy

    if not isinstance(value, torch.Tensor):
        return value
    return cupy.from_dlpack(value.view(_WORDS[value.element_size()])).view(_element_type(value))


def _element_type(value: torch.Tensor) -> Any:
    import ml_dtypes
    import numpy

    name = str(value.dtype).removeprefix("torch.")
    return numpy.dtype(getattr(ml_dtypes, name, None) or name)
