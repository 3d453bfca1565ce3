"""The selective scan of Mamba, for prefill."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import boolean, float32, int32
from ..._core.tensors.tensor import TensorArg
from ._common import MAX_STATES
from ._scan_example import example_selective_scan_fwd
from ._scan_geometry import ScanProblem, TokensConfig, choose
from ._scan_reference import Rows, Slots, first_block, scan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["selective_scan_fwd"]

_selective_scan_fwd = Kernel("mamba/selective_scan_fwd.cu")
_selective_scan_tokens = Kernel("mamba/selective_scan_tokens.cu")
_COLUMNS = "block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx"


@op(inout=("delta", "z_", "ssm_states"), atol=2.0**-18)
def selective_scan_fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Tensor | None,
    z_: Tensor | None,
    delta_bias_: Tensor | None,
    delta_softplus: bool,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    ssm_states: Tensor,
    pad_slot_id: int,
    block_size: int = 1024,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    cu_chunk_seqlen: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
) -> None:
    """The selective scan of Mamba over the tokens of sequences, with its states in a cache (Gu and Dao 2023).

    For each sequence and channel c, from its state h, or 0, and over its tokens t in order::

        d = delta[c, t] + delta_bias_[c], then softplus(d) if delta_softplus
        h[n] = exp(d * A[c, n]) * h[n] + d * u[c, t] * B[n, t]
        delta[c, t] = sum(h * C[:, t]) + D_[c] * u[c, t]

    and ``z_[c, t] = delta[c, t] * silu(z_[c, t])``, before delta is rounded. Computed in float32.

    The state of sequence b is that of slot ``cache_indices[b]``: read if ``has_initial_state[b]``, and written after
    the last token. If the slot is `pad_slot_id` or does not exist, nothing of the sequence is written. Nor is anything
    written for a sequence without tokens, or with tokens that do not exist.

    With `block_idx_last_scheduled_token`, a state is kept for every block of `block_size` tokens. Blocks are counted
    from the first token of the call. With chunks, the first block has the tokens of the sequence's first chunk, so that
    a sequence may continue within a block. Row b of `cache_indices` has the slots of sequence b. The sequence begins
    from the slot in column ``initial_state_idx[b]``. The state after its block i goes to the slot in column
    ``block_idx_first_scheduled_token[b] + i``, and the state after its last block to the slot in column
    ``block_idx_last_scheduled_token[b]``. A state is not written if its slot is `pad_slot_id` or does not exist.

    Args:
        u: [batch, dim, num_tokens], or [dim, num_tokens] with `query_start_loc`; float32, float16 or bfloat16; tokens
            contiguous, any other strides.
        delta: the same, the time steps; overwritten by the result.
        A: [dim, state_size] float32, states contiguous; state_size is at most 256.
        B: [batch, groups, state_size, num_tokens] or [groups, state_size, num_tokens] of the dtype of `u`; tokens
            contiguous. ``dim / groups`` adjacent channels share a group.
        C: the same.
        D_: [dim] float32, contiguous; or None for 0.
        z_: as `u`, a gate; overwritten by the gated result. Or None.
        delta_bias_: [dim] float32, contiguous; or None for 0.
        delta_softplus: whether time steps are softplus(delta + delta_bias_).
        query_start_loc: [batch + 1] int32, contiguous: the first token of each sequence, and the end of the last.
            Sequences may not overlap. None: each row of the batch is a sequence.
        cache_indices: [batch], or [batch, columns] with slots of blocks, int32; or None: sequence b has slot b.
        has_initial_state: [batch] bool, contiguous; or None: no sequence has a state.
        ssm_states: [num_slots, dim, state_size], float32 or of the dtype of `u`, states contiguous; written. No two
            sequences may have the same slot.
        pad_slot_id: the slot of a padding sequence.
        block_size: tokens of a block, at least 1; not used without `block_idx_last_scheduled_token`.
        block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx: [batch] int32, contiguous;
            all three or none.
        cu_chunk_seqlen: [chunks + 1] int32, contiguous: the first token of each chunk of the sequences, counted over
            all; only differences of adjacent elements are used. A first chunk of less than 1 or more than block_size
            tokens counts as one of block_size.
        last_chunk_indices: [batch] int32, contiguous: the last chunk of each sequence; both or none, and only with
            block_idx_last_scheduled_token.
    """
    blocks = block_idx_last_scheduled_token is not None
    slots = Slots(cache_indices, len(ssm_states), pad_slot_id)
    for b in range(len(u) if query_start_loc is None else len(query_start_loc) - 1):
        rows = Rows(u, delta, z_, B, C) if query_start_loc is not None else Rows(u, delta, z_, B, C).of(b)
        begin, end = (0, u.shape[-1]) if query_start_loc is None else query_start_loc[b : b + 2].tolist()
        slot = slots.at(b, initial_state_idx)
        if slot < 0 or not 0 <= begin < end <= u.shape[-1]:
            continue
        continues = has_initial_state is not None and bool(has_initial_state[b])
        state = ssm_states[slot].to(torch.float32, copy=True) if continues else torch.zeros_like(A)
        size = block_size if blocks else end - begin
        starts = [begin, *range(begin + first_block(b, cu_chunk_seqlen, last_chunk_indices, size), end, size)]
        for i, (first, stop) in enumerate(zip(starts, [*starts[1:], end], strict=True)):
            scan(rows.cut(first, stop), state, A, D_, delta_bias_, delta_softplus)
            if blocks:
                is_last = stop == end
                column = block_idx_last_scheduled_token if is_last else block_idx_first_scheduled_token
                slot = slots.at(b, column, 0 if is_last else i)
            if slot >= 0:
                ssm_states[slot] = state.to(ssm_states.dtype)


@selective_scan_fwd.plan
def plan_selective_scan_fwd(
    u: TensorArg,
    delta: TensorArg,
    A: TensorArg,
    B: TensorArg,
    C: TensorArg,
    D_: TensorArg | None,
    z_: TensorArg | None,
    delta_bias_: TensorArg | None,
    query_start_loc: TensorArg | None,
    cache_indices: TensorArg | None,
    has_initial_state: TensorArg | None,
    ssm_states: TensorArg,
    pad_slot_id: int,
    block_size: int,
    block_idx_first_scheduled_token: TensorArg | None,
    block_idx_last_scheduled_token: TensorArg | None,
    initial_state_idx: TensorArg | None,
    cu_chunk_seqlen: TensorArg | None,
    last_chunk_indices: TensorArg | None,
) -> Launch:
    check.floating(u)
    leading: dict[str, int] = {}
    if query_start_loc:
        check.sizes(u, dim=None, num_tokens=None)
        check.sizes(query_start_loc, **{"batch + 1": None})
        if query_start_loc.shape[0] < 1:
            raise query_start_loc.error("expected at least one element, got none")
        check.shape(query_start_loc, int32, **{"batch + 1": query_start_loc.shape[0]})
        batch = query_start_loc.shape[0] - 1
    else:
        check.sizes(u, batch=None, dim=None, num_tokens=None)
        batch = leading["batch"] = u.shape[0]
    dim, num_tokens = u.shape[-2:]
    rows = [arg for arg in (u, delta, z_) if arg]
    check.sizes(A, dim=dim, state_size=None)
    check.dtype(A, float32)
    state_size = check.row_size(A)
    if not 1 <= state_size <= MAX_STATES:
        raise A.error(f"expected 1 to {MAX_STATES} states, got shape {A.shape}")
    for arg in rows[1:]:
        check.like(arg, u)
    check.sizes(B, **leading, groups=None, state_size=state_size, num_tokens=num_tokens)
    num_groups = B.shape[-3]
    if num_groups < 1 or dim % num_groups:
        raise B.error(f"expected groups that divide the {dim} channels of u, got shape {B.shape}")
    check.sizes(C, **leading, groups=num_groups, state_size=state_size, num_tokens=num_tokens)
    for arg in (*rows, B, C):
        check.dtype(arg, u.dtype)
        check.row_size(arg)
    for row in (D_, delta_bias_):
        check.shape(row, float32, dim=dim)
    check.shape(has_initial_state, boolean, batch=batch)
    check.sizes(ssm_states, num_slots=None, dim=dim, state_size=state_size)
    check.dtype(ssm_states, *{u.dtype: None, float32: None})
    check.row_size(ssm_states)
    blocks = (block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx)
    columns = _check_slots(u, batch, cache_indices, ssm_states, any(blocks))
    if any(blocks):
        for name, column in zip(_COLUMNS, blocks, strict=True):
            if column is None:
                raise check.refuse(u, name, "expected a tensor, as other indices of blocks are given, got None")
            check.shape(column, int32, batch=batch)
    _check_chunks(u, batch, cu_chunk_seqlen, last_chunk_indices, any(blocks))
    if index(block_size) < 1:
        raise check.refuse(u, "block_size", f"expected at least 1, got {block_size}")

    vec_size = check.vector_width(num_tokens, *rows, B, C)
    state_vec_size = check.vector_width(state_size, A, ssm_states)
    problem = ScanProblem(
        batch, dim, num_tokens * leading.get("batch", 1), state_size, u.dtype, vec_size, state_vec_size
    )
    config = tuning.config(u.op, problem, u.device, choose)
    group_dim = dim // num_groups
    group_blocks = -(-group_dim // config.block_channels)
    batched = {
        f"{name}_batch_stride": arg.strides[0] if arg and leading else 0
        for name, arg in (("u", u), ("delta", delta), ("z", z_), ("B", B), ("C", C))
    }
    kernel = _selective_scan_tokens if isinstance(config, TokensConfig) else _selective_scan_fwd
    specialisation = kernel(
        scalar_t=u.dtype,
        state_t=ssm_states.dtype,
        STATE_SIZE=state_size,
        VEC_SIZE=vec_size,
        **config.constants(problem),
    )
    return specialisation.launch(
        grid=batch * num_groups * group_blocks if num_tokens and ssm_states.numel else 0,
        block=config.num_threads,
        shared=config.shared_bytes(problem),
        num_tokens=num_tokens,
        num_slots=ssm_states.shape[0],
        columns=columns,
        num_chunks=cu_chunk_seqlen.shape[0] - 1 if cu_chunk_seqlen else 0,
        group_dim=group_dim,
        group_blocks=group_blocks,
        num_groups=num_groups,
        u_stride=u.strides[-2],
        delta_stride=delta.strides[-2],
        z_stride=z_.strides[-2] if z_ else 0,
        A_stride=A.strides[0],
        B_group_stride=B.strides[-3],
        B_stride=B.strides[-2],
        C_group_stride=C.strides[-3],
        C_stride=C.strides[-2],
        slots_stride=cache_indices.strides[0] if cache_indices else 0,
        slot_stride=ssm_states.strides[0],
        state_stride=ssm_states.strides[1],
        **batched,
    )


def _check_chunks(
    u: TensorArg, batch: int, cu_chunk_seqlen: TensorArg | None, last_chunk_indices: TensorArg | None, blocks: bool
) -> None:
    """Check the chunks of `batch` sequences; they are only valid with a state per block (`blocks`)."""
    if (cu_chunk_seqlen is None) != (last_chunk_indices is None):
        missing = "cu_chunk_seqlen" if cu_chunk_seqlen is None else "last_chunk_indices"
        raise check.refuse(u, missing, "expected a tensor, as the other of the two is given, got None")
    if cu_chunk_seqlen is None or last_chunk_indices is None:
        return
    if not blocks:
        raise check.refuse(u, "block_idx_last_scheduled_token", "expected a tensor, as chunks are given, got None")
    check.sizes(cu_chunk_seqlen, **{"chunks + 1": None})
    if cu_chunk_seqlen.shape[0] < 1:
        raise cu_chunk_seqlen.error("expected at least one element, got none")
    check.shape(cu_chunk_seqlen, int32, **{"chunks + 1": cu_chunk_seqlen.shape[0]})
    check.shape(last_chunk_indices, int32, batch=batch)


def _check_slots(u: TensorArg, batch: int, cache_indices: TensorArg | None, ssm_states: TensorArg, blocks: bool) -> int:
    """Check the slots of `batch` sequences: one per sequence, or one per block of a sequence.

    Returns the number of slots per sequence; -1 if there are no indices, so that sequence b has slot b.
    """
    if cache_indices is None:
        if blocks:
            raise check.refuse(u, "cache_indices", "expected the slots of blocks, [batch, columns], got None")
        if ssm_states.shape[0] < batch:
            raise ssm_states.error(f"expected a slot for each of {batch} sequences, got shape {ssm_states.shape}")
        return -1
    check.dtype(cache_indices, int32)
    if not blocks and len(cache_indices.shape) == 1:
        check.sizes(cache_indices, batch=batch)
        return 1
    check.sizes(cache_indices, batch=batch, columns=None)
    check.row_size(cache_indices)
    return cache_indices.shape[1]


@selective_scan_fwd.bad_indices
def bad_indices_selective_scan_fwd(
    u: Tensor,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    ssm_states: Tensor,
    pad_slot_id: int,
    block_idx_first_scheduled_token: Tensor | None,
    block_idx_last_scheduled_token: Tensor | None,
    initial_state_idx: Tensor | None,
    cu_chunk_seqlen: Tensor | None,
    last_chunk_indices: Tensor | None,
) -> dict[str, Tensor]:
    found = {}
    if query_start_loc is not None:
        wrong = (query_start_loc < 0) | (query_start_loc > u.shape[-1])
        wrong[1:] |= query_start_loc.diff() < 0
        found["query_start_loc"] = wrong
    if cache_indices is not None:
        outside = (cache_indices < 0) | (cache_indices >= len(ssm_states))
        found["cache_indices"] = outside & (cache_indices != pad_slot_id)
        columns = block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx
        for name, column in zip(_COLUMNS, columns, strict=True):
            if column is not None:
                found[name] = (column < 0) | (column >= cache_indices.shape[1])
    if cu_chunk_seqlen is not None and last_chunk_indices is not None:
        found["last_chunk_indices"] = (last_chunk_indices < 0) | (last_chunk_indices >= len(cu_chunk_seqlen) - 1)
    return found


@selective_scan_fwd.traffic
def traffic_selective_scan_fwd(
    u: TensorArg,
    delta: TensorArg,
    A: TensorArg,
    B: TensorArg,
    C: TensorArg,
    z_: TensorArg | None,
    query_start_loc: TensorArg | None,
    ssm_states: TensorArg,
) -> int:
    batch = query_start_loc.shape[0] - 1 if query_start_loc else u.shape[0]
    state = A.numel * ssm_states.dtype.itemsize
    return (
        u.nbytes + 2 * delta.nbytes + (2 * z_.nbytes if z_ else 0) + A.nbytes + B.nbytes + C.nbytes + 2 * batch * state
    )


selective_scan_fwd.example(example_selective_scan_fwd)
