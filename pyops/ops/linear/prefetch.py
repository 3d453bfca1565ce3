"""Weights that a later kernel reads, prefetched by GEMVs while the kernel before them leaves memory idle."""

from __future__ import annotations

from typing import Any

from ... import check
from ..._core.tensors.dtypes import DType
from ..._core.tensors.tensor import TensorArg

_LINE = 128  # bytes of a line of L2
_MAX_LINES = 1 << 24


def prefetch_arguments(rows: TensorArg | None, dtype: DType) -> dict[str, Any]:
    """The arguments of `prefetch_rows` in memory.cuh but `prefetched`; OpError for rows that it does not take."""
    if rows is None:
        return {"prefetched": 0, "num_lines": 0, "row_lines": 1, "prefetched_stride": 0}
    check.sizes(rows, rows=None, columns=None)
    check.dtype(rows, dtype)
    columns = check.row_size(rows)
    row_lines = -(-columns * rows.dtype.itemsize // _LINE)
    num_lines = rows.shape[0] * row_lines
    if num_lines > _MAX_LINES:
        raise rows.error(f"expected at most {_MAX_LINES} lines of {_LINE} bytes, got {num_lines}")
    return {"num_lines": num_lines, "row_lines": max(1, row_lines), "prefetched_stride": check.row_stride(rows)}
