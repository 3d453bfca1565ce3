"""A model with its cache: parts of sequences in, logits out; decode steps replay a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from .._core.system.lazy import torch
from .batch import Batch
from .config import Config
from .decoder import Decoder
from .drawing import TABLE_SIZE, Draw, Kind, choose, fill, kind_of

if TYPE_CHECKING:
    from torch import Tensor

# Columns of a sequence's row in the input of a decode step. The block table follows them in the row. _SOURCE is the
# index of the token in all inputs: that of _TOKEN, or that of the token which the last step chose.
_TOKEN, _SOURCE, _POSITION, _SLOT, _LENGTH, _STATE, _BLOCKS = range(7)
_PADDING = 0, 0, 0, -1, 0, -1  # a padding row has length 0; its slots of -1 keep its token out of the cache


class Part(NamedTuple):
    """Tokens of a sequence to compute, and the cache blocks and slot of the sequence.

    Attributes:
        tokens: the tokens to compute.
        start: the position of the first of these tokens in the sequence.
        blocks: all blocks of the sequence, in order.
        slot: slot of the states after the tokens before `start`; -1 if the model has no states.
        is_long: whether the sequence has more tokens than `Config.max_short_length`. When it grows beyond that, all of
            its tokens are recomputed.
        source: the row of the last step which chose the token of a decode, before the host has read it; `tokens` is
            then a placeholder. -1 if `tokens` are known.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    slot: int = -1
    is_long: bool = False
    source: int = -1

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


def decode_batch(rows: Tensor, starts: Tensor, has_states: bool, inputs: Tensor) -> Batch:
    """The batch of a decode step with one row for each sequence.

    Args:
        rows: as `Runner` has them.
        starts: 0, 1, 2, ... as an int64 tensor of one element more than rows, or longer.
        has_states: whether the model reads slots of states.
        inputs: the tensor that sources of tokens index.
    """
    return Batch(
        tokens=inputs.gather(0, rows[:, _SOURCE]),  # index_select reads up to 16 tokens one after another
        positions=rows[:, _POSITION],
        slot_mapping=rows[:, _SLOT],
        block_tables=rows[:, _BLOCKS:],
        seq_lens=rows[:, _LENGTH],
        cu_seqlens_q=starts[: len(rows) + 1],
        state_slots=rows[:, _STATE].int() if has_states else rows[:, _STATE],
        has_states=None,
        num_decodes=len(rows),
    )


