"""Launches of kernels that edit the marked elements of rows of logits (masked_edit.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.tensor import TensorArg
from .._shared.chunks import MAX_GRID_YZ

# docs/performance/sampling.md, "Penalties and bitmasks".
_NUM_THREADS = 128  # threads of a block
_BATCH = 4  # most vectors of a thread
_WAVE_THREADS = 1024  # threads that an SM runs at once: 64 registers are enough for _BATCH vectors
_LATENCY_BYTES = 18_600  # bytes that an SM moves in a latency of DRAM: 0.6 us at the 4.1 TB/s of 132 SMs


class EditProblem(NamedTuple):
    """The input of `choose`: sizes of the matrix, elements of a vector, and bytes of a logit."""

    num_rows: int
    vocab_size: int
    vec_size: int
    itemsize: int

    @property
    def row_vecs(self) -> int:
        """Most vectors that hold elements of a row. Rows that are not whole vectors begin anywhere in one."""
        return -(-self.vocab_size // self.vec_size) + (self.vocab_size % self.vec_size != 0)

    def bucket(self) -> str:
        logits = tuning.power_of_two(self.num_rows * self.vocab_size)
        return f"logits={logits} of {self.itemsize} bytes, vec_size={self.vec_size}"


@dataclass(frozen=True)
class EditConfig:
    """The geometry of a launch.

    Attributes:
        batch: vectors of a thread.
        eager: whether logits are loaded together with their marks, not only those with marks.
        num_threads: threads of a block.
    """

    batch: int
    eager: bool
    num_threads: int

    def candidates(self, problem: EditProblem, device: Device) -> list[EditConfig]:
        """Other blocks, other numbers of vectors, and loads at the other time."""
        return tuning.varied(self, batch=(1, 2, 4), eager=(not self.eager,), num_threads=(64, 128, 256))


def choose(problem: EditProblem, device: Device) -> EditConfig:
    """As few vectors to a thread as allow one wave of blocks; eager loads where they take less than a latency.

    Loads that wait for their marks cost a latency of DRAM, and save what is not marked.
    """
    batch = 1
    while batch < _BATCH and problem.num_rows * problem.row_vecs > batch * _WAVE_THREADS * device.num_sms:
        batch *= 2
    nbytes = problem.num_rows * problem.vocab_size * problem.itemsize
    return EditConfig(batch, nbytes <= _LATENCY_BYTES * device.num_sms, _NUM_THREADS)


def launch(
    kernel: Kernel, logits: TensorArg, vec_size: int, *, fixed: dict[str, int] | None = None, **constants: Any
) -> Launch:
    """The launch of a kernel that edits rows of `logits`, in vectors of `vec_size`.

    Args:
        kernel: takes the constants of masked_edit.cuh.
        logits: a matrix; contiguous where vec_size does not divide its rows.
        vec_size: elements of a vector.
        fixed: parameters of the kernel other than its sizes.
        constants: other constants of the kernel.
    """
    num_rows, vocab_size = logits.shape
    problem = EditProblem(num_rows, vocab_size, vec_size, logits.dtype.itemsize)
    config = tuning.config(logits.op, problem, logits.device, choose)
    planes = -(-num_rows // MAX_GRID_YZ)
    return kernel(
        scalar_t=logits.dtype,
        VEC_SIZE=vec_size,
        SHIFTED=vocab_size % vec_size != 0,
        BATCH=config.batch,
        EAGER=config.eager,
        NUM_THREADS=config.num_threads,
        MIN_BLOCKS=_WAVE_THREADS // config.num_threads,
        PLANES=planes > 1,
        **constants,
    ).launch(
        grid=(
            -(-problem.row_vecs // (config.num_threads * config.batch)),
            -(-num_rows // max(1, planes)),
            planes,
        ),
        block=config.num_threads,
        num_rows=num_rows,
        vocab_size=vocab_size,
        **(fixed or {}),
    )
