"""The cost model of grouped GEMMs with K-major quantized weights: which of three routes is the fastest.

Costs are cycles of an SM for a piece of 64 x 256 weights of an expert, by the rows of the expert: with mma.sync and
with WGMMA, where each tile of rows dequantizes the piece again, and with weights that are written to memory in full.
Their rates are those of an H200 at 1755 MHz, from times in docs/performance/experts.md; those of e4m3 follow from the
number of instructions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_WEIGHTS = 64 * 256  # weights of a piece
_BYTES = 4.3e6 / (132 * 1755)  # bytes of DRAM per cycle of an SM
_DENSE_BYTES = 2  # bytes of a weight that is written in full: it is written once, and read once
# WGMMA: cycles for a slot of a tile. Dense GEMMs reach 8 only on paper: power and L2 leave 13 cycles for a row.
_WGMMA_SLOT, _DENSE_ROW = 8.0, 13.0
_L2_BYTES = 24.0  # bytes of the L2 cache per cycle of an SM
_GATHER_ROW = 0.4  # WGMMA: cycles to gather a row, which 8192 rows of weights share
# Factors on dequantization: k-tiles of 64 instead of 128 elements, by instructions; tiles of 128 weight rows instead of
# 256, which only tiles with more slots have.
_SHORT_STEP, _NARROW_TILE, _WIDE_SLOTS = 1.3, 1.5, 96


@dataclass(frozen=True, slots=True)
class CodedRates:
    """Cycles for a piece of weights.

    Attributes:
        nbytes: bytes of a weight and its share of a scale.
        mma: mma.sync: a tile of 8 slots, and one of 16.
        dequantization: WGMMA with k-tiles of 128: a tile, without its WGMMAs.
    """

    nbytes: float
    mma: tuple[float, float]
    dequantization: float


# {weight type: its rates}
_RATES = {
    "uint4": CodedRates(0.52, (670, 970), 540),
    "float4_e2m1f": CodedRates(0.56, (830, 1130), 1080),
    "float8_e4m3fn": CodedRates(1.03, (830, 1130), 1230),
    "uint8": CodedRates(1.02, (1000, 1300), math.inf),
    "int8": CodedRates(1.0, (1000, 1300), math.inf),
}


def by_mma(kind: str, rows: float, slots: int) -> float:
    """Cycles of wq_grouped_gemm_sm80.cu with tiles of 8 or 16 slots."""
    return _tiles(rows, slots) * max(_RATES[kind].mma[slots > 8], _RATES[kind].nbytes * _WEIGHTS / _BYTES)


def by_wgmma(kind: str, rows: float, slots: int, step: int) -> float:
    """Cycles of wq_grouped_gemm_sm90.cu with tiles of `slots` slots and k-tiles of `step` elements, or of none."""
    if step == 0:
        return math.inf
    dequantization = _RATES[kind].dequantization * (_SHORT_STEP if step < 128 else 1.0)
    dequantization *= _NARROW_TILE if slots > _WIDE_SLOTS else 1.0
    return _tiles(rows, slots) * (dequantization + _WGMMA_SLOT * slots) + _GATHER_ROW * rows


def dense(kind: str, rows: float, slots: int) -> float:
    """Cycles to write the weights in full, and of a dense grouped GEMM with tiles of `slots` slots."""
    read = _DENSE_BYTES * _WEIGHTS
    written = (_RATES[kind].nbytes + _DENSE_BYTES) * _WEIGHTS / _BYTES
    return written + max(read / _BYTES, _tiles(rows, slots) * max(read / _L2_BYTES, _DENSE_ROW * slots))


def _tiles(rows: float, slots: int) -> float:
    """The expected tiles of an expert with about `rows` rows: one if that and the standard deviation fit."""
    return 1.0 if rows + math.sqrt(rows) <= slots else rows / slots + 0.5
