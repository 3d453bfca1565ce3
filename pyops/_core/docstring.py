"""Docstrings: what they say of each parameter, and the docstring of the form of an op that allocates its outputs."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

_NAMES = r"[\w*]+(?:,\s+[\w*]+)*"
_OTHERS = r"\s+(?:The )?others(?=: )"
_WIDTH = 112
# What the text of an output says of a tensor that a caller gives, and not of a new one.
_OF_GIVEN = re.compile(
    r"(rows|elements of a row|heads)( are|) (of (one|any) strides?|contiguous)|(of )?any strides?( .*|)|contiguous"
    r"|the last stride is 1|(written( and returned)?|new unless given|may be `\w+`( itself)?|it must be given)",
    re.IGNORECASE,
)


class Docstring(NamedTuple):
    """A docstring in parts.

    Attributes:
        text: all before the first section.
        parameters: {name: its text in the section Args, in one line}.
        sections: the others, such as ``Raises``, each with its heading.
    """

    text: str
    parameters: dict[str, str]
    sections: list[str]

    def joined(self, *more: str) -> str:
        """The docstring, in which each parameter has an entry of its own, and with `more` sections after them."""
        named = section("Args", self.parameters)
        return "\n\n".join(filter(None, (self.text, named, *more, *self.sections)))


def parse(function: Callable[..., Any], parameters: Sequence[str] = ()) -> Docstring:
    """The docstring of a function with these parameters."""
    text, *found = re.split(r"\n+(?=[A-Z]\w+:\n    \S)", f"\n{inspect.getdoc(function) or ''}")
    named: dict[str, str] = {}
    others = []
    for one in found:
        heading, _, body = one.partition(":\n")
        if heading == "Args":
            for names, words in entries(body, parameters):
                named |= dict.fromkeys(names, words)
        else:
            others.append(one.rstrip())
    return Docstring(text.strip(), {name: named[name] for name in parameters or named if name in named}, others)


def entries(body: str, parameters: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """(names, text) of each entry of a section of names, whose texts are lines that begin with four spaces.

    An entry may have several names, or several parts: ``a, b: text; c: text``. A name may be a pattern, ``block_*``, or
    ``others``: the parameters that no other entry names.
    """
    parts = [part for entry in re.split(r"\n(?=    \S)", body) for part in _parts(entry)]
    named = {one for names, _ in parts for one in _meant(names, parameters) if names != ["*"]}
    others = [name for name in parameters if name not in named]
    for names, words in parts:
        yield others if names == ["*"] else _meant(names, parameters), " ".join(words.split())


def _meant(names: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """The names, and for a pattern the parameters that it fits."""
    return [one for name in names for one in ([p for p in parameters if fnmatch(p, name)] if "*" in name else [name])]


def _parts(entry: str) -> Iterator[tuple[list[str], str]]:
    """(names, words) of each part of ``a, b: words; c: words``. The others are ``*``."""
    for part in re.split(rf";\s+(?={_NAMES}: )", re.sub(_OTHERS, "*", entry)):
        names, _, words = part.strip().partition(": ")
        yield re.split(r",\s+", names), words


def section(heading: str, texts: Mapping[str, str]) -> str:
    """A section of names, each with its text; "" without names."""
    lines = [f"{heading}:"]
    for name, text in texts.items():
        lines += textwrap.wrap(
            f"{name}: {text}",
            _WIDTH,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines) if texts else ""


def returning(
    reference: Callable[..., Any], own: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str]
) -> str:
    """The docstring of the form of an op that allocates its outputs.

    Args:
        reference: of the op; own: has the texts of parameters that the op does not have.
        inputs: parameters of the form.
        outputs: what it returns.
    """
    found = parse(reference, [*inspect.signature(reference).parameters])
    texts = found.parameters | parse(own).parameters
    args = {name: texts[name] for name in inputs if name in texts}
    results = {name: of_new(texts[name]) for name in outputs if name in texts}
    return Docstring(found.text, args, found.sections).joined(section("Returns", results))


def of_new(text: str) -> str:
    """The text of an output without what concerns only a tensor that a caller gives."""
    sentences = []
    for sentence in re.split(r"(?<=[.\w`])\. (?=[A-Z])", text.removesuffix(".")):
        clauses = (
            re.sub(r",? (contiguous|written( and returned)?)(?=[,:]|$)", "", one) for one in sentence.split("; ")
        )
        sentences.append("; ".join(one for one in clauses if not _OF_GIVEN.fullmatch(one)))
    kept = ". ".join(filter(None, sentences))
    return f"{kept}." if kept else text
