"""Docstrings as the API reference wants them, from docstrings as a reader of the source wants them.

An op in backticks becomes a link. A literal block loses its second colon. Parameters that share an entry get one each,
also those of ``blocksparse_*`` and of ``others``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import griffe

import pyops
from pyops import _docstring as docstring


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of all objects before they are parsed.

    The stub is left out: it says for type checkers what the reference says of the functions themselves.
    """

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        if str(mod.filepath).endswith(".pyi"):
            mod.members.clear()

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            parameters = [one.name for one in getattr(obj, "parameters", ()) if one.name != "self"]
            obj.docstring.value = "\n".join(_sections(with_links(obj.docstring.value, obj.name), parameters))


def with_links(text: str, own: str) -> str:
    """The docstring of the name `own` with links to the ops that it speaks of."""

    def linked(match: re.Match[str]) -> str:
        name = match[1].removeprefix("pyops.")
        return f"[`{name}`][pyops.{name}]" if name in pyops.registry and name != own else match[0]

    text = re.sub(r"(?<![`\[])`((?:pyops\.)?\w+)`(?!`)", linked, text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _sections(text: str, parameters: Sequence[str]) -> Iterator[str]:
    """The docstring, in whose sections of names every name has an entry of its own."""
    for section in re.split(r"\n(?=\w+:\n    \S)", text):
        if re.match(r"(Args|Attributes):\n", section):
            heading, _, body = section.partition("\n")
            yield heading
            for name, words in docstring.entries(body, parameters):
                yield f"    {name}: {words}"
            yield ""
        else:
            yield section
