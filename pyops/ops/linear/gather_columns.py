"""A copy of an operand in a workspace: columns permuted, or 8-bit elements converted to 16 bits."""

from __future__ import annotations

from ..._core.launch.kernel import Kernel, Launch
from ..._core.tensors.tensor import TensorArg
from .gemm_problem import Operand
from .gemm_shape import FP8
from .pointers import fed

_gather_columns = Kernel("linear/gather_columns.cu")
_NUM_THREADS = 256  # threads of a block
VEC_SIZE = 8  # elements of a thread


def access(size: int) -> int:
    """Elements of one access of a thread to contiguous pieces of `size` elements."""
    return VEC_SIZE if size % VEC_SIZE == 0 else 1


def gathered(to: Operand, a: Operand, k: int, perm: TensorArg | None = None, *, in_fours: bool = False) -> Launch:
    """The launch that writes the rows of `a`, of `k` adjacent elements, to `to`, a packed matrix in a workspace."""
    kernel, others = fed(_gather_columns, a=a.source, perm=perm)
    pieces = a.rows * -(-k // VEC_SIZE)
    return kernel(
        scalar_t=to.dtype,
        a_t=a.dtype,
        PERMUTED=perm is not None,
        IN_FOURS=in_fours,
        VEC_SIZE=VEC_SIZE,
        ACCESS=access(k),
        A_ACCESS=access(a.vec_size(k)) if a.dtype in FP8 and perm is None and not in_fours else 1,
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        -(-pieces // _NUM_THREADS),
        _NUM_THREADS,
        gathered=to.source,
        m=a.rows,
        k=k,
        a_stride=a.stride,
        **others,
    )
