"""Token embedding and LM head, with the vocabulary divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from .custom_op import CustomOp
from .linear import new_parameter, refuse_quant_config
from .parallel import (
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]


@dataclass(frozen=True)
class VocabParallelEmbeddingShardIndices:
    """The tokens of one rank: a range of the original vocabulary and a range of added tokens; ends are exclusive.

    The ranges `padded_...` include the padding.
    """

    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int

    @property
    def num_org_elements_padded(self) -> int:
        return self.padded_org_vocab_end_index - self.padded_org_vocab_start_index


def _padded(size: int, to: int) -> int:
    return -(-size // to) * to


@CustomOp.register("vocab_parallel_embedding")
class VocabParallelEmbedding(CustomOp):
    """An embedding table. With several ranks, a token outside the vocabulary gives zeros.

    ``forward(input_)`` takes tokens of any shape, int32 or int64, and returns [*shape, embedding_dim]. The original and
    the added part of the vocabulary are each padded and each divided among the ranks. The parameter is `weight` [rows
    of this rank, embedding_dim]; its `weight_loader` takes the whole original vocabulary.

    Args:
        num_embeddings: tokens of the original and the added vocabulary.
        embedding_dim: elements of a row.
        params_dtype: dtype of the table; None for torch's default.
        org_num_embeddings: tokens of the original vocabulary; None for all.
        padding_size: both vocabularies are padded to a multiple of it.
        quant_config: None; tables are not quantised here.
        prefix: the name of the layer in its model.

    Examples:
        >>> embedding = VocabParallelEmbedding(1000, 64)
        >>> embedding.weight.shape  # padded to a multiple of 64
        torch.Size([1024, 64])
        >>> embedding.weight.weight_loader(embedding.weight, torch.randn(1000, 64))  # from a checkpoint
        >>> embedding(torch.tensor([1, 2, 3])).shape
        torch.Size([3, 64])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        refuse_quant_config(self, quant_config)
        self.tp_size = get_tensor_model_parallel_world_size()
        self.num_embeddings, self.embedding_dim, self.padding_size = num_embeddings, embedding_dim, padding_size
        self.org_vocab_size = org_num_embeddings or num_embeddings
        self.num_added_embeddings = num_embeddings - self.org_vocab_size
        if self.num_added_embeddings < 0:
            raise ValueError(
                f"{type(self).__name__}: org_num_embeddings: expected at most num_embeddings={num_embeddings}, got "
                f"{org_num_embeddings}"
            )
        self.org_vocab_size_padded = _padded(self.org_vocab_size, padding_size)
        self.num_embeddings_padded = _padded(self.org_vocab_size_padded + self.num_added_embeddings, padding_size)
        self.shard_indices = self._indices_of(get_tensor_model_parallel_rank())
        self.num_embeddings_per_partition = divide(
            type(self).__name__, "num_embeddings", self.num_embeddings_padded, self.tp_size
        )
        self.prefix = prefix
        shape = self.num_embeddings_per_partition, embedding_dim
        self.weight = new_parameter(shape, params_dtype, self.weight_loader)

    def _indices_of(self, rank: int) -> VocabParallelEmbeddingShardIndices:
        name, org, end = type(self).__name__, self.org_vocab_size, self.num_embeddings
        rows = divide(name, "org_num_embeddings", self.org_vocab_size_padded, self.tp_size)
        added_padded = self.num_embeddings_padded - self.org_vocab_size_padded
        added_rows = divide(name, "added embeddings", added_padded, self.tp_size)
        first, added = rank * rows, org + rank * added_rows
        padded = first, first + rows, added, added + added_rows
        real = (min(at, limit) for at, limit in zip(padded, (org, org, end, end), strict=True))
        return VocabParallelEmbeddingShardIndices(*padded, *real)

    def _token_rows(self) -> list[int]:
        """The row of each token in the concatenation of all ranks' tables."""
        tokens: dict[int, int] = {}
        for rank in range(self.tp_size):
            at, own = rank * self.num_embeddings_per_partition, self._indices_of(rank)
            for first, end, offset in (
                (own.org_vocab_start_index, own.org_vocab_end_index, 0),
                (own.added_vocab_start_index, own.added_vocab_end_index, own.num_org_elements_padded),
            ):
                tokens |= {token: at + offset + token - first for token in range(first, end)}
        return [tokens[token] for token in range(self.num_embeddings)]

    def get_sharded_to_full_mapping(self) -> list[int] | None:
        """Rows of all tokens in the concatenation of all ranks' tables, then rows of padding; None for one rank."""
        if self.tp_size < 2:
            return None
        rows = self._token_rows()
        return rows + sorted(set(range(self.num_embeddings_padded)) - set(rows))

    def weight_loader(self, param: Tensor, loaded_weight: Tensor) -> None:
        """Copy this rank's rows of the original vocabulary. Rows of added tokens and of padding become zeros."""
        if loaded_weight.shape[0] != self.org_vocab_size or loaded_weight.shape[1:] != param.shape[1:]:
            expected = (self.org_vocab_size, *param.shape[1:])
            raise ValueError(
                f"{type(self).__name__}: weight_loader: expected shape {expected}, got {tuple(loaded_weight.shape)}"
            )
        own = self.shard_indices
        part = loaded_weight[own.org_vocab_start_index : own.org_vocab_end_index]
        with torch.no_grad():
            param[: len(part)].copy_(part)
            param[len(part) :].zero_()

    def forward_native(self, input_: Tensor) -> Tensor:
        if self.tp_size == 1 and not self.num_added_embeddings:
            return functional.embedding(input_, self.weight)
        own = self.shard_indices
        is_org = (input_ >= own.org_vocab_start_index) & (input_ < own.org_vocab_end_index)
        is_added = (input_ >= own.added_vocab_start_index) & (input_ < own.added_vocab_end_index)
        row = torch.where(is_org, input_ - own.org_vocab_start_index, 0)
        added = input_ - own.added_vocab_start_index + own.num_org_elements_padded
        output = functional.embedding(torch.where(is_added, added, row), self.weight)
        return tensor_model_parallel_all_reduce(output.masked_fill(~(is_org | is_added)[..., None], 0.0))

    def extra_repr(self) -> str:
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, tp_size={self.tp_size}"


