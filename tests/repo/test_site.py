"""The documentation site: the reference has every name, notebooks have their outputs, and links lead to pages."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import kernels_cu
import pyops
import pyops.nn
from pyops.nn.custom_op import op_registry

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
# Runs the theme's search worker. Arguments: the worker, the index, queries. Prints the pages of each query, best first.
SEARCH = """
const fs = require("fs"), [worker, index, ...queries] = process.argv.slice(1);
let handler, answer;
globalThis.self = globalThis;
globalThis.addEventListener = (_, added) => { handler = added; };
globalThis.postMessage = message => { answer(message.data); };
require("vm").runInThisContext(fs.readFileSync(worker, "utf8"));
const ask = (type, data) => new Promise(resolve => { answer = resolve; handler({data: {type, data}}); });
(async () => {
    await ask(0, {...JSON.parse(fs.readFileSync(index)), options: {suggest: true}});
    const found = {};
    for (const query of queries) found[query] = (await ask(2, query)).items.map(page => page.map(one => one.location));
    console.log(JSON.stringify(found));
})();
"""
# {what people type: (the page, an entry among its first three)}
SEARCHES = {
    "gqa": ("attention", "paged_attention_varlen"),
    "flash attention": ("attention", "paged_attention_varlen"),
    "paged attention": ("attention", "paged_attention_v1"),
    "mla": ("attention", "sm100_cutlass_mla_decode"),
    "kv cache": ("cache", None),
    "gptq": ("linear", "gptq_gemm"),
    "awq": ("linear", "awq_gemm"),
    "marlin": ("linear", "marlin_gemm"),
    "rope": ("rotary", "rotary_embedding"),
    "moe": ("moe", None),
    "rmsnorm": ("norm", "rms_norm"),
    "rms_norm": ("norm", None),
    "silu_and_mul": ("activation", None),
    "swiglu": ("activation", None),
    "gguf": ("quantize", "ggml_dequantize"),
    "mamba": ("mamba", None),
    "top-k": ("sampling", "top_k_top_p_sampling_from_logits"),
}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that makes the pages, imported from its folder as MkDocs does."""
    own = [path.stem for path in SITE.glob("*.py")]
    monkeypatch.syspath_prepend(str(SITE))
    yield importlib.import_module("pages")
    for name in own:
        sys.modules.pop(name, None)


def entries(site: ModuleType, folder: str) -> list[str]:
    """The names that the pages in `folder` document."""
    texts = [page.text for page in site.generated() if page.uri.startswith(folder)]
    return re.findall(r"^::: (\S+)$", "\n".join(texts), re.MULTILINE)


def test_every_op_is_in_the_reference_once(site: ModuleType) -> None:
    documented = entries(site, "reference/ops/")
    assert len(documented) == len(set(documented))
    own = {name for name, op in pyops.registry.items() if op.reference.__module__.startswith("pyops.")}
    functions = {name for name, value in vars(pyops).items() if inspect.isfunction(value) and name[0] != "_"}
    assert {name.removeprefix("pyops.") for name in documented} == own | functions - {"op", "warmup", "example_text"}


def test_every_layer_is_in_the_reference(site: ModuleType) -> None:
    documented = {name.rpartition(".")[2] for name in entries(site, "reference/layers/")}
    public = {layer.__name__ for layer in op_registry.values() if layer.__module__.startswith("pyops.nn.")}
    assert {name for name in public if name[0] != "_"} <= documented
    classes = {name: value for name, value in vars(pyops.nn).items() if inspect.isclass(value) and name[0] != "_"}
    exported = {name for name, value in classes.items() if value.__module__.startswith("pyops.nn.")}
    assert exported <= documented


def test_every_other_name_is_in_the_reference(site: ModuleType) -> None:
    texts = [importlib.import_module("reference").errors(), *(page.text for page in site.generated())]
    documented = set(re.findall(r"^::: (\S+)$", "\n".join(texts), re.MULTILINE))
    modules = {name for name, value in vars(pyops).items() if inspect.ismodule(value)} - {"check"}
    assert {f"pyops.{name}" for name in dir(pyops) if name[0] != "_" and name not in modules} - documented == {
        "pyops.registry"
    }


def test_reference_page_adds_to_the_docstring(site: ModuleType) -> None:
    (norm,) = (page.text for page in site.generated() if page.uri == "reference/ops/norm.md")
    entry = norm[norm.index("::: pyops.rms_norm\n") :].split("\n::: ")[0]
    assert f"```python\n{pyops.example_text('rms_norm')}\n```\n" in entry
    assert "- **Element types** float32, float16, bfloat16\n" in entry
    assert "- **Kernels** [rms_norm.cu](../kernels_cu/norm/rms_norm.cu)\n" in entry
    assert "`torch.ops.pyops.rms_norm(Tensor(a0!) out, " in entry


