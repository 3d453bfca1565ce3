"""What is installed of other libraries, or the reason why it cannot be used."""

from __future__ import annotations

import importlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

left_out = set[str]()  # rivals that are not wanted
patience_s = 0.0  # seconds after which the first call of a rival is given up; 0 is no limit
_BLANKS = {"bool": False}  # by the type of an argument; None of others


class Unavailable(Exception):
    """The reason why a rival cannot be measured."""


class Fault(Exception):
    """The name of a rival after which the process cannot use the GPU any more."""


def check_gpu(rival: str) -> None:
    """Fault if the GPU has met an error, such as an illegal access, after which every call of the process fails."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise Fault(rival) from error


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises Unavailable after this time, such as in a rival that tunes itself; 0 is no limit. For the main thread."""
    if not seconds:
        yield
        return

    def give_up(*_: Any) -> None:
        raise Unavailable(f"takes more than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def reason(error: Exception) -> str:
    """An error as one line without folder names; without its type if it is an `Unavailable`."""
    text = re.sub(r"(?<!\S)/\S*/", "", (str(error).strip().splitlines() or [""])[0])
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"


@cache
def _import(name: str) -> Any:
    """The module, or the exception of its import, cached so that a failing import is tried only once."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def module(name: str) -> Any:
    module = _import(name)
    if isinstance(module, Exception):
        raise Unavailable(f"import {name}: {reason(module)}")
    return module


def deep_gemm() -> Any:
    """DeepGEMM: the package, or the one in vLLM's wheel. nvcc compiles its kernels when they are first called."""
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        if not isinstance(found := _import(name), Exception):
            return found
    return module("deep_gemm")


def libraries() -> str:
    """vLLM's shared objects in load order, for machines where the package cannot be imported."""
    return os.environ.get("PYOPS_VLLM_LIBRARIES", "")


@cache
def load_vllm(paths: str) -> str:
    """Load vLLM's ops from its package, or else from its shared objects. Returns "" or the reason of the failure."""
    for name in ("vllm._C_stable_libtorch", "vllm._C", "vllm._moe_C"):
        _import(name)
    imported = _import("vllm._C")
    if not isinstance(imported, Exception):
        return ""
    if not paths:
        return f"import vllm._C: {reason(imported)}; PYOPS_VLLM_LIBRARIES is not set"
    try:
        for path in paths.split(os.pathsep):
            torch.ops.load_library(path)
    except Exception as error:
        return f"import vllm._C: {reason(imported)}; PYOPS_VLLM_LIBRARIES: {reason(error)}"
    return ""


def vllm_op(library: str, name: str, package: str = "vllm") -> Any:
    """``torch.ops.<library>.<name>`` of vLLM's wheel, where the library is a module of `package`."""
    if trouble := load_vllm(libraries()):
        raise Unavailable(trouble)
    _import(f"{package}.{library}")
    if not hasattr(getattr(torch.ops, library), name):
        raise Unavailable(f"{library} is not loaded, or has no {name}")
    return getattr(getattr(torch.ops, library), name)


def fitted(op: Any, *args: Any) -> Callable[[], Any]:
    """A call of a torch op: `args` cut to its schema, or extended for further arguments without a default.

    Older schemas lack the last arguments; newer ones have further optional arguments.
    """
    schema = op.default._schema.arguments
    more = [_BLANKS.get(str(one.type)) for one in schema[len(args) :] if not one.has_default_value()]
    return partial(op, *args[: len(schema)], *more)
