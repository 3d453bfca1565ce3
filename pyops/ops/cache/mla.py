"""Writing the latents and rotary keys of multi-head latent attention into a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import bfloat16, float16, uint8
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import fp8
from ._common import (
    bits,
    check_rows,
    check_tokens,
    codes,
    entries,
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

_concat_and_cache_mla = Kernel("cache/concat_and_cache_mla.cu")
_concat_and_cache_ds_mla = Kernel("cache/concat_and_cache_ds_mla.cu")
_concat_and_cache_mla_rope_fused = Kernel("cache/concat_and_cache_mla_rope_fused.cu")

_FLT_MIN = 2.0**-126
_DS_MLA_ENTRY = 656  # bytes: 512 codes, four float32 scales, 64 elements of two bytes


def _ds_mla_entry(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """The 656 bytes of each token."""
    tiles = kv_c.float().unflatten(-1, (4, 128))
    largest = tiles.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)
    scales = (largest / torch.full_like(largest, 448.0)).clamp(min=_FLT_MIN)
    parts = (codes(tiles, scales, torch.float8_e4m3fn).flatten(1), scales.flatten(1), k_pe.contiguous())
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
        bits(kv_cache)[block, offset] = kept(entry, scale, kv_cache, kv_cache_dtype)


@concat_and_cache_mla.plan
def plan_concat_and_cache_mla(
    kv_c: TensorArg,
    k_pe: TensorArg,
    kv_cache: TensorArg,
    slot_mapping: TensorArg,
    kv_cache_dtype: str,
    scale: TensorArg,
) -> Launch:
    check.floating(kv_c)
    check.dtype(k_pe, kv_c.dtype)
    for arg, name in ((kv_c, "latent_size"), (k_pe, "rope_size")):
        check.sizes(arg, **{"num_tokens": None, name: None})
        check.row_size(arg)
    num_tokens = check_tokens(slot_mapping, kv_c, k_pe)
    check.scalar(scale)
    if kv_cache_dtype == "fp8_ds_mla":
        return _ds_mla_plan(kv_c, k_pe, kv_cache, slot_mapping, num_tokens)
    kind = fp8.cache_dtype(kv_cache, kv_cache_dtype, kv_c.dtype)
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


def _ds_mla_plan(
    kv_c: TensorArg, k_pe: TensorArg, kv_cache: TensorArg, slot_mapping: TensorArg, num_tokens: int
) -> Launch:
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


@concat_and_cache_mla.bad_indices
def bad_indices_concat_and_cache_mla(kv_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return slots_beyond(slot_mapping, *kv_cache.shape[:2])


@concat_and_cache_mla.traffic
def traffic_concat_and_cache_mla(kv_c: TensorArg, k_pe: TensorArg, kv_cache: TensorArg, slot_mapping: TensorArg) -> int:
    token = token_bytes((kv_c, kv_c.shape[1]), (k_pe, k_pe.shape[1]), (kv_cache, kv_cache.shape[2]))
    return slot_mapping.nbytes + slot_mapping.numel * token


@concat_and_cache_mla.example
def example_concat_and_cache_mla(
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
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
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
        positions: [at least num_tokens] int64 or int32, any stride.
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
    positions = positions[: len(q_pe)]
    known = ((positions >= 0) & (positions < cos_sin_cache.shape[0])).nonzero().squeeze(1)
    cos, sin = cos_sin_cache[positions[known].long()].chunk(2, -1)
    q_pe[known] = _rotated(q_pe[known], cos[:, None], sin[:, None], is_neox)
    tokens, block, offset = slots(slot_mapping[known], *kv_cache.shape[:2])
    cos, sin, tokens = cos[tokens], sin[tokens], known[tokens]
    k_pe[tokens] = _rotated(k_pe[tokens], cos, sin, is_neox)
    entry = torch.cat((kv_c[tokens], k_pe[tokens]), -1)
    bits(kv_cache)[block, offset] = kept(entry, kv_cache_scale, kv_cache, kv_cache_dtype)


@concat_and_cache_mla_rope_fused.plan
def plan_concat_and_cache_mla_rope_fused(
    positions: TensorArg,
    q_pe: TensorArg,
    k_pe: TensorArg,
    kv_c: TensorArg,
    cos_sin_cache: TensorArg,
    is_neox: bool,
    slot_mapping: TensorArg,
    kv_cache: TensorArg,
    kv_cache_dtype: str,
    kv_cache_scale: TensorArg,
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
    check.index(positions, num_tokens=None)
    check_rows(positions, num_tokens, "num_tokens")
    check.index(slot_mapping, num_tokens=num_tokens)
    latent_size = kv_c.shape[1]
    kind = fp8.cache_dtype(kv_cache, kv_cache_dtype, q_pe.dtype)
    check.sizes(kv_cache, num_blocks=None, block_size=None, **{"latent_size + rope_size": latent_size + rope_size})
    entry = entries(kv_cache)
    check.scalar(kv_cache_scale)
    vec_size = check.vector_width(rope_size // 2 | latent_size, q_pe, k_pe, kv_c, cos_sin_cache, kv_cache)
    items = (num_heads + 1) * (rope_size // 2 // vec_size) + latent_size // vec_size
    rounds = 2 if num_tokens > q_pe.device.multiprocessors else 1
    num_threads = check.threads(-(-items // rounds), max_threads=256)
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
        grid=(num_tokens if cos_sin_cache.numel else 0, -(-items // (rounds * num_threads))),
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


@concat_and_cache_mla_rope_fused.bad_indices
def bad_indices_concat_and_cache_mla_rope_fused(
    positions: Tensor, cos_sin_cache: Tensor, slot_mapping: Tensor, kv_cache: Tensor
) -> dict[str, Tensor]:
    outside = (positions < 0) | (positions >= cos_sin_cache.shape[0])
    outside[len(slot_mapping) :] = False
    return {"positions": outside, **slots_beyond(slot_mapping, *kv_cache.shape[:2])}


@concat_and_cache_mla_rope_fused.traffic
def traffic_concat_and_cache_mla_rope_fused(
    positions: TensorArg,
    q_pe: TensorArg,
    k_pe: TensorArg,
    kv_c: TensorArg,
    cos_sin_cache: TensorArg,
    slot_mapping: TensorArg,
    kv_cache: TensorArg,
) -> int:
    angles = min(positions.numel, cos_sin_cache.shape[0]) * cos_sin_cache.shape[1] * cos_sin_cache.dtype.itemsize
    written = positions.numel * kv_cache.shape[2] * kv_cache.dtype.itemsize
    read = positions.nbytes + slot_mapping.nbytes + kv_c.nbytes + angles
    return read + 2 * (q_pe.nbytes + k_pe.nbytes) + written


@concat_and_cache_mla_rope_fused.example
def example_concat_and_cache_mla_rope_fused(
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
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
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
