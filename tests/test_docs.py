"""What the pages say is true: links, commands, examples, the table of ops."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kernels_cu
from pyops import __main__ as command_line
from pyops import testing
from pyops._core import config
from pyops._core.host.toolchain import toolchains
from pyops.cli import table
from pyops.testing import strategies

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
README = (ROOT / "README.md").read_text()
PAGE_IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_table_of_ops_is_fresh() -> None:
    _, shown, _ = re.split(r"<!-- /?ops -->", README)
    assert shown.strip() == table.render(), "put the output of `python -m pyops list --markdown` between the markers"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_command_lines_parse(page: Path) -> None:
    text = page.read_text()
    lines = [line for block in blocks("sh", text) for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        words = shlex.split(line.partition(" > ")[0], comments=True) if "-m pyops " in line else []
        if words:
            command_line.parser().parse_args(words[words.index("pyops") + 1 :])


def test_the_command_lines_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks("sh") if block.startswith("python -m pyops list"))
    for line in block.splitlines():
        _, _, _, *words = shlex.split(line, comments=True)
        if words[0] in ("list", "show", "source"):
            assert command_line.main(words) == 0
            assert capsys.readouterr().out


def test_the_torch_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in blocks("python") if block.startswith("import torch"))
    assert len(example.splitlines()) <= 10
    exec(example, {})


def test_the_cupy_example_runs_on_numpy_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in blocks("python") if block.startswith("import cupy"))
    assert len(example.splitlines()) <= 10
    exec(example.replace("import cupy", "import numpy as cupy"), {})


@pytest.mark.gpu
def test_the_cupy_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in blocks("python") if block.startswith("import cupy"))
    exec(example, {})
    assert "norm/rms_norm.cu" in capsys.readouterr().out


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("page", ["host.md", "testing.md"])
def test_the_examples_of_the_harness_run(page: str) -> None:
    (example,) = blocks("python", (ROOT / "docs" / page).read_text())
    exec(example, {"__name__": "__main__"})


@pytest.mark.parametrize("example", blocks("python", (ROOT / "docs/integrations.md").read_text()))
def test_the_examples_of_integrations_run(example: str) -> None:
    """In processes of their own, because namespaces of torch.ops are the process's."""
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_name_of_the_harness_is_described() -> None:
    page = (ROOT / "docs/testing.md").read_text()
    for name in (*testing.__all__, *strategies.__all__):
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", page), name


NEW_OP = """
import sys
from pathlib import Path
import torch
import kernels_cu, pyops
from pyops._core import device, offline
from pyops._core.example import ArgMaker, TorchMaker

read = kernels_cu.read
kernels_cu.read = lambda name: Path(sys.argv[1]).read_text() if name == "activation/scale.cu" else read(name)
exec(Path(sys.argv[2]).read_text(), {"__name__": "pyops.scale", "__package__": "pyops"})
scale = pyops.registry["scale"]
for dtype in ("float32", "float16", "bfloat16"):
    out, x, factor = scale.example(TorchMaker(), dtype=dtype)
    scale.call(out, x, factor)
    assert torch.equal(out, x / 2)
    out.fill_(0)
    torch.ops.pyops.scale(out, x, factor)
    assert torch.equal(out, x / 2)
    (launch,) = scale.launches(*scale.example(ArgMaker(device.model()), dtype=dtype, hidden_size=4097))
    text = launch.specialisation.text
    if sys.argv[3] == "compile":
        assert offline.compile("activation/scale.cu", "", text, "sm_90").registers > 0
"""


def test_the_new_op_of_the_readme_works(tmp_path: Path) -> None:
    """In another process, because an op stays registered."""
    (kernel,) = blocks("cuda")
    (module,) = (block for block in blocks("python") if block.startswith("from __future__"))
    (tmp_path / "scale.cu").write_text(kernel)
    (tmp_path / "scale.py").write_text(module)
    compiles = "no"
    with contextlib.suppress(ImportError):
        import cupy  # noqa: F401

        compiles = "compile"
    words = [sys.executable, "-c", NEW_OP, str(tmp_path / "scale.cu"), str(tmp_path / "scale.py"), compiles]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_switch_is_described() -> None:
    switches = re.findall(r"PYOPS_\w+=\w+", " ".join(f.__doc__ or "" for f in vars(config).values() if callable(f)))
    assert switches
    for switch in switches:
        assert f"| `{switch}` |" in README


def test_every_header_is_described() -> None:
    page = (ROOT / "docs/kernels.md").read_text()
    for name in kernels_cu.names():
        if name.startswith("include/"):
            assert f"`{name.removeprefix('include/')}`" in page, name


def test_every_extra_named_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r'"\.\[([\w,]+)\]"', README + (ROOT / "CONTRIBUTING.md").read_text())
    assert named
    for extras in named:
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
