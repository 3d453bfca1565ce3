"""The kernels for GEMMs with packed quantized weights: which shapes each of them serves, its Configs, and their times.

Five kernels fuse the dequantization: wq_gemm_sm80.cu for small M, wq_gemm_sm80_large_m.cu for larger M on GPUs without
WGMMA, wq_gemm_sm90_small_m.cu and wq_gemm_sm90.cu on compute capability 9.0, and wq_gemm_cdna.cu on AMD. The sixth
engine dequantizes the weight first and multiplies it by the GEMM that `gemm_engines` chooses; it serves every shape.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float16
from ...tuning.engines import Choice, Engine, overlapped
from .._shared.products import multiplies
from .._shared.scalar_type import uint4b8
from . import gemm_engines, packed_hopper, packed_large, packed_mma, packed_narrow, packed_rates, packed_tile
from .dequantize_packed import DequantizeConfig
from .gemm_rates import POWER_SOFTNESS, num_clusters
from .gemm_shape import K_TILE_BYTES
from .grouped_shape import GroupedShape
from .packed_hopper import PackedConfig
from .packed_large import LargeGeometry, PackedLargeConfig
from .packed_mma import PackedMmaConfig
from .packed_narrow import PackedNarrowConfig
from .packed_rates import PackedRates
from .packed_shape import PackedShape
from .packed_tile import PackedTileConfig


def unread(shape: PackedShape, bits: tuple[int, ...] | None = None) -> str | None:
    """Why a kernel with fused dequantization, which reads quants of these bits, does not read the weight and the
    activations. By default it is wq_gemm_sm80.cu, which reads most of them.
    """
    form = shape.format
    if shape.bits not in (form.sm80_bits if bits is None else bits) or (shape.type.is_integer and shape.type.signed):
        return f"no instance for {shape.type} in layout {shape.layout}"
    if shape.recoding != "none" and not (form.is_of_bytes and shape.type == uint4b8):
        return "quants that are transformed"
    if shape.zero_kind == "codes" and shape.zero_layout != form.zeros:
        return f"zero points in layout {shape.zero_layout}"
    if shape.zero_kind == "codes" and shape.bits not in form.zero_bits:
        return f"zero points of {shape.bits} bits in layout {shape.layout}"
    if shape.is_table or (shape.scale_is_none and shape.zero_kind == "added"):
        return "no scales that its instances apply"
    if shape.has_g_idx:
        return "groups of rows that are not consecutive"
    if shape.k % shape.word_rows or shape.n % packed_mma.TILE_N:
        return f"K is no multiple of {shape.word_rows}, or N none of {packed_mma.TILE_N}"
    if shape.dense.dtype not in (float16, bfloat16) or shape.dense.dtype is not shape.dense.out_dtype:
        return "activations and results of different dtypes, or neither float16 nor bfloat16"
    return _unaligned(shape) or _unfused(shape)


def _unaligned(shape: PackedShape) -> str | None:
    rows_are = shape.dense.vec_size * shape.dense.dtype.itemsize == 16
    return (
        None if rows_are and shape.is_aligned else "rows of a, or tensors of the weight, not at multiples of 16 bytes"
    )


def _unfused(shape: PackedShape) -> str | None:
    dense = shape.dense
    if 0 in (shape.m, shape.n, shape.k):
        return "an empty operand"
    if dense.is_gated or dense.has_matrix_bias or dense.block_scaled:
        return "an epilogue with a gated activation, block scales or a bias for each element"
    return None


def _ungrouped(shape: PackedShape, rows: int) -> str | None:
    return None if shape.divides(rows) else f"groups of {shape.group_size} rows for k-tiles of {rows}"


# wq_gemm_sm80.cu


def mma_refusal(shape: PackedShape, device: Device) -> str | None:
    if not device.supports("mma"):
        return "the device has no mma.sync"
    if not multiplies(shape.dense.dtype, device):
        return f"no tensor cores for {shape.dense.dtype} on the device"
    return unread(shape) or _ungrouped(shape, packed_mma.step_rows(shape, packed_mma.TILE_N))


def _mma_us(config: PackedMmaConfig, shape: PackedShape, device: Device, rates: PackedRates) -> float:
    step = packed_mma.step_rows(shape, config.tile_n)
    tiles = -(-shape.m // config.tile_m) * (shape.n // config.tile_n)
    sms = max(1, num_clusters(config.splits, device)) * config.splits
    of_sm = -(-tiles * config.splits // sms)  # CTAs of the busiest SM
    waves = -(-of_sm // config.min_blocks)
    k_tiles = -(-shape.k // (step * config.splits * config.warps)) * config.warps
    rows = max(8, config.tile_m)  # of an MMA
    code = rates.mma_code * (rates.awq_code if shape.format.is_across else 1.0)
    weight = code + rates.mma_row * rows + (rates.mma_place if shape.is_sparse else 0.0)
    memory = shape.nbytes / rates.bytes_per_us
    memory *= rates.awq_bytes if shape.format.is_across and config.tile_n == packed_mma.TILE_N else 1.0
    warps = config.warps * min(of_sm, config.min_blocks)
    loop = of_sm * k_tiles * step * config.tile_n * weight * (1 + rates.mma_idle / warps)
    ends = waves * rates.mma_end * rows * config.warps + of_sm * rates.exchange * (config.splits.bit_length() - 1)
    return rates.launch + overlapped(loop, memory) + ends


# wq_gemm_sm80_large_m.cu


def large_refusal(shape: PackedShape, device: Device) -> str | None:
    if device.supports("wgmma"):
        return "WGMMA multiplies faster"
    if not (device.supports("mma") and device.supports("async_copies") and multiplies(shape.dense.dtype, device)):
        return f"the device has no cp.async, or no mma.sync of {shape.dense.dtype}"
    if shape.is_sparse or shape.bits == 3 or shape.k % packed_large.STEP:
        return f"K = {shape.k} is no multiple of a k-tile, or the weight has 3 bits or 2:4 sparsity"
    return unread(shape) or rounding(shape) or _ungrouped(shape, packed_large.STEP) or _unmapped(shape)


def large_k_tile_us(
    config: LargeGeometry, of_column: float, rows: float, ctas: int, rates: PackedRates, code: float = 1.0
) -> float:
    """The time of a k-tile of each team of the `ctas` CTAs of an SM; a tile has `rows` rows of a.

    `of_column`: bytes of a column of the weight for each row of it. `code`: factor on its dequantization.
    """
    teams = config.warps_k
    of_weight = of_column * config.columns * packed_large.STEP * teams  # bytes of a k-tile
    idle = 1 + rates.mma_idle / (ctas * config.warps)
    mma = rates.large_mma * config.rows * config.columns * teams * idle
    # Each warp reads its rows of a and its quants.
    reads = config.warps * config.tile_m * K_TILE_BYTES + config.warps_m * of_weight
    shared = rates.large_shared * (config.rows * teams * K_TILE_BYTES + of_weight + reads)
    code *= rates.large_code * config.warps * packed_large.COLUMNS * idle
    loads = rates.l2 * (rows * teams + of_weight / K_TILE_BYTES)
    return rates.large_k_tile + ctas * overlapped(mma, shared, code, loads)


def large_end_us(config: LargeGeometry, rows: float, ctas: int, rates: PackedRates) -> float:
    """What it takes to begin and store these tiles, and to add up the accumulators of their teams."""
    added = 8 * rates.large_shared * config.rows * config.columns * (config.warps_k - 1)  # bytes written and read
    return rates.tile + ctas * (rates.epilogue * rows * config.columns / 128 + added)


def large_experts_us(
    config: LargeGeometry, shape: GroupedShape, of_column: float, device: Device, code: float = 1.0
) -> float:
    """The main loops and epilogues of the busiest SM with experts. A tile of padding alone ends at once."""
    rates, row_tiles = packed_rates.of(device), max(1, round(shape.row_tiles(config.rows)))
    of_sm = -(-row_tiles * -(-shape.n // config.columns) // device.num_sms)  # tiles of the busiest SM
    ctas, rows = min(of_sm, config.min_blocks), shape.rows / row_tiles
    waves = -(-of_sm // ctas)
    loop = shape.k / packed_large.STEP * large_k_tile_us(config, of_column, rows, ctas, rates, code)
    return waves * (loop + large_end_us(config, rows, ctas, rates))


def _large_us(config: PackedLargeConfig, shape: PackedShape, device: Device, rates: PackedRates) -> float:
    k_tiles, ctas = shape.k // (packed_large.STEP * config.warps_k), config.min_blocks
    rows = min(shape.m, config.rows)
    full, rest = config.waves(shape.m, shape.n, device)
    sharers = config.num_sharers(rest, k_tiles, device)
    k_tile = large_k_tile_us(config, shape.weight_bytes / (shape.n * shape.k), rows, ctas, rates)
    end = large_end_us(config, rows, ctas, rates)
    part = rates.part + rates.part_row * config.rows * ctas * config.columns / 128
    steps, ends = _stream_k(full, rest, sharers, k_tiles, end, part)
    return rates.launch + overlapped(steps * k_tile, shape.nbytes / rates.bytes_per_us) + ends


def _stream_k(full: int, rest: int, sharers: int, k_tiles: int, end: float, part: float) -> tuple[int, float]:
    """k-tiles of the CTA with most of them, and what it takes besides: to begin and store tiles, in `end` each, and to
    reduce those that `sharers` CTAs share, in `part` for each of their parts.
    """
    steps = full * k_tiles + (-(-rest * k_tiles // sharers) if rest else 0)
    ends = (full + (rest > 0)) * end
    if sharers > rest:  # CTAs may have the end of one tile and the beginning of the next
        across = sharers % rest > 0
        ends += across * end + (-(-sharers // rest) + across) * part
    return steps, ends


# wq_gemm_sm90_small_m.cu


def _narrow_refusal(shape: PackedShape, device: Device) -> str | None:
    if not device.supports("wgmma"):
        return "the device has no WGMMA"
    if shape.group_size % packed_narrow.STEP:
        return f"groups of {shape.group_size} rows, not of whole k-tiles"
    return unread(shape, shape.format.small_m_bits) or _unmapped(shape)


def _unmapped(shape: PackedShape) -> str | None:
    return None if shape.dense.out_is_aligned else "rows of out not at multiples of 16 bytes"


def _narrow_us(config: PackedNarrowConfig, shape: PackedShape, device: Device, rates: PackedRates) -> float:
    waves = -(-packed_narrow.tiles(shape.m, shape.n) // device.num_sms)
    form = shape.format
    of_layout = 1.0 if form.tile_rows else rates.few_across if form.is_across else rates.few_column
    loop = waves * -(-shape.k // packed_narrow.STEP) * rates.few_k_tile * of_layout
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us) + waves * rates.few_end


# wq_gemm_sm90.cu


def rounding(shape: PackedShape) -> str | None:
    """Why wq_gemm_sm90.cu would round a weight twice, or a scale."""
    if shape.zero_kind == "floats" and not shape.scale_is_none:
        return "the difference of a quant and a float zero point would be rounded, then its product with the scale"
    exact = shape.scale_kind == "float" or (shape.scale_kind == "e8m0" and shape.dense.dtype is bfloat16)
    # Integer scales of 13 bits, and powers of two out of float16's range, are not exact in the 16-bit scale.
    return "scales that 16 bits do not hold" if shape.format.is_of_bytes and not exact else None


def hopper_refusal(shape: PackedShape, device: Device, *, whole: bool = False) -> str | None:
    """`whole`: K must be a multiple of the k-tile, as with experts."""
    if not device.supports("wgmma"):
        return "the device has no WGMMA"
    reason = _untabled(shape) if shape.is_table else unread(shape, shape.format.sm90_bits) or rounding(shape)
    step = shape.format.box_rows
    if whole and not reason and shape.k % step:
        return f"K = {shape.k} is no multiple of a k-tile of {step} rows"
    return reason or _ungrouped(shape, step)


def _hopper_refusal(shape: PackedShape, device: Device) -> str | None:
    """Without experts, TMA stores the results."""
    return hopper_refusal(shape, device) or _unmapped(shape)


def _untabled(shape: PackedShape) -> str | None:
    """Why it does not read a weight of W4A8."""
    if not shape.format.has_tables or shape.scale_is_none or shape.dense.dtype is not float8_e4m3fn:
        return f"tables in layout {shape.layout}, or activations of {shape.dense.dtype}"
    if shape.k % 32 or shape.n % 32:
        return "K or N is no multiple of 32"
    if shape.dense.out_dtype not in (float16, bfloat16):
        return "results that are neither float16 nor bfloat16"
    return _unaligned(shape) or _unfused(shape)


def _hopper_us(config: PackedConfig, shape: PackedShape, device: Device, rates: PackedRates) -> float:
    wide, k_tiles = config.tile_n / 128, -(-shape.k // shape.format.box_rows)  # of one box
    code = rates.code * (rates.table_code if shape.is_table else rates.awq_code if shape.format.is_across else 1.0)
    mma = config.tile_m * wide * (rates.mma + (rates.promote if shape.promoted else 0.0))
    of_weight = shape.weight_bytes * config.tile_n / (shape.n * k_tiles * K_TILE_BYTES)
    loads = rates.l2 * (min(shape.m, config.tile_m) / config.neighbours + of_weight)
    k_tile = rates.k_tile / config.boxes + overlapped(mma, code * config.tile_n, loads)
    end = rates.tile + rates.epilogue * config.tile_m * wide + (config.neighbours - 1) * rates.neighbour
    if config.splits > 1:
        waves = -(-config.tiles(shape.m, shape.n) // max(1, num_clusters(config.splits, device)))
        steps = waves * -(-k_tiles // config.splits)
        ends = waves * (end + rates.exchange * (config.splits.bit_length() - 1))
    else:
        of = config.waves(shape.m, shape.n, device)
        part = rates.part + rates.part_row * config.tile_m * wide
        steps, ends = _stream_k(of.full, of.rest, config.num_sharers(of, k_tiles), k_tiles, end, part)
    us = rates.launch + overlapped(steps * k_tile, shape.nbytes / rates.bytes_per_us) + ends
    macs = shape.m * shape.n * shape.k if shape.is_table else 0
    return overlapped(us, macs / rates.table_macs_per_us, softness=POWER_SOFTNESS)


# wq_gemm_cdna.cu


def cdna_refusal(shape: PackedShape, device: Device) -> str | None:
    if not device.supports("matrix_cores"):
        return "it is for AMD's matrix cores"
    return unread(shape, shape.format.cdna_bits) or (
        None if packed_tile.takes(shape) else "groups, or K, that do not divide into its tiles"
    )


def _cdna_configs(shape: PackedShape, device: Device) -> Iterator[PackedTileConfig]:
    yield packed_tile.choose(shape.m, shape.k, shape.n, device)


def _cdna_us(config: PackedTileConfig, shape: PackedShape, device: Device, rates: PackedRates) -> float:
    blocks = -(-shape.m // config.tile_m) * -(-shape.n // config.tile_n) * config.splits
    k_tile = config.tile_n * (rates.cdna_row * config.tile_m / 128 + rates.cdna_code)
    loop = -(-blocks // device.num_sms) * -(-shape.k // (packed_tile.STEP * config.splits)) * k_tile
    parts = config.splits if config.splits > 1 else 0  # through device memory
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us) + parts * rates.cdna_part


# dequantize_packed.cu, and a dense GEMM


def _dequantize_configs(shape: PackedShape, device: Device) -> Iterator[DequantizeConfig]:
    yield DequantizeConfig(gemm_engines.choose.best(shape.dense, device).config)


def written_us(shape: PackedShape, device: Device, count: int = 1) -> float:
    """The launch that dequantizes `count` weights. From tables of products it takes few instructions."""
    rates, weights = packed_rates.of(device), shape.n * shape.k * count
    nbytes = count * shape.weight_bytes + weights * shape.dense.dtype.itemsize
    code = 0.0 if shape.is_table else weights / device.num_sms * rates.dense_weight
    return rates.dense_launch + overlapped(nbytes / rates.dense_bytes_per_us, code)


def _dequantize_us(config: DequantizeConfig, shape: PackedShape, device: Device, rates: PackedRates) -> float:
    return written_us(shape, device) + gemm_engines.choose.fastest(shape.dense, device).us


choose: Choice[PackedShape, PackedRates] = Choice(
    PackedShape.of,
    packed_rates.of,
    Engine("wq_gemm_sm80.cu", mma_refusal, packed_mma.configs, _mma_us),
    Engine("wq_gemm_sm80_large_m.cu", large_refusal, packed_large.configs, _large_us),
    Engine("wq_gemm_sm90_small_m.cu", _narrow_refusal, lambda shape, device: (PackedNarrowConfig(),), _narrow_us),
    Engine("wq_gemm_sm90.cu", _hopper_refusal, packed_hopper.configs, _hopper_us),
    Engine("wq_gemm_cdna.cu", cdna_refusal, _cdna_configs, _cdna_us),
    Engine("dequantize_packed.cu", lambda shape, device: None, _dequantize_configs, _dequantize_us),
)
