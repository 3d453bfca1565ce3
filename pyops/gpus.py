"""NVIDIA's GPUs as its data sheets and the CUDA programming guide describe them, for plans without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ._core.system import device
from ._core.system.device import Device


class Gpu(NamedTuple):
    """The figures of a GPU.

    Attributes:
        model: by which its calls are planned.
        sm_kib: shared memory of an SM.
        l2_mib: L2 cache.
        gbs: memory bandwidth in GB/s.
    """

    model: Device
    sm_kib: int
    l2_mib: int
    gbs: int


def _other(arch: str, num_sms: int) -> Device:
    """The model of a GPU that differs from the first one of its architecture by the number of SMs."""
    return replace(device.model(arch), num_sms=num_sms)


# The first GPU of an architecture is the one that its model in the core stands for.
GPUS = {
    "t4": Gpu(device.model("sm_75"), 64, 4, 320),
    "a100": Gpu(device.model("sm_80"), 164, 40, 2039),
    "a10": Gpu(device.model("sm_86"), 100, 6, 600),
    "rtx-3090": Gpu(_other("sm_86", 82), 100, 6, 936),
    "l4": Gpu(device.model("sm_89"), 100, 48, 300),
    "rtx-4090": Gpu(_other("sm_89", 128), 100, 72, 1008),
    "l40s": Gpu(_other("sm_89", 142), 100, 96, 864),
    "h200": Gpu(device.model("sm_90"), 228, 50, 4800),
    "b200": Gpu(device.model("sm_100"), 228, 126, 8000),
    "rtx-5090": Gpu(device.model("sm_120"), 100, 96, 1792),
    "gb10": Gpu(device.model("sm_121"), 100, 24, 273),
}


def model(name: str) -> Device:
    """The model of a GPU (``"l4"``) or of an architecture (``"sm_89"``). Raises KeyError for another name."""
    return GPUS[name].model if name in GPUS else device.model(name)
