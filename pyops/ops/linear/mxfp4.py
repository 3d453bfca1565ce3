"""Small-M grouped GEMMs with MXFP4 weights, by the kernel with fused dequantization; scales are untiled first."""

from __future__ import annotations

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.tensors.dtypes import bfloat16
from ..._core.tensors.tensor import TensorArg
from .._shared.fp4_tiles import TILE_COLUMNS
from .._shared.scalar_type import SCALAR_TYPES
from .block_scaled import MXFP4, dense_bytes
from .coded_experts import CodedExperts
from .coded_plan import block_size_of_codes, launches_of, serves
from .coded_problem import CodedProblem
from .gemm_problem import Operand
from .grouped_problem import GroupedProblem
from .grouped_rows import lists_of

_untile_scales = Kernel("linear/untile_scales.cu")
_NUM_THREADS = 256  # threads of a block of untile_scales.cu; a thread has four scales; not yet measured


def few_rows(
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    a_scales: TensorArg,
    b_scales: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    scale_offsets: TensorArg,
) -> list[Launch] | None:
    """The launches of a checked `cutlass_mxfp4_group_mm`; None where dequantizing the weights first is faster."""
    (num_rows, n), num_experts, k = out.shape, problem_sizes.shape[0], 2 * a.shape[1]
    if out.dtype is not bfloat16 or check.row_stride(b) != b.shape[2] or not num_experts:
        return None
    block_size = block_size_of_codes(num_rows, num_experts, "float4_e2m1f")
    lists, launch, scale_rows = lists_of(out, problem_sizes, expert_offsets, scale_offsets, block_size=block_size)
    groups = k // MXFP4.scale_size
    dense_a, scales = Scratch(dense_bytes(num_rows, k)), Scratch(max(1, num_experts * n * groups))
    weight = CodedExperts(b, SCALAR_TYPES["float4_e2m1f"], num_experts, n, k, groups, scales, None)
    rows = Operand.of_scratch(dense_a, bfloat16, num_rows, k)
    product = GroupedProblem(out, rows, Operand.of_rows(b), num_experts, k, lists)
    problem = CodedProblem(product, weight)
    if not serves(problem, out.device):
        return None
    padded_rows, columns = MXFP4.scale_sizes(n, k)
    untiled = _untile_scales.renamed(tiled=b_scales.name)(
        ACCESS=check.vector_width(TILE_COLUMNS, b_scales), NUM_THREADS=_NUM_THREADS
    ).launch(
        -(-num_experts * n * (columns // TILE_COLUMNS) // _NUM_THREADS),
        _NUM_THREADS,
        scales=scales,
        num_experts=num_experts,
        n=n,
        groups=groups,
        columns=columns,
        padded_rows=padded_rows,
    )
    return [launch, MXFP4.expand(dense_a, a, a_scales, num_rows, scale_rows), untiled, *launches_of(problem)]
