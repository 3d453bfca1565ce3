"""The Python function of an op that allocates and returns its outputs."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from .declaration import Declaration
from .wrapper import NAMESPACE, forwarded, listed


def make(declaration: Declaration, call: Callable[..., Any], allocate: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper of an op that allocates and returns its outputs; each may be given by its name instead.

    `call` is the wrapper that writes them. `allocate` takes the other arguments.
    """
    name, outputs = declaration.name, [p.name for p in declaration.returned]
    given = [p for p in declaration.parameters if not p.returned]
    signature = listed(
        declaration,
        [
            f"{p.name}=None" if p.returned else f"{p.name}=defaults[{p.name!r}]" if p.has_default else p.name
            for p in declaration.parameters
        ],
    )
    inputs = ", ".join(f"{p.name}={p.name}" if p.by_name else p.name for p in given)
    absent = " or ".join(f"{output} is None" for output in outputs)
    pairs = ", ".join(f"{output} if {output} is not None else new[{i}]" for i, output in enumerate(outputs))
    results = ", ".join(outputs)
    text = f"""def make(call, allocate, defaults):
    def {name}({signature}):
        if is_compiling() and {" and ".join(f"{output} is None" for output in outputs)}:
            return torch_ops.{name}({inputs})
        if {absent}:
            new = allocate({inputs})
            {results} = {pairs if len(outputs) > 1 else "new"}
        call({forwarded(declaration, lambda p: p.name)})
        return {results}
    return {name}
"""
    filename = f"<pyops {name} returning>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), NAMESPACE, namespace)
    wrapper: Callable[..., Any] = namespace["make"](call, allocate, {p.name: p.default for p in given})
    wrapper.__doc__ = declaration.reference.__doc__
    results = "Tensor" if len(outputs) == 1 else f"tuple[{', '.join('Tensor' for _ in outputs)}]"
    wrapper.__annotations__ = {
        **declaration.reference.__annotations__,
        **dict.fromkeys(outputs, "Tensor | None"),
        "return": results,
    }
    wrapper.__module__, wrapper.__qualname__ = declaration.reference.__module__, declaration.reference.__qualname__
    return wrapper
