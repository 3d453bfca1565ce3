"""Results of the engine benchmark as Markdown tables.

A result is ``{"environment": {...}, "models": {model: {"words", "runs": {run: {"ready", "rows", ...}}}}}``, where a run
is "own", "plugin", "alone" or "floor".
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from ..report import table
from .worker import ROWS

RUNS = {"own": "vLLM", "plugin": "with the plugin", "alone": "alone"}
_SHOWN = 6  # kernels that the table shows per row


def ratios(result: Mapping[str, Any], run: str) -> Iterator[tuple[float, str, str]]:
    """[(time with `run` / time with vLLM's own kernels, model, row)] of all rows that both runs have."""
    for model, one in result["models"].items():
        own, other = (one["runs"].get(name, {}).get("rows", {}) for name in ("own", run))
        for row in own:
            if row in other:
                yield other[row]["median"] / own[row]["median"], model, row


def render(result: Mapping[str, Any]) -> str:
    """All tables of a result."""
    versions = ", ".join(f"{name} {value}" for name, value in result["environment"].items())
    lines = [
        "# vLLM's engine",
        "",
        f"{versions}.",
        "Milliseconds: the median of each row's repetitions, the engines of a model alternately on one card. A kernel",
        "under programmatic launch waits for its predecessor on the device: its share of the time has that, too.",
        "",
    ]
    for run, words in list(RUNS.items())[1:]:
        if found := sorted(ratios(result, run)):
            mean = statistics.geometric_mean(ratio for ratio, _, _ in found)
            slower = sum(ratio > 1 for ratio, _, _ in found)
            worst, model, row = found[-1]
            lines.append(
                f"- {words} / vLLM: geometric mean {mean:.3f} of {len(found)} rows, {slower} above 1.00; "
                f"the worst {worst:.3f} ({model}, {row})"
            )
    for one in result["models"].values():
        lines += ["", f"## {one['words']}", "", *_rows(one["runs"]), "", *_notes(one["runs"])]
    return "\n".join([*lines, ""])


def summary(result: Mapping[str, Any], table_at: str) -> str:
    """The README's paragraph and table: milliseconds with vLLM's kernels and with the plugin.

    Args:
        table_at: path of the complete table, relative to the README.
    """
    found = {run: [ratio for ratio, _, _ in ratios(result, run)] for run in ("plugin", "alone")}
    mean = {run: statistics.geometric_mean(each) for run, each in found.items()}
    slower = sum(ratio > 1 for ratio in found["plugin"])
    environment = result["environment"]
    names = [row for row in ROWS if "," not in row]
    lines = []
    for one in result["models"].values():
        own, plugin = (one["runs"][run]["rows"] for run in ("own", "plugin"))
        pairs = [(own[row]["median"], plugin[row]["median"]) for row in names]
        lines.append([one["words"], *(f"{_ms(before)} → {_ms(after)}" for before, after in pairs)])
    text = (
        f"vLLM {environment['vllm']}'s engine on one {environment['gpu']}, random weights: milliseconds with vLLM's own"
        f" kernels → with\n[the plugin](docs/integrations.md#the-plugin).\n"
        f"[All {len(found['plugin'])} rows]({table_at}) take {mean['plugin']:.2f} of the time (geometric mean);"
        f" {slower} are slower. Without any compiled library of vLLM: {mean['alone']:.2f}."
    )
    return "\n".join([text, "", table(["", *names], lines), ""])


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _rows(runs: Mapping[str, Any]) -> list[str]:
    shown = [run for run in RUNS if "rows" in runs.get(run, {})]
    names = list(dict.fromkeys(row for run in shown for row in runs[run]["rows"]))
    lines = []
    for row in names:
        times = {run: runs[run]["rows"][row]["median"] for run in shown if row in runs[run]["rows"]}
        cells = [f"{times[run]:.2f}" if run in times else "" for run in shown]
        cells += [f"{times[run] / times['own']:.3f}" if {run, "own"} <= times.keys() else "" for run in shown[1:]]
        lines.append([row, *cells])
    headers = ["ms", *(RUNS[run] for run in shown), *(f"{RUNS[run]} / vLLM" for run in shown[1:])]
    return [table(headers, lines)] if lines else []


def _notes(runs: Mapping[str, Any]) -> list[str]:
    lines = []
    for run, one in runs.items():
        words = RUNS.get(run, "vLLM, another attention backend")
        if "error" in one:
            lines.append(f"- {words}: **failed**: {one['error'].strip().splitlines()[-1]}")
        if run != "own" and (compared := _compared(runs.get("own", {}), one)):
            lines.append(f"- {words}: {compared}")
        if "ready" in one:
            lines.append(f"- {words}: ready after {one['ready']:.1f} s, together with the other engines of this model")
        if "took over" in one:
            lines += [f"- {words}: {line}" for line in one["took over"]]
        for row, kernels in one.get("kernels", {}).items():
            lines.append(f"- {words}, {row}: {_shares(kernels)}")
    return lines


def _compared(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if "logprobs" not in own or "logprobs" not in other:
        return ""
    pairs = list(zip(own["logprobs"], other["logprobs"], strict=True))
    differences = [abs(a - b) for a, b in pairs]
    tokens = [
        a == b for mine, its in zip(own["tokens"], other["tokens"], strict=True) for a, b in zip(mine, its, strict=True)
    ]
    return (
        f"logprobs of {len(pairs)} prompt tokens differ from vLLM's by {statistics.fmean(differences):.4f} on average, "
        f"{max(differences):.3f} at most; {sum(tokens)} of {len(tokens)} greedy tokens are the same"
    )


def _shares(kernels: list[Any]) -> str:
    """Kernels' shares of the time, as text. With PDL, a kernel's time includes its wait for the previous kernel."""
    total = sum(us for _, _, us, _ in kernels)
    mine = sum(us for _, _, us, ours in kernels if ours)
    others = [f"{name[:60]} {us / total:.0%}" for name, _, us, ours in kernels if not ours][:_SHOWN]
    own = [f"{name} {us / total:.0%} ({count})" for name, count, us, ours in kernels if ours][: 2 * _SHOWN]
    return f"{mine / total:.0%} of the kernels' time is this library's: {', '.join(own)}; others: {', '.join(others)}"
