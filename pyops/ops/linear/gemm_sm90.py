"""GEMMs by WGMMA on compute capability 9.0: two kernels, the choice between them, the tensor maps of the operands.

`GemmConfig` is gemm_sm90.cu, for large M; `SwapConfig` is gemm_sm90_swap_ab.cu, for small M. `choose` takes the config
that a cost model of the device finds fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..._core import tuning
from ..._core.device import Device
from ..._core.dtypes import bfloat16, float8_e4m3fn, float8_e5m2, float16, int8
from ..._core.kernel import Kernel, Launch
from ..._core.tensor_map import TensorMap
from .gemm_problem import SCALE_BLOCK, GemmProblem, Operand

_gemm_sm90, _gemm_sm90_swap_ab = Kernel("linear/gemm_sm90.cu"), Kernel("linear/gemm_sm90_swap_ab.cu")

_DTYPES = bfloat16, float16, float8_e4m3fn, float8_e5m2, int8
_STEP_BYTES = 128  # bytes of K in a k-tile: one row of the 128-byte swizzle
_BARRIER_BYTES = 8  # bytes of an mbarrier
_MAX_STAGES = 8  # most stages
_MAX_BLOCKED_STAGES = 6  # most stages of gemm_sm90_swap_ab.cu with block scales
_MAX_TURN_COLUMNS = 192  # ping-pong: largest tile N, because one warpgroup holds the whole accumulator tile
_MAX_BLOCK_COLUMNS = 128  # promotion: largest tile N of gemm_sm90.cu with a second set of accumulators per thread
_MAX_GROUP = 64  # most row tiles of a group, in clusters
_MAX_SWAP_COLUMNS = 128  # largest tile N of gemm_sm90_swap_ab.cu
_MAX_BLOCKED_ROWS = 32  # largest tile M of gemm_sm90_swap_ab.cu with block scales: they double the accumulators
_BYTES_IN_FLIGHT = 144 * 1024  # bytes of loads in flight per SM when memory bandwidth is the bound
_GROUP_BYTES = 16 << 20  # bytes of a that the tiles of one group share; they stay in the L2 cache


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The geometry of gemm_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tile_n: columns of a tile; a tile has 128 rows.
        cluster: CTAs of a cluster; they share rows of b by multicast.
        group: row tiles, in clusters, that run together for each column tile.
        ping_pong: whether the two consumer warpgroups take tiles in ping-pong order (each its own) or cooperate on one
            tile.
    """

    tile_n: int
    cluster: int
    group: int
    ping_pong: bool = False

    TILE_M = 128
    _STORES = 2 * 8 * 16  # rows of the epilogue's staging buffers: two 16-row buffers for each of eight warps

    def __post_init__(self) -> None:
        most = _MAX_TURN_COLUMNS if self.ping_pong else 256
        if self.tile_n % 16 or not 0 < self.tile_n <= most or self.cluster not in (1, 2):
            raise ValueError(f"no geometry of gemm_sm90.cu: {self}")

    def candidates(self, problem: GemmProblem, device: Device) -> list[GemmConfig]:
        """Other tiles, clusters and tile orders."""
        found = tuning.varied(
            self,
            tile_n=(64, 128, 192, 224, 256),
            cluster=(1, 2),
            group=tuning.beside(self.group, 1, _MAX_GROUP),
            ping_pong=(False, True),
        )
        return [one for one in found if one._fits(_sum_block(problem, 0))]

    def _fits(self, sum_block: int) -> bool:
        """Whether the accumulators fit into registers."""
        return not sum_block or (self.tile_n <= _MAX_BLOCK_COLUMNS and not self.ping_pong)

    def launch(self, problem: GemmProblem) -> Launch:
        """A persistent grid: as many clusters as the device holds go over the tiles."""
        device, kernel = problem.device, problem.kernel(_gemm_sm90.for_arch(problem.device.arch_feature))
        sum_block, constants = _sum_block(problem, 0), problem.constants()
        if not self._fits(sum_block):
            raise ValueError(f"no registers for sums of {sum_block} elements of K: {self}")
        terms = constants["B_SCALES"] + constants["BIAS"] + (constants["AZP"] > 0)
        # The staging buffers are half as wide where epilogue operands need the shared memory, and for ping-pong.
        wide = self.tile_n % 64 == 0 and terms < 2 and not self.ping_pong
        store_columns = 16 if self.tile_n % 32 else 64 if wide else 32
        store_bytes = store_columns * constants["out_t"].itemsize
        fixed = self._STORES * store_bytes + 2 * terms * self.tile_n * 4
        stage = (self.TILE_M + self.tile_n) * _STEP_BYTES + 2 * _BARRIER_BYTES
        stages = min(_MAX_STAGES, (device.shared_memory - fixed) // stage)
        tiles = -(-problem.m // (self.TILE_M * self.cluster)) * -(-problem.n // self.tile_n)
        return kernel(
            **constants,
            TILE_N=self.tile_n,
            PING_PONG=self.ping_pong,
            STORE_COLUMNS=store_columns,
            STAGES=stages,
            SUM_BLOCK=sum_block,
            CLUSTER=self.cluster,
            GROUP=self.group,
        ).launch(
            (min(tiles, device.num_sms // self.cluster), self.cluster),
            384,
            fixed + stages * stage,
            a_map=_map(problem.a, problem.k, self.TILE_M),
            b_map=_map(problem.b, problem.k, self.tile_n // self.cluster),
            out_map=_out_map(problem, (store_columns, 16)),
            **_arguments(problem, kernel),
        )


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """The geometry of gemm_sm90_swap_ab.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        splits: CTAs of a cluster that share a tile (split-K); each takes a part of K.
    """

    tile_m: int
    tile_n: int
    splits: int

    def __post_init__(self) -> None:
        shape = self.tile_m in (16, 32, 48, 64) and self.tile_n % 8 == 0 and 0 < self.tile_n <= _MAX_SWAP_COLUMNS
        if not shape or self.splits not in (1, 2, 4, 8):
            raise ValueError(f"no geometry of gemm_sm90_swap_ab.cu: {self}")

    @property
    def padded_n(self) -> int:
        """Rows of b in the MMA: tile_n rounded up to 64 or 128."""
        return 64 if self.tile_n <= 64 else 128

    @property
    def parts(self) -> int:
        """Parts of K with separate accumulators: one per CTA, or two (one per warpgroup) for tiles of at most 64
        columns."""
        return self.splits * (2 if self.tile_n <= 64 else 1)

    def candidates(self, problem: GemmProblem, device: Device) -> list[SwapConfig]:
        """Other tiles and splits."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 16, 64),
            tile_n=tuning.beside(self.tile_n, 16, _MAX_SWAP_COLUMNS),
            splits=tuning.beside(self.splits, 1, 8),
        )
        return [one for one in found if one._fits(_steps(problem), problem.epilogue.block_scaled)]

    def _fits(self, steps: int, blocked: bool) -> bool:
        """Whether each part of K has a k-tile, and the accumulators fit into registers."""
        return self.parts <= steps and (not blocked or self.tile_m <= _MAX_BLOCKED_ROWS)

    def launch(self, problem: GemmProblem) -> Launch:
        """One CTA or cluster per tile with split-K; else a persistent grid."""
        device, kernel = problem.device, problem.kernel(_gemm_sm90_swap_ab.for_arch(problem.device.arch_feature))
        sums = self.tile_m * self.padded_n * 4 * self.parts // self.splits
        exchanged = (sums if self.parts > 1 else 0) + _BARRIER_BYTES
        stage = (self.tile_m + self.padded_n) * _STEP_BYTES + 2 * _BARRIER_BYTES
        most = _BYTES_IN_FLIGHT // ((self.tile_m + self.tile_n) * _STEP_BYTES)
        if problem.epilogue.block_scaled:
            most = min(most, _MAX_BLOCKED_STAGES)
        stages = max(2, min(_MAX_STAGES, (device.shared_memory - exchanged) // stage, most))
        tiles = -(-problem.m // self.tile_m) * -(-problem.n // self.tile_n)
        return kernel(
            **problem.constants(),
            SUM_BLOCK=_sum_block(problem, _STEP_BYTES),
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            STAGES=stages,
            SPLITS=self.splits,
        ).launch(
            (tiles if self.parts > 1 else min(tiles, device.num_sms), self.splits),
            288,
            max(exchanged + stages * stage, device.shared_memory // 2 + 1),
            a_map=_map(problem.a, problem.k, self.tile_m),
            b_map=_map(problem.b, problem.k, self.tile_n),
            **_arguments(problem, kernel),
        )


# fp8 with float16 output: elements of K between promotions of the accumulators (fp8_accumulation.py).
_FLOAT16_SUMS = 64


def _sum_block(problem: GemmProblem, of_bfloat16: int) -> int:
    """Elements of K that the tensor cores accumulate before promotion to float32 registers; 0: no promotion.

    `of_bfloat16` is this number for fp8 operands, a bfloat16 output and no block scales.
    """
    if problem.dtype not in (float8_e4m3fn, float8_e5m2):
        return 0
    if problem.epilogue.out.dtype is float16:
        return _FLOAT16_SUMS
    return SCALE_BLOCK if problem.epilogue.block_scaled else of_bfloat16


def _steps(problem: GemmProblem) -> int:
    return -(-problem.k * problem.dtype.itemsize // _STEP_BYTES)


def _map(operand: Operand, k: int, rows: int) -> TensorMap:
    """The tensor map of an operand; a box is `rows` rows of one k-tile."""
    itemsize = operand.dtype.itemsize
    # A tensor of one row may have any row stride.
    stride = operand.stride * itemsize if operand.rows > 1 else -(-k * itemsize // 16) * 16
    box = (_STEP_BYTES // itemsize, rows)
    return TensorMap(operand.source, operand.dtype, (k, operand.rows), (stride,), box, _STEP_BYTES)


def _out_map(problem: GemmProblem, box: tuple[int, int]) -> TensorMap:
    out, stride = problem.epilogue.out, problem.epilogue.arguments()["out_stride"]
    itemsize = out.dtype.itemsize
    pitch = stride * itemsize if problem.m > 1 else -(-problem.n * itemsize // 16) * 16
    return TensorMap(out, out.dtype, (problem.n, problem.m), (pitch,), box, box[0] * itemsize)


def _arguments(problem: GemmProblem, kernel: Kernel) -> dict[str, Any]:
    """The arguments of the problem that the kernel takes. Tensor maps replace the pointers to the operands."""
    taken = {name for _, name in kernel.signature.parameters}
    return {name: value for name, value in problem.arguments().items() if name in taken}


def serves(problem: GemmProblem, device: Device) -> bool:
    """Whether the kernels run on the device and take this problem: 8- or 16-bit operands that TMA can load."""
    epilogue = problem.epilogue
    empty = 0 in (problem.m, problem.n, problem.k)
    mapped = problem.vec_size * problem.dtype.itemsize == 16 and (problem.out_is_aligned or problem.m <= _MAX_SWAP_ROWS)
    sums = problem.dtype in _DTYPES and epilogue.out.dtype.itemsize == 2
    sums = sums and not (epilogue.block_scaled and problem.dtype is int8)
    return device.supports("wgmma") and sums and mapped and not (empty or epilogue.is_gated or epilogue.has_matrix_bias)


# The cost model of the device, fitted to measurements on an H200: docs/performance/products.md.
_MAX_SWAP_ROWS = 64  # most rows of gemm_sm90_swap_ab.cu
_CLOCK = 1500.0  # cycles per microsecond of a large GEMM, at the power limit
_L2_BYTES = 48.0  # bytes per cycle from the L2 cache to one SM
# Cycles of one k-tile of a large GEMM, for which power is the bound: a factor on the tensor cores' cycles, and cycles
# for each operand row that is written to shared memory and for each row that is read from the L2 cache.
_PRODUCT_CYCLES, _SHARED_CYCLES, _L2_CYCLES = 0.88, 0.63, 0.35
_EPILOGUE = 2.1  # microseconds of the epilogue of a 128 x 256 tile; ping-pong hides all but one
_LAUNCH = 3.0  # microseconds of a launch
_EXCHANGE = 0.7  # microseconds to reduce a tile, for each doubling of the split-K CTAs
_BLOCKED = 1.1  # factor of block scales on the tensor cores' cycles
_STEP_CYCLES = 120.0  # least cycles of a k-tile
# {CTAs of a cluster: clusters that the device holds, per SM}. Clusters of 4 leave some SMs idle.
CLUSTERS = {1: 1.0, 2: 1 / 2, 4: 30 / 132}


def choose(problem: GemmProblem, device: Device) -> GemmConfig | SwapConfig:
    """The config with the least time by the cost model, for M rounded up to a power of two."""
    blocked, m = problem.epilogue.block_scaled, tuning.power_of_two(problem.m)
    sums = blocked, _sum_block(problem, 0) > 0, problem.dtype.itemsize == 1
    return _choose(m, problem.n, _steps(problem), *sums, problem.out_is_aligned, device.num_sms)


@cache
def _choose(
    m: int,
    n: int,
    steps: int,
    blocked: bool,
    in_blocks: bool,
    eight_bits: bool,
    out_is_aligned: bool,
    num_sms: int,
) -> GemmConfig | SwapConfig:
    """`choose` by the values that it depends on: block scales, promoted accumulators, 8-bit elements, ..."""
    found: list[tuple[float, GemmConfig | SwapConfig]] = []
    if m <= _MAX_SWAP_ROWS:
        swaps = _swap_configs(m, n, steps, blocked, num_sms)
        found += [(_swap_time(one, m, n, steps, num_sms), one) for one in swaps]
    if out_is_aligned:
        gemms = _gemm_configs(m, steps, blocked, in_blocks, eight_bits)
        found += [(_gemm_time(one, m, n, steps, blocked, num_sms), one) for one in gemms]
    return min(found, key=lambda timed: timed[0])[1]


def _gemm_configs(m: int, steps: int, blocked: bool, in_blocks: bool, eight_bits: bool) -> Iterator[GemmConfig]:
    """Ping-pong only for 8-bit elements: with 16 bits the main loop takes twice as long, and the epilogue is a smaller
    part of the tile's time."""
    wide = () if blocked else (112, 32) if in_blocks else (192, 224, 256, 32)
    turns = (192, 128) if eight_bits and not in_blocks else ()
    for cluster in (2, 1) if m > GemmConfig.TILE_M else (1,):
        group = max(1, min(_MAX_GROUP, _GROUP_BYTES // (GemmConfig.TILE_M * cluster * steps * _STEP_BYTES)))
        for tile_n in (128, 64, *wide):
            yield GemmConfig(tile_n, cluster, group)
        for tile_n in turns:
            yield GemmConfig(tile_n, cluster, group, ping_pong=True)


def _swap_configs(m: int, n: int, steps: int, blocked: bool, num_sms: int) -> Iterator[SwapConfig]:
    """Configs with the tile N that gives the fewest waves, with equal work for all CTAs."""
    tile_m = min(max(16, m), _MAX_BLOCKED_ROWS if blocked else _MAX_SWAP_ROWS)
    row_tiles = -(-m // tile_m)
    for splits, most in CLUSTERS.items():
        clusters = max(1, int(most * num_sms) // row_tiles)
        waves = -(-n // (_MAX_SWAP_COLUMNS * clusters))
        tile_n = -(-n // (8 * waves * clusters)) * 8
        for one in (SwapConfig(tile_m, tile_n, splits), SwapConfig(tile_m, _MAX_SWAP_COLUMNS, splits)):
            if one._fits(steps, blocked):
                yield one


def _gemm_time(config: GemmConfig, m: int, n: int, steps: int, blocked: bool, num_sms: int) -> float:
    """Microseconds: whole waves of tiles, and their epilogues."""
    tiles = -(-m // (config.TILE_M * config.cluster)) * -(-n // config.tile_n)
    waves = -(-tiles // (num_sms // config.cluster))
    products = config.TILE_M * config.tile_n / 32 * (_BLOCKED if blocked else 1.0)
    shared, loaded = config.TILE_M + config.tile_n, config.TILE_M + config.tile_n / config.cluster
    cycles = _PRODUCT_CYCLES * products + _SHARED_CYCLES * shared + _L2_CYCLES * loaded
    ends = (1 if config.ping_pong else waves) * _EPILOGUE * config.tile_n / 256
    return _LAUNCH + waves * steps * cycles / _CLOCK + ends


def _swap_time(config: SwapConfig, m: int, n: int, steps: int, num_sms: int) -> float:
    """Microseconds: the loads of an SM, and the reduction of split-K."""
    tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
    waves = -(-tiles // max(1, int(CLUSTERS[config.splits] * num_sms)))
    loads = (config.tile_m + config.tile_n) * _STEP_BYTES / _L2_BYTES  # cycles of a k-tile
    exchange = _EXCHANGE * (config.splits.bit_length() - 1)
    return _LAUNCH + waves * (exchange + -(-steps // config.splits) * max(loads, _STEP_CYCLES) / _CLOCK)
