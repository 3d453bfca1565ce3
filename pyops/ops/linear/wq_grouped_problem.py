"""A grouped GEMM with K-major quantized weights, and what the choice of its kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType, float32
from ..._core.tensors.tensor import TensorArg
from .._shared.scalar_type import ScalarType
from .block_scaled_problem import are_aligned
from .gemm_problem import Operand
from .grouped_problem import ExpertLists, GroupedProblem
from .grouped_shape import GroupedShape
from .quantized_experts import QuantizedExperts

_MAX_SCALES = 2**32  # scales of an expert: kernels have 32-bit offsets, also to the rows of a last tile
_TILE_ROWS, _TILE_SCALES = 127, 3  # rows, and scales of a row, by which a tile may reach past the last one


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Rows in the format of the weights, [num_rows, K].

    Attributes:
        quants: the values; scales: in tiles, [num_scale_rows, columns].
        scale_rows: the row of scales of each row.
        dequantize: the launch that writes the rows of the product.
    """

    quants: TensorArg
    scales: TensorArg
    scale_rows: Scratch
    dequantize: Launch


@dataclass(frozen=True, slots=True, eq=False)
class WqGroupedProblem:
    """A grouped GEMM with quantized weights.

    Attributes:
        product: the same GEMM with dequantized weights in a workspace.
        weight: the quantized weights.
        dequantize: the launch that writes the workspace.
        rows: the rows of a, if they are quantized like the weights; those of the product are in a workspace.
    """

    product: GroupedProblem
    weight: QuantizedExperts
    dequantize: Launch
    rows: QuantizedRows | None = None

    @classmethod
    def of(
        cls,
        out: TensorArg,
        a: TensorArg,
        weight: QuantizedExperts,
        lists: ExpertLists,
        topk_weights: TensorArg | None = None,
        b_scales: TensorArg | None = None,
        bias: TensorArg | None = None,
        top_k: int = 1,
        activation: str = "none",
    ) -> WqGroupedProblem:
        """A GEMM of 16-bit rows with weights that wna16_to_dense.cu dequantizes."""
        dense = Scratch(max(1, weight.num_experts * weight.rows * weight.k) * a.dtype.itemsize)
        operands = Operand.of_rows(a), Operand.of_scratch(dense, a.dtype, weight.num_experts * weight.rows, weight.k)
        terms = topk_weights, None, b_scales, bias
        product = GroupedProblem(out, *operands, weight.num_experts, weight.k, lists, *terms, top_k, activation)
        return cls(product, weight, weight.written(dense, a.dtype))

    @property
    def device(self) -> Device:
        return self.product.device

    def bucket(self) -> str:
        return f"{self.product.bucket()} {self.weight.type} of {self.weight.group_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WqGroupedShape(GroupedShape):
    """The shape of the GEMM with dequantized weights, and the format of the quantized weights.

    Attributes:
        type: type of a quant.
        group_size: elements of K under one scale.
        scale_dtype: of the scales of groups; None if the epilogue applies a scale to each row of the weight.
        has_zeros: whether groups have zero points.
        is_tiled: whether scales are in tiles.
        is_contiguous: whether quants are.
        is_aligned: whether quants begin at multiples of 16 bytes, and scales in tiles at multiples of 2.
        scales_rows: whether rows of a are quantized, at multiples of 16 bytes, with all scales at multiples of 4.
    """

    type: ScalarType
    group_size: int
    scale_dtype: DType | None
    has_zeros: bool = False
    is_tiled: bool = False
    is_contiguous: bool = True
    is_aligned: bool = True
    scales_rows: bool = False

    @classmethod
    def of_problem(cls, problem: WqGroupedProblem) -> WqGroupedShape:
        w, dense = problem.weight, GroupedShape.of(problem.product)
        pairs = not (w.tiled and isinstance(w.scales, TensorArg)) or w.scales.alignment >= 2
        rows, row_bytes = problem.rows, w.quants.shape[-1] * w.quants.dtype.itemsize
        return cls(
            **{one.name: getattr(dense, one.name) for one in fields(GroupedShape)},
            type=w.type,
            group_size=w.group_size,
            scale_dtype=None if w.scales is None else w.scale_dtype,
            has_zeros=w.zeros is not None,
            is_tiled=w.tiled,
            is_contiguous=check.row_stride(w.quants) == w.quants.shape[-1],
            is_aligned=w.quants.alignment == 16 and pairs,
            scales_rows=rows is not None
            and isinstance(w.scales, TensorArg)
            and are_aligned(row_bytes, (rows.quants, w.quants), (rows.scales, w.scales)),
        )

    @property
    def bits(self) -> int:
        """Bits of a quant."""
        return self.type.size_bits

    @property
    def row_bytes(self) -> int:
        """Bytes of the quants of a row of the weight."""
        return self.k * self.bits // 8

    @property
    def scales_are_indexed(self) -> bool:
        """Whether 32 bits index every scale of an expert."""
        return (self.n + _TILE_ROWS) * (self.k // max(1, self.group_size) + _TILE_SCALES) < _MAX_SCALES

    @property
    def expert_bytes(self) -> float:
        """Bytes of quants, scales and zero points of an expert."""
        scale = (self.scale_dtype or float32).itemsize + (self.bits / 8 if self.has_zeros else 0)
        return self.n * (self.row_bytes + scale * self.k / max(1, self.group_size))

    @property
    def nbytes(self) -> float:
        """Bytes of a, of the quantized weights of experts that have rows, and of out."""
        rows = self.rows / self.top_k * self.k * self.dtype.itemsize
        return rows + self.chosen_experts * self.expert_bytes + self.rows * self.columns * self.out_dtype.itemsize
