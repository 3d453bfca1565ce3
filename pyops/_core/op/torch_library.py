"""Registration of ops with torch as ``torch.ops.pyops.<name>``, their schemas, and the torch functions of wrappers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from ..system import lazy
from ..system.device import Device
from ..system.lazy import loaded
from ..tensors import tensor
from .declaration import Declaration, Parameter
from .wrapper import NAMESPACE, listed


class Form(NamedTuple):
    """The form of an op that allocates its outputs and returns them.

    Attributes:
        declaration: the op's, with these outputs after all other parameters.
        new: the function.
        allocate: (*arguments without outputs) -> the outputs, uninitialised.
    """

    declaration: Declaration
    new: Callable[..., Any]
    allocate: Callable[..., Any]


class _Entry(NamedTuple):
    """An op as it is registered with torch.

    Attributes:
        call: the wrapper, which writes its outputs; load: compiles the wrapper's text.
        check: (*arguments): raises OpError for a call that the op refuses; reads no tensor data.
        form: the form that allocates outputs; None if the op has none.
    """

    declaration: Declaration
    call: Callable[..., Any]
    load: Callable[[], None]
    check: Callable[..., Any]
    form: Form | None = None


# Called with (op's name, arguments, keywords) of every op that is given tensors without data.
Observer = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
_observer: ContextVar[tuple[Observer, Device] | None] = ContextVar("observer", default=None)


@contextmanager
def observed(observer: Observer, device: Device) -> Iterator[None]:
    """While the context lasts, `observer` is called for every op that this thread calls with torch's fake tensors.

    `device` is the one that fake tensors in host memory stand for.
    """
    token = _observer.set((observer, device))
    try:
        yield
    finally:
        _observer.reset(token)


def observed_device() -> Device | None:
    """The device that fake tensors in host memory stand for; None if this thread's calls are not observed."""
    found = _observer.get()
    return None if found is None else found[1]


_entries: dict[str, _Entry] = {}
_libraries: dict[str, Any] = {}  # {op: its torch library}; an op that is redeclared gets a new library


def add(
    declaration: Declaration,
    call: Callable[..., Any],
    load: Callable[[], None],
    check: Callable[..., Any],
    form: Form | None = None,
) -> None:
    """Register an op with torch, now or when torch is bound. It replaces a registered op of the same name."""
    remove(declaration.name)
    _entries[declaration.name] = _Entry(declaration, call, load, check, form)
    if "torch_ops" in NAMESPACE:
        _register(_entries[declaration.name])


def remove(name: str) -> None:
    """Remove the op `name` from torch, if it is registered."""
    _entries.pop(name, None)
    if (library := _libraries.pop(name, None)) is not None:
        destroy(library)


def destroy(library: Any) -> None:
    """Unregister the ops of a torch library, and remove the entries that torch.ops has cached.

    torch.export, which iterates over all ops, fails on a name that no op implements.
    """
    library._destroy()


def bind_loaded() -> None:
    """Bind to the libraries that this process has already imported. The others are bound at their first use."""
    if loaded("torch") is not None:
        bind_torch()
    if loaded("cupy") is not None:
        bind_cupy()


def bind_cupy() -> None:
    """Give wrappers CuPy's array class and its current-stream function."""
    cupy = loaded("cupy")
    get_current_stream = cupy.cuda.get_current_stream

    def cupy_stream(device: int) -> int:
        return int(get_current_stream(device).ptr)

    NAMESPACE.update(cupy_stream=cupy_stream, cupy_ndarray=cupy.ndarray)


def bind_torch() -> None:
    """Register every op as ``torch.ops.pyops.<name>`` and let wrappers use torch."""
    if "torch_ops" in NAMESPACE:
        return
    import torch

    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 us; the public call takes 4 us
    if stream is None:

        def stream(device: int) -> int:
            return int(torch.cuda.current_stream(device).cuda_stream)

    def number(value: Any, like: Any) -> Any:
        return tensor.torch_number(torch, value, like)

    # Each absent tensor has its own stand-in, because a guard also demands that all its tensors differ.
    absent = {
        name: torch.empty(0, dtype=torch.complex128, device="cpu") for name in NAMESPACE if name.startswith("absent")
    }
    for entry in _entries.values():
        _register(entry)
    NAMESPACE.update(is_compiling=torch.compiler.is_compiling, number=number, torch_ops=torch.ops.pyops, **absent)
    NAMESPACE.update(torch_stream=stream, dispatch_modes=torch._C._len_torch_dispatch_stack)
    NAMESPACE.update(is_grad_enabled=torch.is_grad_enabled, increment_version=torch._C._increment_version)


