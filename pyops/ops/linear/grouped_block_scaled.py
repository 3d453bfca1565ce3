"""The plan of grouped GEMMs with NVFP4, MXFP4 and MXFP8 rows and weights."""

from __future__ import annotations

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.launch.scratch import Scratch
from ..._core.tensors.dtypes import bfloat16, float32
from ..._core.tensors.tensor import TensorArg
from . import gemm_sm100_scaled, wq_grouped_engines
from .block_scaled import BlockFormat, dense_bytes
from .gemm_problem import Operand
from .grouped_blocks import block_size_for
from .grouped_problem import GroupedProblem
from .grouped_rows import check_rows, lists_of, swapped, weights_of
from .quantized_experts import QuantizedExperts
from .wq_grouped_problem import QuantizedRows, WqGroupedProblem, WqGroupedShape


def plan(
    format: BlockFormat,
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    a_scales: TensorArg,
    b_scales: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    scale_offsets: TensorArg,
    alphas: TensorArg | None = None,
) -> list[Launch]:
    """The checks and the launches of every format: sorting of rows by expert, dequantization of rows, a grouped
    GEMM."""
    k, (num_rows, n) = format.size(a), check_rows(out, a, b).shape
    check.sizes(problem_sizes, num_experts=None, sizes=3)
    num_experts = problem_sizes.shape[0]
    shape = WqGroupedShape(
        rows=num_rows,
        num_experts=num_experts,
        n=n,
        k=k,
        scales="none" if alphas is None else "row",
        type=format.scalar_type,
        group_size=format.scale_size,
        scale_dtype=format.stored_scale,
        is_tiled=True,
        scales_rows=True,
    )
    b = weights_of(b, num_experts, n, a.shape[1])
    rows, columns = format.scale_sizes(n, k)
    b_scales = swapped(b_scales, num_experts, rows, columns)
    format.check_scales(a_scales, rows=None, columns=columns)
    format.check_scales(b_scales, num_experts=num_experts, rows=rows, columns=columns)
    check.elements(alphas, float32, num_experts)
    operands = out, a, b, a_scales, b_scales
    scaled_by_mma = gemm_sm100_scaled.refusal(format, *operands) is None
    block_size = gemm_sm100_scaled.TILE_M if scaled_by_mma else block_size_for(shape, out.device)
    lists, launch, scale_rows = lists_of(out, problem_sizes, expert_offsets, scale_offsets, block_size)
    assert scale_rows is not None
    if scaled_by_mma:
        others = alphas, lists, problem_sizes, expert_offsets, scale_rows
        return [launch, gemm_sm100_scaled.launch(format, *operands, *others)] if num_experts else []
    dense_a, dense_b = (Scratch(dense_bytes(count, k)) for count in (num_rows, num_experts * n))
    product = GroupedProblem(
        out,
        Operand.of_scratch(dense_a, bfloat16, num_rows, k),
        Operand.of_scratch(dense_b, bfloat16, num_experts * n, k),
        num_experts,
        k,
        lists,
        b_scales=alphas,
    )
    if product.empty:
        return []
    groups = k // format.scale_size
    weight = QuantizedExperts(
        b, format.scalar_type, num_experts, n, k, groups, b_scales, format.stored_scale, None, tiled=True
    )
    dequantize = format.expand(dense_b, b, b_scales, n, problem_sizes=problem_sizes)
    quantized = QuantizedRows(a, a_scales, scale_rows, format.expand(dense_a, a, a_scales, num_rows, scale_rows))
    return [launch, *wq_grouped_engines.plan(WqGroupedProblem(product, weight, dequantize, quantized))]
