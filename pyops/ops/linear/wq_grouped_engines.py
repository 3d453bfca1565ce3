"""The kernels for grouped GEMMs with K-major quantized weights: which shapes each of them serves, and their times.

A time is a launch; the main loop of the busiest SM and the bytes from device memory, which overlap. Each tile of rows
dequantizes its weights again, so the main loop is the dequantization and the MMAs of all tiles. Tensor cores that apply
block scales multiply rows that are quantized like the weights; for the other kernels, quantized rows are dequantized
first. The last engine dequantizes the weights of all experts first and multiplies them by the grouped GEMM that
`grouped_engines` chooses; it serves every shape. Experts have the rows that they are expected to have if tokens choose
them at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn
from ...tuning import engines
from ...tuning.engines import Choice, Engine, overlapped
from .._shared.products import multiplies
from .._shared.scalar_type import ScalarType
from . import gemm_sm120, grouped_engines, packed_large, packed_tile, wq_grouped_configs
from .gemm_shape import K_TILE_BYTES
from .gemm_sm120 import GroupedScaledMmaConfig
from .grouped_shape import GroupedShape
from .packed_engines import large_experts_us
from .packed_tile import TileGeometry
from .wq_grouped_configs import (
    LANE_BYTES,
    ROWS,
    DequantizeExpertsConfig,
    WqGroupedLargeConfig,
    WqGroupedSm80Config,
    WqGroupedSm90Config,
    step_of,
)
from .wq_grouped_problem import WqGroupedProblem, WqGroupedShape

FAMILY = "wq_grouped"  # pyops/tuning/wq_grouped.json has the rates
_K_TILE = K_TILE_BYTES // 2  # elements of K in a k-tile that the rates of WGMMA and of matrix cores refer to
_COLUMNS = 128  # weight rows of a tile that the rates of the MMAs refer to
NARROW = 128  # wq_grouped_gemm_sm90.cu: weight rows of the tiles with more than 96 rows of a


@dataclass(frozen=True, slots=True)
class WqGroupedRates:
    """What the times of the kernels are made of, in microseconds.

    Attributes:
        launch: a launch, with the first loads.
        bytes_per_us: bytes from device memory.
        mma_uint4, mma_e2m1, mma_e4m3, mma_int8: wq_grouped_gemm_sm80.cu: to dequantize a weight of an SM.
        mma_marlin, mma_groups: wq_gemm_sm80.cu: factors on it, in Marlin's layout and with several groups in a k-tile.
        mma_row: to multiply a weight of an SM by a row of a.
        mma_end: the end of a tile, for each row of a: to reduce its accumulators and to store results.
        padding, padding_start: a CTA of padding alone: its time; the time between the starts of two of an SM.
        large_code: wq_grouped_gemm_sm80_large_m: factor on dequantization in the k-tiles of `packed_rates`.
        wgmma_uint4, wgmma_e2m1, wgmma_e4m3: wq_grouped_gemm_sm90.cu: to dequantize a row of the weight in 64 elements
            of K.
        wgmma_table: the same for W4A8, by tables of products: wq_gemm_sm90.cu; with tiles of any width.
        wgmma: the tensor cores, for 64 elements of K, each row of a and each 128 rows of the weight.
        wgmma_eight_bits, wgmma_promote: W4A8: factor on it; to promote accumulators to float32 registers.
        short_k_tile: factor on dequantization in k-tiles of 64 instead of 128 elements.
        narrow: factor on dequantization in tiles of 128 instead of 256 rows of the weight.
        tile: a tile: its first loads and its epilogue.
        cdna_row: wq_grouped_gemm_cdna: a k-tile of a compute unit, for each row of a and each 128 rows of the
            weight.
        cdna_code: to dequantize a row of the weight in a k-tile.
        cdna_part: wq_gemm_cdna.cu: to write, or to read and add, a part of a tile of split-K.
        written_bytes_per_us: bytes that wna16_to_dense.cu reads and writes.
        expanded_bytes_per_us: bytes that block_scaled_to_bf16.cu reads and writes.
    """

    launch: float
    bytes_per_us: float
    mma_uint4: float
    mma_e2m1: float
    mma_e4m3: float
    mma_int8: float
    mma_marlin: float
    mma_groups: float
    mma_row: float
    mma_end: float
    padding: float
    padding_start: float
    large_code: float
    wgmma_uint4: float
    wgmma_e2m1: float
    wgmma_e4m3: float
    wgmma_table: float
    wgmma: float
    wgmma_eight_bits: float
    wgmma_promote: float
    short_k_tile: float
    narrow: float
    tile: float
    cdna_row: float
    cdna_code: float
    cdna_part: float
    written_bytes_per_us: float
    expanded_bytes_per_us: float

    def mma(self, kind: ScalarType) -> float:
        """mma.sync: to dequantize a weight of this type."""
        if kind.size_bits == 8:
            return self.mma_e4m3 if kind.exponent else self.mma_int8
        return self.mma_e2m1 if kind.exponent else self.mma_uint4


def rates_of(device: Device) -> WqGroupedRates:
    """The rates of a device."""
    return engines.rates(WqGroupedRates, FAMILY, device.name)


def _unread(shape: WqGroupedShape) -> str | None:
    """Why no kernel with fused dequantization reads the weight and the activations; None: most of them do."""
    if 0 in (shape.rows, shape.k):
        return "an empty operand"
    if not shape.is_contiguous:
        return "quants with gaps between rows: copy them to a contiguous tensor"
    if not shape.is_aligned or shape.access != 16:
        return "rows of a, or tensors of the weight, not at multiples of 16 bytes"
    if shape.row_bytes % LANE_BYTES:
        return f"rows of {shape.row_bytes} bytes of quants: K must be a multiple of {8 * LANE_BYTES // shape.bits}"
    if shape.block_size % 8:
        return f"tiles of 8 rows do not divide {shape.block_size} slots of a block of the lists"
    lane = LANE_BYTES * 8 // shape.bits
    if (2 if shape.is_tiled else 1) * shape.group_size % lane:
        return f"groups of {shape.group_size} elements: a lane has {lane}, which must lie under one scale"
    return None if shape.scales_are_indexed else "more scales of an expert than 32 bits index"


def _inexact(shape: WqGroupedShape) -> str | None:
    """Why NVIDIA's kernels would round a scale."""
    exact = not shape.type.exponent or shape.dtype is bfloat16
    return None if exact else f"{shape.dtype} does not hold the scales of {shape.type}: use bfloat16 activations"


