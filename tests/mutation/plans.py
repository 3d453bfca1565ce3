"""The mutants that can be generated from plans: the functions that check a call and choose its launches.

A plan function is the one that an op got by ``@<op>.plan``, or a function of the package, outside its core, that such a
function calls. A choice made for speed changes no result, so most of its arithmetic is left alone. Changed are the
checks, and the values that launches get: geometry, constants, strides and other arguments. (One block too many is no
mistake: kernels return where there is no work.)
"""

from __future__ import annotations

import ast
import inspect
import types
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pyops._core.op.op import Op, registry
from tests.mutation.mutant import Mutant, digest, numbered
from tests.mutation.python import ROOT, parts, read

_BOUNDARIES = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_GEOMETRY = ("grid", "block")
_HINTS = ("MIN_BLOCKS",)  # change no result
# Another value of a constant. True is not doubled, because a kernel would see no change.
_OTHER = "(lambda value: not value if isinstance(value, bool) else value * 2)"


class Change(NamedTuple):
    """An expression or statement, and its replacement."""

    operator: str
    node: Any
    new: str


@cache
def functions() -> dict[types.FunctionType, frozenset[str]]:
    """Every plan function, with the names of its ops."""
    callers: dict[types.FunctionType, set[str]] = defaultdict(set)
    for op in registry.values():
        reached: set[types.FunctionType] = set()
        waiting = [_plan_of(op)]
        while waiting:
            function = waiting.pop()
            if function is not None and function not in reached:
                reached.add(function)
                waiting += _called(function)
        for function in reached:
            callers[function].add(op.name)
    return {function: frozenset(names) for function, names in callers.items()}


def _plan_of(op: Op) -> types.FunctionType | None:
    found = inspect.getclosurevars(op._plan).nonlocals.get("function") if op._plan else None
    return found if isinstance(found, types.FunctionType) and not found.__closure__ else None


def _called(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The functions outside the core that `function` names, of its own module or through another."""
    names = {name for part in parts(function.__code__) for name in part.co_names}
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [value for value in known if isinstance(value, types.ModuleType)]
    known += [vars(module)[name] for module in modules for name in names if name in vars(module)]
    for value in map(inspect.unwrap, (value for value in known if callable(value))):
        if isinstance(value, types.FunctionType) and not value.__closure__:
            package = value.__module__ or ""
            if package.startswith("pyops.") and not package.startswith(("pyops._core", "pyops.check", "pyops.tuning")):
                yield value


def _file_of(function: types.FunctionType) -> str:
    return Path(function.__code__.co_filename).relative_to(ROOT).as_posix()


def mutants() -> list[Mutant]:
    """Every mutant of every plan function."""
    lines = {file: {one.__code__.co_firstlineno for one in found} for file, found in _by_file().items()}
    return [mutant for file in sorted(lines) for mutant in _mutants_of(file, read(file), lines[file])]


def _mutants_of(file: str, text: str, wanted: set[int]) -> list[Mutant]:
    found = []
    for node in ast.parse(text).body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        if isinstance(node, ast.FunctionDef) and first in wanted:
            found += changed(file, text, node)
    return numbered(found)


def changed(file: str, text: str, function: ast.FunctionDef) -> Iterator[Mutant]:
    """The mutants of one function."""
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    of_op = [ast.unparse(one) for one in function.decorator_list if isinstance(one, ast.Attribute)]
    within = of_op[0] if of_op else function.name
    for statement in _statements(function.body):
        around = ast.unparse(statement).splitlines()[0]
        for operator, node, new in _changes(statement):
            start = begins[node.lineno - 1] + node.col_offset
            end = begins[node.end_lineno - 1] + node.end_col_offset
            name = f"{file}:{operator}:{digest(within, new, ast.unparse(node), around)}"
            yield Mutant(name, file, operator, start, end, new, within)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement but docstrings, nested ones included."""
    for statement in body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text:
            yield statement
        for inner in ("body", "orelse"):
            yield from _statements(getattr(statement, inner, []))


def _changes(statement: ast.stmt) -> Iterator[Change]:
    """The changes of a statement and its expressions, without those of the statements inside."""
    if isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("check."):
        yield Change("check dropped", statement, "pass")
    if isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Raise):
        yield from _changes_of_check(statement.test)
    inside = (child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt))
    for call in (node for expression in inside for node in ast.walk(expression) if isinstance(node, ast.Call)):
        yield from _changes_of_keywords(call)


def _changes_of_check(test: ast.expr) -> Iterator[Change]:
    """The condition under which a plan refuses a call."""
    yield Change("condition", test, f"not ({ast.unparse(test)})")
    yield Change("condition", test, "False")
    for node in ast.walk(test):
        match node:
            case ast.Compare(left, [sign], [right]) if type(sign) in _BOUNDARIES:
                new = f"({ast.unparse(left)} {_BOUNDARIES[type(sign)]} {ast.unparse(right)})"
                yield Change("comparison", node, new)
            case ast.BoolOp(_, values):
                word = " or " if isinstance(node.op, ast.And) else " and "
                yield Change("logic", node, "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")")


def _changes_of_keywords(call: ast.Call) -> Iterator[Change]:
    """The geometry, the constants and the arguments of a launch."""
    strides = [keyword for keyword in call.keywords if keyword.arg and "stride" in keyword.arg]
    for one, other in pairwise(strides):
        if ast.unparse(one.value) != ast.unparse(other.value):
            yield Change("stride swapped", one.value, ast.unparse(other.value))
    is_launch = isinstance(call.func, ast.Attribute) and call.func.attr == "launch"
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg in _GEOMETRY and is_launch:
            for part in value.elts if isinstance(value, ast.Tuple) else [value]:
                yield Change(keyword.arg, part, f"({ast.unparse(part)}) - 1")
        elif is_launch and keyword.arg:
            yield Change("argument dropped", keyword, "**{}")
        elif keyword.arg and keyword.arg.isupper() and keyword.arg not in _HINTS:
            if isinstance(value, ast.Constant) and not isinstance(value.value, bool):
                continue
            is_truth, text = keyword.arg.startswith(("HAS_", "IS_")), ast.unparse(value)
            yield Change("specialisation", value, f"(not ({text}))" if is_truth else f"{_OTHER}({text})")


def ops_of(mutant: Mutant) -> frozenset[str]:
    """The names of the ops with plans that call the function that the mutant changes."""
    return functions()[function_of(mutant)]


def function_of(mutant: Mutant) -> types.FunctionType:
    """The plan function that the mutant changes."""
    line = read(mutant.file).count("\n", 0, mutant.start) + 1
    before = (function for function in _by_file()[mutant.file] if function.__code__.co_firstlineno <= line)
    return max(before, key=lambda function: function.__code__.co_firstlineno)


@cache
def _by_file() -> dict[str, list[types.FunctionType]]:
    """The plan functions of each file."""
    found = defaultdict(list)
    for function in functions():
        found[_file_of(function)].append(function)
    return found
