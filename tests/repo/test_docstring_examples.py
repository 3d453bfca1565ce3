"""Every public layer, class and function of these packages shows an example in its docstring, and the example runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops.nn
from pyops.nn.custom_op import op_registry, op_registry_oot

SITE = Path(__file__).parents[2] / "docs" / "site"
PACKAGES = (
    "pyops.nn",
    "pyops.models",
    "pyops.integrations.transformers",
    "pyops.integrations.vllm",
    "pyops.testing",
    "pyops.testing.strategies",
)
FUSED = ("FusedMoEQuantConfig", "fused_experts", "fused_marlin_moe", "fused_moe", "parallel_fused_experts")
WITHOUT = {
    "pyops.models.Config": "what the examples of its package begin with makes one",
    "pyops.nn.MLAModules": "is an argument of `MultiHeadLatentAttentionWrapper`, which shows it",
    "pyops.nn.PluggableLayer": "is registered and replaced like `CustomOp`, which shows it",
}
"""{name: why it has no example}."""


def public() -> dict[str, tuple[str, Any]]:
    """{full name: (package, object)} of the classes and functions that must have an example."""
    modules = {package: importlib.import_module(package) for package in PACKAGES}
    named = [(package, name, getattr(module, name)) for package, module in modules.items() for name in module.__all__]
    named += [("pyops", name, getattr(pyops, name)) for name in FUSED]
    return {f"{package}.{name}": (package, one) for package, name, one in named if _is_documented(one)}


def _is_documented(one: Any) -> bool:
    return inspect.isclass(one) or inspect.isroutine(one)


def example(name: str, one: Any, package: str = "pyops") -> doctest.DocTest:
    """The statements of the section Examples, which ends the docstring."""
    _, _, section = inspect.cleandoc(one.__doc__ or "").partition("\nExamples:\n")
    return doctest.DocTestParser().get_doctest(section, _names(package), name, None, None)


def _names(package: str) -> dict[str, Any]:
    """What the beginning that the site shows for a package defines."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(sys.modules["reference"].BEGINNINGS[package], names)
    return names


@pytest.fixture(autouse=True)
def _site(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `reference` of the site, imported from its folder as MkDocs does."""
    own = [path.stem for path in SITE.glob("*.py")]
    monkeypatch.syspath_prepend(str(SITE))
    importlib.import_module("reference")
    yield
    for name in own:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """Layers that an example registers are gone after it."""
    before = dict(op_registry), dict(op_registry_oot)
    yield
    for registry, entries in zip((op_registry, op_registry_oot), before, strict=True):
        registry.clear()
        registry.update(entries)


def run(test: doctest.DocTest) -> list[str]:
    """The reports of the statements that print something else, or raise."""
    torch.manual_seed(0)
    reports: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=reports.append)
    return reports


@pytest.mark.parametrize("name", public())
def test_example(name: str) -> None:
    package, one = public()[name]
    test = example(name, one, package)
    assert bool(test.examples) == (name not in WITHOUT), "expected a section Examples, or a reason in WITHOUT"
    lines = sum(each.source.count("\n") for each in test.examples)
    assert lines <= 8, f"{lines} lines"
    assert not (reports := run(test)), "".join(reports)


def test_a_wrong_or_raising_example_is_reported() -> None:
    for statement in (">>> 1 + 1\n3", ">>> torch.no_such_name"):
        assert run(example("wrong", type("Wrong", (), {"__doc__": f"Words.\n\nExamples:\n{statement}\n"})))


def test_exceptions_exist() -> None:
    assert WITHOUT.keys() <= public().keys()
