"""Quantisation: fp8 and int8 codes under given scales, and under scales found from tensors, rows and groups; NVFP4.

A scale multiplies a code to give its value. All arithmetic is in float32, correctly rounded; conversions round to
nearest even (the group int8 op: toward zero) and saturate. NaN is left out of extremes. An infinity makes the scale it
enters infinite, and the finite values under it 0. `result` of an fp8 op may be float8_e4m3fn, uint8 for its bits, or on
any platform float8_e4m3fnuz, the e4m3 of gfx942: what is said of 448 is then said of 224, and -0 becomes 0.

Beside it, weights as checkpoints pack them: those of AWQ and GGUF in floating point, those of GPTQ made ready.
"""

from __future__ import annotations

from .awq import awq_dequantize, awq_dequantize_out
from .dynamic import dynamic_per_token_scaled_fp8_quant, dynamic_scaled_fp8_quant, dynamic_scaled_int8_quant
from .fp4 import scaled_fp4_quant, silu_and_mul_nvfp4_quant
from .fp4_experts import scaled_fp4_experts_quant, silu_and_mul_scaled_fp4_experts_quant
from .ggml import ggml_dequantize, ggml_dequantize_out
from .gptq import gptq_shuffle
from .groups import per_token_group_fp8_quant, per_token_group_fp8_quant_packed, per_token_group_quant_int8
from .hadamard import hadacore_transform, hadacore_transform_out
from .permute_cols import permute_cols, permute_cols_out
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
    "awq_dequantize_out",
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_scaled_int8_quant",
    "ggml_dequantize",
    "ggml_dequantize_out",
    "gptq_shuffle",
    "hadacore_transform",
    "hadacore_transform_out",
    "nvfp4_experts_quant",
    "nvfp4_quant",
    "per_token_group_fp8_quant",
    "per_token_group_fp8_quant_packed",
    "per_token_group_quant_fp8",
    "per_token_group_quant_fp8_packed_for_deepgemm",
    "per_token_group_quant_int8",
    "permute_cols",
    "permute_cols_out",
    "persistent_masked_m_silu_mul_quant",
    "scaled_fp4_experts_quant",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "silu_and_mul_nvfp4_experts_quant",
    "silu_and_mul_nvfp4_quant",
    "silu_and_mul_scaled_fp4_experts_quant",
    "static_scaled_fp8_quant",
    "static_scaled_int8_quant",
]
