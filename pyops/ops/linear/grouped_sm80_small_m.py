"""Grouped GEMMs of fp8 with small M by mma.sync: the geometry and the launch of grouped_gemm_sm80_small_m.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float8_e4m3fn, float8_e5m2
from .grouped_problem import GroupedProblem
from .grouped_shape import GroupedShape

_grouped_gemm_sm80_small_m = Kernel("linear/grouped_gemm_sm80_small_m.cu")

ROWS = 64  # weight rows of a tile
TILES_M = 16, 8  # slots of a tile; the largest that divides a block of the lists is taken
_DTYPES = float8_e4m3fn, float8_e5m2
_STEP_K = 128  # elements of K in a k-tile
_RESIDENT = 8  # most warps per SM: registers
_MIN_STAGES, _MAX_STAGES = 2, 4  # stages: k-tiles of a warp in shared memory
_RESERVED_BYTES = 1024  # shared memory that the driver takes of each block


@dataclass(frozen=True, slots=True)
class GroupedSmallMConfig:
    """The geometry of grouped_gemm_sm80_small_m.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m: slots of a tile.
        warps: warps of a block; each takes a part of K.
        stages: k-tiles of a warp in shared memory, those in flight among them.
        min_blocks: blocks per SM; bounds the registers.
    """

    tile_m: int
    warps: int
    stages: int
    min_blocks: int

    def __post_init__(self) -> None:
        if self.tile_m not in TILES_M or self.stages < 2 or not 0 < self.warps * self.min_blocks <= _RESIDENT:
            raise ValueError(f"no geometry of grouped_gemm_sm80_small_m.cu: {self}")

    @property
    def shared_memory(self) -> int:
        return self.warps * _warp_bytes(self.tile_m, self.stages)

    def candidates(self, problem: GroupedProblem, device: Device) -> list[GroupedSmallMConfig]:
        """Other numbers of warps, blocks and stages."""
        found = tuning.varied(
            self,
            warps=(1, 2, 4, 8),
            stages=(self.stages - 1, self.stages + 1),
            min_blocks=(self.min_blocks - 1, self.min_blocks + 1),
        )
        return [one for one in found if one.stages >= 2 and one.fits(device)]

    def fits(self, device: Device) -> bool:
        """Whether the blocks of an SM fit into its shared memory."""
        return self.shared_memory <= _block_bytes(self.tile_m, self.min_blocks, device)

    def launch(self, problem: GroupedProblem) -> Launch:
        """One block for each possible tile."""
        kernel = problem.kernel(_grouped_gemm_sm80_small_m)
        return kernel(
            **problem.constants(),
            TILE_M=self.tile_m,
            WARPS=self.warps,
            STAGES=self.stages,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            problem.max_tiles(self.tile_m) * -(-problem.b_rows // ROWS),
            self.warps * 32,
            self.shared_memory,
            **problem.arguments(kernel, self.tile_m),
        )


def refusal(shape: GroupedShape, device: Device) -> str | None:
    """Why the kernel cannot serve a shape."""
    if device.supports("wgmma"):
        return "WGMMA multiplies faster"
    if not device.supports("mma"):
        return "the device has no mma.sync"
    if shape.dtype not in _DTYPES:
        return f"it multiplies float8_e4m3fn and float8_e5m2, not {shape.dtype}"
    if 0 in (shape.rows, shape.k):
        return "an empty operand"
    if shape.access != 16:
        return "rows of a and b not at multiples of 16 bytes"
    if shape.n % ROWS:
        return f"{shape.n} rows of the weight of an expert are no multiple of {ROWS}"
    return None if shape.block_size % 8 == 0 else f"tiles of 8 rows do not divide {shape.block_size} slots"


def configs(shape: GroupedShape, device: Device) -> Iterator[GroupedSmallMConfig]:
    """All numbers of warps, with as many blocks and stages as fit."""
    tile_m = next(one for one in TILES_M if shape.block_size % one == 0)
    for warps in (8, 4, 2, 1):
        for blocks in range(_RESIDENT // warps, 0, -1):
            stages = min(_MAX_STAGES, _block_bytes(tile_m, blocks, device) // (warps * _warp_bytes(tile_m, 1)))
            if stages >= _MIN_STAGES:
                yield GroupedSmallMConfig(tile_m, warps, stages, blocks)
                break


def _warp_bytes(tile_m: int, stages: int) -> int:
    """Bytes of shared memory of a warp: stages, reused for its accumulators in the epilogue."""
    return stages * (tile_m + ROWS) * _STEP_K


def _block_bytes(tile_m: int, blocks: int, device: Device) -> int:
    """Bytes of dynamic shared memory of a block next to others on an SM: static are the rows of out and of a."""
    return (device.shared_memory + _RESERVED_BYTES) // blocks - _RESERVED_BYTES - 2 * 4 * tile_m
