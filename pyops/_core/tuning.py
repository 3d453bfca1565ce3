"""The Config that a plan runs with: the plan's own choice, or one that overrides it.

A plan of a tuned family has three steps: ``check(...) -> Problem``, ``choose(problem, device) -> Config`` and
``launch(problem, config) -> list[Launch]``. Problem and Config are frozen dataclasses, and `choose` is pure. The plan
does not call `choose` itself but ``tuning.config(op, problem, device, choose)``.

Two things override `choose`: the context ``tuning.forced(op, config)``, and the table of the device,
``pyops/tuning/<device name>.json``::

    {"paged_attention_v1": {"<bucket of the problem>": {"num_warps": 3}}}

An entry names only the fields of Config that differ from the choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .device import Device

TABLES = Path(__file__).parents[1] / "tuning"


class Problem(Protocol):
    """What a plan chooses by."""

    def bucket(self) -> str:
        """The key of the problem in a table: equal for problems that one Config serves."""
        ...


P = TypeVar("P", bound=Problem)
C = TypeVar("C")

last: dict[str, Any] = {}  # {op: the Config of the plan made last}
_forced: dict[str, Any] = {}


def config(op: str, problem: P, device: Device, choose: Callable[[P, Device], C]) -> C:
    """The Config for `problem`: the forced one; else the choice, changed as the table of the device says."""
    found: C
    if op in _forced:
        found = _forced[op]
    else:
        found = choose(problem, device)
        if entries := table(device.name).get(op):
            found = replace(found, **entries.get(problem.bucket(), {}))  # type: ignore[type-var]
    last[op] = found
    return found


@contextmanager
def forced(op: str, config: Any) -> Iterator[None]:
    """While the context lasts, in every thread, plans of `op` are made with this Config.

    A plan lives on after the context: call ``pyops.registry[op].forget()`` before and behind it.
    """
    outer = _forced.copy()
    _forced[op] = config
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(outer)


@cache
def table(device_name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """{op: {bucket: {field of Config: value}}} as measured on the devices of this name; empty if none was."""
    path = TABLES / f"{device_name}.json"
    if not device_name or not path.exists():
        return {}
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`, for buckets."""
    return 1 << max(0, count - 1).bit_length()
