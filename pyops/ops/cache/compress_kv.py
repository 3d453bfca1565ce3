"""Compressed keys of DeepSeek-V4: a window of tokens becomes one key, by a softmax over its tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from ._common import first_stride

if TYPE_CHECKING:
    from torch import Tensor

_compress_kv = Kernel("cache/compress_kv.cu")
_states = Kernel("cache/compress_kv.cu", entry="compress_kv_states")
_MAX_HEAD_SIZE = 1024  # largest head
_MAX_ELEMENTS = 4096  # most elements of a CTA's groups together: three floats of each take 48 KB of shared memory
_GROUP_TOKENS = 8  # tokens of a window that a group takes before another group helps
_SPAN = 16  # most tokens of a CTA: several short sequences may end a window there
_MAX_THREADS = 384  # most threads of a CTA, with 168 registers for each
_STATE_THREADS = 256  # threads of compress_kv_states; not tuned


@op(partial="out", inout="states", atol=2.0**-18)
def compress_kv(
    out: Tensor,
    states: Tensor,
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    weight: Tensor,
    cos_sin_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    eps: float,
) -> None:
    """Compress each window of r tokens to one key, where the newest tokens of a sequence end it (DeepSeek-V4).

    Window w holds the tokens at positions ``w * r`` to ``w * r + r - 1``. Its key is, for each element d, with the kv
    and the gates of its tokens and the bias of a token's position in its window::

        x[d] = sum_t softmax_t(gate[t, d] + position_bias[t % r, d]) * kv[t, d]

    then RMS norm with `weight`, and RoPE of the last rope_size elements in adjacent pairs by the angles of position
    ``w * r``. All in float32, rounded once. A row of `kv` and of `gate` is one head of head_size elements, or two: then
    windows overlap, and the sum is over the first heads of the window before and the second heads of this window, 2 * r
    tokens. The first window has none before it.

    The last ``length`` tokens of each sequence, where length is r, or 2 * r with two heads, stay in `states`, for the
    windows that end later: the token at position p in row ``p % length``. Tokens before those of `kv` are read there.
    Without an existing slot a sequence has no earlier tokens, and nothing is kept. A window with a position outside the
    table has no key.

    Args:
        out: [num_tokens, head_size], written where a token is the last of its window; any token stride.
        states: [num_slots, length, 2 * row], read and written: kv and gate of a token; any slot stride, of the dtype of
            `out`: float32, float16 or bfloat16.
        kv, gate: [num_tokens, row] of the same dtype, any token strides; row is head_size or 2 * head_size.
        position_bias: [r, row] float32, contiguous.
        weight: [head_size] of the dtype of `out`, contiguous.
        cos_sin_cache: [max_position, rope_size] float32, contiguous: cosines, then sines; rope_size is even and at
            most head_size.
        query_start_loc: [num_seqs + 1] int32 or int64, any stride, ascending: the first token of each sequence,
            then the end of the last one. Where it is not ascending, keys of any sequence may be left out.
        seq_lens: [num_seqs] int32 or int64, any stride: tokens of each sequence, with those of `kv`.
        state_slots: [num_seqs] int32 or int64, any stride; a negative slot stands for none.
        eps: added to the mean of squares.
    """
    num_slots, length, _ = states.shape
    ratio, head_size, rope_size = position_bias.shape[0], out.shape[1], cos_sin_cache.shape[1]
    kept = torch.cat((kv, gate), -1)
    before, new = states.clone(), pairwise(query_start_loc.clamp(0, len(kv)).tolist())
    for (begin, end), seq_len, slot in zip(new, seq_lens.tolist(), state_slots.tolist(), strict=True):
        start = seq_len - (end - begin)
        rows = {start + i: kept[begin + i] for i in range(end - begin)}
        if 0 <= slot < num_slots:
            rows = {p: before[slot, p % length] for p in range(max(0, start - length), start)} | rows
            for p in range(max(0, start, seq_len - length), seq_len):
                states[slot, p % length] = rows[p]
        for last in range(max(start, 0), seq_len):
            if (last + 1) % ratio or last + 1 - ratio >= len(cos_sin_cache):
                continue
            there = [p for p in range(max(0, last + 1 - length), last + 1) if p in rows]
            values, gates = torch.stack([rows[p].float() for p in there]).chunk(2, -1)
            gates = gates + position_bias[[p % ratio for p in there]]
            if length > ratio:  # the first head of a token of the window before, the second of one of this window
                is_before = [p <= last - ratio for p in there]
                first = torch.tensor(is_before, dtype=torch.bool, device=kv.device)[:, None]
                values, gates = (torch.where(first, *x.split(head_size, -1)) for x in (values, gates))
            x = (gates.softmax(0) * values).sum(0)
            x = x * torch.rsqrt(x.square().mean() + eps) * weight.float()
            cos, sin = cos_sin_cache[last + 1 - ratio].chunk(2)
            rope = x[head_size - rope_size :].unflatten(0, (-1, 2))
            a, b = rope.unbind(-1)
            rope.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), -1))
            out[begin + last - start] = x


@compress_kv.result
def result_compress_kv(kv: TensorArg, weight: TensorArg) -> Result:
    check.sizes(kv, num_tokens=None, row=None)
    check.sizes(weight, head_size=None)
    return Result((kv.shape[0], weight.shape[0]), kv.dtype)


@compress_kv.plan
def plan_compress_kv(
    out: TensorArg,
    states: TensorArg,
    kv: TensorArg,
    gate: TensorArg,
    position_bias: TensorArg,
    weight: TensorArg,
    cos_sin_cache: TensorArg,
    query_start_loc: TensorArg,
    seq_lens: TensorArg,
    state_slots: TensorArg,
) -> list[Launch]:
    check.floating(out)
    check.sizes(out, num_tokens=None, head_size=None)
    num_tokens, head_size = out.shape
    if not 0 < head_size <= _MAX_HEAD_SIZE:
        raise out.error(f"expected 1 to {_MAX_HEAD_SIZE} elements of a key, got shape {out.shape}")
    check.sizes(position_bias, ratio=None, row=None)
    ratio, row = position_bias.shape
    if row not in (head_size, 2 * head_size) or not ratio:
        raise position_bias.error(f"expected at least one row of one or two heads of {head_size}, got {(ratio, row)}")
    check.shape(position_bias, float32, ratio=ratio, row=row)
    length = ratio * (row // head_size)
    for arg in (kv, gate):
        check.dtype(arg, out.dtype)
        check.sizes(arg, num_tokens=num_tokens, row=row)
        check.row_size(arg)
    check.row_size(out)
    check.dtype(states, out.dtype)
    check.sizes(states, num_slots=None, length=length, **{"2 * row": 2 * row})
    if states.strides[1:] != (2 * row, 1) and states.numel:
        raise states.error(f"expected contiguous slots, got strides {states.strides}")
    check.shape(weight, out.dtype, head_size=head_size)
    check.sizes(cos_sin_cache, max_position=None, rope_size=None)
    max_position, rope_size = cos_sin_cache.shape
    if rope_size % 2 or rope_size > head_size:
        raise cos_sin_cache.error(f"expected an even rope_size of at most {head_size}, got shape {cos_sin_cache.shape}")
    check.shape(cos_sin_cache, float32, max_position=max_position, rope_size=rope_size)
    check.index(seq_lens, num_seqs=None)
    num_seqs = seq_lens.shape[0]
    check.index(query_start_loc, **{"num_seqs + 1": num_seqs + 1})
    check.index(state_slots, num_seqs=num_seqs)
    vec_size = check.vector_width(head_size, kv, gate, states)
    constants: dict[str, Any] = {
        "scalar_t": out.dtype,
        "start_t": query_start_loc.dtype,
        "length_t": seq_lens.dtype,
        "slot_t": state_slots.dtype,
        "HEAD_SIZE": head_size,
        "RATIO": ratio,
        "HEADS": row // head_size,
        "VEC_SIZE": vec_size,
    }
    tokens = {
        "num_slots": states.shape[0],
        "num_tokens": num_tokens,
        "kv_stride": kv.strides[0],
        "gate_stride": gate.strides[0],
        "slot_stride": states.strides[0],
        "start_stride": first_stride(query_start_loc),
        "length_stride": first_stride(seq_lens),
        "state_slots_stride": first_stride(state_slots),
    }
    groups = max(1, min(-(-length // _GROUP_TOKENS), _MAX_ELEMENTS // head_size, _MAX_THREADS * vec_size // head_size))
    span = min(ratio, _SPAN)
    bias_size = min(vec_size, check.vector_width(head_size, position_bias))
    constants |= {"ROPE_SIZE": rope_size, "GROUPS": groups, "BIAS_SIZE": bias_size, "SPAN": span}
    threads = check.threads(groups * head_size // vec_size)
    keys = _compress_kv(**constants, NUM_THREADS=threads).launch(
        grid=-(-num_tokens // span) if num_seqs else 0,
        block=threads,
        num_seqs=num_seqs,
        max_position=max_position,
        out_stride=out.strides[0],
        **tokens,
    )
    kept = _states(**constants, NUM_THREADS=_STATE_THREADS).launch(
        grid=(num_seqs, length) if num_tokens else 0, block=_STATE_THREADS, **tokens
    )
    return [keys, kept]


@compress_kv.bad_indices
def bad_indices_compress_kv(
    states: Tensor, kv: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_slots: Tensor
) -> dict[str, Tensor]:
    starts, lengths = query_start_loc.long(), query_start_loc.long().diff()
    wrong = (starts < 0) | (starts > len(kv))
    wrong[1:] |= lengths < 0
    return {
        "query_start_loc": wrong,
        "seq_lens": (seq_lens != 0) & (seq_lens < lengths),
        "state_slots": state_slots >= len(states),
    }


@compress_kv.traffic
def traffic_compress_kv(out: TensorArg, kv: TensorArg, gate: TensorArg, position_bias: TensorArg) -> int:
    return kv.nbytes + gate.nbytes + out.nbytes // position_bias.shape[0]


@compress_kv.example
def example_compress_kv(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    head_size: Literal[512, 128, 40] = 512,
    ratio: Literal[4, 128] = 4,
) -> tuple[Any, ...]:
    num_seqs, heads = 3, 2 if ratio == 4 else 1
    row, length, max_position = heads * head_size, heads * ratio, 4096
    counts = [num_tokens * (i + 1) // num_seqs - num_tokens * i // num_seqs for i in range(num_seqs)]
    starts = [sum(counts[:i]) for i in range(num_seqs + 1)]
    lengths = [count + (ratio - count) % (5 * ratio) + i * ratio for i, count in enumerate(counts)]
    return (
        make.empty(num_tokens, head_size, dtype=dtype),
        make.randn(num_seqs + 2, length, 2 * row, dtype=dtype),
        *(make.randn(num_tokens, row, dtype=dtype) for _ in range(2)),
        make.randn(ratio, row, dtype="float32"),
        make.randn(head_size, dtype=dtype, scale=0.1, shift=1.0),
        make.randn(max_position, min(64, head_size), dtype="float32"),
        make.values(starts, dtype="int64"),
        make.values(lengths, dtype="int64"),
        make.permutation(num_seqs + 2, num_seqs, dtype="int32"),
        1e-6,
    )
