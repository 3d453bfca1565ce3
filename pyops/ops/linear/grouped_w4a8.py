"""vLLM's grouped GEMM of e4m3 rows with signed 4-bit weights that have e4m3 scales."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.fp8_accumulation import absolute_error
from .gemm_problem import Epilogue, Operand
from .grouped_blocks import block_size_for
from .grouped_rows import (
    bad_rows,
    check_rows,
    check_scale_counts,
    check_strides,
    each_expert,
    example_counts,
    example_sizes,
    lists_of,
)
from .packed_grouped_engines import PackedGroupedShape, plan
from .packed_problem import PackedExperts, PackedProblem, PackedWeight
from .packed_reference import values
from .w4a8_mm import PRODUCTS, check_tiles, weight_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["cutlass_w4a8_moe_mm"]

_FEWEST_SLOTS = 16  # slots of a block of the lists by which the block size is chosen


def _of_experts(b_tensors: Tensor, b_group_scales: Tensor, group_size: int) -> list[PackedWeight]:
    return [
        weight_of(codes, codes.shape[0], codes.shape[1] * 8, products, group_size)
        for codes, products in zip(b_tensors, b_group_scales.view(len(b_tensors), -1), strict=True)
    ]


def _absolute_error(a_tensors: Tensor, b_tensors: Tensor, b_group_scales: Tensor, b_group_size: int) -> float:
    weights = _of_experts(b_tensors, b_group_scales, b_group_size)
    return max((absolute_error(a_tensors, values(one)) for one in weights), default=0.0)


@op(partial="out_tensors", atol=_absolute_error)
def cutlass_w4a8_moe_mm(
    out_tensors: Tensor,
    a_tensors: Tensor,
    b_tensors: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    b_group_scales: Tensor,
    b_group_size: int,
    expert_offsets: Tensor,
    problem_sizes: Tensor,
    a_strides: Tensor | None,
    b_strides: Tensor | None,
    c_strides: Tensor | None,
    group_scale_strides: Tensor | None,
    maybe_schedule: str | None = None,
) -> None:
    """`cutlass_w4a8_mm` of rows and the weights of their experts: a grouped GEMM.

    ``out[t] = a_scales[t] * (b_scales[e] * (a[t] @ e4m3(quant * scale)))``, e the expert of row t. The weights are
    dequantized in the main loop on compute capability 9.0, if K is a multiple of 128, N of 32 and experts have at most
    hundreds of rows. Rows are those of `cutlass_moe_mm`; experts must not share rows. Modelled
    on vLLM's op of this name.

    Args:
        out_tensors: [num_rows, N] bfloat16 or float16, written; constant row stride.
        a_tensors: [num_rows, K] float8_e4m3fn; constant row stride.
        b_tensors: [num_experts, N, K / 8] int32, contiguous, as `cutlass_encode_and_reorder_int4b_experts` returns it.
        a_scales: [num_rows, 1] float32, contiguous; b_scales: [num_experts, N, 1], likewise.
        b_group_scales: [num_experts, K / b_group_size, N, 8] float8_e4m3fn, in any shape, contiguous, as
            `cutlass_pack_scale_fp8` returns them.
        b_group_size: elements of K under one scale; divides K.
        expert_offsets: [num_experts] int64 or int32, contiguous: the first row of each expert.
        problem_sizes: [num_experts, 3] int32, contiguous: (N, rows, K), or (rows, N, K).
        a_strides, c_strides: [num_experts] int64; b_strides, group_scale_strides: [num_experts, ...]; or None. They are
            not read: the tensors have their own strides.
        maybe_schedule: for compatibility with vLLM; no effect.
    """
    weights = _of_experts(b_tensors, b_group_scales, b_group_size)
    for e, rows in each_expert(out_tensors, problem_sizes, expert_offsets):
        sums = (a_tensors[rows].double() @ values(weights[e])).float()
        scaled = a_scales.reshape(-1, 1)[rows] * (b_scales.reshape(len(b_tensors), -1)[e] * sums)
        out_tensors[rows] = scaled.to(out_tensors.dtype)


@cutlass_w4a8_moe_mm.result
def result_cutlass_w4a8_moe_mm(
    a_tensors: TensorArg, b_tensors: TensorArg, *, out_dtype: torch.dtype | None = None
) -> Result:
    """Rows of `a_tensors`.

    Args:
        out_dtype: of the output; None for bfloat16.
    """
    check.sizes(a_tensors, num_rows=None, K=None)
    check.sizes(b_tensors, num_experts=None, N=None, words=None)
    dtype = check.chosen(a_tensors, "out_dtype", out_dtype, bfloat16)
    return Result((a_tensors.shape[0], b_tensors.shape[1]), dtype)


@cutlass_w4a8_moe_mm.plan
def plan_cutlass_w4a8_moe_mm(
    out_tensors: TensorArg,
    a_tensors: TensorArg,
    b_tensors: TensorArg,
    a_scales: TensorArg,
    b_scales: TensorArg,
    b_group_scales: TensorArg,
    b_group_size: int,
    expert_offsets: TensorArg,
    problem_sizes: TensorArg,
    a_strides: TensorArg | None,
    b_strides: TensorArg | None,
    c_strides: TensorArg | None,
    group_scale_strides: TensorArg | None,
) -> list[Launch]:
    check.dtype(a_tensors, float8_e4m3fn)
    check.dtype(b_tensors, int32)
    check.sizes(b_tensors, num_experts=None, N=None, words=None)
    check.contiguous(b_tensors)
    num_experts, n, words = b_tensors.shape
    k = words * 8
    check_tiles(b_tensors, k, n)
    same = replace(b_tensors, dtype=a_tensors.dtype)  # passes the dtype check of `check_rows`
    rows_of_experts = check_rows(out_tensors, a_tensors, same), problem_sizes, expert_offsets
    lists, *_ = lists_of(*rows_of_experts, block_size=_FEWEST_SLOTS)
    num_rows = out_tensors.shape[0]
    check.sizes(problem_sizes, num_experts=num_experts, sizes=3)
    check.sizes(a_tensors, num_rows=num_rows, K=k)
    check.sizes(out_tensors, num_rows=num_rows, N=n)
    check_strides(num_experts, a_strides, c_strides)
    check_scale_counts((a_scales, num_rows), (b_scales, num_experts * n))
    if b_group_size < 1 or k % b_group_size:
        raise check.refuse(a_tensors, "b_group_size", f"expected a number that divides K, {k}, got {b_group_size}")
    check.elements(b_group_scales, float8_e4m3fn, PRODUCTS * num_experts * (k // b_group_size) * n)
    weight, a = weight_of(b_tensors, n, k, b_group_scales, b_group_size), Operand.of_rows(a_tensors)
    experts, epilogue = PackedExperts(num_experts, lists, 1, None), Epilogue(out_tensors, a_scales, b_scales)
    problem = PackedProblem(a, weight, epilogue, experts)
    block_size = block_size_for(PackedGroupedShape.of_problem(problem), out_tensors.device)
    lists, launch, _ = lists_of(*rows_of_experts, block_size=block_size)
    return [launch, *plan(replace(problem, experts=replace(experts, lists=lists)))]


@cutlass_w4a8_moe_mm.bad_indices
def bad_indices_cutlass_w4a8_moe_mm(
    out_tensors: Tensor, expert_offsets: Tensor, problem_sizes: Tensor
) -> dict[str, Any]:
    return bad_rows(out_tensors, expert_offsets, problem_sizes)


@cutlass_w4a8_moe_mm.example
def example_cutlass_w4a8_moe_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    group_size: Literal[32, 128] = 32,
    num_experts: int = 3,
    output_size: Literal[96, 112] = 96,
    input_size: Literal[256, 384] = 256,
) -> tuple[Any, ...]:
    n, k = output_size, input_size
    offsets, sizes = example_sizes(make, example_counts(num_tokens, num_experts), n, k)
    return (
        make.full(num_tokens, n, value=0.0, dtype="bfloat16"),
        make.randn(num_tokens, k, dtype="float8_e4m3fn"),
        make.randint(-(2**31), 2**31, num_experts, n, k // 8, dtype="int32"),
        make.full(num_tokens, 1, value=0.05, dtype="float32"),
        make.full(num_experts, n, 1, value=2.0**-4, dtype="float32"),
        make.randn(PRODUCTS * num_experts * (k // group_size) * n, dtype="float8_e4m3fn"),
        group_size,
        offsets,
        sizes,
        *(None, None, None, None),
        None,
    )
