"""The rates of the cost model of grouped GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core.system.device import Device
from ...tuning import engines

FAMILY = "grouped"  # pyops/tuning/grouped.json has the rates


@dataclass(frozen=True, slots=True)
class GroupedRates:
    """What the times of the kernels are made of, in microseconds.

    Attributes:
        launch: a launch, with the first loads.
        bytes_per_us: bytes from device memory.
        k_tile: grouped_gemm_sm90.cu: a k-tile.
        at_once: likewise, further with block scales and one set of accumulators of two warpgroups.
        mma: for each row of b of the k-tile, and 128 rows of a: the tensor cores.
        promoted: block scales, for each row of b of the k-tile, and 128 rows of a: to promote accumulators.
        l2: for each operand row of the k-tile that comes from the L2 cache.
        gather: for each row of a of the k-tile, further: to copy it alone.
        tile: a tile: to find its expert and its rows.
        epilogue: the epilogue of a tile, for each of its columns, and 128 rows.
        mma_k_tile, mma_area: grouped_gemm_sm80: a k-tile, and its MMAs, for each element of the tile.
        mma_shared: for each byte of shared memory that a k-tile writes and reads, while MMAs run.
        mma_converted: for each byte of fp8 that the warps read in a k-tile: to convert it.
        mma_tile: to begin a tile and to end it.
        mma_padding: a block of padding alone: it waits for its first loads.
        small_m, small_m_row: grouped_gemm_sm80_small_m.cu: to copy and read a weight of an SM; to multiply it by a row
            of a.
        small_m_converted: to convert a weight of an SM.
        small_m_idle: further times this, divided by the warps of an SM, which wait for their own results.
        small_m_tile: to begin a tile and to end it.
        simt, simt_load: grouped_gemm_simt: a multiplication of an SM; an operand element that it loads.
        slot: for each slot of the sorted lists: to write and to read it.
    """

    launch: float
    bytes_per_us: float
    k_tile: float
    at_once: float
    mma: float
    promoted: float
    l2: float
    gather: float
    tile: float
    epilogue: float
    mma_k_tile: float
    mma_area: float
    mma_shared: float
    mma_converted: float
    mma_tile: float
    mma_padding: float
    small_m: float
    small_m_row: float
    small_m_converted: float
    small_m_idle: float
    small_m_tile: float
    simt: float
    simt_load: float
    slot: float


def of(device: Device) -> GroupedRates:
    """The rates of a device."""
    return engines.rates(GroupedRates, FAMILY, device.name)
