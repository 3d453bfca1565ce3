"""Writing tokens into the slots of a paged cache."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from .._core import check
from .._core.dtypes import bfloat16, float8_e4m3fn, float16, float32, uint8
from .._core.kernel import Kernel, Launch, Scratch
from .._core.lazy import torch
from .._core.op import op
from .._core.tensor import Arg
from ._common import bits, codes, entries, example_cache, kept, slots, slots_beyond, spread, stride

if TYPE_CHECKING:
    from torch import Tensor

_reshape_and_cache = Kernel("cache/reshape_and_cache.cu")
_group_slots = Kernel("cache/group_slots.cu")
_reshape_and_cache_groups = Kernel("cache/reshape_and_cache_groups.cu")
_reshape_and_cache_flash = Kernel("cache/reshape_and_cache_flash.cu")
_concat_and_cache_mla = Kernel("cache/concat_and_cache_mla.cu")
_concat_and_cache_ds_mla = Kernel("cache/concat_and_cache_ds_mla.cu")
_concat_and_cache_mla_rope_fused = Kernel("cache/concat_and_cache_mla_rope_fused.cu")
_indexer_k_quant_and_cache = Kernel("cache/indexer_k_quant_and_cache.cu")

_FLT_MIN = 2.0**-126
# Tokens per multiprocessor beyond which reshape_and_cache first finds those that share a group of slots.
_GROUPED_TOKENS = 16
_GROUPED_SLOTS = 1 << 24  # slots of the largest cache for which it does: each takes 4 bytes of scratch memory
_GROUP_COLUMNS = 256  # elements of a group's tokens that a block takes at a time
_GROUP_BLOCKS = 12  # blocks to a multiprocessor that do so
_DS_MLA_ENTRY = 656  # bytes: 512 codes, four float32 scales, 64 elements of two bytes


def _num_tokens(slot_mapping: Arg, *sources: Arg) -> int:
    """The length of `slot_mapping`, which no source falls short of."""
    check.index(slot_mapping, num_tokens=None)
    (num_tokens,) = slot_mapping.shape
    for source in sources:
        if not source.shape or source.shape[0] < num_tokens:
            raise source.error(f"expected at least num_tokens={num_tokens} rows like slot_mapping, got {source.shape}")
    return num_tokens


def _token_bytes(*rows: tuple[Arg, int]) -> int:
    """Bytes of one row of each tensor, so many elements of it."""
    return sum(arg.dtype.itemsize * size for arg, size in rows)


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
    num_blocks, num_heads, _, block_size, x = key_cache.shape
    tokens, block, offset = slots(slot_mapping, num_blocks, block_size)
    keys = kept(key[tokens], k_scale, kv_cache_dtype).reshape(len(tokens), num_heads, -1, x)
    bits(key_cache)[block, :, :, offset] = keys
    bits(value_cache)[block, :, :, offset] = kept(value[tokens], v_scale, kv_cache_dtype)


@reshape_and_cache.plan
def _(
    key: Arg,
    value: Arg,
    key_cache: Arg,
    value_cache: Arg,
    slot_mapping: Arg,
    kv_cache_dtype: str,
    k_scale: Arg,
    v_scale: Arg,
) -> list[Launch]:
    num_heads, head_size = _keys_and_values(key, value)
    num_tokens = _num_tokens(slot_mapping, key, value)
    kind = check.cache_dtype(key_cache, kv_cache_dtype, key.dtype)
    check.cache_dtype(value_cache, kv_cache_dtype, key.dtype)
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


def _by_groups(slot_mapping: Arg, num_slots: int, constants: dict[str, Any], strides: dict[str, int]) -> list[Launch]:
    """The launches of `reshape_and_cache` that first find which tokens share a group of slots."""
    (num_tokens,), group, num_threads = slot_mapping.shape, constants["GROUP"], 256
    most_groups = min(num_tokens, num_slots // group)
    columns = min(_GROUP_COLUMNS, 16 * -(-constants["ROW_SIZE"] // 16))
    parts = -(-constants["ROW_SIZE"] // columns)
    batch = -(-group * columns // (constants["LOAD_VEC"] * num_threads))
    scratch: dict[str, Any] = {
        "marks": Scratch(4 * num_slots // group),
        "tokens": Scratch(4 * num_slots),
        "groups": Scratch(4 * most_groups),
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
        grid=min(2 * parts * most_groups, _GROUP_BLOCKS * slot_mapping.device.multiprocessors),
        block=num_threads,
        **scratch,
        **strides,
    )
    return [*finding, writing]


def _keys_and_values(key: Arg, value: Arg) -> tuple[int, int]:
    """(num_heads, head_size) of keys and values, which agree in all but the number of rows."""
    check.floating(key)
    check.dtype(value, key.dtype)
    check.sizes(key, num_tokens=None, num_heads=None, head_size=None)
    _, num_heads, head_size = key.shape
    check.sizes(value, num_tokens=None, num_heads=num_heads, head_size=head_size)
    for arg in (key, value):
        check.row_size(arg)
    return num_heads, head_size


@reshape_and_cache.indices
def _(value_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return slots_beyond(slot_mapping, value_cache.shape[0], value_cache.shape[3])


@reshape_and_cache.traffic
def _(key: Arg, key_cache: Arg, slot_mapping: Arg) -> int:
    row_size = key.shape[1] * key.shape[2]
    return slot_mapping.nbytes + slot_mapping.numel * 2 * _token_bytes((key, row_size), (key_cache, row_size))


def _slots(make: Any, num_tokens: int, block_size: int) -> tuple[int, Any]:
    """(num_blocks, slots all over them) for an example."""
    num_blocks = -(-num_tokens // block_size) + 2
    return num_blocks, make.permutation(num_blocks * block_size, num_tokens)


@reshape_and_cache.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = "auto",
    head_size: Literal[128, 80] = 128,
    num_heads: Literal[8] = 8,
) -> tuple[Any, ...]:
    block_size = 16
    num_blocks, slot_mapping = _slots(make, num_tokens, block_size)
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
        bits(cache)[block, offset] = kept(x[tokens], scale, kv_cache_dtype)


@reshape_and_cache_flash.plan
def _(
    key: Arg,
    value: Arg,
    key_cache: Arg,
    value_cache: Arg,
    slot_mapping: Arg,
    kv_cache_dtype: str,
    k_scale: Arg,
    v_scale: Arg,
) -> Launch:
    num_heads, head_size = _keys_and_values(key, value)
    num_tokens = _num_tokens(slot_mapping, key, value)
    kind = check.cache_dtype(key_cache, kv_cache_dtype, key.dtype)
    check.cache_dtype(value_cache, kv_cache_dtype, key.dtype)
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


@reshape_and_cache_flash.indices
def _(key_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return slots_beyond(slot_mapping, *key_cache.shape[:2])


@reshape_and_cache_flash.traffic
def _(key: Arg, key_cache: Arg, slot_mapping: Arg) -> int:
    row_size = key.shape[1] * key.shape[2]
    return slot_mapping.nbytes + slot_mapping.numel * 2 * _token_bytes((key, row_size), (key_cache, row_size))


@reshape_and_cache_flash.example
def _(
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
    num_blocks, slot_mapping = _slots(make, num_tokens, block_size)
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


def _ds_mla_entry(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """The 656 bytes of each token."""
    tiles = kv_c.float().unflatten(-1, (4, 128))
    largest = tiles.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)
    scales = (largest / torch.full_like(largest, 448.0)).clamp(min=_FLT_MIN)
    parts = (codes(tiles, scales, float8_e4m3fn).flatten(1), scales.flatten(1), k_pe.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


@op(inout="kv_cache", ulps=0)
def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor | float
) -> None:
    """Write the latent and the rotary key of tokens into the slots of a paged cache (multi-head latent attention).

    ``kv_cache[b, o] = [kv_c[t], k_pe[t]]`` with ``b, o = divmod(slot_mapping[t], block_size)``, or their codes. Nothing
    is written for a slot that is negative or lies behind the last. Of tokens with the same slot, which one is kept is
    not specified.

    With "fp8_ds_mla" an entry is 656 bytes: 512 e4m3 codes of `kv_c`; four float32, the scales of its tiles of 128
    elements, ``max(max|x| / 448, 2^-126)`` in which NaN has no part; and 64 elements of `k_pe` as they are (readers
    take them for bfloat16).

    Args:
        kv_c: [at least num_tokens, latent_size], float32, float16 or bfloat16; any stride of tokens.
        k_pe: [at least num_tokens, rope_size], of the same dtype; any stride of tokens.
        kv_cache: [num_blocks, block_size, latent_size + rope_size], written where slots say; any strides but the last;
            of the dtype of `kv_c`, or uint8 or float8 codes. For "fp8_ds_mla" [num_blocks, block_size, 656] uint8,
            latent_size 512, rope_size 64 and a dtype of two bytes.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3", "fp8_e5m2" or "fp8_ds_mla".
        scale: one float32, or a number; not read for "auto" and "fp8_ds_mla".
    """
    tokens, block, offset = slots(slot_mapping, *kv_cache.shape[:2])
    if kv_cache_dtype == "fp8_ds_mla":
        kv_cache[block, offset] = _ds_mla_entry(kv_c[tokens], k_pe[tokens])
    else:
        entry = torch.cat((kv_c[tokens], k_pe[tokens]), -1)
        bits(kv_cache)[block, offset] = kept(entry, scale, kv_cache_dtype)


@concat_and_cache_mla.plan
def _(kv_c: Arg, k_pe: Arg, kv_cache: Arg, slot_mapping: Arg, kv_cache_dtype: str, scale: Arg) -> Launch:
    check.floating(kv_c)
    check.dtype(k_pe, kv_c.dtype)
    for arg, name in ((kv_c, "latent_size"), (k_pe, "rope_size")):
        check.sizes(arg, **{"num_tokens": None, name: None})
        check.row_size(arg)
    num_tokens = _num_tokens(slot_mapping, kv_c, k_pe)
    check.scalar(scale)
    if kv_cache_dtype == "fp8_ds_mla":
        return _ds_mla_plan(kv_c, k_pe, kv_cache, slot_mapping, num_tokens)
    kind = check.cache_dtype(kv_cache, kv_cache_dtype, kv_c.dtype)
    latent_size, rope_size = kv_c.shape[1], k_pe.shape[1]
    check.sizes(kv_cache, num_blocks=None, block_size=None, **{"latent_size + rope_size": latent_size + rope_size})
    entry = entries(kv_cache)
    vec_size = check.vector_width(latent_size | rope_size, kv_c, k_pe, kv_cache)
    grid, threads = spread(num_tokens, max(1, entry.size // vec_size), kv_c.device)
    return _concat_and_cache_mla(
        scalar_t=kv_c.dtype,
        cache_t=kind,
        slot_t=slot_mapping.dtype,
        LATENT_SIZE=latent_size,
        ROPE_SIZE=rope_size,
        BLOCK_SIZE=entry.block_size,
        VEC_SIZE=vec_size,
        **threads,
    ).launch(
        grid=grid if kv_cache.numel else 0,
        block=threads["NUM_THREADS"],
        num_tokens=num_tokens,
        slot_mapping_stride=stride(slot_mapping),
        kv_c_stride=stride(kv_c),
        k_pe_stride=stride(k_pe),
        **entry.strides,
    )


def _ds_mla_plan(kv_c: Arg, k_pe: Arg, kv_cache: Arg, slot_mapping: Arg, num_tokens: int) -> Launch:
    check.dtype(kv_c, float16, bfloat16)
    check.sizes(kv_c, num_tokens=None, latent_size=512)
    check.sizes(k_pe, num_tokens=None, rope_size=64)
    check.dtype(kv_cache, uint8)
    check.sizes(kv_cache, num_blocks=None, block_size=None, entry=_DS_MLA_ENTRY)
    entry, num_threads = entries(kv_cache), 256
    return _concat_and_cache_ds_mla(
        scalar_t=kv_c.dtype,
        slot_t=slot_mapping.dtype,
        BLOCK_SIZE=entry.block_size,
        ACCESS_SIZE=check.vector_width(8, kv_c, k_pe),
        ENTRY_ACCESS=check.vector_width(16, kv_cache),
        NUM_THREADS=num_threads,
    ).launch(
        grid=-(-num_tokens * 64 // num_threads) if kv_cache.numel else 0,
        block=num_threads,
        num_tokens=num_tokens,
        slot_mapping_stride=stride(slot_mapping),
        kv_c_stride=stride(kv_c),
        k_pe_stride=stride(k_pe),
        **entry.strides,
    )


@concat_and_cache_mla.indices
def _(kv_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return slots_beyond(slot_mapping, *kv_cache.shape[:2])


@concat_and_cache_mla.traffic
def _(kv_c: Arg, k_pe: Arg, kv_cache: Arg, slot_mapping: Arg) -> int:
    token = _token_bytes((kv_c, kv_c.shape[1]), (k_pe, k_pe.shape[1]), (kv_cache, kv_cache.shape[2]))
    return slot_mapping.nbytes + slot_mapping.numel * token


@concat_and_cache_mla.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2", "fp8_ds_mla"] = "auto",
) -> tuple[Any, ...]:
    block_size, latent_size, rope_size = 64, 512, 64
    if dtype == "float32" and kv_cache_dtype == "fp8_ds_mla":
        dtype = "bfloat16"
    kept_dtype = dtype if kv_cache_dtype == "auto" else "uint8"
    num_blocks, slot_mapping = _slots(make, num_tokens, block_size)
    entry_size = _DS_MLA_ENTRY if kv_cache_dtype == "fp8_ds_mla" else latent_size + rope_size
    return (
        make.randn(num_tokens, latent_size, dtype=dtype),
        make.randn(num_tokens, rope_size, dtype=dtype),
        example_cache(make, num_blocks, block_size, entry_size, dtype=kept_dtype),
        slot_mapping,
        kv_cache_dtype,
        make.full(1, value=0.03, dtype="float32"),
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Pairs of `x` turned, every product and every sum rounded to its dtype."""
    if is_neox:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


