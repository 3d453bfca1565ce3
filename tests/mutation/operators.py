"""The mutants that can be generated from a kernel source.

An operator looks at one token and says which text to replace, and by what. It looks at code alone (`code.tokens`), and
skips `static_assert`s, parameters of templates, assembly, and the entries of tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.mutation import code
from tests.mutation.code import Token
from tests.mutation.mutant import Mutant, digest, numbered

Change = tuple[int, int, str]  # the tokens first to last are replaced by a text
_CONTEXT = 12  # tokens on either side of a change that its name depends on

_BOUNDARIES = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_SWAPS = {"min": "max", "fminf": "fmaxf", "ieee_min": "ieee_max", "Min": "Max"}
_SWAPS |= {larger: smaller for smaller, larger in _SWAPS.items()}
_SYNCHRONISES = {"__syncthreads", "sync_cluster", "leave_cluster", "sync_warp", "cp_async_wait"}
_CASTS = {"int", "int32_t", "int64_t", "uint32_t", "uint64_t", "unsigned", "float", "double"}
_EXITS = {"return", "continue", "break"}
_SKIPPED_CALLS = {"static_assert", "asm", "__launch_bounds__", "LAUNCH_BOUNDS", "CLUSTER_OF", "alignas", "__align__"}


class Source:
    """A kernel source as the operators see it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.code = code.tokens(text)
        self.words = [token.text for token in self.code]
        self.partner, self.inside = code.brackets(self.code)
        self.skipped = self._skipped()

    def _skipped(self) -> set[int]:
        """Tokens that no operator may change."""
        skipped: set[int] = set()
        for i, word in enumerate(self.words):
            if word in _SKIPPED_CALLS:
                opening = self.words.index("(", i)
                skipped |= set(range(i, self.partner.get(opening, opening) + 1))
            elif word == "template" and self.words[i + 1] == "<":
                depth, j = 0, i + 1
                while True:
                    depth += {"<": 1, ">": -1}.get(self.words[j], 0)
                    skipped.add(j)
                    if depth == 0:
                        break
                    j += 1
        return skipped

    def word(self, i: int) -> str:
        return self.words[i] if 0 <= i < len(self.words) else ""

    def is_binary(self, i: int) -> bool:
        """Whether the sign stands between operands, with white space on both sides, unlike a template bracket."""
        token = self.code[i]
        spaced = self.text[token.start - 1].isspace() and self.text[token.end : token.end + 1].isspace()
        before = self.code[i - 1]
        return (
            spaced and (before.kind in ("word", "number") or before.text in (")", "]", ">")) and before.text != "return"
        )

    def slice(self, first: int, last: int) -> str:
        """The text of the tokens first to last."""
        return self.text[self.code[first].start : self.code[last].end] if first <= last else ""

    def end_of_operand(self, i: int, ends: tuple[str, ...]) -> int:
        """The last token of the expression that begins at token `i` and ends before one of `ends` or a bracket."""
        while i < len(self.words) and self.words[i] not in (*ends, ";", ",", ")", "]", "}"):
            i = self.partner.get(i, i) + 1
        return i - 1


Operator = Callable[[Source, int, Token], Iterator[Change]]


def _comparison(source: Source, i: int, token: Token) -> Iterator[Change]:
    if token.text in _BOUNDARIES and source.is_binary(i):
        yield i, i, _BOUNDARIES[token.text]


def _bound(source: Source, i: int, token: Token) -> Iterator[Change]:
    if token.text in ("<", "<=", ">", ">=") and source.is_binary(i):
        last = source.end_of_operand(i + 1, ("&&", "||", "?", ":", "==", "!="))
        yield i + 1, last, f"({source.slice(i + 1, last)}) - 1"
        return
    binds_tighter = source.word(i + 2) in ("*", "/", "%", ".")
    if token.text in "+-" and source.word(i + 1) == "1" and source.is_binary(i) and not binds_tighter:
        yield i, i + 1, ""


def _constant(source: Source, i: int, token: Token) -> Iterator[Change]:
    in_table = source.word(source.inside[i]) == "{" and source.word(i - 1) in (",", "{")
    if token.kind != "number" or in_table:
        return
    if re.fullmatch(r"\d+", token.text):
        yield i, i, str(int(token.text) + 1)
    elif match := re.fullmatch(r"0[xX]([0-9a-fA-F]+)([uUlL]*)", token.text):
        yield i, i, f"{int(match[1], 16) ^ 1:#x}{match[2]}"
    elif match := re.fullmatch(r"(\d*\.\d*)(f?)", token.text):
        yield i, i, f"{float(match[1]) * 2 or 1.0!r}{match[2]}"


def _barrier(source: Source, i: int, token: Token) -> Iterator[Change]:
    if token.text in _SYNCHRONISES and source.word(i - 1) in (";", "{", "}", ")", "else"):
        last = source.words.index(";", i)
        if source.words[last - 1] == ")":
            yield i, last, ";"