# grouped_gemm_sm120


def _scaled_refusal(shape: WqGroupedShape, device: Device) -> str | None:
    if not shape.is_tiled or 0 in (shape.rows, shape.k) or shape.block_size % 16:
        return f"no block scales of both operands, or tiles of 16 rows do not divide {shape.block_size} slots"
    return gemm_sm120.refusal(device, shape.scales_rows)


def _scaled_configs(shape: WqGroupedShape, device: Device) -> Iterator[GroupedScaledMmaConfig]:
    return gemm_sm120.grouped_configs(shape.bits, shape.group_size, shape.block_size, device)


def _scaled_us(config: GroupedScaledMmaConfig, shape: WqGroupedShape, device: Device, rates: WqGroupedRates) -> float:
    """A tile of padding alone ends at once."""
    tiles = round(shape.row_tiles(config.tile_m)) * -(-shape.n // config.tile_n)
    loop = gemm_sm120.loop_us(config, tiles, shape.k, shape.bits, device)
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us)


# wq_grouped_gemm_sm80.cu


def _sm80_refusal(shape: WqGroupedShape, device: Device) -> str | None:
    if not device.supports("mma"):
        return "the device has no mma.sync"
    if not multiplies(shape.dtype, device):
        return f"no tensor cores for {shape.dtype} on the device"
    if shape.n % ROWS:
        return f"{shape.n} rows of the weight of an expert are no multiple of {ROWS}"
    return _unread(shape) or _inexact(shape)


