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
_SCALE_BYTES = 4  # bytes of the scale of a key
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
        self.entry_bytes = size + _SCALE_BYTES

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
        quants, scales = per_token_group_quant_fp8(query.unflatten(-1, (heads, size)), size, dtype=torch.float8_e4m3fn)
        factor = (heads * size) ** -0.5
        weights = torch.nn.functional.linear(hidden.float(), self.weights) * scales[..., 0] * factor
        tables, lengths = _rows(batch)
        step = len(weights) if batch.num_decodes == len(weights) else _ROWS
        found = [
            self._slots(quants[i : i + step], weights[i : i + step], keys, tables[i : i + step], lengths[i : i + step])
            for i in range(0, len(weights), max(1, step))
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _slots(self, query: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        block_size = keys.shape[1]
        logits = torch.empty(len(query), tables.shape[1] * block_size, dtype=torch.float32, device=query.device)
        fp8_paged_mqa_logits(logits, query.unsqueeze(1), keys, weights, lengths, tables, False)
        top_k = min(self.sizes.top_k, logits.shape[1])
        at = top_k_per_row_decode.new(logits, 1, lengths, len(logits), *logits.stride(), top_k)
        blocks = tables.gather(1, (at.clamp(min=0) // block_size).long())
        return torch.where(at >= 0, blocks * block_size + at % block_size, -1).to(torch.int32)


def _rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """The block table of each query token, and the tokens up to it, itself included."""
    lengths = batch.seq_lens.to(torch.int32)
    num_tokens = len(batch.tokens)
    if batch.num_decodes == num_tokens:
        return batch.block_tables, lengths
    starts = batch.cu_seqlens_q.long()
    sequences = torch.arange(len(lengths), dtype=torch.int64, device=lengths.device)
    sequence = sequences.repeat_interleave(starts.diff(), output_size=num_tokens)
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=lengths.device)
    after = starts[1:][sequence] - tokens  # tokens of the sequence from this one to the last one
    return batch.block_tables[sequence], lengths[sequence] - after.int() + 1
