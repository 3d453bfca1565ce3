"""The kernels for dense GEMMs: which shapes each of them serves, its Configs, and their times by the cost model.

A kernel's time is a launch; the slowest of three streams (the main loop of the busiest SM, bytes from device memory and
bytes from the L2 cache), or the multiplications that power allows; and the epilogues and reductions that nothing
overlaps. `gemm_rates` has the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..._core.system.device import Device
from ..._core.tensors.dtypes import FLOATS, float16, int8
from ...tuning import engines
from ...tuning.engines import Choice, Engine
from . import gemm_converted, gemm_rates, gemm_simt, gemm_sm80, gemm_sm90, gemm_sm100, skinny_linear
from .gemm_converted import ConvertedConfig
from .gemm_problem import multiplies
from .gemm_rates import GemmRates
from .gemm_shape import K_TILE_BYTES, GemmShape
from .gemm_simt import GemmSimtConfig
from .gemm_sm80 import MmaConfig
from .gemm_sm90 import GemmConfig, SwapConfig
from .skinny_linear import SkinnyConfig

_GROUP_BYTES = 16 << 20  # bytes of a that the tiles of one group share; they stay in the L2 cache


# gemm_sm90.cu, gemm_sm90_swap_ab.cu


def _no_wgmma(shape: GemmShape, device: Device) -> str | None:
    """Why neither WGMMA kernel serves a shape."""
    eight_bits = shape.dtype.itemsize == 1
    if not device.supports("wgmma"):
        return "the device has no WGMMA"
    if shape.dtype not in gemm_sm90.DTYPES or shape.out_dtype.itemsize != 2:
        return f"no WGMMA of {shape.dtype} with {shape.out_dtype} results"
    if 0 in (shape.m, shape.n, shape.k):
        return "an empty operand"
    if shape.vec_size * shape.dtype.itemsize != 16:
        return "TMA loads rows that begin at multiples of 16 bytes"
    if shape.block_scaled and (shape.dtype is int8 or shape.is_gated or not eight_bits):
        return "block scales are for fp8 operands without a gated activation"
    return None


def _gemm_refusal(shape: GemmShape, device: Device) -> str | None:
    if shape.has_matrix_bias:
        return "a bias for each element"
    return _no_wgmma(shape, device) or (
        None if shape.out_is_aligned else "TMA stores rows of out at multiples of 16 bytes"
    )


def _gemm_configs(shape: GemmShape, device: Device) -> Iterator[GemmConfig]:
    """Ping-pong only for 8-bit elements: with 16 bits the main loop takes twice as long, and the epilogue is a smaller
    part of the tile's time. Clusters along N only without a column tile past the end of b: TMA is slow to fill
    rows with zeros. Block scales in wide tiles only for bfloat16, as float16 results are promoted twice in a k-tile,
    and without stream-K: 4096 x 28672 x 4096 took 876 us where whole tiles had taken 834."""
    if shape.block_scaled:
        wide: tuple[int, ...] = () if shape.out_dtype is float16 else (192, 256)
    else:
        wide = (112, 96, 32) if shape.promoted else (96, 160, 192, 224, 256, 32)
    ping_pong = (192, 128) if shape.dtype.itemsize == 1 and not shape.promoted else ()
    row_bytes = GemmConfig.TILE_M * shape.num_k_tiles * K_TILE_BYTES
    for cluster, along_n in (2, False), (1, False), (2, True):
        if cluster > 1 and (shape.m < GemmConfig.TILE_M or (shape.m == GemmConfig.TILE_M and not along_n)):
            continue  # nothing to share
        group = max(1, min(gemm_sm90.MAX_GROUP, _GROUP_BYTES // (row_bytes * (1 if along_n else cluster))))
        for tile_n, alternate in (*((n, False) for n in (128, 64, *wide)), *((n, True) for n in ping_pong)):
            one = GemmConfig(tile_n, cluster, group, ping_pong=alternate, along_n=along_n)
            if not one.fits(shape.promoted, shape.is_gated) or (along_n and -(-shape.n // tile_n) % 2):
                continue
            yield one
            waves = one.waves(shape.m, shape.n, shape.num_k_tiles, device)
            divides = not alternate and (not shape.block_scaled or one.has_two_sets)
            for splits in range(2, waves.max_splits + 1 if divides else 1):
                yield replace(one, splits=splits)


def _gemm_us(config: GemmConfig, shape: GemmShape, device: Device, rates: GemmRates) -> float:
    waves = config.waves(shape.m, shape.n, shape.num_k_tiles, device)
    splits, has_rest = min(config.splits, waves.max_splits), waves.rest > 0
    k_tiles = waves.full * shape.num_k_tiles + has_rest * -(-shape.num_k_tiles // splits)
    k_tile = rates.k_tile + rates.mma * config.tile_n
    if shape.block_scaled:
        k_tile *= rates.blocked if config.has_two_sets else rates.blocked_one_set
    ctas = (waves.full * waves.clusters + waves.rest) * config.cluster
    row_tiles, whole = -(-shape.m // config.TILE_M), shape.m // config.TILE_M  # only whole row tiles are shared
    a_rows = min(shape.m, config.TILE_M) * (whole / config.cluster_n + row_tiles - whole) / row_tiles
    l2_rows = ctas * shape.num_k_tiles * (a_rows + config.tile_n / config.cluster_m)
    loop = rates.overlapped(k_tiles * k_tile, shape.nbytes, l2_rows * K_TILE_BYTES, shape.macs)
    epilogues = 1 if config.ping_pong else waves.full + has_rest
    ends = epilogues * (rates.tile + rates.epilogue * config.tile_n)
    if splits > 1:
        ends += rates.stream_k + (rates.stream_k_column + rates.stream_k_part * splits) * config.tile_n
    return rates.launch + loop + ends


def _swap_refusal(shape: GemmShape, device: Device) -> str | None:
    if shape.m > gemm_sm90.MAX_SWAP_M:
        return f"it is for at most {gemm_sm90.MAX_SWAP_M} rows"
    if shape.is_gated and (shape.n % 16 or not shape.out_is_aligned):
        return "gates and ups are loaded in groups of 8 rows"
    return _no_wgmma(shape, device)


def _swap_configs(shape: GemmShape, device: Device) -> Iterator[SwapConfig]:
    """Configs of the fewest row tiles, or of one more, with equal work for all CTAs in the fewest waves."""
    fewest = -(-shape.m // gemm_sm90.max_swap_rows(shape.is_fp8, shape.block_scaled))
    for row_tiles in (fewest, fewest + 1):
        tile_m = -(-shape.m // (16 * row_tiles)) * 16
        if tile_m * (row_tiles - 1) >= shape.m:
            continue
        for splits in gemm_rates.CLUSTERS:
            clusters = max(1, gemm_rates.num_clusters(splits, device) // row_tiles)
            waves = -(-shape.n // (gemm_sm90.MAX_SWAP_COLUMNS * clusters))
            unit = 16 if shape.is_gated else 8
            tile_n = -(-shape.n // (unit * waves * clusters)) * unit
            for columns in {tile_n, gemm_sm90.MAX_SWAP_COLUMNS}:
                one = SwapConfig(tile_m, columns, splits)
                if one.fits(shape.num_k_tiles, shape.is_gated):
                    yield one


def _swap_us(config: SwapConfig, shape: GemmShape, device: Device, rates: GemmRates) -> float:
    """If tiles are not split, CTAs are persistent: the loads of a tile begin before the previous tile is stored."""
    tiles, is_split = config.tiles(shape.m, shape.n), config.parts > 1
    waves = -(-tiles // max(1, gemm_rates.num_clusters(config.splits, device)))
    of_row = rates.swap_m + (rates.swap_promoted if shape.is_fp8 else 0.0)
    of_row += rates.swap_blocked if shape.block_scaled else 0.0
    k_tile = rates.swap_k_tile + of_row * config.tile_m
    k_tile *= rates.swap_alternating if config.parts > config.splits else 1.0
    l2_rows = tiles * shape.num_k_tiles * (min(shape.m, config.tile_m) + config.tile_n)
    k_tiles = waves * -(-shape.num_k_tiles // config.splits)
    end = (waves if is_split else 1) * rates.swap_tile
    end += waves * rates.swap_store * config.tile_m * config.tile_n / config.splits
    if is_split:
        end += waves * (rates.exchange + rates.exchange_row * config.tile_m * config.padded_n / 64)
    end += rates.swap_scales if shape.dtype.itemsize == 1 else 0.0
    nbytes = shape.nbytes + rates.swap_reload * (-(-shape.m // config.tile_m) - 1) * shape.b_bytes
    return rates.swap_launch + rates.overlapped(k_tiles * k_tile, nbytes, l2_rows * K_TILE_BYTES) + end


# gemm_sm80.cu


def _mma_refusal(shape: GemmShape, device: Device) -> str | None:
    if not multiplies(shape.dtype, device):
        return f"no tensor cores for {shape.dtype} on the device"
    by_wgmma = None in (_gemm_refusal(shape, device), _swap_refusal(shape, device))
    return "WGMMA multiplies 8-bit elements much faster" if by_wgmma and shape.dtype.itemsize == 1 else None


def _mma_us(config: MmaConfig, shape: GemmShape, device: Device, rates: GemmRates) -> float:
    """The teams of a CTA wait at the same time for what a k-tile takes besides MMAs and shared memory."""
    tiles = -(-shape.m // config.tile_m) * -(-shape.n // config.tile_n)
    of_sm = -(-tiles * config.splits // device.num_sms)
    converts = gemm_sm80.converts(shape.dtype, device)
    mma = rates.mma_area * config.tile_m * config.tile_n * (2 if converts else 1)
    k_tile = rates.mma_k_tile / config.warps_k + engines.overlapped(mma, rates.mma_shared * config.k_tile_traffic)
    k_tile += rates.mma_converted * config.k_tile_reads if converts else 0.0
    loop = of_sm * -(-shape.num_k_tiles // config.splits) * k_tile
    l2_rows = tiles * shape.num_k_tiles * (min(shape.m, config.tile_m) + config.tile_n)
    loop = rates.overlapped(loop, shape.nbytes, l2_rows * K_TILE_BYTES)
    split = rates.reduction(config.splits, tiles, config.tile_m * config.tile_n)
    return rates.mma_launch + loop + of_sm * rates.mma_block + split


# gather_columns.cu, and gemm_sm80.cu


def _converted_us(config: ConvertedConfig, shape: GemmShape, device: Device, rates: GemmRates) -> float:
    elements = (shape.m + shape.n) * shape.k
    product = _mma_us(config.gemm, gemm_converted.converted(shape), device, rates)
    return 2 * rates.mma_launch + elements * rates.conversion + product


# gemm_simt.cu, gemv.cu


def _simt_us(config: GemmSimtConfig, shape: GemmShape, device: Device, rates: GemmRates) -> float:
    tiles = -(-shape.m // config.tile_m) * -(-shape.n // config.tile_n)
    loop = -(-tiles // device.num_sms) * shape.k * config.tile_m * config.tile_n * rates.simt
    return rates.mma_launch + rates.overlapped(loop, shape.nbytes)


def _gemv_refusal(shape: GemmShape, device: Device) -> str | None:
    if not shape.is_plain or shape.dtype is not shape.out_dtype or shape.dtype not in FLOATS:
        return "its epilogue has at most a bias and an activation, and there is one float dtype"
    if not shape.rows_are_dense or shape.k == 0:
        return "elements of a row are apart, or there are none"
    return None if shape.m <= skinny_linear.MAX_ROWS else f"it is for at most {skinny_linear.MAX_ROWS} rows"


def _gemv_us(config: SkinnyConfig, shape: GemmShape, device: Device, rates: GemmRates) -> float:
    rows = shape.n * shape.k * rates.gemv_row * (shape.m - 1)
    return rates.gemv_launch + shape.nbytes / rates.gemv_bytes_per_us + rows / device.num_sms


choose: Choice[GemmShape, GemmRates] = Choice(
    GemmShape.of,
    gemm_rates.of,
    Engine("gemm_sm90.cu", _gemm_refusal, _gemm_configs, _gemm_us),
    Engine("gemm_sm90_swap_ab.cu", _swap_refusal, _swap_configs, _swap_us),
    Engine("gemm_sm100.cu", gemm_sm100.refusal, gemm_sm100.configs, gemm_sm100.time_us),
    Engine("gemm_sm80.cu", _mma_refusal, gemm_sm80.configs, _mma_us),
    Engine("gather_columns.cu", gemm_converted.refusal, gemm_converted.configs, _converted_us),
    Engine("gemv.cu", _gemv_refusal, lambda shape, device: (skinny_linear.config_for(shape, device),), _gemv_us),
    Engine("gemm_simt.cu", lambda shape, device: None, lambda shape, device: (gemm_simt.choose(shape),), _simt_us),
)
