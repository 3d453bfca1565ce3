"""The table of all ops and of the functions built on them: for a terminal, and as the page docs/ops.md."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pyops

from .. import axes
from .._core.op.op import Op, registry
from .._core.system import device

# Functions built on ops of several families: {module: the family that lists them}.
ABOVE_FAMILIES = dict.fromkeys(
    ("pyops.fused.experts", "pyops.fused.marlin_experts", "pyops.fused.parallel_experts"), "moe"
)


def summary(op: Op) -> str:
    """The first line of the op's docstring."""
    return (op.reference.__doc__ or "").strip().splitlines()[0]


def element_types(op: Op) -> list[str]:
    """The element types of the op's example: ``["float16, bfloat16", "quant_dtype: int8, float8_e4m3fn"]``."""
    return [
        ", ".join(axis.choices or (axis.default,)) if name == "dtype" else f"{name}: {', '.join(axis.choices)}"
        for name, axis in axes.of(op).items()
        if axes.is_dtype(name)
    ]


def text() -> str:
    """One line per op with name, element types and summary; then one per function, without element types."""
    rows = [(op.name, "; ".join(element_types(op)), summary(op)) for op in registry.values()]
    rows += [(name, "", _first_sentence(name)) for names in functions().values() for name in names]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {types:{widths[1]}}  {what}" for name, types, what in rows)


def families() -> dict[str, list[Op]]:
    """{family: its ops}, in alphabetical order of the families. Ops that other packages declare are left out."""
    found: dict[str, list[Op]] = {}
    for op in registry.values():
        if op.reference.__module__.startswith("pyops."):
            found.setdefault(family(op), []).append(op)
    return dict(sorted(found.items()))


def functions() -> dict[str, list[str]]:
    """{family: public functions of `pyops` that are not ops}, both in alphabetical order."""
    found: dict[str, list[str]] = {}
    for name, one in sorted(vars(pyops).items()):
        if name[0] != "_" and name not in registry and inspect.isfunction(one):
            _, _, of_ops = one.__module__.partition("pyops.ops.")
            if family_of_it := ABOVE_FAMILIES.get(one.__module__) or of_ops.partition(".")[0]:
                found.setdefault(family_of_it, []).append(name)
    return dict(sorted(found.items()))


def family(op: Op) -> str:
    """The family of `op`, such as ``"norm"`` for pyops.ops.norm.rms; the module's name for other packages."""
    return op.reference.__module__.removeprefix("pyops.").removeprefix("ops.").partition(".")[0]


def page() -> str:
    """The page docs/ops.md: tables for each family, with links to the wrappers and to the kernels."""
    of_ops, others = families(), functions()
    counted = sum(map(len, of_ops.values()))
    lines = [
        "# Ops",
        "",
        f"{counted} ops, each a function of `pyops` and of `torch.ops.pyops`. Element types of `dtype` stand alone,",
        "others are named. `pyops.OP.new` takes the arguments without the outputs, and returns new ones; an op that",
        "writes in place has no such form. `python -m pyops show OP` prints signatures and docstring. Functions of",
        "`pyops` that stand on ops follow those of their family. This page is the output of `python -m pyops list",
        "--markdown`.",
    ]
    for name in sorted({*of_ops, *others}):
        lines += ["", f"## {name}"]
        if ops := of_ops.get(name):
            lines += ["", "| op | what it does | element types | kernels |", "|---|---|---|---|", *map(_row, ops)]
        if names := others.get(name):
            lines += ["", "| function | what it does |", "|---|---|", *map(_row_of_function, names)]
    return "\n".join(lines)


def _row(op: Op) -> str:
    files = dict.fromkeys(one.specialisation.kernel.file for one in axes.launches(op, {}, device.model()))
    kernels = ", ".join(f"[{file.rpartition('/')[2]}](../kernels_cu/{file})" for file in files)
    return f"{_link(op.name, op.reference)} | {_cell(summary(op))} | {'; '.join(element_types(op))} | {kernels} |"


def _row_of_function(name: str) -> str:
    return f"{_link(name, getattr(pyops, name))} | {_cell(_first_sentence(name))} |"


def _first_sentence(name: str) -> str:
    """The first sentence of the docstring of a function of `pyops`."""
    paragraph, _, _ = (inspect.getdoc(getattr(pyops, name)) or "").partition("\n\n")
    return re.split(r"(?<=\.) ", " ".join(paragraph.split()))[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(name: str, function: Any) -> str:
    """The first cell of a row: a link, relative to docs, to the file that declares the function."""
    module = inspect.getmodule(function)
    assert module is not None
    root = Path(__file__).parents[2]
    path = Path(inspect.getfile(module)).resolve().relative_to(root.resolve()).as_posix()
    return f"| [`{name}`](../{path})"
