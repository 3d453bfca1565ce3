"""Grouped GEMMs by WGMMA: the geometry and the launch of grouped_gemm_sm90.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from .gemm_problem import SCALE_BLOCK
from .gemm_shape import K_TILE_BYTES
from .grouped_problem import GROUP, GroupedProblem
from .grouped_shape import GroupedShape

_hopper = Kernel("linear/grouped_gemm_sm90.cu")

TILES_M = 192, 128, 64
TILES_N = range(32, 257, 32)
_STORE_BYTES = 64 * 128  # bytes of a warpgroup's staging buffer in the epilogue: 64 rows
_BARRIER_BYTES = 2 * 8  # bytes of the barriers of a stage
_QUEUE_BYTES = 4 * (16 + _BARRIER_BYTES)  # bytes of the queue of tiles
_MAX_STAGES = 16  # most stages
_BYTES_IN_FLIGHT = 160 * 1024  # bytes of weights in flight per SM; more are slower (docs/performance/products.md)
_MAX_TWO_SETS = 128  # block scales: most weight rows of each of two warpgroups with a second set of accumulators
# Most weight rows of each of three warpgroups, which have fewer registers: with block scales a thread holds its
# accumulators twice.
_MAX_PART_OF_THREE, _MAX_BLOCKED_PART_OF_THREE = 192, 128


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """The geometry of grouped_gemm_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m: rows of a tile. 64: two warpgroups divide tile_n. 128 or 192: each warpgroup has 64 rows.
        tile_n: weight rows of a tile.
        group: row tiles of one expert that run together for each column tile.
    """

    tile_m: int
    tile_n: int
    group: int = GROUP

    def __post_init__(self) -> None:
        if self.tile_m not in TILES_M or self.tile_n % 32 or not 0 < self.tile_n <= 256:
            raise ValueError(f"no geometry of grouped_gemm_sm90.cu: {self}")

    @property
    def part_n(self) -> int:
        """Weight rows of a warpgroup."""
        return self.tile_n // (2 if self.tile_m == 64 else 1)

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return max(2, self.tile_m // 64)

    @property
    def promotes_at_once(self) -> bool:
        """Whether two warpgroups have one set of accumulators under block scales: only the other one's WGMMAs run while
        a warpgroup promotes."""
        return self.consumers == 2 and self.part_n > _MAX_TWO_SETS

    def candidates(self, problem: GroupedProblem, device: Device) -> list[GroupedConfig]:
        """Other tiles and orders of tiles."""
        shape, groups = GroupedShape.of(problem), tuning.beside(self.group, 4, 32)
        found = tuning.varied(self, tile_m=TILES_M, tile_n=TILES_N, group=groups)
        return [one for one in found if one.fits(shape)]

    def fits(self, shape: GroupedShape) -> bool:
        """Whether the tile divides the blocks of the sorted lists, accumulators fit into registers, and ups have block
        scales of their own."""
        if shape.block_size % self.tile_m:
            return False
        if shape.scales == "block":
            whole = shape.gated != 1 or shape.columns % SCALE_BLOCK == 0
            return whole and (self.consumers == 2 or self.part_n <= _MAX_BLOCKED_PART_OF_THREE)
        few = shape.scales == "none" and self.part_n <= _MAX_PART_OF_THREE  # with scales of rows registers spill
        return self.consumers == 2 or (few and shape.dtype.itemsize == 2)

    def stage_scales(self, is_gated: bool) -> int:
        """Block scales of a stage: of the rows, and of the weight rows, up to a multiple of four."""
        run = self.part_n // (2 if is_gated else 1) | SCALE_BLOCK  # weight rows that follow each other
        return self.tile_m + -(-self.tile_n // (run & -run) // 4) * 4

    def launch(self, problem: GroupedProblem) -> Launch:
        """A persistent grid: at most as many blocks as SMs, or as possible tiles."""
        device, kernel = problem.device, problem.kernel(_hopper.for_arch(problem.device.arch_feature))
        halves = 2 if problem.gated == 1 else 1
        columns = -(-problem.b_rows // self.tile_n) if problem.gated else -(-problem.n // self.tile_n)
        stage = (self.tile_m + self.tile_n) * K_TILE_BYTES + _BARRIER_BYTES
        stage += 4 * self.stage_scales(problem.gated == 1) if problem.block_scaled else 0
        most = _BYTES_IN_FLIGHT // (self.tile_n * K_TILE_BYTES)
        operands = (problem.b_scales is not None and not problem.block_scaled) + (problem.bias is not None)
        stores = self.consumers * (_STORE_BYTES + 4 * self.part_n * operands)
        stages = max(2, min(_MAX_STAGES, (device.shared_memory - stores - _QUEUE_BYTES) // stage, most))
        k, itemsize = problem.k, problem.dtype.itemsize
        stride = problem.b.stride * itemsize if problem.b.rows > 1 else -(-k * itemsize // 16) * 16
        box = K_TILE_BYTES // itemsize, self.part_n // halves
        return kernel(
            **problem.constants(),
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            STAGES=stages,
            GROUP=self.group,
            ALIGNED_OUT=problem.out_is_aligned,
        ).launch(
            min(problem.max_tiles(self.tile_m) * columns, device.num_sms),
            128 * (self.consumers + 1),
            stores + stages * stage + _QUEUE_BYTES,
            b_map=TensorMap(problem.b.source, problem.dtype, (k, problem.b.rows), (stride,), box, K_TILE_BYTES),
            **problem.arguments(kernel, self.tile_m),
        )
