"""The geometry of a step of a state-space model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ..._core import tuning

if TYPE_CHECKING:
    from ..._core.device import Device
    from ..._core.dtypes import DType

_MAX_LANES = 32  # that share a row
# By count of bytes in flight and of registers.
_NUM_THREADS, _MIN_BLOCKS = 128, 4
_WAVE = 6  # blocks of a multiprocessor that run at once, as most kernels need fewer registers than the bound
_MAX_HELD, _MAX_ROWS = 16, 4  # states of a thread, and its rows


class StepProblem(NamedTuple):
    """What the geometry depends on: sequences, heads, their rows, and how the states of a row are read."""

    batch: int
    heads: int
    head_size: int
    state_size: int
    dtype: DType
    vec_size: int

    @property
    def lanes(self) -> int:
        """That share a row."""
        return min(_MAX_LANES, tuning.power_of_two(-(-self.state_size // self.vec_size)))

    def bucket(self) -> str:
        rows = f"{self.heads}x{self.head_size}x{self.state_size}"
        return f"batch={tuning.power_of_two(self.batch)} {rows} {self.dtype.name} vec_size={self.vec_size}"


@dataclass(frozen=True)
class StepConfig:
    """The geometry of selective_state_update.cu.

    Attributes:
        rows: of a thread.
        num_threads: threads of a block.
        min_blocks: blocks per multiprocessor that the compiler makes room for, by bounding registers.
    """

    rows: int
    num_threads: int = _NUM_THREADS
    min_blocks: int = _MIN_BLOCKS

    def head_blocks(self, problem: StepProblem) -> int:
        """Blocks for the rows of a head."""
        return -(-problem.head_size // (self.num_threads // problem.lanes * self.rows))

    def num_blocks(self, problem: StepProblem) -> int:
        return problem.batch * problem.heads * self.head_blocks(problem)

    def candidates(self, problem: StepProblem, device: Device) -> list[StepConfig]:
        """Other rows of a thread, sizes of a block, and bounds of registers."""
        sizes = [tuning.resized(self, size) for size in tuning.beside(self.num_threads, 64, 256)]
        return sizes + tuning.varied(
            self,
            rows=tuning.beside(self.rows, 1, _max_rows(problem)),
            min_blocks=tuning.beside(self.min_blocks, 2, 8),
        )


def _max_rows(problem: StepProblem) -> int:
    """Rows of a thread whose states its registers hold."""
    row_states = problem.vec_size * -(-problem.state_size // (problem.vec_size * problem.lanes))
    return max(1, min(_MAX_ROWS, _MAX_HELD // row_states))


def choose(problem: StepProblem, device: Device) -> StepConfig:
    """As few rows for a thread as let all blocks run at once; where none do, as many as registers hold."""
    config = StepConfig(1)
    while config.rows < _max_rows(problem) and config.num_blocks(problem) > _WAVE * device.multiprocessors:
        config = replace(config, rows=2 * config.rows)
    return config