@CustomOp.register("parallel_lm_head")
class ParallelLMHead(VocabParallelEmbedding):
    """The weight that projects hidden states to logits, in the layout of `VocabParallelEmbedding`.

    This layer is not called; `LogitsProcessor` computes ``hidden_states W^T + b`` with its parameters: `weight` and,
    with `bias` True, `bias` [rows of this rank].

    Examples:
        >>> head = ParallelLMHead(1000, 64)
        >>> head.weight.weight_loader(head.weight, torch.randn(1000, 64))  # from a checkpoint
        >>> LogitsProcessor(1000)(head, torch.randn(3, 64)).shape
        torch.Size([3, 1000])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix
        )
        shape = (self.num_embeddings_per_partition,)
        self.register_parameter("bias", new_parameter(shape, params_dtype, self.weight_loader) if bias else None)
        # Each rank has original tokens, then added ones, so concatenated rows are in token order only without added
        # ones.
        rows = torch.tensor(self._token_rows(), dtype=torch.int64) if self.num_added_embeddings else None
        self.register_buffer("token_rows", rows, persistent=False)

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> ParallelLMHead:
        """Share the weight of `embed_tokens`. Returns this layer."""
        if embed_tokens.weight.shape != self.weight.shape:
            raise ValueError(
                f"ParallelLMHead: embed_tokens: expected a weight of shape {tuple(self.weight.shape)}, "
                f"got {tuple(embed_tokens.weight.shape)}"
            )
        self.weight = embed_tokens.weight
        return self

    def forward(self, input_: Any) -> Any:
        raise RuntimeError("ParallelLMHead: is not called; LogitsProcessor computes logits with its weight")
