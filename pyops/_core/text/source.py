"""Kernel sources: one text per specialisation, with all headers inlined, and the C signature in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import kernels_cu

from ..tensors.dtypes import DType

_COMMENT = re.compile(r"//[^\n]*")
_INCLUDE = re.compile(r'^#include "([\w./]+)"$')
_ENTRY = re.compile(
    r'extern\s+"C"\s+__(?:tile_)?global__\s+void\s+(?:(?:CLUSTER_OF|LAUNCH_BOUNDS)\s*\([^)]*\)\s*)*(\w+)\s*\(([^)]*)\)'
)
_DEFINITION = re.compile(r'^extern "C" __global__ .*?^}$', re.DOTALL | re.MULTILINE)
_PREFETCH = re.compile(r"\bprefetch_\w+\([^;]*\);")
TENSOR_MAP = "128s"  # the 128 bytes of a tensor map
# {C type of a kernel parameter: struct format of its value, padded to eight bytes}.
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


def inline(
    name: str, seen: set[str] | None = None, text: str | None = None, constants: Mapping[str, str] | None = None
) -> str:
    """The source `name` with its quoted includes inlined, each header once; #line keeps the line numbers of the files.

    `seen`: the sources already inlined, updated. `text`: the source, if no file holds it; it may include any header.
    `constants`: those that name headers.
    """
    seen = set() if seen is None else seen
    seen.add(name)
    folder = name.rpartition("/")[0]
    text = kernels_cu.read(name) if text is None else text
    pieces = [f'#line 1 "kernels_cu/{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            pieces.append(line if line != "#pragma once" else "")
            continue
        texts = [
            inline(one, seen, None, constants) for one in headers_of(folder, include[1], constants) if one not in seen
        ]
        pieces += [*texts, f'#line {number + 1} "kernels_cu/{name}"'] if texts else [""]
    return "\n".join(pieces)


def headers_of(folder: str, name: str, constants: Mapping[str, str] | None = None) -> list[str]:
    """The paths of the headers that a file in `folder` includes as `name`.

    A name in capitals is a constant that names the header: with LAYOUT=layout_awq, LAYOUT.cuh is layout_awq.cuh.
    Without the constant these are all headers that it may name: those that begin with its last word, layout_.
    """
    stem = name.removesuffix(".cuh")
    if not stem.isupper():
        return [header_of(folder, name)]
    if constants and stem in constants:
        return [header_of(folder, f"{constants[stem]}.cuh")]
    start = f"{folder}/{stem.rpartition('_')[2].lower()}_"
    return [one for one in kernels_cu.names() if one.startswith(start) and one.endswith(".cuh")]


@cache
def header_of(folder: str, name: str) -> str:
    """The path of the header that a file in `folder` includes as `name`: next to the file, else in `include/`."""
    if "/" in name:  # a path already, such as "linear/dequant.cuh": a source without a file has no folder
        return name
    sibling = f"{folder}/{name}"
    return sibling if folder == "host" or sibling in kernels_cu.names() else f"include/{name}"


@cache
def _flat(name: str, text: str | None, naming: tuple[tuple[str, str], ...], entry: str | None) -> tuple[str, str]:
    """(number.cuh, the rest): the constants of a specialisation go between them, as they use its element types.

    Of the kernels the rest has only `entry`. `naming`: the constants that name headers.
    """
    seen: set[str] = set()
    types, body = inline("include/number.cuh", seen), inline(name, seen, text, dict(naming))
    return types, _DEFINITION.sub(lambda found: _only(entry, found[0]), body) if entry else body


def _declaration(name: str, value: Any) -> str:
    if isinstance(value, DType):
        return f"using {name} = {value.c_name};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr {'int' if abs(value) < 2**31 else 'int64_t'} {name} = {value};"
    return f"#define {name} {value}"


def describe(constants: dict[str, Any]) -> str:
    """The constants as people read and type them: ``scalar_t=bfloat16 HIDDEN_SIZE=4096 ...``."""
    return " ".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in constants.items())


def flatten(name: str, constants: dict[str, Any], text: str | None = None, entry: str | None = None) -> str:
    """The whole text of one specialisation, which is also its cache key. The source is `text`, or the file `name`; of
    its kernels it has only `entry`, if that is given."""
    strings, folder = {key: one for key, one in constants.items() if isinstance(one, str)}, name.rpartition("/")[0]
    naming = tuple(each for each in strings.items() if header_of(folder, f"{each[1]}.cuh").startswith(f"{folder}/"))
    types, body = _flat(name, text, naming, entry)
    declarations = "\n".join(_declaration(key, value) for key, value in constants.items())
    return f'// {name} {describe(constants)}\n{types}\n#line 1 "constants"\n{declarations}\n{body}\n'


def _only(entry: str, definition: str) -> str:
    """The definition of a kernel if it is that of `entry`, otherwise as many empty lines."""
    found = _ENTRY.search(_COMMENT.sub("", definition))
    return definition if found is None or found[1] == entry else "\n" * definition.count("\n")


class Signature(NamedTuple):
    """An ``extern "C"`` kernel of a file.

    Attributes:
        entry: the name of the kernel. parameters: (struct format, name) of each parameter.
        overlaps: whether programmatic dependent launch is safe: the kernel calls ``await_previous_of_call();``, or its
            pointers and tensor maps are only in calls of ``prefetch_...`` before it calls ``await_previous_kernel();``.
    """

    entry: str
    parameters: tuple[tuple[str, str], ...]
    overlaps: bool


def entries(name: str, text: str | None = None) -> dict[str, tuple[str, str]]:
    """{kernel: its parameters, and the code from there to the next kernel} of `text`, or of the file `name`."""
    code = _COMMENT.sub("", kernels_cu.read(name) if text is None else text)
    found = list(_ENTRY.finditer(code))
    ends = [*(one.start() for one in found[1:]), len(code)]
    return {one[1]: (one[2], code[one.end() : end]) for one, end in zip(found, ends, strict=False)}


@cache
def signature(name: str, text: str | None = None, entry: str | None = None) -> Signature:
    """The signature of the kernel `entry`; without a name of that named as the file, or of the only one."""
    found = entries(name, text)
    entry = entry or (next(iter(found)) if len(found) == 1 else name.rpartition("/")[2].partition(".")[0])
    if entry not in found:
        raise ValueError(f'{name}: expected an extern "C" kernel {entry}, found {", ".join(found) or "none"}')
    (parameters, code), parsed, pointers = found[entry], [], []
    for parameter in parameters.split(","):
        c_type, _, identifier = parameter.strip().rpartition(" ")
        c_type = c_type.removeprefix("const ").strip()
        if "*" in parameter or "TensorMap" in parameter:
            pointers.append(identifier.lstrip("*"))
        if "*" in parameter:
            parsed.append(("Q", identifier.lstrip("*")))
        elif c_type in _FORMATS:
            parsed.append((_FORMATS[c_type], identifier))
        else:
            raise ValueError(f"{name}: parameter {identifier} has type {c_type!r}, which no value can be packed into")
    return Signature(entry, tuple(parsed), _overlaps(code[code.index("{") + 1 :], pointers))


@cache
def is_tile(name: str, text: str | None = None) -> bool:
    """Whether the kernel is in CUDA Tile C++ (tile.cuh)."""
    return "__tile_global__" in (kernels_cu.read(name) if text is None else text)


def _overlaps(body: str, pointers: list[str]) -> bool:
    before, waits, _ = body.partition("await_previous_kernel();")
    before = _PREFETCH.sub("", before)
    unsafe = before.count("{") != before.count("}") or any(re.search(rf"\b{name}\b", before) for name in pointers)
    return (bool(waits) and not unsafe) or "await_previous_of_call();" in body
