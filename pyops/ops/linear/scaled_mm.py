"""GEMMs of int8 and fp8 with scales, zero points and bias; and the queries for what these GEMMs support."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.op import registry
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import E4M3, bfloat16, float8_e5m2, float16, float32, int8, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.fp8_accumulation import absolute_error
from .gemm_plan import MIN_BFLOAT16_CAPABILITY, MIN_CAPABILITY, plan
from .gemm_problem import SCALE_BLOCK, Epilogue, GemmProblem, Operand, column_bias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm",
    "cutlass_scaled_mm_azp",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_sparse_scaled_mm_supported",
]


@op(out="out", atol=absolute_error)
def cutlass_scaled_mm(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None = None
) -> None:
    """A GEMM of 8-bit matrices with scales: ``out = a_scales * (b_scales * (a @ b)) + bias``.

    Accumulation is exact for int8 and in float32 for fp8; the epilogue is computed in float32 and rounded once.
    Per-tensor scales, per-row scales of a and per-column scales of b may be mixed. Scales with any other number of
    elements are block scales:
    ``out[m, n] = sum_j a_scales[m, j] * b_scales[j, n // 128] * (a[m, j-th 128] . b[j-th 128, n])``.

    Hopper's tensor cores keep 14 bits of an fp8 accumulator (`fp8_accumulation.py`). For a float16 out, accumulators
    are promoted to float32 after every 64 elements of K; for bfloat16 after every 128 if M is at most 64 or scales are
    block scales. Then the largest error is less than 1.5 times that of rounding once. Otherwise all of K is
    accumulated, as with CUTLASS's FastAccum: for random numbers, the largest error is 1.1 times that of rounding to
    bfloat16 for 1024 elements, 2.2 times for 4096 and 2.5 times for 14336.

    Args:
        out: [M, N] float16 or bfloat16, written; elements of a row are contiguous.
        a: [M, K] int8, float8_e4m3fn, float8_e4m3fnuz or float8_e5m2, any strides; row-major is fast.
        b: [K, N] of the same dtype, any strides; column-major is fast.
        a_scales: float32, contiguous, M or 1 elements; or [M, ceil(K / 128)] of any strides.
        b_scales: float32, contiguous, N or 1 elements; or [ceil(K / 128), ceil(N / 128)] of any strides.
        bias: of the dtype of out, contiguous, N elements; or None, as it must be with block scales.
    """
    if a_scales.numel() in (1, a.shape[0]) and b_scales.numel() in (1, b.shape[1]):
        out.copy_(scaled(a.double() @ b.double(), a_scales, b_scales, bias))
        return
    x = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    columns = torch.arange(b.shape[1], dtype=torch.int64, device=b.device) // SCALE_BLOCK
    for j in range(b_scales.shape[0]):
        block = slice(j * SCALE_BLOCK, (j + 1) * SCALE_BLOCK)
        product = (a[:, block].double() @ b[block].double()).float()
        x += a_scales[:, j, None] * b_scales[j, columns] * product
    out.copy_(x)


def scaled(sums: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> Tensor:
    """float32 ``a_scales * (b_scales * sums) + bias``; scales are per row and per column, or have one element."""
    x = a_scales.reshape(-1, 1) * (b_scales.reshape(1, -1) * sums.float())
    return x if bias is None else x + bias.reshape(-1).float()


def check_product(out: TensorArg, a: TensorArg, b: TensorArg, *dtypes: Any) -> tuple[Operand, Operand]:
    """Check out [M, N], a [M, K] of one of these dtypes and b [K, N] of the same; returns a and the columns of b."""
    check.dtype(a, *dtypes)
    check.sizes(a, M=None, K=None)
    check.dtype(b, a.dtype)
    check.sizes(b, K=a.shape[1], N=None)
    check.sizes(out, M=a.shape[0], N=b.shape[1])
    check.row_size(out)
    return Operand.of_matrix(a), Operand.of_columns(b)


def check_scales(problem_rows: int, scales: TensorArg) -> None:
    """Check contiguous scales: one, or one for each row."""
    check.dtype(scales, float32)
    if scales.numel not in (1, problem_rows):
        raise scales.error(f"expected 1 or {problem_rows} elements, got shape {scales.shape}")
    check.contiguous(scales)


@cutlass_scaled_mm.plan
def plan_cutlass_scaled_mm(
    out: TensorArg, a: TensorArg, b: TensorArg, a_scales: TensorArg, b_scales: TensorArg, bias: TensorArg | None
) -> list[Launch]:
    rows, columns = check_product(out, a, b, int8, *E4M3, float8_e5m2)
    check.dtype(out, float16, bfloat16)
    (m, k), n = a.shape, b.shape[1]
    blocked = a_scales.numel not in (1, m) or b_scales.numel not in (1, n)
    if blocked:
        blocks = -(-k // SCALE_BLOCK)
        for scales, sizes in ((a_scales, (m, blocks)), (b_scales, (blocks, -(-n // SCALE_BLOCK)))):
            check.dtype(scales, float32)
            if scales.shape != sizes:
                one = m if scales is a_scales else n
                raise scales.error(f"expected 1 or {one} elements, or shape {sizes}, got shape {scales.shape}")
        if bias is not None:
            raise bias.error("expected None with scales of blocks")
    else:
        check_scales(m, a_scales)
        check_scales(n, b_scales)
    epilogue = Epilogue(out, a_scales, b_scales, bias=column_bias(bias, out.dtype, n), block_scaled=blocked)
    return plan(GemmProblem(rows, columns, k, epilogue))


@cutlass_scaled_mm.example
def example_cutlass_scaled_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    quant_dtype: Literal["float8_e4m3fn", "int8", "float8_e5m2"] = "float8_e4m3fn",
    out_dtype: Literal["bfloat16", "float16"] = "bfloat16",
    scales: Literal["tensor", "row", "block"] = "row",
    with_bias: bool = False,
) -> tuple[Any, ...]:
    k, n = 160, 136
    sizes = {"tensor": ((1,), (1,)), "row": ((num_tokens, 1), (1, n)), "block": ((num_tokens, 2), (2, 2))}
    a_scales, b_scales = (make.full(*size, value=0.05, dtype="float32") for size in sizes[scales])
    return (
        make.empty(num_tokens, n, dtype=out_dtype),
        codes(make, num_tokens, k, quant_dtype),
        make.transposed(codes(make, n, k, quant_dtype)),
        a_scales,
        b_scales,
        make.randn(n, dtype=out_dtype) if with_bias and scales != "block" else None,
    )


def codes(make: Any, rows: int, columns: int, dtype: str) -> Any:
    """A matrix of int8 or fp8 for examples."""
    if dtype == "int8":
        return make.randint(-128, 128, rows, columns, dtype=dtype)
    return make.randn(rows, columns, dtype=dtype)


@op(out="out", atol=2.0**-18)
def cutlass_scaled_mm_azp(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """`cutlass_scaled_mm` of int8 with zero points of a: ``out = a_scales * (b_scales * (a @ b - z)) + bias``.

    ``z = azp[m] * azp_adj[n]`` where azp is given, and ``azp_adj[n]`` where it is None. The difference is computed in
    int32, with wraparound.

    Args:
        out: [M, N] float16 or bfloat16, written; elements of a row are contiguous.
        a: [M, K] int8, any strides; row-major is fast.
        b: [K, N] int8, any strides; column-major is fast.
        a_scales: float32, contiguous, M or 1 elements; b_scales: likewise, N or 1.
        azp_adj: int32, contiguous, N elements: the sum of each column of b, times the zero point if azp is None.
        azp: int32, contiguous, M elements: a zero point for each row; or None.
        bias: of the dtype of out, contiguous, N elements; or None.
    """
    sums = (a.double() @ b.double()).long()
    z = azp_adj.reshape(1, -1).long()
    if azp is not None:
        z = z * azp.reshape(-1, 1).long()
    out.copy_(scaled((sums - z).int(), a_scales, b_scales, bias))


@cutlass_scaled_mm.result
@cutlass_scaled_mm_azp.result
def result_scaled_mm(
    a: TensorArg, b: TensorArg, bias: TensorArg | None, *, out_dtype: torch.dtype | None = None
) -> Result:
    """Rows of `a`.

    Args:
        out_dtype: of the output; None for bfloat16, or the dtype of the bias.
    """
    check.sizes(a, M=None, K=None)
    check.sizes(b, K=None, N=None)
    return Result((a.shape[0], b.shape[1]), check.chosen(a, "out_dtype", out_dtype, bias.dtype if bias else bfloat16))


@cutlass_scaled_mm_azp.plan
def plan_cutlass_scaled_mm_azp(
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    a_scales: TensorArg,
    b_scales: TensorArg,
    azp_adj: TensorArg,
    azp: TensorArg | None,
    bias: TensorArg | None,
) -> list[Launch]:
    rows, columns = check_product(out, a, b, int8)
    check.dtype(out, float16, bfloat16)
    (m, k), n = a.shape, b.shape[1]
    check_scales(m, a_scales)
    check_scales(n, b_scales)
    check.elements(azp_adj, int32, n)
    check.elements(azp, int32, m)
    epilogue = Epilogue(out, a_scales, b_scales, azp_adj, azp, column_bias(bias, out.dtype, n))
    return plan(GemmProblem(rows, columns, k, epilogue))


@cutlass_scaled_mm_azp.example
def example_cutlass_scaled_mm_azp(
    make: Any,
    *,
    num_tokens: int = 16,
    out_dtype: Literal["bfloat16", "float16"] = "bfloat16",
    with_azp: bool = False,
    with_bias: bool = False,
) -> tuple[Any, ...]:
    k, n = 160, 40
    return (
        make.empty(num_tokens, n, dtype=out_dtype),
        codes(make, num_tokens, k, "int8"),
        make.transposed(codes(make, n, k, "int8")),
        make.full(num_tokens, 1, value=0.05, dtype="float32"),
        make.full(1, n, value=0.02, dtype="float32"),
        make.randint(-9000, 9000, n, dtype="int32"),
        make.randint(-128, 128, num_tokens, dtype="int32") if with_azp else None,
        make.randn(n, dtype=out_dtype) if with_bias else None,
    )


def cutlass_scaled_mm_supports_fp8(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_mm` multiplies fp8 on the tensor cores of a GPU, as fp8 or as float16.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """
    return cuda_device_capability >= MIN_CAPABILITY


def cutlass_scaled_mm_supports_block_fp8(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_mm` multiplies fp8 with block scales on the tensor cores of a GPU.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """
    return cuda_device_capability >= MIN_CAPABILITY


def cutlass_scaled_mm_supports_fp4(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_fp4_mm` runs on the tensor cores of a GPU, where it multiplies bfloat16.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """
    return cuda_device_capability >= MIN_BFLOAT16_CAPABILITY


def cutlass_group_gemm_supported(cuda_device_capability: int) -> bool:
    """Whether `cutlass_moe_mm` is an op of this library and runs on the tensor cores of a GPU.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """
    return "cutlass_moe_mm" in registry and cuda_device_capability >= MIN_CAPABILITY


def cutlass_sparse_scaled_mm_supported(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_sparse_mm` runs on the tensor cores of a GPU.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """
    return cuda_device_capability >= MIN_CAPABILITY