def _sm80_us(config: WqGroupedSm80Config, shape: WqGroupedShape, device: Device, rates: WqGroupedRates) -> float:
    """A CTA for each tile; those of padding alone end at once, and wait for their first loads."""
    columns = shape.n // ROWS
    tiles = -(-round(shape.row_tiles(config.tile_m)) * columns // device.num_sms)  # of the busiest SM
    weight = rates.mma(shape.type) + rates.mma_row * config.tile_m
    loop = tiles * (rates.mma_end * config.tile_m + ROWS * shape.k * weight)
    loop += padding_us(shape, device, rates, config.tile_m, columns, config.min_blocks)
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us)


def padding_us(
    shape: GroupedShape, device: Device, rates: WqGroupedRates, tile_m: int, columns: int, min_blocks: int
) -> float:
    """CTAs of padding alone; an SM has `min_blocks` of them at a time."""
    of_sm = shape.padding_tiles(tile_m) * columns / device.num_sms
    return of_sm * max(rates.padding_start, rates.padding / min_blocks)


# wq_grouped_gemm_sm80_large_m


def _large_refusal(shape: WqGroupedShape, device: Device) -> str | None:
    if device.supports("wgmma"):
        return "WGMMA multiplies faster"
    if not device.supports("async_copies"):
        return "the device has no cp.async"
    if shape.is_tiled or (shape.bits == 8 and shape.type.exponent):
        return "it reads neither scales in tiles nor quants of float8_e4m3fn"
    size, step = shape.group_size, packed_large.STEP
    if shape.k % step or (size % step and size != step // 2):
        return f"K = {shape.k} in groups of {size} elements: k-tiles have {step}, with one or two groups"
    if shape.block_size % 16:
        return f"tiles of 16 rows do not divide {shape.block_size} slots of a block of the lists"
    if not shape.out_is_aligned:
        return "rows of out not at multiples of 16 bytes"
    return _sm80_refusal(shape, device)


def _large_us(config: WqGroupedLargeConfig, shape: WqGroupedShape, device: Device, rates: WqGroupedRates) -> float:
    loop = large_experts_us(config, shape, shape.expert_bytes / (shape.n * shape.k), device, rates.large_code)
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us)


# wq_grouped_gemm_sm90.cu


def _sm90_refusal(shape: WqGroupedShape, device: Device) -> str | None:
    if not device.supports("wgmma"):
        return "the device has no WGMMA"
    if shape.bits == 8 and not shape.type.exponent:
        return f"it dequantizes 4 bits and float8_e4m3fn, not {shape.type}"
    if shape.block_size % 16:
        return f"tiles of 16 rows do not divide {shape.block_size} slots of a block of the lists"
    if reason := _unread(shape) or _inexact(shape):
        return reason
    steps = " or ".join(map(str, wq_grouped_configs.STEPS))
    return None if step_of(shape) else f"no k-tile of {steps} elements divides K = {shape.k} and has whole groups"


def _sm90_us(config: WqGroupedSm90Config, shape: WqGroupedShape, device: Device, rates: WqGroupedRates) -> float:
    """A launch gathers the rows. Every tile of a block of the lists is multiplied, also without rows."""
    code = rates.wgmma_uint4
    if shape.type.exponent:
        code = rates.wgmma_e2m1 if shape.bits == 4 else rates.wgmma_e4m3
    code *= rates.narrow if config.tile_n == NARROW else 1.0
    is_short = config.step == min(wq_grouped_configs.STEPS)
    return k_tiles_us(shape, device, rates, config.tile_m, config.tile_n, code, rates.wgmma, is_short=is_short)


