"""GEMMs of NVFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float16
from ..._core.tensors.tensor import TensorArg
from . import gemm_sm100_scaled
from .block_scaled import NVFP4
from .block_scaled_engines import plan
from .block_scaled_problem import BlockScaledProblem
from .gemm_problem import Epilogue

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["cutlass_scaled_fp4_mm"]


@op(out="out", atol=2.0**-18)
def cutlass_scaled_fp4_mm(
    out: Tensor, a: Tensor, b: Tensor, block_scale_a: Tensor, block_scale_b: Tensor, alpha: Tensor
) -> None:
    """A GEMM of NVFP4 matrices: ``out = alpha * (A @ B.T)``, accumulated in float32 and rounded once.

    A and B are the quantized values times their scales. Tensor cores apply the scales on compute capability 10.0, 10.3,
    12.0 and 12.1; elsewhere A and B are dequantized in a workspace to bfloat16, which holds them exactly.

    Args:
        out: [M, N] float16 or bfloat16, written; elements of a row are contiguous.
        a: [M, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 16; rows of one
            stride.
        b: [N, K / 2] uint8, likewise.
        block_scale_a: float8_e4m3fn or uint8, contiguous, [M rounded up to 128, K / 16 rounded up to 4], a scale for
            every sixteen elements of a, in tiles (see `_shared/fp4_tiles.py`), as `scaled_fp4_quant` writes them: none
            is negative.
        block_scale_b: of b, likewise.
        alpha: one float32, normally the reciprocal of the product of both tensors' scales.
    """
    x = NVFP4.values(a, block_scale_a) @ NVFP4.values(b, block_scale_b).T
    out.copy_(alpha.reshape(()) * x.float())


@cutlass_scaled_fp4_mm.result
def result_cutlass_scaled_fp4_mm(a: TensorArg, b: TensorArg, *, out_dtype: torch.dtype | None = None) -> Result:
    """Rows of `a`.

    Args:
        out_dtype: of the output; None for bfloat16.
    """
    for quants in (a, b):
        check.sizes(quants, rows=None, bytes=None)
    return Result((a.shape[0], b.shape[0]), check.chosen(a, "out_dtype", out_dtype, bfloat16))


@cutlass_scaled_fp4_mm.plan
def plan_cutlass_scaled_fp4_mm(
    out: TensorArg, a: TensorArg, b: TensorArg, block_scale_a: TensorArg, block_scale_b: TensorArg, alpha: TensorArg
) -> list[Launch]:
    k = NVFP4.size(a)
    for codes in (a, b):
        check.sizes(codes, rows=None, bytes=a.shape[-1])
        NVFP4.size(codes)
    m, n = a.shape[0], b.shape[0]
    check.dtype(out, float16, bfloat16)
    check.sizes(out, M=m, N=n)
    check.row_size(out)
    check.scalar(alpha)
    for scales, count in ((block_scale_a, m), (block_scale_b, n)):
        rows, columns = NVFP4.scale_sizes(count, k)
        NVFP4.check_scales(scales, rows=rows, columns=columns)
    operands = out, a, b, block_scale_a, block_scale_b
    if gemm_sm100_scaled.refusal(NVFP4, *operands) is None:
        return [gemm_sm100_scaled.launch(NVFP4, *operands, alpha)]
    return plan(BlockScaledProblem.of(NVFP4, a, b, block_scale_a, block_scale_b, k, Epilogue(out, alpha)))


@cutlass_scaled_fp4_mm.example
def example_cutlass_scaled_fp4_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    output_size: int = 40,
    input_size: Literal[160, 48] = 160,
    out_dtype: Literal["bfloat16", "float16"] = "bfloat16",
) -> tuple[Any, ...]:
    scale_sizes = [NVFP4.scale_sizes(rows, input_size) for rows in (num_tokens, output_size)]
    return (
        make.empty(num_tokens, output_size, dtype=out_dtype),
        make.randint(0, 256, num_tokens, input_size // 2, dtype="uint8"),
        make.randint(0, 256, output_size, input_size // 2, dtype="uint8"),
        *(make.randint(40, 72, *sizes, dtype="uint8") for sizes in scale_sizes),
        make.full(1, value=0.125, dtype="float32"),
    )
