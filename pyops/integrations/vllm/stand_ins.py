"""Modules that vLLM imports instead of its compiled libraries if these are absent or cannot be loaded.

vLLM imports some of them (`OPS`) only for their ops (``import vllm._C``): loading the library defines the ops. If one
is missing, vLLM gets an empty module, and this library defines the ops.

Other libraries have functions (``vllm.vllm_flash_attn``, ``vllm._flashmla_C``, ``vllm.cumem_allocator``). They have no
stand-ins, and vLLM runs without them, except for FlashAttention: its package raises an ImportError if its libraries are
absent, and vLLM's layers import this package on NVIDIA GPUs. `provide` makes the package importable, and
`refuse_flash_attention` tells vLLM not to use it.
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

OPS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch")
FLASH_ATTENTION = "vllm.vllm_flash_attn"
_log = logging.getLogger("vllm.pyops")


def provide(define: Callable[[], None], has_defined: Callable[[], bool]) -> None:
    """From now on, the import of a module of `OPS` that is absent or cannot be loaded gives an empty module.

    A second call of `provide` changes nothing.

    Args:
        define: called when such a module is imported, to define the ops that torch lacks. The import propagates its
            exceptions.
        has_defined: returns whether this library has already defined ops of `OPS`. An existing library is then not
            loaded, because torch aborts the process if C++ defines an op twice.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(define, has_defined))


def remove() -> None:
    """Undo `provide`, and remove the stand-in modules."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in (*OPS, FLASH_ATTENTION):
        if _stands_in(name):
            del sys.modules[name]


def refuse_flash_attention() -> None:
    """Let vLLM's attention selection skip FlashAttention if its libraries are absent."""
    if not importlib.import_module("vllm.platforms").current_platform.is_cuda():
        return
    importlib.import_module(FLASH_ATTENTION)
    if not _stands_in(FLASH_ATTENTION):
        return
    reason = "its libraries are absent"
    backend = importlib.import_module("vllm.v1.attention.backends.flash_attn").FlashAttentionBackend
    validate = backend.validate_configuration.__func__

    def validate_configuration(cls: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Refuses for this class only; a derived class may not need the libraries."""
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
    """Runs before the other finders and delegates to them, so an existing library is loaded as usual."""

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
    """Loads a package. If it raises an ImportError, the partially executed package is kept."""

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
    """Loads a library. If that fails, the module is empty, and `define` is called."""

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
            # An existing library is loaded before anything is defined, see `has_defined`.
            for name in OPS:
                importlib.import_module(name)
            self._define()
