"""The part of the plugin by which vLLM's attention layers choose this library's backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]

_taken = ExitStack()  # what gives vLLM its own back
_line = ""


@dataclass(frozen=True)
class _Backend:
    """An entry of vLLM's lists of backends that is no member of its enumerations, which cannot be extended."""

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
    """Put this library's attention backends before vLLM's own, on CUDA.

    vLLM takes the first backend of a list whose checks pass, unless the user names one (``--attention-backend``). So
    what is not served here has the backend that it had.

    Returns:
        One line for the log: what was taken over; "" where nothing was. A second call changes nothing.
    """
    global _line
    from vllm.platforms import current_platform

    if not _line and current_platform.is_cuda():
        _line = "; ".join(["decoders are CUSTOM"] * _install_decoders() + [_install_latent()])
    return _line


def uninstall() -> None:
    """Let vLLM choose among its own backends again. Layers that exist keep the backend that they have."""
    global _line
    _line = ""
    _taken.close()


def _install_decoders() -> bool:
    """Register the backend of decoders as vLLM's CUSTOM, the first choice; False where CUSTOM is another plugin's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden():
        return False
    register_backend(custom, f"{_PACKAGE}._paged_attention.PagedBackend")
    _taken.callback(custom.clear_override)
    _put_first(custom, for_mla=False)
    return True


def _install_latent() -> str:
    """Put the backends of MLA first: that of decode, and that of prefill, which vLLM chooses apart."""
    from vllm.v1.attention.backends.mla.prefill import selector

    _put_first(_LATENT, for_mla=True)

    def with_ours(priorities: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
        return lambda capability: [_LATENT_PREFILL, *priorities(capability)]

    _replace(selector, "_get_mla_prefill_backend_priorities", with_ours, selector._auto_select_mla_prefill_backend)
    return f"MLA is {_LATENT.name}, its prefill {_LATENT_PREFILL.name}"


def _put_first(backend: Any, *, for_mla: bool) -> None:
    """Have vLLM's CUDA platform ask `backend` before its own, for layers of MLA or for all others."""
    from vllm.platforms import cuda
    from vllm.v1.attention import selector

    def with_ours(priorities: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def of(use_mla: bool, *args: Any, **kwargs: Any) -> list[Any]:
            return [backend] * (use_mla == for_mla) + priorities(use_mla, *args, **kwargs)

        return of

    _replace(cuda, "_get_backend_priorities", with_ours, selector._cached_get_attn_backend)


def _replace(module: ModuleType, name: str, wrapped: Callable[[Any], Any], cached: Any) -> None:
    """Put `wrapped` of a module's function in its place, until `uninstall`; choices in a cache are forgotten."""
    own = getattr(module, name)

    def set_to(function: Any) -> None:
        setattr(module, name, function)
        cached.cache_clear()

    set_to(wrapped(own))
    _taken.callback(set_to, own)
