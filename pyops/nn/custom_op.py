"""`CustomOp`: an `nn.Module` that picks, when it is made, the forward method of the platform it will run on.

Beside it, the configuration that switches such ops on and off, and the registry by which their classes are replaced.
Names and rules are vLLM's. docs/layers.md shows how to use it.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from .._core.lazy import loaded, optional

if TYPE_CHECKING:
    import torch
else:
    torch = optional("torch", "pyops.nn.custom_op", "torch")

__all__ = [
    "CompilationConfig",
    "CompilationMode",
    "CustomOp",
    "PluggableLayer",
    "current_platform",
    "get_compilation_config",
    "op_registry",
    "op_registry_oot",
    "set_custom_ops",
]

op_registry: dict[str, type] = {}
"""Classes by the names that they were registered under, `CustomOp`s and `PluggableLayer`s alike."""

op_registry_oot: dict[str, type] = {}
"""Out-of-tree classes by the names of the classes that they take the place of."""

Platform = Literal["cuda", "rocm", "cpu", "tpu", "xpu", "oot"]
_Class = TypeVar("_Class", bound=type)

_FORWARD: dict[str, str] = {
    "cuda": "forward_cuda",
    "rocm": "forward_hip",
    "cpu": "forward_cpu",
    "tpu": "forward_tpu",
    "xpu": "forward_xpu",
    "oot": "forward_oot",
}


class CompilationMode(IntEnum):
    """How a model is compiled, in vLLM's words; here only whether it is `NONE` matters."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


@dataclass
class CompilationConfig:
    """Which custom ops are on, and what was made of them.

    Attributes:
        custom_ops: entries "all", "none", "+name" and "-name", as a list or as text with commas; elements of a list
            may have commas, too. Where neither "all" nor "none" is among them one is added: "none" if an inductor
            compiles the model, which fuses the native methods itself, else "all".
        mode: how the model is compiled.
        backend: by what.
        platform: where layers will run; None for what `current_platform` finds.
        enabled_custom_ops, disabled_custom_ops: how many instances were made, by name.

    Raises:
        ValueError: an entry of another form, or "all" and "none" together or twice.
    """

    custom_ops: list[str] = field(default_factory=list)
    mode: int = CompilationMode.NONE
    backend: str = "inductor"
    platform: Platform | None = None
    enabled_custom_ops: Counter[str] = field(default_factory=Counter, init=False)
    disabled_custom_ops: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        given = [self.custom_ops] if isinstance(self.custom_ops, str) else self.custom_ops
        self.custom_ops = [entry.strip() for element in given for entry in element.split(",") if entry.strip()]
        for entry in self.custom_ops:
            if entry not in ("all", "none") and not (entry[0] in "+-" and entry[1:]):
                raise ValueError(f'custom_ops: expected "all", "none", "+name" or "-name", got "{entry}"')
        bases = [entry for entry in self.custom_ops if entry in ("all", "none")]
        if len(bases) > 1:
            raise ValueError(f'custom_ops: expected "all" or "none" at most once, got {", ".join(bases)}')
        if self.platform not in (None, *_FORWARD):
            raise ValueError(f"platform: expected {' or '.join(_FORWARD)}, got {self.platform}")
        if not bases:
            inductor = self.backend == "inductor" and self.mode != CompilationMode.NONE
            self.custom_ops.append("none" if inductor else "all")

    def default_on(self) -> bool:
        """Whether ops are on that no entry names."""
        return "all" in self.custom_ops

    def is_custom_op_enabled(self, name: str) -> bool:
        """Whether the op `name` is on; ValueError if it is switched both on and off."""
        on, off = f"+{name}" in self.custom_ops, f"-{name}" in self.custom_ops
        if on and off:
            raise ValueError(f"custom_ops: {name} is both switched on and off")
        return (self.default_on() or on) and not off

    def custom_op_log_check(self) -> None:
        """Warn of entries that had no effect on the model that was made under this configuration.

        That is, of ops that no class is registered as, and of ops of which there is no instance. Where no instance of
        any op was made, nothing is said.
        """
        made = self.enabled_custom_ops + self.disabled_custom_ops
        for name in sorted({entry[1:] for entry in self.custom_ops if entry[0] in "+-"} - made.keys()) if made else ():
            reason = "is not present in the model" if name in op_registry else "does not exist or was not imported"
            warnings.warn(f"custom_ops: {name} {reason}, its entry has no effect", stacklevel=3)