class _HostInputs:
    """The inputs of a decode step on the host, and the tokens that it chose.

    Args:
        size: elements of the inputs.
        max_num_seqs, first_row, columns: rows of sequences, the index of the first, and their size.
        device: of the model; copies from and to a GPU are asynchronous.

    Attributes:
        tensor, inputs, rows: the inputs as a tensor, as a numpy array, and the rows of the latter.
    """

    def __init__(self, size: int, max_num_seqs: int, first_row: int, columns: int, device: Any) -> None:
        self._device, on_gpu = device, device.type == "cuda"
        self.tensor = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.inputs = self.tensor.numpy()
        self.rows = self.inputs[first_row:].reshape(-1, columns)
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None
        self._blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]  # the block table of each row

    def write_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """Write the block table of each row that has changed."""
        for i, blocks in enumerate(tables):
            if self._blocks[i] != blocks:
                self._blocks[i] = list(blocks)
                self.rows[i, _BLOCKS : _BLOCKS + len(blocks)] = blocks

    def read(self, tokens: Tensor) -> None:
        """Begin to copy the chosen tokens from the device."""
        self._tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        self.wait_later()

    def wait_later(self) -> None:
        """Let `wait` wait for what the device has to do so far."""
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until the device has done its copies from and to this memory."""
        if self._done is not None:
            self._done.synchronize()

    def tokens_of(self, count: int) -> list[int]:
        """Wait for the first `count` tokens that were chosen."""
        self.wait()
        found: list[int] = self._tokens[:count].tolist()
        return found


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
        self._graphs: dict[tuple[int, Kind | None], tuple[Any, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None
        # The inputs of a decode step: the tokens that the last step chose, then what a single copy writes, parameters
        # of the choice and a row for each sequence. The host has two of all, because it prepares a step while the
        # copies of the previous one may still be running.
        columns, table_end = row_size(model.config, max_seq_len, block_size), (1 + TABLE_SIZE) * max_num_seqs
        self._table, self._first_row = slice(max_num_seqs, table_end), table_end
        size = table_end + max_num_seqs * columns
        self._inputs = torch.zeros(size, dtype=torch.int64, device=model.device)
        self._tokens, self._rows = self._inputs[:max_num_seqs], self._inputs[table_end:].view(-1, columns)
        self._hosts = [_HostInputs(size, max_num_seqs, table_end, columns, model.device) for _ in range(2)]
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

    def choose(self, parts: Sequence[Part], draws: Sequence[Draw]) -> Callable[[], list[int]]:
        """Compute decodes and choose their next tokens, without waiting for the device.

        Returns:
            A function that waits and returns the token of each part; to be called before the second call of `choose`
            after this one.
        """
        host, size = self._prepared(parts), decode_size(len(parts), len(self._rows))
        fill(host.inputs[self._table], draws)
        self._copy(host, size)
        self.step(size, kind_of(draws))
        host.read(self._tokens[:size])
        return partial(host.tokens_of, len(parts))

    def _decode(self, parts: Sequence[Part]) -> Tensor:
        host, size = self._prepared(parts), decode_size(len(parts), len(self._rows))
        self._copy(host, size)
        host.wait_later()
        return self.step(size)[: len(parts)]

    def _prepared(self, parts: Sequence[Part]) -> _HostInputs:
        """The inputs of decodes, on the host."""
        self._hosts.reverse()
        host, count = self._hosts[0], len(parts)
        host.wait()
        rows, size = host.rows, decode_size(count, len(host.rows))
        host.write_blocks([part.blocks for part in parts])
        firsts = self._first_row + rows.shape[1] * numpy.arange(count) + _TOKEN
        sources, starts = (
            numpy.array(values) for values in zip(*((one.source, one.start) for one in parts), strict=True)
        )
        rows[:count, _TOKEN] = [part.tokens[0] for part in parts]
        rows[:count, _SOURCE] = numpy.where(sources < 0, firsts, sources)
        rows[:count, _POSITION] = starts + self._long_rows * numpy.array([part.is_long for part in parts])
        rows[:count, _SLOT] = self._slots(rows[:, _BLOCKS:], numpy.arange(count), starts)
        rows[:count, _LENGTH] = starts + 1
        rows[:count, _STATE] = [part.slot for part in parts]
        rows[count:size, :_BLOCKS] = _PADDING
        return host

    def _copy(self, host: _HostInputs, size: int) -> None:
        """Copy the table and the first `size` rows to the device."""
        copied = slice(self._table.start, self._first_row + size * self._rows.shape[1])
        self._inputs[copied].copy_(host.tensor[copied], non_blocking=True)

    def step(self, size: int, kind: Kind | None = None) -> Tensor:
        """The logits of the first `size` rows, and their tokens if a `kind` says how they are chosen; with graphs, by
        replaying the graph for both."""
        if not self._use_graphs:
            return self._forward(size, kind)
        if (size, kind) not in self._graphs:
            self._load_kernels(size, kind)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self.model.device), torch.cuda.graph(graph, pool=self._pool):
                logits = self._forward(size, kind)
            self._graphs[size, kind] = graph, logits
        graph, logits = self._graphs[size, kind]
        graph.replay()
        return logits

    def _load_kernels(self, size: int, kind: Kind | None) -> None:
        """Run a step over padding rows before capture, so that torch's matmuls create their workspaces.

        With the step's own rows, this run and the replay would each advance the states by the same token.
        """
        inputs = self._inputs.clone()
        self._rows[:size, :_BLOCKS] = torch.tensor(_PADDING, dtype=torch.int64, device=self.model.device)
        self._forward(size, kind)
        self._inputs.copy_(inputs)

    def _forward(self, size: int, kind: Kind | None) -> Tensor:
        batch = decode_batch(self._rows[:size], self._starts, self.model.slot_bytes > 0, self._inputs)
        logits = self.model.step(batch, self.cache, self._tables)
        if kind is not None:
            choose(self._tokens[:size], logits, self._inputs[self._table], kind)
        return logits

    def _slots(self, tables: Any, sequences: Any, positions: Any) -> Any:
        """The cache slots of tokens, from each token's row in `tables` and its position; all are numpy arrays."""
        if not tables.shape[1]:  # the model has no attention
            return numpy.full(len(positions), -1)
        return tables[sequences, positions // self.block_size] * self.block_size + positions % self.block_size

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(numpy.asarray(values), dtype=torch.int64, device=self.model.device)
