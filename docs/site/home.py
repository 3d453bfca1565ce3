"""The first page, from the README: the same words in another order, with cards, a figure of the engine, and buttons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pyops

_RECIPE = Path(__file__).parents[1] / "recipes" / "paged_attention.py"
_ORDER = ("Why", "Speed", "Two commands", "Use", "Ops", "Limits")
_SCALE = 0.9  # vLLM's time, as a share of the width: slower rows need more
_BUTTONS = """
[Install](#install){ .md-button .md-button--primary }
[First op](docs/notebooks/first_op.ipynb){ .md-button }
[Recipes](docs/recipes/README.md){ .md-button }
[Benchmarks](docs/benchmarks.md){ .md-button }

Version {version} · [what changed](CHANGELOG.md)
"""


def page(readme: str) -> str:
    """The README as the first page, without a list of pages next to it."""
    intro, *rest = re.split(r"^## (?=[A-Z])", readme, flags=re.MULTILINE)
    sections = {title: body for title, _, body in (section.partition("\n") for section in rest)}
    sections["Why"] = f'\n<div class="grid cards" markdown>\n{sections["Why"]}\n</div>\n'
    sections["Speed"] = _with_bars(sections["Speed"])
    recipe = _RECIPE.read_text(encoding="utf-8")
    sections["Use"] += f"\n[Attention over a paged cache](docs/recipes/{_RECIPE.stem}.md):\n\n```python\n{recipe}```\n"
    titles = {"Two commands": "Install"}
    body = "\n".join(f"## {titles.get(title, title)}\n{sections[title]}" for title in _ORDER)
    buttons = _BUTTONS.replace("{version}", pyops.__version__)
    return f'---\nhide: [navigation, toc]\n---\n<div class="hero" markdown>\n{intro}{buttons}\n</div>\n\n{body}'


def _with_bars(speed: str) -> str:
    """The section of the speed, with bars in place of the table of the engine."""
    before, rest = speed.split("<!-- engine -->")
    engine, after = rest.split("<!-- /engine -->")
    lines = [line for line in engine.splitlines() if line.startswith("|")]
    words = "\n".join(line for line in engine.splitlines() if not line.startswith("|"))
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    panels = "".join(_panel(name, [(row[0], row[i]) for row in rows]) for i, name in enumerate(head) if name)
    legend = "<figcaption>milliseconds: <i></i> vLLM → <b></b> vLLM with pyops</figcaption>"
    return f'{before}{words}\n<figure class="bars">{legend}{panels}</figure>\n{after}'


def _panel(title: str, rows: list[tuple[str, str]]) -> str:
    return f"<div><strong>{escape(title)}</strong>{''.join(_bars(rows))}</div>"


def _bars(rows: list[tuple[str, str]]) -> Iterator[str]:
    """A model with its two times, such as ``4.81 → 4.23``, above a bar for each."""
    for model, times in rows:
        before, after = map(float, times.split(" → "))
        widths = (f'style="width:{100 * _SCALE * share:.0f}%"' for share in (1, after / before))
        yield f"<p><span>{escape(model)}</span><span>{times}</span></p><i {next(widths)}></i><b {next(widths)}></b>"
