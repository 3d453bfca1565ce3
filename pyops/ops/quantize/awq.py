"""4-bit weights packed by AWQ: eight columns per word, with scales and zero points per group of rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from .._shared import chunks
from .._shared.chunks import ChunkProblem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["awq_dequantize"]

_awq_dequantize = Kernel("quantize/awq_dequantize.cu")
_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # bit offset of each column's nibble in a word
# Rows per thread: eight (docs/performance/gguf.md), or four where eight would leave threads idle (not measured).
_ROWS, _FEW_ROWS = 8, 4
_FULL_THREADS = 4 * 2048  # threads per SM from which a thread gets eight rows: four full waves


@op(returns="out", runtime=("split_k_iters", "thx", "thy"), ulps=0)
def awq_dequantize(
    qweight: Tensor, scales: Tensor, zeros: Tensor, split_k_iters: int, thx: int, thy: int, *, out: Tensor
) -> None:
    """Dequantize an AWQ weight: ``out = (quant - zero) * scale``, rounded once.

    A word holds eight columns in the order 0 2 4 6 1 3 5 7, starting at its lowest nibble (Lin et al. 2023,
    arXiv:2306.00978, as AutoAWQ packs it). Zero points are used as they are stored.

    Args:
        qweight: [K, N / 8] int32, contiguous.
        scales: [num_groups, N], float32, float16 or bfloat16, contiguous; num_groups divides K.
        zeros: [num_groups, N / 8] int32, packed as the weight, contiguous.
        split_k_iters, thx, thy: for compatibility with vLLM; no effect.
        out: [K, N] of the dtype of `scales`, contiguous, written and returned; new unless given.
    """
    shifts = torch.tensor(_SHIFTS, dtype=torch.int64, device=qweight.device)
    quantized, zero_points = (((x.unsqueeze(-1) >> shifts) & 15).flatten(-2) for x in (qweight, zeros))
    group_size = qweight.shape[0] // max(1, scales.shape[0])
    differences = quantized - zero_points.repeat_interleave(group_size, 0)
    out.copy_(differences.to(scales.dtype) * scales.repeat_interleave(group_size, 0))


@awq_dequantize.result
def result_awq_dequantize(qweight: TensorArg, scales: TensorArg) -> Result:
    check.sizes(scales, num_groups=None, N=None)
    check.sizes(qweight, K=None, words=None)
    return Result((qweight.shape[0], scales.shape[1]), scales.dtype)


@awq_dequantize.plan
def plan_awq_dequantize(qweight: TensorArg, scales: TensorArg, zeros: TensorArg, out: TensorArg) -> Launch:
    check.floating(scales)
    (num_rows, n), *_ = result_awq_dequantize(qweight, scales)
    num_groups = scales.shape[0]
    if n % 8:
        raise scales.error(f"expected a multiple of 8 columns, got {n}")
    if num_rows % max(1, num_groups) or num_groups == 0 < num_rows:
        raise scales.error(f"expected groups that divide the {num_rows} rows of qweight, got {num_groups}")
    check.shape(qweight, int32, K=num_rows, words=n // 8)
    check.shape(zeros, int32, num_groups=num_groups, words=n // 8)
    check.contiguous(scales)
    check.shape(out, scales.dtype, K=num_rows, N=n)
    group_size = num_rows // max(1, num_groups)
    fills_device = num_rows * n // (8 * _ROWS) >= _FULL_THREADS * out.device.num_sms
    rows = math.gcd(group_size, _ROWS if fills_device else _FEW_ROWS)
    problem = ChunkProblem(n // 8, num_rows // max(1, rows), int32)
    config = tuning.config(out.op, problem, out.device, chunks.choose)
    grid = config.grid(problem)
    return _awq_dequantize(
        scalar_t=scales.dtype,
        ROWS=rows,
        GROUP_CHUNKS=group_size // max(1, rows),
        ACCESS=check.vector_width(8, out, scales),
        **config.constants(grid),
    ).launch(
        grid=grid if num_rows else 0,
        block=config.num_threads,
        num_chunks=problem.num_rows,
        num_words=problem.row_size,
    )


@awq_dequantize.example
def example_awq_dequantize(
    make: Any, *, num_tokens: int = 32, hidden_size: Literal[4096, 264] = 4096, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    """A weight of 2 * `num_tokens` rows, in groups of 128 rows if that divides them, else of two."""
    num_rows, words = 2 * num_tokens, hidden_size // 8
    num_groups = num_rows // (2 if num_rows % 128 else 128)
    return (
        make.randint(-(2**31), 2**31, num_rows, words, dtype="int32"),
        make.randn(num_groups, hidden_size, dtype=dtype, scale=0.01),
        make.randint(-(2**31), 2**31, num_groups, words, dtype="int32"),
        *(8, 8, 8),
        make.empty(num_rows, hidden_size, dtype=dtype),
    )
