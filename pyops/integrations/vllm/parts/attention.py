"""The part `attention`: registers this library's attention backends with vLLM."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..choice import keeps

_PACKAGE = __name__.rpartition(".")[0]

_taken = ExitStack()  # callbacks that undo the changes to vLLM
_line = ""


@dataclass(frozen=True)
class _Backend:
    """An entry for vLLM's lists of backends. vLLM's enumerations of backends cannot be extended."""

    name: str
    path: str

    def get_path(self) -> str:
        return self.path

    def get_class(self) -> Any:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        return resolve_obj_by_qualname(self.path)


_LATENT = _Backend("PYOPS_MLA", f"{_PACKAGE}._latent_attention.LatentBackend")
_LATENT_PREFILL = _Backend("PYOPS", f"{_PACKAGE}._latent_attention.LatentPrefillBackend")


def install() -> str:
    """Put this library's attention backends first in vLLM's lists, on CUDA.

    vLLM takes the first backend of a list that passes its checks, unless the user names one (``--attention-backend``).
    A layer that is not supported here therefore keeps its backend.

    Returns:
        One line for the log with the new backends; "" if there are none. A second call changes nothing.

    Raises:
        ImportError: this version of vLLM has another interface of attention backends.
    """
    global _line
    from vllm.platforms import current_platform

    if not _line and current_platform.is_cuda():
        importlib.import_module(f"{_PACKAGE}._paged_attention")  # vLLM resolves the names of backends much later
        installers = {"decoders": _install_decoders}
        if not _has_canonical_cache():
            installers |= {"mla": _install_latent, "mla prefill": _install_latent_prefill}
        lines = [installer() for case, installer in installers.items() if keeps("attention", case)]
        _line = "; ".join(filter(None, lines))
    return _line


def uninstall() -> None:
    """Let vLLM choose among its own backends again. Existing layers keep their backend."""
    global _line
    _line = ""
    _taken.close()


def _has_canonical_cache() -> bool:
    """Whether this is vLLM 0.33 or later: backends no longer choose the shape of a cache. MLA is not served there."""
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    return not hasattr(utils, "get_kv_cache_layout")


def _install_decoders() -> str:
    """Register the decoder backend as vLLM's CUSTOM and put it first; "" if another plugin has registered CUSTOM."""
    from vllm.platforms import cuda
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden():
        return ""
    register_backend(custom, f"{_PACKAGE}._paged_attention.PagedBackend")
    _taken.callback(custom.clear_override)
    _put_first(custom, cuda, "_get_backend_priorities", selector._cached_get_attn_backend)
    return "decoders are CUSTOM"


def _install_latent() -> str:
    """Put the MLA decode backend first in the list of all backends; a backend's checks recognise MLA layers."""
    from vllm.platforms import cuda
    from vllm.v1.attention import selector

    _put_first(_LATENT, cuda, "_get_backend_priorities", selector._cached_get_attn_backend)
    return f"MLA decode is {_LATENT.name}"


def _install_latent_prefill() -> str:
    """Put the MLA prefill backend first; vLLM chooses it separately from decode."""
    from vllm.v1.attention.backends.mla.prefill import selector as prefill

    choices = prefill._auto_select_mla_prefill_backend
    _put_first(_LATENT_PREFILL, prefill, "_get_mla_prefill_backend_priorities", choices)
    return f"MLA prefill is {_LATENT_PREFILL.name}"


def _put_first(backend: Any, module: ModuleType, name: str, choices: Any) -> None:
    """Put `backend` first in the list that the function `name` of a vLLM module returns, until `uninstall`.

    Args:
        choices: vLLM's cached selection function; its cache is cleared now and at `uninstall`.
    """
    own: Callable[..., list[Any]] = getattr(module, name)

    def set_to(function: Callable[..., list[Any]]) -> None:
        setattr(module, name, function)
        choices.cache_clear()

    set_to(lambda *args, **kwargs: [backend, *own(*args, **kwargs)])
    _taken.callback(set_to, own)
