"""Fit the cost model of a family of GEMMs to this device: ``pyops/tuning/<family>.json``.

python -m benchmarks.fit gemm --minutes 4 --out times.json
python -m benchmarks.fit gemm --times times.json --save
python -m benchmarks.fit packed --minutes 8 --save

Times candidates of GEMMs that `benchmarks.models` draws, fits the rates of the family by coordinate descent on the
logarithms of the times, and prints the errors: how far the model is from the times, and how far the config that it
chooses is from the best one that was timed, on rows that the fit has not seen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

import pyops
from pyops import SCALAR_TYPES, compile_ahead, tuning
from pyops._core.launch.kernel import Launch
from pyops._core.system.device import Device
from pyops._core.tensors import dtypes
from pyops._core.tensors.dtypes import DType
from pyops.ops._shared.scalar_type import ScalarType
from pyops.ops.linear import (
    gemm_engines,
    gemm_plan,
    gemm_rates,
    grouped_engines,
    grouped_rates,
    packed_engines,
    packed_plan,
    packed_rates,
    wq_grouped_engines,
)
from pyops.ops.linear.gemm_shape import GemmShape
from pyops.ops.linear.grouped_shape import GroupedShape
from pyops.ops.linear.packed_shape import PackedShape
from pyops.ops.linear.wq_grouped_problem import WqGroupedShape
from pyops.tuning import engines

from . import expert_layers, gemm_layers, products, tune
from .expert_layers import QUANTIZED
from .timing import QUICK, gpu_us

_MOST_MULTIPLICATIONS = 2**37  # of a row: about 400 us
_MAX_SETS = 16  # sets of operands: small ones stay in the L2 cache in part
_RANDOM = 3  # candidates of a row that are drawn at random, in addition to the best by the model
_BEST = 6
_WHOLE = 0.25  # weight of the error of a whole row: candidates of one row are compared with each other only
_MAX_RATIO = 4.0  # most time of a candidate by the model, as a multiple of the best one's
_ROUNDS = 60  # most rounds of the descent
_STEPS = (2.0, 1.3, 1.1, 1.03, 1.01)  # factors by which a rate is changed
_FIRST = (1e-6, 1e-4, 1e-2, 1.0)  # values that are tried for a rate of 0, which no factor changes


@dataclass(frozen=True)
class Family:
    """GEMMs that are chosen among in one way.

    Attributes:
        name: that of the file of rates.
        rows: the module that draws its rows.
        ops: {kind of `benchmarks.models`: its op}.
        shape: the class of its shapes.
        choose: the choice.
        launches: the launches of a config for a problem.
    """

    name: str
    rows: Any
    ops: dict[str, str]
    shape: type[Any]
    choose: engines.Choice[Any, Any]
    launches: Callable[[Any, Any], list[Launch]]


FAMILIES = {
    one.name: one
    for one in (
        Family(
            gemm_rates.FAMILY,
            gemm_layers,
            {"bf16": "linear", "gated": "linear"} | dict.fromkeys(("fp8", "blocks", "int8"), "cutlass_scaled_mm"),
            GemmShape,
            gemm_engines.choose,
            gemm_plan.launches,
        ),
        Family(
            packed_rates.FAMILY,
            gemm_layers,
            {
                "w4": "marlin_gemm",
                "awq": "awq_gemm",
                "gptq": "gptq_gemm",
                "w8": "marlin_gemm",
                "w4a8": "cutlass_w4a8_mm",
                "w4a8half": "cutlass_w4a8_mm",
                "sparse": "gptq_marlin_24_gemm",
            },
            PackedShape,
            packed_engines.choose,
            packed_plan.launches,
        ),
        Family(
            grouped_rates.FAMILY,
            expert_layers,
            dict.fromkeys(("grouped", "grouped_fp8", "grouped_blocks"), "grouped_gemm"),
            GroupedShape,
            grouped_engines.choose,
            lambda problem, config: [config.launch(problem)],
        ),
        Family(
            wq_grouped_engines.FAMILY,
            expert_layers,
            dict.fromkeys(QUANTIZED, "grouped_gemm_packed"),
            WqGroupedShape,
            wq_grouped_engines.choose,
            lambda problem, config: config.launches(problem),
        ),
    )
}


@dataclass(frozen=True)
class Sample:
    """A config of a row and its time."""

    row: str
    engine: str
    config: str  # as it prints
    us: float
    shape: Any


def sample(family: Family, row: Any, generator: random.Random) -> list[Sample]:
    """Times of some candidates of a row: the best of each engine by the model, the next of all, a few at random."""
    sets = [family.rows.operands(row) for _ in range(min(_MAX_SETS, products.num_sets(family.rows.num_bytes(row))))]
    op, choose = pyops.registry[family.ops[row.kind]], family.choose
    calls = [family.rows.contenders(row.kind)["pyops"](*one) for one in sets]
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
    launches = [launch for one in chosen for launch in family.launches(problem, one.config)]
    compile_ahead.load([(op, launch.specialisation) for launch in launches], device.index)
    found = []
    for one in chosen:
        op.forget()
        with tuning.forced(op.name, one.config):
            us = gpu_us(calls, QUICK).median
        found.append(Sample(str(row), one.engine, repr(one.config), us, shape))
    op.forget()
    return found


def collect(family: Family, minutes: float, seed: int) -> list[Sample]:
    """Samples of rows of every kind in turn, until the time is over."""
    generator, end = random.Random(seed), time.monotonic() + 60 * minutes
    drawn = [family.rows.draw(kind, 200, seed) for kind in family.ops]
    found: list[Sample] = []
    for row in (row for rows in zip(*drawn, strict=True) for row in rows):
        if time.monotonic() > end:
            break
        if row.m * row.n * row.k <= _MOST_MULTIPLICATIONS:
            new = sample(family, row, generator)
            best = min((one.us for one in new), default=0.0)
            print(f"{row}: {len(new)} candidates, the best takes {best:.1f} us", flush=True)
            found += new
            torch.cuda.empty_cache()
    return found


Model = Callable[[Any], float]  # from rates to the microseconds of a sample


def model(family: Family, one: Sample, device: Device) -> Model:
    """The model of a sample. Its Config is among the `_proposed`."""
    engine = _engine(family, one)
    return partial(engine.time_us, _proposed(engine, one, device), one.shape, device)


def _engine(family: Family, one: Sample) -> engines.Engine[Any, Any]:
    return next(engine for engine in family.choose.engines if engine.name == one.engine)


def _proposed(engine: engines.Engine[Any, Any], one: Sample, device: Device) -> Any:
    """The Config of a sample, or None if the engine no longer has it, as where it contains the choice of a family."""
    return next((config for config in engine.configs(one.shape, device) if repr(config) == one.config), None)


def error(rates: Any, samples: Sequence[Sample], times: Sequence[Model]) -> float:
    """Mean of the squared logarithms of the model's time over the measured one: all of it, and what of it differs
    within a row, where it decides. Configs that are far from the best of their row count less."""
    rows: dict[str, list[tuple[Sample, Model]]] = {}
    for one, us in zip(samples, times, strict=True):
        rows.setdefault(one.row, []).append((one, us))
    total = weights = 0.0
    for row in rows.values():
        best = min(one.us for one, _ in row)
        weight = [(best / one.us) ** 2 for one, _ in row]
        logs = [math.log(us(rates) / one.us) for one, us in row]
        mean = sum(w * log for w, log in zip(weight, logs, strict=True)) / sum(weight)
        total += sum(w * ((log - mean) ** 2 + _WHOLE * log**2) for w, log in zip(weight, logs, strict=True))
        weights += sum(weight)
    return total / weights


def fit(family: Family, rates: Any, samples: Sequence[Sample], device: Device, only: Sequence[str] = ()) -> Any:
    """The rates with the least error: each rate in turn is multiplied or divided while that helps. `only` names the
    rates that may change; without names all may."""
    times = [model(family, one, device) for one in samples]
    least = error(rates, samples, times)
    for step in _STEPS:
        for _ in range(_ROUNDS):
            before = least
            for one in fields(rates):
                if only and one.name not in only:
                    continue
                for value in _beside(getattr(rates, one.name), step):
                    other = replace(rates, **{one.name: value})
                    now = error(other, samples, times)
                    if now < least:
                        rates, least = other, now
            if before - least < 1e-6:
                break
    return rates


def _beside(value: float, step: float) -> Iterator[float]:
    """Values next to that of a rate."""
    yield from (value * step, value / step) if value else _FIRST


def errors(family: Family, rates: Any, samples: Sequence[Sample], device: Device) -> dict[str, float]:
    """How far the times are off, and what the choice loses."""
    predicted = [model(family, one, device)(rates) for one in samples]
    off = sorted(abs(math.log(us / one.us)) for us, one in zip(predicted, samples, strict=True))
    rows: dict[str, list[tuple[float, float]]] = {}
    for us, one in zip(predicted, samples, strict=True):
        rows.setdefault(one.row, []).append((us, one.us))
    lost = [min(row)[1] / min(us for _, us in row) - 1 for row in rows.values()]
    return {
        "rows": len(lost),
        "median error of a time": round(off[len(off) // 2], 4),
        "error of 95 % of times": round(off[len(off) * 95 // 100], 4),
        "mean loss of the choice": round(statistics.fmean(lost), 4),
        "share of choices within 3 %": round(sum(one <= 0.03 for one in lost) / len(lost), 3),
        "largest loss": round(max(lost), 3),
    }


def as_json(value: Any) -> Any:
    """A sample or a shape as JSON holds it."""
    if isinstance(value, (DType, ScalarType)):
        return str(value)
    return {one.name: as_json(getattr(value, one.name)) for one in fields(value)} if is_dataclass(value) else value


def from_json(kind: Any, value: Any) -> Any:
    """What `as_json` has written of an instance of this class."""
    if kind is DType or DType in get_args(kind):
        return None if value is None else getattr(dtypes, value)
    if kind is ScalarType:
        return SCALAR_TYPES[value]
    if not is_dataclass(kind):
        return value
    hints = get_type_hints(kind)
    return kind(**{name: from_json(hints[name], one) for name, one in value.items()})  # type: ignore[operator]


def samples_of(family: Family, times: Path) -> list[Sample]:
    """The samples that --out has written."""
    values = json.loads(times.read_text())
    return [Sample(**one | {"shape": from_json(family.shape, one["shape"])}) for one in values]


def halves(family: Family, samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Samples of every other row of a kind: to fit, and to check."""
    rows = list(dict.fromkeys(one.row for one in samples))
    seen = {row: i // len(family.ops) % 2 for i, row in enumerate(rows)}
    return [one for one in samples if seen[one.row] == 0], [one for one in samples if seen[one.row] == 1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--minutes", type=float, default=4, help="for the measurements")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, help="write the times to this file")
    parser.add_argument("--times", type=Path, action="append", help="fit to the times of a file, without a GPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="RATE", help="change these rates alone")
    parser.add_argument("--name", default="nvidia-h200", help="with --times: the device that the times are of")
    parser.add_argument("--save", action="store_true", help="write the file of rates")
    asked = parser.parse_args(arguments)
    family = FAMILIES[asked.family]
    if asked.times:
        device, name = pyops._core.system.device.host(), asked.name
        known = [one for path in asked.times for one in samples_of(family, path)]
        samples = [one for one in known if _proposed(_engine(family, one), one, device) is not None]
        print(f"{len(known) - len(samples)} of {len(known)} times are of configs that are no longer candidates")
    else:
        samples = collect(family, asked.minutes, asked.seed)
        device = pyops._core.system.device.get(torch.cuda.current_device())
        name = device.name
    if asked.save and not name:
        parser.error("--save: with PYOPS_ARCH the times are of no GPU of that architecture")
    if asked.out:
        asked.out.write_text(json.dumps([as_json(one) for one in samples]) + "\n")
    first, second = halves(family, samples)
    start = family.choose.rates_of(device)
    print("as it is", errors(family, start, second, device))
    if unknown := set(asked.only) - {one.name for one in fields(start)}:
        parser.error(f"--only: no rates of {asked.family}: {', '.join(sorted(unknown))}")
    of_half = fit(family, start, first, device, asked.only)
    print("fitted to half of the rows, on the others", errors(family, of_half, second, device))
    rates = fit(family, start, samples, device, asked.only)
    found: dict[str, Any] = errors(family, rates, samples, device)
    print("fitted to all rows", found)
    if asked.only:
        found["only"] = asked.only
    for one, value in zip(fields(rates), astuple(rates), strict=True):
        print(f"  {one.name} {value:.5g}")
    if asked.save:
        path = engines.table(family.name)
        tables = json.loads(path.read_text())
        rounded = {key: float(f"{value:.4g}") for key, value in asdict(rates).items()}
        tables[name] = {"rates": rounded, "errors": found}
        path.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
