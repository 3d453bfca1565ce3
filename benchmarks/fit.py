"""Fit the cost model of dense GEMMs to this device: ``pyops/tuning/gemm.json``.

python -m benchmarks.fit --minutes 4 --out times.json
python -m benchmarks.fit --times times.json --save

Times candidates of GEMMs that `benchmarks.models` draws, fits the rates of `GemmRates` by coordinate
descent on the logarithms of the times, and prints the errors: how far the model is from the times, and how far the
config that it chooses is from the best one that was timed, on rows that the fit has not seen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import pyops
from pyops import compile_ahead, tuning
from pyops._core.system.device import Device
from pyops._core.tensors import dtypes
from pyops.ops.linear.gemm_engines import choose
from pyops.ops.linear.gemm_rates import FAMILY, GemmRates
from pyops.ops.linear.gemm_shape import GemmShape
from pyops.tuning import engines

from . import models, products, tune
from .timing import QUICK, gpu_us

KINDS = "bf16", "gated", "fp8", "blocks", "int8"
_MOST_MULTIPLICATIONS = 2**37  # of a row: about 400 us
_MAX_SETS = 16  # sets of operands: small ones stay in the L2 cache in part
_RANDOM = 3  # candidates of a row that are drawn at random, in addition to the best by the model
_BEST = 6
_WHOLE = 0.25  # weight of the error of a whole row: candidates of one row are compared with each other only
_MAX_RATIO = 4.0  # most time of a candidate by the model, as a multiple of the best one's
_ROUNDS = 60  # most rounds of the descent
_STEPS = (2.0, 1.3, 1.1, 1.03, 1.01)  # factors by which a rate is changed
_ENGINES = {engine.name: engine for engine in choose.engines}


@dataclass(frozen=True)
class Sample:
    """A config of a row and its time."""

    row: str
    engine: str
    config: str  # as it prints
    us: float
    shape: GemmShape


def sample(row: models.Row, generator: random.Random) -> list[Sample]:
    """Times of some candidates of a row: the best of each engine by the model, the next of all, a few at random."""
    sets = [models.operands(row) for _ in range(min(_MAX_SETS, products.num_sets(models.num_bytes(row))))]
    op = pyops.registry["linear" if row.kind in ("bf16", "gated") else "cutlass_scaled_mm"]
    calls = [models.contenders(row.kind)["pyops"](*one) for one in sets]
    with tune.choices(tuning, op.name) as seen:
        op.forget()
        calls[0]()
    problem, device = seen[-1].problem, seen[-1].device
    shape = choose.shape_of(problem)
    known = sorted(choose.candidates(shape, device), key=lambda one: one.us)
    first = list({one.engine: one for one in reversed(known)}.values())
    rest = [one for one in known[_BEST:] if one not in first]
    chosen = list(dict.fromkeys(first + known[:_BEST] + generator.sample(rest, min(_RANDOM, len(rest)))))
    chosen = [one for one in chosen if one.us < _MAX_RATIO * known[0].us]
    compile_ahead.load([(op, one.config.launch(problem).specialisation) for one in chosen], device.index)
    found = []
    for one in chosen:
        op.forget()
        with tuning.forced(op.name, one.config):
            us = gpu_us(calls, QUICK).median
        found.append(Sample(str(row), one.engine, repr(one.config), us, shape))
    op.forget()
    return found


def collect(minutes: float, seed: int) -> list[Sample]:
    """Samples of rows of every kind in turn, until the time is over."""
    generator, end = random.Random(seed), time.monotonic() + 60 * minutes
    drawn = [models.draw(kind, 200, seed) for kind in KINDS]
    found: list[Sample] = []
    for row in (row for rows in zip(*drawn, strict=True) for row in rows):
        if time.monotonic() > end:
            break
        if row.m * row.n * row.k <= _MOST_MULTIPLICATIONS:
            new = sample(row, generator)
            best = min((one.us for one in new), default=0.0)
            print(f"{row}: {len(new)} candidates, the best takes {best:.1f} us", flush=True)
            found += new
            torch.cuda.empty_cache()
    return found


def predicted(rates: GemmRates, one: Sample, device: Device) -> float:
    """Microseconds of a sample by the model."""
    return _ENGINES[one.engine].time_us(_config(one.shape, one.engine, one.config, device), one.shape, device, rates)


@cache
def _config(shape: GemmShape, engine: str, config: str, device: Device) -> Any:
    """The Config of a sample. It is among those of the engine for the shape."""
    return next(one for one in _ENGINES[engine].configs(shape, device) if repr(one) == config)


def error(rates: GemmRates, samples: Sequence[Sample], device: Device) -> float:
    """Mean of the squared logarithms of the model's time over the measured one: all of it, and what of it differs
    within a row, where it decides. Configs that are far from the best of their row count less."""
    rows: dict[str, list[Sample]] = {}
    for one in samples:
        rows.setdefault(one.row, []).append(one)
    total = weights = 0.0
    for row in rows.values():
        best = min(one.us for one in row)
        weight = [(best / one.us) ** 2 for one in row]
        logs = [math.log(predicted(rates, one, device) / one.us) for one in row]
        mean = sum(w * log for w, log in zip(weight, logs, strict=True)) / sum(weight)
        total += sum(w * ((log - mean) ** 2 + _WHOLE * log**2) for w, log in zip(weight, logs, strict=True))
        weights += sum(weight)
    return total / weights


def fit(rates: GemmRates, samples: Sequence[Sample], device: Device) -> GemmRates:
    """The rates with the least error: each rate in turn is multiplied or divided while that helps."""
    least = error(rates, samples, device)
    for step in _STEPS:
        for _ in range(_ROUNDS):
            before = least
            for one in fields(rates):
                for factor in (step, 1 / step):
                    other = replace(rates, **{one.name: getattr(rates, one.name) * factor})
                    now = error(other, samples, device)
                    if now < least:
                        rates, least = other, now
            if before - least < 1e-6:
                break
    return rates


def errors(rates: GemmRates, samples: Sequence[Sample], device: Device) -> dict[str, float]:
    """How far the times are off, and what the choice loses."""
    off = sorted(abs(math.log(predicted(rates, one, device) / one.us)) for one in samples)
    lost = []
    for row in dict.fromkeys(one.row for one in samples):
        timed = [one for one in samples if one.row == row]
        chosen = min(timed, key=lambda one: predicted(rates, one, device))
        lost.append(chosen.us / min(one.us for one in timed) - 1)
    return {
        "rows": len(lost),
        "median error of a time": round(off[len(off) // 2], 4),
        "error of 95 % of times": round(off[len(off) * 95 // 100], 4),
        "mean loss of the choice": round(statistics.fmean(lost), 4),
        "share of choices within 3 %": round(sum(one <= 0.03 for one in lost) / len(lost), 3),
        "largest loss": round(max(lost), 3),
    }


def as_json(one: Sample) -> dict[str, Any]:
    names = {"dtype": one.shape.dtype.name, "out_dtype": one.shape.out_dtype.name}
    return {**asdict(one), "shape": asdict(one.shape) | names}


def shape_of(values: dict[str, Any]) -> GemmShape:
    """The shape that `as_json` has written."""
    kinds = {name: getattr(dtypes, values[name]) for name in ("dtype", "out_dtype")}
    return GemmShape(**values | kinds)


def halves(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Samples of every other row of a kind: to fit, and to check."""
    rows = list(dict.fromkeys(one.row for one in samples))
    seen = {row: i // len(KINDS) % 2 for i, row in enumerate(rows)}
    return [one for one in samples if seen[one.row] == 0], [one for one in samples if seen[one.row] == 1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4, help="for the measurements")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, help="write the times to this file")
    parser.add_argument("--times", type=Path, action="append", help="fit to the times of a file, without a GPU")
    parser.add_argument("--name", default="nvidia-h200", help="with --times: the device that the times are of")
    parser.add_argument("--save", action="store_true", help=f"write {engines.table(FAMILY)}")
    asked = parser.parse_args(arguments)
    if asked.times:
        values = [one for path in asked.times for one in json.loads(path.read_text())]
        samples = [replace(Sample(**one), shape=shape_of(one["shape"])) for one in values]
        device, name = pyops._core.system.device.model("sm_90"), asked.name
    else:
        samples, device = collect(asked.minutes, asked.seed), pyops._core.system.device.get(torch.cuda.current_device())
        name = device.name
    if asked.out:
        asked.out.write_text(json.dumps([as_json(one) for one in samples]) + "\n")
    first, second = halves(samples)
    start = choose.rates_of(device)
    print("as it is", errors(start, second, device))
    print("fitted to half of the rows, on the others", errors(fit(start, first, device), second, device))
    rates = fit(start, samples, device)
    found = errors(rates, samples, device)
    print("fitted to all rows", found)
    for one, value in zip(fields(rates), astuple(rates), strict=True):
        print(f"  {one.name} {value:.5g}")
    if asked.save:
        path = engines.table(FAMILY)
        known = json.loads(path.read_text())
        rounded = {key: float(f"{value:.4g}") for key, value in asdict(rates).items()}
        known[name] = {"rates": rounded, "errors": found}
        path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
