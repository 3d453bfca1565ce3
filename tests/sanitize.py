"""The GPU suite under compute-sanitizer: ``python -m tests.sanitize [TOOL...] [-n PROCESSES] [-k EXPRESSION]``.

The tests are dealt out to processes of one sanitizer each, with the memory pools of torch and CuPy off, so that every
tensor is an allocation of its own. Prints what each tool found; fails unless that is nothing and every test passes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# On trial are this project's kernels; no child process, no error of the driver's that a test provokes.
_SANITIZER = ("compute-sanitizer", "--target-processes", "application-only", "--report-api-errors", "no")
# Nor torch's kernels. But initcheck must see what they write, or everything that a kernel reads is news to it.
_NOT_TORCH = ("--kernel-regex-exclude", "kns=at6native")
_PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:xdist", "-p", "no:cacheprovider", "-q")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")


def collect(expression: str) -> list[str]:
    """The ids of the tests that need a device."""
    asked = (*_PYTEST, "--collect-only", "-k", expression)
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "::" in line]


def run(tool: str, tests: Sequence[str]) -> tuple[int, str]:
    """(findings, what was printed) of one process; -1 findings for a process that did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = Path(folder, "tests")
        arguments.write_text("\n".join(tests))
        done = subprocess.run(
            (*_SANITIZER, *(() if tool == "initcheck" else _NOT_TORCH), "--tool", tool, *_PYTEST, f"@{arguments}"),
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
    parser.add_argument("-k", default="", help="which tests, as pytest selects them")
    asked = parser.parse_args()
    if unknown := set(asked.tools) - set(TOOLS):
        parser.error(f"no such tool: {', '.join(unknown)}")
    tests = collect(asked.k)
    failed = False
    for tool in asked.tools or TOOLS:
        started = time.monotonic()
        with ThreadPoolExecutor(asked.n) as pool:
            results = list(pool.map(lambda part, tool=tool: run(tool, tests[part :: asked.n]), range(asked.n)))
        bad = [text for findings, text in results if findings]
        for text in bad:
            print(text)
        failed = failed or bool(bad)
        found = sum(max(0, findings) for findings, _ in results)
        seconds = time.monotonic() - started
        print(
            f"{tool}: {found} findings, {len(bad)} of {asked.n} processes failed, {len(tests)} tests, {seconds:.0f} s"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
