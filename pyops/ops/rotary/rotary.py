"""Rotary embedding (Su et al. 2021, arXiv:2104.09864): pairs of elements of a head turn by angles of its position."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import float32, int32, int64
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..._core.device import Device

__all__ = [
    "apply_rotary_emb",
    "dual_chunk_rotary_embedding",
    "multimodal_rotary_embedding",
    "rotary_embedding",
]

_rotary_embedding = Kernel("rotary/rotary_embedding.cu")
_apply_rotary_emb = Kernel("rotary/apply_rotary_emb.cu")
_dual_chunk_rotary_embedding = Kernel("rotary/dual_chunk_rotary_embedding.cu")


def _heads(arg: TensorArg, tokens: Sequence[int], head_size: int) -> TensorArg:
    """`arg` as [*tokens, heads, head_size], of [*tokens, heads * head_size] too."""
    rank = len(tokens)
    if len(arg.shape) not in (rank + 1, rank + 2) or arg.shape[:rank] != tuple(tokens):
        sizes = ", ".join([*map(str, tokens), "[heads,] head_size"])
        raise arg.error(f"expected shape ({sizes}) for these positions, got {arg.shape}")
    size = check.row_size(arg)
    if len(arg.shape) == rank + 1:
        if size % head_size or not size:
            raise arg.error(f"expected rows of whole heads of head_size={head_size}, got shape {arg.shape}")
        return replace(
            arg,
            shape=(*tokens, size // head_size, head_size),
            strides=(*arg.strides[:rank], head_size, 1),
        )
    if size != head_size or not arg.shape[-2]:
        raise arg.error(f"expected heads of head_size={head_size}, got shape {arg.shape}")
    return arg


def _query_and_key(
    positions: TensorArg, query: TensorArg, key: TensorArg | None, tokens: Sequence[int], head_size: int
) -> list[TensorArg]:
    """Query and, if given, key as [*tokens, heads, head_size]."""
    check.floating(query)
    check.dtype(key, query.dtype)
    check.dtype(positions, int32, int64)
    if head_size < 1:
        raise check.refuse(query, "head_size", f"expected at least 1, got {head_size}")
    heads = [_heads(arg, tokens, head_size) for arg in (query, key) if arg]
    if key and heads[0].shape[-2] % heads[1].shape[-2]:
        raise key.error(f"expected heads that divide those of query, {heads[0].shape[-2]}, got {heads[1].shape[-2]}")
    return heads


def _rotary_dim(cache: TensorArg, query: TensorArg, head_size: int) -> int:
    """Elements of a head that turn, by the rows of a table [positions, rotary_dim] of cosines and sines."""
    check.dtype(cache, query.dtype)
    if len(cache.shape) != 2 or not cache.shape[0]:
        raise cache.error(f"expected shape (max_position, rotary_dim) with at least one row, got {cache.shape}")
    rotary_dim = cache.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= min(head_size, 2048):
        raise cache.error(f"expected an even rotary_dim of at most min(head_size={head_size}, 2048), got {rotary_dim}")
    check.contiguous(cache)
    return rotary_dim


def _pairs(rotary_dim: int, is_neox: bool, tables: Sequence[TensorArg], *heads: TensorArg) -> dict[str, int]:
    """Constants: the pairs of a head that a thread turns at a time, and how wide their accesses are.

    `heads` are [..., heads, head_size], and `tables` have rows of a multiple of rotary_dim / 2 angles.
    """
    half = rotary_dim // 2
    pairs = gcd(half, (16 if is_neox else 8) // heads[0].dtype.itemsize)
    return {
        "ROTARY_DIM": rotary_dim,
        "IS_NEOX": bool(is_neox),
        "PAIRS": pairs,
        "ACCESS_SIZE": check.vector_width(pairs if is_neox else 2 * pairs, *heads),
        "CACHE_ACCESS": check.vector_width(pairs, *tables),
    }


def _geometry(
    device: Device, num_tokens: int, heads: int, pairs: dict[str, int]
) -> tuple[tuple[int, int], dict[str, int]]:
    """(grid, constants) for tokens of so many heads, whose `pairs` are dealt to threads (HeadIndex in rotary.cuh).

    Few tokens: a head to a thread and small blocks, to spread over the device. Many: several heads to a thread, for
    bytes in flight, and blocks of whole tokens that leave few threads idle.
    """
    lanes = pairs["ROTARY_DIM"] // 2 // pairs["PAIRS"]
    few = num_tokens * heads * lanes <= 1024 * device.multiprocessors
    groups = -(-heads // (1 if few else 4))
    block_groups = -(-groups // -(-groups * lanes // (128 if few else 512)))
    needed = block_groups * lanes
    fewest = max(-(-needed // 64) * 64, 64 if few else 128)
    sizes = range(fewest, fewest + 1 if few else max(fewest, 512) + 1, 64)
    num_threads = min(sizes, key=lambda size: size % needed / size)
    grid = -(-num_tokens // (num_threads // needed)), -(-groups // block_groups)
    return grid, {"THREAD_HEADS": -(-heads // groups), "BLOCK_GROUPS": block_groups, "NUM_THREADS": num_threads}


def _in_place(
    positions: TensorArg,
    query: TensorArg,
    key: TensorArg | None,
    head_size: int,
    cos_sin_cache: TensorArg,
    is_neox: bool,
    axes: int = 1,
    sections: tuple[int, int] = (0, 0),
    is_interleaved: bool = False,
) -> Launch:
    """The launch that turns query and key; with three axes, `positions` has one more dimension, the first."""
    tokens = positions.shape[axes > 1 :]
    heads = _query_and_key(positions, query, key, tokens, head_size)
    num_heads = [arg.shape[-2] for arg in heads] + [0] * (key is None)
    rotary_dim = _rotary_dim(cos_sin_cache, query, head_size)
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
    (size0, strides0), (size1, strides1) = (*leading, (1, (0, 0, 0)))[:2]
    pairs = _pairs(rotary_dim, is_neox, [cos_sin_cache], *heads)
    grid, threads = _geometry(query.device, size0 * size1, sum(num_heads), pairs)
    return _rotary_embedding(
        scalar_t=query.dtype,
        position_t=positions.dtype,
        NUM_HEADS_Q=num_heads[0],
        NUM_HEADS_K=num_heads[1],
        AXES=axes,
        SECTION_T=sections[0],
        SECTION_H=sections[1],
        INTERLEAVED=is_interleaved,
        LEADING=len(leading),
        **pairs,
        **threads,
    ).launch(
        grid=grid,
        block=threads["NUM_THREADS"],
        num_tokens=size0 * size1,
        size1=size1,
        max_position=cos_sin_cache.shape[0],
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


def _inside(positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    return (positions >= 0) & (positions < cos_sin_cache.shape[0])


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """heads [*tokens, heads, head_size], their first pairs turned by cosines and sines [*tokens, rotary_dim / 2]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    part, rest = heads.tensor_split([2 * cos.shape[-1]], -1)
    x, y = part.chunk(2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
    pair = x * cos - y * sin, y * cos + x * sin
    turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    return torch.cat((turned, rest), -1)


def _turn(
    query: Tensor, key: Tensor | None, head_size: int, cos: Tensor, sin: Tensor, inside: Tensor, is_neox: bool
) -> None:
    """Turn the heads of the tokens that are `inside` by angles [*tokens, rotary_dim / 2]."""
    for tensor in (query,) if key is None else (query, key):
        heads = tensor if tensor.ndim == inside.ndim + 2 else tensor.unflatten(-1, (-1, head_size))
        heads.copy_(torch.where(inside[..., None, None], _turned(heads, cos, sin, is_neox), heads))


@op(inout=("query", "key"), ulps=0)
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotary embedding of query and key heads, in place: ``x' = T(T(x cos) - T(y sin)), y' = T(T(y cos) + T(x sin))``.

    The first rotary_dim elements of a head turn in pairs (x, y), by the angles of the token's position: elements
    (j, j + rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864). Every operation rounds
    to the element type, so results equal those of eager PyTorch bit for bit. Other elements, and tokens whose position
    lies outside the table, are left as they are.

    Args:
        positions: [num_tokens] or [batch, seq_len], int32 or int64, of any strides.
        query: positions' shape and [num_heads * head_size] or [num_heads, head_size], float32, float16 or bfloat16,
            read and written; of any strides but the last.
        key: the same with num_kv_heads, which divides num_heads, or None.
        head_size: elements of a head.
        cos_sin_cache: [max_position, rotary_dim] of the same dtype, contiguous, of one row at least; cosines in the
            first half of a row, sines in the second; rotary_dim even, at most head_size and 2048.
        is_neox: which elements make a pair.
    """
    inside = _inside(positions, cos_sin_cache)
    cos, sin = cos_sin_cache[positions.where(inside, 0).long()].chunk(2, -1)
    _turn(query, key, head_size, cos, sin, inside, is_neox)


@rotary_embedding.plan
def plan_rotary_embedding(
    positions: TensorArg,
    query: TensorArg,
    key: TensorArg | None,
    head_size: int,
    cos_sin_cache: TensorArg,
    is_neox: bool,
) -> Launch:
    if len(positions.shape) not in (1, 2):
        raise positions.error(f"expected shape (num_tokens,) or (batch, seq_len), got {positions.shape}")
    return _in_place(positions, query, key, head_size, cos_sin_cache, is_neox)


@rotary_embedding.bad_indices
def bad_indices_rotary_embedding(positions: Tensor, cos_sin_cache: Tensor) -> dict[str, Tensor]:
    return {"positions": ~_inside(positions, cos_sin_cache)}


@rotary_embedding.traffic
def traffic_rotary_embedding(
    positions: TensorArg, query: TensorArg, key: TensorArg | None, head_size: int, cos_sin_cache: TensorArg
) -> int:
    return _in_place_traffic(positions, query, key, head_size, cos_sin_cache)


def _in_place_traffic(
    positions: TensorArg, query: TensorArg, key: TensorArg | None, head_size: int, cos_sin_cache: TensorArg
) -> int:
    """Bytes of the parts of heads that turn, read and written, of positions, and of the rows of the table they name."""
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
) -> tuple[Any, ...]:
    positions = make.randint(0, _MAX_POSITION, num_tokens)
    query = make.randn(num_tokens, 32 * head_size, dtype=dtype)
    key = make.randn(num_tokens, 8 * head_size, dtype=dtype) if with_key else None
    return positions, query, key, head_size, make.randn(_MAX_POSITION, rotary_dim or head_size, dtype=dtype), is_neox


_MAX_POSITION = 4096


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
    """`rotary_embedding` by positions in time, height and width, each of which turns some of the pairs of every head.

    Pair j has the position in time for j < t, in height for t <= j < t + h, else in width, t, h and w being the
    sections (Wang et al. 2024, arXiv:2409.12191). If `mrope_interleaved`, pairs 1, 4, 7, ... below 3 h have that in
    height, pairs 2, 5, 8, ... below 3 w that in width, and all others that in time. Tokens with one position outside
    the table are left as they are.

    Args:
        positions: [3, num_tokens] for time, height and width, or [num_tokens] where the three are one; int32 or int64,
            of any strides.
        query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
            read and written; of any strides but the last.
        key: the same with num_kv_heads, which divides num_heads, or None.
        head_size: elements of a head.
        cos_sin_cache: [max_position, rotary_dim] of the same dtype, contiguous, of one row at least; cosines in the
            first half of a row, sines in the second; rotary_dim even, at most head_size and 2048.
        is_neox: which elements make a pair.
        mrope_section_t, mrope_section_h, mrope_section_w: pairs of each axis, rotary_dim / 2 in all.
        mrope_interleaved: whether the pairs of the axes alternate.
    """
    positions = positions.expand(3, -1)
    pair = torch.arange(cos_sin_cache.shape[1] // 2, device=positions.device)
    if mrope_interleaved:
        sections = (0, mrope_section_h, mrope_section_w)
        axis = sum(n * ((pair % 3 == n) & (pair < 3 * sections[n])) for n in (1, 2))
    else:
        axis = (pair >= mrope_section_t) * 1 + (pair >= mrope_section_t + mrope_section_h)
    inside = _inside(positions, cos_sin_cache)
    angles = cos_sin_cache[positions.where(inside, 0).long()].chunk(2, -1)
    cos, sin = (each[axis, :, pair].T for each in angles)
    _turn(query, key, head_size, cos, sin, inside.all(0), is_neox)


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
        return _in_place(positions, query, key, head_size, cos_sin_cache, is_neox)
    if len(positions.shape) != 2 or positions.shape[0] != 3:
        raise positions.error(f"expected shape (3, num_tokens) or (num_tokens,), got {positions.shape}")
    return _in_place(positions, query, key, head_size, cos_sin_cache, is_neox, 3, sections[:2], bool(mrope_interleaved))


@multimodal_rotary_embedding.bad_indices
def bad_indices_multimodal_rotary_embedding(positions: Tensor, cos_sin_cache: Tensor) -> dict[str, Tensor]:
    return {"positions": ~_inside(positions, cos_sin_cache)}


@multimodal_rotary_embedding.traffic
def traffic_multimodal_rotary_embedding(
    positions: TensorArg, query: TensorArg, key: TensorArg | None, head_size: int, cos_sin_cache: TensorArg
) -> int:
    return _in_place_traffic(positions, query, key, head_size, cos_sin_cache)


@multimodal_rotary_embedding.example
def example_multimodal_rotary_embedding(
    make: Any, *, num_tokens: int = 16, dtype: str = "bfloat16", is_neox: bool = True, is_interleaved: bool = True
) -> tuple[Any, ...]:
    positions = make.randint(0, _MAX_POSITION, 3, num_tokens)
    query, key = (make.randn(num_tokens, heads * 128, dtype=dtype) for heads in (28, 4))
    sections = (24, 20, 20) if is_interleaved else (16, 24, 24)
    return positions, query, key, 128, make.randn(_MAX_POSITION, 128, dtype=dtype), is_neox, *sections, is_interleaved


@op(out="out", in_place={"out": "x"}, ulps=0)
def apply_rotary_emb(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool = True, enable_fp32_compute: bool = False
) -> None:
    """Rotary embedding by given angles: ``x' = T(T(x cos) - T(y sin)), y' = T(T(y cos) + T(x sin))``.

    The first rotary_dim elements of a head turn in pairs (x, y): elements (j, j + rotary_dim / 2) if `is_neox`, else
    (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864); the others are copied. Cosines and sines are rounded to the element
    type T, and so is every result, as in eager PyTorch; with `enable_fp32_compute` only the last one is.

    Args:
        out: the shape and dtype of `x`, written; may be `x` itself; of any strides but the last.
        x: [batch, seq_len, num_heads, head_size] or without batch, float32, float16 or bfloat16; of any strides but the
            last.
        cos, sin: [seq_len, rotary_dim / 2], both float32, float16 or bfloat16; rows of one stride; rotary_dim is at
            most head_size and 2048.
        is_neox: which elements make a pair.
        enable_fp32_compute: whether to compute in float32.
    """
    dtype = torch.float32 if enable_fp32_compute else x.dtype
    out.copy_(_turned(x.to(dtype), cos.to(dtype), sin.to(dtype), is_neox))


@apply_rotary_emb.plan
def plan_apply_rotary_emb(
    out: TensorArg, x: TensorArg, cos: TensorArg, sin: TensorArg, is_neox: bool, enable_fp32_compute: bool
) -> Launch:
    check.floating(x)
    if len(x.shape) not in (3, 4):
        raise x.error(f"expected shape ([batch,] seq_len, num_heads, head_size), got {x.shape}")
    check.row_size(x)
    check.like(out, x)
    check.row_size(out)
    seq_len, num_heads, head_size = x.shape[-3:]
    check.floating(cos)
    if len(cos.shape) != 2 or cos.shape[0] != seq_len or not 0 < 2 * cos.shape[1] <= min(head_size, 2048):
        raise cos.error(
            f"expected shape (seq_len={seq_len}, rotary_dim / 2) with a rotary_dim of at most "
            f"min(head_size={head_size}, 2048), got {cos.shape}"
        )
    check.like(sin, cos)
    check.row_size(cos)
    check.row_size(sin)
    rotary_dim = 2 * cos.shape[1]
    pairs = _pairs(rotary_dim, is_neox, [cos, sin], x, out)
    batch = x.shape[0] if len(x.shape) == 4 else 1
    grid, threads = _geometry(x.device, batch * seq_len, max(1, num_heads), pairs)
    return _apply_rotary_emb(
        scalar_t=x.dtype,
        angle_t=cos.dtype,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        FP32_COMPUTE=bool(enable_fp32_compute) and x.dtype is not float32,
        LEADING=1 if batch == 1 else 2,
        REST_ACCESS=check.vector_width(rotary_dim | head_size, x, out),
        **pairs,
        **threads,
    ).launch(
        grid=grid if num_heads else 0,
        block=threads["NUM_THREADS"],
        num_tokens=batch * seq_len,
        seq_len=seq_len,
        cos_stride=cos.strides[0],
        sin_stride=sin.strides[0],
        **_token_strides("out", out),
        **_token_strides("x", x),
    )


def _token_strides(name: str, arg: TensorArg) -> dict[str, int]:
    """The strides of [batch, seq_len, heads, head_size], or without batch."""
    *outer, token, head, _ = arg.strides
    first = outer[0] if outer and arg.shape[0] > 1 else token
    return {f"{name}_stride0": first, f"{name}_stride1": token, f"{name}_head_stride": head}


@apply_rotary_emb.example
def example_apply_rotary_emb(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    head_size: Literal[128, 72] = 128,
    angle_dtype: Literal["float32", "bfloat16"] = "float32",
    is_neox: bool = True,
    enable_fp32_compute: bool = False,
) -> tuple[Any, ...]:
    out = make.empty(num_tokens, 16, head_size, dtype=dtype)
    x = make.randn(num_tokens, 16, head_size, dtype=dtype)
    cos, sin = (make.randn(num_tokens, 64 if head_size == 128 else 36, dtype=angle_dtype) for _ in range(2))
    return out, x, cos, sin, is_neox, enable_fp32_compute


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
    """Rotary embedding for dual chunk attention: of keys by their positions, of queries five times by others.

    Keys of a token at position p turn by row p of `cos_sin_k_cache`; the five versions of its queries by row p %
    chunk_len of `cos_sin_q_cache`, the same row of `cos_sin_qc_cache`, the last row of that, and row p % chunk_len of
    `cos_sin_qc_no_clamp_cache` and of `cos_sin_q_inter_cache` (An et al. 2024, arXiv:2402.17463). What a row of angles
    does to a head, and where it rounds, is that of `rotary_embedding`. The heads of a token whose position lies outside
    `cos_sin_k_cache` are copied.

    Args:
        query_out: [num_tokens, 5 * num_heads * head_size], written: all heads of the first version, then of the next;
            rows of any stride.
        key_out: the shape of `key`, written; of any strides but the last.
        positions: [num_tokens], int32 or int64, of any stride.
        query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
            as all other tensors; of any strides but the last.
        key: the same with num_kv_heads, which divides num_heads.
        head_size: elements of a head.
        cos_sin_k_cache: [max_position, rotary_dim], contiguous; cosines in the first half of a row, sines in the
            second; rotary_dim even, at most head_size and 2048.
        cos_sin_q_cache, cos_sin_qc_cache, cos_sin_qc_no_clamp_cache, cos_sin_q_inter_cache: [chunk_len, rotary_dim].
        is_neox: which elements make a pair.
    """
    inside = _inside(positions, cos_sin_k_cache)
    position = positions.where(inside, 0).long()
    row = position % len(cos_sin_q_cache)
    queries, keys = (x if x.ndim == 3 else x.unflatten(-1, (-1, head_size)) for x in (query, key))

    def turned(heads: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.chunk(2, -1)
        return torch.where(inside[:, None, None], _turned(heads, cos, sin, is_neox), heads)

    angles = (
        cos_sin_q_cache[row],
        cos_sin_qc_cache[row],
        cos_sin_qc_cache[-1:],
        cos_sin_qc_no_clamp_cache[row],
        cos_sin_q_inter_cache[row],
    )
    query_out.copy_(torch.cat([turned(queries, each).flatten(1) for each in angles], -1))
    key_out.copy_(turned(keys, cos_sin_k_cache[position]).view_as(key_out))


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
    heads = _query_and_key(positions, query, key, positions.shape, head_size)
    num_heads = [arg.shape[-2] for arg in heads]
    if query_out.shape != (num_tokens, 5 * num_heads[0] * head_size):
        expected = (num_tokens, 5 * num_heads[0] * head_size)
        raise query_out.error(f"expected shape {expected} for a query of shape {query.shape}, got {query_out.shape}")
    check.dtype(query_out, query.dtype)
    check.like(key_out, key)
    rotary_dim = _rotary_dim(cos_sin_k_cache, query, head_size)
    _rotary_dim(cos_sin_q_cache, query, head_size)
    chunk_len = cos_sin_q_cache.shape[0]
    tables = (cos_sin_q_cache, cos_sin_qc_cache, cos_sin_qc_no_clamp_cache, cos_sin_q_inter_cache)
    for table in tables:
        check.shape(table, query.dtype, chunk_len=chunk_len, rotary_dim=rotary_dim)
    outputs = [_heads(arg, positions.shape, head_size) for arg in (query_out, key_out)]
    pairs = _pairs(rotary_dim, is_neox, [cos_sin_k_cache, *tables], *heads, *outputs)
    grid, threads = _geometry(query.device, num_tokens, sum(num_heads), pairs)
    return _dual_chunk_rotary_embedding(
        scalar_t=query.dtype,
        position_t=positions.dtype,
        NUM_HEADS_Q=num_heads[0],
        NUM_HEADS_K=num_heads[1],
        HEAD_SIZE=head_size,
        REST_ACCESS=check.vector_width(rotary_dim | head_size, *heads, *outputs),
        **pairs,
        **threads,
    ).launch(
        grid=grid,
        block=threads["NUM_THREADS"],
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
    return {"positions": ~_inside(positions, cos_sin_k_cache)}


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
    positions = make.randint(0, _MAX_POSITION, num_tokens)
    query, key = (make.randn(num_tokens, heads * head_size, dtype=dtype) for heads in (query_heads, key_heads))
    tables = [make.randn(rows, rotary_dim, dtype=dtype) for rows in (_MAX_POSITION, *[chunk_len] * 4)]
    return query_out, key_out, positions, query, key, head_size, *tables, is_neox
