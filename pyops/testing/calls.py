"""Call any op on tensors surrounded by canary bytes, and compare its outputs with those of its reference."""

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

# Contents of outputs before a call, one call each: NaN in every float type, zeros, and small values.
_POISONS = (0xFF, 0x00, 0x5A)


def assert_matches_reference(
    op: Wrapper[..., Any] | Op,
    *args: Any,
    schedules: Sequence[Schedule] = SCHEDULES,
    warp_sizes: Sequence[int] = (32,),
    **by_name: Any,
) -> None:
    """Run the kernels of an op and compare the results with its reference, within the `ulps` that the op declares.

    The kernels run on the host backend under each of `schedules` and with each of `warp_sizes`, with canary bytes
    around every tensor and between its rows (`Canaries` keeps strides and alignment). If tensors of `args` are on a
    GPU, the kernels run there first, and then on the host on contiguous copies. The torch tensors and scalars in `args`
    and `by_name` are not modified: the op gets copies, and its outputs hold garbage before each call.

    Raises:
        AssertionError: a result differs, or an input or a canary byte was written. The message names op, output, index,
            expected and actual value, and the schedule.
        KernelFault: the host backend found an error; a note names the schedule.
        OpError: the op refuses the call.
        MissingDependencyError: there is no C++ compiler.

    Examples:
        >>> x = torch.randn(3, 1000)
        >>> assert_matches_reference(pyops.relu2, torch.empty_like(x), x, schedules=SCHEDULES[:2])
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
    """The op, and the values of all its parameters."""
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
    """Exceptions raised within this context get a note of the circumstances."""
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
    """{parameter: tensor} of the tensors among `args`."""
    return {p.name: arg for p, arg in zip(op.parameters, args, strict=True) if _is_tensor(arg)}


def written(op: Op, args: Sequence[Any]) -> dict[str, Tensor]:
    """{parameter: tensor} of the tensors among `args` that the op writes."""
    return {p.name: arg for p, arg in zip(op.parameters, args, strict=True) if p.written and arg is not None}


def clones(args: Sequence[Any]) -> list[Any]:
    """`args` with copies of all tensors."""
    return [arg.clone() if _is_tensor(arg) else arg for arg in args]


def replaced(op: Op, args: Sequence[Any], **values: Any) -> list[Any]:
    """`args` with the arguments in `by_name` replaced."""
    assert values.keys() <= {p.name for p in op.parameters}
    return [values.get(p.name, arg) for p, arg in zip(op.parameters, args, strict=True)]


class Expected(dict[str, "Tensor"]):
    """{parameter: tensor} that an op's reference wrote, and the declared `cancelled` tolerance of the call."""

    def __init__(self, results: Mapping[str, Tensor], atol: float) -> None:
        super().__init__(results)
        self.atol = atol


def expected(op: Op, args: Sequence[Any]) -> Expected:
    """The outputs of the reference for `args`, which are not modified."""
    copies = clones(args)
    with torch.no_grad(), eager():
        atol = op.atol(*copies)
        op.applied(op.reference, copies)()
    return Expected(written(op, copies), atol)


def eager() -> AbstractContextManager[Any]:
    """Within this context, references run in eager PyTorch with correctly rounded functions."""
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
    """Call the op on copies of `args` among canary bytes, in the given `layouts` by name, and return its outputs.

    Outputs hold `poison` before the call. Inputs and canary bytes must be unchanged after it.
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
    """AssertionError unless every output is within `ulps`, by default those that the op declares."""
    assert expected.keys() == actual.keys()
    quantised = any(dtypes.of(value.dtype) in CODES for value in expected.values())
    for name, value in expected.items():
        is_scale = quantised and name == "scale"
        within = op.declaration.ulps if ulps is None else ulps
        assert_close(value, actual[name], within, f"{op.name}: {name}", is_scale, expected.atol)


def assert_same(op: Op, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """AssertionError unless every output is equal bit for bit."""
    for name, value in first.items():
        assert same_bits(value, second[name]), f"{op.name}: {name} differs"
