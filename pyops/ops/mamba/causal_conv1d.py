"""The causal convolutions of Mamba layers, with the signatures that models call.

Channels are the first dimension here, as in models, and the last one in the ops; the difference is a transposed view.
torch.compile traces these functions, so they use no proxy of `_core/system/lazy.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from .conv_decode import causal_conv1d_decode
from .conv_prefill import causal_conv1d_prefill

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int = 0,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """The convolution of the tokens of many sequences, see `causal_conv1d_prefill`: a new tensor like x.

    Args:
        x: [dim, num_tokens], contiguous in memory along either the channels of a token or the tokens of a channel
            (else it is copied). The result has the same layout and the dtype of x; x is converted to the dtype of
            conv_states first.
        conv_states: [num_slots, dim, at least width - 1], any strides, read and written; None if no state is kept.
        activation: "silu", "swish" or True for silu; None or False for none.
        metadata, validate_data: for compatibility with vLLM; no effect: arguments are always checked.
    """
    if x.ndim != 2:
        raise OpError("causal_conv1d_fn", "x", f"expected 2 dimensions, got shape {tuple(x.shape)}")
    dtype = x.dtype
    x = x if conv_states is None else x.to(conv_states.dtype)
    channel_last = x.stride(0) == 1 and x.stride(1) != 1
    if not channel_last and x.stride(1) != 1:
        x = x.contiguous()
    out = causal_conv1d_prefill.new(
        None if conv_states is None else conv_states.transpose(1, 2),
        x.t() if channel_last else x,
        weight.contiguous(),
        bias,
        query_start_loc,
        cache_indices,
        has_initial_state,
        _activation(activation),
        pad_slot_id,
        block_idx_first_scheduled_token,
        block_idx_last_scheduled_token,
        initial_state_idx,
        num_computed_tokens,
        block_size_to_align,
        channel_last,
    )
    return (out.t() if channel_last else out).to(dtype)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = -1,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    validate_data: bool = False,
) -> Tensor:
    """The convolution of the new tokens of each sequence, see `causal_conv1d_decode`: x, overwritten.

    Args:
        x: [num_seqs, dim] or [num_seqs, dim, seq_len]; or with query_start_loc [num_tokens, dim]. If its dtype is
            not that of conv_state, x is left unchanged, and the result is a new tensor.
        conv_state: [num_slots, dim, state_len], any strides, read and written.
        activation: "silu", "swish" or True for silu; None or False for none.
        validate_data: for compatibility with vLLM; no effect: arguments are always checked.
    """
    if x.ndim not in (2, 3):
        raise OpError("causal_conv1d_update", "x", f"expected 2 or 3 dimensions, got shape {tuple(x.shape)}")
    dtype = x.dtype
    x = x.to(conv_state.dtype)
    tokens = x.transpose(1, 2) if x.ndim == 3 else x if query_start_loc is not None else x.unsqueeze(1)
    causal_conv1d_decode(
        tokens,
        conv_state.transpose(1, 2),
        weight.contiguous(),
        bias,
        _activation(activation),
        conv_state_indices,
        num_accepted_tokens,
        query_start_loc,
        max_query_len,
        pad_slot_id,
        block_idx_last_scheduled_token,
        initial_state_idx,
    )
    return x.to(dtype)


def _activation(activation: str | bool | None) -> str | None:
    """The activation in the form that the ops take: "silu" or None."""
    return ("silu" if activation else None) if isinstance(activation, bool) else activation
