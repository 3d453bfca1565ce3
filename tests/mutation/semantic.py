"""Mutants written by hand, in `semantic.txt`: each is a mistake that a kernel engineer could make.

A file's mutants follow a line ``== file``. Each is a line that says what is wrong, the code behind ``-``, and what to
put in its place behind ``+``. The code must stand in the file exactly once; white space, line breaks and comments do
not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import kernels_cu
from tests.mutation import code
from tests.mutation.mutant import Mutant


class Semantic(NamedTuple):
    """A mutant as it is written."""

    file: str
    why: str
    old: str
    new: str


def parse(text: str) -> list[Semantic]:
    """The mutants that a text in the format of `semantic.txt` holds."""
    found = []
    for part in re.split("^== ", text, flags=re.MULTILINE)[1:]:
        file, *lines = part.split("\n")
        for why, old, new in zip(*[(line for line in lines if line)] * 3, strict=True):
            if (old[:2], new[:2]) != ("- ", "+ "):
                raise ValueError(f"{file}: {why}: expected a line of code behind '- ' and one behind '+ '")
            found.append(Semantic(file, why, old[2:], new[2:]))
    return found


SEMANTIC = parse(Path(__file__).with_name("semantic.txt").read_text(encoding="ascii"))


@cache
def _text(file: str) -> str:
    return kernels_cu.read(file) if file in kernels_cu.names() else ""


def anchored(written: Iterable[Semantic]) -> tuple[list[Mutant], list[str]]:
    """(the mutants, a message for each whose code does not stand exactly once in its file)."""
    mutants, problems = [], []
    for one in written:
        text = _text(one.file)
        found = code.tokens(text)
        places = code.find(found, one.old)
        if len(places) != 1:
            told = f"is there {len(places)} times, expected once" if text else "the file does not exist"
            problems.append(f"tests/mutation/semantic.txt: {one.file}: {one.why}\n    {one.old}\n    {told}")
            continue
        ((start, end),) = places
        within = next(d.name for d in code.declarations(found) if start < found[d.end - 1].end)
        name = f"{one.file}: {one.why}"
        mutants.append(Mutant(name, one.file, "semantic", start, end, one.new, within, one.why))
    return mutants, problems
