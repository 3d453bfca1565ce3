"""The recipes of docs/recipes run, and each page shows its file and what it prints.

``python -m tests.test_recipes`` pastes the files and what they print on this machine into the pages.
"""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from benchmarks.readme import replaced
from pyops._core.host.toolchain import toolchains

FOLDER = Path(__file__).parents[1] / "docs/recipes"
RECIPES = sorted(FOLDER.glob("*.py"))
IDS = [path.stem for path in RECIPES]
MEND = "python -m tests.test_recipes"
NEEDS: dict[str, list[str]] = {}
NEEDS_COMPILER: set[str] = set()  # that run kernels on the CPU


def printed(path: Path) -> str:
    """What the recipe prints, run as a program."""
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


def page(path: Path) -> str:
    return path.with_suffix(".md").read_text()


def shown(text: str, name: str, language: str, block: str) -> str:
    """The page with a block of code between the markers of `name`."""
    return replaced(text, name, f"```{language}\n{block}```\n")


def assert_prints_what_its_page_shows(path: Path, device: str) -> None:
    """On a GPU, what the page shows of the CPU, unless it shows what a GPU prints."""
    for module in NEEDS.get(path.stem, []):
        pytest.importorskip(module)
    if path.stem in NEEDS_COMPILER and not toolchains():
        pytest.skip("no C++ compiler")
    text, found = page(path), printed(path)
    if device == "cpu" or "<!-- output on a GPU -->" not in text:
        assert shown(text, "output", "text", found.replace(f"{device}: ", "cpu: ")) == text, MEND
    else:
        assert shown(text, "output on a GPU", "text", found) == text, MEND


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which recipes run")
@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_recipe_prints_what_its_page_shows(path: Path) -> None:
    assert_prints_what_its_page_shows(path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_recipe_prints_on_a_gpu_what_its_page_shows(path: Path) -> None:
    assert_prints_what_its_page_shows(path, "cuda")


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_page_shows_the_file(path: Path) -> None:
    assert shown(page(path), "code", "python", path.read_text()) == page(path), MEND


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_recipe_is_short_and_asserts(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert 10 <= len(lines) <= 25
    assert any("assert" in line for line in lines)


def test_every_recipe_is_in_the_gallery_and_on_the_site() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert pages == set(IDS)
    gallery, site = (FOLDER / "README.md").read_text(), (FOLDER.parents[1] / "mkdocs.yml").read_text()
    for name in pages:
        title = page(FOLDER / f"{name}.py").splitlines()[0].removeprefix("# ")
        assert f"| [{title}]({name}.md) | " in gallery
        assert f"recipes/{name}.md\n" in site


if __name__ == "__main__":
    for one in RECIPES:
        if not sys.argv[1:] or one.stem in sys.argv[1:]:
            name = (
                "output on a GPU" if torch.cuda.is_available() and "<!-- output on a GPU -->" in page(one) else "output"
            )
            text = shown(page(one), "code", "python", one.read_text())
            one.with_suffix(".md").write_text(shown(text, name, "text", printed(one).replace("cuda: ", "cpu: ")))
