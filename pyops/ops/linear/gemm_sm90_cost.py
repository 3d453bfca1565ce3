"""The cost model of the GEMMs on Hopper: microseconds of a config from the rates of a device.

`python -m benchmarks.fit` fits the rates on a device and prints the errors of the fit. A kernel's time is a launch, the
slower of two streams (the main loop of the busiest SM, and the bytes of the operands from device memory), and the
epilogues and reductions that nothing overlaps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from ... import tuning
from ..._core.system.device import Device

# {CTAs of a cluster: clusters that the device holds, per SM}. Clusters of 4 leave some SMs idle.
CLUSTERS = {1: 1.0, 2: 1 / 2, 4: 30 / 132}
TABLE = tuning.TABLES / "gemm_sm90.json"  # {device: rates and the errors of their fit}
_SOFTNESS = 4.0  # two streams that overlap take the 4-norm of their times: 19 % above the slower if they are equal


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
        mma_row: gemm_sm80.cu: a k-tile of an SM, for each of its operand rows.
        mma_part: to write, or to read and add, a part of a tile of split-K.
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
    mma_row: float
    mma_part: float

    def overlapped(self, loop: float, nbytes: int) -> float:
        """Microseconds of main loops that take `loop` while `nbytes` come from device memory."""
        memory = nbytes / self.bytes_per_us
        return float((loop**_SOFTNESS + memory**_SOFTNESS) ** (1 / _SOFTNESS))


@cache
def of(device: Device) -> GemmRates:
    """The rates of a device; those of the H200 for a device that has not been measured."""
    known = json.loads(TABLE.read_text(encoding="utf-8"))
    return GemmRates(**known.get(device.name, known["nvidia-h200"])["rates"])
