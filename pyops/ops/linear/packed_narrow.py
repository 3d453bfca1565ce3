"""GEMMs of at most 16 rows with packed weights by WGMMA (compute capability 9.0): wq_gemm_sm90_small_m.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from . import packed_hopper
from .packed_problem import PackedProblem

_wq_gemm_sm90_small_m = Kernel("linear/wq_gemm_sm90_small_m.cu")

MAX_ROWS = 16  # rows of a tile
STEP = 128  # weight rows of a k-tile
TILE_N, _WARP_COLUMNS = 256, 64  # columns of a tile, columns of a warp
_WARPS = 16  # consumer warps
_BARRIER_BYTES = 8  # bytes of an mbarrier
_TURNS = 4  # consumer warpgroups; each takes every fourth k-tile
_STAGES = (4, 8)  # numbers of stages that fit into shared memory


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
        loads = MAX_ROWS * STEP * 2 + (STEP * weight.bits + problem.group_bits()) * TILE_N // 8
        stage = -(-loads // 1024) * 1024 + 2 * _BARRIER_BYTES
        sums = MAX_ROWS * TILE_N * 4
        box_rows = packed_hopper.box_rows_of(problem.m, MAX_ROWS)
        kernel = problem.kernel(_wq_gemm_sm90_small_m.for_arch(device.arch_feature))
        launch = kernel(
            **problem.constants(),
            TILE_M=MAX_ROWS,
            TILE_N=_WARP_COLUMNS,
            HELD=False,
            STAGES=self.stages,
        ).launch(
            tiles(problem.m, weight.n),
            32 * (_WARPS + 4),
            self.stages * stage + (_TURNS - 1) * sums,
            a_box_rows=box_rows,
            **packed_hopper.load_maps(problem, box_rows, 64, TILE_N, STEP),
            **problem.arguments(kernel),
        )
        return [launch]


def tiles(m: int, n: int) -> int:
    """Tiles of an output of this size."""
    return -(-m // MAX_ROWS) * -(-n // TILE_N)
