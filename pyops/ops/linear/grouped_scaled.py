"""vLLM's grouped GEMMs of fp8, with per-tensor, per-row and per-column scales, or with block scales."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import E4M3, float32
from ..._core.tensors.tensor import TensorArg
from .._shared.fp8_accumulation import experts_error
from .gemm_problem import SCALE_BLOCK, Operand
from .grouped import block_scaled_product
from .grouped_engines import plan
from .grouped_problem import GroupedProblem
from .grouped_rows import (
    bad_rows,
    by_rows,
    check_rows,
    check_scale_counts,
    check_strides,
    each_expert,
    example_counts,
    example_sizes,
    lists_of,
    result_rows,
    weights_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["cutlass_blockwise_scaled_grouped_mm", "cutlass_moe_mm"]


@op(
    partial="out_tensors",
    atol=lambda out_tensors, a_tensors, b_tensors: experts_error(
        a_tensors, by_rows(b_tensors, out_tensors.shape[1], a_tensors.shape[1])
    ),
)
def cutlass_moe_mm(
    out_tensors: Tensor,
    a_tensors: Tensor,
    b_tensors: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    expert_offsets: Tensor,
    problem_sizes: Tensor,
    a_strides: Tensor | None,
    b_strides: Tensor | None,
    c_strides: Tensor | None,
    per_act_token: bool,
    per_out_ch: bool,
) -> None:
    """Grouped GEMM of fp8 rows and weights: ``out[t] = a_scales[t] * (b_scales[e] * (a[t] @ b[e].T))``.

    Expert e has the rows ``expert_offsets[e] + i`` for i below its size. Other rows are left unchanged; experts must
    not share rows. Accumulation is that of fp8 tensor cores (`fp8_accumulation.py`). Modelled on vLLM's
    op of this name.

    Args:
        out_tensors: [num_rows, N] float16 or bfloat16, written; constant row stride.
        a_tensors: [num_rows, K] float8_e4m3fn; constant row stride.
        b_tensors: [num_experts, N, K] of the same dtype, constant row stride; or a view of it, [num_experts, K, N].
        a_scales: float32, contiguous, one for each row if `per_act_token`; else the first of any number of elements.
        b_scales: float32, contiguous, [num_experts, 1], or [num_experts, N] if `per_out_ch`, or with a last size of 1.
        expert_offsets: [num_experts] int64 or int32, contiguous: the first row of each expert.
        problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K), or (N, rows, K).
        a_strides, b_strides, c_strides: [num_experts] int64; or None. They are not read: the tensors have their own
            strides.
        per_act_token, per_out_ch: see a_scales and b_scales.
    """
    b_tensors = by_rows(b_tensors, out_tensors.shape[1], a_tensors.shape[1])
    for e, rows in each_expert(out_tensors, problem_sizes, expert_offsets):
        sums = (a_tensors[rows].double() @ b_tensors[e].double().T).float()
        scales = a_scales.reshape(-1, 1)[rows] if per_act_token else a_scales.reshape(-1)[:1]
        out_tensors[rows] = (scales * (b_scales.reshape(len(b_tensors), -1)[e] * sums)).to(out_tensors.dtype)


@cutlass_moe_mm.result
def result_cutlass_moe_mm(
    a_tensors: TensorArg, b_tensors: TensorArg, *, out_dtype: torch.dtype | None = None
) -> Result:
    """Rows of `a_tensors`.

    Args:
        out_dtype: of the output; None for bfloat16.
    """
    return result_rows(a_tensors, b_tensors, out_dtype=out_dtype)


@cutlass_moe_mm.plan
def plan_cutlass_moe_mm(
    out_tensors: TensorArg,
    a_tensors: TensorArg,
    b_tensors: TensorArg,
    a_scales: TensorArg,
    b_scales: TensorArg,
    expert_offsets: TensorArg,
    problem_sizes: TensorArg,
    a_strides: TensorArg | None,
    b_strides: TensorArg | None,
    c_strides: TensorArg | None,
    per_act_token: bool,
    per_out_ch: bool,
) -> list[Launch]:
    check.dtype(a_tensors, *E4M3)
    rows = check_rows(out_tensors, a_tensors, b_tensors)
    lists, launch, _ = lists_of(rows, problem_sizes, expert_offsets, a=a_tensors, scales="row")
    num_experts, (num_rows, n), k = problem_sizes.shape[0], out_tensors.shape, a_tensors.shape[1]
    weights = weights_of(b_tensors, num_experts, n, k)
    check_strides(num_experts, a_strides, b_strides, c_strides)
    b_count = num_experts * (n if per_out_ch else 1)
    if not per_act_token:  # callers with batched activations repeat the scale for each expert
        check.at_least(a_scales, float32, 1)
        a_scales = replace(a_scales, shape=(1,), strides=(1,))
    check_scale_counts((a_scales, num_rows if per_act_token else 1), (b_scales, b_count))
    operands = Operand.of_rows(a_tensors), Operand.of_rows(weights), num_experts, k
    return [launch, plan(GroupedProblem(out_tensors, *operands, lists, a_scales=a_scales, b_scales=b_scales))]


@cutlass_moe_mm.bad_indices
def bad_indices_cutlass_moe_mm(out_tensors: Tensor, expert_offsets: Tensor, problem_sizes: Tensor) -> dict[str, Any]:
    return bad_rows(out_tensors, expert_offsets, problem_sizes)


@cutlass_moe_mm.example
def example_cutlass_moe_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    per_row: bool = True,
) -> tuple[Any, ...]:
    num_experts, n, k = 3, 136, 160
    offsets, sizes = example_sizes(make, example_counts(num_tokens), n, k)
    return (
        make.full(num_tokens, n, value=0.0, dtype="bfloat16"),
        make.randn(num_tokens, k, dtype="float8_e4m3fn"),
        make.randn(num_experts, n, k, dtype="float8_e4m3fn"),
        make.full(num_tokens if per_row else 1, 1, value=0.05, dtype="float32"),
        make.full(num_experts, n if per_row else 1, value=0.05, dtype="float32"),
        offsets,
        sizes,
        None,
        None,
        None,
        per_row,
        per_row,
    )


@op(partial="output", atol=lambda output, a, b: experts_error(a, by_rows(b, output.shape[1], a.shape[1])))
def cutlass_blockwise_scaled_grouped_mm(
    output: Tensor,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
) -> None:
    """`cutlass_moe_mm` with block scales: 128 elements of a row of a, and blocks of 128 x 128 of a weight.

    Experts must not share rows.

    Args:
        output: [num_rows, N] float16 or bfloat16, written; constant row stride.
        a: [num_rows, K] float8_e4m3fn; constant row stride.
        b: [num_experts, N, K] of the same dtype, constant row stride; or a view of it, [num_experts, K, N].
        scales_a: [num_rows, ceil(K / 128)] float32, any strides.
        scales_b: [num_experts, ceil(N / 128), ceil(K / 128)] float32, any strides.
        problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K), or (N, rows, K).
        expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
    """
    b = by_rows(b, output.shape[1], a.shape[1])
    for e, rows in each_expert(output, problem_sizes, expert_offsets):
        output[rows] = block_scaled_product(a[rows], b[e], scales_a[rows], scales_b[e]).to(output.dtype)


cutlass_blockwise_scaled_grouped_mm.result(result_rows)


@cutlass_blockwise_scaled_grouped_mm.plan
def plan_cutlass_blockwise_scaled_grouped_mm(
    output: TensorArg,
    a: TensorArg,
    b: TensorArg,
    scales_a: TensorArg,
    scales_b: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
) -> list[Launch]:
    check.dtype(a, *E4M3)
    lists, launch, _ = lists_of(check_rows(output, a, b), problem_sizes, expert_offsets, a=a, scales="block")
    num_experts, (num_rows, n), k = problem_sizes.shape[0], output.shape, a.shape[1]
    weights = weights_of(b, num_experts, n, k)
    columns = -(-k // SCALE_BLOCK)
    for scales in (scales_a, scales_b):
        check.dtype(scales, float32)
    check.sizes(scales_a, num_rows=num_rows, blocks=columns)
    check.sizes(scales_b, num_experts=num_experts, row_blocks=-(-n // SCALE_BLOCK), blocks=columns)
    operands = Operand.of_rows(a), Operand.of_rows(weights), num_experts, k
    problem = GroupedProblem(output, *operands, lists, None, scales_a, scales_b, block_scaled=True)
    return [launch, plan(problem)]


@cutlass_blockwise_scaled_grouped_mm.bad_indices
def bad_indices_cutlass_blockwise_scaled_grouped_mm(
    output: Tensor, problem_sizes: Tensor, expert_offsets: Tensor
) -> dict[str, Any]:
    return bad_rows(output, expert_offsets, problem_sizes)


@cutlass_blockwise_scaled_grouped_mm.example
def example_cutlass_blockwise_scaled_grouped_mm(make: Any, *, num_tokens: int = 16) -> tuple[Any, ...]:
    num_experts, n, k = 3, 136, 160
    offsets, sizes = example_sizes(make, example_counts(num_tokens), n, k)
    return (
        make.full(num_tokens, n, value=0.0, dtype="bfloat16"),
        make.randn(num_tokens, k, dtype="float8_e4m3fn"),
        make.randn(num_experts, n, k, dtype="float8_e4m3fn"),
        make.full(num_tokens, 2, value=0.05, dtype="float32"),
        make.full(num_experts, 2, 2, value=0.05, dtype="float32"),
        sizes,
        offsets,
    )
