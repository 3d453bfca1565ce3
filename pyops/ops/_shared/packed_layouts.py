"""Layouts of packed weights: offsets of quants, of zero points, and of per-column parameters.

A quantized weight [K, N] is packed into 32-bit words in one of `Layout`. `code_bit` and `zero_bit` give the offset of a
bit of a quant or a zero point, `column_place` the index of a column in a permuted row of scales or of a bias.
They take integers, or integer tensors that broadcast: references unpack and pack by them. Kernels know layouts and
orders by the same names (packed_layout.cuh, column_permutation.cuh).

    awq        words [K, N bits / 32]: adjacent columns in a word, the even ones in its lower half (Lin et al. 2023,
               arXiv:2306.00978, as AutoAWQ packs it)
    gptq       words [K bits / 32, N]: a column is a string of quants, from the lowest bit of its first word on (Frantar
               et al. 2022, arXiv:2210.17323)
    exllama    gptq with even rows in the lower halves of words, as `gptq_shuffle` leaves them
    marlin     words [K / 16, N bits / 2]: tiles of 16 x 64, for activations of 16 bits (Frantar et al. 2024,
               arXiv:2408.11743)
    marlin_8   words of the same shape: tiles of 32 x 32, for activations of 8 bits
    w4a8       marlin_8 of 4 bits with the 16 upper rows in the lower halves of words; the last 16 columns may be half a
               tile. Only `cutlass_w4a8_mm` reads it
    marlin_24  marlin's tiles in another order of columns: two rows of four are kept, and K counts these
    n32k16     bytes [N rounded up to 32, K]: tiles of 16 x 32, of AllSpark
    bytes      bytes [K, N]
"""

from __future__ import annotations

from typing import Any, Literal

Layout = Literal["awq", "gptq", "exllama", "marlin", "marlin_8", "w4a8", "marlin_24", "n32k16", "bytes"]
ColumnOrder = Literal["natural", "marlin_64", "marlin_32", "marlin_fp4", "marlin_24", "n32k16"]
ZeroLayout = Literal["awq", "gptq", "marlin", "marlin_8"]


def code_bit(layout: Layout, bits: int, size: tuple[int, int], k: Any, n: Any, j: int) -> Any:
    """The offset of bit `j` of the quant at row `k` and column `n`, in bits from the first word on.

    Args:
        layout: of the weight.
        bits: of a quant: 2, 3, 4 or 8.
        size: (K, N) of the weight.
    """
    rows, columns = size
    if layout == "awq":
        return zero_bit("awq", bits, columns, k, n, j)
    if layout == "gptq":
        at = k * bits + j
        return (at // 32 * columns + n) * 32 + at % 32
    if layout == "exllama":
        words, fields = unit(bits)
        at = shuffled_bit(bits, k % fields, j)
        return ((k // fields * words + at // 32) * columns + n) * 32 + at % 32
    if layout == "bytes":
        return (k * columns + n) * 8 + j
    if layout == "n32k16":
        tile = k // 16 * 64 + k % 8 // 2 * 16 + n % 32 // 8 * 4 + k % 16 // 8 * 2 + k % 2
        return ((n // 32 * 8 + n % 8) * 4 * rows + tile) * 8 + j
    return _marlin_bit(layout, bits, columns, k, n, j)


def _marlin_bit(layout: Layout, bits: int, columns: int, k: Any, n: Any, j: int) -> Any:
    """`code_bit` of Marlin's tiles. A lane has four words of a tile of 4-bit quants, and eight of 8-bit quants."""
    if layout in ("marlin_8", "w4a8"):
        tile = k // 32 * (columns // 32) + n // 32
        lane, word = n % 8 * 4 + k % 16 // 4, n % 32 // 8
        half = k % 32 // 16  # upper or lower half of a lane's pair of words, for 8-bit quants
        field = k % 4 * 2 + half if bits == 4 else k % 4
        if layout == "w4a8":
            lane_words = 4 - 2 * (n // 32 >= columns // 32)
            words = k // 32 * columns * 4 + n // 32 * 128 + lane * lane_words + word
            return words * 32 + (half * 4 + k % 4) * 4 + j
    else:
        tile = k // 16 * (columns // 64) + n // 64
        lane, word, half = n % 8 * 4 + k % 8 // 2, n % 64 // 16, n % 16 // 8
        if layout == "marlin_24":
            lane, word, half = n % 64 // 8 * 4 + k % 8 // 2, n % 4, n % 8 // 4
        field = k % 2 * (4 if bits == 4 else 2) + k % 16 // 8
        if bits == 4:
            field = field + half * 2
    if bits == 4:
        return (tile * 128 + lane * 4 + word) * 32 + field * 4 + j
    return (tile * 256 + lane * 8 + word * 2 + half) * 32 + field * 8 + j


def zero_bit(layout: ZeroLayout, bits: int, columns: int, g: Any, n: Any, j: int) -> Any:
    """The bit offset of bit `j` of the zero point of group `g` and column `n`, in words [groups, N bits / 32]."""
    fields = 32 // bits
    if layout == "gptq":
        return (g * columns + n) * bits + j
    place = n
    if layout != "awq":
        place = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
    if layout != "marlin_8":  # even columns are in the lower half of a word, for 4 and for 8 bits
        place = place // fields * fields + place % fields // 2 + place % 2 * (fields // 2)
    return (g * columns + place) * bits + j


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
