"""Groups of arguments that the attention ops share.

A plan function takes a group as one argument. A value is a tensor in a reference and a `TensorArg` in a plan. Fields
have the names of the ops' arguments; the ops' docstrings explain them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


class Arguments:
    """A group of an op's arguments."""

    def named(self) -> dict[str, Any]:
        """The arguments by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV(Arguments):
    """A paged key-value cache, with block tables and sequence lengths."""

    key_cache: Any
    value_cache: Any
    num_kv_heads: int
    block_tables: Any
    seq_lens: Any
    block_size: int
    kv_cache_dtype: str
    k_scale: Any
    v_scale: Any


@dataclass(frozen=True, slots=True, eq=False)
class RaggedKV(Arguments):
    """Ragged keys and values without a cache: token rows of all sequences, concatenated."""

    key: Any
    value: Any
    cu_seqlens_k: Any


@dataclass(frozen=True, slots=True, eq=False)
class Options(Arguments):
    """Options that change the logits or the softmax denominator, and the log-sum-exp output."""

    alibi_slopes: Any = None
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    sinks: Any = None
    lse: Any = None


@dataclass(frozen=True, slots=True)
class Sparse(Arguments):
    """Block-sparse attention: the pages that a head attends to."""

    tp_rank: int = 0
    blocksparse_local_blocks: int = 0
    blocksparse_vert_stride: int = 0
    blocksparse_block_size: int = 64
    blocksparse_head_sliding_step: int = 0

    @property
    def on(self) -> bool:
        return self.blocksparse_vert_stride > 1

    def first_step(self, num_heads: int, num_kv_heads: int) -> int:
        """The sliding offset of the first head of this tensor-parallel rank, in the numbering of all ranks."""
        step = self.blocksparse_head_sliding_step
        return self.tp_rank * (num_heads * step if step >= 0 else num_kv_heads * -step)


@dataclass(frozen=True, slots=True, eq=False)
class Partials(Arguments):
    """The results of partitions, in memory that the caller provides."""

    exp_sums: Any
    max_logits: Any
    tmp_out: Any
