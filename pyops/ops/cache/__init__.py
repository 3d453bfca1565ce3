"""The paged cache of keys and values: writing tokens into slots, gathering sequences, moving and converting blocks.

A cache has num_blocks blocks of block_size slots: slot s is at offset ``s % block_size`` of block ``s // block_size``.
No slot, block, position, length or offset that a tensor holds can lead outside a tensor: what is out of range is not
written, and a row whose entry does not exist is left as it is. Kinds of a cache, `kv_cache_dtype`: "auto", elements are
those of the model; "fp8", "fp8_e4m3", "fp8_e5m2", they are codes of ``x / scale``, a true division in float32, rounded
to the nearest, saturating, NaN staying NaN. The first two are e4m3 as the cache says, float8_e4m3fn or float8_e4m3fnuz;
bytes (uint8) are float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
"""

from __future__ import annotations

from .blocks import convert_fp8, copy_blocks, copy_blocks_mla, copy_cache_blocks, swap_blocks
from .gather import (
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_cache,
    cp_gather_indexer_k_quant_cache,
    gather_and_maybe_dequant_cache,
)
from .indexer import indexer_k_quant_and_cache
from .mla import concat_and_cache_mla, concat_and_cache_mla_rope_fused
from .write import reshape_and_cache, reshape_and_cache_flash

__all__ = [
    "concat_and_cache_mla",
    "concat_and_cache_mla_rope_fused",
    "convert_fp8",
    "copy_blocks",
    "copy_blocks_mla",
    "copy_cache_blocks",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "gather_and_maybe_dequant_cache",
    "indexer_k_quant_and_cache",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
]
