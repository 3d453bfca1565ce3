"""The rates of the cost model of GEMMs with packed weights, as `python -m benchmarks.fit packed` fits them."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core.system.device import Device
from ...tuning import engines

FAMILY = "packed"  # pyops/tuning/packed.json has the rates


@dataclass(frozen=True, slots=True)
class PackedRates:
    """What the times of the kernels are made of, in microseconds.

    Attributes:
        launch: a launch with the first loads.
        bytes_per_us: bytes from device memory.
        exchange: to reduce a tile through distributed shared memory, for each doubling of the split-K CTAs.
        k_tile: wq_gemm_sm90.cu: what nothing overlaps in a k-tile, of 128 or 64 rows of the weight.
        code: to dequantize a column of a k-tile: 64 weights, with W4A8 128.
        table_code, awq_code: factors on `code` of W4A8's tables, and of AWQ's layout, there and on `mma_code`.
        table_macs_per_us: multiplications of W4A8 that the device's power allows.
        awq_bytes: factor on AWQ's bytes where a warp of wq_gemm_sm80.cu loads only 32 bytes of a row.
        mma: the tensor cores, for each row of a and each 128 columns of a k-tile.
        promote: to promote fp8 accumulators, for each row of a and each 128 columns of a k-tile.
        l2: for each 128 bytes of a k-tile's operands from the L2 cache.
        tile, epilogue: a tile: its first loads, and its epilogue for each row of a and each 128 columns.
        neighbour: to start a tile in a cluster that multicasts a.
        part, part_row: stream-K: to write, or to read and add, a partial tile, and for each row and each 128 columns.
        mma_code: wq_gemm_sm80.cu: to dequantize a weight of an SM.
        mma_place: with 2:4 sparsity, to expand a weight of an SM to its position in a group of four.
        mma_row: to multiply a weight of an SM by a row of a.
        mma_idle: factor on these, on large_mma and large_code: issue slots that latency leaves idle with one warp on an
            SM.
        mma_end: to reduce a tile over the warps of a CTA, for each row of each warp.
        large_k_tile: wq_gemm_sm80_large_m.cu: what nothing overlaps in a k-tile.
        large_mma: the tensor cores, for each element of a tile.
        large_shared: for each byte of shared memory that a k-tile writes and reads.
        large_code: to dequantize a column of a k-tile in one warp.
        few_k_tile, few_end: wq_gemm_sm90_small_m.cu: a k-tile, and the reduction and epilogue of a tile.
        few_across, few_column: factors on the k-tile where words are of a row, and of a column, not of a tile.
        cdna_row: wq_gemm_cdna.cu: a k-tile of a compute unit, for each row of a and each 128 columns.
        cdna_code: to dequantize a column of a k-tile.
        cdna_part: to write, or to read and add, a part of a tile of split-K.
        dense_launch, dense_bytes_per_us: dequantize_packed.cu: a launch, and the bytes that it reads and writes.
        dense_weight: to dequantize a weight of an SM.
    """

    launch: float
    bytes_per_us: float
    exchange: float
    k_tile: float
    code: float
    table_code: float
    table_macs_per_us: float
    awq_code: float
    awq_bytes: float
    mma: float
    promote: float
    l2: float
    tile: float
    epilogue: float
    neighbour: float
    part: float
    part_row: float
    mma_code: float
    mma_place: float
    mma_row: float
    mma_idle: float
    mma_end: float
    large_k_tile: float
    large_mma: float
    large_shared: float
    large_code: float
    few_k_tile: float
    few_end: float
    few_across: float
    few_column: float
    cdna_row: float
    cdna_code: float
    cdna_part: float
    dense_launch: float
    dense_bytes_per_us: float
    dense_weight: float


def of(device: Device) -> PackedRates:
    """The rates of a device."""
    return engines.rates(PackedRates, FAMILY, device.name)
