"""GEMMs with weights in Marlin's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from .._shared.fp8_accumulation import absolute_error
from .._shared.scalar_type import SCALAR_TYPES
from .gemm_problem import Epilogue, Operand, column_bias
from .marlin_weight import (
    check_order,
    check_out,
    check_scales,
    check_sizes,
    check_types,
    check_zeros,
    marlin_weight,
    out_dtype,
)
from .packed_plan import plan
from .packed_problem import PackedProblem
from .packed_reference import multiply, rounding_of_weights, values

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gptq_marlin_gemm", "marlin_gemm"]


def _absolute_error(
    a: Tensor,
    b_q_weight: Tensor,
    b_scales: Tensor,
    global_scale: Tensor | None,
    b_zeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    b_type_id: int,
    size_n: int,
    size_k: int,
    is_k_full: bool,
    is_zp_float: bool,
    c: Tensor,
) -> float:
    """The error of rounding weights; for fp8 with one scale per column also that of the tensor cores' accumulation."""
    weight, _ = marlin_weight(
        a, b_q_weight, b_scales, global_scale, b_zeros, g_idx, perm, b_type_id, size_n, size_k, is_k_full, is_zp_float
    )
    error = rounding_of_weights(a, weight, c.dtype)
    if a.element_size() > 1 or b_scales.shape[0] > 1:
        return error
    return error + absolute_error(a, values(weight))


@op(returns="c", ulps=2, atol=_absolute_error)
def marlin_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_bias: Tensor | None,
    b_scales: Tensor,
    a_scales: Tensor | None,
    global_scale: Tensor | None,
    b_zeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    workspace: Tensor | None,
    b_type_id: int,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool = True,
    use_atomic_add: bool = False,
    use_fp32_reduce: bool = False,
    is_zp_float: bool = False,
    *,
    c: Tensor,
) -> None:
    """A GEMM with a weight in Marlin's layout: ``c = a_scales * global_scale * (a @ w) + b_bias``.

    ``w = (quant - zero) * scale``. Accumulation is in float32, and exact for integers with one scale per column, which
    the epilogue applies; else w may be rounded to 16 bits, the dtype of c. The result is rounded once. The layout of
    quants is that of `gptq_marlin_repack` and `awq_marlin_repack` (Frantar et al. 2024, arXiv:2408.11743), for
    activations of 16 or 8 bits; columns of scales, zero points and bias are permuted (`_shared/packed_layouts.py`):

    ============ ============== =========================================== ======================================
    activations  quants         scales [num_groups, N]                      zero points
    ============ ============== =========================================== ======================================
    16 bits      uint4b8,       dtype of a                                  none
                 uint8b128
    16 bits      uint4, uint8   dtype of a                                  [num_groups, N bits / 32] int32, or
                                                                            floats as scales with is_zp_float
    16 bits      e4m3           dtype of a, times 2^8 (float16), 2^120;     none
                                or e8m0
    16 bits      e2m1           e4m3: the upper bits of float16 of 2^7      none
                                scale, under a global_scale of the dtype of
                                a or float32, times 2^7 (float16), 2^119
                                (bfloat16); or e8m0
    int8         uint4b8,       float16 or bfloat16; of several groups      none; [num_groups, N / 8] int32
                 uint8b128,     integers in their bits
                 uint4
    e4m3         uint4b8, uint4 float16 or bfloat16, times 2^9; quants are  none; [num_groups, N / 8] int32
                                those of `marlin_int4_fp8_preprocess`
    e4m3         e2m1           e8m0, times 2^6                             none
    ============ ============== =========================================== ======================================

    An e4m3 weight that is NaN, which no checkpoint has, counts as 480 with its sign.

    Args:
        a: [M, K] float16, bfloat16, int8 or float8_e4m3fn; constant row stride.
        b_q_weight: [K / 16, N * bits / 2] int32, contiguous; K a multiple of 16, or of 32 with 8-bit activations; N a
            multiple of 64.
        b_bias: of the dtype of c, contiguous, N elements, permuted; or None.
        b_scales: see above, contiguous; num_groups divides K.
        a_scales: float32, contiguous, M or 1 elements, with 8-bit activations; else None.
        global_scale: one element, where scales are e4m3; else None.
        b_zeros: see above, contiguous; empty or None without zero points.
        g_idx, perm: [K] int32, contiguous; both empty or None, or both given: row k of the weight multiplies column
            ``perm[k]`` of a, and its group is ``g_idx[k]`` unless is_k_full. An index out of range counts as zeros.
        workspace, use_atomic_add, use_fp32_reduce: for compatibility with vLLM; no effect.
        b_type_id: the type of the quants, a number of vLLM's scalar types: `pyops.SCALAR_TYPES` has them by name.
        size_m, size_n, size_k: M, N, K.
        is_k_full: groups are consecutive; otherwise the weight is a shard, and g_idx has the groups of its rows.
        is_zp_float: zero points are floats.
        c: [M, N], returned; elements of a row are contiguous; new unless given. Its dtype is that of a; with 8-bit
            activations that of b_scales; with e8m0 scales either 16-bit float, by default bfloat16.
    """
    weight, scales = marlin_weight(
        a, b_q_weight, b_scales, global_scale, b_zeros, g_idx, perm, b_type_id, size_n, size_k, is_k_full, is_zp_float
    )
    scales.update({} if a_scales is None else {"a_scales": a_scales})
    multiply(c, a, weight, bias=b_bias, column_order="marlin_32", **scales)


