"""The lightning indexer of DeepSeek sparse attention: the slots that each query token attends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..ops.attention.mqa_logits import fp8_paged_mqa_logits
from ..ops.cache.indexer import indexer_k_quant_and_cache
from ..ops.norm import layer_norm
from ..ops.quantize.scaled import per_token_group_quant_fp8
from ..ops.rotary import rotary_embedding
from ..ops.sampling.top_k import top_k_per_row_decode
from .batch import Batch
from .gguf_linear import GgufLinear
from .latent import Indexer
from .linear import Linear, ScaledLinear
from .packed_linear import PackedLinear

if TYPE_CHECKING:
    from torch import Tensor

Projection = Linear | ScaledLinear | PackedLinear | GgufLinear
_EPSILON = 1e-6  # epsilon of the norm of keys
SCALE_BYTES = 4  # bytes of the scale of a key
_ROWS = 256  # query tokens of prompts with logits at a time: 164 MiB for contexts of 163840 tokens


class SparseIndexer:
    """The indexer. Its cache holds an fp8 key and its scale for each token, in blocks (`indexer_k_quant_and_cache`).

    Tensors have no name of a layer that tensor parallelism divides: every process has all heads.

    Args:
        indexer: sizes.
        hidden_size, q_rank: elements of a hidden state, and of the latent vector of queries.
        project: makes a projection, as `LatentAttention` makes its own.
        like: a tensor of the dtype and device of the weights.
    """

    def __init__(
        self, indexer: Indexer, hidden_size: int, q_rank: int, project: Callable[..., Projection], like: Tensor
    ) -> None:
        self.sizes, self.device = indexer, like.device
        heads, size = indexer.num_heads, indexer.head_dim
        self.q = project({"indexer.wq_b": heads * size}, q_rank, bias=False)
        self.k = project({"indexer.wk": size}, hidden_size, bias=False)
        self.norm, self.norm_bias = like.new_empty(size), like.new_empty(size)
        self.weights = torch.empty(heads, hidden_size, dtype=torch.float32, device=like.device)
        self.entry_bytes = size + SCALE_BYTES

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        names = {"weights_proj.weight": self.weights, "k_norm.weight": self.norm, "k_norm.bias": self.norm_bias}
        return {f"indexer.{name}": tensor for name, tensor in names.items()} | self.q.tensors() | self.k.tensors()

    def new_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """The cache of keys: [num_blocks, block_size, head_dim + 4] uint8."""
        return torch.empty(num_blocks, block_size, self.entry_bytes, dtype=torch.uint8, device=self.device)

    def __call__(self, hidden: Tensor, q_latent: Tensor, batch: Batch, keys: Tensor, table: Tensor) -> Tensor:
        """[num_tokens, top_k] int32: the slots of the tokens with the highest logits, and -1 for none.

        Args:
            hidden: [num_tokens, hidden_size].
            q_latent: [num_tokens, q_rank], the latent vectors of queries, normalised.
            keys: the cache of keys, to which those of the batch are added.
            table: cosines and sines of the rotary embedding.
        """
        heads, size = self.sizes.num_heads, self.sizes.head_dim
        query, key = self.q(q_latent), self.k(hidden)
        layer_norm(key, key, self.norm, self.norm_bias, _EPSILON)
        rotary_embedding(batch.positions, query, key, size, table, not self.sizes.interleaved)
        indexer_k_quant_and_cache(key, keys, batch.slot_mapping, size, "auto")
        factor = (heads * size) ** -0.5
        weights = torch.nn.functional.linear(hidden.float(), self.weights) * factor
        at = best_keys(query.unflatten(-1, (heads, size)), weights, keys, batch, batch.rows[1], self.sizes.top_k)
        block_size = keys.shape[1]
        slots = batch.blocks_at(at.clamp(min=0) // block_size) * block_size + at % block_size
        return torch.where(at >= 0, slots, -1).to(torch.int32)


def best_keys(query: Tensor, weights: Tensor, keys: Tensor, batch: Batch, lengths: Tensor, top_k: int) -> Tensor:
    """The numbers of the keys with the highest logits, in their sequences: [num_tokens, top_k] int32, -1 for none.

    Args:
        query: [num_tokens, num_heads, head_dim], which becomes fp8 with a scale for each head.
        weights: [num_tokens, num_heads] float32, of the heads.
        keys: [num_blocks, keys of a block, head_dim + 4] uint8 (`indexer_k_quant_and_cache`).
        lengths: [num_tokens] integers: the keys of each token, the first ones of its sequence.
    """
    quants, scales = per_token_group_quant_fp8(query, query.shape[2], dtype=torch.float8_e4m3fn)
    weights, lengths = weights * scales[..., 0], lengths.to(torch.int32)
    is_decode = batch.num_decodes == len(weights)
    step = max(1, len(weights) if is_decode else _ROWS)
    capacity, found = batch.block_tables.shape[1] * keys.shape[1], list["Tensor"]()
    for i in range(0, len(weights), step):
        some = slice(i, i + step)
        tables = batch.block_tables if is_decode else batch.block_tables[batch.rows[0][some]]
        logits = torch.empty(len(tables), capacity, dtype=torch.float32, device=keys.device)
        fp8_paged_mqa_logits(logits, quants[some].unsqueeze(1), keys, weights[some], lengths[some], tables, False)
        shape = len(logits), *logits.stride(), min(top_k, capacity)
        found.append(top_k_per_row_decode.new(logits, 1, lengths[some], *shape))
    return found[0] if len(found) == 1 else torch.cat(found)
