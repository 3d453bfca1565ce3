"""Depthwise causal convolution of the few tokens that decoding adds to each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from . import _convolution as common

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["causal_conv1d_decode"]

_decode = Kernel("mamba/causal_conv1d_decode.cu")
_NUM_THREADS = 128  # most threads of a block
_MIN_BLOCKS = 4  # resident blocks of 128 threads per SM; bounds the registers; not tuned
_MAX_BATCH = 4  # inputs in flight per thread
_MIN_VEC_BYTES = 4  # fewest bytes of channels per thread, for small inputs


@op(inout=("x", "conv_state"))
def causal_conv1d_decode(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = -1,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
) -> None:
    """Convolve the new tokens of each sequence in place, continuing from the sequence's state.

    ``x[t, d] = T(act(bias[d] + sum_k weight[d, k] * (history, x)[t + k, d]))`` in float32, rounded once. The history is
    the first ``width - 1`` inputs of the state, the newest last. The state becomes the last ``width - 1`` of history
    and new inputs.

    With num_accepted_tokens (speculative decoding) the history begins ``num_accepted_tokens - 1`` inputs later (clamped
    to the state), and the state becomes the last ``width - 2`` inputs of the history and all new inputs, up to
    state_len. The next call can then continue after any of these tokens.

    A sequence without tokens, or with a slot that is pad_slot_id or does not exist, is skipped: neither its tokens nor
    a state is written. Slots of different sequences must differ.

    Args:
        x: [num_seqs, seq_len, dim], any strides; or with query_start_loc [num_tokens, dim]; float32, float16 or
            bfloat16; overwritten.
        conv_state: [num_slots, state_len, dim] of the dtype of x, any strides, read and written. state_len is at least
            width - 1, and with num_accepted_tokens at least width - 2 and the tokens of a sequence.
        weight: [dim, width], contiguous, float32, float16 or bfloat16, width 2 to 8.
        bias: [dim] of the dtype of `weight`, or None for 0.
        activation: act of the formula: "silu" or its other name "swish", or None.
        conv_state_indices: [num_seqs] slots of sequences, or [num_seqs, max_blocks]; without prefix caching, only
            column 0 counts; None for slots 0, 1, 2, ... This and all other indices are int32, or all are int64.
        num_accepted_tokens: [num_seqs], at least 1: how many tokens of the last call are kept; None without
            speculative decoding.
        query_start_loc: [num_seqs + 1], ascending: the first token of each sequence, and the end of the last. A start
            below 0 is taken for 0, one after the tokens for their end. Where starts do not ascend, sequences share
            tokens: these tokens, and the states of these sequences, are undefined.
        max_query_len: at least the tokens of each sequence, with query_start_loc; -1 if not known.
        pad_slot_id: the slot that means no slot (a padding sequence).
        block_idx_last_scheduled_token, initial_state_idx: [num_seqs] columns of conv_state_indices for prefix caching:
            where the state is written, and where it is read.
    """
    num_slots, state_len, _ = conv_state.shape
    history, wanted = weight.shape[1] - 1, conv_state_indices
    if query_start_loc is None:
        sequences = list(x)
    else:
        sequences = [x[begin : max(begin, end)] for begin, end in common.sequence_bounds(query_start_loc, x.shape[0])]
    for b, tokens in enumerate(sequences):
        columns = (
            0 if column is None else int(column[b]) for column in (initial_state_idx, block_idx_last_scheduled_token)
        )
        first, last = (common.existing_slot(wanted, b, column, num_slots, pad_slot_id) for column in columns)
        if first is None or not len(tokens):
            continue
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[b])
        start = min(max(accepted, 1) - 1, state_len - history)
        inputs = torch.cat((conv_state[first, start : start + history], tokens))
        tokens.copy_(common.result_of(inputs.unfold(0, history + 1, 1).mT, weight, bias, activation))
        if last is not None:
            kept = inputs[-history:] if num_accepted_tokens is None else inputs[1 : state_len + 1]
            conv_state[last, : len(kept)] = kept


@causal_conv1d_decode.plan
def plan_causal_conv1d_decode(
    x: TensorArg,
    conv_state: TensorArg,
    weight: TensorArg,
    bias: TensorArg | None,
    activation: str | None,
    conv_state_indices: TensorArg | None,
    num_accepted_tokens: TensorArg | None,
    query_start_loc: TensorArg | None,
    max_query_len: int,
    block_idx_last_scheduled_token: TensorArg | None,
    initial_state_idx: TensorArg | None,
) -> Launch:
    if query_start_loc is None:
        check.sizes(x, num_seqs=None, seq_len=None, dim=None)
        num_seqs, seq_len, dim = x.shape
        sequence_stride, num_tokens = x.strides[0], 0
    else:
        check.sizes(x, num_tokens=None, dim=None)
        check.index(query_start_loc, **{"num_seqs + 1": None})
        num_seqs, seq_len, dim = query_start_loc.shape[0] - 1, max_query_len, x.shape[1]
        sequence_stride, num_tokens = 0, x.shape[0]
        if num_seqs < 0:
            raise query_start_loc.error("expected at least one entry, got none")
    width = common.check_convolution(x, conv_state, weight, bias, dim)
    if num_accepted_tokens is not None:
        check.sizes(num_accepted_tokens, num_seqs=num_seqs)
        if conv_state.shape[1] < width - 2 + seq_len:
            raise conv_state.error(
                f"expected a state_len of at least width - 2 + seq_len = {width - 2 + seq_len}, got {conv_state.shape}"
            )
    blocks = block_idx_last_scheduled_token, initial_state_idx
    index_t = common.check_indices(conv_state_indices, num_accepted_tokens, query_start_loc, *blocks)
    with_blocks = common.check_blocks(conv_state_indices, num_seqs, *blocks)
    max_blocks = common.check_slots(conv_state_indices, num_seqs, with_blocks)
    silu = common.check_activation(x, activation)
    vec_size = common.channel_vector(width, x, conv_state)
    # Small inputs get fewer channels per thread, so that more SMs load at once.
    wave = x.device.num_sms * _MIN_BLOCKS * _NUM_THREADS
    while vec_size * x.dtype.itemsize > _MIN_VEC_BYTES and num_seqs * dim < wave * vec_size:
        vec_size //= 2
    num_threads = check.threads(-(-dim // vec_size), max_threads=_NUM_THREADS)
    num_groups = -(-dim // (vec_size * num_threads))
    slot_stride, state_stride, state_channel_stride = conv_state.strides
    return _decode(
        scalar_t=x.dtype,
        index_t=index_t,
        **common.constants(weight, bias, vec_size, silu),
        HAS_INDICES=conv_state_indices is not None,
        HAS_STARTS=query_start_loc is not None,
        HAS_BLOCKS=with_blocks,
        IS_SPECULATIVE=num_accepted_tokens is not None,
        VEC_SIZE=vec_size,
        BATCH=1 if seq_len == 1 else _MAX_BATCH,
        NUM_THREADS=num_threads,
        MIN_BLOCKS=_MIN_BLOCKS,
    ).launch(
        grid=num_seqs * num_groups if x.numel else 0,
        block=num_threads,
        dim=dim,
        num_groups=num_groups,
        seq_len=seq_len,
        num_tokens=num_tokens,
        num_slots=conv_state.shape[0],
        state_len=conv_state.shape[1],
        max_blocks=max_blocks,
        indices_stride=conv_state_indices.strides[0] if conv_state_indices else 0,
        x_sequence_stride=sequence_stride,
        x_token_stride=x.strides[-2],
        x_channel_stride=x.strides[-1],
        slot_stride=slot_stride,
        state_stride=state_stride,
        state_channel_stride=state_channel_stride,
    )


@causal_conv1d_decode.bad_indices
def bad_indices_causal_conv1d_decode(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    conv_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    query_start_loc: Tensor | None,
    pad_slot_id: int,
) -> dict[str, Tensor]:
    found = {}
    if conv_state_indices is not None:
        found["conv_state_indices"] = common.bad_slots(conv_state_indices, conv_state.shape[0], pad_slot_id)
    if num_accepted_tokens is not None:
        most = conv_state.shape[1] - weight.shape[1] + 2
        found["num_accepted_tokens"] = (num_accepted_tokens < 1) | (num_accepted_tokens > most)
    if query_start_loc is not None:
        found["query_start_loc"] = common.bad_starts(query_start_loc, x.shape[0])
    return found


@causal_conv1d_decode.traffic
def traffic_causal_conv1d_decode(
    x: TensorArg, weight: TensorArg, num_accepted_tokens: TensorArg | None, query_start_loc: TensorArg | None
) -> int:
    dim, width = weight.shape
    num_seqs = x.shape[0] if query_start_loc is None else query_start_loc.numel - 1
    written = width - 1 if num_accepted_tokens is None else width - 2
    states = num_seqs * (width - 1 + written) * dim * x.dtype.itemsize
    return 2 * x.nbytes + weight.nbytes + states + (x.nbytes if num_accepted_tokens else 0)


@causal_conv1d_decode.example
def example_causal_conv1d_decode(
    make: Any,
    *,
    num_tokens: int = 16,
    dim: int = 64,
    seq_len: Literal[1, 3] = 1,
    dtype: str = "bfloat16",
    varlen: bool = False,
    mode: Literal["plain", "speculative", "blocks"] = "plain",
) -> tuple[Any, ...]:
    """`num_tokens` sequences of seq_len tokens, or with `varlen` sequences of 0 to seq_len tokens."""
    width = 4
    starts = [0]
    while varlen and starts[-1] < num_tokens:
        starts.append(min(num_tokens, starts[-1] + len(starts) % (seq_len + 1)))
    num_seqs = len(starts) - 1 if varlen else num_tokens
    num_slots, blocks = 2 * num_seqs + 1, mode == "blocks"
    speculative = mode == "speculative"
    first, last = (make.values([b % 2 ^ i for b in range(num_seqs)], dtype="int32") if blocks else None for i in (0, 1))
    accepted = make.values([1 + b % seq_len for b in range(num_seqs)], dtype="int32") if speculative else None
    return (
        make.randn(*((num_tokens,) if varlen else (num_tokens, seq_len)), dim, dtype=dtype),
        make.randn(num_slots, width - 2 + seq_len if speculative else width - 1, dim, dtype=dtype),
        make.randn(dim, width, dtype=dtype, scale=0.5),
        make.randn(dim, dtype=dtype),
        "silu",
        make.permutation(num_slots, *((num_seqs, 2) if blocks else (num_seqs,)), dtype="int32"),
        accepted,
        make.values(starts, dtype="int32") if varlen else None,
        seq_len if varlen else -1,
        -1,
        last,
        first,
    )
