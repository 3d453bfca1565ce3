"""Multi-head latent attention over a paged latent KV cache."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..ops.cache import concat_and_cache_mla, mla_norm_rope_cache
from ..ops.norm import rms_norm
from ..tuning import batch_invariant
from .batch import Batch
from .config import Config
from .indexer import SparseIndexer
from .kv_cache import KvScales
from .latent import Latent
from .linear import Linear, Place, plain_weight
from .norm import Norm
from .rope import Rope

if TYPE_CHECKING:
    from torch import Tensor

_EPSILON = 1e-6  # epsilon of the norms of latent vectors; `rms_norm_eps` does not apply to them


class LatentAttention:
    """Multi-head latent attention. Its cache holds the latent vector and the rotated key of each token, in blocks.

    `latent_attention` projects the latent vectors to keys and values of heads for prefill, and absorbs the projections
    into queries and outputs for decode. If these projections are quantised, the first call dequantises them, and
    weights that are written later do not change them.

    Args:
        config: sizes and options of the model.
        latent: sizes and options of this attention.
        rope: the rotary embedding; None for none.
        place: dtype, device and quantization of the weights.
        shares: whether tokens attend to those that the indexer of an earlier layer has chosen.
    """

    slot_bytes = 0

    def __init__(self, config: Config, latent: Latent, rope: Rope | None, place: Place, shares: bool = False) -> None:
        heads, hidden_size, rank = config.num_attention_heads, config.hidden_size, latent.kv_lora_rank
        self.latent, self.num_heads, self.rope = latent, heads, rope
        self.entry_size = rank + latent.qk_rope_head_dim
        queries, compressed = heads * latent.qk_head_dim, {"kv_a_proj_with_mqa": self.entry_size}
        self.q_norm, self.q, self.q_rank = None, None, latent.q_lora_rank or 0
        if self.q_rank:  # one projection to the latent vectors of queries, and of keys and values
            compressed = {"q_a_proj": self.q_rank} | compressed
            self.q_norm = place.empty(self.q_rank)
            self.q = place.linear({"q_b_proj": queries}, self.q_rank, bias=False)
        elif config.qkv_bias or place.quantization is not None:  # one of both may have a bias or be quantised
            self.q = place.linear({"q_proj": queries}, hidden_size, bias=False)
        else:  # one projection to the queries, and to the latent vectors of keys and values
            compressed = {"q_proj": queries} | compressed
        self.a = place.linear(compressed, hidden_size, config.qkv_bias)
        self.kv_norm = place.empty(rank)
        self.kv_b = place.linear({"kv_b_proj": heads * (latent.qk_nope_head_dim + latent.v_head_dim)}, rank, bias=False)
        self.o = place.linear({"o_proj": hidden_size}, heads * latent.v_head_dim, config.o_bias)
        self.prefetched: Tensor | None = None  # rows that a later kernel reads, which the product with W_v prefetches
        self.scales = KvScales(("k_scale",), 1, place.device)
        self.token_size, self.indexer = self.entry_size, None
        if latent.indexer is not None and not shares:
            self.indexer = SparseIndexer(latent.indexer, hidden_size, self.q_rank, place.linear, self.kv_norm)
            self.token_size += self.indexer.entry_bytes  # an upper bound: the cache may have wider elements

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        found = {"kv_a_layernorm.weight": self.kv_norm} | self.kv_b.tensors()
        if self.q is not None:
            found |= self.q.tensors()
        if self.q_norm is not None:
            found["q_a_layernorm.weight"] = self.q_norm
        if self.indexer is not None:
            found |= self.indexer.tensors()
        return found | self.a.tensors() | self.o.tensors()

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The latent KV cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], and that of the indexer."""
        shape = num_blocks, block_size, self.entry_size
        entries = self.kv_norm.new_empty(shape, dtype=dtype)
        return (entries,) if self.indexer is None else (entries, self.indexer.new_cache(num_blocks, block_size))

    def __call__(self, hidden: Tensor, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]) -> Tensor:
        compressed = self.a(hidden)
        query = None if self.q is None or self.q_norm is not None else self.q(hidden)
        return self.o(self._attended(compressed, query, hidden, batch, cache, tables))

    @property
    def adds(self) -> bool:
        """Whether `add_to` serves these weights."""
        is_plain = isinstance(self.a, Linear) and isinstance(self.q, Linear | None) and self.latent.indexer is None
        return is_plain and isinstance(self.o, Linear) and self.o.bias is None

    def add_to(
        self, residual: Tensor, norm: Norm, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]
    ) -> Tensor:
        """``residual + self(norm.of(residual), ...)`` for one token: see `one_token`."""
        assert isinstance(self.a, Linear)
        assert isinstance(self.q, Linear | None)
        assert isinstance(self.o, Linear)
        compressed = self.a.of_norm(residual, *norm.terms)
        query = None if self.q is None or self.q_norm is not None else self.q.of_norm(residual, *norm.terms)
        return self.o.add_to(residual, self._attended(compressed, query, residual, batch, cache, tables))

    def _attended(
        self,
        compressed: Tensor,
        query: Tensor | None,
        hidden: Tensor,
        batch: Batch,
        cache: tuple[Tensor, ...],
        tables: dict[Rope, Tensor],
    ) -> Tensor:
        """The heads of the tokens after attention, [num_tokens, heads * v_head_dim]. Writes `cache`.

        Args:
            compressed: queries or their latent vectors, latent vectors of keys and values, and the key with RoPE, side
                by side; without the first where `query` is given.
            query: the queries.
            hidden: the hidden states, which the indexer needs.
        """
        from ..nn.latent import absorbed_attention, latent_attention  # imported late: pyops.nn needs torch at import

        latent, entries = self.latent, cache[0]
        q_size = compressed.shape[-1] - self.entry_size
        q_c, kv_c, k_pe = compressed.split([q_size, latent.kv_lora_rank, latent.qk_rope_head_dim], -1)
        if self.q is not None and self.q_norm is not None:
            rms_norm(q_c, q_c, self.q_norm, _EPSILON)
            query = self.q(q_c)
        query = (q_c if query is None else query).unflatten(-1, (self.num_heads, -1))
        # Early, because the first call may compute it, and no kernel just before may write constant weights.
        up = self._up.unflatten(0, (self.num_heads, -1))
        absorbed = None
        kv_cache_dtype, k_scale, _ = self.scales.arguments(entries.dtype)
        if self.rope is None:
            rms_norm(kv_c, kv_c, self.kv_norm, _EPSILON)
            concat_and_cache_mla(kv_c, k_pe, entries, batch.slot_mapping, kv_cache_dtype, k_scale)
        else:
            plain, turned = query.split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], -1)
            product: tuple[Tensor, ...] = ()
            if self._absorbs_in_insert(batch):
                absorbed = query.new_empty(self.num_heads, 1, latent.kv_lora_rank)
                product = absorbed, plain.transpose(0, 1), up[:, : latent.qk_nope_head_dim]
            mla_norm_rope_cache(
                *(batch.positions, turned, k_pe, kv_c, tables[self.rope], not latent.interleaved),
                *(batch.slot_mapping, entries, kv_cache_dtype, k_scale, self.kv_norm, _EPSILON),
                *product,
            )
            self.rope.scale_queries(query, batch.positions)
        texts, scales = (batch.block_tables, batch.seq_lens), (latent.scale, k_scale, self.scales.first)
        if self.indexer is not None and self.rope is not None:
            batch.shared["slots"] = self.indexer(hidden, q_c, batch, cache[1], tables[self.rope])
        if latent.indexer is not None:
            return absorbed_attention(query, up, entries, *texts, *scales, batch.shared["slots"])
        batches = batch.cu_seqlens_q, batch.num_decodes
        return latent_attention(
            query, up, entries, *texts, *batches, *scales, absorbed=absorbed, prefetched=self.prefetched
        )

    def _absorbs_in_insert(self, batch: Batch) -> bool:
        """Whether the insert of one token also multiplies its queries by the projections of keys."""
        is_step = batch.num_decodes == len(batch.tokens) == 1 and not batch_invariant()
        return is_step and self.latent.indexer is None and self.rope is not None and not self.rope.query_beta

    @cached_property
    def _up(self) -> Tensor:
        """W_k and W_v of each head: [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank], contiguous."""
        return plain_weight(self.kv_b, self.latent.kv_lora_rank, self.kv_norm).contiguous()
