"""Which kernel serves a product with a weight of packed codes, and how: a Config for each, the choice, the launches.

Four kernels read the codes themselves: wq_gemm_sm80.cu for few rows, wq_gemm_sm90_small_m.cu and wq_gemm_sm90.cu on
compute capability 9.0, and wq_gemm_cdna.cu on AMD. What they do not serve is written in full and multiplied
(`dequantize_packed`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import bfloat16, float8_e4m3fn, float16
from ..._core.kernel import Kernel, Launch
from .._shared.packed_layouts import unit
from .._shared.scalar_type import uint4b8
from . import dequantize_packed, packed_hopper, packed_narrow, packed_tile
from .gemm_sm90 import CLUSTERS
from .packed_hopper import PackedConfig, step_rows
from .packed_narrow import PackedNarrowConfig
from .packed_problem import PackedProblem, PackedWeight
from .packed_tile import PackedTileConfig

_wq_gemm_sm80 = Kernel("linear/wq_gemm_sm80.cu")

_TILE_N = 64  # columns that every tile divides, or has
_MIN_STAGES, _MAX_STAGES = 2, 3  # steps of a warp in shared memory
_WORDS = 512  # bits of the words of a lane in a step: eight words, four times
_SHORT_STEP = 128  # rows of a step of 3-bit codes, and of codes of two in four rows
_BITS = {
    "marlin": (4, 8),
    "marlin_24": (4, 8),
    "awq": (4,),
    "gptq": (2, 4, 8),
    "exllama": (2, 3, 4, 8),
    "n32k16": (8,),
    "marlin_8": (4,),
}
_TILE_ROWS = {"marlin": 16, "n32k16": 16, "marlin_24": 32}  # of the layouts' tiles
_ZEROS = {"marlin": "marlin", "awq": "awq", "gptq": "gptq", "exllama": "gptq"}  # the zero points that kernels read
# Measured on an H200: docs/performance/packed.md.
_MAX_WARPS = 8  # of a block
_WARPS_OF_MANY = 4  # of a block, where there are more blocks than a device holds; one took a quarter longer
# Warps of a multiprocessor that registers allow, by rows and columns of a tile.
_RESIDENT = {(1, 64): 16, (2, 64): 16, (4, 64): 16, (8, 64): 16, (16, 64): 12}
_RESIDENT |= {(1, 128): 12, (2, 128): 12, (4, 128): 12, (8, 128): 12, (16, 128): 8}
_RESIDENT_OF_GROUPS = 8  # the same, where a step has several groups
# Up to how many rows lanes hold codes of the next step in registers, by layouts and bits.
_HELD = {("gptq", 4): 8, ("exllama", 4): 8, ("marlin", 8): 16, ("n32k16", 8): 8}
_MAX_HELD_NIBBLES = 8  # the same of bfloat16 and integers of 8 bits: 16 rows would spill registers
_MAX_HALF_ROWS = 8  # up to which wq_gemm_sm80.cu is faster than wq_gemm_sm90_small_m.cu, or as fast
# Chosen by arithmetic, measured nowhere yet.
_LONG_PART = 4  # steps of each warp, from which on a block has as many warps as a multiprocessor holds
_MAX_FEW_ROWS = 16  # up to which wq_gemm_sm80.cu is faster than wq_gemm_sm90.cu
_MAX_ROWS = 64  # up to which it is faster than writing the weight in full
_MAX_APART_ROWS = 512  # up to which wq_gemm_sm90.cu is, where threads add up sums of fp8


@dataclass(frozen=True, slots=True)
class PackedMmaConfig:
    """The geometry of wq_gemm_sm80.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        warps: of a block, each with a part of K.
        splits: blocks of a cluster, each with a part of K.
        min_blocks: blocks per multiprocessor that the compiler makes room for, by bounding registers.
        held: lanes hold codes of the next step in registers; else codes come through shared memory.
    """

    tile_m: int
    tile_n: int
    warps: int
    splits: int
    min_blocks: int
    held: bool = False

    def __post_init__(self) -> None:
        resident = _RESIDENT.get((self.tile_m, self.tile_n), 0)
        if self.splits not in (1, 2, 4, 8) or not 1 <= self.warps <= self.warps * self.min_blocks <= resident:
            raise ValueError(f"no geometry of wq_gemm_sm80.cu: {self}")

    def candidates(self, problem: PackedProblem, device: Device) -> list[PackedMmaConfig]:
        """Other tiles, warps and splits."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, min(tuning.power_of_two(problem.m), 8), 16),
            tile_n=(64, 128) if _is_wide(problem.weight) else (64,),
            warps=tuning.beside(self.warps, 1, 16),
            splits=tuning.beside(self.splits, 1, device.cluster),
            min_blocks=(self.min_blocks - 1, self.min_blocks + 1),
            held=(False, True) if _may_hold(problem.weight) else (False,),
        )
        return [one for one in found if one.fits(problem, device)]

    def _stage_bytes(self, problem: PackedProblem) -> int:
        """Bytes of a step of a warp: codes, rows of a, scales and zero points."""
        step, size = rows_of_step(problem.weight, self.tile_n), problem.constants()["GROUP_SIZE"]
        groups = step // size if 0 < size < step else 1
        terms = -(-groups * problem.group_bits() * self.tile_n // 128) * 16
        codes = 0 if self.held else step * self.tile_n * problem.weight.bits // 8
        places = 0
        if problem.weight.places is not None:  # half of the rows have codes
            codes, places = codes // 2, step // 32 * self.tile_n * 4
        return codes + self.tile_m * step * 2 + terms + places

    def fits(self, problem: PackedProblem, device: Device) -> bool:
        """Whether a block has shared memory for the fewest stages."""
        return self.warps * _MIN_STAGES * self._stage_bytes(problem) <= device.shared_memory

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """A cluster of blocks for each tile."""
        weight, device, stage = problem.weight, problem.device, self._stage_bytes(problem)
        own = ((device.shared_memory + 1024) // self.min_blocks - 1024) // self.warps  # of a warp
        stages = max(_MIN_STAGES, min(_MAX_STAGES, own // stage))
        sums = self.tile_n * max(8, self.tile_m) * 4
        kernel = problem.kernel(_wq_gemm_sm80)
        launch = kernel(
            **problem.constants(),
            WHOLE_STEPS=weight.k % rows_of_step(weight, self.tile_n) == 0,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            WARPS=self.warps,
            SPLITS=self.splits,
            STAGES=stages,
            HELD=self.held,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (-(-problem.places // self.tile_m) * (weight.n // self.tile_n), self.splits),
            self.warps * 32,
            self.warps * max(stages * stage, sums),
            **problem.arguments(kernel),
        )
        return [launch]


Config = PackedConfig | PackedMmaConfig | PackedNarrowConfig | PackedTileConfig


def plan(problem: PackedProblem) -> list[Launch]:
    """The launches of the kernel that is chosen, or forced by `tuning`."""
    if not serves(problem, problem.device):
        return dequantize_packed.plan(problem)
    config = tuning.config(problem.op, problem, problem.device, choose)
    in_fours = problem.weight.layout == "marlin_8" and isinstance(config, PackedConfig)
    permute, a = dequantize_packed.activations(problem, in_fours=in_fours)
    return [*permute, *config.launches(replace(problem, a=a))]


def serves(problem: PackedProblem, device: Device) -> bool:
    """Whether a kernel that reads codes itself is there for this problem, and faster than writing the weight."""
    tile = serves_tile(problem, device) and problem.m <= packed_tile.MAX_ROWS
    return tile or _serves_many(problem, device) or (serves_few(problem, device) and problem.m <= _MAX_ROWS)


def choose(problem: PackedProblem, device: Device) -> Config:
    """The kernel for a problem that one `serves`, and its geometry. Equal for all problems of a bucket."""
    m, w = tuning.power_of_two(problem.m), problem.weight
    if serves_tile(problem, device):
        return packed_tile.choose(m, w.k, w.n, device)
    many = _serves_many(problem, device)
    if serves_few(problem, device) and m <= (_MAX_FEW_ROWS if many else _MAX_ROWS):
        if _serves_narrow(problem, device, m):
            return PackedNarrowConfig()
        tile_n = 128 if _is_wide(w) and w.n // 128 >= device.multiprocessors else 64
        step = rows_of_step(w, tile_n)
        several, max_rows = w.groups > 1 and w.group_size < step, 8 if w.scale_kind == "int16" else 16
        config = choose_mma(m, tile_n, w.n, -(-w.k // step), device, several, max_rows=max_rows)
        max_held = _HELD.get((w.layout, w.bits), 0)
        if w.type.is_integer and w.bits == 8 and problem.compute_dtype is bfloat16:  # whose nibbles are numbers apart
            max_held = min(max_held, _MAX_HELD_NIBBLES)
        held = config.splits == 1 and m <= max_held
        return fitting(replace(config, held=held), problem, device)
    return packed_hopper.choose(m, w.n, w.k, w.layout, device, packed_hopper.sums_apart(problem))


def fitting(config: PackedMmaConfig, problem: PackedProblem, device: Device) -> PackedMmaConfig:
    """`config`, with as many warps of a block as it has shared memory for."""
    while config.warps > 1 and not config.fits(problem, device):
        config = replace(config, warps=config.warps - 1)
    return config


def rows_of_step(weight: PackedWeight, tile_n: int) -> int:
    """Rows of the weight of a step of wq_gemm_sm80.cu, whose tiles have `tile_n` columns."""
    return _SHORT_STEP if _is_for_few(weight) else _WORDS // weight.bits * 64 // tile_n


def _is_for_few(weight: PackedWeight) -> bool:
    """Whether no kernel but wq_gemm_sm80.cu reads these codes."""
    return weight.bits == 3 or weight.layout == "marlin_24"


def _rows_of_words(weight: PackedWeight) -> int:
    """Rows of the fewest words that hold whole codes: those of a tile, or of a column."""
    return _TILE_ROWS.get(weight.layout) or unit(weight.bits)[1]


def _is_wide(weight: PackedWeight) -> bool:
    """Whether tiles of wq_gemm_sm80.cu may have 128 columns: rows of AWQ, of which 64 are 32 bytes."""
    return weight.layout == "awq" and weight.n % 128 == 0 and fits(weight, rows_of_step(weight, 128))


def _may_hold(weight: PackedWeight) -> bool:
    """Whether lanes of wq_gemm_sm80.cu may hold codes: of layouts where this was faster for some rows."""
    return (weight.layout, weight.bits) in _HELD


def serves_few(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_sm80.cu has an instance for this problem."""
    w = problem.weight
    return reads_codes(problem) and device.supports("mma") and fits(w, rows_of_step(w, 64))


def serves_tile(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_cdna.cu serves this problem: on AMD, where no other kernel reads codes."""
    w = problem.weight
    return device.supports("matrix_cores") and reads_codes(problem) and not _is_for_few(w) and packed_tile.takes(w)


def _serves_narrow(problem: PackedProblem, device: Device, m: int) -> bool:
    """Whether wq_gemm_sm90_small_m.cu takes less time for at most `m` rows than wq_gemm_sm80.cu."""
    w = problem.weight
    served = device.supports("wgmma") and packed_narrow.takes(w) and _is_mapped(problem)
    return m > _MAX_HALF_ROWS and served and packed_narrow.fills(w, device)


def _serves_many(problem: PackedProblem, device: Device) -> bool:
    w = problem.weight
    # Integers of 13 bits, and powers of two beyond those of float16, are no scales of 16 bits.
    rounds = w.layout == "marlin_8" and not (
        w.scale_kind == "float" or (w.scale_kind == "e8m0" and problem.compute_dtype is bfloat16)
    )
    served = _reads_tables(problem) or (reads_codes(problem) and not rounds and rounds_once(w))
    return (
        served
        and not _is_for_few(w)
        and device.supports("wgmma")
        and fits(w, step_rows(w.layout))
        and _is_mapped(problem)
    )


def choose_mma(
    m: int,
    tile_n: int,
    n: int,
    steps: int,
    device: Device,
    several_groups: bool = False,
    weights: int = 1,
    max_rows: int = 16,
    min_warps: int = 1,
) -> PackedMmaConfig:
    """As many warps as the device holds at a time, and their parts of K, for m rows of each of `weights` weights.

    Eight warps to a block at most, unless blocks that clusters do not fit for would leave half of a device's warps out.
    `max_rows`: of a tile. Of several groups in a step, or of scales that are integers, a thread has more in registers,
    and one of 16 rows would spill. `min_warps`: of a block, as far as steps and registers allow.
    """
    tile_m = min(m, 8 if several_groups else max_rows)
    resident = min(_RESIDENT_OF_GROUPS if several_groups else 16, _RESIDENT[tile_m, tile_n])
    tiles = weights * -(-m // tile_m) * (n // tile_n)
    clusters = {size: int(part * device.multiprocessors) for size, part in CLUSTERS.items() if size <= device.cluster}
    splits = max(size for size, count in clusters.items() if size == 1 or (tiles <= count and size <= steps))
    blocks = -(-tiles * splits // device.multiprocessors)  # of a multiprocessor
    # Where not all blocks are there at once, the last round of them is shorter with several warps to a tile.
    warps = resident // blocks or _WARPS_OF_MANY
    max_warps = resident if splits == 1 and steps >= _LONG_PART * resident else _MAX_WARPS
    warps = max(1, min(max_warps, resident, max(warps, min_warps), -(-steps // splits)))
    return PackedMmaConfig(tile_m, tile_n, warps, splits, resident // warps)


def rounds_once(w: PackedWeight) -> bool:
    """Whether wq_gemm_sm90.cu rounds a weight once: not a difference from a float, then its product with a scale."""
    return w.zero_kind != "floats" or w.scales is None


def reads_codes(problem: PackedProblem) -> bool:
    """Whether kernels that read codes themselves have an instance for this problem."""
    w, e, a = problem.weight, problem.epilogue, problem.a
    kind = w.bits in _BITS.get(w.layout, ()) and not (w.type.is_integer and w.type.signed)
    kind = kind and (w.recoding == "none" or (w.layout == "marlin_8" and w.type == uint4b8))
    zeros = w.zero_kind in ("none", "added", "floats") or (
        w.zero_kind == "codes" and w.zero_layout == _ZEROS.get(w.layout)
    )
    zeros = zeros and not (w.layout == "marlin" and w.bits == 8 and w.zero_kind == "codes")
    scales = w.scale_kind != "products" and (w.scales is not None or w.zero_kind != "added")
    rows = w.g_idx is None and w.k % _rows_of_words(w) == 0
    # Activations of 8 bits are widened first, but those of experts.
    dtype = a.dtype if problem.experts is not None else problem.compute_dtype
    aligned = (a.dtype.itemsize == 1 or a.vec_size(w.k) == 8) and all(
        one.alignment == 16 for one in (w.codes, w.scales, w.zeros, w.places) if one is not None
    )
    dtypes = dtype in (float16, bfloat16) and dtype is e.out.dtype
    sizes = problem.m > 0 and w.n > 0 and w.n % _TILE_N == 0 and w.k > 0
    return all((kind, zeros, scales, rows, aligned, _is_plain(problem), dtypes, sizes))


def _reads_tables(problem: PackedProblem) -> bool:
    """Whether wq_gemm_sm90.cu has an instance for this problem of W4A8."""
    w, a = problem.weight, problem.a
    tables = w.layout == "w4a8" and w.scale_kind == "products" and w.scales is not None and w.k % 32 == 0
    aligned = a.vec_size(w.k) == 16 and all(one.alignment == 16 for one in (w.codes, w.scales) if one is not None)
    sizes = problem.m > 0 and w.n > 0 and w.n % 32 == 0 and w.k > 0
    sizes = sizes and (problem.m <= _MAX_APART_ROWS or not packed_hopper.sums_apart(problem))
    return tables and aligned and sizes and a.dtype is float8_e4m3fn and _is_plain(problem)


def _is_plain(problem: PackedProblem) -> bool:
    """Whether the epilogue is one of the kernels that read codes."""
    e = problem.epilogue
    return e.out.dtype in (float16, bfloat16) and not (e.is_gated or e.has_matrix_bias or e.block_scaled or e.azp_adj)


def fits(weight: PackedWeight, step: int) -> bool:
    """Whether a step of so many rows is of whole groups, or within one."""
    size = weight.group_size
    # Of 4 bits 32, as products of W4A8 have.
    smallest = 16 if weight.layout == "marlin" else step if weight.bits == 3 else 128 // weight.bits
    smallest = smallest if weight.places is None else 2 * smallest
    return weight.groups == 1 or size % step == 0 or (step % size == 0 and size % smallest == 0)


def _is_mapped(problem: PackedProblem) -> bool:
    """Whether rows of out begin at multiples of 16 bytes, as a map and stores of 16 bytes ask."""
    out = problem.epilogue.out
    return out.alignment == 16 and (problem.m == 1 or check.row_stride(out) % 8 == 0)
