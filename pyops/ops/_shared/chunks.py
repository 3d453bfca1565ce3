"""Launch geometry of kernels in which each thread processes one chunk of a matrix row (elementwise.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType
from ..._core.tensors.tensor import TensorArg

_NUM_THREADS = 256  # threads of a block
_CANDIDATE_THREADS = 128, 256, 512  # threads of a block that tuning tries
_WARP_SIZE = 32  # threads that share a row, at least; fewer for a shorter row
MAX_GRID_YZ = 65535  # blocks in the second and third dimension of a grid
_MAX_IDLE_CHUNKS = 16  # if more than 1/16 of a row's threads would be idle, more rows share a block


class ChunkProblem(NamedTuple):
    """The input of `choose`.

    Attributes:
        row_size: elements of a row.
        num_rows: rows of the launch.
        dtype: element type.
        vec_size: elements of a chunk.
        max_vec_size: elements of a chunk if such chunks still yield enough threads to fill the device.
        min_blocks: resident blocks per SM for which registers are bounded; None for a kernel without the bound.
    """

    row_size: int
    num_rows: int
    dtype: DType
    vec_size: int = 1
    max_vec_size: int = 1
    min_blocks: int | None = None

    def bucket(self) -> str:
        words = [
            f"rows={tuning.power_of_two(self.num_rows)}",
            f"elements={tuning.power_of_two(self.row_size)}",
            self.dtype.name,
            f"vec_size={self.vec_size}",
        ]
        return " ".join(words + [f"max_vec_size={self.max_vec_size}"] * (self.max_vec_size > self.vec_size))


@dataclass(frozen=True)
class ChunkConfig:
    """The geometry of a kernel with one chunk of a row per thread.

    Attributes:
        vec_size: elements of a chunk.
        num_threads: threads of a block.
        row_threads: adjacent threads of a block that share a row.
        min_blocks: resident blocks per SM for which registers are bounded; None for a kernel without the bound.
    """

    vec_size: int
    num_threads: int
    row_threads: int
    min_blocks: int | None

    def grid(self, problem: ChunkProblem) -> tuple[int, int, int]:
        """Blocks (chunks of a row, groups of rows, planes): a plane has as many groups as `blockIdx.y` can count."""
        row_chunks = problem.row_size // self.vec_size
        groups = -(-problem.num_rows // (self.num_threads // self.row_threads))
        planes = -(-groups // MAX_GRID_YZ)
        return -(-row_chunks // self.row_threads), -(-groups // max(1, planes)), planes

    def constants(self, grid: tuple[int, int, int]) -> dict[str, int]:
        """The kernel's compile-time constants for the shape of a block, by name."""
        return {"NUM_THREADS": self.num_threads, "ROW_THREADS": self.row_threads, "PLANES": grid[2] > 1}

    def candidates(self, problem: ChunkProblem, device: Device) -> list[ChunkConfig]:
        """Other block sizes, other threads per row, and other vector widths and register bounds."""
        found = [
            tuning.resized(self, threads, row_threads=min(self.row_threads, threads)) for threads in _CANDIDATE_THREADS
        ]
        found += tuning.varied(
            self,
            vec_size=(problem.vec_size, problem.max_vec_size),
            row_threads=tuning.beside(self.row_threads, 1, self.num_threads),
        )
        if self.min_blocks is not None:
            found += tuning.varied(self, min_blocks=tuning.occupancies(self.num_threads, self.min_blocks))
        return found


def choose(problem: ChunkProblem, device: Device) -> ChunkConfig:
    """Blocks of 256 threads, with few idle threads."""
    row_size, num_rows, _, vec_size, max_vec_size, min_blocks = problem
    if max_vec_size > vec_size and min_blocks is not None:
        wave = device.num_sms * min_blocks * _NUM_THREADS  # threads that run at once
        if num_rows * row_size >= max_vec_size * wave:
            vec_size = max_vec_size
    return ChunkConfig(vec_size, _NUM_THREADS, _threads_for_row(row_size // vec_size), min_blocks)


@lru_cache(4096)  # bounded: a contiguous matrix counts as one row, so the number of lengths is unlimited
def _threads_for_row(row_chunks: int) -> int:
    """Threads of a block that share a row, chosen so that few are idle. Whole warps, unless rows are shorter."""
    narrowest = min(_WARP_SIZE, 1 << max(0, row_chunks - 1).bit_length())
    row_threads = _NUM_THREADS
    while row_threads > narrowest and -row_chunks % row_threads > row_chunks // _MAX_IDLE_CHUNKS:
        row_threads //= 2
    return row_threads


def launch(
    kernel: Kernel,
    out: TensorArg,
    input: TensorArg,
    out_stride: str = "out_stride",
    min_blocks: int = 8,
    twice: bool = False,
    fixed: dict[str, Any] | None = None,
    **constants: Any,
) -> Launch:
    """The launch of a kernel with one vector of `out` per thread.

    Args:
        kernel: takes the constants of `ChunkConfig`, scalar_t, VEC_SIZE and MIN_BLOCKS.
        out, input: matrices with the same number of rows and one row stride each.
        out_stride: the parameter of the kernel for the stride of `out`.
        min_blocks: resident blocks per SM for which registers are bounded. Eight blocks are 2048 threads, the maximum
            (docs/performance/rows.md).
        twice: whether a thread may process two vectors of `input`. It does if `out` is aligned for twice the vector
            size, and if half as many threads still make a full wave.
        fixed: parameters of the kernel other than sizes and strides.
        constants: other constants of the kernel.
    """
    hidden_size = out.shape[-1]
    vec_size = check.vector_width(hidden_size, out, input)
    max_vec_size = 2 * vec_size if twice and check.vector_width(hidden_size, out) >= 2 * vec_size else vec_size
    problem = ChunkProblem(hidden_size, check.num_rows(out), input.dtype, vec_size, max_vec_size, min_blocks)
    config = tuning.config(out.op, problem, out.device, choose)
    grid = config.grid(problem)
    return kernel(
        scalar_t=input.dtype,
        **constants,
        VEC_SIZE=config.vec_size,
        **config.constants(grid),
        MIN_BLOCKS=config.min_blocks,
    ).launch(
        grid=grid,
        block=config.num_threads,
        num_rows=problem.num_rows,
        hidden_size=hidden_size,
        input_stride=check.row_stride(input),
        **{out_stride: check.row_stride(out)},
        **(fixed or {}),
    )
