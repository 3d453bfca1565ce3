"""A GEMM with a weight in a quantized type of GGUF, and what the choice of its kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Specialisation
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType, int32
from ..._core.tensors.tensor import TensorArg
from .._shared import ggml_formats
from .._shared.ggml_formats import Format
from .gemm_problem import Epilogue, GemmProblem, Operand
from .gemm_shape import GemmShape

UNIT = 256  # elements of a row of the weight that a warp multiplies at a time
MAX_FUSED_ROWS = 32  # most rows of X with a weight that is not rounded: by the ops' definition, and by the kernels
BLOCK_ROWS = 4  # block size of the sorted lists, in rows: callers assume upstream's number


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The experts of the rows of out: ggml_rows.cuh.

    Attributes:
        ids: the expert of each row of out; or, with `expert_ids`, rows of out in the order of their experts,
            `BLOCK_ROWS` of them for each expert of `expert_ids`.
        num_experts: experts of W.
        top_k: rows of out for each row of X.
    """

    ids: TensorArg
    expert_ids: TensorArg | None
    num_experts: int
    top_k: int


def format_of(W: TensorArg, quant_type: int, num_rows: int, k: int) -> Format:
    """Check a weight of `num_rows` rows of k elements (or more, if rows are a dimension of W); returns its format."""
    format, elements = ggml_formats.FORMATS.get(quant_type), k
    if format is not None and len(W.shape) > 1 and W.numel == num_rows * W.shape[-1]:
        elements = max(k, W.shape[-1] // format.nbytes * format.length)
    return ggml_formats.of_rows(W, quant_type, num_rows, elements)


@dataclass(frozen=True, slots=True, eq=False)
class GgmlProblem:
    """``out = X @ W.T``: X [m, k] and out [m, n] with one row stride, W [n, k] in `format`.

    With `choices`, W has a matrix for each expert, and X has one row per token.
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
    def num_rows(self) -> int:
        """Rows of W, of all experts."""
        return self.n * (1 if self.choices is None else self.choices.num_experts)

    @property
    def row_bytes(self) -> int:
        """Row stride of W, in bytes; elements of a row after the first k are not multiplied."""
        return self.W.numel // max(1, self.num_rows)

    @property
    def access(self) -> int:
        """Bytes of one access to W."""
        return ggml_formats.access_of(self.W, self.row_bytes)

    @property
    def x_access(self) -> int:
        """Elements of one access to X."""
        return Operand.of_rows(self.X).vec_size(self.k)

    @property
    def is_whole(self) -> bool:
        """Whether rows are whole units."""
        return self.k % UNIT == 0

    def bucket(self) -> str:
        weight = f"weight={self.n}x{self.k} {self.format.name} access={self.access}"
        experts = "" if self.choices is None else f" experts={self.choices.num_experts}"
        return f"rows={tuning.power_of_two(self.m)} {weight} {self.X.dtype.name}{experts}"

    @property
    def device(self) -> Device:
        return self.out.device

    @property
    def shape(self) -> GgmlShape:
        return GgmlShape.of(self)

    @property
    def product(self) -> GemmProblem:
        """The GEMM with the dequantized weight in a workspace."""
        size = self.row_bytes // self.format.nbytes * self.format.length
        dense = Scratch(self.n * size * self.X.dtype.itemsize)
        weight = Operand.of_scratch(dense, self.X.dtype, self.n, size)
        return GemmProblem(Operand.of_rows(self.X), weight, self.k, Epilogue(self.out))

    def specialised(self, kernel: Kernel, tokens: int, **constants: Any) -> Specialisation:
        """A kernel with blocks that take `tokens` rows of out."""
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
        """Blocks of `tokens` rows of out. With sorted lists, slots after the last whole block never count."""
        choices = self.choices
        if self.m and choices is not None and choices.expert_ids is not None:
            return choices.ids.numel // tokens
        return -(-self.m // tokens)

    def arguments(self) -> dict[str, int]:
        """The arguments of every kernel except the op's tensors; null for absent tensors."""
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
class GgmlShape:
    """Equal for all problems that one Config serves.

    Attributes:
        rows: rows of out, rounded up so that few of them need another kernel.
        n, k, row_bytes: rows of W, elements of K, and bytes of a row of W; of an expert, if there are any.
        format: of the weight.
        dtype: of X and out.
        access: bytes of one access to W.
        num_experts: weights that rows choose among; 0: there is one for all rows.
        block_rows: rows of the blocks of sorted lists; 0 without lists.
        dense: the GEMM of the dequantized weight; None with experts.
    """

    rows: int
    n: int
    k: int
    row_bytes: int
    format: Format
    dtype: DType
    access: int
    num_experts: int = 0
    block_rows: int = 0
    dense: GemmShape | None = None

    @classmethod
    def of(cls, problem: GgmlProblem) -> GgmlShape:
        choices, rounded = problem.choices, tuning.rounded_rows(problem.m)
        if choices is not None:
            rounded = tuning.power_of_two(problem.m) if problem.m else 0
        return cls(
            rounded,
            problem.n,
            problem.k,
            problem.row_bytes,
            problem.format,
            problem.X.dtype,
            problem.access,
            0 if choices is None else choices.num_experts,
            0 if choices is None or choices.expert_ids is None else BLOCK_ROWS,
            GemmShape.of(problem.product) if choices is None else None,
        )

    def of_rows(self, rows: int) -> GgmlShape:
        return replace(self, rows=rows, dense=None if self.dense is None else self.dense.of_rows(rows))

    @property
    def is_empty(self) -> bool:
        return 0 in (self.rows, self.n)

    @property
    def tokens(self) -> int:
        """Rows of X that share a weight, and so are multiplied at once."""
        if self.dense is None:
            return self.block_rows or 1
        return min(MAX_FUSED_ROWS, tuning.power_of_two(self.rows))

    @property
    def tiles(self) -> int:
        """The expected tiles of `tokens` rows; the last block of each expert is not full."""
        whole = -(-self.rows // self.tokens)
        return min(self.rows, whole + self.num_experts) if self.block_rows else whole

    @property
    def units(self) -> int:
        """Units of K, at least two and rounded up to a power of two: more warps would be idle."""
        return max(2, tuning.power_of_two(-(-self.k // UNIT)))

    @property
    def nbytes(self) -> int:
        """Bytes of X, of the weights that are read, and of out."""
        weights = min(self.num_experts, self.rows) if self.dense is None else 1
        return weights * self.n * self.row_bytes + self.rows * (self.k + self.n) * self.dtype.itemsize

    def pitch(self, units: int) -> int:
        """Bytes in shared memory of a row's part of `units` units, as ggml_tile.cuh lays it out."""
        part = units * UNIT // self.format.length * self.format.nbytes
        pieces = -(-part // self.access) + (part % self.access != 0)
        return (pieces * self.access + 15) // 32 * 32 + 16
