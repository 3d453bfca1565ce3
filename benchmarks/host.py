"""Measure the host time of every op without a GPU, with a fake driver.

python -m benchmarks.host
python -m benchmarks.host rms_norm paged_attention_v2
python -m benchmarks.host --save

A call runs the host code of a GPU call up to the launch (benchmarks/fake_driver.py). A *hit* is a call with a cached
plan. A *miss* is the first call with a number of tokens, which makes a plan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import combinations, repeat
from pathlib import Path
from typing import Any

import torch

import pyops
from pyops._core.op.op import Op
from pyops._core.tensors.tensor import TensorArg

from . import report, shapes
from .fake_driver import fake_driver
from .overhead import NEW_SIZES, misses_us
from .rivals import ours
from .shapes import Case
from .timing import Call, spread

RESULTS = Path(__file__).parent / "results" / "cpu-host.json"
MISSES = (
    "rms_norm",
    "silu_and_mul",
    "dynamic_per_token_scaled_fp8_quant",
    "paged_attention_v1",
    "paged_attention_v2",
)
_CALLS = 1000  # calls per batch
_WARM = 25  # untimed pairs of calls before each batch, because the previous batch has evicted the CPU's caches
_TIMES = ("ns", "lowest_ns", "other_ns", "lowest_other_ns")


def case_of(op: Op) -> Case:
    """The op's example with few tokens, in bfloat16 if the op supports it; of its own sizes if it has none of these."""
    return (shapes.cases(op, {"dtype": ["bfloat16"]}, shapes.SMALL) or shapes.cases(op, {}, {}))[0]


def call_of(case: Case) -> Call:
    """A call on CPU tensors with the case's shapes. They are uninitialised, because nothing reads them."""
    return ours(case.op)(*(_memory(arg) if isinstance(arg, TensorArg) else arg for arg in case.described))


def _memory(arg: TensorArg) -> torch.Tensor:
    return torch.empty_strided(arg.shape, arg.strides, dtype=getattr(torch, arg.dtype.name))


def num_pairs(op: Op) -> int:
    """The number of tensor pairs that must not overlap, because at least one of the two is written."""
    return sum(p.written or q.written for p, q in combinations(op.tensors, 2))


def measure_hits(ops: Sequence[Op], batches: int) -> list[dict[str, Any]]:
    """A row for each op: its tensors and launches, and nanoseconds per call, with the same tensors and with others.

    Batches of all ops alternate, so that a slow phase of the machine affects all ops equally.
    """
    cases = [case_of(op) for op in ops]
    calls = [(call_of(case), call_of(case)) for case in cases]
    same: list[list[float]] = [[] for _ in cases]
    others: list[list[float]] = [[] for _ in cases]
    for _ in range(batches):
        for (first, second), same_times, other_times in zip(calls, same, others, strict=True):
            same_times.append(_ns_per_call(first, first))
            other_times.append(_ns_per_call(first, second))
    return [_row(*measured) for measured in zip(cases, same, others, strict=True)]


def _ns_per_call(first: Call, second: Call) -> float:
    """Nanoseconds per call; the two calls alternate."""
    for _ in repeat(None, _WARM):
        first()
        second()
    start = time.thread_time_ns()
    for _ in repeat(None, _CALLS // 2):
        first()
        second()
    return (time.thread_time_ns() - start) / (_CALLS // 2 * 2)


def _row(case: Case, same: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    counts = {"tensors": len(case.op.tensors), "pairs": num_pairs(case.op)}
    counts["launches"] = len(case.op.launches(*case.described))
    times: dict[str, int] = {}
    for name, (median, low, _) in (("ns", spread(same)), ("other_ns", spread(others))):
        times |= {name: round(median), f"lowest_{name}": round(low)}
    return {**case.labels, **counts, **times}


def measure_misses(op: Op) -> dict[str, Any]:
    """A row: microseconds of the op's first calls with 99 new token counts, and the number of kernels they load."""
    case = case_of(op)
    calls = [call_of(Case(op, {**case.axes, "num_tokens": n})) for n in NEW_SIZES]
    times, loaded = misses_us(op, calls, time.thread_time_ns, lambda: None)
    median, low, _ = spread(times)
    return {**case.labels, "tensors": len(op.tensors), "us": median, "lowest_us": low, "loaded": loaded}


def measure(ops: Sequence[Op], batches: int) -> dict[str, Any]:
    """The complete result, as `render` takes it."""
    with fake_driver(), torch.no_grad():
        misses = [measure_misses(op) for op in ops if op.name in MISSES]
        hits = measure_hits(ops, batches)
    method = (
        f"CPU time of one thread. ns per call: median and lowest of {batches} batches of {_CALLS} calls on torch "
        f"tensors, the loop's own step included. us per miss: median and lowest of {len(NEW_SIZES) - 1}. Neither holds "
        "the driver's launch, the look-up of the stream, or a compile."
    )
    return {"environment": environment(), "method": method, "hits": hits, "misses": misses}


def environment() -> str:
    """The CPU and versions of libraries, as text."""
    machine = platform.machine().replace("_", "-")
    python = ".".join(platform.python_version_tuple()[:2])
    torch_version = ".".join(torch.__version__.split(".")[:2])
    return f"{machine}, {os.cpu_count()} cores, Python {python}, torch {torch_version}"


def render(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    hits = [
        [row["op"], *(str(row[key]) for key in ("tensors", "pairs", "launches", *_TIMES))] for row in result["hits"]
    ]
    misses = [
        [row["op"], str(row["tensors"]), f"{row['us']:.1f}", f"{row['lowest_us']:.1f}", str(row["loaded"])]
        for row in result["misses"]
    ]
    lines = ["# Host time without a GPU", "", result["environment"], "", result["method"], "", "## Plan hit", ""]
    lines += ["Pairs: pairs of tensors that may not overlap, because at least one of the two is written.", ""]
    lines += ["Other tensors: two sets of tensors in turn, so that no call finds the addresses of the call before.", ""]
    headers = ["op", "tensors", "pairs", "launches", "same tensors, ns", "lowest", "other tensors, ns", "lowest"]
    lines += [report.table(headers, hits), ""]
    if misses:
        lines += ["## Plan miss", "", "Loaded: kernels that the timed calls were the first to need.", ""]
        lines += [report.table(["op", "tensors", "us per miss", "lowest", "loaded"], misses), ""]
    return "\n".join(lines)


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write the result and its tables."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables for the ops that the command line names, or for all."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="every op unless given")
    parser.add_argument("--batches", type=int, default=21, help="batches per op (default 21)")
    parser.add_argument("--save", action="store_true", help="write cpu-host.json and .md to benchmarks/results")
    options = parser.parse_args(arguments)
    if unknown := set(options.ops) - set(pyops.registry):
        parser.error(f"no op is called {', '.join(sorted(unknown))}")
    if options.save and options.ops:
        parser.error("--save: the table has every op")
    result = measure([pyops.registry[name] for name in options.ops or pyops.registry], options.batches)
    print(render(result))
    if options.save:
        save(result, RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
