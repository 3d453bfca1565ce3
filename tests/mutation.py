"""Kernels broken on purpose: ``python -m tests.mutation [-n PROCESSES] [-k NAME] [--minutes M] [--list]``.

Each mutant of `tests/mutants.py` meets the tests that run its kernels on the CPU, in a process of its own that reads
the broken text: the first of every file, then the second, so that a run of some minutes has met all kernels. A mutant
is killed if a test fails. Fails itself if the tests fail without a mutant, if less than 95 % of the mutants that it
judged are killed, or if a mutant is none: its text is not there once, or does not compile.

This module is also the plugin that pytest loads in such a process.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product, zip_longest
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

MIN_SCORE = 0.95  # of the mutants that must be killed
_SECONDS = 300.0  # after which a mutant has survived
_EVERY_OP = ("tests/test_every_op.py", "tests/test_every_op_host.py")
_PYTEST = ("-p", "tests.mutation", "-p", "no:cacheprovider", "-x", "-q")
_NOT_COMPILED = 9  # exit status, one that pytest does not use


def mutated(mutant: Mutant) -> str:
    """The broken text of the mutant's file."""
    text = kernels_cu.read(mutant.file)
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: its text is {count} times in {mutant.file}, expected once")
    return text.replace(mutant.old, mutant.new)


@cache
def _kernels(op: Op) -> set[str]:
    """The files of the kernels that the op's example launches in any case, with few or many tokens."""
    assert op.example is not None
    found: set[str] = set()
    for case, more in product(axes.combinations(op), ({}, {"num_tokens": 4096})):
        launches = op.launches(*op.example(ArgMaker(device.model()), **case, **more))
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


def judge(mutants: Sequence[Mutant], max_running: int, deadline: float) -> Iterator[tuple[Mutant, Verdict]]:
    """Run the tests against each mutant, `most` at a time, as they come to an end; begin with none after `deadline`.

    Each is judged in a fork of this process, which has read the tests, but no kernel, before.
    """
    for path in _files(mutants):
        importlib.import_module(".".join(Path(path).with_suffix("").parts))
    context, waiting, running = multiprocessing.get_context("fork"), deque(mutants), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            if time.monotonic() > deadline:
                waiting.clear()
            while waiting and len(running) < max_running:
                mutant, log = waiting.popleft(), Path(folder, f"{len(waiting)}.log")
                process = context.Process(target=_run_tests, args=(mutant, folder, log))
                process.start()
                running[process.sentinel] = process, mutant, log, time.monotonic()
            ended = multiprocessing.connection.wait(running, timeout=1.0)
            for sentinel, (process, mutant, log, started) in list(running.items()):
                seconds = time.monotonic() - started
                if sentinel in ended or seconds > _SECONDS:
                    del running[sentinel]
                    process.kill()
                    process.join()
                    status = process.exitcode if sentinel in ended else None
                    yield mutant, _verdict(mutant, status, log.read_text(errors="replace"), seconds)


def _run_tests(mutant: Mutant, folder: str, log: Path) -> None:
    """What a fork does: the tests, with the kernels broken and cached in `folder`, printing to `log`."""
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ["CUPY_CACHE_DIR"] = folder
    for cached in (source.signature, source._flat):
        cached.cache_clear()
    chosen = ("--break", "--mutant", mutant.name, "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    status = pytest.main([*_PYTEST, *chosen, *_files([mutant])])
    sys.stdout.flush()
    os._exit(status)


def _verdict(mutant: Mutant, status: int | None, printed: str, seconds: float) -> Verdict:
    if status is None:
        return Verdict("survived", f"{mutant.why} (no test failed in time)", seconds)
    failed = re.search(r"^FAILED (.*)$", printed, re.MULTILINE)
    if failed or status < 0:  # what writes beyond its memory may take the process along, with or before the test
        return Verdict("killed", failed[1] if failed else f"the process ended by signal {-status}", seconds)
    if status == 0:
        return Verdict("survived", mutant.why, seconds)
    return Verdict("no mutant", "\n".join(printed.splitlines()[-40:]), seconds)


def _files(mutants: Sequence[Mutant]) -> list[str]:
    """The files of tests that could notice the mutants."""
    concerned = [op for op in pyops.registry.values() if any(_concerns(mutant, op) for mutant in mutants)]
    folders = {Path(kernel).parent for op in concerned for kernel in _kernels(op)}
    return [*_EVERY_OP, *sorted(str(path) for folder in folders for path in Path("tests").glob(f"test_{folder}*.py"))]


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
    concerned = {name for name, op in pyops.registry.items() if any(_concerns(mutant, op) for mutant in chosen)}
    turns = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = list(callspec.params.values()) if callspec else []
        ops = {str(getattr(value, "name", value)) for value in values} & pyops.registry.keys()
        # What names no device runs on the host, or where it is cheap: a reference.
        named = {type(value).__name__ for value in values} | {value for value in values if isinstance(value, str)}
        on_host = "Host" in named or (item.path.name != "test_every_op.py" and not named & {"cpu", "cuda"})
        if on_host and (not ops or ops & concerned):
            turns[min(ops, default="")].append(item)
    family = turns.pop("", [])  # tests that name no op: every other one
    ordered = _in_turn(family, _in_turn(*turns.values()))
    # The tests that share the most words with what says why one must notice come first.
    words = {word for mutant in chosen for word in _words(mutant.why)}
    items[:] = sorted(ordered, key=lambda item: -len(words & _words(f"{item.originalname} {item.obj.__doc__}")))


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z]{5,}", text.lower()))


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
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin with no mutant after so long")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    asked = parser.parse_args()
    of_files = defaultdict(list)
    for mutant in MUTANTS:
        if asked.k in mutant.name:
            of_files[mutant.file].append(mutant)
    mutants = _in_turn(*of_files.values())
    if not mutants:
        parser.error(f"no mutant has {asked.k!r} in its name")
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.why}")
        return
    started = time.monotonic()
    os.environ["CI"] = "true"  # as many examples as there
    names = [word for mutant in mutants for word in ("--mutant", mutant.name)]
    tests = (sys.executable, "-m", "pytest", *_PYTEST, "-n", str(asked.n), *names, *_files(mutants))
    done = subprocess.run(tests, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nthe tests fail without a mutant")
    print(f"without a mutant: {done.stdout.splitlines()[-1]}", flush=True)
    outcomes: Counter[str] = Counter()
    for mutant, verdict in judge(mutants, asked.n, started + 60 * asked.minutes):
        outcomes[verdict.outcome] += 1
        print(f"{verdict.outcome:9} {verdict.seconds:4.0f} s  {mutant.name}: {verdict.by}", flush=True)
    score = outcomes["killed"] / max(1, outcomes["killed"] + outcomes["survived"])
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    judged = f"{sum(outcomes.values())} of {len(mutants)} mutants judged"
    print(f"{judged}, {score:.1%} killed ({counts}) in {time.monotonic() - started:.0f} s")
    sys.exit(score < MIN_SCORE or outcomes["no mutant"] > 0)


if __name__ == "__main__":
    main()
