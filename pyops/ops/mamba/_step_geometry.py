"""The geometry of a step of a state-space model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ..._core import tuning

if TYPE_CHECKING:
    from ..._core.device import Device
    from ..._core.dtypes import DType

_MAX_LANES = 32  # that share a row
# By count of bytes in flight and of registers. Of the sizes that were timed on an H200 none gained more than 3 %.
_NUM_THREADS, _MIN_BLOCKS = 128, 5
_MAX_RATES = 16  # elements of A that a thread holds, where A has one for each state
_WAVE = 3  # blocks per SM, at most, before a thread has more rows
_MAX_HELD_BYTES, _MAX_ITEMS = 64, 4  # of states that a thread holds, and rows of all its sequences


class StepProblem(NamedTuple):
    """What the geometry depends on: sequences, heads, their rows, and how the states of a row are read.

    `tied` says that A has one number for all states of a row, `has_starts` that sequences have several tokens.
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
        """That share a row."""
        return min(_MAX_LANES, tuning.power_of_two(-(-self.state_size // self.vec_size)))

    def bucket(self) -> str:
        rows = f"{self.heads}x{self.head_size}x{self.state_size}"
        kinds = f"{self.dtype.name} vec_size={self.vec_size} tied={self.tied} has_starts={self.has_starts}"
        return f"batch={tuning.power_of_two(self.batch)} {rows} {kinds}"


@dataclass(frozen=True)
class StepConfig:
    """The geometry of selective_state_update.cu.

    Attributes:
        rows: of a thread.
        sequences: for each of which a thread works on these rows; they share what is loaded of A.
        num_threads: threads of a block.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
    """

    rows: int = 1
    sequences: int = 1
    num_threads: int = _NUM_THREADS
    min_blocks: int = _MIN_BLOCKS

    @property
    def items(self) -> int:
        """Rows of all sequences that a thread works on."""
        return self.rows * self.sequences

    def head_blocks(self, problem: StepProblem) -> int:
        """Blocks for the rows of a head."""
        return -(-problem.head_size // (self.num_threads // problem.lanes * self.rows))

    def num_blocks(self, problem: StepProblem) -> int:
        return -(-problem.batch // self.sequences) * problem.heads * self.head_blocks(problem)

    def candidates(self, problem: StepProblem, device: Device) -> list[StepConfig]:
        """Other rows and sequences of a thread, sizes of a block, and bounds of registers."""
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
    """Items of a thread with states that fit into its registers."""
    return max(1, min(_MAX_ITEMS, _MAX_HELD_BYTES // (_row_states(problem) * problem.dtype.itemsize)))


def _row_states(problem: StepProblem) -> int:
    """States of a row in a thread."""
    return problem.vec_size * -(-problem.state_size // (problem.vec_size * problem.lanes))


def choose(problem: StepProblem, device: Device) -> StepConfig:
    """Two rows, whose loads overlap, or as many as let all blocks run at once; where none do, as registers hold.

    Measured on an H200 for 1 to 256 sequences of 8192 rows of 16 states and of 80 heads of 64 rows of 128: no number of
    sequences that share A was faster than one, and untied rows of more than 16 elements of A in a thread lost.
    """
    max_rows = _max_items(problem)
    if not problem.tied:  # with several tokens a thread also holds those ahead, and spills sooner
        rates = _MAX_RATES // 2 if problem.has_starts else _MAX_RATES
        max_rows = max(1, min(max_rows, rates // _row_states(problem)))
    config = StepConfig(rows=min(2, max_rows))
    while config.rows < max_rows and config.num_blocks(problem) > _WAVE * device.num_sms:
        config = replace(config, rows=2 * config.rows)
    return config
