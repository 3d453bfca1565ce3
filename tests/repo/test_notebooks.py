"""The notebooks run, without Jupyter, and their stored outputs match a run without a GPU.

``python -m tests.repo.test_notebooks`` stores their outputs again: what a cell prints, and its figures as SVG.
A cell tagged ``varies`` prints what its machine has, and what it prints is not compared.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pyops
from pyops.host import toolchain

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
NEEDS = {
    "drop_in": ["transformers"],
    "look_inside": ["cupy", "matplotlib"],
    "pipeline": ["matplotlib"],
    "quantised": ["gguf", "matplotlib"],
    "write_and_test_a_kernel": ["matplotlib"],
}
# Text in figures stays text, so that a page can colour it. Nothing depends on the date or on randomness.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "pyops"}


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, run one after another in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, {"MPLBACKEND": "agg"}):
        for number, cell in enumerate(code_cells(notebook)):
            with redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), namespace)
            outputs.append([*printed(out.getvalue()), *figures()])
    return outputs


def printed(text: str) -> list[dict[str, Any]]:
    return [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []


def figures() -> list[dict[str, Any]]:
    """The figures that a cell has made; they are then closed."""
    if (plt := sys.modules.get("matplotlib.pyplot")) is None:
        return []
    found = []
    for number in plt.get_fignums():
        drawn = io.StringIO()
        with plt.rc_context(SVG):
            plt.figure(number).savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
        data = {"image/svg+xml": drawn.getvalue().splitlines(keepends=True)}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return found


def compared(cells: list[dict[str, Any]], outputs: list[list[dict[str, Any]]]) -> list[list[str]]:
    """The compared part of each cell: the kinds of outputs, and the texts without addresses unless they vary."""
    texts = []
    for cell, shown in zip(cells, outputs, strict=True):
        varies = "varies" in cell["metadata"].get("tags", [])
        of_cell = ["" if varies or "text" not in one else "".join(one["text"]) for one in shown]
        kinds = [one["output_type"] for one in shown]
        texts.append([*kinds, *(re.sub(r"0x[0-9a-f]+", "0x...", text) for text in of_cell)])
    return texts


def assert_runs(path: Path) -> list[list[dict[str, Any]]]:
    for module in NEEDS.get(path.stem, []):
        pytest.importorskip(module)
    return run(json.loads(path.read_text(encoding="utf-8")))


def named(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in paths]


@pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("path", named(NOTEBOOKS))
@pytest.mark.slow
def test_notebook_matches_its_stored_output(path: Path) -> None:
    outputs = assert_runs(path)
    assert sum(map(bool, outputs)) >= 4
    cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
    if "g++" in toolchain.toolchains() and not torch.cuda.is_available():  # fault messages need their line numbers
        stored = compared(cells, [cell["outputs"] for cell in cells])
        assert compared(cells, outputs) == stored, "python -m tests.repo.test_notebooks"


@pytest.mark.parametrize("path", named(NOTEBOOKS))
def test_notebook_has_outputs_and_is_small(path: Path) -> None:
    cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) >= 4
    assert path.stat().st_size < 300_000


@pytest.mark.gpu
@pytest.mark.parametrize("path", named([path for path in NOTEBOOKS if path.stem in ("drop_in", "first_op")]))
def test_notebook_runs_kernels(path: Path) -> None:
    assert_runs(path)
    assert pyops.rms_norm.compiled()


def test_notebooks_exist() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {*NEEDS, "first_op"}


def refresh(path: Path) -> None:
    """Store the present outputs of the cells."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, shown) in enumerate(zip(code_cells(notebook), run(notebook), strict=True), start=1):
        cell.update(execution_count=number, outputs=shown)
    path.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for one in NOTEBOOKS:
        if not sys.argv[1:] or one.stem in sys.argv[1:]:
            refresh(one)
