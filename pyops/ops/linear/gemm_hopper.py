"""Matrix products by wgmma on compute capability 9.0: two kernels, the choice among them, tensor maps of operands.

`GemmConfig` is gemm.cu, for many rows of a; `SwapConfig` is gemm_swap.cu, for few. `choose` takes the one that a model
of the device finds fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..._core import tuning
from ..._core.device import Device
from ..._core.dtypes import bfloat16, float8_e4m3fn, float8_e5m2, float16, int8
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.tensor_map import TensorMap
from .gemm_problem import SCALE_BLOCK, Operand, Problem

_gemm, _gemm_swap = Kernel("linear/gemm.cu"), Kernel("linear/gemm_swap.cu")

_DTYPES = bfloat16, float16, float8_e4m3fn, float8_e5m2, int8
_STEP_BYTES = 128  # of a row, which a step takes; rows are swizzled by as many
_BARRIER_BYTES = 8
_RESERVED_SHARED_MEMORY = 1024  # of each block, by the system
_MAX_STAGES = 12
_MAX_SHARED_SUMS = 32 * 128  # of a tile, for which two blocks of a multiprocessor have registers
_PREFETCHED_STEPS = 0
_GROUP = 8


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The geometry of gemm.cu; the attributes are constants of the kernel.

    Attributes:
        tile_n: columns of a tile, whose rows are 128.
        cluster: blocks that share rows of b.
        group: clusters of rows that are counted down together.
    """

    tile_n: int
    cluster: int
    group: int

    TILE_M = 128
    _STORES = 2 * 8 * 16  # rows of columns on their way to out: two tiles of each of eight warps

    def __post_init__(self) -> None:
        if self.tile_n % 32 or not 0 < self.tile_n <= 256 or self.cluster not in (1, 2):
            raise ValueError(f"no geometry of gemm.cu: {self}")

    def candidates(self, problem: Problem, device: Device) -> list[GemmConfig]:
        """Other tiles, clusters and orders of tiles."""
        blocked = problem.epilogue.block_scaled
        return tuning.varied(
            self,
            tile_n=(64, 128, 192) if blocked else (64, 128, 192, 224, 256),
            cluster=(1, 2),
            group=tuning.beside(self.group, 4, 32),
        )

    def launch(self, problem: Problem) -> Launch:
        """As many clusters as the device holds go over the tiles."""
        device, kernel = problem.device, problem.kernel(_gemm.for_arch(problem.device.arch_feature))
        constants = problem.constants()
        terms = constants["B_SCALES"] + constants["BIAS"] + (constants["AZP"] > 0)
        store_columns = 64 if self.tile_n % 64 == 0 and terms < 2 else 32
        store_bytes = store_columns * constants["out_t"].itemsize
        fixed = self._STORES * store_bytes + 2 * terms * self.tile_n * 4
        stage = (self.TILE_M + self.tile_n) * _STEP_BYTES + 2 * _BARRIER_BYTES
        stages = min(_MAX_STAGES, (device.shared_memory - fixed) // stage)
        tiles = -(-problem.m // (self.TILE_M * self.cluster)) * -(-problem.n // self.tile_n)
        return kernel(
            **constants,
            TILE_N=self.tile_n,
            STAGES=stages,
            BUFFERS=2 if problem.epilogue.block_scaled and self.tile_n <= SCALE_BLOCK else 1,
            ALTERNATE=False,
            CLUSTER=self.cluster,
            GROUP=self.group,
        ).launch(
            (min(tiles, device.multiprocessors // self.cluster), self.cluster),
            384,
            fixed + stages * stage,
            a_map=_map(problem.a, problem.k, self.TILE_M),
            b_map=_map(problem.b, problem.k, self.tile_n // self.cluster),
            out_map=_out_map(problem, (store_columns, 16)),
            **_arguments(problem, kernel),
        )


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """The geometry of gemm_swap.cu; the attributes are constants of the kernel, but for `stream`.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        splits: blocks of a cluster that share a tile, each with a part of K.
        stream: every block takes as many steps as the others, whatever the tiles. Otherwise it has one tile, or shares
            one.
        min_blocks: blocks on a multiprocessor.
    """

    tile_m: int
    tile_n: int
    splits: int
    stream: bool
    min_blocks: int

    def __post_init__(self) -> None:
        shape = self.tile_m in (16, 32, 48, 64) and self.tile_n in (128, 256) and self.tile_m * self.tile_n <= 64 * 128
        if not shape or self.splits not in (1, 2, 4, 8) or (self.stream and self.splits > 1):
            raise ValueError(f"no geometry of gemm_swap.cu: {self}")

    def candidates(self, problem: Problem, device: Device) -> list[SwapConfig]:
        """Other tiles, other ways to share them, other occupancies."""
        found = tuning.varied(
            self,
            tile_m=tuning.beside(self.tile_m, 16, 64),
            tile_n=() if problem.epilogue.block_scaled else (128, 256),
            splits=tuning.beside(self.splits, 1, 8),
            stream=(not self.stream,),
            min_blocks=tuning.beside(self.min_blocks, 1, 2),
        )
        return [one for one in found if one._fits(problem)]

    def _fits(self, problem: Problem) -> bool:
        """Whether there are steps for all splits, and registers for the sums."""
        few = self.tile_m * self.tile_n <= (
            _MAX_SHARED_SUMS // 2 if problem.epilogue.block_scaled else _MAX_SHARED_SUMS
        )
        return self.splits <= _steps(problem) and (few or self.min_blocks == 1)

    def launch(self, problem: Problem) -> Launch:
        device, kernel = problem.device, problem.kernel(_gemm_swap.for_arch(problem.device.arch_feature))
        exchanged = self.tile_m * self.tile_n * 4 * (self.splits > 1) + 2 * _BARRIER_BYTES
        stage = (self.tile_m + self.tile_n) * _STEP_BYTES + 2 * _BARRIER_BYTES
        room = (device.shared_memory + _RESERVED_SHARED_MEMORY) // self.min_blocks - _RESERVED_SHARED_MEMORY - exchanged
        stages = min(_MAX_STAGES, room // stage)
        blocks = tiles = -(-problem.m // self.tile_m) * -(-problem.n // self.tile_n)
        partial: dict[str, Any] = {"partial": 0, "arrived": 0}
        if self.stream:
            blocks = min(device.multiprocessors * self.min_blocks, tiles * _steps(problem))
            partial["partial"] = Scratch(blocks * 2 * self.tile_m * self.tile_n * 4)
            partial["arrived"] = Scratch(tiles * 4, zeroed=True)
        return kernel(
            **problem.constants(),
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            STAGES=stages,
            SPLITS=self.splits,
            PREFETCH=_PREFETCHED_STEPS,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (blocks, self.splits),
            288,
            exchanged + stages * stage,
            a_map=_map(problem.a, problem.k, self.tile_m),
            b_map=_map(problem.b, problem.k, self.tile_n),
            **_arguments(problem, kernel),
            **partial,
        )


def _steps(problem: Problem) -> int:
    return -(-problem.k * problem.dtype.itemsize // _STEP_BYTES)


def _map(operand: Operand, k: int, rows: int) -> TensorMap:
    """Boxes of `rows` rows and a step of K."""
    itemsize = operand.dtype.itemsize
    # The stride of a single row says nothing.
    stride = operand.stride * itemsize if operand.rows > 1 else -(-k * itemsize // 16) * 16
    box = (_STEP_BYTES // itemsize, rows)
    return TensorMap(operand.source, operand.dtype, (k, operand.rows), (stride,), box, _STEP_BYTES)


def _out_map(problem: Problem, box: tuple[int, int]) -> TensorMap:
    out, stride = problem.epilogue.out, problem.epilogue.arguments()["out_stride"]
    itemsize = out.dtype.itemsize
    pitch = stride * itemsize if problem.m > 1 else -(-problem.n * itemsize // 16) * 16
    return TensorMap(out, out.dtype, (problem.n, problem.m), (pitch,), box, box[0] * itemsize)


def _arguments(problem: Problem, kernel: Kernel) -> dict[str, Any]:
    """Those arguments of the problem that the kernel takes. Maps stand for the pointers to operands."""
    taken = {name for _, name in kernel.signature.parameters}
    return {name: value for name, value in problem.arguments().items() if name in taken}


def serves(problem: Problem, device: Device) -> bool:
    """Whether the kernels run on the device and take this problem: 8 or 16 bits, operands that can be mapped."""
    epilogue = problem.epilogue
    empty = 0 in (problem.m, problem.n, problem.k)
    mapped = problem.vec_size * problem.dtype.itemsize == 16 and (problem.out_is_aligned or problem.m <= _MAX_SWAP_ROWS)
    sums = problem.dtype in _DTYPES and epilogue.out.dtype.itemsize == 2
    return device.supports("wgmma") and sums and mapped and not (empty or epilogue.is_gated or epilogue.has_matrix_bias)


# The model of the device, fitted to what was measured on an H200: docs/performance.md, "Matrix products on Hopper".
_MAX_SWAP_ROWS = 64
_CLOCK = 1500.0  # cycles of a microsecond, as the power limit leaves them to a large product
_L2_BYTES = 48.0  # a cycle, to one multiprocessor
_DRAM_BYTES = 4.2e6  # a microsecond
_EPILOGUE = 1.0  # microseconds at the end of a tile, when the tensor cores wait
_LAUNCH = 3.0  # microseconds
_EXCHANGE = 1.0  # microseconds, for blocks that share a tile


def choose(problem: Problem, device: Device) -> GemmConfig | SwapConfig:
    """The config that takes the least time by the model, of those for as many rows."""
    blocked, itemsize = problem.epilogue.block_scaled, problem.dtype.itemsize
    m = tuning.power_of_two(problem.m)
    return _choose(m, problem.n, _steps(problem), itemsize, blocked, problem.out_is_aligned, device.multiprocessors)


@cache
def _choose(
    m: int, n: int, steps: int, itemsize: int, blocked: bool, out_is_aligned: bool, multiprocessors: int
) -> GemmConfig | SwapConfig:
    """`choose` by what it depends on."""
    found: list[tuple[float, GemmConfig | SwapConfig]] = []
    bytes_moved = (m + n) * steps * _STEP_BYTES + m * n * 2
    floor = bytes_moved / _DRAM_BYTES
    if out_is_aligned:
        found += [
            (max(floor, _gemm_time(one, m, n, steps, blocked, multiprocessors)), one) for one in _gemm_configs(blocked)
        ]
    if m <= _MAX_SWAP_ROWS:
        found += [
            (max(floor, _swap_time(one, m, n, steps, blocked, multiprocessors)), one)
            for one in _swap_configs(m, steps, blocked)
        ]
    return min(found, key=lambda timed: timed[0])[1]


def _gemm_configs(blocked: bool) -> Iterator[GemmConfig]:
    for tile_n in (192, 128, 64) if blocked else (256, 224, 192, 128, 64):
        for cluster in (2, 1):
            yield GemmConfig(tile_n, cluster, _GROUP)


def _swap_configs(m: int, steps: int, blocked: bool) -> Iterator[SwapConfig]:
    tile_m = max(16, m)
    blocks = 2 if tile_m * (2 if blocked else 1) <= 32 else 1
    yield SwapConfig(tile_m, 128, 1, True, blocks)
    for splits in (1, 2, 4, 8):
        if splits <= steps:
            yield SwapConfig(tile_m, 128, splits, False, blocks)


def _gemm_time(config: GemmConfig, m: int, n: int, steps: int, blocked: bool, multiprocessors: int) -> float:
    """Microseconds: whole waves of tiles, bound by tensor cores or by the L2 cache."""
    tiles = -(-m // (config.TILE_M * config.cluster)) * -(-n // config.tile_n)
    waves = -(-tiles // (multiprocessors // config.cluster))
    products = 4.0 * config.tile_n * (1.2 if blocked else 1.0)  # cycles of a step
    loads = (config.TILE_M + config.tile_n / config.cluster) * _STEP_BYTES / _L2_BYTES
    return _LAUNCH + waves * (steps * max(products, loads) / _CLOCK + _EPILOGUE)


def _swap_time(config: SwapConfig, m: int, n: int, steps: int, blocked: bool, multiprocessors: int) -> float:
    """Microseconds: what the busiest multiprocessor loads."""
    tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
    loads = (config.tile_m + config.tile_n) * _STEP_BYTES / _L2_BYTES  # cycles of a step
    if config.stream:
        busiest, exchange = -(-tiles * steps // multiprocessors), _EXCHANGE
    else:
        blocks = -(-tiles * config.splits // multiprocessors)
        busiest, exchange = blocks * -(-steps // config.splits), _EXCHANGE * (config.splits > 1)
    return _LAUNCH + exchange + busiest * loads / _CLOCK
