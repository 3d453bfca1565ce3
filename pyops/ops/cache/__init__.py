"""The paged cache of keys and values: writing tokens into slots, gathering sequences, moving and converting blocks.

A cache has num_blocks blocks of block_size slots: slot s is at offset ``s % block_size`` of block ``s // block_size``.
Index tensors are checked on the device, so no slot, block number, position, length or offset leads to an access outside
a tensor: a slot out of range is not written, and an output row without an existing cache entry is left unchanged.

`kv_cache_dtype` says what a cache holds. "auto": elements of the model's dtype. "fp8", "fp8_e4m3" and "fp8_e5m2": fp8
of ``x / scale``, a true division in float32, rounded to nearest, saturating; NaN stays NaN. "fp8" and "fp8_e4m3" are
the dtype of the cache, float8_e4m3fn or float8_e4m3fnuz; a cache of bytes (uint8) has the e4m3 of its device:
float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
"""

from __future__ import annotations

from .blocks import copy_blocks, copy_blocks_mla, copy_cache_blocks, swap_blocks
from .concat_and_cache_mla import concat_and_cache_mla
from .concat_and_cache_mla_rope_fused import concat_and_cache_mla_rope_fused
from .concat_mla_q import concat_mla_q
from .convert_fp8 import convert_fp8
from .cp_gather_and_upconvert_fp8_kv_cache import cp_gather_and_upconvert_fp8_kv_cache
from .deepseek_v4 import fused_deepseek_v4_kv_rope_insert, fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
from .deepseek_v4_rows import (
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert,
)
from .gather import cp_gather_cache, gather_and_maybe_dequant_cache
from .indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from .reshape_and_cache import reshape_and_cache
from .reshape_and_cache_flash import reshape_and_cache_flash
from .swap_batch import swap_blocks_batch

__all__ = [
    "concat_and_cache_mla",
    "concat_and_cache_mla_rope_fused",
    "concat_mla_q",
    "convert_fp8",
    "copy_blocks",
    "copy_blocks_mla",
    "copy_cache_blocks",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_deepseek_v4_kv_rope_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "gather_and_maybe_dequant_cache",
    "indexer_k_quant_and_cache",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "swap_blocks_batch",
]
