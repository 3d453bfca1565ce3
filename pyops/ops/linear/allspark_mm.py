"""GEMMs with 8-bit weights in AllSpark's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float16, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.fp8_accumulation import FLOAT32_ERROR
from .._shared.packed_layouts import column_place
from .._shared.scalar_type import uint8b128
from .gemm_problem import Epilogue, Operand
from .packed_plan import plan
from .packed_problem import PackedProblem, PackedWeight
from .packed_reference import multiply, rounding_of_weights
from .repack import repack, repacked

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["allspark_w8a16_gemm", "rearrange_kn_weight_as_n32k16_order"]

_order_columns = Kernel("linear/order_columns.cu")
_NUM_THREADS = 256  # threads of a block of this kernel; a thread has a column
_TILE = 16, 32  # rows and columns of a tile


@op(out=("b_qweight_reorder", "b_scales_reorder", "b_zeros_reorder"), ulps=0)
def rearrange_kn_weight_as_n32k16_order(
    b_qweight: Tensor,
    b_scales: Tensor,
    b_zeros: Tensor | None,
    has_zp: bool,
    b_qweight_reorder: Tensor,
    b_scales_reorder: Tensor,
    b_zeros_reorder: Tensor | None,
    K: int,
    N: int,
    N_32align: int,
) -> None:
    """An 8-bit weight in tiles of 16 x 32, for `allspark_w8a16_gemm`; scales and zero points in the same column order.

    Columns after the last one are 0. For an empty weight nothing is written. `_shared/packed_layouts.py` has the layout
    and the column order (n32k16).

    Args:
        b_qweight: [K, N] uint8, contiguous; K a multiple of 16.
        b_scales: [1, N] float16 or bfloat16, contiguous.
        b_zeros: the same, with has_zp; else None, or not read.
        has_zp: whether there are zero points.
        b_qweight_reorder: [N_32align, K] uint8, contiguous, written.
        b_scales_reorder: [1, N_32align] of the dtype of b_scales, contiguous, written.
        b_zeros_reorder: the same, written with has_zp; else None, or not written.
        K, N: the size of the weight.
        N_32align: N, rounded up to a multiple of 32.
    """
    if not b_qweight.numel():
        return
    words = repacked(b_qweight, ("bytes", "n32k16"), 8, (K, N), columns=N_32align)
    b_qweight_reorder.copy_(words.view(torch.uint8).view(b_qweight_reorder.shape))
    place = column_place("n32k16", torch.arange(N, dtype=torch.int64, device=b_scales.device))
    pairs = [(b_scales_reorder, b_scales)]
    if has_zp:
        assert b_zeros is not None
        assert b_zeros_reorder is not None
        pairs.append((b_zeros_reorder, b_zeros))
    for ordered, entries in pairs:
        ordered.zero_()
        ordered.view(-1)[place] = entries.reshape(-1)


@rearrange_kn_weight_as_n32k16_order.result
def result_rearrange_kn_weight_as_n32k16_order(b_scales: TensorArg, K: int, N_32align: int) -> tuple[Result, Result]:
    return Result((N_32align, K), uint8), Result((1, N_32align), b_scales.dtype)


@rearrange_kn_weight_as_n32k16_order.plan
def plan_rearrange_kn_weight_as_n32k16_order(
    b_qweight: TensorArg,
    b_scales: TensorArg,
    b_zeros: TensorArg | None,
    has_zp: bool,
    b_qweight_reorder: TensorArg,
    b_scales_reorder: TensorArg,
    b_zeros_reorder: TensorArg | None,
    K: int,
    N: int,
    N_32align: int,
) -> list[Launch]:
    tile_k, tile_n = _TILE
    if K % tile_k or K < 0:
        raise check.refuse(b_qweight, "K", f"expected a multiple of {tile_k}, got {K}")
    if N < 0 or N_32align != -(-N // tile_n) * tile_n:
        raise check.refuse(b_qweight, "N_32align", f"expected {N} rounded up to {tile_n}, got {N_32align}")
    check.shape(b_qweight, uint8, K=K, N=N)
    check.shape(b_qweight_reorder, uint8, N_32align=N_32align, K=K)
    check.dtype(b_scales, float16, bfloat16)
    pairs: list[tuple[TensorArg | None, TensorArg | None]] = [(b_scales, b_scales_reorder)]
    if has_zp:
        pairs.append((b_zeros, b_zeros_reorder))
    launches = [repack(b_qweight_reorder, b_qweight, ("bytes", "n32k16"), 8, (K, N), columns=N_32align)]
    for entries, ordered in pairs:
        if entries is None or ordered is None:
            name = "b_zeros" if entries is None else "b_zeros_reorder"
            raise check.refuse(b_qweight, name, "expected a tensor with has_zp, got None")
        check.shape(entries, b_scales.dtype, one=1, N=N)
        check.shape(ordered, b_scales.dtype, one=1, N_32align=N_32align)
        kernel = _order_columns.renamed(ordered=ordered.name, entries=entries.name)
        launches.append(
            kernel(scalar_t=b_scales.dtype, COLUMN_ORDER="column_n32k16", NUM_THREADS=_NUM_THREADS).launch(
                -(-N_32align // _NUM_THREADS), _NUM_THREADS, n=N, columns=N_32align
            )
        )
    return launches if b_qweight.numel else []


@rearrange_kn_weight_as_n32k16_order.example
def example_rearrange_kn_weight_as_n32k16_order(
    make: Any,
    *,
    num_tokens: int = 16,
    has_zp: bool = True,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    k, n, padded = 16 * num_tokens, 72, 96
    return (
        make.randint(0, 256, k, n, dtype="uint8"),
        make.randn(1, n, dtype=dtype),
        make.randn(1, n, dtype=dtype) if has_zp else None,
        has_zp,
        make.empty(padded, k, dtype="uint8"),
        make.empty(1, padded, dtype=dtype),
        make.empty(1, padded, dtype=dtype) if has_zp else None,
        k,
        n,
        padded,
    )


def _absolute_error(a: Tensor, b_qweight: Tensor, b_qzeros: Tensor | None, n: int) -> float:
    """The error of float32 accumulation, and of rounding differences from zero points that are floats."""
    return FLOAT32_ERROR if b_qzeros is None else rounding_of_weights(a, _weight(a, b_qweight, b_qzeros, n), a.dtype)


@op(returns="out", atol=_absolute_error)
def allspark_w8a16_gemm(
    a: Tensor,
    b_qweight: Tensor,
    b_scales: Tensor,
    b_qzeros: Tensor | None,
    n: int,
    group_size: int,
    sm_count: int,
    sm_version: int,
    CUBLAS_M_THRESHOLD: int,
    has_zp: bool,
    n32k16_reorder: bool,
    *,
    out: Tensor,
) -> None:
    """A GEMM with an 8-bit weight in AllSpark's layout: ``out = scale * (a @ (quant - 128 - zero))``.

    A zero point is any float: differences may be rounded to the dtype of a. Accumulation is in float32; the result is
    rounded once.

    Args:
        a: [M, K] float16 or bfloat16; constant row stride; K a multiple of 16.
        b_qweight: [n rounded up to 32, K] uint8, contiguous, as `rearrange_kn_weight_as_n32k16_order` writes it.
        b_scales: [1, n rounded up to 32] of the dtype of a, contiguous, in that order.
        b_qzeros: the same, with has_zp; else None.
        n: columns of the weight.
        group_size: must be -1: a column has one scale.
        sm_count, sm_version, CUBLAS_M_THRESHOLD: for compatibility with vLLM; no effect.
        has_zp: whether there are zero points.
        n32k16_reorder: must be True: the weight is in that order.
        out: [M, n] of the dtype of a, returned; elements of a row are contiguous; new unless given.
    """
    multiply(out, a, _weight(a, b_qweight, b_qzeros, n), b_scales=b_scales, column_order="n32k16")


def _weight(a: Any, b_qweight: Any, b_qzeros: Any, n: int) -> PackedWeight:
    k = a.shape[1]
    kind: Literal["none", "floats"] = "none" if b_qzeros is None else "floats"
    return PackedWeight(
        b_qweight, "n32k16", uint8b128, k, n, 1, k, scale_order="n32k16", zeros=b_qzeros, zero_kind=kind
    )


@allspark_w8a16_gemm.result
def result_allspark_w8a16_gemm(a: TensorArg, n: int) -> Result:
    check.sizes(a, M=None, K=None)
    if n < 0:
        raise check.refuse(a, "n", f"expected 0 or more, got {n}")
    return Result((a.shape[0], n), a.dtype)


@allspark_w8a16_gemm.plan
def plan_allspark_w8a16_gemm(
    a: TensorArg,
    b_qweight: TensorArg,
    b_scales: TensorArg,
    b_qzeros: TensorArg | None,
    n: int,
    group_size: int,
    has_zp: bool,
    n32k16_reorder: bool,
    out: TensorArg,
) -> list[Launch]:
    check.dtype(a, float16, bfloat16)
    result = result_allspark_w8a16_gemm(a, n)
    (m, k), (tile_k, tile_n) = a.shape, _TILE
    if k % tile_k:
        raise a.error(f"expected rows of a multiple of {tile_k} elements, got shape {a.shape}")
    if group_size != -1:
        raise check.refuse(a, "group_size", f"expected -1, got {group_size}")
    if not n32k16_reorder:
        raise check.refuse(a, "n32k16_reorder", "expected True, got False")
    if has_zp != (b_qzeros is not None):
        raise check.refuse(a, "b_qzeros", "expected zero points with has_zp, and None without")
    padded = -(-n // tile_n) * tile_n
    check.shape(b_qweight, uint8, columns=padded, K=k)
    check.shape(b_scales, a.dtype, one=1, columns=padded)
    check.shape(b_qzeros, a.dtype, one=1, columns=padded)
    check.dtype(out, result.dtype)
    check.sizes(out, M=m, N=n)
    check.row_size(out)
    epilogue = Epilogue(out, b_scales=b_scales, column_order="n32k16")
    return plan(PackedProblem(Operand.of_rows(a), _weight(a, b_qweight, b_qzeros, n), epilogue))


@allspark_w8a16_gemm.example
def example_allspark_w8a16_gemm(
    make: Any,
    *,
    num_tokens: int = 16,
    has_zp: bool = False,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    k, n, padded = 144, 72, 96
    return (
        make.randn(num_tokens, k, dtype=dtype),
        make.randint(0, 256, padded, k, dtype="uint8"),
        make.randn(1, padded, dtype=dtype, scale=2.0**-6),
        make.randn(1, padded, dtype=dtype, scale=8.0) if has_zp else None,
        n,
        -1,
        *(132, 90, 1024),
        has_zp,
        True,
        make.empty(num_tokens, n, dtype=dtype),
    )
