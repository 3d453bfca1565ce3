"""Products with packed weights by wgmma on compute capability 9.0: wq_gemm_sm90.cu, its geometry and tensor maps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import float8_e4m3fn, float16, int32, int64
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.tensor import TensorArg
from ..._core.tensor_map import TensorMap
from .gemm_sm90 import CLUSTERS
from .packed_problem import PackedProblem

_wq_gemm_sm90 = Kernel("linear/wq_gemm_sm90.cu")

_ROW_BYTES = 128  # of a, of a step
_TABLE_BYTES = 8  # of a column of W4A8, in a group
_WARPS = 8  # that multiply
_BARRIER_BYTES = 8
_MAX_STAGES = 8
_MAX_SUMS = 128 * 128  # of a tile, for which no warpgroup gives registers away; of the halves of a tile twice as large
_MAX_SHARED_ROWS = 64  # of a tile whose sums several blocks add up, or threads store
# From how many rows on neighbours share rows of a: measured (docs/performance/packed.md); W4A8 gains nothing.
_ROWS_OF_NEIGHBOURS = 1024
_STORE_BYTES = 2 * 16  # rows of 32 bytes, for every 16 columns of a warp

# The model of the device, fitted to a few measurements on an H200: docs/performance/packed.md.
_PRODUCT_CYCLES = 1.11 / 2048  # of a multiply-add
_CODE_CYCLES = 70.0 / (16 * 64)  # of a code that is made a number
_TABLE_CODE_CYCLES = 75.0 / (32 * 128)  # of a code of W4A8, by a count of instructions
_CODES_BESIDE = 0.155  # of these, of codes that are made numbers while the tensor cores are busy
_L2_BYTES = 48.0  # a cycle, to one multiprocessor
_TILE_CYCLES = 3000.0  # to begin and to end a tile
_EXCHANGE_CYCLES = 1200.0  # for every doubling of the blocks that share a tile
_ARRIVAL_CYCLES = 1000.0  # to write or to read sums of a part of a tile, beside those of their bytes
_DOUBT = 1.03  # what cut tiles must take less by the model
_MAX_PARTS = 4  # of a tile of the last round: the last block to arrive reads the sums of all others


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """The geometry of wq_gemm_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        chunk: products of 16 rows of the weight in flight.
        splits: blocks of a cluster that share a tile, each with a part of K.
        min_blocks: blocks per multiprocessor that the compiler makes room for, by bounding registers.
        max_parts: parts of a tile of the last round, along K; 1: none is cut.
        boxes: of 128 bytes of a row of a, in a step.
        neighbours: blocks of a cluster whose tiles lie side by side, and which share the rows of a that they load.
    """

    tile_m: int
    tile_n: int
    chunk: int
    splits: int
    min_blocks: int
    max_parts: int = 1
    boxes: int = 1
    neighbours: int = 1

    def __post_init__(self) -> None:
        shape = self.tile_m % 16 == 0 and self.tile_n in (128, 256) and 0 < self.tile_m * self.tile_n <= 2 * _MAX_SUMS
        shared = self.splits == 1 or (self.splits in (2, 4, 8) and self.tile_m <= _MAX_SHARED_ROWS)
        roomy = self.min_blocks == 1 or (self.min_blocks == 2 and self.tile_m * self.tile_n <= _MAX_SUMS // 2)
        alone = self.max_parts == self.neighbours == 1
        large = self.min_blocks == self.splits == 1 and self.tile_m > _MAX_SHARED_ROWS
        counts = self.max_parts > 0 and all(one in (1, 2) for one in (self.chunk, self.boxes, self.neighbours))
        if not (shape and shared and roomy and (alone or large) and counts):
            raise ValueError(f"no geometry of wq_gemm_sm90.cu: {self}")

    def candidates(self, problem: PackedProblem, device: Device) -> list[PackedConfig]:
        """Other tiles, splits, and products in flight."""
        return [
            one
            for one in tuning.varied(
                self,
                tile_m=tuning.beside(self.tile_m, 16, 256),
                tile_n=(128, 256),
                chunk=(1, 2),
                splits=tuning.beside(self.splits, 1, 8),
                min_blocks=(1, 2),
                max_parts=(1, _MAX_PARTS),
                neighbours=(1, 2),
                boxes=(1, 2),
            )
            if one.boxes <= max_boxes(problem)
            and one.splits <= -(-problem.weight.k // step_rows(problem.weight.layout))
            and (one.max_parts == one.neighbours == 1 or problem.experts is None)
            and not (sums_apart(problem) and (one.chunk == 1 or one.tile_m * one.tile_n > _MAX_SUMS))
        ]

    def tiles(self, rows: int, columns: int) -> int:
        """Of an output of this size; those of neighbours count as one."""
        return -(-rows // self.tile_m) * -(-columns // (self.tile_n * self.neighbours))

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """A block, or a cluster of them, for each tile, or as many blocks as the device holds at a time."""
        weight, device, constants, apart = problem.weight, problem.device, problem.constants(), sums_apart(problem)
        size, step = constants["GROUP_SIZE"], self.boxes * step_rows(weight.layout)
        groups = step // size if 0 < size < step else 1
        loads = (
            self.boxes * self.tile_m * _ROW_BYTES
            + (step * weight.bits + groups * problem.group_bits()) * self.tile_n // 8
        )
        stage = -(-loads // 1024) * 1024 + 2 * _BARRIER_BYTES
        sums = self.tile_m * self.tile_n * 4 if self.splits > 1 else 0
        by_stores = self.tile_m > _MAX_SHARED_ROWS and problem.experts is None
        stores = self.tile_n * 4 * _STORE_BYTES if by_stores else 0
        fixed = sums + stores + _BARRIER_BYTES
        stages = min(_MAX_STAGES, ((device.shared_memory + 1024) // self.min_blocks - 1024 - fixed) // stage)
        tiles, clusters = self.tiles(problem.places, weight.n), device.multiprocessors // self.neighbours
        rest = tiles % clusters if self.max_parts > 1 else 0
        blocks = sharers(self, rest, -(-weight.k // step), clusters, weight.layout)
        parts = rest + blocks - 1 if blocks > rest > 0 else 0  # of all tiles of the rest
        grid = tiles if self.splits > 1 else min(max(tiles, blocks), clusters * self.min_blocks)
        kernel = problem.kernel(_wq_gemm_sm90.for_arch(device.arch_feature))
        launch = kernel(
            **constants,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            BOXES=self.boxes,
            CHUNK=self.chunk,
            STAGES=stages,
            SPLITS=self.splits,
            NEIGHBOURS=self.neighbours,
            APART=apart,
            CUT=self.max_parts > 1,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (grid, self.splits * self.neighbours),
            384 if self.tile_m * self.tile_n * (2 if apart else 1) > _MAX_SUMS else 32 * (_WARPS + 1),
            max(fixed + stages * stage, device.shared_memory // (self.min_blocks + 1) + 1),
            partial=Scratch(self.neighbours * parts * self.tile_m * self.tile_n * 4) if parts else 0,
            arrived=Scratch(self.neighbours * rest * _WARPS * 4, zeroed=True) if parts else 0,
            sharers=blocks,
            **_maps(problem, self.tile_m, self.tile_n, step, groups, self.neighbours),
            **problem.arguments(kernel),
        )
        return [launch]


def sums_apart(problem: PackedProblem) -> bool:
    """Whether threads add up the sums of tensor cores for fp8, for results of float16."""
    return problem.a.dtype is float8_e4m3fn and problem.epilogue.out.dtype is float16


@cache
def choose(m: int, n: int, k: int, layout: str, device: Device, apart: bool = False) -> PackedConfig:
    """The config that takes the least time by the model, for at most `m` rows, a power of two.

    `apart`: there are registers for two sets of sums.
    """
    # With more products in flight, the larger tiles are slower, or have no registers for AWQ's words.
    most = _MAX_SUMS if layout == "awq" else 2 * _MAX_SUMS
    step_k = step_rows(layout)

    def cycles(one: PackedConfig) -> float:
        waves = -(-one.tiles(m, n) // max(1, int(CLUSTERS[one.splits] * device.multiprocessors)))
        exchange = _EXCHANGE_CYCLES * (one.splits.bit_length() - 1)
        return waves * (_TILE_CYCLES + -(-k // (step_k * one.splits)) * _step_cycles(one, layout)) + exchange

    found = []
    for tile_m, tile_n in (
        (16, 128),
        (16, 256),
        (32, 128),
        (32, 256),
        (64, 128),
        (64, 256),
        (128, 128),
        (128, 256),
        (256, 128),
    ):
        for splits in CLUSTERS:
            fits = splits == 1 or (tile_m <= _MAX_SHARED_ROWS and splits <= -(-k // step_k))
            if fits and (tile_m <= m or tile_m == 16) and not (apart and tile_m * tile_n > _MAX_SUMS):
                chunk = 2 if tile_m < 256 and tile_m * tile_n <= most else 1
                found.append(PackedConfig(tile_m, tile_n, chunk, splits, 1))
    config = min(found, key=cycles)
    if config.tile_m <= _MAX_SHARED_ROWS:
        return config
    if m >= _ROWS_OF_NEIGHBOURS and layout != "w4a8" and -(-n // config.tile_n) % 2 == 0:
        config = replace(config, neighbours=2)
    clusters = device.multiprocessors // config.neighbours
    rest, cut = config.tiles(m, n) % clusters, replace(config, max_parts=_MAX_PARTS)
    return cut if sharers(cut, rest, -(-k // step_k), clusters, layout) > max(1, rest) else config


@cache
def sharers(config: PackedConfig, rest: int, steps: int, blocks: int, layout: str) -> int:
    """Of `blocks` blocks, those that share the `rest` tiles of the last round: as many where none is cut; 1 of none."""
    sums = config.tile_m * config.tile_n * 4 / _L2_BYTES + _ARRIVAL_CYCLES

    def cycles(count: int) -> float:
        own = -(-rest * steps // count) * _step_cycles(config, layout)
        parts = max(-(-(tile + 1) * count // rest) - tile * count // rest for tile in range(rest))
        return own if parts == 1 else _DOUBT * (own + _TILE_CYCLES + parts * sums)

    # Whole parts of a tile, and those whose runs begin anew with every few tiles: few blocks then have a third part.
    counts = {rest * parts for parts in range(1, config.max_parts + 1)}
    counts |= {rest * parts // (parts - 1) for parts in range(3, 10) if rest % (parts - 1) == 0}
    most = min(blocks, rest * min(steps, config.max_parts))
    return min((count for count in sorted({*counts, most}) if 0 < rest <= count <= most), key=cycles, default=1)


def step_rows(layout: str) -> int:
    """Rows of a weight in this layout that a step has, as many as 128 bytes of a row of a: 16 bits, of W4A8 8 bits."""
    return 128 if layout == "w4a8" else 64


def max_boxes(problem: PackedProblem) -> int:
    """2 where K is of whole steps of two boxes, each of whole groups or within one; else 1."""
    w = problem.weight
    step = 2 * step_rows(w.layout)
    fits = w.groups == 1 or w.group_size % step == 0 or step % w.group_size == 0
    return 2 if w.layout == "marlin" and w.k % step == 0 and fits else 1


def _step_cycles(config: PackedConfig, layout: str) -> float:
    """Of a step of a tile, by the model."""
    is_table, step_k = layout == "w4a8", step_rows(layout)
    product_cycles, code_cycles = _PRODUCT_CYCLES, _CODE_CYCLES
    if is_table:
        product_cycles, code_cycles = _PRODUCT_CYCLES / 2, _TABLE_CODE_CYCLES
    loads = config.tile_m * _ROW_BYTES + config.tile_n * (step_k // 2 + is_table * _TABLE_BYTES)
    products, codes = config.tile_m * config.tile_n * step_k * product_cycles, config.tile_n * step_k * code_cycles
    return max(products + codes * _CODES_BESIDE, codes, loads / _L2_BYTES)


def _maps(problem: PackedProblem, tile_m: int, tile_n: int, step: int, groups: int, neighbours: int) -> dict[str, Any]:
    """The boxes of a step, and of what is stored. The map of a stands for those that there are not."""
    weight, a, out = problem.weight, problem.a, problem.epilogue.out
    maps = load_maps(problem, tile_m // neighbours, step_rows(weight.layout), tile_n, step, groups)
    if problem.experts is not None:
        return {**maps, "out_map": maps["a_map"]}  # rows of experts are stored by threads
    columns, pitch = 16 * tile_n // (16 * _WARPS), check.row_stride(out) * 2 if a.rows > 1 else -(-weight.n // 8) * 16
    return {**maps, "out_map": TensorMap(out, out.dtype, (weight.n, a.rows), (pitch,), (columns, 16), columns * 2)}


def load_maps(
    problem: PackedProblem, a_rows: int, a_columns: int, tile_n: int, step: int, groups: int = 1
) -> dict[str, Any]:
    """Boxes of a, rows of 128 bytes, and of `step` rows and `groups` groups of `tile_n` columns of the weight."""
    weight, a = problem.weight, problem.a
    n, k, bits, itemsize = weight.n, weight.k, weight.bits, a.dtype.itemsize
    # The stride of a single row says nothing.
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
        shape, box = (n, weight.groups), (tile_n, groups)
        scales_map = TensorMap(weight.scales, int64, shape, (n * _TABLE_BYTES,), box)
    return {
        "a_map": a_map,
        "codes_map": _codes_map(problem, tile_n, step),
        "scales_map": scales_map,
        "zeros_map": of_groups(weight.zeros, bits if weight.zero_kind == "codes" else 16),
    }


def _codes_map(problem: PackedProblem, tile_n: int, step: int) -> TensorMap:
    """As packed_weight.cuh describes it."""
    weight = problem.weight
    n, k, bits, swizzle = weight.n, weight.k, weight.bits, 0
    if weight.layout in ("w4a8", "marlin_8"):
        sizes, box = (32 * bits, n // 32, k // 32), (32 * bits, tile_n // 32, step // 32)
    elif weight.layout == "marlin":
        sizes, box = (32 * bits, n // 64, problem.num_weights * k // 16), (32 * bits, tile_n // 64, step // 16)
    elif weight.layout == "awq":
        sizes, box, swizzle = (n // 8, k, 1), (tile_n // 8, step, 1), tile_n // 2
    elif weight.layout == "n32k16":
        sizes, box = (k, n // 4, 1), (step, tile_n // 4, 1)
    else:
        sizes, box = (n, k * bits // 32, 1), (tile_n, step * bits // 32, 1)
    strides = (sizes[0] * 4, sizes[0] * sizes[1] * 4)
    return TensorMap(weight.codes, int32, sizes, strides, box, swizzle)
