"""The small-M GEMMs of DeepSeek-V3's layers, by vLLM's names; of any size, on every platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float32
from ..._core.tensors.tensor import TensorArg
from .gemm_plan import plan
from .gemm_problem import Epilogue, GemmProblem
from .rocm_skinny import example_tensors, plan_product, weight_product
from .scaled_mm import check_product

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["dsv3_fused_a_gemm", "dsv3_router_gemm"]


@op(out="output", atol=2.0**-18)
def dsv3_fused_a_gemm(output: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
    """DeepSeek-V3's first projections of queries and latents: ``output = mat_a @ mat_b``, accumulated in float32.

    Args:
        output: [tokens, outputs] bfloat16, written; elements of a row are contiguous.
        mat_a: the tokens, [tokens, K] bfloat16, any strides; row-major is fast.
        mat_b: the weight, [K, outputs] bfloat16, any strides; column-major is fast.
    """
    output.copy_(mat_a.double() @ mat_b.double())


@dsv3_fused_a_gemm.result
def result_dsv3_fused_a_gemm(mat_a: TensorArg, mat_b: TensorArg) -> Result:
    check.sizes(mat_a, tokens=None, K=None)
    check.sizes(mat_b, K=None, outputs=None)
    return Result((mat_a.shape[0], mat_b.shape[1]), bfloat16)


@dsv3_fused_a_gemm.plan
def plan_dsv3_fused_a_gemm(output: TensorArg, mat_a: TensorArg, mat_b: TensorArg) -> Launch:
    rows, columns = check_product(output, mat_a, mat_b, bfloat16)
    check.dtype(output, bfloat16)
    return plan(GemmProblem(rows, columns, mat_a.shape[1], Epilogue(output)))


@dsv3_fused_a_gemm.example
def example_dsv3_fused_a_gemm(make: Any, *, num_tokens: int = 4) -> tuple[Any, ...]:
    weight, tokens, _ = example_tensors(make, num_tokens, "bfloat16", with_bias=False)
    return (make.empty(num_tokens, 40, dtype="bfloat16"), tokens, make.transposed(weight))


@op(out="output", atol=2.0**-18)
def dsv3_router_gemm(output: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
    """DeepSeek-V3's router: ``output = mat_a @ mat_b.T``, accumulated in float32 and rounded once, if at all.

    Args:
        output: [tokens, experts] float32 or bfloat16, written; elements of a row are contiguous.
        mat_a: the tokens, [tokens, K] bfloat16, any strides; row-major is fast.
        mat_b: the weight, [experts, K] bfloat16, likewise.
    """
    output.copy_(weight_product(mat_b, mat_a))


@dsv3_router_gemm.result
def result_dsv3_router_gemm(mat_a: TensorArg, mat_b: TensorArg, *, out_dtype: torch.dtype | None = None) -> Result:
    """Rows of `mat_a`.

    Args:
        out_dtype: of the output; None for float32.
    """
    check.sizes(mat_a, tokens=None, K=None)
    check.sizes(mat_b, experts=None, K=None)
    return Result((mat_a.shape[0], mat_b.shape[0]), check.chosen(mat_a, "out_dtype", out_dtype, float32))


@dsv3_router_gemm.plan
def plan_dsv3_router_gemm(output: TensorArg, mat_a: TensorArg, mat_b: TensorArg) -> Launch:
    check.dtype(mat_a, bfloat16)
    check.dtype(output, float32, bfloat16)
    return plan_product(output, mat_b, mat_a)


@dsv3_router_gemm.example
def example_dsv3_router_gemm(
    make: Any, *, num_tokens: int = 4, out_dtype: Literal["float32", "bfloat16"] = "float32"
) -> tuple[Any, ...]:
    weight, tokens, _ = example_tensors(make, num_tokens, "bfloat16", with_bias=False)
    return (make.empty(num_tokens, 40, dtype=out_dtype), tokens, weight)
