"""What every replaced forward has: what it was tried with, compared with what the module is at every call."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from .trial import OF_EVERY_MODULE, forward_of

# What forwards of transformers call their cache; the first is the name from version 5.24 on.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")


def hooked(*modules: Any) -> bool:
    """Whether somebody sees what goes into one of the modules or comes out: it must be called, and its results kept."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def renamed(kwargs: dict[str, Any], parameters: Container[str]) -> dict[str, Any]:
    """Arguments of a forward that has these parameters, with the cache by the name that it has there."""
    given = next((name for name in CACHE_NAMES if name in kwargs and name not in parameters), None)
    known = next((name for name in CACHE_NAMES if name in parameters), None)
    if given is None or known is None:
        return kwargs
    return {known if name == given else name: value for name, value in kwargs.items()}


class Tried:
    """A module as it was when it was tried.

    Args:
        name: of a part that is not called while a replacement serves; "" for the replaced module itself.
    """

    def __init__(self, module: Any, name: str = "") -> None:
        self.module, self.name, self.kind = module, name, type(module)
        self.forward, self.function = self.kind.forward, forward_of(module)
        # A trial runs outside training.
        self.attributes = {key: _kept(value) for key, value in vars(module).items()} | {"training": False}
        self.parts = dict(module._modules)
        own = {"training", *self.attributes} - (OF_EVERY_MODULE - {"training"})
        self.numbers = {
            key: self.attributes[key] for key in own if isinstance(self.attributes[key], (bool, int, float))
        }
        self.dtypes = {key: each.dtype for key, each in module._parameters.items() if each is not None}
        self.config, named = getattr(module, "config", None), _named(self.kind)
        self.counts = named | {"training", "forward"} | (self.attributes.keys() - OF_EVERY_MODULE)
        settings = {} if self.config is None else vars(self.config)
        self.configured = tuple(sorted(settings.keys() & named))
        self.settings = tuple(_kept(settings[key]) for key in self.configured)
        values = {key: self.function.__globals__.get(key) for key in self.function.__code__.co_names}
        self.called = tuple(key for key, value in values.items() if inspect.isroutine(value))
        self.functions = tuple(map(values.get, self.called))

    def changed(self) -> str | None:
        """What is different now; None if nothing is that the trial depended on."""
        module = self.module
        if type(module) is not self.kind or self.kind.forward is not self.forward:
            return self._of("its class has another forward since")
        try:
            is_same = module.__dict__ == self.attributes
        except Exception:  # tensors, and whatever else compares element by element
            is_same = False
        if not is_same and (why := self._difference()):
            return why
        if module._modules != self.parts:
            return self._of("its parts are others since")
        if self.name and (module._forward_hooks or module._forward_pre_hooks):
            return self._of("it has hooks")
        for key, dtype in self.dtypes.items():
            if (weight := module._parameters.get(key)) is None or weight.dtype is not dtype:
                return self._of(f"its {key} is of another dtype since")
        if self.called and tuple(map(self.function.__globals__.get, self.called)) != self.functions:
            return self._of(f"its forward finds others since under the names {', '.join(self.called)}")
        if self.configured and tuple(map(vars(self.config).get, self.configured)) != self.settings:
            return self._of(f"its configuration has other values since, of {', '.join(self.configured)}")
        return None

    def is_same(self) -> bool:
        """Whether all is as it was of what torch.compile compares again, when the compiled code is called."""
        module = self.module
        for key, value in self.numbers.items():
            if getattr(module, key) != value:
                return False
        for key, part in self.parts.items():
            if getattr(module, key) is not part:
                return False
        forward = self.attributes["forward"].__func__ if "forward" in self.attributes else self.forward
        return getattr(module.forward, "__func__", None) is forward

    def _difference(self) -> str | None:
        """The attribute that is different now, of those that the forward may read."""
        now = vars(self.module)
        for key in sorted(self.counts):
            if not _same(self.attributes.get(key, self), now.get(key, self)):
                return self._of("it is in training" if key == "training" else f"its {key} is another since")
        return None

    def _of(self, why: str) -> str:
        return f"{self.name}: {why}" if self.name else why


def _kept(value: Any) -> Any:
    """A value that can be compared with what becomes of it: lists and dictionaries are written in place."""
    if type(value) in (list, tuple, set):
        return type(value)(map(_kept, value))
    return {key: _kept(each) for key, each in value.items()} if type(value) is dict else value


def _same(before: Any, after: Any) -> bool:
    try:
        return before is after or (type(before) is type(after) and bool(before == after))
    except Exception:  # what compares element by element
        return False


def _named(kind: type) -> set[str]:
    """Names in the code of a class, without its `__init__` and that of `nn.Module`."""
    kinds = [each for each in kind.__mro__ if each not in nn.Module.__mro__]
    functions = (
        inspect.unwrap(value)
        for each in kinds
        for name, value in vars(each).items()
        if callable(value) and name != "__init__"
    )
    return {name for function in functions if inspect.isfunction(function) for name in function.__code__.co_names}


class Replacement:
    """The forward of `module`, which falls back on the one that the module's class has.

    Args:
        dtype: of the model, and so of what the ops are given.

    Attributes:
        op: what computes the module now.
    """

    op: str

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.tried: list[Tried] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class computes."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def passed_over(self) -> Iterable[tuple[str, Any]]:
        """(name, part): the module's parts that are not called."""
        return ()

    def serving(self) -> str:
        """What computes the module now: `op`, and what of it is done otherwise since."""
        return self.op

    def serves(self, x: Tensor) -> bool:
        """Whether the ops compute what the module would: they have no gradients and do not follow autocast."""
        return (
            x.dtype is self.dtype
            and not (torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type))
            and self.changed() is None
        )

    def changed(self) -> str | None:
        """Why the module is left to transformers now, though it was replaced; None if it is not."""
        if torch.compiler.is_compiling():
            for tried in self.tried:
                if not tried.is_same():
                    return "it is another since"
        why: str | None = self.difference()
        return why

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def difference(self) -> str | None:
        """As `changed`; torch.compile takes what it says for good."""
        if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
            return "there are hooks of all modules"
        for tried in self.tried:
            if why := tried.changed():
                return why
        return None

    def install(self) -> None:
        self.module.forward = self.forward

    def watch(self) -> None:
        """From now on what differs from what the module is now is left to transformers."""
        parts = [Tried(part, name) for name, part in self.passed_over()]
        self.tried = [Tried(self.module), *parts]

    def remove(self) -> None:
        """Leave the module as it was; a forward that has been set since stays."""
        if vars(self.module).get("forward") == self.forward:
            del self.module.forward


def without_weights(module: Any) -> list[tuple[str, Any]]:
    """(name, part): what has no weights of a module's parts, activations and dropout, and the parts of these."""
    children = [(name, part) for name, part in module.named_children() if next(part.parameters(), None) is None]
    return [(f"{name}.{inner}".rstrip("."), each) for name, part in children for inner, each in part.named_modules()]
