"""A model with its cache: parts of sequences in, logits out; decode steps replay a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from .._core.system.lazy import torch
from .batch import Batch
from .config import Config
from .decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

# Columns of a sequence's row in the input of a decode step. The block table follows them in the row.
_TOKEN, _POSITION, _SLOT, _LENGTH, _STATE, _BLOCKS = range(6)
_PADDING = 0, 0, -1, 0, -1  # a padding row has length 0; its slots of -1 keep its token out of the cache


class Part(NamedTuple):
    """Tokens of a sequence to compute, and the cache blocks and slot of the sequence.

    Attributes:
        tokens: the tokens to compute.
        start: the position of the first of these tokens in the sequence.
        blocks: all blocks of the sequence, in order.
        slot: slot of the states after the tokens before `start`; -1 if the model has no states.
        is_long: whether the sequence has more tokens than `Config.max_short_length`. When it grows beyond that, all of
            its tokens are recomputed.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    slot: int = -1
    is_long: bool = False

    @property
    def is_step(self) -> bool:
        """Whether this is a decode: one token, and the cache holds the tokens before it."""
        return len(self.tokens) == 1 and self.start > 0


def blocks_for(config: Config, num_tokens: int, block_size: int) -> int:
    """Blocks that the first `num_tokens` tokens of a sequence fill; 0 if no layer is attention."""
    return -(-num_tokens // block_size) if config.has_attention else 0


def row_size(config: Config, max_seq_len: int, block_size: int) -> int:
    """Columns of a row in the input of a decode step."""
    return _BLOCKS + blocks_for(config, max_seq_len, block_size)


def default_max_seq_len(config: Config) -> int:
    """The default max_seq_len: 4096, or the model's ``max_position_embeddings`` if that is less."""
    return min(4096, config.max_position_embeddings)


def decode_size(num_seqs: int, max_num_seqs: int) -> int:
    """The padded batch size of a decode step with `num_seqs` sequences: a power of two, or `max_num_seqs`."""
    return min(1 << (num_seqs - 1).bit_length(), max_num_seqs)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """All padded batch sizes of decode steps with up to `max_num_seqs` sequences."""
    return sorted({decode_size(count, max_num_seqs) for count in range(1, max_num_seqs + 1)})


def decode_batch(rows: Tensor, starts: Tensor, has_states: bool) -> Batch:
    """The batch of a decode step with one row for each sequence.

    Args:
        rows: as `Runner` has them.
        starts: 0, 1, 2, ... as an int64 tensor of one element more than rows, or longer.
        has_states: whether the model reads slots of states.
    """
    return Batch(
        tokens=rows[:, _TOKEN],
        positions=rows[:, _POSITION],
        slot_mapping=rows[:, _SLOT],
        block_tables=rows[:, _BLOCKS:],
        seq_lens=rows[:, _LENGTH],
        cu_seqlens_q=starts[: len(rows) + 1],
        state_slots=rows[:, _STATE].int() if has_states else rows[:, _STATE],
        has_states=None,
        num_decodes=len(rows),
    )


class Runner:
    """Runs `model` over a paged cache of ``num_blocks * block_size`` tokens, and states of `max_num_seqs` sequences.

    Decode steps, with one token for each sequence, are padded to a power of two sequences, so that few CUDA graphs
    suffice. Each graph is captured when it is first needed. A padding row has length 0 and slots of -1, so that it
    neither reads nor writes the cache.

    Args:
        model: a model with its weights set.
        num_blocks, block_size: blocks of the cache, and tokens of a block.
        max_num_seqs: sequences of one step, at most.
        max_seq_len: tokens of a sequence, at most.
        graphs: whether decode steps are captured; None to capture if the model is on a GPU.
        kv_cache_dtype: as in `Engine`.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_seq_len: int,
        graphs: bool | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.model, self.block_size = model, block_size
        self._long_rows = max_seq_len  # first row for long sequences in the cos/sin tables
        self.cache = model.new_cache(num_blocks, block_size, max_num_seqs, kv_cache_dtype)
        self._tables = model.new_tables(max_seq_len)
        on_gpu = model.device.type == "cuda"
        self._use_graphs = on_gpu if graphs is None else graphs
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None
        # The inputs of a decode step, one row per sequence, in one tensor: a single copy updates the graphs' inputs.
        shape = (max_num_seqs, row_size(model.config, max_seq_len, block_size))
        self._host_rows = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._rows = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int64, device=model.device)

    def run(self, parts: Sequence[Part]) -> Tensor:
        """Compute `parts` and add them to the cache; returns the logits after each, [len(parts), vocab_size].

        Decodes should come before other parts. The next call overwrites the logits.
        """
        return self._decode(parts) if all(part.is_step for part in parts) else self._mixed(parts)

    def _mixed(self, parts: Sequence[Part]) -> Tensor:
        ends = numpy.cumsum([len(part.tokens) for part in parts])
        return self.model.logits(self.hidden(parts)[self._tensor(ends - 1)])

    def hidden(self, parts: Sequence[Part]) -> Tensor:
        """Compute `parts`, as `run` does, without a graph; returns the hidden states of all of their tokens."""
        counts = numpy.array([len(part.tokens) for part in parts])
        firsts = numpy.array([part.start for part in parts])
        ends = counts.cumsum()
        tables = numpy.full((len(parts), max(len(part.blocks) for part in parts)), -1)
        for table, part in zip(tables, parts, strict=True):
            table[: len(part.blocks)] = part.blocks
        positions = numpy.arange(ends[-1]) + numpy.repeat(firsts - (ends - counts), counts)
        slots = self._slots(tables, numpy.repeat(numpy.arange(len(parts)), counts), positions)
        rows = positions + numpy.repeat([self._long_rows * part.is_long for part in parts], counts)
        batch = Batch(
            tokens=self._tensor([token for part in parts for token in part.tokens]),
            positions=self._tensor(rows),
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor(tables),
            seq_lens=self._tensor(firsts + counts),
            cu_seqlens_q=self._tensor([0, *ends]),
            state_slots=self._tensor([part.slot for part in parts]).int(),
            has_states=torch.as_tensor(firsts > 0, device=self.model.device),
            num_decodes=sum(1 for _ in takewhile(lambda part: part.is_step, parts)),
        )
        return self.model.forward(batch, self.cache, self._tables)

    def _decode(self, parts: Sequence[Part]) -> Tensor:
        count = len(parts)
        size = decode_size(count, self._rows.shape[0])
        rows = self._host_rows.numpy()
        for row, part in zip(rows, parts, strict=False):
            row[_TOKEN], row[_POSITION], row[_LENGTH] = part.tokens[0], part.start, part.start + 1
            row[_STATE] = part.slot
            row[_BLOCKS : _BLOCKS + len(part.blocks)] = part.blocks
        rows[:count, _SLOT] = self._slots(rows[:, _BLOCKS:], numpy.arange(count), rows[:count, _POSITION])
        rows[:count, _POSITION] += [self._long_rows * part.is_long for part in parts]
        rows[count:size, :_BLOCKS] = _PADDING
        self._rows[:size].copy_(self._host_rows[:size])
        return self.step(size)[:count]

    def step(self, size: int) -> Tensor:
        """The logits of the first `size` rows; with graphs, by replaying the graph for this size."""
        if not self._use_graphs:
            return self._forward(size)
        if size not in self._graphs:
            self._load_kernels(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self.model.device), torch.cuda.graph(graph, pool=self._pool):
                logits = self._forward(size)
            self._graphs[size] = graph, logits
        graph, logits = self._graphs[size]
        graph.replay()
        return logits

    def _load_kernels(self, size: int) -> None:
        """Run a step over padding rows before capture, so that torch's matmuls create their workspaces.

        With the step's own rows, this run and the replay would each advance the states by the same token.
        """
        rows = self._rows[:size].clone()
        self._rows[:size, :_BLOCKS] = torch.tensor(_PADDING, dtype=torch.int64, device=self.model.device)
        self._forward(size)
        self._rows[:size] = rows

    def _forward(self, size: int) -> Tensor:
        batch = decode_batch(self._rows[:size], self._starts, self.model.slot_bytes > 0)
        return self.model.logits(self.model.forward(batch, self.cache, self._tables))

    def _slots(self, tables: Any, sequences: Any, positions: Any) -> Any:
        """The cache slots of tokens, from each token's row in `tables` and its position; all are numpy arrays."""
        if not tables.shape[1]:  # the model has no attention
            return numpy.full(len(positions), -1)
        return tables[sequences, positions // self.block_size] * self.block_size + positions % self.block_size

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(numpy.asarray(values), dtype=torch.int64, device=self.model.device)
