"""Trials find out what a module computes by running its own forward on small inputs.

A module is recognised by what it computes, not by its name. A *twin* has the module's class and settings, but small
random weights on the CPU. The forward of the class and the replacement both run on the twin in float32, and only a
replacement that agrees is used. Stand-ins that record their inputs are used instead of large projections.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._core.errors import OpError

_T = TypeVar("_T")
_MAX_WEIGHTS = 1 << 20  # most weights of a twin, which bounds the time of a trial
_SETTINGS = (bool, int, float, str, type(None))
# Relative tolerance: another order of summation in float32 differs by less, another formula by more.
_CLOSE = 1e-5
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MAX_ROUNDED = 1 / 8  # largest fraction of bfloat16 elements that another order of summation may round differently


class Unknown(Exception):
    """The reason why a module is left to transformers."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Seeded normal numbers on the CPU. PyTorch's global generators are not used."""
    numbers = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")
    return numbers.to(dtype)


def forward_of(module: Any) -> Any:
    """The forward of a module's class, without decorators; `nn.Module.forward`, which raises, if it is no function."""
    found = inspect.unwrap(type(module).forward)
    return found if inspect.isfunction(found) else nn.Module.forward


def settings(module: nn.Module) -> dict[str, Any]:
    """Public attributes of a module that are numbers, strings or None."""
    return {name: value for name, value in vars(module).items() if isinstance(value, _SETTINGS) and name[0] != "_"}


class Trials:
    """Outcomes of the trials in one model. Modules that differ only in the values of weights share a trial."""

    def __init__(self) -> None:
        self._outcomes: dict[Any, Any] = {}

    def outcome(self, module: nn.Module, trial: Callable[[Any], _T], *more: Any) -> _T:
        """The outcome of `trial` for a module, cached for modules of the same kind.

        Args:
            more: further values on which the outcome depends. With any, layer_idx counts only if it is among them.

        Raises:
            Unknown: the trial raised it.
        """
        key = more or trial, _kind(module, {"layer_idx"} if more else set())
        if key not in self._outcomes:
            try:
                self._outcomes[key] = trial(module)
            except Unknown as why:
                self._outcomes[key] = why
        found = self._outcomes[key]
        if isinstance(found, Unknown):
            raise Unknown(str(found))
        return found  # type: ignore[no-any-return]


def _kind(module: nn.Module, without: Container[str]) -> Any:
    """The key of a trial: class, attributes except `without`, buffers, shapes and dtypes of weights, parts."""
    names = sorted(name for name in vars(module).keys() - OF_EVERY_MODULE if name not in without)
    own = tuple((name, _hashable(vars(module)[name])) for name in names)
    # By identity, because a twin uses the buffers' values.
    buffers = tuple((name, id(buffer)) for name, buffer in module._buffers.items())
    shapes = tuple((name, weight.shape, weight.dtype) for name, weight in module.named_parameters(recurse=False))
    parts = tuple((name, _kind(part, without)) for name, part in module.named_children())
    return type(module), own, buffers, shapes, parts


def _hashable(value: Any) -> Any:
    """A hashable key for a value: type and contents of settings and containers, the identity of other objects."""
    if isinstance(value, _SETTINGS):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(map(_hashable, value))
    if type(value) is dict:
        return dict, tuple((_hashable(key), _hashable(each)) for key, each in value.items())
    return id(value)


def refuse_tensors(*modules: nn.Module, read: Container[str] = ()) -> None:
    """Refuse modules with tensors other than parameters, because later writes to these would go unnoticed.

    Args:
        read: names of buffers that the op reads at every call.

    Raises:
        Unknown: a module has such a tensor.
    """
    for module in modules:
        names = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
        names += [name for name, buffer in module._buffers.items() if buffer is not None and name not in read]
        if names:
            raise Unknown(f"no op reads its {names[0]}")


def twin(
    module: Any, parts: Mapping[str, nn.Module] | None = None, dtype: torch.dtype = torch.float32, **weights: Tensor
) -> Any:
    """A module of the same class and settings with random weights on the CPU, without hooks.

    Args:
        parts: replacements for submodules, by name; twins of all others are made.
        dtype: dtype of the weights.
        weights: parameters, by name; others are random and have the shapes of the module's.
    """
    made = copy.copy(module)
    vars(made).pop("forward", None)
    made.training = False
    made._forward_hooks, made._forward_pre_hooks = OrderedDict(), OrderedDict()
    own = {name: weight for name, weight in module.named_parameters(recurse=False) if name not in weights}
    if sum(weight.numel() for weight in own.values()) > _MAX_WEIGHTS:
        raise Unknown("it has large weights of its own")
    made._parameters = {
        name: weights.get(name, weight if weight is None else 1 + 0.3 * randn(*weight.shape, seed=i).to(dtype))
        for i, (name, weight) in enumerate(module._parameters.items())
    }
    made._buffers = {name: None if buffer is None else buffer.cpu() for name, buffer in module._buffers.items()}
    made._modules = {
        name: parts[name] if parts and name in parts else part if part is None else _part(part, dtype)
        for name, part in module._modules.items()
    }
    return made


