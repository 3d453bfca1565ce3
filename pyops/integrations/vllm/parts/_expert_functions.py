"""Replacements for vLLM's functions `fused_marlin_moe` and `fused_experts`, for experts without a modular class.

vLLM calls the first for GPTQ, AWQ and others, with weights that it has repacked; the second for sizes that Marlin does
not support, with weights packed along K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import vllm.envs as envs
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

from ....fused.experts import fused_experts
from ....fused.marlin_experts import ACTIVATIONS, fused_marlin_moe
from ....ops._shared.scalar_type import SCALAR_TYPES
from ....ops.activation.gated import silu_and_mul_with_clamp
from ....ops.linear.gemm_problem import SCALE_BLOCK
from ....ops.linear.grouped_problem import ACTIVATIONS as ACTIVATIONS_OF_PRODUCTS
from ..choice import keeps

_OWN = {"uint4": "w4a16", "uint4b8": "w4a16", "uint8b128": "w8a16", "float4_e2m1f": "fp4_marlin"}
_CASES = {SCALAR_TYPES[name].id: case for name, case in {**_OWN, "float8_e4m3fn": "fp8_marlin"}.items()}
# Most positional arguments in vLLM's calls of `fused_marlin_moe`, and of `fused_experts` after hidden_states.
_POSITIONAL, _POSITIONAL_OF_FUSED = 9, 5
# Values of activation_func and moe_sum by which vLLM asks for the default function.
_PLAIN_ACTIVATIONS = None, apply_moe_activation, mk.FusedMoEExpertsModular.activation
_PLAIN_SUMS = None, MarlinExperts.moe_sum
_kept = cache(keeps)  # cached, because every call asks


def marlin(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of vLLM's `fused_marlin_moe`, which falls back to `original`."""

    def with_pyops(*args: Any, **kwargs: Any) -> Any:
        case = _CASES.get(kwargs.get("quant_type_id", 0))
        if case is None or len(args) > _POSITIONAL or not _kept("experts", case):
            return original(*args, **kwargs)
        activation = kwargs.pop("activation", MoEActivation.SILU)
        function = _function(activation, kwargs.pop("activation_func", None), kwargs.pop("clamp_limit", None))
        kwargs |= {"activation": activation.value, "activation_func": function}
        if _method(kwargs.get("moe_sum")) in _PLAIN_SUMS:
            kwargs["moe_sum"] = None
        return fused_marlin_moe(*args, **kwargs)

    return with_pyops


def fused(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of vLLM's `fused_experts`, which falls back to `original`."""

    def with_pyops(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        activation = kwargs.get("activation", MoEActivation.SILU)
        case = _case_of(kwargs.get("quant_config"))
        served = case is not None and hidden_states.dtype in (torch.bfloat16, torch.float16)
        served = served and activation.value in ACTIVATIONS_OF_PRODUCTS and len(args) <= _POSITIONAL_OF_FUSED
        # While compiling, vLLM's own function is kept, because it calls a torch op that torch.compile can trace.
        served = served and not torch.compiler.is_compiling() and not envs.VLLM_BATCH_INVARIANT
        if not served or not _kept("experts", str(case)):
            return original(hidden_states, *args, **kwargs)
        return fused_experts(hidden_states, *args, **kwargs | {"activation": activation.value})

    return with_pyops


def _case_of(quant_config: Any) -> str | None:
    """The case of `keeps`; None if `fused_experts` does not support the quantization."""
    if quant_config is None or (quant_config.quant_dtype is None and quant_config.weight_quant_dtype is None):
        return "bf16"
    if quant_config.quant_dtype is None:
        return {"int4": "w4a16", torch.int8: "w8a16"}.get(quant_config.weight_quant_dtype)
    if quant_config.use_fp8_w8a8:
        blocks = quant_config.block_shape
        return "fp8_tensor" if blocks is None else "fp8_block" if list(blocks) == [SCALE_BLOCK] * 2 else None
    return None


def _function(
    activation: MoEActivation, given: Any, limit: float | None
) -> Callable[[str, Tensor, Tensor], Any] | None:
    """The `activation_func` for this library's function; None for the default."""
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
