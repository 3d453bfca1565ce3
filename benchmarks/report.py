"""Write results as tables, JSON and a plot. Needs no GPU.

A result is ``{"environment", "method", <section>: {"rows", "skipped", "failures", ...}, ...}``, with those of the
sections gpu, host, numerics and compile that were measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .timing import Spread

Row = Mapping[str, Any]
OURS = "pyops"
_LARGE = 4096  # number of tokens from which bandwidth, not latency, limits an op


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, padded to be readable as text. All columns but the first are right-aligned."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(headers))]

    def text(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([text(lines[0]), text(rule), *map(text, lines[1:])])


def best_rival(row: Row) -> tuple[str, Spread] | None:
    """(name, time) of the fastest contender other than pyops."""
    rivals = {name: Spread(*one["us"]) for name, one in row["times"].items() if name != OURS}
    return min(rivals.items(), key=lambda item: item[1].median) if rivals else None


def gbs(row: Row, contender: str) -> float:
    """GB/s: the bytes that a call must move, divided by the contender's median time."""
    return float(row["bytes"] / row["times"][contender]["us"][0] / 1e3)


def needed_fraction(row: Row) -> float | None:
    """The target of an op as a fraction of the streaming bandwidth; None for few tokens, which latency limits."""
    if row["shape"].get("num_tokens", 0) < _LARGE:
        return None
    return 0.85 if row["family"] != "activation" and "quant" in row["op"] else 0.90


def verdict(row: Row, streaming_gbs: float) -> dict[str, Any]:
    """Whether a row meets its targets: not slower than the best rival, and close enough to the streaming bandwidth.

    ``"faster"``: True, False, or "tie" if the median exceeds the rival's by less than the spread of the replays; None
    without a rival. ``"streams"``: True, False, or None without a target.
    """
    us = Spread(*row["times"][OURS]["us"])
    best = best_rival(row)
    faster: bool | str | None = None
    if best:
        faster = us.median <= best[1].median or ("tie" if us.low <= best[1].median else False)
    fraction, needed = gbs(row, OURS) / streaming_gbs, needed_fraction(row)
    streams = None if needed is None else fraction >= needed
    return {
        "best": best,
        "ratio": us.median / best[1].median if best else None,
        "faster": faster,
        "fraction": fraction,
        "needed": needed,
        "streams": streams,
        "holds": faster is not False and streams is not False,
    }


def render(result: Mapping[str, Any]) -> str:
    """All sections of a result as Markdown."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment.items() if name != "gpu")
    lines = [f"# {environment['gpu']}", "", versions, ""]
    for name, (title, body) in _SECTIONS.items():
        if name in result:
            section = result[name]
            lines += [f"## {title}", "", *(body(section) if section["rows"] else []), *_left_out(section)]
    return "\n".join([*lines, result["method"], ""])


def _left_out(section: Mapping[str, Any]) -> list[str]:
    """Lists of the skipped rivals, by reason, and of the failed ops."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for one in section["skipped"]:
        ops = grouped.setdefault((one["rival"], one["reason"]), [])
        if one["op"] not in ops:
            ops.append(one["op"])
    lines = [f"- skipped {rival}: {reason} ({', '.join(ops)})" for (rival, reason), ops in grouped.items()]
    lines += [f"- **failed** {one['case']}: {one['error']}" for one in section["failures"]]
    return [*lines, ""] if lines else []


def _axes(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(axis for row in rows for axis in row["shape"]))


def _labels(row: Row, axes: Iterable[str]) -> list[str]:
    return [row["op"], row["dtype"], *(str(row["shape"].get(axis, "")) for axis in axes)]


def _contenders(rows: Iterable[Row], key: str) -> list[str]:
    return [name for name in dict.fromkeys(name for row in rows for name in row[key]) if name != OURS]


