"""Which kernel multiplies a matrix in one of GGUF's quantised types, and how: a Config for each kernel, the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import float32, int32
from ..._core.kernel import Kernel, Launch, Scratch, Specialisation
from ..._core.tensor import TensorArg
from .._shared import ggml_formats
from .._shared.ggml_formats import Format
from . import gemm_plan
from .gemm_problem import Epilogue, Operand
from .gemm_problem import Problem as DenseProblem

_mul_mat, _vec = Kernel("linear/ggml_mul_mat.cu"), Kernel("linear/ggml_mul_mat_vec.cu")
_simt = Kernel("linear/ggml_mul_mat_simt.cu")

# Measured on an H200: docs/performance.md, "Products of GGUF weights".
MAX_FUSED_ROWS = 32  # of X, that a product multiplies with format blocks; for more, the weight is dequantised first
BLOCK_ROWS = 4  # that have one expert together, in the order of experts: the number that callers know from upstream
_UNIT = 256  # elements of a row of the weight that a warp multiplies at a time
_MAX_VEC_TOKENS = 2  # up to which ggml_mul_mat_vec.cu serves a product
_VEC_SHARED_MEMORY = 48 * 1024  # bytes of a block of it: blocks of this product and of the next share a multiprocessor
# Threads of a multiprocessor, for which registers of ggml_mul_mat_vec.cu are bounded, by rows of X: more spill.
_RESIDENT_VEC_THREADS = {1: 1024, 2: 768}
# Of a multiprocessor, for which registers of ggml_mul_mat.cu are bounded; and up to how many rows of X, as more spill.
_RESIDENT_THREADS, _MAX_BOUNDED_TOKENS = 512, 16
# Waves of a block of ggml_mul_mat.cu along the rows of W and along K, on AMD, best first: by the model of
# docs/performance.md. Where 32 rows of W for each block would leave compute units without one, 16 rows.
_WAVES, _FEW_WAVES = ((2, 4), (2, 2), (4, 1)), ((1, 4), (1, 2), (1, 1))
_MAX_SIMT_TOKENS = 4  # rows of X of a block of ggml_mul_mat_simt.cu


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """How rows of out belong to experts: ggml_rows.cuh.

    Attributes:
        ids: the expert of each row of out; or, with `expert_ids`, rows of out in the order of their experts,
            `BLOCK_ROWS` of them for each expert of `expert_ids`.
        num_experts: how many W has.
        top_k: rows of out for each row of X.
    """

    ids: TensorArg
    expert_ids: TensorArg | None
    num_experts: int
    top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """``out = X @ W.T``: X [m, k] and out [m, n] of rows of one stride, W [n, k] in `format`.

    With `choices`, W has a matrix for each expert, and X as many rows as tokens.
    """

    out: TensorArg
    W: TensorArg
    X: TensorArg
    format: Format
    choices: Choices | None = None

    @property
    def m(self) -> int:
        return self.out.shape[0]

    @property
    def k(self) -> int:
        return self.X.shape[1]

    @property
    def n(self) -> int:
        return self.out.shape[1]

    @property
    def row_bytes(self) -> int:
        return self.k // self.format.length * self.format.nbytes

    @property
    def access(self) -> int:
        """Bytes of one access to W."""
        return ggml_formats.access_of(self.W, self.row_bytes)

    @property
    def x_access(self) -> int:
        """Elements of one access to X."""
        return Operand.of_rows(self.X).vec_size(self.k)

    def bucket(self) -> str:
        weight = f"weight={self.n}x{self.k} {self.format.name} access={self.access}"
        experts = "" if self.choices is None else f" experts={self.choices.num_experts}"
        return f"rows={tuning.power_of_two(self.m)} {weight} {self.X.dtype.name}{experts}"

    def pitch(self, units: int) -> int:
        """Bytes of shared memory of a row's part of so many units, as ggml_tile.cuh places it."""
        part = units * _UNIT // self.format.length * self.format.nbytes
        pieces = -(-part // self.access) + (part % self.access != 0)
        return (pieces * self.access + 15) // 32 * 32 + 16

    def specialised(self, kernel: Kernel, tokens: int, **constants: Any) -> Specialisation:
        """A kernel whose blocks take `tokens` rows of out."""
        choices = self.choices
        return (kernel if choices is None else kernel.renamed(ids=choices.ids.name))(
            scalar_t=self.X.dtype,
            index_t=int32 if choices is None else choices.ids.dtype,
            CHOICES=0 if choices is None else 1 if choices.expert_ids is None else 2,
            FORMAT=self.format.name,
            TOKENS=tokens,
            ACCESS=self.access,
            **constants,
        )

    def tiles(self, tokens: int) -> int:
        """Blocks of `tokens` rows of out."""
        choices = self.choices
        rows = self.m if choices is None or choices.expert_ids is None else choices.ids.numel
        return -(-rows // tokens) if self.m else 0

    def arguments(self) -> dict[str, int]:
        """What every kernel takes beside the op's tensors; null for those that there are not."""
        choices = self.choices
        absent = ["ids"] if choices is None else []
        absent += ["expert_ids", "num_tokens_post_padded"] if choices is None or choices.expert_ids is None else []
        return {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "row_bytes": self.row_bytes,
            "out_stride": check.row_stride(self.out),
            "x_stride": check.row_stride(self.X),
            "num_experts": 1 if choices is None else choices.num_experts,
            "top_k": 1 if choices is None else choices.top_k,
            **dict.fromkeys(absent, 0),
        }


@dataclass(frozen=True, slots=True)
class MulMatConfig:
    """The geometry of ggml_mul_mat.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        row_warps, k_warps: warps along 16 rows of W each, and along K.
        stages: steps of K that are in shared memory or on the way there; on AMD 1, as registers hold the next.
        splits: blocks that share rows, each with a part of K.
    """

    tokens: int
    row_warps: int
    k_warps: int
    stages: int
    splits: int

    @property
    def rows(self) -> int:
        """Of W, of a block."""
        return 16 * self.row_warps

    def num_threads(self, problem: Problem) -> int:
        """Of a block."""
        return self.row_warps * self.k_warps * problem.out.device.warp_size

    def shared_memory(self, problem: Problem) -> int:
        """Bytes: the grid of the type, then stages, whose place sums take in the end."""
        padding = 8 if problem.out.device.supports("matrix_cores") else 16
        stage = self.rows * problem.pitch(self.k_warps) + self.tokens * (self.k_warps * _UNIT + padding) * 2
        return 2 * problem.format.grid_size + max(self.stages * stage, self.k_warps * self.tokens * (self.rows + 4) * 4)

    def candidates(self, problem: Problem, device: Device) -> list[MulMatConfig]:
        """Other blocks, stages and splits."""
        found = tuning.varied(
            self,
            row_warps=tuning.beside(self.row_warps, 1, 8),
            k_warps=tuning.beside(self.k_warps, 1, 8),
            stages=(self.stages - 1, self.stages + 1),
            splits=tuning.beside(self.splits, 1, 8),
        )
        least, most = (1, 1) if device.supports("matrix_cores") else (2, self.stages + 1)
        return [
            one for one in found if least <= one.stages <= most and one.shared_memory(problem) <= device.shared_memory
        ]

    def launch(self, problem: Problem) -> Launch:
        """One launch. Blocks that share rows leave their sums in a workspace, and the last of them adds these up."""
        count, threads = -(-problem.n // self.rows) * problem.tiles(self.tokens), self.num_threads(problem)
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
            MIN_BLOCKS=max(1, _RESIDENT_THREADS // threads) if self.tokens <= _MAX_BOUNDED_TOKENS else 1,
        ).launch((count, self.splits), threads, self.shared_memory(problem), **problem.arguments(), **partial)


@dataclass(frozen=True, slots=True)
class VecConfig:
    """The geometry of ggml_mul_mat_vec.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        row_warps, k_warps: warps along 16 rows of W each, and along K.
        stages: steps of K that are in shared memory or on the way there.
    """

    tokens: int
    row_warps: int
    k_warps: int
    stages: int

    def shared_memory(self, problem: Problem) -> int:
        """Bytes: the grid of the type, then stages."""
        stage = 16 * self.row_warps * problem.pitch(self.k_warps) + self.tokens * self.k_warps * _UNIT * 2
        return 2 * problem.format.grid_size + self.stages * stage

    def candidates(self, problem: Problem, device: Device) -> list[VecConfig]:
        """Other blocks and stages."""
        found = tuning.varied(
            self,
            row_warps=tuning.beside(self.row_warps, 1, 2),
            k_warps=tuning.beside(self.k_warps, 2, 8),
            stages=(self.stages - 1, self.stages + 1),
        )
        return [one for one in found if one.stages >= 2 and one.shared_memory(problem) <= device.shared_memory]

    def launch(self, problem: Problem) -> Launch:
        grid = -(-problem.n // (16 * self.row_warps)) * problem.tiles(self.tokens)
        threads = 32 * self.row_warps * self.k_warps
        resident = max(1, _RESIDENT_VEC_THREADS.get(self.tokens, 0) // threads)
        if problem.choices is None:
            blocks = -(-grid // problem.out.device.multiprocessors)  # of a multiprocessor
            # Two find room anyway, and with fewer registers took longer.
            resident = min(resident, blocks) if blocks > 2 else 1
        return problem.specialised(
            _vec,
            self.tokens,
            ROW_WARPS=self.row_warps,
            K_WARPS=self.k_warps,
            STAGES=self.stages,
            X_ACCESS=problem.x_access,
            MIN_BLOCKS=resident,
        ).launch(grid, threads, self.shared_memory(problem), **problem.arguments())


@dataclass(frozen=True, slots=True)
class SimtConfig:
    """The geometry of ggml_mul_mat_simt.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: rows of X of a block.
        units: of 256 elements of K, that a block copies to shared memory at a time.
        num_threads: threads of a block; a warp has a row of W.
    """

    tokens: int
    units: int
    num_threads: int

    def candidates(self, problem: Problem, device: Device) -> list[SimtConfig]:
        """Other parts of K, and blocks."""
        return tuning.varied(self, units=tuning.beside(self.units, 1, 4), num_threads=(128, 256))

    def launch(self, problem: Problem) -> Launch:
        row_groups = -(-problem.n * problem.out.device.warp_size // self.num_threads)
        return problem.specialised(
            _simt,
            self.tokens,
            UNITS=self.units,
            VEC_SIZE=min(8, problem.x_access),
            NUM_THREADS=self.num_threads,
        ).launch(row_groups * problem.tiles(self.tokens), self.num_threads, **problem.arguments())


Config = VecConfig | MulMatConfig | SimtConfig


def choose(problem: Problem, device: Device) -> Config:
    """The kernel that multiplies format blocks, and its geometry. Equal for all problems of a bucket."""
    choices = problem.choices
    of_tile = 1 if choices is None or choices.expert_ids is None else BLOCK_ROWS
    tokens = of_tile if choices is not None else min(MAX_FUSED_ROWS, tuning.power_of_two(problem.m))
    # WMMA of gfx11 takes the time of vector instructions: for few rows more than ggml_mul_mat_simt.cu spends on them.
    is_slow = device.arch.startswith("gfx11") and tokens <= _MAX_VEC_TOKENS
    if problem.X.dtype is float32 or not device.supports("products") or is_slow:
        return SimtConfig(min(_MAX_SIMT_TOKENS, tokens), units=4, num_threads=256)
    units = max(2, tuning.power_of_two(-(-problem.k // _UNIT)))
    if device.supports("matrix_cores"):
        return _of_waves(problem, device, tokens, units)
    config: VecConfig | MulMatConfig
    if tokens <= _MAX_VEC_TOKENS:
        config, most = VecConfig(tokens, 1, min(8, units), stages=2), _VEC_SHARED_MEMORY
    else:
        config, most = MulMatConfig(tokens, 2, min(4, units), stages=2, splits=1), device.shared_memory
    while config.shared_memory(problem) > most and config.k_warps > 2:
        config = replace(config, k_warps=config.k_warps // 2)
    return config


def _of_waves(problem: Problem, device: Device, tokens: int, units: int) -> MulMatConfig:
    """The geometry on AMD. Blocks leave room for another in shared memory, which multiplies while they store what they
    have loaded, unless there are no more blocks than compute units."""
    tiles = -(-problem.n // 16) * problem.tiles(tokens)
    is_small = tiles < 2 * device.multiprocessors
    blocks = 1 if tiles <= device.multiprocessors else 2  # of a compute unit
    found = [MulMatConfig(tokens, rows, min(k, units), 1, 1) for rows, k in (_FEW_WAVES if is_small else _WAVES)]
    return next((one for one in found if blocks * one.shared_memory(problem) <= device.shared_memory), found[-1])


def plan(problem: Problem) -> list[Launch]:
    """The launches of a product: one for few rows of X, and for many one that dequantises the weight before it."""
    out, device = problem.out, problem.out.device
    if problem.m <= MAX_FUSED_ROWS or problem.choices is not None:
        return [tuning.config(out.op, problem, device, choose).launch(problem)]
    dtype, numel = problem.X.dtype, problem.n * problem.k
    weight = Scratch(numel * dtype.itemsize)
    rows = Operand.of_scratch(weight, dtype, problem.n, problem.k)
    product = gemm_plan.plan(DenseProblem(Operand.of_rows(problem.X), rows, problem.k, Epilogue(out)))
    expansion = ggml_formats.dequantised(problem.W, problem.format, weight, dtype, numel, access=16 // dtype.itemsize)
    return [] if product.empty else [expansion, product]
