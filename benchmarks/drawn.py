"""What the kinds of `benchmarks.models` share: rows drawn by a seed, and the check of rivals before they are timed."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from . import installed
from .accuracy import difference
from .installed import Unavailable, reason
from .timing import Call


class Row(Protocol):
    """A call of one of the kinds. As text it is unique among the rows of its kind."""

    @property
    def kind(self) -> str: ...

    @property
    def layer(self) -> str:
        """The model, the layer and the number of GPUs of tensor parallelism."""
        ...


R = TypeVar("R", bound=Row)
Contenders = dict[str, Callable[..., Call]]


def draw(kind: str, count: int, seed: int, one: Callable[[random.Random], R | None]) -> list[R]:
    """`count` different rows of a kind. `one` draws a row, or None for sizes that the kind does not take."""
    generator, found = random.Random(f"{seed} {kind}"), dict[str, R]()
    while len(found) < count:
        if (row := one(generator)) is not None:
            found[str(row)] = row
    return list(found.values())


def log_uniform(generator: random.Random, most: int, least: int = 1) -> int:
    """A size from `least` to `most`, so that each doubling is equally likely."""
    return round(math.exp(generator.uniform(math.log(least), math.log(most))))


def agreeing(
    row: object,
    contenders: Contenders,
    call: dict[str, Any],
    out: str,
    allowed: float,
    compared: Callable[[torch.Tensor], torch.Tensor] = lambda result: result,
) -> Contenders:
    """pyops, and the rivals that compute the same from copies of the arguments `call`; others are reported.

    A rival's call returns its result or writes the argument `out`. `allowed` is the largest difference from pyops in
    the 2-norm, relative to that of the result; `compared` makes what is compared from a result.
    """
    found: Contenders = {}
    expected = None
    for name, build in contenders.items():
        if name in installed.left_out:
            continue
        copies = {one: value.clone() if isinstance(value, torch.Tensor) else value for one, value in call.items()}
        try:
            with installed.within(0 if name == "pyops" else installed.patience_s):
                result = build(copies)()
            returned = isinstance(result, torch.Tensor) and name != "pyops"
            actual = compared((result if returned else copies[out]).reshape(call[out].shape))
            expected = actual if expected is None else expected
            _, relative = difference(actual, expected)
            if not relative <= allowed:
                raise Unavailable(f"differs from pyops by {relative:.2g} in the 2-norm, allowed {allowed:.2g}")
            found[name] = build
        except Exception as error:
            print(f"{row}: {name}: {reason(error)}", file=sys.stderr, flush=True)
            installed.check_gpu(name)
    return found
