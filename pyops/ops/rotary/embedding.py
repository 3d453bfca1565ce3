"""Rotary embedding of query and key in place, by the position of a token."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import DType, float32
from ..._core.tensors.tensor import TensorArg
from ._common import EXAMPLE_POSITIONS, choose, query_and_key, rotary_dim_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["flashinfer_rotary_embedding", "rotary_embedding"]

_rotary_embedding = Kernel("rotary/rotary_embedding.cu")
_ANGLE_BYTES = 16  # bytes of cosines per thread
_NO_DIMENSION = (1, (0, 0, 0))  # size and strides of a missing leading dimension


def inside(positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Whether the table has a row for each of `positions`."""
    return (positions >= 0) & (positions < cos_sin_cache.shape[0])


def turned(heads: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """`heads` [*tokens, heads, head_size] with their first pairs rotated.

    `cos` and `sin` are [*tokens, rotary_dim / 2]; elements of a head beyond rotary_dim are copied.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    part, rest = heads.tensor_split([2 * cos.shape[-1]], -1)
    x, y = part.chunk(2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
    pair = x * cos - y * sin, y * cos + x * sin
    part = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    return torch.cat((part, rest), -1)


def turn_in_place(
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos: Tensor,
    sin: Tensor,
    in_table: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
) -> None:
    """Rotate the heads of the tokens that are `in_table` by cosines and sines [*tokens, rotary_dim / 2], in place."""
    for tensor in (query,) if key is None else (query, key):
        heads = tensor if tensor.ndim == in_table.ndim + 2 else tensor.unflatten(-1, (-1, head_size))
        heads = heads[..., rope_dim_offset:]
        heads.copy_(torch.where(in_table[..., None, None], turned(heads, cos, sin, is_neox), heads))


def plan_in_place(
    positions: TensorArg,
    query: TensorArg,
    key: TensorArg | None,
    head_size: int,
    cos_sin_cache: TensorArg,
    is_neox: bool,
    axes: int = 1,
    sections: tuple[int, int] = (0, 0),
    is_interleaved: bool = False,
    rope_dim_offset: int = 0,
    inverse: bool = False,
    angles: DType | None = None,
) -> Launch:
    """The launch that rotates query and key. With `axes` 3, `positions` is [3, ...].

    `angles` is the dtype of the table; None for the dtype of query.
    """
    tokens = positions.shape[axes > 1 :]
    heads = query_and_key(positions, query, key, tokens, head_size)
    num_heads = [arg.shape[-2] for arg in heads] + [0] * (key is None)
    rotary_dim = rotary_dim_of(cos_sin_cache, query, head_size, angles)
    if not 0 <= rope_dim_offset <= head_size - rotary_dim:
        raise check.refuse(
            query,
            "rope_dim_offset",
            f"expected 0 to head_size - rotary_dim={head_size - rotary_dim}, got {rope_dim_offset}",
        )
    offset_bytes = rope_dim_offset * query.dtype.itemsize
    turning = [replace(arg, alignment=gcd(arg.alignment, offset_bytes)) for arg in heads]
    rank = len(tokens)
    leading = check.leading(
        *(
            replace(arg, shape=(*tokens, 1), strides=(*strides, 1))
            for arg, strides in [
                (positions, positions.strides[axes > 1 :]),
                *((arg, arg.strides[:rank]) for arg in heads),
            ]
        ),
        max_dims=2,
    )
    (size0, strides0), (size1, strides1) = (*leading, _NO_DIMENSION)[:2]
    max_pairs = _ANGLE_BYTES // cos_sin_cache.dtype.itemsize
    config = choose(size0 * size1, sum(num_heads), rotary_dim, is_neox, [cos_sin_cache], turning, max_pairs)
    return _rotary_embedding(
        scalar_t=query.dtype,
        angle_t=cos_sin_cache.dtype,
        position_t=positions.dtype,
        NUM_HEADS_Q=num_heads[0],
        NUM_HEADS_K=num_heads[1],
        AXES=axes,
        SECTION_T=sections[0],
        SECTION_H=sections[1],
        INTERLEAVED=is_interleaved,
        INVERSE=bool(inverse),
        LEADING=len(leading),
        **config.constants,
    ).launch(
        grid=config.grid(size0 * size1),
        block=config.num_threads,
        num_tokens=size0 * size1,
        size1=size1,
        max_position=cos_sin_cache.shape[0],
        rope_dim_offset=rope_dim_offset,
        axis_stride=positions.strides[0] if axes > 1 else 0,
        positions_stride0=strides0[0],
        positions_stride1=strides1[0],
        query_stride0=strides0[1],
        query_stride1=strides1[1],
        query_head_stride=heads[0].strides[-2],
        key_stride0=strides0[2] if key else 0,
        key_stride1=strides1[2] if key else 0,
        key_head_stride=heads[1].strides[-2] if key else 0,
    )


@op(inout=("query", "key"), ulps=0)
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotary embedding of query and key heads, in place: ``x' = T(T(x cos) - T(y sin)), y' = T(T(y cos) + T(x sin))``.

    Elements `rope_dim_offset` to rope_dim_offset + rotary_dim of a head are rotated in pairs (x, y), by the angles of
    the token's position: elements (j, j + rotary_dim / 2) of these if `is_neox`, else (2j, 2j + 1) (Su et al. 2021,
    arXiv:2104.09864). Every operation rounds to the element type, so results equal those of eager PyTorch bit for bit;
    by a table of float32 every operation rounds to float32, and the result to T. Other elements, and tokens with a
    position outside the table, are left unchanged.

    Args:
        positions: [num_tokens] or [batch, seq_len], int32 or int64, any strides.
        query: positions' shape and [num_heads * head_size] or [num_heads, head_size], float32, float16 or bfloat16,
            read and written; any strides but the last.
        key: the same with num_kv_heads, which divides num_heads, or None.
        head_size: elements of a head.
        cos_sin_cache: [max_position, rotary_dim] of the same dtype or float32, contiguous, of one row at least; cosines
            in the first half of a row, sines in the second; rotary_dim even, at most head_size and 2048.
        is_neox: which elements form a pair.
        rope_dim_offset: the first element of a head that is rotated, at most head_size - rotary_dim.
        inverse: rotate by the negative angles, ``sin`` being -sin.
    """
    in_table = inside(positions, cos_sin_cache)
    cos, sin = cos_sin_cache[positions.where(in_table, 0).long()].chunk(2, -1)
    turn_in_place(query, key, head_size, cos, -sin if inverse else sin, in_table, is_neox, rope_dim_offset)


@rotary_embedding.plan
def plan_rotary_embedding(
    positions: TensorArg,
    query: TensorArg,
    key: TensorArg | None,
    head_size: int,
    cos_sin_cache: TensorArg,
    is_neox: bool,
    rope_dim_offset: int,
    inverse: bool,
) -> Launch:
    if len(positions.shape) not in (1, 2):
        raise positions.error(f"expected shape (num_tokens,) or (batch, seq_len), got {positions.shape}")
    return plan_in_place(
        positions,
        query,
        key,
        head_size,
        cos_sin_cache,
        is_neox,
        rope_dim_offset=rope_dim_offset,
        inverse=inverse,
        angles=float32 if cos_sin_cache.dtype is float32 else None,
    )


@rotary_embedding.bad_indices
def bad_indices_rotary_embedding(positions: Tensor, cos_sin_cache: Tensor) -> dict[str, Tensor]:
    return {"positions": ~inside(positions, cos_sin_cache)}


@rotary_embedding.traffic
def traffic_rotary_embedding(
    positions: TensorArg, query: TensorArg, key: TensorArg | None, head_size: int, cos_sin_cache: TensorArg
) -> int:
    return traffic_in_place(positions, query, key, head_size, cos_sin_cache)


def traffic_in_place(
    positions: TensorArg, query: TensorArg, key: TensorArg | None, head_size: int, cos_sin_cache: TensorArg
) -> int:
    """Bytes of the rotated parts of heads, read and written, of positions, and of the table rows that they index."""
    max_position, rotary_dim = cos_sin_cache.shape
    turning = 2 * (query.nbytes + (key.nbytes if key else 0)) * rotary_dim // head_size
    return turning + positions.nbytes + min(positions.numel, max_position) * rotary_dim * cos_sin_cache.dtype.itemsize


@rotary_embedding.example
def example_rotary_embedding(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    head_size: Literal[128, 80] = 128,
    rotary_dim: Literal[None, 32] = None,
    is_neox: bool = True,
    with_key: bool = True,
    inverse: bool = False,
    num_heads: Literal[32] = 32,
    num_kv_heads: Literal[8] = 8,
) -> tuple[Any, ...]:
    positions = make.randint(0, EXAMPLE_POSITIONS, num_tokens)
    query = make.randn(num_tokens, num_heads * head_size, dtype=dtype)
    key = make.randn(num_tokens, num_kv_heads * head_size, dtype=dtype) if with_key else None
    return (
        positions,
        query,
        key,
        head_size,
        make.randn(EXAMPLE_POSITIONS, rotary_dim or head_size, dtype=dtype),
        is_neox,
        head_size - rotary_dim if rotary_dim and inverse else 0,
        inverse,
    )


@op(inout=("query", "key"), ulps=0)
def flashinfer_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """`rotary_embedding` by a table of float32, in place: ``x' = T(x cos - y sin), y' = T(y cos + x sin)`` in float32.

    A product rounds to float32, then the sum, and the result once more to T. This is the arithmetic of FlashInfer's
    ``apply_rope_with_cos_sin_cache_inplace``, for which vLLM keeps its table in float32.

    Args:
        positions: [num_tokens], int32 or int64, any stride.
        query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
            read and written; any strides but the last.
        key: the same with num_kv_heads, which divides num_heads.
        head_size: elements of a head.
        cos_sin_cache: [max_position, rotary_dim] float32, contiguous, of one row at least; cosines in the first half of
            a row, sines in the second; rotary_dim even, at most head_size and 2048.
        is_neox: whether a pair is elements (j, j + rotary_dim / 2), or else (2j, 2j + 1).
    """
    in_table = inside(positions, cos_sin_cache)
    cos, sin = cos_sin_cache[positions.where(in_table, 0).long()].chunk(2, -1)
    turn_in_place(query, key, head_size, cos, sin, in_table, is_neox)


@flashinfer_rotary_embedding.plan
def plan_flashinfer_rotary_embedding(
    positions: TensorArg,
    query: TensorArg,
    key: TensorArg,
    head_size: int,
    cos_sin_cache: TensorArg,
    is_neox: bool,
) -> Launch:
    check.sizes(positions, num_tokens=None)
    return plan_in_place(positions, query, key, head_size, cos_sin_cache, is_neox, angles=float32)


@flashinfer_rotary_embedding.bad_indices
def bad_indices_flashinfer_rotary_embedding(positions: Tensor, cos_sin_cache: Tensor) -> dict[str, Tensor]:
    return {"positions": ~inside(positions, cos_sin_cache)}


@flashinfer_rotary_embedding.traffic
def traffic_flashinfer_rotary_embedding(
    positions: TensorArg, query: TensorArg, key: TensorArg, head_size: int, cos_sin_cache: TensorArg
) -> int:
    return traffic_in_place(positions, query, key, head_size, cos_sin_cache)


@flashinfer_rotary_embedding.example
def example_flashinfer_rotary_embedding(
    make: Any, *, num_tokens: int = 16, dtype: str = "bfloat16", is_neox: bool = True
) -> tuple[Any, ...]:
    positions = make.randint(0, EXAMPLE_POSITIONS, num_tokens)
    query, key = (make.randn(num_tokens, heads * 128, dtype=dtype) for heads in (32, 8))
    return positions, query, key, 128, make.randn(EXAMPLE_POSITIONS, 128, dtype="float32"), is_neox
