"""The plugin of vLLM that this package is: the entry point `pyops` of the group ``vllm.general_plugins``."""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress

from ..._core import config
from .library import Registration, override

_replaced: Registration | None = None


def activate() -> None:
    """Have vLLM run on this library's kernels where the switch ``PYOPS_VLLM`` says so; without it, do nothing.

    vLLM calls this function once in each of its processes. ``PYOPS_VLLM=all`` replaces every op that torch knows from
    vLLM by a schema that is known here; ``PYOPS_VLLM=rms_norm,silu_and_mul`` these. Each is reported at INFO by the
    logger ``vllm.pyops``, so that it is seen where vLLM's own lines are. A second call changes nothing.

    Raises:
        OpError: what `override` refuses, such as a name that is no op of vLLM. Nothing is replaced then.
    """
    global _replaced
    names = config.vllm_ops()
    if not names or _replaced is not None:
        return
    with suppress(ImportError):  # vLLM without its compiled libraries: torch then knows no op, and `override` says so
        importlib.import_module("vllm._custom_ops")  # registers vLLM's ops
    _replaced = override() if names == ("all",) else override(*names)
    for name in _replaced.names:
        logging.getLogger("vllm.pyops").info("%s runs on pyops", name)
