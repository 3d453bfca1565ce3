"""Time of an op's first call in a new process: with an empty kernel cache, then with the cache filled by that call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyops

from .shapes import Case

_ROOT = Path(__file__).parents[1]
_CHILD = """
import sys, time
start = time.perf_counter()
import cupy, torch, pyops
seconds = time.perf_counter() - start
from benchmarks.compile_time import first_call
first_call(seconds, *sys.argv[1:])
"""


def measure(case: Case) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """(row, []): seconds of the imports and of the first call, with an empty cache ("cold") and from the disk."""
    with tempfile.TemporaryDirectory(prefix="pyops-first-call-") as folder:
        cold, disk = (_in_a_new_process(case, folder) for _ in range(2))
    return {**case.labels, "cold": cold, "disk": disk}, []


def _in_a_new_process(case: Case, cache: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, case.op.name, json.dumps(case.axes)],
        cwd=_ROOT,
        env={**os.environ, "CUPY_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def first_call(import_s: float, op: str, axes: str) -> None:
    """Runs in the new process after its imports: initialises the device, makes the arguments, and times one call."""
    import torch

    case = Case(pyops.registry[op], json.loads(axes))
    args = case.arguments()
    torch.cuda.synchronize()
    start = time.perf_counter()
    case.op.call(*args)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    origin = sorted({compiled.origin for compiled in case.op.compiled()})
    print(json.dumps({"import_s": import_s, "first_call_s": seconds, "origin": origin}))
