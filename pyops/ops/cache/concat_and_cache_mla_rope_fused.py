"""Multi-head latent attention: norm, rotary embedding and the write into the paged cache in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from .._shared import columns, fp8
from .._shared.norms import rms
from ._common import (
    bad_slots,
    check_rows,
    check_tokens,
    encoded,
    entry_layout,
    example_cache,
    example_slots,
    existing_slots,
    first_stride,
    indexable,
)

if TYPE_CHECKING:
    from torch import Tensor

_concat_and_cache_mla_rope_fused = Kernel("cache/concat_and_cache_mla_rope_fused.cu")
_mla_absorb_rope_insert = Kernel("cache/mla_absorb_rope_insert.cu")
# Vectors per thread if there are more tokens than SMs, and threads of a block; not yet measured.
_MANY_ROUNDS, _MAX_THREADS = 2, 256


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Rotate the pairs of `x`; every multiplication and addition is rounded to the dtype of `x`."""
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

    The pairs (j, j + rope_size / 2) if `is_neox`, else (2j, 2j + 1), rotate by the angles in row ``positions[t]`` of
    `cos_sin_cache` (Su et al. 2021, arXiv:2104.09864); each multiplication and addition is rounded to T. If the slot
    of a token is negative or after the last, only its queries are rotated. If its position lies outside the table,
    nothing of the token is rotated or written.

    Args:
        positions: [at least num_tokens] int64 or int32, any stride.
        q_pe: [at least num_tokens, num_heads, rope_size], float32, float16 or bfloat16, read and written; any strides
            of tokens and heads.
        k_pe: [at least num_tokens, rope_size] of the same dtype, read and written; any token stride.
        kv_c: [at least num_tokens, latent_size] of the same dtype; any token stride.
        cos_sin_cache: [max_position, rope_size] of the same dtype, or float32, which is rounded to it; contiguous:
            cosines in the first half of a row, sines in the second.
        is_neox: whether a pair has one element in each half of a row, or two adjacent elements.
        slot_mapping: [num_tokens] int64 or int32, any stride. Nothing is written of tokens after the last slot.
        kv_cache: [num_blocks, block_size, latent_size + rope_size], written where slots say; any strides but the last;
            of the same dtype, or uint8 or float8.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        kv_cache_scale: one float32, or a number; not read for "auto".
    """
    positions = positions[: len(slot_mapping)]
    known = ((positions >= 0) & (positions < cos_sin_cache.shape[0])).nonzero().squeeze(1)
    cos, sin = cos_sin_cache[positions[known].long()].to(q_pe.dtype).chunk(2, -1)
    q_pe[known] = _rotated(q_pe[known], cos[:, None], sin[:, None], is_neox)
    tokens, block, offset = existing_slots(slot_mapping[known], *kv_cache.shape[:2])
    cos, sin, tokens = cos[tokens], sin[tokens], known[tokens]
    k_pe[tokens] = _rotated(k_pe[tokens], cos, sin, is_neox)
    entry = torch.cat((kv_c[tokens], k_pe[tokens]), -1)
    indexable(kv_cache)[block, offset] = encoded(entry, kv_cache_scale, kv_cache, kv_cache_dtype)


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
    inserted = slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale
    return _launch(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, *inserted, None)


def _launch(
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
    norm_weight: TensorArg | None,
    product: tuple[TensorArg, TensorArg, TensorArg] | None = None,
) -> Launch:
    check.floating(q_pe)
    check.sizes(q_pe, num_tokens=None, num_heads=None, rope_size=None)
    _, num_heads, rope_size = q_pe.shape
    if rope_size % 2 or not rope_size:
        raise q_pe.error(f"expected an even rope_size, got shape {q_pe.shape}")
    for arg in (k_pe, kv_c):
        check.dtype(arg, q_pe.dtype)
    check.dtype(cos_sin_cache, q_pe.dtype, float32)
    check.sizes(k_pe, num_tokens=None, rope_size=rope_size)
    check.sizes(kv_c, num_tokens=None, latent_size=None)
    check.sizes(cos_sin_cache, max_position=None, rope_size=rope_size)
    check.contiguous(cos_sin_cache)
    for arg in (q_pe, k_pe, kv_c):
        check.row_size(arg)
    check.index(positions, num_tokens=None)
    num_tokens = check_tokens(slot_mapping, q_pe, k_pe, kv_c)
    check_rows(positions, num_tokens, "num_tokens")
    latent_size = kv_c.shape[1]
    check.shape(norm_weight, q_pe.dtype, latent_size=latent_size)
    kind = fp8.cache_dtype(kv_cache, kv_cache_dtype, q_pe.dtype)
    check.sizes(kv_cache, num_blocks=None, block_size=None, **{"latent_size + rope_size": latent_size + rope_size})
    entry = entry_layout(kv_cache)
    check.scalar(kv_cache_scale)
    of_vectors = q_pe, k_pe, kv_c, cos_sin_cache, kv_cache, *([] if norm_weight is None else [norm_weight])
    arguments: dict[str, Any] = {
        "max_position": cos_sin_cache.shape[0],
        "positions_stride": first_stride(positions),
        "slot_mapping_stride": first_stride(slot_mapping),
        "q_stride": q_pe.strides[0],
        "q_head_stride": q_pe.strides[1],
        "k_stride": first_stride(k_pe),
        "kv_c_stride": first_stride(kv_c),
        **entry.fixed,
    }
    if norm_weight is None:
        arguments |= {"norm_weight": 0, "epsilon": 0.0}
    constants = {
        "scalar_t": q_pe.dtype,
        "angle_t": cos_sin_cache.dtype,
        "cache_t": kind,
        "slot_t": slot_mapping.dtype,
        "position_t": positions.dtype,
        "NUM_HEADS": num_heads,
        "ROPE_SIZE": rope_size,
        "LATENT_SIZE": latent_size,
        "BLOCK_SIZE": entry.block_size,
        "IS_NEOX": bool(is_neox),
        "NORMALISED": norm_weight is not None,
    }

    def items(vec_size: int) -> int:
        return (num_heads + 1) * (rope_size // 2 // vec_size) + latent_size // vec_size

    if product is not None:
        _, plain, up_keys = product
        columns.check_batch(*product)
        check.dtype(plain, q_pe.dtype)
        check.sizes(plain, num_heads=num_heads, num_tokens=num_tokens, K=None)
        if up_keys.shape[2] > 1 and up_keys.strides[2] != 1:
            raise up_keys.error(f"expected a last dimension of stride 1, got strides {up_keys.strides}")
        vec_size = check.vector_width(rope_size // 2 | latent_size | up_keys.shape[2], *of_vectors, up_keys)
        parts = -(-items(vec_size) // columns.NUM_THREADS)
        return _mla_absorb_rope_insert(
            **constants, **columns.column_constants(plain.shape[2], vec_size), ROUNDS=1
        ).launch(
            grid=(max(parts, columns.column_blocks(up_keys.shape[2], vec_size)), num_tokens, num_heads + 1),
            block=columns.NUM_THREADS,
            weight_stride=up_keys.strides[1],
            **columns.batch_strides(*product),
            **arguments,
        )
    vec_size = check.vector_width(rope_size // 2 | latent_size, *of_vectors)
    rounds = _MANY_ROUNDS if num_tokens > q_pe.device.num_sms else 1
    num_threads = check.threads(-(-items(vec_size) // rounds), max_threads=_MAX_THREADS)
    return _concat_and_cache_mla_rope_fused(
        **constants, VEC_SIZE=vec_size, ROUNDS=rounds, NUM_THREADS=num_threads
    ).launch(
        grid=(num_tokens if cos_sin_cache.numel else 0, -(-items(vec_size) // (rounds * num_threads))),
        block=num_threads,
        **arguments,
    )


@op(inout=("absorbed", "q_pe", "k_pe", "kv_cache"), ulps=2, atol=2.0**-18)  # as `rms_norm`, and as `skinny_bmm`
def mla_norm_rope_cache(
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
    norm_weight: Tensor,
    epsilon: float = 1e-6,
    absorbed: Tensor | None = None,
    plain: Tensor | None = None,
    up_keys: Tensor | None = None,
) -> None:
    """Rotate queries and keys in place, then write the norm of the latent and the key into a paged cache: one launch.

    As `rms_norm` of `kv_c`, then `concat_and_cache_mla_rope_fused`, but `kv_c` itself is not changed. For few tokens
    the launch may also compute ``absorbed = plain @ up_keys``, as `skinny_bmm` does: neither needs the other.

    Args:
        positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping: as in `concat_and_cache_mla_rope_fused`.
        kv_cache, kv_cache_dtype, kv_cache_scale: likewise.
        norm_weight: [latent_size] of the dtype of `kv_c`, contiguous.
        epsilon: added to the mean of squares.
        absorbed: [num_heads, num_tokens, N], written; elements of a row contiguous, any strides else; or None.
        plain: [num_heads, num_tokens, K] of the same dtype; likewise.
        up_keys: [num_heads, K, N] of the same dtype, rows contiguous, any strides else. The kernel reads it while the
            previous kernel runs: no kernel that may still run may write it.
    """
    if absorbed is not None and plain is not None and up_keys is not None:
        absorbed.copy_(plain.double() @ up_keys.double())
    concat_and_cache_mla_rope_fused.reference(
        *(positions, q_pe, k_pe, rms(kv_c.float(), norm_weight, epsilon, kv_c.dtype), cos_sin_cache, is_neox),
        *(slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale),
    )


@mla_norm_rope_cache.plan
def plan_mla_norm_rope_cache(
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
    norm_weight: TensorArg,
    absorbed: TensorArg | None,
    plain: TensorArg | None,
    up_keys: TensorArg | None,
) -> Launch:
    inserted = slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale
    given = [one for one in (absorbed, plain, up_keys) if one is not None]
    if len(given) not in (0, 3):
        raise given[0].error("expected absorbed, plain and up_keys, or none of them")
    product = (given[0], given[1], given[2]) if given else None
    return _launch(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, *inserted, norm_weight, product)


@concat_and_cache_mla_rope_fused.bad_indices
@mla_norm_rope_cache.bad_indices
def bad_indices_concat_and_cache_mla_rope_fused(
    positions: Tensor, cos_sin_cache: Tensor, slot_mapping: Tensor, kv_cache: Tensor
) -> dict[str, Tensor]:
    outside = (positions < 0) | (positions >= cos_sin_cache.shape[0])
    outside[len(slot_mapping) :] = False
    return {"positions": outside, **bad_slots(slot_mapping, *kv_cache.shape[:2])}


@concat_and_cache_mla_rope_fused.traffic
@mla_norm_rope_cache.traffic
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
    cache_element = dtype if kv_cache_dtype == "auto" else "uint8"
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
    return (
        make.randint(0, max_position, num_tokens),
        make.randn(num_tokens, num_heads, rope_size, dtype=dtype),
        make.randn(num_tokens, rope_size, dtype=dtype),
        make.randn(num_tokens, latent_size, dtype=dtype),
        make.randn(max_position, rope_size, dtype=dtype),
        is_neox,
        slot_mapping,
        example_cache(make, num_blocks, block_size, latent_size + rope_size, dtype=cache_element),
        kv_cache_dtype,
        make.full(1, value=0.03, dtype="float32"),
    )


@mla_norm_rope_cache.example
def example_mla_norm_rope_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    absorbs: bool = False,
) -> tuple[Any, ...]:
    given = example_concat_and_cache_mla_rope_fused(
        make, num_tokens=num_tokens, dtype=dtype, kv_cache_dtype=kv_cache_dtype
    )
    num_heads, plain_size, latent_size = 16, 128, 512
    product = (
        make.empty(num_heads, num_tokens, latent_size, dtype=dtype),
        make.randn(num_heads, num_tokens, plain_size, dtype=dtype),
        make.randn(num_heads, plain_size, latent_size, dtype=dtype, scale=plain_size**-0.5),
    )
    return (*given, make.randn(latent_size, dtype=dtype), 1e-6, *(product if absorbs else (None,) * 3))
