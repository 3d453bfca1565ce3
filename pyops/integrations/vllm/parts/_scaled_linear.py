"""vLLM's linear layers of 8-bit weights and activations, by `cutlass_scaled_mm`.

fp8 activations are quantised by vLLM's own layer `QuantFP8`, so that vLLM can still fuse it with the preceding norm or
activation; int8 activations are quantised by this library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import (
    CutlassInt8ScaledMMLinearKernel,
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

import pyops

from . import _hopper

_BLOCK = 128  # elements of K, and rows of the weight, under one scale


class PyopsFP8ScaledMMLinearKernel(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """fp8 GEMM with per-tensor or per-token activation scales and per-tensor or per-channel weight scales."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _answer(_hopper.refusal(compute_capability))

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return _answer(_refused_dtype(c))

    def apply_scaled_mm(
        self,
        *,
        A: Tensor,
        B: Tensor,
        out_dtype: torch.dtype,
        As: Tensor,
        Bs: Tensor,
        bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:
        out = A.new_empty(A.shape[0], B.shape[1], dtype=out_dtype)
        pyops.cutlass_scaled_mm(out, A, B, As, Bs, bias)
        return out.view(output_shape)


class PyopsFp8BlockScaledMMLinearKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """fp8 GEMM with activation scales per 128 elements of a token and weight scales per 128 x 128 block."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # The GEMM reads column-major scales: those of one group of K are contiguous.
        group = config.activation_quant_key.scale.group_shape
        self.quant_fp8 = QuantFP8(static=False, group_shape=group, use_ue8m0=False, column_major_scales=True)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _answer(_hopper.refusal(compute_capability))

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        can, reason = super().can_implement(config)
        if not can:
            return can, reason
        groups = config.activation_quant_key.scale.group_shape, config.weight_quant_key.scale.group_shape
        if groups != (GroupShape(1, _BLOCK), GroupShape(_BLOCK, _BLOCK)):
            return False, f"supports groups of {_BLOCK} and blocks of {_BLOCK} x {_BLOCK}, not {groups}"
        return _answer(_refused_dtype(config))

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        out = A.new_empty(A.shape[0], B.shape[0], dtype=self.config.out_dtype)
        pyops.cutlass_scaled_mm(out, A, B.T, As, Bs.T)
        return out


class PyopsInt8ScaledMMLinearKernel(CutlassInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """int8 GEMM with per-tensor or per-token and per-channel scales, optional zero points, and CUTLASS weights."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _answer(_hopper.refusal(compute_capability))

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, weight_scale, input_scale, zero_point, azp_adj = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1])
        codes, scales, zero_points = pyops.scaled_int8_quant(rows, input_scale, zero_point, azp_adj is None)
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        if azp_adj is None:
            pyops.cutlass_scaled_mm(out, codes, weight, scales, weight_scale, bias)
        else:  # vLLM has already multiplied azp_adj by the static zero point
            each = zero_points if zero_point is None else None
            pyops.cutlass_scaled_mm_azp(out, codes, weight, scales, weight_scale, azp_adj, each, bias)
        return out.view(*x.shape[:-1], weight.shape[1])


def _answer(refusal: str | None) -> tuple[bool, str | None]:
    """The reply to vLLM's kernel selection: (whether the kernel supports the layer, the reason if not)."""
    return refusal is None, refusal


def _refused_dtype(config: Any) -> str | None:
    """Why an fp8 layer is left to vLLM. For float16 results, promoted accumulators would slow down large M."""
    return None if config.out_dtype == torch.bfloat16 else f"is slower than CUTLASS for results of {config.out_dtype}"
