"""Grouped GEMMs with NVFP4, MXFP4 and MXFP8 weights by the kernels with fused dequantization."""

from __future__ import annotations

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.tensors.dtypes import bfloat16
from ..._core.tensors.tensor import TensorArg
from .._shared.fp4_tiles import TILE_COLUMNS
from . import coded_hopper
from .block_scaled import MXFP4, BlockFormat, dense_bytes
from .coded_experts import CodedExperts
from .coded_plan import block_size_of_codes, launches_of, serves
from .coded_problem import CodedProblem
from .gemm_problem import Operand
from .grouped_problem import GroupedProblem
from .grouped_rows import lists_of

_untile_scales = Kernel("linear/untile_scales.cu")
_NUM_THREADS = 256  # threads of a block of untile_scales.cu; a thread has four scales; not yet measured


def fused(
    format: BlockFormat,
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    a_scales: TensorArg,
    b_scales: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    scale_offsets: TensorArg,
    alphas: TensorArg | None,
) -> list[Launch] | None:
    """The launches of a checked grouped GEMM of block-scaled rows and weights: rows are dequantized to a workspace,
    weights in the main loop. None where dequantizing the weights first is faster, or no kernel takes them."""
    (num_rows, n), num_experts = out.shape, problem_sizes.shape[0]
    k = a.shape[1] * 8 // format.code_bits
    on_amd = out.device.supports("matrix_cores")
    if not num_experts or check.row_stride(b) != b.shape[2] or (on_amd and format is not MXFP4):
        return None
    groups = k // format.scale_size
    dense_a = Scratch(dense_bytes(num_rows, k))
    scales = Scratch(max(1, num_experts * n * groups)) if on_amd else b_scales
    weight = CodedExperts(
        b, format.scalar_type, num_experts, n, k, groups, scales, format.stored_scale, None, tiled=not on_amd
    )
    step = coded_hopper.step_of(weight) if out.device.supports("wgmma") else 0
    block_size = block_size_of_codes(num_rows, num_experts, str(weight.type), step)
    lists, launch, scale_rows = lists_of(out, problem_sizes, expert_offsets, scale_offsets, block_size=block_size)
    rows = Operand.of_scratch(dense_a, bfloat16, num_rows, k)
    product = GroupedProblem(out, rows, Operand.of_rows(b), num_experts, k, lists, b_scales=alphas)
    problem = CodedProblem(product, weight)
    if not serves(problem, out.device):
        return None
    expanded = format.expand(dense_a, a, a_scales, num_rows, scale_rows)
    untiled = [_untiled(scales, b_scales, n, groups, num_experts)] if isinstance(scales, Scratch) else []
    return [launch, expanded, *untiled, *launches_of(problem)]


def _untiled(scales: Scratch, tiled: TensorArg, n: int, groups: int, num_experts: int) -> Launch:
    """AMD: the launch that writes the scales of experts in row-major order."""
    _, padded_rows, columns = tiled.shape
    return _untile_scales.renamed(tiled=tiled.name)(
        ACCESS=check.vector_width(TILE_COLUMNS, tiled), NUM_THREADS=_NUM_THREADS
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
