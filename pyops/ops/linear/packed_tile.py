"""GEMMs with packed weights on AMD's matrix cores: wq_gemm_cdna.cu, and its geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float16
from .packed_problem import PackedProblem
from .packed_shape import PackedShape

_wq_gemm_cdna = Kernel("linear/wq_gemm_cdna.cu")

STEP = 64  # weight rows of a k-tile
_ROW_BYTES = 128  # bytes of a row of a stage in shared memory
_STAGES = 2  # stages in shared memory
_PIECE_WORDS = 4  # words of a lane's piece
# Chosen by arithmetic, not yet run on an AMD GPU: docs/performance/amd.md.
_FEW_THREADS = 128  # threads of a CTA for small M: each loads one piece of four words of 4-bit weights
_DEPTH = 4  # k-tiles with packed weights in flight
_MAX_SPLITS = 8  # split-K: most CTAs that share a tile
_MIN_SPLIT_STEPS = 4  # split-K: fewest k-tiles of each CTA


@dataclass(frozen=True, slots=True)
class TileGeometry:
    """The common geometry of kernels that dequantize in the tile; the attributes are their constants.

    Attributes:
        tile_m, tile_n: rows of a, and columns or rows of the weight, in a CTA's accumulator tile.
        warps_m, warps_n: warps along M and N.
        depth: k-tiles with packed weights in flight.
    """

    tile_m: int
    tile_n: int
    warps_m: int
    warps_n: int
    depth: int

    def __post_init__(self) -> None:
        if self.tile_m % (16 * self.warps_m) or self.tile_n % (16 * self.warps_n):
            raise ValueError(f"warps do not divide the tile: {self}")
        if self.tile_n not in (64, 128) or self.depth % 2:
            raise ValueError(f"no geometry of a tile of codes: {self}")

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA: two stages of a and of dequantized weights."""
        return _STAGES * (self.tile_m + self.tile_n) * _ROW_BYTES

    def num_threads(self, device: Device) -> int:
        return self.warps_m * self.warps_n * device.warp_size

    def constants(self, places: int) -> dict[str, int]:
        """The compile-time constants; `places` is the rows of a tile that are used: rows of a, or slots of the sorted
        token ids."""
        return {
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "PLACES": places,
            "DEPTH": self.depth,
            "MIN_BLOCKS": 1,
        }


@dataclass(frozen=True, slots=True)
class PackedTileConfig(TileGeometry):
    """The geometry of wq_gemm_cdna.cu.

    Attributes:
        splits: CTAs that share a tile (split-K); each takes a part of K.
    """

    splits: int

    def candidates(self, problem: PackedProblem, device: Device) -> list[PackedTileConfig]:
        """Other tiles, depths and splits."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 16 * self.warps_m, 128),
            tile_n=tuning.beside(self.tile_n, 64, 128),
            depth=(2, 4),
            splits=tuning.beside(self.splits, 1, _MAX_SPLITS),
        )
        return [one for one in found if one.fits(problem, device)]

    def fits(self, problem: PackedProblem, device: Device) -> bool:
        """Whether shared memory suffices, and each part of K has a k-tile."""
        whole = self.splits == 1 and problem.experts is None  # else flags or row indices take static shared memory
        room = device.shared_memory - (0 if whole else _ROW_BYTES * _STAGES)
        rows = problem.experts is None or places_of(problem.experts.lists.block_size, self.tile_m) > 0
        return rows and self.shared_memory <= room and self.splits <= -(-problem.weight.k // STEP)

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """One launch. With split-K each CTA writes its accumulators to a workspace, and the last one adds them up."""
        weight, out = problem.weight, problem.epilogue.out
        places = self.tile_m
        if problem.experts is not None:
            places = places_of(problem.experts.lists.block_size, self.tile_m)
        tiles = -(-problem.places // places) * -(-weight.n // self.tile_n)
        splits = min(self.splits, -(-weight.k // STEP))  # each split has a k-tile
        partial: dict[str, Any] = {"partial": 0, "arrived": 0}
        if splits > 1:
            partial["partial"] = Scratch(tiles * splits * self.tile_m * self.tile_n * 4)
            partial["arrived"] = Scratch(tiles * 4, zeroed=True)
        kernel = problem.kernel(_wq_gemm_cdna)
        launch = kernel(
            **problem.constants(),
            IN_PAIRS=_in_pairs(problem),
            WHOLE_STEPS=weight.k % STEP == 0,
            OUT_ACCESS=min(2, check.vector_width(weight.n, out)),
            **self.constants(places),
            SPLITS=splits,
        ).launch(
            (tiles, splits),
            self.num_threads(problem.device),
            self.shared_memory,
            **problem.arguments(kernel),
            **partial,
        )
        return [launch]


def places_of(block_size: int, tile_m: int) -> int:
    """Slots of the sorted token ids in a tile of `tile_m` rows, for lists with blocks of `block_size`; 0: does not
    divide."""
    return tile_m if block_size % tile_m == 0 else 8 if tile_m == 16 and block_size % 8 == 0 else 0


def takes(shape: PackedShape) -> bool:
    """Whether each lane's piece lies under one scale, and K is a multiple of the layout's tile."""
    tile, size = shape.format.tile_rows, shape.group_size
    span = tile or (_PIECE_WORDS if shape.format.is_across else _PIECE_WORDS * 32 // shape.bits)
    return (size % STEP == 0 or (STEP % size == 0 and size % span == 0)) and shape.k % max(1, tile) == 0


def _in_pairs(problem: PackedProblem) -> bool:
    """Whether float16 holds quant minus zero point, and the scale, exactly, so that their product is rounded once."""
    w = problem.weight
    scaled = w.scales is None or (w.scale_kind == "float" and w.scale_exponent == 0 and w.scales.dtype is float16)
    return problem.a.dtype is float16 and w.type.is_integer and w.zero_kind in ("none", "codes") and scaled


def choose(m: int, k: int, n: int, device: Device, weights: int = 1, block_size: int = 0) -> PackedTileConfig:
    """The largest tile that leaves no SM idle; else split-K.

    For `m` rows, a power of two, of each of `weights` weights [k, n]. `block_size`: block size of the experts' lists; a
    multiple of the tile's rows.
    """
    steps = -(-k // STEP)

    def tiles(tile_m: int, tile_n: int) -> int:
        return weights * -(-m // tile_m) * -(-n // tile_n)

    few = _FEW_THREADS // device.warp_size  # warps
    if m <= 16 or block_size % 32:
        tile_m, tile_n, warps_m, warps_n, blocks = 16, 64, 1, few, 3
    elif m <= 32 or block_size % 64:
        tile_m, tile_n, warps_m, warps_n, blocks = 32, 64, 1, few, 2
    elif m <= 64 or block_size or tiles(128, 128) < device.num_sms:
        tile_m, tile_n, warps_m, warps_n, blocks = 64, 64, 2, 2, 2
    else:
        tile_m, tile_n, warps_m, warps_n, blocks = 128, 128, 2, 4, 1
    splits = 1
    most = min(blocks * device.num_sms // tiles(tile_m, tile_n), _MAX_SPLITS, steps // _MIN_SPLIT_STEPS)
    while splits * 2 <= most:
        splits *= 2
    depth = _DEPTH if tile_m <= 32 else 2
    return PackedTileConfig(tile_m, tile_n, warps_m, warps_n, depth, 1 if blocks == 1 else splits)
