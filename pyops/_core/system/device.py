"""Device: what plans know of a GPU, its architecture and its limits, read once per device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from .lazy import cupy


@dataclass(frozen=True)
class Device:
    """A GPU, or the model of one for planning on a machine without a GPU.

    Attributes:
        index: ordinal among the process's devices; -1 for a model.
        arch: ``"sm_90"`` on CUDA, ``"gfx942"`` on HIP.
        num_sms: number of SMs (compute units on AMD GPUs).
        warp_size: threads that run in lockstep.
        shared_memory: bytes one block can ask for, opt-in included.
        cluster: largest thread block cluster, in CTAs; 1 for architectures without clusters.
        name: ``"nvidia-h200"``, the name of its tuning table (`tuning`); empty for a model.
    """

    index: int
    arch: str
    num_sms: int
    warp_size: int
    shared_memory: int
    cluster: int = 1
    name: str = ""

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may be started while the one before it still runs (programmatic dependent launch)."""
        return self.supports("clusters")

    @property
    def max_threads_x(self) -> int:
        """Threads of one launch along x. The HIP runtime counts them in 32 bits; CUDA limits only the blocks."""
        return 2**41 if self.arch.startswith("sm_") else 2**32 - 1

    @property
    def arch_feature(self) -> str:
        """The architecture-specific target, with instructions that later architectures may lack: ``"sm_90a"``."""
        return f"{self.arch}a" if self.arch.startswith("sm_") and int(self.arch[3:]) >= 90 else self.arch

    def supports(self, feature: str) -> bool:
        """Whether the device has a feature.

        The features are ``"mma"`` (warp-level MMA, mma.cuh), ``"matrix_cores"`` (AMD's MFMA and WMMA, matrix_core.cuh),
        ``"products"`` (either of these, product.cuh), ``"async_copies"`` (cp.async to shared memory), ``"clusters"``,
        ``"tma"`` (bulk tensor copies) and ``"wgmma"`` (Hopper's warpgroup MMA).
        """
        capability = int(self.arch[3:]) if self.arch.startswith("sm_") else 0
        matrix_cores = self.arch in _MATRIX_CORES
        return {
            "mma": capability >= 80,
            "products": capability >= 80 or matrix_cores,
            "matrix_cores": matrix_cores,
            "async_copies": capability >= 80,
            "clusters": capability >= 90,
            "tma": capability >= 90,
            "wgmma": capability == 90,
        }[feature]


# AMD architectures with matrix cores that matrix_core.cuh supports.
_MATRIX_CORES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201")
_MODELS = {
    "sm_80": Device(-1, "sm_80", 108, 32, 163 * 1024),
    "sm_90": Device(-1, "sm_90", 132, 32, 227 * 1024, 8),
    "sm_100": Device(-1, "sm_100", 148, 32, 227 * 1024, 8),
    "gfx90a": Device(-1, "gfx90a", 104, 64, 64 * 1024),  # one of the two dies of an MI250X
    "gfx942": Device(-1, "gfx942", 304, 64, 64 * 1024),
    "gfx950": Device(-1, "gfx950", 256, 64, 160 * 1024),
    "gfx1100": Device(-1, "gfx1100", 96, 32, 64 * 1024),
    "gfx1201": Device(-1, "gfx1201", 64, 32, 64 * 1024),
}
# {warp size: the device that the host backend stands for}. Both read an fp8 cache as e4m3fn.
_HOST = {32: _MODELS["sm_90"], 64: replace(_MODELS["gfx942"], arch="gfx90a")}


def model(arch: str = "sm_90") -> Device:
    """The model of a device, for checks on the CPU and for compiling on a machine without a GPU."""
    return _MODELS[arch]


def host(warp_size: int = 32) -> Device:
    """The device model by which calls with CPU tensors are planned; the host backend runs its kernels."""
    return _HOST[warp_size]


def table_name(product: str) -> str:
    """The name of a product's tuning table: ``"nvidia-h200"`` for ``"NVIDIA H200"``."""
    return re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")


@cache
def get(index: int) -> Device:
    """The device `index` of this process."""
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    if cupy.cuda.runtime.is_hip:
        arch = properties["gcnArchName"].decode().split(":")[0]
    else:
        arch = f"sm_{properties['major']}{properties['minor']}"
    return Device(
        index,
        arch,
        properties["multiProcessorCount"],
        properties["warpSize"],
        properties.get("sharedMemPerBlockOptin", properties["sharedMemPerBlock"]),
        8 if arch.startswith("sm_") and int(arch[3:]) >= 90 else 1,
        table_name(properties["name"].decode()),
    )


@cache
def count() -> int:
    """Number of devices that this process sees; 0 without a driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
