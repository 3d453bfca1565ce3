"""Normalisation: root-mean-square and layer norms, alone and fused with residual, quantisation and rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._core import check
from ._core.kernel import Kernel, Launch
from ._core.lazy import torch
from ._core.op import op
from ._core.tensor import Arg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rms_norm"]

_rms_norm = Kernel("norm/rms_norm.cu")


def _row_geometry(num_rows: int, row_vecs: int) -> tuple[int, int, int]:
    """(threads that share a row, threads in a block, blocks) for rows of `row_vecs` vectors."""
    if row_vecs <= 128:  # a few rows to a block, each with the power of two of lanes that gives a lane up to 4 vectors
        row_threads = 1
        while row_threads < 32 and row_threads * 4 < row_vecs:
            row_threads *= 2
        block_rows = 128 // row_threads
        return row_threads, 128, -(-num_rows // block_rows)
    few = num_rows <= 132
    row_threads = check.threads(-(-row_vecs // 4), most=512 if few else 128)
    while row_vecs > row_threads * 16 and row_threads < 1024:
        row_threads *= 2
    return row_threads, row_threads, num_rows


@op(out="out", in_place={"out": "input"})
def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Scale each row of `input` to unit root mean square, then by `weight`.

    ``out = T(T(input / sqrt(mean(input^2) + epsilon)) * weight)``, the mean in float32 over the last dimension
    (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        out: [..., hidden_size], written; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; up to three leading dimensions of any strides.
        weight: [hidden_size] of the same dtype, or None for ones.
        epsilon: added to the mean of squares.
    """
    x = input.float()
    y = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)).to(input.dtype)
    out.copy_(y if weight is None else y * weight)


@rms_norm.plan
def _(out: Arg, input: Arg, weight: Arg | None, epsilon: float) -> Launch:
    check.floating(input)
    check.like(out, input)
    hidden_size = check.row_size(input)
    check.row_size(out)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    leading = check.leading(input, out, most=3)
    num_rows = check.num_rows(input)
    vec_size = check.vector_width(hidden_size, *(arg for arg in (out, input, weight) if arg))
    row_threads, num_threads, grid = _row_geometry(num_rows, hidden_size // vec_size)
    sizes = [size for size, _ in leading] + [1, 1]
    input_strides, out_strides = ([strides[i] for _, strides in leading] + [0, 0] for i in (0, 1))
    return _rms_norm(
        scalar_t=input.dtype,
        HIDDEN_SIZE=hidden_size,
        VEC_SIZE=vec_size,
        NUM_THREADS=num_threads,
        ROW_THREADS=row_threads,
        LEADING=len(leading),
        HAS_WEIGHT=weight is not None,
    ).launch(
        grid=grid if hidden_size else 0,
        block=num_threads,
        num_rows=num_rows,
        size1=sizes[1],
        size2=sizes[2],
        out_stride0=out_strides[0],
        out_stride1=out_strides[1],
        out_stride2=out_strides[2],
        input_stride0=input_strides[0],
        input_stride1=input_strides[1],
        input_stride2=input_strides[2],
    )


@rms_norm.example
def _(make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16") -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    weight = make.randn(hidden_size, dtype=dtype, scale=0.1, shift=1.0)
    return make.empty(num_tokens, hidden_size, dtype=dtype), x, weight, 1e-6
