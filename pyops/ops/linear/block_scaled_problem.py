"""A GEMM of block-scaled matrices, and what the choice of its kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..._core.launch.kernel import Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16
from ..._core.tensors.tensor import TensorArg
from .block_scaled import BlockFormat, dense_bytes
from .gemm_problem import Epilogue, GemmProblem, Operand
from .gemm_shape import GemmShape


@dataclass(frozen=True, slots=True, eq=False)
class BlockScaledProblem:
    """``out = epilogue(A @ B.T)``, where A and B are values times their scales.

    Attributes:
        format: of both operands.
        a: values [M, K]; b: values [N, K]; rows of one stride.
        a_scales, b_scales: their scales, in tiles.
        product: the same GEMM with dequantized operands in workspaces.
    """

    format: BlockFormat
    a: TensorArg
    b: TensorArg
    a_scales: TensorArg
    b_scales: TensorArg
    product: GemmProblem

    @classmethod
    def of(
        cls,
        format: BlockFormat,
        a: TensorArg,
        b: TensorArg,
        a_scales: TensorArg,
        b_scales: TensorArg,
        k: int,
        epilogue: Epilogue,
    ) -> BlockScaledProblem:
        dense_a, dense_b = (
            Operand.of_scratch(Scratch(dense_bytes(one.shape[0], k)), bfloat16, one.shape[0], k) for one in (a, b)
        )
        return cls(format, a, b, a_scales, b_scales, GemmProblem(dense_a, dense_b, k, epilogue))

    @property
    def op(self) -> str:
        return self.product.op

    @property
    def device(self) -> Device:
        return self.product.device

    def bucket(self) -> str:
        return f"{self.product.bucket()} {self.format.scalar_type} of {self.format.scale_size}"

    def dequantize(self) -> list[Launch]:
        """The launches that write the workspaces of the product."""
        product, found = self.product, []
        for dense, values, scales in (product.a, self.a, self.a_scales), (product.b, self.b, self.b_scales):
            assert isinstance(dense.source, Scratch)
            found.append(self.format.expand(dense.source, values, scales, dense.rows))
        return found


@dataclass(frozen=True, slots=True)
class BlockScaledShape:
    """Equal for all problems that one Config serves.

    Attributes:
        dense: the shape of the GEMM with dequantized operands.
        bits: of a value. block: values under one scale.
        is_aligned: whether rows of a and b begin at multiples of 16 bytes, and scales at multiples of 4.
    """

    dense: GemmShape
    bits: int
    block: int
    is_aligned: bool = True

    @classmethod
    def of(cls, problem: BlockScaledProblem) -> BlockScaledShape:
        form, k = problem.format, problem.product.k
        return cls(
            GemmShape.of(problem.product),
            form.code_bits,
            form.scale_size,
            are_aligned(k * form.code_bits // 8, (problem.a, problem.b), (problem.a_scales, problem.b_scales)),
        )

    def of_rows(self, rows: int) -> BlockScaledShape:
        return replace(self, dense=self.dense.of_rows(rows))

    @property
    def is_empty(self) -> bool:
        return self.dense.is_empty

    @property
    def quantized_bytes(self) -> float:
        """Bytes of the values and the scales of both operands."""
        return (self.dense.m + self.dense.n) * self.dense.k * (self.bits / 8 + 1 / self.block)

    @property
    def out_bytes(self) -> int:
        return self.dense.m * self.dense.n * self.dense.out_dtype.itemsize


def are_aligned(row_bytes: int, values: tuple[TensorArg, ...], scales: tuple[TensorArg, ...]) -> bool:
    """Whether rows of values begin at multiples of 16 bytes, and scales at multiples of 4."""
    whole = all(Operand.of_rows(one).vec_size(row_bytes) == 16 for one in values)
    return whole and all(one.alignment >= 4 for one in scales)
