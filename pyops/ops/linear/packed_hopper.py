"""GEMMs with packed weights by WGMMA on compute capability 9.0: the geometry and tensor maps of wq_gemm_sm90.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.dtypes import int32, int64
from ..._core.tensors.tensor import TensorArg
from .._shared.packed_layouts import LAYOUTS, LayoutName
from .gemm_rates import CLUSTERS
from .packed_problem import PackedProblem
from .packed_shape import PackedShape

_wq_gemm_sm90 = Kernel("linear/wq_gemm_sm90.cu")

_ROW_BYTES = 128  # bytes of a row of a in one box: the 128-byte swizzle
_TABLE_BYTES = 8  # W4A8: bytes of the scale table per column and group
_WARPS = 8  # consumer warps
_BARRIER_BYTES = 8  # bytes of an mbarrier
_MAX_STAGES = 8  # most stages
_MIN_LONG_STAGES = 4  # fewest stages of k-tiles of two boxes
# Largest accumulator tile without register reallocation between warpgroups; twice as large with it.
MAX_SUMS = 128 * 128
# Largest tile M for cluster split-K, and for direct stores in the epilogue; larger tiles are stored by TMA.
MAX_SPLIT_ROWS = 64
_STORE_BYTES = 2 * 16  # bytes of a warp's staging buffer per 16 columns: rows of 32 bytes

# {(CTAs, tiles): stream-K: CTAs that share so many tiles of the last wave}
_SHARERS = [(parts, 1) for parts in range(2, 9)] + [(tiles + 1, tiles) for tiles in range(2, 9)]
_MORE_ROW_TILES = 4  # numbers of row tiles that come into question, from the fewest on
MAX_PARTS = 8  # stream-K: most CTAs for a tile of the last wave
_BOX_ROWS = 32  # rows of a box of a where the last tile is not full


class Waves(NamedTuple):
    """The waves in which clusters take the tiles.

    Attributes:
        clusters: clusters that the device holds at a time.
        full: waves in which every cluster has a tile.
        rest: tiles of the last wave if it is not full, else 0.
    """

    clusters: int
    full: int
    rest: int


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """The geometry of wq_gemm_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        chunk: WGMMA k-blocks (16 rows of the weight) in flight.
        splits: CTAs of a cluster that share a tile (split-K); each takes a part of K.
        min_blocks: CTAs per SM; bounds the registers.
        sharers, shared: stream-K: CTAs that share, along K, each `shared` tiles of a last wave that is not full, as far
            as there are CTAs for it; as many CTAs as tiles: no stream-K.
        boxes: TMA boxes of 128 bytes of a row of a, in a k-tile.
        neighbours: CTAs of a cluster with adjacent column tiles; they multicast the rows of a that they share.
    """

    tile_m: int
    tile_n: int
    chunk: int
    splits: int
    min_blocks: int
    sharers: int = 1
    shared: int = 1
    boxes: int = 1
    neighbours: int = 1

    def __post_init__(self) -> None:
        shape = self.tile_m % 16 == 0 and self.tile_n in (128, 256) and 0 < self.tile_m * self.tile_n <= 2 * MAX_SUMS
        split = self.splits == 1 or (self.splits in (2, 4, 8) and self.tile_m <= MAX_SPLIT_ROWS)
        roomy = self.min_blocks == 1 or (self.min_blocks == 2 and self.tile_m * self.tile_n <= MAX_SUMS // 2)
        parts = 0 < self.shared <= self.sharers and (self.sharers == self.shared or self.min_blocks == self.splits == 1)
        alone = self.neighbours == 1 or (self.min_blocks == self.splits == 1 and self.tile_m > MAX_SPLIT_ROWS)
        counts = all(one in (1, 2) for one in (self.chunk, self.boxes, self.neighbours))
        if not (shape and split and roomy and parts and alone and counts):
            raise ValueError(f"no geometry of wq_gemm_sm90.cu: {self}")

    def candidates(self, problem: PackedProblem, device: Device) -> list[PackedConfig]:
        """Other tiles, splits, and MMAs in flight."""
        shape = PackedShape.of(problem)
        return [
            one
            for one in tuning.varied(
                self,
                tile_m=tuning.beside(self.tile_m, 16, 256),
                tile_n=(128, 256),
                chunk=(1, 2),
                splits=tuning.beside(self.splits, 1, 8),
                min_blocks=(1, 2),
                sharers=(self.shared, self.shared + 1),
                neighbours=(1, 2),
                boxes=(1, 2),
            )
            if one.boxes <= max_boxes(shape)
            and one.splits <= -(-problem.weight.k // problem.weight.format.box_rows)
            and (problem.experts is None or one.serves_blocks_of(problem.experts.lists.block_size))
            and not (shape.promoted and (one.chunk == 1 or one.tile_m * one.tile_n > MAX_SUMS))
        ]

    def serves_blocks_of(self, slots: int) -> bool:
        """Whether the tile divides blocks of the sorted lists of experts, and one CTA has a whole tile."""
        return self.sharers == self.shared == self.neighbours == self.splits == 1 and slots % self.tile_m == 0

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of an output of this size; the adjacent tiles of a cluster count as one."""
        return -(-rows // self.tile_m) * -(-columns // (self.tile_n * self.neighbours))

    def waves(self, rows: int, columns: int, device: Device) -> Waves:
        """The waves of an output of this size."""
        clusters = max(1, device.num_sms // self.neighbours)
        return Waves(clusters, *divmod(self.tiles(rows, columns), clusters))

    def num_sharers(self, waves: Waves, k_tiles: int) -> int:
        """CTAs of the last wave; as many as it has tiles: no stream-K."""
        most = min(waves.clusters, waves.rest * min(k_tiles, MAX_PARTS))
        return max(waves.rest, min(most, waves.rest * self.sharers // self.shared))

    def _stage_bytes(self, shape: PackedShape) -> int:
        """Bytes of a k-tile in shared memory, and its two mbarriers."""
        step = self.boxes * shape.format.box_rows
        weight = (step * shape.bits + shape.groups_of(step) * shape.group_bits) * self.tile_n // 8
        return -(-(self.boxes * self.tile_m * _ROW_BYTES + weight) // 1024) * 1024 + 2 * _BARRIER_BYTES

    def _fixed_bytes(self, grouped: bool) -> int:
        """Bytes of the accumulators that other CTAs send, or of the staging buffers of TMA stores, and a mbarrier."""
        sums = self.tile_m * self.tile_n * 4 if self.splits > 1 else 0
        stores = self.tile_n * 4 * _STORE_BYTES if self.tile_m > MAX_SPLIT_ROWS and not grouped else 0
        return sums + stores + _BARRIER_BYTES

    def stages(self, shape: PackedShape, device: Device, grouped: bool = False) -> int:
        """k-tiles in shared memory."""
        space = (device.shared_memory + 1024) // self.min_blocks - 1024 - self._fixed_bytes(grouped)
        return min(_MAX_STAGES, space // self._stage_bytes(shape))

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """One CTA or cluster per tile with split-K; else a persistent grid."""
        weight, device, shape = problem.weight, problem.device, PackedShape.of(problem)
        step, grouped = self.boxes * weight.format.box_rows, problem.experts is not None
        stages, fixed = self.stages(shape, device, grouped), self._fixed_bytes(grouped)
        rows = problem.places
        waves, tiles = self.waves(rows, weight.n, device), self.tiles(rows, weight.n)
        sharers = self.num_sharers(waves, -(-weight.k // step))
        parts = waves.rest + sharers - 1 if sharers > waves.rest else 0  # parts of all stream-K tiles
        grid = tiles if self.splits > 1 else min(max(tiles, sharers), waves.clusters * self.min_blocks)
        box_rows = box_rows_of(rows, self.tile_m, self.neighbours)
        kernel = problem.kernel(_wq_gemm_sm90.for_arch(device.arch_feature))
        launch = kernel(
            **problem.constants(),
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            BOXES=self.boxes,
            CHUNK=self.chunk,
            STAGES=stages,
            SPLITS=self.splits,
            NEIGHBOURS=self.neighbours,
            APART=shape.promoted,
            CUT=self.sharers > self.shared,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (grid, self.splits * self.neighbours),
            384 if self.tile_m * self.tile_n * (2 if shape.promoted else 1) > MAX_SUMS else 32 * (_WARPS + 1),
            max(fixed + stages * self._stage_bytes(shape), device.shared_memory // (self.min_blocks + 1) + 1),
            partial=Scratch(self.neighbours * parts * self.tile_m * self.tile_n * 4) if parts else 0,
            arrived=Scratch(self.neighbours * waves.rest * _WARPS * 4, zeroed=True) if parts else 0,
            a_box_rows=box_rows,
            sharers=max(1, sharers),
            **_maps(problem, box_rows, self.tile_n, step, shape.groups_of(step)),
            **problem.arguments(kernel),
        )
        return [launch]


def configs(shape: PackedShape, device: Device) -> Iterator[PackedConfig]:
    """Tiles of equal rows, of the fewest row tiles or of a few more; K split over clusters, or in the last wave."""
    for one in _tiles(shape, device):
        k_tiles = -(-shape.k // (one.boxes * shape.format.box_rows))
        if one.tile_m <= MAX_SPLIT_ROWS:
            yield from (replace(one, splits=size) for size in CLUSTERS if 1 < size <= min(k_tiles, device.cluster))
        for neighbours in (1, 2) if one.tile_m > MAX_SPLIT_ROWS else (1,):
            whole = replace(one, neighbours=neighbours)
            yield whole
            waves = whole.waves(shape.m, shape.n, device)
            for sharers, shared in _SHARERS:
                cut = replace(whole, sharers=sharers, shared=shared)
                if shared <= waves.rest and waves.rest * sharers // shared == cut.num_sharers(waves, k_tiles):
                    yield cut


def _tiles(shape: PackedShape, device: Device) -> Iterator[PackedConfig]:
    """Configs of all tiles, without split-K. A k-tile of two boxes leaves enough stages to load while MMAs run."""
    for tile_n in (128, 256):
        most = (MAX_SUMS if shape.promoted else 2 * MAX_SUMS) // tile_n
        fewest = -(-shape.m // most)
        rows = {-(-shape.m // (16 * row_tiles)) * 16 for row_tiles in range(fewest, fewest + _MORE_ROW_TILES)}
        for tile_m in sorted(rows):
            for boxes in range(1, max_boxes(shape) + 1):
                one = PackedConfig(tile_m, tile_n, _chunk(shape, tile_m, tile_n), 1, 1, boxes=boxes)
                if boxes == 1 or one.stages(shape, device) >= _MIN_LONG_STAGES:
                    yield one


def _chunk(shape: PackedShape, tile_m: int, tile_n: int) -> int:
    """MMAs in flight. With two, the largest tiles are slower, or the words do not fit into registers."""
    most = MAX_SUMS if shape.format.is_across else 2 * MAX_SUMS
    return 2 if tile_m < 256 and tile_m * tile_n <= most else 1


def box_rows_of(m: int, tile_m: int, neighbours: int = 1) -> int:
    """Rows of a box of a: a CTA's share of a tile, or a part of it where the last tile is not full."""
    if m % tile_m == 0:
        return tile_m // neighbours
    if m < tile_m and neighbours == 1:
        return -(-m // 8) * 8
    return math.gcd(tile_m, _BOX_ROWS)


def step_rows(layout: LayoutName) -> int:
    """Rows of a weight in this layout in one box of a."""
    return LAYOUTS[layout].box_rows


def max_boxes(shape: PackedShape) -> int:
    """The layout's boxes of a in a k-tile where these divide K, and hold whole groups or lie within one; else 1."""
    most = shape.format.most_boxes
    return most if shape.k % (most * shape.format.box_rows) == 0 and shape.divides(most * shape.format.box_rows) else 1


def _maps(problem: PackedProblem, box_rows: int, tile_n: int, step: int, groups: int) -> dict[str, Any]:
    """The tensor maps of loads and of the output. The map of a stands in for absent tensors."""
    weight, a, out = problem.weight, problem.a, problem.epilogue.out
    maps = load_maps(problem, box_rows, weight.format.box_rows, tile_n, step, groups)
    if problem.experts is not None:
        return {**maps, "out_map": maps["a_map"]}  # with experts, threads store the rows without TMA
    columns, pitch = 16 * tile_n // (16 * _WARPS), check.row_stride(out) * 2 if a.rows > 1 else -(-weight.n // 8) * 16
    return {**maps, "out_map": TensorMap(out, out.dtype, (weight.n, a.rows), (pitch,), (columns, 16), columns * 2)}


def load_maps(
    problem: PackedProblem, a_rows: int, a_columns: int, tile_n: int, step: int, groups: int = 1
) -> dict[str, Any]:
    """The tensor maps of a (boxes with rows of 128 bytes) and of the weight (`step` rows, `groups` groups, `tile_n`
    columns)."""
    weight, a = problem.weight, problem.a
    n, k, bits, itemsize = weight.n, weight.k, weight.bits, a.dtype.itemsize
    # A tensor of one row may have any row stride.
    a_pitch = a.stride * itemsize if a.rows > 1 else -(-k * itemsize // 16) * 16
    a_map = TensorMap(a.source, a.dtype, (k, a.rows), (a_pitch,), (a_columns, a_rows), _ROW_BYTES)

    def of_groups(tensor: TensorArg | None, bits: int) -> TensorMap:
        if tensor is None:
            return a_map
        width = 8 * tensor.dtype.itemsize
        box = (tile_n * bits // width, groups)
        rows = weight.groups * problem.num_weights
        return TensorMap(tensor, tensor.dtype, (n * bits // width, rows), (n * bits // 8,), box)

    scales_map = of_groups(weight.scales, 8 * weight.scales.dtype.itemsize if weight.scales else 0)
    if weight.scales is not None and weight.scale_kind == "products":
        shape, box = (n, weight.groups * problem.num_weights), (tile_n, groups)
        scales_map = TensorMap(weight.scales, int64, shape, (n * _TABLE_BYTES,), box)
    return {
        "a_map": a_map,
        "quants_map": _quants_map(problem, tile_n, step),
        "scales_map": scales_map,
        "zeros_map": of_groups(weight.zeros, bits if weight.zero_kind == "codes" else 16),
    }


def _quants_map(problem: PackedProblem, tile_n: int, step: int) -> TensorMap:
    """The tensor map of the packed weights."""
    weight, form = problem.weight, problem.weight.format
    assert form.words is not None
    sizes = form.words(weight.bits, problem.num_weights * weight.k, weight.n)
    box = form.words(weight.bits, step, tile_n)
    strides = (sizes[0] * 4, sizes[0] * sizes[1] * 4)
    return TensorMap(weight.codes, int32, sizes, strides, box, box[0] * 4 if form.is_swizzled else 0)