def k_tiles_us(
    shape: GroupedShape,
    device: Device,
    rates: WqGroupedRates,
    tile_m: int,
    tile_n: int,
    code: float,
    mma: float,
    *,
    is_short: bool,
) -> float:
    """A launch that gathers rows, and a persistent grid. For 64 elements of K, `code` is the time to dequantize a row
    of the weight, and `mma` that to multiply 128 of them by a row of a."""
    slots = round(shape.row_tiles(shape.block_size)) * shape.block_size
    waves = -(-slots // tile_m * -(-shape.n // tile_n) // device.num_sms)
    code *= rates.short_k_tile if is_short else 1.0
    k_tile = tile_n * (code + mma * tile_m / _COLUMNS)
    gathered = (slots + shape.rows / shape.top_k) * shape.k * shape.dtype.itemsize / rates.bytes_per_us
    loop = overlapped(waves * shape.k / _K_TILE * k_tile, shape.nbytes / rates.bytes_per_us)
    return 2 * rates.launch + gathered + loop + waves * rates.tile


# wq_grouped_gemm_cdna


def _cdna_refusal(shape: WqGroupedShape, device: Device) -> str | None:
    if not device.supports("matrix_cores"):
        return "it is for AMD's matrix cores"
    if shape.scale_dtype is float8_e4m3fn or (shape.type.exponent and shape.bits == 8):
        return "it reads neither quants nor scales of float8_e4m3fn"
    size = packed_tile.STEP if shape.group_size == shape.k else shape.group_size
    if size % packed_tile.STEP and packed_tile.STEP % size:
        return f"groups of {size} elements, and k-tiles of {packed_tile.STEP}: neither divides the other"
    return _unread(shape)


def cdna_us(config: TileGeometry, shape: GroupedShape, device: Device, rates: WqGroupedRates, splits: int = 1) -> float:
    """The time by matrix cores; with split-K, CTAs add their parts through device memory."""
    slots = packed_tile.places_of(shape.block_size, config.tile_m)
    tiles = -(-round(shape.row_tiles(slots)) * -(-shape.n // config.tile_n) * splits // device.num_sms)
    k_tile = config.tile_n * (rates.cdna_row * config.tile_m / _COLUMNS + rates.cdna_code)
    loop = tiles * -(-shape.k // (packed_tile.STEP * splits)) * k_tile
    parts = splits if splits > 1 else 0
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us) + parts * rates.cdna_part


# wna16_to_dense.cu or block_scaled_to_bf16.cu, and a grouped GEMM


def _dequantize_configs(shape: WqGroupedShape, device: Device) -> Iterator[DequantizeExpertsConfig]:
    yield DequantizeExpertsConfig(grouped_engines.choose.best(shape.dense, device).config)


def _dequantize_us(
    config: DequantizeExpertsConfig, shape: WqGroupedShape, device: Device, rates: WqGroupedRates
) -> float:
    """wna16_to_dense.cu writes the weights of all experts, block_scaled_to_bf16.cu those of experts that have rows."""
    experts, speed = shape.num_experts * 1.0, rates.written_bytes_per_us
    if shape.is_tiled:
        experts, speed = shape.chosen_experts, rates.expanded_bytes_per_us
    nbytes = experts * (shape.expert_bytes + shape.n * shape.k * shape.dtype.itemsize)
    return rates.launch + nbytes / speed + grouped_engines.choose.fastest(shape.dense, device).us


choose: Choice[WqGroupedShape, WqGroupedRates] = Choice(
    WqGroupedShape.of_problem,
    rates_of,
    Engine("grouped_gemm_sm120", _scaled_refusal, _scaled_configs, _scaled_us),
    Engine("wq_grouped_gemm_sm80.cu", _sm80_refusal, wq_grouped_configs.sm80_configs, _sm80_us),
    Engine("wq_grouped_gemm_sm80_large_m", _large_refusal, wq_grouped_configs.large_configs, _large_us),
    Engine("wq_grouped_gemm_sm90.cu", _sm90_refusal, wq_grouped_configs.sm90_configs, _sm90_us),
    Engine("wq_grouped_gemm_cdna", _cdna_refusal, wq_grouped_configs.cdna_configs, cdna_us),
    Engine("dequantize, then a grouped GEMM", lambda shape, device: None, _dequantize_configs, _dequantize_us),
)


def plan(problem: WqGroupedProblem) -> list[Launch]:
    """The launches of the kernel that is chosen, or forced by `tuning`."""
    config = tuning.config(problem.product.out.op, problem, problem.device, choose)
    found: list[Launch] = config.launches(problem)
    if problem.rows is None or isinstance(config, GroupedScaledMmaConfig):
        return found
    return [problem.rows.dequantize, *found]