@marlin_gemm.result
def result_marlin_gemm(a: TensorArg, b_scales: TensorArg, size_m: int, size_n: int) -> Result:
    for name, size in (("size_m", size_m), ("size_n", size_n)):
        if size < 0:
            raise check.refuse(a, name, f"expected 0 or more, got {size}")
    return Result((size_m, size_n), out_dtype(a, b_scales))


@marlin_gemm.plan
def plan_marlin_gemm(
    a: TensorArg,
    b_q_weight: TensorArg,
    b_bias: TensorArg | None,
    b_scales: TensorArg,
    a_scales: TensorArg | None,
    global_scale: TensorArg | None,
    b_zeros: TensorArg | None,
    g_idx: TensorArg | None,
    perm: TensorArg | None,
    b_type_id: int,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool,
    is_zp_float: bool,
    c: TensorArg,
) -> list[Launch]:
    kind = check_types(a, b_type_id)
    result_marlin_gemm(a, b_scales, size_m, size_n)
    check_sizes(a, size_m, size_n, size_k)
    check.shape(b_q_weight, int32, row_tiles=size_k // 16, words=size_n * kind.size_bits // 2)
    check_scales(a, b_scales, a_scales, global_scale, kind, size_n, size_k)
    check_zeros(a, b_scales, b_zeros, kind, size_n, is_zp_float)
    check_order(g_idx, perm, size_k)
    check_out(c, a, b_scales, size_m, size_n)
    b_bias = column_bias(b_bias, c.dtype, size_n)
    weight, scales = marlin_weight(
        a, b_q_weight, b_scales, global_scale, b_zeros, g_idx, perm, b_type_id, size_n, size_k, is_k_full, is_zp_float
    )
    scales.update({} if a_scales is None else {"a_scales": a_scales})
    epilogue = Epilogue(c, bias=b_bias, column_order="marlin_32", **scales)
    return plan(PackedProblem(Operand.of_rows(a), weight, epilogue))


@marlin_gemm.bad_indices
def bad_indices_marlin_gemm(
    b_scales: Tensor, g_idx: Tensor | None, perm: Tensor | None, size_k: int, is_k_full: bool
) -> dict[str, Tensor]:
    found = {} if perm is None else {"perm": (perm < 0) | (perm >= size_k)}
    if g_idx is not None and not is_k_full:
        found["g_idx"] = (g_idx < 0) | (g_idx >= b_scales.shape[0])
    return found


@marlin_gemm.example
def example_marlin_gemm(
    make: Any,
    *,
    num_tokens: int = 16,
    codes: Literal["uint4b8", "uint8b128", "uint4", "float8_e4m3fn", "float4_e2m1f"] = "uint4b8",
    quant_dtype: Literal["float16", "bfloat16", "int8", "float8_e4m3fn"] = "bfloat16",
    num_groups: Literal[4, 1] = 4,
    permuted: bool = False,
    with_bias: bool = False,
) -> tuple[Any, ...]:
    """Only 4-bit integer weights have 8-bit activations; only 16-bit activations are permuted."""
    k, n, is_a_8bit = 128, 64, quant_dtype in ("int8", "float8_e4m3fn")
    if is_a_8bit and codes != "uint4":
        codes = "uint4b8"
    kind, dtype = SCALAR_TYPES[codes], "float16" if is_a_8bit else quant_dtype
    groups = k // 16 if codes == "float4_e2m1f" else num_groups
    permuted = permuted and codes == "uint4b8" and not is_a_8bit
    a = (
        make.randint(-128, 128, num_tokens, k, dtype="int8")
        if quant_dtype == "int8"
        else make.randn(num_tokens, k, dtype=quant_dtype)
    )
    moved = {"float16": 8, "bfloat16": 120}[dtype] if codes == "float8_e4m3fn" else 0  # added to the scales' exponents
    scales = make.randn(groups, n, dtype=dtype, scale=2.0 ** (moved - 8))
    if codes == "float4_e2m1f":
        scales = make.full(groups, n, value=1.5, dtype="float8_e4m3fn")
    elif quant_dtype == "int8" and groups > 1:  # integers in the bits of a float
        scales = make.full(groups, n, value=37 * 2.0**-24, dtype=dtype)
    words = make.randint(-(2**31), 2**31, k // 16, n * kind.size_bits // 2, dtype="int32")
    zeros = make.randint(-(2**31), 2**31, groups, n // 8, dtype="int32") if codes == "uint4" else None
    return (
        a,
        words,
        make.randn(n, dtype=dtype) if with_bias else None,
        scales,
        make.full(num_tokens, 1, value=2.0**-4, dtype="float32") if is_a_8bit else None,
        make.full(1, value=1.0, dtype=dtype) if codes == "float4_e2m1f" else None,
        zeros,
        make.randint(0, groups, k, dtype="int32") if permuted else None,
        make.permutation(k, k, dtype="int32") if permuted else None,
        None,
        kind.id,
        num_tokens,
        n,
        k,
        not permuted,
        *(False, True, False),
        make.empty(num_tokens, n, dtype=dtype),
    )


gptq_marlin_gemm = marlin_gemm  # vLLM's name until 0.13
