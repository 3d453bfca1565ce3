"""Rotary embedding for dual chunk attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..ops.rotary import dual_chunk_rotary_embedding
from ..ops.rotary import tables as rope_tables
from .base import OpLayer
from .custom_op import CustomOp
from .rotary import table_like

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DualChunkRotaryEmbedding"]


@CustomOp.register("dual_chunk_rotary_embedding")
class DualChunkRotaryEmbedding(OpLayer, op=dual_chunk_rotary_embedding):
    """Rotary embedding for dual chunk attention, see `pyops.dual_chunk_rotary_embedding`.

    ``forward(positions, query, key, offsets=None)`` takes positions [num_tokens], int32 or int64, query [num_tokens,
    num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16, and key the same with
    num_kv_heads. It returns new tensors: the queries rotated in five ways, [num_tokens, 5 * num_heads * head_size], and
    the keys, [num_tokens, num_kv_heads * head_size].

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype: as in `RotaryEmbeddingBase`.
        chunk_size: tokens of a chunk.
        local_size: tokens of a chunk that the next chunk sees as its own. Positions count modulo ``chunk_size -
            local_size``.

    Examples:
        >>> rope = DualChunkRotaryEmbedding(64, 64, 4096, 10000.0, True, torch.float32, chunk_size=1024, local_size=128)
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
        >>> query.shape, key.shape
        (torch.Size([5, 1280]), torch.Size([5, 128]))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        chunk_size: int,
        local_size: int,
    ) -> None:
        super().__init__()
        if not 0 <= local_size < chunk_size:
            raise ValueError(
                f"DualChunkRotaryEmbedding: local_size: expected 0 up to chunk_size={chunk_size}, got {local_size}"
            )
        self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
        self.max_position_embeddings, self.is_neox_style, self.dtype = max_position_embeddings, is_neox_style, dtype
        self.chunk_size, self.local_size = chunk_size, local_size
        chunk_len = chunk_size - local_size
        frequencies = rope_tables.frequencies(rotary_dim, base)
        position = torch.arange(max(max_position_embeddings, chunk_len), dtype=torch.int64)
        own, beyond = position[:chunk_len], position[:chunk_len] + chunk_len
        for name, turned_as in (
            ("k", position[:max_position_embeddings] % chunk_len),
            ("q", own),
            ("qc", beyond.clamp(max=chunk_size)),
            ("qc_no_clamp", beyond),
            ("q_inter", own + chunk_size),
        ):
            table = rope_tables.cos_sin(turned_as.float()[:, None] * frequencies).to(dtype)
            self.register_buffer(f"cos_sin_{name}_cache", table, persistent=False)

    def compute(
        self, op: Callable[..., None], positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        positions = positions if offsets is None else positions + offsets
        queries = query.new_empty(query.shape[0], 5 * query.shape[1:].numel())
        keys = torch.empty_like(key, memory_format=torch.contiguous_format)
        names = ("k", "q", "qc", "qc_no_clamp", "q_inter")
        tables = [table_like(self, f"cos_sin_{name}_cache", query) for name in names]
        op(queries, keys, positions, query, key, self.head_size, *tables, self.is_neox_style)
        return queries, keys.flatten(1)
