"""The documentation site: the reference has every name, notebooks have their outputs, and links lead to pages."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kernels_cu
import pyops
import pyops.nn
from pyops.nn.custom_op import op_registry

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


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


def test_first_page_has_a_light_and_a_dark_plot(site: ModuleType) -> None:
    home = site.home((ROOT / "README.md").read_text())
    for theme in ("light", "dark"):
        assert f"/speed-{theme}.svg#only-{theme})" in home
    assert "<picture>" not in home


def test_kernels_link_to_their_headers(site: ModuleType) -> None:
    pages = {page.path: page.text for page in site.generated()}
    assert {f"kernels_cu/{name}" for name in kernels_cu.names()} <= pages.keys()
    assert "Includes [norm.cuh](../include/norm.cuh)." in pages["kernels_cu/norm/rms_norm.cu"]


def test_site_names_no_host() -> None:
    """It has no address, and its pages load nothing from elsewhere."""
    text = (ROOT / "mkdocs.yml").read_text()
    assert not re.search(r"^(site_url|repo_url|repo_name|site_author)|https?://", text, re.MULTILINE)
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
