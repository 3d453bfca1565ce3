"""The plugins of vLLM that this package is: two entry points `pyops`, which vLLM calls in each of its processes.

vLLM calls `stand_in`, of the group ``vllm.platform_plugins``, before it imports its platform, and thereby its compiled
libraries; and `activate`, of the group ``vllm.general_plugins``, before it builds a model.
"""

from __future__ import annotations

import importlib
import logging
from contextlib import ExitStack
from importlib.metadata import version

from ..._core import config
from . import parts, stand_ins
from .choice import Choice
from .library import Registration, define_missing, has_defined, override, registered
from .table import DEFINED_IN_PYTHON, VERSIONS, table

_log = logging.getLogger("vllm.pyops")
_active: ExitStack | None = None


def stand_in() -> None:
    """Where the switch ``PYOPS_VLLM`` is set, have this library define the ops of vLLM's compiled libraries that are
    absent or cannot be loaded, when vLLM imports them.

    vLLM drops what a plugin of this group raises. So nothing that may fail is done here: an error comes out of vLLM's
    import of the library. It is an OpError if this library has no schemas of the version of vLLM that is installed.

    Returns:
        None, by which vLLM knows that this is no platform of its own.
    """
    if config.vllm():
        stand_ins.provide(lambda: define_missing(".".join(version("vllm").split(".")[:2])), has_defined)


def activate() -> None:
    """Have vLLM run on this library where the switch ``PYOPS_VLLM`` says so; without it, do nothing.

    ``PYOPS_VLLM=all`` replaces every op that torch knows from vLLM by a schema that is known here, and takes over every
    part of `parts`; ``ops`` is every op, a name that op or part, and a name after ``-`` is left out (`Choice.read`).
    The logger ``vllm.pyops`` reports at INFO how many ops run here, which are left to vLLM and why, and each part; at
    DEBUG the name of each op. A second call changes nothing.

    Raises:
        SwitchError: a word of the switch that names nothing.
        OpError: what `override` refuses, such as a named op with another schema in the installed vLLM. Nothing is
            replaced after an error.
    """
    global _active
    words = config.vllm()
    if not words or _active is not None:
        return
    choice = Choice.read(words, [name for vllm in VERSIONS for name in table(vllm)], parts.NAMES)
    for module in ("vllm._custom_ops", *DEFINED_IN_PYTHON.values()):
        importlib.import_module(module)  # defines ops, or loads the libraries that do
    stand_ins.refuse_flash_attention()
    with ExitStack() as undo:
        if choice.every_op or choice.ops:
            _report(undo.enter_context(override(*choice.ops, without=choice.without)))
        for name in choice.parts:
            part = parts.load(name)
            line = part.install()
            undo.callback(part.uninstall)
            if line:
                _log.info("%s: %s", name, line)
        _active = undo.pop_all()


def deactivate() -> None:
    """Undo `activate`."""
    global _active
    if _active is not None:
        _active.close()
        _active = None


def _report(replaced: Registration) -> None:
    names = {*replaced.names, *registered.names}
    _log.info("%d ops of vLLM run on pyops", len(names))
    _log.debug("ops on pyops: %s", ", ".join(sorted(names)))
    if replaced.left:
        _log.info("ops left to vLLM: %s", "; ".join(f"{name} ({why})" for name, why in replaced.left.items()))
