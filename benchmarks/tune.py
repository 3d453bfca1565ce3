"""Search for the fastest Config of an op's problem on a GPU.

python -m benchmarks tune paged_attention_v1 num_tokens=16 max_seq_len=4096
python -m benchmarks tune paged_attention_v1 num_tokens=1,16,64 --save

The search starts with the Config that the op's `choose` returns, and goes on with the `candidates` of the fastest
Config so far. A Config is accepted only if the op's results agree with the reference within the op's tolerance. With
--save, the best Config is written to the device's table, ``pyops/tuning/<device>.json``, unless it is the one of
`choose`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import pyops
from pyops import axes, tuning
from pyops._core.op.op import Op
from pyops.testing import calls as testing

from . import report, shapes, timing
from .installed import reason
from .kernel_time import argument_sets
from .rivals import ours
from .shapes import Case
from .timing import Spread, gpu_us

Config = Any  # a frozen dataclass with `candidates` (pyops/tuning/__init__.py)
_SCALARS = (bool, int, str)  # field types that a table can hold


@dataclass(frozen=True)
class Choice:
    """A call of `choose` by a plan: the problem, the device and the returned Config."""

    problem: Any
    device: Any
    config: Config


@dataclass(frozen=True)
class Timed:
    """A Config with its time, or with the reason why it was not timed."""

    config: Config
    us: Spread | None
    trouble: str = ""

    @property
    def median(self) -> float:
        return self.us.median if self.us else float("inf")


@dataclass(frozen=True)
class Tuned:
    """The result of a search: all tried Configs, fastest first, and the best one.

    `best` is the Config of `choose` unless another was clearly faster when the two were timed again, alternately.
    """

    choice: Choice
    tried: list[Timed]
    best: Config
    best_us: Spread
    choice_us: Spread


@contextmanager
def choices(tuning: Any, op: str) -> Iterator[list[Choice]]:
    """Within this context, records the calls of `choose` by plans of `op`."""
    seen: list[Choice] = []
    config = tuning.config

    def noted(name: str, problem: Any, device: Any, choose: Callable[[Any, Any], Config]) -> Config:
        if name == op:
            seen.append(Choice(problem, device, choose(problem, device)))
        return config(name, problem, device, choose)

    with mock.patch.object(tuning, "config", noted):
        yield seen


def search(
    first: Config, beside: Callable[[Config], Sequence[Config]], measure: Callable[[Config], Timed], rounds: int
) -> list[Timed]:
    """All timed Configs, fastest first. Each round tries the candidates of the fastest one so far."""
    timed = {first: measure(first)}
    for _ in range(rounds):
        best = min(timed.values(), key=lambda one: one.median)
        new = dict.fromkeys(config for config in beside(best.config) if config not in timed)
        if not new:
            break
        for config in new:
            timed[config] = measure(config)
    return sorted(timed.values(), key=lambda one: one.median)


def tune(op: Op, tuning: Any, check: Callable[[], None], time_us: Callable[[], Spread], rounds: int) -> Tuned:
    """Search for the best Config of the problem that `check` and `time_us` run.

    `check` raises an error if results are wrong.

    Raises:
        ValueError: the op chooses no Config.
    """
    with choices(tuning, op.name) as seen:
        op.forget()
        check()
    if not seen:
        raise ValueError(f"{op.name} chooses no Config for this call")
    choice = seen[-1]

    def time_with(config: Config) -> Spread:
        op.forget()  # plans made under `forced` would stay cached
        with tuning.forced(op.name, config):
            check()
            return time_us()

    def measure(config: Config) -> Timed:
        try:
            return Timed(config, time_with(config))
        except Exception as error:
            return Timed(config, None, reason(error))

    try:
        tried = search(choice.config, lambda config: config.candidates(choice.problem, choice.device), measure, rounds)
        # The minimum over many Configs is biased low, so a second measurement decides.
        choice_us, best_us = time_with(choice.config), time_with(tried[0].config)
    finally:
        op.forget()
    best = tried[0].config if best_us.high < choice_us.low else choice.config
    return Tuned(choice, tried, best, best_us if best != choice.config else choice_us, choice_us)


def difference(config: Config, choice: Config) -> dict[str, Any]:
    """The fields in which two Configs differ, with the values of the first."""
    names = (one.name for one in fields(choice))
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(choice, name)}


def render(case: Case, tuned: Tuned) -> str:
    """The tried Configs as a table, and the result."""

    def words(config: Config) -> str:
        return " ".join(f"{name}={value}" for name, value in difference(config, tuned.choice.config).items())

    lines = [
        [
            words(one.config) or "the choice",
            *((f"{one.us.median:.2f}", f"{one.us.low:.2f}-{one.us.high:.2f}") if one.us else ("", "")),
            one.trouble,
        ]
        for one in tuned.tried
    ]
    if tuned.best == tuned.choice.config:
        verdict = "The choice stays: no other is faster beyond the spread of its times."
    else:
        verdict = (
            f"Best: {words(tuned.best)}, {tuned.best_us.median:.2f} us; the choice {tuned.choice_us.median:.2f} us."
        )
    heading = f"## {case}\n\n{tuned.choice.problem.bucket()}\n\n{tuned.choice.config}"
    return "\n\n".join([heading, report.table(["Config", "us", "low-high", "trouble"], lines), verdict, ""])


def save(path: Path, op: str, tuned: Tuned) -> None:
    """Write the best Config to the device's table; if `choose` is best, remove its entry.

    An entry has all fields that a table can hold, so every problem of the bucket for which `choose` returns a Config of
    this class runs with the measured one.
    """
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    best, choice, problem = tuned.best, tuned.choice.config, tuned.choice.problem
    key = tuning.key(problem, choice)
    if wrong := [
        name
        for name, value in difference(best, choice).items()
        if not (isinstance(value, _SCALARS) or tuning.is_config(value))
    ]:
        raise TypeError(f"{op}: a table cannot hold the Config's {', '.join(wrong)}")
    entries = table.setdefault(op, {})
    entries.pop(key, None)
    if best != choice:
        entries[key] = _entry(best)
    table = {name: dict(sorted(found.items())) for name, found in sorted(table.items()) if found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")


def _entry(config: Config) -> dict[str, Any]:
    """The fields that a table can hold; those of a field that is a Config itself."""
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    values = {name: _entry(one) if tuning.is_config(one) else one for name, one in values.items()}
    return {name: one for name, one in values.items() if isinstance(one, (*_SCALARS, dict))}


def on_gpu(case: Case, effort: timing.Effort) -> tuple[Callable[[], None], Callable[[], Spread]]:
    """(check, time_us) for `tune`, from a case."""
    args = case.arguments()
    right = testing.expected(case.op, args)
    sets, renew = argument_sets(case, effort)
    calls = [ours(case.op)(*one) for one in sets]

    def check() -> None:
        testing.assert_results(case.op, right, testing.run(case.op, args))

    def time_us() -> Spread:
        return gpu_us(calls, effort, renew)

    return check, time_us


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    result = argparse.ArgumentParser(
        "python -m benchmarks tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("op", metavar="OP")
    result.add_argument("axes", nargs="*", metavar="AXIS=VALUE,...", help="values for axes of the op's example")
    result.add_argument(
        "--rounds", type=int, default=2, help="rounds, each of which may change one more field (default 2)"
    )
    result.add_argument("--quick", action="store_true", help="fewer replays and fewer sets of arguments")
    result.add_argument("--save", action="store_true", help="write the table of the device")
    return result


def cases_of(op: Op, words: Sequence[str]) -> list[Case]:
    """The op at every combination of the axes on the command line; by default a few tokens in bfloat16."""
    chosen: Mapping[str, Sequence[Any]] = dict(shapes.parse(word) for word in words)
    if unknown := set(chosen) - set(axes.of(op)):
        raise ValueError(f"no axis is called {', '.join(sorted(unknown))}; there are {', '.join(axes.of(op))}")
    return shapes.needed(op, chosen, {**shapes.SMALL, "dtype": ("bfloat16",)})


def main(arguments: Sequence[str]) -> int:
    """Tune an op at the shapes that the command line names."""
    options = parser().parse_args(arguments)
    if options.op not in pyops.registry:
        parser().error(f"no op is called {options.op}")
    op = pyops.registry[options.op]
    try:
        cases = cases_of(op, options.axes)
    except ValueError as error:
        parser().error(str(error))
    if not torch.cuda.is_available():
        print("python -m benchmarks tune measures on a GPU, and torch sees none", file=sys.stderr)
        return 2
    for case in cases:
        check, time_us = on_gpu(case, timing.QUICK if options.quick else timing.FULL)
        tuned = tune(op, tuning, check, time_us, options.rounds)
        print(render(case, tuned), flush=True)
        if options.save:
            save(tuning.TABLES / f"{tuned.choice.device.name}.json", op.name, tuned)
            tuning.table.cache_clear()
    return 0
