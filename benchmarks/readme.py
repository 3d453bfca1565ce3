"""Update the README's figures from the saved JSON files: the table of vLLM's engine, and the plot of the ops.

The plot is two SVG files next to the JSON files, for light and dark pages.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .engine import report as engine
from .report import OURS, best_rival
from .shapes import SWEEP

README = Path(__file__).parents[1] / "README.md"
RIVALS = {"vllm": "vLLM", "flashinfer": "FlashInfer", "torch": "torch"}
THEMES = {
    "light": {
        "text": "#1f2328",
        "quiet": "#59636e",
        "grid": "#d8dee4",
        "behind": "#eff2f5",
        "vllm": "#0969da",
        "flashinfer": "#d4660a",
        "torch": "#1a8a5a",
    },
    "dark": {
        "text": "#f0f6fc",
        "quiet": "#9198a1",
        "grid": "#2a3038",
        "behind": "#1a2029",
        "vllm": "#58a6ff",
        "flashinfer": "#f0a050",
        "torch": "#3fb98a",
    },
}

# Sizes of the plot in pixels. The horizontal axis is the ratio of times, logarithmic.
_WIDTH, _LEFT, _RIGHT, _TOP = 840, 172, 24, 84
_RADIUS = 2.8
_LOW, _HIGH = 0.7, 100.0  # range of ratios; dots outside are drawn at the edge
_TICKS = (1, 2, 4, 8, 16, 32, 64)
_FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


def update(folder: Path) -> None:
    """Write the plots next to the JSON files in `folder`, and the figures into the README."""
    results = read(folder)
    for theme in THEMES:
        (folder / f"speed-{theme}.svg").write_text(plot(results, theme))
    text = replaced(README.read_text(), "speed", block(results, folder))
    if (engines := folder / "engine.json").exists():
        at = os.path.relpath(folder / "engine.md", README.parent).replace(os.sep, "/")
        text = replaced(text, "engine", engine.summary(json.loads(engines.read_text()), at))
    README.write_text(text)


def replaced(text: str, name: str, block: str) -> str:
    """`text` with the block between ``<!-- name -->`` and ``<!-- /name -->`` replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, rest = text.split(start)
    _, after = rest.split(end)
    return f"{before}{start}{block}{end}{after}"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """{family: result} of the JSON files in `folder` with GPU times."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {family: result for family, result in results.items() if result.get("gpu", {}).get("rows")}


def block(results: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """The Markdown between the README's markers: a summary of the cases, and the plot."""
    compared = [ratio for rows in ratios(results).values() for ratio, _, _ in rows]
    lead = sum(ratio >= 1 for ratio in compared)
    at = os.path.relpath(folder, README.parent).replace(os.sep, "/")
    worst = f"{min(compared):.2f}"
    lines = [
        f"Of single ops, {len(compared)} cases were timed against at least one rival; most are bound by memory.",
        f"In {lead} no rival is faster; at worst the fastest takes {worst} of pyops' time. The shapes were tuned:",
        f"mostly {_tuned()}. CUDA graphs, bfloat16, {_versions(results)}:",
        "",
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{at}/speed-dark.svg">',
        f'<img alt="pyops against the fastest rival, by case" src="{at}/speed-light.svg"></picture>',
        "",
    ]
    return "\n".join(lines)


def _tuned() -> str:
    """The sizes of `shapes.SWEEP`, as text."""
    return "; ".join(f"`{axis}` {', '.join(map(str, sizes))}" for axis, sizes in SWEEP.items())


def _versions(results: Mapping[str, Mapping[str, Any]]) -> str:
    found: dict[str, str] = {}
    for result in results.values():
        found |= result["environment"]
    return f"{found['gpu']}, vLLM {found['vllm']}, FlashInfer {found['flashinfer-python']}, torch {found['torch']}"


def ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[float, str, str]]]:
    """{family: [(time of the fastest rival / time of pyops, rival, op), ...]} of cases with a rival, ascending."""
    found: dict[str, list[tuple[float, str, str]]] = {}
    for family, result in results.items():
        for row in result["gpu"]["rows"]:
            if best := best_rival(row):
                name, time = best
                ratio = time.median / float(row["times"][OURS]["us"][0])
                found.setdefault(family, []).append((ratio, name, row["op"]))
    return {family: sorted(rows) for family, rows in found.items()}


