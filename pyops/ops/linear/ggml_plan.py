"""GEMM with a GGUF weight: a Config for each kernel, the choice among them, and the launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from .._shared import ggml_formats
from .._shared.products import multiplies
from . import gemm_plan
from .gemm_problem import Epilogue, Operand
from .gemm_problem import GemmProblem as DenseProblem
from .ggml_problem import UNIT, GgmlProblem

_mul_mat, _vec = Kernel("linear/ggml_mul_mat.cu"), Kernel("linear/ggml_mul_mat_vec.cu")
_digits, _simt = Kernel("linear/ggml_mul_mat_row.cu"), Kernel("linear/ggml_mul_mat_simt.cu")

# Measured on an H200: docs/performance/gguf.md.
MAX_FUSED_ROWS = 32  # most rows of X with fused dequantization; for more rows the weight is dequantized first
BLOCK_ROWS = 4  # block size of the sorted lists, in rows: callers assume upstream's number
_MAX_VEC_TOKENS = 2  # most rows of X of ggml_mul_mat_vec.cu
# Most bytes of shared memory of a block of ggml_mul_mat_vec.cu, if two warps along K fit.
_VEC_SHARED_MEMORY = 48 * 1024
# {rows of X: threads per SM that bound the registers of ggml_mul_mat_vec.cu}: more threads spill.
_RESIDENT_VEC_THREADS = {1: 1024, 2: 768}
# Threads per SM that bound the registers of ggml_mul_mat.cu, and most rows of X with that bound: more rows spill.
_RESIDENT_THREADS, _MAX_BOUNDED_TOKENS = 512, 16
# Threads per SM that bound the registers of ggml_mul_mat_row.cu; and fewer, against spills, with experts, with
# unaligned X, or with types that use a lookup table.
_RESIDENT_DIGITS_THREADS, _FEWER_RESIDENT_THREADS = 1024, 768
# Types for which ggml_mul_mat_row.cu is faster than ggml_mul_mat_vec.cu with one row of X, and the most bytes of shared
# memory of its blocks.
_DIGIT_TYPES, _DIGIT_SHARED_MEMORY = frozenset({"Q4_K", "IQ4_XS", "IQ4_NL"}), 56 * 1024
# (waves along the rows of W, waves along K) of a block of ggml_mul_mat.cu on AMD, best first, by the model of
# docs/performance/amd.md. The second list, with 16 rows of W per block, is for grids that would leave compute units
# idle.
_WAVES, _FEW_WAVES = ((2, 4), (2, 2), (4, 1)), ((1, 4), (1, 2), (1, 1))
_MAX_SIMT_TOKENS = 4  # rows of X of a block of ggml_mul_mat_simt.cu


def _each(problem: GgmlProblem, blocks: int) -> int:
    """Most blocks of a grid of `blocks` blocks on any SM."""
    return -(-blocks // problem.out.device.num_sms)


def _spread(problem: GgmlProblem, blocks: int, shared_memory: int) -> int:
    """Bytes of shared memory of a block, raised so that no third block (or second, if one per SM is enough) fits on an
    SM.

    Otherwise blocks of the next GEMM, which start before this one ends, are spread unevenly: three on some SMs, one on
    others.
    """
    device, each = problem.out.device, _each(problem, blocks)
    # Before sm_90 a kernel starts only after the previous one has ended.
    if not device.supports("clusters") or not 0 < each <= 2:
        return shared_memory
    return max(shared_memory, device.shared_memory // (each + 1) + 1)


@dataclass(frozen=True, slots=True)
class MulMatConfig:
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

    def num_threads(self, problem: GgmlProblem) -> int:
        """Threads of a block."""
        return self.row_warps * self.k_warps * problem.out.device.warp_size

    def shared_memory(self, problem: GgmlProblem) -> int:
        """Bytes of shared memory: the lookup table of the type, then stages, reused for accumulators in the
        epilogue."""
        padding = 8 if problem.out.device.supports("matrix_cores") else 16
        stage = self.rows * problem.pitch(self.k_warps) + self.tokens * (self.k_warps * UNIT + padding) * 2
        return 2 * problem.format.grid_size + max(self.stages * stage, self.k_warps * self.tokens * (self.rows + 4) * 4)

    def candidates(self, problem: GgmlProblem, device: Device) -> list[MulMatConfig]:
        """Other blocks, stages and splits."""
        found = tuning.varied(
            self,
            row_warps=tuning.beside(self.row_warps, 1, 8),
            k_warps=tuning.beside(self.k_warps, 1, 8),
            stages=(self.stages - 1, self.stages + 1),
            splits=tuning.beside(self.splits, 1, 8),
        )
        least, most = (2, self.stages + 1) if device.supports("async_copies") else (1, 1)
        return [
            one for one in found if least <= one.stages <= most and one.shared_memory(problem) <= device.shared_memory
        ]

    def launch(self, problem: GgmlProblem) -> Launch:
        """One launch. With split-K each block writes its accumulators to a workspace, and the last one adds them up."""
        count, threads = -(-problem.n // self.rows) * problem.tiles(self.tokens), self.num_threads(problem)
        shared = _spread(problem, count * self.splits, self.shared_memory(problem))
        most = _RESIDENT_THREADS // threads if self.tokens <= _MAX_BOUNDED_TOKENS else 1
        partial: dict[str, Any] = {"partial": 0, "arrived": 0}
        if self.splits > 1 and count:
            results = -(-self.tokens * self.rows // threads)
            partial["partial"] = Scratch(count * self.splits * results * threads * 4)
            partial["arrived"] = Scratch(count * 4, zeroed=True)
        return problem.specialised(
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


def _resident(problem: GgmlProblem, grid: int, most: int) -> int:
    """Blocks per SM, at most `most`, that bound the registers of the kernels for one or two rows."""
    if problem.choices is None:
        blocks = _each(problem, grid)
        # Two blocks fit anyway, and were slower with fewer registers.
        most = min(most, blocks) if blocks > 2 else 1
    return max(1, most)


@dataclass(frozen=True, slots=True)
class VecConfig:
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

    def shared_memory(self, problem: GgmlProblem) -> int:
        """Bytes of shared memory: the lookup table of the type, then stages."""
        stage = 16 * self.row_warps * problem.pitch(self.k_warps) + self.tokens * self.k_warps * UNIT * 2
        return 2 * problem.format.grid_size + self.stages * stage

    def candidates(self, problem: GgmlProblem, device: Device) -> list[VecConfig]:
        """Other blocks and stages."""
        found = tuning.varied(
            self,
            row_warps=tuning.beside(self.row_warps, 1, 2),
            k_warps=tuning.beside(self.k_warps, 2, 8),
            stages=(self.stages - 1, self.stages + 1),
        )
        return [one for one in found if one.stages >= 2 and one.shared_memory(problem) <= device.shared_memory]

    def launch(self, problem: GgmlProblem) -> Launch:
        grid = -(-problem.n // (16 * self.row_warps)) * problem.tiles(self.tokens)
        threads = 32 * self.row_warps * self.k_warps
        return problem.specialised(
            _vec,
            self.tokens,
            ROW_WARPS=self.row_warps,
            K_WARPS=self.k_warps,
            STAGES=self.stages,
            X_ACCESS=problem.x_access,
            WHOLE=problem.is_whole,
            MIN_BLOCKS=_resident(problem, grid, _RESIDENT_VEC_THREADS.get(self.tokens, 0) // threads),
        ).launch(grid, threads, _spread(problem, grid, self.shared_memory(problem)), **problem.arguments())


@dataclass(frozen=True, slots=True)
class DigitsConfig:
    """The geometry of ggml_mul_mat_row.cu; the attributes are constants of the kernel.

    Attributes:
        k_warps: warps along K.
        stages: k-tiles in shared memory or in flight.
    """

    k_warps: int
    stages: int

    def shared_memory(self, problem: GgmlProblem) -> int:
        """Bytes of shared memory: the lookup table, zeros, stages of 16 rows of the weight, two stages of the digits of
        a row of X."""
        digits = 3 * (self.k_warps * UNIT + 16) + self.k_warps * UNIT // 16 * 8
        return 2 * problem.format.grid_size + 128 + self.stages * 16 * problem.pitch(self.k_warps) + 2 * digits

    def candidates(self, problem: GgmlProblem, device: Device) -> list[DigitsConfig]:
        """Other numbers of warps and stages."""
        found = tuning.varied(
            self, k_warps=tuning.beside(self.k_warps, 2, 8), stages=(self.stages - 1, self.stages + 1)
        )
        return [one for one in found if one.stages >= 2 and one.shared_memory(problem) <= device.shared_memory]

    def launch(self, problem: GgmlProblem) -> Launch:
        grid, threads = -(-problem.n // 16) * problem.tiles(1), 32 * self.k_warps
        is_plain = problem.choices is None and problem.x_access > 1 and problem.format.name == "Q4_K"
        most = _RESIDENT_DIGITS_THREADS if is_plain else _FEWER_RESIDENT_THREADS
        arguments = problem.arguments()
        del arguments["expert_ids"], arguments["num_tokens_post_padded"]
        return problem.specialised(
            _digits,
            1,
            K_WARPS=self.k_warps,
            STAGES=self.stages,
            X_ACCESS=min(8, problem.x_access),
            WHOLE=problem.is_whole,
            MIN_BLOCKS=_resident(problem, grid, most // threads),
        ).launch(grid, threads, _spread(problem, grid, self.shared_memory(problem)), **arguments)


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

    def launch(self, problem: GgmlProblem) -> Launch:
        row_groups = -(-problem.n * problem.out.device.warp_size // self.num_threads)
        return problem.specialised(
            _simt,
            self.tokens,
            UNITS=self.units,
            VEC_SIZE=min(8, problem.x_access),
            NUM_THREADS=self.num_threads,
        ).launch(row_groups * problem.tiles(self.tokens), self.num_threads, **problem.arguments())


Config = VecConfig | DigitsConfig | MulMatConfig | GgmlSimtConfig


def choose(problem: GgmlProblem, device: Device) -> Config:
    """The kernel with fused dequantization, and its geometry. Equal for all problems of a bucket."""
    choices = problem.choices
    of_tile = 1 if choices is None or choices.expert_ids is None else BLOCK_ROWS
    tokens = of_tile if choices is not None else min(MAX_FUSED_ROWS, tuning.power_of_two(tuning.pinned(problem.m)))
    # WMMA of gfx11 is as slow as vector instructions: for small M it takes longer than ggml_mul_mat_simt.cu.
    is_slow = device.arch.startswith("gfx11") and tokens <= _MAX_VEC_TOKENS
    if is_slow or not multiplies(problem.X.dtype, device):
        return GgmlSimtConfig(min(_MAX_SIMT_TOKENS, tokens), units=4, num_threads=256)
    units = max(2, tuning.power_of_two(-(-problem.k // UNIT)))
    if not device.supports("async_copies"):
        return _of_waves(problem, device, tokens, units)
    config: VecConfig | DigitsConfig | MulMatConfig
    if tokens == 1 and problem.format.name in _DIGIT_TYPES:
        config, most = DigitsConfig(min(8, units), stages=2), _DIGIT_SHARED_MEMORY
    elif tokens <= _MAX_VEC_TOKENS:
        config, most = VecConfig(tokens, 1, min(8, units), stages=2), _VEC_SHARED_MEMORY
    else:
        config, most = MulMatConfig(tokens, 2, min(4, units), stages=2, splits=1), device.shared_memory
    while config.shared_memory(problem) > most and config.k_warps > 2:
        config = replace(config, k_warps=config.k_warps // 2)
    return config


def _of_waves(problem: GgmlProblem, device: Device, tokens: int, units: int) -> MulMatConfig:
    """The geometry where registers hold copies. Two blocks fit on an SM, so that one multiplies while the other stores
    its loads to shared memory, unless there are at most as many blocks as SMs."""
    tiles = -(-problem.n // 16) * tuning.pinned(problem.tiles(tokens))
    is_small = tiles < 2 * device.num_sms
    blocks = 1 if tiles <= device.num_sms else 2  # blocks per SM
    found = [MulMatConfig(tokens, rows, min(k, units), 1, 1) for rows, k in (_FEW_WAVES if is_small else _WAVES)]
    return next((one for one in found if blocks * one.shared_memory(problem) <= device.shared_memory), found[-1])


def plan(problem: GgmlProblem) -> list[Launch]:
    """The launches: one with fused dequantization for small M; for large M dequantization of the weight, then a
    GEMM."""
    out, device = problem.out, problem.out.device
    if tuning.pinned(problem.m) <= MAX_FUSED_ROWS or problem.choices is not None:
        return [tuning.config(out.op, problem, device, choose).launch(problem)]
    dtype, format = problem.X.dtype, problem.format
    size = problem.row_bytes // format.nbytes * format.length
    numel = problem.n * size
    weight = Scratch(numel * dtype.itemsize)
    rows = Operand.of_scratch(weight, dtype, problem.n, size)
    product = gemm_plan.plan(DenseProblem(Operand.of_rows(problem.X), rows, problem.k, Epilogue(out)))
    expansion = ggml_formats.dequantised(problem.W, format, weight, dtype, numel, access=16 // dtype.itemsize)
    return [] if product.empty else [expansion, product]
