"""Device: what plans know of a GPU, its architecture and its limits, read once per device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from .. import config
from ..errors import SwitchError, UnsupportedGpuError
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
        translates: the GPU is newer than `arch`, and its driver translates kernels from PTX for `arch` (PYOPS_ARCH).
        tiles: NVRTC and the driver compile CUDA Tile C++ (tile.cuh); False for a model.
        portable: plans choose none of the kernels with instructions that no GPU has run yet (_core/op/trust.py).
    """

    index: int
    arch: str
    num_sms: int
    warp_size: int
    shared_memory: int
    cluster: int = 1
    name: str = ""
    translates: bool = False
    tiles: bool = False
    portable: bool = False

    @property
    def as_portable(self) -> Device:
        """This device, for plans of portable kernels alone."""
        return replace(self, portable=True)

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
        return f"{self.arch}a" if _capability(self.arch) >= 90 else self.arch

    def supports(self, feature: str) -> bool:
        """Whether the device has a feature.

        The features are ``"mma"`` (warp-level MMA of float16 and int8, mma.cuh), ``"matrix_cores"`` (AMD's MFMA and
        WMMA, matrix_core.cuh), ``"products"`` (either of these, product.cuh), ``"bfloat16_products"``,
        ``"async_copies"`` (cp.async to shared memory), ``"clusters"``, ``"tma"`` (bulk tensor copies), ``"wgmma"``
        (Hopper's warpgroup MMA), ``"tcgen05"`` (Blackwell's MMA, through CUDA Tile C++) and
        ``"block_scaled_products"`` (mma.sync with block scales).
        """
        capability = _capability(self.arch)
        matrix_cores = self.arch in _MATRIX_CORES and not self.portable
        return {
            "mma": capability >= OLDEST,
            "products": capability >= OLDEST or matrix_cores,
            "bfloat16_products": capability >= 80 or matrix_cores,
            "fp8_products": capability == 89 or capability >= 120,
            "matrix_cores": matrix_cores,
            "async_copies": capability >= 80,
            "clusters": capability >= 90,
            "tma": capability >= 90,
            "wgmma": capability == 90 and not self.translates,  # no later GPU has it
            "tcgen05": capability in (100, 103) and self.tiles and not self.portable,
            # They need sm_120a or sm_121a.
            "block_scaled_products": capability in (120, 121) and not self.translates and not self.portable,
        }[feature]


# AMD architectures with matrix cores that matrix_core.cuh supports.
_MATRIX_CORES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201")
OLDEST = 75  # least compute capability (major * 10 + minor) for which kernels are written


def _capability(arch: str) -> int:
    """The compute capability of ``"sm_90"``: 90; 0 on HIP."""
    return int(arch[3:]) if arch.startswith("sm_") else 0


def _largest_cluster(arch: str) -> int:
    return 8 if _capability(arch) >= 90 else 1


def _cuda(arch: str, num_sms: int, shared_kib: int) -> Device:
    return Device(-1, arch, num_sms, 32, shared_kib * 1024, _largest_cluster(arch))


# The model of each architecture is one GPU of it; `pyops.gpus` has others.
_CUDA = (
    _cuda("sm_75", 40, 64),  # T4
    _cuda("sm_80", 108, 163),  # A100
    _cuda("sm_86", 72, 99),  # A10
    _cuda("sm_89", 58, 99),  # L4
    _cuda("sm_90", 132, 227),  # H200
    _cuda("sm_100", 148, 227),  # B200
    _cuda("sm_120", 170, 99),  # RTX 5090
    _cuda("sm_121", 48, 99),  # GB10
)
_HIP = (
    Device(-1, "gfx90a", 104, 64, 64 * 1024),  # one of the two dies of an MI250X
    Device(-1, "gfx942", 304, 64, 64 * 1024),
    Device(-1, "gfx950", 256, 64, 160 * 1024),
    Device(-1, "gfx1100", 96, 32, 64 * 1024),
    Device(-1, "gfx1201", 64, 32, 64 * 1024),
)
_MODELS = {one.arch: one for one in (*_CUDA, *_HIP)}
# {warp size: the device that the host backend stands for}. Both read an fp8 cache as e4m3fn.
_HOST = {32: _MODELS["sm_90"], 64: replace(_MODELS["gfx942"], arch="gfx90a")}


def model(name: str = "sm_90") -> Device:
    """The model of an architecture, for checks and for compiling on a machine without a GPU of it."""
    return _MODELS[name]


def host(warp_size: int = 32) -> Device:
    """The device model by which calls with CPU tensors are planned; the host backend runs its kernels."""
    older = _asked()
    return _HOST[warp_size] if older is None or older.warp_size != warp_size else older


def _asked() -> Device | None:
    """The model of the architecture that PYOPS_ARCH names."""
    if (arch := config.arch()) is None:
        return None
    known = {one.arch: one for one in _CUDA}
    if arch not in known:
        raise SwitchError(f'PYOPS_ARCH: expected one of {", ".join(known)}, got "{arch}"')
    return known[arch]


def table_name(product: str) -> str:
    """The name of a product's tuning table: ``"nvidia-h200"`` for ``"NVIDIA H200"``."""
    return re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")


@cache
def get(index: int) -> Device:
    """The device `index` of this process, as a GPU of the architecture of PYOPS_ARCH if that is older.

    Raises UnsupportedGpuError for a GPU without kernels, and SwitchError for a value of PYOPS_ARCH that it cannot run.
    """
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    name = properties["name"].decode()
    if cupy.cuda.runtime.is_hip:
        arch = properties["gcnArchName"].decode().split(":")[0]
    else:
        arch = f"sm_{properties['major']}{properties['minor']}"
        if _capability(arch) < OLDEST:
            raise UnsupportedGpuError(index, name, arch)
    found = Device(
        index,
        arch,
        properties["multiProcessorCount"],
        properties["warpSize"],
        properties.get("sharedMemPerBlockOptin", properties["sharedMemPerBlock"]),
        _largest_cluster(arch),
        table_name(name),
        tiles=_capability(arch) >= 80 and _compiles_tiles(),
    )
    older = _asked()
    if older is None or older.arch == arch:
        return found
    if _capability(older.arch) > _capability(arch):
        raise SwitchError(f"PYOPS_ARCH: {name} is {arch} and cannot run code for {older.arch}")
    shared_memory = min(older.shared_memory, found.shared_memory)
    return replace(found, arch=older.arch, shared_memory=shared_memory, cluster=older.cluster, name="", translates=True)


def _compiles_tiles() -> bool:
    """Whether NVRTC and the driver are of CUDA 13.4 or later: CUDA Tile C++ with gathered rows."""
    from cupy_backends.cuda.libs import nvrtc

    return bool(nvrtc.getVersion() >= (13, 4) and cupy.cuda.runtime.driverGetVersion() >= 13040)


@cache
def count() -> int:
    """Number of devices that this process sees; 0 without a driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
