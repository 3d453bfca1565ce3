"""The part of the plugin by which vLLM's attention layers choose this library's backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ._flash_attn import do_without_flash_attn

_PACKAGE = __name__.rpartition(".")[0]

_taken = ExitStack()  # what gives vLLM its own back
_line = ""


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
        do_without_flash_attn()
        _line = _install_decoders()
    return _line


def uninstall() -> None:
    """Let vLLM choose among its own backends again. Layers that exist keep the backend that they have."""
    global _line
    _line = ""
    _taken.close()


def _install_decoders() -> str:
    """Register the backend of decoders as vLLM's CUSTOM, the first choice; "" where CUSTOM is another plugin's."""
    from vllm.platforms import cuda
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden():
        return ""
    register_backend(custom, f"{_PACKAGE}._paged_attention.PagedBackend")
    _taken.callback(custom.clear_override)

    def with_ours(priorities: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def of(use_mla: bool, *args: Any, **kwargs: Any) -> list[Any]:
            found = priorities(use_mla, *args, **kwargs)
            return found if use_mla else [custom, *found]

        return of

    _replace(cuda, "_get_backend_priorities", with_ours, selector._cached_get_attn_backend)
    return "decoders (CUSTOM in vLLM's log)"


def _replace(module: ModuleType, name: str, wrapped: Callable[[Any], Any], cached: Any) -> None:
    """Put `wrapped` of a module's function in its place, until `uninstall`; choices in a cache are forgotten."""
    own = getattr(module, name)

    def set_to(function: Any) -> None:
        setattr(module, name, function)
        cached.cache_clear()

    set_to(wrapped(own))
    _taken.callback(set_to, own)
