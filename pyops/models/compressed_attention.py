"""Attention to a window of tokens and to compressed keys, over a paged cache (DeepSeek-V4)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..errors import ModelError
from ..ops.attention.mla_problem import ENTRY_SIZE, LATENT_SIZE, ROPE_SIZE
from ..ops.attention.mla_sparse import sparse_mla_attention
from ..ops.cache import concat_and_cache_mla, indexer_k_quant_and_cache
from ..ops.cache.deepseek_v4_rows import fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert
from ..ops.norm import rms_norm
from ..ops.rotary import rotary_embedding
from .batch import Batch
from .compressed import Compressed, Compression
from .compressor import Compressor
from .config import Config
from .indexer import SCALE_BYTES, best_keys
from .linear import Place, plain_weight
from .norm import Norm
from .rope import Rope

if TYPE_CHECKING:
    from torch import Tensor

_NOPE_SIZE = LATENT_SIZE - ROPE_SIZE  # elements of a head that are not rotated
_MIN_RATIO = 4  # smallest ratio of slots of tokens to slots of compressed keys that `token_size` assumes


class CompressedAttention:
    """Multi-query attention in which a key is also its value.

    A block of its cache has a slot for each token, then one for each compressed key that ends in the block, so that
    `sparse_mla_attention` reads both by one list of slots. That op takes entries of 576 elements; the last 64 are
    zeros here. A sequence also has states in a slot: the last tokens of windows that have not ended.

    Args:
        config: sizes and options of the model.
        sizes: sizes of this attention.
        compression: how keys are compressed; None if they are not.
        rope: the rotary embedding.
        at: dtype, device and quantization of the weights. Those of compressed keys are not quantised.
    """

    scales = None

    def __init__(
        self, config: Config, sizes: Compressed, compression: Compression | None, rope: Rope, at: Place
    ) -> None:
        heads, hidden_size, rank = config.num_attention_heads, config.hidden_size, sizes.q_lora_rank
        self.sizes, self.compression, self.rope, self.device = sizes, compression, rope, at.device
        self.num_heads, self.epsilon = heads, config.rms_norm_eps
        self.a = at.linear({"wq_a": rank, "wkv": LATENT_SIZE}, hidden_size, bias=False)
        self.q_norm, self.kv_norm = (Norm(config.norms, self.epsilon, at, size) for size in (rank, LATENT_SIZE))
        self.q = at.linear({"wq_b": heads * LATENT_SIZE}, rank, bias=False)
        self.o_columns = heads * LATENT_SIZE // sizes.groups
        self.o_a = at.linear({"wo_a": sizes.groups * sizes.o_lora_rank}, self.o_columns, bias=False)
        self.o = at.linear({"wo_b": hidden_size}, sizes.groups * sizes.o_lora_rank, bias=False)
        self.sinks = torch.empty(heads, dtype=torch.float32, device=at.device)
        self._one = torch.ones(1, dtype=torch.float32, device=at.device)  # the scale that a cache of floats ignores
        self.compressors: list[Compressor] = []
        self.index_q = None
        projected: dict[str, int] = {}
        if compression is not None:
            self.compressors.append(Compressor("compressor", compression, LATENT_SIZE, config, at))
            projected |= self.compressors[0].projected
        if compression is not None and compression.is_indexed:
            indexer = sizes.indexer
            self.compressors.append(Compressor("indexer.compressor", compression, indexer.head_dim, config, at))
            self.index_q = at.linear({"indexer.wq_b": indexer.num_heads * indexer.head_dim}, rank, bias=False)
            projected |= self.compressors[1].projected | {"indexer.weights_proj": indexer.num_heads}
        self.projection = at._replace(quantization=None).linear(projected, hidden_size, False) if projected else None
        self.slot_bytes = sum(one.slot_bytes for one in self.compressors)
        self.token_size = ENTRY_SIZE
        if compression is not None:  # an upper bound
            self.token_size += (ENTRY_SIZE + (sizes.indexer.head_dim + SCALE_BYTES)) // _MIN_RATIO

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        found = {"q_norm.weight": self.q_norm.weight, "kv_norm.weight": self.kv_norm.weight, "attn_sink": self.sinks}
        for part in (self.a, self.q, self.o_a, self.o, self.index_q, self.projection, *self.compressors):
            found |= {} if part is None else part.tensors()
        return found

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The entries in blocks; views of those of tokens and of compressed keys; states in slots; the keys of the
        indexer, quantised, in blocks."""
        device, compression = self.device, self.compression
        ratio = block_size if compression is None else compression.ratio
        keys = 0 if compression is None else -(-block_size // ratio)
        if compression is not None and (block_size % ratio if compression.is_indexed else block_size < _MIN_RATIO):
            expected = (
                f"a multiple of the {ratio} tokens of a compressed key" if compression.is_indexed else "4 or more"
            )
            raise ModelError("Engine", f"block_size: expected {expected}, got {block_size}")
        entries = torch.zeros(num_blocks, block_size + keys, ENTRY_SIZE, dtype=dtype, device=device)
        found = [entries, entries[:, :block_size], entries[:, block_size:]]
        found += [one.new_states(num_slots) for one in self.compressors]
        if self.index_q is not None:
            size = self.sizes.indexer.head_dim + SCALE_BYTES
            found.append(torch.empty(num_blocks, keys, size, dtype=torch.uint8, device=device))
        return tuple(found)

    def __call__(self, hidden: Tensor, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]) -> Tensor:
        table, entries = tables[self.rope], cache[0]
        q_c, kv = self.a(hidden).split([self.sizes.q_lora_rank, LATENT_SIZE], -1)
        self.q_norm(q_c)
        self.kv_norm(kv)
        query = self.q(q_c).unflatten(-1, (self.num_heads, LATENT_SIZE))
        zeros = batch.once("zeros", lambda: query.new_zeros(*query.shape[:2], ROPE_SIZE))
        self._insert(query, kv, cache[1], batch, table, zeros[:, 0])
        weights = self._compress(hidden, batch, cache, table, zeros[:, 0])
        slots, lengths = self._attended(q_c, weights, batch, cache, table)
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        sparse_mla_attention(out, lse, query, zeros, entries, slots, lengths, LATENT_SIZE**-0.5, 0)
        out.mul_(torch.sigmoid(lse - self.sinks).unsqueeze(-1))
        rotary_embedding(batch.positions, out, None, LATENT_SIZE, table, False, _NOPE_SIZE, True)
        grouped = out.view(len(out), self.sizes.groups, -1)
        values = query.new_empty(len(out), self.sizes.groups, self.sizes.o_lora_rank)
        values.transpose(0, 1).baddbmm_(grouped.transpose(0, 1), self._of_groups.transpose(1, 2), beta=0)
        return self.o(values.flatten(1))

    @cached_property
    def _of_groups(self) -> Tensor:
        """The output projection of each group of heads: [groups, o_lora_rank, heads of a group * 512]."""
        return plain_weight(self.o_a, self.o_columns, self.q_norm.weight).unflatten(0, (self.sizes.groups, -1))

    def _insert(self, query: Tensor, kv: Tensor, tokens: Tensor, batch: Batch, table: Tensor, zeros: Tensor) -> None:
        """Normalise and rotate the queries in place; rotate the keys, and write them to the slots of their tokens."""
        if query.element_size() == 2:
            fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
                *(query, kv, tokens[..., :LATENT_SIZE], batch.slot_mapping, batch.positions, table),
                *(self.epsilon, tokens.shape[1]),
            )
            return
        rms_norm(query, query, None, self.epsilon)
        rotary_embedding(batch.positions, query, kv, LATENT_SIZE, table, False, _NOPE_SIZE)
        concat_and_cache_mla(kv, zeros, tokens, batch.slot_mapping, "auto", self._one)

    def _compress(
        self, hidden: Tensor, batch: Batch, cache: tuple[Tensor, ...], table: Tensor, zeros: Tensor
    ) -> Tensor | None:
        """Compress the windows that end, and write their keys; returns the weights of the indexer's heads."""
        if self.projection is None or self.compression is None:
            return None
        projected = self.projection(hidden)
        sizes = [size for one in self.compressors for size in one.projected.values()]
        parts = projected.split([*sizes, projected.shape[1] - sum(sizes)], -1)
        ratio, block_size, block_keys = self.compression.ratio, cache[1].shape[1], cache[2].shape[1]
        ended = batch.once(("ended", ratio), lambda: _ended(batch, ratio, block_size, block_keys))
        keys = [
            one(parts[2 * i], parts[2 * i + 1], cache[3 + i], batch, table) for i, one in enumerate(self.compressors)
        ]
        concat_and_cache_mla(keys[0], zeros, cache[2], ended, "auto", self._one)
        if self.index_q is not None:
            indexer_k_quant_and_cache(keys[1], cache[-1], ended, keys[1].shape[1], "auto")
        return parts[-1]

    def _attended(
        self, q_c: Tensor, weights: Tensor | None, batch: Batch, cache: tuple[Tensor, ...], table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The slots that each token attends to, [num_tokens, n] int32 with -1 for none, and how many of them count."""
        block_size, page = cache[1].shape[1], cache[0].shape[1]
        window: Tensor = batch.once(("window", page), lambda: self._window(batch, block_size, page))
        if self.compression is None:
            return window, torch.full_like(batch.rows[1], window.shape[1])
        ratio = self.compression.ratio
        if self.index_q is not None and weights is not None:
            counts = batch.rows[1] // ratio
            at = self._chosen(q_c, weights, counts, batch, cache[-1], table)
            block_keys = page - block_size
            slots = batch.blocks_at(at.clamp(min=0) // block_keys) * page + block_size + at % block_keys
            slots = torch.where(at >= 0, slots, -1).int()
            return torch.cat((window, slots), 1), window.shape[1] + counts.clamp(max=at.shape[1])
        found: tuple[Tensor, Tensor] = batch.once(
            ("attended", ratio), lambda: _all_attended(batch, ratio, block_size, page, window)
        )
        return found

    def _window(self, batch: Batch, block_size: int, page: int) -> Tensor:
        """The slots of the last tokens up to each token."""
        before = torch.arange(-self.sizes.window, 0, dtype=torch.int64, device=batch.tokens.device)
        positions = batch.rows[1][:, None] + before
        slots = batch.blocks_at(positions.clamp(min=0) // block_size) * page + positions % block_size
        return torch.where(positions >= 0, slots, -1).int()

    def _chosen(
        self, q_c: Tensor, weights: Tensor, counts: Tensor, batch: Batch, keys: Tensor, table: Tensor
    ) -> Tensor:
        """The compressed keys with the highest logits: [num_tokens, top_k] int32, and -1 for none."""
        assert self.index_q is not None
        indexer = self.sizes.indexer
        heads, size = indexer.num_heads, indexer.head_dim
        query = self.index_q(q_c).unflatten(-1, (heads, size))
        rotary_embedding(batch.positions, query, None, size, table, False, size - ROPE_SIZE)
        return best_keys(query, weights.float() * (heads * size) ** -0.5, keys, batch, counts, indexer.top_k)


def _ended(batch: Batch, ratio: int, block_size: int, block_keys: int) -> Tensor:
    """The slot of the compressed key that each token ends, among those of compressed keys; -1 for none."""
    _, lengths = batch.rows
    last = (lengths - 1).clamp(min=0)
    slots = batch.blocks_at(last[:, None] // block_size)[:, 0] * block_keys + last % block_size // ratio
    return torch.where((lengths % ratio == 0) & (lengths > 0), slots, -1)


def _all_attended(batch: Batch, ratio: int, block_size: int, page: int, window: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of the window and of all compressed keys of each token's sequence, and how many of them count."""
    most = batch.block_tables.shape[1] * block_size // ratio
    ends = torch.arange(1, most + 1, dtype=torch.int64, device=window.device) * ratio - 1
    slots = batch.block_tables[:, ends // block_size] * page + block_size + ends % block_size // ratio
    sequence, lengths = batch.rows
    return torch.cat((window, slots[sequence].int()), 1), window.shape[1] + lengths // ratio
