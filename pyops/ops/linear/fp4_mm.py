"""Matrix products of NVFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import bfloat16, float8_e4m3fn, float16, uint8
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared.fp4_tiles import BLOCK, tile_sizes, untiled
from .gemm_plan import plan
from .gemm_problem import Epilogue, Operand, Problem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cutlass_scaled_fp4_mm"]

_nvfp4_to_bf16 = Kernel("linear/nvfp4_to_bf16.cu")
_NUM_THREADS = 256  # of nvfp4_to_bf16.cu, each with sixteen elements
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@op(out="out", atol=2.0**-18)
def cutlass_scaled_fp4_mm(
    out: Tensor, a: Tensor, b: Tensor, block_scale_a: Tensor, block_scale_b: Tensor, alpha: Tensor
) -> None:
    """A product of matrices of NVFP4: ``out = alpha * (A @ B.T)``, summed in float32 and rounded once.

    A and B have the values of codes times scales: they are made in bfloat16, which holds them, in memory of the call.

    Args:
        out: [M, N] float16 or bfloat16, written; elements of a row lie one after another.
        a: [M, K / 2] uint8, two codes of e2m1 to a byte, the first in its lower half; K a multiple of 16; rows of one
            stride.
        b: [N, K / 2] uint8, likewise.
        block_scale_a: float8_e4m3fn or uint8, contiguous, [M rounded up to 128, K / 16 rounded up to 4], a scale for
            every sixteen elements of a, in tiles (see `_shared/fp4_tiles.py`), as `scaled_fp4_quant` writes them.
        block_scale_b: of b, likewise.
        alpha: one float32, normally the reciprocal of the product of both tensors' scales.
    """
    x = values(a, block_scale_a) @ values(b, block_scale_b).T
    out.copy_(alpha.reshape(()) * x.float())


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 codes times scales."""
    rows, blocks = codes.shape[0], codes.shape[1] * 2 // BLOCK
    each = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=codes.device)
    values = torch.where(each >= 8, -1.0, 1.0) * magnitudes[each & 7]
    of_blocks = untiled(scales, rows, blocks).contiguous().view(torch.float8_e4m3fn).double()
    return values * of_blocks.repeat_interleave(BLOCK, 1)


@cutlass_scaled_fp4_mm.plan
def plan_cutlass_scaled_fp4_mm(
    out: TensorArg, a: TensorArg, b: TensorArg, block_scale_a: TensorArg, block_scale_b: TensorArg, alpha: TensorArg
) -> list[Launch]:
    for codes in (a, b):
        check.dtype(codes, uint8)
        check.sizes(codes, rows=None, bytes=a.shape[-1] if a.shape else None)
        if codes.shape[1] * 2 % BLOCK:
            raise codes.error(f"expected rows of a multiple of {BLOCK // 2} bytes, got shape {codes.shape}")
        check.row_size(codes)
    (m, size), n = a.shape, b.shape[0]
    k = size * 2
    check.dtype(out, float16, bfloat16)
    check.sizes(out, M=m, N=n)
    check.row_size(out)
    check.scalar(alpha)
    dense_a, dense_b = (Scratch(rows * k * bfloat16.itemsize) for rows in (m, n))
    for scales, count in ((block_scale_a, m), (block_scale_b, n)):
        columns, rows = tile_sizes(count, k // BLOCK)
        check.dtype(scales, float8_e4m3fn, uint8)
        check.shape(scales, rows=rows, columns=columns)
    launches = [expand(dense_a, a, block_scale_a, m), expand(dense_b, b, block_scale_b, n)]
    operands = Operand.of_scratch(dense_a, bfloat16, m, k), Operand.of_scratch(dense_b, bfloat16, n, k)
    product = plan(Problem(*operands, k, Epilogue(out, alpha)))
    return [] if product.empty else [*launches, product]


def expand(
    dense: Scratch, codes: TensorArg, scales: TensorArg, rows_of_matrix: int, scale_rows: Scratch | None = None
) -> Launch:
    """Writes codes times scales to `dense`, of matrices of `rows_of_matrix` rows whose scales have tiles of their own.

    `scale_rows` says where the scales of a row lie, if that is not the row itself.
    """
    num_rows, blocks = check.num_rows(codes), codes.shape[-1] * 2 // BLOCK
    columns, rows = tile_sizes(rows_of_matrix, blocks)
    kernel = _nvfp4_to_bf16.renamed(codes=codes.name, scales=scales.name)
    constants = {"CODE_ACCESS": check.vector_width(BLOCK // 2, codes), "HAS_SCALE_ROWS": scale_rows is not None}
    return kernel(**constants, NUM_THREADS=_NUM_THREADS).launch(
        -(-num_rows * blocks // _NUM_THREADS),
        _NUM_THREADS,
        dense=dense,
        scale_rows=scale_rows or 0,
        num_rows=num_rows,
        blocks=blocks,
        columns=columns,
        rows_of_matrix=max(1, rows_of_matrix),
        padded_rows=rows,
        num_scale_rows=scales.numel // columns,
        codes_stride=check.row_stride(codes),
    )


@cutlass_scaled_fp4_mm.example
def example_cutlass_scaled_fp4_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    input_size: Literal[160, 48] = 160,
    out_dtype: Literal["bfloat16", "float16"] = "bfloat16",
) -> tuple[Any, ...]:
    output_size = 40
    scale_sizes = [tile_sizes(rows, input_size // BLOCK)[::-1] for rows in (num_tokens, output_size)]
    return (
        make.empty(num_tokens, output_size, dtype=out_dtype),
        make.randint(0, 256, num_tokens, input_size // 2, dtype="uint8"),
        make.randint(0, 256, output_size, input_size // 2, dtype="uint8"),
        *(make.randn(*sizes, dtype="float8_e4m3fn") for sizes in scale_sizes),
        make.full(1, value=0.125, dtype="float32"),
    )
