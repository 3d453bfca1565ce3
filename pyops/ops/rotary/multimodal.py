"""Multimodal rotary embedding (M-RoPE) of query and key in place: a token has positions in time, height and width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from ._common import EXAMPLE_POSITIONS
from .embedding import inside, plan_in_place, traffic_in_place, turn_in_place

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["multimodal_rotary_embedding"]


@op(inout=("query", "key"), ulps=0)
def multimodal_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    mrope_section_t: int,
    mrope_section_h: int,
    mrope_section_w: int,
    mrope_interleaved: bool = False,
) -> None:
    """`rotary_embedding` by positions in time, height and width; each axis rotates some of the pairs of every head.

    Pair j has the position in time for j < t, in height for t <= j < t + h, else in width, t, h and w being the
    sections (Wang et al. 2024, arXiv:2409.12191). If `mrope_interleaved`, pairs 1, 4, 7, ... below 3 h have the
    position in height, pairs 2, 5, 8, ... below 3 w that in width, and all others that in time. Tokens with one
    position outside the table are left unchanged.

    Args:
        positions: [3, num_tokens] for time, height and width, or [num_tokens] where the three are one; int32 or int64,
            of any strides.
        query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
            read and written; any strides but the last.
        key: the same with num_kv_heads, which divides num_heads, or None.
        head_size: elements of a head.
        cos_sin_cache: [max_position, rotary_dim] of the same dtype, contiguous, of one row at least; cosines in the
            first half of a row, sines in the second; rotary_dim even, at most head_size and 2048.
        is_neox: which elements make a pair.
        mrope_section_t, mrope_section_h, mrope_section_w: pairs of each axis, rotary_dim / 2 in all.
        mrope_interleaved: whether the pairs of the axes alternate.
    """
    positions = positions.expand(3, -1)
    pair = torch.arange(cos_sin_cache.shape[1] // 2, dtype=torch.int64, device=positions.device)
    if mrope_interleaved:
        sections = (0, mrope_section_h, mrope_section_w)
        axis = sum(n * ((pair % 3 == n) & (pair < 3 * sections[n])) for n in (1, 2))
    else:
        axis = (pair >= mrope_section_t) * 1 + (pair >= mrope_section_t + mrope_section_h)
    in_table = inside(positions, cos_sin_cache)
    angles = cos_sin_cache[positions.where(in_table, 0).long()].chunk(2, -1)
    cos, sin = (each[axis, :, pair].T for each in angles)
    turn_in_place(query, key, head_size, cos, sin, in_table.all(0), is_neox)


@multimodal_rotary_embedding.plan
def plan_multimodal_rotary_embedding(
    positions: TensorArg,
    query: TensorArg,
    key: TensorArg | None,
    head_size: int,
    cos_sin_cache: TensorArg,
    is_neox: bool,
    mrope_section_t: int,
    mrope_section_h: int,
    mrope_section_w: int,
    mrope_interleaved: bool,
) -> Launch:
    sections = (mrope_section_t, mrope_section_h, mrope_section_w)
    if cos_sin_cache.shape[1:] != (2 * sum(sections),) or min(sections) < 0:
        raise check.refuse(
            query,
            "mrope_section_t",
            f"expected sections of rotary_dim / 2 pairs in all, got {sections} for a "
            f"cos_sin_cache of shape {cos_sin_cache.shape}",
        )
    if len(positions.shape) == 1:
        return plan_in_place(positions, query, key, head_size, cos_sin_cache, is_neox)
    if len(positions.shape) != 2 or positions.shape[0] != 3:
        raise positions.error(f"expected shape (3, num_tokens) or (num_tokens,), got {positions.shape}")
    return plan_in_place(
        positions, query, key, head_size, cos_sin_cache, is_neox, 3, sections[:2], bool(mrope_interleaved)
    )


@multimodal_rotary_embedding.bad_indices
def bad_indices_multimodal_rotary_embedding(positions: Tensor, cos_sin_cache: Tensor) -> dict[str, Tensor]:
    return {"positions": ~inside(positions, cos_sin_cache)}


@multimodal_rotary_embedding.traffic
def traffic_multimodal_rotary_embedding(
    positions: TensorArg, query: TensorArg, key: TensorArg | None, head_size: int, cos_sin_cache: TensorArg
) -> int:
    return traffic_in_place(positions, query, key, head_size, cos_sin_cache)


@multimodal_rotary_embedding.example
def example_multimodal_rotary_embedding(
    make: Any, *, num_tokens: int = 16, dtype: str = "bfloat16", is_neox: bool = True, is_interleaved: bool = True
) -> tuple[Any, ...]:
    positions = make.randint(0, EXAMPLE_POSITIONS, 3, num_tokens)
    query, key = (make.randn(num_tokens, heads * 128, dtype=dtype) for heads in (28, 4))
    sections = (24, 20, 20) if is_interleaved else (16, 24, 24)
    return (
        positions,
        query,
        key,
        128,
        make.randn(EXAMPLE_POSITIONS, 128, dtype=dtype),
        is_neox,
        *sections,
        is_interleaved,
    )
