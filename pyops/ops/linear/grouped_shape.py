"""What the choice of a grouped GEMM's kernel depends on, and how many row tiles its experts are expected to have."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

from ..._core.tensors.dtypes import DType, bfloat16
from .gemm_shape import num_k_tiles
from .grouped_problem import GroupedProblem

Scales = Literal["none", "row", "block"]
_DEVIATIONS = 8  # standard deviations from the mean beyond which no expert is expected to have rows
_MAX_COUNTS = 8192  # distributions of rows, and numbers of tiles, that a process remembers


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Equal for all grouped GEMMs that one Config serves.

    Attributes:
        rows: rows of out, rounded up so that few of them need another kernel; 0 if there is nothing to multiply.
        num_experts: experts; a token chooses top_k of them.
        n: rows of b of an expert; with a gated activation twice the columns of out.
        k: elements of K.
        top_k: rows of out that share a row of a.
        dtype, out_dtype: of the operands, and of out.
        scales: of the operands.
        gated: the order of gates and ups, as in `ACTIVATIONS`; 0 without gates.
        block_size: slots of a block of the sorted lists.
        access: bytes of one access to a and b.
        out_is_aligned: whether TMA can store rows of out.
        has_tiles: whether the epilogue exists in CUDA Tile C++ (grouped_gemm_sm100.cu).
    """

    rows: int
    num_experts: int
    n: int
    k: int
    top_k: int = 1
    dtype: DType = bfloat16
    out_dtype: DType = bfloat16
    scales: Scales = "none"
    gated: int = 0
    block_size: int = 64
    access: int = 16
    out_is_aligned: bool = True
    has_tiles: bool = True

    @classmethod
    def of(cls, problem: GroupedProblem) -> GroupedShape:
        scaled = problem.a_scales is not None or problem.b_scales is not None
        return cls(
            0 if problem.empty else problem.rounded_rows,
            problem.num_experts,
            problem.b_rows,
            problem.k,
            problem.top_k,
            problem.dtype,
            problem.out.dtype,
            "block" if problem.block_scaled else "row" if scaled else "none",
            problem.gated,
            problem.lists.block_size,
            problem.vec_size * problem.dtype.itemsize,
            problem.out_is_aligned,
            problem.has_tiles,
        )

    def of_rows(self, rows: int) -> GroupedShape:
        return replace(self, rows=rows * self.top_k)

    @property
    def is_empty(self) -> bool:
        return self.rows == 0

    @property
    def dense(self) -> GroupedShape:
        """The shape of the GEMM with dequantized weights, of a shape with quantized ones."""
        return GroupedShape(*(getattr(self, one.name) for one in fields(GroupedShape)))

    @property
    def columns(self) -> int:
        """Columns of out."""
        return self.n // 2 if self.gated else self.n

    @property
    def num_k_tiles(self) -> int:
        return num_k_tiles(self.k, self.dtype)

    @property
    def nbytes(self) -> float:
        """Bytes of a, of the weights of experts that have rows, and of out."""
        operands = self.rows / self.top_k + self.chosen_experts * self.n
        return operands * self.k * self.dtype.itemsize + self.rows * self.columns * self.out_dtype.itemsize

    @property
    def chosen_experts(self) -> float:
        """The expected number of experts that have rows."""
        return self.row_tiles(self.rows)

    def row_tiles(self, tile_m: int) -> float:
        """The expected row tiles of all experts, if tokens choose experts at random."""
        if 0 in (self.rows, self.num_experts):
            return 0.0
        tokens = max(1, round(self.rows / self.top_k))
        return self.num_experts * _tiles_of_expert(tokens, min(1.0, self.top_k / self.num_experts), tile_m)

    def padding_tiles(self, tile_m: int) -> float:
        """The expected row tiles of padding alone, in blocks of the lists that have rows."""
        return self.row_tiles(self.block_size) * (self.block_size / tile_m) - self.row_tiles(tile_m)


@lru_cache(_MAX_COUNTS)
def _tiles_of_expert(tokens: int, chance: float, tile_m: int) -> float:
    """The expected row tiles of an expert that each token chooses with this chance."""
    first, chances = _rows_of_expert(tokens, chance)
    return sum(of_count * -(-count // tile_m) for count, of_count in enumerate(chances, first))


@lru_cache(_MAX_COUNTS)
def _rows_of_expert(tokens: int, chance: float) -> tuple[int, tuple[float, ...]]:
    """(the fewest rows, the chances of this and of each higher number of rows) of an expert that each token chooses
    with this chance."""
    if chance >= 1.0:
        return tokens, (1.0,)
    mean = tokens * chance
    width = _DEVIATIONS * (1 + math.sqrt(mean * (1 - chance)))
    first, last = max(0, math.floor(mean - width)), min(tokens, math.ceil(mean + width))
    ways = math.lgamma(tokens + 1) - math.lgamma(first + 1) - math.lgamma(tokens - first + 1)
    found = [math.exp(ways + first * math.log(chance) + (tokens - first) * math.log1p(-chance))]
    for count in range(first, last):
        found.append(found[-1] * (tokens - count) / (count + 1) * chance / (1 - chance))
    return first, tuple(found)
