"""The pages of the API reference: names from `pyops.registry` and from `__all__`, words from docstrings.

A page is Markdown in which ``::: pyops.rms_norm`` stands for the signature and the docstring of a name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import words

import pyops
from pyops import axes
from pyops._core.op import torch_library
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.cli import table

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results/nvidia-h200"
# What is no op and no layer: {page: (title, package, names)}, all names of the package's __all__ where none are given.
OTHERS = {
    "runtime": (
        "Declaring and compiling",
        "pyops",
        ("op", "Op", "Kernel", "check", "warmup", "Compiled", "Wrapper", "ScalarType", "SCALAR_TYPES"),
    ),
    "experts": ("Configurations of experts", "pyops", ("FusedMoEQuantConfig",)),
    "collective": ("Collectives of processes", "pyops", ("CustomAllReduce", "ExpertParallel", "DispatchedRows")),
    "testing": ("pyops.testing", "pyops.testing", ()),
    "strategies": ("pyops.testing.strategies", "pyops.testing.strategies", ()),
    "models": ("pyops.models", "pyops.models", ()),
    "vllm": ("pyops.integrations.vllm", "pyops.integrations.vllm", ()),
    "transformers": ("pyops.integrations.transformers", "pyops.integrations.transformers", ()),
}


def families() -> dict[str, str]:
    """{family: its page}, for every family of ops."""
    ops = table.families()
    names = sorted({*ops, *(path.parent.name for path in (ROOT / "pyops/ops").glob("[a-z]*/__init__.py"))})
    return {name: _family(name, ops.get(name, [])) for name in names}


def layers() -> dict[str, str]:
    """{module of pyops.nn: its page}, for every module that has layers."""
    pages = {}
    for path in sorted((ROOT / "pyops/nn").glob("[a-z]*.py")):
        if names := _public(path):
            title = f"# pyops.nn: {path.stem}"
            pages[path.stem] = "\n\n".join(
                [title, _words(path), *(f"::: pyops.nn.{path.stem}.{name}" for name in names)]
            )
    return pages


def others() -> dict[str, str]:
    """{page: its text}, for what is neither op nor layer."""
    pages = {}
    for page, (title, package, names) in OTHERS.items():
        path = ROOT.joinpath(*package.split("."), "__init__.py")
        entries = (f"::: {package}.{name}" for name in names or _public(path))
        pages[page] = "\n\n".join([f"# {title}", *([] if names else [_words(path)]), *entries])
    return pages


def errors() -> str:
    """The entries of all errors, for the end of the page that explains them."""
    names = (name for name, one in vars(pyops).items() if isinstance(one, type) and issubclass(one, Exception))
    return "\n\n".join(["## In code", *(f"::: pyops.{name}\n    options:\n      heading_level: 3" for name in names)])


def _family(name: str, ops: list[Op]) -> str:
    package = importlib.import_module(f"pyops.ops.{name}")
    named = {op.name: op for op in ops} | dict.fromkeys(table.functions().get(name, []))
    parts = [f"---\ntags: {json.dumps(words.tags(list(named)))}\n---", f"# {name}", inspect.getdoc(package) or ""]
    if (ROOT / RESULTS / f"{name}.md").exists():
        parts.append(f"Measured on an H200: [times and errors](../{RESULTS}/{name}.md).")
    for one in words.first(list(named)):
        parts += [f"::: pyops.{one}", _facts(one, named[one])]
    return "\n\n".join(filter(None, parts))


def _facts(name: str, op: Op | None) -> str:
    """What is not in the docstring: other words for it, and of an op element types, kernels, and the name in torch."""
    facts = {"Also known as": ", ".join(words.WORDS.get(name, ()))}
    if op:
        files = dict.fromkeys(one.specialisation.kernel.file for one in axes.launches(op, {}, device.model()))
        schema = torch_library.returning_schema if op.declaration.returned else torch_library.schema
        facts |= {
            "Element types": "; ".join(table.element_types(op)),
            "Kernels": ", ".join(f"[{file.rpartition('/')[2]}](../kernels_cu/{file})" for file in files),
            "In torch": f"`torch.ops.pyops.{schema(op.declaration)}`",
        }
    lines = [f"- **{fact}** {text}" for fact, text in facts.items() if text]
    return "\n".join(["<div class=facts markdown>", "", *lines, "", "</div>"]) if lines else ""


def _public(path: Path) -> list[str]:
    """The `__all__` of a module, which is not imported: layers need torch."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _words(path: Path) -> str:
    """The docstring of a module, without the order of its files."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"\s+A file imports", docstring)[0]
