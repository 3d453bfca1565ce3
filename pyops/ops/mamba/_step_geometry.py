"""The geometry of selective_state_update.cu, the decode step of a state-space model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ... import tuning

if TYPE_CHECKING:
    from ..._core.system.device import Device
    from ..._core.tensors.dtypes import DType

_MAX_LANES = 32  # most lanes that share a row
# Chosen by counting bytes in flight and registers. No other size timed on an H200 was more than 3 % faster.
_NUM_THREADS, _MIN_BLOCKS = 128, 5
_MAX_RATES = 16  # most elements of A that a thread holds, if A has one per state
_WAVE = 3  # blocks per SM above which a thread gets more rows
_MAX_HELD_BYTES, _MAX_ITEMS = 64, 4  # per thread: most bytes of states in registers, most (row, sequence) pairs


class StepProblem(NamedTuple):
    """The input of `choose`: sequences, heads, rows of a head, states of a row, and elements of an access.

    `tied`: A has one number for all states of a row. `has_starts`: sequences may have several tokens (cu_seqlens).
    """

    batch: int
    heads: int
    head_size: int
    state_size: int
    dtype: DType
    vec_size: int
    tied: bool
    has_starts: bool

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return min(_MAX_LANES, tuning.power_of_two(-(-self.state_size // self.vec_size)))

    def bucket(self) -> str:
        rows = f"{self.heads}x{self.head_size}x{self.state_size}"
        kinds = f"{self.dtype.name} vec_size={self.vec_size} tied={self.tied} has_starts={self.has_starts}"
        return f"batch={tuning.power_of_two(self.batch)} {rows} {kinds}"


@dataclass(frozen=True)
class StepConfig:
    """The geometry of selective_state_update.cu.

    Attributes:
        rows: rows per thread.
        sequences: sequences per thread, which processes these rows for each of them and loads A once.
        num_threads: threads of a block.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
    """

    rows: int = 1
    sequences: int = 1
    num_threads: int = _NUM_THREADS
    min_blocks: int = _MIN_BLOCKS

    @property
    def items(self) -> int:
        """(row, sequence) pairs of a thread."""
        return self.rows * self.sequences

    def head_blocks(self, problem: StepProblem) -> int:
        """Blocks for the rows of a head."""
        return -(-problem.head_size // (self.num_threads // problem.lanes * self.rows))

    def num_blocks(self, problem: StepProblem) -> int:
        return -(-problem.batch // self.sequences) * problem.heads * self.head_blocks(problem)

    def candidates(self, problem: StepProblem, device: Device) -> list[StepConfig]:
        """Other rows and sequences per thread, block sizes and register bounds."""
        sizes = [tuning.resized(self, size) for size in tuning.beside(self.num_threads, 64, 256)]
        items = _max_items(problem)
        sequences = 1 if problem.has_starts else items // self.rows
        return sizes + tuning.varied(
            self,
            rows=tuning.beside(self.rows, 1, items // self.sequences),
            sequences=tuning.beside(self.sequences, 1, sequences),
            min_blocks=tuning.beside(self.min_blocks, 2, 8),
        )


def _max_items(problem: StepProblem) -> int:
    """Most (row, sequence) pairs with states that fit into the registers of a thread."""
    return max(1, min(_MAX_ITEMS, _MAX_HELD_BYTES // (_row_states(problem) * problem.dtype.itemsize)))


def _row_states(problem: StepProblem) -> int:
    """States of a row per thread."""
    return problem.vec_size * -(-problem.state_size // (problem.vec_size * problem.lanes))


def choose(problem: StepProblem, device: Device) -> StepConfig:
    """Two rows per thread, so that their loads overlap; more, until all blocks are one wave or registers are full.

    Measured on an H200 for 1 to 256 sequences of 8192 rows of 16 states, and of 80 heads of 64 rows of 128 states: one
    sequence per thread was fastest, and with untied A more than 16 elements of A per thread were slower.
    """
    max_rows = _max_items(problem)
    if not problem.tied:  # with several tokens a thread also prefetches the next one, and spills sooner
        rates = _MAX_RATES // 2 if problem.has_starts else _MAX_RATES
        max_rows = max(1, min(max_rows, rates // _row_states(problem)))
    config = StepConfig(rows=min(2, max_rows))
    while config.rows < max_rows and config.num_blocks(problem) > _WAVE * device.num_sms:
        config = replace(config, rows=2 * config.rows)
    return config
