"""GEMMs by WGMMA on compute capability 9.0: geometry and launch of two kernels, and the operands' tensor maps.

`GemmConfig` is gemm_sm90.cu, for large M; `SwapConfig` is gemm_sm90_swap_ab.cu, for small M. gemm_engines.py
chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float16, int8
from .gemm_problem import SCALE_BLOCK, GemmProblem, Operand
from .gemm_shape import FP8, K_TILE_BYTES, num_k_tiles

_gemm_sm90, _gemm_sm90_swap_ab = Kernel("linear/gemm_sm90.cu"), Kernel("linear/gemm_sm90_swap_ab.cu")

DTYPES = bfloat16, float16, *FP8, int8
_BARRIER_BYTES = 8  # bytes of an mbarrier
_MAX_STAGES = 8  # most stages
_MAX_BLOCKED_STAGES = 6  # most stages of gemm_sm90_swap_ab.cu with block scales
_MAX_TURN_COLUMNS = 192  # ping-pong: largest tile N, because one warpgroup holds the whole accumulator tile
_MAX_BLOCK_COLUMNS = 128  # promotion: largest tile N of gemm_sm90.cu with a second set of accumulators per thread
_ONE_SET_COLUMNS = 192, 256  # promotion: tile N of gemm_sm90.cu with one set of accumulators per thread
_STAGE_SCALES = 4 * (128 + 4)  # bytes of the block scales of a stage of gemm_sm90.cu: of its rows, then its columns
MAX_GROUP = 64  # most row tiles of a group, in clusters
MAX_SWAP_COLUMNS = 128  # largest tile N of gemm_sm90_swap_ab.cu
# Largest tile M of gemm_sm90_swap_ab.cu that registers allow; promotion doubles the accumulators.
_MAX_SWAP_ROWS, _MAX_PROMOTED_ROWS, _MAX_BLOCKED_ROWS = 192, 128, 32
# Most rows that gemm_sm90_swap_ab.cu serves: of more, tiles of 128 rows are full but for an eighth, and the persistent
# gemm_sm90.cu overlaps the stores of a tile with the loads of the next one.
MAX_SWAP_M = 1024
_MAX_APART_ROWS = 64  # largest tile M with which split-K has its accumulators after the ring, not in its place
MAX_SPLITS = 8  # stream-K: most clusters that share a tile
_BYTES_IN_FLIGHT = 144 * 1024  # bytes of loads in flight per SM when memory bandwidth is the bound


class Waves(NamedTuple):
    """The waves in which clusters take the tiles of gemm_sm90.cu.

    Attributes:
        clusters: clusters that the device holds at a time.
        full: waves in which every cluster has a tile.
        rest: tiles of the last wave if it is not full, else 0.
        max_splits: the most clusters that can share a tile of the last wave.
    """

    clusters: int
    full: int
    rest: int
    max_splits: int


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The geometry of gemm_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tile_n: columns of a tile; a tile has 128 rows.
        cluster: CTAs of a cluster; they have adjacent tiles along M and share rows of b by multicast.
        group: row tiles, in clusters, that run together for each column tile.
        ping_pong: whether the two consumer warpgroups take tiles in ping-pong order (each its own) or cooperate on one
            tile.
        splits: clusters that share each tile of a last wave that is not full, as far as there are clusters for it.
        along_n: the CTAs of a cluster have adjacent tiles along N and share rows of a.
    """

    tile_n: int
    cluster: int
    group: int
    ping_pong: bool = False
    splits: int = 1
    along_n: bool = False

    TILE_M = 128
    _STORES = 2 * 8 * 16  # rows of the epilogue's staging buffers: two 16-row buffers for each of eight warps

    def __post_init__(self) -> None:
        most, both = _MAX_TURN_COLUMNS if self.ping_pong else 256, self.ping_pong and self.splits > 1
        if self.tile_n % 16 or not 0 < self.tile_n <= most or self.cluster not in (1, 2) or both:
            raise ValueError(f"no geometry of gemm_sm90.cu: {self}")

    def candidates(self, problem: GemmProblem, device: Device) -> list[GemmConfig]:
        """Other tiles, clusters, tile orders and splits of the last wave."""
        most = self.waves(problem.m, problem.b.rows, num_k_tiles(problem.k, problem.dtype), device).max_splits
        found = tuning.varied(
            self,
            tile_n=(64, 128, 192, 224, 256),
            cluster=(1, 2),
            group=tuning.beside(self.group, 1, MAX_GROUP),
            ping_pong=(False, True),
            along_n=(False, True),
            splits=tuning.beside(min(self.splits, most), 1, most),
        )
        return [one for one in found if one.fits(sum_block(problem, 0) > 0, problem.epilogue.is_gated)]

    @property
    def cluster_m(self) -> int:
        """CTAs of a cluster along M."""
        return 1 if self.along_n else self.cluster

    @property
    def cluster_n(self) -> int:
        """CTAs of a cluster along N."""
        return self.cluster if self.along_n else 1

    @property
    def has_two_sets(self) -> bool:
        """Whether a thread has two sets of accumulators under promotion: WGMMAs fill one, the other is promoted."""
        return self.tile_n <= _MAX_BLOCK_COLUMNS

    def fits(self, promoted: bool, is_gated: bool) -> bool:
        """Whether the accumulators fit into registers, and gates and ups of a tile into runs of whole swizzle atoms."""
        registers = not self.ping_pong and (self.has_two_sets or self.tile_n in _ONE_SET_COLUMNS)
        return (registers or not promoted) and not (is_gated and self.tile_n % 32)

    def launch(self, problem: GemmProblem) -> Launch:
        """A persistent grid: as many clusters as the device holds go over the tiles."""
        device, kernel = problem.device, problem.kernel(_gemm_sm90.for_arch(problem.device.arch_feature))
        promoted, constants = sum_block(problem, 0), problem.constants()
        if not self.fits(promoted > 0, problem.epilogue.is_gated):
            raise ValueError(f"no registers to promote accumulators, or no boxes of gates and ups: {self}")
        terms = constants["B_SCALES"] + constants["BIAS"] + (constants["AZP"] > 0)
        runs = 2 if problem.epilogue.is_gated else self.cluster_m  # boxes of b of a tile
        out_n = self.tile_n // (2 if problem.epilogue.is_gated else 1)
        # The staging buffers are half as wide where epilogue operands need the shared memory, and for ping-pong.
        wide = out_n % 64 == 0 and terms < 2 and not self.ping_pong
        store_columns = 16 if out_n % 32 else 64 if wide else 32
        store_bytes = store_columns * constants["out_t"].itemsize
        fixed = self._STORES * store_bytes + 2 * terms * self.tile_n * 4
        stage = (self.TILE_M + self.tile_n) * K_TILE_BYTES + 2 * _BARRIER_BYTES
        stage += _STAGE_SCALES if problem.epilogue.block_scaled else 0
        stages = min(_MAX_STAGES, (device.shared_memory - fixed) // stage)
        waves = self.waves(problem.m, problem.b.rows, num_k_tiles(problem.k, problem.dtype), device)
        rest, splits = waves.rest, min(self.splits, waves.max_splits)
        sharers = max(1, rest * splits)
        parts = self.cluster * (rest + sharers - 1) if splits > 1 else 0  # partial accumulator tiles
        return kernel(
            **constants,
            TILE_N=self.tile_n,
            PING_PONG=self.ping_pong,
            STORE_COLUMNS=store_columns,
            STAGES=stages,
            SUM_BLOCK=promoted,
            CLUSTER_M=self.cluster_m,
            CLUSTER_N=self.cluster_n,
            STREAM_K=parts > 0,
        ).launch(
            (waves.clusters if waves.full else sharers, self.cluster),
            384,
            fixed + stages * stage,
            **_a_maps(problem, self.TILE_M, self.cluster_n),
            b_map=_map(problem.b, problem.k, self.tile_n // runs),
            out_map=_out_map(problem, (store_columns, 16)),
            partial=Scratch(parts * self.TILE_M * self.tile_n * 4) if parts else 0,
            arrived=Scratch(self.cluster * rest * 8 * 4, zeroed=True) if parts else 0,
            group_rows=self.group,
            sharers=sharers,
            **_arguments(problem, kernel),
        )

    def waves(self, m: int, b_rows: int, k_tiles: int, device: Device) -> Waves:
        """The waves of the problem's tiles."""
        tiles = -(-m // (self.TILE_M * self.cluster_m)) * -(-b_rows // (self.tile_n * self.cluster_n))
        clusters = device.num_sms // self.cluster
        full, rest = divmod(tiles, clusters)
        return Waves(clusters, full, rest, min(MAX_SPLITS, clusters // rest, k_tiles) if rest else 1)


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
        shape = self.tile_m % 16 == 0 and 0 < self.tile_m <= _MAX_SWAP_ROWS
        shape = shape and self.tile_n % 8 == 0 and 0 < self.tile_n <= MAX_SWAP_COLUMNS
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
            tile_m=tuning.beside(self.tile_m, 16, _MAX_SWAP_ROWS),
            tile_n=tuning.beside(self.tile_n, 16, MAX_SWAP_COLUMNS),
            splits=tuning.beside(self.splits, 1, 8),
        )
        epilogue = problem.epilogue
        most = max_swap_rows(problem.dtype in FP8, epilogue.block_scaled)
        return [
            one
            for one in found
            if one.fits(num_k_tiles(problem.k, problem.dtype), epilogue.is_gated) and one.tile_m <= most
        ]

    def tiles(self, m: int, b_rows: int) -> int:
        return -(-m // self.tile_m) * -(-b_rows // self.tile_n)

    def fits(self, steps: int, is_gated: bool) -> bool:
        """Whether each part of K has a k-tile, and gates go with their ups."""
        return self.parts <= steps and not (is_gated and self.tile_n % 16)

    def launch(self, problem: GemmProblem) -> Launch:
        """One CTA or cluster per tile with split-K; else a persistent grid."""
        device, kernel = problem.device, problem.kernel(_gemm_sm90_swap_ab.for_arch(problem.device.arch_feature))
        sums = self.tile_m * self.padded_n * 4 * self.parts // self.splits if self.parts > 1 else 0
        apart = self.tile_m <= _MAX_APART_ROWS
        exchanged = (sums if apart else 0) + 2 * _BARRIER_BYTES
        stage = (self.tile_m + self.padded_n) * K_TILE_BYTES + 2 * _BARRIER_BYTES
        most = _BYTES_IN_FLIGHT // ((self.tile_m + self.tile_n) * K_TILE_BYTES) if apart else _MAX_STAGES
        if problem.epilogue.block_scaled:
            most = min(most, _MAX_BLOCKED_STAGES)
        groups = self.parts // self.splits  # warpgroups that alternate k-tiles
        stages = min(_MAX_STAGES, (device.shared_memory - exchanged) // stage, most) // groups * groups
        stages = max(2 * groups, stages)
        tiles, is_gated = self.tiles(problem.m, problem.b.rows), problem.epilogue.is_gated
        return kernel(
            **problem.constants(),
            SUM_BLOCK=sum_block(problem, K_TILE_BYTES),
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            STAGES=stages,
            SPLITS=self.splits,
            CONSTANT_WEIGHT=problem.constant_weight,
        ).launch(
            (tiles if self.parts > 1 else min(tiles, device.num_sms), self.splits),
            288,
            max(exchanged + stages * stage, device.shared_memory // 2 + 1),
            **_a_maps(problem, self.tile_m),
            b_map=_gated_map(problem, self.tile_n) if is_gated else _map(problem.b, problem.k, self.tile_n),
            **_arguments(problem, kernel),
        )


# fp8 with float16 output: elements of K between promotions of the accumulators (fp8_accumulation.py).
_FLOAT16_SUMS = 64


def sum_block(problem: GemmProblem, of_bfloat16: int) -> int:
    """Elements of K that the tensor cores accumulate before promotion to float32 registers; 0: no promotion.

    `of_bfloat16` is this number for fp8 operands, a bfloat16 output and no block scales.
    """
    if problem.dtype not in FP8:
        return 0
    if problem.epilogue.out.dtype is float16:
        return _FLOAT16_SUMS
    return SCALE_BLOCK if problem.epilogue.block_scaled else of_bfloat16


def max_swap_rows(is_fp8: bool, block_scaled: bool) -> int:
    """The largest tile M of gemm_sm90_swap_ab.cu, which promotes the accumulators of fp8 operands."""
    return _MAX_BLOCKED_ROWS if block_scaled else _MAX_PROMOTED_ROWS if is_fp8 else _MAX_SWAP_ROWS


def _a_maps(problem: GemmProblem, tile_m: int, parts: int = 1) -> dict[str, Any]:
    """The tensor maps of a: for parts of whole row tiles, and for the last, partial tile."""
    tail = -(-(problem.m % tile_m) // 8) * 8 or tile_m
    return {"a_map": _map(problem.a, problem.k, tile_m // parts), "a_tail_map": _map(problem.a, problem.k, tail)}


def _map(operand: Operand, k: int, rows: int) -> TensorMap:
    """The tensor map of an operand; a box is `rows` rows of one k-tile."""
    itemsize = operand.dtype.itemsize
    # A tensor of one row may have any row stride.
    stride = operand.stride * itemsize if operand.rows > 1 else -(-k * itemsize // 16) * 16
    box = (K_TILE_BYTES // itemsize, rows)
    return TensorMap(operand.source, operand.dtype, (k, operand.rows), (stride,), box, K_TILE_BYTES)


def _gated_map(problem: GemmProblem, rows: int) -> TensorMap:
    """The tensor map of b as [N / 8, 2, 8, K]: groups of 8 gates and 8 ups; a box is `rows` rows of one k-tile."""
    b, itemsize = problem.b, problem.dtype.itemsize
    row, box = b.stride * itemsize, (K_TILE_BYTES // itemsize, 8, 2, rows // 16)
    sizes, strides = (problem.k, 8, 2, problem.n // 8), (row, problem.n * row, 8 * row)
    return TensorMap(b.source, b.dtype, sizes, strides, box, K_TILE_BYTES)


def _out_map(problem: GemmProblem, box: tuple[int, int]) -> TensorMap:
    out, stride = problem.epilogue.out, problem.epilogue.arguments()["out_stride"]
    itemsize = out.dtype.itemsize
    pitch = stride * itemsize if problem.m > 1 else -(-problem.n * itemsize // 16) * 16
    return TensorMap(out, out.dtype, (problem.n, problem.m), (pitch,), box, box[0] * itemsize)


def _arguments(problem: GemmProblem, kernel: Kernel) -> dict[str, Any]:
    """The arguments of the problem that the kernel takes. Tensor maps replace the pointers to the operands."""
    return kernel.taken(problem.arguments())