def _part(module: Any, dtype: torch.dtype) -> Any:
    if "forward" in vars(module):
        raise Unknown(f"the forward of its {type(module).__name__} is replaced already")
    return twin(module, None, dtype)


def width(module: Any) -> int | None:
    """The output size of a projection; None for any other module."""
    found = getattr(module, "out_features", getattr(module, "nf", None))
    return found if isinstance(found, int) else None


class StandIn(nn.Module):  # type: ignore[misc]
    """Stands in for a projection: returns fixed random numbers plus the mean of its input. Records its inputs."""

    def __init__(self, out_features: int, seed: int) -> None:
        super().__init__()
        self.out_features, self.seed = out_features, seed
        self.given: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(x.clone())
        fixed = 2.0 * randn(*x.shape[:-1], self.out_features, seed=self.seed, dtype=x.dtype)
        return fixed + x.mean(-1, keepdim=True)


def projection(in_features: int, out_features: int, bias: bool, seed: int, dtype: torch.dtype) -> nn.Linear:
    """A small linear module with random weights."""
    made = nn.utils.skip_init(nn.Linear, in_features, out_features, bias=bias, device="cpu", dtype=dtype)
    made.weight.data = randn(out_features, in_features, seed=seed, dtype=dtype)
    if bias:
        made.bias.data = randn(out_features, seed=seed + 1, dtype=dtype)
    return made


def agree(ours: Iterable[Tensor], theirs: Iterable[Tensor], tolerance: float = _CLOSE) -> bool:
    """Whether tensors agree within a tolerance relative to the largest element."""
    return all(
        a.shape == b.shape and bool((a.double() - b.double()).abs().max() <= tolerance * b.double().abs().max())
        for a, b in zip(ours, theirs, strict=True)
    )


def nearest(
    candidates: Iterable[_T],
    ours: Callable[[_T, torch.dtype], Tensor],
    theirs: Callable[[torch.dtype], Tensor],
    tolerance: float = _CLOSE,
) -> _T | None:
    """The candidate that agrees in float32 and differs in the fewest elements in bfloat16; None if none agrees.

    Raises:
        Unknown: the module's own forward fails.
    """
    exact, rounded = tried(lambda: theirs(torch.float32)), tried(lambda: theirs(torch.bfloat16))
    if not isinstance(exact, Tensor) or not isinstance(rounded, Tensor):
        raise Unknown("its forward gives more than a tensor")
    found: list[tuple[int, _T]] = []
    for candidate in candidates:
        try:
            if agree([ours(candidate, torch.float32)], [exact], tolerance):
                found.append((int((ours(candidate, torch.bfloat16) != rounded).sum()), candidate))
        except (OpError, RuntimeError, TypeError, ValueError):  # shapes that are not supported
            continue
    fewest, best = min(found, key=lambda pair: pair[0], default=(0, None))
    return best if fewest <= _MAX_ROUNDED * rounded.numel() else None


def dimensions(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Any], rows: Tensor) -> frozenset[int]:
    """The numbers of dimensions, of two to four, for which both functions agree on `rows` [., .] in that shape."""
    found = set()
    for shape in ((-1,), (2, -1), (2, -1, 2)):
        x = rows.view(*shape, rows.shape[-1])
        try:
            if agree([ours(x)], [tried(partial(theirs, x))]):
                found.add(x.ndim)
        except (Unknown, OpError, RuntimeError):  # the forward does not support this number of dimensions
            continue
    return frozenset(found)


def tried(call: Callable[[], _T]) -> _T:
    """The result of `call`, with errors of foreign code as Unknown.

    Raises:
        OpError: an op refuses its arguments.
        Unknown: the call raised Unknown or any other error.
    """
    try:
        return call()
    except (OpError, Unknown):
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise Unknown(f"its forward cannot be tried: {type(error).__name__}: {said}") from error
