"""Test profiles: how many examples, variants and compiles a run takes.

`PYOPS_TEST_PROFILE` names a profile. The default is ``ci`` with ``CI=true``, else ``dev``. `PYOPS_TEST_SHARE` names the
share of the tests that rotate; by default the hour of the commit does.
"""

from __future__ import annotations

import os
import random
import subprocess
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """How many of the possible cases are tried; None for all of them."""

    examples: int  # examples of hypothesis
    combinations: int | None = None  # combinations of an op's axes
    varied: int | None = None  # combinations that run under every schedule and in any layout
    sizes: int | None = None  # row sizes
    candidates: int | None = None  # configs that a plan could choose
    variants: int | None = None  # variants of each test that is not made for every op, in a run that names no test
    hostile: int | None = None  # calls with hostile values of each index tensor among many tokens
    covers: bool = True  # whether there are more combinations, until every value of every axis occurs
    slow: bool = True  # whether tests run that take seconds and are about no op
    compiles: dict[str, int] = field(default_factory=dict)  # architecture -> specialisations by NVRTC of each op
    others: int | None = None  # architectures besides sm_90 that each op is compiled for
    shares: int = 1  # a run that names no test runs one of so many shares of the tests that rotate


_ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100")
PROFILES = {
    # Every op, and one variant of any other test: minutes on two cores with empty caches.
    "dev": Profile(3, 2, 1, 2, 1, 1, 2, False, False, {"sm_90": 1}, 0, shares=8),
    "ci": Profile(3, 3, 1, 3, 1, 1, 2, True, True, dict.fromkeys(_ARCHS, 1), 2, shares=4),
    # On a GPU only compiling takes long.
    "gpu": Profile(10, 24, 4, None, 3, None, None, True, True, dict.fromkeys(_ARCHS, 1) | {"sm_90": 2}, 2),
    "nightly": Profile(1000),
}
NAME = os.environ.get("PYOPS_TEST_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev")
PROFILE = PROFILES[NAME]


def sample(values: Iterable[T], max_values: int | None, seed: Any) -> list[T]:
    """At most `max_values` of the values, in order, the same ones for a seed; all of them for None."""
    every: Sequence[T] = list(values)
    if max_values is None or len(every) <= max_values:
        return list(every)
    return [every[i] for i in sorted(random.Random(str(seed)).sample(range(len(every)), max_values))]


def varied(cases: Sequence[T], max_cases: int | None, seed: Any, parts: Callable[[T], Iterable[Any]]) -> list[T]:
    """At most `max_cases` of the cases, in order: those with the most `parts` that no chosen case has yet."""
    if max_cases is None or len(cases) <= max_cases:
        return list(cases)
    left = list(range(len(cases)))
    random.Random(str(seed)).shuffle(left)
    every = {i: set(parts(cases[i])) for i in left}
    chosen, seen = list[int](), set[Any]()
    while len(chosen) < max_cases:
        best = max(left, key=lambda i: len(every[i] - seen))
        left.remove(best)
        chosen.append(best)
        seen |= every[best]
    return [cases[i] for i in sorted(chosen)]


def covering(cases: Sequence[T], parts: Callable[[T], Iterable[Any]]) -> list[T]:
    """Cases, in order, that have every one of the `parts` of all cases: greedily those with the most new ones."""
    left, seen, chosen = {i: set(parts(case)) for i, case in enumerate(cases)}, set[Any](), list[int]()
    while left:
        left = {i: new for i, every in left.items() if (new := every - seen)}
        if left:
            chosen.append(max(left, key=lambda i: len(left[i])))
            seen |= left[chosen[-1]]
    return [cases[i] for i in sorted(chosen)]


@cache
def rotation() -> int:
    """What the share of a run is chosen by. A commit runs the same tests every time, whatever the date."""
    if given := os.environ.get("PYOPS_TEST_SHARE"):
        return int(given) - 1
    with suppress(OSError, ValueError):  # no git, or no repository
        command = ("git", "log", "-1", "--format=%ct")
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return int(done.stdout) // 3600
    return 0


def share(values: Sequence[T], key: str) -> list[T]:
    """This run's share of what rotates under a key: at least one of the values."""
    number = min(PROFILE.shares, len(values))
    return list(values[(rotation() + zlib.crc32(key.encode())) % PROFILE.shares % number :: number]) if number else []


def is_in_share(key: str) -> bool:
    """Whether this run's share has the key."""
    return (rotation() + zlib.crc32(key.encode())) % PROFILE.shares == 0


def few(values: Iterable[T], count: int) -> list[T]:
    """`count` of a test's similar variants; all of them where the profile does not limit variants."""
    return sample(values, None if PROFILE.variants is None else count, "few")


def name_of_share() -> str:
    """Such as ``3/4``, the third of four: in the header of a run, and for the compiles of `.ci/run`."""
    return f"{rotation() % PROFILE.shares + 1}/{PROFILE.shares}"


if __name__ == "__main__":
    print(name_of_share())
