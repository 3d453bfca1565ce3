"""The rates of the cost model of dense GEMMs, as `python -m benchmarks.fit gemm` fits them on a device."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core.system.device import Device
from ...tuning import engines

# {CTAs of a cluster: clusters that the device holds, per SM}. Clusters of 4 leave some SMs idle.
CLUSTERS = {1: 1.0, 2: 1 / 2, 4: 30 / 132}
FAMILY = "gemm"  # pyops/tuning/gemm.json has the rates
POWER_SOFTNESS = 16.0  # of the bound by power: nearly a maximum


@dataclass(frozen=True, slots=True)
class GemmRates:
    """What the times of the kernels are made of, in microseconds.

    Attributes:
        bytes_per_us: bytes of the operands, from device memory.
        l2_bytes_per_us: bytes that all tiles load, from the L2 cache.
        macs_per_us: multiplications of 16-bit elements that the device's power allows; of 8-bit ones twice as many.
        launch: gemm_sm90.cu: a launch, with the first loads.
        k_tile: a k-tile.
        mma: for each row of b of the k-tile.
        blocked, blocked_one_set: factors on a k-tile with block scales, with two sets of accumulators and with one.
        tile, epilogue: the epilogue of a tile, and for each of its columns.
        stream_k: to reduce the tiles of the last wave.
        stream_k_column, stream_k_part: for each of their columns, and for each column of each part.
        swap_launch: gemm_sm90_swap_ab.cu: a launch, with the first loads.
        swap_k_tile: a k-tile.
        swap_m: for each row of a of the k-tile.
        swap_promoted, swap_blocked: to promote fp8 accumulators, and block scales, for each row of a of the k-tile.
        swap_alternating: factor on a k-tile where the two warpgroups alternate k-tiles.
        swap_reload: b for each further row tile, as a part of its bytes from device memory.
        swap_tile: a wave of tiles.
        swap_store: to store the tile, for each of its elements that a CTA stores.
        swap_scales: to load the scales of 8-bit operands for the epilogue.
        exchange, exchange_row: to reduce a tile through distributed shared memory, and for each row of a, of 64 of b.
        mma_launch: gemm_sm80.cu: a launch, with the first loads.
        mma_k_tile, mma_area: a k-tile, and its MMAs, for each element of the tile.
        mma_shared: for each byte of shared memory that a k-tile writes and reads, while MMAs run.
        mma_converted: for each byte of fp8 that a warp reads and converts to float16.
        conversion: gather_columns.cu: to convert an element of fp8 to float16 before gemm_sm80.cu runs.
        mma_block: to begin and end a block's tile.
        mma_split, mma_split_byte: to reduce the partial accumulators of split-K through device memory, and for each
            byte of them.
        gemv_launch, gemv_bytes_per_us: gemv.cu: a launch, and the bytes that it loads.
        gemv_row: for each element of the weight of an SM, and each further row of a.
        simt: gemm_simt.cu: a multiplication of an SM.
    """

    bytes_per_us: float
    l2_bytes_per_us: float
    macs_per_us: float
    launch: float
    k_tile: float
    mma: float
    blocked: float
    blocked_one_set: float
    tile: float
    epilogue: float
    stream_k: float
    stream_k_column: float
    stream_k_part: float
    swap_launch: float
    swap_k_tile: float
    swap_m: float
    swap_promoted: float
    swap_blocked: float
    swap_alternating: float
    swap_reload: float
    swap_tile: float
    swap_store: float
    swap_scales: float
    exchange: float
    exchange_row: float
    mma_launch: float
    mma_k_tile: float
    mma_area: float
    mma_shared: float
    mma_converted: float
    conversion: float
    mma_block: float
    mma_split: float
    mma_split_byte: float
    gemv_launch: float
    gemv_bytes_per_us: float
    gemv_row: float
    simt: float

    def overlapped(self, loop: float, nbytes: float, l2_bytes: float = 0.0, macs: float = 0.0) -> float:
        """Microseconds of streams that overlap: main loops of the busiest SM that take `loop`, and bytes from device
        memory and from the L2 cache. Power hardly adds to them unless it is the bound."""
        time = engines.overlapped(loop, nbytes / self.bytes_per_us, l2_bytes / self.l2_bytes_per_us)
        return engines.overlapped(time, macs / self.macs_per_us, softness=POWER_SOFTNESS)

    def reduction(self, splits: int, tiles: int, tile_elements: int) -> float:
        """Microseconds to reduce the float32 partial accumulators of all tiles of split-K; 0 without it."""
        return self.mma_split + self.mma_split_byte * (tiles * splits * tile_elements * 4) if splits > 1 else 0.0


def of(device: Device) -> GemmRates:
    """The rates of a device."""
    return engines.rates(GemmRates, FAMILY, device.name)


def num_clusters(size: int, device: Device) -> int:
    """Clusters of `size` CTAs that a device holds at a time, one CTA to an SM."""
    return int(CLUSTERS[size] * device.num_sms)
