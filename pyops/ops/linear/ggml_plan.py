"""Which kernel multiplies a matrix in one of GGUF's quantised types, and how: a Config for each kernel, the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import float32
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.tensor import TensorArg
from .._shared import ggml_formats
from .._shared.ggml_formats import Format
from . import gemm_plan
from .gemm_problem import Epilogue, Operand
from .gemm_problem import Problem as DenseProblem

_mul_mat, _vec = Kernel("linear/ggml_mul_mat.cu"), Kernel("linear/ggml_mul_mat_vec.cu")
_simt = Kernel("linear/ggml_mul_mat_simt.cu")

MAX_FUSED_ROWS = 64  # of X, that a product multiplies with format blocks; for more, the weight is dequantised first
_UNIT = 256  # elements of a row of the weight that a warp multiplies at a time
_MAX_TOKENS = 64  # rows of X of a block, whose sums a thread has in registers
_MAX_STAGES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """``out = X @ W.T``: X [m, k] and out [m, n] of rows of one stride, W [n, k] in `format`."""

    out: TensorArg
    W: TensorArg
    X: TensorArg
    format: Format

    @property
    def m(self) -> int:
        return self.X.shape[0]

    @property
    def k(self) -> int:
        return self.X.shape[1]

    @property
    def n(self) -> int:
        return self.out.shape[1]

    @property
    def row_bytes(self) -> int:
        return self.k // self.format.length * self.format.nbytes

    @property
    def access(self) -> int:
        """Bytes of one access to W."""
        return ggml_formats.access_of(self.W, self.row_bytes)

    @property
    def x_access(self) -> int:
        """Elements of one access to X."""
        return Operand.of_rows(self.X).vec_size(self.k)

    def bucket(self) -> str:
        weight = f"weight={self.n}x{self.k} {self.format.name} access={self.access}"
        return f"rows={tuning.power_of_two(self.m)} {weight} {self.X.dtype.name}"

    def pitch(self, units: int) -> int:
        """Bytes of shared memory of a row's part of so many units, as ggml_tile.cuh places it."""
        part = units * _UNIT // self.format.length * self.format.nbytes
        pieces = -(-part // self.access) + (part % self.access != 0)
        return (pieces * self.access + 15) // 32 * 32 + 16

    def arguments(self) -> dict[str, int]:
        sizes = {"m": self.m, "n": self.n, "k": self.k, "row_bytes": self.row_bytes}
        return {**sizes, "out_stride": check.row_stride(self.out), "x_stride": check.row_stride(self.X)}


@dataclass(frozen=True, slots=True)
class MulMatConfig:
    """The geometry of ggml_mul_mat.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        row_warps, k_warps: warps along 16 rows of W each, and along K.
        stages: steps of K that are in shared memory or on the way there.
        splits: blocks that share rows, each with a part of K.
        min_blocks: blocks per multiprocessor that the compiler makes room for, by bounding registers.
    """

    tokens: int
    row_warps: int
    k_warps: int
    stages: int
    splits: int
    min_blocks: int = 1

    @property
    def rows(self) -> int:
        """Of W, of a block."""
        return 16 * self.row_warps

    @property
    def num_threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    def shared_memory(self, problem: Problem) -> int:
        """Bytes: the grid of the type, then stages, whose place sums take in the end."""
        stage = self.rows * problem.pitch(self.k_warps) + self.tokens * (self.k_warps * _UNIT + 16) * 2
        return 2 * problem.format.grid_size + max(self.stages * stage, self.k_warps * self.tokens * (self.rows + 4) * 4)

    def fits(self, problem: Problem, device: Device) -> bool:
        return self.shared_memory(problem) * self.min_blocks <= device.shared_memory

    def candidates(self, problem: Problem, device: Device) -> list[MulMatConfig]:
        """Other blocks, stages and splits."""
        found = tuning.varied(
            self,
            row_warps=tuning.beside(self.row_warps, 1, 8),
            k_warps=tuning.beside(self.k_warps, 1, 8),
            stages=(self.stages - 1, self.stages + 1),
            splits=tuning.beside(self.splits, 1, 8),
        )
        return [one for one in found if one.stages >= 2 and one.num_threads <= 512 and one.fits(problem, device)]

    def launch(self, problem: Problem) -> Launch:
        """One launch. Blocks that share rows leave their sums in a workspace, and the last of them adds these up."""
        tiles = -(-problem.n // self.rows), -(-problem.m // self.tokens)
        count, threads = tiles[0] * tiles[1], self.num_threads
        partial: dict[str, Any] = {"partial": 0, "arrived": 0}
        if self.splits > 1 and count:
            results = -(-self.tokens * self.rows // threads)
            partial["partial"] = Scratch(count * self.splits * results * threads * 4)
            partial["arrived"] = Scratch(count * 4, zeroed=True)
        return _mul_mat(
            scalar_t=problem.X.dtype,
            FORMAT=problem.format.name,
            TOKENS=self.tokens,
            ROW_WARPS=self.row_warps,
            K_WARPS=self.k_warps,
            STAGES=self.stages,
            SPLITS=self.splits,
            ACCESS=problem.access,
            X_ACCESS=problem.x_access,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (tiles[0], self.splits, tiles[1]),
            threads,
            self.shared_memory(problem),
            **problem.arguments(),
            **partial,
        )


@dataclass(frozen=True, slots=True)
class VecConfig:
    """The geometry of ggml_mul_mat_vec.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        row_warps, k_warps: warps along 16 rows of W each, and along K.
        stages: steps of K that are in shared memory or on the way there.
        min_blocks: blocks per multiprocessor that the compiler makes room for, by bounding registers.
    """

    tokens: int
    row_warps: int
    k_warps: int
    stages: int
    min_blocks: int

    def shared_memory(self, problem: Problem) -> int:
        """Bytes: the grid of the type, then stages."""
        stage = 16 * self.row_warps * problem.pitch(self.k_warps) + self.tokens * self.k_warps * _UNIT * 2
        return 2 * problem.format.grid_size + self.stages * stage

    def candidates(self, problem: Problem, device: Device) -> list[VecConfig]:
        """Other blocks and stages."""
        found = tuning.varied(
            self,
            row_warps=tuning.beside(self.row_warps, 1, 2),
            k_warps=tuning.beside(self.k_warps, 2, 8),
            stages=(self.stages - 1, self.stages + 1),
        )
        return [one for one in found if one.stages >= 2 and one.shared_memory(problem) <= device.shared_memory]

    def launch(self, problem: Problem) -> Launch:
        grid = -(-problem.n // (16 * self.row_warps)), -(-problem.m // self.tokens)
        return _vec(
            scalar_t=problem.X.dtype,
            FORMAT=problem.format.name,
            TOKENS=self.tokens,
            ROW_WARPS=self.row_warps,
            K_WARPS=self.k_warps,
            STAGES=self.stages,
            ACCESS=problem.access,
            X_ACCESS=problem.x_access,
            MIN_BLOCKS=self.min_blocks,
        ).launch(grid, 32 * self.row_warps * self.k_warps, self.shared_memory(problem), **problem.arguments())


@dataclass(frozen=True, slots=True)
class SimtConfig:
    """The geometry of ggml_mul_mat_simt.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        units: of 256 elements of K, that a block copies to shared memory at a time.
        num_threads: threads of a block; a warp has a row of W.
    """

    tokens: int
    units: int
    num_threads: int

    def candidates(self, problem: Problem, device: Device) -> list[SimtConfig]:
        """Other parts of K, and blocks."""
        return tuning.varied(self, units=tuning.beside(self.units, 1, 4), num_threads=(128, 256))

    def launch(self, problem: Problem) -> Launch:
        row_groups = -(-problem.n * problem.out.device.warp_size // self.num_threads)
        return _simt(
            scalar_t=problem.X.dtype,
            FORMAT=problem.format.name,
            TOKENS=self.tokens,
            UNITS=self.units,
            ACCESS=problem.access,
            VEC_SIZE=min(8, problem.x_access),
            NUM_THREADS=self.num_threads,
        ).launch(row_groups * -(-problem.m // self.tokens), self.num_threads, **problem.arguments())


def choose(problem: Problem, device: Device) -> MulMatConfig | SimtConfig:
    """The kernel for at most `MAX_FUSED_ROWS` rows, and its geometry. Equal for all problems of a bucket."""
    m = tuning.power_of_two(problem.m)
    if problem.X.dtype is float32 or not device.supports("mma"):
        return SimtConfig(tokens=min(4, m), units=4, num_threads=256)
    return MulMatConfig(tokens=min(_MAX_TOKENS, m), row_warps=2, k_warps=4, stages=3, splits=1)


def plan(problem: Problem) -> list[Launch]:
    """The launches of a product: one for few rows of X, and for many one that dequantises the weight before it."""
    out, device = problem.out, problem.out.device
    if problem.m <= MAX_FUSED_ROWS:
        return [tuning.config(out.op, problem, device, choose).launch(problem)]
    dtype, numel = problem.X.dtype, problem.n * problem.k
    weight = Scratch(numel * dtype.itemsize)
    rows = Operand.of_scratch(weight, dtype, problem.n, problem.k)
    product = gemm_plan.plan(DenseProblem(Operand.of_rows(problem.X), rows, problem.k, Epilogue(out)))
    expansion = ggml_formats.dequantised(problem.W, problem.format, weight, dtype, numel, access=8)
    return [] if product.empty else [expansion, product]
