"""Writing the latents and rotary keys of multi-head latent attention into a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float16, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from . import _geometry
from ._common import (
    DS_MLA_BYTES,
    bad_slots,
    check_tokens,
    encoded,
    entry_layout,
    example_cache,
    example_slots,
    existing_slots,
    first_stride,
    fp8_codes,
    indexable,
    token_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor

_concat_and_cache_mla = Kernel("cache/concat_and_cache_mla.cu")
_concat_and_cache_ds_mla = Kernel("cache/concat_and_cache_ds_mla.cu")

_FLT_MIN = 2.0**-126
_DS_MLA_THREADS = 256  # threads of a block; not tuned


def _ds_mla_entry(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """The entries of "fp8_ds_mla", [num_tokens, 656] bytes."""
    tiles = kv_c.float().unflatten(-1, (4, 128))
    largest = tiles.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)
    scales = (largest / torch.full_like(largest, 448.0)).clamp(min=_FLT_MIN)
    parts = (fp8_codes(tiles, scales, torch.float8_e4m3fn).flatten(1), scales.flatten(1), k_pe.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


@op(inout="kv_cache", ulps=0)
def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor | float
) -> None:
    """Write the latent and the rotary key of tokens into the slots of a paged cache (multi-head latent attention).

    ``kv_cache[b, o] = [kv_c[t], k_pe[t]]`` with ``b, o = divmod(slot_mapping[t], block_size)``, or quantized to
    fp8. Nothing is written for a slot that is negative or after the last. Among tokens with the same slot, it is
    unspecified which one is kept.

    With "fp8_ds_mla" an entry is 656 bytes: 512 e4m3 values of `kv_c`; four float32, the scales of its tiles of 128
    elements, ``max(max|x| / 448, 2^-126)``, where the maximum ignores NaN; and 64 elements of `k_pe`, copied
    (readers interpret them as bfloat16).

    Args:
        kv_c: [at least num_tokens, latent_size], float32, float16 or bfloat16; any token stride.
        k_pe: [at least num_tokens, rope_size], of the same dtype; any token stride.
        kv_cache: [num_blocks, block_size, latent_size + rope_size], written where slots say; any strides but the last;
            of the dtype of `kv_c`, or uint8 or float8. For "fp8_ds_mla" [num_blocks, block_size, 656] uint8,
            latent_size 512, rope_size 64 and a dtype of two bytes.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3", "fp8_e5m2" or "fp8_ds_mla".
        scale: one float32, or a number; not read for "auto" and "fp8_ds_mla".
    """
    tokens, block, offset = existing_slots(slot_mapping, *kv_cache.shape[:2])
    if kv_cache_dtype == "fp8_ds_mla":
        kv_cache[block, offset] = _ds_mla_entry(kv_c[tokens], k_pe[tokens])
    else:
        entry = torch.cat((kv_c[tokens], k_pe[tokens]), -1)
        indexable(kv_cache)[block, offset] = encoded(entry, scale, kv_cache, kv_cache_dtype)


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
        return _launch_ds_mla(kv_c, k_pe, kv_cache, slot_mapping, num_tokens)
    kind = fp8.cache_dtype(kv_cache, kv_cache_dtype, kv_c.dtype)
    latent_size, rope_size = kv_c.shape[1], k_pe.shape[1]
    check.sizes(kv_cache, num_blocks=None, block_size=None, **{"latent_size + rope_size": latent_size + rope_size})
    entry = entry_layout(kv_cache)
    vec_size = check.vector_width(latent_size | rope_size, kv_c, k_pe, kv_cache)
    config = _geometry.config(kv_c, num_tokens, max(1, entry.size // vec_size))
    return _concat_and_cache_mla(
        scalar_t=kv_c.dtype,
        cache_t=kind,
        slot_t=slot_mapping.dtype,
        LATENT_SIZE=latent_size,
        ROPE_SIZE=rope_size,
        BLOCK_SIZE=entry.block_size,
        VEC_SIZE=vec_size,
        **config.constants,
    ).launch(
        grid=config.num_blocks(num_tokens) if kv_cache.numel else 0,
        block=config.num_threads,
        num_tokens=num_tokens,
        slot_mapping_stride=first_stride(slot_mapping),
        kv_c_stride=first_stride(kv_c),
        k_pe_stride=first_stride(k_pe),
        **entry.fixed,
    )


def _launch_ds_mla(
    kv_c: TensorArg, k_pe: TensorArg, kv_cache: TensorArg, slot_mapping: TensorArg, num_tokens: int
) -> Launch:
    """The checks and the launch of concat_and_cache_ds_mla.cu."""
    check.dtype(kv_c, float16, bfloat16)
    check.sizes(kv_c, num_tokens=None, latent_size=512)
    check.sizes(k_pe, num_tokens=None, rope_size=64)
    check.dtype(kv_cache, uint8)
    check.sizes(kv_cache, num_blocks=None, block_size=None, entry=DS_MLA_BYTES)
    entry = entry_layout(kv_cache)
    return _concat_and_cache_ds_mla(
        scalar_t=kv_c.dtype,
        slot_t=slot_mapping.dtype,
        BLOCK_SIZE=entry.block_size,
        ACCESS_SIZE=check.vector_width(8, kv_c, k_pe),
        ENTRY_ACCESS=check.vector_width(16, kv_cache),
        NUM_THREADS=_DS_MLA_THREADS,
    ).launch(
        grid=-(-num_tokens * 64 // _DS_MLA_THREADS) if kv_cache.numel else 0,
        block=_DS_MLA_THREADS,
        num_tokens=num_tokens,
        slot_mapping_stride=first_stride(slot_mapping),
        kv_c_stride=first_stride(kv_c),
        k_pe_stride=first_stride(k_pe),
        **entry.fixed,
    )


@concat_and_cache_mla.bad_indices
def bad_indices_concat_and_cache_mla(kv_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return bad_slots(slot_mapping, *kv_cache.shape[:2])


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
    cache_element = dtype if kv_cache_dtype == "auto" else "uint8"
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
    entry_size = DS_MLA_BYTES if kv_cache_dtype == "fp8_ds_mla" else latent_size + rope_size
    return (
        make.randn(num_tokens, latent_size, dtype=dtype),
        make.randn(num_tokens, rope_size, dtype=dtype),
        example_cache(make, num_blocks, block_size, entry_size, dtype=cache_element),
        slot_mapping,
        kv_cache_dtype,
        make.full(1, value=0.03, dtype="float32"),
    )
