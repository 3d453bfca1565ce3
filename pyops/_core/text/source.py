"""Kernel sources: one flat, self-contained text per specialisation, and the C signature in it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import kernels_cu

from ..tensors.dtypes import DType

_INCLUDE = re.compile(r'^#include "([\w./]+)"$')
_ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:(?:CLUSTER_OF|LAUNCH_BOUNDS)\s*\([^)]*\)\s*)*(\w+)\s*\(([^)]*)\)'
)
_AWAITS = re.compile(r"\{\s*(?:(?:const \w+ \w+ = )?prefetch_\w+\([^;]*\);\s*)?await_previous_kernel\(\);")
TENSOR_MAP = "128s"
# Conversion of a Python value to the eight bytes of a kernel parameter, or to the 128 bytes of a tensor map.
_FORMATS = {
    "float": "f4x",
    "double": "d",
    "int": "i4x",
    "int32_t": "i4x",
    "uint32_t": "I4x",
    "int64_t": "q",
    "uint64_t": "Q",
    "bool": "?7x",
    "__grid_constant__ TensorMap": TENSOR_MAP,
}


def inline(name: str, seen: set[str] | None = None, text: str | None = None) -> str:
    """Text of a source with its quoted includes inlined, each header once, with #line before every piece.

    `text` is that of a source that no file holds. What it includes are headers of `kernels_cu` all the same.

    A header is looked for next to the file that includes it, then in `include/` (`header`).
    """
    seen = set() if seen is None else seen
    seen.add(name)
    folder = name.rpartition("/")[0]
    text = kernels_cu.read(name) if text is None else text
    pieces = [f'#line 1 "kernels_cu/{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            if line != "#pragma once":
                pieces.append(line)
            else:
                pieces.append("")
        elif (header := header_of(folder, include[1])) in seen:
            pieces.append("")
        else:
            pieces.append(inline(header, seen))
            pieces.append(f'#line {number + 1} "kernels_cu/{name}"')
    return "\n".join(pieces)


@cache
def header_of(folder: str, name: str) -> str:
    """The path of the header that a file in `folder` includes as `name`: next to the file, else in `include/`.

    A name with a folder, such as ``"linear/dequant.cuh"``, is a path in `kernels_cu`, for kernels that no file holds.
    """
    if "/" in name:
        return name
    beside = f"{folder}/{name}"
    return beside if folder == "host" or beside in kernels_cu.names() else f"include/{name}"


@cache
def _flat(name: str, text: str | None) -> tuple[str, str]:
    """(the element types, the rest): the constants of a specialisation go between the two."""
    seen: set[str] = set()
    return inline("include/number.cuh", seen), inline(name, seen, text)


def _declaration(name: str, value: Any) -> str:
    if isinstance(value, DType):
        return f"using {name} = {value.c_name};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr {'int' if abs(value) < 2**31 else 'int64_t'} {name} = {value};"
    return f"#define {name} {value}"


def describe(constants: dict[str, Any]) -> str:
    """The specialisation as a person reads and types it: ``scalar_t=bfloat16 HIDDEN_SIZE=4096 ...``."""
    return " ".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in constants.items())


def flatten(name: str, constants: dict[str, Any], text: str | None = None) -> str:
    """The whole text of one specialisation of the kernel file `name`, or of `text`, so named; this is its cache key."""
    types, body = _flat(name, text)
    declarations = "\n".join(_declaration(key, value) for key, value in constants.items())
    return f'// {name} {describe(constants)}\n{types}\n#line 1 "constants"\n{declarations}\n{body}\n'


class Signature(NamedTuple):
    """The one ``extern "C"`` kernel of a file.

    Attributes:
        entry: its name.
        parameters: (struct format, name) of each.
        overlaps: its first statement is ``await_previous_kernel();``, so it may start before the previous kernel ends.
            Before it, only a call of a function named ``prefetch_...``, which only prefetches to a cache, may come.
    """

    entry: str
    parameters: tuple[tuple[str, str], ...]
    overlaps: bool


@cache
def signature(name: str, text: str | None = None) -> Signature:
    """The signature of the kernel in the file `name`, or in `text`, so named."""
    text = re.sub(r"//[^\n]*", "", kernels_cu.read(name) if text is None else text)
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise ValueError(f'{name}: expected one extern "C" kernel, found {len(entries)}')
    entry, parameters = entries[0].groups()
    parsed = []
    for parameter in parameters.split(","):
        c_type, _, identifier = parameter.strip().rpartition(" ")
        c_type = c_type.removeprefix("const ").strip()
        if "*" in parameter:
            parsed.append(("Q", identifier.lstrip("*")))
        elif c_type in _FORMATS:
            parsed.append((_FORMATS[c_type], identifier))
        else:
            raise ValueError(f"{name}: parameter {identifier} has type {c_type!r}, which no value can be packed into")
    return Signature(entry, tuple(parsed), _AWAITS.match(text, text.index("{", entries[0].end())) is not None)
