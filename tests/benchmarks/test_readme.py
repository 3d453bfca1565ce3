"""The README's figures: the table and the plot of given results."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as main
from benchmarks import readme

SVG = "{http://www.w3.org/2000/svg}"


def row(op: str, shape: dict[str, Any], **us: float) -> dict[str, Any]:
    times = {name: {"us": [median, median - 0.1, median + 0.1]} for name, median in us.items()}
    return {"op": op, "family": "norm", "dtype": "bfloat16", "shape": shape, "times": times}


WON = ("fused", "gelu", "rms_norm", "rotary", "silu")


def results() -> dict[str, dict[str, Any]]:
    """Rows with a win, a loss, and no rival."""
    rows = [row(op, {}, pyops=2.0, vllm=5.0, torch=4.0) for op in WON]
    rows += [row("attention", {}, pyops=2.0, flashinfer=1.5), row("lonely", {}, pyops=1.0)]
    environment = {"gpu": "Imagined GPU", "vllm": "1.0", "flashinfer-python": "2.0", "torch": "3.0"}
    return {"norm": {"environment": environment, "gpu": {"rows": rows}}}


def test_ratios_are_those_of_the_fastest_rival() -> None:
    assert readme.ratios(results()) == {
        "norm": [(0.75, "flashinfer", "attention"), *((2.0, "torch", op) for op in WON)]
    }


def test_summary_counts_wins_and_marks_losses() -> None:
    text = readme.block(results(), readme.README.parent / "folder")
    words = " ".join(text.split())
    assert "6 cases were timed against at least one rival; most are bound by memory" in words
    assert "In 5 no rival is faster" in words
    assert "the fastest takes 0.75 of pyops' time" in words
    assert "The shapes were tuned: mostly `num_tokens` 1, 16, 256, 4096, 16384; `hidden_size` 4096" in words
    assert "Imagined GPU, vLLM 1.0, FlashInfer 2.0, torch 3.0:" in text
    assert 'src="folder/speed-light.svg"' in text


@pytest.mark.parametrize("theme", readme.THEMES)
def test_plot_has_a_dot_per_case_on_the_right_side(theme: str) -> None:
    tree = ElementTree.fromstring(readme.plot(results(), theme))
    dots = [dot for dot in tree.iter(f"{SVG}circle") if dot.find(f"{SVG}title") is not None]
    assert [dot.get("class") for dot in dots] == ["flashinfer", *["torch"] * 5]
    (axis,) = (float(line.get("x1", "")) for line in tree.iter(f"{SVG}line") if line.get("class") == "axis")
    assert [float(dot.get("cx", "")) > axis for dot in dots] == [False, *[True] * 5]


def test_dots_do_not_overlap_and_stay_in_the_picture() -> None:
    folder = main.RESULTS / "nvidia-h200"
    tree = ElementTree.fromstring(readme.plot(readme.read(folder), "light"))
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in tree.iter(f"{SVG}circle")]
    assert len(dots) > 300
    width, height = float(tree.get("width", "")), float(tree.get("height", ""))
    assert all(0 < x < width and 0 < y < height for x, y in dots)
    min_distance = min(math.dist(a, b) for i, a in enumerate(dots) for b in dots[:i] if abs(a[0] - b[0]) < 10)
    assert min_distance >= 2 * readme._RADIUS  # rounded to tenths of a pixel


def test_figures_are_inserted_between_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    (tmp_path / "norm.json").write_text(json.dumps(results()["norm"]))
    (tmp_path / "host.json").write_text(json.dumps({"environment": {}, "host": {"rows": []}}))
    monkeypatch.setattr(readme, "README", page)
    assert main.main(["--readme", str(tmp_path)]) == 0
    held = readme.block(results(), tmp_path)
    assert page.read_text() == f"before\n<!-- speed -->\n{held}<!-- /speed -->\nafter\n"
    assert {path.name for path in tmp_path.glob("*.svg")} == {"speed-light.svg", "speed-dark.svg"}
