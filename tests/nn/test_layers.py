"""The list of layers."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

import pyops
from pyops import nn as layers
from pyops.nn.custom_op import CustomOp, PluggableLayer, op_registry, op_registry_oot
from tests.support import vllm_signatures

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"

# The layers of vLLM 0.22, by name and class.
REGISTERED = {
    one["name"]: cls for cls, one in json.loads(vllm_signatures.TABLE.read_text())["layers"].items() if one["name"]
}
PLUGGABLE = {"gate_linear", "replicated_linear", "column_parallel_linear", "row_parallel_linear"}


def _own() -> dict[str, type]:
    return {name: cls for name, cls in op_registry.items() if cls.__module__.startswith("pyops.nn.")}


def _missing() -> dict[str, str]:
    return {name: cls for name, (cls, _) in layers.MISSING.items()}


def test_every_registered_name_is_there_or_listed_as_missing() -> None:
    own = _own()
    assert {name: cls.__name__ for name, cls in own.items()} | _missing() == REGISTERED
    assert not own.keys() & layers.MISSING.keys()
    for name, cls in own.items():
        assert issubclass(cls, PluggableLayer if name in PLUGGABLE else CustomOp)
        assert layers.get_layer_class(name) is layers.get_layer_class(cls.__name__) is cls
        assert getattr(layers, cls.__name__) is cls
        assert cls.__doc__
    for cls_name in _missing().values():
        assert not hasattr(layers, cls_name)
        with pytest.raises(AttributeError, match=f"pyops.nn has no {cls_name}"):
            getattr(layers, cls_name)
    with pytest.raises(AttributeError, match=r"module 'pyops\.nn' has no attribute 'nothing'"):
        layers.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("static_sink_attention", r"pyops.nn has no StaticSinkAttention \(static_sink_attention\)"),
        ("SparseAttnIndexer", r"pyops.nn has no SparseAttnIndexer \(sparse_attn_indexer\): is part of vLLM\'s engine"),
        ("nothing", "pyops.nn has no layer nothing"),
    ],
)
def test_unknown_layer_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers.get_layer_class(name)


def test_exports_are_those_of_the_modules() -> None:
    for module in ("activation", "linear", "merged", "rotary"):
        names = importlib.import_module(f"pyops.nn.{module}").__all__
        assert set(names) <= set(layers.__all__)
    assert len(layers.__all__) == len(set(layers.__all__))


def _docs_section(name: str) -> str:
    return re.split(f"<!-- /?{name} -->", PAGE.read_text())[1].strip()


def _summary(text: str | None) -> str:
    """The first sentence of a docstring."""
    return re.split(r"(?<=[.:])\s|, see `", " ".join(str(text).split("\n\n")[0].split()))[0].rstrip(".:")


def _table() -> str:
    rows = ["| name | class | what it does | ops |", "|---|---|---|---|"]
    for name, cls in _own().items():
        ops = [word for word in re.findall(r"`pyops\.(\w+)`", str(cls.__doc__)) if callable(getattr(pyops, word))]
        rows.append(f"| `{name}` | `{cls.__name__}` | {_summary(cls.__doc__)} | {', '.join(dict.fromkeys(ops))} |")
    return "\n".join(rows)


def test_page_lists_the_layers() -> None:
    assert _docs_section("layers") == _table(), _table()
    reasons = [f"| `{name}` | `{cls}` | {reason} |" for name, (cls, reason) in layers.MISSING.items()]
    assert _docs_section("missing") == "\n".join(["| name | class | why |", "|---|---|---|", *reasons])


@pytest.mark.parametrize("number", range(5))
def test_examples_of_the_page_run(number: int) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(examples) == 5
    before = dict(op_registry_oot)
    try:
        exec(examples[number], {"__name__": "example"})
    finally:
        op_registry_oot.clear()
        op_registry_oot.update(before)
