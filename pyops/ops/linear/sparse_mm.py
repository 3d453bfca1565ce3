"""GEMMs with a 2:4 sparse weight: of four adjacent elements of a row, at most two are not zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float16, int8, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.fp8_accumulation import absolute_error
from .gemm_plan import plan
from .gemm_problem import Epilogue, GemmProblem, Operand, column_bias
from .scaled_mm import check_scales, codes, scaled

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cutlass_scaled_sparse_mm", "cutlass_sparse_compress"]

_sparse_compress, _sparse_expand = Kernel("linear/sparse_compress.cu"), Kernel("linear/sparse_expand.cu")
_NUM_THREADS = 256  # threads of a block of both kernels; a thread has eight elements
_DTYPES = (bfloat16, float16, float8_e4m3fn, int8)


@op(returns=("a_nzs", "a_meta"), ulps=0)
def cutlass_sparse_compress(a: Tensor, *, a_nzs: Tensor, a_meta: Tensor) -> None:
    """The two kept elements of every four in a row, and their 2:4 metadata, for `cutlass_scaled_sparse_mm`.

    Kept are the elements that are not zero, in their order: the first two if there are more, and zeros if there are
    fewer. A byte of a_meta has the positions of four kept elements, two bits each, the first in the lowest bits.

    Args:
        a: [R, K] bfloat16, float16, float8_e4m3fn or int8, K a multiple of 8; constant row stride.
        a_nzs: [R, K / 2] of the same dtype, returned; constant row stride.
        a_meta: [R, K / 8] uint8, returned; constant row stride.
    """
    groups = a.unflatten(1, (-1, 4))
    is_set = groups.float() != 0
    low = torch.where(is_set[..., 0], 0, torch.where(is_set[..., 1], 1, 2))
    high = torch.where((low < 1) & is_set[..., 1], 1, torch.where((low < 2) & is_set[..., 2], 2, 3))
    places = torch.stack((low, high), -1)
    bits = groups.view(torch.uint8 if a.element_size() == 1 else torch.int16)
    a_nzs.copy_(bits.gather(-1, places).flatten(1).view(a.dtype))
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.int64, device=a.device)
    a_meta.copy_((places.flatten(1).unflatten(1, (-1, 4)) << shifts).sum(-1))


@cutlass_sparse_compress.result
def result_cutlass_sparse_compress(a: TensorArg) -> tuple[Result, Result]:
    check.sizes(a, R=None, K=None)
    rows, k = a.shape
    return Result((rows, k // 2), a.dtype), Result((rows, k // 8), uint8)


@cutlass_sparse_compress.plan
def plan_cutlass_sparse_compress(a: TensorArg, a_nzs: TensorArg, a_meta: TensorArg) -> Launch:
    check.dtype(a, *_DTYPES)
    check.sizes(a, R=None, K=None)
    rows, k = a.shape
    if check.row_size(a) % 8:
        raise a.error(f"expected rows of a multiple of 8 elements, got shape {a.shape}")
    check.dtype(a_nzs, a.dtype)
    check.sizes(a_nzs, R=rows, half=k // 2)
    check.dtype(a_meta, uint8)
    check.sizes(a_meta, R=rows, eighth=k // 8)
    check.row_size(a_nzs)
    check.row_size(a_meta)
    constants = {"A_ACCESS": check.vector_width(8, a), "NZS_ACCESS": check.vector_width(4, a_nzs)}
    kernel = _sparse_compress.renamed(nzs=a_nzs.name, meta=a_meta.name)
    return kernel(scalar_t=a.dtype, **constants, NUM_THREADS=_NUM_THREADS).launch(
        -(-rows * (k // 8) // _NUM_THREADS),
        _NUM_THREADS,
        num_rows=rows,
        bytes=k // 8,
        a_stride=a.strides[0],
        nzs_stride=a_nzs.strides[0],
        meta_stride=a_meta.strides[0],
    )


@cutlass_sparse_compress.example
def example_cutlass_sparse_compress(
    make: Any,
    *,
    num_tokens: int = 16,
    quant_dtype: Literal["bfloat16", "float16", "float8_e4m3fn", "int8"] = "bfloat16",
) -> tuple[Any, ...]:
    k = 160
    return (
        make.randint(-1, 2, num_tokens, k, dtype="int8")
        if quant_dtype == "int8"
        else codes(make, num_tokens, k, quant_dtype),
        make.empty(num_tokens, k // 2, dtype=quant_dtype),
        make.empty(num_tokens, k // 8, dtype="uint8"),
    )


def _expanded(nzs: Tensor, meta: Tensor) -> Tensor:
    """The weight [N, K] that was compressed, in float64."""
    places, values = meta.long(), nzs.double().unflatten(1, (-1, 4))
    dense = torch.zeros(*values.shape[:2], 8, dtype=torch.float64, device=nzs.device)
    for i in range(4):
        place = (places >> 2 * i & 3) + i // 2 * 4
        dense.scatter_(2, place.unsqueeze(-1), values[..., i : i + 1])
    return dense.flatten(1)


def _absolute_error(a: Tensor, bt_nzs: Tensor, bt_meta: Tensor) -> float:
    return absolute_error(a, _expanded(bt_nzs, bt_meta).to(a.dtype).T)


@op(out="out", atol=_absolute_error)
def cutlass_scaled_sparse_mm(
    out: Tensor,
    a: Tensor,
    bt_nzs: Tensor,
    bt_meta: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
) -> None:
    """A GEMM with a 2:4 sparse weight: ``out = a_scales * (b_scales * (a @ B.T)) + bias``.

    B is the weight before compression; it is expanded to a workspace. Accumulation is exact for int8 and in float32 for
    other dtypes; the epilogue is computed in float32 and rounded once. If bt_meta has the same position for both
    elements of a group, which compression never writes, the second element counts.

    Args:
        out: [M, N] written, of the dtype of a if that has 16 bits, else float16 or bfloat16; elements of a row are
            contiguous.
        a: [M, K] bfloat16, float16, float8_e4m3fn or int8, K a multiple of 8, any strides; row-major is fast.
        bt_nzs: [N, K / 2] of the same dtype, as `cutlass_sparse_compress` writes it for B [N, K]; constant row stride.
        bt_meta: [N, K / 8] uint8, likewise.
        a_scales: float32, contiguous, M or 1 elements; b_scales: likewise, N or 1.
        bias: of the dtype of out, contiguous, N elements; or None.
    """
    out.copy_(scaled(a.double() @ _expanded(bt_nzs, bt_meta).T, a_scales, b_scales, bias))


@cutlass_scaled_sparse_mm.result
def result_cutlass_scaled_sparse_mm(a: TensorArg, bt_nzs: TensorArg, *, out_dtype: torch.dtype | None = None) -> Result:
    """Rows of `a`.

    Args:
        out_dtype: of the output; None for bfloat16, or the dtype of `a` if that has 16 bits.
    """
    check.sizes(a, M=None, K=None)
    check.sizes(bt_nzs, N=None, half=None)
    default = a.dtype if a.dtype.itemsize == 2 else bfloat16
    return Result((a.shape[0], bt_nzs.shape[0]), check.chosen(a, "out_dtype", out_dtype, default))


@cutlass_scaled_sparse_mm.plan
def plan_cutlass_scaled_sparse_mm(
    out: TensorArg,
    a: TensorArg,
    bt_nzs: TensorArg,
    bt_meta: TensorArg,
    a_scales: TensorArg,
    b_scales: TensorArg,
    bias: TensorArg | None,
) -> list[Launch]:
    check.dtype(a, *_DTYPES)
    check.sizes(a, M=None, K=None)
    m, k = a.shape
    if k % 8:
        raise a.error(f"expected rows of a multiple of 8 elements, got shape {a.shape}")
    check.dtype(bt_nzs, a.dtype)
    check.sizes(bt_nzs, N=None, half=k // 2)
    n = bt_nzs.shape[0]
    check.dtype(bt_meta, uint8)
    check.sizes(bt_meta, N=n, eighth=k // 8)
    check.row_size(bt_nzs)
    check.row_size(bt_meta)
    check.dtype(out, *((a.dtype,) if a.dtype.itemsize == 2 else (float16, bfloat16)))
    check.sizes(out, M=m, N=n)
    check.row_size(out)
    check_scales(m, a_scales)
    check_scales(n, b_scales)
    dense = Scratch(n * k * a.dtype.itemsize)
    kernel = _sparse_expand.renamed(nzs=bt_nzs.name, meta=bt_meta.name)
    access = check.vector_width(4, bt_nzs)
    expand = kernel(scalar_t=a.dtype, NZS_ACCESS=access, NUM_THREADS=_NUM_THREADS).launch(
        -(-n * (k // 8) // _NUM_THREADS),
        _NUM_THREADS,
        dense=dense,
        num_rows=n,
        bytes=k // 8,
        nzs_stride=bt_nzs.strides[0],
        meta_stride=bt_meta.strides[0],
    )
    operand = Operand.of_scratch(dense, a.dtype, n, k)
    epilogue = Epilogue(out, a_scales, b_scales, bias=column_bias(bias, out.dtype, n))
    product = plan(GemmProblem(Operand.of_matrix(a), operand, k, epilogue))
    return [expand, *product] if product else []


@cutlass_scaled_sparse_mm.example
def example_cutlass_scaled_sparse_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    quant_dtype: Literal["bfloat16", "float16", "float8_e4m3fn", "int8"] = "bfloat16",
    with_bias: bool = False,
) -> tuple[Any, ...]:
    k, n = 160, 40
    out_dtype = quant_dtype if quant_dtype == "float16" else "bfloat16"
    return (
        make.empty(num_tokens, n, dtype=out_dtype),
        codes(make, num_tokens, k, quant_dtype),
        codes(make, n, k // 2, quant_dtype),
        make.randint(0, 256, n, k // 8, dtype="uint8"),
        make.full(num_tokens, 1, value=0.05, dtype="float32"),
        make.full(1, n, value=0.02, dtype="float32"),
        make.randn(n, dtype=out_dtype) if with_bias else None,
    )
