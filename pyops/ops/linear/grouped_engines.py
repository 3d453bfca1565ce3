"""The kernels for grouped GEMMs: which shapes each of them serves, its Configs, and their times by the cost model.

A kernel's time is a launch, the slower of two streams (the main loop of the busiest SM, and the bytes of the operands
from device memory), and the epilogues that nothing overlaps. Tokens are taken to choose experts at random, so experts
have different numbers of rows, and their last tiles are not full. `grouped_rates` has the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float8_e5m2, float16, int8
from ...tuning.engines import Choice, Engine, overlapped
from . import grouped_rates, grouped_simt, grouped_sm80, grouped_sm80_small_m, grouped_sm90, grouped_sm100
from .gemm_problem import SCALE_BLOCK, multiplies
from .gemm_shape import FP8
from .grouped_problem import GroupedProblem
from .grouped_rates import GroupedRates
from .grouped_shape import GroupedShape
from .grouped_simt import GroupedSimtConfig
from .grouped_sm80 import GroupedMmaConfig
from .grouped_sm80_small_m import ROWS, GroupedSmallMConfig
from .grouped_sm90 import GroupedConfig

_HOPPER_DTYPES = bfloat16, float16, float8_e4m3fn, float8_e5m2, int8
_ROWS = 128  # rows of a that the rates of the tensor cores and of the epilogue refer to
_PART_ROWS = 64  # rows of a warpgroup, which skips a k-tile without rows


# grouped_gemm_sm90.cu


def _hopper_refusal(shape: GroupedShape, device: Device) -> str | None:
    if not device.supports("wgmma"):
        return "the device has no WGMMA"
    if shape.dtype not in _HOPPER_DTYPES or shape.out_dtype.itemsize != 2:
        return f"no WGMMA of {shape.dtype} with {shape.out_dtype} results"
    if 0 in (shape.rows, shape.k):
        return "an empty operand"
    if shape.access != 16:
        return "TMA loads rows that begin at multiples of 16 bytes"
    if shape.block_size % _PART_ROWS:
        return f"WGMMA multiplies {_PART_ROWS} rows, and blocks of the lists have {shape.block_size} slots"
    if shape.scales == "block" and shape.dtype is int8:
        return "block scales are for fp8 operands"
    if shape.scales == "block" and shape.gated == 1 and shape.columns % SCALE_BLOCK:
        return f"ups begin inside a block of {SCALE_BLOCK} rows with one scale"
    return None


def _hopper_configs(shape: GroupedShape, device: Device) -> Iterator[GroupedConfig]:
    for tile_m in grouped_sm90.TILES_M:
        for tile_n in grouped_sm90.TILES_N:
            if (one := GroupedConfig(tile_m, tile_n)).fits(shape):
                yield one


def _hopper_us(config: GroupedConfig, shape: GroupedShape, device: Device, rates: GroupedRates) -> float:
    """A warpgroup without rows does not multiply."""
    filled = shape.row_tiles(config.tile_m)
    waves = -(-round(filled) * -(-shape.n // config.tile_n) // device.num_sms)
    rows = shape.rows / max(1.0, filled)
    multiplied = config.tile_n * shape.row_tiles(_PART_ROWS) * _PART_ROWS / max(1.0, filled) / _ROWS
    mma, least = rates.mma, rates.k_tile
    if shape.scales == "block":
        mma += rates.promoted
        least += rates.at_once if config.promotes_at_once else 0.0
    loads = rates.l2 * (config.tile_n + rows) + rates.gather * rows
    loop = waves * shape.num_k_tiles * (least + overlapped(mma * multiplied, loads))
    ends = waves * (rates.tile + rates.epilogue * multiplied)
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us) + ends


# grouped_gemm_sm80


def _mma_refusal(shape: GroupedShape, device: Device) -> str | None:
    if not multiplies(shape.dtype, device):
        return f"no tensor cores for {shape.dtype} on the device"
    return None if shape.block_size % 16 == 0 else f"tiles of 16 rows do not divide {shape.block_size} slots"


def _mma_us(config: GroupedMmaConfig, shape: GroupedShape, device: Device, rates: GroupedRates) -> float:
    """A warp converts the fp8 operands of its MMAs before these. Blocks of padding alone end at once."""
    columns = -(-shape.n // config.tile_n)
    tiles = round(shape.row_tiles(config.tile_m)) * columns
    mma = overlapped(rates.mma_area * config.tile_m * config.tile_n, rates.mma_shared * config.k_tile_traffic)
    converted = rates.mma_converted * config.k_tile_reads if _converts(shape, device) else 0.0
    k_tile = rates.mma_k_tile + mma + converted
    of_sm = -(-tiles // device.num_sms)  # tiles of the busiest SM; the first one begins with the launch
    loop = of_sm * shape.num_k_tiles * k_tile + max(0, of_sm - 1) * rates.mma_tile / config.min_blocks
    padding = shape.padding_tiles(config.tile_m) * columns / device.num_sms
    loop += padding * rates.mma_padding / config.min_blocks
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us)


def _converts(shape: GroupedShape, device: Device) -> bool:
    """Whether fp8 operands are converted to float16."""
    return shape.dtype in FP8 and not device.supports("fp8_products")


# grouped_gemm_sm80_small_m.cu


def _small_m_us(config: GroupedSmallMConfig, shape: GroupedShape, device: Device, rates: GroupedRates) -> float:
    """The blocks of an SM run in waves. While it has one block, nothing hides the beginning and the end of a tile."""
    of_sm = -(-round(shape.row_tiles(config.tile_m)) * -(-shape.n // ROWS) // device.num_sms)  # tiles of the busiest SM
    blocks = min(of_sm, config.min_blocks)
    waves = -(-of_sm // blocks)
    weight = rates.small_m + rates.small_m_row * config.tile_m
    weight += rates.small_m_converted if _converts(shape, device) else 0.0
    loop = waves * blocks * ROWS * shape.k * weight * (1 + rates.small_m_idle / (blocks * config.warps))
    ends = rates.small_m_tile * (waves if blocks == 1 else 1)
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us) + ends


# grouped_gemm_simt


def _simt_refusal(shape: GroupedShape, device: Device) -> str | None:
    return None if shape.block_size % 8 == 0 else f"tiles of 8 rows do not divide {shape.block_size} slots"


def _simt_us(config: GroupedSimtConfig, shape: GroupedShape, device: Device, rates: GroupedRates) -> float:
    tiles = round(shape.row_tiles(config.tile_m)) * -(-shape.columns // config.tile_n)
    rows_of_b = config.tile_n * (2 if shape.gated else 1)
    element = config.tile_m * rows_of_b * rates.simt + (config.tile_m + rows_of_b) * rates.simt_load
    loop = -(-tiles // device.num_sms) * shape.k * element
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us)


choose: Choice[GroupedShape, GroupedRates] = Choice(
    GroupedShape.of,
    grouped_rates.of,
    Engine("grouped_gemm_sm90.cu", _hopper_refusal, _hopper_configs, _hopper_us),
    Engine("grouped_gemm_sm80", _mma_refusal, grouped_sm80.configs, _mma_us),
    Engine("grouped_gemm_sm80_small_m.cu", grouped_sm80_small_m.refusal, grouped_sm80_small_m.configs, _small_m_us),
    Engine("grouped_gemm_simt", _simt_refusal, lambda shape, device: grouped_simt.configs(shape), _simt_us),
    Engine("grouped_gemm_sm100.cu", grouped_sm100.refusal, grouped_sm100.configs, grouped_sm100.time_us),
)


def plan(problem: GroupedProblem) -> Launch:
    """The launch of the kernel that is chosen, or forced by `tuning`."""
    launch: Launch = tuning.config(problem.out.op, problem, problem.device, choose).launch(problem)
    return launch
