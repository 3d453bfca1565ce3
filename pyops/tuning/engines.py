"""Engines: the kernels that a family of ops chooses among, by the times that a cost model gives them.

A family has a shape, a hashable value with everything that its choice depends on besides the device, and one `Engine`
for each kernel. An engine says why its kernel cannot serve a shape, or which Configs come into question and how long
each of them takes. `Choice` is the `choose` of `tuning.config`: the Config with the least time of all engines.

The times are made of a device's rates: a dataclass of numbers for each family, which `python -m benchmarks.fit` fits on
a device. `pyops/tuning/<family>.json` has them with the errors of the fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .._core.system.device import Device
from . import TABLES, batch_invariant


class Shape(Hashable, Protocol):
    """What a choice depends on besides the device."""

    def of_rows(self, rows: int) -> Any:
        """The shape with this number of rows."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to multiply."""
        ...


S = TypeVar("S", bound=Shape)
R = TypeVar("R")  # rates
_REFERENCE = "nvidia-h200"  # its rates stand in for those of a device that has not been measured
_MAX_CHOICES = 4096  # choices that a process remembers
_ROW_COUNTS = 1, 16, 128, 1024, 8192  # batch invariance: numbers of rows for which a Config is weighed
_SOFTNESS = 4.0  # streams that overlap take the 4-norm of their times: two equal ones 19 % more than each


@dataclass(frozen=True, slots=True)
class Engine(Generic[S, R]):
    """A kernel of a family.

    Attributes:
        name: the kernel: its file, or its entry in the file of another.
        refusal: why the kernel cannot serve a shape on a device; None: it can.
        configs: the Configs that come into question for a shape that it serves.
        time_us: microseconds of a Config, from the rates of the device.
    """

    name: str
    refusal: Callable[[S, Device], str | None]
    configs: Callable[[S, Device], Iterable[Any]]
    time_us: Callable[[Any, S, Device, R], float]


class Candidate(NamedTuple):
    """A Config of an engine, and its time by the model."""

    us: float
    engine: str
    config: Any


class Choice(Generic[S, R]):
    """`choose` of a family: the Config with the least time by the cost model.

    Attributes:
        shape_of: the shape of a problem.
        rates_of: the rates of a device.
        engines: where times are equal, the earlier engine is chosen.
    """

    def __init__(self, shape_of: Callable[[Any], S], rates_of: Callable[[Device], R], *engines: Engine[S, R]) -> None:
        self.shape_of, self.rates_of, self.engines = shape_of, rates_of, engines
        self._fastest = lru_cache(_MAX_CHOICES)(lambda shape, device, _: min(self.candidates(shape, device), key=_us))
        self._steadiest = lru_cache(_MAX_CHOICES)(self._weighed)

    def __call__(self, problem: Any, device: Device) -> Any:
        return self.best(self.shape_of(problem), device).config

    def best(self, shape: S, device: Device) -> Candidate:
        """The Config with the least time; with PYOPS_BATCH_INVARIANT one that does not depend on the rows."""
        if not batch_invariant() or shape.is_empty:
            return self.fastest(shape, device)
        found = self._steadiest(shape.of_rows(1), device)
        engine = next(one for one in self.engines if one.name == found.engine)
        return found._replace(us=engine.time_us(found.config, shape, device, self.rates_of(device)))

    def _weighed(self, shape: S, device: Device) -> Candidate:
        """Of the Configs that serve any number of rows, without split-K and stream-K, that with the least loss.

        The loss is the largest factor, over `_ROW_COUNTS`, by which a Config is slower than the fastest one.
        """
        rates, shapes = self.rates_of(device), [shape.of_rows(rows) for rows in _ROW_COUNTS]
        least = [self.fastest(one, device).us for one in shapes]
        losses: dict[Candidate, float] = {}
        for engine in self.engines:
            if any(engine.refusal(one, device) for one in shapes):
                continue
            for config in dict.fromkeys(unsplit(config) for one in shapes for config in engine.configs(one, device)):
                times = [engine.time_us(config, one, device, rates) for one in shapes]
                loss = max(us / best for us, best in zip(times, least, strict=True))
                losses[Candidate(0.0, engine.name, config)] = loss
        return min(losses, key=lambda one: losses[one])

    def fastest(self, shape: S, device: Device) -> Candidate:
        """The Config with the least time for the shape."""
        return self._fastest(shape, device, batch_invariant())

    def candidates(self, shape: S, device: Device) -> list[Candidate]:
        """All Configs of all engines that serve the shape."""
        rates = self.rates_of(device)
        return [
            Candidate(engine.time_us(config, shape, device, rates), engine.name, config)
            for engine in self.engines
            if engine.refusal(shape, device) is None
            for config in engine.configs(shape, device)
        ]

    def of_engines(self, shape: S, device: Device) -> dict[str, Candidate]:
        """{kernel: its fastest Config} of the engines that serve the shape."""
        best: dict[str, Candidate] = {}
        for one in self.candidates(shape, device):
            best[one.engine] = min(best.get(one.engine, one), one, key=_us)
        return best

    def explained(self, problem: Any, device: Device) -> list[str]:
        """A line for each engine: its time and fastest Config, or the reason why it is out of the question."""
        shape = self.shape_of(problem)
        best, lines = self.of_engines(shape, device), []
        for engine in self.engines:
            if reason := engine.refusal(shape, device):
                lines.append(f"{engine.name}: no, {reason}")
            elif engine.name not in best:
                lines.append(f"{engine.name}: no config for this shape")
            else:
                lines.append(f"{engine.name}: {best[engine.name].us:.1f} us by the model, {best[engine.name].config}")
        return lines


def unsplit(config: Any) -> Any:
    """`config` without split-K and stream-K: no CTAs share a tile along K."""
    return replace(config, **{name: 1 for name in ("splits", "sharers", "shared") if hasattr(config, name)})


def _us(one: Candidate) -> float:
    return one.us


def overlapped(*streams: float, softness: float = _SOFTNESS) -> float:
    """The time of streams of work that overlap, from the time that each of them takes alone: their norm."""
    return float(sum(one**softness for one in streams) ** (1 / softness))


def rates(kind: type[R], family: str, device_name: str) -> R:
    """The rates of a device: those that were fitted on it, else those of an H200."""
    found: R = _rates(kind, family, device_name)  # type: ignore[arg-type]
    return found


@cache
def _rates(kind: type[Any], family: str, device_name: str) -> Any:
    known = json.loads(table(family).read_text(encoding="utf-8"))
    return kind(**known.get(device_name, known[_REFERENCE])["rates"])


def table(family: str) -> Path:
    """The file of a family: {device: its rates and the errors of their fit}."""
    return TABLES / f"{family}.json"
