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
from .compress_kv import compress_kv
from .concat_and_cache_mla import concat_and_cache_mla
from .concat_and_cache_mla_rope_fused import concat_and_cache_mla_rope_fused, mla_norm_rope_cache
from .concat_mla_q import concat_mla_q
from .convert_fp8 import convert_fp8
from .cp_gather_and_upconvert_fp8_kv_cache import cp_gather_and_upconvert_fp8_kv_cache
from .cp_gather_and_upconvert_nvfp4_kv_cache import cp_gather_and_upconvert_nvfp4_kv_cache
from .deepseek_v4 import fused_deepseek_v4_kv_rope_insert, fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
from .deepseek_v4_rows import (
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert,
)
from .gather import cp_gather_cache, gather_and_maybe_dequant_cache
from .indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from .kimi_k3_decode import (
    fused_kimi_k3_mla_decode_q_concat_ds_mla_insert,
    fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert,
    fused_kimi_k3_mla_decode_q_concat_kv_cache_insert,
)
from .kimi_k3_fp8 import (
    fused_kimi_k3_mla_kv_concat,
    fused_kimi_k3_mla_kv_concat_quant_fp8,
    fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert,
)
from .kimi_k3_prefill import fused_kimi_k3_mla_key_concat_ds_mla_insert, fused_kimi_k3_mla_key_concat_kv_cache_insert
from .minimax_m3 import fused_minimax_m3_qknorm_rope_kv_insert
from .qk_norm_rope import fused_muse_spark_qknorm_rope_kv_insert, fused_qknorm_rope_cache
from .qk_rope_cache import fused_qk_rope_cache
from .reshape_and_cache import reshape_and_cache
from .reshape_and_cache_flash import reshape_and_cache_flash
from .swap_batch import swap_blocks_batch

__all__ = [
    "compress_kv",
    "concat_and_cache_mla",
    "concat_and_cache_mla_rope_fused",
    "concat_mla_q",
    "convert_fp8",
    "copy_blocks",
    "copy_blocks_mla",
    "copy_cache_blocks",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_and_upconvert_nvfp4_kv_cache",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_deepseek_v4_kv_rope_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "fused_kimi_k3_mla_decode_q_concat_ds_mla_insert",
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert",
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert",
    "fused_kimi_k3_mla_key_concat_ds_mla_insert",
    "fused_kimi_k3_mla_key_concat_kv_cache_insert",
    "fused_kimi_k3_mla_kv_concat",
    "fused_kimi_k3_mla_kv_concat_quant_fp8",
    "fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert",
    "fused_minimax_m3_qknorm_rope_kv_insert",
    "fused_muse_spark_qknorm_rope_kv_insert",
    "fused_qk_rope_cache",
    "fused_qknorm_rope_cache",
    "gather_and_maybe_dequant_cache",
    "indexer_k_quant_and_cache",
    "mla_norm_rope_cache",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "swap_blocks_batch",
]
