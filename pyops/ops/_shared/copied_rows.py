"""Rows that kernels copy bit for bit: as bytes, so that one kernel handles all element types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.tensors.dtypes import E4M3, FLOATS, float8_e5m2, int8, int32, int64, uint8
from ..._core.tensors.tensor import TensorArg
from . import chunks

MOVED = (*FLOATS, *E4M3, float8_e5m2, int8, uint8, int32, int64)  # dtypes of rows that are only copied
_COPY_BLOCKS = 8  # blocks of 256 threads per SM: 32 registers are enough to copy
# Gathers: rows per thread, if that leaves this many threads per SM. With one row, a thread waits for the index and then
# for the row, which gave 2.8 TB/s on an H200 for 32768 rows of 8 KiB. These numbers are predicted, not measured.
_BATCH, _BATCH_THREADS = 4, 1024


def as_bytes(arg: TensorArg) -> TensorArg:
    """A matrix with dense rows as a matrix of its bytes."""
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


def gather(kernel: Kernel, out: TensorArg, source: TensorArg, fixed: dict[str, Any], **constants: Any) -> Launch:
    """The launch of a kernel that fills the rows of `out` with rows of `source` (`gather_rows` of cache.cuh).

    A thread has one vector of each of BATCH adjacent rows. `num_outputs` and those in `fixed` are parameters of the
    kernel.
    """
    rows, num_rows = as_bytes(out), out.shape[0]
    vectors = rows.nbytes // check.vector_width(rows.shape[1], rows, as_bytes(source))
    batch = _BATCH if vectors >= _BATCH * _BATCH_THREADS * out.device.num_sms else 1
    return chunks.launch(
        kernel,
        replace(rows, shape=(-(-num_rows // batch), rows.shape[1])),
        as_bytes(source),
        min_blocks=_COPY_BLOCKS,
        fixed={"num_outputs": num_rows, **fixed},
        BATCH=batch,
        **constants,
    )
