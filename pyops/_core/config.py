"""Every environment switch, read on the cold path: where a plan is made or a kernel compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import SwitchError

_OFF, _ON = ("", "0", "false", "off", "no"), ("1", "true", "on", "yes")


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if (word := value.strip().lower()) not in _OFF + _ON:
        raise SwitchError(f'{name}: expected {", ".join(_ON)}, {", ".join(_OFF[1:])} or nothing, got "{value}"')
    return word in _ON


def reference() -> bool:
    """PYOPS_REFERENCE=1: run every op by its PyTorch reference, on any device."""
    return _flag("PYOPS_REFERENCE")


def sync() -> bool:
    """PYOPS_SYNC=1: wait for the device after every op, so that a fault is raised by the op that caused it."""
    return _flag("PYOPS_SYNC")


def check_indices() -> bool:
    """PYOPS_CHECK=1: raise an OpError after a call if index tensors held values out of range, which kernels skip."""
    return _flag("PYOPS_CHECK")


def trust() -> bool:
    """PYOPS_TRUST=1: use kernels that no GPU of this architecture has run without comparing them with portable ones."""
    return _flag("PYOPS_TRUST")


def batch_invariant() -> bool:
    """PYOPS_BATCH_INVARIANT=1: choose no kernel, tile, split or order by the number of rows or sequences of a call."""
    return _flag("PYOPS_BATCH_INVARIANT")


def log() -> bool:
    """PYOPS_LOG=1: log every kernel made ready, with its time and whether it was compiled or read from disk."""
    return _flag("PYOPS_LOG")


def jit_forbidden() -> bool:
    """PYOPS_JIT=error: a call whose kernel is not loaded raises NotLoadedError instead of compiling or loading it."""
    mode = os.environ.get("PYOPS_JIT") or "compile"
    if mode not in ("compile", "error"):
        raise SwitchError(f'PYOPS_JIT: expected "compile" or "error", got "{mode}"')
    return mode == "error"


def arch() -> str | None:
    """PYOPS_ARCH=sm_80: the older architecture that a GPU is planned for, and runs as; None where it is off."""
    value = os.environ.get("PYOPS_ARCH", "").strip().lower()
    return None if value in _OFF else value


def vllm() -> tuple[str, ...]:
    """PYOPS_VLLM=all,-attention: the words by which vLLM's plugin chooses ops and parts; none where it is off."""
    value = os.environ.get("PYOPS_VLLM", "")
    if value.strip().lower() in _OFF:
        return ()
    return tuple(word for part in value.split(",") if (word := part.strip()))


_cpu: str | None = None


def kernels_on_cpu(default: str = "reference") -> bool:
    """PYOPS_CPU=kernels: run CPU tensors and numpy arrays by the kernels, on the host backend, not by the reference.

    `default` is the mode where PYOPS_CPU is not set.
    """
    mode = _cpu or os.environ.get("PYOPS_CPU") or default
    if mode not in ("kernels", "reference"):
        raise SwitchError(f'PYOPS_CPU: expected "kernels" or "reference", got "{mode}"')
    return mode == "kernels"


@contextmanager
def cpu(mode: str) -> Iterator[None]:
    """While it lasts, in every thread, PYOPS_CPU is `mode`.

    Examples:
        >>> x = torch.randn(3, 100)
        >>> with cpu("kernels"):  # not the reference
        ...     pyops.relu2(torch.empty_like(x), x)
    """
    global _cpu
    before, _cpu = _cpu, mode
    try:
        yield
    finally:
        _cpu = before