def test_pages_of_ops_begin_with_what_people_look_for(site: ModuleType) -> None:
    pages = {page.uri: page.text for page in site.generated() if page.uri.startswith("reference/ops/")}
    named = importlib.import_module("words").WORDS
    documented = {uri: re.findall(r"^::: pyops\.(\S+)$", text, re.MULTILINE) for uri, text in pages.items()}
    for uri, names in documented.items():
        wanted = [name for name in named if name in names]
        assert wanted, uri
        assert names[: len(wanted)] == wanted, uri
        for name in wanted:
            entry = pages[uri].split(f"::: pyops.{name}\n")[1].split("\n::: ")[0]
            assert f"- **Also known as** {', '.join(named[name])}\n" in entry
    assert set(named) <= {name for names in documented.values() for name in names}


@pytest.mark.rotates
def test_search_finds_what_people_type(tmp_path: Path) -> None:
    """The index of the built site, searched by the theme's own worker. SITE names a site that is built already."""
    pytest.importorskip("material", reason="the site is built with the extra docs")
    if not (node := shutil.which("node")):
        pytest.skip("node runs the theme's search")
    built = Path(os.environ.get("SITE", tmp_path))
    if built == tmp_path:
        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(built)]
        subprocess.run(build, cwd=ROOT, check=True)
    (worker,) = built.glob("assets/javascripts/workers/search.*.min.js")
    files = [str(worker), str(built / "search/search_index.json")]
    answered = subprocess.run([node, "-e", SEARCH, *files, *SEARCHES], capture_output=True, text=True, check=True)
    for query, pages in json.loads(answered.stdout).items():
        page, entry = SEARCHES[query]
        assert pages[0][0].partition("#")[0] == f"reference/ops/{page}.html", (query, pages[:3])
        assert entry is None or f"reference/ops/{page}.html#pyops.{entry}" in pages[0][:3], (query, pages[0])


def test_notebooks_show_their_outputs(site: ModuleType) -> None:
    shown = {page.path: page.text for page in site.generated() if page.path.endswith(".ipynb")}
    assert len(shown) == len(list((ROOT / "docs/notebooks").glob("*.ipynb"))) >= 4
    for path, text in shown.items():
        for cell in json.loads((ROOT / path).read_text())["cells"]:
            assert "".join(cell["source"]).partition("\n")[2] in text
            for output in cell.get("outputs", ()):
                assert "".join(output.get("text", ())).strip() in text
        drawn = sum(
            "data" in output
            for cell in json.loads((ROOT / path).read_text())["cells"]
            for output in cell.get("outputs", ())
        )
        assert text.count("<svg") == drawn


def test_links_of_every_page_lead_to_pages(site: ModuleType) -> None:
    """MkDocs checks the links; this checks their sources, without MkDocs."""
    generated = {page.uri: page for page in site.generated()}
    files = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*") if path.is_file()}
    there = {*generated, *files, *(f"results/{plot.name}" for plot in site.PLOTS)}
    texts = {uri: (page.path, page.text) for uri, page in generated.items()}
    texts |= {path.name: (f"docs/{path.name}", path.read_text()) for path in (ROOT / "docs").glob("*.md")}
    for uri, (path, text) in texts.items():
        text = site.with_reference(text) if uri == "ops.md" else text
        linked = site.with_links(text, path, uri)
        for target in re.findall(
            r"\]\((?!https://|#)([^)#\s]+)[)#]", re.sub(r"^````?.*?^````?$", "", linked, flags=re.M | re.S)
        ):
            found = (Path("/", uri).parent / target).as_posix()
            assert Path(found).resolve().relative_to("/").as_posix() in there, (uri, target)


def test_links_in_code_are_left_alone(site: ModuleType) -> None:
    text = "[a](docs/host.md#use)\n```cpp\n[&](int)\n```\n[b](https://c)\n````text\n```\n[d](LICENSE)\n````\n[e](docs/notebooks)"
    assert site.with_links(text, "README.md", "notebooks/x.md") == text.replace("docs/host.md", "../host.md").replace(
        "docs/notebooks", "README.md"
    )


