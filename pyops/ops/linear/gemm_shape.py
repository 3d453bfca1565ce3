"""What the choice of a GEMM kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..._core.tensors.dtypes import DType, float8_e4m3fn, float8_e5m2, float16
from .gemm_problem import GemmProblem

FP8 = float8_e4m3fn, float8_e5m2
K_TILE_BYTES = 128  # bytes of K in a k-tile: one row of the 128-byte swizzle


def num_k_tiles(k: int, dtype: DType) -> int:
    """k-tiles of K."""
    return -(-k * dtype.itemsize // K_TILE_BYTES)


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Equal for all problems that one Config serves.

    Attributes:
        m: rows of a, rounded up so that few M need another kernel.
        n: rows of b; with a gated activation twice the columns of out.
        k: elements of K.
        dtype, out_dtype: of the operands, and of out.
        vec_size: elements of one access to a and b.
        rows_are_dense: whether the elements of a row are contiguous, in a and in b.
        out_is_aligned: whether TMA can store rows of out.
        block_scaled, is_gated, is_plain, has_matrix_bias, has_tiles: of the epilogue.
    """

    m: int
    n: int
    k: int
    dtype: DType
    out_dtype: DType
    vec_size: int
    rows_are_dense: bool = True
    out_is_aligned: bool = True
    block_scaled: bool = False
    is_gated: bool = False
    is_plain: bool = True
    has_matrix_bias: bool = False
    has_tiles: bool = True

    @classmethod
    def of(cls, problem: GemmProblem) -> GemmShape:
        epilogue = problem.epilogue
        return cls(
            problem.rounded_m,
            problem.b.rows,
            problem.k,
            problem.dtype,
            epilogue.out.dtype,
            problem.vec_size,
            problem.rows_are_dense,
            problem.out_is_aligned,
            epilogue.block_scaled,
            epilogue.is_gated,
            epilogue.is_plain,
            epilogue.has_matrix_bias,
            epilogue.has_tiles,
        )

    def of_rows(self, rows: int) -> GemmShape:
        return replace(self, m=rows)

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n)

    @property
    def num_k_tiles(self) -> int:
        """k-tiles of K."""
        return num_k_tiles(self.k, self.dtype)

    @property
    def is_fp8(self) -> bool:
        return self.dtype in FP8

    @property
    def promoted(self) -> bool:
        """Whether gemm_sm90.cu promotes accumulators to float32 registers."""
        return self.is_fp8 and (self.block_scaled or self.out_dtype is float16)

    @property
    def nbytes(self) -> int:
        """Bytes of a, b and out."""
        columns = self.n // 2 if self.is_gated else self.n
        return (self.m + self.n) * self.k * self.dtype.itemsize + self.m * columns * self.out_dtype.itemsize

    @property
    def b_bytes(self) -> int:
        return self.n * self.k * self.dtype.itemsize

    @property
    def macs(self) -> float:
        """Multiplications, two of 8-bit elements counted as one."""
        return self.m * self.n * self.k * self.dtype.itemsize / 2
