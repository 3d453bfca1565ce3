"""The base of replaced forwards: each call checks that the module is still as it was in the trial."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from .trial import OF_EVERY_MODULE, forward_of

# Names of the cache argument in transformers' forwards; the first is the one from version 5.24 on.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")


def hooked(*modules: Any) -> bool:
    """Whether any of the modules has hooks. It must then be called, and its results must not be overwritten."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def renamed(kwargs: dict[str, Any], parameters: Container[str]) -> dict[str, Any]:
    """`kwargs` with the cache argument renamed to the name that it has among the forward's `parameters`."""
    given = next((name for name in CACHE_NAMES if name in kwargs and name not in parameters), None)
    known = next((name for name in CACHE_NAMES if name in parameters), None)
    if given is None or known is None:
        return kwargs
    return {known if name == given else name: value for name, value in kwargs.items()}


class Tried:
    """A snapshot of a module at its trial: everything that the outcome of the trial depends on.

    Args:
        name: the name of a part that is not called while the replacement serves; "" for the replaced module itself.
    """

    def __init__(self, module: Any, name: str = "") -> None:
        self.module, self.name, self.kind = module, name, type(module)
        self.forward, self.function = self.kind.forward, forward_of(module)
        # Trials run in evaluation mode.
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
        """A difference to the snapshot, in words; None if the trial is still valid."""
        module = self.module
        if type(module) is not self.kind or self.kind.forward is not self.forward:
            return self._of("its class has another forward since")
        try:
            is_same = module.__dict__ == self.attributes
        except Exception:  # tensors and other values that compare element by element
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
        """Whether the module is unchanged, by comparisons that become guards of code compiled by torch.compile."""
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
        """The first changed attribute among those that the forward may read, in words."""
        now = vars(self.module)
        for key in sorted(self.counts):
            if not _same(self.attributes.get(key, self), now.get(key, self)):
                return self._of("it is in training" if key == "training" else f"its {key} is another since")
        return None

    def _of(self, why: str) -> str:
        return f"{self.name}: {why}" if self.name else why


def _kept(value: Any) -> Any:
    """A copy of a value to compare with later: lists, tuples, sets and dictionaries are copied recursively."""
    if type(value) in (list, tuple, set):
        return type(value)(map(_kept, value))
    return {key: _kept(each) for key, each in value.items()} if type(value) is dict else value


def _same(before: Any, after: Any) -> bool:
    try:
        return before is after or (type(before) is type(after) and bool(before == after))
    except Exception:  # values that compare element by element
        return False


def _named(kind: type) -> set[str]:
    """Names in the code of a class's methods, without `__init__` and the methods of `nn.Module`."""
    kinds = [each for each in kind.__mro__ if each not in nn.Module.__mro__]
    functions = (
        inspect.unwrap(value)
        for each in kinds
        for name, value in vars(each).items()
        if callable(value) and name != "__init__"
    )
    return {name for function in functions if inspect.isfunction(function) for name in function.__code__.co_names}


class Replacement:
    """A forward for `module` that falls back to the forward of the module's class.

    Args:
        dtype: dtype of the model, and of the inputs that the ops serve.

    Attributes:
        op: the op, or ops, that compute the module, as text for the report.
    """

    op: str

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.tried: list[Tried] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module's class."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def passed_over(self) -> Iterable[tuple[str, Any]]:
        """(name, part) of the module's parts that the replacement does not call."""
        return ()

    def serving(self) -> str:
        """`op`, with a note on what has changed since the replacement."""
        return self.op

    def serves(self, x: Tensor) -> bool:
        """Whether the ops may serve a call: dtype unchanged, no gradients, no autocast, the module as it was tried."""
        return (
            x.dtype is self.dtype
            and not (torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type))
            and self.changed() is None
        )

    def changed(self) -> str | None:
        """Why transformers now computes the replaced module; None if the ops do."""
        if torch.compiler.is_compiling():
            for tried in self.tried:
                if not tried.is_same():
                    return "it is another since"
        why: str | None = self.difference()
        return why

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def difference(self) -> str | None:
        """As `changed`, outside of torch.compile, which takes the result for a constant."""
        if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
            return "there are hooks of all modules"
        for tried in self.tried:
            if why := tried.changed():
                return why
        return None

    def install(self) -> None:
        self.module.forward = self.forward

    def watch(self) -> None:
        """Take the snapshot with which later calls compare the module."""
        parts = [Tried(part, name) for name, part in self.passed_over()]
        self.tried = [Tried(self.module), *parts]

    def remove(self) -> None:
        """Give the module its own forward back. A forward that was set later stays."""
        if vars(self.module).get("forward") == self.forward:
            del self.module.forward


def without_weights(module: Any) -> list[tuple[str, Any]]:
    """(name, part) of a module's parts without weights, such as activations and dropout, and of their parts."""
    children = [(name, part) for name, part in module.named_children() if next(part.parameters(), None) is None]
    return [(f"{name}.{inner}".rstrip("."), each) for name, part in children for inner, each in part.named_modules()]
