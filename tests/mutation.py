"""Kernels broken on purpose: ``python -m tests.mutation [-n PROCESSES] [-k NAME] [--list]``.

Each mutant of `tests/mutants.py` meets the tests that run its kernels on the CPU, in a process of its own that reads
the broken text. A mutant is killed if one of them fails. Fails itself if the tests fail without a mutant, if less than
95 % of the mutants are killed, or if a mutant is none: its text is not there once, or does not compile.

This module is also the plugin that pytest loads in such a process.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest

import kernels_cu
import pyops
from pyops._core import device, source
from pyops._core.errors import CompileError
from pyops._core.example import ArgMaker
from pyops._core.op import Op
from tests import axes
from tests.mutants import MUTANTS, Mutant

LEAST = 0.95  # of the mutants that must be killed
_SECONDS = 300.0  # after which a mutant has survived
_EVERY_OP = ("tests/test_every_op.py", "tests/test_every_op_host.py")
_PYTEST = (sys.executable, "-m", "pytest", "-p", "tests.mutation", "-p", "no:cacheprovider", "-x", "-q")
_NOT_COMPILED = 9  # exit status, one that pytest does not use


def mutated(mutant: Mutant) -> str:
    """The broken text of the mutant's file."""
    text = kernels_cu.read(mutant.file)
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: its text is {count} times in {mutant.file}, expected once")
    return text.replace(mutant.old, mutant.new)


@cache
def _kernels(op: Op) -> set[str]:
    """The files of the kernels that the op's example launches in any of the cases that are run."""
    assert op.example is not None
    found: set[str] = set()
    for case in axes.combinations(op, axes.RUN):
        launches = op.launches(*op.example(ArgMaker(device.model()), **case))
        found |= {one.specialisation.kernel.file for one in launches}
    return found


@cache
def _sources(kernel: str) -> set[str]:
    """A kernel's file and all that it includes."""
    seen: set[str] = set()
    source.inline("include/number.cuh", seen)
    source.inline(kernel, seen)
    return seen


class Verdict(NamedTuple):
    outcome: str  # "killed", "survived" or "no mutant"
    by: str
    seconds: float


def judge(mutant: Mutant, folder: str) -> Verdict:
    """Run the tests against the mutant, its kernels cached in `folder`."""
    started = time.monotonic()

    def verdict(outcome: str, by: str = "") -> Verdict:
        return Verdict(outcome, by, time.monotonic() - started)

    try:
        mutated(mutant)
        status, printed = _tests([mutant], "--break", "-p", "no:xdist", folder=folder)
    except ValueError as error:
        return verdict("no mutant", str(error))
    except subprocess.TimeoutExpired:
        return verdict("survived", f"{mutant.why} (no test failed in time)")
    failed = re.search(r"^FAILED (.*)$", printed, re.MULTILINE)
    if failed or status < 0:  # what writes beyond its memory may take the process along, with or before the test
        return verdict("killed", failed[1] if failed else f"the process ended by signal {-status}")
    if status == 0:
        return verdict("survived", mutant.why)
    return verdict("no mutant", "\n".join(printed.splitlines()[-40:]))


def _tests(mutants: Sequence[Mutant], *options: str, folder: str | None = None) -> tuple[int, str]:
    """(exit status, what was printed) of the tests that could notice the mutants."""
    concerned = [op for op in pyops.ops.values() if any(_concerns(mutant, op) for mutant in mutants)]
    folders = {Path(kernel).parent for op in concerned for kernel in _kernels(op)}
    families = sorted(str(path) for folder in folders for path in Path("tests").glob(f"test_{folder}*.py"))
    names = [word for mutant in mutants for word in ("--mutant", mutant.name)]
    done = subprocess.run(
        (*_PYTEST, *options, *names, *_EVERY_OP, *families),
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS if folder else None,
        env=os.environ | {"CI": "true"} | ({"CUPY_CACHE_DIR": folder} if folder else {}),
    )
    return done.returncode, done.stdout + done.stderr


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant", action="append", default=[], help="select the tests that could notice it; repeatable")
    parser.addoption("--break", action="store_true", dest="apply", help="break its kernel")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Break the kernel, before the first is read. What fails need not be made small."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", hypothesis.settings(), phases=phases, report_multiple_bugs=False)
    hypothesis.settings.load_profile("mutation")
    if session.config.getoption("apply"):
        (mutant,) = _chosen(session.config)
        broken, read = mutated(mutant), kernels_cu.read
        kernels_cu.read = lambda name: broken if name == mutant.file else read(name)


def _concerns(mutant: Mutant, op: Op) -> bool:
    return mutant.ops in op.name and any(mutant.file in _sources(kernel) for kernel in _kernels(op))


def _chosen(config: pytest.Config) -> list[Mutant]:
    return [mutant for mutant in MUTANTS if mutant.name in config.getoption("mutant")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that run the kernels on the CPU, of ops and of their family in turn, so that one soon fails."""
    chosen = _chosen(config)
    concerned = {name for name, op in pyops.ops.items() if any(_concerns(mutant, op) for mutant in chosen)}
    turns = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = list(callspec.params.values()) if callspec else []
        ops = {str(getattr(value, "name", value)) for value in values} & pyops.ops.keys()
        # What names no device runs on the host, or where it is cheap: a reference.
        named = {type(value).__name__ for value in values} | {value for value in values if isinstance(value, str)}
        on_host = "Host" in named or (item.path.name != "test_every_op.py" and not named & {"cpu", "cuda"})
        if on_host and (not ops or ops & concerned):
            turns[min(ops, default="")].append(item)
    family = turns.pop("", [])  # tests that name no op: every other one
    items[:] = _in_turn(family, _in_turn(*turns.values()))


def _in_turn(*groups: Sequence[Any]) -> list[Any]:
    """One of each group, then the next of each."""
    return [one for turn in zip_longest(*groups) for one in turn if one is not None]


def pytest_exception_interact(call: pytest.CallInfo[Any]) -> None:
    """A text that no compiler takes breaks nothing."""
    if call.excinfo is not None and call.excinfo.errisinstance(CompileError):
        pytest.exit(f"does not compile: {call.excinfo.value}", returncode=_NOT_COMPILED)


def main() -> None:
    """Judge the mutants; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="processes at a time")
    parser.add_argument("-k", default="", help="only mutants with this in their name")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    asked = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if asked.k in mutant.name]
    if not mutants:
        parser.error(f"no mutant has {asked.k!r} in its name")
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.why}")
        return
    started = time.monotonic()
    status, printed = _tests(mutants, "-n", str(asked.n))
    if status:
        sys.exit(f"{printed}\nthe tests fail without a mutant")
    print(f"without a mutant: {printed.splitlines()[-1]}", flush=True)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.n) as pool:
        judged = {pool.submit(judge, mutant, folder): mutant for mutant in mutants}
        for future in as_completed(judged):
            verdict = future.result()
            outcomes[verdict.outcome] += 1
            print(f"{verdict.outcome:9} {verdict.seconds:4.0f} s  {judged[future].name}: {verdict.by}", flush=True)
    score = outcomes["killed"] / max(1, outcomes["killed"] + outcomes["survived"])
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    print(f"{score:.1%} of {len(mutants)} mutants killed ({counts}) in {time.monotonic() - started:.0f} s")
    sys.exit(score < LEAST or outcomes["no mutant"] > 0)


if __name__ == "__main__":
    main()
