"""Grouped GEMM: a Config for each kernel, the choice among them, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float8_e5m2, float16, int8
from .gemm_problem import HELD_STAGES, SCALE_BLOCK, multiplies
from .grouped_problem import GroupedProblem

_hopper, _mma = Kernel("linear/grouped_gemm_sm90.cu"), Kernel("linear/grouped_gemm_sm80.cu")
_simt = Kernel("linear/grouped_gemm_simt.cu")

_HOPPER_DTYPES = bfloat16, float16, float8_e4m3fn, float8_e5m2, int8
_STEP_BYTES = 128  # bytes of K in a k-tile: one row of the 128-byte swizzle
_STORE_BYTES = 64 * 128  # bytes of a warpgroup's staging buffer in the epilogue of grouped_gemm_sm90.cu: 64 rows
_BARRIER_BYTES = 2 * 8  # bytes of the barriers of a stage
_MAX_STAGES = 16  # most stages
_BYTES_IN_FLIGHT = 160 * 1024  # bytes of weights in flight per SM; more are slower (docs/performance/products.md)
# Row tiles of an expert that run together for each column tile, so that the L2 cache holds the rows that they share.
_GROUP = 16
_MAX_BLOCKED_PART = 128  # block scales: most weight rows of a warpgroup, because a thread holds its accumulators twice
# Rows per expert, measured on an H200 (docs/performance/experts.md): fewest with which tiles of 128 rows are faster
# than tiles of 64; with block scales, fewest and most with which tiles of 192 rows are faster. (With block scales
# larger tiles have half the columns, so they pay only while most experts have a single tile.)
_MANY_ROWS, _MANY_BLOCKED_ROWS, _MAX_BLOCKED_ROWS = 56, 56, 160
_TILE_COST = 24  # cost of a tile's prologue and epilogue, in weight rows that could be loaded meanwhile
# Cost of a tile with columns under two block scales, in weight rows: choosing the scale takes time. Fitted to times of
# an H200: tiles of 224 and 256 weight rows, 8 to 128 rows of DeepSeek-V3's second GEMM.
_STRADDLING_COST = 16


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
    group: int = _GROUP

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128, 192) or self.tile_n % 32 or not 0 < self.tile_n <= 256:
            raise ValueError(f"no geometry of grouped_gemm_sm90.cu: {self}")

    @property
    def part_n(self) -> int:
        """Weight rows of a warpgroup."""
        return self.tile_n // (2 if self.tile_m == 64 else 1)

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return max(2, self.tile_m // 64)

    def candidates(self, problem: GroupedProblem, device: Device) -> list[GroupedConfig]:
        """Other tiles and orders of tiles."""
        found = tuning.varied(
            self, tile_m=(64, 128, 192), tile_n=range(32, 257, 32), group=tuning.beside(self.group, 4, 32)
        )
        return [one for one in found if one.fits(problem)]

    def fits(self, problem: GroupedProblem) -> bool:
        """Whether the tile divides the blocks of the sorted lists, and its columns suit the block scales."""
        if problem.lists.block_size % self.tile_m or (self.tile_m == 192 and not problem.block_scaled):
            return False
        if not problem.block_scaled:
            return True
        whole = problem.gated != 1 or problem.n % SCALE_BLOCK == 0
        return self.part_n <= _MAX_BLOCKED_PART and whole and not (problem.gated and self.straddles(problem))

    def straddles(self, problem: GroupedProblem) -> bool:
        """Whether the columns of a warpgroup may lie under two block scales."""
        return problem.block_scaled and SCALE_BLOCK % (self.part_n // (2 if problem.gated == 1 else 1)) != 0

    def launch(self, problem: GroupedProblem) -> Launch:
        """A persistent grid: at most as many blocks as SMs, or as possible tiles."""
        device, kernel = problem.device, problem.kernel(_hopper.for_arch(problem.device.arch_feature))
        halves = 2 if problem.gated == 1 else 1
        columns = -(-problem.b_rows // self.tile_n) if problem.gated else -(-problem.n // self.tile_n)
        stage = (self.tile_m + self.tile_n) * _STEP_BYTES + _BARRIER_BYTES
        most = _BYTES_IN_FLIGHT // (self.tile_n * _STEP_BYTES)
        stores = self.consumers * _STORE_BYTES
        stages = max(2, min(_MAX_STAGES, (device.shared_memory - stores) // stage, most))
        k, itemsize = problem.k, problem.dtype.itemsize
        stride = problem.b.stride * itemsize if problem.b.rows > 1 else -(-k * itemsize // 16) * 16
        box = _STEP_BYTES // itemsize, self.part_n // halves
        return kernel(
            **problem.constants(),
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            STAGES=stages,
            BUFFERS=2 if problem.block_scaled and self.consumers == 2 else 1,
            GROUP=self.group,
            ALIGNED_OUT=problem.out_is_aligned,
        ).launch(
            min(problem.max_tiles(self.tile_m) * columns, device.num_sms),
            128 * (self.consumers + 1),
            stores + stages * stage,
            b_map=TensorMap(problem.b.source, problem.dtype, (k, problem.b.rows), (stride,), box, _STEP_BYTES),
            **problem.arguments(kernel, self.tile_m),
        )


@dataclass(frozen=True, slots=True)
class GroupedMmaConfig:
    """The geometry of grouped_gemm_sm80.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and weight rows of a block's tile.
        warps_m, warps_n: warps along M and N.
        stages: k-tiles in shared memory or in flight.
        min_blocks: blocks per SM; bounds the registers.
    """

    tile_m: int
    tile_n: int
    warps_m: int
    warps_n: int
    stages: int
    min_blocks: int = 1

    def __post_init__(self) -> None:
        if self.tile_m % (16 * self.warps_m) or self.tile_n % (16 * self.warps_n) or self.stages < 2:
            raise ValueError(f"warps do not divide the tile: {self}")

    @property
    def shared_memory(self) -> int:
        return self.stages * (self.tile_m + self.tile_n) * _STEP_BYTES

    def candidates(self, problem: GroupedProblem, device: Device) -> list[GroupedMmaConfig]:
        """Other tiles and stages."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 16, 64),
            tile_n=tuning.beside(self.tile_n, 32, 128),
            stages=(self.stages - 1, self.stages + 1),
        )
        fits = [one for one in found if one.shared_memory <= device.shared_memory]
        return [one for one in fits if problem.lists.block_size % one.tile_m == 0]

    def launch(self, problem: GroupedProblem) -> Launch:
        """One block for each possible tile."""
        tiles = problem.max_tiles(self.tile_m) * -(-problem.b_rows // self.tile_n)
        num_threads = self.warps_m * self.warps_n * problem.device.warp_size
        kernel = problem.kernel(_mma)
        return kernel(
            **problem.constants(),
            VEC_SIZE=problem.vec_size,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            WARPS_M=self.warps_m,
            WARPS_N=self.warps_n,
            STAGES=self.stages,
            GROUP=_GROUP,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            tiles,
            num_threads,
            self.shared_memory,
            **problem.arguments(kernel, self.tile_m),
        )


@dataclass(frozen=True, slots=True)
class GroupedSimtConfig:
    """The geometry of grouped_gemm_simt.cu: rows and columns of a block's tile; a thread has 4 x 4 accumulators."""

    tile_m: int
    tile_n: int

    def candidates(self, problem: GroupedProblem, device: Device) -> list[GroupedSimtConfig]:
        """Other tiles."""
        found = tuning.varied(
            self, tile_m=tuning.beside(self.tile_m, 16, 64), tile_n=tuning.beside(self.tile_n, 64, 128)
        )
        return [one for one in found if problem.lists.block_size % one.tile_m == 0]

    def launch(self, problem: GroupedProblem) -> Launch:
        """One block for each possible tile."""
        tiles = problem.max_tiles(self.tile_m) * -(-problem.n // self.tile_n)
        kernel = problem.kernel(_simt)
        return kernel(**problem.constants(), TILE_M=self.tile_m, TILE_N=self.tile_n, GROUP=_GROUP).launch(
            tiles,
            self.tile_m * self.tile_n // 16,
            **problem.arguments(kernel, self.tile_m),
        )


Config = GroupedConfig | GroupedMmaConfig | GroupedSimtConfig


def serves(problem: GroupedProblem, device: Device) -> bool:
    """Whether grouped_gemm_sm90.cu runs on the device and supports this problem."""
    supported = problem.dtype in _HOPPER_DTYPES and problem.out.dtype.itemsize == 2
    supported = supported and not (problem.block_scaled and problem.dtype is int8) and not problem.empty
    mapped = problem.vec_size * problem.dtype.itemsize == 16 and problem.k > 0
    fits = problem.lists.block_size % 64 == 0 and GroupedConfig(64, 64).fits(problem)
    return device.supports("wgmma") and supported and mapped and fits


def block_size_for(num_rows: int, num_experts: int, block_scaled: bool = False) -> int:
    """The block size with which `moe_align_block_size` should sort `num_rows` rows."""
    if block_scaled:
        return 192 if _MANY_BLOCKED_ROWS * num_experts <= num_rows <= _MAX_BLOCKED_ROWS * num_experts else 64
    return 128 if num_rows >= _MANY_ROWS * num_experts else 64


def choose(problem: GroupedProblem, device: Device) -> Config:
    """The kernel for this problem, and its geometry. Equal for all problems of a bucket."""
    if serves(problem, device):
        return _choose_hopper(problem, device)
    if problem.lists.block_size % 16:  # only with packed weights
        return GroupedSimtConfig(8, 64)
    rows = problem.rows_of_expert
    tile_m = next(
        tile for tile in (64, 32, 16) if problem.lists.block_size % tile == 0 and (rows > tile // 2 or tile == 16)
    )
    if not multiplies(problem.dtype, device):
        return GroupedSimtConfig(tile_m, 64)
    held = not device.supports("async_copies")
    if tile_m < 64:
        return GroupedMmaConfig(tile_m, 64, 1, 4, HELD_STAGES if held else 6, 2)
    return GroupedMmaConfig(64, 128, 2, 4, HELD_STAGES if held else 4)


def _choose_hopper(problem: GroupedProblem, device: Device) -> GroupedConfig:
    """The tile with which the busiest SM loads the fewest weight rows."""
    places = problem.lists.block_size
    tile_m = 192 if problem.block_scaled and places % 192 == 0 else 128 if places % 128 == 0 else 64
    row_tiles = problem.row_tiles(tile_m)

    def cost(one: GroupedConfig) -> tuple[int, int]:
        tiles = row_tiles * -(-problem.b_rows // one.tile_n)
        rows = one.tile_n + _TILE_COST + (_STRADDLING_COST if one.straddles(problem) else 0)
        return -(-tiles // device.num_sms) * rows, one.tile_n

    sizes = [GroupedConfig(tile_m, tile_n) for tile_n in range(32, 257, 32)]
    return min((one for one in sizes if one.fits(problem)), key=cost)


def plan(problem: GroupedProblem) -> Launch:
    """The launch of the kernel that is chosen, or forced by `tuning`."""
    return tuning.config(problem.out.op, problem, problem.device, choose).launch(problem)