def _trace_without_torch() -> bool:
    """Whether a compiler is tracing. Binds torch first, because an op must be registered when it is traced."""
    bind_torch()
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


_trace_without_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_compiling() -> bool:
    """The is-compiling test of wrappers until torch is bound."""
    return "torch" in sys.modules and _trace_without_torch()


NAMESPACE["is_compiling"] = _is_compiling


def schema(declaration: Declaration) -> str:
    """The schema of the form that writes its outputs, with every written tensor marked.

    For an op that returns its outputs, this is the overload ``out``.
    """
    overload = ".out" if declaration.returned else ""
    return f"{declaration.name}{overload}({_parameters(declaration, declaration.parameters)}) -> ()"


def returning_schema(form: Declaration, overload: str = "") -> str:
    """The schema of the form that allocates and returns its outputs.

    For an op that takes its outputs by position, this is the overload ``new``.
    """
    given = [p for p in form.parameters if not p.returned]
    results = ", ".join("Tensor" for _ in form.returned)
    results = results if len(form.returned) == 1 else f"({results})"
    return f"{form.name}{overload}({_parameters(form, given)}) -> {results}"


def _parameters(declaration: Declaration, parameters: Sequence[Parameter]) -> str:
    parts = []
    for index, p in enumerate(parameters):
        mark = f"(a{index}!)" if p.written else ""
        # torch.compile may not specialise on an integer, which may be a size that changes with every call.
        kind = {"int": "SymInt", "tuple[int, int]": "(int, int)", "dtype": "ScalarType"}.get(p.kind, p.kind)
        text = f"{kind}{mark}{'?' if p.optional else ''} {p.name}"
        if p.has_default and not p.returned:
            text += f'="{p.default}"' if isinstance(p.default, str) else f"={p.default}"
        parts.append(text)
    return listed(declaration, parts)


def _register(entry: _Entry) -> None:
    import torch

    declaration, call, load, check, form = entry
    name = declaration.name
    library = _libraries[name] = torch.library.Library("pyops", "FRAGMENT")

    def check_meta(parameters: Sequence[Parameter], args: Sequence[Any], by_name: dict[str, Any]) -> None:
        # torch leaves out what equals its default. Fake tensors are not checked: a check would fix symbolic sizes.
        given = {p.name: value for p, value in zip(parameters, args, strict=False)} | by_name
        values = [given.get(p.name, p.default) for p in declaration.parameters]
        if all(tensor.is_meta(value) for value in declaration.tensors_of(values) if value is not None):
            check(*values)

    def define(schema: str, declaration: Declaration, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
        library.define(schema)
        overload = schema.partition("(")[0]
        for key in ("CUDA", "CPU"):
            library.impl(overload, function, key)
        # torch would resolve a lazily negated tensor, and fail on outputs. The op refuses it, however it is called.
        library.impl(overload, torch.library.fallthrough_kernel, "Negative")
        by_name = declaration.parameters[declaration.positional :]

        # torch.compile calls this after it has traced the wrapper and before it installs guards on the wrapper's code,
        # which must not change afterwards: so `load` compiles the wrapper's text here.
        def checked(*args: Any, **kwargs: Any) -> Any:
            load()
            pairs = zip(declaration.parameters, args, strict=False)
            for p, value in (*pairs, *((p, kwargs.get(p.name)) for p in by_name)):
                if p.is_tensor and value is not None:
                    tensor.check_needs_no_grad(name, p.name, value)
            return fake(*args, **kwargs)

        torch.library.register_fake(f"pyops::{overload}", checked, lib=library)

    def observed(*args: Any, **kwargs: Any) -> None:
        check_meta(declaration.parameters, args, kwargs)
        if (found := _observer.get()) is not None:
            found[0](name, args, kwargs)

    def allocated(*args: Any, **kwargs: Any) -> Any:
        assert form is not None
        results = form.allocate(*args, **kwargs)
        outputs = results if isinstance(results, tuple) else (results,)
        names = (p.name for p in form.declaration.returned)
        check_meta(form.declaration.parameters, args, kwargs | dict(zip(names, outputs, strict=True)))
        return results

    define(schema(declaration), declaration, call, observed)
    if form is not None:
        overload = "" if declaration.returned else ".new"
        define(returning_schema(form.declaration, overload), form.declaration, form.new, allocated)
    # torch.compile traces the reference of a layer that is switched off, but cannot trace the lazy proxy of torch.
    module = declaration.reference.__globals__
    if module.get("torch") is lazy.torch:
        module["torch"] = torch
