"""Rotary embedding for dual chunk attention."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from ._common import EXAMPLE_POSITIONS, choose, query_and_key, rotary_dim_of, split_heads
from .embedding import inside, turned

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dual_chunk_rotary_embedding"]

_dual_chunk_rotary_embedding = Kernel("rotary/dual_chunk_rotary_embedding.cu")


@op(out=("query_out", "key_out"), ulps=0)
def dual_chunk_rotary_embedding(
    query_out: Tensor,
    key_out: Tensor,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_k_cache: Tensor,
    cos_sin_q_cache: Tensor,
    cos_sin_qc_cache: Tensor,
    cos_sin_qc_no_clamp_cache: Tensor,
    cos_sin_q_inter_cache: Tensor,
    is_neox: bool,
) -> None:
    """Rotary embedding for dual chunk attention: keys rotate by their positions, queries in five other ways.

    Keys of a token at position p rotate by row p of `cos_sin_k_cache`; the five versions of its queries by row p %
    chunk_len of `cos_sin_q_cache`, the same row of `cos_sin_qc_cache`, the last row of that, and row p % chunk_len of
    `cos_sin_qc_no_clamp_cache` and of `cos_sin_q_inter_cache` (An et al. 2024, arXiv:2402.17463). A row of angles
    rotates a head as in `rotary_embedding`, with the same roundings. If the position of a token lies outside
    `cos_sin_k_cache`, its heads are copied.

    Args:
        query_out: [num_tokens, 5 * num_heads * head_size], written: all heads of the first version, then of the next;
            any row stride.
        key_out: the shape of `key`, written; any strides but the last.
        positions: [num_tokens], int32 or int64, any stride.
        query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
            as all other tensors; any strides but the last.
        key: the same with num_kv_heads, which divides num_heads.
        head_size: elements of a head.
        cos_sin_k_cache: [max_position, rotary_dim], contiguous; cosines in the first half of a row, sines in the
            second; rotary_dim even, at most head_size and 2048.
        cos_sin_q_cache, cos_sin_qc_cache, cos_sin_qc_no_clamp_cache, cos_sin_q_inter_cache: [chunk_len, rotary_dim].
        is_neox: which elements form a pair.
    """
    in_table = inside(positions, cos_sin_k_cache)
    position = positions.where(in_table, 0).long()
    row = position % len(cos_sin_q_cache)
    queries, keys = (x if x.ndim == 3 else x.unflatten(-1, (-1, head_size)) for x in (query, key))

    def turn(heads: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.chunk(2, -1)
        return torch.where(in_table[:, None, None], turned(heads, cos, sin, is_neox), heads)

    angles = (
        cos_sin_q_cache[row],
        cos_sin_qc_cache[row],
        cos_sin_qc_cache[-1:],
        cos_sin_qc_no_clamp_cache[row],
        cos_sin_q_inter_cache[row],
    )
    query_out.copy_(torch.cat([turn(queries, each).flatten(1) for each in angles], -1))
    key_out.copy_(turn(keys, cos_sin_k_cache[position]).view_as(key_out))


@dual_chunk_rotary_embedding.result
def result_dual_chunk_rotary_embedding(query: TensorArg, key: TensorArg) -> tuple[Result, Result]:
    if not query.shape:
        raise query.error("expected at least one dimension, got a scalar")
    return Result((query.shape[0], 5 * prod(query.shape[1:])), query.dtype), Result(key.shape, key.dtype)


@dual_chunk_rotary_embedding.plan
def plan_dual_chunk_rotary_embedding(
    query_out: TensorArg,
    key_out: TensorArg,
    positions: TensorArg,
    query: TensorArg,
    key: TensorArg,
    head_size: int,
    cos_sin_k_cache: TensorArg,
    cos_sin_q_cache: TensorArg,
    cos_sin_qc_cache: TensorArg,
    cos_sin_qc_no_clamp_cache: TensorArg,
    cos_sin_q_inter_cache: TensorArg,
    is_neox: bool,
) -> Launch:
    if len(positions.shape) != 1:
        raise positions.error(f"expected shape (num_tokens,), got {positions.shape}")
    num_tokens = positions.shape[0]
    heads = query_and_key(positions, query, key, positions.shape, head_size)
    num_heads = [arg.shape[-2] for arg in heads]
    if query_out.shape != (num_tokens, 5 * num_heads[0] * head_size):
        expected = (num_tokens, 5 * num_heads[0] * head_size)
        raise query_out.error(f"expected shape {expected} for a query of shape {query.shape}, got {query_out.shape}")
    check.dtype(query_out, query.dtype)
    check.like(key_out, key)
    rotary_dim = rotary_dim_of(cos_sin_k_cache, query, head_size)
    rotary_dim_of(cos_sin_q_cache, query, head_size)
    chunk_len = cos_sin_q_cache.shape[0]
    tables = (cos_sin_q_cache, cos_sin_qc_cache, cos_sin_qc_no_clamp_cache, cos_sin_q_inter_cache)
    for table in tables:
        check.shape(table, query.dtype, chunk_len=chunk_len, rotary_dim=rotary_dim)
    outputs = [split_heads(arg, positions.shape, head_size) for arg in (query_out, key_out)]
    config = choose(num_tokens, sum(num_heads), rotary_dim, is_neox, [cos_sin_k_cache, *tables], [*heads, *outputs])
    return _dual_chunk_rotary_embedding(
        scalar_t=query.dtype,
        position_t=positions.dtype,
        NUM_HEADS_Q=num_heads[0],
        NUM_HEADS_K=num_heads[1],
        HEAD_SIZE=head_size,
        REST_ACCESS=check.vector_width(rotary_dim | head_size, *heads, *outputs),
        **config.constants,
    ).launch(
        grid=config.grid(num_tokens),
        block=config.num_threads,
        num_tokens=num_tokens,
        max_position=cos_sin_k_cache.shape[0],
        chunk_len=chunk_len,
        positions_stride=positions.strides[0],
        query_out_stride=query_out.strides[0],
        key_out_stride=key_out.strides[0],
        key_out_head_stride=outputs[1].strides[-2],
        query_stride=query.strides[0],
        query_head_stride=heads[0].strides[-2],
        key_stride=key.strides[0],
        key_head_stride=heads[1].strides[-2],
    )


@dual_chunk_rotary_embedding.bad_indices
def bad_indices_dual_chunk_rotary_embedding(positions: Tensor, cos_sin_k_cache: Tensor) -> dict[str, Tensor]:
    return {"positions": ~inside(positions, cos_sin_k_cache)}


@dual_chunk_rotary_embedding.example
def example_dual_chunk_rotary_embedding(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    rotary_dim: Literal[128, 32] = 128,
    is_neox: bool = True,
) -> tuple[Any, ...]:
    query_heads, key_heads, head_size, chunk_len = 28, 4, 128, 384
    query_out = make.empty(num_tokens, 5 * query_heads * head_size, dtype=dtype)
    key_out = make.empty(num_tokens, key_heads * head_size, dtype=dtype)
    positions = make.randint(0, EXAMPLE_POSITIONS, num_tokens)
    query, key = (make.randn(num_tokens, heads * head_size, dtype=dtype) for heads in (query_heads, key_heads))
    tables = [make.randn(rows, rotary_dim, dtype=dtype) for rows in (EXAMPLE_POSITIONS, *[chunk_len] * 4)]
    return query_out, key_out, positions, query, key, head_size, *tables, is_neox
