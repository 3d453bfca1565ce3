"""The columns of a matrix in another order: activations for quantised weights whose rows are reordered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import int32
from ..._core.kernel import Kernel, Launch
from ..._core.op import op
from ..._core.tensor import TensorArg, new

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["permute_cols", "permute_cols_out"]

_permute_cols = Kernel("quantize/permute_cols.cu")
_MAX_ROWS, _MAX_THREADS = 4, 512  # of a block; no measurement of their own


def permute_cols(a: Any, perm: Any) -> Any:
    """`permute_cols_out` into a new tensor."""
    out = new(a, a.shape)
    permute_cols_out(out, a, perm)
    return out


@op(out="out", ulps=0)
def permute_cols_out(out: Tensor, a: Tensor, perm: Tensor) -> None:
    """The columns of a matrix in another order, bit for bit: ``out[..., j] = a[..., perm[j]]``.

    `perm` may name a column any number of times. Where it names no column, `out` becomes 0.

    Args:
        out: [..., hidden_size], contiguous, written.
        a: the same shape, float32, float16 or bfloat16, contiguous.
        perm: [hidden_size] int32, contiguous.
    """
    inside = (perm >= 0) & (perm < a.shape[-1])
    columns = a[..., perm.where(inside, 0).long()]
    out.copy_(columns.where(inside, 0.0))


@permute_cols_out.plan
def plan_permute_cols_out(out: TensorArg, a: TensorArg, perm: TensorArg) -> Launch:
    check.floating(a)
    hidden_size = check.row_size(a)
    check.like(out, a)
    for arg in (out, a):
        check.contiguous(arg)
    check.shape(perm, int32, hidden_size=hidden_size)
    num_rows, row_bytes = check.num_rows(a), hidden_size * a.dtype.itemsize
    # A block of several rows reads the indices once. Two blocks should fit into a multiprocessor's shared memory.
    max_shared = a.device.shared_memory
    many = num_rows > 2 * a.device.multiprocessors
    rows = max(1, min(_MAX_ROWS, max_shared // 2 // max(1, row_bytes))) if many else 1
    staged = rows * row_bytes <= max_shared
    vec_size = check.vector_width(hidden_size, out, a)
    num_threads = check.threads(hidden_size // vec_size, max_threads=_MAX_THREADS)
    return _permute_cols(scalar_t=a.dtype, VEC_SIZE=vec_size, ROWS=rows, STAGED=staged, NUM_THREADS=num_threads).launch(
        grid=-(-num_rows // rows) if hidden_size else 0,
        block=num_threads,
        shared=rows * row_bytes if staged else 0,
        num_rows=num_rows,
        row_size=hidden_size,
    )


@permute_cols_out.bad_indices
def bad_indices_permute_cols_out(a: Tensor, perm: Tensor) -> dict[str, Tensor]:
    return {"perm": (perm < 0) | (perm >= a.shape[-1])}


@permute_cols_out.example
def example_permute_cols_out(
    make: Any, *, num_tokens: int = 16, hidden_size: Literal[4096, 14336, 769] = 4096, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, hidden_size, dtype=dtype),
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.permutation(hidden_size, hidden_size, dtype="int32"),
    )
