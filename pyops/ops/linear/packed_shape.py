"""What the choice of a kernel for a GEMM with a packed quantized weight depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..._core.tensors.dtypes import float8_e4m3fn, float16
from .._shared.packed_layouts import LAYOUTS, Layout, LayoutName, ZeroLayout, unit
from .._shared.scalar_type import ScalarType
from . import dequantize_packed
from .gemm_shape import GemmShape
from .packed_problem import PackedProblem, Recoding, ScaleKind, ZeroKind


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Equal for all problems that one Config serves.

    Attributes:
        dense: the GEMM of the dequantized weight; with experts and 8-bit activations, of activations that are not
            upcast.
        layout, type, recoding, zero_layout: of the quants and of zero points that are quants.
        groups, group_size: groups of rows, and rows of a group; 0 rows for one group.
        group_bits: bits of a column's scale and zero point in a group.
        scale_kind, scale_is_none, zero_kind: the formats of scales and zero points; whether there are no scales.
        has_g_idx: whether groups are not consecutive.
        is_aligned: whether the weight's tensors begin at multiples of 16 bytes.
    """

    dense: GemmShape
    layout: LayoutName
    type: ScalarType
    groups: int
    group_size: int
    group_bits: int
    scale_kind: ScaleKind
    scale_is_none: bool
    zero_kind: ZeroKind
    zero_layout: ZeroLayout
    recoding: Recoding
    has_g_idx: bool
    is_aligned: bool

    @classmethod
    def of(cls, problem: PackedProblem) -> PackedShape:
        w = problem.weight
        return cls(
            GemmShape.of(dequantize_packed.product(problem)),
            w.layout,
            w.type,
            w.groups,
            w.group_size if w.groups > 1 else 0,
            problem.group_bits(),
            w.scale_kind,
            w.scales is None,
            w.zero_kind,
            w.zero_layout,
            w.recoding,
            w.g_idx is not None,
            all(one.alignment == 16 for one in (w.codes, w.scales, w.zeros, w.places) if one is not None),
        )

    def of_rows(self, rows: int) -> PackedShape:
        return replace(self, dense=self.dense.of_rows(rows))

    @property
    def is_empty(self) -> bool:
        return self.dense.is_empty

    @property
    def m(self) -> int:
        """Rows of a, rounded up so that few M need another kernel."""
        return self.dense.m

    @property
    def n(self) -> int:
        return self.dense.n

    @property
    def k(self) -> int:
        return self.dense.k

    @property
    def bits(self) -> int:
        """Bits of a quant."""
        return self.type.size_bits

    @property
    def format(self) -> Layout:
        """The declaration of the layout."""
        return LAYOUTS[self.layout]

    @property
    def is_sparse(self) -> bool:
        """2:4 sparsity: half of the rows are stored, with metadata."""
        return self.format.stored_rows == 2

    @property
    def is_e2m1(self) -> bool:
        """4-bit floats: FP4."""
        return self.bits == 4 and self.type.exponent > 0

    @property
    def is_table(self) -> bool:
        """W4A8: quants select products from lookup tables."""
        return self.scale_kind == "products"

    @property
    def promoted(self) -> bool:
        """Whether wq_gemm_sm90.cu promotes fp8 accumulators to float32 registers: for a float16 output."""
        return self.dense.dtype is float8_e4m3fn and self.dense.out_dtype is float16

    @property
    def weight_bytes(self) -> int:
        """Bytes of quants, metadata, scales and zero points."""
        bits = (self.bits + 2) // 2 if self.is_sparse else self.bits
        return (self.k * bits + self.groups * self.group_bits) * self.n // 8

    @property
    def nbytes(self) -> int:
        """Bytes of a, the weight and out."""
        dense = self.dense
        return self.weight_bytes + self.m * (self.k * dense.dtype.itemsize + self.n * dense.out_dtype.itemsize)

    @property
    def word_rows(self) -> int:
        """Fewest weight rows that fill whole packed words: rows of a tile of the layout, or of a column's words."""
        return self.format.tile_rows * self.format.stored_rows or unit(self.bits)[1]

    def groups_of(self, rows: int) -> int:
        """Groups of a k-tile of `rows` rows."""
        return rows // self.group_size if 0 < self.group_size < rows else 1

    def divides(self, rows: int) -> bool:
        """Whether a k-tile of `rows` rows holds whole groups or lies within one."""
        # The smallest group is 32 rows for 4 bits, as the scale tables of W4A8 require.
        smallest = self.format.group_rows or (rows if self.bits == 3 else 128 // self.bits)
        smallest *= self.format.stored_rows
        size = self.group_size
        return size % rows == 0 or (rows % size == 0 and size % smallest == 0)