def plot(results: Mapping[str, Mapping[str, Any]], theme: str) -> str:
    """An SVG with one row per family and one dot per case, coloured by the fastest rival."""
    colours = THEMES[theme]
    rows = ratios(results)
    swarms = {family: list(_swarm([_x(ratio) for ratio, _, _ in cases])) for family, cases in rows.items()}
    heights = {family: max(max(map(abs, offsets)) * 2 + 24, 46) for family, offsets in swarms.items()}
    bottom = _TOP + sum(heights.values())
    body = [
        _text(20, 26, "Time of the fastest rival, as a multiple of pyops' time", 16, "text", weight=600),
        _text(20, 47, f"a dot for each of {sum(map(len, rows.values()))} cases", 12, "quiet"),
        *_legend(_WIDTH - _RIGHT, 47),
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_x(1) - _LEFT:.1f}" height="{bottom - _TOP:.1f}" class="behind"/>',
        _text(_x(1) - 7, _TOP - 8, "pyops slower", 11, "quiet", anchor="end"),
        _text(_x(1) + 7, _TOP - 8, "pyops faster", 11, "quiet"),
    ]
    for tick in _TICKS:
        kind = "axis" if tick == 1 else "grid"
        body.append(f'<line x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="{_TOP}" y2="{bottom:.1f}" class="{kind}"/>')
        body.append(_text(_x(tick), bottom + 18, f"{tick}x", 12, "quiet", anchor="middle"))
    top = float(_TOP)
    for family, cases in rows.items():
        middle = top + heights[family] / 2
        if top > _TOP:
            body.append(f'<line x1="20" x2="{_WIDTH - _RIGHT}" y1="{top:.1f}" y2="{top:.1f}" class="grid"/>')
        median = statistics.median(ratio for ratio, _, _ in cases)
        body.append(_text(20, middle - 2, family, 13, "text", weight=600))
        body.append(_text(20, middle + 13, f"{len(cases)} cases, median {median:.1f}x", 11, "quiet"))
        for (ratio, rival, op), offset in zip(cases, swarms[family], strict=True):
            title = escape(f"{op}: {RIVALS[rival]} takes {ratio:.2f} times as long")
            at = f'cx="{_x(ratio):.1f}" cy="{middle + offset:.1f}"'
            body.append(f'<circle {at} r="{_RADIUS}" class="{rival}"><title>{title}</title></circle>')
        top += heights[family]
    height = bottom + 30
    style = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())
    style += f".grid{{stroke:{colours['grid']};fill:none}}.axis{{stroke:{colours['quiet']};stroke-width:1.5}}"
    frame = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}"'
    head = f'<svg {frame} height="{height:.0f}" font-family="{_FONT}" role="img"><style>{style}</style>'
    return "\n".join([head, *body, "</svg>", ""])


def _x(ratio: float) -> float:
    share = math.log(min(max(ratio, _LOW), _HIGH) / _LOW) / math.log(_HIGH / _LOW)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _swarm(places: Sequence[float]) -> Iterator[float]:
    """Vertical offsets of dots at ascending positions `x` (a beeswarm): no dot overlaps an earlier one."""
    placed: list[tuple[float, float]] = []
    apart = 2 * _RADIUS + 0.4
    for x in places:
        near = [(x - other, across) for other, across in placed if x - other < apart]
        # Candidate offsets: the middle, then the two offsets at which the new dot touches each near dot.
        tried = [0.0]
        for distance, across in near:
            step = math.sqrt(apart**2 - distance**2)
            tried += [across + step, across - step]
        free = (y for y in sorted(tried, key=lambda y: (abs(y), y)) if all(_clear(y, one, apart) for one in near))
        across = next(free)
        placed.append((x, across))
        yield across


def _clear(y: float, near: tuple[float, float], apart: float) -> bool:
    distance, across = near
    return math.hypot(distance, y - across) >= apart - 1e-6


def _legend(right: float, y: float) -> list[str]:
    """The legend of the rivals' colours, drawn from right to left."""
    parts = []
    for name, title in reversed(RIVALS.items()):
        width = 6.6 * len(title)
        parts.append(_text(right - width, y, title, 12, "text"))
        parts.append(f'<circle cx="{right - width - 9:.1f}" cy="{y - 4:.1f}" r="4" class="{name}"/>')
        right -= width + 32
    parts.append(_text(right + 10, y, "the fastest rival is", 12, "quiet", anchor="end"))
    return parts


def _text(x: float, y: float, words: str, size: int, kind: str, anchor: str = "start", weight: int = 400) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text {at} class="{kind}">{escape(words)}</text>'
