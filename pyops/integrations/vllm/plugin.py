"""The two entry points `pyops`, plugins that vLLM calls in each of its processes.

vLLM calls `stand_in`, in the group ``vllm.platform_plugins``, before it imports its platform and with it the compiled
libraries; and `activate`, in the group ``vllm.general_plugins``, before it builds a model.
"""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import ExitStack, suppress
from importlib.metadata import version

from ..._core import config
from . import parts, stand_ins
from .choice import Choice
from .library import define_missing, has_defined, override
from .table import DEFINED_IN_PYTHON, VERSIONS, table

_log = logging.getLogger("vllm.pyops")
_active: ExitStack | None = None


def stand_in() -> None:
    """If ``PYOPS_VLLM`` is set, arrange that this library defines the ops of compiled libraries of vLLM that are absent
    or cannot be loaded, as soon as vLLM imports them.

    vLLM discards exceptions of plugins in this group, so nothing here may fail. Errors surface when vLLM imports the
    library: an OpError if this library has no schemas for the installed version of vLLM.

    Returns:
        None, which tells vLLM that this plugin adds no platform.
    """
    if config.vllm():
        stand_ins.provide(lambda: define_missing(".".join(version("vllm").split(".")[:2])), has_defined)


def activate() -> None:
    """Let vLLM run on this library as the switch ``PYOPS_VLLM`` says; do nothing if it is not set.

    ``PYOPS_VLLM=all`` replaces every op of vLLM that has a known schema, and every part of `parts`; ``ops`` replaces
    every op, a name that op or part; a name with the prefix ``-`` is excluded (`Choice.read`). The logger
    ``vllm.pyops`` reports at INFO the number of replaced ops, the ops that are left to vLLM with the reasons, and each
    part; at WARNING a part for which this version of vLLM has another interface; at DEBUG the name of each op. A second
    call changes nothing. Under vLLM's switch ``VLLM_BATCH_INVARIANT`` the ops are batch invariant, too.

    Raises:
        SwitchError: the switch has an unknown word.
        OpError: `override` raises it, for example for a named op with another schema in the installed vLLM. Nothing is
            replaced then.
    """
    global _active
    words = config.vllm()
    if not words or _active is not None:
        return
    choice = Choice.read(words, [name for vllm in VERSIONS for name in table(vllm)], parts.NAMES)
    _configure_logging()
    importlib.import_module("vllm._custom_ops")  # loads the libraries that define ops
    for module in DEFINED_IN_PYTHON.values():
        with suppress(ModuleNotFoundError):  # another version may have neither the module nor its op
            importlib.import_module(module)
    stand_ins.refuse_flash_attention()
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):  # as vLLM reads it
        os.environ.setdefault("PYOPS_BATCH_INVARIANT", "1")
    with ExitStack() as undo:
        if choice.every_op or choice.ops:
            undo.enter_context(override(*choice.ops, without=choice.without))
        for name in choice.parts:
            try:
                part = parts.load(name)
                line = part.install()
            except (ImportError, AttributeError) as error:
                _log.warning("%s is left to vLLM, which has another interface: %s", name, error)
                continue
            undo.callback(part.uninstall)
            if line:
                _log.info("%s: %s", name, line)
        _active = undo.pop_all()


def _configure_logging() -> None:
    """Let vLLM configure its loggers now. vLLM 0.33 does so when it makes an engine, after it has called plugins."""
    with suppress(ImportError, AttributeError):
        configure = importlib.import_module("vllm.logger").configure_logging_if_needed
        if not logging.getLogger("vllm").handlers:
            configure(importlib.import_module("vllm.config.logging").LoggingConfig())


def deactivate() -> None:
    """Undo `activate`."""
    global _active
    if _active is not None:
        _active.close()
        _active = None
