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
from pyops.cli import show, table

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results/nvidia-h200"
# What is no op and no layer: {page: (title, package, names)}, all names of the package's __all__ where none are given.
OTHERS = {
    "runtime": (
        "Declaring and compiling",
        "pyops",
        ("op", "Op", "Kernel", "check", "warmup", "example_text", "Compiled", "Wrapper", "ScalarType", "SCALAR_TYPES"),
    ),
    "experts": ("Configurations of experts", "pyops", ("FusedMoEQuantConfig",)),
    "collective": ("Collectives of processes", "pyops", ("CustomAllReduce", "ExpertParallel", "DispatchedRows")),
    "testing": ("pyops.testing", "pyops.testing", ()),
    "strategies": ("pyops.testing.strategies", "pyops.testing.strategies", ()),
    "models": ("pyops.models", "pyops.models", ()),
    "vllm": ("pyops.integrations.vllm", "pyops.integrations.vllm", ()),
    "transformers": ("pyops.integrations.transformers", "pyops.integrations.transformers", ()),
}
# What the examples of a package's docstrings begin with: {package: code}.
BEGINNINGS = {
    "pyops": "import torch\nimport pyops",
    "pyops.nn": "import torch\nimport pyops\nfrom pyops.nn import *",
    "pyops.models": """\
import torch
from pyops.models import *

config = Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
model = Decoder(config).randomise(seed=0)""",
    "pyops.integrations.vllm": "import torch\nimport pyops\nfrom pyops.integrations.vllm import *",
    "pyops.integrations.transformers": """\
import torch
import transformers
from pyops.integrations.transformers import *

config = transformers.LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config).eval()  # or from_pretrained""",
    "pyops.testing": "import torch\nimport pyops\nfrom pyops.testing import *",
    "pyops.testing.strategies": """\
import torch
import pyops
from hypothesis import given
from pyops.testing import *
from pyops.testing.strategies import *""",
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
                [title, _words(path), _begin("pyops.nn"), *(f"::: pyops.nn.{path.stem}.{name}" for name in names)]
            )
    return pages


def others() -> dict[str, str]:
    """{page: its text}, for what is neither op nor layer."""
    pages = {}
    for page, (title, package, names) in OTHERS.items():
        path = ROOT.joinpath(*package.split("."), "__init__.py")
        entries = (f"::: {package}.{name}" for name in names or _public(path))
        words = [] if names else [_words(path), _begin(package)]
        pages[page] = "\n\n".join([f"# {title}", *words, *entries])
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
        text = f"**Example**\n\n```python\n{pyops.example_text(one)}\n```" if named[one] else ""
        parts += [f"::: pyops.{one}", text, _facts(one, named[one])]
    return "\n\n".join(filter(None, parts))


def _facts(name: str, op: Op | None) -> str:
    """What is not in the docstring: other words for it, and of an op element types, kernels, and the name in torch."""
    facts = {"Also known as": ", ".join(words.WORDS.get(name, ()))}
    if op:
        files = dict.fromkeys(one.specialisation.kernel.file for one in axes.launches(op, {}, device.model()))
        schema = torch_library.returning_schema if op.declaration.returned else torch_library.schema
        _, *new = show.signatures(op)
        more = (f"`{one}`: {text.removesuffix('.')}" for one, text in show.of_new(op).items())
        facts |= {
            "New outputs": "; ".join([*(f"`pyops.{one}`" for one in new), *more]),
            "Element types": "; ".join(table.element_types(op)),
            "Kernels": ", ".join(f"[{file.rpartition('/')[2]}](../kernels_cu/{file})" for file in files),
            "In torch": f"`torch.ops.pyops.{schema(op.declaration)}`",
        }
    lines = [f"- **{fact}** {text}" for fact, text in facts.items() if text]
    return "\n".join(["<div class=facts markdown>", "", *lines, "", "</div>"]) if lines else ""


def _begin(package: str) -> str:
    return f"Examples begin with:\n\n```python\n{BEGINNINGS[package]}\n```"


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
