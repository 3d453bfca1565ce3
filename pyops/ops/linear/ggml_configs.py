"""The geometry and the launches of the GEMMs with GGUF weights.

Four kernels fuse the dequantization: ggml_mul_mat_row.cu and ggml_mul_mat_vec.cu for one and two rows of X,
ggml_mul_mat.cu for more, all on tensor cores, and ggml_mul_mat_simt.cu. Otherwise the weight is dequantized to a
workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from .._shared import ggml_formats
from .ggml_problem import UNIT, GgmlProblem, GgmlShape

_mul_mat, _vec = Kernel("linear/ggml_mul_mat.cu"), Kernel("linear/ggml_mul_mat_vec.cu")
_row, _simt = Kernel("linear/ggml_mul_mat_row.cu"), Kernel("linear/ggml_mul_mat_simt.cu")

# Measured on an H200: docs/performance/gguf.md.
MAX_VEC_TOKENS = 2  # most rows of X of ggml_mul_mat_vec.cu
# Most bytes of shared memory of a block of ggml_mul_mat_vec.cu, if two warps along K fit.
_VEC_SHARED_MEMORY = 48 * 1024
# {rows of X: threads per SM that bound the registers of ggml_mul_mat_vec.cu}: more threads spill.
_RESIDENT_VEC_THREADS = {1: 1024, 2: 768}
# Threads per SM that bound the registers of ggml_mul_mat.cu, and most rows of X with that bound: more rows spill.
_RESIDENT_THREADS, _MAX_BOUNDED_TOKENS = 512, 16
# Threads per SM that bound the registers of ggml_mul_mat_row.cu; and fewer, against spills, with experts, with
# unaligned X, or with types that use a lookup table.
_RESIDENT_ROW_THREADS, _FEWER_RESIDENT_THREADS = 1024, 768
_ROW_SHARED_MEMORY = 56 * 1024  # most bytes of shared memory of a block of ggml_mul_mat_row.cu
# (waves along the rows of W, waves along K) of a block of ggml_mul_mat.cu on AMD, best first, by the model of
# docs/performance/amd.md. The second list, with 16 rows of W per block, is for grids that would leave compute units
# idle.
_WAVES, _FEW_WAVES = ((2, 4), (2, 2), (4, 1)), ((1, 4), (1, 2), (1, 1))
_MAX_SIMT_TOKENS = 4  # rows of X of a block of ggml_mul_mat_simt.cu

C = TypeVar("C", "GgmlRowConfig", "GgmlVecConfig", "GgmlMulMatConfig")


def _each(problem: GgmlProblem, blocks: int) -> int:
    """Most blocks of a grid of `blocks` blocks on any SM."""
    return -(-blocks // problem.device.num_sms)


def _fits(config: GgmlRowConfig | GgmlVecConfig | GgmlMulMatConfig, problem: GgmlProblem, device: Device) -> bool:
    return config.shared_memory(problem.shape, device) <= device.shared_memory


def _spread(problem: GgmlProblem, blocks: int, config: GgmlRowConfig | GgmlVecConfig | GgmlMulMatConfig) -> int:
    """Bytes of shared memory of a block, raised so that no third block (or second, if one per SM is enough) fits on an
    SM.

    Otherwise blocks of the next GEMM, which start before this one ends, are spread unevenly: three on some SMs, one on
    others.
    """
    device, each = problem.device, _each(problem, blocks)
    shared_memory = config.shared_memory(problem.shape, device)
    # Before sm_90 a kernel starts only after the previous one has ended.
    if not device.supports("clusters") or not 0 < each <= 2:
        return shared_memory
    return max(shared_memory, device.shared_memory // (each + 1) + 1)


@dataclass(frozen=True, slots=True)
class GgmlMulMatConfig:
    """The geometry of ggml_mul_mat.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        row_warps, k_warps: warps along W, each with 16 rows, and warps along K.
        stages: k-tiles in shared memory or in flight; 1 on AMD, where registers hold the next one.
        splits: blocks that share rows (split-K); each takes a part of K.
    """

    tokens: int
    row_warps: int
    k_warps: int
    stages: int
    splits: int

    @property
    def rows(self) -> int:
        """Rows of W of a block."""
        return 16 * self.row_warps

    def num_threads(self, device: Device) -> int:
        """Threads of a block."""
        return self.row_warps * self.k_warps * device.warp_size

    def shared_memory(self, shape: GgmlShape, device: Device) -> int:
        """Bytes of shared memory: the lookup table of the type, then stages, reused for accumulators in the
        epilogue."""
        padding = 8 if device.supports("matrix_cores") else 16
        stage = self.rows * shape.pitch(self.k_warps) + self.tokens * (self.k_warps * UNIT + padding) * 2
        return 2 * shape.format.grid_size + max(self.stages * stage, self.k_warps * self.tokens * (self.rows + 4) * 4)

    def candidates(self, problem: GgmlProblem, device: Device) -> list[GgmlMulMatConfig]:
        """Other blocks, stages and splits."""
        found = tuning.varied(
            self,
            row_warps=tuning.beside(self.row_warps, 1, 8),
            k_warps=tuning.beside(self.k_warps, 1, 8),
            stages=(self.stages - 1, self.stages + 1),
            splits=tuning.beside(self.splits, 1, 8),
        )
        least, most = (2, self.stages + 1) if device.supports("async_copies") else (1, 1)
        return [one for one in found if least <= one.stages <= most and _fits(one, problem, device)]

    def launches(self, problem: GgmlProblem) -> list[Launch]:
        """One launch. With split-K each block writes its accumulators to a workspace, and the last one adds them up."""
        count, threads = -(-problem.n // self.rows) * problem.tiles(self.tokens), self.num_threads(problem.device)
        shared = _spread(problem, count * self.splits, self)
        most = _RESIDENT_THREADS // threads if self.tokens <= _MAX_BOUNDED_TOKENS else 1
        partial: dict[str, Any] = {"partial": 0, "arrived": 0}
        if self.splits > 1 and count:
            results = -(-self.tokens * self.rows // threads)
            partial["partial"] = Scratch(count * self.splits * results * threads * 4)
            partial["arrived"] = Scratch(count * 4, zeroed=True)
        launch = problem.specialised(
            _mul_mat,
            self.tokens,
            ROW_WARPS=self.row_warps,
            K_WARPS=self.k_warps,
            STAGES=self.stages,
            SPLITS=self.splits,
            X_ACCESS=problem.x_access,
            WHOLE=problem.is_whole,
            MIN_BLOCKS=max(1, min(most, _each(problem, count * self.splits))),
        ).launch((count, self.splits), threads, shared, **problem.arguments(), **partial)
        return [launch]


def _resident(problem: GgmlProblem, grid: int, most: int) -> int:
    """Blocks per SM, at most `most`, that bound the registers of the kernels for one or two rows."""
    if problem.choices is None:
        blocks = _each(problem, grid)
        # Two blocks fit anyway, and were slower with fewer registers.
        most = min(most, blocks) if blocks > 2 else 1
    return max(1, most)


@dataclass(frozen=True, slots=True)
class GgmlVecConfig:
    """The geometry of ggml_mul_mat_vec.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        row_warps, k_warps: warps along W, each with 16 rows, and warps along K.
        stages: k-tiles in shared memory or in flight.
    """

    tokens: int
    row_warps: int
    k_warps: int
    stages: int

    def shared_memory(self, shape: GgmlShape, device: Device) -> int:
        """Bytes of shared memory: the lookup table of the type, then stages."""
        stage = 16 * self.row_warps * shape.pitch(self.k_warps) + self.tokens * self.k_warps * UNIT * 2
        return 2 * shape.format.grid_size + self.stages * stage

    def candidates(self, problem: GgmlProblem, device: Device) -> list[GgmlVecConfig]:
        """Other blocks and stages."""
        found = tuning.varied(
            self,
            row_warps=tuning.beside(self.row_warps, 1, 2),
            k_warps=tuning.beside(self.k_warps, 2, 8),
            stages=(self.stages - 1, self.stages + 1),
        )
        return [one for one in found if one.stages >= 2 and _fits(one, problem, device)]

    def launches(self, problem: GgmlProblem) -> list[Launch]:
        grid = -(-problem.n // (16 * self.row_warps)) * problem.tiles(self.tokens)
        threads = 32 * self.row_warps * self.k_warps
        launch = problem.specialised(
            _vec,
            self.tokens,
            ROW_WARPS=self.row_warps,
            K_WARPS=self.k_warps,
            STAGES=self.stages,
            X_ACCESS=problem.x_access,
            WHOLE=problem.is_whole,
            MIN_BLOCKS=_resident(problem, grid, _RESIDENT_VEC_THREADS.get(self.tokens, 0) // threads),
        ).launch(grid, threads, _spread(problem, grid, self), **problem.arguments())
        return [launch]


@dataclass(frozen=True, slots=True)
class GgmlRowConfig:
    """The geometry of ggml_mul_mat_row.cu; the attributes are constants of the kernel.

    Attributes:
        k_warps: warps along K.
        stages: k-tiles in shared memory or in flight.
    """

    k_warps: int
    stages: int

    def shared_memory(self, shape: GgmlShape, device: Device) -> int:
        """Bytes of shared memory: the lookup table, zeros, stages of 16 rows of the weight, two stages of the digits of
        a row of X."""
        digits = 3 * (self.k_warps * UNIT + 16) + self.k_warps * UNIT // 16 * 8
        return 2 * shape.format.grid_size + 128 + self.stages * 16 * shape.pitch(self.k_warps) + 2 * digits

    def candidates(self, problem: GgmlProblem, device: Device) -> list[GgmlRowConfig]:
        """Other numbers of warps and stages."""
        found = tuning.varied(
            self, k_warps=tuning.beside(self.k_warps, 2, 8), stages=(self.stages - 1, self.stages + 1)
        )
        return [one for one in found if one.stages >= 2 and _fits(one, problem, device)]

    def launches(self, problem: GgmlProblem) -> list[Launch]:
        grid, threads = -(-problem.n // 16) * problem.tiles(1), 32 * self.k_warps
        is_plain = problem.choices is None and problem.x_access > 1 and problem.format.name == "Q4_K"
        most = _RESIDENT_ROW_THREADS if is_plain else _FEWER_RESIDENT_THREADS
        arguments = problem.arguments()
        del arguments["expert_ids"], arguments["num_tokens_post_padded"]
        launch = problem.specialised(
            _row,
            1,
            K_WARPS=self.k_warps,
            STAGES=self.stages,
            X_ACCESS=min(8, problem.x_access),
            WHOLE=problem.is_whole,
            MIN_BLOCKS=_resident(problem, grid, most // threads),
        ).launch(grid, threads, _spread(problem, grid, self), **arguments)
        return [launch]


@dataclass(frozen=True, slots=True)
class GgmlSimtConfig:
    """The geometry of ggml_mul_mat_simt.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        units: units of 256 elements of K that a block copies to shared memory at a time.
        num_threads: threads of a block; a warp has a row of W.
    """

    tokens: int
    units: int
    num_threads: int

    def candidates(self, problem: GgmlProblem, device: Device) -> list[GgmlSimtConfig]:
        """Other parts of K, and blocks."""
        return tuning.varied(self, units=tuning.beside(self.units, 1, 4), num_threads=(128, 256))

    def launches(self, problem: GgmlProblem) -> list[Launch]:
        row_groups = -(-problem.n * problem.device.warp_size // self.num_threads)
        launch = problem.specialised(
            _simt,
            self.tokens,
            UNITS=self.units,
            VEC_SIZE=min(8, problem.x_access),
            NUM_THREADS=self.num_threads,
        ).launch(row_groups * problem.tiles(self.tokens), self.num_threads, **problem.arguments())
        return [launch]


@dataclass(frozen=True, slots=True)
class DequantizeGgmlConfig:
    """The weight is dequantized to a workspace.

    Attributes:
        gemm: the Config of the GEMM that follows.
    """

    gemm: Any

    def candidates(self, problem: GgmlProblem, device: Device) -> list[DequantizeGgmlConfig]:
        """Other GEMMs."""
        return [DequantizeGgmlConfig(one) for one in self.gemm.candidates(problem.product, device)]

    def launches(self, problem: GgmlProblem) -> list[Launch]:
        """The launch that dequantizes the weight, and the GEMM."""
        product, dtype = problem.product, problem.X.dtype
        gemm, weight = self.gemm.launch(product), product.b.source
        assert isinstance(weight, Scratch)
        sizes = product.b.rows * product.b.stride, 16 // dtype.itemsize
        return [] if gemm.empty else [ggml_formats.dequantised(problem.W, problem.format, weight, dtype, *sizes), gemm]


def row_configs(shape: GgmlShape, device: Device) -> Iterator[GgmlRowConfig]:
    yield _fitting(GgmlRowConfig(min(8, shape.units), stages=2), shape, device, _ROW_SHARED_MEMORY)


def vec_configs(shape: GgmlShape, device: Device) -> Iterator[GgmlVecConfig]:
    yield _fitting(GgmlVecConfig(shape.tokens, 1, min(8, shape.units), stages=2), shape, device, _VEC_SHARED_MEMORY)


def mul_mat_configs(shape: GgmlShape, device: Device) -> Iterator[GgmlMulMatConfig]:
    if device.supports("async_copies"):
        one = GgmlMulMatConfig(shape.tokens, 2, min(4, shape.units), stages=2, splits=1)
        yield _fitting(one, shape, device, device.shared_memory)
    else:
        yield _of_waves(shape, device)


def simt_configs(shape: GgmlShape, device: Device) -> Iterator[GgmlSimtConfig]:
    yield GgmlSimtConfig(min(_MAX_SIMT_TOKENS, shape.tokens), units=4, num_threads=256)


def _fitting(config: C, shape: GgmlShape, device: Device, most: int) -> C:
    """`config` with fewer warps along K where shared memory requires it, but at least two."""
    while config.shared_memory(shape, device) > most and config.k_warps > 2:
        config = replace(config, k_warps=config.k_warps // 2)
    return config


def _of_waves(shape: GgmlShape, device: Device) -> GgmlMulMatConfig:
    """The geometry where registers hold copies. Two blocks fit on an SM, so that one multiplies while the other stores
    its loads to shared memory, unless there are at most as many blocks as SMs."""
    tiles = -(-shape.n // 16) * tuning.pinned(shape.tiles)
    is_small = tiles < 2 * device.num_sms
    blocks = 1 if tiles <= device.num_sms else 2  # blocks per SM
    waves = _FEW_WAVES if is_small else _WAVES
    found = [GgmlMulMatConfig(shape.tokens, rows, min(k, shape.units), 1, 1) for rows, k in waves]
    return next((one for one in found if blocks * one.shared_memory(shape, device) <= device.shared_memory), found[-1])
