"""Linear modules of transformers with fp8 weights."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ...fused.quantized_linear import QuantisedLinear
from ...ops.linear.gemm_problem import SCALE_BLOCK
from .replacement import Replacement

# {class: its module in transformers.integrations}: DeepSeek's fp8 format; compressed-tensors' optimised inference.
_CLASSES = {"FP8Linear": "finegrained_fp8", "CompressedTensorsFP8Linear": "compressed_tensors"}


class Projection(Replacement):
    """A linear module with a quantised weight, as a quantization op for the activation and a scaled GEMM."""

    op = "scaled_fp8_quant or per_token_group_quant_fp8, and cutlass_scaled_mm"

    def forward(self, input: Tensor) -> Tensor:
        if not self.serves(input):
            return self.original(input)
        rows = input.reshape(-1, input.shape[-1])
        return _product(self.module)(rows).view(*input.shape[:-1], -1)


def holds_codes(module: Any) -> bool:
    """Whether a module is a linear module with fp8 weights."""
    return any(type(module) is getattr(sys.modules.get(_path(file)), name, None) for name, file in _CLASSES.items())


def obstacle(module: Any, dtype: torch.dtype) -> str | None:
    """Why a module with fp8 weights cannot be replaced in a model of this dtype; None if it can."""
    product = _product(module)
    blocks = getattr(module, "block_size", None)
    if dtype == torch.float32:
        return "its activations are float32, not float16 or bfloat16"
    if product.weight.dtype != torch.float8_e4m3fn or product.weight_scale.dtype != torch.float32:
        return f"its weights are {product.weight.dtype} under scales of {product.weight_scale.dtype}"
    if blocks is not None and tuple(blocks) != (SCALE_BLOCK, SCALE_BLOCK):
        return f"its blocks are {blocks[0]} x {blocks[1]}, not {SCALE_BLOCK} x {SCALE_BLOCK}"
    if blocks is not None and product.input_scale is not None:
        return "its blocks have a static scale for activations"
    return None


def _product(module: Any) -> QuantisedLinear:
    """The projection of a module, with its current parameters."""
    blocks = getattr(module, "block_size", None) is not None
    scale = module.weight_scale_inv if hasattr(module, "weight_scale_inv") else module.weight_scale
    return QuantisedLinear(
        weight=module.weight,
        weight_scale=scale if blocks else scale.reshape(-1, 1),
        input_scale=getattr(module, "activation_scale", None),
        bias=module.bias,
        block_rows=(module.out_features,) if blocks else (),
    )


def _path(file: str) -> str:
    return f"transformers.integrations.{file}"
