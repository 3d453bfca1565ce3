"""Layouts of packed weights: offsets of quants, of zero points, and of per-column parameters.

A quantized weight [K, N] is packed into 32-bit words in one of `LAYOUTS`; `kernels_cu/linear/layout_<name>.cuh` shows
the bytes of each and reads them in kernels. `code_bit` and `zero_bit` give the offset of a bit of a quant or a zero
point, `column_place` the index of a column in a permuted row of scales or of a bias (column_permutation.cuh). They take
integers, or integer tensors that broadcast: references unpack and pack by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LayoutName = Literal["awq", "gptq", "exllama", "marlin", "marlin_8", "w4a8", "marlin_24", "n32k16", "bytes"]
ColumnOrder = Literal["natural", "marlin_64", "marlin_32", "marlin_fp4", "marlin_24", "n32k16"]
ZeroLayout = Literal["awq", "gptq", "marlin", "marlin_8"]
Size = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A layout of packed weights: its definition, and what the kernels with fused dequantization can do with it.

    Attributes:
        code_bit: (bits, (K, N), k, n, j): the offset of bit j of the quant at row k and column n.
        zero_place: (bits, n): the index of the packed zero point of column n within its group; None: there are none.
        sm80_bits, small_m_bits, sm90_bits, cdna_bits: bits of the quants that wq_gemm_sm80.cu, wq_gemm_sm90_small_m.cu,
            wq_gemm_sm90.cu and wq_gemm_cdna.cu read.
        zeros: the layout of the packed zero points that they read, and zero_bits: bits of these.
        of_8_bits: the layout for kernels if quants have 8 bits, where that has the same bytes.
        words: (bits, rows, columns): words of that many rows and columns along each dimension of the tensor map of
            wq_gemm_sm90.cu and wq_gemm_sm90_small_m.cu, innermost first.
        is_swizzled: TMA swizzles rows of such a box by their size.
        tile_rows: rows of a tile, which are contiguous; 0: words are rows or columns of the weight.
        stored_rows: rows per stored row: 2 with 2:4 sparsity.
        group_rows: fewest rows of a group that lies within a k-tile; 0: 128 / bits.
        box_rows: rows in one box of a, 128 bytes of a row, of wq_gemm_sm90.cu.
        most_boxes: most boxes of a in a k-tile of wq_gemm_sm90.cu.
        held_rows: {bits: most rows of a tile where lanes of wq_gemm_sm80.cu hold the next k-tile in registers}.
        is_across: a word has columns of one row. So 64 columns are only 32 bytes of a row, a lane takes bytes of two
            words for a pair, and wq_gemm_sm90.cu holds more words.
        is_of_bytes: for activations of 8 bits; an MMA lane has four adjacent rows.
        of_experts: wq_gemm_sm90.cu multiplies the rows of experts with such weights.
        has_tables: quants select products with e4m3 scales from tables, which wq_gemm_sm90.cu reads.
    """

    code_bit: Callable[[int, Size, Any, Any, int], Any]
    zero_place: Callable[[int, Any], Any] | None = None
    sm80_bits: tuple[int, ...] = ()
    small_m_bits: tuple[int, ...] = ()
    sm90_bits: tuple[int, ...] = ()
    cdna_bits: tuple[int, ...] = ()
    zeros: ZeroLayout | None = None
    zero_bits: tuple[int, ...] = (2, 3, 4, 8)
    of_8_bits: LayoutName | None = None
    words: Callable[[int, int, int], tuple[int, int, int]] | None = None
    is_swizzled: bool = False
    tile_rows: int = 0
    stored_rows: int = 1
    group_rows: int = 0
    box_rows: int = 64
    most_boxes: int = 1
    held_rows: Mapping[int, int] = field(default_factory=dict)
    is_across: bool = False
    is_of_bytes: bool = False
    of_experts: bool = False
    has_tables: bool = False


