"""A GEMM and its epilogue: the problem that the plans of this family choose kernels by.

``out = epilogue(a @ b.T)`` for a [M, K] and b [N, K], both K-major. `Operand` describes a matrix in memory, `Epilogue`
the epilogue (`gemm_epilogue.cuh` has the formula), `GemmProblem` the whole GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import DType, float32, int8
from ..._core.tensors.tensor import TensorArg
from .._shared import products
from .._shared.packed_layouts import ColumnOrder

if TYPE_CHECKING:
    from torch import Tensor

SCALE_BLOCK = 128  # block-scaled GEMM: elements of K, and rows of b, under one scale
# Stages in shared memory where registers hold loads: one is multiplied while the next is loaded to registers.
HELD_STAGES = 2
ACTIVATIONS = ("none", "gelu", "silu_and_mul")
_MAX_ACCESS = 16  # bytes of the widest access


def multiplies(dtype: DType, device: Device) -> bool:
    """Whether gemm_step.cuh multiplies this dtype: as product.cuh does, but not fp8 on gfx11, where the upcast to
    float16 spills."""
    widened = dtype.itemsize == 1 and dtype is not int8 and device.arch.startswith("gfx11")
    return products.multiplies(dtype, device) and not widened


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A matrix with K along its rows.

    Attributes:
        source: a tensor of the op, or a workspace that a previous launch has written.
        dtype: dtype of the elements.
        rows: number of rows.
        stride: elements from one row to the next.
        step: elements from one element of a row to the next.
        alignment: alignment of the first element, in bytes.
    """

    source: TensorArg | Scratch
    dtype: DType
    rows: int
    stride: int
    step: int
    alignment: int

    @classmethod
    def of_rows(cls, tensor: TensorArg) -> Operand:
        """A tensor [..., K] with merged leading dimensions; elements of a row are contiguous."""
        check.row_size(tensor)
        return cls(tensor, tensor.dtype, check.num_rows(tensor), check.row_stride(tensor), 1, tensor.alignment)

    @classmethod
    def of_matrix(cls, tensor: TensorArg) -> Operand:
        """A tensor [rows, K] of any strides."""
        stride, step = tensor.strides
        step = step if tensor.shape[1] > 1 else 1
        return cls(tensor, tensor.dtype, tensor.shape[0], stride, step, tensor.alignment)

    @classmethod
    def of_columns(cls, tensor: TensorArg) -> Operand:
        """A tensor [K, rows] of any strides; column-major is fast."""
        return cls.of_matrix(replace(tensor, shape=tensor.shape[::-1], strides=tensor.strides[::-1]))

    @classmethod
    def of_scratch(cls, scratch: Scratch, dtype: DType, rows: int, size: int) -> Operand:
        """A packed matrix [rows, size] in a workspace."""
        return cls(scratch, dtype, rows, size, 1, _MAX_ACCESS)

    def vec_size(self, size: int) -> int:
        """Elements of the widest access that divides rows of `size` elements into aligned pieces."""
        if self.step != 1:
            return 1
        bits = size | _MAX_ACCESS // self.dtype.itemsize | (self.alignment // self.dtype.itemsize or 1)
        if self.rows > 1:
            bits |= self.stride
        return bits & -bits


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """The epilogue: names and formula are those of gemm_epilogue.cuh.

    Attributes:
        out: [..., N], constant row stride.
        a_scales: a scale for each row of a, or one, of any float dtype. With block_scaled float32 [M, blocks of K], any
            strides.
        b_scales: likewise for the rows of b, in `column_order` if there are several. With block_scaled float32 [blocks
            of K, blocks of N], any strides.
        azp_adj: int32, for each row of b; azp: int32, for each row of a.
        bias: [N] in `column_order`, or [M, N] with one row stride; with experts [num_experts, N] in `column_order`.
        activation: one of `ACTIVATIONS`; with "silu_and_mul", out has half as many columns as b has rows.
        block_scaled: a_scales and b_scales are block scales; the main loop applies them.
        scale_exponent: the stored scale that is applied first (b_scales if given) is multiplied by two to this power.
        column_order: the position of a column's entry in b_scales and bias.
        of_experts: rows of out belong to experts, and each expert has its own bias.
    """

    out: TensorArg
    a_scales: TensorArg | None = None
    b_scales: TensorArg | None = None
    azp_adj: TensorArg | None = None
    azp: TensorArg | None = None
    bias: TensorArg | None = None
    activation: str = "none"
    block_scaled: bool = False
    scale_exponent: int = 0
    column_order: ColumnOrder = "natural"
    of_experts: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the epilogue adds at most a per-column bias to accumulators, activates and converts them."""
        tensors = (self.a_scales, self.b_scales, self.azp_adj)
        return tensors == (None, None, None) and self._bias in (0, 1) and self.column_order == "natural"

    @property
    def is_gated(self) -> bool:
        return self.activation == "silu_and_mul"

    @property
    def has_tiles(self) -> bool:
        """Whether the epilogue exists in CUDA Tile C++ (gemm_sm100.cu)."""
        return self.column_order == "natural" and self.activation != "gelu"

    @property
    def has_matrix_bias(self) -> bool:
        return self._bias == 2

    @property
    def _bias(self) -> int:
        """0: none, 1: one per column, 2: one per element."""
        if self.bias is None:
            return 0
        # A matrix of one row selects other kernels than one of several: batch invariance goes by the dimensions.
        is_row = check.num_rows(self.bias) == 1 and not (tuning.batch_invariant() and len(self.bias.shape) > 1)
        return 1 if self.of_experts or is_row else 2

    def constants(self) -> dict[str, Any]:
        """Constants of every kernel that includes gemm_epilogue.cuh."""
        return {
            "out_t": self.out.dtype,
            "a_scale_t": float32 if self.a_scales is None else self.a_scales.dtype,
            "b_scale_t": float32 if self.b_scales is None else self.b_scales.dtype,
            "A_SCALES": self.a_scales is not None and not self.block_scaled,
            "B_SCALES": self.b_scales is not None and not self.block_scaled,
            "SCALE_EXPONENT": self.scale_exponent,
            "COLUMN_ORDER": f"column_{self.column_order}",
            "AZP": 0 if self.azp_adj is None else 1 if self.azp is None else 2,
            "BIAS": self._bias,
            "ACTIVATION": f"gemm_{self.activation.partition('_')[0]}",
            "GATED": self.is_gated,
        }

    def arguments(self) -> dict[str, int]:
        """Strides and steps, in elements."""
        out_stride = check.row_stride(self.out)
        bias_stride = check.row_stride(self.bias) if self.bias is not None and self._bias == 2 else 0
        steps = {"a_scale_step": 0, "b_scale_step": 0, "a_scale_block_step": 0, "b_scale_block_step": 0}
        if self.block_scaled:
            assert self.a_scales is not None
            assert self.b_scales is not None
            steps["a_scale_step"], steps["a_scale_block_step"] = self.a_scales.strides
            steps["b_scale_block_step"], steps["b_scale_step"] = self.b_scales.strides
        else:
            steps["a_scale_step"] = int(self.a_scales is not None and self.a_scales.numel > 1)
            steps["b_scale_step"] = int(self.b_scales is not None and self.b_scales.numel > 1)
        return {"out_stride": out_stride, "bias_stride": bias_stride, **steps}


@dataclass(frozen=True, slots=True, eq=False)
class GemmProblem:
    """``out = epilogue(a @ b.T)``.

    Attributes:
        a: [M, K]; b: [N, K], of the same dtype. With a gated activation b has 2 N rows: first the gates, then the ups.
        k: elements of K.
        constant_weight: the kernel before this one does not write b.
        norm_weight: [K], the weight of an RMS norm of the rows of a, which gemv.cu alone computes; or None.
    """

    a: Operand
    b: Operand
    k: int
    epilogue: Epilogue
    constant_weight: bool = False
    norm_weight: TensorArg | None = None

    @property
    def op(self) -> str:
        return self.epilogue.out.op

    @property
    def device(self) -> Device:
        return self.epilogue.out.device

    @property
    def m(self) -> int:
        return self.a.rows

    @property
    def rounded_m(self) -> int:
        """M as kernels are chosen by."""
        return tuning.rounded_rows(self.m)

    @property
    def n(self) -> int:
        """Columns of out."""
        return self.b.rows // 2 if self.epilogue.is_gated else self.b.rows

    @property
    def dtype(self) -> DType:
        return self.a.dtype

    @property
    def rows_are_dense(self) -> bool:
        """Whether the elements of a row are contiguous, in a and in b."""
        return self.a.step == self.b.step == 1

    @property
    def vec_size(self) -> int:
        """Elements of one access to a and b, and to the weight of a norm."""
        of_norm = () if self.norm_weight is None else (self.norm_weight.alignment // self.dtype.itemsize,)
        return min(self.a.vec_size(self.k), self.b.vec_size(self.k), *of_norm)

    @property
    def out_access(self) -> int:
        """Elements of one access to out: 8, 2 or 1."""
        width = check.vector_width(self.n, self.epilogue.out)
        return width if width in (1, 8) else 2

    @property
    def out_is_aligned(self) -> bool:
        """Whether rows of out begin at multiples of 16 bytes."""
        out = self.epilogue.out
        return out.alignment >= 16 and (
            tuning.pinned(self.m) == 1 or check.row_stride(out) * out.dtype.itemsize % 16 == 0
        )

    def bucket(self) -> str:
        epilogue, out = self.epilogue, self.epilogue.out
        words = [
            f"rows={self.rounded_m}",
            f"weight={self.b.rows}x{self.k}",
            f"{self.dtype.name}-{out.dtype.name}",
            f"vec_size={self.vec_size}",
            *([] if self.out_is_aligned else ["unaligned out"]),
            *(["blocks"] if epilogue.block_scaled else []),
            *([epilogue.activation] if epilogue.activation != "none" else []),
            *(["normalised"] if self.norm_weight is not None else []),
        ]
        return " ".join(words)

    def kernel(self, kernel: Kernel) -> Kernel:
        """`kernel` with its parameters fed by the op's tensors: a, b, out and the epilogue operands, by their names."""
        return kernel.renamed(**{name: one.name for name, one in self._tensors().items() if isinstance(one, TensorArg)})

    def pointers(self) -> dict[str, Any]:
        """Pointers of the kernel that no tensor of the op feeds: workspaces, and null for absent tensors."""
        return {
            name: 0 if one is None else one for name, one in self._tensors().items() if not isinstance(one, TensorArg)
        }

    def arguments(self) -> dict[str, Any]:
        """The arguments of every kernel, except the op's tensors."""
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        strides = {"a_stride": self.a.stride, "b_stride": self.b.stride, "a_step": self.a.step, "b_step": self.b.step}
        return {**sizes, **strides, **self.epilogue.arguments(), **self.pointers()}

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of every kernel."""
        blocks = SCALE_BLOCK if self.epilogue.block_scaled else 0
        return {"scalar_t": self.dtype, **self.epilogue.constants(), "SCALE_BLOCK": blocks}

    def _tensors(self) -> dict[str, TensorArg | Scratch | None]:
        """Pointers of every kernel by parameter."""
        e = self.epilogue
        return {
            "out": e.out,
            "a": self.a.source,
            "b": self.b.source,
            "a_scales": e.a_scales,
            "b_scales": e.b_scales,
            "azp_adj": e.azp_adj,
            "azp": e.azp,
            "bias": e.bias,
        }


def column_bias(bias: TensorArg | None, dtype: DType, columns: int) -> TensorArg | None:
    """A bias with one element per column, given in any shape, as [columns]."""
    check.elements(bias, dtype, columns)
    return None if bias is None else replace(bias, shape=(columns,), strides=(1,))


def activated(x: Tensor, activation: str) -> Tensor:
    """One of `ACTIVATIONS` of the rows of `x`, as references compute it."""
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    if activation == "silu_and_mul":
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return x