_config = CompilationConfig()


def get_compilation_config() -> CompilationConfig:
    """The configuration by which ops that are made now are switched; unless `set_custom_ops` set one, all are on."""
    return _config


@contextmanager
def set_custom_ops(
    custom_ops: str | Iterable[str] = (),
    *,
    mode: int = CompilationMode.NONE,
    backend: str = "inductor",
    platform: Platform | None = None,
) -> Iterator[CompilationConfig]:
    """While it lasts, in every thread, instances are made under this configuration, see `CompilationConfig`.

    An instance keeps what it was made with. At the end, entries that had no effect are warned of.
    """
    global _config
    entries = [custom_ops] if isinstance(custom_ops, str) else list(custom_ops)
    config = CompilationConfig(entries, mode, backend, platform)
    before, _config = _config, config
    try:
        yield config
    finally:
        _config = before
    config.custom_op_log_check()


def current_platform() -> Platform:
    """Where a module that is made now will run, unless the configuration says otherwise."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "tpu" if loaded("torch_xla") else "cpu"
    if accelerator.type == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    return "xpu" if accelerator.type == "xpu" else "oot"


@cache
def _warn_unregistered(cls: str) -> None:
    warnings.warn(
        f"{cls} is not registered as a custom op: no entry of custom_ops can name it, and it is on where ops "
        "are on by default",
        stacklevel=4,
    )


class _Replaceable(torch.nn.Module):  # type: ignore[misc]
    """A module whose class has a name in the registry, and may be replaced by an out-of-tree class."""

    op_registry: ClassVar[dict[str, type]] = op_registry
    op_registry_oot: ClassVar[dict[str, type]] = op_registry_oot
    name: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        chosen = op_registry_oot.get(cls.__name__, cls)
        if not issubclass(chosen, cls):  # Python would leave an instance of it without calling its __init__
            raise TypeError(f"{chosen.__name__} is to replace {cls.__name__} and is no subclass of it")
        module: Self = super().__new__(chosen)
        return module

    @classmethod
    def register(cls, name: str) -> Callable[[_Class], _Class]:
        """Decorator: register a class as the op `name`; ValueError if there is one of that name."""

        def add(op_cls: _Class) -> _Class:
            if name in op_registry:
                raise ValueError(f"duplicate op name: {name} is {op_registry[name].__qualname__} already")
            op_cls.name = name  # type: ignore[attr-defined]
            op_registry[name] = op_cls
            return op_cls

        return add

    @classmethod
    def register_oot(cls, _decorated_op_cls: Any = None, name: str | None = None) -> Any:
        """Have instances of a subclass made wherever instances of a class of this library are asked for.

        As ``@RMSNorm.register_oot``, ``@RMSNorm.register_oot()``, ``@CustomOp.register_oot("RMSNorm")`` or with
        ``name="RMSNorm"``, or as ``CustomOp.register_oot(_decorated_op_cls=MyRMSNorm, name="RMSNorm")``.

        The name is that of the class to replace, unless given that of the class this is called on. Subclasses of it
        that have other names are not replaced. The configuration knows the new class by the name of the op it inherits.

        Raises:
            ValueError: the class is replaced already.
            TypeError: what is to be registered is no class.
        """
        if isinstance(_decorated_op_cls, str) and name is None:
            _decorated_op_cls, name = None, _decorated_op_cls
        replaced = cls.__name__ if name is None else name

        def add(op_cls: _Class) -> _Class:
            if not inspect.isclass(op_cls):
                raise TypeError(f"register_oot: expected a class, got {op_cls!r}")
            if replaced in op_registry_oot:
                raise ValueError(f"duplicate op name: {replaced} is replaced by {op_registry_oot[replaced].__name__}")
            if not hasattr(op_cls, "name"):
                op_cls.name = replaced  # type: ignore[attr-defined]
            op_registry_oot[replaced] = op_cls
            return op_cls

        return add if _decorated_op_cls is None else add(_decorated_op_cls)


class PluggableLayer(_Replaceable):
    """A module that may be replaced out of tree as a `CustomOp` may, and has one forward method for all platforms."""


class CustomOp(_Replaceable):
    """A module with a forward method for each platform, of which one is chosen when an instance is made.

    A subclass gives `forward_native`, plain PyTorch for any device, and where it has kernels `forward_cuda`; the other
    methods default to these. An op that is switched off uses `forward_native`. A subclass may choose otherwise after
    ``super().__init__()`` by setting `_forward_method`, or override `forward` and do without all of this.

    Kernels have no derivative. While grad mode is on, a call with an argument or a parameter that requires grad uses
    `forward_native`, too, unless the subclass says that all its methods are `differentiable`.

    Args:
        enforce_enable: this instance is on whatever the configuration says.
        compile_native: where the op is off and the configuration compiles the model, compile `forward_native`.
    """

    differentiable: ClassVar[bool] = False

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = False) -> None:
        super().__init__()
        self._enforce_enable = enforce_enable
        self._forward_method = self.dispatch_forward(compile_native)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self.differentiable and self._requires_grad(*args, *kwargs.values()):
            return self.forward_native(*args, **kwargs)
        return self._forward_method(*args, **kwargs)

    def _requires_grad(self, *args: Any) -> bool:
        """Whether autograd has to follow a call with these arguments."""
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *self.parameters()))

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch alone, for any device; writes no argument."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_native")

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """CUDA; without one, `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """ROCm; without one, `forward_cuda`."""
        return self.forward_cuda(*args, **kwargs)

    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        """Intel GPUs; without one, `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """CPU; without one, `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """TPU; without one, `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        """Platforms that torch has as plugins; without one, `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def dispatch_forward(self, compile_native: bool) -> Callable[..., Any]:
        """The method that `forward` will call; counts the instance in the configuration."""
        config = get_compilation_config()
        enabled = self._enforce_enable or self.enabled()
        counter = config.enabled_custom_ops if enabled else config.disabled_custom_ops
        counter[getattr(self, "name", type(self).__name__)] += 1
        if not enabled:
            return self.maybe_compile(self.forward_native, enable=compile_native)
        method: Callable[..., Any] = getattr(self, _FORWARD[config.platform or current_platform()])
        return method

    def maybe_compile(self, fn: Callable[..., Any], *, enable: bool = True) -> Callable[..., Any]:
        """`fn` compiled for any sizes, if `enable` and the configuration compiles the model; else `fn`."""
        config = get_compilation_config()
        if not enable or config.mode == CompilationMode.NONE or config.backend == "eager":
            return fn
        options = {}
        if config.backend == "inductor" and "graph_partition" in torch._inductor.list_options():
            options["graph_partition"] = False
        compiled: Callable[..., Any] = torch.compile(fn, dynamic=True, backend=config.backend, options=options or None)
        return compiled

    @classmethod
    def enabled(cls) -> bool:
        """Whether instances that are made now are on; ValueError if the op is switched both on and off."""
        if not hasattr(cls, "name"):
            _warn_unregistered(cls.__qualname__)
            return cls.default_on()
        return get_compilation_config().is_custom_op_enabled(cls.name)

    @staticmethod
    def default_on() -> bool:
        """Whether ops are on that no entry of the configuration names."""
        return get_compilation_config().default_on()
