"""The rates of the cost model of dense GEMMs, as `python -m benchmarks.fit gemm` fits them on a device."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core.system.device import Device
from ...tuning import engines

# {CTAs of a cluster: clusters that the device holds, per SM}. Clusters of 4 leave some SMs idle.
CLUSTERS = {1: 1.0, 2: 1 / 2, 4: 30 / 132}
FAMILY = "gemm"  # pyops/tuning/gemm.json has the rates


@dataclass(frozen=True, slots=True)
class GemmRates:
    """What the times of the kernels are made of, in microseconds.

    Attributes:
        launch, swap_launch: a launch of gemm_sm90.cu, and of the other two, with the first loads.
        bytes_per_us: bytes from device memory.
        k_tile: gemm_sm90.cu: a k-tile.
        mma: for each row of b of the k-tile: the tensor cores, and the writes to shared memory.
        l2: for each operand row of the k-tile that comes from the L2 cache; a cluster of two loads half of b's.
        eight_bits, blocked: factors on a k-tile of 8-bit operands, and of block scales.
        epilogue: the epilogue of a tile, for each of its columns.
        part, part_column: stream-K: to write, or to read and add, a partial tile, and for each of its columns.
        swap_k_tile: gemm_sm90_swap_ab.cu: a k-tile.
        swap_m, swap_n: for each row of a, and of b, of the k-tile.
        swap_promoted, swap_blocked: to promote fp8 accumulators, and block scales, for each row of a of the k-tile.
        exchange: to reduce a tile through distributed shared memory, for each doubling of the split-K CTAs.
        swap_end: to store the tile, or to send its parts, for each row of a of a CTA's share.
        mma_row: gemm_sm80.cu: a k-tile of an SM, for each of its operand rows.
        mma_part: to write, or to read and add, a part of a tile of split-K.
        gemv_launch, gemv_bytes_per_us: gemv.cu: a launch, and the bytes that it loads.
        gemv_row: for each element of the weight of an SM, and each further row of a.
        simt: gemm_simt.cu: a multiplication of an SM.
    """

    launch: float
    swap_launch: float
    bytes_per_us: float
    k_tile: float
    mma: float
    l2: float
    eight_bits: float
    blocked: float
    epilogue: float
    part: float
    part_column: float
    swap_k_tile: float
    swap_m: float
    swap_n: float
    swap_promoted: float
    swap_blocked: float
    exchange: float
    swap_end: float
    mma_row: float
    mma_part: float
    gemv_launch: float
    gemv_bytes_per_us: float
    gemv_row: float
    simt: float

    def overlapped(self, loop: float, nbytes: int) -> float:
        """Microseconds of main loops that take `loop` while `nbytes` come from device memory."""
        return engines.overlapped(loop, nbytes / self.bytes_per_us)


def of(device: Device) -> GemmRates:
    """The rates of a device."""
    return engines.rates(GemmRates, FAMILY, device.name)


def num_clusters(size: int, device: Device) -> int:
    """Clusters of `size` CTAs that a device holds at a time, one CTA to an SM."""
    return int(CLUSTERS[size] * device.num_sms)
