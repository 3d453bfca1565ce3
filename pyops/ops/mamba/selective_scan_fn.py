"""The selective scan of Mamba with the signature that layers call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._common import PAD_SLOT_ID
from .selective_scan import selective_scan_fwd

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["selective_scan_fn"]


def selective_scan_fn(
    u: Tensor,
    ssm_states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    block_size: int = 1024,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    cu_chunk_seqlen: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
) -> Tensor:
    """`selective_scan_fwd` for torch tensors of any strides; B and C may lack the dimension of groups.

    Tensors with strides that the op does not take are copied. The result is `z` if it is given, else `delta`: the
    tensor itself, or its copy.

    Args:
        D, z, delta_bias: D_, z_ and delta_bias_ of `selective_scan_fwd`.
    """
    u, delta, A, B, C = (each if each.stride(-1) == 1 else each.contiguous() for each in (u, delta, A, B, C))
    if z is not None and z.stride(-1) != 1:
        z = z.contiguous()
    D, delta_bias = (None if row is None else row.float().contiguous() for row in (D, delta_bias))
    rank = 3 if query_start_loc is not None else 4
    B, C = (tensor.unsqueeze(-3) if tensor.ndim == rank - 1 else tensor for tensor in (B, C))
    selective_scan_fwd(
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        delta_softplus,
        query_start_loc,
        cache_indices,
        has_initial_state,
        ssm_states,
        pad_slot_id,
        block_size,
        block_idx_first_scheduled_token,
        block_idx_last_scheduled_token,
        initial_state_idx,
        cu_chunk_seqlen,
        last_chunk_indices,
    )
    return delta if z is None else z