def _min_max(source: Source, i: int, token: Token) -> Iterator[Change]:
    is_reduction = source.word(i - 1) == "<" and source.word(i + 1) in (",", ">")
    is_call = source.word(i + 1) == "(" and token.text not in ("Min", "Max")
    is_own_name = source.word(i - 1) in ("float", "int", "T", "int64_t")
    if token.text in _SWAPS and (is_reduction or is_call) and not is_own_name:
        yield i, i, _SWAPS[token.text]


def _condition(source: Source, i: int, token: Token) -> Iterator[Change]:
    """An `if` is negated, or never true; a conditional expression takes its other value."""
    if token.text == "if":
        opening = i + 2 if source.word(i + 1) == "constexpr" else i + 1
        closing = source.partner[opening]
        inner = source.slice(opening + 1, closing - 1)
        yield opening, closing, f"(!({inner}))"
        yield opening, closing, "(false)"
    elif token.text == "?":
        colon = source.end_of_operand(i + 1, (":",)) + 1
        if source.word(colon) == ":" and "?" not in source.words[i + 1 : colon]:
            last = source.end_of_operand(colon + 1, (":",))
            yield i + 1, last, f"{source.slice(colon + 1, last)} : {source.slice(i + 1, colon - 1)}"


def _predicate(source: Source, i: int, token: Token) -> Iterator[Change]:
    """A statement guarded by an `if`, usually a store or an early exit, always happens."""
    if token.text == "if":
        opening = i + 2 if source.word(i + 1) == "constexpr" else i + 1
        yield opening, source.partner[opening], "(true)"


def _cast(source: Source, i: int, token: Token) -> Iterator[Change]:
    declares = source.code[i - 1].kind == "word" and source.word(i - 1) != "return"
    if token.text in _CASTS and source.word(i + 1) == "(" and not declares and not _is_implicit(source, i):
        yield i, i, ""


def _is_implicit(source: Source, i: int) -> bool:
    """Whether the cast is the whole initialiser of a variable of its own type."""
    if source.word(i - 1) != "=" or source.word(source.partner[i + 1] + 1) not in (",", ";"):
        return False
    first = i - 1
    while first > 0 and source.word(first - 1) not in (";", "{", "}", "("):
        first -= 1
    first += source.word(first) in ("const", "constexpr")
    return source.word(first) == source.word(i)


def _index(source: Source, i: int, token: Token) -> Iterator[Change]:
    if token.text != "[" or source.word(i + 1) == "]":
        return
    before, declares = source.code[i - 1], source.code[i - 2]
    is_array = before.kind == "word" or before.text in (")", "]")
    is_declaration = (declares.kind == "word" and declares.text != "return") or declares.text in (">", "*")
    if is_array and before.text != "return" and not (before.kind == "word" and is_declaration):
        closing = source.partner[i]
        yield i + 1, closing - 1, f"{source.slice(i + 1, closing - 1)} + 1"


def _logic(source: Source, i: int, token: Token) -> Iterator[Change]:
    if token.text in ("&&", "||") and source.is_binary(i):
        yield i, i, "||" if token.text == "&&" else "&&"


def _arithmetic(source: Source, i: int, token: Token) -> Iterator[Change]:
    swapped = {"+": "-", "-": "+", "+=": "-=", "-=": "+="}
    opening = source.inside[i]
    steps_a_loop = source.word(opening) == "(" and source.word(opening - 1) == "for" and token.text.endswith("=")
    if token.text in swapped and source.is_binary(i) and not steps_a_loop:
        yield i, i, swapped[token.text]


def _exit(source: Source, i: int, token: Token) -> Iterator[Change]:
    if token.text in _EXITS and source.word(i - 1) == ")":
        yield i, source.words.index(";", i), ";"


OPERATORS: dict[str, Operator] = {
    "comparison": _comparison,
    "bound": _bound,
    "constant": _constant,
    "barrier": _barrier,
    "min-max": _min_max,
    "condition": _condition,
    "predicate": _predicate,
    "cast": _cast,
    "index": _index,
    "logic": _logic,
    "arithmetic": _arithmetic,
    "exit": _exit,
}


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Every mutant of the kernel source `file`, in the order of its code."""
    source = Source(text)
    found = []
    for declaration in code.declarations(source.code):
        for i in range(declaration.begin, declaration.end):
            if i in source.skipped:
                continue
            for name, operator in OPERATORS.items():
                for first, last, new in operator(source, i, source.code[i]):
                    before = source.words[max(declaration.begin, first - _CONTEXT) : first]
                    after = source.words[first : min(declaration.end, last + 1 + _CONTEXT)]
                    words = [token.text for token in code.tokens(new)]
                    label = f"{file}:{name}:{digest(*before, '|', *after, '|', *words)}"
                    start, end = source.code[first].start, source.code[last].end
                    found.append(Mutant(label, file, name, start, end, new, declaration.name))
    return numbered(found)