def _gpu(section: Mapping[str, Any]) -> list[str]:
    rows, streaming = section["rows"], section["streaming_gbs"]
    axes, rivals = _axes(rows), _contenders(rows, "times")
    times, verdicts = [], []
    for row in rows:
        found, labels = verdict(row, streaming), _labels(row, axes)
        ours, best = Spread(*row["times"][OURS]["us"]), found["best"]
        times.append(
            [
                *labels,
                _us(ours.median),
                f"{_us(ours.low)}-{_us(ours.high)}",
                f"{gbs(row, OURS):.0f}{'' if row['cold'] else '*'}",
                f"{found['fraction']:.0%}",
                *(_us(row["times"][name]["us"][0]) if name in row["times"] else "" for name in rivals),
                f"{row['times'][OURS]['error']:.2g}",
            ]
        )
        verdicts.append(
            [
                *labels,
                _us(ours.median),
                *((best[0], _us(best[1].median), f"{found['ratio']:.2f}") if best else ("", "", "")),
                _answer(found["faster"]),
                f"{found['fraction']:.0%}",
                "" if found["needed"] is None else f"{found['needed']:.0%}",
                _answer(found["streams"]),
                _answer(found["holds"]),
            ]
        )
    held = sum(one[-1] == "yes" for one in verdicts)
    return [
        f"Streaming bandwidth {streaming:.0f} GB/s (copy of 1 GB), launch floor {section['launch_floor_us']:.2f} us. "
        "us per call; * marks arguments that fit in L2. Error: the largest difference from the reference.",
        "",
        table(
            ["op", "dtype", *axes, OURS, "low-high", "GB/s", "of streaming", *rivals, "error"],
            times,
        ),
        "",
        f"### Targets: {held} of {len(rows)} hold",
        "",
        "No slower than the best rival; from 4096 tokens on 90 % of the streaming bandwidth (85 % if it quantises).",
        "",
        table(
            [
                "op",
                "dtype",
                *axes,
                OURS,
                "best rival",
                "us",
                "ratio",
                "faster",
                "of streaming",
                "needed",
                "reached",
                "holds",
            ],
            verdicts,
        ),
        "",
    ]


def _host(section: Mapping[str, Any]) -> list[str]:
    rows = section["rows"]
    axes, others = _axes(rows), _contenders(rows, "times")
    lines = []
    for row in rows:
        times = {name: values[0] for name, values in row["times"].items()}
        lines.append(
            [
                *_labels(row, axes),
                *(f"{times[name]:.2f}" if name in times else "" for name in (OURS, *others)),
                f"{times[OURS] / times['vllm']:.2f}" if "vllm" in times else "",
                f"{row['plan_miss_us']:.1f}" if "plan_miss_us" in row else "",
                str(row.get("recompiled", "")),
            ]
        )
    return [
        "us per eager call. Plan miss: the first call with a new token count, and how many of 99 compiled a kernel.",
        "",
        table(["op", "dtype", *axes, OURS, *others, "ratio to vllm", "plan miss", "compiled"], lines),
        "",
    ]


def _numerics(section: Mapping[str, Any]) -> list[str]:
    rows = section["rows"]
    axes, others = _axes(rows), _contenders(rows, "errors")
    lines = []
    for row in rows:
        errors = row["errors"]
        if not errors:
            continue
        ratio = ""
        if "vllm" in errors:
            ours, theirs = errors[OURS], errors["vllm"]
            ratio = "1.00" if ours == theirs else f"{ours / theirs:.2f}" if theirs else "inf"
        lines.append(
            [*_labels(row, axes), *(f"{errors[n]:.3g}" if n in errors else "" for n in (OURS, *others)), ratio]
        )
    return [
        "Largest absolute error against the reference evaluated in float64.",
        "",
        table(["op", "dtype", *axes, OURS, *others, "ratio to vllm"], lines),
        "",
    ]


def _compile(section: Mapping[str, Any]) -> list[str]:
    rows = section["rows"]
    columns = [("cold", "first_call_s"), ("disk", "first_call_s"), ("cold", "import_s"), ("disk", "import_s")]
    lines = [
        [row["op"], row["dtype"], *(_ms(row[when][what]) for when, what in columns), ", ".join(row["disk"]["origin"])]
        for row in rows
    ]
    medians = [_ms(statistics.median(row[when][what] for row in rows)) for when, what in columns]
    headers = ["op", "dtype", "first call, cold", "first call, disk", "imports, cold", "imports, disk", "disk origin"]
    return [
        "ms in a new process. Imports: cupy, torch and pyops.",
        "",
        table(headers, [*lines, ["median", "", *medians, ""]]),
        "",
    ]


_SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "gpu": ("GPU time", _gpu),
    "host": ("Host time", _host),
    "numerics": ("Error", _numerics),
    "compile": ("First call", _compile),
}


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def _answer(value: bool | str | None) -> str:
    return {True: "yes", False: "no", None: ""}[value] if value is None or isinstance(value, bool) else value


def save(result: dict[str, Any], path: Path) -> None:
    """Write `path` (JSON), and the tables and the plot next to it.

    Sections of an earlier result with the same environment and method are kept if this result lacks them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        former = json.loads(path.read_text())
        if all(former[key] == result[key] for key in ("environment", "method")):
            result = {**former, **result}
    path.write_text(json.dumps(result, indent=1) + "\n")
    render_file(path)


def render_file(path: Path) -> None:
    """Write the tables and the plot of a result next to it."""
    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text(render(result))
    if result.get("gpu", {}).get("rows"):
        plot(result, path.with_suffix(".png"))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Plot bars of pyops and its best rival: one column of panels per token count, one row per dtype and other axes.

    Panels with few tokens, which latency limits, show microseconds. Panels with many tokens show the fraction of the
    streaming bandwidth.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    section = result["gpu"]
    panels: dict[str, dict[int, list[Row]]] = {}
    for row in section["rows"]:
        shape = dict(row["shape"])
        tokens = shape.pop("num_tokens", 0)
        name = "\n".join([row["dtype"], *(f"{axis}={value}" for axis, value in shape.items())])
        panels.setdefault(name, {}).setdefault(tokens, []).append(row)
    columns = sorted({tokens for row in panels.values() for tokens in row})
    heights = [max(map(len, row.values())) + 1.5 for row in panels.values()]
    figure = Figure(figsize=(3.2 + 2.8 * len(columns), 1.2 + 0.38 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), len(columns), squeeze=False, height_ratios=heights)
    for (name, by_tokens), axes in zip(panels.items(), grid, strict=True):
        ops = list(dict.fromkeys(row["op"] for rows in by_tokens.values() for row in rows))
        for tokens, ax in zip(columns, axes, strict=True):
            _panel(ax, by_tokens.get(tokens, []), ops, section["streaming_gbs"], tokens, labelled=ax is axes[0])
        axes[0].set_ylabel(name)
    figure.legend(grid[0][0].containers[:2], [OURS, "best rival"], loc="outside upper right", ncols=2, frameon=False)
    figure.suptitle(f"{result['environment']['gpu']}: {section['streaming_gbs']:.0f} GB/s streaming bandwidth")
    figure.savefig(path, dpi=110)


def _panel(ax: Any, rows: Sequence[Row], ops: Sequence[str], streaming_gbs: float, tokens: int, labelled: bool) -> None:
    ax.set_visible(bool(rows))
    in_us = tokens < 256
    by_op = {row["op"]: row for row in rows}

    def value(row: Row | None, name: str | None) -> float:
        if row is None or name is None:
            return 0.0
        return float(row["times"][name]["us"][0]) if in_us else gbs(row, name) / streaming_gbs

    rivals = [best[0] if op in by_op and (best := best_rival(by_op[op])) else None for op in ops]
    places = range(len(ops))
    ax.barh([i - 0.2 for i in places], [value(by_op.get(op), OURS) for op in ops], 0.38, color="#1f5fa8")
    lengths = [value(by_op.get(op), rival) for op, rival in zip(ops, rivals, strict=True)]
    bars = ax.barh([i + 0.2 for i in places], lengths, 0.38, color="#e0a458")
    ax.bar_label(bars, [rival or "" for rival in rivals], fontsize=6, padding=2, color="#666666")
    ax.set_yticks(list(places), ops if labelled else [""] * len(ops), fontsize=8)
    ax.set_ylim(len(ops) - 0.4, -0.6)
    ax.set_title(
        f"{tokens} token{'s' if tokens != 1 else ''}: {'us' if in_us else 'of streaming bandwidth'}", fontsize=9
    )
    ax.tick_params(axis="x", labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)
    if in_us:
        ax.margins(x=0.18)
    else:
        ax.set_xlim(0, 1.18)
        ax.axvline(0.9, color="#999999", linewidth=0.8, linestyle=":")
