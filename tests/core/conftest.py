"""Ops and kernels that live for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import kernels_cu
from pyops._core import binding, launch, source
from pyops._core.kernel import Kernel
from pyops._core.op import registry


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Kernel]]:
    """kernel(name, text): a Kernel over a text that no file holds."""
    texts: dict[str, str] = {}
    read = kernels_cu.read
    monkeypatch.setattr(kernels_cu, "read", lambda name: texts[name] if name in texts else read(name))

    def make(name: str, text: str) -> Kernel:
        texts[f"test/{name}.cu"] = text
        return Kernel(f"test/{name}.cu")

    yield make
    for cached in (source._flat, source.signature, launch.layout):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    """Ops declared in a test are gone after it (torch keeps their schemas, so every such op has its own name)."""
    before = set(registry)
    yield
    for name in set(registry) - before:
        binding._ops.remove(registry.pop(name))
