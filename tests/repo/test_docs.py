"""The pages are true: links, commands, examples, figures, tables of ops, switches, errors and extras."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import kernels_cu
import pyops
import pyops.models
from benchmarks import readme
from benchmarks.engine import report as engine
from pyops import __main__ as command_line
from pyops import testing
from pyops._core import config
from pyops.cli import coverage, stub, table
from pyops.host.toolchain import toolchains
from pyops.testing import strategies

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/performance").glob("*.md")]
PAGES += [*(ROOT / "docs/decisions").glob("*.md"), *(ROOT / "docs/recipes").glob("*.md")]
PAGES += [ROOT / "docs/notebooks/README.md"]
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
RESULTS = ROOT / "benchmarks/results/nvidia-h200"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE_IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_page_of_ops_is_up_to_date() -> None:
    assert page("ops.md") == table.page() + "\n", "python -m pyops list --markdown > docs/ops.md"


def test_the_stub_is_fresh() -> None:
    fresh = stub.text() + "\n"
    assert (ROOT / "pyops/__init__.pyi").read_text() == fresh, "python -m pyops list --stub > pyops/__init__.pyi"


def test_every_parameter_has_a_text() -> None:
    """Of every function of the stub: editors show it with the parameter."""
    tree = ast.parse((ROOT / "pyops/__init__.pyi").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 2 * len(pyops.registry)
    for function in functions:
        names = [one.arg for one in (*function.args.args, *function.args.kwonlyargs) if one.arg != "self"]
        texts = re.findall(r"^    (\w+): \S", (ast.get_docstring(function) or "").partition("Args:\n")[2], re.MULTILINE)
        assert texts[: len(names)] == names, f"{ast.unparse(function.args)}: {set(names) - set(texts)} have no text"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 135


def test_readme_counts_the_ops_of_every_family() -> None:
    shown = re.findall(r"^\| \[(\w+)\]\(docs/ops\.md#(\w+)\) \| (\d+) \|", README, flags=re.MULTILINE)
    assert shown == [(name, name, str(len(ops))) for name, ops in table.families().items()]


def test_readme_counts_the_replacements_of_vllm_ops() -> None:
    for version, of in (("0.16", r" \[ops\]\(docs/integrations\.md\) of vLLM 0\.16"), ("0.22", r" of 0\.22")):
        states = re.fullmatch(r"(\d+) ops: (\d+) served, .*, 0 missing", coverage.text(version).splitlines()[-1])
        assert states
        served, ops = re.findall(rf"(\d+) of the (\d+){of}", README)[0]
        assert (ops, served) == states.groups()
    (layers,) = re.findall(r"(\d+) \[layers\]", README)
    _, rows, _ = re.split(r"<!-- /?layers -->", page("layers.md"))
    assert int(layers) == rows.count("\n| `")


def test_figures_of_the_readme_match_the_results() -> None:
    results = readme.read(RESULTS)
    mend = f"python -m benchmarks --readme {RESULTS.relative_to(ROOT)}"
    assert readme.replaced(README, "speed", readme.block(results, RESULTS)) == README, mend
    engines = json.loads((RESULTS / "engine.json").read_text())
    at = (RESULTS / "engine.md").relative_to(ROOT).as_posix()
    assert readme.replaced(README, "engine", engine.summary(engines, at)) == README, mend
    for found in RESULTS.glob("engine*.json"):
        assert found.with_suffix(".md").read_text() == engine.render(json.loads(found.read_text())), mend
    for theme in readme.THEMES:
        assert (RESULTS / f"speed-{theme}.svg").read_text() == readme.plot(results, theme), mend


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'\bsrc(?:set)?="([^"]+)"', text):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def test_measurements_cited_in_code_are_on_their_page() -> None:
    cited = re.compile(r'(docs/performance(?:/\w+)?\.md)(?:[,:] "([^"]+)")?')
    for folder in ("pyops", "kernels_cu", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".cu", ".cuh"):
                for name, phrase in cited.findall(re.sub(r"\n\s*(?:#|//)", "", path.read_text())):
                    assert phrase in " ".join((ROOT / name).read_text().split()), f"{path}: {name}, {phrase}"


def stray_markers(text: str) -> list[str]:
    """Lines that continue a paragraph or an item of a list and yet begin like an item or a heading."""
    marker = re.compile(r"( *)(?:(\d+)[.)]|[-+*]|#{1,6})(?: |$)")
    found = []
    for block in re.split(r"\n\s*\n", re.sub(r"^ *```.*?^ *```\n", "", text, flags=re.DOTALL | re.MULTILINE)):
        first, *lines = block.strip("\n").split("\n")
        item, indent = marker.match(first), len(first) - len(first.lstrip())
        for here in filter(None, map(marker.match, lines)):
            if item is None and len(here[1]) < indent:  # the item after an indented paragraph
                item = here
            elif item is None or item[1] != here[1] or bool(item[2]) != bool(here[2]):
                found.append(here.string)
    return found


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_no_wrapped_line_begins_like_an_item_or_a_heading(page: Path) -> None:
    assert stray_markers(page.read_text()) == []


@pytest.mark.parametrize("line", ["4350.", "2) b", "+ 3 b", "- b", "* b", "# b"])
def test_a_wrapped_line_that_begins_like_an_item_is_found(line: str) -> None:
    assert stray_markers(f"of the cores a\n{line}\nb\n") == [line]
    assert stray_markers(f"- an item of\n  {line}\n- another\n") == [f"  {line}"]


def test_lists_and_code_are_no_stray_markers() -> None:
    assert stray_markers("# title\n\n1. a\n   b\n\n   c\n2. d\n\n```sh\n# comment\n```\n\n- d\n  30). e\n- f\n") == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_command_lines_parse(page: Path) -> None:
    text = page.read_text()
    lines = [line for block in blocks("sh", text) for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        if "-m pyops " in line or line.startswith("pyops "):
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if "--version" not in words:
                command_line.parser().parse_args(words[words.index("pyops") + 1 :])


def test_command_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks("sh", page("switches.md")) if block.startswith("python -m pyops list"))
    for line in block.splitlines():
        _, _, _, *words = shlex.split(line, comments=True)
        if words[0] in ("list", "show", "source"):
            assert command_line.main(words) == 0
            assert capsys.readouterr().out


@pytest.mark.slow
def test_readme_examples_print_the_documented_output() -> None:
    """In a separate process, because ops list all kernels of their process."""
    assert_prints("import torch\nimport pyops", "cuda ['norm/", "cpu ", torch.cuda.is_available())


@pytest.mark.gpu
def test_readme_examples_print_the_documented_output_on_a_gpu() -> None:
    test_readme_examples_print_the_documented_output()


def assert_prints(start: str, on_gpu: str, without: str, gpu: bool) -> None:
    """The example that begins with `start` prints the output that the README shows."""
    (example,) = (block for block in blocks("python") if block.startswith(start))
    assert len(example.splitlines()) <= 10
    promised = [re.findall(rf"`({re.escape(words)}[^`]*)`", README) for words in (on_gpu, without)]
    assert list(map(len, promised)) == [1, 1]
    done = run_python(example)
    assert (done.returncode, done.stdout) == (0, promised[not gpu][0] + "\n"), done.stderr


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.slow
def test_op_of_the_readme_works_and_its_fault_is_named() -> None:
    """In separate processes, because an op stays registered."""
    (op,) = (block for block in blocks("python") if "kernel = Kernel(" in block)
    assert len(op.splitlines()) <= 25
    bound = "if (i < numel) "
    assert op.count(bound) == 1
    assert f"Without `{bound.strip()}`" in README
    good, faulty = (run_python(text) for text in (op, op.replace(bound, "")))
    assert good.returncode == 0, good.stderr
    assert faulty.returncode != 0
    claimed = re.search(r"it ends in (`[^`]+`), (`[^`]+`), (`[^`]+`)", README.replace("\n", " "))
    assert claimed
    kind, place, thread = (words.strip("`") for words in claimed.groups())
    assert f"pyops.KernelFault: {kind}" in faulty.stderr
    assert [f"  {place}", f"  {thread}"] == faulty.stderr[faulty.stderr.index(kind) :].splitlines()[1:3]


def run_python(text: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", text]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("name", ["host.md", "testing.md"])
def test_harness_examples_run(name: str) -> None:
    (block,) = blocks("python", page(name))
    exec(block, {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("python", page("integrations.md")))
@pytest.mark.slow
def test_integration_examples_run(block: str) -> None:
    """In separate processes, because namespaces of torch.ops belong to the process."""
    done = run_python(block)
    assert done.returncode == 0, done.stderr


def test_every_name_of_the_harness_is_described() -> None:
    text = page("testing.md")
    for name in (*testing.__all__, *strategies.__all__):
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


NEW_OP = """
import sys
from pathlib import Path
import torch
import kernels_cu, pyops
from pyops._core.system import device; from pyops import offline
from pyops.example import ArgMaker, TorchMaker

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
    assert torch.equal(scale.wrapper.new(x, factor), x / 2)
    (launch,) = scale.launches(*scale.example(ArgMaker(device.model()), dtype=dtype, hidden_size=4097))
    text = launch.specialisation.text
    if sys.argv[3] == "compile":
        assert offline.compile("activation/scale.cu", "", text, "sm_90").registers > 0
