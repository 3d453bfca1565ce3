"""Mutant: one change of one file."""

from __future__ import annotations

import difflib
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """Replaces text[start:end] of a file by `new`.

    Attributes:
        name: ``file:operator:digest``. The digest is of the code around the change: comments, line breaks and edits
            elsewhere in the file do not change the name. A semantic mutant is called ``file: why``.
        file: of a kernel, the path in `kernels_cu`; of Python, the path from the root of the repository.
        within: the top-level declaration that is changed.
        why: of a semantic mutant, what a test must notice.
        tests: the files of tests that should notice, where the mutant says so itself.
    """

    name: str
    file: str
    operator: str
    start: int
    end: int
    new: str
    within: str
    why: str = ""
    tests: tuple[str, ...] = ()

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py")

    @property
    def is_plan(self) -> bool:
        return self.is_python and not self.tests

    def apply(self, text: str) -> str:
        """The file with the mutant in it."""
        return text[: self.start] + self.new + text[self.end :]

    def diff(self, text: str) -> str:
        """The change, as a unified diff of the file."""
        lines = (text.splitlines(), self.apply(text).splitlines())
        return "\n".join(difflib.unified_diff(*lines, f"a/{self.file}", f"b/{self.file}", lineterm="", n=2))


def digest(*parts: str) -> str:
    """Eight hexadecimal digits of the change and the code around it."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def numbered(mutants: Iterable[Mutant]) -> list[Mutant]:
    """The same mutants; repeated names get .2, .3, ... in the order of the file."""
    seen: Counter[str] = Counter()
    found = []
    for mutant in mutants:
        seen[mutant.name] += 1
        suffix = f".{seen[mutant.name]}" if seen[mutant.name] > 1 else ""
        found.append(Mutant(**{**vars(mutant), "name": mutant.name + suffix}))
    return found


def sample(mutants: Sequence[Mutant], per_file: int, seed: int) -> list[Mutant]:
    """`per_file` mutants of each file, from its operators in rotation, so that no operator dominates.

    The same mutants and seed give the same sample. The first mutant of every file comes before the second of any.
    """
    files: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        files[mutant.file][mutant.operator].append(mutant)
    chosen = []
    for file, operators in sorted(files.items()):
        generator = random.Random(f"{seed}:{file}")
        groups = [generator.sample(group, len(group)) for _, group in sorted(operators.items())]
        generator.shuffle(groups)
        chosen.append(in_turn(*groups)[:per_file])
    random.Random(seed).shuffle(chosen)
    return in_turn(*chosen)


def in_turn(*groups: Sequence[Any]) -> list[Any]:
    """The first of each group, then the second of each, and so on."""
    return [one for turn in zip_longest(*groups) for one in turn if one is not None]
