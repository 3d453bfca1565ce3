"""Docstrings as the API reference wants them, from docstrings as a reader of the source wants them.

An op in backticks becomes a link. A literal block loses its second colon. Parameters that share an entry get one each,
also those of ``blocksparse_*`` and of ``others``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import griffe

import pyops

_NAMES = r"[\w*]+(?:,\s+[\w*]+)*"
_OTHERS = r"\s+(?:The )?others(?=: )"


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of all objects before they are parsed."""

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
            entries = [part for entry in re.split(r"\n(?=    \S)", body) for part in _parts(entry)]
            named = {p for names, _ in entries for p in _meant(names, parameters) if names != ["*"]}
            others = [p for p in parameters if p not in named]
            yield heading
            for names, words in entries:
                for name in others if names == ["*"] else _meant(names, parameters):
                    yield f"    {name}: {words}"
            yield ""
        else:
            yield section


def _meant(names: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """The names, and for a pattern the parameters that it fits."""
    return [one for name in names for one in ([p for p in parameters if fnmatch(p, name)] if "*" in name else [name])]


def _parts(entry: str) -> Iterator[tuple[list[str], str]]:
    """(names, words) of each part of ``a, b: words; c: words``. The others are ``*``."""
    for part in re.split(rf";\s+(?={_NAMES}: )", re.sub(_OTHERS, "*", entry)):
        names, _, words = part.strip().partition(": ")
        yield re.split(r",\s+", names), words
