"""Calls of published models with sizes drawn by a seed, next to every rival in one run: shapes nobody has tuned for.

python -m benchmarks.models
python -m benchmarks.models --seed 7 --rows 40 bf16 bias gated fp8 blocks int8 w4
python -m benchmarks.models decode prefill mla scans rows sampling

Words are kinds, or groups of kinds: GEMMs (`benchmarks.gemm_layers`), layers of experts (`benchmarks.expert_layers`),
attention (`benchmarks.attention_batches`), scans and convolutions (`benchmarks.scan_layers`), and norms, activations,
quantization, rotary embedding, cache writes and sampling (`benchmarks.row_layers`). The modules say what a row is.
Prints, for each kind, the geometric mean of pyops' time over the best rival's, the share of rows more than 2 % behind,
and the worst rows. Rivals that cannot be imported, or that refuse a row, are named on stderr and left out; each row
says which were timed. Without --seed each run draws its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import attention_batches, expert_layers, gemm_layers, row_layers, scan_layers
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


def module(kind: str) -> Any:
    """The module that draws and measures rows of a kind: of `KINDS`, a grouped GEMM, or of `benchmarks.products`."""
    return KINDS.get(kind, expert_layers if kind in expert_layers.PRODUCTS else gemm_layers)


def ratio(times: dict[str, float]) -> float:
    """pyops' time over the best rival's."""
    return times["pyops"] / min(us for name, us in times.items() if name != "pyops")


def report(timed: Mapping[Row, dict[str, float]]) -> str:
    """A line for each kind, and the worst rows of all."""
    lines = []
    for kind in dict.fromkeys(row.kind for row in timed):
        ratios = [ratio(times) for row, times in timed.items() if row.kind == kind]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        behind = sum(one > _BEHIND for one in ratios)
        lines.append([kind, str(len(ratios)), f"{mean:.3f}", f"{behind}", f"{max(ratios):.2f}"])
    worst = sorted(timed.items(), key=lambda one: -ratio(one[1]))[:_WORST]
    rows = [
        [str(row), row.layer, *(f"{name} {us:.1f}" for name, us in times.items()), f"{ratio(times):.2f}"]
        for row, times in worst
    ]
    width = max(map(len, rows))
    rows = [[*row[:-1], *[""] * (width - len(row)), row[-1]] for row in rows]
    heads = ["kind", "rows", "geometric mean of ours / best rival", "rows behind by more than 2 %", "worst"]
    return table(heads, lines) + "\n\n" + table(["row", "layer", *["us"] * (width - 3), "ratio"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").splitlines()[0])
    words = f"any of {', '.join((*KINDS, *GROUPS))}, or a kind of products"
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=words)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--rows", type=int, default=24, help="rows of each kind")
    parser.add_argument("--out", type=Path, help="write every time to this file as JSON")
    asked = parser.parse_args(arguments)
    print(f"seed {asked.seed}", flush=True)
    timed: dict[Row, dict[str, float]] = {}
    for kind in (kind for word in asked.kinds for kind in GROUPS.get(word, (word,))):
        for row in module(kind).draw(kind, asked.rows, asked.seed):
            times = module(kind).measure(row)
            if len(times) > 1 and "pyops" in times:
                timed[row] = times
            print(f"{row} ({row.layer}): " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()), flush=True)
            torch.cuda.empty_cache()
    print(report(timed))
    if asked.out:
        rows = [{"row": str(row), "layer": row.layer, "us": times} for row, times in timed.items()]
        asked.out.write_text(json.dumps({"seed": asked.seed, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
