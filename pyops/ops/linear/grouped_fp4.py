"""vLLM's grouped product of NVFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core import check
from ..._core.dtypes import bfloat16, float8_e4m3fn, float32, uint8
from ..._core.kernel import Launch, Scratch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared.fp4_tiles import BLOCK, TILE_ROWS, rounded_up, tile_sizes
from .fp4_mm import expand, values
from .gemm_problem import Operand
from .grouped_plan import plan
from .grouped_problem import GroupedProblem
from .grouped_rows import bad_rows, check_rows, each_expert, example_sizes, lists_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cutlass_fp4_group_mm"]


@op(inout="out", atol=2.0**-18)
def cutlass_fp4_group_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_blockscale: Tensor,
    b_blockscales: Tensor,
    alphas: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    sf_offsets: Tensor,
) -> None:
    """Products of NVFP4 rows with the weights of their experts: ``out[t] = alphas[e] * (A[t] @ B[e].T)``.

    A and B have the values of codes times scales: they are made in bfloat16, which holds them, in memory of the call.
    Expert e has the rows ``expert_offsets[e] + i`` for i below its size. Other rows are left as they are; rows of two
    experts must not be the same. After vLLM's op of this name.

    Args:
        out: [num_rows, N] float16 or bfloat16, written; rows of one stride.
        a: [num_rows, K / 2] uint8, two codes of e2m1 to a byte, the first in its lower half; K a multiple of 16; rows
            of one stride.
        b: [num_experts, N, K / 2] uint8, likewise.
        a_blockscale: float8_e4m3fn or uint8, contiguous, [rows, K / 16 rounded up to 4], a multiple of 128 rows: the
            scales of each expert in tiles (see `_shared/fp4_tiles.py`), as `scaled_fp4_experts_quant` writes them.
        b_blockscales: likewise, [num_experts, N rounded up to 128, K / 16 rounded up to 4], in tiles for each expert.
        alphas: [num_experts] float32, contiguous.
        problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K).
        expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
        sf_offsets: [num_experts] int32, contiguous: the row of a_blockscale where those of an expert begin, a multiple
            of 128. Rows whose scales would lie elsewhere have zeros for scales.
    """
    n = out.shape[1]
    for e, rows in each_expert(out, problem_sizes, expert_offsets):
        first, count, size = int(sf_offsets[e]), rows.stop - rows.start, len(a_blockscale)
        x = torch.zeros(count, 2 * a.shape[1], dtype=torch.float64, device=a.device)
        inside = torch.tensor([0 <= first + i < size for i in range(count)], device=a.device)
        place = (first + torch.arange(count, device=a.device)).clamp(0, max(0, size - 1))
        codes = torch.zeros(size, a.shape[1], dtype=a.dtype, device=a.device)
        codes[place[inside]] = a[rows][inside]
        x[inside] = values(codes, a_blockscale)[place[inside]]
        out[rows] = (alphas[e] * (x @ values(b[e], b_blockscales[e])[:n].T).float()).to(out.dtype)


@cutlass_fp4_group_mm.plan
def plan_cutlass_fp4_group_mm(
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    a_blockscale: TensorArg,
    b_blockscales: TensorArg,
    alphas: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    sf_offsets: TensorArg,
) -> list[Launch]:
    check.dtype(a, uint8)
    lists, launch, scale_rows = lists_of(check_rows(out, a, b), problem_sizes, expert_offsets, sf_offsets)
    assert scale_rows is not None
    num_experts, (num_rows, n), size = problem_sizes.shape[0], out.shape, a.shape[1]
    if size * 2 % BLOCK:
        raise a.error(f"expected rows of a multiple of {BLOCK // 2} bytes, got shape {a.shape}")
    check.sizes(b, num_experts=num_experts, N=n, bytes=size)
    check.row_size(b)
    columns, rows = tile_sizes(n, size * 2 // BLOCK)
    check.sizes(a_blockscale, rows=None, columns=columns)
    if a_blockscale.shape[0] % TILE_ROWS:
        raise a_blockscale.error(f"expected a multiple of 128 rows, got shape {a_blockscale.shape}")
    for scales, shape in ((a_blockscale, a_blockscale.shape), (b_blockscales, (num_experts, rows, columns))):
        check.dtype(scales, float8_e4m3fn, uint8)
        check.contiguous(scales)
        if scales.shape != shape:
            raise scales.error(f"expected shape {shape}, got {scales.shape}")
    check.shape(alphas, float32, num_experts=num_experts)
    k = size * 2
    dense_a, dense_b = (Scratch(max(1, count) * k * bfloat16.itemsize) for count in (num_rows, num_experts * n))
    operands = (
        Operand.of_scratch(dense_a, bfloat16, num_rows, k),
        Operand.of_scratch(dense_b, bfloat16, num_experts * n, k),
    )
    product = plan(GroupedProblem(out, *operands, num_experts, k, lists, b_scales=alphas))
    if product.empty:
        return []
    return [
        launch,
        expand(dense_a, a, a_blockscale, num_rows, scale_rows),
        expand(dense_b, b, b_blockscales, n),
        product,
    ]


@cutlass_fp4_group_mm.bad_indices
def bad_indices_cutlass_fp4_group_mm(
    out: Tensor, a_blockscale: Tensor, problem_sizes: Tensor, expert_offsets: Tensor, sf_offsets: Tensor
) -> dict[str, Tensor]:
    outside = (sf_offsets < 0) | (sf_offsets > len(a_blockscale)) | (sf_offsets % 128 != 0)
    return {**bad_rows(out, expert_offsets, problem_sizes), "sf_offsets": outside}


@cutlass_fp4_group_mm.example
def example_cutlass_fp4_group_mm(make: Any, *, num_tokens: int = 16) -> tuple[Any, ...]:
    num_experts, n, k = 3, 136, 160
    offsets, sizes = example_sizes(make, num_tokens, n, k)
    first, columns = rounded_up(num_tokens // 3, TILE_ROWS), rounded_up(k // BLOCK, 4)
    rows = first + rounded_up(num_tokens - num_tokens // 3, TILE_ROWS)
    return (
        make.full(num_tokens, n, value=0.0, dtype="bfloat16"),
        make.randint(0, 256, num_tokens, k // 2, dtype="uint8"),
        make.randint(0, 256, num_experts, n, k // 2, dtype="uint8"),
        make.randn(rows, columns, dtype="float8_e4m3fn"),
        make.randn(num_experts, rounded_up(n, TILE_ROWS), columns, dtype="float8_e4m3fn"),
        make.full(num_experts, value=2.0**-8, dtype="float32"),
        sizes,
        offsets,
        make.values([0, first, first], "int32"),
    )
