"""Signatures of vLLM's layers and of the functions of its module `_custom_ops`, read from its sources.

    python -m tests.support.vllm_signatures FOLDER > tests/support/vllm_signatures_0_22.json

FOLDER is the sdist of vLLM 0.22.1, unpacked. Nothing of it is imported. The table holds names and defaults alone.
"""

from __future__ import annotations

import ast
import copy
import json
import sys
from pathlib import Path

REGISTER = ("CustomOp.register(", "PluggableLayer.register(")
TABLE = Path(__file__).with_name("vllm_signatures_0_22.json")


def signature(function: ast.FunctionDef, *, bound: bool) -> str:
    """``a, b=1, *, c=None``: the parameters of a function, without the first if it is `bound`, without annotations."""
    own = copy.deepcopy(function.args)
    for each in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg):
        if each is not None:
            each.annotation = None
    if bound:
        del own.args[0]
    return ast.unparse(own)


def functions(source: str) -> dict[str, str]:
    """{name: signature} of the functions of a module, also of those under a condition."""
    body = ast.parse(source).body
    nested = [inner for node in body if isinstance(node, ast.If) for inner in node.body]
    found = [node for node in (*body, *nested) if isinstance(node, ast.FunctionDef)]
    return {node.name: signature(node, bound=False) for node in found if not node.name.startswith("_")}


def layers(folder: Path) -> dict[str, dict[str, str]]:
    """{class: {"name": as it is registered, "signature": of its constructor, or of that of its base in the same file}}.

    Of the classes that the sources in a folder register as CustomOp or PluggableLayer, and of those derived from them.
    """
    found: dict[str, dict[str, str]] = {}
    classes = [
        {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}
        for file in sorted(folder.rglob("*.py"))
    ]
    for own in classes:
        for node in own.values():
            names = [call for call in node.decorator_list if ast.unparse(call).startswith(REGISTER)]
            if names:
                name = ast.literal_eval(names[0].args[0])  # type: ignore[attr-defined]
                found[node.name] = {"name": name, "signature": constructor(node, own)}
    for own in classes:
        for node in own.values():
            derived = any(ast.unparse(base) in found for base in node.bases)
            if derived and node.name not in found:
                found[node.name] = {"name": "", "signature": constructor(node, own)}
    return dict(sorted(found.items()))


def constructor(node: ast.ClassDef, own: dict[str, ast.ClassDef]) -> str:
    """The signature of the constructor of a class, found in a base of the same file if need be; "" if there is none."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return signature(inner, bound=True)
    bases = [own[name] for base in node.bases if (name := ast.unparse(base)) in own]
    return constructor(bases[0], own) if bases else ""


def main(folder: Path) -> None:
    package = folder / "vllm"
    table = {
        "functions": functions((package / "_custom_ops.py").read_text()),
        "layers": layers(package / "model_executor"),
    }
    json.dump(table, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
