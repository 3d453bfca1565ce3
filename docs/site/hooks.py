"""The site's hooks of MkDocs: they add the generated pages, name them in the navigation, and turn links."""

from __future__ import annotations

from typing import Any

import pages
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import pyops

_paths: dict[str, str] = {}  # {page: the file from which its links start}, of the generated pages


def on_config(config: MkDocsConfig) -> None:
    """Put the generated pages where the navigation names a folder of theirs, and the version below every page."""
    config.copyright = f"pyops {pyops.__version__}"
    folders = {
        "reference/ops/": [{name: f"reference/ops/{name}.md"} for name in reference.families()],
        "reference/layers/": [{name: f"reference/layers/{name}.md"} for name in reference.layers()],
        "reference/": [{title: f"reference/{page}.md"} for page, (title, *_) in reference.OTHERS.items()],
        "results/": [{name: f"results/{name}.md"} for name in pages.RESULTS],
    }

    def filled(item: Any) -> Any:
        if isinstance(item, dict):
            return {title: filled(below) for title, below in item.items()}
        return list(map(filled, item)) if isinstance(item, list) else folders.get(item, item)

    config.nav = filled(config.nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in pages.generated():
        files.append(File.generated(config, page.uri, content=page.text))
        _paths[page.uri] = page.path
    for plot in pages.PLOTS:
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_pre_page(page: Page, config: MkDocsConfig, files: Files) -> Page:
    """Where REPO_URL names the repository, pages that stand for a file of it link to that file."""
    path = _source_of(page)
    there = bool(config.repo_url) and (pages.ROOT / path).is_file()
    page.edit_url = f"{config.repo_url.rstrip('/')}/edit/main/{path}" if there else None
    return page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if uri == "ops.md":
        markdown = pages.with_reference(markdown)
    if uri == "recipes/README.md":
        markdown = pages.gallery(markdown)
    if uri == "errors.md":
        markdown += f"\n{reference.errors()}"
    return pages.with_links(markdown, _source_of(page), uri)


def _source_of(page: Page) -> str:
    """The file of the repository that the page stands for."""
    return _paths.get(page.file.src_uri, f"docs/{page.file.src_uri}")
