"""The stub `pyops/__init__.pyi`: what editors and type checkers know of the ops, with a text for each parameter."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyops

from .. import _docstring as docstring
from .._core.op.op import Op, registry
from . import show, table

_HEAD = '''"""The names of `pyops` for editors and type checkers: the output of `python -m pyops list --stub`."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from ._core.op.typed import Attributes as _Attributes
'''
_WIDTH = 120


def text() -> str:
    """The stub: imports, then functions, then each op as a class with one instance of its name."""
    functions = [name for names in table.functions().values() for name in names]
    ops = [op for of_family in table.families().values() for op in of_family]
    parts = [_HEAD + "\n".join(_imports()), "__version__: str\nregistry: Mapping[str, Op]"]
    return "\n\n".join([*parts, *map(_function, functions), *map(_op, ops)])


def _imports() -> Iterator[str]:
    """What the package has besides functions and ops: the names that it imports one by one, and classes of families."""
    for node in ast.parse(Path(inspect.getfile(pyops)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            names = (alias.name for alias in node.names if alias.name == alias.asname and alias.name[0] != "_")
            module = node.module or ""
            yield from (f"from .{module} import {name} as {name}" for name in names if not _is_written(name))
    for name, one in vars(pyops).items():
        module = getattr(one, "__module__", "")
        if isinstance(one, type) and module.startswith("pyops.ops.") and "._shared." not in module:
            yield f"from {module.removeprefix('pyops')} import {name} as {name}"


def _is_written(name: str) -> bool:
    return any(name in names for names in table.functions().values())


def _function(name: str) -> str:
    """A function that is no op, or another name of one."""
    function = getattr(pyops, name)
    if hasattr(function, "op"):
        return f"{name}: _{function.op.name}"
    parameters = list(inspect.signature(function).parameters.values())
    parts = [f"{p.name}: {p.annotation}" + ("" if p.default is p.empty else f" = {p.default!r}") for p in parameters]
    if by_name := [part for p, part in zip(parameters, parts, strict=True) if p.kind is p.KEYWORD_ONLY]:
        parts[-len(by_name) :] = ["*", *by_name]
    words = _words(function, [p.name for p in parameters])
    return _definition(name, parts, function.__annotations__["return"], words)


def _op(op: Op) -> str:
    """The class of an op: its call, and its form `new`, if it has one."""
    declaration, form = op.declaration, op.form
    function = form.new if form and declaration.returned else op.reference
    words = _words(function, [p.name for p in op.parameters])
    call = ["self", *show.parameters(declaration, op)]
    lines = [f"class _{op.name}(_Attributes, Protocol):"]
    lines.append(_definition("__call__", call, show.results(declaration), words, " " * 4))
    if form is not None:
        words = _words(form.new, list(inspect.signature(form.new).parameters))
        parts, results = show.parameters(form.declaration, op), show.results(form.declaration)
        lines += ["    @staticmethod", _definition("new", parts, results, words, " " * 4)]
    return "\n".join([*lines, "", f"{op.name}: _{op.name}"])


def _words(function: Callable[..., Any], names: Sequence[str]) -> str:
    """The docstring of a function with a text for each parameter, that of an op where it refers to the op."""
    found = docstring.parse(function, names)
    mentioned = re.findall(r"`(\w+)`", f"{found.text} {found.sections}")
    texts: dict[str, str] = {}
    for name in names:
        text = found.parameters.get(name)
        if text is None:
            text = next((_texts(one)[name] for one in mentioned if name in _texts(one)), None)
        else:
            text = _resolved(name, text)
        texts |= {} if text is None else {name: text}
    return found._replace(parameters=texts).joined()


@cache
def _texts(name: str) -> dict[str, str]:
    """The texts of the parameters of the op or function `name`; none of another name."""
    function = registry[name].reference if name in registry else vars(pyops).get(name)
    if not inspect.isfunction(function):
        return {}
    found = docstring.parse(function, list(inspect.signature(function).parameters)).parameters
    return {one: _resolved(one, text) for one, text in found.items()}


def _resolved(name: str, text: str) -> str:
    """The text of a parameter, or that of the op or function to which it refers: "as `op` takes it"."""
    refers = re.match(r"as (?:in )?`(\w+)`(?: (?:takes|returns) (?:it|them))?\.?", text)
    own = _texts(refers[1]).get(name) if refers else None
    return text if refers is None or own is None else f"{own}{text[refers.end() :]}"


def _definition(name: str, parameters: Sequence[str], returns: str, words: str, indent: str = "") -> str:
    """A function with its docstring for a body."""
    line = f"{indent}def {name}({', '.join(parameters)}) -> {returns}:"
    if len(line) > _WIDTH:
        listed = "".join(f"{indent}    {one},\n" for one in parameters)
        line = f"{indent}def {name}(\n{listed}{indent}) -> {returns}:"
    ends = "\n" if "\n" in words else ""
    return f"{line}\n" + textwrap.indent(f'"""{words}{ends}"""', f"{indent}    ")