def test_first_page_has_figures_of_the_engine_and_of_the_ops(site: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    (home,) = (page.text for page in site.generated() if page.path == "README.md")
    linked = site.with_links(home, "README.md", "index.md")
    for theme in ("light", "dark"):
        assert f"(results/speed-{theme}.svg#only-{theme})" in linked
    assert "<picture>" not in linked
    figure = home[home.index('<figure class="bars">') : home.index("</figure>")]
    rows = re.findall(r"^\| (.*?) *((?:\| +[\d.]+ → [\d.]+ )+)\|$", readme, re.MULTILINE)
    times = [(model, *map(str.strip, cells.strip("| ").split("|"))) for model, cells in rows]
    assert len(times) == 8
    for model, *cells in times:
        for cell in cells:
            before, after = map(float, cell.split(" → "))
            bars = f'<i style="width:90%"></i><b style="width:{90 * after / before:.0f}%"></b>'
            assert f"<span>{model}</span><span>{cell}</span></p>{bars}" in figure


def test_first_page_says_all_that_the_readme_says(site: ModuleType) -> None:
    (home,) = (page.text for page in site.generated() if page.path == "README.md")
    readme = (ROOT / "README.md").read_text()
    lines = {line for line in readme.splitlines() if not line.startswith(("<", "## Two", "|"))}
    assert lines <= set(home.splitlines())
    assert home.count("```python") == 3


def test_page_of_benchmarks_has_every_plot_and_its_command(site: ModuleType) -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    results = "../benchmarks/results/nvidia-h200"
    parser = importlib.import_module("benchmarks.__main__").parser()
    for plot in (plot for plot in site.PLOTS if plot.suffix == ".png"):
        part = text.split(f"\n## {plot.stem}\n")[1].split("\n## ")[0]
        assert f"]({results}/{plot.stem}.md)" in part
        assert f"]({results}/{plot.name})" in part
        (command,) = re.findall(r"^python -m benchmarks (.*)$", part, re.MULTILINE)
        assert parser.parse_args(command.split()).family == [plot.stem]
    for command in re.findall(r"-m benchmarks ([^#`\n]*)", text):
        parser.parse_args(command.split())


def test_gallery_has_a_card_for_every_recipe(site: ModuleType) -> None:
    gallery = site.gallery((ROOT / "docs/recipes/README.md").read_text())
    cards = re.findall(r"^- \*\*\[.+\]\((\w+)\.md\)\*\*\n\n    \S.*\n", gallery, re.MULTILINE)
    assert sorted(cards) == sorted({path.stem for path in (ROOT / "docs/recipes").glob("*.md")} - {"README"})
    assert gallery.startswith("# Recipes\n")
    assert "|" not in gallery


def test_pages_link_to_their_files_where_the_repository_is_named(site: ModuleType) -> None:
    pytest.importorskip("mkdocs")
    hooks = importlib.import_module("hooks")
    hooks._paths.update({page.uri: page.path for page in site.generated()})

    def edited(uri: str, repo_url: str) -> str | None:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        url: str | None = hooks.on_pre_page(page, SimpleNamespace(repo_url=repo_url), None).edit_url
        return url

    files = {
        "index.md": "README.md",
        "host.md": "docs/host.md",
        "notebooks/first_op.md": "docs/notebooks/first_op.ipynb",
        "source/kernels_cu/norm/rms_norm.cu.md": "kernels_cu/norm/rms_norm.cu",
    }
    for uri, path in files.items():
        assert edited(uri, "https://host.example/a/b/") == f"https://host.example/a/b/edit/main/{path}"
        assert edited(uri, "") is None
    assert edited("reference/ops/norm.md", "https://host.example/a/b") is None


def test_kernels_link_to_their_headers(site: ModuleType) -> None:
    pages = {page.path: page.text for page in site.generated()}
    assert {f"kernels_cu/{name}" for name in kernels_cu.names()} <= pages.keys()
    assert "Includes [norm.cuh](../include/norm.cuh)." in pages["kernels_cu/norm/rms_norm.cu"]


def test_site_names_no_host() -> None:
    """It has no address, its pages load nothing from elsewhere, and only REPO_URL gives the repository's address."""
    text = (ROOT / "mkdocs.yml").read_text()
    assert not re.search(r"^(site_url|repo_name|site_author)|https?://", text, re.MULTILINE)
    assert re.findall(r"^repo_url: (.*)$", text, re.MULTILINE) == ['!ENV [REPO_URL, ""]']
    assert re.search(r"^  font: false$", text, re.MULTILINE)


def test_every_name_has_its_docstring_entry(site: ModuleType) -> None:
    pytest.importorskip("griffe")
    docstrings = importlib.import_module("docstrings")
    text = """First line, as `rms_norm` and `pyops.layer_norm` do; `own` and ``rms_norm`` stay::

    x = y

Args:
    a, b: words
        that go on; c: more.
    sparse_*: glob; and more words.
    The others: as there.

Raises:
    OpError: never; a: b."""
    assert (
        "\n".join(
            docstrings._sections(docstrings.with_links(text, "own"), ["a", "b", "c", "sparse_d", "sparse_e", "f"])
        )
        == """\
First line, as [`rms_norm`][pyops.rms_norm] and [`layer_norm`][pyops.layer_norm] do; `own` and ``rms_norm`` stay:

    x = y

Args:
    a: words
        that go on
    b: words
        that go on
    c: more.
    sparse_d: glob; and more words.
    sparse_e: glob; and more words.
    f: as there.

Raises:
    OpError: never; a: b."""
    )
