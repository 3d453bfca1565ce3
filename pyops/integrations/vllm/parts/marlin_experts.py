"""vLLM's `fused_marlin_moe` by this library's: experts of GPTQ, AWQ and others whose weights vLLM has repacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

from ...._marlin_experts import ACTIVATIONS, fused_marlin_moe
from ....ops._shared.scalar_type import SCALAR_TYPES
from ....ops.activation.gated import silu_and_mul_with_clamp
from .modular_experts import keeps

_OWN = {"uint4": "w4a16", "uint4b8": "w4a16", "uint8b128": "w8a16", "float4_e2m1f": "fp4_marlin"}
_CASES = {SCALAR_TYPES[name].id: case for name, case in {**_OWN, "float8_e4m3fn": "fp8_marlin"}.items()}
_POSITIONAL = 9  # arguments before `quant_type_id`; vLLM's callers name all others
# What vLLM's callers give where they want the plain function.
_PLAIN_ACTIVATIONS = None, apply_moe_activation, mk.FusedMoEExpertsModular.activation
_PLAIN_SUMS = None, MarlinExperts.moe_sum


def in_the_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """What vLLM is to call where it calls `original`, its own function of this name."""

    def with_pyops(*args: Any, **kwargs: Any) -> Any:
        case = _CASES.get(kwargs.get("quant_type_id", 0))
        if case is None or len(args) > _POSITIONAL or not keeps(case):
            return original(*args, **kwargs)
        activation = kwargs.pop("activation", MoEActivation.SILU)
        function = _function(activation, kwargs.pop("activation_func", None), kwargs.pop("clamp_limit", None))
        kwargs |= {"activation": activation.value, "activation_func": function}
        if _method(kwargs.get("moe_sum")) in _PLAIN_SUMS:
            kwargs["moe_sum"] = None
        return fused_marlin_moe(*args, **kwargs)

    return with_pyops


def _function(
    activation: MoEActivation, given: Any, limit: float | None
) -> Callable[[str, Tensor, Tensor], Any] | None:
    """The `activation_func` of this library's function; None for its own."""
    if limit is not None and activation is MoEActivation.SILU:
        return lambda _, out, x: silu_and_mul_with_clamp(out, x, limit)
    if _method(given) not in _PLAIN_ACTIVATIONS:
        return lambda _, out, x: given(activation, out, x)
    if activation.value in ACTIVATIONS:
        return None
    return lambda _, out, x: apply_moe_activation(activation, out, x)


def _method(function: Any) -> Any:
    """The function of a bound method."""
    return getattr(function, "__func__", function)
