"""The GPU suite under compute-sanitizer: ``python -m tests.sanitize [TOOL...] [-n PROCESSES] [-k EXPRESSION]``.

The tests are divided among processes, one sanitizer each. The memory pools of torch and CuPy are off, so that every
tensor is a separate allocation. Prints a line for each process and its findings; fails on any finding or failed test.

With ``--minutes`` a tool starts no test after that time, and prints how many it has run: a sample of all.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Only this project's kernels are checked: not child processes, nor driver errors that a test provokes.
_SANITIZER = ("compute-sanitizer", "--target-processes", "application-only", "--report-api-errors", "no")
# Kernels of torch are not checked either.
_NOT_TORCH = ("--kernel-regex-exclude", "kns=at6native", "--kernel-regex-exclude", "kns=cudnn")
_OF_TOOL = {
    "memcheck": _NOT_TORCH,
    "racecheck": _NOT_TORCH,
    "synccheck": _NOT_TORCH,
    # initcheck must see the writes of torch's kernels, or it would report everything that a kernel reads. Tests also
    # copy an output's uninitialised memory, to compare it later; such copies are not reads by a kernel.
    "initcheck": ("--check-api-memory-access", "no"),
}
TOOLS = tuple(_OF_TOOL)
# Without a pool, graph capture allocates nothing, freeing waits for the device, and torch counts no memory.
_NEED_A_POOL = "graph or capture or current_stream or tokens_on_a_gpu or owns_nothing"
# racecheck loses launches of several threads at a time, and reports that as an error of its own.
_NOT_FOR = {"racecheck": "test_threads"}
_PYTEST = (sys.executable, "-m", "pytest", "-mgpu", "-pno:xdist", "-pno:cacheprovider", "-q", "--durations=1")
# The tests of a process are consecutive: a sanitizer rewrites each loaded kernel, and adjacent tests load the same
# ones.
_PART = 24
_SLOWEST = re.compile(r"^([\d.]+)s call +(.*)$", re.MULTILINE)
_SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")


def collect(expression: str, tool: str) -> list[str]:
    """The ids of the tests that need a device and work under a tool."""
    left_out = " or ".join(filter(None, (_NEED_A_POOL, _NOT_FOR.get(tool))))
    chosen = f"({expression or 'test'}) and not ({left_out})"
    listed = subprocess.run((*_PYTEST, "--collect-only", "-k", chosen), capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "::" in line]


def run(tool: str, tests: Sequence[str]) -> tuple[int, str]:
    """(findings, output) of one process; findings are -1 if it failed, even if only by a test."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = Path(folder, "tests")
        arguments.write_text("\n".join(tests))
        done = subprocess.run(
            (*_SANITIZER, "--tool", tool, *_OF_TOOL[tool], *_PYTEST, f"@{arguments}"),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
    counts = [int(count) for count in _SUMMARY.findall(done.stdout)]
    return (-1 if done.returncode or not counts else sum(counts)), done.stdout


def main() -> None:
    """Run the tools one after another; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"any of {', '.join(TOOLS)}; all unless given")
    parser.add_argument("-n", type=int, default=8, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="what a tool may take, or little more")
    parser.add_argument("-k", default="", help="which tests, as pytest selects them")
    asked = parser.parse_args()
    if unknown := set(asked.tools) - set(TOOLS):
        parser.error(f"no such tool: {', '.join(unknown)}")
    failed = False
    for tool in asked.tools or TOOLS:
        tests = collect(asked.k, tool)
        if not tests:
            parser.error(f"no test for {tool}")
        parts = [tests[first : first + _PART] for first in range(0, len(tests), _PART)]
        random.Random(0).shuffle(parts)
        started = time.monotonic()

        def one(part: list[str], tool: str = tool, end: float = started + 60 * asked.minutes) -> tuple[int, int]:
            if time.monotonic() > end:
                return 0, 0
            begun = time.monotonic()
            findings, text = run(tool, part)
            slowest = _SLOWEST.search(text)
            print(
                f"{tool}: {len(part)} tests, {findings or 'no'} findings, {time.monotonic() - begun:.0f} s, "
                f"the longest {slowest[1] + ' s in ' + slowest[2] if slowest else 'unknown'}",
                *([text] if findings else []),
                sep="\n",
                flush=True,
            )
            return findings, len(part)

        with ThreadPoolExecutor(asked.n) as pool:
            results = list(pool.map(one, parts))
        bad = sum(findings != 0 for findings, _ in results)
        failed = failed or bad > 0
        print(
            f"{tool}: {sum(max(0, findings) for findings, _ in results)} findings, {bad} processes failed, "
            f"{sum(ran for _, ran in results)} of {len(tests)} tests, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
