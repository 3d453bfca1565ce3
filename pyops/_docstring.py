"""Docstrings: what they say of each parameter, and the docstring of the form of an op that allocates its outputs.

The package imports this module before its ops: it registers `returning` with the core, which writes no docstrings.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any, NamedTuple

from ._core.op.returning import document_by

_NAMES = r"[\w*]+(?:,\s+[\w*]+)*"
_OTHERS = r"\s+(?:The )?others(?=: )"
_WIDTH = 90  # of the lines of a text that is changed
# What the text of an output says of a tensor that a caller gives, and not of a new one: clauses, and words in others.
_OF_GIVEN = re.compile(
    r"(rows|elements of a row|heads)( are)? (of (one|any) strides?|contiguous)|(of )?any strides?( .*)?|contiguous"
    r"|constant row stride|the last stride is 1|written|returned|written and returned|new unless given|it must be given"
    r"|may be `?\w+`?( itself)?",
    re.IGNORECASE,
)
_WORDS_OF_GIVEN = re.compile(
    r"(?<! are)(?<! is)(?<! and),? (contiguous|in any shape|written and returned|written|returned|and returned)"
    r"(?=[,:]|$)"
)


class Docstring(NamedTuple):
    """A docstring in parts.

    Attributes:
        text: all before the first section.
        parameters: {name: its text in the section Args, with the line breaks and indents that it has there}.
        sections: {heading: text} of the others, such as ``Raises``. Text after Args without a heading has "" for one.
    """

    text: str
    parameters: dict[str, str]
    sections: dict[str, str]

    def joined(self) -> str:
        """The docstring, in which each parameter has an entry of its own."""
        sections = (f"{heading}:\n{text}" if heading else text for heading, text in self.sections.items())
        return "\n\n".join(filter(None, (self.text, named("Args", self.parameters), *sections)))


def parse(function: Callable[..., Any], parameters: Sequence[str] = ()) -> Docstring:
    """The docstring of a function with these parameters."""
    text, *found = re.split(r"\n+(?=[A-Z]\w+:\n    \S)", f"\n{inspect.getdoc(function) or ''}")
    sections = {heading: body.rstrip() for heading, _, body in (one.partition(":\n") for one in found)}
    args, after = _indented(sections.pop("Args", ""))
    if after:
        sections = {"": after, **sections}
    texts = dict(entries(args, parameters))
    return Docstring(text.strip(), {name: texts[name] for name in parameters or texts if name in texts}, sections)


def entries(body: str, parameters: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(name, text) of each name in a section of names. Entries are lines that begin with four spaces.

    An entry may have several names, or several parts: ``a, b: text; c: text``. A name may be a pattern, ``block_*``, or
    ``others``: the parameters that no other entry names.
    """
    parts = [part for entry in re.split(r"\n(?=    \S)", body) if entry for part in _parts(entry)]
    meant = {one for names, _ in parts for one in _meant(names, parameters) if names != ["*"]}
    others = [name for name in parameters if name not in meant]
    for names, words in parts:
        for name in others if names == ["*"] else _meant(names, parameters):
            yield name, words


def _indented(body: str) -> tuple[str, str]:
    """(the lines of a section, what follows after the last of them that is indented)."""
    lines = body.split("\n")
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return "\n".join(lines[:end]).rstrip(), "\n".join(lines[end:])


def _meant(names: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """The names, and for a pattern the parameters that it fits."""
    return [one for name in names for one in ([p for p in parameters if fnmatch(p, name)] if "*" in name else [name])]


def _parts(entry: str) -> Iterator[tuple[list[str], str]]:
    """(names, words) of each part of ``a, b: words; c: words``. The others are ``*``."""
    for part in re.split(rf";\s+(?={_NAMES}: )", re.sub(_OTHERS, "*", entry)):
        names, _, words = part.strip().partition(": ")
        yield re.split(r",\s+", names), words


def named(heading: str, texts: Mapping[str, str]) -> str:
    """A section of names, each with its text; "" without names."""
    return "\n".join([f"{heading}:", *(f"    {name}: {text}" for name, text in texts.items())]) if texts else ""


def returning(
    reference: Callable[..., Any], own: Callable[..., Any], inputs: Sequence[str], outputs: Mapping[str, bool]
) -> str:
    """The docstring of the form of an op that allocates its outputs.

    Args:
        reference: of the op.
        own: the result function. Its section Args has the texts of parameters that the op does not have, and its
            section Returns those of outputs that say less, or more, than the texts of the op.
        inputs: parameters of the form.
        outputs: {what it returns: whether the op writes only a part of it, so that the rest are zeros}.
    """
    names = list(inspect.signature(reference).parameters)
    found, more = parse(reference, names), parse(own)
    texts = found.parameters | more.parameters
    for before, name in pairwise(names):
        shape = re.match(r"\[[^]]*\]", texts.get(before, ""))
        if before in outputs and shape and name in texts:
            texts[name] = re.sub(r"^the same shape", shape[0], texts[name])
    rest = {True: " Zeros where the op leaves it as it is.", False: ""}
    results = {name: of_new(texts[name] + rest[partial]) for name, partial in outputs.items() if name in texts}
    results |= dict(entries(more.sections.get("Returns", "")))
    args = {name: texts[name] for name in inputs if name in texts}
    docstring = Docstring(found.text, args, found.sections).joined()
    return "\n\n".join(filter(None, (docstring, named("Returns", results))))


def of_new(text: str) -> str:
    """The text of an output without what concerns only a tensor that a caller gives."""
    sentences = []
    for sentence in re.split(r"(?<=[.\w`\]])\. (?=[A-Z])", " ".join(text.split()).removesuffix(".")):
        clauses = (clause for clause in sentence.split("; ") if not _OF_GIVEN.fullmatch(clause))
        sentences.append("; ".join(_WORDS_OF_GIVEN.sub("", clause) for clause in clauses))
    kept = ". ".join(filter(None, sentences)).replace("` takes them", "` returns them")
    lines = textwrap.wrap(f"{kept}.", _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n        ".join(lines) if kept else text


document_by(returning)
