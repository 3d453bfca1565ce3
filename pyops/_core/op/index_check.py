"""PYOPS_CHECK: after a call, index tensors with invalid entries raise an OpError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from ..errors import OpError
from ..system.lazy import cupy, torch
from ..tensors import tensor
from .declaration import Declaration
from .planner import Planner


def checked(
    declaration: Declaration, planner: Planner, run: Callable[..., None], library: str, index: int
) -> Callable[..., None]:
    """`run`, followed by an OpError for an index out of range. (Not during a capture: nothing runs.)"""

    def run_and_check(*args: Any) -> None:
        run(*args)
        if index < 0 or not capturing(library, index):
            with torch.no_grad(), torch_stream() if library == "cupy" else nullcontext():
                _check_indices(declaration, planner, args if library == "torch" else as_torch(args))

    return run_and_check


def _check_indices(declaration: Declaration, planner: Planner, args: Sequence[Any]) -> None:
    assert planner.bad_indices is not None
    values = {p.name: value for p, value in zip(declaration.parameters, args, strict=True)}
    found = []
    for name, masks in planner.bad_indices(*args).items():
        for what, wrong in (masks if isinstance(masks, dict) else {"are out of range": masks}).items():
            if count := int(wrong.sum()):
                at = tuple(wrong.nonzero()[0].tolist())
                held = values[name][at].item()
                found.append((name, f"{count} of {wrong.numel()} indices {what}, the first at {at}: {held}"))
    if found:
        (name, message), *others = found
        raise OpError(declaration.name, name, "; ".join([message, *(f"{also}: {what}" for also, what in others)]))


def as_torch(args: Sequence[Any]) -> Sequence[Any]:
    """`args` with torch tensors over the memory of arrays."""
    return [tensor.to_torch(value) if tensor.library_of(value) else value for value in args]


def torch_stream() -> Any:
    """A context in which torch's current stream is CuPy's current stream."""
    pointer = cupy.cuda.get_current_stream().ptr
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream())


def capturing(library: str, index: int) -> bool:
    """Whether the library's current stream is captured into a graph."""
    if library == "torch":
        return bool(torch.cuda.is_current_stream_capturing())
    return bool(cupy.cuda.get_current_stream(index).is_capturing())
