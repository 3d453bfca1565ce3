"""Which GEMM serves a problem on Hopper, and with which geometry: the candidate with the least time by the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from ..._core.system.device import Device
from . import gemm_sm90_cost as cost
from .gemm_problem import GemmProblem
from .gemm_sm80 import MmaConfig, choose_mma
from .gemm_sm90 import (
    FP8,
    K_TILE_BYTES,
    MAX_BLOCKED_ROWS,
    MAX_GROUP,
    MAX_SWAP_COLUMNS,
    MAX_SWAP_ROWS,
    GemmConfig,
    SwapConfig,
    num_k_tiles,
    sum_block,
)

Config = GemmConfig | SwapConfig | MmaConfig
_GROUP_BYTES = 16 << 20  # bytes of a that the tiles of one group share; they stay in the L2 cache


@dataclass(frozen=True, slots=True)
class Shape:
    """What the choice depends on.

    Attributes:
        m: rows of a, rounded up so that few M compile anything anew.
        n: rows of b; with a gated activation twice the columns of out.
        num_k_tiles: k-tiles.
        blocked: whether there are block scales.
        promoted: whether accumulators are promoted to float32 registers.
        eight_bits, is_fp8: whether elements have 8 bits, and are fp8.
        is_gated: whether the activation is gated.
        out_is_aligned: whether TMA can store out.
    """

    m: int
    n: int
    num_k_tiles: int
    blocked: bool
    promoted: bool
    eight_bits: bool
    is_fp8: bool
    is_gated: bool
    out_is_aligned: bool

    @classmethod
    def of(cls, problem: GemmProblem) -> Shape:
        blocked, promoted = problem.epilogue.block_scaled, sum_block(problem, 0) > 0
        sizes = problem.rounded_m, problem.b.rows, num_k_tiles(problem)
        dtype = problem.dtype.itemsize == 1, problem.dtype in FP8
        return cls(*sizes, blocked, promoted, *dtype, problem.epilogue.is_gated, problem.out_is_aligned)


def choose(problem: GemmProblem, device: Device) -> Config:
    """The config with the least time by the cost model of the device."""
    return _choose(Shape.of(problem), choose_mma(problem, device), device)


@cache
def _choose(shape: Shape, mma: MmaConfig, device: Device) -> Config:
    rates = cost.of(device)
    return min(candidates(shape, mma, device), key=lambda config: config_us(config, shape, device, rates))


def candidates(shape: Shape, mma: MmaConfig, device: Device) -> list[Config]:
    """The configs that `choose` compares. `mma` is that of gemm_sm80.cu; for 8-bit elements it is never the fastest."""
    found: list[Config] = [] if shape.eight_bits else [mma]
    if shape.m <= MAX_SWAP_ROWS and not (shape.is_gated and shape.n % 16):
        found += _swap_configs(shape, device.num_sms)
    if shape.out_is_aligned:
        found += _gemm_configs(shape, device)
    return found


def config_us(config: Config, shape: Shape, device: Device, rates: cost.GemmRates) -> float:
    """Microseconds of a config by the cost model."""
    nbytes = (shape.m + shape.n) * shape.num_k_tiles * K_TILE_BYTES + shape.m * shape.n * (1 if shape.is_gated else 2)
    if isinstance(config, GemmConfig):
        launch, (loop, ends) = rates.launch, _gemm_us(config, shape, device, rates)
    elif isinstance(config, SwapConfig):
        launch, (loop, ends) = rates.swap_launch, _swap_us(config, shape, device.num_sms, rates)
    else:
        launch, (loop, ends) = rates.swap_launch, _mma_us(config, shape, device.num_sms, rates)
    return launch + rates.overlapped(loop, nbytes) + ends


def _gemm_us(config: GemmConfig, shape: Shape, device: Device, rates: cost.GemmRates) -> tuple[float, float]:
    """Microseconds of the main loops, and of what they do not overlap: epilogues, and stream-K's reduction."""
    waves = config.waves(shape.m, shape.n, shape.num_k_tiles, device)
    splits, has_rest = min(config.splits, waves.max_splits), waves.rest > 0
    k_tiles = waves.full * shape.num_k_tiles + has_rest * -(-shape.num_k_tiles // splits)
    rows = min(shape.m, config.TILE_M) + config.tile_n / config.cluster
    k_tile = rates.k_tile + rates.mma * config.tile_n + rates.l2 * rows
    k_tile *= (rates.blocked if shape.blocked else 1.0) * (rates.eight_bits if shape.eight_bits else 1.0)
    ends = (1 if config.ping_pong else waves.full + has_rest) * rates.epilogue * config.tile_n
    if splits > 1:  # a cluster writes its part; the last one of a tile reads all others
        ends += splits * (rates.part + rates.part_column * config.tile_n)
    return k_tiles * k_tile, ends


def _swap_us(config: SwapConfig, shape: Shape, sms: int, rates: cost.GemmRates) -> tuple[float, float]:
    """Microseconds of the main loops, and of the reductions among the CTAs of a cluster."""
    waves = -(-config.tiles(shape.m, shape.n) // max(1, int(cost.CLUSTERS[config.splits] * sms)))
    of_row = rates.swap_m + (rates.swap_promoted if shape.is_fp8 else 0.0)
    of_row += rates.swap_blocked if shape.blocked else 0.0
    k_tile = rates.swap_k_tile + of_row * config.tile_m + rates.swap_n * config.tile_n
    ends = waves * rates.exchange * (config.splits.bit_length() - 1)
    return waves * -(-shape.num_k_tiles // config.splits) * k_tile, ends


def _mma_us(config: MmaConfig, shape: Shape, sms: int, rates: cost.GemmRates) -> tuple[float, float]:
    """Microseconds of the main loops, and of split-K's reduction through device memory."""
    blocks = -(-shape.m // config.tile_m) * -(-shape.n // config.tile_n) * config.splits
    per_sm = -(-blocks // sms)
    k_tile = rates.mma_row * (config.tile_m + config.tile_n)
    parts = config.splits if config.splits > 1 else 0
    return per_sm * -(-shape.num_k_tiles // config.splits) * k_tile, parts * rates.mma_part


def _gemm_configs(shape: Shape, device: Device) -> Iterator[GemmConfig]:
    """Ping-pong only for 8-bit elements: with 16 bits the main loop takes twice as long, and the epilogue is a smaller
    part of the tile's time."""
    wide = () if shape.blocked else (112, 32) if shape.promoted else (192, 224, 256, 32)
    ping_pong = (192, 128) if shape.eight_bits and not shape.promoted else ()
    for cluster in (2, 1) if shape.m > GemmConfig.TILE_M else (1,):
        row_bytes = GemmConfig.TILE_M * cluster * shape.num_k_tiles * K_TILE_BYTES
        group = max(1, min(MAX_GROUP, _GROUP_BYTES // row_bytes))
        for tile_n in (128, 64, *wide):
            one = GemmConfig(tile_n, cluster, group)
            if not one.fits(shape.promoted, shape.is_gated):
                continue
            yield one
            waves = one.waves(shape.m, shape.n, shape.num_k_tiles, device)
            for splits in range(2, waves.max_splits + 1):
                yield replace(one, splits=splits)
        for tile_n in ping_pong:
            yield GemmConfig(tile_n, cluster, group, ping_pong=True)


def _swap_configs(shape: Shape, sms: int) -> Iterator[SwapConfig]:
    """Configs with the tile N that gives the fewest waves, with equal work for all CTAs."""
    tile_m = min(max(16, -(-shape.m // 16) * 16), MAX_BLOCKED_ROWS if shape.blocked else MAX_SWAP_ROWS)
    row_tiles = -(-shape.m // tile_m)
    for splits, most in cost.CLUSTERS.items():
        clusters = max(1, int(most * sms) // row_tiles)
        waves = -(-shape.n // (MAX_SWAP_COLUMNS * clusters))
        unit = 16 if shape.is_gated else 8
        tile_n = -(-shape.n // (unit * waves * clusters)) * unit
        for one in (SwapConfig(tile_m, tile_n, splits), SwapConfig(tile_m, MAX_SWAP_COLUMNS, splits)):
            if one.fits(shape.num_k_tiles, shape.blocked, shape.is_gated):
                yield one
