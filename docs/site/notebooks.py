"""A notebook as Markdown: its text, its code, and below each cell what it printed and drew."""

from __future__ import annotations

import re
from typing import Any


def page(notebook: dict[str, Any], name: str) -> str:
    """The page of a notebook, with a link to its file `name`."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(_fenced("python", source))
            parts += map(_output, cell["outputs"])
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"---\nhide: [toc]\n---\n{title}\n\n[Download this notebook]({name}){{ .download download }}\n{rest}"


def _output(output: dict[str, Any]) -> str:
    if "text" in output:
        return _fenced("{ .text .output }", "".join(output["text"]).rstrip("\n"))
    drawn = "".join(output["data"]["image/svg+xml"])
    drawn = re.sub(r"<(metadata|style)\b.*?</\1>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    return f'<div class="figure">{drawn.strip()}</div>'


def _fenced(language: str, text: str) -> str:
    """A block of code, whose fence is longer where the text has a fence."""
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}"
