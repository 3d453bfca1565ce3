"""Mutants of Python code: the position of a fragment, and loading a changed file into a process that has imported it.

Values that a file computes once, at its import, stay as they were: a mutant is in the body of a function.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pyops
from tests.mutation.mutant import Mutant

ROOT = Path(pyops.__file__).parents[1]


def read(file: str) -> str:
    """The text of a file, by its path from the root of the repository."""
    return (ROOT / file).read_text(encoding="utf-8")


def find(text: str, fragment: str) -> list[tuple[int, int]]:
    """Where `fragment` occurs, as (start, end). The amount of white space between words does not matter."""
    return [match.span() for match in re.finditer(r"\s+".join(map(re.escape, fragment.split())), text)]


def function_at(text: str, start: int) -> str:
    """The name of the innermost function that has `start` in its body; '' if none has."""
    before = text[:start].encode()
    place = before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1)
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.body[0].lineno, node.body[0].col_offset) <= place
        and place < (node.end_lineno or 0, node.end_col_offset or 0)
    ]
    return max(found, key=lambda node: node.lineno).name if found else ""


def parts(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and all that it contains: functions, classes, comprehensions."""
    yield code
    for held in _held(code):
        yield from parts(held)


def _held(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _paired(old: types.CodeType, new: types.CodeType) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """Corresponding parts of both, by their names and their order among equal names."""
    yield old, new
    for name in {held.co_name for held in _held(old)}:
        before, after = ([held for held in _held(code) if held.co_name == name] for code in (old, new))
        for pair in zip(before, after, strict=False):
            yield from _paired(*pair)


# The first code of a new Python process.
_IN_CHILDREN = """
from importlib.machinery import SourceFileLoader
get_code = SourceFileLoader.get_code
def changed(self, name):
    return compile({text!r}, self.path, "exec", dont_inherit=True) if self.path == {path!r} else get_code(self, name)
SourceFileLoader.get_code = changed
"""


def apply_in_children(mutant: Mutant, folder: Path) -> None:
    """Make processes that this one starts import the changed file; `folder` is for the files of this."""
    folder.mkdir()
    text = _IN_CHILDREN.format(text=mutant.apply(read(mutant.file)), path=str(ROOT / mutant.file))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def apply(mutant: Mutant) -> None:
    """Put the changed code into every function of the file, in this process. Their caches are cleared."""
    text = read(mutant.file)
    old, new = (compile(one, mutant.file, "exec", dont_inherit=True) for one in (text, mutant.apply(text)))
    changed = {before: after for before, after in _paired(old, new) if before != after}
    importlib.import_module(mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    gc.unfreeze()  # tests/conftest.py has frozen the objects that existed when tests were collected
    objects, count = gc.get_objects(), 0
    for function in (one for one in objects if type(one) is types.FunctionType):
        is_of_file = function.__code__.co_filename == str(ROOT / mutant.file)
        if is_of_file and function.__code__ in changed:
            function.__code__ = changed[function.__code__].replace(co_filename=function.__code__.co_filename)
            count += 1
    if not count:
        raise RuntimeError(f"{mutant.name}: no function has the code that the file has")
    for cached in (one for one in objects if type(one) is functools._lru_cache_wrapper):
        if (getattr(cached, "__module__", None) or "").startswith("pyops."):
            cached.cache_clear()
