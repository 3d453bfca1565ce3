"""GEMMs by mma.sync, or by AMD's matrix cores: the geometry and the launch of gemm_sm80.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType
from .gemm_problem import HELD_STAGES, GemmProblem
from .gemm_shape import FP8, K_TILE_BYTES, GemmShape

_mma = Kernel("linear/gemm_sm80.cu")

_MAX_STAGES = 4, 8  # most stages: of large tiles, of small tiles
_FLAG_BYTES = 16  # static shared memory of split-K
_SMALL_TILE = 16 * 1024  # most bytes of a stage of a small tile
_MAX_SPLITS = 8  # split-K: most blocks that share a tile
_MIN_SPLIT_K_TILES = 4  # split-K: fewest k-tiles of each block
_MAX_ACCUMULATORS = 128  # most accumulators of a thread: half of its registers
_MAX_COPIED = 16  # most rows that a thread of a persistent block copies: sm_80 spills 24 bytes with 20
_MAX_RESIDENT = 16 * 1024  # most accumulators of all blocks of an SM: a quarter of its registers
# Row tiles that run together for each column tile: 132 CTAs of 128 x 256 are then about as high as wide, and read the
# fewest rows. Of 4096 x 28672 x 4096, a standalone copy of the kernel took 2117 us with 8 and 2082 with 16.
_GROUP_ROWS = 16


@dataclass(frozen=True, slots=True)
class MmaTile:
    """The tile of a block of gemm_sm80.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a block's accumulator tile.
        warps_m, warps_n: warps of a team along M and N.
    """

    tile_m: int
    tile_n: int
    warps_m: int
    warps_n: int

    @property
    def k_tile_traffic(self) -> int:
        """Bytes of shared memory that a k-tile writes, and that its warps read."""
        return (self.tile_m + self.tile_n) * K_TILE_BYTES + self.k_tile_reads

    @property
    def k_tile_reads(self) -> int:
        """Bytes of shared memory that the warps of a team read of a k-tile."""
        return (self.warps_n * self.tile_m + self.warps_m * self.tile_n) * K_TILE_BYTES


@dataclass(frozen=True, slots=True)
class MmaConfig(MmaTile):
    """The geometry of entry gemm_sm80; the attributes are constants of the kernel.

    Attributes:
        stages: k-tiles of a team in shared memory or in flight.
        splits: blocks that share a tile (split-K); each takes a part of K.
        min_blocks: blocks per SM; bounds the registers.
        warps_k: teams of these warps in a block, which split K.
    """

    stages: int
    splits: int
    min_blocks: int
    warps_k: int = 1

    def __post_init__(self) -> None:
        if self.tile_m % (16 * self.warps_m) or self.tile_n % (8 * self.warps_n * self.warps_k):
            raise ValueError(f"warps do not divide the tile: {self}")

    @property
    def shared_memory(self) -> int:
        return self.warps_k * self.stages * (self.tile_m + self.tile_n) * K_TILE_BYTES

    def num_threads(self, device: Device) -> int:
        return self.warps_m * self.warps_n * self.warps_k * device.warp_size

    def candidates(self, problem: GemmProblem, device: Device) -> list[MmaConfig]:
        """Other tiles, stages, splits and registers."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 16, 128),
            tile_n=tuning.beside(self.tile_n, 32, 128),
            stages=(self.stages - 1, self.stages + 1),
            splits=tuning.beside(self.splits, 1, _MAX_SPLITS),
            min_blocks=tuning.beside(self.min_blocks, 1, 4),
        )
        return [one for one in found if one.stages >= 2 and one._fits(problem, device)]

    def _fits(self, problem: GemmProblem, device: Device) -> bool:
        """Whether shared memory and registers suffice."""
        threads = self.num_threads(device)
        held = self.warps_k * self.tile_m * self.tile_n // threads * (2 if problem.epilogue.block_scaled else 1)
        enough = self.min_blocks == 1 or self.min_blocks * threads * held <= _MAX_RESIDENT
        return enough and held <= max_accumulators(problem.dtype, device) and self.shared_memory <= device.shared_memory

    def launch(self, problem: GemmProblem) -> Launch:
        """One launch. With split-K each block writes its accumulators to a workspace, and the last one adds them up."""
        tiles = -(-problem.m // self.tile_m) * -(-problem.b.rows // self.tile_n)
        splits = self.splits if tiles * self.splits <= 2**31 - 1 else 1
        blocks = self._blocks(tiles, problem.device) if splits == 1 else tiles
        partial: dict[str, Any] = {"partial": 0, "arrived": 0}
        if splits > 1 and tiles:
            partial["partial"] = Scratch(tiles * splits * self.tile_m * self.tile_n * 4)
            partial["arrived"] = Scratch(tiles * 4, zeroed=True)
        return problem.kernel(_mma)(
            **problem.constants(),
            VEC_SIZE=problem.vec_size,
            OUT_ACCESS=problem.out_access,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            WARPS_M=self.warps_m,
            WARPS_N=self.warps_n,
            WARPS_K=self.warps_k,
            STAGES=self.stages,
            SPLITS=splits,
            GROUP_ROWS=_GROUP_ROWS,
            MIN_BLOCKS=self.min_blocks,
            PERSISTENT=blocks < tiles,
        ).launch(
            (blocks, splits),
            self.num_threads(problem.device),
            self.shared_memory,
            tiles=tiles,
            **problem.arguments(),
            **partial,
        )

    def _blocks(self, tiles: int, device: Device) -> int:
        """Blocks that take all tiles: as many as there are, or as shared memory lets run at a time.

        With batch invariance, every number of rows has the same kernel.
        """
        copied = (self.tile_m + self.tile_n) * 8 * self.warps_k // self.num_threads(device)  # rows of a thread
        if tuning.batch_invariant() or not device.supports("async_copies") or copied > _MAX_COPIED:
            return tiles
        return min(tiles, device.num_sms * max(1, device.shared_memory // self.shared_memory))


# Tiles and their warps: TILE_M, TILE_N, WARPS_M, WARPS_N, WARPS_K. Warps of 64 x 64 read the fewest bytes of shared
# memory for each MMA; the small tiles are for few rows, and for few tiles. Teams along K hide latency as more warps of
# one team would, and read fewer of these bytes. 224 columns make two full waves of 256 x 28672 on 132 SMs.
_TILES = (
    (16, 64, 1, 4, 1),
    (32, 64, 1, 4, 1),
    (64, 64, 2, 2, 1),
    (64, 128, 2, 4, 1),
    (128, 128, 2, 4, 1),
    (128, 128, 2, 2, 1),
    (64, 256, 1, 4, 1),
    (128, 256, 2, 4, 1),
    (128, 224, 2, 4, 1),
    (16, 32, 1, 2, 2),
    (64, 32, 2, 1, 2),
    (32, 64, 1, 2, 2),
    (128, 64, 2, 2, 2),
    (64, 128, 2, 2, 2),
)
_SMALL_TILES = 5  # these first tiles have warps of at most 64 x 32, for copies that registers hold
_EVEN_TILES = 8  # these first tiles have one team, and warps of a multiple of 16 columns


def configs(shape: GemmShape, device: Device) -> Iterator[MmaConfig]:
    """Tiles that registers and shared memory allow, each whole and with split-K while SMs would idle."""
    for tile_m, tile_n, warps_m, warps_n, warps_k in _tiles(shape, device):
        if tile_m > 16 and 2 * shape.m <= tile_m:
            continue  # half of the tile would be padding
        held = tile_m * tile_n // (warps_m * warps_n * device.warp_size)
        if held * (2 if shape.block_scaled else 1) > max_accumulators(shape.dtype, device):
            continue
        stage_bytes = (tile_m + tile_n) * K_TILE_BYTES
        tiles, splits = -(-shape.m // tile_m) * -(-shape.n // tile_n), 1
        most = _MAX_STAGES[stage_bytes <= _SMALL_TILE] if device.supports("async_copies") else HELD_STAGES
        while True:
            # Blocks of an SM share its shared memory.
            blocks = 2 if stage_bytes <= _SMALL_TILE and tiles * splits > device.num_sms else 1
            # Split-K takes static shared memory for a flag.
            space = (device.shared_memory - _FLAG_BYTES * (splits > 1)) // blocks
            stages = min(most, space // (stage_bytes * warps_k))
            if stages >= 2:
                yield MmaConfig(tile_m, tile_n, warps_m, warps_n, stages, splits, blocks, warps_k)
            splits *= 2
            if splits > min(_MAX_SPLITS, shape.num_k_tiles // _MIN_SPLIT_K_TILES):
                break
            if splits * tiles > 2 * device.num_sms:
                break


def _tiles(shape: GemmShape, device: Device) -> tuple[tuple[int, int, int, int, int], ...]:
    """The tiles that the kernel has for operands of this kind. GPUs with WGMMA, where other choices are measured, have
    no teams and no odd numbers of MMA tiles."""
    if not device.supports("async_copies"):
        return _TILES[:_SMALL_TILES]
    plain = not (shape.block_scaled or shape.is_gated) and shape.vec_size * shape.dtype.itemsize >= 4
    return _TILES if plain and not (converts(shape.dtype, device) or device.supports("wgmma")) else _TILES[:_EVEN_TILES]


def max_accumulators(dtype: DType, device: Device) -> int:
    """Most accumulators of a thread: a half where fp8 operands are converted, or copies are held in registers."""
    whole = device.supports("async_copies") and not converts(dtype, device)
    return _MAX_ACCUMULATORS if whole else _MAX_ACCUMULATORS // 2


def converts(dtype: DType, device: Device) -> bool:
    """Whether fp8 operands are converted to float16, which takes twice the MMAs."""
    return dtype in FP8 and not device.supports("fp8_products")