"""


@pytest.mark.slow
def test_op_of_add_an_op_works(tmp_path: Path) -> None:
    """In a separate process, because an op stays registered."""
    (kernel,) = blocks("cuda", page("add_an_op.md"))
    module, result = blocks("python", page("add_an_op.md"))
    (tmp_path / "scale.cu").write_text(kernel)
    (tmp_path / "scale.py").write_text(f"{module}\n{result}")
    compiles = "no"
    with contextlib.suppress(ImportError):
        import cupy  # noqa: F401

        compiles = "compile"
    words = [sys.executable, "-c", NEW_OP, str(tmp_path / "scale.cu"), str(tmp_path / "scale.py"), compiles]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_of_models_are_described_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)\.py` \|", page("models.md"), flags=re.MULTILINE)
    listed = re.findall(r"^((?:\w+ )+) +\S", str(pyops.models.__doc__), flags=re.MULTILINE)
    assert rows == " ".join(listed).split()


def test_every_switch_is_described() -> None:
    switches = re.findall(r"PYOPS_\w+=\w+", " ".join(f.__doc__ or "" for f in vars(config).values() if callable(f)))
    assert switches
    for switch in switches:
        assert f"| `{switch}` |" in page("switches.md")


def test_every_error_is_described() -> None:
    exported = {name: one for name, one in vars(pyops).items() if isinstance(one, type) and issubclass(one, Exception)}
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page("errors.md"), flags=re.MULTILINE))
    assert rows == {name: one.__bases__[0].__name__ for name, one in exported.items()}


def test_documented_error_is_the_one_raised() -> None:
    x = torch.zeros(2, 4096)
    with pytest.raises(pyops.OpError) as caught:
        pyops.rms_norm(torch.empty_like(x), x, torch.ones(4095), 1e-6)
    (shown,) = blocks("text", page("errors.md"))
    assert shown == f"pyops.OpError: {caught.value}\n"


def test_every_header_is_described() -> None:
    """In the table of the folder that contains it."""
    vocabulary, own = page("kernels.md").split("\n## The vocabulary\n")[1].split("\n### Headers of one family\n")
    rows = re.findall(r"^\| (`\w+\.cuh`.*?) \|", vocabulary, re.MULTILINE)
    found = {f"include/{header}" for row in rows for header in re.findall(r"`(\w+\.cuh)`", row)}
    for family, row in re.findall(r"^\| (\w+) \| (.*?) \|", own.split("\n#")[0], re.MULTILINE):
        found |= {f"{family}/{header}" for header in re.findall(r"`([\w*]+\.cuh)`", row)}
    headers = {name for name in kernels_cu.names() if name.endswith(".cuh")}
    assert {name for name in headers if not any(fnmatch(name, one) for one in found)} == set()
    assert {one for one in found if not any(fnmatch(name, one) for name in headers)} == set()


def test_compiler_specific_headers_are_named() -> None:
    tests = re.compile(r"\bPYOPS_(CUDA|HIP|HOST)\b|__CUDA_ARCH__|__HIP")
    found = {name.rpartition("/")[2] for name in kernels_cu.names() if tests.search(kernels_cu.read(name))}
    (sentence,) = re.findall(r"What differs between them lives in (\w+) headers \(([^)]+)\)", page("kernels.md"))
    assert sentence[0] == "eighteen"
    assert set(re.findall(r"`([\w.]+)`", sentence[1])) == found
    assert len(found) == 18


def test_every_extra_is_described_and_exists() -> None:
    extras = PROJECT["optional-dependencies"].keys()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page("install.md"), flags=re.MULTILINE)) == sorted(extras)
    for path in (*PAGES, *NOTEBOOKS):
        for named in re.findall(r'"\.\[([\w,]+)\]', path.read_text().replace("\\", "")):
            assert set(named.split(",")) <= extras, path


def test_no_pip_line_installs_another_project() -> None:
    """PyPI's `pyops` is another project."""
    for path in (*PAGES, *NOTEBOOKS):
        for words in re.findall(r"pip install ([^`\n&]*)", path.read_text()):
            assert not re.search(r"(?<![\w./-])pyops(?![\w-])", words), (path, words)
