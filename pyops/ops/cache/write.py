"""Writing the keys and values of tokens into the slots of a paged cache."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import float32
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import fp8
from ._common import (
    bits,
    check_tokens,
    example_cache,
    example_slots,
    kept,
    slots,
    slots_beyond,
    spread,
    stride,
    token_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor

_reshape_and_cache = Kernel("cache/reshape_and_cache.cu")
_group_slots = Kernel("cache/group_slots.cu")
_reshape_and_cache_groups = Kernel("cache/reshape_and_cache_groups.cu")
_reshape_and_cache_flash = Kernel("cache/reshape_and_cache_flash.cu")

# Tokens per multiprocessor beyond which reshape_and_cache first finds those that share a group of slots.
_GROUPED_TOKENS = 16
_GROUPED_SLOTS = 1 << 24  # slots of the largest cache for which it does: each takes 4 bytes of scratch memory
_GROUP_COLUMNS = 256  # elements of a group's tokens that a block takes at a time
_GROUP_BLOCKS = 12  # blocks to a multiprocessor that do so


@op(inout=("key_cache", "value_cache"), ulps=0)
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """Write keys and values of tokens into the slots of a packed cache.

    ``key_cache[b, h, d // x, o, d % x] = key[t, h, d]; value_cache[b, h, d, o] = value[t, h, d]`` with
    ``b, o = divmod(slot_mapping[t], block_size)``, or their codes. Nothing is written for a slot that is negative or
    lies behind the last. Of tokens with the same slot, which one is kept is not specified.

    Args:
        key, value: [at least num_tokens, num_heads, head_size], float32, float16 or bfloat16; any stride of tokens.
        key_cache: [num_blocks, num_heads, head_size / x, block_size, x], contiguous, written where slots say; of the
            dtype of `key`, or uint8 or float8 codes.
        value_cache: [num_blocks, num_heads, head_size, block_size], likewise.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: one float32 each, or a number; not read for "auto".
    """
    num_blocks, num_heads, chunks, block_size, x = key_cache.shape
    tokens, block, offset = slots(slot_mapping, num_blocks, block_size)
    keys = kept(key[tokens], k_scale, key_cache, kv_cache_dtype).reshape(len(tokens), num_heads, chunks, x)
    bits(key_cache)[block, :, :, offset] = keys
    bits(value_cache)[block, :, :, offset] = kept(value[tokens], v_scale, value_cache, kv_cache_dtype)


@reshape_and_cache.plan
def plan_reshape_and_cache(
    key: TensorArg,
    value: TensorArg,
    key_cache: TensorArg,
    value_cache: TensorArg,
    slot_mapping: TensorArg,
    kv_cache_dtype: str,
    k_scale: TensorArg,
    v_scale: TensorArg,
) -> list[Launch]:
    num_heads, head_size = _keys_and_values(key, value)
    num_tokens = check_tokens(slot_mapping, key, value)
    kind = fp8.cache_dtype(key_cache, kv_cache_dtype, key.dtype)
    fp8.cache_dtype(value_cache, kv_cache_dtype, key.dtype)
    check.dtype(value_cache, key_cache.dtype)
    check.sizes(key_cache, num_blocks=None, num_heads=num_heads, chunks=None, block_size=None, x=None)
    num_blocks, _, chunks, block_size, x = key_cache.shape
    if chunks * x != head_size:
        raise key_cache.error(f"expected dimensions 2 and 4 to make head_size={head_size}, got shape {key_cache.shape}")
    sizes = {"num_blocks": num_blocks, "num_heads": num_heads, "head_size": head_size, "block_size": block_size}
    check.sizes(value_cache, **sizes)
    for arg in (key_cache, value_cache):
        check.contiguous(arg)
    row_size = num_heads * head_size
    rows = [replace(arg, shape=(arg.shape[0], row_size), strides=(arg.strides[0], 1)) for arg in (key, value)]
    for arg in (key, value):
        check.contiguous(replace(arg, shape=arg.shape[1:], strides=arg.strides[1:]))
    for scale in (k_scale, v_scale):
        check.scalar(scale)
    if not key_cache.numel or not num_tokens:
        return []
    constants = {
        "scalar_t": key.dtype,
        "cache_t": kind,
        "ROW_SIZE": row_size,
        "BLOCK_SIZE": block_size,
        "X": x,
        "LOAD_VEC": check.vector_width(row_size, *rows),
        "KEY_VEC": check.vector_width(gcd(x, 16), replace(key_cache, shape=(), strides=())),
    }
    strides = {"key_stride": stride(key), "value_stride": stride(value)}
    flat_values = replace(value_cache, shape=(), strides=())
    group = max(size for size in range(1, 33) if block_size % size == 0)
    many = num_tokens > _GROUPED_TOKENS * key.device.multiprocessors
    if many and group >= 8 and num_blocks * block_size <= _GROUPED_SLOTS:
        constants |= {"GROUP": group, "RUN": check.vector_width(group, flat_values)}
        return _by_groups(slot_mapping, num_blocks * block_size, constants, strides)
    if num_tokens <= 32:
        tokens, columns, num_threads = 4, 128, 128
    elif num_tokens <= 16 * key.device.multiprocessors:
        tokens, columns, num_threads = 16, 64, 128
    else:
        tokens, columns, num_threads = 32, 128, 256
    return [
        _reshape_and_cache(
            **constants,
            slot_t=slot_mapping.dtype,
            RUN=check.vector_width(block_size, flat_values),
            TOKENS=tokens,
            COLUMNS=columns,
            NUM_THREADS=num_threads,
        ).launch(
            grid=(-(-num_tokens // tokens), -(-row_size // columns), 2),
            block=num_threads,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            slot_mapping_stride=stride(slot_mapping),
            **strides,
        )
    ]


def _by_groups(
    slot_mapping: TensorArg, num_slots: int, constants: dict[str, Any], strides: dict[str, int]
) -> list[Launch]:
    """The launches of `reshape_and_cache` that first find which tokens share a group of slots."""
    (num_tokens,), group, num_threads = slot_mapping.shape, constants["GROUP"], 256
    max_groups = min(num_tokens, num_slots // group)
    columns = min(_GROUP_COLUMNS, 16 * -(-constants["ROW_SIZE"] // 16))
    parts = -(-constants["ROW_SIZE"] // columns)
    batch = -(-group * columns // (constants["LOAD_VEC"] * num_threads))
    scratch: dict[str, Any] = {
        "marks": Scratch(4 * num_slots // group),
        "tokens": Scratch(4 * num_slots),
        "groups": Scratch(4 * max_groups),
        "count": Scratch(4),
    }
    finding = [
        _group_slots(slot_t=slot_mapping.dtype, GROUP=group, CLEAR=clear, NUM_THREADS=num_threads).launch(
            grid=-(-num_tokens // num_threads),
            block=num_threads,
            num_tokens=num_tokens,
            num_slots=num_slots,
            slot_mapping_stride=stride(slot_mapping),
            **scratch,
        )
        for clear in (True, False)
    ]
    writing = _reshape_and_cache_groups(
        **constants, COLUMNS=columns, BATCH=min(4, batch), NUM_THREADS=num_threads
    ).launch(
        grid=min(2 * parts * max_groups, _GROUP_BLOCKS * slot_mapping.device.multiprocessors),
        block=num_threads,
        **scratch,
        **strides,
    )
    return [*finding, writing]


def _keys_and_values(key: TensorArg, value: TensorArg) -> tuple[int, int]:
    """(num_heads, head_size) of keys and values, which agree in all but the number of rows."""
    check.floating(key)
    check.dtype(value, key.dtype)
    check.sizes(key, num_tokens=None, num_heads=None, head_size=None)
    _, num_heads, head_size = key.shape
    check.sizes(value, num_tokens=None, num_heads=num_heads, head_size=head_size)
    for arg in (key, value):
        check.row_size(arg)
    return num_heads, head_size


@reshape_and_cache.bad_indices
def bad_indices_reshape_and_cache(value_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return slots_beyond(slot_mapping, value_cache.shape[0], value_cache.shape[3])


@reshape_and_cache.traffic
def traffic_reshape_and_cache(key: TensorArg, key_cache: TensorArg, slot_mapping: TensorArg) -> int:
    row_size = key.shape[1] * key.shape[2]
    return slot_mapping.nbytes + slot_mapping.numel * 2 * token_bytes((key, row_size), (key_cache, row_size))


@reshape_and_cache.example
def example_reshape_and_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = "auto",
    head_size: Literal[128, 80] = 128,
    num_heads: Literal[8] = 8,
) -> tuple[Any, ...]:
    block_size = 16
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
    x = 16 // (4 if dtype == "float32" else 2) if kv_cache_dtype == "auto" else 16
    kept_dtype = dtype if kv_cache_dtype == "auto" else "uint8"
    return (
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        example_cache(make, num_blocks, num_heads, head_size // x, block_size, x, dtype=kept_dtype),
        example_cache(make, num_blocks, num_heads, head_size, block_size, dtype=kept_dtype),
        slot_mapping,
        kv_cache_dtype,
        make.full(1, value=0.03, dtype="float32"),
        make.full(1, value=0.05, dtype="float32"),
    )


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
    ``b, o = divmod(slot_mapping[t], block_size)``, or their codes. Nothing is written for a slot that is negative or
    lies behind the last. Of tokens with the same slot, which one is kept is not specified.

    Args:
        key, value: [at least num_tokens, num_heads, head_size], float32, float16 or bfloat16; any strides of tokens and
            heads.
        key_cache, value_cache: [num_blocks, block_size, num_heads, head_size], written where slots say; each of any
            strides but that of the last dimension, so that heads may come before slots in memory and both caches may be
            slices of one buffer; of the dtype of `key`, or uint8 or float8 codes.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: one float32 each, or a number, or both [num_heads], one for each head; not read for "auto".
    """
    num_blocks, block_size, *_ = key_cache.shape
    tokens, block, offset = slots(slot_mapping, num_blocks, block_size)
    for cache, x, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        bits(cache)[block, offset] = kept(x[tokens], scale, cache, kv_cache_dtype)


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
    num_heads, head_size = _keys_and_values(key, value)
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
    grid, threads = spread(num_tokens, max(1, num_heads * head_size // vec_size), key.device)
    return _reshape_and_cache_flash(
        scalar_t=key.dtype,
        cache_t=kind,
        slot_t=slot_mapping.dtype,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        HEAD_SCALES=head_scales,
        VEC_SIZE=vec_size,
        **threads,
    ).launch(
        grid=(grid if key_cache.numel else 0, 2),
        block=threads["NUM_THREADS"],
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        slot_mapping_stride=stride(slot_mapping),
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
    return slots_beyond(slot_mapping, *key_cache.shape[:2])


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
    kept_dtype = dtype if kv_cache_dtype == "auto" else "uint8"
    num_scales = num_heads if head_scales else 1
    return (
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        example_cache(make, num_blocks, block_size, num_heads, head_size, dtype=kept_dtype),
        example_cache(make, num_blocks, block_size, num_heads, head_size, dtype=kept_dtype),
        slot_mapping,
        kv_cache_dtype,
        make.randn(num_scales, dtype="float32", scale=0.001, shift=0.03),
        make.randn(num_scales, dtype="float32", scale=0.001, shift=0.05),
    )
