"""Calling any op on memory that is watched, and comparing what it wrote with what its reference writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from .._core import config
from .._core.errors import OpError
from .._core.op.op import Op
from .._core.op.typed import Wrapper
from .._core.system.lazy import torch
from .._core.tensors import dtypes
from ..host.run import SCHEDULES, Schedule, scheduled
from .compare import CODES, assert_close, same_bits
from .memory import Canaries, Layout

if TYPE_CHECKING:
    from torch import Tensor

# What outputs hold before a call, in turn: NaN in every float type, zeros, and small values.
_POISONS = (0xFF, 0x00, 0x5A)


def assert_matches_reference(
    op: Wrapper[..., Any] | Op,
    *args: Any,
    schedules: Sequence[Schedule] = SCHEDULES,
    warp_sizes: Sequence[int] = (32,),
    **by_name: Any,
) -> None:
    """Run the kernels of an op and hold them to its reference, as it is declared, within its `ulps`.

    The kernels run on the host backend under each of `schedules` and in warps of each of `warp_sizes` lanes, with
    watched bytes around every tensor and between its rows (see `Canaries`, which keeps strides and alignment). Where
    tensors of `args` are on a GPU they run there first, and then on the host on contiguous copies. `args` and
    `by_name`, torch tensors and scalars that the op takes, stay as they are: what is written are copies, of which
    outputs hold garbage before each call.

    Raises AssertionError, which names op, output, index, what was expected and what came, and the schedule; also where
    an input or a byte around a tensor was written. KernelFault, for what the host backend finds, has a note of the
    schedule. OpError where the op refuses the call; MissingDependencyError without a C++ compiler.
    """
    op, values = _arguments(op, args, by_name)
    if not schedules or not warp_sizes:
        raise ValueError("schedules, warp_sizes: expected at least one of each")
    if config.reference():
        raise RuntimeError("PYOPS_REFERENCE is set, so no kernel would run: unset it")
    op.check(*values)
    if any(tensor.is_cuda for tensor in named(op, values).values()):
        with _noted("on the GPU"):
            assert_results(op, expected(op, values), run(op, values))
        values = [value.cpu().contiguous() if _is_tensor(value) else value for value in values]
    with config.cpu("kernels"):
        right = expected(op, values)
        for warp_size in warp_sizes:
            for index, schedule in enumerate(schedules):
                with _noted(f"under {schedule}, warps of {warp_size}"), scheduled(schedule, warp_size=warp_size):
                    assert_results(op, right, run(op, values, poison=_POISONS[index % len(_POISONS)]))


def _arguments(op: Wrapper[..., Any] | Op, args: Sequence[Any], by_name: Mapping[str, Any]) -> tuple[Op, Sequence[Any]]:
    """The op, and a value for each of its parameters."""
    found = op if isinstance(op, Op) else getattr(op, "op", None)
    if not isinstance(found, Op):
        raise TypeError(f"op: expected what @op made of a reference, got {op!r}")
    bound = inspect.signature(found.reference).bind(*args, **by_name)
    bound.apply_defaults()
    values = [bound.arguments[p.name] for p in found.parameters]
    like = next(value for p, value in zip(found.parameters, values, strict=True) if p.kind == "Tensor" and not p.number)
    for i, (p, value) in enumerate(zip(found.parameters, values, strict=True)):
        if p.number and isinstance(value, float | int):
            values[i] = torch.tensor(value, dtype=torch.float32, device=like.device)
        elif p.kind == "Tensor" and value is not None and not _is_tensor(value):
            raise TypeError(f"{found.name}: {p.name}: expected a torch tensor, got {type(value).__name__}")
    return found, values


@contextmanager
def _noted(circumstances: str) -> Iterator[None]:
    """What is raised within says under which circumstances."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{error}, {circumstances}") from None
    except Exception as error:
        error.add_note(circumstances)
        raise


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def named(op: Op, args: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors among `args` by parameter."""
    return {p.name: arg for p, arg in zip(op.parameters, args, strict=True) if _is_tensor(arg)}


def written(op: Op, args: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors among `args` that the op writes."""
    return {p.name: arg for p, arg in zip(op.parameters, args, strict=True) if p.written and arg is not None}


def clones(args: Sequence[Any]) -> list[Any]:
    """`args` with a copy of each tensor."""
    return [arg.clone() if _is_tensor(arg) else arg for arg in args]


def replaced(op: Op, args: Sequence[Any], **values: Any) -> list[Any]:
    """`args` with some of them, by name, replaced."""
    assert values.keys() <= {p.name for p in op.parameters}
    return [values.get(p.name, arg) for p, arg in zip(op.parameters, args, strict=True)]


class Expected(dict[str, "Tensor"]):
    """What the reference of an op wrote, by parameter, and `cancelled` of its declaration for that call."""

    def __init__(self, results: Mapping[str, Tensor], atol: float) -> None:
        super().__init__(results)
        self.atol = atol


def expected(op: Op, args: Sequence[Any]) -> Expected:
    """What the reference makes of `args`, which stay as they are."""
    copies = clones(args)
    with torch.no_grad(), eager():
        atol = op.atol(*copies)
        op.applied(op.reference, copies)()
    return Expected(written(op, copies), atol)


def eager() -> AbstractContextManager[Any]:
    """Within it, eager PyTorch computes what kernels that are equal to it are compared with."""
    if not config.kernels_on_cpu():
        return nullcontext()
    from .rounded import CorrectlyRounded

    return CorrectlyRounded()


def run(
    op: Op,
    args: Sequence[Any],
    layouts: Mapping[str, Layout] | None = None,
    *,
    poison: int = 0xFF,
    call: Callable[..., None] | None = None,
) -> dict[str, Tensor]:
    """Call the op on watched copies of `args`, placed in `layouts` by name, and return what it wrote.

    Outputs hold `poison` before the call; inputs must be what they were after it, and so must every byte around.
    """
    placed = {
        name: layouts[name].place(value) for name, value in named(op, args).items() if layouts and name in layouts
    }
    held = {name: Canaries(value) for name, value in (named(op, args) | placed).items()}
    for p in op.tensors:
        if p.role == "out" and p.name in held:
            held[p.name].poison(poison)
    before = {name: one.tensor.clone() for name, one in held.items()}
    called = replaced(op, args, **{name: one.tensor for name, one in held.items()})
    try:
        (call or op)(*called)
    except OpError:
        for name, one in held.items():
            assert same_bits(before[name], one.tensor), f"{op.name}: {name} was written before the call was refused"
        raise
    for p in op.tensors:
        if p.name in held:
            held[p.name].check(f"{op.name}: {p.name}")
            unchanged = p.written or same_bits(before[p.name], held[p.name].tensor)
            assert unchanged, f"{op.name}: the input {p.name} was written"
    return {name: tensor.clone() for name, tensor in written(op, called).items()}


def assert_results(op: Op, expected: Expected, actual: Mapping[str, Tensor], ulps: int | None = None) -> None:
    """Every output within `ulps`, or those that the op declares."""
    assert expected.keys() == actual.keys()
    quantised = any(dtypes.of(value.dtype) in CODES for value in expected.values())
    for name, value in expected.items():
        is_scale = quantised and name == "scale"
        within = op.declaration.ulps if ulps is None else ulps
        assert_close(value, actual[name], within, f"{op.name}: {name}", is_scale, expected.atol)


def assert_same(op: Op, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Every output equal bit for bit."""
    for name, value in first.items():
        assert same_bits(value, second[name]), f"{op.name}: {name} differs"
