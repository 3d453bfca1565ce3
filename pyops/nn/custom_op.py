"""`CustomOp`: an `nn.Module` that selects its forward method at construction, by platform.

This module also has the configuration that switches custom ops on and off, and the registry through which their classes
are replaced. Names and rules are vLLM's; docs/layers.md shows their use.
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

from .._core.system.lazy import loaded, optional

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
"""{name: the class registered under it}, of `CustomOp`s and `PluggableLayer`s alike."""

op_registry_oot: dict[str, type] = {}
"""{name of a class: the out-of-tree class that replaces it}."""

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
    """How a model is compiled, with vLLM's names and values. This library treats all but `NONE` alike."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


@dataclass
class CompilationConfig:
    """Which custom ops are on, with counts of their instances.

    Attributes:
        custom_ops: entries "all", "none", "+name" and "-name", as a list or as a string with commas; elements of a
            list may have commas, too. If neither "all" nor "none" is given, one is added: "none" if inductor compiles
            the model, because inductor fuses native methods; else "all".
        mode: how the model is compiled.
        backend: the compiler of the model.
        platform: where layers will run; None for the result of `current_platform`.
        enabled_custom_ops, disabled_custom_ops: {name: instances made} of ops that are on, and off.

    Raises:
        ValueError: an entry is malformed, or "all" and "none" appear together or twice.
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
        """Whether ops that no entry names are on."""
        return "all" in self.custom_ops

    def is_custom_op_enabled(self, name: str) -> bool:
        """Whether the op `name` is on. ValueError if entries switch it both on and off."""
        on, off = f"+{name}" in self.custom_ops, f"-{name}" in self.custom_ops
        if on and off:
            raise ValueError(f"custom_ops: {name} is both switched on and off")
        return (self.default_on() or on) and not off

    def custom_op_log_check(self) -> None:
        """Warn of entries that had no effect on the model that was constructed under this configuration.

        An entry has no effect if no class is registered under its name, or if the class has no instances. Nothing is
        reported if no op has instances.
        """
        made = self.enabled_custom_ops + self.disabled_custom_ops
        for name in sorted({entry[1:] for entry in self.custom_ops if entry[0] in "+-"} - made.keys()) if made else ():
            reason = "is not present in the model" if name in op_registry else "does not exist or was not imported"
            warnings.warn(f"custom_ops: {name} {reason}, its entry has no effect", stacklevel=3)


_config = CompilationConfig()


def get_compilation_config() -> CompilationConfig:
    """The configuration for new instances: the one that `set_custom_ops` has set, else one with all ops on."""
    return _config


@contextmanager
def set_custom_ops(
    custom_ops: str | Iterable[str] = (),
    *,
    mode: int = CompilationMode.NONE,
    backend: str = "inductor",
    platform: Platform | None = None,
) -> Iterator[CompilationConfig]:
    """Within this context, new instances use this configuration, in every thread; see `CompilationConfig`.

    An instance stays on or off for its lifetime. When the context ends, entries that had no effect cause warnings.

    Examples:
        >>> with set_custom_ops("all,-silu_and_mul") as config:
        ...     layers = RMSNorm(64), SiluAndMul()
        >>> config.disabled_custom_ops
        Counter({'silu_and_mul': 1})
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
    """The platform of new modules, unless the configuration names another."""
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
    """The base of modules with a registered name, which an out-of-tree class can replace."""

    op_registry: ClassVar[dict[str, type]] = op_registry
    op_registry_oot: ClassVar[dict[str, type]] = op_registry_oot
    name: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        chosen = op_registry_oot.get(cls.__name__, cls)
        if not issubclass(chosen, cls):  # Python calls __init__ only on instances of `cls`
            raise TypeError(f"{chosen.__name__} is to replace {cls.__name__} and is no subclass of it")
        module: Self = super().__new__(chosen)
        return module

    @classmethod
    def register(cls, name: str) -> Callable[[_Class], _Class]:
        """Decorator that registers a class as the op `name`. ValueError if the name is taken."""

        def add(op_cls: _Class) -> _Class:
            if name in op_registry:
                raise ValueError(f"duplicate op name: {name} is {op_registry[name].__qualname__} already")
            op_cls.name = name  # type: ignore[attr-defined]
            op_registry[name] = op_cls
            return op_cls

        return add

    @classmethod
    def register_oot(cls, _decorated_op_cls: Any = None, name: str | None = None) -> Any:
        """Register a subclass that replaces a class: this library then instantiates the subclass instead.

        As ``@RMSNorm.register_oot``, ``@RMSNorm.register_oot()``, ``@CustomOp.register_oot("RMSNorm")`` or with
        ``name="RMSNorm"``, or as ``CustomOp.register_oot(_decorated_op_cls=MyRMSNorm, name="RMSNorm")``.

        `name` is the name of the class to replace; by default, the class that the method is called on. Subclasses of
        the replaced class with other names are not replaced. In the configuration, the new class has the name of the op
        that it inherits.

        Raises:
            ValueError: the class is already replaced.
            TypeError: the object to register is not a class.
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
    """A module with one forward method for all platforms that, like a `CustomOp`, can be replaced out of tree."""


class CustomOp(_Replaceable):
    """A module with a forward method for each platform. The method is selected at construction.

    A subclass defines `forward_native`, plain PyTorch for any device, and `forward_cuda` if it has kernels. The other
    methods default to these two. An op that is switched off uses `forward_native`. A subclass may set `_forward_method`
    to another method after ``super().__init__()``, or override `forward` and define no methods for platforms.

    Kernels have no backward pass. While grad mode is on, a call with an argument or a parameter that requires grad also
    uses `forward_native`, unless the subclass sets `differentiable`.

    Args:
        enforce_enable: switch this instance on, whatever the configuration says.
        compile_native: compile `forward_native` if the op is off and the configuration compiles the model.

    Examples:
        >>> @CustomOp.register("square")
        ... class Square(CustomOp):
        ...     def forward_native(self, x):  # forward_cuda would call a kernel
        ...         return x * x
        >>> Square()(torch.tensor([1.0, 3.0]))
        tensor([1., 9.])
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
        """Whether autograd must record a call with these arguments."""
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *self.parameters()))

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Plain PyTorch for any device. Writes to no argument."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_native")

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """The method for CUDA; `forward_native` by default."""
        return self.forward_native(*args, **kwargs)

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """The method for ROCm; `forward_cuda` by default."""
        return self.forward_cuda(*args, **kwargs)

    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        """The method for Intel GPUs; `forward_native` by default."""
        return self.forward_native(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """The method for CPUs; `forward_native` by default."""
        return self.forward_native(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """The method for TPUs; `forward_native` by default."""
        return self.forward_native(*args, **kwargs)

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        """The method for out-of-tree platforms; `forward_native` by default."""
        return self.forward_native(*args, **kwargs)

    def dispatch_forward(self, compile_native: bool) -> Callable[..., Any]:
        """Select the method that `forward` calls, and count the instance in the configuration."""
        config = get_compilation_config()
        enabled = self._enforce_enable or self.enabled()
        counter = config.enabled_custom_ops if enabled else config.disabled_custom_ops
        counter[getattr(self, "name", type(self).__name__)] += 1
        if not enabled:
            return self.maybe_compile(self.forward_native, enable=compile_native)
        method: Callable[..., Any] = getattr(self, _FORWARD[config.platform or current_platform()])
        return method

    def maybe_compile(self, fn: Callable[..., Any], *, enable: bool = True) -> Callable[..., Any]:
        """`fn`, compiled with dynamic shapes if `enable` is set and the configuration compiles the model."""
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
        """Whether new instances are on. ValueError if the op is switched both on and off."""
        if not hasattr(cls, "name"):
            _warn_unregistered(cls.__qualname__)
            return cls.default_on()
        return get_compilation_config().is_custom_op_enabled(cls.name)

    @staticmethod
    def default_on() -> bool:
        """Whether ops that no entry of the configuration names are on."""
        return get_compilation_config().default_on()
