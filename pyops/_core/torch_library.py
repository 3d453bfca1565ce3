"""torch's side of an op: its schema and registration as ``torch.ops.pyops.<name>``, and what wrappers use of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import lazy, tensor
from .declaration import Declaration
from .lazy import loaded
from .wrapper import NAMESPACE, listed


class _Entry(NamedTuple):
    """An op as torch gets it: its declaration, its wrapper, and what compiles the wrapper's text."""

    declaration: Declaration
    call: Callable[..., Any]
    load: Callable[[], None]


_entries: dict[str, _Entry] = {}
_libraries: dict[str, Any] = {}  # the torch library of each op: an op that is declared again takes another


def add(declaration: Declaration, call: Callable[..., Any], load: Callable[[], None]) -> None:
    """Have an op registered with torch: now, or when torch is bound. An op of its name that is there goes."""
    remove(declaration.name)
    _entries[declaration.name] = _Entry(declaration, call, load)
    if _is_bound():
        _register(_entries[declaration.name])


def remove(name: str) -> None:
    """Take the op `name` from torch, if it is there."""
    _entries.pop(name, None)
    if (library := _libraries.pop(name, None)) is not None:
        destroy(library)


def destroy(library: Any) -> None:
    """Take back what a torch library holds, and what torch.ops has kept of it.

    A name without an op behind it would be an error to whoever goes through all ops, as torch.export does.
    """
    library._destroy()


def _is_bound() -> bool:
    return "torch_ops" in NAMESPACE


def bind_loaded() -> None:
    """Bind to the libraries that this process has already imported. The others are bound at their first use."""
    if loaded("torch") is not None:
        bind_torch()
    if loaded("cupy") is not None:
        bind_cupy()


def bind_cupy() -> None:
    """Let wrappers know CuPy's array class and current stream."""
    cupy = loaded("cupy")
    get_current_stream = cupy.cuda.get_current_stream

    def cupy_stream(device: int) -> int:
        return int(get_current_stream(device).ptr)

    NAMESPACE.update(cupy_stream=cupy_stream, cupy_ndarray=cupy.ndarray)


def bind_torch() -> None:
    """Register every op as ``torch.ops.pyops.<name>`` and let wrappers use torch."""
    if _is_bound():
        return
    import torch

    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 us; the public call takes 4 us
    if stream is None:

        def stream(device: int) -> int:
            return int(torch.cuda.current_stream(device).cuda_stream)

    def number(value: Any, like: Any) -> Any:
        return tensor.torch_number(torch, value, like)

    # Each absent tensor has a stand-in of its own: a guard also demands that no tensor comes twice.
    absent = {name: torch.empty(0, dtype=torch.complex128) for name in NAMESPACE if name.startswith("absent")}
    for entry in _entries.values():
        _register(entry)
    NAMESPACE.update(is_compiling=torch.compiler.is_compiling, number=number, torch_ops=torch.ops.pyops, **absent)
    NAMESPACE.update(torch_stream=stream, dispatch_modes=torch._C._len_torch_dispatch_stack)


def _trace_without_torch() -> bool:
    """Whether a compiler traces a call that comes before torch is bound. The op must be registered by then."""
    bind_torch()
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


_trace_without_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_compiling() -> bool:
    """What wrappers ask until torch is bound."""
    return "torch" in sys.modules and _trace_without_torch()


NAMESPACE["is_compiling"] = _is_compiling


def schema(declaration: Declaration) -> str:
    """The op's torch schema, with every written tensor marked."""
    parts = []
    for index, p in enumerate(declaration.parameters):
        mark = f"(a{index}!)" if p.written else ""
        # A compiler may not take an integer for a constant: the integer may be a size, which changes with every call.
        kind = {"int": "SymInt", "tuple[int, int]": "(int, int)"}.get(p.kind, p.kind)
        text = f"{kind}{mark}{'?' if p.optional else ''} {p.name}"
        if p.has_default:
            text += f'="{p.default}"' if isinstance(p.default, str) else f"={p.default}"
        parts.append(text)
    return f"{declaration.name}({listed(declaration, parts)}) -> ()"


def _register(entry: _Entry) -> None:
    import torch

    declaration, call, load = entry
    library = _libraries[declaration.name] = torch.library.Library("pyops", "FRAGMENT")
    library.define(schema(declaration))
    for key in ("CUDA", "CPU"):
        library.impl(declaration.name, call, key)
    # A compiler has traced the wrapper, whose code may not change once it is guarded, and runs this before it guards.
    torch.library.register_fake(f"pyops::{declaration.name}", lambda *args, **kwargs: load(), lib=library)
    # torch.compile traces a reference, as layers that are switched off have it, but not the proxy of torch.
    module = declaration.reference.__globals__
    if module.get("torch") is lazy.torch:
        module["torch"] = torch
