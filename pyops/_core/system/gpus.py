"""NVIDIA's GPUs as its data sheets and the CUDA programming guide describe them, for plans without a GPU."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """The figures of a GPU.

    Attributes:
        arch: ``"sm_90"``.
        num_sms: number of SMs.
        block_kib, sm_kib: shared memory that a block can ask for, and that of an SM.
        l2_mib: L2 cache.
        gbs: memory bandwidth in GB/s.
    """

    arch: str
    num_sms: int
    block_kib: int
    sm_kib: int
    l2_mib: int
    gbs: int


# The first GPU of an architecture also stands for the architecture.
GPUS = {
    "t4": Gpu("sm_75", 40, 64, 64, 4, 320),
    "a100": Gpu("sm_80", 108, 163, 164, 40, 2039),
    "a10": Gpu("sm_86", 72, 99, 100, 6, 600),
    "rtx-3090": Gpu("sm_86", 82, 99, 100, 6, 936),
    "l4": Gpu("sm_89", 58, 99, 100, 48, 300),
    "rtx-4090": Gpu("sm_89", 128, 99, 100, 72, 1008),
    "l40s": Gpu("sm_89", 142, 99, 100, 96, 864),
    "h200": Gpu("sm_90", 132, 227, 228, 50, 4800),
    "b200": Gpu("sm_100", 148, 227, 228, 126, 8000),
    "rtx-5090": Gpu("sm_120", 170, 99, 100, 96, 1792),
    "gb10": Gpu("sm_121", 48, 99, 100, 24, 273),
}
