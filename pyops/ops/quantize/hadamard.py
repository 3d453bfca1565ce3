"""The Walsh-Hadamard transform, which spreads outliers over a row before it is quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy

from ..._core import check
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["hadacore_transform", "hadacore_transform_out"]

_hadamard = Kernel("quantize/hadamard.cu")
_LARGEST = 32768


def hadacore_transform(x: Any, inplace: bool = True) -> Any:
    """`hadacore_transform_out` into `x`, which is returned, or into a new tensor if not `inplace`.

    `x` may have any strides; a copy is worked on, and copied back, unless it is contiguous or a matrix whose rows are.
    """
    if hasattr(x, "new_empty"):
        rows = x if x.ndim in (1, 2) and x.stride(-1) == 1 else x.contiguous()
        out = rows if inplace else rows.new_empty(rows.shape)
    else:
        rows = x if x.flags.c_contiguous else x.copy(order="C")
        out = rows if inplace else numpy.empty_like(rows)
    hadacore_transform_out(out, rows)
    if inplace and rows is not x:
        x[...] = rows
    return x if inplace else out


@op(out="out", in_place={"out": "x"})
def hadacore_transform_out(out: Tensor, x: Tensor) -> None:
    """Walsh-Hadamard transform of rows: ``out[..., i] = sum_j (-1)^popcount(i & j) * x[..., j] / sqrt(hidden_size)``.

    Natural (Sylvester's) order, orthonormal and its own inverse. Computed in float32 and rounded once (Fino and Algazi
    1976, "Unified matrix treatment of the fast Walsh-Hadamard transform"; Agarwal et al. 2024, arXiv:2412.08832).

    Args:
        out: [..., hidden_size], written; rows of one stride. May be `x`.
        x: the same shape, float32, float16 or bfloat16, hidden_size a power of two up to 32768; rows of one stride.
    """
    size = x.shape[-1]
    y, apart = x.double(), 1
    while apart < size:
        first, second = y.unflatten(-1, (-1, 2, apart)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        apart *= 2
    out.copy_((y / size**0.5).to(x.dtype))


@hadacore_transform_out.plan
def plan_hadacore_transform_out(out: TensorArg, x: TensorArg) -> Launch:
    check.floating(x)
    size = check.row_size(x)
    check.like(out, x)
    check.row_size(out)
    if size & (size - 1) or not 1 <= size <= _LARGEST:
        raise x.error(f"expected a last dimension that is a power of two up to {_LARGEST}, got shape {x.shape}")
    # Elements of a thread: a warp should be enough for a row that is not long, and a block for one that is.
    elements = min(size, 8 if size <= 256 else 16 if size <= 512 else 32 if size <= 4096 else 64)
    vec_size, row_threads = min(elements, 16 // x.dtype.itemsize), size // elements
    num_threads, num_rows = max(128, row_threads) if row_threads <= 32 else row_threads, check.num_rows(x)
    rounds = 1 if 4 * size <= x.device.shared_memory else 2
    return _hadamard(
        scalar_t=x.dtype,
        SIZE=size,
        VEC_SIZE=vec_size,
        ACCESS=check.vector_width(vec_size, out, x),
        NUM_THREADS=num_threads,
        ROW_THREADS=row_threads,
        ROUNDS=rounds,
        MIN_BLOCKS=max(1, {32: 1024, 64: 512}.get(elements, 1536) // num_threads),
    ).launch(
        grid=-(-num_rows // (num_threads // row_threads)),
        block=num_threads,
        shared=4 * size // rounds if row_threads > 32 else 0,
        num_rows=num_rows,
        out_stride=check.row_stride(out),
        x_stride=check.row_stride(x),
    )


@hadacore_transform_out.example
def example_hadacore_transform_out(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 128, 1024, 8192, 1, 4, 2048] = 4096,
    dtype: str = "bfloat16",
) -> tuple[Any, ...]:
    return make.empty(num_tokens, hidden_size, dtype=dtype), make.randn(num_tokens, hidden_size, dtype=dtype)
