"""Quantization of activations to fp8, int8 and FP4; dequantization and repacking of AWQ, GGUF and GPTQ weights.

A value is about its quantized value times a scale. Scales are given (static), or computed from a tensor, a row or a
group (dynamic). All arithmetic is in
float32, correctly rounded. Conversions round to nearest even (`per_token_group_quant_int8`: toward zero) and saturate.
Maxima and minima ignore NaN. An infinity makes its scale infinite; finite values then quantize to 0.
The `result` of an fp8 op may be float8_e4m3fn, uint8 (the bits of float8_e4m3fn) or, on any platform, float8_e4m3fnuz,
the e4m3 of gfx942: its limit is 224 where docstrings say 448, and it has no -0.
"""

from __future__ import annotations

from .awq import awq_dequantize
from .dynamic import dynamic_per_token_scaled_fp8_quant, dynamic_scaled_fp8_quant, dynamic_scaled_int8_quant
from .fp4 import scaled_fp4_quant, silu_and_mul_nvfp4_quant
from .fp4_experts import scaled_fp4_experts_quant, silu_and_mul_scaled_fp4_experts_quant
from .ggml import ggml_dequantize
from .gptq import gptq_shuffle
from .groups import per_token_group_fp8_quant, per_token_group_quant_int8
from .groups_packed import per_token_group_fp8_quant_packed
from .hadamard import hadacore_transform, hadacore_transform_out
from .mxfp4_experts import mxfp4_experts_quant, silu_and_mul_mxfp4_experts_quant
from .mxfp8_experts import mxfp8_experts_quant
from .permute_cols import permute_cols
from .persistent_masked_m_silu_mul_quant import persistent_masked_m_silu_mul_quant
from .scaled import (
    nvfp4_experts_quant,
    nvfp4_quant,
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed_for_deepgemm,
    scaled_fp8_quant,
    scaled_int8_quant,
    silu_and_mul_nvfp4_experts_quant,
)
from .static import static_scaled_fp8_quant, static_scaled_int8_quant

__all__ = [
    "awq_dequantize",
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_scaled_int8_quant",
    "ggml_dequantize",
    "gptq_shuffle",
    "hadacore_transform",
    "hadacore_transform_out",
    "mxfp4_experts_quant",
    "mxfp8_experts_quant",
    "nvfp4_experts_quant",
    "nvfp4_quant",
    "per_token_group_fp8_quant",
    "per_token_group_fp8_quant_packed",
    "per_token_group_quant_fp8",
    "per_token_group_quant_fp8_packed_for_deepgemm",
    "per_token_group_quant_int8",
    "permute_cols",
    "persistent_masked_m_silu_mul_quant",
    "scaled_fp4_experts_quant",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "silu_and_mul_mxfp4_experts_quant",
    "silu_and_mul_nvfp4_experts_quant",
    "silu_and_mul_nvfp4_quant",
    "silu_and_mul_scaled_fp4_experts_quant",
    "static_scaled_fp8_quant",
    "static_scaled_int8_quant",
]
