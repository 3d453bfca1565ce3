"""Writing the keys and values of tokens into the slots of a paged cache, head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from . import _geometry
from ._common import (
    bad_slots,
    check_keys_and_values,
    check_tokens,
    encoded,
    example_cache,
    example_slots,
    existing_slots,
    first_stride,
    indexable,
    token_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor

_reshape_and_cache_flash = Kernel("cache/reshape_and_cache_flash.cu")


@op(inout=("key_cache", "value_cache"), ulps=0)
def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """Write keys and values of tokens into the slots of a paged cache, head by head.

    ``key_cache[b, o, h] = key[t, h]; value_cache[b, o, h] = value[t, h]`` with
    ``b, o = divmod(slot_mapping[t], block_size)``, or quantized to fp8. Nothing is written for a slot that is negative
    or after the last. Among tokens with the same slot, it is unspecified which one is kept.

    Args:
        key, value: [at least num_tokens, num_heads, head_size], float32, float16 or bfloat16; any token and
            head strides.
        key_cache, value_cache: [num_blocks, block_size, num_heads, head_size], written where slots say; each of any
            strides but that of the last dimension, so that heads may come before slots in memory and both caches may be
            slices of one buffer; of the dtype of `key`, or uint8 or float8.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: one float32 each, or a number, or both [num_heads], one for each head; not read for "auto".
    """
    num_blocks, block_size, *_ = key_cache.shape
    tokens, block, offset = existing_slots(slot_mapping, num_blocks, block_size)
    for cache, x, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        indexable(cache)[block, offset] = encoded(x[tokens], scale, cache, kv_cache_dtype)


@reshape_and_cache_flash.plan
def plan_reshape_and_cache_flash(
    key: TensorArg,
    value: TensorArg,
    key_cache: TensorArg,
    value_cache: TensorArg,
    slot_mapping: TensorArg,
    kv_cache_dtype: str,
    k_scale: TensorArg,
    v_scale: TensorArg,
) -> Launch:
    num_heads, head_size = check_keys_and_values(key, value)
    num_tokens = check_tokens(slot_mapping, key, value)
    kind = fp8.cache_dtype(key_cache, kv_cache_dtype, key.dtype)
    fp8.cache_dtype(value_cache, kv_cache_dtype, key.dtype)
    check.dtype(value_cache, key_cache.dtype)
    check.sizes(key_cache, num_blocks=None, block_size=None, num_heads=num_heads, head_size=head_size)
    check.same_shape(value_cache, key_cache)
    for cache in (key_cache, value_cache):
        check.row_size(cache)
    num_blocks, block_size, _, _ = key_cache.shape
    head_scales = k_scale.shape == (num_heads,) and num_heads > 1
    for scale in (k_scale, v_scale):
        if head_scales:
            check.shape(scale, float32, num_heads=num_heads)
        else:
            check.scalar(scale)
    vec_size = check.vector_width(head_size, key, value, key_cache, value_cache)
    config = _geometry.config(key, num_tokens, max(1, num_heads * head_size // vec_size))
    return _reshape_and_cache_flash(
        scalar_t=key.dtype,
        cache_t=kind,
        slot_t=slot_mapping.dtype,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        HEAD_SCALES=head_scales,
        VEC_SIZE=vec_size,
        **config.constants,
    ).launch(
        grid=(config.num_blocks(num_tokens) if key_cache.numel else 0, 2),
        block=config.num_threads,
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        slot_mapping_stride=first_stride(slot_mapping),
        key_stride=key.strides[0],
        key_head_stride=key.strides[1],
        value_stride=value.strides[0],
        value_head_stride=value.strides[1],
        key_block_stride=key_cache.strides[0],
        key_slot_stride=key_cache.strides[1],
        key_cache_head_stride=key_cache.strides[2],
        value_block_stride=value_cache.strides[0],
        value_slot_stride=value_cache.strides[1],
        value_cache_head_stride=value_cache.strides[2],
    )


@reshape_and_cache_flash.bad_indices
def bad_indices_reshape_and_cache_flash(key_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return bad_slots(slot_mapping, *key_cache.shape[:2])


@reshape_and_cache_flash.traffic
def traffic_reshape_and_cache_flash(key: TensorArg, key_cache: TensorArg, slot_mapping: TensorArg) -> int:
    row_size = key.shape[1] * key.shape[2]
    return slot_mapping.nbytes + slot_mapping.numel * 2 * token_bytes((key, row_size), (key_cache, row_size))


@reshape_and_cache_flash.example
def example_reshape_and_cache_flash(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = "auto",
    head_size: Literal[128, 80] = 128,
    num_heads: Literal[8] = 8,
    head_scales: bool = False,
) -> tuple[Any, ...]:
    block_size = 16
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
    cache_element = dtype if kv_cache_dtype == "auto" else "uint8"
    num_scales = num_heads if head_scales else 1
    return (
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        example_cache(make, num_blocks, block_size, num_heads, head_size, dtype=cache_element),
        example_cache(make, num_blocks, block_size, num_heads, head_size, dtype=cache_element),
        slot_mapping,
        kv_cache_dtype,
        make.randn(num_scales, dtype="float32", scale=0.001, shift=0.03),
        make.randn(num_scales, dtype="float32", scale=0.001, shift=0.05),
    )
