"""Depthwise causal convolution of the tokens of many sequences."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import boolean, float32
from ..._core.tensors.tensor import TensorArg
from . import _convolution as common

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["causal_conv1d_prefill"]

_tokens = Kernel("mamba/causal_conv1d_tokens.cu")
_channels = Kernel("mamba/causal_conv1d_channels.cu")

_NUM_THREADS = 128  # most threads of a block
# Fastest for 8192 tokens of 8192 channels on an H200 (docs/performance/scans.md).
_TOKENS_BATCH = 4  # rows in flight per thread
# Blocks per SM of causal_conv1d_tokens.cu. True: narrow 16-bit inputs without prefix caching on sm_90 and newer; False:
# all others, which need more registers.
_TOKENS_MIN_BLOCKS = {True: 6, False: 4}
_MIN_TILE, _MAX_TILE = 8, 128  # tokens of a block; each tile reads width - 1 tokens of the tile before it again
_CHANNELS_BATCH, _CHANNELS_MIN_BLOCKS = 4, 4  # causal_conv1d_channels.cu: channels in flight per thread, blocks per SM
_WAVES = 2  # waves of blocks; not tuned
_MAX_CHANNELS = 16  # channels per thread for large inputs
_STATE_CHANNELS = 2  # most channels of a thread that updates states: more need more registers than the convolution


@op(out="out", inout="conv_states")
def causal_conv1d_prefill(
    out: Tensor,
    conv_states: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int = 0,
    channel_last: bool = True,
) -> None:
    """Convolve each channel over the last tokens of its sequence; keep the last inputs of sequences in a cache.

    ``out[t, d] = T(act(bias[d] + sum_k weight[d, k] * x[t - (width - 1) + k, d]))`` in float32, rounded once. The
    inputs before the first token of a sequence are its state if has_initial_state, else 0. The state becomes the last
    ``width - 1`` inputs of the sequence, the newest last; a shorter sequence keeps inputs of the former state.
    (The convolution of Mamba: Gu and Dao 2023, arXiv:2312.00752.)

    A sequence without tokens changes nothing. A sequence with a slot that is pad_slot_id or does not exist has no
    state: it begins with 0, and none is written. A token of no sequence gets 0. Slots of sequences must differ.

    Prefix caching is on where the three block indices are given. A sequence then has a row of slots. Its state comes
    from column initial_state_idx, and its last inputs go to column block_idx_last_scheduled_token. The columns from
    block_idx_first_scheduled_token up to block_idx_last_scheduled_token - 1 get the inputs before block boundaries: the
    last of them those before the last boundary inside the sequence, each earlier column those before the boundary one
    block earlier. A boundary that is not after a token of this call is skipped.

    Args:
        out: [num_tokens, dim], written; or [dim, num_tokens] without channel_last. Constant row stride.
        conv_states: [num_slots, state_len, dim] of the dtype of x, state_len at least width - 1, any strides; read and
            written. None if no state is kept.
        x: shape and dtype of `out`, float32, float16 or bfloat16; constant row stride.
        weight: [dim, width], contiguous, float32, float16 or bfloat16, width 2 to 8.
        bias: [dim] of the dtype of `weight`, or None for 0.
        query_start_loc: [num_seqs + 1], ascending: the first token of each sequence, and the end of the last. This and
            all other indices are int32, or all are int64. A start below 0 is taken for 0, one after the tokens for
            their end. Where starts do not ascend, sequences share tokens: the results of these tokens, and the states
            of these sequences, are undefined.
        cache_indices: [num_seqs] slots of sequences, or [num_seqs, max_blocks]; None for slots 0, 1, 2, ...
        has_initial_state: [num_seqs] bool; None if no sequence has one.
        activation: act of the formula: "silu" or its other name "swish", or None.
        pad_slot_id: the slot that means no slot (a padding sequence).
        block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx: [num_seqs] columns.
        num_computed_tokens: [num_seqs] tokens of each sequence before this call; None for 0.
        block_size_to_align: tokens of a block; only with prefix caching.
        channel_last: whether the channels of a token are contiguous in memory.
    """
    inputs, result = (x, out) if channel_last else (x.mT, out.mT)
    num_tokens, width = inputs.shape[0], weight.shape[1]
    result.zero_()
    num_slots = 0 if conv_states is None else conv_states.shape[0]
    for b, (begin, end) in enumerate(common.sequence_bounds(query_start_loc, num_tokens)):
        if begin >= end:
            continue
        slot_of = partial(common.existing_slot, cache_indices, b, num_slots=num_slots, pad_slot_id=pad_slot_id)
        first, last, initial, computed = (
            0 if numbers is None else int(numbers[b])
            for numbers in (
                block_idx_first_scheduled_token,
                block_idx_last_scheduled_token,
                initial_state_idx,
                num_computed_tokens,
            )
        )
        slot = slot_of(initial)
        history = inputs.new_zeros(width - 1, inputs.shape[1])
        if conv_states is not None and slot is not None and has_initial_state is not None and has_initial_state[b]:
            history = conv_states[slot, : width - 1]
        sequence = torch.cat((history, inputs[begin:end]))
        result[begin:end] = common.result_of(sequence.unfold(0, width, 1).mT, weight, bias, activation)
        if conv_states is None or slot is None:
            continue
        kept = {max(0, last): end - begin}
        if cache_indices is not None and initial_state_idx is not None:
            kept |= common.boundaries(first, last, computed, end - begin, cache_indices.shape[1], block_size_to_align)
        for column, tokens in kept.items():
            if (target := slot_of(column)) is not None:
                conv_states[target, : width - 1] = sequence[tokens : tokens + width - 1]


@causal_conv1d_prefill.plan
def plan_causal_conv1d_prefill(
    out: TensorArg,
    conv_states: TensorArg | None,
    x: TensorArg,
    weight: TensorArg,
    bias: TensorArg | None,
    query_start_loc: TensorArg,
    cache_indices: TensorArg | None,
    has_initial_state: TensorArg | None,
    activation: str | None,
    block_idx_first_scheduled_token: TensorArg | None,
    block_idx_last_scheduled_token: TensorArg | None,
    initial_state_idx: TensorArg | None,
    num_computed_tokens: TensorArg | None,
    block_size_to_align: int,
    channel_last: bool,
) -> Launch:
    check.sizes(x, **dict.fromkeys(("num_tokens", "dim") if channel_last else ("dim", "num_tokens"), None))
    common.check_convolution(x, conv_states, weight, bias, dim=x.shape[1 if channel_last else 0])
    check.like(out, x)
    for arg in (x, out):
        check.row_size(arg)
    check.index(query_start_loc, **{"num_seqs + 1": None})
    num_seqs = query_start_loc.shape[0] - 1
    if num_seqs < 0:
        raise query_start_loc.error("expected at least one entry, got none")
    blocks = block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx
    index_t = common.check_indices(query_start_loc, cache_indices, *blocks, num_computed_tokens)
    with_blocks = common.check_blocks(cache_indices, num_seqs, *blocks)
    max_blocks = common.check_slots(cache_indices, num_seqs, with_blocks)
    check.shape(has_initial_state, boolean, num_seqs=num_seqs)
    if num_computed_tokens is not None:
        check.sizes(num_computed_tokens, num_seqs=num_seqs)
    if with_blocks and not 0 < block_size_to_align < 2**31:
        raise check.refuse(x, "block_size_to_align", f"expected 1 to 2^31 - 1, got {block_size_to_align}")
    silu = common.check_activation(x, activation)
    how = (_by_tokens if channel_last else _by_channels)(out, x, weight, with_blocks)
    # The first blocks of the grid update the states of sequences.
    inputs, results = (arg if channel_last else common.channels_behind(arg, 0) for arg in (x, out))
    kept = [] if conv_states is None else [conv_states]
    state_vec = min(_STATE_CHANNELS, common.channel_vector(weight.shape[1], inputs, results, *kept))
    state_groups = -(-inputs.shape[1] // (state_vec * how.num_threads))
    slot_stride, state_stride, state_channel_stride = conv_states.strides if conv_states else (0, 0, 0)
    return how.kernel(
        scalar_t=x.dtype,
        index_t=index_t,
        **common.constants(weight, bias, how.channels, silu),
        VEC_SIZE=how.vec_size,
        BATCH=how.batch,
        STATE_VEC=state_vec,
        STATE_WEIGHT_VEC=common.weight_vector(weight, state_vec * weight.shape[1]),
        HAS_STATES=conv_states is not None,
        HAS_INDICES=cache_indices is not None,
        HAS_INITIAL=has_initial_state is not None,
        HAS_BLOCKS=with_blocks,
        HAS_COMPUTED=with_blocks and num_computed_tokens is not None,
        NUM_THREADS=how.num_threads,
        MIN_BLOCKS=how.min_blocks,
    ).launch(
        grid=how.num_blocks + (num_seqs * state_groups if conv_states and how.num_blocks else 0),
        block=how.num_threads,
        num_tokens=inputs.shape[0],
        dim=inputs.shape[1],
        num_seqs=num_seqs,
        state_groups=state_groups,
        num_slots=conv_states.shape[0] if conv_states else 0,
        max_blocks=max_blocks,
        indices_stride=cache_indices.strides[0] if cache_indices else 0,
        x_stride=x.strides[0],
        out_stride=out.strides[0],
        slot_stride=slot_stride,
        state_channel_stride=state_channel_stride,
        state_stride=state_stride,
        **how.sizes,
    )


class _Convolution(NamedTuple):
    """The part of a launch that differs between the two kernels."""

    kernel: Kernel
    vec_size: int
    channels: int  # channels for which a thread holds the taps
    batch: int
    num_blocks: int
    num_threads: int
    min_blocks: int
    sizes: dict[str, int]


def _by_tokens(out: TensorArg, x: TensorArg, weight: TensorArg, with_blocks: bool) -> _Convolution:
    num_tokens, dim = x.shape
    vec_size = common.channel_vector(weight.shape[1], x, out)
    num_threads = check.threads(-(-dim // vec_size), max_threads=_NUM_THREADS)
    num_groups = -(-dim // (vec_size * num_threads))
    narrow = x.dtype is not float32 and vec_size < 8 and not with_blocks
    min_blocks = _TOKENS_MIN_BLOCKS[narrow and x.device.supports("clusters")]
    resident = x.device.num_sms * min_blocks * _WAVES
    tile_size = min(_MAX_TILE, max(_MIN_TILE, -(-num_tokens * num_groups // (resident * _MIN_TILE)) * _MIN_TILE))
    num_blocks = -(-num_tokens // tile_size) * num_groups
    sizes = {"tile_size": tile_size, "num_groups": num_groups}
    return _Convolution(_tokens, vec_size, vec_size, _TOKENS_BATCH, num_blocks, num_threads, min_blocks, sizes)


def _by_channels(out: TensorArg, x: TensorArg, weight: TensorArg, with_blocks: bool) -> _Convolution:
    dim, num_tokens = x.shape
    vec_size = check.vector_width(num_tokens, x, out)
    row_vecs = num_tokens // vec_size
    wave = x.device.num_sms * _CHANNELS_MIN_BLOCKS * _NUM_THREADS
    many = row_vecs * dim >= _WAVES * _MAX_CHANNELS * wave
    channels = _MAX_CHANNELS if many else _CHANNELS_BATCH
    num_blocks = -(-row_vecs * -(-dim // channels) // _NUM_THREADS)
    sizes = {"channels": channels}
    return _Convolution(_channels, vec_size, 1, _CHANNELS_BATCH, num_blocks, _NUM_THREADS, _CHANNELS_MIN_BLOCKS, sizes)


@causal_conv1d_prefill.result
def result_causal_conv1d_prefill(x: TensorArg) -> Result:
    return Result(x.shape, x.dtype)


@causal_conv1d_prefill.bad_indices
def bad_indices_causal_conv1d_prefill(
    conv_states: Tensor | None,
    x: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None,
    pad_slot_id: int,
    channel_last: bool,
) -> dict[str, Tensor]:
    found = {"query_start_loc": common.bad_starts(query_start_loc, x.shape[0 if channel_last else 1])}
    if cache_indices is not None and conv_states is not None:
        found["cache_indices"] = common.bad_slots(cache_indices, conv_states.shape[0], pad_slot_id)
    return found


@causal_conv1d_prefill.traffic
def traffic_causal_conv1d_prefill(x: TensorArg, weight: TensorArg, query_start_loc: TensorArg) -> int:
    dim, width = weight.shape
    states = 2 * (query_start_loc.numel - 1) * (width - 1) * dim * x.dtype.itemsize
    return 2 * x.nbytes + weight.nbytes + states


@causal_conv1d_prefill.example
def example_causal_conv1d_prefill(
    make: Any,
    *,
    num_tokens: int = 16,
    dim: int = 64,
    width: Literal[4, 3] = 4,
    dtype: str = "bfloat16",
    channel_last: bool = True,
    with_blocks: bool = False,
) -> tuple[Any, ...]:
    """Four sequences, one of them with one token and one empty. Two have 9 and 16 earlier tokens, in blocks of 8."""
    starts, block_size = [0, min(1, num_tokens), *[(num_tokens + 1) // 2] * 2, num_tokens], 8
    computed = [9, 0, 0, 16] if with_blocks else [0] * 4
    ends = [computed[b] + starts[b + 1] - starts[b] for b in range(4)]
    columns = [[c // block_size for c in computed], [max(0, e - 1) // block_size for e in ends]]
    columns.append([max(0, c - 1) // block_size for c in computed])
    max_blocks = max(columns[1]) + 1
    num_slots = 4 * max_blocks + 2
    shape = (num_tokens, dim) if channel_last else (dim, num_tokens)
    first, last, initial = (make.values(column, dtype="int32") if with_blocks else None for column in columns)
    return (
        make.empty(*shape, dtype=dtype),
        make.randn(num_slots, width - 1, dim, dtype=dtype),
        make.randn(*shape, dtype=dtype),
        make.randn(dim, width, dtype=dtype, scale=0.5),
        make.randn(dim, dtype=dtype),
        make.values(starts, dtype="int32"),
        make.permutation(num_slots, *((4, max_blocks) if with_blocks else (4,)), dtype="int32"),
        make.values([True, False, True, True], dtype="bool"),
        "silu",
        -1,
        first,
        last,
        initial,
        make.values(computed, dtype="int32") if with_blocks else None,
        block_size if with_blocks else 0,
        channel_last,
    )
