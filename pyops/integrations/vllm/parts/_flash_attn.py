"""vLLM's attention layers without the compiled FlashAttention."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_PACKAGE, _HELPER = "vllm.vllm_flash_attn", "vllm.v1.attention.backends.fa_utils"
_NAMES = ("flash_attn_varlen_func", "get_scheduler_metadata")


def do_without_flash_attn() -> None:
    """Where vLLM lacks the compiled FlashAttention, have its attention layers import all the same.

    On CUDA all of them import a helper, which imports two functions of FlashAttention. It is imported here beside an
    empty package, and then loses both names: backends that import them from it are not available, and vLLM goes on to
    the next one. It must be called before vLLM imports its layers, and changes nothing where FlashAttention is there.
    """
    try:
        importlib.import_module(_PACKAGE)
    except ImportError:
        absent = ModuleType(_PACKAGE)
        vars(absent).update(dict.fromkeys(_NAMES))
        sys.modules[_PACKAGE] = absent
        try:
            helper = importlib.import_module(_HELPER)
        finally:
            del sys.modules[_PACKAGE]
        for name in _NAMES:
            vars(helper).pop(name, None)
