"""The Config that a plan runs with: the plan's own choice, or one that overrides it.

A plan that has something to choose takes three steps: check the arguments, choose a Config by
``choose(problem, device)``, launch what the Config says. A Problem is immutable and holds everything that `choose`
reads except the device; a Config is a frozen dataclass; `choose` is pure. The plan does not call `choose` itself but
``tuning.config(op, problem, device, choose)``, once.

Two things override `choose`: the context ``tuning.forced(op, config)``, and the table of the device,
``pyops/tuning/<device name>.json``::

    {"paged_attention_v1": {"DecodeConfig <bucket of the problem>": {"num_warps": 3}}}

An entry replaces the fields of the choice that it names; for a field that is a Config itself, it has the fields of that
one. It serves every problem of its bucket for which `choose` returns a Config of this class, which stands for a kernel,
with Configs of the same classes in its fields ("DecodeConfig CombineConfig <bucket>"). So a Config holds no number that
differs within a bucket, such as the size of a grid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .._core.config import batch_invariant as batch_invariant
from .._core.system.device import Device

TABLES = Path(__file__).parent
_MAX_RESIDENT_THREADS = 2048  # resident threads of an SM
# Batch invariance: rows, sequences, or rows of an expert that a choice assumes. It is the size of a decode batch, which
# is thus served as without the switch.
_PINNED = 32


class Problem(Protocol):
    """The input of `choose`."""

    def bucket(self) -> str:
        """A part of `key`: equal for problems that one Config serves."""
        ...


class Config(Protocol):
    """The result of `choose`. The fields that tuning varies are scalars, so that a JSON table can hold them."""

    def candidates(self, problem: Any, device: Device) -> Iterable[Any]:
        """Configs that may be faster for the same problem, each different from this one in one respect.

        Each of them is valid for every problem of the bucket. This Config itself may be among them.
        """
        ...


P = TypeVar("P", bound=Problem)
C = TypeVar("C", bound=Config)

last: dict[str, Any] = {}  # {op: the Config of the plan made last}
last_choice: dict[str, tuple[Any, Any]] = {}  # {op: the problem of the plan made last, and its `choose`}
_forced: dict[str, Any] = {}


def config(op: str, problem: P, device: Device, choose: Callable[[P, Device], C]) -> C:
    """The Config for `problem`: the forced one; else the choice, changed as the table of the device says."""
    found: C
    if op in _forced:
        found = _forced[op]
    else:
        found = choose(problem, device)
        if not batch_invariant() and (entries := table(device.name).get(op)):
            found = _changed(found, entries.get(key(problem, found), {}))
    last[op], last_choice[op] = found, (problem, choose)
    return found


def key(problem: Problem, config: Config) -> str:
    """The key of a table's entry for problems of this bucket, and for choices of these classes."""
    values = config, *(getattr(config, one.name) for one in fields(config))  # type: ignore[arg-type]
    return " ".join([*(type(one).__name__ for one in values if is_config(one)), problem.bucket()])


def is_config(value: Any) -> bool:
    """Whether a value, perhaps of a field of a Config, is a Config itself."""
    return hasattr(value, "candidates")


def _changed(config: C, entry: dict[str, Any]) -> C:
    """`config` with the values of an entry of a table."""
    values = {
        name: _changed(getattr(config, name), one) if isinstance(one, dict) else one for name, one in entry.items()
    }
    return replace(config, **values)  # type: ignore[type-var]


@contextmanager
def forced(op: str, config: Any) -> Iterator[None]:
    """While the context lasts, in every thread, plans of `op` are made with this Config.

    A plan lives on after the context: call ``pyops.registry[op].forget()`` before and after it.
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
    """{op: {`key`: {field of Config: value}}} as measured on the devices of this name; empty if none was."""
    path = TABLES / f"{device_name}.json"
    if not device_name or not path.exists():
        return {}
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def varied(config: C, **values: Iterable[Any]) -> list[C]:
    """Copies of `config` with one field changed, to each of the values that are given for the field.

    A value that the Config refuses with a ValueError is left out.
    """
    found = []
    for name, several in values.items():
        for value in several:
            with suppress(ValueError):
                found.append(replace(config, **{name: value}))  # type: ignore[type-var]
    return found


def resized(config: Any, num_threads: int, **changes: Any) -> Any:
    """`config` with blocks of `num_threads`, and min_blocks scaled so that an SM holds the same number of threads."""
    min_blocks = config.min_blocks and max(1, config.min_blocks * config.num_threads // num_threads)
    return replace(config, num_threads=num_threads, min_blocks=min_blocks, **changes)


def beside(count: int, low: int, high: int) -> list[int]:
    """Candidates next to `count`: its half and its double, if they lie in [`low`, `high`]."""
    return [other for other in (count // 2, 2 * count) if low <= other <= high]


def occupancies(num_threads: int, min_blocks: int) -> range:
    """Candidates for MIN_BLOCKS: `min_blocks` - 1 to + 1, if an SM has threads for that many blocks."""
    return range(max(1, min_blocks - 1), min(_MAX_RESIDENT_THREADS // num_threads, min_blocks + 1) + 1)


def pinned(count: int, to: int = _PINNED) -> int:
    """`count` rows, sequences or tokens as a choice sees them: with PYOPS_BATCH_INVARIANT `to`, unless there are none.

    A plan uses it wherever the order of a row's summation depends on what is chosen.
    """
    return to if count and batch_invariant() else count


def pinned_rows(count: int, num_experts: int) -> int:
    """`pinned` for the rows of a grouped GEMM: an equal number for each expert."""
    return pinned(count, _PINNED * max(1, num_experts))


def rounded_rows(count: int) -> int:
    """M as GEMMs are chosen by, so that few M need another kernel: rounded up to a power of two up to 16, then to an
    eighth of one, of 16 to 128 rows."""
    power = power_of_two(count)
    unit = power if power <= 16 else max(16, min(power // 8, 128))
    return -(-count // unit) * unit


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`, for buckets."""
    return 1 << max(0, count - 1).bit_length()
