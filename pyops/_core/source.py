"""Kernel sources: one flat, self-contained text per specialisation, and the C signature in it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import kernels_cu

from .dtypes import DType

_INCLUDE = re.compile(r'^#include "([\w./]+)"$')
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:LAUNCH_BOUNDS\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)')
# What a value on the Python side becomes in the eight bytes of a kernel parameter.
_FORMATS = {
    "float": "f4x",
    "double": "d",
    "int": "i4x",
    "int32_t": "i4x",
    "uint32_t": "I4x",
    "int64_t": "q",
    "uint64_t": "Q",
    "bool": "?7x",
}


def _inline(name: str, seen: set[str]) -> str:
    """Text of a source with its quoted includes inlined, each header once, with #line before every piece."""
    seen.add(name)
    text = kernels_cu.read(name)
    pieces = [f'#line 1 "kernels_cu/{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            if line != "#pragma once":
                pieces.append(line)
            else:
                pieces.append("")
        elif (header := f"include/{include[1]}") in seen:
            pieces.append("")
        else:
            pieces.append(_inline(header, seen))
            pieces.append(f'#line {number + 1} "kernels_cu/{name}"')
    return "\n".join(pieces)


@cache
def _flat(name: str) -> tuple[str, str]:
    """(the element types, the rest): the constants of a specialisation go between the two."""
    seen: set[str] = set()
    return _inline("include/number.cuh", seen), _inline(name, seen)


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


def flatten(name: str, constants: dict[str, Any]) -> str:
    """The whole text of one specialisation of the kernel file `name`; this text is its cache key."""
    types, body = _flat(name)
    declarations = "\n".join(_declaration(key, value) for key, value in constants.items())
    return f'// {name} {describe(constants)}\n{types}\n#line 1 "constants"\n{declarations}\n{body}\n'


@cache
def signature(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(entry, ((struct format, parameter name), ...)) of the one ``extern "C"`` kernel in the file `name`."""
    text = re.sub(r"//[^\n]*", "", kernels_cu.read(name))
    entries = _ENTRY.findall(text)
    if len(entries) != 1:
        raise ValueError(f'{name}: expected one extern "C" kernel, found {len(entries)}')
    entry, parameters = entries[0]
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
    return entry, tuple(parsed)