@op(inout=("q_pe", "k_pe", "kv_cache"), ulps=0)
def concat_and_cache_mla_rope_fused(
    positions: Tensor,
    q_pe: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: Tensor | float,
) -> None:
    """Rotate queries and keys in place, then write latent and key into a paged cache, as `concat_and_cache_mla` does.

    The pairs (j, j + rope_size / 2) if `is_neox`, else (2j, 2j + 1), turn by the angles in row ``positions[t]`` of
    `cos_sin_cache` (Su et al. 2021, arXiv:2104.09864), each product and each sum rounded to T. Of a token whose slot is
    negative or lies behind the last, only the queries are rotated; one whose position lies outside the table is left as
    it is, and nothing is written for it.

    Args:
        positions: [num_tokens] int64 or int32, any stride.
        q_pe: [num_tokens, num_heads, rope_size], float32, float16 or bfloat16, read and written; any strides of tokens
            and heads.
        k_pe: [num_tokens, rope_size] of the same dtype, read and written; any stride of tokens.
        kv_c: [num_tokens, latent_size] of the same dtype; any stride of tokens.
        cos_sin_cache: [max_position, rope_size] of the same dtype, contiguous: cosines in the first half of a row,
            sines in the second.
        is_neox: which elements make a pair.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        kv_cache: [num_blocks, block_size, latent_size + rope_size], written where slots say; any strides but the last;
            of the same dtype, or uint8 or float8 codes.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        kv_cache_scale: one float32, or a number; not read for "auto".
    """
    known = ((positions >= 0) & (positions < cos_sin_cache.shape[0])).nonzero().squeeze(1)
    cos, sin = cos_sin_cache[positions[known].long()].chunk(2, -1)
    q_pe[known] = _rotated(q_pe[known], cos[:, None], sin[:, None], is_neox)
    tokens, block, offset = slots(slot_mapping[known], *kv_cache.shape[:2])
    cos, sin, tokens = cos[tokens], sin[tokens], known[tokens]
    k_pe[tokens] = _rotated(k_pe[tokens], cos, sin, is_neox)
    bits(kv_cache)[block, offset] = kept(torch.cat((kv_c[tokens], k_pe[tokens]), -1), kv_cache_scale, kv_cache_dtype)


