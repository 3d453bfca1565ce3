"""GEMMs of at most 16 rows with packed weights by WGMMA (compute capability 9.0): wq_gemm_sm90_small_m.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from . import packed_hopper
from .packed_problem import PackedProblem, PackedWeight

_wq_gemm_sm90_small_m = Kernel("linear/wq_gemm_sm90_small_m.cu")

MAX_ROWS = 16  # rows of a tile
STEP = 128  # weight rows of a k-tile
_TILE_N, _WARP_COLUMNS = 256, 64  # columns of a tile, columns of a warp
_WARPS = 16  # consumer warps
_BARRIER_BYTES = 8  # bytes of an mbarrier
_TURNS = 4  # consumer warpgroups; each takes every fourth k-tile
_STAGES = (4, 8)  # numbers of stages that fit into shared memory
_LAYOUTS = ("marlin", "awq", "exllama")
# Share of SMs with a tile from which on the kernel is faster than wq_gemm_sm80.cu: measured on an
# H200 (docs/performance/packed.md, "M of 9 to 16 by WGMMA").
_MIN_FULL = 0.8


@dataclass(frozen=True, slots=True)
class PackedNarrowConfig:
    """The geometry of wq_gemm_sm90_small_m.cu.

    Attributes:
        stages: k-tiles in shared memory; each warpgroup takes every fourth.
    """

    stages: int = 8

    def __post_init__(self) -> None:
        if self.stages not in _STAGES:
            raise ValueError(f"no geometry of wq_gemm_sm90_small_m.cu: {self}")

    def candidates(self, problem: PackedProblem, device: Device) -> list[PackedNarrowConfig]:
        """Fewer stages."""
        return tuning.varied(self, stages=_STAGES)

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """One block for each tile."""
        weight, device = problem.weight, problem.device
        loads = MAX_ROWS * STEP * 2 + (STEP * weight.bits + problem.group_bits()) * _TILE_N // 8
        stage = -(-loads // 1024) * 1024 + 2 * _BARRIER_BYTES
        sums = MAX_ROWS * _TILE_N * 4
        tiles = -(-problem.m // MAX_ROWS) * -(-weight.n // _TILE_N)
        kernel = problem.kernel(_wq_gemm_sm90_small_m.for_arch(device.arch_feature))
        launch = kernel(
            **problem.constants(),
            TILE_M=MAX_ROWS,
            TILE_N=_WARP_COLUMNS,
            HELD=False,
            STAGES=self.stages,
        ).launch(
            tiles,
            32 * (_WARPS + 4),
            self.stages * stage + (_TURNS - 1) * sums,
            **packed_hopper.load_maps(problem, MAX_ROWS, 64, _TILE_N, STEP),
            **problem.arguments(kernel),
        )
        return [launch]


def takes(weight: PackedWeight) -> bool:
    """Whether the kernel has an instance for a packed weight that kernels with fused dequantization read."""
    whole = weight.groups == 1 or weight.group_size % STEP == 0
    return weight.layout in _LAYOUTS and weight.bits == 4 and whole


def fills(weight: PackedWeight, device: Device) -> bool:
    """Whether the tiles of a weight are one wave that leaves few SMs idle."""
    return _MIN_FULL * device.num_sms <= -(-weight.n // _TILE_N) <= device.num_sms
