"""Break kernels and plans on purpose, and count how often a test fails: ``python -m tests.mutation --help``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

import kernels_cu
from tests.mutation import choose, operators, plans, python
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.judge import OUTCOMES, Judge, Verdict
from tests.mutation.mutant import Mutant, sample
from tests.mutation.semantic import SEMANTIC, anchored

REQUIRED = 0.95  # the share of mutants, without equivalent and invalid ones, that must be killed


def generated() -> list[Mutant]:
    """Every mutant of every kernel, header and plan."""
    kernels = [one for file in kernels_cu.names() for one in operators.mutants_of(file, kernels_cu.read(file))]
    return kernels + plans.mutants()


def _text(mutant: Mutant) -> str:
    return python.read(mutant.file) if mutant.is_python else kernels_cu.read(mutant.file)


def _chosen(asked: argparse.Namespace) -> list[Mutant]:
    if not asked.semantic:
        return sample([one for one in generated() if _is_asked(one, asked)], asked.per_file, asked.seed)
    found, problems = anchored(SEMANTIC)
    if problems:
        sys.exit("\n".join(problems))
    return sample([one for one in found if _is_asked(one, asked)], len(found), asked.seed)


def _is_asked(mutant: Mutant, asked: argparse.Namespace) -> bool:
    return any(part in mutant.name for part in asked.file or [""])


def score(outcomes: Counter[str]) -> float:
    """The share of killed mutants among the judged ones, without equivalent and invalid ones."""
    judged = outcomes.total() - outcomes["equivalent"] - outcomes["invalid"]
    return outcomes["killed"] / judged if judged else 1.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin with no mutant after so long")
    parser.add_argument("--seconds", type=float, default=90.0, help="time for the tests of one mutant (90)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (0)")
    parser.add_argument("--per-file", type=int, default=2, help="mutants of each file (2)")
    parser.add_argument(
        "--file", action="append", help="only mutants with this in their name, which begins with the file; repeatable"
    )
    parser.add_argument("--semantic", action="store_true", help="those of tests/mutation/semantic.py instead")
    parser.add_argument("--list", action="store_true", help="print the mutants as diffs and judge none")
    return parser.parse_args()


def main() -> None:
    """Judge the chosen mutants."""
    asked = _arguments()
    mutants = _chosen(asked)
    if not mutants:
        sys.exit(f"no mutant has {' or '.join(asked.file or [])} in its name")
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.name} {mutant.why}\n{mutant.diff(_text(mutant))}\n")
        return
    started, outcomes = time.monotonic(), Counter[str]()

    def report(mutant: Mutant, verdict: Verdict) -> None:
        outcomes[verdict.outcome] += 1
        print(f"{verdict.outcome:10} {verdict.seconds:3.0f} s  {mutant.name}: {verdict.by}", flush=True)
        if verdict.outcome in ("survived", "timeout"):
            print(f"{mutant.why}\n{mutant.diff(_text(mutant))}\n".lstrip(), flush=True)

    judge = Judge(mutants, asked.n, asked.seconds, started + 60 * asked.minutes, report)
    judge.run(choose.files_of(mutants))
    _conclude(outcomes, mutants, judge, asked.seed, time.monotonic() - started)


def _conclude(outcomes: Counter[str], mutants: Sequence[Mutant], judge: Judge, seed: int, seconds: float) -> None:
    counts = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in OUTCOMES if outcomes[outcome])
    print(f"seed {seed}: {outcomes.total()} of {len(mutants)} mutants judged in {seconds:.0f} s: {counts}")
    print(f"{score(outcomes):.1%} killed of those that are neither equivalent nor invalid")
    for name in sorted(EQUIVALENT.keys() - {one.name for one in generated()}):
        print(f"{name} is listed as equivalent and is no mutant any more")
    for test in sorted(judge.unsound):
        print(f"fails without a mutant, or takes too long: {test}")
    sys.exit(score(outcomes) < REQUIRED)


if __name__ == "__main__":
    main()
