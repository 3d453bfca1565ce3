"""GEMMs with 2:4 sparse weights of 4 and 8 bits in Marlin's 2:4 layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float16, int16, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.packed_layouts import ColumnOrder
from .._shared.scalar_type import SCALAR_TYPES, ScalarType, uint4b8, uint8b128
from .gemm_problem import Epilogue, Operand
from .packed_plan import plan
from .packed_problem import PackedProblem, PackedWeight
from .packed_reference import multiply, rounding_of_weights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gptq_marlin_24_gemm"]

_TYPES = (uint4b8, uint8b128)


@op(
    returns="out",
    ulps=2,
    atol=lambda a, b_q_weight, b_meta, b_scales, b_q_type, size_n, size_k: rounding_of_weights(
        a, _weight(b_q_weight, b_meta, b_scales, b_q_type, size_n, size_k), a.dtype
    ),
)
def gptq_marlin_24_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_meta: Tensor,
    b_scales: Tensor,
    workspace: Tensor | None,
    b_q_type: int,
    size_m: int,
    size_n: int,
    size_k: int,
    *,
    out: Tensor,
) -> None:
    """A GEMM with a 2:4 sparse weight, two of four rows stored: ``out = a @ (quant * scale)``.

    Weights may be rounded to the dtype of a, unless a column has one scale; then the epilogue applies it. Accumulation
    is in float32; the result is rounded once. `_shared/packed_layouts.py` has the layout of the stored rows
    (marlin_24). If b_meta has the same position for both rows of a group of four, the second row counts.

    Args:
        a: [M, K] float16 or bfloat16; constant row stride.
        b_q_weight: [K / 32, N * bits / 2] int32, contiguous; K a multiple of 32, N of 64.
        b_meta: [K / 32, 2 N] int16, contiguous: four bits for a group of four rows, the positions of its two stored
            rows.
        b_scales: [num_groups, N] of the dtype of a, contiguous; num_groups divides K. With several groups, columns are
            permuted.
        workspace: for compatibility with vLLM; no effect.
        b_q_type: uint4b8 or uint8b128, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`).
        size_m, size_n, size_k: M, N, K.
        out: [M, N] of the dtype of a, returned; elements of a row are contiguous; new unless given.
    """
    weight = _weight(b_q_weight, b_meta, b_scales, b_q_type, size_n, size_k)
    multiply(out, a, weight, b_scales=b_scales if weight.scales is None else None)


def _weight(b_q_weight: Any, b_meta: Any, b_scales: Any, b_q_type: int, n: int, k: int) -> PackedWeight:
    groups = b_scales.shape[0]
    order: ColumnOrder = "marlin_24" if groups > 1 else "natural"
    return PackedWeight(
        b_q_weight,
        "marlin_24",
        ScalarType.of(b_q_type),
        k,
        n,
        groups,
        k // max(1, groups),
        b_scales if groups > 1 else None,
        order,
        places=b_meta,
    )


@gptq_marlin_24_gemm.result
def result_gptq_marlin_24_gemm(a: TensorArg, size_m: int, size_n: int) -> Result:
    for name, size in (("size_m", size_m), ("size_n", size_n)):
        if size < 0:
            raise check.refuse(a, name, f"expected 0 or more, got {size}")
    return Result((size_m, size_n), a.dtype)


@gptq_marlin_24_gemm.plan
def plan_gptq_marlin_24_gemm(
    a: TensorArg,
    b_q_weight: TensorArg,
    b_meta: TensorArg,
    b_scales: TensorArg,
    b_q_type: int,
    size_m: int,
    size_n: int,
    size_k: int,
    out: TensorArg,
) -> list[Launch]:
    check.dtype(a, float16, bfloat16)
    result_gptq_marlin_24_gemm(a, size_m, size_n)
    kind = next((one for one in _TYPES if one.id == b_q_type), None)
    if kind is None:
        names = " or ".join(f"{one} ({one.id})" for one in _TYPES)
        raise check.refuse(a, "b_q_type", f"expected {names}, got {b_q_type}")
    for name, size, multiple in (("size_k", size_k, 32), ("size_n", size_n, 64)):
        if size < 0 or size % multiple:
            raise check.refuse(a, name, f"expected a multiple of {multiple}, got {size}")
    check.sizes(a, size_m=size_m, size_k=size_k)
    check.shape(b_q_weight, int32, row_tiles=size_k // 32, words=size_n * kind.size_bits // 2)
    check.shape(b_meta, int16, row_tiles=size_k // 32, places=2 * size_n)
    check.dtype(b_scales, a.dtype)
    check.sizes(b_scales, num_groups=None, N=size_n)
    check.contiguous(b_scales)
    groups = b_scales.shape[0]
    if groups == 0 or size_k % groups:
        raise b_scales.error(f"expected groups that divide K, {size_k}, got {groups}")
    check.dtype(out, a.dtype)
    check.sizes(out, M=size_m, N=size_n)
    check.row_size(out)
    weight = _weight(b_q_weight, b_meta, b_scales, b_q_type, size_n, size_k)
    epilogue = Epilogue(out, b_scales=b_scales if weight.scales is None else None)
    return plan(PackedProblem(Operand.of_rows(a), weight, epilogue))


@gptq_marlin_24_gemm.example
def example_gptq_marlin_24_gemm(
    make: Any,
    *,
    num_tokens: int = 16,
    codes: Literal["uint4b8", "uint8b128"] = "uint4b8",
    num_groups: Literal[2, 1] = 2,
    dtype: Literal["float16", "bfloat16"] = "float16",
) -> tuple[Any, ...]:
    k, n, kind = 160, 64, SCALAR_TYPES[codes]
    return (
        make.randn(num_tokens, k, dtype=dtype),
        make.randint(-(2**31), 2**31, k // 32, n * kind.size_bits // 2, dtype="int32"),
        make.randint(-(2**15), 2**15, k // 32, 2 * n, dtype="int16"),
        make.randn(num_groups, n, dtype=dtype, scale=2.0**-6),
        None,
        kind.id,
        num_tokens,
        n,
        k,
        make.empty(num_tokens, n, dtype=dtype),
    )
