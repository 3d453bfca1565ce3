"""The table of all ops: for a terminal, and as Markdown for the README."""

from __future__ import annotations

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


def render() -> str:
    """The Markdown table of the README: each op with its wrapper's and its kernels' files."""
    lines = ["| op | what it does | element types | kernels |", "|---|---|---|---|"]
    for op in registry.values():
        module = op.reference.__module__.replace(".", "/") + ".py"
        files = dict.fromkeys(one.specialisation.kernel.file for one in axes.launches(op, {}, device.model()))
        kernels = ", ".join(f"[{file.rpartition('/')[2]}](kernels_cu/{file})" for file in files)
        what = summary(op).replace("|", "\\|")
        lines.append(f"| [`{op.name}`]({module}) | {what} | {'; '.join(element_types(op))} | {kernels} |")
    return "\n".join(lines)
