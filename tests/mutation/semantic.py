"""Mutants written by hand: each is a mistake that an engineer could make, of kernels in `semantic.txt`, else of Python.

A file's mutants follow a line ``== file``. Each is a line that says what is wrong, the code after ``-``, and what to
put in its place after ``+``. The code must stand in the file exactly once; white space and line breaks, and comments
of a kernel, do not matter. Python has its code in the body of a function, and its line names the tests after the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import kernels_cu
from tests.mutation import code, python
from tests.mutation.mutant import Mutant


class Semantic(NamedTuple):
    """A mutant as it is written."""

    file: str
    why: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


def parse(text: str) -> list[Semantic]:
    """The mutants that a text in this format contains."""
    found = []
    for part in re.split("^== ", text, flags=re.MULTILINE)[1:]:
        first, *lines = part.split("\n")
        file, *tests = first.split()
        for why, old, new in zip(*[(line for line in lines if line)] * 3, strict=True):
            if (old[:2], new[:2]) != ("- ", "+ "):
                raise ValueError(f"{file}: {why}: expected a line of code behind '- ' and one behind '+ '")
            found.append(Semantic(file, why, old[2:], new[2:], tuple(tests)))
    return found


_TEXTS = ("semantic.txt", "semantic_python.txt")
SEMANTIC = [one for name in _TEXTS for one in parse(Path(__file__).with_name(name).read_text(encoding="ascii"))]


def anchored(written: Iterable[Semantic]) -> tuple[list[Mutant], list[str]]:
    """(the mutants, a message for each whose code does not occur exactly once in its file)."""
    mutants, problems = [], []
    for one in written:
        mutant = _of_python(one) if one.file.endswith(".py") else _of_kernel(one)
        if isinstance(mutant, Mutant):
            mutants.append(mutant)
        else:
            problems.append(f"tests/mutation: {one.file}: {one.why}\n    {one.old}\n    {mutant}")
    return mutants, problems


def _of_kernel(one: Semantic) -> Mutant | str:
    """The mutant, or the error in its definition."""
    if one.file not in kernels_cu.names():
        return "the file does not exist"
    found = code.tokens(kernels_cu.read(one.file))
    places = code.find(found, one.old)
    if len(places) != 1:
        return _count(places)
    within = next(d.name for d in code.declarations(found) if places[0][0] < found[d.end - 1].end)
    return _mutant(one, places[0], within)


def _of_python(one: Semantic) -> Mutant | str:
    """The mutant, or the error in its definition."""
    lacking = [file for file in (one.file, *one.tests) if not (python.ROOT / file).is_file()]
    if lacking:
        return f"{lacking[0]} does not exist"
    if not one.tests:
        return "names no file of tests"
    text = python.read(one.file)
    places = python.find(text, one.old)
    if len(places) != 1:
        return _count(places)
    within = python.function_at(text, places[0][0])
    if not within:
        return "is outside of the body of a function"
    mutant = _mutant(one, places[0], within)
    try:
        compile(mutant.apply(text), one.file, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"does not compile: {error}"
    return mutant


def _count(places: Sequence[object]) -> str:
    return f"is there {len(places)} times, expected once"


def _mutant(one: Semantic, place: tuple[int, int], within: str) -> Mutant:
    name = f"{one.file}: {one.why}"
    return Mutant(name, one.file, "semantic", *place, one.new, within, one.why, one.tests)
