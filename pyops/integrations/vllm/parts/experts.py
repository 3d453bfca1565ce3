"""The part `experts`: vLLM's layers of mixtures of experts run on this library's.

vLLM's oracles ask the backends of a format in order, and take the first with experts for the layer. `install` puts
a backend in front, ``PYOPS``, so that vLLM itself chooses it, names it in its log, and goes on to its own where a layer
is not supported. A backend that the user names, by ``--moe-backend`` or vLLM's switches, is taken without asking. What
vLLM multiplies by its functions `fused_marlin_moe` and `fused_experts` takes this library's functions of these names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import Enum
from typing import Any

from ._replaced import Replaced

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_ORACLE = f"{_FUSED_MOE}.oracle"
_replaced = Replaced()


class Backend(Enum):
    """This library's experts, among the backends of vLLM's oracles."""

    PYOPS = "PYOPS"


def install() -> str:
    """Have vLLM choose this library's experts for layers that it makes from now on.

    Returns:
        What was taken over, a line for the log; empty if it was before.

    Raises:
        ImportError, AttributeError: of a vLLM that lacks these modules or functions. Nothing is taken over then.
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
    """Have vLLM choose among its own again, for layers that it makes from now on."""
    _replaced.undo()


def _take_over() -> None:
    for oracle, priorities in (
        ("unquantized", "_get_priority_backends"),
        ("fp8", "_get_priority_backends"),
        ("int8", "_get_priority_backends"),
        ("mxfp4", "_get_priority_backends_for_gpt_oss"),
    ):
        _replaced.function(f"{_ORACLE}.{oracle}", priorities, _in_front)
        _replaced.function(f"{_ORACLE}.{oracle}", "backend_to_kernel_cls", _knows_experts(oracle != "unquantized"))
    fp8 = importlib.import_module(f"{_ORACLE}.fp8").Fp8MoeBackend
    mxfp4 = importlib.import_module(f"{_ORACLE}.mxfp4").Mxfp4MoeBackend
    # What vLLM prepares by the backend: weights as Triton's and XPU's kernels take them are those of checkpoints.
    for oracle, name, argument, backend in (
        ("fp8", "convert_to_fp8_moe_kernel_format", "fp8_backend", fp8.TRITON),
        ("mxfp4", "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format", "mxfp4_backend", mxfp4.XPU),
        ("mxfp4", "make_mxfp4_moe_quant_config", "mxfp4_backend", mxfp4.MARLIN),
    ):
        _replaced.function(f"{_ORACLE}.{oracle}", name, _as_for(argument, backend))
    functions = importlib.import_module("pyops.integrations.vllm.parts._expert_functions")
    _replaced.function(f"{_FUSED_MOE}.experts.marlin_moe", "fused_marlin_moe", functions.marlin)
    _replaced.function(f"{_FUSED_MOE}.fused_moe", "fused_experts", functions.fused)


def _in_front(priorities: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def with_pyops(*args: Any, **kwargs: Any) -> list[Any]:
        return [Backend.PYOPS, *priorities(*args, **kwargs)]

    return with_pyops


def _knows_experts(in_list: bool) -> Callable[[Any], Callable[[Any], Any]]:
    """Has an oracle's function of the experts of a backend, one class or a list of them, know the class here."""
    experts = importlib.import_module("pyops.integrations.vllm.parts._modular_experts").PyopsExperts

    def around(classes: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def with_pyops(backend: Any) -> Any:
            if backend is not Backend.PYOPS:
                return classes(backend)
            return [experts] if in_list else experts

        return with_pyops

    return around


def _as_for(argument: str, backend: Any) -> Callable[[Any], Any]:
    """Has a function that prepares for a backend do for this one what it does for another."""

    def around(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def with_pyops(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get(argument) is Backend.PYOPS:
                kwargs[argument] = backend
            if args and args[0] is Backend.PYOPS:
                args = (backend, *args[1:])
            return prepare(*args, **kwargs)

        return with_pyops

    return around
