"""Permutation of columns: activations for quantized weights with reordered rows (act-order)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["permute_cols"]

_permute_cols = Kernel("quantize/permute_cols.cu")
_MAX_ROWS, _MAX_THREADS = 4, 512  # most rows and most threads of a block; not tuned


@op(returns="out", ulps=0)
def permute_cols(a: Tensor, perm: Tensor, *, out: Tensor) -> None:
    """The columns of a matrix in another order, bit for bit: ``out[..., j] = a[..., perm[j]]``.

    `perm` may repeat columns. Where an index is out of range, `out` becomes 0.

    Args:
        a: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        perm: [hidden_size] int32, contiguous.
        out: the same shape and dtype as `a`, written and returned; constant row stride; new unless given.
    """
    inside = (perm >= 0) & (perm < a.shape[-1])
    columns = a[..., perm.where(inside, 0).long()]
    out.copy_(columns.where(inside, 0.0))


@permute_cols.result
def result_permute_cols(a: TensorArg) -> Result:
    return Result(a.shape, a.dtype)


@permute_cols.plan
def plan_permute_cols(a: TensorArg, perm: TensorArg, out: TensorArg) -> Launch:
    check.floating(a)
    hidden_size = check.row_size(a)
    check.like(out, a)
    check.row_size(out)
    check.shape(perm, int32, hidden_size=hidden_size)
    num_rows, row_bytes = check.num_rows(a), hidden_size * a.dtype.itemsize
    # A block with several rows reads the indices once for all. Two blocks should fit into the shared memory of an SM.
    max_shared = a.device.shared_memory
    many = num_rows > 2 * a.device.num_sms
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
        out_stride=check.row_stride(out),
        a_stride=check.row_stride(a),
    )


@permute_cols.bad_indices
def bad_indices_permute_cols(a: Tensor, perm: Tensor) -> dict[str, Tensor]:
    return {"perm": (perm < 0) | (perm >= a.shape[-1])}


@permute_cols.example
def example_permute_cols(
    make: Any, *, num_tokens: int = 16, hidden_size: Literal[4096, 14336, 769] = 4096, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return (
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.permutation(hidden_size, hidden_size, dtype="int32"),
        make.empty(num_tokens, hidden_size, dtype=dtype),
    )
