"""Attention without a KV cache, for image and audio encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..ops.attention import attention_varlen
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MMEncoderAttention"]


@CustomOp.register("mm_encoder_attn")
class MMEncoderAttention(CustomOp):
    """Attention of every token to all tokens, or to the tokens of its own segment: ``softmax(scale * Q K^T) V``.

    ``forward(query, key, value, cu_seqlens=None, max_seqlen=None)`` takes query [batch, seq_len, num_heads * head_size]
    or [batch, seq_len, num_heads, head_size], key and value the same with their own seq_len and num_kv_heads, all of
    one float dtype. It returns a new tensor of the shape of query. Query head h attends to key and value head
    ``h // (num_heads / num_kv_heads)``. With cu_seqlens [num_segments + 1] int32, the batch is 1, and segment i is the
    tokens from ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]`` of queries and of keys. The segments cover all tokens.

    With cu_seqlens, `forward_cuda` calls `pyops.attention_varlen` once for all segments. `forward_native` calls
    PyTorch's attention once per segment, and reads the lengths on the host. max_seqlen is accepted because vLLM passes
    it. The layer is always on.

    Args:
        num_heads: query heads.
        head_size: elements of a head.
        scale: multiplies the logits; None for 1 / sqrt(head_size).
        num_kv_heads: key heads, and value heads, a divisor of num_heads; None for num_heads.
        prefix: the name of the layer in its model.
        multimodal_config: not read; vLLM had it before 0.16.

    Examples:
        >>> attention = MMEncoderAttention(num_heads=4, head_size=16)
        >>> query, key, value = torch.randn(3, 1, 10, 64)
        >>> attention(query, key, value).shape
        torch.Size([1, 10, 64])
        >>> cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)  # two images, of 4 and of 6 patches
        >>> attention(query, key, value, cu_seqlens).shape
        torch.Size([1, 10, 64])
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
        *,
        multimodal_config: object = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.prefix = num_heads, head_size, prefix
        self.scale = head_size**-0.5 if scale is None else scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(
                f"MMEncoderAttention: num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}"
            )
        self.num_queries_per_kv = num_heads // self.num_kv_heads

    @classmethod
    def enabled(cls) -> bool:
        return True

    def forward_native(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
    ) -> Tensor:
        q, k, v = self._heads(query, key, value, cu_seqlens)
        if cu_seqlens is None:
            return self._attend(q, k, v).view(query.shape)
        lengths = cu_seqlens.diff().tolist()
        segments = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
        return torch.cat([self._attend(*segment) for segment in segments], 1).view(query.shape)

    def forward_cuda(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
    ) -> Tensor:
        if cu_seqlens is None:
            return self.forward_native(query, key, value)
        q, k, v = (x[0] for x in self._heads(query, key, value, cu_seqlens))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attention_varlen(out, q, k, v, cu_seqlens, cu_seqlens, self.scale, causal=False)
        return out.view(query.shape)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
        """Query, key and value as [batch, seq_len, heads, head_size], checked."""
        heads = []
        for name, x, count in (
            ("query", query, self.num_heads),
            ("key", key, self.num_kv_heads),
            ("value", value, self.num_kv_heads),
        ):
            if x.ndim not in (3, 4) or x.shape[2:].numel() != count * self.head_size:
                raise ValueError(
                    f"MMEncoderAttention: {name}: expected [batch, seq_len] of {count} heads of {self.head_size}, got "
                    f"shape {tuple(x.shape)}"
                )
            heads.append(x.unflatten(2, (count, self.head_size)) if x.ndim == 3 else x)
        if cu_seqlens is not None and query.shape[0] != 1:
            raise ValueError(f"MMEncoderAttention: cu_seqlens: expected a batch of 1 with it, got {query.shape[0]}")
        return heads

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=self.num_queries_per_kv > 1)
        return out.transpose(1, 2).contiguous()
