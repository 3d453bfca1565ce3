"""The recipes of docs/recipes run, and each page shows its file and what it prints.

``python -m tests.repo.test_recipes`` pastes the files and what they print on this machine into the pages.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from benchmarks.readme import replaced
from pyops.host.toolchain import toolchains

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/recipes"
RECIPES = sorted(FOLDER.glob("*.py"))
IDS = [path.stem for path in RECIPES]
MEND = "python -m tests.repo.test_recipes"
ALONE = {"vllm_plugin"}  # namespaces of torch.ops are the process's
NEEDS = {"property_test": ["hypothesis"], "transformers_model": ["transformers"]}
ON_THE_HOST = {"own_kernel", "property_test", "several_gpus"}  # that run kernels on the CPU


def printed(path: Path) -> str:
    """What the recipe prints, run as a program; in this process where it can be, for importing torch takes seconds."""
    if path.stem in ALONE:
        return run_alone(str(path))
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


def run_alone(*words: str) -> str:
    """What Python prints, that finds this tree first."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def page(path: Path) -> str:
    return path.with_suffix(".md").read_text()


def shown(text: str, name: str, language: str, block: str) -> str:
    """The page with a block of code between the markers of `name`."""
    return replaced(text, name, f"```{language}\n{block}```\n")


def with_output(path: Path) -> str:
    """The page with what this machine prints. A page may have a block of its own for a GPU."""
    text, found = page(path), printed(path)
    if torch.cuda.is_available() and "<!-- output on a GPU -->" in text:
        return shown(text, "output on a GPU", "text", found)
    return shown(text, "output", "text", found.replace("cuda: ", "cpu: "))


def assert_prints_what_its_page_shows(path: Path) -> None:
    for module in NEEDS.get(path.stem, []):
        pytest.importorskip(module)
    if path.stem in ON_THE_HOST and not toolchains():
        pytest.skip("no C++ compiler")
    # vLLM's version is printed where it is installed; lines of faults are those that g++ and pyelftools find.
    lines = "g++" in toolchains() and importlib.util.find_spec("elftools")
    varies = {"vllm_plugin": importlib.util.find_spec("vllm"), "own_kernel": not lines}
    found = with_output(path)
    assert varies.get(path.stem) or found == page(path), MEND


@pytest.mark.rotates
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which recipes run")
@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_recipe_prints_what_its_page_shows(path: Path) -> None:
    assert_prints_what_its_page_shows(path)


@pytest.mark.gpu
@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_recipe_prints_on_a_gpu_what_its_page_shows(path: Path) -> None:
    assert_prints_what_its_page_shows(path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_ranks_of_torchrun_print_what_ranks_of_the_host_do() -> None:
    path = FOLDER / "several_gpus.py"
    found = run_alone("-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)).splitlines(keepends=True)
    assert shown(page(path), "output", "text", "".join(sorted(found))) == page(path)


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_page_shows_the_file(path: Path) -> None:
    assert shown(page(path), "code", "python", path.read_text()) == page(path), MEND


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_recipe_is_short_and_asserts(path: Path) -> None:
    """The text of a kernel is not counted."""
    text = re.sub(r'(?<= = """\n).*?(?=""")', "", path.read_text(), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert 10 <= len(lines) <= 25
    assert any("assert" in line for line in lines)


def test_every_recipe_is_in_the_gallery_and_on_the_site() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert pages == set(IDS)
    gallery, site = (FOLDER / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for name in pages:
        title = page(FOLDER / f"{name}.py").splitlines()[0].removeprefix("# ")
        assert f"| [{title}]({name}.md) | " in gallery
        assert f"      - {title}: recipes/{name}.md\n" in site


if __name__ == "__main__":
    for one in RECIPES:
        if not sys.argv[1:] or one.stem in sys.argv[1:]:
            one.with_suffix(".md").write_text(shown(page(one), "code", "python", one.read_text()))
            one.with_suffix(".md").write_text(with_output(one))
