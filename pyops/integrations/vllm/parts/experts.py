"""The part `experts`: vLLM's mixture-of-experts layers on this library's kernels.

vLLM's oracles try the backends of a format in order and take the first that supports the layer. `install` adds a
backend ``PYOPS`` in front, so that vLLM chooses it, logs its name, and goes on to its own backends for a layer that it
does not support. A backend that the user names, by ``--moe-backend`` or vLLM's switches, has precedence. vLLM's
functions `fused_marlin_moe` and `fused_experts` are replaced by this library's functions of the same names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, get_origin

from ._replaced import Replaced

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_ORACLE = f"{_FUSED_MOE}.oracle"
_replaced = Replaced()


class Backend(Enum):
    """The backend ``PYOPS`` for vLLM's oracles."""

    PYOPS = "PYOPS"


def install() -> str:
    """Let vLLM choose this library's experts for layers that it creates from now on.

    Returns:
        One line for the log with what was replaced; "" if it already was.

    Raises:
        ImportError, AttributeError: the installed vLLM lacks one of these modules or functions. Nothing is replaced.
    """
    if _replaced:
        return ""
    try:
        _take_over()
    except (ImportError, AttributeError):
        uninstall()
        raise
    return "unquantized, fp8, int8 and mxfp4 by the backend PYOPS; others by fused_marlin_moe and fused_experts"


def uninstall() -> None:
    """Let vLLM choose among its own experts again, for layers that it creates from now on."""
    _replaced.undo()


def _take_over() -> None:
    for oracle, priorities in (
        ("unquantized", "_get_priority_backends"),
        ("fp8", "_get_priority_backends"),
        ("int8", "_get_priority_backends"),
        ("mxfp4", "_get_priority_backends_for_gpt_oss"),
    ):
        _replaced.function(f"{_ORACLE}.{oracle}", priorities, _in_front)
        _replaced.function(f"{_ORACLE}.{oracle}", "backend_to_kernel_cls", _knows_experts)
    fp8 = importlib.import_module(f"{_ORACLE}.fp8").Fp8MoeBackend
    mxfp4 = importlib.import_module(f"{_ORACLE}.mxfp4").Mxfp4MoeBackend
    # vLLM prepares weights and scales by backend. Those of Triton and XPU keep the checkpoint's layout.
    for oracle, name, argument, backend in (
        ("fp8", "convert_to_fp8_moe_kernel_format", "fp8_backend", fp8.TRITON),
        ("mxfp4", "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format", "mxfp4_backend", mxfp4.XPU),
        ("mxfp4", "make_mxfp4_moe_quant_config", "mxfp4_backend", mxfp4.MARLIN),
    ):
        _replaced.function(f"{_ORACLE}.{oracle}", name, _as_for(argument, backend))
    functions = importlib.import_module("pyops.integrations.vllm.parts._expert_functions")
    for module, name, ours in (
        ("experts.marlin_moe", "fused_marlin_moe", functions.marlin),
        ("fused_moe", "fused_experts", functions.fused),
    ):
        theirs = getattr(importlib.import_module(f"{_FUSED_MOE}.{module}"), name)
        if "inplace" in inspect.signature(theirs).parameters:  # other arguments in 0.33, which calls neither by default
            _replaced.function(f"{_FUSED_MOE}.{module}", name, ours)


def _in_front(priorities: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def with_pyops(*args: Any, **kwargs: Any) -> list[Any]:
        return [Backend.PYOPS, *priorities(*args, **kwargs)]

    return with_pyops


def _knows_experts(classes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap an oracle's `backend_to_kernel_cls` to return `PyopsExperts` for PYOPS, as a class or in a list."""
    experts = importlib.import_module("pyops.integrations.vllm.parts._modular_experts").PyopsExperts
    in_list = get_origin(inspect.signature(classes, eval_str=True).return_annotation) is list

    def with_pyops(backend: Any) -> Any:
        if backend is not Backend.PYOPS:
            return classes(backend)
        return [experts] if in_list else experts

    return with_pyops


def _as_for(argument: str, backend: Any) -> Callable[[Any], Any]:
    """Wrap a function of vLLM so that PYOPS is treated as `backend`."""

    def around(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def with_pyops(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get(argument) is Backend.PYOPS:
                kwargs[argument] = backend
            if args and args[0] is Backend.PYOPS:
                args = (backend, *args[1:])
            return prepare(*args, **kwargs)

        return with_pyops

    return around
