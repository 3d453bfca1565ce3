"""How much the tests try.

`PYOPS_TEST_PROFILE` names a profile. Without it the profile is ``ci`` where ``CI=true``, and ``dev`` otherwise.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """How much is tried of what could be tried; None for all of it."""

    examples: int  # that hypothesis draws
    combinations: int | None = None  # of an op's axes, each with other kernels; more where that takes all values
    varied: int | None = None  # combinations that run under every schedule, and in any layout
    sizes: int | None = None  # of rows
    candidates: int | None = None  # configs that a plan could choose
    variants: int | None = None  # of the parameters of a test that is not made for every op, in a run of everything
    slow: bool = True  # tests that take seconds and are about no op
    compiles: dict[str, int] = field(default_factory=dict)  # architecture -> specialisations of each op, by NVRTC


PROFILES = {
    # Every op, and one variant of any other test; minutes on two cores, with nothing in the caches.
    "dev": Profile(3, 3, 1, 2, 1, 1, False, {"sm_80": 0, "sm_90": 1, "sm_100": 0}),
    "ci": Profile(6, 6, 2, 4, 1, 6, True, {"sm_80": 1, "sm_90": 2, "sm_100": 1}),
    # What a GPU runs, where nothing takes long but compiling.
    "gpu": Profile(10, 24, 4, None, 3, None, True, {"sm_80": 1, "sm_90": 2, "sm_100": 1}),
    "nightly": Profile(1000),
}
NAME = os.environ.get("PYOPS_TEST_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev")
PROFILE = PROFILES[NAME]


def sample(values: Iterable[T], max_values: int | None, seed: Any) -> list[T]:
    """At most so many of the values, in their order, always the same ones for a seed; all of them for None."""
    every: Sequence[T] = list(values)
    if max_values is None or len(every) <= max_values:
        return list(every)
    return [every[i] for i in sorted(random.Random(str(seed)).sample(range(len(every)), max_values))]


def varied(cases: Sequence[T], max_cases: int | None, seed: Any, parts: Callable[[T], Iterable[Any]]) -> list[T]:
    """At most so many of the cases, in their order: those with the most `parts` that no other chosen one has."""
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


def few(values: Iterable[T], count: int) -> list[T]:
    """So many of a test's variants, which are much alike; all of them where the profile does not limit variants."""
    return sample(values, None if PROFILE.variants is None else count, "few")