def code_bit(layout: LayoutName, bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    """The offset of bit `j` of the quant at row `k` and column `n`, in bits from the first word on.

    Args:
        layout: of the weight.
        bits: of a quant: 2, 3, 4 or 8.
        size: (K, N) of the weight.
    """
    return LAYOUTS[layout].code_bit(bits, size, k, n, j)


def zero_bit(layout: ZeroLayout, bits: int, columns: int, g: Any, n: Any, j: int) -> Any:
    """The bit offset of bit `j` of the zero point of group `g` and column `n`, in words [groups, N bits / 32]."""
    index_of = LAYOUTS[layout].zero_place
    assert index_of is not None
    return (g * columns + index_of(bits, n)) * bits + j


def column_place(order: ColumnOrder, n: Any) -> Any:
    """The index of column `n` in a permuted row of scales or of a bias."""
    if order == "marlin_64":
        return n // 64 * 64 + n % 8 * 8 + n % 64 // 8
    if order == "marlin_32":
        return n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2
    if order == "marlin_fp4":  # swaps the second and the third of every four columns
        place = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
        return place // 4 * 4 + place % 2 * 2 + place % 4 // 2
    if order == "marlin_24":
        return n // 8 * 8 + n % 4 * 2 + n % 8 // 4
    if order == "n32k16":
        return n // 32 * 32 + n % 8 * 4 + n % 32 // 8
    return n


def unit(bits: int) -> tuple[int, int]:
    """(words, fields) of a unit of a column: the fewest words that hold whole quants."""
    return (3, 32) if bits == 3 else (1, 32 // bits)


def shuffled_bit(bits: int, field: Any, j: int) -> Any:
    """The bit in an `exllama` unit to which bit `j` of this field of a `gptq` unit moves."""
    if bits == 8:
        return 8 * field + j
    if bits == 3:  # ten fields per word; bit j of fields 30 and 31 is the top bit of the two halves of word j
        tenth = 32 * (field // 10) + 16 * (field % 10 % 2) + field % 10 // 2 * 3 + j
        last = 32 * j + 15 + 16 * (field % 2)
        is_last = (field >= 30) * 1
        return is_last * last + (1 - is_last) * tenth
    return 16 * (field % 2) + field // 2 * bits + j


# Adjacent columns in a word, the even ones in its lower half.


def _even_first(bits: int, n: Any) -> Any:
    """The field of column n in words that store even columns first."""
    fields = 32 // bits
    return n // fields * fields + n % fields // 2 + n % 2 * (fields // 2)


def _awq_bit(bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    return (k * size[1] + _even_first(bits, n)) * bits + j


# A column is a string of quants, or even rows are in the lower halves of its words.


def _gptq_bit(bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    at = k * bits + j
    return (at // 32 * size[1] + n) * 32 + at % 32


def _exllama_bit(bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    words, fields = unit(bits)
    at = shuffled_bit(bits, k % fields, j)
    return ((k // fields * words + at // 32) * size[1] + n) * 32 + at % 32


def _column_words(bits: int, rows: int, columns: int) -> tuple[int, int, int]:
    return columns, rows * bits // 32, 1


# Marlin's tiles. A lane has four words of a tile of 4-bit quants, and eight of 8-bit quants.


def _tile_bit(bits: int, tile: Any, lane: Any, word: Any, half: Any, at: Any, j: int) -> Any:
    """The offset of a bit; `at` is the field of the quant in its word."""
    if bits == 4:
        return (tile * 128 + lane * 4 + word) * 32 + at * 4 + j
    return (tile * 256 + lane * 8 + word * 2 + half) * 32 + at * 8 + j


def _marlin_field(bits: int, k: Any, half: Any) -> Any:
    """The field of row k. A word has rows k, k + 1, k + 8, k + 9; with 4 bits of two columns, the second `half` 1."""
    return k % 2 * 4 + k % 16 // 8 + half * 2 if bits == 4 else k % 2 * 2 + k % 16 // 8


def _marlin_bit(bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    tile, half = k // 16 * (size[1] // 64) + n // 64, n % 16 // 8
    return _tile_bit(bits, tile, n % 8 * 4 + k % 8 // 2, n % 64 // 16, half, _marlin_field(bits, k, half), j)


def _marlin_24_bit(bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    tile, half = k // 16 * (size[1] // 64) + n // 64, n % 8 // 4
    return _tile_bit(bits, tile, n % 64 // 8 * 4 + k % 8 // 2, n % 4, half, _marlin_field(bits, k, half), j)


def _marlin_8_bit(bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    tile, half = k // 32 * (size[1] // 32) + n // 32, k % 32 // 16
    at = k % 4 * 2 + half if bits == 4 else k % 4
    return _tile_bit(bits, tile, n % 8 * 4 + k % 16 // 4, n % 32 // 8, half, at, j)


def _w4a8_bit(bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    lane, word, half = n % 8 * 4 + k % 16 // 4, n % 32 // 8, k % 32 // 16
    lane_words = 4 - 2 * (n // 32 >= size[1] // 32)
    words = k // 32 * size[1] * 4 + n // 32 * 128 + lane * lane_words + word
    return words * 32 + (half * 4 + k % 4) * 4 + j


def _marlin_zero(bits: int, n: Any) -> Any:
    return _even_first(bits, column_place("marlin_64", n))


def _tiles_of_32(bits: int, rows: int, columns: int) -> tuple[int, int, int]:
    return 32 * bits, columns // 32, rows // 32


# Tiles of bytes.


def _n32k16_bit(bits: int, size: Size, k: Any, n: Any, j: int) -> Any:
    at = k // 16 * 64 + k % 8 // 2 * 16 + n % 32 // 8 * 4 + k % 16 // 8 * 2 + k % 2
    return ((n // 32 * 8 + n % 8) * 4 * size[0] + at) * 8 + j


# The numbers of rows in `held_rows` were measured on an H200: docs/performance/packed.md.
LAYOUTS: Mapping[LayoutName, Layout] = {
    # words [K, N bits / 32] (Lin et al. 2023, arXiv:2306.00978, as AutoAWQ packs it)
    "awq": Layout(
        code_bit=_awq_bit,
        zero_place=_even_first,
        sm80_bits=(4,),
        small_m_bits=(4,),
        sm90_bits=(4,),
        cdna_bits=(4,),
        zeros="awq",
        words=lambda bits, rows, columns: (columns // 8, rows, 1),
        is_swizzled=True,
        is_across=True,
    ),
    # words [K bits / 32, N] (Frantar et al. 2022, arXiv:2210.17323)
    "gptq": Layout(
        code_bit=_gptq_bit,
        zero_place=lambda bits, n: n,
        sm80_bits=(2, 4, 8),
        sm90_bits=(2, 4, 8),
        cdna_bits=(2, 4, 8),
        zeros="gptq",
        words=_column_words,
        held_rows={4: 8},
    ),
    # gptq as `gptq_shuffle` leaves it
    "exllama": Layout(
        code_bit=_exllama_bit,
        sm80_bits=(2, 3, 4, 8),
        small_m_bits=(4,),
        sm90_bits=(2, 4, 8),
        cdna_bits=(2, 4, 8),
        zeros="gptq",
        of_8_bits="gptq",
        words=_column_words,
        held_rows={4: 8},
    ),
    # words [K / 16, N bits / 2], for activations of 16 bits (Frantar et al. 2024, arXiv:2408.11743)
    "marlin": Layout(
        code_bit=_marlin_bit,
        zero_place=_marlin_zero,
        sm80_bits=(4, 8),
        small_m_bits=(4,),
        sm90_bits=(4, 8),
        cdna_bits=(4, 8),
        zeros="marlin",
        zero_bits=(4,),
        words=lambda bits, rows, columns: (32 * bits, columns // 64, rows // 16),
        tile_rows=16,
        group_rows=16,
        most_boxes=2,
        held_rows={8: 16},
        of_experts=True,
    ),
    # words of the same shape, for activations of 8 bits
    "marlin_8": Layout(
        code_bit=_marlin_8_bit,
        zero_place=lambda bits, n: column_place("marlin_64", n),
        sm80_bits=(4,),
        sm90_bits=(4,),
        cdna_bits=(4,),
        words=_tiles_of_32,
        tile_rows=32,
        is_of_bytes=True,
    ),
    # marlin_8 of 4 bits in another order; only `cutlass_w4a8_mm` and its grouped form read it
    "w4a8": Layout(code_bit=_w4a8_bit, words=_tiles_of_32, box_rows=128, of_experts=True, has_tables=True),
    # marlin's tiles of the stored rows, in another order of columns; K counts the stored rows
    "marlin_24": Layout(code_bit=_marlin_24_bit, sm80_bits=(4, 8), tile_rows=16, stored_rows=2),
    # bytes [N rounded up to 32, K], of AllSpark
    "n32k16": Layout(
        code_bit=_n32k16_bit,
        sm80_bits=(8,),
        sm90_bits=(8,),
        cdna_bits=(8,),
        words=lambda bits, rows, columns: (rows, columns // 4, 1),
        tile_rows=16,
        held_rows={8: 8},
    ),
    # bytes [K, N]
    "bytes": Layout(code_bit=lambda bits, size, k, n, j: (k * size[1] + n) * 8 + j),
}
