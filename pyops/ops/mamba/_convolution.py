"""Code shared by the causal convolutions: slots of sequences, checks, and vector widths."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32, int64
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

MAX_WIDTH = 8  # most taps: wider kernels spill
_MAX_TAPS = 16  # most weights in registers of a thread: 32 are 1 % faster in prefill, but spill for some dtypes
_ACTIVATIONS = (None, "silu", "swish")

# References


def result_of(windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The convolution of `windows` [..., width, dim], oldest input first; returns [..., dim] in float32."""
    y = (windows.float() * weight.float().mT).sum(-2)
    if bias is not None:
        y = y + bias.float()
    return torch.nn.functional.silu(y) if activation else y


def existing_slot(indices: Tensor | None, sequence: int, column: int, num_slots: int, pad_slot_id: int) -> int | None:
    """The slot in this column of a sequence's indices; None if it is padding or out of range."""
    row = [sequence] if indices is None else indices[sequence].reshape(-1).tolist()
    if not 0 <= column < len(row) or not 0 <= row[column] < num_slots or row[column] == pad_slot_id:
        return None
    return int(row[column])


def boundaries(first: int, last: int, computed: int, count: int, max_blocks: int, block_size: int) -> dict[int, int]:
    """{column of the slots: new tokens before its block boundary}, for each boundary that the new tokens cross.

    The sequence has `count` new tokens after `computed` earlier ones; states at boundaries go to the columns from
    `first` up to the one before `last`.
    """
    first, last, computed = max(0, first), max(0, last), max(0, computed)
    last_boundary = (computed + count - 1) // block_size * block_size - computed
    behind = range(max(0, last - max_blocks), last - first)
    found = {last - 1 - i: last_boundary - i * block_size for i in behind}
    return {column: tokens for column, tokens in found.items() if tokens > 0}


def sequence_bounds(query_start_loc: Tensor, num_tokens: int) -> list[tuple[int, int]]:
    """[(first token, end)] of each sequence."""
    bounds = query_start_loc.clamp(0, num_tokens).tolist()
    return list(pairwise(bounds))


# Indices for PYOPS_CHECK


def bad_starts(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """The entries of `query_start_loc` that are out of range or below the previous entry."""
    starts = query_start_loc.long()
    wrong = (starts < 0) | (starts > num_tokens)
    wrong[1:] |= starts.diff() < 0
    return wrong


def bad_slots(indices: Tensor, num_slots: int, pad_slot_id: int) -> Tensor:
    """The slots that are out of range and are not `pad_slot_id`."""
    return ((indices < 0) | (indices >= num_slots)) & (indices != pad_slot_id)


# Plans


def check_convolution(
    x: TensorArg, conv_states: TensorArg | None, weight: TensorArg, bias: TensorArg | None, dim: int
) -> int:
    """Check dtypes and sizes of the arguments common to all convolutions; returns the width."""
    check.floating(x)
    check.floating(weight)
    check.sizes(weight, dim=dim, width=None)
    check.contiguous(weight)
    width = weight.shape[1]
    if not 2 <= width <= MAX_WIDTH:
        raise weight.error(f"expected a width of 2 to {MAX_WIDTH}, got shape {weight.shape}")
    check.shape(bias, weight.dtype, dim=dim)
    if conv_states is not None:
        check.dtype(conv_states, x.dtype)
        check.sizes(conv_states, num_slots=None, state_len=None, dim=dim)
        if conv_states.shape[1] < width - 1:
            raise conv_states.error(f"expected a state_len of at least {width - 1}, got shape {conv_states.shape}")
    return width


def check_activation(x: TensorArg, activation: str | None) -> bool:
    """Whether `activation` is silu; OpError if it is neither silu (swish) nor None."""
    if activation not in _ACTIVATIONS:
        raise check.refuse(x, "activation", f'expected None, "silu" or "swish", got "{activation}"')
    return activation is not None


def check_indices(*indices: TensorArg | None) -> Any:
    """Check that all index tensors have one element type, int32 or int64, and contiguous rows; returns that type."""
    given = [arg for arg in indices if arg is not None]
    for arg in given:
        check.dtype(arg, int32, int64)
        if arg.dtype is not given[0].dtype:
            raise arg.error(f"expected dtype {given[0].dtype} like {given[0].name}, got {arg.dtype}")
        check.row_size(arg)
    return given[0].dtype if given else int32


def check_slots(indices: TensorArg | None, num_seqs: int, with_blocks: bool) -> int:
    """Check the slots of sequences; returns the number of slots per sequence."""
    if indices is None:
        return 1
    if with_blocks or len(indices.shape) == 2:
        check.sizes(indices, num_seqs=num_seqs, max_blocks=None)
        return indices.shape[1]
    check.sizes(indices, num_seqs=num_seqs)
    return 1


def check_blocks(indices: TensorArg | None, num_seqs: int, *columns: TensorArg | None) -> bool:
    """Whether the arguments of prefix caching are given; OpError if some are and others are not."""
    if all(arg is None for arg in columns):
        return False
    first = next(arg for arg in columns if arg is not None)
    if indices is None or None in columns:
        raise first.error("expected the slots of blocks and all arguments of prefix caching with it")
    for arg in columns:
        if arg is not None:
            check.sizes(arg, num_seqs=num_seqs)
    return True


def channels_behind(arg: TensorArg, axis: int) -> TensorArg:
    """`arg` with dimension `axis` moved to the end."""
    order = [i for i in range(len(arg.shape)) if i != axis] + [axis]
    return replace(arg, shape=tuple(arg.shape[i] for i in order), strides=tuple(arg.strides[i] for i in order))


def channel_vector(width: int, *args: TensorArg) -> int:
    """Adjacent channels per thread, which holds their taps in registers. Channels are the last dimension of `args`."""
    dim = args[0].shape[-1]
    if any(arg.strides[-1] != 1 and dim > 1 for arg in args):
        return 1
    return min(check.vector_width(dim, *args), 1 << (_MAX_TAPS // width).bit_length() - 1)


def weight_vector(weight: TensorArg, count: int) -> int:
    """Elements of one access to `count` adjacent weights."""
    size = weight.dtype.itemsize
    return gcd(count, 16 // size, max(1, weight.alignment // size))


def constants(weight: TensorArg, bias: TensorArg | None, vec_size: int, silu: bool) -> dict[str, Any]:
    """The constants of every kernel with `vec_size` channels per thread."""
    width = weight.shape[1]
    return {
        "weight_t": weight.dtype,
        "WIDTH": width,
        "WEIGHT_VEC": weight_vector(weight, vec_size * width),
        "HAS_BIAS": bias is not None,
        "SILU": silu,
    }
