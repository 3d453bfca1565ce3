"""Tokens of a kernel source: its code as the host's compiler sees it, without comments and preprocessor lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<skipped>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<directive>(?<![^\n])[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])')
    |(?P<number>(?:0[xX][0-9a-fA-F.']+(?:[pP][+-]?\d+)?|\.?\d(?:[eE][+-]|[\w.'])*)[uUlLfF]*)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<sign><<=|>>=|->|::|\+\+|--|&&|\|\||[<>=!+*/%&|^-]=|<<|.)""",
    re.VERBOSE | re.DOTALL,
)
_CONDITIONAL = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)", re.DOTALL)
_DEFINED_ON_HOST = {"PYOPS_HOST"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Token(NamedTuple):
    kind: str  # "string", "number", "word" or "sign"
    text: str
    start: int
    end: int


@cache
def tokens(text: str) -> tuple[Token, ...]:
    """The tokens of `text`, without code that the preprocessor hides from the host's compiler."""
    found = []
    shown: list[bool] = []  # for each conditional around the current line: is its branch compiled?
    taken: list[bool] = []  # for each: was one of its branches compiled?
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "directive":
            if conditional := _CONDITIONAL.fullmatch(match[0]):
                _enter(conditional[1], conditional[2], shown, taken)
        elif kind != "skipped" and kind is not None and all(shown):
            found.append(Token(kind, match[0], match.start(), match.end()))
    return tuple(found)


def _enter(directive: str, condition: str, shown: list[bool], taken: list[bool]) -> None:
    """Follow one line of a conditional."""
    if directive == "endif":
        shown.pop()
        taken.pop()
        return
    if directive in ("ifdef", "ifndef"):
        holds = (condition.split()[0] in _DEFINED_ON_HOST) == (directive == "ifdef")
    else:
        holds = directive == "else" or _holds(condition)
    if directive.startswith("if"):
        shown.append(holds)
        taken.append(holds)
    else:
        shown[-1] = holds and not taken[-1]
        taken[-1] |= holds


def _holds(condition: str) -> bool:
    """The value of a preprocessor condition on the host, where undefined names are 0."""
    plain = re.sub(r"//.*|/\*.*?\*/|\\\n", " ", condition)
    plain = re.sub(r"defined\s*\(?\s*(\w+)\s*\)?", lambda m: str(int(m[1] in _DEFINED_ON_HOST)), plain)
    plain = re.sub(r"[A-Za-z_]\w*", lambda m: str(int(m[0] in _DEFINED_ON_HOST)), plain)
    plain = plain.replace("&&", " and ").replace("||", " or ").replace("!=", "<>")
    return bool(eval(plain.replace("!", " not ").replace("<>", "!=").strip(), {"__builtins__": {}}))


def brackets(code: Sequence[Token]) -> tuple[dict[int, int], list[int]]:
    """({opening token: closing token}, for each token the bracket that it is directly inside of, or -1)."""
    partner: dict[int, int] = {}
    inside, opened = [], []
    for i, token in enumerate(code):
        if token.text in _CLOSING.values() and opened:
            partner[opened.pop()] = i
        inside.append(opened[-1] if opened else -1)
        if token.text in _CLOSING:
            opened.append(i)
    return partner, inside


class Declaration(NamedTuple):
    """A function, class, variable or alias at the top level of a file: tokens begin to end."""

    name: str
    begin: int
    end: int


def declarations(code: Sequence[Token]) -> Iterator[Declaration]:
    """Everything that a file declares, in order. A declaration without a name, such as an operator, is called ''."""
    partner, _ = brackets(code)
    begin = i = 0
    while i < len(code):
        closing = partner.get(i, i)
        follows = code[closing + 1].text if closing + 1 < len(code) else ""
        is_body = code[i].text == "{" and follows not in (";", ",", "(")
        if code[closing].text == ";" or is_body:
            yield Declaration(_name([token.text for token in code[begin : closing + 1]]), begin, closing + 1)
            begin = closing + 1
        i = closing + 1


def _name(words: list[str]) -> str:
    if "operator" in words[: words.index("{") if "{" in words else None]:
        return ""
    if words[0] == "template" and "<" in words:
        depth = 0
        for i, word in enumerate(words):
            depth += (word == "<") - (word == ">")
            if i and word == ">" and depth == 0:
                words = words[i + 1 :]
                break
    for keyword in ("struct", "class", "union", "enum", "using"):
        if keyword in words[:1]:
            return next((word for word in words[1:] if word.isidentifier() and word != "class"), "")
    marks = ("=", "{", ";", "[")
    head = words[: min((words.index(mark) for mark in marks if mark in words), default=len(words))]
    skipped = {"LAUNCH_BOUNDS", "CLUSTER_OF", "alignas", "__align__", "static_assert"}
    called = [a for a, b in pairwise(head) if b == "(" and a.isidentifier() and a not in skipped]
    named = [word for word in head if word.isidentifier()]
    return called[0] if called else named[-1] if named else ""


def find(code: Sequence[Token], fragment: str) -> list[tuple[int, int]]:
    """Where `fragment` occurs, as (start, end) in the text. White space, line breaks and comments do not matter."""
    wanted = [token.text for token in tokens(fragment)]
    words = [token.text for token in code]
    size = len(wanted)
    places = (i for i in range(len(words) - size + 1) if words[i : i + size] == wanted)
    return [(code[i].start, code[i + size - 1].end) for i in places]
