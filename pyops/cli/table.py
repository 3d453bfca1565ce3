"""The table of all ops: for a terminal, and as the page docs/ops.md."""

from __future__ import annotations

import inspect
from pathlib import Path

from .. import axes
from .._core import device
from .._core.op import Op, registry


def summary(op: Op) -> str:
    """First line of the op's docstring."""
    return (op.reference.__doc__ or "").strip().splitlines()[0]


def element_types(op: Op) -> list[str]:
    """The element types of the op's example: ``["float16, bfloat16", "quant_dtype: int8, float8_e4m3fn"]``."""
    return [
        ", ".join(axis.choices or (axis.default,)) if name == "dtype" else f"{name}: {', '.join(axis.choices)}"
        for name, axis in axes.of(op).items()
        if axes.is_dtype(name)
    ]


def text() -> str:
    """One line per op: name, element types, what it does."""
    rows = [(op.name, "; ".join(element_types(op)), summary(op)) for op in registry.values()]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {types:{widths[1]}}  {what}" for name, types, what in rows)


def families() -> dict[str, list[Op]]:
    """{family: its ops}, in alphabetical order of the families. Ops that other packages declare are left out."""
    found: dict[str, list[Op]] = {}
    for op in registry.values():
        if op.reference.__module__.startswith("pyops."):
            found.setdefault(family(op), []).append(op)
    return dict(sorted(found.items()))


def family(op: Op) -> str:
    """The module or package that declares `op`, without the packages around it: ``"norm"`` of pyops.ops.norm.rms."""
    return op.reference.__module__.removeprefix("pyops.").removeprefix("ops.").partition(".")[0]


def page() -> str:
    """The page docs/ops.md: a table for each family, with links to the wrappers and to the kernels."""
    counted = sum(map(len, families().values()))
    lines = [
        "# Ops",
        "",
        f"{counted} ops, each a function of `pyops` and of `torch.ops.pyops`. Element types of `dtype` stand alone,",
        "others are named. `python -m pyops show OP` prints signature and docstring. This page is the output of",
        "`python -m pyops list --markdown`.",
    ]
    for name, ops in families().items():
        lines += ["", f"## {name}", "", "| op | what it does | element types | kernels |", "|---|---|---|---|"]
        lines += map(_row, ops)
    return "\n".join(lines)


def _row(op: Op) -> str:
    files = dict.fromkeys(one.specialisation.kernel.file for one in axes.launches(op, {}, device.model()))
    kernels = ", ".join(f"[{file.rpartition('/')[2]}](../kernels_cu/{file})" for file in files)
    what = summary(op).replace("|", "\\|")
    return f"| [`{op.name}`](../{_module(op)}) | {what} | {'; '.join(element_types(op))} | {kernels} |"


def _module(op: Op) -> str:
    """The file that declares `op`, from the root of the repository."""
    root = Path(__file__).parents[2]
    return Path(inspect.getfile(op.reference)).resolve().relative_to(root.resolve()).as_posix()
