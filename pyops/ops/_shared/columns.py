"""Batches of small GEMMs for few tokens with columns that are contiguous in memory: gemv_columns.cuh."""

from __future__ import annotations

from typing import Any

from ... import check
from ..._core.tensors.tensor import TensorArg

_MAX_BLOCKS = 65535  # most matrices, and most rows of each: blockIdx.z and blockIdx.y count them
# Threads of a block and those that share a row of the weight, rows that a thread loads at a time, threads of an SM; not
# yet measured. The 128 rows of a head of DeepSeek's MLA are one round of loads.
NUM_THREADS, _COLUMN_THREADS, _BATCH, _RESIDENT = 128, 8, 8, 1024


def check_batch(out: TensorArg, input: TensorArg, mat2: TensorArg) -> None:
    """OpError unless ``out[b] = input[b] @ mat2[b]`` has sizes and dtypes that kernels serve."""
    check.floating(input)
    check.sizes(input, B=None, M=None, K=None)
    batch, rows, k = input.shape
    check.sizes(mat2, B=batch, K=k, N=None)
    check.sizes(out, B=batch, M=rows, N=mat2.shape[2])
    for arg in (out, mat2):
        check.dtype(arg, input.dtype)
    for arg in (out, input):
        check.row_size(arg)
    if not k:
        raise input.error(f"expected rows of at least one element, got shape {input.shape}")
    if max(batch, rows) > _MAX_BLOCKS:
        raise input.error(f"expected at most {_MAX_BLOCKS} matrices and rows of each, got shape {input.shape}")


def batch_strides(out: TensorArg, input: TensorArg, mat2: TensorArg) -> dict[str, int]:
    """The arguments of a kernel for all but the stride of the weight's rows."""
    return {
        "output_size": mat2.shape[2],
        "out_batch_stride": out.strides[0],
        "out_stride": out.strides[1],
        "input_batch_stride": input.strides[0],
        "input_stride": input.strides[1],
        "weight_batch_stride": mat2.strides[0],
    }


def column_constants(k: int, vec_size: int) -> dict[str, Any]:
    """The constants of gemv_columns.cuh for rows of `k` elements."""
    return {
        "HIDDEN_SIZE": k,
        "VEC_SIZE": vec_size,
        "COLUMN_THREADS": _COLUMN_THREADS,
        "BATCH": _BATCH,
        "NUM_THREADS": NUM_THREADS,
        "MIN_BLOCKS": _RESIDENT // NUM_THREADS,
    }


def column_blocks(columns: int, vec_size: int) -> int:
    """Blocks for the columns of a matrix."""
    return -(-columns // (_COLUMN_THREADS * vec_size))