@concat_and_cache_mla_rope_fused.plan
def _(
    positions: Arg,
    q_pe: Arg,
    k_pe: Arg,
    kv_c: Arg,
    cos_sin_cache: Arg,
    is_neox: bool,
    slot_mapping: Arg,
    kv_cache: Arg,
    kv_cache_dtype: str,
    kv_cache_scale: Arg,
) -> Launch:
    check.floating(q_pe)
    check.sizes(q_pe, num_tokens=None, num_heads=None, rope_size=None)
    num_tokens, num_heads, rope_size = q_pe.shape
    if rope_size % 2 or not rope_size:
        raise q_pe.error(f"expected an even rope_size, got shape {q_pe.shape}")
    for arg in (k_pe, kv_c, cos_sin_cache):
        check.dtype(arg, q_pe.dtype)
    check.sizes(k_pe, num_tokens=num_tokens, rope_size=rope_size)
    check.sizes(kv_c, num_tokens=num_tokens, latent_size=None)
    check.sizes(cos_sin_cache, max_position=None, rope_size=rope_size)
    check.contiguous(cos_sin_cache)
    for arg in (q_pe, k_pe, kv_c):
        check.row_size(arg)
    for arg in (positions, slot_mapping):
        check.index(arg, num_tokens=num_tokens)
    latent_size = kv_c.shape[1]
    kind = check.cache_dtype(kv_cache, kv_cache_dtype, q_pe.dtype)
    check.sizes(kv_cache, num_blocks=None, block_size=None, **{"latent_size + rope_size": latent_size + rope_size})
    entry = entries(kv_cache)
    check.scalar(kv_cache_scale)
    vec_size = check.vector_width(rope_size // 2 | latent_size, q_pe, k_pe, kv_c, cos_sin_cache, kv_cache)
    items = (num_heads + 1) * (rope_size // 2 // vec_size) + latent_size // vec_size
    rounds = 2 if num_tokens > q_pe.device.multiprocessors else 1
    num_threads = check.threads(-(-items // rounds), most=256)
    return _concat_and_cache_mla_rope_fused(
        scalar_t=q_pe.dtype,
        cache_t=kind,
        slot_t=slot_mapping.dtype,
        position_t=positions.dtype,
        NUM_HEADS=num_heads,
        ROPE_SIZE=rope_size,
        LATENT_SIZE=latent_size,
        BLOCK_SIZE=entry.block_size,
        IS_NEOX=bool(is_neox),
        VEC_SIZE=vec_size,
        ROUNDS=rounds,
        NUM_THREADS=num_threads,
    ).launch(
        grid=(num_tokens if kv_cache.numel else 0, -(-items // (rounds * num_threads))),
        block=num_threads,
        max_position=cos_sin_cache.shape[0],
        positions_stride=stride(positions),
        slot_mapping_stride=stride(slot_mapping),
        q_stride=q_pe.strides[0],
        q_head_stride=q_pe.strides[1],
        k_stride=stride(k_pe),
        kv_c_stride=stride(kv_c),
        **entry.strides,
    )


@concat_and_cache_mla_rope_fused.indices
def _(positions: Tensor, cos_sin_cache: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> dict[str, Tensor]:
    outside = (positions < 0) | (positions >= cos_sin_cache.shape[0])
    return {"positions": outside, **slots_beyond(slot_mapping, *kv_cache.shape[:2])}


@concat_and_cache_mla_rope_fused.traffic
def _(positions: Arg, q_pe: Arg, k_pe: Arg, kv_c: Arg, cos_sin_cache: Arg, slot_mapping: Arg, kv_cache: Arg) -> int:
    angles = min(positions.numel, cos_sin_cache.shape[0]) * cos_sin_cache.shape[1] * cos_sin_cache.dtype.itemsize
    written = positions.numel * kv_cache.shape[2] * kv_cache.dtype.itemsize
    read = positions.nbytes + slot_mapping.nbytes + kv_c.nbytes + angles
    return read + 2 * (q_pe.nbytes + k_pe.nbytes) + written


@concat_and_cache_mla_rope_fused.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = "auto",
    is_neox: bool = False,
    num_heads: Literal[16] = 16,
) -> tuple[Any, ...]:
    block_size, latent_size, rope_size, max_position = 64, 512, 64, 4096
    kept_dtype = dtype if kv_cache_dtype == "auto" else "uint8"
    num_blocks, slot_mapping = _slots(make, num_tokens, block_size)
    return (
        make.randint(0, max_position, num_tokens),
        make.randn(num_tokens, num_heads, rope_size, dtype=dtype),
        make.randn(num_tokens, rope_size, dtype=dtype),
        make.randn(num_tokens, latent_size, dtype=dtype),
        make.randn(max_position, rope_size, dtype=dtype),
        is_neox,
        slot_mapping,
        example_cache(make, num_blocks, block_size, latent_size + rope_size, dtype=kept_dtype),
        kv_cache_dtype,
        make.full(1, value=0.03, dtype="float32"),
    )


def _power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two that is no smaller, of positive normal numbers; infinity stays."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


@op(inout="kv_cache", ulps=0)
def indexer_k_quant_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantise the indexer's keys by groups and write them into its paged cache (sparse attention of DeepSeek V3.2).

    ``s = max(max|x|, 1e-4) / 448`` over a group x of `quant_block_size` elements, in which NaN has no part, and the
    least power of two that is no smaller for "ue8m0"; the codes are ``e4m3(x / s)``, saturating, NaN staying NaN. A
    block of the cache is not a list of entries: it holds the codes of all its slots, [block_size, head_size], and then
    the scales of all its slots, [block_size, head_size / quant_block_size] float32. Nothing is written for a slot that
    is negative or lies behind the last. Of tokens with the same slot, which one is kept is not specified.

    Args:
        k: [num_tokens, head_size], float32, float16 or bfloat16; any stride of tokens. Tokens beyond the shorter of `k`
            and `slot_mapping` are not written.
        kv_cache: [num_blocks, block_size, head_size + 4 * head_size / quant_block_size] uint8, the elements of a block
            one after another; written where slots say.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        quant_block_size: elements under one scale, a divisor of head_size.
        kv_cache_dtype: the format of scales: "ue8m0" or any other name.
    """
    num_blocks, block_size, _ = kv_cache.shape
    num_tokens, head_size = min(len(k), len(slot_mapping)), k.shape[1]
    tokens, block, offset = slots(slot_mapping[:num_tokens], num_blocks, block_size)
    groups = k[tokens].float().unflatten(-1, (-1, quant_block_size))
    largest = groups.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True).clamp(min=1e-4)
    scales = largest / torch.full_like(largest, 448.0)
    if kv_cache_dtype == "ue8m0":
        scales = _power_of_two_above(scales)
    keys, of_scales = indexer_parts(kv_cache, head_size)
    keys[block, offset] = codes(groups, scales, float8_e4m3fn).flatten(1)
    of_scales[block, offset] = scales.flatten(1).view(torch.uint8)


def indexer_parts(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """The codes [num_blocks, block_size, head_size] and the bytes of the scales [num_blocks, block_size, ...]."""
    num_blocks, block_size, entry = kv_cache.shape
    flat = kv_cache.as_strided((num_blocks, block_size * entry), (kv_cache.stride(0), 1))
    parts = flat.split((block_size * head_size, block_size * (entry - head_size)), 1)
    keys, scales = (part.unflatten(1, (block_size, -1)) for part in parts)
    return keys, scales


def indexer_cache(kv_cache: Arg, head_size: int, scale_size: int) -> tuple[Arg, int]:
    """(the codes of an indexer's cache, in what alignment the scales lie); checks the cache."""
    check.dtype(kv_cache, uint8)
    check.sizes(kv_cache, num_blocks=None, block_size=None, entry=head_size + scale_size)
    num_blocks, block_size, _ = kv_cache.shape
    check.contiguous(replace(kv_cache, shape=kv_cache.shape[1:], strides=kv_cache.strides[1:]))
    block_stride = kv_cache.strides[0]
    keys = replace(kv_cache, shape=(num_blocks, block_size, head_size), strides=(block_stride, head_size, 1))
    bits_ = block_size * head_size | kv_cache.alignment | (block_stride if num_blocks > 1 else 0)
    return keys, bits_ & -bits_


@indexer_k_quant_and_cache.plan
def _(k: Arg, kv_cache: Arg, slot_mapping: Arg, quant_block_size: int, kv_cache_dtype: str) -> Launch:
    check.floating(k)
    check.sizes(k, num_tokens=None, head_size=None)
    head_size = check.row_size(k)
    if quant_block_size <= 0 or head_size % quant_block_size or not head_size:
        raise check.refuse(
            k, "quant_block_size", f"expected a divisor of head_size={head_size}, got {quant_block_size}"
        )
    check.index(slot_mapping, num_tokens=None)
    num_tokens = min(k.shape[0], slot_mapping.shape[0])
    num_groups = head_size // quant_block_size
    keys, scale_alignment = indexer_cache(kv_cache, head_size, 4 * num_groups)
    vec_size = check.vector_width(quant_block_size, k, keys)
    lanes, num_threads = 1, 128
    while lanes < 32 and lanes * vec_size < quant_block_size:
        lanes *= 2
    return _indexer_k_quant_and_cache(
        scalar_t=k.dtype,
        slot_t=slot_mapping.dtype,
        HEAD_SIZE=head_size,
        GROUP_SIZE=quant_block_size,
        BLOCK_SIZE=kv_cache.shape[1],
        POWER_OF_TWO=kv_cache_dtype == "ue8m0",
        VEC_SIZE=vec_size,
        SCALE_ACCESS=min(4, scale_alignment),
        LANES=lanes,
        NUM_THREADS=num_threads,
    ).launch(
        grid=-(-num_tokens * num_groups * lanes // num_threads) if kv_cache.numel else 0,
        block=num_threads,
        num_tokens=num_tokens,
        num_blocks=kv_cache.shape[0],
        slot_mapping_stride=stride(slot_mapping),
        k_stride=stride(k),
        block_stride=stride(kv_cache),
    )


@indexer_k_quant_and_cache.indices
def _(kv_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return slots_beyond(slot_mapping, *kv_cache.shape[:2])


@indexer_k_quant_and_cache.traffic
def _(k: Arg, kv_cache: Arg, slot_mapping: Arg) -> int:
    return k.nbytes + slot_mapping.nbytes + slot_mapping.numel * kv_cache.shape[2]


@indexer_k_quant_and_cache.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    quant_block_size: Literal[128, 64] = 128,
    kv_cache_dtype: Literal["auto", "ue8m0"] = "ue8m0",
) -> tuple[Any, ...]:
    block_size, head_size = 64, 128
    num_blocks, slot_mapping = _slots(make, num_tokens, block_size)
    entry = head_size + 4 * head_size // quant_block_size
    return (
        make.randn(num_tokens, head_size, dtype=dtype),
        make.randint(0, 120, num_blocks, block_size, entry, dtype="uint8"),
        slot_mapping,
        quant_block_size,
        kv_cache_dtype,
    )
