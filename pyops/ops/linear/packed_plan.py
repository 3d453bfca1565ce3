"""GEMM with a packed quantized weight: a Config for each kernel, the choice among them, and the launches.

Four kernels fuse the dequantization: wq_gemm_sm80.cu for small M, wq_gemm_sm90_small_m.cu and wq_gemm_sm90.cu on
compute capability 9.0, and wq_gemm_cdna.cu on AMD. For other problems the weight is dequantized first and then
multiplied (`dequantize_packed`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float16
from .._shared.packed_layouts import unit
from .._shared.products import multiplies
from .._shared.scalar_type import uint4b8
from . import dequantize_packed, packed_hopper, packed_narrow, packed_tile
from .gemm_rates import CLUSTERS
from .packed_hopper import PackedConfig, step_rows
from .packed_narrow import PackedNarrowConfig
from .packed_problem import PackedProblem, PackedWeight
from .packed_tile import PackedTileConfig

_wq_gemm_sm80 = Kernel("linear/wq_gemm_sm80.cu")

_TILE_N = 64  # smallest tile N; N must be a multiple of it
_MIN_STAGES, _MAX_STAGES = 2, 3  # stages: k-tiles of a warp in shared memory
_WORDS = 512  # rows * bits of a k-tile with 64 columns: 32 words per lane
_SHORT_STEP = 128  # rows of a k-tile of 3-bit weights and of 2:4 sparse weights
_BITS = {
    "marlin": (4, 8),
    "marlin_24": (4, 8),
    "awq": (4,),
    "gptq": (2, 4, 8),
    "exllama": (2, 3, 4, 8),
    "n32k16": (8,),
    "marlin_8": (4,),
}
_TILE_ROWS = {"marlin": 16, "n32k16": 16, "marlin_24": 32}  # rows of a tile of the layout
# {layout: the layout of zero points that kernels read}
_ZEROS = {"marlin": "marlin", "awq": "awq", "gptq": "gptq", "exllama": "gptq"}
# Measured on an H200: docs/performance/packed.md.
_MAX_WARPS = 8  # most warps of a CTA
_WARPS_OF_MANY = 4  # warps of a CTA where the grid exceeds one wave; with one warp it took a quarter longer
# Warps per SM that registers allow, by rows and columns of a tile.
_RESIDENT = {(1, 64): 16, (2, 64): 16, (4, 64): 16, (8, 64): 16, (16, 64): 12}
_RESIDENT |= {(1, 128): 12, (2, 128): 12, (4, 128): 12, (8, 128): 12, (16, 128): 8}
_RESIDENT_OF_GROUPS = 8  # warps per SM that registers allow where a k-tile has several groups
# {(layout, bits): most rows where lanes hold the packed words of the next k-tile in registers}.
_HELD = {("gptq", 4): 8, ("exllama", 4): 8, ("marlin", 8): 16, ("n32k16", 8): 8}
_MAX_HELD_NIBBLES = 8  # the same for bfloat16 with 8-bit integers, where 16 rows would spill
_MAX_HALF_ROWS = 8  # most rows where wq_gemm_sm80.cu is at least as fast as wq_gemm_sm90_small_m.cu
# Chosen by arithmetic, not yet measured.
_LONG_PART = 4  # k-tiles per warp from which a CTA takes all warps that an SM holds
_MAX_FEW_ROWS = 16  # most rows where wq_gemm_sm80.cu is faster than wq_gemm_sm90.cu
_MAX_ROWS = 64  # most rows where wq_gemm_sm80.cu is faster than dequantizing the whole weight first
_MAX_APART_ROWS = 512  # most rows where wq_gemm_sm90.cu with promotion of fp8 accumulators beats dequantizing first


@dataclass(frozen=True, slots=True)
class PackedMmaConfig:
    """The geometry of wq_gemm_sm80.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        warps: warps of a CTA; each takes a part of K.
        splits: CTAs of a cluster; each takes a part of K.
        min_blocks: CTAs per SM; bounds the registers.
        held: lanes hold the packed words of the next k-tile in registers; else they go through shared memory.
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
        """Bytes of a stage of a warp: quantized weights, rows of a, scales and zero points."""
        step, size = rows_of_step(problem.weight, self.tile_n), problem.constants()["GROUP_SIZE"]
        groups = step // size if 0 < size < step else 1
        terms = -(-groups * problem.group_bits() * self.tile_n // 128) * 16
        codes = 0 if self.held else step * self.tile_n * problem.weight.bits // 8
        places = 0
        if problem.weight.places is not None:  # 2:4: half of the rows are stored, with metadata
            codes, places = codes // 2, step // 32 * self.tile_n * 4
        return codes + self.tile_m * step * 2 + terms + places

    def fits(self, problem: PackedProblem, device: Device) -> bool:
        """Whether the fewest stages fit into the shared memory of a CTA."""
        return self.warps * _MIN_STAGES * self._stage_bytes(problem) <= device.shared_memory

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """A cluster of CTAs for each tile."""
        weight, device, stage = problem.weight, problem.device, self._stage_bytes(problem)
        # Bytes of shared memory of a warp.
        own = ((device.shared_memory + 1024) // self.min_blocks - 1024) // self.warps
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
    """Whether a kernel with fused dequantization supports this problem and is faster than dequantizing first."""
    tile = serves_tile(problem, device) and problem.m <= packed_tile.MAX_ROWS
    return tile or _serves_many(problem, device) or (serves_few(problem, device) and problem.m <= _MAX_ROWS)


def choose(problem: PackedProblem, device: Device) -> Config:
    """The kernel for a problem for which `serves` is true, and its geometry. Equal for all problems of a bucket."""
    m, w = tuning.power_of_two(problem.m), problem.weight
    if serves_tile(problem, device):
        return packed_tile.choose(m, w.k, w.n, device)
    many = _serves_many(problem, device)
    if serves_few(problem, device) and m <= (_MAX_FEW_ROWS if many else _MAX_ROWS):
        if _serves_narrow(problem, device, m):
            return PackedNarrowConfig()
        tile_n = 128 if _is_wide(w) and w.n // 128 >= device.num_sms else 64
        step = rows_of_step(w, tile_n)
        several, max_rows = w.groups > 1 and w.group_size < step, 8 if w.scale_kind == "int16" else 16
        config = choose_mma(m, tile_n, w.n, -(-w.k // step), device, several, max_rows=max_rows)
        max_held = _HELD.get((w.layout, w.bits), 0)
        # Both nibbles of a byte are held as numbers.
        if w.type.is_integer and w.bits == 8 and problem.compute_dtype is bfloat16:
            max_held = min(max_held, _MAX_HELD_NIBBLES)
        held = config.splits == 1 and m <= max_held
        return fitting(replace(config, held=held), problem, device)
    return packed_hopper.choose(m, w.n, w.k, w.layout, device, packed_hopper.sums_apart(problem))


def fitting(config: PackedMmaConfig, problem: PackedProblem, device: Device) -> PackedMmaConfig:
    """`config` with fewer warps per CTA where shared memory requires it."""
    while config.warps > 1 and not config.fits(problem, device):
        config = replace(config, warps=config.warps - 1)
    return config


def rows_of_step(weight: PackedWeight, tile_n: int) -> int:
    """Weight rows of a k-tile of wq_gemm_sm80.cu with `tile_n` columns."""
    return _SHORT_STEP if _is_for_few(weight) else _WORDS // weight.bits * 64 // tile_n


def _is_for_few(weight: PackedWeight) -> bool:
    """Whether only wq_gemm_sm80.cu reads this weight."""
    return weight.bits == 3 or weight.layout == "marlin_24"


def _rows_of_words(weight: PackedWeight) -> int:
    """Fewest weight rows that fill whole packed words: rows of a tile of the layout, or of a column's words."""
    return _TILE_ROWS.get(weight.layout) or unit(weight.bits)[1]


def _is_wide(weight: PackedWeight) -> bool:
    """Whether wq_gemm_sm80.cu may have 128 columns in a tile: for AWQ, where 64 columns are only 32 bytes of a row."""
    return weight.layout == "awq" and weight.n % 128 == 0 and fits(weight, rows_of_step(weight, 128))


def _may_hold(weight: PackedWeight) -> bool:
    """Whether wq_gemm_sm80.cu may hold packed words in registers: for layouts where this was measured faster."""
    return (weight.layout, weight.bits) in _HELD


def serves_few(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_sm80.cu has an instance for this problem."""
    w = problem.weight
    return (
        device.supports("mma")
        and multiplies(problem.compute_dtype, device)
        and reads_codes(problem)
        and fits(w, rows_of_step(w, 64))
    )


def serves_tile(problem: PackedProblem, device: Device) -> bool:
    """Whether wq_gemm_cdna.cu supports this problem: on AMD, where no other kernel fuses the dequantization."""
    w = problem.weight
    return device.supports("matrix_cores") and reads_codes(problem) and not _is_for_few(w) and packed_tile.takes(w)


def _serves_narrow(problem: PackedProblem, device: Device, m: int) -> bool:
    """Whether wq_gemm_sm90_small_m.cu is faster than wq_gemm_sm80.cu for at most `m` rows."""
    w = problem.weight
    served = device.supports("wgmma") and packed_narrow.takes(w) and _is_mapped(problem)
    return m > _MAX_HALF_ROWS and served and packed_narrow.fills(w, device)


def _serves_many(problem: PackedProblem, device: Device) -> bool:
    w = problem.weight
    # Integer scales of 13 bits, and powers of two out of float16's range, are not exact in the 16-bit scale.
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
    """The config of wq_gemm_sm80.cu for m rows of each of `weights` weights: K is split over as many warps as the
    device holds at a time.

    A CTA has at most eight warps, unless the warps of the device would otherwise stay half idle because clusters do not
    fit.
    `max_rows`: most rows of a tile. With several groups in a k-tile, or integer scales, a thread needs more registers,
    and 16 rows would spill. `min_warps`: fewest warps of a CTA, as far as k-tiles and registers allow.
    """
    tile_m = min(m, 8 if several_groups else max_rows)
    resident = min(_RESIDENT_OF_GROUPS if several_groups else 16, _RESIDENT[tile_m, tile_n])
    tiles = weights * -(-m // tile_m) * (n // tile_n)
    clusters = {size: int(part * device.num_sms) for size, part in CLUSTERS.items() if size <= device.cluster}
    splits = max(size for size, count in clusters.items() if size == 1 or (tiles <= count and size <= steps))
    blocks = -(-tiles * splits // device.num_sms)  # CTAs per SM
    # In a grid of more than one wave, several warps per tile make the last wave shorter.
    warps = resident // blocks or _WARPS_OF_MANY
    max_warps = resident if splits == 1 and steps >= _LONG_PART * resident else _MAX_WARPS
    warps = max(1, min(max_warps, resident, max(warps, min_warps), -(-steps // splits)))
    return PackedMmaConfig(tile_m, tile_n, warps, splits, resident // warps)


def rounds_once(w: PackedWeight) -> bool:
    """Whether wq_gemm_sm90.cu rounds a weight once: float zero points would round the difference, then its product with
    the scale."""
    return w.zero_kind != "floats" or w.scales is None


def reads_codes(problem: PackedProblem) -> bool:
    """Whether kernels with fused dequantization have an instance for this problem."""
    w, e, a = problem.weight, problem.epilogue, problem.a
    kind = w.bits in _BITS.get(w.layout, ()) and not (w.type.is_integer and w.type.signed)
    kind = kind and (w.recoding == "none" or (w.layout == "marlin_8" and w.type == uint4b8))
    zeros = w.zero_kind in ("none", "added", "floats") or (
        w.zero_kind == "codes" and w.zero_layout == _ZEROS.get(w.layout)
    )
    zeros = zeros and not (w.layout == "marlin" and w.bits == 8 and w.zero_kind == "codes")
    scales = w.scale_kind != "products" and (w.scales is not None or w.zero_kind != "added")
    rows = w.g_idx is None and w.k % _rows_of_words(w) == 0
    # 8-bit activations are upcast first, except with experts.
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
    """Whether the kernels with fused dequantization support the epilogue."""
    e = problem.epilogue
    return e.out.dtype in (float16, bfloat16) and not (e.is_gated or e.has_matrix_bias or e.block_scaled or e.azp_adj)


def fits(weight: PackedWeight, step: int) -> bool:
    """Whether a k-tile of `step` rows holds whole groups or lies within one."""
    size = weight.group_size
    # The smallest group is 32 rows for 4 bits, as the scale tables of W4A8 require.
    smallest = 16 if weight.layout == "marlin" else step if weight.bits == 3 else 128 // weight.bits
    smallest = smallest if weight.places is None else 2 * smallest
    return weight.groups == 1 or size % step == 0 or (step % size == 0 and size % smallest == 0)


def _is_mapped(problem: PackedProblem) -> bool:
    """Whether rows of out begin at multiples of 16 bytes, as TMA and 16-byte stores require."""
    out = problem.epilogue.out
    return out.alignment == 16 and (problem.m == 1 or check.row_stride(out) % 8 == 0)
