"""Rows as bytes, for kernels that copy them bit for bit, and checks of choices."""

from __future__ import annotations

from dataclasses import replace

from ... import check
from ..._core.tensors.dtypes import E4M3, FLOATS, float8_e5m2, int8, int32, int64, uint8
from ..._core.tensors.tensor import TensorArg

MOVED = (*FLOATS, *E4M3, float8_e5m2, int8, uint8, int32, int64)  # dtypes of rows that are only copied
_MAX_TOPK = 1024  # most choices of a token, because kernels unroll the loop over them


def as_bytes(arg: TensorArg) -> TensorArg:
    """A matrix with dense rows as a matrix of its bytes, so that one kernel handles all element types."""
    itemsize = arg.dtype.itemsize
    num_rows, row_size = arg.shape
    return replace(
        arg, dtype=uint8, shape=(num_rows, row_size * itemsize), strides=(check.row_stride(arg) * itemsize, 1)
    )


def check_matrix(arg: TensorArg, *dtypes: object) -> tuple[int, int]:
    """Check a matrix with dense rows; returns its shape."""
    check.sizes(arg, num_rows=None, hidden_size=None)
    check.dtype(arg, *dtypes)  # type: ignore[arg-type]
    check.row_size(arg)
    return arg.shape[0], arg.shape[1]


def check_topk(arg: TensorArg, topk: int) -> None:
    """Check `topk`, the number of choices per token; the error names `arg`."""
    if not 1 <= topk <= _MAX_TOPK:
        raise check.refuse(arg, arg.name, f"expected 1 to {_MAX_TOPK} choices of a token, got {topk}")
