"""Code shared by the cache inserts of DeepSeek-V4: references, and the launch of their kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float16, float32, uint8
from ..._core.tensors.tensor import TensorArg
from ._common import bad_slots, example_slots, existing_slots, first_stride, indexable

if TYPE_CHECKING:
    from torch import Tensor

_insert = Kernel("cache/deepseek_v4_insert.cu")
HEAD_SIZE, ROPE_SIZE = 512, 64
_NOPE_SIZE = HEAD_SIZE - ROPE_SIZE
_CHUNK = 16  # adjacent elements of a head in the interleaved layout of queries
# Heads per group of 32 lanes if groups of one head would exceed _FEW_GROUPS per SM; that bound; threads of a block.
_MANY_ROUNDS, _FEW_GROUPS, _NUM_THREADS = 2, 64, 256


class Packed(NamedTuple):
    """A format of quantized keys: elements of a group with one scale, bytes of values, bytes of scales."""

    group_size: int
    value_bytes: int
    scale_bytes: int

    @property
    def entry_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes


_V4 = Packed(64, _NOPE_SIZE + 2 * ROPE_SIZE, 8)  # the scales of a block come after the values of all of its slots
_MXFP8 = Packed(32, HEAD_SIZE, HEAD_SIZE // 32)  # the scales of a slot come after its values


def packed_format(mxfp8: bool) -> Packed:
    """The format of keys in a cache of bytes."""
    return _MXFP8 if mxfp8 else _V4


# References


def _rotated(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """The float32 heads `x` [num_tokens, heads, 512] of tokens with a position in the table, rotated."""
    cos, sin = (each[:, None] for each in cos_sin_cache[positions.long()].chunk(2, -1))
    a, b = x[..., _NOPE_SIZE::2], x[..., _NOPE_SIZE + 1 :: 2]
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((x[..., :_NOPE_SIZE], pairs), -1)


def rotated_queries(
    q: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, eps: float, apply_norm: bool, apply_rope: bool = True
) -> Tensor:
    """The queries [num_tokens, heads, 512], normalised and rotated, in float32."""
    x = q.float()
    if apply_norm:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if apply_rope:
        known = ((position_ids >= 0) & (position_ids < len(cos_sin_cache))).nonzero().squeeze(1)
        x[known] = _rotated(x[known], position_ids[known], cos_sin_cache)
    return x


def interleaved(q: Tensor) -> Tensor:
    """A view of contiguous queries [num_tokens, heads, 512] as [num_tokens, 32, heads, 16], heads before elements."""
    num_tokens, num_heads, _ = q.shape
    return q.reshape(num_tokens, HEAD_SIZE // _CHUNK, num_heads, _CHUNK).transpose(1, 2)


def as_fp8(x: Tensor, reciprocal: Tensor) -> Tensor:
    """The float8_e4m3fn as_fp8 of ``x * reciprocal``, saturating; NaN becomes -448."""
    return (x * reciprocal).nan_to_num(nan=-448.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _packed(key: Tensor, form: Packed) -> tuple[Tensor, Tensor]:
    """(bytes of values, bytes of scales) of keys [num_tokens, 512]."""
    end = HEAD_SIZE if form is _MXFP8 else _NOPE_SIZE
    x = key[:, :end].float().unflatten(-1, (-1, form.group_size))
    absmax = x.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True).clamp(min=1e-4)
    bits = (absmax / torch.full_like(absmax, 448.0)).view(torch.int32)
    exponents = (bits + 0x7FFFFF) >> 23
    scale = (exponents << 23).view(torch.float32)
    values = as_fp8(x, 1.0 / scale).flatten(1).view(torch.uint8)
    rest = key[:, end:].contiguous()
    rest = rest.view(torch.int16).masked_fill(rest.isnan(), 0x7FFF).view(torch.uint8)  # the NaN that conversions give
    scales = exponents.squeeze(-1)
    scales = torch.nn.functional.pad(scales, (0, form.scale_bytes - scales.shape[1])).to(torch.uint8)
    return torch.cat((values, rest), -1), scales


def insert_keys(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    mxfp8: bool = False,
    scale: Tensor | None = None,
) -> None:
    """Rotate the keys of tokens with a slot and a position, and write them into the cache."""
    known = ((position_ids >= 0) & (position_ids < len(cos_sin_cache))).nonzero().squeeze(1)
    known = known[known < len(slot_mapping)]
    tokens, block, offset = existing_slots(slot_mapping[known], len(k_cache), block_size)
    tokens = known[tokens]
    key = _rotated(kv[tokens, None].float(), position_ids[tokens], cos_sin_cache)[:, 0]
    if k_cache.dtype == torch.float8_e4m3fn:
        assert scale is not None
        indexable(k_cache)[block, offset] = as_fp8(key, 1.0 / scale.reshape(())).view(torch.uint8)
    elif k_cache.dtype != torch.uint8:
        k_cache[block, offset] = key.to(k_cache.dtype)
    else:
        form = packed_format(mxfp8)
        values, scales = _packed(key.to(kv.dtype), form)
        if mxfp8:
            parts = ((values, form.entry_bytes, 0), (scales, form.entry_bytes, form.value_bytes))
        else:
            parts = ((values, form.value_bytes, 0), (scales, form.scale_bytes, block_size * form.value_bytes))
        blocks = k_cache.flatten(1)  # a view: the slots of a block are adjacent
        for part, step, start in parts:
            within = torch.arange(part.shape[1], dtype=torch.int64, device=block.device)
            blocks[block[:, None], start + offset[:, None] * step + within] = part


def bad_tokens(
    k_cache: Tensor, slot_mapping: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, block_size: int
) -> dict[str, Tensor]:
    """The positions outside the table, and the slots after the last."""
    outside = (position_ids < 0) | (position_ids >= len(cos_sin_cache))
    return {"position_ids": outside, **bad_slots(slot_mapping, len(k_cache), block_size)}


# Plans


class Queries(NamedTuple):
    """The queries of a launch: None for `q_in` if `q_out` is read and written."""

    q_in: TensorArg | None
    q_out: TensorArg
    apply_norm: bool
    apply_rope: bool = True
    interleaved: bool = False
    scale_inv: TensorArg | None = None


def _check_cache(k_cache: TensorArg, kv: TensorArg, block_size: int, mxfp8: bool) -> int:
    """Check the cache; returns the elements from a slot to the next."""
    if block_size < 1:
        raise check.refuse(kv, "cache_block_size", f"expected at least 1, got {block_size}")
    check.dtype(k_cache, uint8, float8_e4m3fn, kv.dtype)
    check.row_size(k_cache)
    if k_cache.dtype != uint8:
        check.sizes(k_cache, num_blocks=None, cache_block_size=block_size, head_size=HEAD_SIZE)
        return k_cache.strides[1]
    form = packed_format(mxfp8)
    if len(k_cache.shape) == 3:
        check.sizes(k_cache, num_blocks=None, cache_block_size=block_size, entry_bytes=form.entry_bytes)
        if block_size > 1 and k_cache.strides[1] != form.entry_bytes:
            raise k_cache.error(f"expected adjacent slots, got strides {k_cache.strides}")
    else:
        check.sizes(k_cache, num_blocks=None, bytes=None)
        if k_cache.shape[1] < block_size * form.entry_bytes:
            need = block_size * form.entry_bytes
            raise k_cache.error(f"expected blocks of at least {need} bytes, got shape {k_cache.shape}")
    return form.entry_bytes if mxfp8 else form.value_bytes


def launch(
    kv: TensorArg,
    k_cache: TensorArg,
    slot_mapping: TensorArg,
    position_ids: TensorArg,
    cos_sin_cache: TensorArg,
    block_size: int,
    *,
    mxfp8: bool = False,
    scale: TensorArg | None = None,
    queries: Queries | None = None,
    **fixed: int | float,
) -> Launch:
    """Check all tensors but the queries, and launch the kernel. `fixed`: parameters that the op does not have."""
    check.dtype(kv, float16, bfloat16)
    check.sizes(kv, num_tokens=None, head_size=HEAD_SIZE)
    check.row_size(kv)
    num_tokens = kv.shape[0]
    check.index(slot_mapping, num_slots=None)
    num_slots = slot_mapping.shape[0]
    if num_slots > num_tokens:
        raise slot_mapping.error(f"expected at most num_tokens={num_tokens} slots, got {slot_mapping.shape}")
    check.index(position_ids, num_tokens=num_tokens)
    check.sizes(cos_sin_cache, max_position=None, rope_size=ROPE_SIZE)
    check.shape(cos_sin_cache, float32, max_position=cos_sin_cache.shape[0], rope_size=ROPE_SIZE)
    if not cos_sin_cache.numel:
        raise cos_sin_cache.error("expected at least one row, got none")
    slot_stride = _check_cache(k_cache, kv, block_size, mxfp8)
    if k_cache.dtype == float8_e4m3fn and scale is None:
        raise check.refuse(kv, "fp8_scale", "expected a tensor for a cache of fp8, got None")
    if scale is not None:
        check.scalar(scale)
    heads, padded, q_in = 0, 0, None
    read = [kv]
    if queries is not None:
        q_in = queries.q_in or queries.q_out
        heads, padded = q_in.shape[1], queries.q_out.shape[1]
        read += [q_in, queries.q_out]
    else:
        num_tokens = num_slots
    rounds = _MANY_ROUNDS if num_tokens * (padded + 1) > _FEW_GROUPS * kv.device.num_sms else 1
    token_groups = -(-(padded + 1) // rounds)
    # What feeds the kernel's own names; null pointers where there is no tensor.
    fed: dict[str, Any] = {"q_in": None, "q_out": None, "q_scale_inv": None, "k_scale": None, **fixed}
    if queries is not None:
        fed |= {"q_in": queries.q_in, "q_out": queries.q_out, "q_scale_inv": queries.scale_inv}
    if k_cache.dtype == float8_e4m3fn:
        fed["k_scale"] = scale
    return _insert(
        scalar_t=kv.dtype,
        query_t=kv.dtype if queries is None else queries.q_out.dtype,
        entry_t=k_cache.dtype,
        slot_t=slot_mapping.dtype,
        position_t=position_ids.dtype,
        NUM_HEADS=heads,
        PADDED_HEADS=padded,
        APPLY_NORM=queries is not None and queries.apply_norm,
        APPLY_ROPE=queries is not None and queries.apply_rope,
        IN_PLACE=queries is not None and queries.q_in is None,
        INTERLEAVED=queries is not None and queries.interleaved,
        BLOCK_SIZE=block_size,
        GROUP=packed_format(mxfp8).group_size,
        ROUNDS=rounds,
        ACCESS_SIZE=check.vector_width(8, *read),
        ANGLE_ACCESS=check.vector_width(4, cos_sin_cache),
        ENTRY_ACCESS=check.vector_width(16 if k_cache.dtype == uint8 else 8, k_cache),
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        grid=-(-num_tokens * token_groups * 32 // _NUM_THREADS),
        block=_NUM_THREADS,
        num_tokens=num_tokens,
        num_slots=num_slots,
        num_blocks=k_cache.shape[0],
        max_position=cos_sin_cache.shape[0],
        q_stride=q_in.strides[0] if q_in else 0,
        q_head_stride=q_in.strides[1] if q_in else 0,
        kv_stride=first_stride(kv),
        block_stride=k_cache.strides[0],
        slot_stride=slot_stride,
        slot_mapping_stride=first_stride(slot_mapping),
        positions_stride=first_stride(position_ids),
        **{name: 0 if arg is None else arg for name, arg in fed.items()},
    )


def traffic(
    kv: TensorArg, k_cache: TensorArg, slot_mapping: TensorArg, position_ids: TensorArg, table: TensorArg, mxfp8: bool
) -> int:
    """Bytes that keys, slots, positions and angles move."""
    angles = min(position_ids.numel, table.shape[0]) * ROPE_SIZE * 4
    entry = packed_format(mxfp8).entry_bytes if k_cache.dtype == uint8 else HEAD_SIZE * k_cache.dtype.itemsize
    return kv.nbytes + slot_mapping.nbytes + position_ids.nbytes + angles + slot_mapping.numel * entry


# Examples


def example_tokens(make: Any, num_tokens: int, dtype: str, kind: str, rows: bool = True) -> tuple[Any, ...]:
    """(kv, k_cache, slot_mapping, position_ids, cos_sin_cache); `kind`: "packed", "mxfp8", "fp8" or "auto".

    `rows`: the blocks of a cache of bytes have two dimensions.
    """
    block_size, max_position = 64, 4096
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
    if kind in ("packed", "mxfp8"):
        entry_bytes = packed_format(kind == "mxfp8").entry_bytes
        sizes = (block_size, entry_bytes) if rows else (block_size * entry_bytes,)
        k_cache = make.randint(0, 120, num_blocks, *sizes, dtype="uint8")
    else:
        cache_dtype = "float8_e4m3fn" if kind == "fp8" else dtype
        k_cache = make.randn(num_blocks, block_size, HEAD_SIZE, dtype=cache_dtype)
    return (
        make.randn(num_tokens, HEAD_SIZE, dtype=dtype),
        k_cache,
        slot_mapping,
        make.randint(0, max_position, num_tokens),
        make.randn(max_position, ROPE_SIZE, dtype="float32"),
    )
