"""The gated delta rule over prompts as a module (Qwen3-Next, OLMo Hybrid)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..ops.mamba import gated_delta_rule
from .base import OpLayer
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChunkGatedDeltaRule"]


@CustomOp.register("chunk_gated_delta_rule")
class ChunkGatedDeltaRule(OpLayer, op=gated_delta_rule):
    """Linear attention that corrects what its state predicts, over prompts, see `pyops.gated_delta_rule`.

    ``forward(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, chunk_indices=None,
    chunk_offsets=None, use_qk_l2norm_in_kernel=True, core_attn_out=None)`` returns (o, final_state) for the scale
    ``key_size**-0.5``. States are [num_seqs, value_heads, value_size, key_size]; an initial state is float32, float16,
    bfloat16 or None, the final one float32 and None unless `output_final_state`. The outputs are a new tensor like v,
    or the first elements of `core_attn_out` if that is given, a contiguous tensor of the dtype of v. `chunk_indices`
    and `chunk_offsets` have no effect: the kernel finds its chunks by itself.
    """

    def __init__(self) -> None:
        super().__init__()

    def compute(
        self,
        op: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        chunk_offsets: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        o = v.new_empty(v.shape) if core_attn_out is None else core_attn_out.view(-1)[: v.numel()].view(v.shape)
        final_state = None
        if output_final_state:
            num_seqs = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
            final_state = v.new_empty(num_seqs, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
        if initial_state is not None:
            initial_state = initial_state.contiguous()
        how = cu_seqlens, use_qk_l2norm_in_kernel, True, final_state
        op(q, k, v, g, beta, q.shape[3] ** -0.5, initial_state, *how, o=o)
        return o, final_state
