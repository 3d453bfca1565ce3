"""The pages that no file of docs/ is, and where links lead: as Markdown, without MkDocs.

Links are those of a repository view, relative to a file of the repository. `with_links` turns them into the site's.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import home
import notebooks
import reference

import kernels_cu
from pyops._core.text.source import headers_of
from pyops.cli import table

ROOT = Path(__file__).parents[2]
FILES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "RELEASING.md": "releasing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
RESULTS = {path.stem: path for path in sorted((ROOT / reference.RESULTS).glob("*.md"))}
PLOTS = [path for kind in ("svg", "png") for path in sorted((ROOT / reference.RESULTS).glob(f"*.{kind}"))]
_FENCED = re.compile(r"(^````.*?^````$|^```.*?^```$)", re.MULTILINE | re.DOTALL)
_THEMED = re.compile(r'<picture><source [^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)"></picture>')
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")


@dataclass(frozen=True)
class Generated:
    """A page: where it is on the site, the file of the repository from which its links start, and its Markdown."""

    uri: str
    path: str
    text: str


def generated() -> Iterator[Generated]:
    """All pages that are generated."""
    for path, uri in FILES.items():
        yield Generated(
            uri, path, {"README.md": home.page, "LICENSE": _license}.get(path, str)((ROOT / path).read_text())
        )
    for file in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        text = notebooks.page(json.loads(file.read_text()), file.name)
        yield Generated(f"notebooks/{file.stem}.md", f"docs/notebooks/{file.name}", text)
    for name in kernels_cu.names():
        yield Generated(f"source/kernels_cu/{name}.md", f"kernels_cu/{name}", _source(name))
    for name, file in RESULTS.items():
        text = file.read_text().replace("# ", f"# {name}, ", 1)
        yield Generated(f"results/{name}.md", f"{reference.RESULTS}/{name}.md", f"---\nhide: [toc]\n---\n{text}")
    for folder, texts in (("ops", reference.families()), ("layers", reference.layers()), ("", reference.others())):
        for name, text in texts.items():
            yield Generated(posixpath.join("reference", folder, f"{name}.md"), "docs/reference.md", text)


def uri_of(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in FILES:
        return FILES[path]
    if path.startswith("kernels_cu/"):
        return f"source/{path}.md"
    if path.startswith(reference.RESULTS):
        return "results" + path.removeprefix(reference.RESULTS)
    path = path.removeprefix("docs/")
    return "notebooks/README.md" if path == "notebooks" else path.replace(".ipynb", ".md")


def with_links(markdown: str, path: str, uri: str) -> str:
    """The text of the file `path` with links as the page `uri` needs them. Code stays as it is.

    Plots for light and for dark pages follow the colours of the site, not those of the reader's system.
    """

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        return match[1] if target == path else posixpath.relpath(uri_of(target), posixpath.dirname(uri))

    pieces = _FENCED.split(markdown)
    pieces[::2] = (
        _LINK.sub(moved, _THEMED.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", text)) for text in pieces[::2]
    )
    return "".join(pieces)


def with_reference(ops: str) -> str:
    """The table of all ops and functions, which lead to their places in the reference instead of to their files."""
    families = {op.name: name for name, ops in table.families().items() for op in ops}
    families |= {one: name for name, functions in table.functions().items() for one in functions}
    link = re.compile(r"\[`(\w+)`\]\(\.\./pyops/[^)]*\)")
    return link.sub(lambda match: f"[`{match[1]}`](reference/ops/{families[match[1]]}.md#pyops.{match[1]})", ops)


def gallery(recipes: str) -> str:
    """The table of recipes as cards."""
    cards = re.sub(r"^\| (\[.*?\]\(\w+\.md\)) \| (.*) \|$", r"- **\1**\n\n    \2\n", recipes, flags=re.MULTILINE)
    before, cards = cards.split("| recipe | what |\n|---|---|\n")
    return f'{before}<div class="grid cards" markdown>\n\n{cards}\n</div>\n'


def _license(text: str) -> str:
    return f"# License\n\n```text\n{text.rstrip()}\n```"


def _source(name: str) -> str:
    """The page of a kernel source, which is found by the pages that link to it, and by no search for its text."""
    text = kernels_cu.read(name)
    included = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    folder = name.rpartition("/")[0]
    found = [path for header in included for path in headers_of(folder, header)]
    links = ", ".join(f"[{path.rpartition('/')[2]}](../{path})" for path in found)
    parts = [f"# {name}", f"Includes {links}." if links else "", f'```cuda linenums="1"\n{text.rstrip()}\n```']
    return "---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n" + "\n\n".join(filter(None, parts))
