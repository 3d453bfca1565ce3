"""Calls of published models with sizes drawn by a seed, next to every rival in one run: shapes nobody has tuned for.

python -m benchmarks.models
python -m benchmarks.models --seed 7 --rows 40 bf16 bias gated fp8 blocks int8 w4
python -m benchmarks.models decode prefill mla scans rows sampling
python -m benchmarks.models attention scans rows --minutes 5 --without compile

Words are kinds, or groups of kinds: GEMMs (`benchmarks.gemm_layers`), layers of experts (`benchmarks.expert_layers`),
attention (`benchmarks.attention_batches`), scans and convolutions (`benchmarks.scan_layers`), and norms, activations,
quantization, rotary embedding, cache writes and sampling (`benchmarks.row_layers`). The modules say what a row is.
Prints, for each kind, the geometric mean of pyops' time over the best rival's and over each rival's, the rows more than
2 % behind, and the worst rows. Rivals that cannot be imported, that fail, or that refuse a row, are named on stderr and
left out; each row says which were timed. Without --seed each run draws its own. Kinds alternate, so that a run which
ends after --minutes has rows of each. Rows are measured in a process of their own: a kernel that faults, or a rival
that crashes or hangs, costs its row. A rival that takes half of the time of --hang for its first call, such as one that
tunes itself, is left out of the row.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

from . import attention_batches, expert_layers, gemm_layers, installed, row_layers, scan_layers
from .drawn import Row
from .report import table

_MODULES: tuple[Any, ...] = gemm_layers, expert_layers, attention_batches, scan_layers, row_layers
KINDS = {kind: module for module in _MODULES for kind in module.KINDS}
GROUPS = {
    "gemm": gemm_layers.KINDS,
    "attention": attention_batches.KINDS,
    "scans": scan_layers.KINDS,
    "rows": row_layers.KINDS,
}
_BEHIND = 1.02  # a row is behind above this ratio
_WORST = 10
# Seconds after which a row counts as hanging. Most rivals compile within a minute; FLA's scans take several on a fresh
# machine, and need --hang.
_HUNG_S = 120.0
# The part of that time after which the first call of a rival is given up, and the row goes on without the rival.
_PATIENCE = 1 / 2


def module(kind: str) -> Any:
    """The module that draws and measures rows of a kind: of `KINDS`, a grouped GEMM, or of `benchmarks.products`."""
    return KINDS.get(kind, expert_layers if kind in expert_layers.PRODUCTS else gemm_layers)


def ratio(times: dict[str, float]) -> float:
    """pyops' time over the best rival's."""
    return times["pyops"] / min(us for name, us in times.items() if name != "pyops")


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _summary(ratios: Sequence[float]) -> list[str]:
    behind = sum(one > _BEHIND for one in ratios)
    return [str(len(ratios)), f"{_mean(ratios):.3f}", f"{behind}", f"{max(ratios):.2f}"]


def report(timed: Mapping[Row, dict[str, float]]) -> str:
    """A line for each kind, one for each of its rivals, and the worst rows of all."""
    if not timed:
        return "no row was timed with a rival"
    kinds, each = [], []
    for kind in dict.fromkeys(row.kind for row in timed):
        of_kind = [times for row, times in timed.items() if row.kind == kind]
        kinds.append([kind, *_summary([ratio(times) for times in of_kind])])
        for rival in dict.fromkeys(name for times in of_kind for name in times if name != "pyops"):
            ratios = [times["pyops"] / times[rival] for times in of_kind if rival in times]
            each.append([kind, rival, *_summary(ratios)])
    worst = sorted(timed.items(), key=lambda one: -ratio(one[1]))[:_WORST]
    rows = [
        [str(row), row.layer, *(f"{name} {us:.1f}" for name, us in times.items()), f"{ratio(times):.2f}"]
        for row, times in worst
    ]
    width = max(map(len, rows))
    rows = [[*row[:-1], *[""] * (width - len(row)), row[-1]] for row in rows]
    ends = "rows behind by more than 2 %", "worst"
    return "\n\n".join(
        (
            table(["kind", "rows", "geometric mean of ours / best rival", *ends], kinds),
            table(["kind", "rival", "rows", "geometric mean of ours / rival", *ends], each),
            table(["row", "layer", *["us"] * (width - 3), "ratio"], rows),
        )
    )


def in_rounds(kinds: Collection[str], count: int, seed: int) -> Iterator[Row]:
    """The rows of these kinds, one of each kind after the other."""
    drawn = [module(kind).draw(kind, count, seed) for kind in kinds]
    return (row for row in chain.from_iterable(zip_longest(*drawn)) if row is not None)


def _start(without: Collection[str], patience_s: float) -> None:
    """In a measuring process, before its first row."""
    torch.set_grad_enabled(False)
    installed.left_out.update(without)
    installed.patience_s = patience_s


def _measure(row: Row) -> tuple[dict[str, float], str | None]:
    """({contender: microseconds}, the rival after which this process cannot use the GPU, "" if unknown, or None)."""
    found: dict[str, float] = {}
    try:
        found = module(row.kind).measure(row)
    except installed.Fault as fault:
        return {}, str(fault)
    except Exception as error:
        print(f"{row}: {installed.reason(error)}", file=sys.stderr, flush=True)
    try:
        installed.check_gpu("")
        torch.cuda.empty_cache()
    except installed.Fault as fault:
        print(f"{row}: {installed.reason(fault)}", file=sys.stderr, flush=True)
        return {}, str(fault)
    return found, None


def measured(
    rows: Iterable[Row],
    minutes: float,
    without: Collection[str],
    start: Callable[[Collection[str]], Executor],
    hang_s: float = _HUNG_S,
) -> Iterator[tuple[Row, dict[str, float]]]:
    """(row, {contender: microseconds}) until the minutes are over. `start` makes a process that leaves rivals out.

    A row that ends its process, or that hangs, has no times; the next row gets a new process, without the rivals that
    ended two.
    """
    end, pool, faults = time.monotonic() + 60 * minutes, None, Counter[str]()
    for row in rows:
        if time.monotonic() >= end:
            break
        pool = pool or start([*without, *(name for name, count in faults.items() if name and count > 1)])
        try:
            times, faulty = pool.submit(_measure, row).result(hang_s)
        except Exception as error:
            print(f"{row}: {installed.reason(error)}", file=sys.stderr, flush=True)
            times, faulty = {}, ""
        if faulty is not None:
            faults[faulty] += 1
            _end(pool)
            pool = None
        yield row, times
    if pool:
        pool.shutdown()


def _end(pool: Executor) -> None:
    """End a process that may hang."""
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.kill()
    pool.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").splitlines()[0])
    words = f"any of {', '.join((*KINDS, *GROUPS))}, or a kind of products"
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=words)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--rows", type=int, default=24, help="most rows of each kind")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row after this time")
    parser.add_argument("--without", action="append", default=[], metavar="RIVAL", help="leave out, such as compile")
    parser.add_argument("--hang", type=float, default=_HUNG_S, metavar="SECONDS", help="give a row up after this time")
    parser.add_argument("--out", type=Path, help="write every time to this file as JSON")
    asked = parser.parse_args(arguments)
    print(f"seed {asked.seed}", flush=True)
    kinds = dict.fromkeys(kind for word in asked.kinds for kind in GROUPS.get(word, (word,)))
    timed: dict[Row, dict[str, float]] = {}
    spawn = multiprocessing.get_context("spawn")

    def start(without: Collection[str]) -> Executor:
        return ProcessPoolExecutor(1, spawn, _start, (without, _PATIENCE * asked.hang))

    drawn = in_rounds(kinds, asked.rows, asked.seed)
    for row, times in measured(drawn, asked.minutes, asked.without, start, asked.hang):
        if len(times) > 1 and "pyops" in times:
            timed[row] = times
        print(f"{row} ({row.layer}): " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()), flush=True)
    print(report(timed))
    if asked.out:
        rows = [{"row": str(row), "layer": row.layer, "us": times} for row, times in timed.items()]
        asked.out.write_text(json.dumps({"seed": asked.seed, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
