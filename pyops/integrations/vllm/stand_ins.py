"""Modules that vLLM imports instead of its compiled libraries if these are absent or cannot be loaded.

vLLM imports three of them (`OPS`) for their ops alone, as ``import vllm._C``: to load one is to define its ops. Where
one is missing, vLLM imports an empty module, and this library defines the ops.

Others have functions of their own (those of ``vllm.vllm_flash_attn``, ``vllm._flashmla_C``, ``vllm.cumem_allocator``).
Nothing stands in for these; where they are absent, vLLM does without. It takes those of FlashAttention for granted,
though: its package raises an ImportError where they are absent, and on NVIDIA GPUs vLLM's layers import that package.
`provide` lets it be imported, and `refuse_flash_attention` tells vLLM that it does not work.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OPS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C")
FLASH_ATTENTION = "vllm.vllm_flash_attn"
_log = logging.getLogger("vllm.pyops")


def provide(define: Callable[[], None], has_defined: Callable[[], bool]) -> None:
    """From now on, where one of `OPS` is absent or cannot be loaded, its import makes an empty module.

    A second call of `provide` changes nothing.

    Args:
        define: called when such a module is imported; defines the ops that torch lacks. What it raises is raised by
            the import.
        has_defined: whether this library has defined ops of `OPS` already. A library that is there is not loaded
            then: torch ends the process where C++ defines an op that it knows.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(define, has_defined))


def remove() -> None:
    """Forget what `provide` was told, and the modules that have stood in."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in (*OPS, FLASH_ATTENTION):
        if _stands_in(name):
            del sys.modules[name]


def refuse_flash_attention() -> None:
    """Have vLLM pass over FlashAttention when it chooses how to compute attention, if its libraries are absent."""
    if not importlib.import_module("vllm.platforms").current_platform.is_cuda():
        return
    importlib.import_module(FLASH_ATTENTION)
    if not _stands_in(FLASH_ATTENTION):
        return
    reason = "its libraries are absent"
    backend = importlib.import_module("vllm.v1.attention.backends.flash_attn").FlashAttentionBackend
    validate = backend.validate_configuration.__func__

    def validate_configuration(cls: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Of this class alone: one that is derived may compute otherwise."""
        reasons: list[str] = validate(cls, *args, **kwargs)
        return [*reasons, reason] if cls is backend else reasons

    backend.validate_configuration = classmethod(validate_configuration)
    prefill = importlib.import_module("vllm.v1.attention.backends.mla.prefill.flash_attn").FlashAttnPrefillBackend
    prefill.is_available = classmethod(lambda cls: False)
    _log.info("vLLM does without FlashAttention: %s", reason)


def _stands_in(name: str) -> bool:
    loader = getattr(sys.modules.get(name), "__loader__", None)
    return isinstance(loader, _Loader) and not loader.has_loaded


class _Finder(MetaPathFinder):
    """Comes before other finders, and asks them: a library that is there is loaded as ever."""

    def __init__(self, define: Callable[[], None], has_defined: Callable[[], bool]) -> None:
        self._define, self._has_defined = define, has_defined

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (*OPS, FLASH_ATTENTION):
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if fullname in OPS:
            if spec is None or self._has_defined():
                if spec is not None:
                    _log.warning("%s is not loaded: pyops has defined its ops before vLLM was imported", spec.origin)
                spec = ModuleSpec(fullname, None)
            spec.loader = _OpsLoader(spec.loader, self._define)
        elif spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a package; where it raises an ImportError, what it has by then is all of it."""

    def __init__(self, real: Loader | None) -> None:
        self.real = real
        self.has_loaded = False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec) if self.real else None

    def exec_module(self, module: ModuleType) -> None:
        if self.real is None:
            return
        try:
            self.real.exec_module(module)
            self.has_loaded = True
        except ImportError as error:
            _log.debug("%s: %s", module.__name__, error)


class _OpsLoader(_Loader):
    """Loads a library; where that cannot be done, the module is empty, and `define` is called."""

    def __init__(self, real: Loader | None, define: Callable[[], None]) -> None:
        super().__init__(real)
        self._define = define

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        try:
            return super().create_module(spec)
        except ImportError as error:
            _log.warning("%s cannot be loaded: %s", spec.origin, error)
            self.real = None
            return None

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if not self.has_loaded:
            # A library that is there comes first, because of `has_defined`.
            for name in OPS:
                importlib.import_module(name)
            self._define()
