"""Time ops and their rivals.

python -m benchmarks rms_norm silu_and_mul --dtype bf16 --against torch,vllm,flashinfer
python -m benchmarks rms_norm num_tokens=1,64 hidden_size=5120
python -m benchmarks --all --gpu --host --numerics --save
python -m benchmarks --render benchmarks/results/nvidia-h200
python -m benchmarks tune --help
python -m benchmarks --readme benchmarks/results/nvidia-h200
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pyops
from pyops import axes
from pyops._core.op.op import Op

from . import compile_time, kernel_time, numerics, overhead, readme, report, shapes, timing, tune
from .installed import libraries, reason
from .rivals import RIVALS
from .shapes import Case
from .timing import Spread

RESULTS = Path(__file__).parent / "results"
MEASURES = ("gpu", "host", "numerics", "compile")
Measure = Callable[[Case], tuple[dict[str, Any], list[dict[str, str]]]]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("words", nargs="*", metavar="OP|AXIS=VALUE,...", help="ops, and values for axes of their examples")
    add("--all", action="store_true", help="every op")
    add("--family", action="append", default=[], help="every op of a package of pyops.registry: norm, activation, ...")
    add("--dtype", type=_split, default=["bf16"], help="bf16,fp16,fp32 (default bf16)")
    add("--against", type=_split, default=["torch", "vllm", "flashinfer"], help=f"any of {','.join(RIVALS)}")
    for name, what in zip(MEASURES, ("GPU time (default)", "host time", "error", "first call"), strict=True):
        add(f"--{name}", action="append_const", dest="measures", const=name, help=f"measure {what}")
    add("--quick", action="store_true", help="fewer replays and fewer sets of arguments")
    add("--limit", type=int, help="first calls: at most this many ops")
    add(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin no case after so long; families and measures have equal shares",
    )
    add("--save", action="store_true", help="write JSON, tables and plot")
    add("--results", type=Path, default=RESULTS, metavar="DIR", help="where --save writes (default benchmarks/results)")
    add("--render", type=Path, metavar="DIR", help="only write the tables and plots of the JSON files in DIR anew")
    add(
        "--readme",
        type=Path,
        metavar="DIR",
        help="only write the figures of the README from the JSON files in DIR anew",
    )
    return result


def _split(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def select(options: argparse.Namespace) -> tuple[dict[str, list[Op]], dict[str, Sequence[Any]]]:
    """({group: ops}, {axis: values}) from the command line. ValueError for an unknown name."""
    names = [word for word in options.words if "=" not in word]
    chosen: dict[str, Sequence[Any]] = dict(shapes.parse(word) for word in options.words if "=" in word)
    families: dict[str, list[Op]] = {}
    for op in pyops.registry.values():
        families.setdefault(shapes.family(op), []).append(op)
    _all_known("op", names, pyops.registry)
    _all_known("family", options.family, families)
    _all_known("rival", options.against, RIVALS)
    groups = families if options.all else {name: families[name] for name in options.family}
    if names:
        groups = {**groups, "+".join(names): [pyops.registry[name] for name in names]}
    if not groups:
        raise ValueError("name an op, a --family or --all")
    _all_known("axis", chosen, {axis for ops in groups.values() for op in ops for axis in axes.of(op)})
    chosen["dtype"] = [shapes.DTYPES.get(name, name) for name in options.dtype]
    for name in names:
        shapes.needed(pyops.registry[name], chosen)
    return groups, chosen


def _all_known(what: str, names: Any, known: Any) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no {what} is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")


def measure_all(name: str, cases: Sequence[Case], measure: Measure, end: float = float("inf")) -> dict[str, Any]:
    """Measure `cases`; returns their section of the result. Failures are recorded. No case starts after `end`."""
    section: dict[str, Any] = {"rows": [], "skipped": [], "failures": []}
    for case in cases:
        if time.monotonic() > end:
            section["skipped"].append({"rival": "pyops", "op": case.op.name, "reason": "no time left"})
            continue
        try:
            row, skipped = measure(case)
        except Exception as error:
            section["failures"].append({"case": str(case), "error": reason(error)})
            print(f"{name}: {case}: FAILED: {reason(error)}", file=sys.stderr, flush=True)
            continue
        section["rows"].append(row)
        section["skipped"] += skipped
        print(f"{name}: {case}: {_brief(row)}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    return section


def _brief(row: Mapping[str, Any]) -> str:
    """A row as one line of text."""
    if "times" in row:
        medians = {k: Spread(*(v["us"] if isinstance(v, dict) else v)).median for k, v in row["times"].items()}
        return ", ".join(f"{name} {median:.2f} us" for name, median in medians.items())
    if "errors" in row:
        return ", ".join(f"{name} {error:.3g}" for name, error in row["errors"].items())
    return ", ".join(f"{when} {row[when]['first_call_s'] * 1e3:.0f} ms" for when in ("cold", "disk"))


def measure_group(
    ops: Sequence[Op],
    chosen: Mapping[str, Sequence[Any]],
    options: argparse.Namespace,
    effort: timing.Effort,
    floors: Mapping[str, float],
    end: float,
) -> dict[str, Any]:
    """Measure the sections that the command line asks for. No case starts after `end` (monotonic clock)."""
    against = options.against
    wanted: dict[str, tuple[Measure, Mapping[str, Sequence[Any]]]] = {
        "gpu": (partial(kernel_time.measure, against=against, effort=effort), shapes.SWEEP),
        "host": (partial(overhead.measure, against=against, effort=effort), shapes.SMALL),
        "numerics": (partial(numerics.measure, against=against), {**shapes.SMALL, "num_tokens": (256,)}),
        "compile": (compile_time.measure, shapes.SMALL),
    }
    sections, measures = {}, options.measures or ["gpu"]
    for i, name in enumerate(measures):
        measure, sweep = wanted[name]
        some = ops[: options.limit] if name == "compile" else ops
        cases = [case for op in some for case in shapes.cases(op, chosen, sweep)]
        share = (end - time.monotonic()) / (len(measures) - i)
        section = measure_all(name, cases, measure, time.monotonic() + share)
        section["skipped"] += [
            {"rival": "pyops", "op": op.name, "reason": f"its example rules out one of {dict(chosen)}"}
            for op in some
            if not shapes.cases(op, chosen, sweep)
        ]
        sections[name] = {**floors, **section} if name == "gpu" else section
    return sections


def environment() -> dict[str, str]:
    """The GPU, the driver and versions of libraries."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    found = {"gpu": torch.cuda.get_device_name(), "driver": driver, "python": platform.python_version()}
    found["pyops"] = pyops.__version__
    # vLLM's shared objects may come from an unpacked wheel that is not installed.
    unpacked = [str(Path(library).parent.parent) for library in libraries().split(os.pathsep) if library]
    for package in ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "vllm", "flashinfer-python"):
        for distribution in importlib.metadata.distributions(name=package, path=[*sys.path, *unpacked]):
            found.setdefault(package, distribution.version)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["tune"]:
        return tune.main(words[1:])
    options = parser().parse_args(words)
    if options.render:
        for path in sorted(options.render.glob("*.json")):
            if path.stem != "engine":  # python -m benchmarks.engine --render
                report.render_file(path)
    if options.readme:
        readme.update(options.readme)
    if options.render or options.readme:
        return 0
    try:
        groups, chosen = select(options)
    except ValueError as error:
        parser().error(str(error))
    if not torch.cuda.is_available():
        print("python -m benchmarks measures on a GPU, and torch sees none", file=sys.stderr)
        return 2
    started, where = time.monotonic(), environment()
    folder = options.results / re.sub(r"[^a-z0-9]+", "-", where["gpu"].lower()).strip("-")
    effort = timing.QUICK if options.quick else timing.FULL
    floors = {"streaming_gbs": timing.streaming_gbs(effort), "launch_floor_us": timing.launch_floor_us(effort)}
    failed, deadline = False, started + 60 * options.minutes
    for i, (name, ops) in enumerate(groups.items()):
        share = (deadline - time.monotonic()) / (len(groups) - i)
        sections = measure_group(ops, chosen, options, effort, floors, time.monotonic() + share)
        result = {"environment": where, "method": effort.method, **sections}
        print(report.render(result), flush=True)
        failed |= any(section["failures"] for key, section in result.items() if key in MEASURES)
        if options.save:
            report.save(result, folder / f"{name}.json")
    return int(failed)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
