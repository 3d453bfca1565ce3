"""The notebooks run, without Jupyter; what they show, those that show something, is what came out.

``python -m tests.test_notebooks`` stores the outputs of these anew. The others are stored without outputs, because they
print what their machine has and does.
"""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import pyops
from pyops._core.host import toolchain

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
WITH_OUTPUTS = ["write_and_test_a_kernel"]
NEEDS = {"look_inside": ["cupy", "matplotlib"], "drop_in": ["transformers"]}


def run(notebook: dict[str, Any]) -> list[str]:
    """What each code cell prints, run one after another in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            with redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), namespace)
            printed.append(out.getvalue())
    return printed


def stored(notebook: dict[str, Any]) -> list[str]:
    """What each code cell shows."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]


def without_addresses(texts: list[str]) -> list[str]:
    return [re.sub(r"0x[0-9a-f]+", "0x...", text) for text in texts]


@pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem in WITH_OUTPUTS], ids=lambda path: path.stem)
def test_notebook_shows_what_it_prints(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    printed = run(notebook)
    assert len(printed) >= 4
    if "g++" in toolchain.toolchains():  # lines are told as they are there
        assert without_addresses(printed) == without_addresses(stored(notebook))


WITHOUT_OUTPUTS = [pytest.param(path, id=path.stem) for path in NOTEBOOKS if path.stem not in WITH_OUTPUTS]


def assert_runs(path: Path) -> None:
    for module in NEEDS.get(path.stem, []):
        pytest.importorskip(module)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert not any(stored(notebook))
    assert sum(bool(text) for text in run(notebook)) >= 4


@pytest.mark.parametrize("path", WITHOUT_OUTPUTS)
def test_notebook_runs(path: Path) -> None:
    assert_runs(path)


@pytest.mark.gpu
@pytest.mark.parametrize("path", WITHOUT_OUTPUTS)
def test_notebook_runs_kernels(path: Path) -> None:
    assert_runs(path)
    assert pyops.rms_norm.compiled()


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {*WITH_OUTPUTS, *NEEDS, "first_op"}


def refresh(path: Path) -> None:
    """Store what the cells print now."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for number, (cell, text) in enumerate(zip(code, run(notebook), strict=True), start=1):
        shown = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []
        cell.update(execution_count=number, outputs=shown)
    path.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for one in NOTEBOOKS:
        if one.stem in WITH_OUTPUTS:
            refresh(one)
