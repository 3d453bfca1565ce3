"""Plan: what a call with one signature needs, made once on the cold path and used by every call that follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from ..errors import OpError
from ..launch import launch
from ..launch.launch import Bound
from ..tensors import tensor
from ..tensors.tensor import TensorArg
from .declaration import Declaration
from .guard import uncalled

_MAX_SEPARATE = 8192  # distances between tensors that a plan remembers


@dataclass(slots=True, eq=False)
class Plan:
    """Everything that calls with one signature need.

    Attributes:
        run: takes the op's arguments and does the whole call, by whatever means. For a device, what the wrapper does.
        device: ordinal; -1 for the CPU.
        bound: the launches: the wrapper packs their buffer and fires them. None: it hands the call over to `run`.
        lock, pack, buffer, fire: see `launch.Bound`.
        alignments: of the tensors' addresses, modulo 16; False if all are 0.
        addresses: of the last call that passed the overlap test. A call with the same addresses skips the test.
        guard: torch's own test whether tensors look as those of this plan; fails until the plan's second call.
        requires_grad: whether a tensor of the guard does. The plan then serves only calls with grad mode off.
        versioned: whether autograd counts writes to a written tensor of the guard. It does not for tensors made in
            inference mode.
        scalars: values of the keyed scalars.
        tensors: descriptors of the tensors; extents: bytes from the first element of each to the end of its last.
        separate: distances between the tensors that share no byte.
        empty: nothing is launched.
        keep: whether later calls with the same key may use the plan.
    """

    run: Callable[..., Any]
    device: int = -1
    bound: Bound | None = None
    tensors: Sequence[TensorArg | None] = ()
    alignments: Any = False
    scalars: tuple[Any, ...] = ()
    addresses: tuple[int, ...] = ()
    guard: Callable[..., bool] = uncalled
    requires_grad: bool = False
    versioned: bool = True
    lock: threading.Lock | None = None
    pack: Callable[..., None] | None = None
    buffer: Any = None
    fire: Any = None
    extents: tuple[int, ...] = ()
    separate: set[tuple[int, ...]] = field(default_factory=set)
    empty: bool = False
    keep: bool = True

    def __post_init__(self) -> None:
        self.extents = tuple(arg.extent if arg else 0 for arg in self.tensors)
        if self.bound is not None:
            self.lock, self.pack, self.buffer, self.fire = self.bound


def check_overlap(declaration: Declaration, plan: Plan, *addresses: int) -> None:
    """Called when address ranges overlap: refuse the call if bytes are shared and the op may not work in place.

    Strided views may interleave without a byte in common. The exact test is slow, so a plan remembers the distances
    between tensors that have passed.
    """
    distances = tuple(address - addresses[0] for address in addresses)
    if distances not in plan.separate:
        check_separate(declaration, plan.tensors, addresses)
        if len(plan.separate) >= _MAX_SEPARATE:
            plan.separate.clear()
        plan.separate.add(distances)


def check_separate(declaration: Declaration, tensors: Sequence[TensorArg | None], addresses: Sequence[int]) -> None:
    """Raises OpError if a written tensor shares a byte with another tensor, and `in_place` does not allow it."""
    present = [
        (p, arg, address)
        for p, arg, address in zip(declaration.tensors, tensors, addresses, strict=True)
        if arg is not None and arg.numel
    ]
    for (p, a, at_a), (q, b, at_b) in combinations(present, 2):
        if not (p.written or q.written):
            continue
        may_be_one = declaration.in_place.get(p.name) == q.name or declaration.in_place.get(q.name) == p.name
        if may_be_one and at_a == at_b and a.strides == b.strides and a.dtype is b.dtype:
            continue
        if tensor.shares_memory(a, at_a, b, at_b):
            written, other = (p, q) if p.written else (q, p)
            raise OpError(declaration.name, written.name, f"is written, but shares memory with {other.name}")


def addresses_of(declaration: Declaration, values: Sequence[Any]) -> list[int]:
    """Addresses of the tensors among values for all parameters; 0 for one that is absent."""
    return [0 if value is None else tensor.address(value) for value in declaration.tensors_of(values)]


def device_plan(
    declaration: Declaration,
    tensors: Sequence[TensorArg | None],
    index: int,
    bound: Bound,
    current_stream: Callable[[int], int],
) -> Plan:
    """The plan of launches that are bound to the device `index`."""

    def run(*args: Any) -> None:
        addresses = addresses_of(declaration, args)
        check_separate(declaration, tensors, addresses)
        tensor.increment_versions(declaration.written_of(args))
        values = {p.name: value for p, value in zip(declaration.parameters, args, strict=True)}
        words = (*addresses, *(values[name] for name, _ in declaration.runtime))
        stream = current_stream(index)
        error: Any
        try:
            error = bound.launch(stream, *words)
        except Exception as raised:
            error = raised
        if error:
            recover(declaration, error, index, bound, stream, *words)

    return Plan(run, index, bound, tensors)


def recover(
    declaration: Declaration, error: Exception | int, index: int, bound: Bound | None, stream: int, *words: Any
) -> None:
    """A launch that failed, by an exception or with a status of the driver."""
    assert bound is not None
    named = (*((name, "Q") for name in declaration.tensor_names), *declaration.runtime)
    launch.recover(error, declaration.name, index, bound, named, stream, *words)
