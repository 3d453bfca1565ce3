"""GEMMs with packed weights by WGMMA on compute capability 9.0: the geometry and tensor maps of wq_gemm_sm90.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float8_e4m3fn, float16, int32, int64
from ..._core.tensors.tensor import TensorArg
from .gemm_rates import CLUSTERS
from .packed_problem import PackedProblem

_wq_gemm_sm90 = Kernel("linear/wq_gemm_sm90.cu")

_ROW_BYTES = 128  # bytes of a row of a in one box: the 128-byte swizzle
_TABLE_BYTES = 8  # W4A8: bytes of the scale table per column and group
_WARPS = 8  # consumer warps
_BARRIER_BYTES = 8  # bytes of an mbarrier
_MAX_STAGES = 8  # most stages
# Largest accumulator tile without register reallocation between warpgroups; twice as large with it.
_MAX_SUMS = 128 * 128
# Largest tile M for cluster split-K, and for direct stores in the epilogue; larger tiles are stored by TMA.
_MAX_SHARED_ROWS = 64
# Smallest M where two CTAs of a cluster multicast rows of a: measured (docs/performance/packed.md); W4A8 gains nothing.
_ROWS_OF_NEIGHBOURS = 1024
_STORE_BYTES = 2 * 16  # bytes of a warp's staging buffer per 16 columns: rows of 32 bytes

# The cost model of the device, fitted to a few measurements on an H200: docs/performance/packed.md.
_PRODUCT_CYCLES = 1.11 / 2048  # cycles per multiply-add of the tensor cores
_CODE_CYCLES = 70.0 / (16 * 64)  # cycles to dequantize one weight
_TABLE_CODE_CYCLES = 75.0 / (32 * 128)  # W4A8: cycles to dequantize one weight, by a count of instructions
_CODES_BESIDE = 0.155  # part of the dequantization cycles that the tensor cores do not hide
_L2_BYTES = 48.0  # bytes per cycle from the L2 cache to one SM
_TILE_CYCLES = 3000.0  # cycles of a tile's prologue and epilogue
_EXCHANGE_CYCLES = 1200.0  # cycles to reduce a tile, for each doubling of the split-K CTAs
_ARRIVAL_CYCLES = 1000.0  # stream-K: cycles to write or read one partial tile, in addition to the cycles for its bytes
_DOUBT = 1.03  # stream-K: the cost model must predict a gain of at least 3 %
_MAX_PARTS = 4  # stream-K: most parts of a tile; the last CTA to arrive reads the accumulators of all others


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """The geometry of wq_gemm_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        chunk: WGMMA k-blocks (16 rows of the weight) in flight.
        splits: CTAs of a cluster that share a tile (split-K); each takes a part of K.
        min_blocks: CTAs per SM; bounds the registers.
        max_parts: stream-K: most parts, along K, of a tile of the last wave; 1: no stream-K.
        boxes: TMA boxes of 128 bytes of a row of a, in a k-tile.
        neighbours: CTAs of a cluster with adjacent column tiles; they multicast the rows of a that they share.
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
        """Other tiles, splits, and MMAs in flight."""
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
            and (problem.experts is None or one.serves_blocks_of(problem.experts.lists.block_size))
            and not (sums_apart(problem) and (one.chunk == 1 or one.tile_m * one.tile_n > _MAX_SUMS))
        ]

    def serves_blocks_of(self, slots: int) -> bool:
        """Whether the tile divides blocks of the sorted lists of experts, and one CTA has a whole tile."""
        return self.max_parts == self.neighbours == self.splits == 1 and slots % self.tile_m == 0

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of an output of this size; the adjacent tiles of a cluster count as one."""
        return -(-rows // self.tile_m) * -(-columns // (self.tile_n * self.neighbours))

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """One CTA or cluster per tile with split-K; else a persistent grid."""
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
        tiles, clusters = self.tiles(problem.places, weight.n), device.num_sms // self.neighbours
        rest = tiles % clusters if self.max_parts > 1 else 0
        blocks = sharers(self, rest, -(-weight.k // step), clusters, weight.layout)
        parts = rest + blocks - 1 if blocks > rest > 0 else 0  # parts of all stream-K tiles
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
    """Whether fp8 accumulators are promoted to float32 registers: for a float16 output."""
    return problem.a.dtype is float8_e4m3fn and problem.epilogue.out.dtype is float16


@cache
def choose(m: int, n: int, k: int, layout: str, device: Device, apart: bool = False) -> PackedConfig:
    """The config with the least time by the cost model, for at most `m` rows, a power of two.

    `apart`: promotion needs registers for a second set of accumulators.
    """
    # With two MMAs in flight the larger tiles are slower, or AWQ's words do not fit into registers.
    most = _MAX_SUMS if layout == "awq" else 2 * _MAX_SUMS
    step_k = step_rows(layout)

    def cycles(one: PackedConfig) -> float:
        waves = -(-one.tiles(m, n) // max(1, int(CLUSTERS[one.splits] * device.num_sms)))
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
    clusters = device.num_sms // config.neighbours
    rest, cut = config.tiles(m, n) % clusters, replace(config, max_parts=_MAX_PARTS)
    return cut if sharers(cut, rest, -(-k // step_k), clusters, layout) > max(1, rest) else config


@cache
def sharers(config: PackedConfig, rest: int, steps: int, blocks: int, layout: str) -> int:
    """CTAs, of `blocks`, that share the `rest` tiles of the last wave: `rest` without stream-K; 1 if `rest` is 0."""
    sums = config.tile_m * config.tile_n * 4 / _L2_BYTES + _ARRIVAL_CYCLES

    def cycles(count: int) -> float:
        own = -(-rest * steps // count) * _step_cycles(config, layout)
        parts = max(-(-(tile + 1) * count // rest) - tile * count // rest for tile in range(rest))
        return own if parts == 1 else _DOUBT * (own + _TILE_CYCLES + parts * sums)

    # Candidates are counts that divide each tile into equal parts, and counts where the division repeats every few
    # tiles: in both cases a tile has few parts.
    counts = {rest * parts for parts in range(1, config.max_parts + 1)}
    counts |= {rest * parts // (parts - 1) for parts in range(3, 10) if rest % (parts - 1) == 0}
    most = min(blocks, rest * min(steps, config.max_parts))
    return min((count for count in sorted({*counts, most}) if 0 < rest <= count <= most), key=cycles, default=1)


def step_rows(layout: str) -> int:
    """Rows of a weight in this layout in one box of a (128 bytes of a row): 64 for 16-bit activations, 128 for W4A8."""
    return 128 if layout == "w4a8" else 64


def max_boxes(problem: PackedProblem) -> int:
    """2 where K is a multiple of a two-box k-tile and this holds whole groups or lies within one; else 1."""
    w = problem.weight
    step = 2 * step_rows(w.layout)
    fits = w.groups == 1 or w.group_size % step == 0 or step % w.group_size == 0
    return 2 if w.layout == "marlin" and w.k % step == 0 and fits else 1


def _step_cycles(config: PackedConfig, layout: str) -> float:
    """Cycles of one k-tile of a tile, by the cost model."""
    is_table, step_k = layout == "w4a8", step_rows(layout)
    product_cycles, code_cycles = _PRODUCT_CYCLES, _CODE_CYCLES
    if is_table:
        product_cycles, code_cycles = _PRODUCT_CYCLES / 2, _TABLE_CODE_CYCLES
    loads = config.tile_m * _ROW_BYTES + config.tile_n * (step_k // 2 + is_table * _TABLE_BYTES)
    products, codes = config.tile_m * config.tile_n * step_k * product_cycles, config.tile_n * step_k * code_cycles
    return max(products + codes * _CODES_BESIDE, codes, loads / _L2_BYTES)


def _maps(problem: PackedProblem, tile_m: int, tile_n: int, step: int, groups: int, neighbours: int) -> dict[str, Any]:
    """The tensor maps of loads and of the output. The map of a stands in for absent tensors."""
    weight, a, out = problem.weight, problem.a, problem.epilogue.out
    maps = load_maps(problem, tile_m // neighbours, step_rows(weight.layout), tile_n, step, groups)
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
    """The tensor map of the packed weights, in the layouts that packed_weight.cuh describes."""
    weight = problem.weight
    n, k, bits, swizzle = weight.n, weight.k, weight.bits, 0
    if weight.layout in ("w4a8", "marlin_8"):
        sizes, box = (32 * bits, n // 32, problem.num_weights * k // 32), (32 * bits, tile_n // 32, step // 32)
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
